"""Volumes and videos (N, C, D, H, W): every method works, or says that it is defined for two spatial axes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from saliency import METHODS, Attribution
from saliency.attribution.estimates import generator
from saliency.testing import tiny_model
from saliency.testing.case import tiny_model_for
from saliency.testing.unchanged import Snapshot
from tests.selection import of_each_family

TWO_AXES = "is defined for images of two spatial axes, and the input has 3"
IMAGES_ONLY = {"extremal_perturbation", "xrai"}
SEGMENTED = ("lime", "kernel_shap", "shapley_sampling", "feature_ablation", "vx_code")
BLOCKS: dict[str, dict[str, Any]] = {name: {"segments": (2, 2, 2)} for name in SEGMENTED}
OPTIONS: dict[str, dict[str, Any]] = {
    **BLOCKS,
    "shapley_sampling": {"segments": (1, 2, 2), "passes": 25},
    "kernel_shap": {"segments": (1, 2, 3), "passes": 21},
    "sobol": {"grid": 2, "passes": 40},
}


def volume(*, images: int = 2, size: tuple[int, int, int] = (8, 12, 16)) -> Tensor:
    return torch.randn(images, 3, *size, generator=torch.Generator().manual_seed(1))


def inflated(model: nn.Module, *, flat: bool) -> nn.Module:
    """Replace the 2-D layers by 3-D ones: `flat` ones have kernels of depth 1, others kernels of equal edges."""
    for name, module in model.named_children():
        if isinstance(module, nn.Conv2d):
            edges = {key: cast("tuple[int, int]", getattr(module, key)) for key in ("kernel_size", "stride", "padding")}
            depths = {key: edge[:1] for key, edge in edges.items()}
            if flat:
                depths = {"kernel_size": (1,), "stride": (1,), "padding": (0,)}
            options: Any = {key: (*depths[key], *edge) for key, edge in edges.items()}
            layer = nn.Conv3d(module.in_channels, module.out_channels, **options)
            depth = layer.kernel_size[0]
            layer.weight.data = module.weight.detach()[:, :, None].repeat(1, 1, depth, 1, 1) / depth
            layer.bias = module.bias
            setattr(model, name, layer)
        elif isinstance(module, nn.BatchNorm2d):
            norm = nn.BatchNorm3d(module.num_features)
            norm.load_state_dict(module.state_dict())
            setattr(model, name, norm)
        elif isinstance(module, nn.AdaptiveAvgPool2d):
            setattr(model, name, nn.AdaptiveAvgPool3d(1))
        else:
            inflated(module, flat=flat)
    return model.eval()


def method_of(name: str, model: nn.Module, **options: Any) -> Attribution:
    return METHODS[name](model, **{**METHODS[name].preview_options, **OPTIONS.get(name, {}), **options})


@pytest.mark.parametrize("name", of_each_family())
def test_a_method_explains_a_volume_or_says_that_it_is_for_images(name: str, tmp_path: Path) -> None:
    model = inflated(tiny_model_for(METHODS[name])(), flat=False)
    x = volume()
    method = method_of(name, model)
    before = Snapshot(model=model, method=method, input=x)
    if name in IMAGES_ONLY:
        with pytest.raises(saliency.errors.NotApplicableError, match=TWO_AXES):
            method.attribute(x, [0, 1])
    else:
        explanation = method.attribute(x, [0, 1])
        assert explanation.input_size == (8, 12, 16)
        assert explanation.values.dim() == 5
        assert saliency.heatmap(explanation).shape == (2, 8, 12, 16)
        assert float(explanation.values.amax() - explanation.values.amin()) > 0
        one = method_of(name, model).attribute(x[1:], 1)
        torch.testing.assert_close(one.values, explanation.values[1:], rtol=1e-3, atol=1e-5)
    assert not before.changes()


# The definition of these depends on the number of axes, or on the shortest edge: their random draws, and the neighbours
# of a location in Recipro-CAM.
OTHER_IN_THREE_AXES = {"rise", "d_rise", *IMAGES_ONLY}
FLAT: dict[str, dict[str, Any]] = {
    **{name: {"segments": (1, 2, 3)} for name in BLOCKS},
    "recipro_cam": {"alone": True},
}


@pytest.mark.parametrize("name", [name for name in METHODS if name not in OTHER_IN_THREE_AXES])
def test_a_volume_of_one_slice_has_the_map_of_the_image(name: str) -> None:
    build = tiny_model_for(METHODS[name])
    x = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    own = FLAT.get(name, {})
    segments = {"segments": own["segments"][1:]} if "segments" in own else {}
    image = method_of(name, build().double(), **{**own, **segments}).attribute(x, [0, 1])
    slices = method_of(name, inflated(build(), flat=True).double(), **own).attribute(x[:, :, None], [0, 1])
    assert slices.layer == image.layer
    torch.testing.assert_close(slices.values[:, :, 0], image.values, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(slices.scores, image.scores)
    for part in ("error", "residual", "agreement", "ledger"):
        ours, theirs = getattr(slices, part), getattr(image, part)
        if theirs is not None:
            torch.testing.assert_close(ours.view(theirs.shape), theirs, rtol=1e-4, atol=1e-7, equal_nan=True)
    torch.testing.assert_close(saliency.heatmap(slices)[:, 0], saliency.heatmap(image), rtol=1e-6, atol=1e-9)


def test_a_wrapped_method_for_images_refuses_a_volume() -> None:
    model = inflated(tiny_model(), flat=False)
    with pytest.raises(saliency.errors.NotApplicableError, match=f"xrai {TWO_AXES}"):
        saliency.SmoothGrad(saliency.XRAI(model, steps=2), passes=2).attribute(volume(), 0)
    with pytest.raises(saliency.errors.NotApplicableError, match=f'fill="inpaint" {TWO_AXES}'):
        saliency.Occlusion(model, window=4, stride=4, fill="inpaint").attribute(volume(), 0)


# Independent references.


def test_gradients_and_cams_are_those_of_autograd() -> None:
    model = inflated(tiny_model(), flat=False).double()
    x = volume().double().requires_grad_()
    cells: list[Tensor] = []
    handle = model.get_submodule("last").register_forward_hook(lambda module, inputs, output: cells.append(output))
    score = model(x)[:, 3].sum()
    handle.remove()
    cells[0] = cells[0].relu() if cells[0].min() < 0 else cells[0]  # an in-place ReLU has written to it
    gradient, at_layer = torch.autograd.grad(score, [x, cells[0]], allow_unused=True)
    assert torch.equal(saliency.VanillaGradient(model).attribute(x, 3).values, gradient)
    cam = saliency.GradCAM(model, "last").attribute(x, 3)
    del at_layer
    with torch.no_grad():
        activation = torch.relu(model.get_submodule("drop")(torch.relu(model.get_submodule("down")(_stem(model, x)))))
        activation = model.get_submodule("last")(activation)
    leaf = activation.clone().requires_grad_()
    pooled = model.get_submodule("head")(leaf.relu().mean((2, 3, 4)))[:, 3].sum()
    (at_layer,) = torch.autograd.grad(pooled, leaf)
    expected = (at_layer.mean((2, 3, 4), keepdim=True) * activation).sum(1, keepdim=True)
    torch.testing.assert_close(cam.values, expected)


def _stem(model: nn.Module, x: Tensor) -> Tensor:
    stem: Tensor = model.get_submodule("norm")(model.get_submodule("stem")(x))
    return stem.relu()


def test_occlusion_is_that_of_a_plain_loop() -> None:
    model = inflated(tiny_model(), flat=False).double()
    x = volume(images=1).double()
    values = saliency.Occlusion(model, window=(4, 6, 8), stride=(2, 6, 4), fill=0.5).attribute(x, 2).values
    total, count = torch.zeros(2, 8, 12, 16, dtype=torch.float64)
    with torch.no_grad():
        for z in (0, 2, 4):
            for y in (0, 6):
                for left in (0, 4, 8):
                    window = (..., slice(z, z + 4), slice(y, y + 6), slice(left, left + 8))
                    hidden = x.clone()
                    hidden[window] = 0.5
                    total[window] += (model(x) - model(hidden))[0, 2]
                    count[window] += 1
    torch.testing.assert_close(values[0, 0], total / count)
    with pytest.raises(saliency.errors.MethodError, match=r"got 2 numbers .* expected 3"):
        saliency.Occlusion(model, window=(4, 6), stride=2).attribute(x, 2)


def test_rise_is_that_of_a_plain_loop() -> None:
    model = inflated(tiny_model(), flat=False).double()
    x, size, grid = volume(images=1).double(), (8, 12, 16), 3
    values = saliency.RISE(model, passes=6, grid=grid, debiased=False).attribute(x, 2).values
    cells = [math.ceil(edge / grid) for edge in size]
    total = torch.zeros(size, dtype=torch.float64)
    for number in range(6):
        draws = torch.rand(grid**3 + 3, generator=generator(0, number))
        shown = (draws[:-3] < 0.5).double().view(1, 1, grid, grid, grid)
        large = F.interpolate(shown, [(grid + 1) * cell for cell in cells], mode="trilinear", align_corners=False)[0, 0]
        starts = [int(draw * cell) for draw, cell in zip(draws[-3:], cells, strict=True)]
        mask = large[tuple(slice(start, start + edge) for start, edge in zip(starts, size, strict=True))]
        with torch.no_grad():
            total += model(x * mask)[0, 2] * mask / 0.5 / 6
    torch.testing.assert_close(values[0, 0], total)


class LayersOfVolumes(nn.Module):
    """The operations of 3-D networks that have a rule in LRP."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm3d(6)
        self.pool, self.mean = nn.MaxPool3d(2), nn.AvgPool3d(2)
        self.up = nn.ConvTranspose3d(6, 4, 2, stride=2)
        self.instance = nn.InstanceNorm3d(4, affine=True)
        self.pad, self.mirror = nn.ReplicationPad3d(1), nn.ReflectionPad3d(1)
        self.last = nn.Conv3d(8, 4, 3)
        self.head = nn.Linear(4 * 8 + 4 * 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.norm(self.stem(x)).relu())
        small = self.instance(self.up(self.mean(x))).relu()
        large = F.interpolate(small, scale_factor=2, mode="trilinear")
        near = F.interpolate(small, scale_factor=2, mode="nearest")
        x = self.last(torch.cat([self.pad(large), self.mirror(near)], 1)).relu()
        pooled = [F.adaptive_avg_pool3d(x, 2), F.adaptive_max_pool3d(x, 2)]
        return cast("Tensor", self.head(torch.cat(pooled, 1).flatten(1)))


@pytest.mark.parametrize("name", ["lrp", "attn_lrp", "cp_lrp", "deep_lift", "full_grad"])
def test_relevance_passes_all_operations_of_volumes_and_accounts_for_the_score(name: str) -> None:
    torch.manual_seed(0)
    model = LayersOfVolumes().double().eval()
    explanation = METHODS[name](model).attribute(torch.randn(2, 2, 8, 8, 8, dtype=torch.float64), [0, 1])
    assert explanation.residual is not None
    if explanation.ledger is not None:
        shares = explanation.ledger.sum(1) + explanation.residual
        torch.testing.assert_close(shares, explanation.scores)
    assert float(explanation.residual.abs().max()) < 1e-9


@pytest.mark.parametrize("composite", ["epsilon_plus", "epsilon_alpha2_beta1_flat"])
def test_lrp_is_that_of_zennit(composite: str) -> None:
    zennit = pytest.importorskip("zennit.composites")
    torch.manual_seed(0)
    parts = [nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(4, 4, 3), nn.ReLU(), nn.AvgPool3d(2)]
    model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(4, 3)).double().eval()
    x = torch.randn(2, 2, 8, 8, 8, dtype=torch.float64, requires_grad=True)
    found = saliency.LRP(model, composite=composite).attribute(x, 1)
    seed = torch.zeros(2, 3, dtype=torch.float64)
    seed[:, 1] = found.scores
    with zennit.COMPOSITES[composite]().context(model) as changed:
        (expected,) = torch.autograd.grad(changed(x), x, seed)
    torch.testing.assert_close(found.values, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


# Reading, saving, and other parts.


def test_a_volume_is_saved_and_loaded(tmp_path: Path) -> None:
    explanation = saliency.GradCAM(inflated(tiny_model(), flat=False)).attribute(volume(), [0, 1])
    loaded = saliency.Explanation.load(explanation.save(tmp_path / "map.safetensors"))
    assert loaded.input_size == (8, 12, 16)
    assert torch.equal(saliency.heatmap(loaded), saliency.heatmap(explanation))
    assert saliency.heatmap(loaded[1], size=(4, 6, 8), percentile=99).shape == (1, 4, 6, 8)
    with pytest.raises(saliency.errors.RenderError, match=r"\(depth, height, width\)"):
        saliency.heatmap(loaded, size=(6, 8))


@pytest.mark.parametrize("shape", [(3, 8), (1, 1, 3, 8, 8, 8)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(saliency.errors.ImageError, match=r"for volumes and videos, \(N, C, D, H, W\)"):
        saliency.VanillaGradient(tiny_model()).attribute(torch.randn(shape), 0)


def test_overlays_and_metrics_of_a_volume_are_refused_in_words() -> None:
    model = inflated(tiny_model(), flat=False)
    x = volume()
    explanation = saliency.GradCAM(model).attribute(x, [0, 1])
    with pytest.raises(saliency.errors.RenderError, match="a volume or video"):
        saliency.overlay(explanation[0])
    with pytest.raises(saliency.errors.MethodError, match="of a volume or video"):
        saliency.metrics.measure("deletion", explanation, model=model, inputs=x)


def test_one_forward_gives_several_maps_of_a_volume() -> None:
    model = inflated(tiny_model(), flat=False)
    methods = [saliency.GradCAM(model), saliency.GuidedBackprop(model), saliency.LRP(model)]
    for explanation, method in zip(saliency.Together(*methods).attribute(volume(), 1), methods, strict=True):
        torch.testing.assert_close(explanation.values, method.attribute(volume(), 1).values)


def test_baselines_and_segments_of_a_volume() -> None:
    model = inflated(tiny_model(), flat=False)
    x = volume()
    flipped = saliency.PerImage(x.flip(0))
    given = saliency.IntegratedGradients(model, steps=2, baseline=flipped).attribute(x, 1).values
    assert torch.equal(
        given[:1], saliency.IntegratedGradients(model, baseline=x[1:], steps=2).attribute(x[:1], 1).values
    )
    for baseline in ("blur", "noise", 0.5):
        assert saliency.IntegratedGradients(model, baseline=baseline, steps=2).attribute(x, 1).values.shape == x.shape
    labels = torch.arange(8 * 12 * 16).view(8, 12, 16) // 384
    for segments in (20, labels, lambda image: labels):
        explanation = saliency.FeatureAblation(model, segments=segments, fill="blur").attribute(x[:1], 1)
        assert len(set(explanation.values.flatten().tolist())) > 2
    with pytest.raises(saliency.errors.MethodError, match="3 spatial axes"):
        saliency.FeatureAblation(model, segments=(2, 2)).attribute(x, 1)


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv3d(3, 4, 3, padding=1), nn.Conv3d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.out(self.conv(x).relu()))


def test_a_region_of_a_volume_is_the_mean_of_its_voxels() -> None:
    torch.manual_seed(0)
    model, x = Segmenter().double(), volume().double()
    bias = cast("Tensor", model.out.bias)
    with torch.no_grad():  # half of the voxels for each class
        bias[1] += (model(x)[:, 0] - model(x)[:, 1]).median()
    mask = torch.zeros(8, 12, 16, dtype=torch.bool)
    mask[2:4, 3:9, 5:8] = True
    output = model(x).detach()
    own = saliency.VanillaGradient(model)
    assert torch.allclose(own.attribute(x, saliency.region(1, mask)).scores, output[:, 1, mask].mean(1))
    predicted = [image[1][image.argmax(0) == 1].mean() for image in output]
    assert torch.allclose(own.attribute(x, saliency.region(1)).scores, torch.stack(predicted))
    both = saliency.region(1, torch.stack([mask, ~mask]))
    assert torch.allclose(own.attribute(x, both).scores[1], output[1, 1, ~mask].mean())
    border = saliency.region(1, "border")
    assert own.attribute(x, border).values.shape == x.shape
    assert saliency.heatmap(saliency.GradCAM(model).attribute(x, border)).shape == (2, 8, 12, 16)
    with pytest.raises(saliency.errors.TargetError, match="a mask in the size of the output"):
        own.attribute(x, saliency.region(1, (0, 0, 4, 4)))
    with pytest.raises(saliency.errors.TargetError, match=r"saliency.region\(label\)"):
        own.attribute(x, 1)


def test_tensors_of_monai_are_read_as_they_are() -> None:
    data = pytest.importorskip("monai.data")
    x = volume()
    model = inflated(tiny_model(), flat=False)
    explanation = saliency.GradCAM(model).attribute(data.MetaTensor(x), 1)
    assert type(explanation.values) is Tensor
    assert torch.equal(explanation.values, saliency.GradCAM(model).attribute(x, 1).values)
    mask = data.MetaTensor(torch.ones(8, 12, 16, dtype=torch.bool))
    assert type(saliency.VanillaGradient(Segmenter()).attribute(x, saliency.region(1, mask)).scores) is Tensor


def test_a_volume_without_a_batch_axis_is_named_as_one() -> None:
    model = inflated(tiny_model(), flat=False)
    with pytest.raises(
        saliency.errors.ModelError, match=r"refused an input of .*five axes, so pass a single one as x\[None\]"
    ):
        saliency.GradCAM(model).attribute(volume()[0], 1)
