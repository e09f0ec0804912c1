"""`saliency methods`, `saliency models` and `saliency report`."""

from __future__ import annotations

import argparse
import fnmatch
import re
from collections import Counter

from rich.table import Column, Table
from rich.text import Text

from ...attribution.base import Attribution, source, summary
from ...batch.report import report as write_page
from ...errors import did_you_mean
from ...methods import METHODS
from ...zoo import models as zoo_models
from ..console import Screen, UsageError, visible

_WEIGHTS = {"here": "here", "download": "to download", "pip install": "pip install", "none": "none, random only"}


def methods(_: argparse.Namespace, screen: Screen) -> int:
    """List all methods with a one-sentence description, cost and paper."""
    rows = [(name, re.split(r"(?<=\.)\s", summary(cls))[0], cls.cost, *paper(cls)) for name, cls in METHODS.items()]
    if not screen.is_terminal:
        columns = [Column(title) for title in ("method", "cost", "paper", "link", "description")]
        screen.table(columns, [(name, cost, short, link, text) for name, text, cost, short, link in rows])
        return 0
    table = Table.grid(padding=(0, 2, 1, 0))
    table.add_column(style="bold", no_wrap=True)
    for name, text, cost, short, link in rows:
        table.add_row(name, Text.assemble(text, "\n", (f"{cost} · {short}  {link}", "dim")))
    screen.show(table)
    return 0


def paper(cls: type[Attribution]) -> tuple[str, str]:
    """Return authors and year of a method's paper, such as "Zhou et al. 2015", and its URL."""
    text = source(cls)
    authors = re.split(r',\s*["“]', text)[0]
    year, link = re.search(r"\b(?:19|20)\d\d\b", text), re.search(r"https?://[^\s,;]+", text)
    return f"{authors} {year[0]}" if year else authors, link[0].rstrip(".") if link else ""


def models(arguments: argparse.Namespace, screen: Screen) -> int:
    """List the models that can be loaded by name: the bundled ones, those that match a pattern, or all."""
    pattern: str | None = arguments.pattern
    with screen.waiting("listing the models of torchvision and timm"):
        known = zoo_models()
    # A pattern without wildcards matches any part of a name.
    wildcards = pattern if pattern is None or re.search(r"[*?\[]", pattern) else f"*{pattern}*"
    matching = [model for model in known if wildcards is None or fnmatch.fnmatch(model.name, wildcards)]
    if pattern is not None and not matching:
        hint = did_you_mean(pattern, [model.name for model in known]) or "; saliency models --all lists them"
        raise UsageError(f'no model matches "{pattern}"{hint}')
    bundled_only = pattern is None and not arguments.all
    rows = []
    for model in matching:
        style = "bold" if model.source == "bundled" else ""
        if style or not bundled_only:
            rows.append([Text(cell, style) for cell in (model.name, model.source, _WEIGHTS[model.weights])])
    screen.table([Column("model"), Column("source"), Column("weights")], rows)
    if bundled_only:
        counts = Counter(model.source for model in known if model.source != "bundled")
        rest = " and ".join(f"{count} of {library}" for library, count in counts.items())
        screen.say(f"and {rest}: saliency models --all, or a part of a name, as in: saliency models resnet")
    return 0


def report(arguments: argparse.Namespace, screen: Screen) -> int:
    """Rewrite the gallery page of a batch folder."""
    try:
        with screen.waiting("writing the page"):
            page = write_page(arguments.folder)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UsageError(f"cannot write the page of {arguments.folder}: {reason}") from error
    screen.say(f"written: {visible(page)}")
    return 0
