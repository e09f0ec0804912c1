"""The promises of a table: rows to compute with, text that lines up, HTML that is safe, a DataFrame where pandas is."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from html.parser import HTMLParser

import pytest

from saliency.errors import LayerError
from saliency.tables import Column, Table, number, share, si


@dataclass(frozen=True)
class Row:
    name: str
    size: int
    part: float | None = None


COLUMNS = [
    Column("layer", "name", align="left"),
    Column("size", "size", si, hint="how <large>"),
    Column("part", "part", share),
]
ROWS = [Row("conv1", 64, 0.25), Row("layer1.0.conv1", 1_234_567, 0.0), Row("conv1", 7), Row("fc", 1000, math.nan)]


def table(rows: list[Row] = ROWS, title: str = "Sizes", notes: tuple[str, ...] = ("a note",)) -> Table[Row]:
    return Table(rows, COLUMNS, title, notes)


# A sequence ----------------------------------------------------------------------------------------------------


def test_a_table_is_a_sequence_of_its_rows() -> None:
    assert (len(table()), list(table()), table().rows) == (4, ROWS, tuple(ROWS))
    assert table()[1] is ROWS[1]
    assert table()[-1] is ROWS[-1]
    assert table().index(ROWS[2]) == 2
    assert ROWS[1] in table()
    assert Row("fc", 1) not in table()
    with pytest.raises(IndexError):
        table()[4]


def test_a_row_is_found_by_its_name_and_the_first_of_several() -> None:
    assert table()["layer1.0.conv1"] is ROWS[1]
    assert table()["conv1"] is ROWS[0]
    assert table().__contains__("fc")
    assert not table().__contains__("conv")
    with pytest.raises(LayerError, match=r'no row "layer1.0.conv" in this table of 4; did you mean "layer1.0.conv1"'):
        table()["layer1.0.conv"]
    with pytest.raises(LayerError, match=r'no row "x" in this table of 0$'):
        table([])["x"]


def test_a_slice_is_a_table_of_its_kind_without_the_notes_on_the_whole() -> None:
    class Special(Table[Row]):
        @property
        def largest(self) -> int:
            return max(row.size for row in self)

    some = Special(ROWS, COLUMNS, "Sizes", ["in all"])[:1]
    assert type(some) is Special
    assert (some.rows, some.notes, some.title, some.largest) == ((ROWS[0],), (), "Sizes", 64)
    assert Special(ROWS, COLUMNS)[::2].largest == 64


def test_a_table_is_not_changed_by_what_is_made_of_it() -> None:
    whole = table()
    whole.of(ROWS[:1], ["other"])
    assert (whole.rows, whole.notes) == (tuple(ROWS), ("a note",))
    assert str(copy.deepcopy(whole)) == str(whole)


# Text ----------------------------------------------------------------------------------------------------------


def test_the_text_lines_up_below_its_titles() -> None:
    assert str(table()) == "\n".join(
        [
            "Sizes",
            "",
            "layer             size    part",
            "--------------  ------  ------",
            "conv1               64  25.0 %",
            "layer1.0.conv1  1.23 M     0 %",
            "conv1                7",
            "fc              1.00 k     nan",
            "",
            "a note",
        ]
    )


def test_the_text_of_a_table_without_rows_title_and_notes_has_its_columns() -> None:
    assert str(Table([], COLUMNS)) == "layer  size  part\n-----  ----  ----"


def test_commands_to_a_terminal_are_written_out() -> None:
    lines = str(table([Row("a\x1b[2J\nb", 2), Row("é", 3)], title="")).splitlines()
    assert lines[2] == r"a\x1b[2J\nb" + " " * 5 + "2"
    assert lines[3] == "é" + " " * 15 + "3"


def test_the_representation_is_one_short_line() -> None:
    assert repr(table()) == "<Table 'Sizes': 4 rows>"
    assert repr(Table(ROWS[:1], COLUMNS)) == "<Table: 1 row>"


# HTML ----------------------------------------------------------------------------------------------------------


class Read(HTMLParser):
    """What a browser makes of a piece of HTML: cells row by row, attributes, tags that are opened and not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.opened: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.opened and self.opened[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        elif not self.opened or self.opened[-1] != "style":
            self.data += data


def test_the_html_has_every_cell_and_closes_every_tag() -> None:
    read = Read(table().to_html())
    assert read.opened == []
    assert read.rows == [["layer", "size", "part"], *table().cells()]
    assert "Sizes" in read.data
    assert "a note" in read.data
    assert table()._repr_html_() == table().to_html()


def test_html_in_names_titles_and_notes_is_text() -> None:
    evil = '<script>alert("x")</script>&\'"'
    read = Read(table([Row(evil, 1)], title=evil, notes=(evil,)).to_html())
    assert "script" not in {tag for tag, _ in read.tags}
    assert read.rows[1][0] == evil
    assert read.data.count(evil) == 2


def test_the_style_stays_within_the_table() -> None:
    style = table().to_html().partition("<style>")[2].partition("</style>")[0]
    rules = [rule.partition("{")[0].strip() for rule in style.split("}") if "{" in rule]
    assert rules
    assert all(each.strip().startswith(".saliency-table") for rule in rules for each in rule.split(","))
    # Light or dark is up to the page: no text or ground has a colour of its own.
    assert "color: inherit" in style
    assert "http" not in table().to_html()


def test_hints_and_alignment_are_in_the_html() -> None:
    read = Read(table().to_html())
    assert [attributes.get("title") for tag, attributes in read.tags if tag == "th"] == [None, "how <large>", None]
    assert next(attributes["class"] for tag, attributes in read.tags if tag == "td") == "left"


# DataFrames ----------------------------------------------------------------------------------------------------


def test_a_dataframe_has_a_column_for_each_field() -> None:
    pytest.importorskip("pandas")
    frame = table().dataframe()
    assert list(frame.columns) == ["name", "size", "part"]
    assert frame["size"].sum() == 64 + 1_234_567 + 7 + 1000
    assert len(table([]).dataframe()) == 0


# Numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (1000, "1.00 k"),
        (123_456, "123 k"),
        (999_499, "999 k"),
        (999_999, "1.00 M"),
        (4_089_184_256, "4.09 G"),
        (-1234, "-1.23 k"),
        (12.3, "12.3"),
        (999.9, "1.00 k"),
        (10**20, "1.00e+20"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_large_numbers_have_three_digits_and_a_prefix(value: float, text: str) -> None:
    assert si(value) == text


def test_a_unit_takes_the_prefix() -> None:
    assert [si(each, "s") for each in (0.0123, 1.5e-6, 12.0, 0)] == ["12.3 ms", "1.50 µs", "12.0 s", "0 s"]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (0.123, "12.3 %"),
        (0, "0 %"),
        (1, "100 %"),
        (0.0004, "<0.1 %"),
        (0.9996, ">99.9 %"),
        (1.002, "100.2 %"),
        (None, ""),
        (math.nan, "nan"),
    ],
)
def test_only_what_is_nothing_or_all_looks_like_it(part: float | None, text: str) -> None:
    assert share(part) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0, "0"),
        (100.0, "100"),
        (99_999, "99999"),
        (123_456, "1.23e+05"),
        (0.001234, "0.00123"),
        (0.00009, "9.00e-05"),
        (12.345, "12.3"),
        (9.999, "10.0"),
        (12345.6, "12346"),
        (-0.5, "-0.500"),
        (1.5e-7, "1.50e-07"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_have_three_significant_digits(value: float, text: str) -> None:
    assert number(value) == text
