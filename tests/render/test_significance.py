"""How sure a map is, as a map, as a measure, and faded in the drawing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from saliency import RISE, Explanation, VanillaGradient, overlay, shared_limit, significance, standard_error
from saliency.errors import RenderError, SaliencyWarning
from saliency.io.geometry import Frame
from saliency.render.overlay import Opacity
from saliency.testing import images, tiny_model
from saliency.validation import Sign


def sampled(values: Tensor, error: Tensor | None, sign: Sign = "signed") -> Explanation:
    """An explanation of a grey photo by values and errors (1, C, h, w)."""
    picture = Image.new("RGB", (64, 48), (128, 128, 128))
    like = VanillaGradient(tiny_model()).attribute(torch.randn(1, 3, 16, 16), 0)
    frames = (Frame(picture, (0.0, 0.0, 64.0, 48.0)),)
    return replace(like.with_evidence(error=error), values=values, frames=frames, sign=sign)


def halves(left: float, right: float, channels: int = 1) -> Tensor:
    """(1, C, 4, 8): one value on the left half, another on the right."""
    values = torch.full((1, channels, 4, 8), float(left))
    values[..., 4:] = right
    return values


def test_the_error_is_an_explanation_that_draws_like_any_other() -> None:
    explanation = sampled(halves(3, -3), halves(1, 2))
    shares = explanation.with_evidence(residual=torch.zeros(1), ledger=torch.ones(1, 1), ledger_names=("input",))
    error = standard_error(shares)
    assert torch.equal(error.values, halves(1, 2))
    assert error.sign == "positive"
    assert error.target_names == ("standard error of class 0",)
    assert (error.error, error.residual, error.ledger, error.ledger_names) == (None, None, None, ())
    assert overlay(error).size == (64, 48)


def test_colours_of_errors_begin_at_zero() -> None:
    error = standard_error(sampled(halves(3, -3), halves(1, 2)))
    assert overlay(error).tobytes() == overlay(error, limit=shared_limit(error)).tobytes()
    assert overlay(error).tobytes() != overlay(error.with_evidence(from_zero=None)).tobytes()


def test_significance_is_the_number_of_errors_from_zero() -> None:
    far = significance(sampled(halves(3, -1), halves(1, 2)))
    assert torch.equal(far, halves(3, 0.5)[:, 0])
    positive = significance(sampled(halves(3, -1), halves(1, 2), "positive"))
    assert torch.equal(positive, halves(3, 0)[:, 0])


def test_errors_of_channels_add_up_and_the_largest_brings_its_own() -> None:
    values, error = halves(1, 1, channels=3), torch.ones(1, 3, 4, 8)
    values[:, 1] = -5
    error[:, 1] = 2
    assert torch.allclose(significance(sampled(values, error)), torch.full((1, 4, 8), 3 / 4))
    assert torch.allclose(significance(sampled(values, error, "absolute")), torch.full((1, 4, 8), 5 / 2))


def test_without_an_error_a_value_is_certain_and_zero_is_nothing() -> None:
    far = significance(sampled(halves(3, 0), torch.zeros(1, 1, 4, 8)))
    assert torch.isinf(far[..., :4]).all()
    assert not far[..., 4:].any()


@pytest.mark.parametrize("opacity", [0.5, "map"])
def test_what_is_not_significant_fades(opacity: Opacity) -> None:
    explanation = sampled(halves(4, -4), halves(0.1, 40))
    plain, faded = (
        np.asarray(overlay(explanation, opacity=opacity, min_significance=least), float) for least in (None, 2.0)
    )
    photo = 128.0
    sure, unsure = np.s_[:, :24], np.s_[:, 40:]
    assert np.array_equal(plain[sure], faded[sure])
    assert abs(plain[unsure] - photo).max() > 40
    assert abs(faded[unsure] - photo).max() < 0.06 * abs(plain[unsure] - photo).max() + 1


def test_a_fade_of_a_method_without_errors_says_which_have_them() -> None:
    explanation = sampled(halves(3, -3), None)
    for call in (lambda: overlay(explanation, min_significance=2), lambda: standard_error(explanation)):
        with pytest.raises(RenderError, match=r"vanilla_gradient has no standard error.*smooth_grad"):
            call()


def test_one_sample_of_a_method_that_samples_has_no_error() -> None:
    with pytest.warns(SaliencyWarning, match="below the rounding error"):
        explanation = RISE(tiny_model(), passes=1).attribute(images(1), 0)
    with pytest.raises(
        RenderError, match=r"^((?!such as.*rise).)*no standard error \(passes: 1\).*at least two samples"
    ):
        standard_error(explanation)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan")])
def test_a_fade_that_is_no_number_of_errors_is_refused(wrong: float) -> None:
    with pytest.raises(RenderError, match="number of standard errors"):
        overlay(sampled(halves(3, -3), halves(1, 1)), min_significance=wrong)
