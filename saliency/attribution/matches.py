"""The result of `explain_matches`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ..io.preprocess import Frame

Product = Literal["cosine", "dot"]
"""Similarities that are a sum over pairs of cells."""


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """Result of `explain_matches`: the share of each pair of cells in the similarity of two images.

    Attributes:
        values: (h, w, h', w') the shares of the score, signed, in units of the score: `values[i, j, k, l]` belongs to
            the cell in row i and column j of the first image, and the cell in row k and column l of the second.
        score: The similarity of both images.
        measure: The similarity: "cosine", or "dot" for the inner product of the embeddings.
        method: The method's name in the registry.
        frames: The position of the model's input on each original image; None for an image given as a tensor.
    """

    values: Tensor = field(repr=False)
    score: float
    measure: Product
    method: str
    frames: tuple[Frame | None, Frame | None] = field(repr=False)
