"""Pack the rows of a manifest into compact data for the page, which `data.js` unpacks."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from ...errors import ExplanationError, RenderError
from ...render.blending import DIVERGING, SEQUENTIAL, color_table

FORMAT = "saliency batch 1"
COLOURS = 17  # colours per colour bar; the browser interpolates between them

Row = dict[str, object]

# Columns of the manifest that the page shows, per photo and per row.
_PHOTO = ("index", "source", "id", "width", "height", "input_width", "input_height", "box", "photo")
_ROW = (
    *("target", "name", "probability", "score", "layer", "settings", "sign", "units", "limit"),
    *("colormap", "heat", "overlay", "error", "error_kind"),
)
_FILES = ("photo", "heat", "overlay")


def read_run(folder: Path) -> Row:
    """Return `manifest.json`: model, versions, methods, command.

    Raises:
        ExplanationError: `saliency batch` did not write the folder, or a version with another format did.
    """
    path = folder / "manifest.json"
    try:
        run = _parsed(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "expected the folder that saliency batch --out wrote"
        raise ExplanationError(f"no manifest.json in {folder}; {hint}") from error
    except ValueError as error:
        raise ExplanationError(f"{path} is not JSON in UTF-8: {error}; run saliency batch with --restart") from error
    known = run.get("format") if isinstance(run, dict) else None
    if not isinstance(run, dict) or known != FORMAT:
        raise ExplanationError(
            f'{path} has the format {known!r}, expected "{FORMAT}"; '
            "write the page with the version of saliency that wrote the folder"
        )
    return run


def read_rows(folder: Path) -> Iterator[Row]:
    """Yield the rows of `manifest.jsonl` in file order; none if the run has not written any yet.

    Raises:
        ExplanationError: A line other than an unfinished last one is not a row.
    """
    path = folder / "manifest.jsonl"
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            # A killed run may leave an incomplete last line, which the next run removes.
            if not line.endswith(b"\n"):
                return
            try:
                row = _parsed(line.decode("utf-8"))
            except ValueError as error:
                raise ExplanationError(f"{path}, line {number} is not JSON in UTF-8: {error}") from error
            if not isinstance(row, dict) or not isinstance(row.get("index"), int):
                raise ExplanationError(f'{path}, line {number} is not a row of a manifest: it has no number "index"')
            yield row


def _parsed(text: str) -> object:
    """Parse JSON, with None for NaN and infinity, which JSON parsers of browsers reject."""
    parsed: object = json.loads(text, parse_constant=lambda name: None, parse_float=_finite)
    return parsed


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


class Packer:
    """Packs photos with their rows as compressed JSON, one by one.

    Attributes:
        methods: Names of the methods; packed rows contain their indices.
        bars: Colours of the colour bars by name; packed rows contain the names.
        photos: Number of photos packed so far.
        failed: Number of these photos with an error in any row.
    """

    def __init__(self, methods: Iterable[str]) -> None:
        self.methods = list(methods)
        self.bars: dict[str, list[str]] = {}
        self.photos = 0
        self.failed = 0

    def pack(self, rows: Iterable[Row]) -> str:
        """Return a list of all photos as JSON, compressed by zlib, in base64."""
        compressor = zlib.compressobj()
        packed = bytearray()
        for _, group in groupby(rows, lambda row: row["index"]):
            text = ("," if self.photos else "[") + dumped(self._photo(list(group)))
            packed += compressor.compress(text.encode())
        packed += compressor.compress(b"]" if self.photos else b"[]") + compressor.flush()
        return base64.b64encode(packed).decode()

    def _photo(self, rows: list[Row]) -> Row:
        self.photos += 1
        self.failed += any(row.get("error") is not None for row in rows)
        # A row of a failed method may lack the sizes, which the rows of other methods contain.
        known = {key: value for row in reversed(rows) for key, value in row.items() if value is not None}
        return {**_selected(known, _PHOTO), "rows": [self._row(row) for row in rows]}

    def _row(self, row: Row) -> Row:
        return {**_selected(row, _ROW), "method": self._method(row.get("method")), "bar": self._bar(row)}

    def _method(self, name: object) -> int:
        """Return the index of a method; -1 if the photo failed before any method."""
        if name is None:
            return -1
        if str(name) not in self.methods:
            self.methods.append(str(name))
        return self.methods.index(str(name))

    def _bar(self, row: Row) -> str | None:
        """Return the name of the row's colour bar and store its colours; None without a known colormap."""
        name, signed = row.get("colormap"), row.get("sign") == "signed"
        if not isinstance(name, str):
            name = None if row.get("sign") is None else DIVERGING if signed else SEQUENTIAL
        bar = None if name is None else colours(name, signed)
        if bar is None:
            return None
        key = f"{name} signed" if signed else str(name)
        self.bars[key] = bar
        return key


def _selected(row: Row, keys: Iterable[str]) -> Row:
    """Return the given columns of a row, without unknown values."""
    values = {key: address(row.get(key)) if key in _FILES else row.get(key) for key in keys}
    # The page shows fewer than six digits.
    rounded = {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in values.items()}
    return {key: value for key, value in rounded.items() if value is not None}


def dumped(value: object) -> str:
    """Return JSON that is safe inside a script element: HTML characters and JavaScript line breaks are escaped.

    Lone surrogates, which UTF-8 cannot encode, are escaped as well.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "backslashreplace").decode()


def address(path: object) -> str | None:
    """Return a path of the manifest as a relative, percent-encoded URL; None if it points outside the folder."""
    if not isinstance(path, str) or path.startswith("/") or not path or ".." in PurePosixPath(path).parts:
        return None
    return "./" + quote(path, safe="/", errors="surrogatepass")


@cache
def colours(name: str, signed: bool) -> list[str] | None:
    """Return the colours of a bar from low to high as "#rrggbb"; None for a colormap unknown to matplotlib."""
    try:
        entries = color_table(name, centred=signed)
    except RenderError:
        return None
    low = 1 if signed else 0
    places = [low + round(i * (255 - low) / (COLOURS - 1)) for i in range(COLOURS)]
    return ["#{:02x}{:02x}{:02x}".format(*map(int, entries[place])) for place in places]
