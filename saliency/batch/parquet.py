"""The manifest as a Parquet table, where pyarrow is installed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from ..io.atomic_write import atomic_write
from .manifest import NUMBERS, WHOLE, Row

ROWS_AT_ONCE = 10_000

_TYPES = {
    **dict.fromkeys(WHOLE, "int64"),
    **dict.fromkeys(NUMBERS, "float64"),
}


def write_parquet(rows: Iterable[Row], path: Path) -> bool:
    """Write rows as a table, and say whether it was written: not without pyarrow.

    The columns are the keys of a row; `box` is a list of four numbers, `settings` is JSON.
    """
    if find_spec("pyarrow") is None:
        return False
    arrow = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    schema = _schema(arrow)
    rows = iter(rows)
    with atomic_write(path) as temporary, parquet.ParquetWriter(temporary, schema) as writer:
        while some := list(islice(rows, ROWS_AT_ONCE)):
            writer.write_table(arrow.Table.from_pylist([_plain(row) for row in some], schema=schema))
    return True


def _schema(arrow: Any) -> Any:
    from .manifest import KEYS

    kinds = {"int64": arrow.int64(), "float64": arrow.float64()}
    fields = [(key, kinds[_TYPES[key]] if key in _TYPES else arrow.string()) for key in KEYS]
    return arrow.schema([(key, arrow.list_(arrow.float64()) if key == "box" else kind) for key, kind in fields])


def _plain(row: Row) -> Row:
    settings = row["settings"]
    return {**row, "settings": None if settings is None else json.dumps(settings, sort_keys=True)}
