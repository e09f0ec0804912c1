"""Text of an answer of a vision-language model, and its tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text, without special tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def token_texts(tokenizer: Any, ids: Sequence[int], context: int) -> tuple[str, ...]:
    """Return the text that each token adds; of a character of several tokens, the first one adds it.

    Args:
        tokenizer: A tokenizer with `decode`.
        ids: The tokens.
        context: The number of tokens before it with which each token is decoded.
    """
    texts: list[str] = []
    for end in range(1, len(ids) + 1):
        start = max(0, len(texts) - context)
        before, text = (tokenizer.decode(ids[start:stop]) if start < stop else "" for stop in (len(texts), end))
        if not text.endswith("\N{REPLACEMENT CHARACTER}") or end == len(ids):  # otherwise of an incomplete character
            texts += [text[len(before) :], *[""] * (end - len(texts) - 1)]
    return tuple(texts)


@dataclass(frozen=True, slots=True)
class AnswerText:
    """Tokens of an answer, and the tokenizer.

    Attributes:
        ids: The ids of its T tokens.
        tokens: Their texts, which form the answer together. A character of several tokens is the text of the first one.
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
        spans = list(zip([0, *ends], ends, strict=False))  # an empty one belongs to the character before it
        inside = [match.start() < end and start < match.end() + (start == end) for start, end in spans]
        return slice(inside.index(True), inside.index(True) + sum(inside))

    def encode_at(self, text: str, start: int) -> list[int]:
        """Return the ids of a text that replaces the answer from a token on: with a space before it where one is."""
        space = " " if self.tokens[start][:1].isspace() else ""
        before, decode = [*self.ids[:start]], self.tokenizer.decode
        wanted = decode(before).strip() + space + text
        tried = [encode(self.tokenizer, text), encode(self.tokenizer, f" {text}")]
        right = [ids for ids in tried if ids and decode([*before, *ids]).strip() == wanted.strip()]
        return min(right or filter(None, tried), key=len)
