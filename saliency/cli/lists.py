"""`saliency methods` and `saliency models`."""

from __future__ import annotations

import argparse
import fnmatch
import inspect
import json
import re
from collections import Counter
from typing import Any

from rich.text import Text

from ..attribution.base import Attribution, get_method, source, summary
from ..attribution.options import declared_options
from ..errors import did_you_mean
from ..methods import METHODS
from ..zoo import models as zoo_models
from .console import Screen, UsageError


def methods(arguments: argparse.Namespace, screen: Screen) -> int:
    """List all methods with a one-sentence description, cost and paper; or describe one method with its options."""
    chosen = METHODS if arguments.method is None else {arguments.method: get_method(arguments.method)}
    described = [describe(cls) for cls in chosen.values()]
    if arguments.json:
        print(json.dumps(described, indent=1, default=str))
    elif arguments.method is not None:
        _print_method(described[0], chosen[arguments.method], screen)
    elif not screen.is_terminal:
        columns = ("method", "cost", "paper", "link", "description")
        screen.table(columns, [[about[column] for column in columns] for about in described])
    else:
        for about in described:
            facts = f"\n{about['cost']} · {about['paper']}  {about['link']}\n"
            screen.say(Text.assemble((about["method"], "bold"), f"\n{about['description']}", (facts, "dim")))
    return 0


def describe(cls: type[Attribution]) -> dict[str, Any]:
    """Return the facts about a method and its options, for people and for programs."""
    authors, link = paper(cls)
    options = {}
    for name in cls.options():
        option = declared_options(cls)[name]
        options[name] = {"default": option.default, "choices": option.choices, "description": _meaning(cls, name)}
    facts = {"cost": cls.cost, "units": cls.units, "sign": cls.sign, "paper": authors, "link": link}
    return {"method": cls.name, "description": re.split(r"(?<=\.)\s", summary(cls))[0], **facts, "options": options}


def _meaning(cls: type[Attribution], option: str) -> str:
    """Return an option's description from the docstring of a class. "As for `X`" is replaced by X's description."""
    pattern = rf"^ {{4}}(?:\w+, )*{option}(?:, \w+)*: (.*(?:\n {{8}}.*)*)"
    entry = re.search(pattern, inspect.getdoc(cls) or "", re.MULTILINE)
    text = " ".join(entry[1].split()) if entry else ""
    if other := re.match(r"As for `(\w+)`", text):
        named = {method.__name__: method for method in METHODS.values()}
        return _meaning(named[other[1]], option).rstrip(".") + text[other.end() :]
    return text


def _print_method(about: dict[str, Any], cls: type[Attribution], screen: Screen) -> None:
    """Print the description of a method: its docstring without errors, its cost, and a table of its options."""
    screen.say(Text(about["method"], "bold"))
    for paragraph in (inspect.getdoc(cls) or "").split("\n\n"):
        if not paragraph.startswith(("Args:", "Raises:")):
            screen.say(f"{' '.join(paragraph.split())}\n")
    screen.say(f"Cost: {about['cost']}. Units: {about['units']}. Sign: {about['sign']}.")
    rows = []
    for name, option in about["options"].items():
        default = json.dumps(option["default"], default=str).strip('"')
        rows.append((f"{name}={default}", " | ".join(map(str, option["choices"])), option["description"]))
    if rows:
        screen.say("\nOptions, set with --set OPTION=VALUE:")
        screen.table(["default", "values", "meaning"], rows)


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
    screen.table(["model", "source"], [(model.name, model.source) for model in shown])
    if bundled_only:
        counts = Counter(model.source for model in known if model.source != "bundled")
        rest = " and ".join(f"{count} of {library}" for library, count in counts.items())
        screen.say(f"and {rest}: saliency models --all, or a part of a name, as in: saliency models resnet")
    return 0
