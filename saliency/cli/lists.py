"""`saliency methods`, `saliency models` and `saliency layers`: what there is to choose from."""

from __future__ import annotations

import argparse
import fnmatch
import inspect
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.text import Text

from ..attribution.base import Attribution, get_method, source, summary
from ..attribution.options import declared_options
from ..errors import did_you_mean
from ..inspection import activation_statistics, gradient_statistics, layer_table
from ..inspection.layers import LayerRow, LayerTable
from ..io.inputs import read
from ..methods import METHODS
from ..model.call import categories_of, prepared_for_attribution, reference_tensor
from ..model.layers import LayerScan, scan_layers
from ..tables import Column, Table
from ..targets.classes import as_categories, as_target
from ..targets.language import parse_target
from ..targets.question import Images
from ..validation import check_integer
from ..zoo import load
from ..zoo import models as zoo_models
from .batch_commands import choose_target
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
        available = zoo_models()
    # A pattern without wildcards matches any part of a name.
    wildcards = pattern if re.search(r"[*?\[]", pattern) else f"*{pattern}*"
    matching = [model for model in available if fnmatch.fnmatch(model.name, wildcards)]
    if not matching:
        hint = did_you_mean(pattern, [model.name for model in available]) or "; saliency models --all lists them"
        raise UsageError(f'no model matches "{pattern}"{hint}')
    bundled_only = arguments.pattern is None and not arguments.all
    shown = [model for model in matching if model.source == "bundled" or not bundled_only]
    screen.table(["model", "source"], [(model.name, model.source) for model in shown])
    if bundled_only:
        counts = Counter(model.source for model in available if model.source != "bundled")
        rest = " and ".join(f"{count} of {library}" for library, count in counts.items())
        screen.say(f"and {rest}: saliency models --all, or a part of a name, as in: saliency models resnet")
    return 0


DEFAULT_ROWS = 40  # largest number of rows shown by default, unless depth 1 has more


def layers(arguments: argparse.Namespace, screen: Screen) -> int:
    """Print the tables of a model's layers."""
    if arguments.target is not None and not arguments.gradients:
        raise UsageError("--target selects the class whose gradients are shown; add --gradients")
    if arguments.depth is not None:
        check_integer("--depth", arguments.depth, error=UsageError)
    with screen.waiting(f"loading {arguments.model}"):
        reads_values = arguments.weights != "default" or arguments.stats or arguments.gradients
        model = load(arguments.model, weights=arguments.weights if reads_values else None)  # a table needs no download
    categories = as_categories(arguments.categories) if arguments.categories else categories_of(model)
    target = as_target(parse_target(choose_target(arguments), categories)).prepared(Images(categories=categories))
    preprocess = arguments.preprocess or getattr(model, "preprocess", None)
    if preprocess is None:
        raise UsageError(f"{arguments.model} has no preprocessing; pass --preprocess")
    batch = read(arguments.image or noise(), preprocess, like=reference_tensor(model))
    x = batch.inputs  # (1, C, H, W)
    with screen.waiting("measuring the layers"):
        with prepared_for_attribution(model):
            scan = scan_layers(model, x)
        table = layer_table(model, x)
    rows = _rows(table, scan.default, arguments)
    names = {row.name for row in rows}
    tables: list[Table[Any]] = [_with_grids(table, rows, scan)]
    if arguments.stats:
        with screen.waiting("measuring the activations"):
            tables.append(_select_rows(activation_statistics(model, x), names))
    if arguments.gradients:
        with screen.waiting("measuring the gradients"):
            gradients = gradient_statistics(model, x, target, of=arguments.gradients)
            tables.append(_select_rows(gradients, names, kind=arguments.gradients))
    for shown in tables:
        screen.show(shown)
        screen.say()
    read_by_cams = f'CAMs read "{scan.default}" by default (->)' if scan.default else "CAMs have no default layer"
    screen.say(f"{arguments.model} on an input of {x.shape[2]}x{x.shape[3]}: {read_by_cams}")
    if len(rows) < len(table):
        hidden = f"--all lists {len(table) - len(rows)} more nested layers"
        screen.say(Text(f"{hidden}; explain --layer accepts any layer with a grid", "dim"))
    return 0


def noise() -> np.ndarray[Any, Any]:
    """Return an image of noise, for commands without an image."""
    return np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)


def _rows(table: LayerTable, chosen: str | None, arguments: argparse.Namespace) -> list[LayerRow]:
    """Return the rows to show: to the given depth, or to the largest one with at most `DEFAULT_ROWS` rows."""
    depths = sorted(row.depth for row in table)
    depth = depths[-1] if len(depths) <= DEFAULT_ROWS or arguments.all else max(1, depths[DEFAULT_ROWS] - 1)
    if arguments.depth is not None:
        depth = arguments.depth
    return [row for row in table if row.depth <= depth or row.name == chosen]


def _with_grids(table: LayerTable, rows: Sequence[LayerRow], scan: LayerScan) -> Table[LayerRow]:
    """Return the table of layers with a mark at the default layer of CAMs, and with the grids of feature maps."""
    grids = {layer.name: "x".join(map(str, layer.layout.grid)) for layer in scan.spatial}
    arrow = Column("", "name", lambda name: "->" if name == scan.default else "", "left")
    grid = Column("grid", lambda row: grids.get(row.name))
    output = [column.title for column in table.columns].index("output") + 1
    columns = [arrow, *table.columns[:output], grid, *table.columns[output:]]
    return Table(rows, columns, table.title, table.notes)


def _select_rows(table: Table[Any], names: set[str], *, kind: str = "layers") -> Table[Any]:
    """Return the table with only the rows of layers with these names, or of their parameters and the model's own."""
    if kind == "parameters":
        return table.of((row for row in table if row.name.rpartition(".")[0] in {"", *names}), table.notes)
    return table.of((row for row in table if row.name in names), table.notes)
