"""Target for the words of an answer that a vision-language model gave."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..errors import TargetError
from ..validation import is_integer
from .targets import Categories, OutputFacts, OutputTarget, Target, TargetList, output_tensor


@dataclass(frozen=True, slots=True)
class AnswerText:
    """Tokens of an answer, and the tokenizer.

    Attributes:
        ids: The ids of its T tokens.
        tokens: Their texts, which form the answer together.
        encode: A function from a text to the ids of its tokens.
        decode: A function from ids to a text.
    """

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    encode: Callable[[str], list[int]] = field(repr=False)
    decode: Callable[[Sequence[int]], str] = field(repr=False)

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.tokens)

    def words(self) -> list[tuple[str, slice]]:
        """Return the words of the answer in order, without punctuation, and the tokens of each."""
        return [(match[0], self._tokens(match)) for match in re.finditer(r"\w+(?:['’-]\w+)*", self.text)]

    def find(self, text: str) -> list[slice]:
        """Return the tokens of each occurrence of a text, regardless of case: as whole words, or else inside words."""
        for pattern in (rf"(?<!\w){re.escape(text)}(?!\w)", re.escape(text)):
            if found := [self._tokens(match) for match in re.finditer(pattern, self.text, re.IGNORECASE)]:
                return found
        return []

    def _tokens(self, match: re.Match[str]) -> slice:
        ends = list(accumulate(map(len, self.tokens)))
        first = next(number for number, end in enumerate(ends) if end > match.start())
        return slice(first, 1 + next(number for number, end in enumerate(ends) if end >= match.end()))

    def encode_at(self, text: str, start: int) -> list[int]:
        """Return the ids of a text that replaces the answer from a token on: with a space before it where one is."""
        space = " " if self.tokens[start][:1].isspace() else ""
        wanted = self.decode(self.ids[:start]).strip() + space + text
        tried = [self.encode(text), self.encode(f" {text}")]
        right = [ids for ids in tried if ids and self.decode([*self.ids[:start], *ids]).strip() == wanted.strip()]
        return min(right or filter(None, tried), key=len)


@dataclass(frozen=True, slots=True)
class Words(OutputTarget):
    """Log-odds of words of an answer; see `words`.

    Attributes:
        text: The words; None for `at`.
        against: Another text for the same position, or None.
        at: The index or the slice of tokens, or None.
        count: The number of tokens of the answer, 0 before they are known.
        pairs: The row of the output and the token of each explained number.
        other: The token to compare with, or None.
        label: The name of the target.
    """

    text: str | None = None
    against: str | None = None
    at: int | slice | None = None
    count: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    other: int | None = None
    label: str = "words of an answer"

    def in_answer(self, answer: AnswerText) -> Words:
        """Return the target with its tokens. Raises TargetError if the answer does not contain them."""
        explained = self._explained_tokens(answer)
        rows = range(len(answer.ids))[explained]
        if not rows:
            raise TargetError(f"at={self.at!r} selects none of the {len(answer.ids)} tokens of the answer")
        pairs, other = tuple((row, answer.ids[row]) for row in rows), None
        label = self.text or "".join(answer.tokens[explained]).strip()
        if self.against is not None:
            ids = answer.encode_at(self.against, rows[0])
            differing = (number for number, pair in enumerate(zip(pairs, ids, strict=False)) if pair[0][1] != pair[1])
            first = next(differing, None)
            if first is None:
                raise TargetError(f'"{label}" and "{self.against}" begin with the same tokens; compare other words')
            pairs, other, label = (pairs[first],), ids[first], f"{label} rather than {self.against}"
        return replace(self, count=len(answer.ids), pairs=pairs, other=other, label=label)

    def _explained_tokens(self, answer: AnswerText) -> slice:
        """Return the tokens of the answer that the target explains."""
        at = self.at
        if isinstance(at, int):
            if not -len(answer.ids) <= at < len(answer.ids):
                raise TargetError(f"at={at}: the answer has {len(answer.ids)} tokens, numbered from 0")
            at = slice(at, at + 1 or None)
        if self.text is None:
            return slice(None) if at is None else at
        found = answer.find(self.text)
        tokens = {*range(len(answer.ids))[slice(None) if at is None else at]}
        inside = [own for own in found if tokens.intersection(range(own.start, own.stop))]
        if not inside:
            known = ", ".join(dict.fromkeys(word for word, _ in answer.words()))
            where = "" if at is None or not found else f" at={self.at!r}, but at {[own.start for own in found]}"
            raise TargetError(f'"{self.text}" is not in the answer{where}; its words are {known}')
        return inside[0]

    def resolve_from(self, output: Any, facts: OutputFacts) -> Words:
        """Return the target unchanged. Raises TargetError if the image is not an answer."""
        if not self.pairs:
            raise TargetError("saliency.words explains an answer: pass saliency.generate(...) instead of an image")
        return self

    def _logits(self, output: Any) -> Tensor:
        """Return the logits (N, tokens, V) that predict the explained tokens, in float32 or wider."""
        logits = output_tensor(output)
        rows = torch.tensor([row for row, _ in self.pairs], device=logits.device)
        chosen = logits[:, logits.shape[1] - self.count :][:, rows]
        return chosen.to(torch.promote_types(chosen.dtype, torch.float32))

    def __call__(self, output: Any) -> Tensor:
        """Return the log-odds (N,) of the words, in the units of the model's logits."""
        logits = self._logits(output)
        if self.other is not None:
            return logits[:, 0, self.pairs[0][1]] - logits[:, 0, self.other]
        odds = []
        for number, (_, token) in enumerate(self.pairs):
            row = logits[:, number]
            others = torch.cat([row[:, :token], row[:, token + 1 :]], 1)
            odds.append(row[:, token] - others.logsumexp(1))
        return torch.stack(odds, 1).sum(1)

    def probabilities(self, output: Any) -> Tensor:
        """Return the probability (N,) of the words: the product over their tokens."""
        logits = self._logits(output).detach()
        ids = torch.tensor([token for _, token in self.pairs], device=logits.device)
        chosen = logits.log_softmax(2).gather(2, ids.expand(len(logits), -1)[..., None])
        return chosen.sum((1, 2)).exp()

    def names(self, images: int, categories: Categories) -> tuple[str, ...]:
        """Return names such as `red rather than blue`."""
        return (self.label,) * images

    def contrasts(self, images: int) -> tuple[bool, ...]:
        """Return whether another word is compared."""
        return (self.other is not None,) * images


def in_answer(target: OutputTarget, answer: AnswerText) -> OutputTarget:
    """Return a target with the tokens of its words in an answer; other targets unchanged."""
    if isinstance(target, TargetList):
        return TargetList(tuple(in_answer(own, answer) for own in target.targets))
    return target.in_answer(answer) if isinstance(target, Words) else target


def words(text: str | None = None, *, against: str | None = None, at: int | slice | None = None) -> Target:
    """Explain words of an answer of a vision-language model; the image is a result of `saliency.generate`.

    The score is the log-odds log(p / (1 - p)) of a token against all other tokens, given the tokens before it; of
    several tokens, the sum. Unlike the gradient of log(p), its gradient does not vanish if the model is certain.
    `explanation.probabilities` is the product of the p.

    Args:
        text: The words, as in the answer, regardless of case; the first occurrence without `at`.
        against: Another text for the same position. The score is then the log-odds of both: the difference of the
            logits at the first token in which they differ.
        at: The index or the slice of tokens of the answer, from 0. With a text, the occurrence that has one of them.
            Without both, the whole answer.

    Raises:
        TargetError: An argument has another type. In `attribute`: the answer does not contain the words.
    """
    texts: dict[str, object] = {"text": text, "against": against}
    for name, value in texts.items():
        if value is not None and not (isinstance(value, str) and value.strip()):
            raise TargetError(f"{name}={value!r}: expected a text of the answer")
    if at is None or isinstance(at, slice):
        return Words(text, against, at)
    if not is_integer(at, least=None):
        raise TargetError(f"at={at!r}: expected the index of a token, or a slice of tokens")
    return Words(text, against, int(at))
