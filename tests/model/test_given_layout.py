"""A function of the user's reads tokens and channels whose layout is not recognised."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import saliency
from saliency import METHODS, AttentionRollout, GradCAM, ReciproCAM, SmoothGrad, Together
from saliency.errors import LayerError, MethodError
from saliency.testing import images, tiny_transformer
from saliency.testing.case import TinyTransformer

OBJECTS = 100
X = images(2, (16, 24))  # 4 x 6 patches


class TinyDetector(TinyTransformer):
    """Class scores of tokens of objects, which come after those of the class and the patches, as in YOLOS."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = nn.Embedding(OBJECTS, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, objects, classes)."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        own = [token.weight.expand(len(x), -1, -1) for token in (self.token, self.objects)]
        tokens = self.norm(self.blocks(torch.cat([own[0], patches, own[1]], 1)))
        return cast("Tensor", self.head(tokens[:, -OBJECTS:]))


def detector() -> nn.Module:
    torch.manual_seed(0)
    return TinyDetector().eval()


def patches(tokens: Tensor) -> Tensor:
    return tokens[:, 1:-OBJECTS].transpose(1, 2).reshape(len(tokens), -1, 4, 6)


def second_object(output: Tensor) -> Tensor:
    return output[:, 1, 2]


@pytest.mark.parametrize("cls", [AttentionRollout, GradCAM])
def test_tokens_of_objects_are_not_taken_for_patches(cls: Any) -> None:
    layer = {"layer": "blocks.1.norm2"} if cls is GradCAM else {}
    found, wanted = (
        cls(detector(), **layer, **given).attribute(X, second_object) for given in ({}, {"layout": patches})
    )
    torch.testing.assert_close(found.values, wanted.values)


def test_attention_is_read_by_the_given_function() -> None:
    model = detector()
    found = AttentionRollout(model, layout=patches).attribute(X, second_object)
    fused = [
        item.probabilities + torch.eye(125) for item in saliency.attention(model, X, second_object, reduce="mean_heads")
    ]
    rollout = (fused[1] / 2) @ (fused[0] / 2)
    torch.testing.assert_close(found.values, patches(rollout[:, 26, :, None]))
    assert found.settings["layout"] == "patches"


@pytest.mark.parametrize("name", [name for name, cls in METHODS.items() if cls.needs.attention])
def test_a_given_layout_equals_the_recognised_one(name: str) -> None:
    def cells(tokens: Tensor) -> Tensor:
        return tokens[:, 1:].transpose(1, 2).reshape(len(tokens), -1, 4, 6)

    model, method = tiny_transformer(), METHODS[name]
    model.token.weight.data.mul_(100)  # type: ignore[operator, union-attr]  # so that it stands apart from the patches
    wanted = method(model, **method.preview_options).attribute(X, 1)
    found = method(model, **method.preview_options, layout=cells).attribute(X, 1)
    torch.testing.assert_close(found.values, wanted.values)


def test_cams_read_the_layer_by_the_given_function() -> None:
    model, layer = detector(), "blocks.1.norm2"
    found = GradCAM(model, layer, layout=patches).attribute(X, second_object)
    captured: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_hook(lambda _, __, output: captured.append(output))
    score = second_object(model(X)).sum()
    handle.remove()
    grad = torch.autograd.grad(score, captured)[0]
    weights = patches(grad).mean((2, 3), keepdim=True)
    torch.testing.assert_close(found.values, (weights * patches(captured[0])).sum(1, keepdim=True))
    for method in (
        ReciproCAM(model, layer, layout=patches),
        SmoothGrad(GradCAM(model, layer, layout=patches), passes=2),
    ):
        assert method.attribute(X, second_object).values.shape == (2, 1, 4, 6)


def test_a_model_brings_its_layout() -> None:
    model = detector()
    model.layout = patches  # type: ignore[assignment]
    found = AttentionRollout(model).attribute(X, second_object)
    assert (found.values.shape, found.settings["layout"]) == ((2, 1, 4, 6), "patches")
    assert "layout" not in AttentionRollout(detector()).settings
    assert GradCAM(model, "patches").attribute(X, second_object).values.shape == (2, 1, 4, 6)  # a convolution


def test_what_is_no_layout_is_refused() -> None:
    model = detector()
    with pytest.raises(MethodError, match=r"layout='NTC': expected a function"):
        AttentionRollout(model, layout="NTC")  # type: ignore[arg-type]
    with pytest.raises(
        LayerError, match=r"layout: expected maps \(2, K, h, w\) of \(2, 125, 1\), got Tensor of shape \(2, 24, 1\)"
    ):
        AttentionRollout(model, layout=lambda tokens: tokens[:, 1:25]).attribute(X, second_object)
    with pytest.raises(MethodError, match="must have the same model, preprocessing, class names and layout"):
        Together(AttentionRollout(model), AttentionRollout(model, layout=patches)).attribute(X, second_object)
