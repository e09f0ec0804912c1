"""Texts of the tokens of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from saliency.targets.question import AnswerText, token_texts
from tests.vision_language import byte_tokenizer


def written(tokenizer: Any, text: str, length: int | None = None) -> AnswerText:
    """The first tokens of a text."""
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))[:length]
    return AnswerText(ids, token_texts(tokenizer, ids, context=len(ids)), tokenizer)


def test_a_word_has_all_tokens_of_its_characters() -> None:
    answer = written(byte_tokenizer(), "ärgert 🚗🚗 grün, weiß")
    assert answer.text == "ärgert 🚗🚗 grün, weiß"
    assert answer.words() == [("ärgert", slice(0, 7)), ("grün", slice(17, 22)), ("weiß", slice(24, 29))]
    assert answer.find("🚗") == [slice(8, 12), slice(12, 16)]
    assert answer.tokens[12:17] == ("🚗", "", "", "", " ")
    assert [len(answer.encode_at(word, 17)) for word in ("blau", "rötlich")] == [4, 8]


def test_an_answer_that_ends_within_a_character_keeps_the_character_before() -> None:
    answer = written(byte_tokenizer(), "weiß", 4)
    assert answer.tokens == ("w", "e", "i", "\N{REPLACEMENT CHARACTER}")


def test_bytes_of_sentencepiece_are_one_character() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(parts)
    ids = tuple(fast.encode("ein 🚗 ist grün").ids)
    answer = AnswerText(ids, token_texts(fast, ids, context=len(ids)), fast)
    assert answer.text == "ein 🚗 ist grün"
    assert answer.words() == [("ein", slice(1, 4)), ("ist", slice(10, 13)), ("grün", slice(14, 19))]
    assert answer.find("🚗") == [slice(5, 9)]
