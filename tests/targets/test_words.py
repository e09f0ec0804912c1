"""Words of an answer as targets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import saliency
from saliency.targets.question import AnswerText, Images, Question, Target

PIECES = [
    "a",
    " red",
    " cir",
    "cle",
    " left",
    " of",
    " a",
    " red",
    " square",
    ".",
    "blue",
    " blue",
    "black",
    " rect",
    *"red",
]


def encode(text: str, *, add_special_tokens: bool) -> list[int]:
    """Take the longest piece first, as tokenizers of byte pairs do."""
    ids = []
    while text:
        piece = max((piece for piece in PIECES if text.startswith(piece)), key=len)
        ids.append(PIECES.index(piece))
        text = text[len(piece) :]
    return ids


IDS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
TOKENIZER = SimpleNamespace(encode=encode, decode=lambda ids: "".join(PIECES[token] for token in ids))
ANSWER = AnswerText(IDS, tuple(PIECES[:10]), TOKENIZER)
LOGITS = torch.randn(2, 12, len(PIECES), generator=torch.Generator().manual_seed(0))  # two rows are before the answer


def asked(target: Target, logits: Tensor = LOGITS) -> Question:
    """The question about the first image."""
    return target.ask(logits, Images(len(logits), answer=ANSWER))[0][0]


def score(target: Target) -> Tensor:
    """The scores of a target, as in a call."""
    return asked(target).score(LOGITS)


def odds(row: int, token: int) -> Tensor:
    """The log-odds of a token of the answer."""
    p = LOGITS[:, 2 + row].softmax(1)[:, token]
    return (p / (1 - p)).log()


def test_a_word_is_the_sum_of_the_log_odds_of_its_tokens() -> None:
    torch.testing.assert_close(score(saliency.words("circle")), odds(2, 2) + odds(3, 3))
    torch.testing.assert_close(score(saliency.words("Red")), odds(1, 1))
    torch.testing.assert_close(score(saliency.words("red", at=7)), odds(7, 7))
    torch.testing.assert_close(score(saliency.words(at=-1)), odds(9, 9))
    torch.testing.assert_close(score(saliency.words("left of")), odds(4, 4) + odds(5, 5))
    everything = torch.stack([odds(row, row) for row in range(10)]).sum(0)
    torch.testing.assert_close(score(saliency.words()), everything, rtol=1e-4, atol=1e-4)


def test_the_probability_is_the_product_over_the_tokens() -> None:
    p, probability = LOGITS.softmax(2), asked(saliency.words("circle")).probability
    torch.testing.assert_close(probability, p[0, 4, 2] * p[0, 5, 3])


def test_another_word_is_compared_at_the_first_token_that_differs() -> None:
    question, other = asked(saliency.words("red", against="blue")), PIECES.index(" blue")  # with the space before it
    torch.testing.assert_close(question.score(LOGITS), LOGITS[:, 3, 1] - LOGITS[:, 3, other])
    assert question.name == "red rather than blue"
    assert question.is_difference


def test_the_gradient_does_not_vanish_if_the_model_is_certain() -> None:
    logits = torch.zeros(1, 10, len(PIECES))
    logits[0, 1, 1] = 40.0
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(asked(saliency.words("red"), logits).score(logits).sum(), logits)
    assert float(gradient[0, 1, 1]) == pytest.approx(1)
    assert float(gradient[0, 1].sum()) == pytest.approx(0, abs=1e-6)


def test_words_are_listed_with_their_tokens() -> None:
    words = ANSWER.words()
    assert [word for word, _ in words] == ["a", "red", "circle", "left", "of", "a", "red", "square"]
    assert words[2] == ("circle", slice(2, 4))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (saliency.words("green"), '"green" is not in the answer; its words are a, red, circle, left, of, square'),
        (saliency.words("red", at=4), r'"red" is not in the answer at=4, but at \[1, 7\]'),
        (saliency.words(at=10), "at=10 selects none of the 10 tokens"),
        (saliency.words(at=slice(10, 12)), "selects none of the 10 tokens"),
        (saliency.words("red", against="red"), '"red" and "red" begin with the same tokens'),
    ],
)
def test_words_that_are_not_in_the_answer_are_refused(target: Target, message: str) -> None:
    with pytest.raises(saliency.errors.TargetError, match=message):
        asked(target)


def test_arguments_of_other_types_are_refused() -> None:
    with pytest.raises(saliency.errors.TargetError, match="text=3: expected a text"):
        saliency.words(3)  # type: ignore[arg-type]
    with pytest.raises(saliency.errors.TargetError, match="at='red'"):
        saliency.words(at="red")  # type: ignore[arg-type]
    with pytest.raises(saliency.errors.TargetError, match=r"pass saliency.generate\(...\) instead of an image"):
        saliency.VanillaGradient(torch.nn.Flatten()).attribute(torch.randn(1, 3, 4, 4), saliency.words("red"))
