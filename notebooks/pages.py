"""The pages of the gallery: found by their names, run in a kernel of their own, and written so that nothing in the file
hangs on the day or the machine.
"""

from __future__ import annotations

import asyncio
import atexit
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

from saliency.io.atomic_write import atomic_write

HOME = Path(__file__).parent
SECONDS_PER_CELL = 600

_METADATA = {
    "jupytext": {"formats": "ipynb,py:percent"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_ENVIRONMENT = {
    # Sums in parallel differ in their last digits from run to run.
    "OMP_NUM_THREADS": "1",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    # timm's progress bars ask for ipywidgets, without which they are as good.
    "PYTHONWARNINGS": "ignore:IProgress not found",
}
_KERNEL = """\
c.InlineBackend.figure_formats = {"png", "jpeg"}
c.InlineBackend.rc = {"figure.dpi": 100}
"""
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_WHERE_WARNED = re.compile(r"^\S.*?:\d+: (\w*Warning: .*)\n(?:  .*\n)?", re.MULTILINE)


class CellError(Exception):
    """A cell of a page failed; the message says which and how."""


def pages(names: Sequence[str] = ()) -> list[Path]:
    """The scripts of all pages, or of those whose file names contain one of `names`, in the order of their numbers.

    Raises:
        LookupError: No page has such a name.
    """
    scripts = sorted(HOME.glob("[0-9][0-9]_*.py"))
    for name in names:
        if not any(name in each.stem for each in scripts):
            raise LookupError(f'no page "{name}"; there are {", ".join(each.stem for each in scripts)}')
    return [each for each in scripts if not names or any(name in each.stem for name in names)]


def notebook_of(script: Path) -> Path:
    """The executed notebook of a page."""
    return script.with_suffix(".ipynb")


def read(script: Path) -> NotebookNode:
    """A page as a notebook without outputs."""
    return tidied(jupytext.read(script))


async def execute(script: Path) -> NotebookNode:
    """A page as a notebook with the outputs of this run.

    The kernel is this very Python, in the folder of the script, without the user's IPython configuration.

    Raises:
        CellError: A cell raised, took too long, or ended the kernel.
    """
    notebook = read(script)
    running = "before the first cell"

    def name(cell: NotebookNode, cell_index: int) -> None:
        nonlocal running
        running = cell_name(cell_index, cell)

    client = NotebookClient(
        notebook,
        timeout=SECONDS_PER_CELL,
        record_timing=False,
        coalesce_streams=True,
        on_notebook_start=_leave_signals_alone,
        on_cell_execute=name,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
        resources={"metadata": {"path": str(script.parent)}},
    )
    manager = client.create_kernel_manager()
    # With no folders to look in, there is only the kernel of the running Python.
    manager.kernel_spec_manager = KernelSpecManager(kernel_dirs=[])
    with TemporaryDirectory() as folder:
        manager.connection_file = str(Path(folder) / "kernel.json")
        profile = Path(folder) / "profile_default"
        profile.mkdir()
        (profile / "ipython_kernel_config.py").write_text(_KERNEL)
        try:
            await client.async_execute(env={**os.environ, **_ENVIRONMENT, "IPYTHONDIR": folder})
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            what = error.traceback if isinstance(error, CellExecutionError) else str(error)
            raise CellError(f"{script.stem}, {running}:\n{_COLOR.sub('', what).strip()}") from None
        finally:
            # Where this is cancelled, nbclient leaves it registered, and it would fail at exit.
            atexit.unregister(client._cleanup_kernel)
    return tidied(notebook)


def _leave_signals_alone(notebook: NotebookNode) -> None:
    """Undo nbclient's handlers: with several kernels in one loop, Ctrl-C would end only one of them."""
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().remove_signal_handler(each)


def cell_name(index: int, cell: NotebookNode) -> str:
    """How a message calls a cell: its number in the notebook, from 1, and its first line."""
    return f"cell {index + 1} ({cell.source.splitlines()[0] if cell.source else 'empty'})"


def write(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook, whole or not at all."""
    with atomic_write(path) as temporary:
        temporary.write_text(nbformat.writes(notebook) + "\n", "utf-8")


def tidied(notebook: NotebookNode) -> NotebookNode:
    """The notebook with nothing in it that differs from run to run or from machine to machine."""
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict(_METADATA)
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index + 1:02}"
        cell.metadata = nbformat.from_dict({"tags": cell.metadata.tags} if cell.metadata.get("tags") else {})
        for output in cell.get("outputs", ()):
            _tidy(output)
    return notebook


def _tidy(output: NotebookNode) -> None:
    if output.output_type == "error":
        # The page is about the error, and not about the files that it came through.
        output.traceback = [f"{output.ename}: {output.evalue}"]
    elif output.output_type == "stream":
        text = _COLOR.sub("", output.text)
        output.text = _WHERE_WARNED.sub(r"\1\n", text) if output.name == "stderr" else text
    else:
        _keep_smaller_picture(output.data)


def _keep_smaller_picture(data: NotebookNode) -> None:
    """Of a picture that comes as PNG and as JPEG, the smaller: a photo is ten times smaller as JPEG."""
    if "image/png" in data and "image/jpeg" in data:
        del data["image/png" if len(data["image/png"]) > len(data["image/jpeg"]) else "image/jpeg"]
