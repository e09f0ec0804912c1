"""Evaluate methods on folders of images: measure each image by metrics, and compare the methods. A run resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from ..attribution.base import Attribution
from ..attribution.options import declared_options
from ..errors import ImageError
from ..evaluation.comparison import Comparison, MetricResult, measure_image, unique_names
from ..evaluation.metrics.base import Metric, SharedResults, resolve_metrics
from ..evaluation.metrics.faithfulness import Deletion, PerturbationMetric
from ..io.atomic_write import inside
from ..methods.baselines import GivenImages
from ..model.call import name_subjects
from ..validation import described
from .drawing import failure_columns, write_file
from .engines import Mapper, execute, open_engine
from .failures import BatchError, attempt, writing_to
from .listing import ImageEntry, merge_listing, names_in
from .network import LoadedImage, Network, other_images
from .options import NetworkOptions, OutputOptions, Progress, RunOptions, describe, fingerprint
from .report import report
from .sources import Paths, find_images, require_images
from .store import ABOUT, EVALUATION, EVALUATION_PAGE, RESULTS, Row, Store, locked, read_json, remove_temporary_files

if TYPE_CHECKING:
    from torch import nn

    from ..io.preprocess import PreprocessLike, Whole
    from ..targets.question import Target

FORMAT = "saliency evaluate 2"
RESULT: dict[str, Any] = dict.fromkeys(("image", "method", "metric"), str)
RESULT |= {"value": float | None, "seconds": float, "controls": dict, "curves": dict}
RESULT |= {"higher_is_better": bool | None, "p": float | None}
"""The shape of a stored `MetricResult`."""


class FolderComparison(Comparison):
    """Comparison of methods on images of files.

    Attributes:
        failures: A row for each failure, with its source, method, error and error_kind. The method is None if the image
            failed for all methods.
        left_out: Number of images in the sources that the toolkit wrote, such as overlays.
        others: Number of other files in the folders of the sources, by suffix.
        page: The page with the table; None if there are no results.
    """

    failures: Sequence[Row] = ()
    left_out: int = 0
    others: Mapping[str, int] = MappingProxyType({})
    page: Path | None = None


def evaluate(
    sources: Paths,
    out: str | os.PathLike[str],
    model: str | nn.Module = "efficientnet_lite0",
    methods: Sequence[str] = ("grad_cam",),
    metrics: str | Metric | Sequence[str | Metric] = ("deletion", "insertion"),
    *,
    masks: Paths | None = None,
    boxes: Mapping[str, Any] | None = None,
    weights: str | None = "default",
    preprocess: PreprocessLike | None = None,
    categories: Sequence[str] | Mapping[int, str] | Mapping[str, int] | None = None,
    layer: str | None = None,
    options: Mapping[str, Any] | None = None,
    whole: Whole = False,
    target: int | str | Target | None = None,
    targets: str | os.PathLike[str] | None = None,
    recursive: bool = False,
    engine: Literal["local", "ray"] = "local",
    device: str = "auto",
    compile: bool = False,
    workers: int | None = None,
    limit: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> FolderComparison:
    """Compare methods by metrics on the images of folders, and write the results to a folder.

    Repeat the same call to resume an interrupted run, or call it with more methods or images to add them. An image,
    mask, box, option or checkpoint that has changed is measured again. An image that fails is in `failures` of the
    result, never affects the others, and is tried again by the next run.

    The output folder contains `evaluation.json`, with the table, the differences, the mean curves and the value of each
    image, the table as `evaluation.html`, and `results/` with the values of each image and method. In the output folder
    of `saliency.batch`, the table is a tab of its page instead.

    Args:
        sources: Folders, files, patterns, lists and shards, as for `saliency.batch`.
        out: The output folder; created if it does not exist.
        model: A name that `saliency.load` accepts, or a model.
        methods: Names in the registry.
        metrics: Metrics such as `saliency.metrics.Deletion(steps=28)`, or their names.
        masks: Folders, files or patterns of masks with the names of the images, in which the object is not black.
        boxes: Instead of masks, the box (x0, y0, x1, y1) of the object, or several boxes, by the name of the file, such
            as "cat.jpg", or "pets/cat.jpg" in a subfolder; in pixels of the upright image.
        weights: As for `saliency.load`.
        preprocess: Preprocessing of the images; None for the model's own.
        categories: Class names; None for the model's own.
        layer: The layer, for the methods that read a layer.
        options: Options of the methods, applied to each method that has them.
        whole: Whether the model sees the whole image instead of a crop, as for every method: False, True or "aspect".
        target: Class index or name, or a target such as "box:0", for all images without a target of their own; None for
            the top class of each image.
        targets: File with paths and targets, for images that `sources` finds without a target.
        recursive: Whether subfolders are searched, also for masks.
        engine: "local" for this machine, "ray" for a cluster, as for `saliency.batch`.
        device: "auto", "cpu", "cuda", or several as in "cuda:0,cuda:1".
        compile: Whether the methods are compiled before the first image, as for `saliency.batch`.
        workers: Number of images that are measured in parallel on a CPU; by default one per core.
        limit: Largest number of images to measure, in the order of the sources.
        on_progress: Called with a `Progress` after every image.

    Returns:
        The comparison, as from `saliency.compare`, with the failures. Images are named by their paths without
        suffix, or as in the batch run of the folder.

    Raises:
        BatchError: There is no image or no mask, the folder is in use, or an option is invalid.
        StoppedError: The folder cannot be written to.
        SaliencyError: The model, a method, a metric, a layer or the target of all images does not exist.
        KeyboardInterrupt: Ctrl-C was pressed. Methods in progress are finished first, and their values are kept.
    """
    arguments = locals()
    network_options, run = NetworkOptions.of(arguments), RunOptions.of(arguments)
    entries, left_out, others = find_images(sources, recursive=recursive, targets=targets)
    require_images(entries)
    metric_list, by_name = resolve_metrics(metrics), None
    if not isinstance(boxes, Mapping | None):
        raise BatchError(f'boxes={described(boxes)}: expected the boxes by file, as in {{"cat.jpg": (x0, y0, x1, y1)}}')
    if masks is not None:
        try:
            listing = merge_listing([], find_images(masks, recursive=recursive).entries)
        except BatchError as error:
            raise BatchError(f"masks: {error}") from error
        by_name = {mask.name: mask for mask in listing.entries}
    names = unique_names(metric_list)
    about = {"format": FORMAT, "metrics": dict(zip(names, map(_all_settings, metric_list), strict=True))}
    values = fingerprint(network_options, OutputOptions()).items()
    settings = {
        method: {name: value for name, value in values if name.partition(" of ")[2] in ("", method)} | about
        for method in network_options.methods
    }
    with locked(out) as folder:
        remove_temporary_files(folder)
        files = ResultFiles(folder, by_name, boxes, settings)
        store = ResultStore(files, merge_listing([], entries).entries, network_options.methods, limit)
        names = names_in(folder, store.entries)  # as on the page of a batch run
        if store.missing:
            with open_engine(network_options, run) as run_engine:
                mapper = MeasureMapper(options=network_options, out=folder, metrics=metric_list, files=files)
                execute(mapper, store, run_engine, run)
        comparison = FolderComparison(store.all_results(names), model=network_options.model_name)
        comparison.failures, comparison.left_out, comparison.others = store.failures, left_out, others
        if comparison.results:
            comparison.page = _write(comparison, folder)
        return comparison


# Not rows of one file, as in a manifest: a worker stores each method at once, so a killed run loses only the methods
# in progress. A card of metrics takes minutes.
@dataclass(frozen=True, slots=True)
class ResultFiles:
    """Files of the results of an evaluation, each with the settings that determine it.

    Attributes:
        out: The output folder.
        masks: The masks by the names of the images; None without masks.
        boxes: The boxes by the names of the files; None without boxes.
        settings: The settings of each method, as JSON values.
    """

    out: Path
    masks: Mapping[str, ImageEntry] | None
    boxes: Mapping[str, Any] | None
    settings: Mapping[str, Mapping[str, Any]]

    def find_object(self, entry: ImageEntry) -> tuple[ImageEntry | None, Any]:
        """Return the mask and the boxes of an image; None if it has none."""
        return (self.masks or {}).get(entry.name), (self.boxes or {}).get("/".join((*entry.folder, entry.label)))

    def _file(self, entry: ImageEntry, method: str) -> tuple[str, list[Any]]:
        """Return the name of the file of the results, and the settings that determine them, as JSON values."""
        mask, boxes = self.find_object(entry)
        files = [[file.path, file.offset, *file.stamp] for file in (entry, mask) if file is not None]
        key = [self.settings[method], files, entry.target, boxes]
        return f"{RESULTS}/{entry.name}.{method}.json", json.loads(json.dumps(key, default=describe))

    def read(self, entry: ImageEntry, method: str) -> list[MetricResult] | None:
        """Return the stored results; None if there are none, or the file is damaged or has other settings."""
        name, key = self._file(entry, method)
        content = read_json(self.out / name, {"key": list, "results": [RESULT]})
        return [MetricResult(**result) for result in content["results"]] if content and content["key"] == key else None

    def write(self, entry: ImageEntry, method: str, results: Sequence[MetricResult]) -> None:
        """Store results. Raises StoppedError if the folder cannot be written to."""
        name, key = self._file(entry, method)
        content = {"key": key, "results": [asdict(result) for result in results]}
        with writing_to(self.out):
            write_file(inside(self.out, name), f"{json.dumps(content, indent=1)}\n".encode("ascii"))


class ResultStore(Store):
    """Store of an evaluation, whose results the workers write.

    Args:
        files: Files of the results.
        entries: The images.
        methods: Names of the methods.
        limit: Largest number of images to measure; None for all.
    """

    resumes = True

    def __init__(
        self, files: ResultFiles, entries: Sequence[ImageEntry], methods: Sequence[str], limit: int | None
    ) -> None:
        self._files, self._results = files, dict[tuple[int, str], list[MetricResult]]()
        super().__init__(files.out, entries, methods, limit)

    def lacking(self, index: int, methods: Sequence[str]) -> tuple[str, ...]:
        """Read the results of an image, and return the methods without results."""
        read = {method: self._files.read(self.entries[index], method) for method in methods}
        self._results |= {(index, method): results for method, results in read.items() if results is not None}
        return tuple(method for method, results in read.items() if results is None)

    def append(self, rows: Sequence[Row]) -> None:
        """Keep the results of an image, which are stored already."""
        super().append(rows)
        self._results |= {(row["index"], row["method"]): row["results"] for row in rows}

    def all_results(self, names: Sequence[str]) -> list[MetricResult]:
        """Return all results, in the order of the images and methods, with the names of the images."""
        keys = ((index, method) for index in range(self.total) for method in self.methods)
        return [replace(result, image=names[key[0]]) for key in keys for result in self._results.get(key, ())]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureMapper(Mapper):
    """Measures each image by its methods, and stores the results.

    Attributes:
        metrics: The metrics.
        files: Files of the results.
    """

    metrics: Sequence[Metric]
    files: ResultFiles

    def warm(self, network: Network, batch: Sequence[LoadedImage]) -> None:
        """Run the passes of a batch, and a few passes of metrics."""
        network.explain(batch)
        if any(isinstance(metric, PerturbationMetric) for metric in self.metrics):
            about, few = (batch[0].open(), batch[0].target), [Deletion(steps=3)]
            for method in network.methods:
                attempt(measure_image, "", method.name, method, *about, few, controls=False, progress=False)

    def compute(self, network: Network, batch: Sequence[LoadedImage]) -> list[list[Row]]:
        """Measure each image by the methods of its slot. The row of an error of the image has no method."""
        return [self._measure(network, loaded) for loaded in batch]

    def finish(self, loaded: LoadedImage, results: list[Row]) -> list[Row]:
        """Return the rows, whose results are stored already."""
        return results

    def _measure(self, network: Network, loaded: LoadedImage) -> list[Row]:
        rows: dict[str | None, Row] = {}
        slot, shared = loaded.slot, SharedResults()
        name_subjects(slot.entry.source)
        for method in network.methods:
            if method.name not in slot.methods or self.is_interrupted():
                continue
            row: Row = {"index": slot.index, "source": slot.entry.source, "results": []}
            results = attempt(self._measure_method, method, loaded, shared)
            if isinstance(results, BaseException):
                name = None if isinstance(results, ImageError) else method.name
                row |= failure_columns(results, slot.entry, name)
            else:
                self.files.write(slot.entry, method.name, results)
                row |= {"method": method.name, "error": None, "error_kind": None, "results": results}
            rows[row["method"]] = row
        return list(rows.values())

    def _measure_method(self, method: Attribution, loaded: LoadedImage, shared: SharedResults) -> list[MetricResult]:
        image, entry = loaded.open(), loaded.slot.entry
        mask, boxes = self.files.find_object(entry)
        if self.files.masks is not None and mask is None:
            raise ImageError(f'has no mask: no mask in --objects (masks=) is called "{entry.name}"')
        if self.files.boxes is not None and boxes is None:
            raise ImageError("has no box: the file of --objects (boxes=) does not name it")
        about = entry.name, method.name, method, image, loaded.target
        mask_image = None if mask is None else mask.open()
        context: dict[str, Any] = {"shared": shared, "others": other_images(method, entry), "progress": False}
        return measure_image(*about, self.metrics, mask_image, boxes, **context)


def _all_settings(metric: Metric) -> dict[str, Any]:
    """Return the settings of a metric, with the pixels of images, which its own settings only mention."""
    values = {name: getattr(metric, name) for name in declared_options(type(metric))}
    return {
        **metric.settings,
        **{name: value.values for name, value in values.items() if isinstance(value, GivenImages)},
    }


def _write(comparison: Comparison, out: Path) -> Path:
    """Write the comparison, and return its page: the page of a batch run in the same folder, or else its own."""
    with writing_to(out):
        comparison.save(out / EVALUATION)
        return report(out) if (out / ABOUT).is_file() else comparison.save(out / EVALUATION_PAGE)
