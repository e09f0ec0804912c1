"""Extra arguments of the model's forward: each image gets its own row, in every method and in every pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from saliency import (
    METHODS,
    RISE,
    Attribution,
    GradCAM,
    IntegratedGradients,
    Occlusion,
    SmoothGrad,
    Together,
    VanillaGradient,
)
from saliency.errors import MethodError, ModelError
from saliency.testing import tiny_model, tiny_model_for
from saliency.testing.case import images
from tests.models import OwnForward
from tests.selection import of_each_family


def masked(model: Any, x: Tensor, mask: Tensor, *, stretch: float = 1.0) -> Tensor:
    assert len(mask) == len(x)
    scores: Tensor = model.net(stretch * mask.to(x.dtype) * x)
    return scores


def with_mask(method: type[Attribution] = GradCAM) -> OwnForward:
    """A classifier of the visible part of an image, which takes a mask (N, 1, H, W)."""
    return OwnForward(masked, net=tiny_model_for(method)()).eval()


def fixed(mask: Tensor, method: type[Attribution] = GradCAM, stretch: float = 2.0) -> OwnForward:
    """The same classifier with its arguments built in, which takes an image only."""

    def forward(model: Any, x: Tensor) -> Tensor:
        return masked(model, x, mask.expand(len(x), -1, -1, -1), stretch=stretch)

    return OwnForward(forward, net=tiny_model_for(method)()).eval()


@pytest.fixture
def x() -> Tensor:
    return images(2)


@pytest.fixture
def mask() -> Tensor:
    return (torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(3)) > 0.3).float()


@pytest.mark.parametrize("name", of_each_family())
def test_each_image_has_its_own_row_in_every_method(name: str, x: Tensor, mask: Tensor) -> None:
    method, options = METHODS[name], dict(METHODS[name].preview_options)
    options |= {"chunk": 16} if "chunk" in method.options() else {}
    batch = method(with_mask(method), **options).attribute(x, [0, 1], forward_args={"mask": mask, "stretch": 2.0})
    alone = method(fixed(mask[1:], method), **options).attribute(x[1], 1)
    torch.testing.assert_close(batch[1].values, alone.values, atol=1e-5 * float(alone.values.abs().max()), rtol=0)
    assert (batch.layer, batch.target_names[1]) == (alone.layer, alone.target_names[0])


def test_arguments_may_be_given_by_position_as_arrays_and_as_lists(x: Tensor, mask: Tensor) -> None:
    def forward(model: Any, x: Tensor, mask: Any, prompts: list[str], classes: Tensor, size: Any) -> Tensor:
        assert [len(x)] * 2 == [len(mask), len(prompts)]
        assert (set(prompts) <= {"a", "bb"}, classes.shape, size) == (True, (3,), (16, 16))
        weights = torch.tensor([float(len(prompt)) for prompt in prompts])[:, None]
        scores: Tensor = model.net(x * torch.as_tensor(mask)) * weights
        return scores

    model = OwnForward(forward, net=tiny_model()).eval()
    given = (mask.numpy(), ["a", "bb"], torch.zeros(3), (16, 16))  # a tuple is passed whole, not row by row
    for method in (VanillaGradient(model), RISE(model, passes=8, chunk=3)):
        batch = method.attribute(x, [0, 1], forward_args=given)
        own = (mask[1:].numpy(), ["bb"], *given[2:])
        torch.testing.assert_close(batch[1].values, method.attribute(x[1], 1, forward_args=own).values)


def test_methods_together_and_several_classes_take_the_same_arguments(x: Tensor, mask: Tensor) -> None:
    model, given = with_mask(), {"mask": mask}
    methods: list[Attribution] = [GradCAM(model), VanillaGradient(model), IntegratedGradients(model, steps=3, chunk=4)]
    for method, together in zip(methods, Together(*methods).attribute(x, 0, forward_args=given), strict=True):
        torch.testing.assert_close(together.values, method.attribute(x, 0, forward_args=given).values)
        _, second = method.attribute_classes(x, [1, 0], forward_args=given)
        torch.testing.assert_close(second.values, together.values)


def test_masked_images_partial_forwards_and_wrapped_methods_get_the_rows(x: Tensor, mask: Tensor) -> None:
    half = mask.to(torch.float32)
    for make in (
        lambda model: RISE(model, passes=12, chunk=4),
        lambda model: Occlusion(model, window=2, stride=2, chunk=8),
        lambda model: SmoothGrad(IntegratedGradients(model, steps=2, chunk=2), passes=4, chunk=3),
    ):
        batch = make(with_mask()).attribute(x, 0, forward_args=(half,))
        alone = make(fixed(half[1:], stretch=1.0)).attribute(x[1], 0)
        torch.testing.assert_close(batch[1].values, alone.values, atol=0.05 * float(alone.values.abs().max()), rtol=0)


def test_the_default_layer_is_that_of_the_branch_which_the_arguments_choose(x: Tensor) -> None:
    def forward(model: Any, x: Tensor, *, deep: bool = False) -> Tensor:
        maps = model.first(x)
        scores: Tensor = (model.second(maps) if deep else maps).mean((2, 3))
        return scores

    model = OwnForward(forward, first=nn.Conv2d(3, 8, 3), second=nn.Conv2d(8, 8, 3)).eval()
    layers = [GradCAM(model).attribute(x, 0, forward_args={"deep": deep}).layer for deep in (True, False, True)]
    assert [*layers, GradCAM(model).attribute(x, 0).layer] == ["second", "first", "second", "first"]


def test_the_callers_tensors_and_later_calls_are_untouched(x: Tensor, mask: Tensor) -> None:
    def forward(model: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores: Tensor = model.net(x if mask is None else x * mask.neg_())
        return scores

    model = OwnForward(forward, net=tiny_model()).eval()
    before, kept = mask.clone(), mask.requires_grad_()
    plain = VanillaGradient(model).attribute(x, 0).values

    def target(output: Tensor) -> Tensor:
        assert torch.equal(VanillaGradient(model).attribute(x, 0).values, plain)  # a call inside of the other
        return output[:, 0]

    VanillaGradient(model).attribute(x, target, forward_args=(kept,))
    assert torch.equal(kept, before)
    assert kept.grad is None
    with pytest.raises(ModelError):
        VanillaGradient(model).attribute(x, 0, forward_args=(kept, 1))
    assert torch.equal(VanillaGradient(model).attribute(x, 0).values, plain)


def test_arguments_that_do_not_fit_are_refused(x: Tensor, mask: Tensor) -> None:
    with pytest.raises(MethodError, match=r"Tensor; expected a tuple \(mask,\) or a mapping"):
        VanillaGradient(with_mask()).attribute(x, 0, forward_args=mask)  # type: ignore[call-overload]
    with pytest.raises(ModelError, match="unexpected keyword argument 'msk'"):
        VanillaGradient(with_mask()).attribute(x, 0, forward_args={"msk": mask})


def test_numpy_rows_keep_their_type(x: Tensor) -> None:
    kinds = set()

    def forward(model: Any, x: Tensor, rows: np.ndarray[Any, Any]) -> Tensor:
        kinds.add((type(rows), rows.shape == (len(x), 2), rows.dtype))
        scores: Tensor = model.net(x)
        return scores

    IntegratedGradients(OwnForward(forward, net=tiny_model()).eval(), steps=3).attribute(
        x, 0, forward_args=(np.zeros((2, 2), np.int16),)
    )
    assert kinds == {(np.ndarray, True, np.dtype(np.int16))}
