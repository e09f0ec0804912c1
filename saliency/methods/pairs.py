"""Explain similarities: of two images, by maps or matches of their parts; of a text, by the weight of its tokens."""

from __future__ import annotations

import html
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never, get_args

import torch
from torch import Tensor, nn

from ..attribution.base import Attribution, get_method
from ..attribution.estimates import normal
from ..attribution.explanation import Explanation, Matches, Product
from ..attribution.passes import chunk_size
from ..calls import known_keywords, refuse_keywords
from ..errors import ImageError, LayerError, MethodError, ModelError, TargetError, plural
from ..hooks.manager import HookManager
from ..io.atomic_write import atomic_write
from ..io.axes import at_least_float32
from ..io.inputs import Batch, ImageLike, ImagesLike, read
from ..model.answer import Answer
from ..model.call import NO_ARGUMENTS, model_attribute, prepared_for_attribution, reference_tensor, run_model, unwrap
from ..model.dual_encoder import DualEncoder, LateInteraction
from ..model.layers import attention_layout
from ..targets.classes import TargetList, embedding
from ..targets.question import Asked, Images, QuestionFacts
from ..targets.similarity import Measure, Similarity, similarity
from ..validation import check_choice, check_integer, described
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


TEXT_METHODS = ("integrated_gradients", "deep_lift", "input_x_gradient", "attn_lrp", "cp_lrp")


@dataclass(frozen=True, slots=True, eq=False)
class TextExplanation:
    """Importance of each token of a text; a notebook shows it as coloured words.

    Attributes:
        text: The text.
        tokens: The L tokens. Padding is one token ("!" in open_clip), and is left out if it has no influence.
        values: (L,) the importance of each token, signed, in units of the score.
        score: The cosine similarity of the text and the image.
        method: The method's name in the registry.
    """

    text: str
    tokens: tuple[str, ...]
    values: Tensor
    score: float
    method: str

    def __str__(self) -> str:
        """Return one line per token: its value and its text."""
        return "\n".join(f"{value:+9.4f}  {token}" for token, value in zip(self.tokens, self.values, strict=True))

    def _repr_html_(self) -> str:
        """Return the tokens as HTML: red for positive values, blue for negative values."""
        largest = float(self.values.abs().max()) or 1.0
        words = [
            f'<span title="{value:+.4f}" style="background: hsla({0 if value > 0 else 210}, 80%, 50%, '
            f'{abs(value) / largest:.2f})">{html.escape(token)}</span>'
            for token, value in zip(self.tokens, self.values.tolist(), strict=True)
        ]
        return f'<meta charset="utf-8"><p>{" ".join(words)}</p>'

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the coloured words to a file of HTML, atomically, and return the path."""
        with atomic_write(path) as temporary:
            temporary.write_text(self._repr_html_(), "utf-8")
        return Path(path)


class _TextTower(nn.Module):
    """Text tower of a model for one text, as a function of the embeddings of its tokens (N, 1, L, D)."""

    def __init__(self, encoder: DualEncoder, text: str) -> None:
        super().__init__()
        self.encoder = encoder
        self.tokens = encoder.tokenize(text)
        tables = [module for module in encoder.modules() if isinstance(module, nn.Embedding)]
        self.table = max(tables, key=lambda table: table.num_embeddings)  # smaller tables are for positions

    def forward(self, x: Tensor) -> Tensor:
        tokens = {name: values.expand(len(x), -1) for name, values in self.tokens.items()}
        with HookManager() as hooks:
            hooks.revise(self.table, lambda _: x[:, 0])
            return self.encoder.encode_tokens(tokens)


def token_importance(
    model: nn.Module, image: ImageLike, text: str, method: str = "integrated_gradients", **options: Any
) -> TextExplanation:
    """Explain the cosine similarity of an image and a text by the tokens of the text.

    The method explains the text tower as a function of the token embeddings. The value of a token is the sum over its
    embedding. Baselines are by default embeddings of zero, so the values of integrated gradients and DeepLIFT sum to
    the score minus the score of such embeddings. After a layer norm, the score hardly depends on the length of an
    embedding. Gradient x input is then close to zero.

    Args:
        model: A `DualEncoder`.
        image: The image, as for `Attribution.attribute`.
        text: The text.
        method: One of "integrated_gradients", "deep_lift", "input_x_gradient", "attn_lrp" and "cp_lrp".
        options: Options of the method, such as `steps`.

    Raises:
        ModelError: The model has no text encoder.
        MethodError: The method is not supported, an option is invalid, or the text is not a string.
        ImageError: The image cannot be read, or there are several.

    Source: as for the method. Integrated gradients: Sundararajan et al., "Axiomatic Attribution for Deep Networks"
        (2017), https://arxiv.org/abs/1703.01365.
    """
    model = unwrap(model)
    if not isinstance(model, DualEncoder) or isinstance(model, LateInteraction):
        raise ModelError(
            f"{type(model).__name__} has no text encoder with one embedding per text; expected a saliency.DualEncoder"
        )
    if not isinstance(text, str):
        raise MethodError(f"text={described(text)}: expected one text, such as 'a photo of a cat'")
    cls = get_method(check_choice("method", method, TEXT_METHODS))
    with prepared_for_attribution(model), torch.no_grad():
        images = run_model(model, cls(model).read(image).inputs)["image_embeds"]
        if len(images) > 1:
            raise ImageError(f"expected one image, got {len(images)}")
        tower = _TextTower(model, text)
        ids = next(iter(tower.tokens.values()))[0]  # (L,)
        x = tower.table(ids)[None, None]  # (1, 1, L, D)
    result = cls(tower, **options).attribute(x, similarity(images[0]))
    return TextExplanation(text, *_tokens(model, ids, result.values.sum((0, 1, 3))), float(result.scores), method)


def word_similarity(model: nn.Module, image: ImageLike, text: str) -> Explanation:
    """Return the similarity of each word of a text to each patch of an image, as one map per word.

    The maximum over all tokens of the image, also tokens without a position, is the word's part of `saliency.max_sim`.

    Args:
        model: A `LateInteraction`.
        image: One image, as for `Attribution.attribute`.
        text: The text.

    Returns:
        An explanation of L words, for `saliency.figure`: values (L, 1, h, w), dimensionless, the `scores` (L,) of
            `max_sim`, and the words as target names.

    Raises:
        ModelError: The model is not a `LateInteraction`.
        ImageError: The image cannot be read, or there are several.
        LayerError: The image tokens are not a grid of patches.
    """
    model = unwrap(model)
    if not isinstance(model, LateInteraction):
        raise ModelError(f"{type(model).__name__} has no embedding per word; expected a saliency.LateInteraction")
    batch = read(image, model_attribute("preprocess", model), like=reference_tensor(model))
    x, words = batch.inputs, model.words(text)
    if len(x) > 1:
        raise ImageError(f"expected one image, got {len(x)}")
    with prepared_for_attribution(model), torch.no_grad():
        tokens = at_least_float32(run_model(model, x)["image_embeds"])  # (1, tokens, D)
        try:
            layout = attention_layout(model, tokens.shape[1], x)
        except LayerError as error:
            problem = f"the tokens of {type(model.model).__name__} are not one for each patch of the image"
            raise LayerError(problem) from error
    similarities = tokens @ model.encode_text([text]).to(tokens).T  # (1, tokens, L)
    return Explanation(
        layout(similarities).movedim(1, 0),
        similarities[0].amax(0),
        method="word_similarity",
        questions=tuple(map(QuestionFacts, words)),
        input_size=tuple(x.shape[2:]),
        frames=batch.frames * len(words),
        sign="positive",
        title="WordSimilarity",
        units="similarity",
    )


def _tokens(model: DualEncoder, ids: Tensor, values: Tensor) -> tuple[tuple[str, ...], Tensor]:
    """Return the tokens and their values, with the padding as one token, or without it if its value is zero."""
    padding = int((ids == ids[-1]).logical_not().nonzero().max()) + 1
    values = torch.cat([values[:padding], values[padding:].sum()[None]])
    values = values if values[-1] else values[:-1]
    return tuple(model.tokenizer.decode([token]).strip() for token in ids[: len(values)].tolist()), values
