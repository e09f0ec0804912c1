"""Photos and their rows as compact JSON, which the page's `data.js` unpacks.

A photo is a list in the order of `PHOTO`, its rows are lists in the order of `ROW`. What many rows have in common
(class names, settings, colours of a bar, both ends of a path) stands once in a table, and rows hold its number there.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator
from functools import cache
from pathlib import PurePosixPath
from urllib.parse import quote

from ...errors import RenderError
from ...render.colors import DIVERGING, SEQUENTIAL, table
from .reading import Photo, Row

CHUNK = 4_000_000  # characters; the rows of about 10,000 photos with four methods
STOPS = 17  # colours of a bar, between which the browser interpolates

PHOTO = ("index", "source", "id", "width", "height", "input_width", "input_height", "box", "stem", "photo")
ROW = (
    *("method", "target", "name", "probability", "score", "layer", "settings", "sign", "units", "limit"),
    *("colormap", "bar", "heat", "overlay", "error", "error_kind"),
)
_SHARED = frozenset({"name", "layer", "settings", "sign", "units", "colormap", "error_kind", "box"})


def dumped(value: object) -> str:
    """JSON that neither ends the script element it stands in nor breaks a line of JavaScript.

    Halves of surrogate pairs, which UTF-8 cannot hold, are escaped as well.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "backslashreplace").decode()


def address(path: object) -> str | None:
    """A path of the manifest as a relative address, percent-encoded; None for what does not stay in the folder."""
    if not isinstance(path, str) or path.startswith("/") or not path or ".." in PurePosixPath(path).parts:
        return None
    return "./" + quote(path, safe="/", errors="surrogatepass")


class Packer:
    """Chunks of photos as JSON, each with a table of its own, made while the photos pass by.

    Attributes:
        methods: Their names, in the order in which rows hold their numbers.
        photos: How many have been packed.
        failed: How many of them have an error in some row.
    """

    def __init__(self, methods: Iterable[str]) -> None:
        self.methods = list(methods)
        self.photos = 0
        self.failed = 0

    def chunks(self, photos: Iterable[Photo]) -> Iterator[str]:
        """Each chunk as the JSON of an object with `shared` and `photos`."""
        share = _Table()
        packed: list[str] = []
        size = 0
        for photo in photos:
            packed.append(dumped(self._photo(photo, share)))
            size += len(packed[-1])
            if size > CHUNK:
                yield _chunk(share, packed)
                share, packed, size = _Table(), [], 0
        if packed or not self.photos:
            yield _chunk(share, packed)

    def _photo(self, photo: Photo, share: _Table) -> list[object]:
        self.photos += 1
        self.failed += photo.failed
        # Sizes are unknown in the row of a method that failed early, and known in the others.
        best = {key: _first(photo.rows, key) for key in PHOTO}
        path = address(best["photo"])
        stem = path.removeprefix("./photos/").rpartition(".")[0] if path else ""
        shared_id = isinstance(best["id"], str) and best["id"] in str(best["source"])
        best |= {"id": None if shared_id else best["id"], "stem": stem, "photo": share.path(path, stem)}
        best["box"] = share(best["box"])
        rows = [self._row(row, stem, share) for row in photo.rows]
        return [*(best[key] for key in PHOTO), rows]

    def _row(self, row: Row, stem: str, share: _Table) -> list[object]:
        packed = {key: share(row.get(key)) if key in _SHARED else _short(row.get(key)) for key in ROW}
        packed["method"] = self._method(row.get("method"))
        packed["bar"] = self._bar(row, share)
        packed["heat"] = share.path(address(row.get("heat")), stem)
        packed["overlay"] = share.path(address(row.get("overlay")), stem)
        cells = [packed[key] for key in ROW]
        while cells[-1] is None:
            cells.pop()
        return cells

    def _bar(self, row: Row, share: _Table) -> int | None:
        name, signed = row.get("colormap"), row.get("sign") == "signed"
        if not isinstance(name, str):
            name = None if row.get("sign") is None else DIVERGING if signed else SEQUENTIAL
        return None if name is None else share(colours(name, signed), ("bar", name, signed))

    def _method(self, name: object) -> int:
        """Its number; -1 for none, where the photo failed before any method."""
        if name is None:
            return -1
        if str(name) not in self.methods:
            self.methods.append(str(name))
        return self.methods.index(str(name))


class _Table:
    """Values by number; what is called with a value returns its number, None for null."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self._known: dict[Hashable, int] = {}

    def __call__(self, value: object, key: Hashable = None) -> int | None:
        """Where the value is a string, or has a key that stands for it, it is written as JSON once only."""
        if value is None:
            return None
        key = value if isinstance(value, str) else key
        if key is None:
            return self._number(value)
        if key not in self._known:
            self._known[key] = self._number(value)
        return self._known[key]

    def _number(self, value: object) -> int:
        return self.texts.setdefault(dumped(value), len(self.texts))

    def path(self, path: str | None, stem: str) -> int | None:
        """The number of a path's two ends, around what it has in common with the photo's others."""
        if path is None:
            return None
        before, found, after = path.partition(stem) if stem else (path, "", "")
        return self([before, after], (before, after)) if found else self([path])


def _chunk(share: _Table, packed: list[str]) -> str:
    return f'{{"shared":[{",".join(share.texts)}],"photos":[{",".join(packed)}]}}'


def _first(rows: Iterable[Row], key: str) -> object:
    return next((_short(row[key]) for row in rows if row.get(key) is not None), None)


def _short(value: object) -> object:
    """Floats in six digits: more than is shown, and than the network's own rounding allows."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


@cache
def colours(name: str, signed: bool) -> list[str] | None:
    """A bar from its lower end to its upper one as "#rrggbb"; None for a colour map that matplotlib does not know."""
    try:
        entries = table(name, centred=signed)
    except RenderError:
        return None
    low = 1 if signed else 0
    places = [low + round(at * (255 - low) / (STOPS - 1)) for at in range(STOPS)]
    return ["#{:02x}{:02x}{:02x}".format(*map(int, entries[at])) for at in places]
