"""The notebooks as pages, with the outputs that are stored in them. Nothing is run."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import nbformat

from .markdown import ROOT, as_page

_ERROR, _STREAM, _MARKDOWN, _HTML = "error", "stream", "text/markdown", "text/html"
_IMAGES = {"image/jpeg": ".jpg", "image/png": ".png"}


def notebook_pages(folder: Path) -> dict[str, str]:
    """Write the pictures of all notebooks to a folder, and return the pages by path."""
    pages = {}
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = nbformat.read(file, nbformat.NO_CONVERT).cells
        text = "\n\n".join(_cell(cell, folder / file.stem / str(number)) for number, cell in enumerate(cells, 1))
        note = f"This page is the notebook `notebooks/{file.name}`, with its outputs."
        heading, _, rest = text.partition("\n")
        pages[f"notebooks/{file.stem}.md"] = as_page(f"notebooks/{file.name}", f"{heading}\n\n{note}\n{rest}\n")
    return pages


def _cell(cell: Any, file: Path) -> str:
    """Return a cell as Markdown: its text, or its code and outputs."""
    if cell.cell_type == "markdown":
        return str(cell.source)
    outputs = [
        _output(output, file.with_name(f"{file.name}-{number}")) for number, output in enumerate(cell.outputs, 1)
    ]
    return "\n\n".join([_block(cell.source, "python"), *outputs])


def _output(output: Any, file: Path) -> str:
    """Return an output as Markdown. A picture is written to a file and shown."""
    if output.output_type == _ERROR:
        return _block(f"{output.ename}: {output.evalue}", "text")
    if output.output_type == _STREAM:
        return _block(output.text, "text")
    for kind, suffix in _IMAGES.items():
        if kind in output.data:
            file = file.with_suffix(suffix)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(base64.b64decode(output.data[kind]))
            return f"![Output of the cell above]({file.parent.name}/{file.name})"
    if _MARKDOWN in output.data:
        return str(output.data[_MARKDOWN])
    if _HTML in output.data:
        lines = [line.strip() for line in output.data[_HTML].splitlines() if line.strip()]
        return f'<div class="output">\n{chr(10).join(lines)}\n</div>'
    return _block(output.data["text/plain"], "text")


def _block(text: str, language: str) -> str:
    """Return a fenced block of code, whose fence does not occur in it."""
    fence = "~~~" if "```" in text else "```"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
