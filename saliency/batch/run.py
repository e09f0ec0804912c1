"""A run from its beginning to its end: what is missing in the folder is made, and told of in the photos' order."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .batch_size import Plan
from .errors import BatchError, unwritable
from .image_entry import Photo
from .listing import joined
from .manifest import Manifest
from .output_folder import FORMAT, LISTING, PAGE, PARQUET, Folder
from .progress import Orders, Progress, Summary, interrupts
from .run_options import Job, differences

if TYPE_CHECKING:
    from torch import nn

    from .drawing import Made
    from .manifest_writer import Committer
    from .work_group import Engine, Group

DISTRIBUTION = "saliency-toolkit"


class Run:
    """One run in a folder that is locked.

    Args:
        job: What is done to each photo.
        found: The photos that the sources lead to now.
        folder: The folder.
        orders: How it goes about.
    """

    def __init__(self, job: Job, found: Sequence[Photo], folder: Folder, orders: Orders) -> None:
        self.job, self.folder, self.orders = job, folder, orders
        self._began = time.monotonic()
        self._noted = 0
        folder.tidy()
        about = folder.about(damaged=orders.restart)
        if about is not None and (orders.restart or not folder.has_rows()):
            folder.clear(folder.listing(damaged=True), [each["name"] for each in about["methods"]] or job.methods)
            about = None
        listed = folder.listing() if about is not None else []
        if about is not None and not listed:
            raise BatchError(f"{folder.path / LISTING} is missing or empty; begin anew with --restart (restart=True)")
        self.fresh = about is None
        self.listing = joined(listed, found)
        self.photos = self.listing.photos
        if about is None:
            folder.require_free(self.photos, job.methods)
        self.about = self._checked(about)
        self.manifest = Manifest(folder.path, job.methods, len(self.photos))
        # The rows go first and the stamps are written last: wherever this is cut short, changes are noticed again.
        self.manifest.read(again=orders.retry, changed=self.listing.changed)
        folder.remove([self.photos[at] for at in self.listing.changed], job.methods)

    def _checked(self, about: dict[str, Any] | None) -> dict[str, Any]:
        """The manifest's head, of this run or the one that it goes on with."""
        fingerprint = self.job.fingerprint()
        if about is None:
            return {
                "format": FORMAT,
                "versions": _versions(),
                "model": {"name": self.job.model_name, "weights": fingerprint["weights"]},
                "command": list(self.orders.command),
                "fingerprint": fingerprint,
                "batch_size": None,
                "batches": [],
                "counts": {},
                "methods": [],
                "categories": None,
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "finished": False,
            }
        different = differences(about["fingerprint"], fingerprint)
        if different:
            raise BatchError(
                f"{self.folder.path} holds a run of another kind: {'; '.join(different)}; choose another folder, or "
                "begin anew with --restart (restart=True), which removes what that run made"
            )
        return about

    @property
    def last(self) -> int:
        """The number of photos that are to be done."""
        limit = self.orders.limit
        return len(self.photos) if limit is None else min(limit, len(self.photos))

    def missing(self, index: int) -> tuple[str, ...]:
        """The methods of a photo that have no row."""
        if index >= self.last:
            return ()
        standing = self.manifest.standing
        return tuple(name for place, name in enumerate(self.job.methods) if not standing.is_done(index, place))

    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        everything = (1 << len(self.job.methods)) - 1
        done = self.manifest.standing.done
        return all(done.get(index, 0) & everything == everything for index in range(self.last))

    def work(self, engine: Engine, lanes: int, most: int) -> tuple[int, tuple[tuple[str, str, str], ...], bool]:
        """Do what is missing: how many photos were done, the first failures, and whether it was interrupted.

        Args:
            engine: Where it is done.
            lanes: How many groups it does at once.
            most: The largest batch that is tried.
        """
        from .manifest_writer import Committer
        from .work_group import Work, loaded

        model = loaded(self.job)
        self._begin(model)
        plan = self._plan(lanes, most)
        committer = Committer(self.folder.path, self.manifest, strict=self.orders.strict)
        with interrupts() as stopping:
            work = Work(self.job, self.folder.path, model, plan, self._groups(plan, committer), stopping)
            with closing(_generator(engine(work))) as results:
                for made in results:
                    self._require_sense(made)
                    self._note(plan)
                    for each in made:
                        committer.add(each)
                    self._tell(committer)
        return committer.fresh, tuple(committer.failures), stopping()

    def _plan(self, lanes: int, most: int) -> Plan:
        """The groups: those that have rows as they were, the others as they come."""
        done = self.manifest.standing.done
        pieces = [(int(start), int(size)) for start, size in self.about["batches"]]
        return Plan(
            len(self.photos),
            self.orders.batch_size,
            most=most,
            lanes=lanes,
            pieces=pieces,
            fixed=max(done, default=-1) + 1,
            settled=self.about["batch_size"],
        )

    def _groups(self, plan: Plan, committer: Committer) -> Iterator[Group]:
        """The groups in which something is missing, each written down before it is handed out."""
        from .drawing import Task

        while (numbers := plan.next()) is not None and numbers.start < self.last:
            wanted = [self.missing(index) for index in numbers]
            self._note(plan)
            if any(wanted):
                committer.expect(numbers, wanted)
                yield [Task(index, self.photos[index], its) for index, its in zip(numbers, wanted, strict=True)]

    def _note(self, plan: Plan) -> None:
        """Write down the groups where they are others than the manifest's head says."""
        if plan.changes != self._noted:
            self._noted = plan.changes
            self.about["batches"] = [list(piece) for piece in plan.pieces]
            self.about["batch_size"] = plan.settled
            self._write_about()

    def _begin(self, model: nn.Module) -> None:
        """Write the listing and the head of the manifest. Raises what is wrong with the model or its methods."""
        from ..render.colors import table
        from .network import Network

        network = Network(self.job, model)
        if network.preprocess is None:
            raise BatchError(
                f"{self.job.model_name} carries no preprocessing; set model.preprocess, as saliency.load does"
            )
        if self.job.look.colormap is not None:
            table(self.job.look.colormap)
        self.about["methods"] = [
            {"name": each.name, "settings": dict(each.settings), "sign": each.sign, "units": each.units}
            for each in network.methods
        ]
        self.about["categories"] = None if network.categories is None else len(network.categories)
        self.about["finished"] = False
        try:
            # The head first: a listing without one is taken for a file of others, a head without rows for nothing.
            self.folder.write_about(self.about)
            if self.listing.is_new:
                self.folder.write_listing(self.photos)
            self.manifest.open()
        except OSError as error:
            raise unwritable(self.folder.path, error) from error

    def _require_sense(self, group: Sequence[Made]) -> None:
        """Raise what is wrong with the call rather than with a photo, as long as nothing was made."""
        rows = [row for made in group for row in made.rows]
        blamed = {"MethodError"} | ({"TargetError"} if self.job.target is not None else set())
        blamed |= {"LayerError"} if self.job.layer is not None else set()
        targets = {self.photos[made.index].target for made in group}
        nothing_yet = self.manifest.standing.rows == 0 and targets == {None}
        if nothing_yet and rows and all(row["error_kind"] in blamed for row in rows):
            raise BatchError(rows[0]["error"])

    def _write_about(self) -> None:
        try:
            self.folder.write_about(self.about)
        except OSError as error:
            raise unwritable(self.folder.path, error) from error

    def _tell(self, committer: Committer) -> None:
        if self.orders.on_progress is not None:
            failed = len(self.manifest.standing.failed)
            self.orders.on_progress(Progress(self._begun(), self.last, committer.fresh, failed))

    def _begun(self) -> int:
        """How many of the photos that are to be done have a row; an earlier run may have done others."""
        done = self.manifest.standing.done
        return len(done) if self.last == len(self.photos) else sum(index < self.last for index in done)

    def finish(self) -> Path:
        """Bring the manifests to their final form, and make the page; its path."""
        standing, complete = self.manifest.standing, self.is_complete()
        counts = {"photos": len(self.photos), "rows": standing.rows, "failed": len(standing.failed)}
        same = standing.ordered and self.about["counts"] == counts and self.about["finished"] == complete
        page = self.folder.path / PAGE
        try:
            self.manifest.sort()
            if not same:
                self.about |= {"counts": counts, "finished": complete}
                self._write_about()
            from .parquet import write_parquet

            if not (same and (self.folder.path / PARQUET).is_file()):
                write_parquet(self.manifest.rows(), self.folder.path / PARQUET)
            if not (same and page.is_file()):
                return _page(self.folder.path)
        except OSError as error:
            raise unwritable(self.folder.path, error) from error
        return page

    def summary(self, page: Path | None, fresh: int = 0, failures: Sequence[tuple[str, str, str]] = ()) -> Summary:
        """What became of the run."""
        standing = self.manifest.standing
        return Summary(
            self.folder.path,
            page,
            self.last,
            self._begun(),
            fresh,
            len(standing.failed),
            Counter(standing.kinds),
            tuple(failures),
            time.monotonic() - self._began,
            len(self.listing.changed),
            self.listing.removed,
        )


def _page(folder: Path) -> Path:
    from .report import report

    return report(folder)


def _generator(results: Iterator[Any]) -> Any:
    """The results as what can be closed: an engine is ended where the run stops on its way."""
    yield from results


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name, distribution in (("saliency", DISTRIBUTION), ("torch", "torch"), ("torchvision", "torchvision")):
        with suppress(PackageNotFoundError):
            found[name] = version(distribution)
    return found
