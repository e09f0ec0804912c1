"""Questions in all places where one is asked: variants of an image, wrappers, folders, metrics, changed outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import saliency
from saliency import (
    Augmented,
    DeepLIFT,
    FinerCAM,
    GradCAM,
    GuidedBackprop,
    IntegratedGradients,
    PerImage,
    SmoothGrad,
    Tiled,
    VanillaGradient,
)
from saliency.errors import MethodError, TargetError
from saliency.metrics import measure
from saliency.testing import tiny_model
from saliency.testing.case import images
from tests.targets.test_boxes import GridDetector


class Segmenter(nn.Module):
    """Maps of two classes, and what the network does with them at its end."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)
        self.end = end
        nn.init.normal_(self.conv.weight, generator=torch.Generator().manual_seed(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.conv(x))


def muted(z: Tensor) -> Tensor:
    p = z.sigmoid()
    p[:, 1] = 0.25 * p[:, 1]
    return p


def cleared(z: Tensor) -> Tensor:
    p = z.sigmoid()
    with torch.no_grad():
        z.zero_()
    return p


def test_finer_cam_asks_about_the_variants_of_an_image() -> None:
    model, x = tiny_model(), images(2)
    plain = FinerCAM(model).attribute(x)
    found = SmoothGrad(FinerCAM(model), passes=4, noise=0.0).attribute(x)
    torch.testing.assert_close(found.values, plain.values, rtol=1e-4, atol=1e-6)
    assert Augmented(FinerCAM(model)).attribute(x).target == plain.target


def test_values_before_a_sigmoid_are_those_at_the_same_place() -> None:
    mask = torch.zeros(16, 16)
    mask[2:5, 9:12] = 1
    found, expected = (
        VanillaGradient(Segmenter(end).eval()).attribute(images(1), saliency.region(1, mask)).values
        for end in (lambda z: z.sigmoid().transpose(2, 3), lambda z: z.transpose(2, 3))
    )
    factor = found.abs().sum() / expected.abs().sum()  # a probability, as the view is not the sigmoid's own result
    assert 0 < factor < 0.26
    assert torch.equal(found != 0, expected != 0)


@pytest.mark.parametrize("end", [muted, cleared])
def test_an_output_that_changes_after_the_sigmoid_is_read_as_it_is(end: Callable[[Tensor], Tensor]) -> None:
    model = Segmenter(end).eval()
    with torch.no_grad():
        expected = model(images(1))[:, 1, 2:5, 2:5].mean((1, 2))
    found = saliency.RISE(model, passes=4, grid=2).attribute(images(1), saliency.region(1, (2, 2, 5, 5)))
    torch.testing.assert_close(found.scores, expected)


def test_a_neuron_and_a_similarity_are_targets_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for seed in range(2):
        pixels = np.random.default_rng(seed).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{seed}.png")
    model: Any = tiny_model()
    model.preprocess = saliency.Preprocess(size=(16, 16), resize=16)
    for number, target in enumerate((saliency.neuron("stem", 1), saliency.similarity(torch.ones(5)))):
        run = saliency.batch.batch(
            tmp_path / "photos", tmp_path / f"out{number}", model=model, target=target, methods=("vanilla_gradient",)
        )
        assert (run.done, run.failed) == (2, 0)


@pytest.mark.parametrize("create", [lambda given: IntegratedGradients(tiny_model(), steps=3, baseline=given), None])
def test_a_value_for_each_image_belongs_to_its_image_inside_of_a_wrapper(create: Any) -> None:
    model, x = tiny_model(), images(2)
    create = create or (lambda given: DeepLIFT(model, baseline=given))
    both = SmoothGrad(create(PerImage([0.3, -0.2])), passes=3, noise=0.0).attribute(x, 1).values
    alone = [SmoothGrad(create(v), passes=3, noise=0.0).attribute(x[i], 1).values for i, v in enumerate((0.3, -0.2))]
    torch.testing.assert_close(both, torch.cat(alone))


def test_values_for_other_images_are_refused_also_together_and_in_wrappers() -> None:
    model, x = tiny_model(), images(2)
    three = IntegratedGradients(model, steps=2, baseline=PerImage([0.0, 1.0, 2.0]))
    for call in (
        lambda: three.attribute(x, 1),
        lambda: SmoothGrad(three, passes=2).attribute(x, 1),
        lambda: saliency.Together(GradCAM(model), three).attribute(x, 1),
    ):
        with pytest.raises(MethodError, match="baseline has 3 values for 2 images"):
            call()
    with pytest.raises(MethodError, match="smooth: GuidedBackprop takes one value for all images"):
        GuidedBackprop(model, smooth=PerImage(["leave", "leave"]))  # type: ignore[arg-type]


def test_one_value_serves_all_tiles_of_an_image() -> None:
    model, large = tiny_model(), torch.randn(1, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    one, plain = (
        Tiled(IntegratedGradients(model, steps=2, baseline=own), size=24, overlap=8).attribute(large, 1).values
        for own in (PerImage([0.5]), 0.5)
    )
    assert torch.equal(one, plain)


def test_metrics_take_a_list_of_a_box_and_a_function() -> None:
    model, x = GridDetector().eval(), torch.randn(2, 3, 48, 64, generator=torch.Generator().manual_seed(0))
    targets: list[Any] = [saliency.box(index=0), lambda output: output[0][:, 4:].flatten(1).sum(1)]
    method = VanillaGradient(model)
    (found,) = measure(["deletion"], method.attribute(x, targets), method=method, inputs=x, target=targets)
    assert torch.isfinite(found.values).all()


def test_a_region_is_a_target_of_gradient_statistics() -> None:
    table = saliency.inspection.gradient_statistics(
        Segmenter(nn.Identity()), images(2), saliency.region(1, (1, 1, 4, 4))
    )
    assert len(table)


def test_regions_and_other_targets_of_one_call_are_refused_where_they_read_other_values() -> None:
    model, x = Segmenter(torch.sigmoid).eval(), images(1)
    targets: list[Any] = [saliency.region(1, (2, 2, 5, 5)), lambda output: output.flatten(1).sum(1)]
    with pytest.raises(TargetError, match="explain them in another call than other targets"):
        VanillaGradient(model).attribute_classes(x, targets)


@pytest.mark.parametrize(
    ("keywords", "advice"),
    [
        ({"baselines": [0.0]}, r"IntegratedGradients\(model, baseline=...\), with saliency.PerImage"),
        ({"tiles": 512}, r"Tiled\(method, size=512, overlap=64\)"),
    ],
)
def test_old_keywords_name_the_new_call(keywords: dict[str, Any], advice: str) -> None:
    method, x = IntegratedGradients(tiny_model()), images(1)
    with pytest.raises(TypeError, match=advice):
        method.attribute(x, 1, **keywords)
    with pytest.raises(TypeError, match=advice):
        method.attribute_classes(x, [1], **keywords)
