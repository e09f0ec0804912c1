"""The table of methods in the documentation, from the registry: `python -m benchmarks.methods_table` rewrites it."""

from __future__ import annotations

from pathlib import Path

from saliency.attribution.base import Attribution, summary
from saliency.cli.lists import paper
from saliency.methods import METHODS

PAGE = Path(__file__).parent.parent / "docs" / "choosing-a-method.md"
BEGIN, END = "<!-- methods: this table is made from the registry -->\n", "<!-- /methods -->"


def methods_table() -> str:
    """One row per method: class, what it shows, cost, paper."""
    rows = ["| method | in a sentence | cost | source |", "|---|---|---|---|"]
    rows += [
        f"| `{cls.__name__}` | {summary(cls)} | {cls.cost} | {_linked(cls)} |"
        for cls in METHODS.values()
        if cls.__module__.startswith("saliency.methods.")
    ]
    return "\n".join(rows) + "\n"


def _linked(cls: type[Attribution]) -> str:
    """The authors and year as a link to the paper."""
    authors, address = paper(cls)
    return f"[{authors}]({address})"


def with_table(text: str) -> str:
    """The text of the page with the table of the registry."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + methods_table() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
