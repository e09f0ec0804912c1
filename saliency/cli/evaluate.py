"""`saliency evaluate`: measure methods by metrics on a folder of images, and write a table that compares them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.text import Text

from ..attribution.aliases import option_hint
from ..attribution.base import Attribution
from ..attribution.options import declared_options
from ..batch.engines import RunContext, open_engine
from ..batch.failures import Failure, sentence, writing_to
from ..batch.listing import ImageEntry, merge_listing
from ..batch.manifest import Row
from ..batch.network import LoadedImage, Network, Task, load_model
from ..batch.output_folder import ABOUT, EVALUATION, RESULTS, OutputFolder, locked
from ..batch.report import report
from ..batch.run import interruption, require_sensible_options
from ..batch.run_options import RunOptions
from ..batch.sources import find_images
from ..errors import ImageError, MethodError, plural, visible
from ..evaluation.comparison import Comparison, Result, measure_image
from ..evaluation.metrics.base import Metric, SharedResults, get_metric
from ..io.atomic_write import atomic_write
from ..tables import Table
from ..targets.embedding import text
from .arguments import ALL, METHOD, arguments_of
from .batch_commands import read_sources, select_methods
from .console import Screen

FORMAT = "saliency evaluate 2"
METRICS = ("deletion", "insertion")
"""The metrics by default."""

Outcome = list[Result] | Failure
"""Results or failure of one method for one image."""


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Measure the images, print and write the comparison, and return the exit code."""
    listing, left_out = find_images(
        read_sources(arguments.sources), recursive=arguments.recursive, targets=arguments.targets
    )
    images = merge_listing([], listing).images[: arguments.limit]
    evaluation = Evaluation.of(arguments, screen)
    with locked(arguments.out):
        OutputFolder(arguments.out).remove_temporary_files()
        outcomes = [evaluation.read(image) for image in images]
        _measure_missing(evaluation, images, outcomes, arguments, screen)
        ordered = [known[name] for known in outcomes for name in evaluation.options.methods]
        results = [result for outcome in ordered if not isinstance(outcome, Failure) for result in outcome]
        if results:
            _write(Comparison(results), arguments.out, screen)
    failures = [evaluation.describe_failures(*pair) for pair in zip(images, outcomes, strict=True)]
    for line in chain.from_iterable(failures):
        screen.error(line)
    failed = sum(map(bool, failures))
    screen.say_left_out(left_out)
    if failed:
        screen.say(Text(f"{plural(failed, 'image')} with failures; re-run to try again", "red"))
    return 1 if failed or not results else 0


def _measure_missing(
    evaluation: Evaluation,
    images: Sequence[ImageEntry],
    outcomes: Sequence[dict[str, Outcome]],
    arguments: argparse.Namespace,
    screen: Screen,
) -> None:
    """Add the outcome of each image and method without one.

    Raises:
        KeyboardInterrupt: As for `Run.execute`. Methods in progress are finished first.
    """
    missing = [[name for name in evaluation.options.methods if name not in known] for known in outcomes]
    groups = [[Task(index, images[index], tuple(names))] for index, names in enumerate(missing) if names]
    if not groups:
        return
    done, failed = len(images) - len(groups), 0
    engine = open_engine(arguments.engine, arguments.device, arguments.workers, evaluation.model)
    with engine as opened, screen.progress() as show, interruption() as is_interrupted:
        show(done, len(images), failed)
        context = replace(evaluation, is_interrupted=is_interrupted)
        with closing(opened.execute(context, groups, is_interrupted)) as measured:
            for rows in measured:
                index, fresh = rows[0]["index"], {row["method"]: row["outcome"] for row in rows}
                failures = [each if isinstance(each, Failure) else None for each in fresh.values()]
                is_first = all(isinstance(each, Failure) for known in outcomes for each in known.values())
                if is_first and images[index].target is None:
                    require_sensible_options(evaluation.options, failures)
                outcomes[index].update(fresh)
                done, failed = done + 1, failed + any(failures)
                show(done, len(images), failed)
        if is_interrupted():
            raise KeyboardInterrupt("finished methods are kept; re-run to resume")


def _create_metrics(names: Sequence[str], settings: Mapping[str, Any]) -> list[Metric]:
    """Create the metrics, each with the options that it accepts."""
    classes = [get_metric(name) for name in dict.fromkeys(names)]
    known = list(dict.fromkeys(option for cls in classes for option in declared_options(cls)))
    for name in settings:
        if name not in known:
            raise MethodError(f'no option "{name}" of {", ".join(names)}{option_hint(name, known)}')
    return [cls(**{name: settings[name] for name in declared_options(cls) if name in settings}) for cls in classes]


@dataclass(frozen=True, slots=True)
class Evaluation(RunContext):
    """Metrics and output paths of an evaluation.

    Attributes:
        metrics: The metrics.
        masks: The masks by the names of the images; None without masks.
        boxes: The boxes by the names of the files; None without boxes.
        settings: The settings that determine the results of each method, as JSON values.
        expected: The kind of error that is not a failure: with --method all, of a method that does not apply.
        is_interrupted: Returns whether to start no further method.
    """

    metrics: Sequence[Metric]
    masks: Mapping[str, ImageEntry] | None
    boxes: Mapping[str, Any] | None
    settings: Mapping[str, Mapping[str, Any]]
    expected: str
    is_interrupted: Callable[[], bool] = bool

    @classmethod
    def of(cls, arguments: argparse.Namespace, screen: Screen) -> Evaluation:
        """Load the files and the model of a command line, and create the output folder."""
        given = arguments_of(RunOptions, arguments) | {"methods": select_methods(arguments.methods or [METHOD])}
        if arguments.texts:
            given["target"] = text(arguments.texts[0], against=arguments.texts[1:])
        options = RunOptions(**given | {"options": dict(arguments.settings or ())})
        metrics = _create_metrics(arguments.metrics or METRICS, dict(arguments.metric_settings or ()))
        named = None
        if arguments.masks:
            masks = find_images([arguments.masks], recursive=arguments.recursive).images
            named = {mask.name: mask for mask in merge_listing([], masks).images}
        about = {"format": FORMAT, "metrics": {each.name: dict(each.settings) for each in metrics}}
        settings = {name: replace(options, methods=[name]).fingerprint() | about for name in options.methods}
        with screen.waiting(f"loading {options.model}"):
            model = load_model(options)
            Network(options, model)  # raises an error for a wrong option before anything is written
        with writing_to(arguments.out):
            arguments.out.mkdir(parents=True, exist_ok=True)
        expected = "NotApplicableError" if ALL in (arguments.methods or ()) else ""
        return cls(options, arguments.out, model, metrics, named, arguments.boxes, settings, expected)

    def read(self, image: ImageEntry) -> dict[str, Outcome]:
        """Return the results of earlier runs for one image, by method, if all their settings are the same."""
        read = {name: _read_results(*self._file(image, name)) for name in self.options.methods}
        return {name: results for name, results in read.items() if results is not None}

    def _file(self, image: ImageEntry, method: str) -> tuple[Path, list[Any]]:
        """Return the file of the results, and the settings that determine them, as JSON values."""
        mask, boxes = self._object(image)
        files = [[each.path, each.offset, *each.stamp] for each in (image, mask) if each is not None]
        key = [self.settings[method], files, image.target, boxes]
        return self.out / RESULTS / f"{image.name}.{method}.json", json.loads(json.dumps(key))

    def _object(self, image: ImageEntry) -> tuple[ImageEntry | None, Any]:
        """Return the mask and the boxes of an image; None if it has none."""
        file = "/".join((*image.folder, image.label))
        return (self.masks or {}).get(image.name), (self.boxes or {}).get(file)

    def explain(self, network: Network, group: Sequence[Task], loaded: Sequence[LoadedImage]) -> list[list[Row]]:
        """Measure each image by the methods of its task, and write the results."""
        return [self._measure(network.methods, *image) for image in zip(group, loaded, strict=True)]

    def finish(self, task: Task, loaded: LoadedImage, results: list[Row]) -> list[Row]:
        """Return the outcomes, which are written already."""
        return results

    def _measure(self, methods: Sequence[Attribution], task: Task, loaded: LoadedImage) -> list[Row]:
        rows, shared = [], SharedResults()
        for method in methods:
            if method.name not in task.methods or self.is_interrupted():
                continue
            outcome: Outcome
            try:
                outcome = self._measure_method(method, task.image, loaded, shared)
            except Exception as error:  # noqa: BLE001 - any error is a failure of this image and method only
                outcome = Failure.of(error, task.image.source)
            else:
                with writing_to(self.out):
                    _write_results(*self._file(task.image, method.name), outcome)
            rows.append({"index": task.index, "method": method.name, "outcome": outcome})
        return rows

    def _measure_method(
        self, method: Attribution, image: ImageEntry, loaded: LoadedImage, shared: SharedResults
    ) -> list[Result]:
        if loaded.failure is not None:
            raise loaded.failure
        mask, boxes = self._object(image)
        if self.masks is not None and mask is None:
            raise ImageError(f'has no mask: no image in the folder of --masks is called "{image.name}"')
        if self.boxes is not None and boxes is None:
            raise ImageError("has no box: the file of --boxes does not name it")
        about = image.name, method.name, method, loaded.picture or image.open(), loaded.target
        shown = None if mask is None else mask.open()
        return measure_image(*about, self.metrics, shown, boxes, shared=shared, progress=False)

    def describe_failures(self, image: ImageEntry, outcomes: Mapping[str, Outcome]) -> list[str]:
        """Return one line for each failure; an image that cannot be read fails once, not with each method."""
        lines = [
            sentence(image.source, None if outcome.kind == "ImageError" else name, outcome.reason)
            for name, outcome in outcomes.items()
            if isinstance(outcome, Failure) and outcome.kind != self.expected
        ]
        return list(dict.fromkeys(lines))


def _read_results(path: Path, key: list[Any]) -> list[Result] | None:
    """Return the results in a file; None if there is none, or if it is damaged or has another key."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return [Result(**each) for each in content["results"]] if content["key"] == key else None


def _write_results(path: Path, key: list[Any], results: Sequence[Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"key": key, "results": [asdict(result) for result in results]}
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", "ascii")


def _write(comparison: Comparison, out: Path, screen: Screen) -> None:
    """Print the table, and write it with the differences and the value of each image, to the page of a batch run."""
    screen.say(str(Table(comparison.rows, comparison.columns)), cut=True)
    screen.say("\n".join(["", *comparison.notes]))
    with writing_to(out):
        comparison.save(out / EVALUATION)
        page = report(out) if (out / ABOUT).is_file() else comparison.save(out / "evaluation.html")
    screen.say(f"table: {visible(page)}")
