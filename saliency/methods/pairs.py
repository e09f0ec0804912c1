"""Explain the similarity of two images: one map of each, or the matches between their parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Never, get_args

import torch
from torch import Tensor

from ..attribution.base import Attribution
from ..attribution.estimates import normal
from ..attribution.explanation import Explanation, Matches, Product
from ..attribution.passes import chunk_size
from ..calls import known_keywords, refuse_keywords
from ..errors import MethodError, TargetError, plural
from ..io.axes import at_least_float32
from ..io.inputs import Batch, ImagesLike
from ..model.answer import Answer
from ..model.call import NO_ARGUMENTS, prepared_for_attribution, run_model
from ..targets.classes import TargetList, embedding
from ..targets.question import Asked, Images
from ..targets.similarity import Measure, Similarity, similarity
from ..validation import check_choice, check_integer
from .cam import HiResCAM
from .deep_lift import DeepLIFT
from .gradient import InputXGradient, VanillaGradient
from .lrp import LRP, AttnLRP

LINEAR = (LRP, AttnLRP, DeepLIFT, HiResCAM, InputXGradient, VanillaGradient)
"""Methods whose map of a sum of scores is the sum of the maps, so that they can explain directions."""


def pair(
    method: Attribution, a: ImagesLike, b: ImagesLike, *, measure: Measure = "cosine"
) -> tuple[Explanation, Explanation]:
    """Explain the similarity of two images, with a map of each.

    The maps equal the maps of `method.attribute(a, similarity(b))` and `method.attribute(b, similarity(a))`. If both
    inputs have one size, they form one batch, and one forward also computes the embeddings.

    Args:
        method: The method.
        a: An image or several, as for `Attribution.attribute`.
        b: The image to compare with, or one for each image of `a`.
        measure: As for `saliency.similarity`.

    Returns:
        The explanations of `a` and of `b`. `saliency.figure` draws both.

    Raises:
        MethodError: `method` is not an `Attribution`, or the numbers of images differ.
        TargetError: The model does not return one embedding (N, D), or `measure` is unknown.
    """
    check_choice("measure", measure, get_args(Measure), error=TargetError)
    first, second = _read(method, a, b)
    if first.inputs.shape != second.inputs.shape:  # they cannot be one batch
        to_first, to_second = ([similarity(x, measure=measure) for x in batch.inputs] for batch in (first, second))
        return method.attribute(first, to_second), method.attribute(second, to_first)
    images = len(first.inputs)
    batch = Batch(torch.cat([first.inputs, second.inputs]), first.frames + second.frames)
    partners: list[Any] = []  # for their names
    for side in (b, a):
        partners += side if isinstance(side, list | tuple) and len(side) == images else [side] * images
    both = method.attribute(batch, PairSimilarity(tuple(partners), measure))
    return both[:images], both[images:]


@dataclass(frozen=True, slots=True, eq=False)
class PairSimilarity(Similarity):
    """Similarity of each image of a batch to its partner, half a batch away; `references` are the partners."""

    def prepared(self, images: Images) -> PairSimilarity:
        """Return the target unchanged: the first output of the model has all embeddings."""
        return self

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the similarity of each image to the embedding of its partner in the same output."""
        embeddings = embedding(output).detach()
        partners = zip(self.references, embeddings.roll(len(embeddings) // 2, 0)[:, None], strict=True)
        targets = [Similarity((partner,), self.measure, embeddings=row) for partner, row in partners]
        return TargetList(tuple(targets)).ask(output, images)


@known_keywords
def matches(
    method: Attribution,
    a: ImagesLike,
    b: ImagesLike,
    *,
    measure: Product = "cosine",
    cells: int = 14,
    passes: int | None = 100,
    seed: int = 0,
    **unknown: Never,
) -> Matches:
    """Explain which part of one image matches which part of another.

    The dot product of two embeddings is the sum of phi_m(a) * phi_m(b) over their numbers m. The method explains each
    number on both images. The match of the cells i and j is the sum of R_m(a)_i * R_m(b)_j over m, where R_m is the map
    of number m, summed over the channels and pixels of a cell. With `LRP` this is BiLRP. With `InputXGradient` it is
    the Hessian of the dot product, times both inputs. The matches sum to the similarity if each R_m sums to phi_m, as
    in a network of ReLUs without biases. Otherwise, biases absorb a part.

    Runs two forwards, and one forward and one backward for each direction and image. They run in chunks, so the memory
    does not depend on the number of directions.

    Args:
        method: `LRP`, `AttnLRP`, `CPLRP`, `DeepLIFT`, `HiResCAM`, `InputXGradient` or `VanillaGradient` of a model.
        a: One image, as for `Attribution.attribute`.
        b: The other image.
        measure: "dot" for the inner product of the embeddings. "cosine" divides it, and all matches, by both lengths,
            which are treated as constants.
        cells: The number of cells along the longer edge, limited by the size of the method's map. Cells are square.
        passes: The number of directions that are explained instead of all D numbers, at least 3: the directions of both
            embeddings, and random directions orthogonal to them. The matches are then unbiased estimates, and without
            biases their sum is exact. The authors' code explains 100 random directions. None explains all numbers.
        seed: The seed of the random directions.

    Raises:
        MethodError: A side has several images, the method is not in this list, or an option is invalid.
        TargetError: The model does not return one embedding (N, D).

    Source: Eberle et al., "Building and Interpreting Deep Similarity Models" (2020), https://arxiv.org/abs/2003.05431.
    """
    if unknown:
        refuse_keywords(unknown, matches, method)
    check_choice("measure", measure, get_args(Product))
    check_integer("cells", cells, least=1)
    batches = _read(method, a, b)
    if len(batches[0].inputs) != 1:
        raise MethodError(f"matches takes one image on each side, got {len(batches[0].inputs)}")
    if not isinstance(method, LINEAR):
        names = ", ".join(cls.__name__ for cls in LINEAR)
        raise MethodError(f"{method.name}: the maps of matches must be linear in the score, as for {names}")
    with prepared_for_attribution(method.model, **NO_ARGUMENTS, layout=method.layout):
        with torch.no_grad():
            first, second = (at_least_float32(embedding(run_model(method.model, batch.inputs)))[0] for batch in batches)
        rows, chunk = _directions(first, second, passes, seed), chunk_size(batches[0].inputs)
        parts = [rows[start : start + chunk] for start in range(0, len(rows), chunk)]  # (k, D) each
        maps_a, maps_b = (torch.cat([_maps(method, batch.inputs, part, cells) for part in parts]) for batch in batches)
    scale = 1 / max(float(first.norm() * second.norm()), 1e-12) if measure == "cosine" else 1.0
    values = torch.tensordot(maps_a, maps_b, dims=([0], [0])) * scale  # (K, h, w) and (K, h', w')
    return Matches(
        values, float(first @ second) * scale, measure, method.name, (batches[0].frames[0], batches[1].frames[0])
    )


def _read(method: Attribution, a: ImagesLike, b: ImagesLike) -> tuple[Batch, Batch]:
    """Read both sides of a pair. Raises MethodError unless each image has a partner."""
    if not isinstance(method, Attribution):
        raise MethodError(f"expected a method, such as LRP(model), got {type(method).__name__}")
    first, second = method.read(a), method.read(b)
    if isinstance(first, Answer) or isinstance(second, Answer):
        raise MethodError("a pair is of two images, got an answer; explain its words: attribute(answer, target)")
    if len(first.inputs) != len(second.inputs):
        sides = " and ".join(plural(len(side.inputs), "image") for side in (first, second))
        raise MethodError(f"each image of a pair needs a partner, got {sides}")
    return first, second


def _directions(first: Tensor, second: Tensor, count: int | None, seed: int) -> Tensor:
    """Return directions (K, D) such that the products of the projections of two embeddings sum to their dot product."""
    numbers = len(first)
    count = numbers if count is None else min(check_integer("passes", count, least=3), numbers)
    random = normal((numbers, max(count - 2, 0)), seed).to(first)
    basis: Tensor = torch.linalg.qr(torch.column_stack([first, second, random])).Q  # (D, K)
    # The product of the random directions with their transpose is, on average, the identity of the other D - 2 numbers.
    basis[:, 2:] *= math.sqrt(max(numbers - 2, 1) / max(count - 2, 1))
    # Most scores would be 0, and any rounding error of relevance would be a large fraction of them. A reflection of the
    # directions does not affect the matches, and gives all directions the same product with the first embedding.
    across = torch.full_like(basis[0], -(basis.shape[1] ** -0.5))
    across[0] += 1
    return (basis - torch.outer(basis @ across, across) * 2 / (across @ across).clamp(min=1e-30)).T


def _maps(method: Attribution, x: Tensor, rows: Tensor, cells: int) -> Tensor:
    """Return the maps (K, h, w) of an image's embedding along directions (K, D), summed over square cells."""
    batch = x.expand(len(rows), *x.shape[1:])
    target = method.questions(lambda output: (embedding(output) * rows).sum(1), batch)
    maps = method.explain(batch, target).values.sum(1, dtype=rows.dtype)
    longest = max(maps.shape[1:])
    for axis, length in enumerate(maps.shape[1:], 1):
        count = max(1, round(min(cells, longest) * length / longest))
        cell = torch.arange(length, device=maps.device) * count // length
        maps = maps.new_zeros(*maps.shape[:axis], count, *maps.shape[axis + 1 :]).index_add_(axis, cell, maps)
    return maps
