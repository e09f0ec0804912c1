"""TAM equals its formula, spelled out with the logits of the whole vocabulary at all positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import saliency
from saliency.errors import NotApplicableError
from saliency.methods.token_activation import rank_gaussian
from saliency.testbed import CaptionProcessor
from saliency.testing import images, tiny_model
from tests.vision_language import answered
from tests.vision_language import scene as smooth


def captioner() -> nn.Module:
    model: nn.Module = saliency.load("shapes_caption")
    return model


def scene() -> Tensor:
    image: Tensor = saliency.testbed.draw_scenes(1, seed=1_000_000).images[0]
    return image


def spelled_out(model: nn.Module, answer: saliency.Answer, word: int) -> Tensor:
    """The map (64,) of a token of an answer about one image, by the paper's formula, without the filter."""
    logits = model(answer.ids[None, :-1], answer.inputs)[0][0].detach().double().clamp(min=0)  # (L, V)
    ids, cells = answer.ids.tolist(), answer.image_tokens[0].positions.flatten()
    position = answer.output_positions[word] + 1
    earlier = [p for p in range(int(cells[-1]) + 1, position) if ids[p] != ids[position]]
    own = logits[cells, ids[position]]
    shares = [float(logits[p, ids[position]]) for p in earlier]
    context = sum(share * logits[cells, ids[p]] for share, p in zip(shares, earlier, strict=True)) / sum(shares)
    factor = np.linalg.lstsq(context.numpy()[:, None], own.numpy(), rcond=None)[0][0]
    wanted: Tensor = (own - factor * context).clamp(min=0)
    return wanted


def test_the_map_of_each_word_is_the_formula_after_the_filter() -> None:
    model = captioner()
    answer = saliency.generate(model, CaptionProcessor(), scene(), "caption")
    targets: list[Any] = [saliency.words(at=word) for word in range(1, len(answer.tokens))]
    found = saliency.TAM(model).attribute_classes(answer, targets)
    maps = [spelled_out(model, answer, word).float().view(1, 1, 8, 8) for word in range(1, len(answer.tokens))]
    for explanation, wanted in zip(found, maps, strict=True):
        torch.testing.assert_close(explanation.values, rank_gaussian(wanted), rtol=1e-3, atol=1e-3)
        assert wanted.any()
    whole = saliency.TAM(model).attribute(answer, saliency.words(at=slice(1, 3)))
    torch.testing.assert_close(whole.values, rank_gaussian(maps[0] + maps[1]), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(whole.scores, found[0].scores + found[1].scores)


def test_arguments_of_the_forward_reach_the_model() -> None:
    model, _, answer = answered("llava")
    mask = torch.ones(1, len(answer.ids) - 1, dtype=torch.long)
    mask[0, -4:-2] = 0
    given: dict[str, Any] = {"forward_args": {"attention_mask": mask}}
    whole = saliency.TAM(model).attribute(answer, saliency.words("car"))
    hidden = saliency.TAM(model).attribute(answer, saliency.words("car"), **given)
    wanted = saliency.VanillaGradient(model).attribute(answer, saliency.words("car"), **given)
    torch.testing.assert_close(hidden.scores, wanted.scores)
    assert not torch.allclose(hidden.scores, whole.scores)


def test_each_image_may_have_words_of_its_own() -> None:
    model, processor, one = answered("llava")
    targets = [saliency.words("red"), saliency.words("car")]
    two = saliency.generate(model, processor, [smooth(0), smooth(1)], "<image> <image>", answer="a red car")
    for answer, own in ((one, targets[:1]), (two, targets)):
        found = saliency.TAM(model).attribute(answer, own)
        for row, target in enumerate(own):
            alone = saliency.TAM(model).attribute(answer, target)
            torch.testing.assert_close(found.values[row], alone.values[row])
            assert found.target_names[row] == alone.target_names[row]


def test_the_filter_is_a_gaussian_over_ranks() -> None:
    maps = torch.rand(2, 1, 4, 5, dtype=torch.float64)
    maps[1] = 0.7  # even
    found = rank_gaussian(maps)
    padded = np.pad(maps[0, 0].numpy(), 1, mode="reflect")
    for row in range(4):
        for column in range(5):
            window = np.sort(padded[row : row + 3, column : column + 3].ravel())
            weights = np.exp(-((np.arange(9) - 4) ** 2) / (2 * (window.std() / window.mean()) ** 2))
            assert float(found[0, 0, row, column]) == pytest.approx((window * weights).sum() / weights.sum())
    torch.testing.assert_close(found[1], maps[1])
    assert not rank_gaussian(torch.zeros(1, 1, 1, 3)).any()


def test_only_words_of_an_answer_are_explained() -> None:
    model = captioner()
    answer = saliency.generate(model, CaptionProcessor(), scene(), "caption")
    with pytest.raises(NotApplicableError, match="without against="):
        saliency.TAM(model).attribute(answer, saliency.words(at=1, against="blue"))
    with pytest.raises(NotApplicableError, match="TAM explains words of an answer"):
        saliency.TAM(tiny_model()).attribute(images(1), 0)
