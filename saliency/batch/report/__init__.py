"""The gallery page of a folder that `saliency batch` wrote."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...errors import RenderError, warn
from ...frontend import read, scripts, styles
from ...io.atomic_write import durable_write, inside
from ...render.overlay import MOST_OPACITY
from ...render.scaling import hex_colors
from ..failures import BatchError
from ..store import EVALUATION, GROUPS, MANIFEST, PAGE, Row, locked, read_json, read_rows, read_run, write_head

SCRIPTS = ("data.js", "layout.js", "state.js", "grid.js", "view.js", "comparison.js", "main.js")
COMPARISON = {"rows": [dict], "differences": [dict], "notes": [str], "curves": [dict], "results": [dict]}

# Columns of the manifest that the page shows, per image and per row.
_ENTRY = ("index", "source", "id", "width", "height", "input_width", "input_height", "box", "thumbnail")
_ROW = (
    *("target", "target_box", "name", "probability", "score", "layer", "settings", "coverage", "residual"),
    *("ledger", "shares", "sign", "units", "floor", "limit", "colormap"),
    *("heat", "overlay", "trust", "card", "error", "error_kind"),
)
_FILES = ("thumbnail", "heat", "overlay", "card")


def report(folder: Path, *, title: str | None = None) -> Path:
    """Write the gallery page of a batch folder, and return its path.

    The page is the file `index.html` in the folder. It needs no server. It shows the images in the subfolders and the
    comparison that `saliency evaluate` wrote into the folder, and links to the page of `saliency groups`. It is created
    from `manifest.json`, `manifest.jsonl` and `evaluation.json`; equal files give identical bytes. The file is written
    atomically.

    Args:
        folder: Output folder of `saliency batch`. The run may still be in progress, or have been interrupted.
        title: The title of the page, which is stored in `manifest.json`; None for the stored one, else the model.

    Raises:
        BatchError: The folder was not written by `saliency batch`, a line of its manifest cannot be read, or a title is
            given while a run is in progress.
        OSError: The folder cannot be written to.
    """
    folder = Path(folder)
    run = read_run(folder)
    if title is not None:
        with locked(folder):
            run["title"] = title
            write_head(folder, run)
    page = _page(run, _rows(folder / MANIFEST), _comparison(folder), GROUPS if (folder / GROUPS).is_file() else None)
    return durable_write(inside(folder, PAGE), [page.encode()])


def _rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a manifest, without an incomplete last line, which a killed run may leave."""
    end = 0
    for row, line in read_rows(path):
        end += len(line)
        yield row
    if path.is_file():
        with path.open("rb") as file:
            file.seek(end)
            if file.readline().endswith(b"\n"):
                raise BatchError(f"{path} is damaged after byte {end}; run saliency batch again to repair it")


def _comparison(folder: Path) -> Row | None:
    """Return the comparison of methods in the folder; None if there is no comparison, or if it is damaged."""
    path = folder / EVALUATION
    comparison: Row | None = _rounded(read_json(path, COMPARISON))
    if comparison is None and path.is_file():
        warn(f"{path} is damaged, so the page has no comparison; run saliency evaluate again")
    return comparison


def _page(run: Row, rows: Iterable[Row], comparison: Row | None, groups: str | None) -> str:
    methods = {name: index for index, name in enumerate(run["methods"])}
    bars: dict[str, list[str] | None] = {}
    by_index: dict[int, Row] = {}
    for index, group in groupby(rows, itemgetter("index")):
        entry = _entry(list(group), methods, bars)
        if earlier := by_index.get(index):  # a run in progress, such as a second method or a retry, appends rows
            entry |= earlier | {"rows": sorted(earlier["rows"] + entry["rows"], key=itemgetter("method"))}
        by_index[index] = entry
    entries = [by_index[index] for index in sorted(by_index)]
    # Omit times, so that a resumed run gives the same page.
    head = {
        "title": run.get("title"),
        "model": run["model"]["name"],
        "weights": run["model"]["weights"],
        "versions": run["versions"],
        "command": run["command"],
        "methods": list(methods),
        "bars": bars,
        "opacity": MOST_OPACITY if run["fingerprint"]["opacity"] == "map" else run["fingerprint"]["opacity"],
        "images": len(entries),
        "groups": groups,
        "counted": "detections" if run["fingerprint"].get("detections") else "images",
        "failed": sum(any("error" in row for row in entry["rows"]) for entry in entries),
    }
    title = f"{head['title'] or head['model']}: {len(entries):,} {head['counted']}".encode(
        "utf-8", "backslashreplace"
    ).decode()
    style, script = styles(__name__, "page.css"), scripts(__name__, SCRIPTS)
    parts = {
        "title": html.escape(title),
        "policy": _policy(style, script),
        "style": style,
        "data": dumped({"head": _rounded(head), "images": _packed(entries), "comparison": _packed(comparison)}),
        "script": script,
    }
    # A single substitution: placeholders in inserted text are not replaced.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], read(__name__, "page.html"))


def _packed(value: object) -> str:
    return base64.b64encode(zlib.compress(dumped(value).encode())).decode()


def _entry(rows: Sequence[Row], methods: Mapping[str, int], bars: dict[str, list[str] | None]) -> Row:
    """Return the columns of an image and of its rows, and add the colours of its colour bars to `bars`.

    The method of a row is an index; -1 if the image failed before any method.
    """
    # A row of a failed method may lack the sizes, which the rows of other methods contain.
    of_image = {key: value for row in reversed(rows) for key, value in row.items() if value is not None}
    packed = []
    for row in rows:
        is_signed = row["sign"] == "signed"
        bar = f"{row['colormap']}{' signed' * is_signed}"
        if row["colormap"] is not None:
            bars[bar] = colours(row["colormap"], is_signed)
        packed.append({**_selected(row, _ROW), "method": methods.get(row["method"], -1), "bar": bar})
    return {**_selected(of_image, _ENTRY), "rows": packed}


def _selected(row: Row, keys: Iterable[str]) -> Row:
    """Return the given columns of a row, without unknown values."""
    values = {key: address(row[key]) if key in _FILES else row[key] for key in keys if row.get(key) is not None}
    return {key: _rounded(value) for key, value in values.items() if value is not None}


def _rounded(value: Any) -> Any:
    """Round all numbers to six digits, since the page shows fewer, and replace numbers that are not finite by None."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return value


def dumped(value: object) -> str:
    """Return JSON that is safe inside a script element: HTML characters and JavaScript line breaks are escaped.

    Lone surrogates, which UTF-8 cannot encode, are escaped as well.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "backslashreplace").decode()


def address(path: str) -> str | None:
    """Return a path of the manifest as a relative, percent-encoded URL; None if it points outside the folder."""
    if path.startswith("/") or ".." in path.split("/"):
        return None
    return "./" + quote(path, safe="/", errors="surrogatepass")


@cache
def colours(name: str, signed: bool) -> list[str] | None:
    """Return the colours of a bar from low to high as "#rrggbb"; None for a colormap unknown to this process."""
    with suppress(RenderError):
        return hex_colors(name, centred=signed)[int(signed) :]
    return None


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
