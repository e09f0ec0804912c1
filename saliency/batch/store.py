"""The store of a run: its images, which of them have results, and the rows of results, in memory or in a folder."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from .._version import DISTRIBUTION
from .failures import BatchError, writing_to
from .listing import MOST_PER_FOLDER, ImageEntry, merge_listing, with_names
from .manifest import MANIFEST, Manifest, Row, read_rows
from .options import NetworkOptions, OutputOptions, Progress, RunOptions, Summary, fingerprint, without_address
from .output_folder import (
    FORMAT,
    LISTING,
    PAGE,
    clear,
    read_head,
    read_listing,
    remove_files,
    remove_temporary_files,
    write_head,
    write_listing,
)
from .plan import Plan

if TYPE_CHECKING:
    from pathlib import Path

    from .engines import Engine
    from .network import Network

FAILURES_SHOWN = 20
"""Largest number of failures that a summary lists."""


class Store:
    """Images of a run and counts of their results. It reads and writes no rows; subclasses keep them in files.

    Args:
        out: The output folder.
        entries: The images.
        methods: Names of the methods.
        limit: Largest number of images to explain, all detections of each; None for all.

    Attributes:
        total: Number of entries to explain, the first ones.
        missing: Methods without results, by the number of the image; images with all results are absent.
        sizes: Pairs of the first image and the size of its batch and of the following ones.
        failed: Numbers of the images with an error.
        failures: The rows of errors of this run.
        fresh: Number of images that this run explained.
        repeated: Number of images whose batch was repeated in parts, by the error.
    """

    resumes = False

    def __init__(
        self, out: Path, entries: Sequence[ImageEntry], methods: Sequence[str], limit: int | None = None
    ) -> None:
        self.out, self.entries, self.methods, self._limit = out, entries, methods, limit
        self.sizes: Sequence[tuple[int, int]] = [(0, 1)]
        self.failed: set[int] = set()
        self.failures: list[Row] = []
        self.fresh = 0
        self.repeated: Counter[str] = Counter()
        self._find_missing()

    def _find_missing(self) -> None:
        images = accumulate(not entry.detection for entry in self.entries)
        self.total = sum(self._limit is None or number <= self._limit for number in images)
        lacking = {index: self.lacking(index, self.methods) for index in range(self.total)}
        self.missing = {index: methods for index, methods in lacking.items() if methods}

    @property
    def done(self) -> int:
        """Number of images with results of all methods, or with an error."""
        return self.total - len(self.missing)

    def lacking(self, index: int, methods: Sequence[str]) -> tuple[str, ...]:
        """Return those of the methods that have no stored results for an image."""
        return tuple(methods)

    def plan(self) -> Plan:
        """Return the plan of the missing results."""
        return Plan(self.entries, dict(self.missing), self.sizes)

    def progress(self) -> Progress:
        """Return the progress of the run."""
        return Progress(self.done, self.total, self.fresh, len(self.failed))

    def prepare(self, network: Network, engine: Engine) -> None:
        """Prepare the output folder before the first image. Raises OSError if it cannot be written to."""
        self.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=self.out).close()

    def write_sizes(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Store other batch sizes, before the first results of these sizes."""
        self.sizes = sizes

    def append(self, rows: Sequence[Row]) -> None:
        """Store the rows of an image: a row per method, or one without a method for an error of the image."""
        index, methods = rows[0]["index"], {row["method"] for row in rows}
        left = tuple(method for method in self.missing.pop(index) if method not in methods)
        if left and None not in methods:  # interrupted between two methods
            self.missing[index] = left
        failed = [row for row in rows if row["error"] is not None]
        self.failed |= {index} if failed else set()
        self.failures += failed
        self.fresh += 1
        self.repeated.update({row["repeated"] for row in rows if row.get("repeated")})


class ManifestStore(Store):
    """Store in a locked folder with a manifest, which resumes.

    Args:
        out: The output folder.
        entries: Images that the sources contain now.
        options: The model, the methods and the target.
        output: The files of each image.
        run: Options of the run.
    """

    resumes = True

    def __init__(
        self,
        out: Path,
        entries: Sequence[ImageEntry],
        options: NetworkOptions,
        output: OutputOptions,
        run: RunOptions,
    ) -> None:
        self._start = time.monotonic()
        self._options, self._output, self._run = options, output, run
        remove_temporary_files(out, ())  # of a run that was killed while it wrote its page
        head = read_head(out)
        if head is not None and (run.restart or next(read_rows(out / MANIFEST), None) is None):
            clear(out, read_listing(out), head["methods"])
            head = None
        listed = read_listing(out) if head is not None else []
        if head is not None and not listed:
            raise BatchError(f"{out / LISTING} is missing or empty; start again with --restart (restart=True)")
        self.listing = merge_listing(listed, entries, MOST_PER_FOLDER)
        self.head = self._new_head() if head is None else self._checked_head(out, head)
        # The methods of the folder: methods of earlier runs, then new ones.
        self.head["methods"] = list(dict.fromkeys([*self.head.get("methods", ()), *options.methods]))
        self.manifest = Manifest(out, self.head["methods"])
        # Write the listing with new stamps later, so that changes are detected again after an interruption.
        retry = (None, *options.methods) if run.retry else ()
        self.manifest.read(retry=retry, changed=self.listing.changed)
        remove_files(out, [self.listing.entries[index] for index in self.listing.changed], self.head["methods"])
        # A removed image keeps the results that it has.
        self._kept = self.listing.removed & {index for index, _ in self.manifest.rows}
        super().__init__(out, self.listing.entries, options.methods, run.limit)
        self.failed = {index for index, _ in self.manifest.failures(options.methods)}

    def _new_head(self) -> dict[str, Any]:
        values = fingerprint(self._options, self._output)
        versions = {"python": sys.version.split()[0]}
        for name, distribution in (("saliency", DISTRIBUTION), ("torch", "torch"), ("torchvision", "torchvision")):
            with suppress(PackageNotFoundError):
                versions[name] = version(distribution)
        return {
            "format": FORMAT,
            "versions": versions,
            "model": {"name": self._options.model_name, "weights": values["weights"]},
            "command": list(self._run.command),
            "fingerprint": values,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def _checked_head(self, out: Path, head: dict[str, Any]) -> dict[str, Any]:
        """Return the head with the new methods of this run. Raises BatchError if the results have other options."""
        old, new = head["fingerprint"], fingerprint(self._options, self._output)
        different = [name for name in new if old.get(name, new[name]) != new[name]]
        if different:
            # A method without rows, such as one with an invalid option, may have other options now.
            explained = {"", *(row["method"] for row, _ in read_rows(out / MANIFEST))}
            different = [name for name in different if name.partition(" of ")[2] in explained]
        if different:
            reasons = "; ".join(f"{name} was {old[name]!r} and is now {new[name]!r}" for name in different)
            raise BatchError(
                f"{out} contains a run with other options: {reasons}; choose another folder, "
                "or start again with --restart (restart=True), which removes the files of that run"
            )
        command, added = head["command"], list(self._run.command)
        if new.keys() - old.keys():
            command = [*command, "&&", *added] if command else added
        return head | {"fingerprint": old | new, "command": command}

    def lacking(self, index: int, methods: Sequence[str]) -> tuple[str, ...]:
        """Return those of the methods that have no row for an image."""
        is_done = self.manifest.is_done
        return () if index in self._kept else tuple(method for method in methods if not is_done(index, method))

    def prepare(self, network: Network, engine: Engine) -> None:
        """Remove files of killed runs, and store the description of the run, its batch sizes and its images."""
        remove_temporary_files(self.out)
        self.head["preprocess"] = without_address(network.preprocess)
        if self._options.detections is not None:
            self._list_detections(network, self._options.detections)
        # With trust cards, which take longer than all else, progress and interruptions are by image. Volumes are large.
        is_slow = self._output.trust or any(entry.is_volume for entry in self.entries)
        most, chosen = 1 if is_slow else engine.default_batch_size, self._run.batch_size
        size = chosen or max(1, min(most, len(self.entries) // engine.parallel))
        # A resumed run keeps its batch sizes. Only a smaller size is accepted, for machines with less memory.
        stored = self.head.get("batch_sizes", [(0, size)])
        # Write manifest.json first: without it, a listing counts as a file that does not belong to a run.
        self.write_sizes([(first, min(size, chosen or size)) for first, size in stored])
        with writing_to(self.out):
            write_listing(self.out, self.entries)

    def _list_detections(self, network: Network, detections: int | str) -> None:
        """Replace each new image by an entry for each of its detections, with names such as `cat.0`.

        The new images come last. An image without detections keeps one entry, whose row says so.
        """
        new = [entry for entry in self.entries[: self.total] if entry.detection is None]
        first = self.total - len(new)
        most = detections if isinstance(detections, int) else sys.maxsize
        found: list[ImageEntry] = []
        for entry in new:
            stem, suffix = os.path.splitext(entry.label)  # noqa: PTH122
            ranks = range(max(1, min(network.count_detections(entry), most)))
            found += [entry._replace(label=f"{stem}.{rank}{suffix}", detection=rank) for rank in ranks]
        listed, rest = self.entries[:first], self.entries[self.total :]
        self.entries = [*listed, *with_names(found, [*listed, *rest], MOST_PER_FOLDER), *rest]
        self._find_missing()

    def write_sizes(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Write the head with the batch sizes."""
        self.sizes = sizes
        self.head |= {"batch_sizes": sizes, "finished": False}
        with writing_to(self.out):
            write_head(self.out, self.head)

    def append(self, rows: Sequence[Row]) -> None:
        """Append the rows of an image to the manifest."""
        with writing_to(self.out):
            self.manifest.append(rows)
        super().append(rows)
        del self.failures[FAILURES_SHOWN:]

    def finish(self) -> Summary:
        """Sort the manifest, write the page, and return the summary."""
        manifest, methods = self.manifest, self.head["methods"]
        unfinished = Counter(method for index in range(self.total) for method in self.lacking(index, methods))
        failed = {index for index, _ in manifest.failures(methods)}
        counts = {"images": len(self.entries), "rows": len(manifest.rows), "failed": len(failed)}
        state = {"counts": counts, "finished": not unfinished}
        page = self.out / PAGE
        if not (manifest.is_sorted() and self.head | state == self.head and page.is_file()):
            from .report import report

            with writing_to(self.out):
                manifest.sort()
                report(self.out)
                # Write this last: an interrupted update is then repeated.
                write_head(self.out, self.head | state)
        return Summary(
            folder=self.out,
            page=page,
            images=self.total,
            done=self.done,
            fresh=self.fresh,
            failed=len(self.failed),
            kinds=Counter(manifest.failures(self.methods).values()),
            failures=tuple((row["source"], row["method"] or "", row["error"]) for row in self.failures),
            seconds=time.monotonic() - self._start,
            changed=len(self.listing.changed),
            removed=tuple(self.listing.entries[index].source for index in sorted(self.listing.removed)),
            unfinished=unfinished,
            repeated=self.repeated,
        )
