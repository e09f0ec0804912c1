"""The tables of `saliency methods` and `saliency models`."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter

from rich.table import Table
from rich.text import Text

from ...attribution.base import Attribution
from ...attribution.registry import source, summary
from ...errors import did_you_mean
from ...methods import METHODS
from ...zoo import Listing
from ...zoo import models as zoo_models
from ..console import Column, Screen, UsageError

_WHERE = {"here": "here", "download": "to download", "pip install": "pip install", "none": "none, random only"}


def methods(screen: Screen) -> int:
    """Every method: its name, what it is in one sentence, what it costs, and its paper."""
    rows = [(name, _sentence(cls), cls.cost, *paper(cls)) for name, cls in METHODS.items()]
    if not screen.is_terminal:
        columns = [Column(title) for title in ("method", "cost", "paper", "link", "what it is")]
        screen.table(columns, [(name, cost, short, link, what) for name, what, cost, short, link in rows])
        return 0
    table = Table.grid(padding=(0, 2, 1, 0))
    table.add_column(style="bold", no_wrap=True)
    for name, what, cost, short, link in rows:
        table.add_row(name, Text.assemble(what, "\n", (f"{cost} · {short}  {link}", "dim")))
    screen.show(table)
    return 0


def paper(cls: type[Attribution]) -> tuple[str, str]:
    """Authors and year of a method's paper, as in "Zhou et al. 2015", and where it is."""
    text = source(cls)
    authors = re.split(r',\s*["“]', text)[0]
    year, link = re.search(r"\b(?:19|20)\d\d\b", text), re.search(r"https?://[^\s,;]+", text)
    return f"{authors} {year[0]}" if year else authors, link[0].rstrip(".") if link else ""


def _sentence(cls: type[Attribution]) -> str:
    return re.split(r"(?<=\.)\s", summary(cls))[0]


def models(pattern: str | None, everything: bool, screen: Screen) -> int:
    """The models that can be loaded by name: the bundled ones, those that fit a pattern, or all."""
    with screen.waiting("looking through torchvision and timm"):
        known = zoo_models()
    fitting = [each for each in known if pattern is None or _fits(each.name, pattern)]
    if pattern is not None and not fitting:
        hint = did_you_mean(pattern, [each.name for each in known]) or "; saliency models --all lists them"
        raise UsageError(f'no model fits "{pattern}"{hint}')
    bundled_only = pattern is None and not everything
    listed = [each for each in fitting if not bundled_only or each.source == "bundled"]
    columns = (Column("model"), Column("from"), Column("weights"))
    screen.table(columns, [_model_row(each) for each in listed])
    if bundled_only:
        counts = Counter(each.source for each in known if each.source != "bundled")
        rest = " and ".join(f"{count} of {source}" for source, count in counts.items())
        screen.say(f"and {rest}: saliency models --all, or a part of a name, as in: saliency models resnet")
    return 0


def _fits(name: str, pattern: str) -> bool:
    """Whether a name contains the pattern, or matches it where it has wildcards."""
    return fnmatch.fnmatch(name, pattern if re.search(r"[*?\[]", pattern) else f"*{pattern}*")


def _model_row(model: Listing) -> list[str | Text]:
    style = "bold" if model.source == "bundled" else ""
    return [Text(model.name, style), Text(model.source, style), Text(_WHERE[model.weights], style)]
