"""Tables of what was measured: rows to compute with, text to read, HTML for notebooks and pages."""

from __future__ import annotations

import copy
import dataclasses
import html
import importlib
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, Self, TypeVar, overload

from ..errors import LayerError, SaliencyError, closest


class Named(Protocol):
    """A row: a frozen dataclass with at least a name."""

    @property
    def name(self) -> str:
        """What the row is of: the dotted name of a layer or a parameter."""


Row = TypeVar("Row", bound=Named)


@dataclass(frozen=True)
class Column(Generic[Row]):
    """How one column of a table is read off its rows.

    Attributes:
        title: Its heading.
        text: What stands in the cell of a row. Leading spaces indent.
        align: On which side.
        hint: What the heading means, for those who point at it on a page.
        bar: A share from 0 to 1 that a page draws behind the cell; None draws nothing.
        alert: Whether a page draws the reader's eye to the cell: a NaN, a dead channel.
    """

    title: str
    text: Callable[[Row], str]
    align: Literal["left", "right"] = "right"
    hint: str = ""
    bar: Callable[[Row], float | None] | None = None
    alert: Callable[[Row], bool] | None = None


class Table(Sequence[Row]):
    """Rows in order, which know how to be read: a sequence of dataclasses, a text, a piece of HTML, a DataFrame.

    Args:
        rows: Frozen dataclasses.
        columns: What of them is shown; `rows` and `dataframe()` have everything.
        title: What the table is of.
        notes: Sentences below the table.
    """

    def __init__(
        self, rows: Iterable[Row], columns: Sequence[Column[Row]], title: str = "", notes: Iterable[str] = ()
    ) -> None:
        self.rows: tuple[Row, ...] = tuple(rows)
        self.columns: tuple[Column[Row], ...] = tuple(columns)
        self.title = title
        self.notes: tuple[str, ...] = tuple(notes)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @overload
    def __getitem__(self, at: int | str) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> Self: ...
    def __getitem__(self, at: int | str | slice) -> Row | Self:
        """A row by its place or its name, the first of that name; or a table of some of the rows, without the notes.

        Raises:
            IndexError: There are fewer rows.
            LayerError: No row has that name; the closest names are given.
        """
        if isinstance(at, slice):
            return self.of(self.rows[at])
        if not isinstance(at, str):
            return self.rows[at]
        row = next((each for each in self.rows if each.name == at), None)
        if row is None:
            near = closest(at, dict.fromkeys(each.name for each in self.rows if each.name))
            hint = f"; the closest are {', '.join(near)}" if near else ""
            raise LayerError(f'no row "{at}" in this table of {len(self)}{hint}')
        return row

    def __contains__(self, row: object) -> bool:
        """Whether it is one of the rows, or the name of one."""
        return any(each.name == row if isinstance(row, str) else each == row for each in self.rows)

    def of(self, rows: Iterable[Row], notes: Iterable[str] = ()) -> Self:
        """The same table with other rows and notes."""
        made = copy.copy(self)
        made.rows, made.notes = tuple(rows), tuple(notes)
        return made

    def __repr__(self) -> str:
        count = f"{len(self)} row{'' if len(self) == 1 else 's'}"
        return f"<{type(self).__name__}{f' {self.title!r}' if self.title else ''}: {count}>"

    def __str__(self) -> str:
        """The table as aligned text."""
        cells = [[each.title for each in self.columns], *self.cells()]
        widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                _padded(cell, width, each.align) for cell, width, each in zip(row, widths, self.columns, strict=True)
            ).rstrip()
            for row in cells
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        title = [visible(self.title), ""] if self.title else []
        notes = ["", *map(visible, self.notes)] if self.notes else []
        return "\n".join([*title, *lines, *notes])

    def cells(self) -> list[list[str]]:
        """What stands in each cell, row by row, on one line and without what a terminal would obey."""
        return [[visible(column.text(row)) for column in self.columns] for row in self.rows]

    def to_html(self) -> str:
        """The table as a piece of HTML that brings its own style, in the colours of whatever page it is put on."""
        heads = "".join(_head(each) for each in self.columns)
        # The first column that has a title is that of the names.
        names = next((each for each in self.columns if each.title), None)
        body = "".join(
            f"<tr>{''.join(_cell(c, row, text, c is names) for c, text in zip(self.columns, texts, strict=True))}</tr>"
            for row, texts in zip(self.rows, self.cells(), strict=True)
        )
        caption = f"<caption>{escaped(self.title)}</caption>" if self.title else ""
        notes = "".join(f"<p>{escaped(each)}</p>" for each in self.notes)
        return (
            f'<div class="saliency-table"><style>{_STYLE}</style>\n<div><table>{caption}'
            f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}</tbody></table></div>{notes}</div>"
        )

    def _repr_html_(self) -> str:
        return self.to_html()

    def dataframe(self) -> Any:
        """A `pandas.DataFrame` with one column for each field of the rows.

        Raises:
            SaliencyError: pandas is not installed.
        """
        try:
            pandas: Any = importlib.import_module("pandas")
        except ImportError as error:
            raise SaliencyError("a DataFrame takes pandas, which is not installed: pip install pandas") from error
        first: Any = self.rows[0] if self.rows else None
        names = [each.name for each in dataclasses.fields(first)] if first is not None else []
        return pandas.DataFrame([[getattr(row, name) for name in names] for row in self.rows], columns=names)


def si(value: float, unit: str = "") -> str:
    """A number in three digits and a prefix: 123456 is "123 k", 0.0123 with the unit "s" is "12.3 ms"."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g} {unit}".rstrip()
    small = isinstance(value, int) and abs(value) < 1000
    digits, exponent = (str(value), 0) if small else _engineered(value)
    prefix = _PREFIXES.get(exponent)
    if prefix is None:
        return f"{value:.2e} {unit}".rstrip()
    return f"{digits} {prefix}{unit}".rstrip()


_PREFIXES = {-12: "p", -9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}


def _engineered(value: float) -> tuple[str, int]:
    """Three digits, and a power of ten that is a multiple of three."""
    mantissa, _, power = f"{value:.2e}".partition("e")
    exponent = int(power) // 3 * 3
    shift = int(power) - exponent
    return f"{float(mantissa) * 10**shift:.{2 - shift}f}", exponent


def share(part: float | None) -> str:
    """A part of 1 as a percentage: 0.123 is "12.3 %"; only what is exactly 0 or 1 looks like it. None is empty."""
    if part is None:
        return ""
    if not math.isfinite(part):
        return f"{part:g}"
    if part in (0, 1):
        return f"{100 * part:.0f} %"
    if 0 < part < 0.0005:
        return "<0.1 %"
    return ">99.9 %" if 0.9995 <= part < 1 else f"{100 * part:.1f} %"


def number(value: float) -> str:
    """A number in three significant digits: "0.00123", "12.3", "1.23e-7"; integers below 100000 are whole."""
    if not math.isfinite(value) or value == 0 or (isinstance(value, int) and abs(value) < 100_000):
        return f"{value:g}"
    mantissa, _, power = f"{value:.2e}".partition("e")
    exponent = int(power)
    if -4 < exponent < 5:
        return f"{value:.{max(0, 2 - exponent)}f}"
    return f"{mantissa}e{exponent}"


def listed(what: str, names: Iterable[str], most: int = 12) -> list[str]:
    """A note that names some layers or parameters; none where there are none.

    Many that differ in a number only are one pattern: "not called: blocks.*.drop (7)".
    """
    patterns: dict[str, list[str]] = {}
    for name in names:
        patterns.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    texts = [
        text
        for pattern, alike in patterns.items()
        for text in ([f"{pattern} ({len(alike)})"] if len(alike) > 3 else alike)
    ]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return [f"{what} {', '.join(texts[:most])}{more}"] if texts else []


def visible(text: str) -> str:
    """Text on one line: what a terminal would obey is written out."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    )


def escaped(text: str) -> str:
    """Text as it stands in HTML."""
    return html.escape(visible(text))


def _width(text: str) -> int:
    """How many columns of a terminal it takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _padded(text: str, width: int, align: str) -> str:
    space = " " * (width - _width(text))
    return space + text if align == "right" else text + space


def _head(column: Column[Any]) -> str:
    hint = f' title="{escaped(column.hint)}"' if column.hint else ""
    return f'<th scope="col" class="{column.align}"{hint}>{escaped(column.title)}</th>'


def _cell(column: Column[Row], row: Row, text: str, is_name: bool) -> str:
    kinds = [column.align, *(["name"] if is_name else [])]
    if column.alert is not None and column.alert(row):
        kinds.append("alert")
    part = column.bar(row) if column.bar is not None else None
    is_bar = part is not None and math.isfinite(part)
    style = f' style="--part:{100 * min(max(part or 0.0, 0.0), 1.0):.1f}%"' if is_bar else ""
    return f'<td class="{" ".join([*kinds, *(["bar"] if is_bar else [])])}"{style}>{escaped(text)}</td>'


# Every colour is the page's own text colour, thinned: right on any background, light or dark, whoever chose it. The
# header alone hides what scrolls below it, with the background of JupyterLab, VS Code or our own page.
_STYLE = """
.saliency-table { color: inherit; margin: .5em 0 1em; }
.saliency-table > div { max-height: min(44rem, 85vh); overflow: auto; width: fit-content; max-width: 100%;
  scrollbar-color: color-mix(in srgb, currentColor 40%, transparent) transparent; }
.saliency-table table { border-collapse: collapse; border: 0; margin: 0; font-size: 13px; line-height: 1.35;
  color: inherit; background: none; font-variant-numeric: tabular-nums; }
.saliency-table caption { text-align: left; font-weight: 600; padding: .3em .6em; white-space: nowrap;
  color: inherit; caption-side: top; }
.saliency-table th, .saliency-table td { padding: .22em .7em; white-space: pre; border: 0; color: inherit;
  background: none; text-align: right; vertical-align: baseline; max-width: none; }
.saliency-table th.left, .saliency-table td.left { text-align: left; }
.saliency-table thead th { position: sticky; top: 0; font-weight: 600; backdrop-filter: blur(1rem);
  background: var(--jp-layout-color0, var(--vscode-editor-background, var(--saliency-ground, transparent)));
  box-shadow: inset 0 -1px color-mix(in srgb, currentColor 45%, transparent); }
.saliency-table thead th[title] { cursor: help; text-decoration: underline dotted; text-underline-offset: .25em;
  text-decoration-color: color-mix(in srgb, currentColor 40%, transparent); }
.saliency-table tbody tr { background: none; }
.saliency-table tbody tr + tr td { box-shadow: inset 0 1px color-mix(in srgb, currentColor 9%, transparent); }
.saliency-table tbody tr:hover td { background-color: color-mix(in srgb, currentColor 7%, transparent); }
.saliency-table td.name { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.saliency-table td.bar { min-width: 5.5em; background-origin: content-box; background-clip: content-box;
  background-image: linear-gradient(to right,
  color-mix(in srgb, #2f81f7 35%, transparent) var(--part), transparent var(--part)); }
.saliency-table td.alert { font-weight: 600; background-color: color-mix(in srgb, #e5534b 30%, transparent); }
.saliency-table p { margin: .35em .6em; font-size: 13px; max-width: 60rem; color: inherit; }
"""
