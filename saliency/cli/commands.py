"""The commands that run a model, such as `saliency explain`, and those that list methods, models and layers."""

from __future__ import annotations

import argparse
import fnmatch
import inspect
import json
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.text import Text

from ..attribution.base import Attribution, get_method, source, summary
from ..attribution.explanation import Explanation
from ..attribution.options import declared_options
from ..batch.drawing import ExplainMapper, ImageResults
from ..batch.engines import SequentialEngine, execute
from ..batch.failures import error_columns, require_writable, sentence
from ..batch.folder_evaluation import evaluate as evaluate_folder
from ..batch.listing import ImageEntry, with_names
from ..batch.network import LoadedImage, Network, create_methods, find_devices, load_model, move_model, trust_card
from ..batch.options import NetworkOptions, OutputOptions, OverlayStyle, RunOptions, expected_errors
from ..batch.plan import BatchSlot
from ..batch.sources import Found, find_images, require_images
from ..batch.store import Row, Store, file_names
from ..errors import SaliencyError, did_you_mean, plural, visible
from ..evaluation.metrics.base import METRICS
from ..inspection import activation_statistics, gradient_statistics, layer_table
from ..inspection.layers import LayerRow, LayerTable
from ..io.atomic_write import inside
from ..io.inputs import read
from ..methods import METHODS
from ..model.call import categories_of, name_subjects, prepared_for_attribution, reference_tensor
from ..model.layers import LayerScan, scan_layers
from ..render.overlay import save_drawing, shrink
from ..render.sheet import contact_sheet
from ..tables import Column, Table
from ..targets.classes import as_categories, as_target
from ..targets.language import parse_target
from ..targets.question import Images
from ..validation import check_integer
from ..zoo import load
from ..zoo import models as zoo_models
from .arguments import ALL, METHOD, MODEL, arguments_of
from .batch_commands import (
    choose_target,
    choose_targets,
    named_inputs,
    run_arguments,
    select_methods,
    split_settings,
    split_style,
)
from .console import Screen, UsageError, one_line

SHEET = "sheet.png"
THUMB = 240

FACTS = (
    *("source", "method", "target", "name", "probability", "score", "layer", "residual", "notes", "overlay", "map"),
    *("error", "error_kind"),
)
"""The columns that `explain --json` prints; paths are relative to the output folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectingMapper(ExplainMapper):
    """Results to print and draw after the run, also after an interruption.

    Attributes:
        rows: The rows of all images.
        thumbs: The explanations of each image by method, on a small copy of the image; None without a contact sheet.
    """

    rows: list[Row]
    thumbs: dict[int, dict[str, Explanation]] | None

    def write(self, loaded: LoadedImage, results: ImageResults) -> Iterator[Row]:
        """Write the files of one image, and yield its rows."""
        for row in ExplainMapper.write(self, loaded, results):  # not super(), which classes with slots lack
            explanation = results.explanations.get(row["method"]) if row["overlay"] else None
            self.rows.append(row | {"notes": [note for note in getattr(explanation, "notes", ()) if note]})
            if self.thumbs is not None and isinstance(explanation, Explanation) and loaded.volume is None:
                frame = shrink(loaded.frame(), THUMB)
                sign = self.output.style.sign or explanation.sign
                of_image = self.thumbs.setdefault(row["index"], {})
                of_image[row["method"]] = replace(explanation, frames=(frame,), sign=sign)
            yield row


def explain(arguments: argparse.Namespace, screen: Screen) -> int:
    """Explain the images, print the results, and return the exit code.

    Raises:
        SaliencyError: The command line is invalid. Nothing has been written.
    """
    methods, more_images = methods_and_images(arguments.methods or [METHOD])
    targets = choose_targets(arguments)
    texts = {word: target for word, target in targets.items() if word.startswith("text:")}
    arguments.target = next(iter(targets.values()), None)
    with tempfile.TemporaryDirectory() as scratch:
        found = _find_images(arguments, more_images, texts, Path(scratch))
        require_images(found.entries if arguments.trust or arguments.maps or arguments.sheet else ())
        if arguments.out != Path("-"):
            code = _explain(arguments, methods, found.entries, screen)
            if not arguments.json:
                screen.say_left_out(found.left_out, found.others)
            return code
        more = (arguments.sheet, arguments.maps, arguments.trust, arguments.json)
        if len(found.entries) * len(methods) != 1 or any(more) or screen.is_terminal:
            hint = "give one image and one method, and no --sheet, --maps, --trust or --json"
            raise UsageError(f"-o - writes one overlay to a pipe or file; {hint}")
        arguments.out = Path(scratch)
        code = _explain(arguments, methods, found.entries, Screen(quiet=True))
        for overlay in Path(scratch).rglob("*.png"):
            sys.stdout.buffer.write(overlay.read_bytes())
        return code


def _find_images(arguments: argparse.Namespace, more: Sequence[str], texts: Mapping[str, Any], scratch: Path) -> Found:
    """Find the images. The name "-" denotes the image on standard input, which is written to a file."""
    names = [*arguments.images, *more]
    if "-" in names:
        (scratch / "stdin").write_bytes(sys.stdin.buffer.read())
    files = [str(scratch / "stdin") if name == "-" else name for name in names]
    found = find_images(named_inputs(files) or files, recursive=arguments.recursive)
    entries = [entry._replace(source=entry.source.removeprefix(f"{scratch}/")) for entry in found.entries]
    return found._replace(entries=with_names([row for entry in entries for row in _once_per_text(entry, texts)]))


def _once_per_text(entry: ImageEntry, texts: Mapping[str, Any]) -> list[ImageEntry]:
    """Return an image once for each text, which is its target, and a part of its file names."""
    stem, suffix = os.path.splitext(entry.label)  # noqa: PTH122
    labels = {word: f"{stem}-{word.removeprefix('text:').strip().replace(' ', '_')}{suffix}" for word in texts}
    if len(texts) < 2:  # the target of the run
        return [entry._replace(label=label) for label in labels.values()] or [entry]
    return [entry._replace(label=label, target=texts[word]) for word, label in labels.items()]


def _explain(arguments: argparse.Namespace, methods: list[str], entries: Sequence[ImageEntry], screen: Screen) -> int:
    """Explain the images, and write the overlays to a folder."""
    if not entries:
        raise UsageError("no image was given; try: saliency explain photo.jpg")
    settings, style = split_style(arguments, methods)
    values = vars(arguments) | {"methods": methods, "options": settings, "style": style}
    values |= {"with_manifest": False}
    rows: list[Row] = []
    thumbs: dict[int, dict[str, Explanation]] | None = {} if arguments.sheet else None
    _require_other_files(arguments, methods, entries)
    out = arguments.out.absolute()  # code of the user may change the current folder
    try:
        with screen.progress() as show:
            options, output = NetworkOptions.of(values), OutputOptions.of(values)
            engine = SequentialEngine(one_device(options))
            mapper = CollectingMapper(options=options, out=out, output=output, rows=rows, thumbs=thumbs)
            execute(mapper, Store(out, entries, methods), engine, RunOptions(on_progress=show))
    except SaliencyError:  # an invalid option, for which the first image failed, or a full disk
        rows[:] = [row for row in rows if row["overlay"]]
        raise
    finally:
        name_subjects()
        shown = Screen(quiet=True) if arguments.json else screen
        failures = _print_results(rows, expected_errors(ALL in (arguments.methods or ())), arguments.out, shown)
    if thumbs:
        _write_sheet(list(thumbs.values()), methods, output.style, shown, out)
    if arguments.json:
        print(json.dumps([{name: row[name] for name in FACTS} for row in rows], indent=1))
    return 1 if failures or not any(row["overlay"] for row in rows) else 0


def methods_and_images(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words after --method into methods without duplicates, and images that follow them.

    "all" selects every method. A word that is not a method is an image if it has a suffix or exists.

    Raises:
        MethodError: A word is neither a method nor an image, or no method is given. The message lists the closest
            names.
    """
    names = {*METHODS, ALL}
    images = [word for word in words if word not in names and (word == "-" or "." in word or os.path.exists(word))]  # noqa: PTH110
    methods = select_methods([word for word in words if word not in images] or words)
    return [get_method(name).name for name in methods], images


def one_device(options: NetworkOptions) -> torch.device:
    """Return the device of the options. Raises UsageError if there are several."""
    first, *others = find_devices(options.device, options.model)
    if others:
        raise UsageError(f"--device {options.device}: only saliency batch and saliency evaluate use several devices")
    return first


def _require_other_files(arguments: argparse.Namespace, methods: Sequence[str], entries: Sequence[ImageEntry]) -> None:
    """Raise UsageError if a file would replace one of the images."""
    names = [file_names(entry, method, "png", with_manifest=False) for entry in entries for method in methods]
    protected = {os.path.realpath(entry.path) for entry in entries}
    for file in [*([SHEET] * arguments.sheet), *(file for of_method in names for file in of_method.values())]:
        if os.path.realpath(arguments.out / file) in protected:
            raise UsageError(f"--out {arguments.out}: {file} would replace one of the images; choose another folder")


def _write_sheet(
    thumbs: Sequence[dict[str, Explanation]], methods: Sequence[str], style: OverlayStyle, screen: Screen, out: Path
) -> None:
    """Write the contact sheet with the methods that succeeded on most images, and the images on which all of them did.

    Nothing is written if a method or an image does not exist.
    """
    counts = Counter(method for row in thumbs for method in row)
    methods = [method for method in methods if 2 * counts[method] > len(thumbs)]
    complete = [[row[method] for method in methods] for row in thumbs if row.keys() >= set(methods)]
    if not methods or not complete:
        return
    drawing = {name: getattr(style, name) for name in ("opacity", "colormap", "percentile", "smoothing")}
    with screen.waiting("drawing the contact sheet"):
        save_drawing(contact_sheet(complete, thumb=THUMB, **drawing), inside(out, SHEET))
    screen.say(f"contact sheet: {visible(out / SHEET)}")


def _print_results(rows: Sequence[Row], expected: set[str], out: Path, screen: Screen) -> int:
    """Print the failures on standard error and a table of the other rows, and return the number of failures.

    Errors of the kinds `expected` are not failures.
    """
    failed = [row for row in rows if row["error"] is not None and row["error_kind"] not in expected]
    for row in failed:
        screen.error(sentence(row["source"], row["method"], row["error"]))
    if not rows:
        return 0
    rows = [row for row in rows if row not in failed or row["overlay"]]
    cells: list[tuple[str | Text, ...]] = []
    width = max((len(row["method"]) for row in rows), default=0)
    for _, group in groupby(rows, itemgetter("index")):
        of_image = list(group)
        # The row of a method that does not apply has no target, but all methods explain the same target.
        explained = next((row for row in of_image if row["name"] is not None), of_image[0])
        percent = "" if explained["probability"] is None else f"{100 * explained['probability']:.1f} %"
        about = (visible(Path(explained["source"]).name), explained["name"] or "", percent)
        lines = [(row["method"], _result(row, out)) for row in of_image]
        if screen.is_terminal:  # a list for each image, which fits any width
            screen.say(Text.assemble((about[0], "bold"), (f"  {about[1]}  {percent}", "cyan")))
            for method, result in lines:
                screen.say(Text.assemble(f"  {method:{width}}  ", result))
        cells += [(*about, *line) for line in lines]
    if cells and not screen.is_terminal:
        screen.table(["image", "class", "prob.", "method", "file"], cells)
    _print_totals([row for row in rows if row["overlay"]], len(failed), out, screen)
    for row in rows:
        if row["shares"]:
            shares = ", ".join(f"{name} {round(100 * share)} %" for name, share in row["shares"].items())
            screen.say(f"{visible(Path(row['source']).name)} by {row['method']}: {shares}")
        if row["trust"]:
            screen.say(f"{visible(Path(row['source']).name)} by {row['method']}: {row['trust']['summary']}")
    return len(failed)


def _result(row: Row, out: Path) -> Text:
    return Text(visible(out / row["overlay"])) if row["overlay"] else Text(one_line(row["error"]), "dim")


def _print_totals(written: Sequence[Row], failures: int, out: Path, screen: Screen) -> None:
    screen.say()
    if written:
        images = len({row["source"] for row in written})
        folder = "" if out == Path() else f" in {visible(out)}{os.sep}"
        screen.say(f"{plural(len(written), 'overlay')} of {plural(images, 'image')}{folder}")
        has_boxes = any(row["target_box"] for row in written)
        marks = "green: the explained box" if has_boxes else "rectangle: the crop that the model saw"
        screen.say(Text(f"strong colours: what drove the score; {marks}", "dim"))
    layers = dict.fromkeys(row["layer"] for row in written if row["layer"])
    if layers:
        screen.say(Text(f"layers read by the CAMs: {', '.join(layers)}", "dim"))
    for covered in dict.fromkeys(f"{row['method']}: {row['coverage']}" for row in written if row["coverage"]):
        screen.say(Text(covered, "dim"))
    if failures:
        screen.say(Text(plural(failures, "failure"), "red"))


def trust(arguments: argparse.Namespace, screen: Screen) -> int:
    """Print the card, write it to files, and return the exit code.

    Raises:
        SaliencyError: The command line is invalid. Nothing has been written.
    """
    methods, more_images = methods_and_images(arguments.methods or [METHOD])
    entries = find_images([*arguments.images, *more_images]).entries
    if len(entries) != 1 or len(methods) != 1:
        counts = f"got {plural(len(entries), 'image')} and {plural(len(methods), 'method')}"
        raise UsageError(f"a trust card is of one image and one method, {counts}; saliency explain --trust writes many")
    require_images(entries)
    values = {**vars(arguments), "methods": methods, "target": choose_target(arguments)}
    options, seconds, (entry,) = NetworkOptions.of(values), OutputOptions.of(values).seconds, entries
    files = [file for file in arguments.files if file.name != "-"]
    with screen.waiting("measuring the map"):
        network = Network(options, move_model(load_model(options), one_device(options)))
        for file in files:
            require_writable(file.parent)
        network.require_preprocess(entries)
        loaded = network.load(BatchSlot(0, entry, (methods[0],)))
        chosen = {"others": arguments.others} if arguments.others else {}
        card = trust_card(network.methods[0], loaded, seconds, seed=arguments.seed, draws=arguments.draws, **chosen)
    if isinstance(card, BaseException):
        screen.error(sentence(entry.source, methods[0], error_columns(card)["error"]))
        return 1
    if len(files) < len(arguments.files):
        print(card.to_json(), end="")
    else:
        screen.show(card)
    for file in files:
        card.save(file)
        if len(files) == len(arguments.files):
            screen.say(f"written: {visible(file)}")
    return 0


def evaluate(arguments: argparse.Namespace, screen: Screen) -> int:
    """Measure the images, print the comparison, and return the exit code."""
    values = run_arguments(evaluate_folder, arguments)
    names = ",".join(arguments.metrics or ("deletion", "insertion")).split(",")
    classes = [METRICS.find(name) for name in dict.fromkeys(names)]
    of_metrics = dict.fromkeys(option for cls in classes for option in declared_options(cls))
    values["options"], settings = split_settings(arguments.options, values["methods"], "metric", of_metrics)
    values["metrics"] = [
        cls(**{name: settings[name] for name in declared_options(cls) if name in settings}) for cls in classes
    ]
    values["boxes" if isinstance(arguments.objects, dict) else "masks"] = arguments.objects
    with screen.progress() as show:
        comparison = evaluate_folder(**values, on_progress=show)
    if comparison.page is not None:
        screen.show(Table(comparison.rows, comparison.columns, notes=comparison.notes))
        screen.say(f"table: {visible(comparison.page)}")
        if arguments.card:
            screen.say(f"model card: {visible(comparison.save(arguments.out / 'card.md'))}")
    expected = expected_errors(ALL in (arguments.methods or ()))
    failures = [row for row in comparison.failures if row["error_kind"] not in expected]
    for row in failures:
        screen.error(sentence(row["source"], row["method"], row["error"]))
    screen.say_left_out(comparison.left_out, comparison.others)
    if failures:
        failed = plural(len({row["index"] for row in failures}), "image")
        screen.say(Text(f"{failed} with failures; re-run to try again", "red"))
    return 1 if failures or comparison.page is None else 0


def export(arguments: argparse.Namespace, screen: Screen) -> int:
    """Write a model and its explanation as one program, and return the exit code."""
    from ..program.export import export

    methods, more = methods_and_images(arguments.methods or [METHOD])
    if len(methods) != 1 or more:
        raise UsageError("--method takes one method: a program has one map")
    target = choose_target(arguments)
    options = NetworkOptions.of({**vars(arguments), "methods": methods, "target": target})
    with screen.waiting(f"exporting {options.model}"):
        (method,) = create_methods(options, load_model(options))
        path = export(method, arguments.file, arguments.image or noise(), target=target)
    screen.say(f"written: {visible(path)}")
    return 0


def serve(arguments: argparse.Namespace, screen: Screen) -> int:
    """Show the page of the explorer until Ctrl-C is pressed, and return the exit code."""
    from ..explorer.server import MODEL_THREAD, serve

    methods, more = methods_and_images(arguments.methods or [METHOD])
    if len(methods) != 1 or more:
        raise UsageError("--method takes one method; the page offers all others")
    words = arguments.folder
    if named_inputs([arguments.model]):
        raise UsageError(f"{arguments.model} is an input; the model comes first, as in mine.py:make {arguments.model}")
    if not words and os.path.isdir(arguments.model):  # noqa: PTH112 - unlike Path, never raises
        arguments.model, words = MODEL, [arguments.model]
    paths = [word if "://" in word else Path(word).absolute() for word in words]  # a model may change the folder
    arguments.folder = named_inputs(words) or (paths[0] if len(paths) == 1 else paths)
    values = arguments_of(serve, arguments) | {"method": methods[0], "options": dict(arguments.options or ())}
    if arguments.compile:
        screen.say("compiling the method, up to some minutes")
    serve(**values)
    if any(thread.name == MODEL_THREAD for thread in threading.enumerate()):
        os._exit(0)  # the model hangs: Python would wait for its thread, or abort
    return 0


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
