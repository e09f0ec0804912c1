"""What must hold of a page: it is that of its script, says again what it said, and its pictures show something."""

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
LEAST_DEVIATION = 8.0  # of 0..255: the faintest map on white is far above
FEWEST_COLORS = 32
# Axes with nothing in them are black on white; what is drawn in them has colours, or fills more than the lines do.
LEAST_COLORED = 5e-4
MOST_GROUND = 0.9
WORDS = ("text/plain", "text/markdown")

_NUMBER = re.compile(r"[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
_RUN = re.compile(r"[ \t─-]+")
_MACHINE = re.compile(
    r"(?<![\w.:/])/(?:home|Users|root|tmp|var|usr|opt|mnt|private|work)/|\b[A-Z]:\\\w|\b0x[0-9a-f]{6,}"
)


def problems(notebook: NotebookNode) -> list[str]:
    """What is wrong with a page by itself, each in a line; nothing where all is well."""
    found = [
        f"{cell_name(index, cell)}: {problem}"
        for index, cell in enumerate(notebook.cells)
        for problem in _problems_of(cell)
    ]
    count = sum(1 for cell in notebook.cells for _ in pictures(cell))
    if count < FEWEST_PICTURES:
        found.append(f"the page has {count} pictures; a page of this gallery has at least {FEWEST_PICTURES}")
    return found


def _problems_of(cell: NotebookNode) -> Iterator[str]:
    tags = cell.metadata.get("tags", ())
    if cell.cell_type == "code" and not cell.execution_count:
        yield "it has not been run"
    for output in cell.get("outputs", ()):
        if output.output_type == "error" and "raises-exception" not in tags:
            yield f"it ended in {output.ename}: {output.evalue}"
        if output.get("name") == "stderr" and not {"raises-exception", "warns"} & set(tags):
            yield f"it wrote to stderr: {output.text.strip()}"
        for text in texts(output):
            if machine := _MACHINE.search(text):
                yield f"what it shows is of one machine only: {text[max(0, machine.start() - 20) :][:80].strip()}"
    for picture in pictures(cell):
        if problem := _blank(picture):
            yield problem


def pictures(cell: NotebookNode) -> Iterator[bytes]:
    """The files of the pictures that a cell shows."""
    for output in cell.get("outputs", ()):
        for mime, content in output.get("data", {}).items():
            if mime in ("image/png", "image/jpeg"):
                yield base64.b64decode(content)


def texts(output: NotebookNode) -> list[str]:
    """The texts in an output."""
    data = output.get("data", {})
    return [
        *(content for mime, content in data.items() if mime.startswith("text/")),
        output.get("text", ""),
        *output.get("traceback", ()),
    ]


def _blank(picture: bytes) -> str:
    """Why a picture shows nothing; "" where it does."""
    try:
        pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))
    except (OSError, SyntaxError) as error:
        return f"its picture cannot be read: {error}"
    colors = len(np.unique(pixels @ np.array([65536, 256, 1])))
    if pixels.std() < LEAST_DEVIATION or colors < FEWEST_COLORS:
        return f"its picture is blank: {colors} colours, a standard deviation of {pixels.std():.1f}"
    colored = float((np.ptp(pixels, axis=2) > 40).mean())
    if colored < LEAST_COLORED and _ground(pixels) > MOST_GROUND:
        return f"its picture is blank: nothing but its ground, lines and letters, {colored:.2%} in colour"
    return ""


def _ground(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> float:
    """The share of a picture (H, W, 3) that has one of its two most frequent colours, of 16 steps for each of RGB."""
    steps = (pixels // 16).astype(np.int64) @ np.array([256, 16, 1])
    counts = np.bincount(steps.ravel())
    return float(np.sort(counts)[-2:].sum() / steps.size)


def stale(source: NotebookNode, notebook: NotebookNode) -> list[str]:
    """Where the cells of a notebook are not those of its script."""
    found = []
    if len(source.cells) != len(notebook.cells):
        found.append(f"the script has {len(source.cells)} cells, the notebook {len(notebook.cells)}")
    for index, (new, old) in enumerate(zip(source.cells, notebook.cells, strict=False)):
        if (new.cell_type, new.source, new.metadata) != (old.cell_type, old.source, old.metadata):
            found.append(f"{cell_name(index, new)} is another in the notebook")
    return found


def differences(fresh: NotebookNode, kept: NotebookNode) -> list[str]:
    """Where a run shows something of another structure than the notebook that is kept."""
    found = []
    for index, (new, old) in enumerate(zip(fresh.cells, kept.cells, strict=True)):
        now, before = structure(new), structure(old)
        if now != before:
            found.append(f"{cell_name(index, new)} shows {now}\n  and the notebook has {before}")
    return found


def structure(cell: NotebookNode) -> list[Any]:
    """What a cell shows, without the numbers: kinds of outputs, their types, and the words of their texts."""
    found: list[Any] = []
    for output in cell.get("outputs", ()):
        if output.output_type == "stream":
            found.append(("stream", output.name, _words(output.text)))
        elif output.output_type == "error":
            found.append(("error", output.ename))
        else:
            types = {mime: _words(text) if mime in WORDS else [] for mime, text in output.data.items()}
            found.append((output.output_type, sorted(types.items())))
    return found


def _words(text: str) -> list[str]:
    """The lines of a text with a # for each number, and one space for each run of spaces or rules."""
    return [_RUN.sub(" ", _NUMBER.sub("#", line)).strip() for line in text.splitlines()]
