"""Rows on their way into the manifest: in the order of the photos, once what they tell of is in place."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from .drawing import Made
from .errors import StoppedError, unwritable
from .manifest import Manifest

TOLD = 20
"""Failures that a summary names."""


class Committer:
    """Takes what was made in any order, and writes it down in the order of the photos.

    Args:
        folder: The folder of the run.
        manifest: Its manifest.
        strict: Whether a failure stops the run; its row is not written, so that the photo is tried again.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, strict: bool) -> None:
        self._folder, self._manifest, self._strict = folder, manifest, strict
        self._expected: deque[int] = deque()  # photos that are under way, in their order
        self._made: dict[int, Made] = {}  # those that are done before an earlier one is
        self.fresh = 0
        self.failures: list[tuple[str, str, str]] = []

    def expect(self, numbers: Sequence[int], wanted: Sequence[Sequence[str]]) -> None:
        """These photos come next, where something of them is wanted."""
        self._expected.extend(number for number, its in zip(numbers, wanted, strict=True) if its)

    def add(self, made: Made) -> None:
        """Take what was made of a photo.

        Raises:
            StoppedError: Nothing can be written any more, or a photo failed in a strict run.
        """
        self._made[made.index] = made
        while self._expected and self._expected[0] in self._made:
            self._commit(self._made.pop(self._expected.popleft()))

    def _commit(self, made: Made) -> None:
        if made.fatal is not None:
            raise unwritable(self._folder, made.fatal)
        bad = next((row for row in made.rows if row["error"] is not None), None)
        if bad is not None and self._strict:
            method = f" by {bad['method']}" if bad["method"] else ""
            raise StoppedError(f"{bad['source']}{method}: {bad['error']}; --strict (strict=True) stops at the first")
        try:
            self._manifest.append(made.rows)
        except OSError as error:
            raise unwritable(self._folder, error) from error
        self.fresh += 1
        for row in made.rows:
            if row["error"] is not None and len(self.failures) < TOLD:
                self.failures.append((row["source"], row["method"] or "", row["error"]))
