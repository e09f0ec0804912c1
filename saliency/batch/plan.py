"""The plan of a run: which images with which methods, in which batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .listing import ImageEntry


@dataclass(frozen=True, slots=True)
class BatchSlot:
    """One position of a batch.

    Attributes:
        index: Number of the image in the listing.
        entry: The image.
        methods: Methods without results; empty for an image that only keeps its position in the batch.
    """

    index: int
    entry: ImageEntry
    methods: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Batches of a run. Their limits depend only on the numbers of the images and on the sizes.

    Attributes:
        entries: The images.
        missing: Methods without results, by the number of the image; images with all results are absent.
        sizes: Pairs of the first image and the size of its batch and of the following batches.
    """

    entries: Sequence[ImageEntry]
    missing: Mapping[int, tuple[str, ...]]
    sizes: Sequence[tuple[int, int]]

    def __iter__(self) -> Iterator[list[BatchSlot]]:
        """Yield the batches with missing results."""
        for (first, size), (end, _) in pairwise([*self.sizes, (len(self.entries), 1)]):
            for start in range(first, end, size):
                batch = range(start, min(start + size, end))
                if any(index in self.missing for index in batch):
                    yield [BatchSlot(index, self.entries[index], self.missing.get(index, ())) for index in batch]

    def halved(self) -> Plan:
        """Return a plan with half of the size for the first batch, which does not fit into memory, and all later ones.

        The images from that batch on have no results of this size yet, so a resumed run makes the same batches.
        """
        batch = next(iter(self))
        start, half = batch[0].index, (len(batch) + 1) // 2
        sizes = {first: size if first < start else min(size, half) for first, size in self.sizes}
        return replace(self, sizes=sorted((sizes | {start: half}).items()))
