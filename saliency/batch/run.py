"""The loop of `explain`, `evaluate` and `batch`: an engine maps a plan, and a store takes the rows."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from .failures import BatchError, StoppedError, sentence
from .manifest import Row
from .options import Progress, RunOptions
from .store import Store

if TYPE_CHECKING:
    from torch import nn

    from .engines import Engine, Mapper


def execute(mapper: Mapper, store: Store, engine: Engine, options: RunOptions) -> None:
    """Compute the missing results of a store on an engine, and report each image.

    Args:
        mapper: The work on each image.
        store: The images and their results.
        engine: The engine.
        options: Options of the run.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed, or SIGTERM arrived and has the same handler.
        StoppedError: The folder cannot be written to, or an image failed in a strict run.
        SaliencyError: An option is invalid.
    """
    from .network import Network, load_model

    model = load_model(mapper.options)
    network = Network(mapper.options, model)
    network.require_preprocess(store.entries)
    store.prepare(network, engine.default_batch_size, engine.parallel)

    def report(note: str = "") -> None:
        if options.on_progress is not None:
            options.on_progress(Progress(store.done, store.total, store.fresh, len(store.failed), note))

    with interruption() if store.resumes else nullcontext(bool) as is_interrupted:
        mapper = replace(mapper, is_interrupted=is_interrupted, report=report)
        try:
            with closing(_compute(mapper, store, engine, model)) as images:
                for rows in images:
                    _require_success(mapper, store, rows, strict=options.strict)
                    store.append(rows)
                    report()
            if is_interrupted():
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            hint = "; re-run to resume" if store.resumes else ""
            raise KeyboardInterrupt(f"{store.done} of {store.total} images are done{hint}") from None


def _compute(mapper: Mapper, store: Store, engine: Engine, model: nn.Module) -> Generator[list[Row], None, None]:
    """Yield the rows of each image. If a batch does not fit into memory, continue with a plan of smaller batches."""
    from .network import BatchTooLargeError

    while not mapper.is_interrupted():
        try:
            with closing(engine.map(mapper, model, store.plan())) as images:
                yield from images
            return
        except BatchTooLargeError:
            store.write_sizes(store.plan().halved().sizes)


def _require_success(mapper: Mapper, store: Store, rows: Sequence[Row], *, strict: bool) -> None:
    """Raise an error for failures that stop the run.

    Raises:
        BatchError: Invalid options caused the failures of the first images, so all images would fail.
        StoppedError: The image failed in a strict run.
    """
    failed = [row for row in rows if row["error"] is not None]
    has_succeeded = store.done > len(store.failed) or isinstance(store.entries[rows[0]["index"]].target, int | str)
    kinds = [None if row.get("overlay") else row["error_kind"] for row in rows]  # with an overlay, only its card failed
    if not has_succeeded and mapper.options.layer is not None and "LayerError" in kinds:
        raise BatchError(rows[kinds.index("LayerError")]["error"])
    if not has_succeeded and all(kind in ("MethodError", "TargetError") for kind in kinds):
        raise BatchError(rows[0]["error"])
    if failed and strict:
        reason = sentence(failed[0]["source"], failed[0]["method"], failed[0]["error"])
        raise StoppedError(f"{reason}; --strict (strict=True) stops at the first failure")


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Return a function that returns whether Ctrl-C was pressed, or SIGTERM arrived and has the same handler.

    The first interruption lets the images in progress finish, except those that a method explains in many passes. A
    second one raises KeyboardInterrupt at once.
    """
    pressed = False

    def handle(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    is_main = threading.current_thread() is threading.main_thread()
    with ExitStack() as undo:
        for number in (signal.SIGINT, signal.SIGTERM):
            if is_main and signal.getsignal(number) is signal.default_int_handler:
                undo.callback(signal.signal, number, signal.signal(number, handle))
        yield lambda: pressed
