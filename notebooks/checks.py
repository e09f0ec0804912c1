"""Checks of a page: it matches its script, a new run gives the same texts, and no picture is blank."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from nbformat import NotebookNode
from PIL import Image

from .pages import cell_name

FEWEST_PICTURES = 3
LEAST_DEVIATION = 8.0  # standard deviation of pixels in 0..255; even a faint map on white is far above it
FEWEST_COLORS = 32
# Empty axes are black lines on white. A drawing has coloured pixels, or covers more than lines do.
LEAST_COLORED = 5e-4  # share of coloured pixels
MOST_BACKGROUND = 0.9  # share of pixels in the two most frequent colours
TEXT_TYPES = ("text/plain", "text/markdown")

_NUMBER = re.compile(r"[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
_SPACING = re.compile(r"[ \t─-]+")
_MACHINE = re.compile(
    r"(?<![\w.:/])/(?:home|Users|root|tmp|var|usr|opt|mnt|private|work)/|\b[A-Z]:\\\w|\b0x[0-9a-f]{6,}"
)


def problems(notebook: NotebookNode) -> list[str]:
    """Return the problems of a page, one line each, without comparing it with its script."""
    messages = [
        f"{cell_name(index, cell)}: {problem}"
        for index, cell in enumerate(notebook.cells)
        for problem in _problems_of(cell)
    ]
    count = sum(1 for cell in notebook.cells for _ in pictures(cell))
    if count < FEWEST_PICTURES:
        messages.append(f"the page has {count} pictures; a page of this gallery has at least {FEWEST_PICTURES}")
    return messages


def _problems_of(cell: NotebookNode) -> Iterator[str]:
    tags = cell.metadata.get("tags", ())
    if cell.cell_type == "code" and not cell.execution_count:
        yield "the cell has not been run"
    for output in cell.get("outputs", ()):
        if output.output_type == "error" and "raises-exception" not in tags:
            yield f"the cell ended in {output.ename}: {output.evalue}"
        if output.get("name") == "stderr" and not {"raises-exception", "warns"} & set(tags):
            yield f"the cell wrote to stderr: {output.text.strip()}"
        for text in texts(output):
            if machine := _MACHINE.search(text):
                excerpt = text[max(0, machine.start() - 20) :][:80].strip()
                yield f"the output contains a path or an address of this machine: {excerpt}"
    for picture in pictures(cell):
        if problem := _blank(picture):
            yield problem


def pictures(cell: NotebookNode) -> Iterator[bytes]:
    """Yield the pictures in the outputs of a cell, as the bytes of PNG or JPEG files."""
    for output in cell.get("outputs", ()):
        for mime, content in output.get("data", {}).items():
            if mime in ("image/png", "image/jpeg"):
                yield base64.b64decode(content)


def texts(output: NotebookNode) -> list[str]:
    """Return the texts in an output."""
    data = output.get("data", {})
    return [
        *(content for mime, content in data.items() if mime.startswith("text/")),
        output.get("text", ""),
        *output.get("traceback", ()),
    ]


def _blank(picture: bytes) -> str:
    """Return why a picture counts as blank, or "" if it shows something."""
    try:
        pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))
    except (OSError, SyntaxError) as error:
        return f"the picture cannot be read: {error}"
    colors = len(np.unique(pixels @ np.array([65536, 256, 1])))
    if pixels.std() < LEAST_DEVIATION or colors < FEWEST_COLORS:
        return f"the picture is blank: {colors} colours, a standard deviation of {pixels.std():.1f}"
    colored = float((np.ptp(pixels, axis=2) > 40).mean())
    if colored < LEAST_COLORED and _background_share(pixels) > MOST_BACKGROUND:
        return f"the picture is blank: it has only background, lines and text; {colored:.2%} of it is coloured"
    return ""


def _background_share(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> float:
    """Return the share of the pixels (H, W, 3) in the two most frequent colours, with 16 levels per RGB channel."""
    levels = (pixels // 16).astype(np.int64) @ np.array([256, 16, 1])
    counts = np.bincount(levels.ravel())
    return float(np.sort(counts)[-2:].sum() / levels.size)


def stale(source: NotebookNode, notebook: NotebookNode) -> list[str]:
    """Return the cells of a notebook that differ from the cells of its script, one line each."""
    messages = []
    if len(source.cells) != len(notebook.cells):
        messages.append(f"the script has {len(source.cells)} cells, the notebook {len(notebook.cells)}")
    for index, (new, old) in enumerate(zip(source.cells, notebook.cells, strict=False)):
        if (new.cell_type, new.source, new.metadata) != (old.cell_type, old.source, old.metadata):
            messages.append(f"{cell_name(index, new)} differs in the notebook")
    return messages


def differences(fresh: NotebookNode, stored: NotebookNode) -> list[str]:
    """Return the cells whose output in a new run has another structure than in the stored notebook."""
    messages = []
    for index, (new, old) in enumerate(zip(fresh.cells, stored.cells, strict=True)):
        now, before = structure(new), structure(old)
        if now != before:
            messages.append(f"{cell_name(index, new)} shows {now}\n  and the notebook has {before}")
    return messages


def structure(cell: NotebookNode) -> list[Any]:
    """Return the output of a cell without numbers: kinds of outputs, MIME types, and the words of texts."""
    outputs: list[Any] = []
    for output in cell.get("outputs", ()):
        if output.output_type == "stream":
            outputs.append(("stream", output.name, _words(output.text)))
        elif output.output_type == "error":
            outputs.append(("error", output.ename))
        else:
            types = {mime: _words(text) if mime in TEXT_TYPES else [] for mime, text in output.data.items()}
            outputs.append((output.output_type, sorted(types.items())))
    return outputs


def _words(text: str) -> list[str]:
    """Return the lines of a text, with # for each number and one space for consecutive spaces and dashes."""
    return [_SPACING.sub(" ", _NUMBER.sub("#", line)).strip() for line in text.splitlines()]
