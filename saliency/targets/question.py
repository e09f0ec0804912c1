"""Questions: what a target asks about each image of a call, and the score that answers it."""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, Self, cast

from torch import Tensor

from ..errors import TargetError, plural
from ..hooks.autograd_graph import view_base
from ..io.geometry import Box, Geometry

Categories = Sequence[str] | None
"""Class names in the order of the output; None if the model has no class names."""

Score = Callable[[Any], Tensor]
"""Output for n variants of one image -> their scores (n,)."""

Prompt = str | tuple[str, ...]
"""A text, or texts whose embeddings are averaged."""

Link = Literal["softmax", "sigmoid", "identity"] | None
"""Function from scores to probabilities; None for a single number per image that may mean anything."""


_METHODS_ONLY = "only methods and `saliency.attention` take a text or a reference as the target"


class PartialNames(tuple[str, ...]):
    """Class names from a mapping with gaps. Other classes have names such as `class 7`."""


class Images:
    """Facts about the images of a call that targets need besides the output.

    A call of a method adds the positions of the images, and encodes texts and references.

    Attributes:
        count: The number of images in the batch.
        categories: The class names.
        answer: The answer that is explained; None for an image.
        logits: The sigmoid or softmax before which the values of each tensor of an output were read; see `Call`.
        located_at: The position of the model's input on each image; empty if it was not computed, or does not exist.
        numbers: The indices of the images that questions are about.
    """

    def __init__(self, count: int = 1, categories: Categories = None, answer: AnswerText | None = None) -> None:
        self.count, self.categories, self.answer = count, categories, answer
        self.logits: Mapping[Tensor, str] = {}
        self.located_at: tuple[Geometry, ...] = ()
        self._readings: list[Any] = [None, {}]  # the last output of a detector, and its candidates by options
        self.numbers: Sequence[int] = range(count)

    @property
    def geometries(self) -> tuple[Geometry, ...]:
        """The position of the model's input on each image; empty without positions."""
        return self.located_at

    def candidates(self, output: Any, key: Hashable, read: Callable[[], list[Any]]) -> list[Any]:
        """Return the candidates of an output, which all targets of a call with the same options in `key` share."""
        if output is not self._readings[0]:
            self._readings[:] = output, {}
        rows: dict[Hashable, list[Any]] = self._readings[1]
        if key not in rows:
            rows[key] = read()
        return rows[key]

    def encode_text(self, texts: Sequence[Prompt]) -> tuple[Tensor, float]:
        """Return the embeddings (K, D) of texts, and the model's factor from cosine similarities to logits."""
        raise TargetError(_METHODS_ONLY)

    def encode_image(self, image: Any) -> Any:
        """Return the model's output for a reference image."""
        raise TargetError(_METHODS_ONLY)

    def read_numbers(self, *rows: Tensor) -> list[float]:
        """Return the numbers of tensors (n,), row by row."""
        return [number for row in rows for number in row.tolist()]

    def is_probability(self, scores: Tensor) -> bool:
        """Return whether the last operation of scores with values of 0 to 1 is a sigmoid or softmax."""
        return False

    def last_operation(self, scores: Tensor) -> str:
        """Return "sigmoid" or "softmax" for scores that are the values before it; else an empty text."""
        base = view_base(scores)  # the part of one image may be a view
        return self.logits.get(scores if base is None else base, "")

    def channel_axis(self, layer: Any) -> tuple[str, int | None]:
        """Return the name of a layer, and the axis of the channels in its output, or None."""
        return str(layer), None

    def score_of(self, function: Score, image: int | None = None) -> Score:
        """Return the score of one image, or of all images, by a user's function of the output of the whole batch."""
        return function

    def only(self, number: int) -> Self:
        """Return the same images, with questions about one of them only."""
        images = copy.copy(self)
        images.numbers = (number,)
        return images

    def located(self, geometries: Sequence[Geometry]) -> Self:
        """Return the same images at other positions, one for each image or one for all."""
        images = copy.copy(self)
        images.located_at = tuple(geometries) * (self.count if len(geometries) == 1 else 1)
        return images

    def class_count(self, outputs: int) -> int:
        """Return the number of classes of an output with this many scores: two for a single score with two names.

        Raises:
            TargetError: The number of class names differs.
        """
        names = outputs if self.categories is None else len(self.categories)
        if (outputs, names) == (1, 2):
            return 2
        if names != outputs and not (names < outputs and isinstance(self.categories, PartialNames)):
            classes = f"{outputs} classes" if outputs > 1 else "1 class"
            hint = "pass one name per class, or a mapping {index: name}, which may have gaps"
            raise TargetError(f"got {plural(names, 'class name')} for a model of {classes}; {hint}")
        return outputs

    def link(self, scores: Tensor, smallest: float | None = None) -> Link:
        """Return the function from scores (N, classes, ...) to probabilities, given the smallest score if known."""
        if self.logits and (last := self.last_operation(scores)):
            return cast("Link", last)
        if scores.numel() and (float(scores.detach().min()) if smallest is None else smallest) >= 0:
            values = scores.detach().float()
            sums_to_one = scores.shape[1] > 1 and bool(((values.sum(1) - 1).abs() < 1e-3).all())
            if sums_to_one or (float(values.max()) <= 1 and self.is_probability(scores)):
                return "identity"
        if scores.shape[1] > 1:
            return "softmax" if scores.is_floating_point() else "identity"
        return "sigmoid" if self.class_count(1) == 2 else None


Asked = tuple[list["Question"], Score]
"""The questions about images of a batch, and the function from the output of the batch to the scores (N,).

For a question about one image, only its row of the scores has a meaning.
"""


class Target(ABC):
    """What to explain: a class, a box, a region, words. It derives a question for each image from the output."""

    @property
    def part(self) -> Hashable:
        """The explained part of a box or a pose, whose score a head of the model computes; None for other targets."""
        return None

    @property
    def reads_logits(self) -> bool:
        """Whether values before a last sigmoid or softmax of the model are read."""
        return False

    def prepared(self, images: Images) -> Target:
        """Return the target with everything computed that does not depend on the output, such as a text's embedding."""
        return self

    @abstractmethod
    def ask(self, output: Any, images: Images) -> Asked:
        """Return a question for each of `images.numbers`, with the top class and the like fixed by this output.

        Raises:
            TargetError: The target does not fit the output, or does not exist in an image.
        """

    def others(self, output: Any, images: Images, kind: Literal["class", "box"]) -> Sequence[Question]:
        """Return questions about the other classes at the same position, or the other boxes, of a single image."""
        return ()


@dataclass(frozen=True, slots=True)
class QuestionFacts:
    """Facts of a question, as an explanation stores them. `Question` describes the attributes."""

    name: str
    index: int | None = None
    is_difference: bool = False
    box: Box | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Question(Target):
    """Question about one image. Used as a target, it asks the same question about another image.

    Attributes:
        score: The function from the model's output for n variants of the image to their scores (n,).
        name: The name of the target, for display.
        index: The index of the class; None if the target is not a class.
        probability: () the probability of the class, or None.
        is_difference: Whether the score is a difference, such as the difference of two classes or texts.
        box: The explained box in pixels of the input.
        mirrored: The score of variants that are mirrored from left to right; None if mirroring changes the question.
        part: As for `Target`.
        reads_logits: As for `Target`.
    """

    score: Score
    name: str
    index: int | None = None
    probability: Tensor | None = None
    is_difference: bool = False
    box: Box | None = None
    mirrored: Score | None = None
    part: Hashable = None
    reads_logits: bool = False

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the question unchanged, for each image."""
        return [self] * len(images.numbers), self.score


def one_score_each(scores: Any, images: int) -> Tensor:
    """Return the scores of a target. Raises TargetError unless they are a float tensor (N,)."""
    if isinstance(scores, Tensor) and scores.shape == (images,) and scores.is_floating_point():
        return scores
    got = f"{scores.dtype} of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
    raise TargetError(f"the target returned {got}; expected one score per image, a float tensor ({images},)")


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text, without special tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def token_texts(tokenizer: Any, ids: Sequence[int], context: int) -> tuple[str, ...]:
    """Return the text that each token adds. The first of several tokens of a character adds the character.

    Args:
        tokenizer: A tokenizer with `decode`.
        ids: The tokens.
        context: The number of previous tokens with which each token is decoded.
    """
    texts: list[str] = []
    for end in range(1, len(ids) + 1):
        start = max(0, len(texts) - context)
        before, text = (tokenizer.decode(ids[start:stop]) if start < stop else "" for stop in (len(texts), end))
        if not text.endswith("\N{REPLACEMENT CHARACTER}") or end == len(ids):  # else the character is incomplete
            texts += [text[len(before) :], *[""] * (end - len(texts) - 1)]
    return tuple(texts)


@dataclass(frozen=True, slots=True)
class AnswerText:
    """Tokens of an answer, and the tokenizer.

    Attributes:
        ids: The ids of its T tokens.
        tokens: Their texts, which form the answer together. The first of several tokens of a character has its text.
        tokenizer: A tokenizer with `encode` and `decode`.
    """

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    tokenizer: Any = field(repr=False)

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.tokens)

    def words(self) -> list[tuple[str, slice]]:
        """Return the words of the answer in order, without punctuation, with the tokens of each word."""
        return [(match[0], self._tokens(match)) for match in re.finditer(r"\w+(?:['’-]\w+)*", self.text)]

    def find(self, text: str) -> list[slice]:
        """Return the tokens of each occurrence of a text, regardless of case: as whole words, or else inside words."""
        for pattern in (rf"(?<!\w){re.escape(text)}(?!\w)", re.escape(text)):
            if slices := [self._tokens(match) for match in re.finditer(pattern, self.text, re.IGNORECASE)]:
                return slices
        return []

    def _tokens(self, match: re.Match[str]) -> slice:
        ends = list(accumulate(map(len, self.tokens)))
        spans = list(zip([0, *ends], ends, strict=False))  # an empty span belongs to the character before it
        inside = [match.start() < end and start < match.end() + (start == end) for start, end in spans]
        return slice(inside.index(True), inside.index(True) + sum(inside))

    def encode_at(self, text: str, start: int) -> list[int]:
        """Return the ids of a text that replaces the answer from a token on, with the space before the token."""
        space = " " if self.tokens[start][:1].isspace() else ""
        before, decode = [*self.ids[:start]], self.tokenizer.decode
        wanted = decode(before).strip() + space + text
        tried = [encode(self.tokenizer, text), encode(self.tokenizer, f" {text}")]
        right = [ids for ids in tried if ids and decode([*before, *ids]).strip() == wanted.strip()]
        return min(right or filter(None, tried), key=len)
