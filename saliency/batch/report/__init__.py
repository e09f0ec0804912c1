"""The gallery page of a folder that `saliency batch` wrote."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from importlib.resources import files
from pathlib import Path

from ...io.atomic_write import atomic_write
from .packing import Packer, Row, dumped, read_rows, read_run

__all__ = ["report"]

SCRIPTS = ("data.js", "layout.js", "state.js", "grid.js", "view.js", "main.js")


def report(folder: Path) -> Path:
    """Write the gallery page of a batch folder, and return its path.

    The page is the file `index.html` in the folder. It needs no server, and shows the images in the subfolders. It is
    created from `manifest.json` and `manifest.jsonl`; equal manifests give identical bytes. The file is written
    atomically.

    Args:
        folder: Output folder of `saliency batch`. The run may still be in progress, or have been interrupted.

    Raises:
        ExplanationError: The folder was not written by `saliency batch`, or a line of its manifest cannot be read.
        OSError: The folder cannot be written to.
    """
    folder = Path(folder)
    run = read_run(folder)
    listed = run.get("methods")
    methods = listed if isinstance(listed, list) else []
    packer = Packer(str(method.get("name")) if isinstance(method, dict) else str(method) for method in methods)
    photos = packer.pack(read_rows(folder))
    page = folder / "index.html"
    with atomic_write(page) as temporary:
        temporary.write_text(_page(_head(run, packer), photos), "utf-8", newline="\n")
    return page


def _head(run: Row, packer: Packer) -> Row:
    """Return the facts about the run for the page, without times, so that a resumed run gives the same page."""
    model = run.get("model")
    named = model if isinstance(model, dict) else {"name": model}
    command = run.get("command")
    return {
        "model": named.get("name"),
        "weights": named.get("weights"),
        "versions": run.get("versions"),
        "command": [str(word) for word in command] if isinstance(command, list) else command,
        "methods": packer.methods,
        "bars": packer.bars,
        "photos": packer.photos,
        "failed": packer.failed,
    }


def _page(head: Row, photos: str) -> str:
    title = f"{head['model']}: {head['photos']:,} photos".encode("utf-8", "backslashreplace").decode()
    style, script = _template("page.css"), "\n".join(map(_template, SCRIPTS))
    parts = {
        "title": html.escape(title),
        "policy": _policy(style, script),
        "style": style,
        "data": f'{{"head":{dumped(head)},"photos":"{photos}"}}',
        "script": script,
    }
    # A single substitution: placeholders in inserted text are not replaced.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _template("page.html"))


def _policy(style: str, script: str) -> str:
    """Return a content security policy that allows only this style, this script and images of the same folder.

    Text cannot be inserted as HTML. Images from file: are allowed because 'self' may not cover a page opened as a file.
    """
    rules = (
        "default-src 'none'",
        "img-src 'self' file: data:",
        f"style-src '{_hash(style)}'",
        f"script-src '{_hash(script)}'",
        *("base-uri 'none'", "form-action 'none'", "require-trusted-types-for 'script'", "trusted-types 'none'"),
    )
    return "; ".join(rules)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _template(name: str) -> str:
    return files(__name__).joinpath(name).read_text("utf-8")
