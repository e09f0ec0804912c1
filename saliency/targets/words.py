"""Target for the words of an answer that a vision-language model gave."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from ..errors import TargetError
from ..io.axes import at_least_float32
from ..validation import described, is_integer
from .classes import output_tensor
from .question import AnswerText, Asked, Images, Question, Target


@dataclass(frozen=True, slots=True)
class Words(Target):
    """Log-odds of words of an answer; see `words`.

    Attributes:
        text: The words, or None.
        against: Another text for the same position, or None.
        chosen: The index or the slice of tokens, or None.
    """

    text: str | None = None
    against: str | None = None
    chosen: int | slice | None = None

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the questions about the tokens. Raises TargetError if the answer does not contain them."""
        answer = images.answer
        if answer is None:
            raise TargetError("saliency.words explains an answer: pass saliency.generate(...) instead of an image")
        explained, other = self._explained_tokens(answer), None
        pairs = tuple((number - len(answer.ids), answer.ids[number]) for number in explained)
        label = self.text or "".join(answer.tokens[number] for number in explained).strip() or f"token {explained[0]}"
        if self.against is not None:
            ids = answer.encode_at(self.against, explained[0])
            both = zip(pairs, ids, strict=False)
            pair, other = next(((pair, token) for pair, token in both if pair[1] != token), (None, None))
            if pair is None:
                raise TargetError(f'"{label}" and "{self.against}" begin with the same tokens; compare other words')
            pairs, label = (pair,), f"{label} rather than {self.against}"
        score = WordScore(pairs, other)
        probabilities, difference = score.probabilities(output), other is not None
        asked = [Question(score, label, None, probabilities[n], difference, mirrored=score) for n in images.numbers]
        return asked, score

    def _explained_tokens(self, answer: AnswerText) -> range:
        """Return the tokens of the answer that the target explains."""
        tokens, key = range(len(answer.ids)), self.chosen
        selected = tokens[key or slice(None)] if isinstance(key, slice | None) else tokens[key : key + 1 or None]
        if not selected:
            raise TargetError(f"at={key!r} selects none of the {len(tokens)} tokens of the answer, numbered from 0")
        if self.text is None:
            return selected
        occurrences = [tokens[span] for span in answer.find(self.text)]
        inside = [span for span in occurrences if {*span} & {*selected}]
        if not inside:
            listing = ", ".join(dict.fromkeys(word for word, _ in answer.words()))
            where = f" at={key!r}, but at {[span[0] for span in occurrences]}" if occurrences else ""
            raise TargetError(f'"{self.text}" is not in the answer{where}; its words are {listing}')
        return inside[0]


@dataclass(frozen=True, slots=True)
class WordScore:
    """Log-odds of tokens of an answer.

    Attributes:
        pairs: For each explained token, its row in the output, from the end, and its id.
        other: The token to compare with, or None.
    """

    pairs: tuple[tuple[int, int], ...]
    other: int | None

    def _logits(self, output: Any) -> Tensor:
        """Return the logits (N, T, V) that predict T explained tokens, in float32 or wider."""
        return at_least_float32(output_tensor(output)[:, [row for row, _ in self.pairs]])

    def __call__(self, output: Any) -> Tensor:
        """Return the log-odds (N,) of the words, in the units of the model's logits."""
        logits = self._logits(output)
        if self.other is not None:
            return logits[:, 0, self.pairs[0][1]] - logits[:, 0, self.other]
        images, explained, size = logits.shape
        chosen = [number * size + token for number, (_, token) in enumerate(self.pairs)]  # in all rows, flattened
        gaps = [end - start - 1 for start, end in pairwise([-1, *chosen, explained * size])]
        parts = logits.flatten(1).split_with_sizes([*chain.from_iterable((gap, 1) for gap in gaps)][:-1], 1)
        tokens, others = torch.cat(parts[1::2], 1), torch.cat(parts[::2], 1)
        return (tokens - others.view(images, explained, size - 1).logsumexp(2)).sum(1)

    def probabilities(self, output: Any) -> Tensor:
        """Return the probability (N,) of the words: the product over their tokens."""
        tokens = [token for _, token in self.pairs]
        logits = self._logits(output).detach()
        return logits.log_softmax(2)[:, range(len(tokens)), tokens].sum(1).exp()


def words(text: str | None = None, *, against: str | None = None, at: int | slice | None = None) -> Target:
    """Explain words of an answer of a vision-language model; the image is a result of `saliency.generate`.

    The score is the log-odds log(p / (1 - p)) of a token against all other tokens, given the tokens before it; the
    log-odds of several tokens are summed. Unlike the gradient of log(p), its gradient does not vanish if the model is
    certain. `explanation.probabilities` is the product of all p.

    Args:
        text: The words, as in the answer, regardless of case; by default their first occurrence.
        against: Another text for the same position. The score is then the log-odds of both: the difference of the
            logits at the first token in which they differ.
        at: The index or the slice of tokens of the answer, from 0. With `text`, the occurrence that contains one of
            these tokens. By default the whole answer.

    Raises:
        TargetError: An argument has another type. In `attribute`: the answer does not contain the words.
    """
    texts: dict[str, object] = {"text": text, "against": against}
    for name, value in texts.items():
        if value is not None and not (isinstance(value, str) and value.strip()):
            raise TargetError(f"{name}={described(value)}: expected a text of the answer")
    is_valid = isinstance(at, slice | None) or is_integer(at, least=None)
    if not is_valid:
        raise TargetError(f"at={described(at)}: expected the index of a token, or a slice of tokens")
    return Words(text, against, at)
