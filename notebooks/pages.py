"""Find the pages of the gallery by name, run each in its own kernel, and write the notebooks.

The files do not depend on the date or the machine.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import io
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from PIL import Image

from saliency.io.atomic_write import atomic_write

from .kernels import ENVIRONMENT, ForkedKernel

HOME = Path(__file__).parent
SECONDS_PER_CELL = 3600

_METADATA = {
    "jupytext": {"formats": "ipynb,py:percent"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_KERNEL = """\
c.InlineBackend.figure_formats = {"png", "jpeg"}
c.InlineBackend.rc = {"figure.dpi": 100}
"""
_WIDGET = "application/vnd.jupyter.widget-view+json"  # a progress bar, which is gone in a stored notebook
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_WARNING_LOCATION = re.compile(r"^\S.*?:\d+: (\w*Warning: .*)\n(?:  .*\n)?", re.MULTILINE)


class CellError(Exception):
    """A cell of a page failed. The message has the cell and the error."""


def pages(names: Sequence[str] = ()) -> list[Path]:
    """Return the scripts of all pages, or of those whose file names contain one of `names`, in numerical order.

    Raises:
        LookupError: No page has such a name.
    """
    scripts = sorted(HOME.glob("[0-9][0-9]_*.py"))
    for name in names:
        if not any(name in script.stem for script in scripts):
            raise LookupError(f'no page "{name}"; there are {", ".join(script.stem for script in scripts)}')
    return [script for script in scripts if not names or any(name in script.stem for name in names)]


def notebook_of(script: Path) -> Path:
    """Return the path of the executed notebook of a page."""
    return script.with_suffix(".ipynb")


def read(script: Path) -> NotebookNode:
    """Read a page as a notebook without outputs."""
    return tidy(jupytext.read(script))


async def execute(script: Path) -> NotebookNode:
    """Run a page, and return it as a notebook with the outputs.

    The kernel is the running Python, in the folder of the script, without the user's IPython configuration.

    Raises:
        CellError: A cell raised, took too long, or ended the kernel.
    """
    notebook = read(script)
    position = "before the first cell"

    def update_position(cell: NotebookNode, cell_index: int) -> None:
        nonlocal position
        position = cell_name(cell_index, cell)

    client = NotebookClient(
        notebook,
        timeout=SECONDS_PER_CELL,
        record_timing=False,
        coalesce_streams=True,
        on_notebook_start=_remove_signal_handlers,
        on_cell_execute=update_position,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
        resources={"metadata": {"path": str(script.parent)}},
    )
    manager = client.create_kernel_manager()
    # Without kernel folders, only the kernel of the running Python is found.
    manager.kernel_spec_manager = KernelSpecManager(kernel_dirs=[])
    manager.provisioner = ForkedKernel(kernel_spec=manager.kernel_spec, parent=manager)
    with TemporaryDirectory() as folder:
        manager.connection_file = str(Path(folder) / "kernel.json")
        profile = Path(folder) / "profile_default"
        profile.mkdir()
        (profile / "ipython_kernel_config.py").write_text(_KERNEL)
        try:
            await client.async_execute(env={**os.environ, **ENVIRONMENT, "IPYTHONDIR": folder})
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            reason = error.traceback if isinstance(error, CellExecutionError) else str(error)
            raise CellError(f"{script.stem}, {position}:\n{_COLOR.sub('', reason).strip()}") from None
        finally:
            # If the task is cancelled, nbclient leaves this function registered, and it would fail at exit.
            atexit.unregister(client._cleanup_kernel)
    return tidy(notebook)


def _remove_signal_handlers(notebook: NotebookNode) -> None:
    """Remove nbclient's signal handlers: with several kernels in one loop, Ctrl-C would end only one of them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().remove_signal_handler(number)


def cell_name(index: int, cell: NotebookNode) -> str:
    """Return the name of a cell in messages: its number in the notebook, from 1, and its first line."""
    return f"cell {index + 1} ({cell.source.splitlines()[0] if cell.source else 'empty'})"


def write(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(nbformat.writes(notebook) + "\n", "utf-8")


def tidy(notebook: NotebookNode) -> NotebookNode:
    """Remove everything from a notebook that differs between runs or machines, and return it."""
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict(_METADATA)
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index + 1:02}"
        cell.metadata = nbformat.from_dict({"tags": cell.metadata.tags} if cell.metadata.get("tags") else {})
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _WIDGET not in output.get("data", ())]
            for output in cell.outputs:
                _tidy_output(output)
    return notebook


def _tidy_output(output: NotebookNode) -> None:
    if output.output_type == "error":
        # Keep only the error: the traceback contains paths of this machine.
        output.traceback = [f"{output.ename}: {output.evalue}"]
    elif output.output_type == "stream":
        text = _COLOR.sub("", output.text)
        output.text = _WARNING_LOCATION.sub(r"\1\n", text) if output.name == "stderr" else text
    else:
        _keep_smaller_picture(output.data)


def _keep_smaller_picture(data: NotebookNode) -> None:
    """Keep the smaller file of a picture as PNG and as JPEG: a photo is ten times smaller as JPEG."""
    if "image/png" in data:
        data.setdefault("image/jpeg", _as_jpeg(data["image/png"]))
        del data["image/png" if len(data["image/png"]) > len(data["image/jpeg"]) else "image/jpeg"]


def _as_jpeg(png: str) -> str:
    """Return a PNG as JPEG, both in base64."""
    jpeg = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").save(jpeg, "JPEG")
    return base64.b64encode(jpeg.getvalue()).decode()
