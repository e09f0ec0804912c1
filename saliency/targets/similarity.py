"""Targets for models that return an embedding: similarity to a text, to a reference image, or to an embedding."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import TargetError, plural
from ..io.axes import at_least_float32
from ..validation import check_choice, described
from .classes import embedding
from .question import Asked, Images, Prompt, Question, Target

Measure = Literal["cosine", "dot", "distance"]
ITSELF = "similarity to itself"
"""The name of the target `similarity()` only."""
_MOST_NAMED = 3  # other texts that the name of a target lists; of more texts, it states only the number


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingScore:
    """Similarity of the model's embedding to other embeddings.

    Attributes:
        compare: The function from the embeddings (N, D) of an output and `others` (K, D) to scores (N,).
        others: (K, D) the embeddings to compare with.
        read: The function from an output to its embeddings.
    """

    compare: Callable[[Tensor, Tensor], Tensor]
    others: Tensor
    read: Callable[[Any], Tensor] = embedding

    def __call__(self, output: Any) -> Tensor:
        """Return the scores (N,), in float32 or wider."""
        embeddings = at_least_float32(self.read(output))
        return self.compare(embeddings, self.others.to(embeddings))

    def ask(self, output: Any, images: Images, name: str, *, is_difference: bool = False) -> Asked:
        """Return the questions. Raises TargetError unless all embeddings have one length."""
        embeddings = self.read(output)
        if embeddings.shape[-1] != self.others.shape[1]:
            problem = f"the reference has {self.others.shape[1]} numbers"
            raise TargetError(f"{problem}; the model's embedding has {embeddings.shape[-1]}")
        return Question(self, name, is_difference=is_difference, mirrored=self).ask(output, images)


@dataclass(frozen=True, slots=True, eq=False)
class _EmbeddingTarget(Target):
    """Target that compares the model's embedding with others (K, D), which `prepared` computes."""

    embeddings: Tensor | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True, eq=False)
class TextSimilarity(_EmbeddingTarget):
    """Similarity to a text, or its log-odds against other texts; see `text`."""

    prompt: Prompt
    against: tuple[Prompt, ...] = ()

    def prepared(self, images: Images) -> TextSimilarity:
        """Return the target with the embeddings of its texts: of unit length, or scaled to give logits."""
        embeddings, scale = images.encode_text([self.prompt, *self.against])
        return replace(self, embeddings=F.normalize(embeddings, dim=1) * (scale if self.against else 1))

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the questions about the cosine similarity, or the log-odds."""
        number = len(self.against)
        others = " or ".join(map(_name, self.against)) if number <= _MOST_NAMED else f"{number} other texts"
        name = _name(self.prompt) + (f" rather than {others}" if others else "")
        score = EmbeddingScore(_text_scores, cast("Tensor", self.embeddings))
        asked, _ = score.ask(output, images, name, is_difference=bool(self.against))
        if self.against:
            probabilities = score(output).detach().float().sigmoid()  # among all texts
            asked = [replace(asked[0], probability=probabilities[image]) for image in images.numbers]
        return asked, score


def _text_scores(embeddings: Tensor, texts: Tensor) -> Tensor:
    """Return the cosines (N,) of the embeddings and a text, or the log-odds of the first of several texts."""
    scores = F.linear(F.normalize(embeddings, dim=1), texts)  # (N, K)
    return scores[:, 0] if len(texts) == 1 else scores[:, 0] - scores[:, 1:].logsumexp(1)


def _name(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else f"{prompt[0]} (mean of {plural(len(prompt), 'text')})"


@dataclass(frozen=True, slots=True, eq=False)
class Similarity(_EmbeddingTarget):
    """Similarity to an image or an embedding, or the difference of two similarities; see `similarity`."""

    references: tuple[Any, ...]  # one, or two for a contrast
    measure: Measure = "cosine"

    def prepared(self, images: Images) -> Similarity:
        """Return the target with the embeddings of its references."""
        rows = [
            torch.as_tensor(reference, device="cpu").reshape(1, -1)
            if _is_embedding(reference)
            else embedding(images.encode_image(reference))
            for reference in self.references
        ]
        return replace(self, embeddings=torch.cat([row.detach().to(rows[0]) for row in rows]))

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the questions about the similarity."""
        names = [Path(r).name if isinstance(r, str | os.PathLike) else "a reference" for r in self.references]
        score = EmbeddingScore(partial(_similarities, self.measure), cast("Tensor", self.embeddings))
        name = f"similarity to {' rather than '.join(names)}"
        return score.ask(output, images, name, is_difference=len(self.references) > 1)


def _similarities(measure: Measure, embeddings: Tensor, others: Tensor) -> Tensor:
    """Return the similarities (N,) to the first of `others`, minus the similarities to the second, if any."""
    if measure == "cosine":
        embeddings, others = F.normalize(embeddings, dim=1), F.normalize(others, dim=1)
    if measure == "distance":
        scores = torch.stack([-torch.linalg.vector_norm(embeddings - other, dim=1) for other in others], 1)
    else:
        scores = F.linear(embeddings, others)  # (N, K)
    return scores[:, 0] if len(others) == 1 else scores[:, 0] - scores[:, 1]


@dataclass(frozen=True, slots=True)
class SelfSimilarity(Target):
    """Cosine similarity of changed versions of an image to the image itself; see `similarity`."""

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the questions, with the embeddings of the images themselves from their output."""
        itself = embedding(output).detach()
        scores = [EmbeddingScore(F.cosine_similarity, itself[image : image + 1]) for image in images.numbers]
        questions = [Question(score, ITSELF, mirrored=score) for score in scores]
        return questions, EmbeddingScore(F.cosine_similarity, itself)


@dataclass(frozen=True, slots=True, eq=False)
class MaxSimilarity(_EmbeddingTarget):
    """Late interaction of the words of a text with the tokens of an image; see `max_sim`."""

    prompt: str
    word: int | None = None

    def prepared(self, images: Images) -> MaxSimilarity:
        """Return the target with the embeddings of its words. Raises TargetError if there is no such word."""
        words, _ = images.encode_text([self.prompt])
        if self.word is not None and not -len(words) <= self.word < len(words):
            raise TargetError(f"word {self.word} is outside 0..{len(words) - 1}")
        return replace(self, embeddings=words if self.word is None else words[self.word][None])

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the questions about the sum over the words of the largest similarity."""
        score = EmbeddingScore(_late_interaction, cast("Tensor", self.embeddings), _token_embeddings)
        return score.ask(output, images, self.prompt if self.word is None else f"word {self.word} of {self.prompt}")


def _late_interaction(embeddings: Tensor, words: Tensor) -> Tensor:
    return (embeddings @ words.T).amax(1).sum(1)


def _token_embeddings(output: Any) -> Tensor:
    """Return the embeddings (N, tokens, D) of an output."""
    embeddings = output["image_embeds"] if isinstance(output, Mapping) else output
    if not isinstance(embeddings, Tensor) or embeddings.dim() != 3:
        raise TargetError("max_sim is a target of methods for a model that is wrapped in saliency.LateInteraction")
    return embeddings


def max_sim(prompt: str, word: int | None = None) -> Target:
    """Explain the late interaction of an image with a text, for a model such as ColPali: a `LateInteraction`.

    The score is the sum over the words of the text of the largest similarity of the word to a token of the image. The
    similarity is the inner product of both embeddings, which ColPali scales to unit length.

    Args:
        prompt: The text.
        word: The index of a single token in `LateInteraction.words(prompt)`; by default all tokens, also those
            that the processor adds, as in retrieval.

    Source: Faysse et al., "ColPali: Efficient Document Retrieval with Vision Language Models" (2024),
        https://arxiv.org/abs/2407.01449.
    """
    return MaxSimilarity(prompt, word)


def text(prompt: str | Sequence[str], against: str | Sequence[str | Sequence[str]] = ()) -> Target:
    """Explain the similarity of an image to a text, for a model with a text encoder: a `DualEncoder`.

    Without `against`, the score is the cosine similarity, -1 to 1. With `against`, it is the log-odds log(p / (1 - p))
    of the text in the softmax over all texts, with the model's scale of logits. For two texts this is the difference of
    their logits. `explanation.probabilities` holds p. Unlike the gradients of p and log(p), the gradient of the
    log-odds does not vanish if the model is certain.

    Args:
        prompt: The text. A list of texts is an ensemble: its embedding is the mean of their normalised embeddings.
        against: Other texts to contrast it with. Each text may also be a list.

    Raises:
        TargetError: A text is not a string, or an ensemble is empty.
    """
    others = against if isinstance(against, list | tuple) else [against]
    return TextSimilarity(_as_prompt(prompt), tuple(map(_as_prompt, others)))


def _as_prompt(prompt: str | Sequence[str]) -> Prompt:
    texts = (prompt,) if isinstance(prompt, str) else tuple(prompt) if isinstance(prompt, list | tuple) else ()
    if not texts or not all(isinstance(text, str) for text in texts):
        raise TargetError(f"expected a text or a list of texts, got {described(prompt)}")
    return prompt if isinstance(prompt, str) else texts


def _is_embedding(reference: Any) -> bool:
    """Return whether a reference is an embedding (D,) or (1, D). An image with one row has integer values."""
    shape: tuple[int, ...] = getattr(reference, "shape", ())
    return len(shape) == 1 or (len(shape) == 2 and shape[0] == 1 and "float" in str(reference.dtype))


def similarity(reference: Any = None, against: Any = None, measure: Measure = "cosine") -> Target:
    """Explain the similarity of an image to a reference, for a model that returns one embedding per image.

    Args:
        reference: An image, as `attribute` takes it, or an embedding (D,) or (1, D). An image is encoded at each call,
            without the `forward_args` of the call. By default, the image itself: the score of a changed image is the
            cosine similarity of its embedding to the embedding of the image. No label is needed. The score of the image
            itself is 1, and its gradient there is zero, so use methods that change the image, such as `RISE`.
        against: Another reference. The score is then the difference of the two similarities.
        measure: "cosine", "dot" for the inner product, or "distance" for minus the Euclidean distance.

    Raises:
        TargetError: `measure` is unknown; or `against` or a measure other than "cosine" is given without a reference.
    """
    check_choice("measure", measure, get_args(Measure), error=TargetError)
    if reference is None:
        if against is not None or measure != "cosine":
            raise TargetError("the similarity of an image to itself is a cosine without `against`; pass a reference")
        return SelfSimilarity()
    return Similarity((reference,) if against is None else (reference, against), measure)
