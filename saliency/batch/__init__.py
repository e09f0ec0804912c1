"""Explain folders of images: overlays, saved maps, a manifest and a gallery page. An interrupted run can be resumed.

    batch                 explain images into a folder; `saliency.batch(...)` and the command call it

The output folder contains:

    overlays/             the overlays
    thumbnails/, heat/    images of the gallery page
    maps/                 saved maps (with `maps=True`, and of volumes)
    trust/                trust cards (with `trust=True`)
    manifest.jsonl        a row per image and method
    manifest.json         model, options and state of the run
    listing.jsonl         the numbered images
    index.html            the gallery page
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from ..calls import answer_calls
from ..validation import SIGNS
from .failures import BatchError, StoppedError, writing_to
from .options import FORMATS, NetworkOptions, OutputOptions, OverlayStyle, Progress, RunOptions, Summary
from .sources import find_images, require_images
from .store import ManifestStore, locked

if TYPE_CHECKING:
    from torch import nn

    from ..io.preprocess import PreprocessLike, Whole
    from ..targets.question import Target

__all__ = ["FORMATS", "SIGNS", "BatchError", "OverlayStyle", "Progress", "StoppedError", "Summary", "batch"]


# Here and in `evaluate`, the options of a run are spelled out: editors and type checkers cannot read a signature that a
# decorator builds, and a `TypedDict` would repeat the list without the defaults.
@answer_calls
def batch(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, Any],
    out: str | os.PathLike[str],
    model: str | nn.Module = "efficientnet_lite0",
    methods: Sequence[str] = ("grad_cam",),
    *,
    weights: str | None = "default",
    preprocess: PreprocessLike | None = None,
    categories: Sequence[str] | Mapping[int, str] | Mapping[str, int] | None = None,
    layer: str | None = None,
    options: Mapping[str, Any] | None = None,
    whole: Whole = False,
    target: int | str | Target | None = None,
    detections: int | Literal["all"] | None = None,
    targets: str | os.PathLike[str] | None = None,
    recursive: bool = False,
    style: OverlayStyle | None = None,
    maps: bool = False,
    trust: bool = False,
    seconds: float | None = None,
    engine: Literal["local", "ray"] = "local",
    device: str = "auto",
    compile: bool = False,
    workers: int | None = None,
    batch_size: int | None = None,
    restart: bool = False,
    retry: bool = False,
    limit: int | None = None,
    strict: bool = False,
    command: Sequence[str] = (),
    on_progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Explain images with one or several methods, and write the results to a folder.

    Repeat the same call to resume an interrupted run, or call it with other methods to add them to the folder. The
    missing files are written, identical byte for byte to files of an uninterrupted run. An image that cannot be
    explained gets a manifest row with the reason, and never affects the others. PyTorch runs with one thread per worker
    until the call returns.

    Args:
        sources: Folders, files, patterns, lists (.csv, .tsv, .jsonl, .txt) with a path and optionally a target per row,
            and WebDataset shards (.tar). Images include NIfTI and DICOM files, see docs/volumes.md, and files at
            fsspec addresses (s3://, gs://), see docs/batch.md. For a model with several inputs, a mapping of names to
            sources: files of equal names are a case. Lists may also have a column for each input.
        out: The output folder; created if it does not exist.
        model: A name that `saliency.load` accepts, or a model.
        methods: Names in the registry. Methods share forward passes where possible. Methods of earlier runs in the same
            folder keep their results; each method may have its own `layer`, `options` and `maps`.
        weights: As for `saliency.load`.
        preprocess: Preprocessing of the images; None for the model's own. For volumes, a function from the volume to
            the model's input, both tensors (C, D, H, W).
        categories: Class names; None for the model's own.
        layer: The layer, for the methods that read a layer.
        options: Options of the methods, applied to each method that has them.
        whole: Whether the model sees the whole image instead of a crop, as for every method: False, True or "aspect".
        target: Class index or name, or a target such as "box:0" or `saliency.text(...)`, for all images without a
            target of their own; None for the top class of each image.
        detections: "all", or a number: every detection of each image is explained, or the most probable detections,
            each as an image of its own: `cat.0`, `cat.1`. `target` then selects the detections of a class. The
            detections of an image are counted once; if the image changes later, their number stays the same.
        targets: File with paths and targets, for images that `sources` finds without a target.
        recursive: Whether subfolders are searched.
        style: How overlays are drawn.
        maps: Whether the attribution values are saved in float16, for `Explanation.load`.
        trust: Whether a trust card of each overlay is written, which takes far longer than the overlay.
        seconds: The time limit for each trust card, as for `saliency.trust`.
        engine: "local" for this machine; "ray" for the connected cluster or the one at `RAY_ADDRESS`, else a cluster
            started on this machine. Both write the same files.
        device: "auto", "cpu", "cuda", or several as in "cuda:0,cuda:1", each with a copy of the model. With "auto", a
            model that is passed as a module stays on its device.
        compile: Whether the methods are compiled before the first image, see `Attribution.compile`. A `Progress` before
            the first image states the number of images from which on this saves time. Files are equal up to rounding.
        workers: Number of threads for loading and drawing; by default one per core. On CPUs also the number of
            networks that run in parallel.
        batch_size: Images per batch; by default 8 on CPUs and 64 on accelerators, or 1 with trust cards. If a batch
            does not fit into memory, the size is halved from its first image on. A resumed run keeps its sizes unless a
            smaller size is given.
        restart: Whether the files of an earlier run in the folder are removed first. Other files are never removed.
        retry: Whether images that failed in an earlier run are tried again.
        limit: Largest number of images to explain, with all their detections, in the order of the listing.
        strict: Whether the first failure stops the run. Images without detections, and methods that do not apply in a
            run of all methods, are not failures.
        command: The command line, stored in the manifest.
        on_progress: Called with a `Progress` after every image.

    Raises:
        BatchError: There is no image, the folder is in use or contains other files or results with other options, or an
            option is invalid.
        StoppedError: A full disk, a folder that cannot be written to, or a failure with `strict`.
        SaliencyError: The model, a method, a layer or the target of all images does not exist.
        KeyboardInterrupt: Ctrl-C was pressed, or SIGTERM arrived and its handler is `signal.default_int_handler`, as on
            the command line. Finished images are kept.
    """
    arguments = locals()
    network, output, run = NetworkOptions.of(arguments), OutputOptions.of(arguments), RunOptions.of(arguments)
    with without_garbage_collection():
        entries, left_out, others = find_images(sources, recursive=recursive, targets=targets)
        require_images(entries if maps or trust or detections else ())
    with locked(out) as folder:
        with writing_to(folder), without_garbage_collection():
            store = ManifestStore(folder, entries, network, output, run)
        if store.missing:
            from .drawing import ExplainMapper
            from .engines import execute, open_engine

            with open_engine(network, run) as run_engine:
                execute(ExplainMapper(options=network, out=folder, output=output), store, run_engine, run)
        with without_garbage_collection():
            return replace(store.finish(_write_page), left_out=left_out, others=others)


def _write_page(folder: Path) -> None:
    from .report import report  # imports torch, which a finished run does not need

    report(folder)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector of the process, which would visit all entries of a large folder again and again.

    The collector takes a third of the time of resuming a run over 100,000 images.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


class _CallableModule(ModuleType):
    """This module, which is called as its function: `saliency.batch("photos", "maps")`."""

    __call__ = staticmethod(batch)
    __signature__ = signature(batch)  # otherwise `inspect` and notebooks show it without the first argument


sys.modules[__name__].__class__ = _CallableModule
