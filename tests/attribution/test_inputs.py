"""Several inputs of one call: a map and a share for each, as captum's tuples, and never a layer of another input."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, UserDict
from functools import partial
from itertools import permutations
from math import factorial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import saliency
from saliency import Views
from saliency.errors import ImageError, LayerError, MethodError, ModelError, NonFiniteError, SaliencyWarning
from saliency.model.inputs import with_image
from saliency.testbed import CAMERAS, INSTRUCTION
from tests.models import small_vit
from tests.several_inputs import CASES, MultiView, case

TWO_STREAMS = ("late", "middle", "early", "shared")
COMPLETE = ("input_x_gradient", "integrated_gradients", "deep_lift", "lrp", "attn_lrp")
WINDOW: dict[str, Any] = {"window": 8, "stride": 4}


@pytest.fixture(scope="module")
def captum() -> Any:
    return pytest.importorskip("captum.attr")


def keep(calls: list[Tensor], module: nn.Module, arguments: Any, output: Tensor) -> None:
    calls.append(output)


def target_of(name: str) -> Any:
    return saliency.value(0, 1) if name == "policy" else 1


@pytest.mark.parametrize("name", TWO_STREAMS)
def test_maps_equal_the_tuples_of_captum(name: str, captum: Any) -> None:
    model, inputs = case(name)
    given = tuple(inputs.values())
    path = {"n_steps": 20, "method": "gausslegendre"}
    for method, other, options in (
        (saliency.VanillaGradient(model), captum.Saliency(model), {"abs": False}),
        (saliency.InputXGradient(model), captum.InputXGradient(model), {}),
        (saliency.IntegratedGradients(model, steps=20), captum.IntegratedGradients(model), path),
    ):
        expected = other.attribute(tuple(x.clone().requires_grad_() for x in given), target=1, **options)
        for result in (method.attribute(inputs, 1), method.attribute(given, 1)):
            assert list(result) == list(inputs)
            for own, theirs in zip(result.values(), expected, strict=True):
                torch.testing.assert_close(own.values, theirs.detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", TWO_STREAMS)
def test_occlusion_equals_the_tuples_of_captum(name: str, captum: Any) -> None:
    model, inputs = case(name)
    windows = tuple((x.shape[1], 4, 4) for x in inputs.values())
    strides = tuple((x.shape[1], 2, 2) for x in inputs.values())
    shapes: dict[str, Any] = {"sliding_window_shapes": windows, "strides": strides}
    expected = captum.Occlusion(model).attribute(tuple(inputs.values()), target=1, **shapes)
    result = saliency.Occlusion(model, window=4, stride=2).attribute(inputs, 1)
    for own, theirs in zip(result.values(), expected, strict=True):
        torch.testing.assert_close(own.values, theirs[:, :1].double(), atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:.*joined before the first layer")
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("late", ("rgb_stream", "depth_stream")),
        ("middle", ("rgb_stream", "depth_stream")),
        ("attention", ("rgb_stream", "depth_stream")),
        ("early", ("fused", "fused")),
    ],
)
def test_grad_cam_equals_that_of_captum_at_the_layer_of_each_image(
    name: str, layers: tuple[str, str], captum: Any
) -> None:
    model, inputs = case(name)
    result = saliency.GradCAM(model).attribute(inputs, 1)
    for own, layer in zip(result.values(), layers, strict=True):
        assert own.layer == layer
        theirs = captum.LayerGradCam(model, model.get_submodule(layer)).attribute(tuple(inputs.values()), target=1)
        torch.testing.assert_close(own.values, theirs.detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("name", "layers"), [("late", ("rgb_stream", "depth_stream")), ("shared", ("encoder",) * 2)])
@pytest.mark.parametrize("which", [None, "sum"])
def test_a_map_at_a_layer_is_of_the_call_that_reads_its_image(name: str, layers: tuple[str, str], which: Any) -> None:
    model, inputs = case(name)
    result = saliency.GradCAM(model, calls=which).attribute(inputs, 1)
    for (key, own), layer in zip(result.items(), layers, strict=True):
        assert own.layer == layer
        stream = model.get_submodule(layer)
        calls: list[Tensor] = []
        with stream.register_forward_hook(partial(keep, calls)):
            score = model(**{**inputs, key: inputs[key].clone().requires_grad_()})[:, 1].sum()
        activation = next(call for call in calls if torch.equal(call, stream(inputs[key])))
        (gradient,) = torch.autograd.grad(score, activation)
        expected = (gradient.mean((2, 3), keepdim=True) * activation).sum(1, keepdim=True).relu()
        torch.testing.assert_close(own.values.relu(), expected.detach(), atol=1e-9, rtol=0)


def test_the_default_layer_descends_from_its_image_and_no_other() -> None:
    model, inputs = case("middle")
    layers = [own.layer for own in saliency.GradCAM(model).attribute(inputs, 1).values()]
    assert layers == ["rgb_stream", "depth_stream"]


def test_excitation_is_read_at_the_layer_of_each_image() -> None:
    model, inputs = case("late")
    with pytest.warns(SaliencyWarning, match="or takes other paths"):  # the streams of other images
        result = saliency.ExcitationBackprop(model).attribute(inputs, 1)
    assert [str(own.layer).partition(".")[0] for own in result.values()] == ["rgb_stream", "depth_stream"]
    total = torch.stack([*result.sums.values()]).sum(0)
    assert ((total > 0.5) & (total < 1 + 1e-9)).all()


def test_after_early_fusion_there_is_one_map_of_all_images_and_a_warning_says_so() -> None:
    model, inputs = case("early")
    with pytest.warns(SaliencyWarning) as caught:
        result = saliency.GradCAM(model).attribute(inputs, 1)
    (warning,) = caught
    assert "joined before the first layer" in str(warning.message)
    assert torch.equal(result["rgb"].values, result["depth"].values)


@pytest.mark.parametrize("method", [saliency.LRP, saliency.AttnLRP])
def test_relevance_of_images_that_share_a_patch_embedding_is_read_at_pixels(method: type[saliency.Attribution]) -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = small_vit()
            self.vit.conv_proj = nn.Conv2d(4, 16, 8, 8)

        def forward(self, rgb: Tensor, depth: Tensor) -> Tensor:
            out: Tensor = self.vit(torch.cat([rgb, depth], 1))
            return out

    torch.manual_seed(0)
    model, inputs = Joined(), {"rgb": torch.randn(2, 3, 32, 32), "depth": torch.randn(2, 1, 32, 32)}
    result = method(model).attribute(inputs, 1)
    whole = method(model.vit, at="pixels").attribute(torch.cat([*inputs.values()], 1), 1)
    torch.testing.assert_close(torch.cat([part.values for part in result.values()], 1), whole.values)
    at_patches = method(model, at="patches").attribute(inputs, 1)
    assert [part.values.shape for part in at_patches.values()] == [(2, 1, 4, 4)] * 2


def test_relevance_at_patches_is_read_at_the_convolution_of_each_image() -> None:
    model, inputs = case("late")
    result = saliency.LRP(model, at="patches").attribute(inputs, 1)
    assert [part.layer for part in result.values()] == ["rgb_stream.0", "depth_stream.0"]


@pytest.mark.parametrize("name", [*CASES, "views by case", "views by view"])
@pytest.mark.parametrize("method", COMPLETE)
def test_shares_sum_to_the_score(name: str, method: str) -> None:
    torch.manual_seed(0)
    if name in CASES:
        model, inputs = case(name)
    else:  # folded into the batch
        model = MultiView(is_transposed=name == "views by view").double().eval()
        inputs = dict[Any, Any](enumerate(torch.randn(3, 2, 3, 12, 16, dtype=torch.float64)))
    given = inputs if name in CASES else Views(torch.stack([*inputs.values()], 1))
    options = {"tolerance": 1e-6} if method == "integrated_gradients" else {}
    result = saliency.METHODS[method](model, **options).attribute(given, target_of(name))
    sums = result.sums
    floats = {key for key, own in inputs.items() if isinstance(own, Tensor)}
    assert set(sums) == floats | ({"rest"} if "rest" in sums else set())
    if not (method == "input_x_gradient" and name == "attention"):  # a softmax is not of degree one
        torch.testing.assert_close(sum(sums.values()), result.scores.double(), atol=1e-5, rtol=1e-5)
    shares = torch.tensor(list(result.shares.values())).T
    torch.testing.assert_close(shares.abs().sum(-1), torch.ones(len(result.scores)))
    assert torch.equal(shares.double().sign(), torch.stack(list(sums.values()), -1).squeeze().sign())


@pytest.mark.parametrize("name", ["late", "state", "policy"])
def test_the_ledger_has_a_row_for_each_input(name: str) -> None:
    model, inputs = case(name)
    result = saliency.LRP(model).attribute(inputs, target_of(name))
    first, *_ = result.values()
    floats = [key for key, own in inputs.items() if isinstance(own, Tensor)]
    assert list(first.ledger_names[: len(floats)]) == floats
    for column, key in enumerate(floats):
        torch.testing.assert_close(first.ledger[:, column], result.sums[key])
    torch.testing.assert_close(first.ledger.sum(1) + first.residual, first.scores)
    assert [row.name for row in saliency.ledger_table(first[0])][: len(floats)] == floats


class Weighed(nn.Module):
    """A score to which colours and depth add their sums, each times a weight."""

    def __init__(self, colour: float, depth: float) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([colour, depth]))

    def forward(self, rgb: Tensor, depth: Tensor) -> Tensor:
        return (self.weights[0] * rgb.sum((1, 2, 3)) + self.weights[1] * depth.sum((1, 2, 3)))[:, None] + 5


@pytest.mark.parametrize(("colour", "depth"), [(-3.0, 1.0), (-1.0, 1.0), (3.0, -1.0), (3.0, 1.0)])
def test_the_input_that_raises_the_score_has_the_larger_share_whatever_the_sign_of_the_sum(
    colour: float, depth: float
) -> None:
    image = torch.full((1, 1, 8, 8), 1 / 64)
    shares = saliency.InputXGradient(Weighed(colour, depth)).attribute({"rgb": image, "depth": image}, 0).shares
    size = abs(colour) + abs(depth)
    assert shares == pytest.approx({"rgb": colour / size, "depth": depth / size})


@pytest.mark.parametrize("method", ["grad_cam", "vanilla_gradient", "input_x_gradient"])
def test_shares_are_of_the_values_that_are_drawn(method: str) -> None:
    network = saliency.load("shapes_rgbd")
    scenes = saliency.testbed.draw_rgbd(1, seed=3).inputs
    result = saliency.METHODS[method](network).attribute({"rgb": scenes["rgb"], "depth": scenes["depth"]}, 0)
    sums = {name: float(saliency.heatmap(explanation).double().sum()) for name, explanation in result.items()}
    size = sum(map(abs, sums.values()))
    assert result.shares == pytest.approx({name: value / size for name, value in sums.items()}, rel=1e-4)


def test_shares_of_maps_of_zeros_are_zero() -> None:
    image = torch.rand(1, 1, 8, 8)
    with pytest.warns(SaliencyWarning, match="is 0 everywhere"):
        result = saliency.InputXGradient(Weighed(0.0, 0.0)).attribute({"rgb": image, "depth": image}, 0)
    assert result.shares == {"rgb": 0, "depth": 0}


@pytest.mark.parametrize("method", ["occlusion", "rise", "kernel_shap"])
def test_an_input_is_hidden_while_the_others_stay(method: str) -> None:
    model, inputs = case("late")
    chosen = saliency.METHODS[method](model, **saliency.METHODS[method].preview_options)
    result = chosen.attribute(inputs, 1, explain=["depth"])
    assert list(result) == ["depth"]

    class Depth(nn.Module):
        def forward(self, depth: Tensor, rgb: Tensor) -> Tensor:
            out: Tensor = model(rgb, depth)
            return out

    alone = saliency.METHODS[method](Depth(), **saliency.METHODS[method].preview_options)
    expected = alone.attribute(inputs["depth"], 1, forward_args=(inputs["rgb"],))
    torch.testing.assert_close(result["depth"].values, expected.values)


def test_views_have_a_map_each() -> None:
    torch.manual_seed(0)
    model, x = MultiView().double().eval(), torch.randn(2, 3, 3, 12, 16, dtype=torch.float64)
    result = saliency.InputXGradient(model).attribute(Views(x), 1)
    y = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(y)[:, 1].sum(), y)
    assert list(result) == [0, 1, 2]
    for view, own in result.items():
        torch.testing.assert_close(own.values, (gradient * x)[:, view])
    with pytest.raises(ImageError, match=r"got \(2, 3, 3, 12, 16\).*saliency.Views"):
        saliency.InputXGradient(model).attribute(x, 1)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_map_at_a_layer_is_of_the_rows_of_its_view(is_transposed: bool) -> None:
    torch.manual_seed(0)
    model, x = MultiView(is_transposed=is_transposed).double().eval(), torch.randn(2, 3, 3, 12, 16, dtype=torch.float64)
    calls: list[Any] = []
    with model.encoder.register_forward_hook(partial(keep, calls)):
        score = model(x)[:, 1].sum()
    (gradient,) = torch.autograd.grad(score, calls[0])
    values = (gradient.mean((2, 3), keepdim=True) * calls[0]).sum(1, keepdim=True).relu().detach()
    by_view = values.unflatten(0, (3, 2)) if is_transposed else values.unflatten(0, (2, 3)).transpose(0, 1)
    result = saliency.GradCAM(model).attribute(Views(x), 1)
    for view, own in result.items():
        assert own.layer == "encoder"
        torch.testing.assert_close(own.values.relu(), by_view[view])
        for row in range(2):
            alone = saliency.GradCAM(model).attribute(Views(x[row : row + 1]), 1)
            torch.testing.assert_close(own.values[row : row + 1], alone[view].values)


def test_photos_have_their_own_preprocessing_frames_and_baselines(tmp_path: Path, captum: Any) -> None:
    model, _ = case("late")
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8))
    photo.save(tmp_path / "a.png")
    depth = torch.rand(1, 12, 12, dtype=torch.float64)
    prepare = {"rgb": saliency.Preprocess(size=(16, 16)), "depth": None}
    vars(model)["preprocess"] = prepare
    for given in (prepare, None):
        baseline: dict[str, str | float] = {"rgb": "black", "depth": 1.0}
        method = saliency.IntegratedGradients(model, preprocess=given, baseline=baseline, steps=3)
        result = method.attribute({"rgb": tmp_path / "a.png", "depth": depth}, 1)
        frame = result["rgb"].frames[0]
        assert frame is not None
        assert frame.image.size == (60, 40)
        assert result["depth"].frames == (None,)
        assert result["rgb"].input_size == (16, 16)
    black = torch.tensor([-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225], dtype=torch.float64)
    reference = (black.view(1, 3, 1, 1).expand(1, 3, 16, 16), torch.ones(1, 1, 12, 12, dtype=torch.float64))
    x = (result.inputs["rgb"], result.inputs["depth"])
    expected = captum.IntegratedGradients(model).attribute(x, reference, target=1, n_steps=3)
    for own, theirs in zip(result.values(), expected, strict=True):
        torch.testing.assert_close(own.values, theirs, atol=1e-6, rtol=0)


def test_the_crop_may_be_left_out_by_input() -> None:
    model, _ = case("late")
    photo, depth = Image.new("RGB", (60, 40)), torch.rand(1, 12, 12, dtype=torch.float64)
    prepare = {"rgb": saliency.Preprocess(size=(16, 16), resize=16), "depth": None}
    for whole in (True, {"rgb": True}):
        method = saliency.VanillaGradient(model, preprocess=prepare, whole=whole)
        frame = method.attribute({"rgb": photo, "depth": depth}, 1)["rgb"].frames[0]
        assert frame is not None
        assert frame.box == (0, 0, 60, 40)
    with pytest.raises(MethodError, match="needs preprocess= by input"):
        saliency.VanillaGradient(model, preprocess=prepare["rgb"], whole={"rgb": True})
    with pytest.raises(MethodError, match="whole has a value for red; the inputs are rgb, depth"):
        saliency.VanillaGradient(model, preprocess=prepare, whole={"red": True}).attribute(
            {"rgb": photo, "depth": depth}, 1
        )


def test_the_fields_of_one_preprocessing_are_no_mapping_of_inputs() -> None:
    model = saliency.testing.tiny_model()
    assert saliency.VanillaGradient(model, preprocess={"resize": 32}).preprocess == saliency.Preprocess(resize=32)


def test_layers_by_input() -> None:
    model, inputs = case("late")
    layers: dict[str, str | nn.Module] = {"rgb": "rgb_stream.0", "depth": model.get_submodule("depth_stream")}
    result = saliency.GradCAM(model, layers).attribute(inputs, 1)
    assert [own.layer for own in result.values()] == ["rgb_stream.0", "depth_stream"]
    with pytest.raises(LayerError, match=r"does not depend on the explained image.*a layer of each input: layer=\{"):
        saliency.GradCAM(model, "rgb_stream").attribute(inputs, 1)


def test_a_list_is_a_batch_and_a_tuple_only_if_the_model_requires_as_many() -> None:
    model = saliency.testing.tiny_model()
    x = torch.randn(3, 16, 20)
    assert len(saliency.VanillaGradient(model).attribute((x, x), 1)) == 2
    two, inputs = case("early")
    with pytest.raises(ModelError, match=r'forward_args.*\{"rgb": image'):
        saliency.VanillaGradient(two).attribute([*inputs["rgb"]], 1)


def test_bad_inputs_are_named() -> None:
    model, inputs = case("late")
    method = saliency.VanillaGradient(model)
    for given, error, facts in (
        ({"rgb": inputs["rgb"], "dep": inputs["depth"]}, MethodError, "takes rgb, depth, got a mapping of rgb, dep"),
        ({"rgb": inputs["rgb"], "depth": inputs["depth"][:1].repeat(3, 1, 1, 1)}, ImageError, "2 images; expected 3"),
        (
            {"rgb": inputs["rgb"], "depth": inputs["depth"] * torch.nan},
            NonFiniteError,
            "depth: image 0",
        ),
        ({"rgb": "no.png", "depth": inputs["depth"]}, ImageError, "rgb: "),
        ({"rgb": 1, "depth": 2}, ImageError, "no image among the inputs rgb, depth"),
    ):
        with pytest.raises(error, match=facts):
            method.attribute(given, 1)
    with pytest.raises(MethodError, match="a list of images among rgb, depth"):
        method.attribute(inputs, 1, explain=["d"])
    with pytest.raises(ImageError, match=r"images of one size.*name them, \{.*of a tuple, by number, \{0: a, 1: b\}"):
        method.attribute([*inputs.values()], 1)
    with pytest.raises(AttributeError, match=r"each image has its own, as in result\['rgb'\].target"):
        _ = method.attribute(inputs, 1).target
    with pytest.raises(KeyError, match="there is one of 'rgb', 'depth'"):
        method.attribute(inputs, 1)["d"]
    cure = r'forward_args={"depth": value}, or images by name, {"rgb": image, "depth": other}$'
    with pytest.raises(ModelError, match=f"missing 1 required .*{cure}"):
        method.attribute({"rgb": inputs["rgb"]}, 1)


def test_a_depth_of_one_row_serves_all_images() -> None:
    model, inputs = case("late")
    single = {**inputs, "depth": inputs["depth"][:1]}
    repeated = {**inputs, "depth": inputs["depth"][:1].repeat(2, 1, 1, 1)}
    for method in (saliency.InputXGradient(model), saliency.GradCAM(model), saliency.Occlusion(model, **WINDOW)):
        for own, expected in zip(*(method.attribute(given, 1).values() for given in (single, repeated)), strict=True):
            torch.testing.assert_close(own.values, expected.values)


def test_a_batch_is_its_cases() -> None:
    for name in CASES:
        model, inputs = case(name)
        for method in (saliency.LRP(model), saliency.Occlusion(model, **WINDOW)):
            both = method.attribute(inputs, target_of(name))
            for row in range(2):
                single = {key: own[row : row + 1] if isinstance(own, Tensor) else own for key, own in inputs.items()}
                for own, alone in zip(both.values(), method.attribute(single, target_of(name)).values(), strict=True):
                    torch.testing.assert_close(own.values[row], alone.values[0])


def test_shapley_values_of_whole_inputs_are_exact() -> None:
    for name in ("late", "three", "state", "policy"):
        model, inputs = case(name)
        result = saliency.KernelSHAP(model, segments="inputs").attribute(inputs, target_of(name))
        tensors = {key: own for key, own in inputs.items() if isinstance(own, Tensor)}
        score = partial(score_with, model, inputs, target_of(name))
        expected = dict.fromkeys(tensors, 0.0)
        for order in permutations(tensors):  # by the definition
            for at, key in enumerate(order):
                expected[key] += float((score(order[: at + 1]) - score(order[:at]))[0]) / factorial(len(order))
        for key, value in result.sums.items():
            assert float(value[0]) == pytest.approx(expected.get(str(key), 0), abs=1e-9)  # the rest is 0


def score_with(model: nn.Module, inputs: dict[str, Any], target: Any, shown: tuple[str, ...]) -> Tensor:
    """The scores when only some inputs are shown, and the others are 0."""
    hidden = {key: own * 0 if isinstance(own, Tensor) and key not in shown else own for key, own in inputs.items()}
    output: Tensor = model(**hidden) if target == 1 else model(hidden)
    return output.detach()[:, 1] if target == 1 else output.detach()[:, 0, 1]


def test_a_group_of_images_is_hidden_at_the_same_places() -> None:
    model, inputs = case("early")
    joined = torch.cat([*inputs.values()], 1)

    class Joined(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = model(x[:, :3], x[:, 3:])
            return out

    result = saliency.Occlusion(model, **WINDOW).attribute(inputs, 1, explain=[("rgb", "depth"), "rgb"])
    assert list(result) == [("rgb", "depth"), "rgb"]
    expected = saliency.Occlusion(Joined(), **WINDOW).attribute(joined, 1)
    torch.testing.assert_close(result["rgb", "depth"].values, expected.values)
    gradient = saliency.InputXGradient(model).attribute(inputs, 1, explain=[("rgb", "depth")])["rgb", "depth"]
    torch.testing.assert_close(gradient.values, saliency.InputXGradient(Joined()).attribute(joined, 1).values)
    other, sizes = case("late")
    with pytest.raises(ImageError, match="rgb 16x20, depth 12x16"):
        saliency.Occlusion(other, **WINDOW).attribute(sizes, 1, explain=[("rgb", "depth")])
    with pytest.raises(MethodError, match='segments="inputs" is for models with several inputs'):
        saliency.KernelSHAP(saliency.testing.tiny_model(), segments="inputs").attribute(torch.randn(3, 8, 8), 1)


def test_the_fill_is_of_each_input() -> None:
    model, inputs = case("late")
    result = saliency.FeatureAblation(model, segments="inputs", fill="mean").attribute(inputs, 1)
    score = model(**inputs)[:, 1]
    for key, own in inputs.items():
        hidden = {**inputs, key: own.mean((2, 3), keepdim=True).expand_as(own)}
        torch.testing.assert_close(result.sums[key], score - model(**hidden)[:, 1])


AVERAGES = ("smooth_grad", "smooth_grad_squared", "var_grad", "augmented")
IMAGES = {
    name: [key for key, own in inputs.items() if getattr(own, "ndim", 0) == 4] for name, (_, inputs) in CASES.items()
}


def any_method(name: str, model: nn.Module) -> saliency.Attribution:
    cls = saliency.METHODS[name]
    return cls(saliency.VanillaGradient(model) if name in AVERAGES else model, **cls.preview_options)


@pytest.mark.filterwarnings("ignore:excitation_backprop. the fractions")
@pytest.mark.parametrize("name", saliency.METHODS)
def test_a_method_explains_each_image_or_says_why_not(name: str) -> None:
    model, inputs = case("late")
    try:
        result = any_method(name, model).attribute(inputs, 1)
    except saliency.errors.NotApplicableError:
        assert saliency.METHODS[name].needs.attention or name in ("cam", "tam")
        return
    assert list(result) == ["rgb", "depth"]
    for own, x in zip(result.values(), inputs.values(), strict=True):
        assert own.values.shape[0] == 2
        assert own.input_size == x.shape[2:]
        assert own.layer is None or all(("depth" in layer) == (x.shape[1] == 1) for layer in own.layer.split(", "))


@pytest.mark.parametrize("case_name", [name for name, images in IMAGES.items() if len(images) > 1 and name != "early"])
@pytest.mark.parametrize("name", ["grad_cam", "layer_cam", "eigen_cam", "score_cam", "refine_cam", "guided_grad_cam"])
def test_no_method_reads_a_layer_of_another_image(case_name: str, name: str) -> None:
    model, inputs = case(case_name)
    result = any_method(name, model).attribute(inputs, target_of(case_name))
    for key, own in result.items():
        others = {other: inputs[other] + 1 for other in IMAGES[case_name] if other != key}
        for layer in str(own.layer).split(", "):
            assert reads_only(model, layer, inputs, key, others)


def reads_only(model: nn.Module, layer: str, inputs: dict[Any, Any], key: Any, others: dict[Any, Any]) -> bool:
    """Whether a row of a layer's output, in one of its calls, changes with an image and not with the others."""
    before, after, moved = (
        outputs(model, layer, {**inputs, **changed}) for changed in ({}, others, {key: inputs[key] + 1})
    )
    rows = zip(before, after, moved, strict=True)
    return any(torch.equal(first, second) and not torch.equal(first, third) for first, second, third in rows)


def outputs(model: nn.Module, layer: str, inputs: dict[Any, Any]) -> list[Tensor]:
    """The rows of the outputs of all calls of a layer."""
    calls: list[Any] = []
    with model.get_submodule(layer).register_forward_hook(partial(keep, calls)), torch.no_grad():
        if 0 in inputs:
            model(torch.stack([*inputs.values()], 1))
        else:
            _ = model(inputs) if "observation.state" in inputs else model(**inputs)
    return [row for output in calls for row in (output[0] if isinstance(output, tuple) else output)]


CAMS = (
    *("grad_cam", "grad_cam_plus_plus", "layer_cam", "hires_cam", "xgrad_cam"),
    *("eigen_cam", "eigen_grad_cam", "score_cam", "shapley_cam", "refine_cam"),
)


def networks() -> dict[str, tuple[nn.Module, dict[Any, Any]]]:
    """Eleven networks: late and middle fusion, cross attention, one encoder for all images, a state, and views."""
    torch.manual_seed(0)
    found: dict[str, tuple[nn.Module, dict[Any, Any]]] = {name: case(name) for name in CASES if name != "early"}
    views = dict(enumerate(torch.randn(3, 1, 3, 12, 16, dtype=torch.float64)))
    cameras = {name: torch.randn(1, 3, 8, 12, dtype=torch.float64) for name in ("top", "wrist")}
    for flag in (False, True):
        found[f"views {flag}"] = MultiView(is_transposed=flag).double().eval(), views
        found[f"stacked {flag}"] = Stacked(is_shared=flag).double().eval(), cameras
    return found


@pytest.mark.slow
def test_cams_read_layers_of_their_image_in_all_of_200_cases_over_11_networks() -> None:
    cases = wrong = 0
    for model, inputs in networks().values():
        given: Any = Views([*inputs.values()]) if 0 in inputs else inputs
        for name in CAMS:
            target = saliency.value(0, 1) if "observation.state" in inputs else 1
            for key, own in any_method(name, model).attribute(given, target).items():
                others = {other: x + 1 for other, x in inputs.items() if other != key and isinstance(x, Tensor)}
                cases += 1
                wrong += not all(reads_only(model, at, inputs, key, others) for at in str(own.layer).split(", "))
    assert (cases >= 200, wrong) == (True, 0)


def test_each_explanation_is_saved_and_what_takes_one_image_says_so(tmp_path: Path) -> None:
    model, inputs = case("late")
    method = saliency.GradCAM(model)
    result = method.attribute(inputs, 1)
    files = result.save(tmp_path / "scene.1.safetensors")
    assert [file.name for file in files] == ["scene.1.rgb.safetensors", "scene.1.depth.safetensors"]
    for file, own in zip(files, result.values(), strict=True):
        assert torch.equal(saliency.Explanation.load(file).values, own.values)
    for call in (saliency.overlay, saliency.heatmap, saliency.contact_sheet):
        with pytest.raises(saliency.errors.RenderError, match=r"result\[NAME\]|takes rows"):
            call(result)
    for refused in (
        lambda: saliency.trust(method, inputs, 1),
        lambda: saliency.compare([method], [inputs], [1]),  # type: ignore[list-item]
        lambda: saliency.export(method, tmp_path / "a.pt2", inputs, target=1),
        lambda: saliency.Together(method).attribute(inputs, 1),
    ):
        with pytest.raises(saliency.errors.SaliencyError, match="of a model that holds its other inputs"):
            refused()


def test_every_call_of_a_held_input_takes_the_options_of_this_input() -> None:
    model, inputs = case("late")
    method = saliency.GradCAM(model, layer={"rgb": "rgb_stream.0", "depth": "depth_stream.1"})
    result = method.attribute(inputs, 1)
    held = result.hold("rgb")
    (of_class,), (of_method,) = method.attribute_classes(held, [1]), saliency.Together(method).attribute(held, 1)
    for own in (method.attribute(held, 1), of_class, of_method):
        assert own.layer == "rgb_stream.0"
        assert torch.equal(own.values, result["rgb"].values)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result))])
@pytest.mark.parametrize("name", ["late", "policy", "views"])
def test_results_can_be_copied_and_pickled(name: str, duplicate: Any) -> None:
    views: tuple[nn.Module, Any] = MultiView(), Views(torch.randn(1, 2, 3, 12, 16))
    model, inputs = views if name == "views" else case(name)
    method = saliency.InputXGradient(model)
    result = method.attribute(inputs, target_of(name))
    copied, held = duplicate(result), duplicate(result.hold(next(iter(result))))
    assert copied.shares == result.shares
    copied_map = method.attribute(held, target_of(name)).values
    assert torch.equal(copied_map, result[next(iter(result))].values)


class Stacked(nn.Module):
    """Cameras that are stacked, and then read one by one by an encoder each, or by one for all."""

    def __init__(self, *, is_shared: bool) -> None:
        super().__init__()
        encoders = [nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()) for _ in range(1 if is_shared else 2)]
        self.encoders, self.head = nn.ModuleList(encoders), nn.Linear(8, 5)

    def forward(self, top: Tensor, wrist: Tensor) -> Tensor:
        views = torch.stack([top, wrist], 1).unbind(1)
        pooled = [self.encoders[number % len(self.encoders)](view).mean((2, 3)) for number, view in enumerate(views)]
        out: Tensor = self.head(torch.cat(pooled, 1))
        return out


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_part_of_a_stack_reads_its_image_only(is_shared: bool) -> None:
    torch.manual_seed(0)
    model = Stacked(is_shared=is_shared).double().eval()
    inputs = {name: torch.randn(1, 3, 8, 12, dtype=torch.float64) for name in ("top", "wrist")}
    result = saliency.GradCAM(model).attribute(inputs, 1)
    for number, (name, own) in enumerate(result.items()):
        maps = model.encoders[number % len(model.encoders)](inputs[name]).detach()
        weights = model.head.weight[1, 4 * number : 4 * number + 4].detach().view(1, 4, 1, 1) / maps[0, 0].numel()
        torch.testing.assert_close(own.values.relu(), (weights * maps).sum(1, keepdim=True).relu())


@pytest.mark.parametrize("name", ["ablation_cam", "recipro_cam"])
def test_a_layer_that_also_reads_another_image_is_not_replaced(name: str) -> None:
    model, inputs = case("shared")
    with pytest.raises(saliency.errors.NotApplicableError, match='"encoder" also reads other inputs'):
        saliency.METHODS[name](model).attribute(inputs, 1)
    views = Views(torch.randn(1, 3, 3, 12, 16, dtype=torch.float64))
    with pytest.raises(saliency.errors.NotApplicableError, match='"encoder" also reads other inputs'):
        saliency.METHODS[name](MultiView().double().eval()).attribute(views, 1)


def test_the_attention_of_two_transformers_is_told_apart() -> None:
    timm = pytest.importorskip("timm")
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 6}
    torch.manual_seed(0)
    streams = [timm.models.VisionTransformer(**options).eval() for _ in range(2)]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = streams
            self.head = nn.Linear(12, 5)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            out: Tensor = self.head(torch.cat([self.left(a), self.right(b)], 1))
            return out

    model, x = Both().eval(), [torch.randn(1, 3, 32, 32) for _ in range(2)]
    for stream in streams:
        nn.init.normal_(stream.head.weight)
    layers = [own.layer for own in saliency.GradCAM(model).attribute((x[0], x[1]), 1).values()]
    assert layers == ["left.blocks.2.norm1", "right.blocks.2.norm1"]
    rollout = saliency.AttentionRollout(model).attribute((x[0], x[1]), 1)
    for own, stream, image in zip(rollout.values(), streams, x, strict=True):
        torch.testing.assert_close(own.values, saliency.AttentionRollout(stream).attribute(image, 1).values)


def test_other_arguments_options_and_names_reach_the_right_input() -> None:
    model, inputs = case("state")
    image, state = inputs["image"], inputs["state"]
    expected = saliency.InputXGradient(model).attribute({"image": image, "state": state, "gripper": True}, 1)
    for given, arguments in (((image, state), (True,)), ((image, state), {"gripper": True})):
        result = saliency.InputXGradient(model).attribute(given, 1, forward_args=arguments)
        assert result.shares == expected.shares
    alone = saliency.InputXGradient(model).attribute({"image": image}, 1, forward_args=(state, True))
    torch.testing.assert_close(alone["image"].values, expected["image"].values)
    single = saliency.InputXGradient(model).attribute({"image": image[0], "state": state[0]}, 1)
    assert set(single.shares) == {"image", "state"}
    one_row = saliency.InputXGradient(model).attribute({"image": image, "state": state[:1]}, 1)
    assert set(one_row.shares) == {"image", "state"}
    path = saliency.IntegratedGradients(model, baseline={"image": 0.0, "state": 1.0}, steps=3)
    assert float(path.attribute({"image": image, "state": torch.ones_like(state)}, 1).sums["state"].abs().max()) == 0
    with pytest.raises(MethodError, match="baseline has a value for stat; the inputs are image, state"):
        saliency.IntegratedGradients(model, baseline={"stat": 0.0}).attribute({"image": image, "state": state}, 1)
    black = saliency.IntegratedGradients(model, preprocess={"image": None}, baseline="black")
    with pytest.raises(MethodError, match='"black" is unknown for an input without preprocessing'):
        black.attribute(inputs, 1)


def test_a_place_is_in_pixels_of_the_first_photo_for_all_inputs() -> None:
    class Segmenter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 3, 3, padding=1)

        def forward(self, rgb: Tensor, depth: Tensor) -> Tensor:
            out: Tensor = self.conv(torch.cat([rgb, depth], 1))
            return out

    torch.manual_seed(0)
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 80, 3), np.uint8))
    prepare = {"rgb": saliency.Preprocess(size=(32, 40)), "depth": None}
    target = saliency.region(1, (30, 30))
    for cls in (saliency.Occlusion, saliency.InputXGradient):
        result = cls(Segmenter(), preprocess=prepare).attribute(
            {"rgb": photo, "depth": torch.rand(1, 1, 32, 40)}, target
        )
        scores = [own.scores for own in result.values()]
        assert torch.equal(*scores)


class Formatted(nn.Module):
    """A policy of two cameras and an instruction in the formats of others: a list of cameras with masks; nested
    mappings; and all cameras in one tensor (N, V, C, H, W)."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def run(self, cameras: Any, instruction: Tensor) -> Tensor:
        out: Tensor = self.policy(dict(zip(CAMERAS, cameras, strict=True)) | {INSTRUCTION: instruction})
        return out


class Listed(Formatted):
    def forward(self, images: list[Tensor], img_masks: list[Tensor], state: Tensor) -> Tensor:
        shown = (x * mask[:, None, None, None] for x, mask in zip(images, img_masks, strict=True))
        return self.run(shown, state)


class Nested(Formatted):
    def forward(self, observation: dict[str, Any]) -> Tensor:
        return self.run([observation["images"][name] for name in ("top", "wrist")], observation["state"])


class Joined(Formatted):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.run(batch["observation.images"].unbind(1), batch["state"])


@pytest.mark.parametrize("name", ["input_x_gradient", "integrated_gradients", "occlusion", "attention_rollout"])
def test_the_formats_of_policies_give_the_same_maps_and_shares(name: str) -> None:
    policy = saliency.load("shapes_policy")
    drawn = saliency.testbed.draw_cameras(2, seed=1_000_000).inputs
    cameras, state = [drawn[camera] / 127.5 - 1 for camera in CAMERAS], drawn[INSTRUCTION]
    target = saliency.value(3, 0)
    options: Any = {"integrated_gradients": {"steps": 3}, "occlusion": {"window": 32, "stride": 32}}

    def explained(model: nn.Module, inputs: Any) -> Any:
        return saliency.METHODS[name](model, **options.get(name, {})).attribute(inputs, target)

    expected = explained(policy, dict(zip(CAMERAS, cameras, strict=True)) | {INSTRUCTION: state})
    masks = [torch.ones(2, dtype=torch.bool)] * 2
    for model, inputs in (
        (Listed(policy), {"images": tuple(cameras), "img_masks": masks, "state": state}),
        (Listed(policy), (tuple(cameras), masks, state)),
        (Nested(policy), {"images": dict(zip(("top", "wrist"), cameras, strict=True)), "state": state}),
        (Joined(policy), {"observation.images": Views(torch.stack(cameras, 1)), "state": state}),
    ):
        result = explained(model, inputs)
        assert all("images." in key for key in result)
        for own, other in zip(result.values(), expected.values(), strict=True):
            torch.testing.assert_close(own.values, other.values)
        for own_sum, other_sum in zip(result.sums.values(), expected.sums.values(), strict=True):
            torch.testing.assert_close(own_sum, other_sum)


def test_cameras_in_a_list_or_in_one_tensor_are_refused_with_the_cure() -> None:
    model, cameras, state = Joined(nn.Conv2d(3, 2, 3)), torch.randn(1, 2, 3, 8, 8), torch.randn(1, 2, 4)
    for images, cure in ((cameras, r"saliency.Views\(x\)"), ([*cameras.unbind(1)], "pass a tuple if .* one case")):
        with pytest.raises(ImageError, match=f"observation.images: .*{cure}"):
            saliency.GradCAM(model).attribute({"observation.images": images, "state": state}, 0)


def test_an_image_of_a_nested_entry_may_be_replaced() -> None:
    views, pair = Views([1, 2]), (3, {"depth": 4})
    given = {"views": views, "pair": pair, "rgb": torch.zeros(3, 8, 8)}
    assert with_image(given, "views.1", 5)["views"].images == [1, 5]
    assert with_image({**given, "pair": (given["rgb"], pair[1])}, "pair.1.depth", 5)["pair"][1] == {"depth": 5}
    assert (views.images, pair[1]) == ([1, 2], {"depth": 4})


class Regions(nn.Module):
    """A model of an image, a list of boxes for each image, and the two states of an LSTM (layers, N, H)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lstm = nn.Conv2d(3, 4, 3), nn.LSTM(4, 5, batch_first=True)

    def forward(self, image: Tensor, boxes: list[Tensor], state: Any = None) -> Tensor:
        features = self.conv(image).relu()
        means = [
            row[:, : int(box[-1, 2]), : int(box[-1, 3])].mean((1, 2)) for row, box in zip(features, boxes, strict=True)
        ]
        scores: Tensor = self.lstm(torch.stack(means)[:, None], state)[0][:, 0]
        return scores


@pytest.mark.parametrize("name", ["grad_cam", "vanilla_gradient", "integrated_gradients", "occlusion"])
def test_a_list_with_a_tensor_for_each_image_is_divided_by_image(name: str) -> None:
    torch.manual_seed(0)
    method, x = (
        saliency.METHODS[name](Regions().eval(), **saliency.METHODS[name].preview_options),
        torch.randn(2, 3, 12, 12),
    )
    boxes = [torch.tensor([[0.0, 0, 5, 5]]), torch.tensor([[0.0, 0, 3, 3], [0, 0, 8, 6]])]
    both = method.attribute({"image": x, "boxes": boxes}, 1)["image"]
    for number in (0, 1):
        alone = method.attribute({"image": x[number : number + 1], "boxes": boxes[number : number + 1]}, 1)["image"]
        torch.testing.assert_close(both.values[number : number + 1], alone.values)


@pytest.mark.parametrize("name", ["grad_cam", "vanilla_gradient", "occlusion"])
def test_a_tuple_of_states_has_a_row_of_each_image_on_its_second_axis(name: str) -> None:
    torch.manual_seed(0)
    method, x = (
        saliency.METHODS[name](Regions().eval(), **saliency.METHODS[name].preview_options),
        torch.randn(2, 3, 12, 12),
    )
    rest: dict[str, Any] = {"boxes": [torch.tensor([[0.0, 0, 5, 5]])] * 2, "state": tuple(torch.randn(2, 1, 2, 5))}
    both = method.attribute({"image": x, **rest}, 1)["image"].values
    assert torch.equal(method.attribute(x, 1, forward_args=rest).values, both)
    for number in (0, 1):
        row = {"boxes": rest["boxes"][:1], "state": tuple(state[:, number, None] for state in rest["state"])}
        alone = method.attribute({"image": x[number, None], **row}, 1)["image"].values
        torch.testing.assert_close(both[number, None], alone)


class OneArgument(nn.Module):
    """The network of colours and depth, with both images in one argument."""

    def __init__(self, model: nn.Module, keys: tuple[Any, ...]) -> None:
        super().__init__()
        self.model, self.keys, self.kind = model, keys, type(None)

    def forward(self, images: Any, scale: float = 1.0) -> Tensor:
        self.kind = type(images)
        rgb, depth = (images.pop(key) for key in self.keys)  # the mapping of the user stays whole
        out: Tensor = self.model(*(part["image"] if self.kind is list else part for part in (rgb, depth)))
        return out * scale


@pytest.mark.parametrize("kind", [OrderedDict, UserDict, "BatchFeature", "BatchEncoding", list])
def test_mappings_of_any_type_and_lists_of_mappings_are_divided(kind: Any) -> None:
    if isinstance(kind, str):
        kind = getattr(pytest.importorskip("transformers"), kind)
    model, inputs = case("middle")
    images: Any = kind({"image": image} for image in inputs.values()) if kind is list else kind(inputs)
    reader = OneArgument(model, (0, 0) if kind is list else tuple(inputs))
    nested: Any = {"images": images, "scale": 1.0}
    for method, given in (
        (saliency.GradCAM, nested),
        (saliency.InputXGradient, nested if kind is list else images),
    ):
        expected = method(model).attribute(inputs, 1)
        result = method(reader).attribute(given, 1)
        assert (reader.kind, len(images), len(result)) == (kind, 2, 2)
        for own, other in zip(result.values(), expected.values(), strict=True):
            torch.testing.assert_close(own.values, other.values)


def test_a_refused_input_is_named() -> None:
    model, inputs = case("early")
    with pytest.raises(ModelError, match=r"refused an input of rgb 2x3x16x20 .* and depth 2x1x8x8 "):
        saliency.VanillaGradient(model).attribute({"rgb": inputs["rgb"], "depth": inputs["depth"][..., :8, :8]}, 1)
    late, images = case("late")
    with pytest.raises(ModelError, match=r"depth 2x1x12x16 \(int64 on cpu\): .*; pass depth as a float tensor$"):
        saliency.VanillaGradient(late).attribute({**images, "depth": images["depth"].long()}, 1)
    for one in (saliency.testing.tiny_model(), saliency.load("efficientnet_lite0")):
        with pytest.raises(ModelError, match="it got a mapping of rgb, depth: pass one image if it takes one"):
            saliency.VanillaGradient(one).attribute(inputs, 1)
    other, cameras = case("policy")
    wrong = {**cameras, "observation.state": cameras["observation.state"].long()}
    with pytest.raises(ModelError, match=r"observation.state 2x4 \(int64 on cpu\)"):
        saliency.VanillaGradient(other).attribute(wrong, target_of("policy"))


def test_a_traced_model_takes_a_tuple_of_images_as_a_batch() -> None:
    trace: Any = torch.jit.trace
    model = trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), torch.randn(1, 3, 8, 8))
    assert len(saliency.VanillaGradient(model).attribute((torch.randn(3, 8, 8), torch.randn(3, 8, 8)), 1)) == 2


def test_images_of_any_kind_are_recognised(tmp_path: Path) -> None:
    model, inputs = case("middle")
    depth = inputs["depth"][:1].float()
    photo = np.random.default_rng(0).integers(0, 255, (16, 20, 3), np.uint8)
    Image.fromarray(photo).save(tmp_path / "a.png")
    method = saliency.InputXGradient(model, preprocess={"rgb": saliency.Preprocess(size=(16, 20))})
    expected = method.attribute({"rgb": photo, "depth": depth}, 1)
    with (tmp_path / "a.png").open("rb") as file:
        for rgb in (file, tmp_path / "a.png", (tmp_path / "a.png").read_bytes()):
            for given in (depth, depth[0], depth[0, 0], depth[0, 0].numpy()):
                result = method.attribute({"rgb": rgb, "depth": given}, 1)
                assert list(result) == ["rgb", "depth"]
                for own, other in zip(result.values(), expected.values(), strict=True):
                    assert torch.equal(own.values, other.values)


def test_flows_are_images_and_states_and_matrices_are_not() -> None:
    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rgb, self.flow, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(2, 4, 3), nn.Linear(4, 5)

        def forward(self, rgb: Tensor, flow: Tensor, camera: Tensor, state: Tensor) -> Tensor:
            assert camera.shape == (3, 3)
            pooled = self.rgb(rgb).mean((2, 3)) * self.flow(flow).mean((2, 3))
            out: Tensor = self.head(pooled * camera.mean()) + state.mean(1, keepdim=True)
            return out

    inputs = {"rgb": torch.randn(3, 16, 20), "flow": torch.randn(2, 16, 20), "camera": torch.randn(3, 3)}
    result = saliency.VanillaGradient(Moving()).attribute({**inputs, "state": torch.randn(9)[None]}, 1)
    assert list(result) == ["rgb", "flow"]
    photos = [np.zeros((16, 20, 3), np.uint8)] * 6
    batch = {"rgb": photos, "flow": torch.randn(6, 2, 16, 20), "camera": torch.randn(3, 3), "state": torch.randn(6, 9)}
    prepare: Any = {"rgb": saliency.Preprocess(size=(16, 20))}
    assert list(saliency.VanillaGradient(Moving(), preprocess=prepare).attribute(batch, 1)) == ["rgb", "flow"]


def test_a_model_that_takes_one_tuple_gets_a_mapping_of_numbers() -> None:
    model, inputs = case("late")

    class Unpacking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
            rgb, depth = inputs
            out: Tensor = self.model(rgb, depth)
            return out

    result = saliency.GradCAM(Unpacking()).attribute(dict(enumerate(inputs.values())), 1)
    expected = saliency.GradCAM(model).attribute(inputs, 1)
    for own, other in zip(result.values(), expected.values(), strict=True):
        assert torch.equal(own.values, other.values)


def test_a_key_that_the_model_reads_and_the_mapping_lacks_is_named() -> None:
    model, inputs = case("late")

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.model(batch["rgb"], batch["depth"])
            return out

    with pytest.raises(ModelError, match=r"there is no 'depth' among rgb, d$"):
        saliency.GradCAM(Reading()).attribute({"rgb": inputs["rgb"], "d": inputs["depth"]}, 1)


@pytest.mark.parametrize("name", ["occlusion", "rise", "feature_ablation"])
def test_the_fill_may_be_given_by_input(name: str) -> None:
    model, inputs = case("late")
    cls, options = saliency.METHODS[name], saliency.METHODS[name].preview_options
    result = cls(model, fill={"depth": 0.7}, **options).attribute(inputs, 1)
    for key, fill in (("rgb", vars(cls(model, **options))["fill"]), ("depth", 0.7)):
        expected = cls(model, fill=fill, **options).attribute(inputs, 1, explain=[key])
        assert torch.equal(result[key].values, expected[key].values)
    whole = saliency.FeatureAblation(model, segments="inputs", fill={"rgb": "mean", "depth": 0.7}).attribute(inputs, 1)
    for key, fill in (("rgb", "mean"), ("depth", 0.7)):
        alone = saliency.FeatureAblation(model, segments="inputs", fill=fill).attribute(inputs, 1)
        torch.testing.assert_close(whole.sums[key], alone.sums[key])
    with pytest.raises(MethodError, match="fill"):
        saliency.metrics.Deletion(fill={"rgb": 0.0})
