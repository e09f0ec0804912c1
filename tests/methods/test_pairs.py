"""Pairs of images: the maps of both from one forward, and which part of one matches which part of the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import saliency
from saliency import METHODS, InputXGradient, VanillaGradient, similarity
from saliency.errors import MethodError, TargetError
from saliency.methods import pairs
from saliency.testing import Snapshot, images, tiny_model, tiny_model_for, tiny_transformer
from tests.models import LinearModel, Packed
from tests.selection import of_each_family

A, B = images(1), images(1, seed=2)


def homogeneous_net() -> nn.Module:
    """ReLUs, a max pool and no biases: a network of degree one."""
    layers = nn.Conv2d(3, 6, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, bias=False), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 7, bias=False)).eval()


class Calls:
    """The number of images in each forward of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.sizes: list[int] = []
        model.register_forward_pre_hook(lambda module, inputs: self.sizes.append(len(inputs[0])))


# Both maps.


@pytest.mark.filterwarnings("ignore::saliency.errors.SaliencyWarning")
@pytest.mark.parametrize("name", of_each_family())
def test_a_pair_has_the_maps_of_two_single_calls(name: str) -> None:
    cls = METHODS[name]
    method = cls(tiny_model_for(cls)(), **cls.preview_options)
    if name in ("cam", "finer_cam"):  # of classes only
        with pytest.raises(saliency.errors.NotApplicableError):
            saliency.pair(method, A, B)
        return
    expected = method.attribute(A, similarity(B)), method.attribute(B, similarity(A))
    for found, single in zip(saliency.pair(method, A, B), expected, strict=True):
        torch.testing.assert_close(found.scores, single.scores)
        torch.testing.assert_close(found.values, single.values, atol=2e-5, rtol=1e-3)
        assert found.target_names == single.target_names


@pytest.mark.parametrize("measure", ["cosine", "dot", "distance"])
def test_pairs_in_lists_are_compared_one_by_one(measure: Any) -> None:
    method, others = VanillaGradient(tiny_model().double()), images(3, seed=5).double()
    own = images(3).double()
    found = saliency.pair(method, own, list(others), measure=measure)
    for index, (x, other) in enumerate(zip(own, others, strict=True)):
        torch.testing.assert_close(
            found[0][index].values, method.attribute(x, similarity(other, measure=measure)).values
        )
        torch.testing.assert_close(
            found[1][index].values, method.attribute(other, similarity(x, measure=measure)).values
        )
    nested = saliency.pair(method, [own], [others], measure=measure)
    assert torch.equal(nested[0].values, found[0].values)


def test_a_pair_of_a_gradient_method_is_one_forward() -> None:
    model = tiny_model()
    method = VanillaGradient(model)
    calls = Calls(model)
    saliency.pair(method, A, B)
    assert calls.sizes == [2]


def test_the_reference_of_a_method_of_many_passes_is_encoded_once() -> None:
    model = tiny_model()
    method = saliency.Occlusion(model, window=8, stride=8, chunk=1)
    calls = Calls(model)
    saliency.pair(method, A, B)
    single = tiny_model()
    method = saliency.Occlusion(single, window=8, stride=8, chunk=1)
    singles = Calls(single)
    method.attribute(A, similarity(B))
    assert calls.sizes[0] == 2
    assert sum(calls.sizes) <= 2 * (sum(singles.sizes) - 1)


def test_images_of_two_sizes_are_a_pair() -> None:
    method, wide = InputXGradient(tiny_model()), images(1, (16, 24))
    first, second = saliency.pair(method, A, wide)
    assert torch.equal(first.values, method.attribute(A, similarity(wide)).values)
    assert torch.equal(second.values, method.attribute(wide, similarity(A)).values)


def test_files_of_a_pair_are_named_and_drawn(tmp_path: Path) -> None:
    model: Any = tiny_model()
    model.preprocess = saliency.Preprocess(size=(16, 16), resize=16)
    for name in ("red", "blue"):
        Image.new("RGB", (20, 20), name).save(tmp_path / f"{name}.png")
    first, second = saliency.pair(InputXGradient(model), tmp_path / "red.png", tmp_path / "blue.png")
    assert first.target_names + second.target_names == ("similarity to blue.png", "similarity to red.png")
    assert saliency.overlay(first).size == saliency.overlay(second).size == (20, 20)


# Matches.


def double_sum(method: Any, a: Tensor, b: Tensor, numbers: int) -> Tensor:
    """The definition, number by number: (H, W, H', W')."""
    shares = []
    for m in range(numbers):
        left, right = (method.attribute(x, saliency.value(m)).values[0].sum(0) for x in (a, b))
        shares.append(left[:, :, None, None] * right)
    return torch.stack(shares).sum(0)


@pytest.mark.parametrize("name", ["lrp", "input_x_gradient", "vanilla_gradient", "attn_lrp", "deep_lift", "hires_cam"])
def test_matches_are_the_explicit_double_sum(name: str) -> None:
    method: Any = METHODS[name](tiny_model().double(), **METHODS[name].preview_options)
    a, b = images(1, (10, 8)).double(), images(1, (8, 12), seed=4).double()
    expected = double_sum(method, a, b, 5)
    found = saliency.matches(method, a, b, measure="dot", cells=12, passes=None)
    torch.testing.assert_close(found.values, expected, rtol=1e-9, atol=1e-12)


def test_cells_sum_the_matches_of_their_pixels() -> None:
    method = saliency.LRP(tiny_model().double())
    a, b = images(1, (10, 8)).double(), images(1, (8, 12), seed=4).double()
    pixels, cells = (saliency.matches(method, a, b, cells=cells).values for cells in (12, 4))
    assert (pixels.shape, cells.shape) == ((10, 8, 8, 12), (4, 3, 3, 4))
    row, column = torch.arange(10) * 4 // 10 == 1, torch.arange(8) * 3 // 8 == 2
    share = pixels[row][:, column][:, :, torch.arange(8) * 3 // 8 == 0][..., 9:].sum()
    torch.testing.assert_close(cells[1, 2, 0, 3], share, rtol=1e-9, atol=1e-12)


def test_the_gradient_form_is_the_hessian_of_the_product_times_both_inputs() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 6)).double()
    a, b = torch.randn(2, 1, 1, 4, 4, dtype=torch.double).unbind()

    def product(x: Tensor) -> Any:
        return (model(x[:1]) * model(x[1:])).sum()

    functional: Any = torch.autograd.functional
    hessian = functional.hessian(product, torch.cat([a, b]))[0, 0, :, :, 1, 0]
    options: Any = {"measure": "dot", "passes": None}
    torch.testing.assert_close(saliency.matches(VanillaGradient(model), a, b, **options).values, hessian)
    found = saliency.matches(InputXGradient(model), a, b, **options)
    torch.testing.assert_close(found.values, a[0, 0, :, :, None, None] * hessian * b[0, 0])


@pytest.mark.parametrize("directions", [None, 3, 5])
@pytest.mark.parametrize("method", [InputXGradient, saliency.AttnLRP, saliency.LRP])
def test_matches_of_a_homogeneous_network_sum_to_the_similarity(method: Any, directions: int | None) -> None:
    model = homogeneous_net()
    for measure, score in (
        ("dot", (model(A) * model(B)).sum()),
        ("cosine", torch.cosine_similarity(model(A), model(B))),
    ):
        found = saliency.matches(method(model), A, B, measure=measure, passes=directions, cells=3)  # type: ignore[arg-type]
        assert found.score == pytest.approx(score.item(), rel=1e-4)
        assert float(found.values.sum()) == pytest.approx(found.score, rel=1e-4)


@pytest.mark.parametrize("numbers", [1, 2, 3, 9])
def test_matches_of_few_numbers_equal_images_or_no_embedding_are_defined(numbers: int) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, numbers, bias=False))
    a, b = torch.randn(2, 1, 3, 2, 2).unbind()
    for other, score in ((b, torch.cosine_similarity(model(a), model(b)).item()), (a, 1.0), (0 * b, 0.0)):
        found = saliency.matches(InputXGradient(model), a, other, passes=3)
        assert found.score == pytest.approx(score, abs=1e-6)
        assert float(found.values.sum()) == pytest.approx(found.score, abs=1e-5)


def test_random_directions_give_the_shares_on_average() -> None:
    model = LinearModel()
    a, b = torch.randn(2, 1, 3, 2, 2).unbind()
    method = InputXGradient(model)
    exact = saliency.matches(method, a, b, passes=None).values
    draws = torch.stack([saliency.matches(method, a, b, passes=3, seed=seed).values for seed in range(200)])
    again = saliency.matches(method, a, b, passes=3, seed=7).values
    assert torch.equal(draws[7], again)
    errors = draws.std(0) / 200**0.5
    assert float(((draws.mean(0) - exact).abs() / errors).max()) < 4.5
    assert float(errors.min()) > 0


def test_the_directions_run_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model().double()
    method, calls = saliency.LRP(model), Calls(model)
    whole = saliency.matches(method, A.double(), B.double())
    assert calls.sizes == [1, 1, 5, 5]
    calls.sizes.clear()
    monkeypatch.setattr(pairs, "chunk_size", lambda x: 2)
    parts = saliency.matches(method, A.double(), B.double())
    assert calls.sizes == [1, 1, 2, 2, 1, 2, 2, 1]
    torch.testing.assert_close(parts.values, whole.values)


def test_matches_of_a_transformer_are_patches() -> None:
    found = saliency.matches(saliency.AttnLRP(tiny_transformer()), A, B)
    assert found.values.shape == (4, 4, 4, 4)
    assert repr(found) == f"Matches(score={found.score}, measure='cosine', method='attn_lrp')"


def test_a_pair_touches_nothing() -> None:
    model = tiny_model().train()
    before = Snapshot(model=model, a=A, b=B)
    with torch.inference_mode():
        saliency.pair(VanillaGradient(model), A, B)
        saliency.matches(saliency.LRP(model), A, B, passes=4)
    with pytest.raises(TargetError):
        saliency.matches(saliency.LRP(model.get_submodule("down")), A.repeat(1, 2, 1, 1), B.repeat(1, 2, 1, 1))
    assert not before.changes()


# Trust.


def test_the_trust_card_of_a_similarity_deletes_its_score() -> None:
    method = saliency.GradCAM(tiny_model())
    explanation, _ = saliency.pair(method, A, B)
    card = saliency.trust(method, A, similarity(B))
    assert card.explanation is not None
    torch.testing.assert_close(card.explanation.values, explanation.values)
    assert torch.isfinite(card.measurements["deletion"].values).all()
    assert {"insertion", "infidelity"} <= card.measurements.keys()


# Errors.


@pytest.mark.parametrize("explain", [saliency.pair, saliency.matches])
def test_what_is_not_a_pair_is_refused(explain: Any) -> None:
    model = tiny_model()
    method = VanillaGradient(model)
    with pytest.raises(
        TypeError, match=r"missing a required argument: 'b'|missing 1 required positional argument: 'b'"
    ):
        explain(method, A)
    with pytest.raises(MethodError, match="needs a partner, got 2 images and 1 image"):
        explain(method, images(2), B)
    with pytest.raises(MethodError, match=r"expected a method, such as LRP\(model\), got TinyNet"):
        explain(model, A, B)
    with pytest.raises((MethodError, TargetError), match="measure"):
        explain(method, A, B, measure="euclid")
    with pytest.raises(TargetError, match=r"\(N, D\); this model's is .*wrap the model"):
        explain(VanillaGradient(model.get_submodule("stem")), A, B)
    boxes = Packed(lambda scores: {"boxes": scores, "labels": scores}, model)
    with pytest.raises(TargetError, match="not clear which tensor"):
        explain(VanillaGradient(boxes), A, B)


def test_matches_need_one_pair_and_a_linear_method() -> None:
    with pytest.raises(MethodError, match="one image on each side, got 2"):
        saliency.matches(saliency.LRP(tiny_model()), images(2), images(2))
    for cls in (saliency.RISE, saliency.GuidedBackprop, saliency.ExcitationBackprop, saliency.GradCAMPlusPlus):
        with pytest.raises(MethodError, match="linear in the score, as for LRP, AttnLRP"):
            saliency.matches(cls(tiny_model()), A, B)
    for options in ({"cells": 0}, {"passes": 2}):
        with pytest.raises(MethodError, match=next(iter(options))):
            saliency.matches(saliency.LRP(tiny_model()), A, B, **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match='matches has no argument "directions"; it is called passes here'):
        saliency.matches(saliency.DeepSHAP(tiny_model()), A, B, directions=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"the method takes it: LRP\(model, gamma"):
        saliency.matches(method=saliency.LRP(tiny_model()), a=A, b=B, gamma=3)  # type: ignore[arg-type]
