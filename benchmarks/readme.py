"""The README's table of methods, made from the registry: `python -m benchmarks.readme` writes it anew."""

from __future__ import annotations

from pathlib import Path

from saliency.attribution.base import Attribution
from saliency.attribution.registry import summary
from saliency.cli.commands.lists import paper
from saliency.methods import METHODS

README = Path(__file__).parent.parent / "README.md"
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
    """The README's text with the table as the registry has it."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + methods_table() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
