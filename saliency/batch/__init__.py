"""A folder of photos becomes a folder of overlays, whatever is wrong with some, however often it is interrupted.

    batch           the call; `saliency batch` only wraps it
    again           overlays in other colours, from the maps that a run has kept

The folder: overlays/, photos/ and heat/ (what the page shows), maps/ (with `maps=True`), manifest.jsonl (a row per
photo and method), manifest.json (the run), manifest.parquet, listing.jsonl (the photos by number) and index.html.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..validation import check_whole_number
from .errors import BatchError, StoppedError, unwritable
from .output_folder import Folder, locked
from .progress import Orders, Progress, Summary
from .run import Run
from .run_options import FORMATS, SIGNS, Job, Look
from .sources import find

if TYPE_CHECKING:
    from torch import nn

    from .work_group import Engine

__all__ = ["FORMATS", "SIGNS", "BatchError", "Look", "Progress", "StoppedError", "Summary", "batch"]


def batch(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    model: str | nn.Module = "efficientnet_lite0",
    methods: Sequence[str] = ("grad_cam",),
    *,
    weights: str | None = "default",
    layer: str | None = None,
    options: Mapping[str, Any] | None = None,
    target: int | str | None = None,
    targets: str | os.PathLike[str] | None = None,
    recursive: bool = False,
    look: Look | None = None,
    maps: bool = False,
    engine: Literal["local", "ray"] = "local",
    device: str = "auto",
    workers: int | None = None,
    batch_size: int | None = None,
    restart: bool = False,
    retry: bool = False,
    limit: int | None = None,
    strict: bool = False,
    command: Sequence[str] = (),
    on_progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Explain every photo of some sources by every method, into a folder.

    The same call again does what is missing, and nothing where nothing is. A photo that cannot be explained is a row of
    the manifest with the reason, and costs no other photo anything. Meanwhile PyTorch runs with one thread per worker.

    Args:
        sources: Folders, files, patterns, lists (.csv, .tsv, .jsonl, .txt) with a path and perhaps a target per row,
            and WebDataset shards (.tar).
        out: The folder; made where it is not there yet.
        model: A name that `saliency.load` takes, or a model with a `preprocess`, which is run where it is.
        methods: Names in the registry; they share what they can.
        weights: As for `saliency.load`.
        layer: For the methods that read one.
        options: Of the methods, each for those that have it.
        target: A class index or name, for all photos that name none; None for each photo's top class.
        targets: A list of paths and targets, for photos that are found otherwise.
        recursive: Whether folders inside of folders are searched too.
        look: How the overlays are drawn.
        maps: Whether the raw values are kept too.
        engine: "local", this machine; or "ray", a cluster: the one that `RAY_ADDRESS` names or that is connected to,
            else one of this machine's own. Both make the same files.
        device: "auto", "cpu", "cuda", or several as in "cuda:0,cuda:1": a copy of the model on each.
        workers: Threads that read and draw, and on processors networks side by side; by default one per core.
        batch_size: How many photos go through the network at once; None to find the best while running.
        restart: Whether what an earlier run made in the folder is removed first; files of others never are.
        retry: Whether photos that failed in an earlier run are tried again.
        limit: How many photos are done, of the first ones in the listing.
        strict: Whether the first photo that fails stops the run.
        command: What was typed, for the manifest.
        on_progress: Called with a `Progress` as photos are done.

    Raises:
        BatchError: There is no photo, the folder is in use or holds something else, or an option makes no sense.
        StoppedError: A full disk, a folder that cannot be written to, or a failure with `strict`.
        SaliencyError: The model, a method, a layer or the target of all photos does not exist.
        KeyboardInterrupt: Ctrl-C, or SIGTERM where its handler is `signal.default_int_handler`, as on the command line;
            what was under way is done and kept.
    """
    batch_size = _whole("batch_size", batch_size)
    workers = _whole("workers", workers)
    limit = _whole("limit", limit)
    if engine not in ("local", "ray"):
        raise BatchError(f"engine={engine!r} is neither 'local' nor 'ray'")
    words = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    methods_named: object = methods
    names = (methods_named,) if isinstance(methods_named, str) else tuple(methods)
    job = Job(
        model=model,
        weights=weights,
        methods=names,
        layer=layer,
        options=dict(options or {}),
        target=target,
        look=look or Look(),
        maps=maps,
    )
    orders = Orders(
        batch_size=batch_size,
        restart=restart,
        retry=retry,
        limit=limit,
        strict=strict,
        command=tuple(command),
        on_progress=on_progress,
    )
    folder = Path(out)
    if os.path.exists(folder) and not os.path.isdir(folder):  # noqa: PTH110, PTH112 - unlike Path, never raise
        raise BatchError(f"{folder} is a file; the overlays need a folder: choose another one for --out")
    found = find(words, recursive=recursive, targets=targets, out=folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    with locked(folder):
        run = _opened(job, found, folder, orders)
        try:
            return _carried_out(run, engine, device, workers)
        finally:
            run.manifest.close()


def _opened(job: Job, found: Sequence[Any], folder: Path, orders: Orders) -> Run:
    try:
        return Run(job, found, Folder(folder), orders)
    except OSError as error:
        raise unwritable(folder, error) from error


def _carried_out(run: Run, engine: str, device: str, workers: int | None) -> Summary:
    if run.is_complete() and not run.fresh:
        return run.summary(run.finish())
    if engine == "ray":
        from .engine_ray import on_ray

        with on_ray(device, workers) as cluster:
            return _worked(run, cluster, cluster.lanes, cluster.most)
    from .engine_local import Local, devices_of, most_at_once

    devices = devices_of(device) if isinstance(run.job.model, str) or device != "auto" else [""]
    local = Local(devices, workers)
    on_processor = all(each in ("", "cpu") for each in devices)
    return _worked(run, local, local.lanes(on_processor), most_at_once(devices))


def _worked(run: Run, engine: Engine, lanes: int, most: int) -> Summary:
    fresh, failures, interrupted = run.work(engine, lanes, most)
    if interrupted:
        done = run.summary(None)
        raise KeyboardInterrupt(f"{done.done} of {done.photos} photos are done; the same command goes on from there")
    return run.summary(run.finish(), fresh, failures)


def _whole(name: str, number: int | None) -> int | None:
    return None if number is None else check_whole_number(name, number, error=BatchError)
