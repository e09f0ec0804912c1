"""The gallery page of a folder that `saliency batch` made."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from importlib.resources import files
from pathlib import Path

from ...io.atomic_write import atomic_write
from .packing import Packer, dumped
from .reading import Row, read_about, read_photos

__all__ = ["report"]

INLINE = 2  # chunks of data that stand in the page itself; of more than these only the first does
SCRIPTS = ("data.js", "layout.js", "state.js", "grid.js", "view.js", "main.js")


def report(folder: Path) -> Path:
    """Write the gallery page of a batch folder, and return its path.

    The page is one file that needs no server: `index.html` in the folder, which shows the pictures beside it. The
    rows of more than some ten thousand photos stand in chunks beside it, in `page/`. Everything is made anew from
    `manifest.json` and `manifest.jsonl`; the same manifests give the same bytes. Files appear whole or not at all.

    Args:
        folder: As `saliency batch --out` made it; the run may still be going on, or have been interrupted.

    Raises:
        ExplanationError: The folder is none of `saliency batch`, or a line of its manifest cannot be read.
        OSError: The folder cannot be written to.
    """
    folder = Path(folder)
    about = read_about(folder)
    packer = Packer(_names(about))
    chunks = list(packer.chunks(read_photos(folder)))
    inline = chunks if len(chunks) <= INLINE else chunks[:1]
    beside = [_write_chunk(folder / "page", each) for each in chunks[len(inline) :]]
    page = folder / "index.html"
    with atomic_write(page) as temporary:
        temporary.write_text(_page(_head(about, packer), inline, beside), "utf-8", newline="\n")
    _remove_others(folder / "page", beside)
    return page


def _names(about: Row) -> list[str]:
    methods = about.get("methods")
    entries = methods if isinstance(methods, list) else []
    return [str(each.get("name")) if isinstance(each, dict) else str(each) for each in entries]


def _head(about: Row, packer: Packer) -> Row:
    """What the page says of the run; nothing of when, so that a run and its continuation give the same page."""
    model = about.get("model")
    named = model if isinstance(model, dict) else {"name": model}
    command = about.get("command")
    return {
        "model": named.get("name"),
        "weights": named.get("weights"),
        "versions": about.get("versions"),
        "command": [str(each) for each in command] if isinstance(command, list) else command,
        "methods": packer.methods,
        "photos": packer.photos,
        "failed": packer.failed,
    }


def _page(head: Row, inline: list[str], beside: list[str]) -> str:
    style = _template("page.css")
    script = "\n".join(_template(name) for name in SCRIPTS)
    links = "\n".join(f'<script defer src="page/{html.escape(name)}"></script>' for name in beside)
    filling = {
        "title": html.escape(
            f"{head['model']}: {head['photos']:,} photos".encode("utf-8", "backslashreplace").decode()
        ),
        "policy": _policy(style, script, bool(beside)),
        "style": style,
        "data": f'{{"head":{dumped(head)},"chunks":[{",".join(inline)}]}}',
        "script": script,
        "links": links,
    }
    # In one pass: what is filled in is not looked through for places again.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: filling[place[1]], _template("page.html"))


def _policy(style: str, script: str, has_links: bool) -> str:
    """Nothing but this style and this script, images and chunks of the same folder, and no HTML out of texts.

    A page that is opened as a file has no origin that 'self' would surely mean, so that file: is allowed as well.
    """
    links = " 'self' file:" if has_links else ""
    rules = (
        "default-src 'none'",
        "img-src 'self' file: data:",
        f"style-src '{_hash(style)}'",
        f"script-src '{_hash(script)}'{links}",
        *("base-uri 'none'", "form-action 'none'", "require-trusted-types-for 'script'", "trusted-types 'none'"),
    )
    return "; ".join(rules)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _template(name: str) -> str:
    return files(__name__).joinpath(name).read_text("utf-8")


def _write_chunk(folder: Path, chunk: str) -> str:
    """The file's name, which its content decides: a page that is open keeps its chunks while another is made."""
    folder.mkdir(exist_ok=True)
    data = f"saliencyChunk({chunk});\n".encode()
    path = folder / f"{hashlib.sha256(data).hexdigest()[:16]}.js"
    with atomic_write(path) as temporary:
        temporary.write_bytes(data)
    return path.name


def _remove_others(folder: Path, names: list[str]) -> None:
    """Remove the chunks of an earlier page, and nothing else."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if re.fullmatch(r"[0-9a-f]{16}\.js", path.name) and path.name not in names:
            path.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
