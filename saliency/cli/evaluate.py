"""`saliency evaluate`: measure methods by metrics on a folder of images, and write a table that compares them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.text import Text

from ..attribution.base import Attribution
from ..attribution.options import declared_options
from ..attribution.spellings import option_hint
from ..batch.errors import Failure, sentence, writing_to
from ..batch.listing import ImageEntry, merge_listing
from ..batch.network import Network
from ..batch.output_folder import locked
from ..batch.run import require_sensible_options
from ..batch.run_options import RunOptions
from ..batch.sources import find_images
from ..errors import ImageError, MethodError, plural, visible
from ..inspection.comparison import Comparison, Result, measure_image
from ..inspection.tables import Table
from ..io.atomic_write import atomic_write
from ..metrics.base import Metric, get_metric
from ..targets.embedding import text
from .batch import read_sources, select_methods
from .console import Screen
from .explain import open_network
from .options import ALL, METHOD, arguments_of

FORMAT = "saliency evaluate 2"
METRICS = ("deletion", "insertion")
"""The metrics by default."""

Outcome = list[Result] | Exception
"""Results or error of one method for one image."""


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Measure the images, print and write the comparison, and return the exit code."""
    images = _find_images(arguments, arguments.sources, targets=arguments.targets)[: arguments.limit]
    evaluation = Evaluation.of(arguments, screen)
    results: list[Result] = []
    failed: dict[str, list[str]] = {}
    with locked(arguments.out), screen.progress() as show:
        for index, image in enumerate(images):
            show(index, len(images), len(failed))
            screen.subject = visible(image.label)
            outcomes = evaluation.measure(image)
            if not results and image.target is None:
                require_sensible_options(evaluation.options, [_failure(image, each) for each in outcomes])
            results += [result for each in outcomes if not isinstance(each, Exception) for result in each]
            lines = evaluation.describe_failures(image, outcomes)
            failed |= {image.name: lines} if lines else {}
        screen.subject = ""
        if results:
            _write(Comparison(results), arguments.out, screen)
    for line in chain.from_iterable(failed.values()):
        screen.error(line)
    if failed:
        screen.say(Text(f"{plural(len(failed), 'image')} with failures; re-run to try again", "red"))
    return 1 if failed or not results else 0


def _failure(image: ImageEntry, outcome: Outcome) -> Failure | None:
    return Failure.of(outcome, image.source) if isinstance(outcome, Exception) else None


def _find_images(arguments: argparse.Namespace, words: list[str], **options: Any) -> list[ImageEntry]:
    images = find_images(read_sources(words), recursive=arguments.recursive, out=arguments.out, **options)
    return merge_listing([], images).images


def _create_metrics(names: Sequence[str], settings: Mapping[str, Any]) -> list[Metric]:
    """Create the metrics, each with the options that it accepts."""
    classes = [get_metric(name) for name in dict.fromkeys(names)]
    known = list(dict.fromkeys(option for cls in classes for option in declared_options(cls)))
    for name in settings:
        if name not in known:
            raise MethodError(f'no option "{name}" of {", ".join(names)}{option_hint(name, known)}')
    return [cls(**{name: settings[name] for name in declared_options(cls) if name in settings}) for cls in classes]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is measured, and where the results are written.

    Attributes:
        options: The model, the methods and the target.
        network: The model with its methods.
        metrics: The metrics.
        masks: The masks by the names of the images; None without masks.
        out: The output folder.
        settings: What determines the results of each method, as JSON values.
        expected: The kind of error that is not a failure: with --method all, of a method that does not apply.
    """

    options: RunOptions
    network: Network
    metrics: Sequence[Metric]
    masks: Mapping[str, ImageEntry] | None
    out: Path
    settings: Mapping[str, Mapping[str, Any]]
    expected: str

    @classmethod
    def of(cls, arguments: argparse.Namespace, screen: Screen) -> Evaluation:
        """Load what a command line names, and create the output folder."""
        given = arguments_of(RunOptions, arguments) | {"methods": select_methods(arguments.methods or [METHOD])}
        if arguments.texts:
            given["target"] = text(arguments.texts[0], against=arguments.texts[1:])
        options = RunOptions(**given | {"options": dict(arguments.settings or ())})
        metrics = _create_metrics(arguments.metrics or METRICS, dict(arguments.metric_settings or ()))
        masks = _find_images(arguments, [arguments.masks]) if arguments.masks else None
        named = None if masks is None else {mask.name: mask for mask in masks}
        about = {"format": FORMAT, "metrics": {each.name: dict(each.settings) for each in metrics}}
        settings = {name: replace(options, methods=[name]).fingerprint() | about for name in options.methods}
        network = open_network(options, arguments.device, screen)
        with writing_to(arguments.out):
            arguments.out.mkdir(parents=True, exist_ok=True)
        expected = "NotApplicableError" if ALL in (arguments.methods or ()) else ""
        return cls(options, network, metrics, named, arguments.out, settings, expected)

    def measure(self, image: ImageEntry) -> list[Outcome]:
        """Return the results or the error of each method for one image.

        The results of an earlier run are read again if nothing has changed that determines them.
        """
        mask = (self.masks or {}).get(image.name)
        files = [[each.path, each.offset, *each.stamp] for each in (image, mask) if each is not None]
        outcomes: list[Outcome] = []
        for method in self.network.methods:
            key = json.loads(json.dumps([self.settings[method.name], files, image.target]))
            path = self.out / "results" / f"{image.name}.{method.name}.json"
            results = _read_results(path, key)
            if results is None:
                try:
                    results = self._measure_method(method, image, mask)
                except Exception as error:  # noqa: BLE001 - any error is a failure of this image and method only
                    outcomes.append(error)
                    continue
                with writing_to(self.out):
                    _write_results(path, key, results)
            outcomes.append(results)
        return outcomes

    def describe_failures(self, image: ImageEntry, outcomes: Sequence[Outcome]) -> list[str]:
        """Return one line for each failure; an image that cannot be read fails once, not with each method."""
        failures = [(name, _failure(image, each)) for name, each in zip(self.options.methods, outcomes, strict=True)]
        lines = [
            sentence(image.source, None if failure.kind == "ImageError" else name, failure.reason)
            for name, failure in failures
            if failure is not None and failure.kind != self.expected
        ]
        return list(dict.fromkeys(lines))

    def _measure_method(self, method: Attribution, image: ImageEntry, mask: ImageEntry | None) -> list[Result]:
        loaded = self.network.load(image)
        if loaded.failure is not None or loaded.picture is None:
            raise loaded.failure or ImageError("the image cannot be read")
        if self.masks is not None and mask is None:
            raise ImageError(f'has no mask: no image in the folder of --masks is called "{image.name}"')
        shown = None if mask is None else mask.open()
        names = image.name, method.name
        return measure_image(*names, method, loaded.picture, loaded.target, self.metrics, shown, progress=False)


def _read_results(path: Path, key: list[Any]) -> list[Result] | None:
    """Return the results in a file; None if there is none, or if it has another key."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return [Result(**each) for each in content["results"]] if content["key"] == key else None


def _write_results(path: Path, key: list[Any], results: Sequence[Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"key": key, "results": [asdict(result) for result in results]}
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", "ascii")


def _write(comparison: Comparison, out: Path, screen: Screen) -> None:
    """Print the table, and write it with the differences and the value of each image."""
    screen.say(str(Table(comparison.rows, comparison.columns)), cut=True)
    screen.say("\n".join(["", *comparison.notes]))
    with writing_to(out):
        comparison.save(out / "evaluation.json")
        page = comparison.save(out / "evaluation.html")
    screen.say(f"table: {visible(page)}")
