"""The similarity of two images: a map of each, and which part of one matches which part of the other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..attribution.base import Attribution, TracedAttribution
from ..attribution.explanation import Explanation
from ..attribution.forward import at_least_float32
from ..engine.estimates import generator
from ..engine.multi_pass import chunk_size
from ..errors import MethodError, TargetError, plural
from ..hooks.forward_args import bind_forward_args
from ..hooks.model_state import prepared_for_attribution, run_model
from ..io.inputs import Batch, ImagesLike
from ..io.preprocess import Frame
from ..layers.layout import bind_layout
from ..targets.embedding import Measure, PairSimilarity, similarity
from ..targets.targets import embedding
from ..validation import check_choice, check_integer

Product = Literal["cosine", "dot"]


def explain_pair(
    method: Attribution, a: ImagesLike, b: ImagesLike, *, by: Measure = "cosine"
) -> tuple[Explanation, Explanation]:
    """Explain the similarity of two images on both of them.

    The maps equal those of `method.attribute(a, similarity(b))` and `method.attribute(b, similarity(a))`. If both
    inputs have one size, they are one batch of one forward, which also gives the embeddings.

    Args:
        method: The method.
        a: An image or several, as for `Attribution.attribute`.
        b: The image to compare with, or one for each image of `a`.
        by: As for `saliency.similarity`.

    Returns:
        The explanations of `a` and of `b`. `saliency.figure` draws both.

    Raises:
        MethodError: `method` is not a method, or the numbers of images differ.
        TargetError: The model does not return one embedding (N, D), or `by` is unknown.
    """
    check_choice("by", by, get_args(Measure), error=TargetError)
    first, second = _read(method, a, b)
    if first.inputs.shape != second.inputs.shape:  # they cannot be one batch
        left, right = ([similarity(x, by=by) for x in batch.inputs] for batch in (first, second))
        return method.attribute(a, right), method.attribute(b, left)
    images = len(first.inputs)
    batch = Batch(torch.cat([first.inputs, second.inputs]), first.frames + second.frames)
    partners: list[Any] = [[*side] if isinstance(side, list | tuple) else [side] * images for side in (b, a)]
    with prepared_for_attribution(method.model), bind_forward_args((), 2 * images), bind_layout(method.layout):
        pair = PairSimilarity((*partners[0], *partners[1]), by)
        target = method.explained_target(method.resolve(pair, batch.inputs, batch.frames))
        both = method.explanation(method.explain(batch.inputs, target), target, batch)
    return both[:images], both[images:]


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """Result of `explain_matches`: the share of each pair of cells in the similarity of two images.

    Attributes:
        values: (h, w, h', w') the shares of the score, signed, in units of the score: `values[i, j, k, l]` belongs to
            the cell in row i and column j of the first image, and the cell in row k and column l of the second.
        score: The similarity of both images.
        by: The similarity: "cosine", or "dot" for the inner product of the embeddings.
        method: The method's name in the registry.
        frames: The position of the model's input on each original image; None for an image given as a tensor.
    """

    values: Tensor
    score: float
    by: Product
    method: str
    frames: tuple[Frame | None, Frame | None]

    def __repr__(self) -> str:
        """Return one line: the score, the method, and the shape of the values."""
        return f"<Matches of {self.by} similarity {self.score:.3g} by {self.method}, values {tuple(self.values.shape)}>"


def explain_matches(
    method: TracedAttribution,
    a: ImagesLike,
    b: ImagesLike,
    *,
    by: Product = "cosine",
    cells: int = 14,
    directions: int | None = 100,
    seed: int = 0,
) -> Matches:
    """Explain which part of one image matches which part of another.

    The dot product of two embeddings is the sum over their numbers m of phi_m(a) * phi_m(b). The method explains each
    number on both images. The share of the cells i and j is the sum over m of R_m(a)_i * R_m(b)_j, where R_m is the map
    of number m, summed over channels and pixels of a cell. With `LRP` this is BiLRP; with `InputXGradient`, the Hessian
    of the dot product times both inputs. If the maps of the numbers sum to the numbers, as for `InputXGradient` of a
    network of ReLUs without biases, the shares sum to the score.

    Runs two forwards, and one forward and one backward for each direction and image, in chunks that bound the memory.

    Args:
        method: A method of one forward, such as `LRP(model)`, `AttnLRP(model)` or `InputXGradient(model)`.
        a: One image, as for `Attribution.attribute`.
        b: The other image.
        by: "dot" for the inner product of the embeddings; "cosine" divides it, and all shares, by their lengths, which
            count as constants.
        cells: The number of cells along the longer edge; at most the values of the method's map.
        directions: The number of directions of the embedding that are explained instead of all D numbers: those of both
            embeddings, and random ones orthogonal to them. The expected shares are the exact ones, and as much of them
            sums to the score. The authors explain 100 random directions. None explains all numbers.
        seed: The seed of the random directions.

    Raises:
        MethodError: There is not one image on each side, the method runs many passes, or an option is invalid.
        TargetError: The model does not return one embedding (N, D).

    Source: Eberle et al., "Building and Interpreting Deep Similarity Models" (2020), https://arxiv.org/abs/2003.05431.
    """
    check_choice("by", by, get_args(Product))
    check_integer("cells", cells, least=1)
    batches = _read(method, a, b)
    if len(batches[0].inputs) != 1:
        raise MethodError(f"explain_matches takes one image on each side, got {len(batches[0].inputs)}")
    if not isinstance(method, TracedAttribution):
        raise MethodError(f"{method.name} runs many passes; use a method of one forward, such as LRP or InputXGradient")
    with prepared_for_attribution(method.model), bind_forward_args((), 1), bind_layout(method.layout):
        with torch.no_grad():
            first, second = (at_least_float32(embedding(run_model(method.model, own.inputs)))[0] for own in batches)
        rows = _directions(first, second, directions, seed).split(chunk_size(batches[0].inputs))  # (k, D) each
        maps = [torch.cat([_maps(method, own.inputs, part, cells) for part in rows]) for own in batches]  # (K, h, w)
    scale = 1 / float(first.norm() * second.norm()) if by == "cosine" else 1.0
    values = torch.tensordot(*maps, dims=([0], [0])) * scale
    return Matches(values, float(first @ second) * scale, by, method.name, (batches[0].frames[0], batches[1].frames[0]))


def _read(method: Attribution, a: ImagesLike, b: ImagesLike) -> tuple[Batch, Batch]:
    """Read both sides of a pair. Raises MethodError unless each image has a partner."""
    if not isinstance(method, Attribution):
        raise MethodError(f"expected a method, such as LRP(model), got {type(method).__name__}")
    first, second = method.read(a), method.read(b)
    if len(first.inputs) != len(second.inputs):
        sides = " and ".join(plural(len(side.inputs), "image") for side in (first, second))
        raise MethodError(f"each image of a pair needs a partner, got {sides}")
    return first, second


def _directions(first: Tensor, second: Tensor, count: int | None, seed: int) -> Tensor:
    """Return directions (K, D) such that the products of the projections of two embeddings sum to their dot product."""
    numbers = len(first)
    if count is None or check_integer("directions", count, least=3) >= numbers:
        return torch.eye(numbers, dtype=first.dtype, device=first.device)
    random = torch.randn(numbers, count - 2, generator=generator(seed), device="cpu").to(first)
    basis = torch.linalg.qr(torch.column_stack([first, second, random])).Q  # (D, K)
    # The product of the random directions with their transpose is, on average, the identity of the other D - 2 numbers.
    basis[:, 2:] *= math.sqrt((numbers - 2) / (count - 2))
    return basis.T


def _maps(method: TracedAttribution, x: Tensor, rows: Tensor, cells: int) -> Tensor:
    """Return the maps (K, h, w) of an image's embedding along directions (K, D), summed over square cells."""
    batch = x.expand(len(rows), *x.shape[1:])
    target = method.resolve(lambda output: (embedding(output) * rows).sum(1), batch)
    maps = method.explain(batch, method.explained_target(target)).values.sum(1, dtype=rows.dtype)
    longest = max(maps.shape[1:])
    for axis, length in enumerate(maps.shape[1:], 1):
        count = max(1, round(min(cells, longest) * length / longest))
        cell = torch.arange(length, device=maps.device) * count // length
        maps = maps.new_zeros(*maps.shape[:axis], count, *maps.shape[axis + 1 :]).index_add_(axis, cell, maps)
    return maps
