"""A batch run: write all missing files and manifest rows of an output folder, in the order of the images."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .._version import DISTRIBUTION
from .failures import BatchError, Failure, StoppedError, sentence, writing_to
from .listing import ImageEntry, merge_listing
from .manifest import MANIFEST, Manifest, Row, read_rows
from .output_folder import FORMAT, LISTING, PAGE, OutputFolder
from .run_options import Progress, RunOptions, Summary, without_address

if TYPE_CHECKING:
    from pathlib import Path

    from .engines import LocalEngine, RayEngine
    from .network import Task

FAILURES_SHOWN = 20
"""Largest number of failures that a summary lists."""


class Run:
    """One run in a locked folder.

    Args:
        options: Options of the run.
        images: Images that the sources contain now.
        folder: The output folder.
    """

    def __init__(self, options: RunOptions, images: Sequence[ImageEntry], folder: Path) -> None:
        self.options, self.folder = options, OutputFolder(folder)
        self._start = time.monotonic()
        self._fresh = 0
        self._failures: list[tuple[str, str, str]] = []
        self.folder.remove_temporary_files()
        head = self.folder.read_head()
        if head is not None and (options.restart or next(read_rows(folder / MANIFEST), None) is None):
            self.folder.clear(self.folder.read_listing(), [method["name"] for method in head["methods"]])
            head = None
        listed = self.folder.read_listing() if head is not None else []
        if head is not None and not listed:
            raise BatchError(f"{folder / LISTING} is missing or empty; start again with --restart (restart=True)")
        self.listing = merge_listing(listed, images)
        self.images = self.listing.images
        self.head = self._new_head() if head is None else self._checked_head(head)
        self.total = min(options.limit or len(self.images), len(self.images))
        # The methods of the folder: methods of earlier runs, then new ones.
        self.methods = list(dict.fromkeys([*self._described, *options.methods]))
        self.manifest = Manifest(folder, self.methods)
        # Write the listing with new stamps later, so that changes are detected again after an interruption.
        retry = (None, *options.methods) if options.retry else ()
        self.manifest.read(retry=retry, changed=self.listing.changed)
        self.folder.remove([self.images[index] for index in self.listing.changed], self.methods)
        # A removed image keeps the results that it has.
        self._kept = self.listing.removed & {index for index, _ in self.manifest.rows}
        self._done = {index for index in range(self.total) if not self._missing(index)}
        self._failed = {index for index, _ in self.manifest.failures(options.methods)}

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
            explained = {"", *(row["method"] for row, _ in read_rows(self.folder.path / MANIFEST))}
            different = [name for name in different if name.partition(" of ")[2] in explained]
        if different:
            reasons = "; ".join(f"{name} was {old[name]!r} and is now {new[name]!r}" for name in different)
            raise BatchError(
                f"{self.folder.path} contains a run with other options: {reasons}; choose another folder, "
                "or start again with --restart (restart=True), which removes the files of that run"
            )
        command = head["command"]
        if new.keys() - old.keys():
            command = [*command, "&&", *self.options.command] if command else list(self.options.command)
        return head | {"fingerprint": old | new, "command": command}

    @property
    def _described(self) -> dict[str, dict[str, Any]]:
        """The descriptions of the methods in the head, by name."""
        return {method["name"]: method for method in self.head.get("methods", ())}

    def is_complete(self) -> bool:
        """Return whether all images have a row for every method of the run."""
        return len(self._done) == self.total

    def _missing(self, index: int) -> tuple[str, ...]:
        """Return the methods of the run without a row for an image."""
        return tuple(method for method in self.options.methods if self._lacks(index, method))

    def _lacks(self, index: int, method: str) -> bool:
        return index not in self._kept and not self.manifest.is_done(index, method)

    def execute(self, engine: LocalEngine | RayEngine) -> None:
        """Write the missing files and rows.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, or SIGTERM arrived and has the same handler. Images in progress are
                finished first.
            StoppedError: The folder cannot be written to, or an image failed in a strict run.
        """
        from .engines import RunContext
        from .network import BatchTooLargeError, Network, load_model

        options = self.options
        model = load_model(options)
        self._describe(Network(options, model))
        # With trust cards, which take longer than all else, progress and interruptions are by image.
        largest = 1 if options.trust else engine.default_batch_size
        size = options.batch_size or max(1, min(largest, len(self.images) // engine.parallel))
        # A resumed run keeps its batch sizes. Only a smaller size is accepted, for machines with less memory.
        stored = self.head.get("batch_sizes", [(0, size)])
        sizes = [(first, min(one, options.batch_size or one)) for first, one in stored]
        self.head |= {"batch_sizes": sizes, "finished": False}
        with writing_to(self.folder.path):
            # Write manifest.json first: without it, a listing counts as a file that does not belong to a run.
            self.folder.write_head(self.head)
            self.folder.write_listing(self.images)
        context = RunContext(options, self.folder.path, model)
        with interruption() as is_interrupted:
            while True:
                try:
                    with closing(engine.execute(context, self._groups(), is_interrupted)) as results:
                        for rows in results:
                            self._add(rows)
                    break
                except BatchTooLargeError:
                    self._halve()
            if is_interrupted():
                raise KeyboardInterrupt(f"{len(self._done)} of {self.total} images are done; re-run to resume")

    def _describe(self, network: Any) -> None:
        """Add the methods, the preprocessing and the number of classes to the head."""
        described = self._described
        for method in network.methods:
            facts = {"settings": dict(method.settings), "sign": method.sign, "units": method.units}
            described[method.name] = {"name": method.name, **facts}
        self.head["methods"] = list(described.values())
        self.head["preprocess"] = without_address(network.preprocess)
        self.head["categories"] = None if network.categories is None else len(network.categories)

    def _halve(self) -> None:
        """Store half of the size for the batch that does not fit, the first one with missing rows, and for all later.

        Its images have no row of this size yet, so a resumed run makes the same batches.
        """
        group = next(self._groups())
        start, half = group[0].index, (len(group) + 1) // 2
        sizes = {first: size if first < start else min(size, half) for first, size in self.head["batch_sizes"]}
        self.head["batch_sizes"] = sorted((sizes | {start: half}).items())
        with writing_to(self.folder.path):
            self.folder.write_head(self.head)

    def _groups(self) -> Iterator[Sequence[Task]]:
        """Yield the batches with missing rows. Their boundaries depend only on the image numbers and `batch_sizes`."""
        from .network import Task

        for (first, size), (end, _) in pairwise([*self.head["batch_sizes"], (len(self.images), 1)]):
            for start in range(first, min(end, self.total), size):
                group = range(start, min(start + size, end))
                missing = [self._missing(index) if index < self.total else () for index in group]
                if any(missing):
                    tasks = zip(group, missing, strict=True)
                    yield [Task(index, self.images[index], methods) for index, methods in tasks]

    def _add(self, rows: list[Row]) -> None:
        """Append the rows of an image to the manifest, and report the progress."""
        options, manifest, index = self.options, self.manifest, rows[0]["index"]
        failed = [row for row in rows if row["error"] is not None]
        if len(self._done) == len(self._failed) and self.images[index].target is None:
            require_sensible_options(
                options, [None if row["overlay"] else Failure(row["error_kind"], row["error"]) for row in rows]
            )
        if failed and options.strict:
            reason = sentence(failed[0]["source"], failed[0]["method"], failed[0]["error"])
            raise StoppedError(f"{reason}; --strict (strict=True) stops at the first failure")
        with writing_to(self.folder.path):
            manifest.append(rows)
        self._done.add(index)
        self._fresh += 1
        self._failed |= {index} if failed else set()
        self._failures += [(row["source"], row["method"] or "", row["error"]) for row in failed]
        del self._failures[FAILURES_SHOWN:]
        if options.on_progress is not None:
            options.on_progress(Progress(len(self._done), self.total, self._fresh, len(self._failed)))

    def finish(self) -> Summary:
        """Sort the manifest, write the page, and return the summary."""
        manifest, failures = self.manifest, self.manifest.failures(self.options.methods)
        lacking = Counter(
            method for index in range(self.total) for method in self.methods if self._lacks(index, method)
        )
        complete, failed = not lacking, {index for index, _ in manifest.failures(self.methods)}
        counts = {"photos": len(self.images), "rows": len(manifest.rows), "failed": len(failed)}
        is_same = manifest.is_sorted() and self.head.get("counts") == counts and self.head["finished"] == complete
        page = self.folder.path / PAGE
        if not (is_same and page.is_file()):
            from .report import report

            with writing_to(self.folder.path):
                manifest.sort()
                report(self.folder.path)
                # Write this last: an interrupted update is then repeated.
                self.folder.write_head(self.head | {"counts": counts, "finished": complete})
        return Summary(
            folder=self.folder.path,
            page=page,
            images=self.total,
            done=len(self._done),
            fresh=self._fresh,
            failed=len(self._failed),
            kinds=Counter(failures.values()),
            failures=tuple(self._failures),
            seconds=time.monotonic() - self._start,
            changed=len(self.listing.changed),
            removed=tuple(self.images[index].source for index in sorted(self.listing.removed)),
            unfinished=lacking,
        )


def require_sensible_options(options: RunOptions, failures: Sequence[Failure | None]) -> None:
    """Raise BatchError if invalid options caused the failures of an image, before all images fail for the same reason.

    Args:
        options: Options of the run.
        failures: One entry per row of the image; None for a method that succeeded.
    """
    blamed = [failure for failure in failures if failure is not None and failure.kind in ("MethodError", "TargetError")]
    layers = [failure for failure in failures if failure is not None and failure.kind == "LayerError"]
    if options.layer is not None and layers:
        raise BatchError(layers[0].reason)
    if failures and len(blamed) == len(failures):
        raise BatchError(blamed[0].reason)


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
