"""Runs over images: the one loop of `explain`, `evaluate` and `batch`, and the run of `batch` with its manifest."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from .._version import DISTRIBUTION
from .failures import BatchError, StoppedError, sentence, writing_to
from .listing import MOST_PER_FOLDER, ImageEntry, merge_listing, with_names
from .manifest import MANIFEST, Manifest, Row, read_rows
from .output_folder import FORMAT, LISTING, PAGE, OutputFolder
from .run_options import Progress, RunOptions, Summary, without_address

if TYPE_CHECKING:
    from pathlib import Path

    from .engines import LocalEngine, RayEngine, RunContext, SequentialEngine
    from .network import Network, Slot

    MakeContext = Callable[..., RunContext]
    Engine: TypeAlias = LocalEngine | RayEngine | SequentialEngine

FAILURES_SHOWN = 20
"""Largest number of failures that a summary lists."""


class Run:
    """One run over images: explain those without results of a method, in batches on an engine, and report each.

    As it is, it reads no results of earlier runs: it explains all images, one by one, and Ctrl-C stops at once.
    A subclass that stores results resumes, and Ctrl-C finishes the images in progress first.

    Args:
        options: Options of the run.
        out: The output folder.
        entries: The images.
        context: Creates the context of the engine from the options, the folder, the model and `is_interrupted`.

    Attributes:
        total: Number of images to explain, the first ones.
        done: Numbers of the images with results of all methods.
        failed: Numbers of the images with an error.
        failures: The rows of errors of this run.
        repeated: Number of images whose batch was repeated in parts, by the error.
        batch_sizes: Pairs of the first image and the size of its batch and of the following ones.
    """

    resumes = False

    def __init__(
        self, options: RunOptions, out: Path, entries: Sequence[ImageEntry], context: MakeContext | None = None
    ) -> None:
        self.options, self.out, self.entries = options, out, entries
        self.total = self._count_entries()
        self.batch_sizes: list[tuple[int, int]] = [(0, 1)]
        self.done: set[int] = set()
        self.failed: set[int] = set()
        self.failures: list[Row] = []
        self.repeated: Counter[str] = Counter()
        self._context = context
        self._start, self._fresh = time.monotonic(), 0

    def _count_entries(self) -> int:
        """Return the number of entries of the first `limit` images, which may have several detections each."""
        images = accumulate(not entry.detection for entry in self.entries)
        return sum(self.options.limit is None or number <= self.options.limit for number in images)

    def missing(self, index: int) -> tuple[str, ...]:
        """Return the methods without results for an image."""
        return () if index in self.done else tuple(self.options.methods)

    def prepare(self, network: Network, engine: Engine) -> None:
        """Prepare the output folder before the first image. Raises OSError if it cannot be written to."""
        self.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=self.out).close()

    def store(self, rows: Sequence[Row]) -> None:
        """Store the rows of an image."""
        self.done.add(rows[0]["index"])

    def store_batch_sizes(self) -> None:
        """Store `batch_sizes`, before the first results of these sizes."""

    def complete(self) -> None:
        """Explain the images without results on the engine of the options, if there are any. See `execute`."""
        if len(self.done) < self.total:
            from .engines import open_engine

            with open_engine(self.options) as engine:
                self.execute(engine)

    def execute(self, engine: Engine) -> None:
        """Explain the images without results.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, or SIGTERM arrived and has the same handler.
            StoppedError: The folder cannot be written to, or an image failed in a strict run.
            SaliencyError: An option is invalid.
        """
        from .engines import RunContext
        from .network import BatchTooLargeError, Network, load_model

        model = load_model(self.options)
        network = Network(self.options, model)
        if network.preprocess is None and not all(entry.is_volume for entry in self.entries):
            raise BatchError(f"{self.options.model_name} has no preprocessing; pass --preprocess (preprocess=)")
        self.prepare(network, engine)
        with interruption() if self.resumes else nullcontext(bool) as is_interrupted:
            context = (self._context or RunContext)(self.options, self.out, model, is_interrupted)
            try:
                while not is_interrupted():
                    try:
                        with closing(engine.execute(context, self._batches())) as images:
                            for rows in images:
                                self._add(rows)
                        break
                    except BatchTooLargeError:
                        self._halve()
                if is_interrupted():
                    raise KeyboardInterrupt
            except KeyboardInterrupt:
                hint = "; re-run to resume" if self.resumes else ""
                raise KeyboardInterrupt(f"{len(self.done)} of {self.total} images are done{hint}") from None

    def _halve(self) -> None:
        """Store half of the size for the batch that does not fit, the first one with missing rows, and for all later.

        Its images have no results of this size yet, so a resumed run makes the same batches.
        """
        batch = next(self._batches())
        start, half = batch[0].index, (len(batch) + 1) // 2
        sizes = {first: size if first < start else min(size, half) for first, size in self.batch_sizes}
        self.batch_sizes = sorted((sizes | {start: half}).items())
        self.store_batch_sizes()

    def _batches(self) -> Iterator[Sequence[Slot]]:
        """Yield the batches with missing results. Their limits depend only on the numbers of images and the sizes."""
        from .network import Slot

        for (first, size), (end, _) in pairwise([*self.batch_sizes, (len(self.entries), 1)]):
            for start in range(first, min(end, self.total), size):
                batch = range(start, min(start + size, end))
                missing = [self.missing(index) if index < self.total else () for index in batch]
                if any(missing):
                    slots = zip(batch, missing, strict=True)
                    yield [Slot(index, self.entries[index], methods) for index, methods in slots]

    def _add(self, rows: Sequence[Row]) -> None:
        """Store the rows of an image, and report the progress."""
        options, index = self.options, rows[0]["index"]
        failed = [row for row in rows if row["error"] is not None]
        if len(self.done) == len(self.failed) and not isinstance(self.entries[index].target, int | str):
            require_sensible_options(options, rows)
        if failed and options.strict:
            reason = sentence(failed[0]["source"], failed[0]["method"], failed[0]["error"])
            raise StoppedError(f"{reason}; --strict (strict=True) stops at the first failure")
        self.store(rows)
        self._fresh += 1
        self.failed |= {index} if failed else set()
        self.failures += failed
        self.repeated.update({row["repeated"] for row in rows if row.get("repeated")})
        if options.on_progress is not None:
            options.on_progress(Progress(len(self.done), self.total, self._fresh, len(self.failed)))


class BatchRun(Run):
    """One run in a locked folder, with a manifest.

    Args:
        options: Options of the run.
        out: The output folder.
        entries: Images that the sources contain now.
    """

    resumes = True

    def __init__(self, options: RunOptions, out: Path, entries: Sequence[ImageEntry]) -> None:
        self.folder = OutputFolder(out)
        head = self.folder.read_head()
        if head is not None and (options.restart or next(read_rows(out / MANIFEST), None) is None):
            self.folder.clear(self.folder.read_listing(), head["methods"])
            head = None
        listed = self.folder.read_listing() if head is not None else []
        if head is not None and not listed:
            raise BatchError(f"{out / LISTING} is missing or empty; start again with --restart (restart=True)")
        self.listing = merge_listing(listed, entries, MOST_PER_FOLDER)
        super().__init__(options, out, self.listing.entries)
        self.head = self._new_head() if head is None else self._checked_head(head)
        # The methods of the folder: methods of earlier runs, then new ones.
        self.methods = list(dict.fromkeys([*self.head.get("methods", ()), *options.methods]))
        self.manifest = Manifest(out, self.methods)
        # Write the listing with new stamps later, so that changes are detected again after an interruption.
        retry = (None, *options.methods) if options.retry else ()
        self.manifest.read(retry=retry, changed=self.listing.changed)
        self.folder.remove([self.entries[index] for index in self.listing.changed], self.methods)
        # A removed image keeps the results that it has.
        self._kept = self.listing.removed & {index for index, _ in self.manifest.rows}
        self.done = {index for index in range(self.total) if not self.missing(index)}
        self.failed = {index for index, _ in self.manifest.failures(options.methods)}

    def _new_head(self) -> dict[str, Any]:
        fingerprint = self.options.fingerprint()
        versions = {"python": sys.version.split()[0]}
        for name, distribution in (("saliency", DISTRIBUTION), ("torch", "torch"), ("torchvision", "torchvision")):
            with suppress(PackageNotFoundError):
                versions[name] = version(distribution)
        return {
            "format": FORMAT,
            "versions": versions,
            "model": {"name": self.options.model_name, "weights": fingerprint["weights"]},
            "command": list(self.options.command),
            "fingerprint": fingerprint,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def _checked_head(self, head: dict[str, Any]) -> dict[str, Any]:
        """Return the head with the new methods of this run. Raises BatchError if the results have other options."""
        old, new = head["fingerprint"], self.options.fingerprint()
        different = [name for name in new if old.get(name, new[name]) != new[name]]
        if different:
            # A method without rows, such as one with an invalid option, may have other options now.
            explained = {"", *(row["method"] for row, _ in read_rows(self.out / MANIFEST))}
            different = [name for name in different if name.partition(" of ")[2] in explained]
        if different:
            reasons = "; ".join(f"{name} was {old[name]!r} and is now {new[name]!r}" for name in different)
            raise BatchError(
                f"{self.out} contains a run with other options: {reasons}; choose another folder, "
                "or start again with --restart (restart=True), which removes the files of that run"
            )
        command = head["command"]
        if new.keys() - old.keys():
            command = [*command, "&&", *self.options.command] if command else list(self.options.command)
        return head | {"fingerprint": old | new, "command": command}

    def missing(self, index: int) -> tuple[str, ...]:
        """Return the methods of the run without a row for an image."""
        return tuple(method for method in self.options.methods if self._lacks(index, method))

    def _lacks(self, index: int, method: str) -> bool:
        return index not in self._kept and not self.manifest.is_done(index, method)

    def complete(self) -> None:
        """Explain the images without results. A run that was killed while it wrote its page has all of them."""
        self.folder.remove_temporary_files(())
        super().complete()

    def prepare(self, network: Network, engine: Engine) -> None:
        """Remove files of killed runs, and store the description of the run, its batch sizes and its images."""
        self.folder.remove_temporary_files()
        self.head["methods"] = self.methods
        self.head["preprocess"] = without_address(network.preprocess)
        if self.options.detections is not None:
            self._list_detections(network)
        # With trust cards, which take longer than all else, progress and interruptions are by image. Volumes are large.
        options = self.options
        largest = 1 if options.trust or any(entry.is_volume for entry in self.entries) else engine.default_batch_size
        size = options.batch_size or max(1, min(largest, len(self.entries) // engine.parallel))
        # A resumed run keeps its batch sizes. Only a smaller size is accepted, for machines with less memory.
        stored = self.head.get("batch_sizes", [(0, size)])
        self.batch_sizes = [(first, min(one, options.batch_size or one)) for first, one in stored]
        # Write manifest.json first: without it, a listing counts as a file that does not belong to a run.
        self.store_batch_sizes()
        with writing_to(self.out):
            self.folder.write_listing(self.entries)

    def _list_detections(self, network: Network) -> None:
        """Replace each new image by an entry for each of its detections, with names such as `cat.0`.

        The new images come last. An image without detections keeps one entry, whose row says so.
        """
        new = [entry for entry in self.entries[: self.total] if entry.detection is None]
        first = self.total - len(new)
        most = self.options.detections if isinstance(self.options.detections, int) else sys.maxsize
        found: list[ImageEntry] = []
        for entry in new:
            stem, suffix = os.path.splitext(entry.label)  # noqa: PTH122
            ranks = range(max(1, min(network.count_detections(entry), most)))
            found += [entry._replace(label=f"{stem}.{rank}{suffix}", detection=rank) for rank in ranks]
        listed, rest = self.entries[:first], self.entries[self.total :]
        self.entries = [*listed, *with_names(found, [*listed, *rest], MOST_PER_FOLDER), *rest]
        self.total = self._count_entries()

    def store_batch_sizes(self) -> None:
        """Write the head with the batch sizes."""
        self.head |= {"batch_sizes": self.batch_sizes, "finished": False}
        with writing_to(self.out):
            self.folder.write_head(self.head)

    def store(self, rows: Sequence[Row]) -> None:
        """Append the rows of an image to the manifest."""
        with writing_to(self.out):
            self.manifest.append(rows)
        super().store(rows)
        del self.failures[FAILURES_SHOWN:]

    def finish(self) -> Summary:
        """Sort the manifest, write the page, and return the summary."""
        manifest, failures = self.manifest, self.manifest.failures(self.options.methods)
        lacking = Counter(
            method for index in range(self.total) for method in self.methods if self._lacks(index, method)
        )
        complete, failed = not lacking, {index for index, _ in manifest.failures(self.methods)}
        counts = {"images": len(self.entries), "rows": len(manifest.rows), "failed": len(failed)}
        is_same = manifest.is_sorted() and self.head.get("counts") == counts and self.head["finished"] == complete
        page = self.out / PAGE
        if not (is_same and page.is_file()):
            from .report import report

            with writing_to(self.out):
                manifest.sort()
                report(self.out)
                # Write this last: an interrupted update is then repeated.
                self.folder.write_head(self.head | {"counts": counts, "finished": complete})
        return Summary(
            folder=self.out,
            page=page,
            images=self.total,
            done=len(self.done),
            fresh=self._fresh,
            failed=len(self.failed),
            kinds=Counter(failures.values()),
            failures=tuple(
                (row["source"], row["method"] or "", row["error"]) for row in self.failures[:FAILURES_SHOWN]
            ),
            seconds=time.monotonic() - self._start,
            changed=len(self.listing.changed),
            removed=tuple(self.listing.entries[index].source for index in sorted(self.listing.removed)),
            unfinished=lacking,
            repeated=self.repeated,
        )


def require_sensible_options(options: RunOptions, rows: Sequence[Row]) -> None:
    """Raise BatchError if invalid options caused the failures of an image, before all images fail for the same reason.

    Args:
        options: Options of the run.
        rows: The rows of the image.
    """
    kinds = [None if row.get("overlay") else row["error_kind"] for row in rows]  # with an overlay, only its card failed
    if options.layer is not None and "LayerError" in kinds:
        raise BatchError(rows[kinds.index("LayerError")]["error"])
    if all(kind in ("MethodError", "TargetError") for kind in kinds):
        raise BatchError(rows[0]["error"])


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Return a function that returns whether Ctrl-C was pressed, or SIGTERM arrived and has the same handler.

    The first interruption lets the images in progress finish. A second one raises KeyboardInterrupt at once.
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
