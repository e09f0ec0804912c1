"""Tables of measurements as rows, text, HTML and DataFrames."""

from __future__ import annotations

import copy
import html
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, Protocol, Self, TypeVar, overload

from .errors import LayerError, did_you_mean, optional_import, plural, visible


class Named(Protocol):
    """Row of a table: a frozen dataclass with at least a name."""

    @property
    def name(self) -> str:
        """Dotted name of the layer or parameter."""


Row = TypeVar("Row", bound=Named)


@dataclass(frozen=True)
class Column:
    """One column of a table. Tables are pickled with their columns, so functions must not be lambdas.

    Attributes:
        title: The heading.
        value: The name of an attribute of the rows, or a function from a row to a value.
        form: Function from a value to the text of its cell; None and False give an empty text. Leading spaces are
            preserved as indentation.
        align: "left" or "right".
        hint: Explanation of the heading, shown as a tooltip in HTML.
    """

    title: str
    value: str | Callable[[Any], object]
    form: Callable[[Any], str] = str
    align: Literal["left", "right"] = "right"
    hint: str = ""

    def text(self, row: object) -> str:
        """Return the text of the cell in a row."""
        value = getattr(row, self.value) if isinstance(self.value, str) else self.value(row)
        return "" if value is None or value is False else self.form(value)


class Table(Sequence[Row]):
    """Sequence of dataclasses that is displayed as text or HTML, and converts to a DataFrame.

    Args:
        rows: Frozen dataclasses.
        columns: The displayed columns, except those with only empty cells; `rows` and `dataframe()` contain all fields.
        title: The title of the table.
        notes: Notes below the table.
    """

    absent: Mapping[str, str] = {}  # by name, why a row is missing

    def __init__(
        self, rows: Iterable[Row], columns: Sequence[Column], title: str = "", notes: Iterable[str] = ()
    ) -> None:
        self.rows: tuple[Row, ...] = tuple(rows)
        self.columns = tuple(c for c in columns if not self.rows or any(map(c.text, self.rows)))
        self.title = title
        self.notes: tuple[str, ...] = tuple(notes)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @overload
    def __getitem__(self, key: int | str) -> Row: ...
    @overload
    def __getitem__(self, key: slice) -> Self: ...
    def __getitem__(self, key: int | str | slice) -> Row | Self:
        """Return a row by its index, the first row of that name, or a table of a slice of the rows without notes.

        Raises:
            IndexError: The index is out of range.
            LayerError: No row has that name; the reason or the closest names are given.
        """
        if isinstance(key, slice):
            return self.of(self.rows[key])
        if not isinstance(key, str):
            return self.rows[key]
        row = next((row for row in self.rows if row.name == key), None)
        if row is None:
            hint = did_you_mean(key, [row.name for row in self.rows])
            raise LayerError(self.absent.get(key) or f'no row "{key}" in this table of {len(self)}{hint}')
        return row

    def __contains__(self, item: object) -> bool:
        """Return whether a row, or a row with that name, is in the table."""
        return any(row.name == item if isinstance(item, str) else row == item for row in self.rows)

    def of(self, rows: Iterable[Row], notes: Iterable[str] = ()) -> Self:
        """Return the same table with other rows and notes."""
        table = copy.copy(self)
        table.rows, table.notes = tuple(rows), tuple(notes)
        return table

    def __repr__(self) -> str:
        title = f" {self.title!r}" if self.title else ""
        return f"<{type(self).__name__}{title}: {plural(len(self), 'row')}>"

    def __str__(self) -> str:
        """Return the table as aligned text."""
        texts = [[column.title for column in self.columns], *self.cells()]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        texts.insert(1, ["-" * width for width in widths])
        aligns = ["<" if column.align == "left" else ">" for column in self.columns]
        cells = "  ".join(f"{{:{align}{width}}}" for align, width in zip(aligns, widths, strict=True))
        lines = [cells.format(*row).rstrip() for row in texts]
        title = [visible(self.title), ""] if self.title else []
        notes = ["", *map(visible, self.notes)] if self.notes else []
        return "\n".join([*title, *lines, *notes])

    def cells(self) -> list[list[str]]:
        """Return the text of each cell, row by row, with control characters and line breaks escaped."""
        return [[visible(column.text(row)) for column in self.columns] for row in self.rows]

    def to_html(self) -> str:
        """Return the table as HTML with a style that adapts to the colours of the page."""
        head = "".join(map(_heading, self.columns))
        body = "".join(f"<tr>{''.join(_cell(column, row) for column in self.columns)}</tr>" for row in self.rows)
        caption = f"<caption>{escaped(self.title)}</caption>" if self.title else ""
        notes = "".join(f"<p>{escaped(note)}</p>" for note in self.notes)
        style = files(__package__).joinpath("tables.css").read_text("utf-8")
        return (
            f'<div class="saliency-table"><style>{style}</style>\n<div><table>{caption}'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>{notes}</div>"
        )

    _repr_html_ = to_html

    def dataframe(self) -> Any:
        """Return a `pandas.DataFrame` with one column per field of the rows.

        Raises:
            DependencyError: pandas is not installed.
        """
        pandas = optional_import("pandas", "tables", "a DataFrame")
        return pandas.DataFrame(list(self.rows))


def si(value: float, unit: str = "") -> str:
    """Format a number with three digits and a prefix: 123456 is "123 k", 0.0123 with the unit "s" is "12.3 ms"."""
    if not math.isfinite(value) or value == 0 or (isinstance(value, int) and abs(value) < 1000):
        return f"{value:g} {unit}".rstrip()
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    thousands, shift = divmod(int(exponent), 3)
    if not -4 <= thousands <= 5:
        return f"{value:.2e} {unit}".rstrip()
    return f"{float(mantissa) * 10**shift:.{2 - shift}f} {'pnµm kMGTP'[thousands + 4].strip()}{unit}".rstrip()


def share(fraction: float | None) -> str:
    """Format a fraction as a percentage: 0.123 is "12.3 %"; None is "". Only exact 0 and 1 give "0 %" and "100 %"."""
    if fraction is None or not math.isfinite(fraction):
        return "" if fraction is None else f"{fraction:g}"
    if 0 < fraction < 0.0005:
        return "<0.1 %"
    if 0.9995 <= fraction < 1:
        return ">99.9 %"
    return f"{100 * fraction:.{0 if fraction in (0, 1) else 1}f} %"


def number(value: float | None) -> str:
    """Format a number with three digits: "0.00123", "12.3", "1.23e-07"; None is "", and 12345.6 is "12346"."""
    if not value:
        return "" if value is None else "0"
    if 100 <= abs(value) < 1e5:
        return f"{value:.0f}"
    return f"{value:#.3g}".rstrip(".")


Shapes = tuple[int, ...] | list[tuple[int, ...]]
"""The shape of a tensor, or the shapes of several tensors."""


def shape_text(shapes: Shapes) -> str:
    """Format the shape of an output: "10x64x112x112", or "1x21, 1x21" for two tensors."""
    if isinstance(shapes, list):
        more = f", ... {len(shapes)} in all" if len(shapes) > 4 else ""
        return ", ".join(map(shape_text, shapes[:4])) + more
    return "x".join(map(str, shapes)) or "scalar"


def escaped(text: str) -> str:
    """Escape a text for HTML."""
    return html.escape(visible(text))


def _heading(column: Column) -> str:
    hint = f' title="{escaped(column.hint)}"' if column.hint else ""
    return f'<th scope="col" class="{column.align}"{hint}>{escaped(column.title)}</th>'


def _cell(column: Column, row: object) -> str:
    return f'<td class="{column.align}">{escaped(column.text(row))}</td>'


draw_png: Callable[[object], bytes | None]
"""Draw an explanation at the end of a notebook cell."""
draw_card: Callable[[object], bytes]
"""Draw a trust card."""
