"""The commands on batch folders: `saliency batch`, and `report`, which needs no model.

Modules that import torch are imported later, since a finished run needs none of them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from rich.text import Text

from ..batch import OverlayStyle, Summary, batch
from ..batch.failures import sentence
from ..batch.options import expected_errors
from ..batch.sources import NAMED
from ..batch.store import MANIFEST, manifest_csv
from ..errors import MethodError, plural, visible
from ..validation import check_number
from .arguments import ALL, METHOD, arguments_of
from .console import Screen, UsageError, one_line


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Run the batch, print its summary, and return the exit code."""
    options = run_arguments(batch, arguments)
    options["options"], options["style"] = split_style(arguments, options["methods"])
    with screen.progress() as show:
        summary = batch(**options, command=["saliency", *sys.argv[1:]], on_progress=show)
    expected = expected_errors(ALL in (arguments.methods or ()), arguments.detections)
    _print_summary(summary, screen, "image" if arguments.detections is None else "detection", expected)
    return 1 if summary.kinds.keys() - expected else 0


def run_arguments(function: Callable[..., object], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the parsed arguments of `batch` or `evaluate`, without the values of --set."""
    words = list(read_sources(arguments.sources))
    return arguments_of(function, arguments) | {
        "sources": named_inputs(words) or words,
        "methods": select_methods(arguments.methods or [METHOD]),
        "target": choose_target(arguments),
    }


def choose_target(arguments: argparse.Namespace) -> Any:
    """Return the target of the parsed arguments, the first of several texts. Raises as `choose_targets`."""
    return next(iter(choose_targets(arguments).values()), None)


def choose_targets(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the targets of the parsed arguments by their words. Each of several texts is explained against the others.

    Raises:
        UsageError: There are several targets that are not all texts.
        TargetError: One of several targets is invalid.
    """
    words = dict.fromkeys(arguments.target or ())
    if len(words) < 2:
        return {word: word for word in words}
    from ..targets.language import parse_target
    from ..targets.similarity import TextSimilarity

    parsed = {word: parse_target(word) for word in words}
    texts = {word: target for word, target in parsed.items() if isinstance(target, TextSimilarity)}
    if len(texts) < len(words):
        hint = 'several targets are possible only as texts, as in --target "text:a dog" "text:a cat"'
        raise UsageError(f"got the targets {', '.join(words)}; {hint}")
    return {
        word: replace(target, against=tuple(other.prompt for other in texts.values() if other is not target))
        for word, target in texts.items()
    }


def split_style(arguments: argparse.Namespace, methods: Sequence[str]) -> tuple[dict[str, Any], OverlayStyle]:
    """Return the values of --set for the methods, and the style of the overlays.

    Raises:
        MethodError, UsageError: As `split_settings`.
        BatchError, RenderError: A value of the style is invalid.
    """
    names = [name for name in signature(OverlayStyle).parameters if name != "format"]
    options, style = split_settings(arguments.options, methods, "overlay", names)
    values: dict[str, Any] = {name: None if value == "none" else value for name, value in style.items()}
    return options, OverlayStyle(**values, **arguments_of(OverlayStyle, arguments))


def split_settings(
    settings: Sequence[tuple[str, Any]], methods: Sequence[str], owner: str, names: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide the values of --set into the options of the methods and the options of the overlay or the metrics.

    Args:
        settings: Pairs of a name and a value. The name may begin with its owner, as in "metric.steps".
        methods: Names of the methods.
        owner: "overlay" or "metric".
        names: Names of the options of the overlay or the metrics.

    Raises:
        MethodError: An option does not exist.
        UsageError: Both have an option of the name.
    """
    split: dict[str, dict[str, Any]] = {"method": {}, owner: {}}
    if settings:
        from ..aliases import option_hint
        from ..methods import METHODS

        of_methods = dict.fromkeys(name for method in methods for name in METHODS.find(method).options())
        options = {"method": of_methods, owner: names}
        for setting, value in settings:
            prefix, _, name = setting.rpartition(".")
            owners = [owner for owner, names in options.items() if name in names and prefix in ("", owner)]
            if not owners:
                asked = "any method" if len(methods) == len(METHODS) else ", ".join(methods)
                hint = option_hint(name, [*of_methods, *names])
                raise MethodError(f'no option "{setting}" of {asked} or the {owner}{hint}')
            if len(owners) > 1:
                hint = f"write method.{setting} or {owner}.{setting}"
                raise UsageError(f"--set {setting}: a method and the {owner} have this option; {hint}")
            split[owners[0]][name] = value
    return split["method"], split[owner]


def read_sources(words: list[str]) -> Iterator[str]:
    """Yield the sources. The word "-" denotes the paths on standard input, one per line or separated by NUL."""
    for word in words:
        if word != "-":
            yield word
            continue
        data = sys.stdin.buffer.read()
        yield from map(os.fsdecode, filter(None, data.split(b"\0") if b"\0" in data else data.splitlines()))


def named_inputs(words: Sequence[str]) -> dict[str, str]:
    """Return the inputs of a model from words such as rgb=a.png; none if a word is an image by itself."""
    named: dict[str, str] = {}
    for word in words:
        name, mark, value = word.partition("=")
        if not mark or not NAMED.fullmatch(name) or os.path.exists(word):  # noqa: PTH110
            return {}
        named[name] = value
    return named


def select_methods(names: Sequence[str]) -> list[str]:
    """Return the methods given by --method, also as a,b, without duplicates. "all" selects every method."""
    every: Sequence[str] = ()
    if ALL in names:
        from ..methods import METHODS

        every = list(METHODS)
    return list(dict.fromkeys(method for name in names for method in (every if name == ALL else name.split(","))))


def _print_summary(summary: Summary, screen: Screen, counted: str, expected: set[str]) -> None:
    """Print the failures, the number of images or detections, the speed and the path of the page."""
    for source, method, why in summary.failures:
        screen.error(sentence(source, method, why))
    more = summary.kinds.total() - len(summary.failures)
    if summary.failures and more > 0:
        screen.error(f"{more} more failures are in {summary.folder / MANIFEST}")
    done = f"{summary.done} of {plural(summary.images, counted)} done"
    if summary.fresh:
        minutes, seconds = divmod(summary.seconds, 60)
        duration = f"{minutes:.0f} min {seconds:.0f} s" if minutes else f"{seconds:.1f} s"
        speed = f"{summary.fresh / max(summary.seconds, 1e-9):.1f} per second"
        screen.say(f"{done}, {summary.fresh} in this run: {duration}, {speed}")
    else:
        screen.say(f"{done} by earlier runs; nothing to do")
    if summary.changed:
        screen.say(f"changed since the last run and explained again: {plural(summary.changed, 'image')}")
    if summary.removed:
        named = ", ".join(map(visible, summary.removed[:3])) + (", ..." if len(summary.removed) > 3 else "")
        screen.say(f"removed since the last run, overlays kept: {plural(len(summary.removed), 'image')}, {named}")
    screen.say_left_out(summary.left_out, summary.others)
    if summary.repeated:
        images, error = plural(summary.repeated.total(), "image"), one_line(next(iter(summary.repeated)))
        screen.say(f"batches repeated in parts after an error: {images} (column repeated of manifest.jsonl), {error}")
    for method, lacking in summary.unfinished.items():
        screen.say(f"{plural(lacking, 'image')} without {method}; to complete: --method {method}")
    if summary.failed:
        kinds = ", ".join(f"{number} {kind}" for kind, number in summary.kinds.most_common())
        text = f"{plural(summary.failed, counted)} with failures: {kinds}; --retry tries them again"
        screen.say(Text(text, "red" if summary.kinds.keys() - expected else ""))
    screen.say(f"gallery page: {visible(summary.page)}")


def report(arguments: argparse.Namespace, screen: Screen) -> int:
    """Rewrite the gallery page of a batch folder, and write its table and its labels."""
    from ..batch.report import report as write_page

    with screen.waiting("writing the page"):
        files = [write_page(arguments.folder, title=arguments.title)]
        if arguments.csv:
            files.append(manifest_csv(arguments.folder))
        if arguments.fiftyone is not None:
            from ..batch.runs import write_labels

            labels = write_labels(arguments.folder, arguments.fiftyone)
            screen.say(f"written: {plural(labels, 'map')} to the dataset {visible(arguments.fiftyone)} of FiftyOne")
    for file in files:
        screen.say(f"written: {visible(file)}")
    return 0


def compare(arguments: argparse.Namespace, screen: Screen) -> int:
    """Compare two batch folders, write the results, and return the exit code."""
    least = arguments.fail_under
    if least is not None:
        check_number("--fail-under", least, least=0, most=1)
        if not (arguments.same or arguments.mirrored):
            raise UsageError("--fail-under needs a yardstick of unchanged maps: add --null, or a run with another seed")
    from ..batch.runs import FEWEST, compare_runs

    with screen.waiting("comparing the maps"):
        comparison = compare_runs(**arguments_of(compare_runs, arguments))
    if least is not None and comparison.few:
        raise UsageError(f"--fail-under needs {FEWEST} images by each method, of which {comparison.few[0]} has fewer")
    screen.show(comparison)
    screen.say(f"written: {visible(comparison.save(arguments.out))}")
    return int(comparison.unchanged < (least or 0))


def groups(arguments: argparse.Namespace, screen: Screen) -> int:
    """Find groups of the maps of a batch folder, write them, and return the exit code."""
    from ..batch.groups import groups as find_groups
    from ..batch.groups import write_groups

    with screen.waiting("grouping the maps"):
        table = find_groups(**arguments_of(find_groups, arguments))
    screen.show(table)
    screen.say(f"written: {visible(write_groups(table, arguments.folder))}")
    return 0
