"""Rewrite the table of methods in the documentation from the registry: `python -m benchmarks.methods_table`."""

from __future__ import annotations

from pathlib import Path

from saliency.attribution.base import Attribution, summary
from saliency.cli.commands import paper
from saliency.methods import METHODS

PAGE = Path(__file__).parent.parent / "docs" / "choosing-a-method.md"
BEGIN, END = "<!-- methods: this table is generated from the registry -->\n", "<!-- /methods -->"


def methods_table() -> str:
    """Return the Markdown table with one row per method: class, summary, cost and paper."""
    rows = ["| method | summary | cost | source |", "|---|---|---|---|"]
    rows += [
        f"| `{cls.__name__}` | {summary(cls)} | {cls.cost} | {_linked(cls)} |"
        for cls in METHODS.values()
        if cls.__module__.startswith("saliency.methods.")
    ]
    return "\n".join(rows) + "\n"


def _linked(cls: type[Attribution]) -> str:
    """Return the authors and year as a Markdown link to the paper."""
    authors, address = paper(cls)
    return f"[{authors}]({address})"


def with_table(text: str) -> str:
    """Return the text of the page with a new table."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + methods_table() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
