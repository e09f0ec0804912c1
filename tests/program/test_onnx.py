"""ONNX files: the decompositions of backward operations, and programs that ONNX Runtime runs with equal maps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import saliency
from saliency.errors import NotApplicableError
from saliency.program.capture import BEFORE_MAPPING, DECOMPOSITIONS, FOR_ONNX, batch_norm
from tests.models import FunctionModel, torchvision_models
from tests.reference import error

ATEN = torch.ops.aten
TABLE = BEFORE_MAPPING | FOR_ONNX
PAGE = Path(__file__).parents[2] / "docs" / "export.md"


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def images(count: int, size: int = 32) -> Tensor:
    return randn(count, 3, size, size, seed=count).float()


def resized(mode: str, size: tuple[int, int] | None = (11, 4), **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, size, mode=mode, **options)


def _convolution(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3](x, weight, **options)


def _transposed_convolution(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv_transpose2d(x, weight, stride=3, padding=1, output_padding=2, groups=2, dilation=2)


STATISTICS = randn(3, seed=4), randn(3, seed=5) ** 2


def _batch_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return F.batch_norm(x, *STATISTICS, weight, bias)


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 4, 7, 9), (6, 4, 3, 3), {}),
    "strides, padding, dilation": ((2, 4, 12, 9), (6, 4, 3, 2), {"stride": (3, 2), "padding": (1, 2), "dilation": 2}),
    "groups": ((2, 4, 8, 8), (6, 2, 3, 3), {"groups": 2, "stride": 2, "padding": 1}),
    "depthwise": ((2, 4, 7, 7), (4, 1, 5, 5), {"groups": 4, "padding": 2}),
    "one axis": ((2, 4, 10), (6, 4, 3), {"stride": 2}),
    "three axes": ((2, 4, 5, 6, 7), (3, 4, 3, 3, 3), {"stride": 2}),
}
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "transposed convolution": (
        partial(_transposed_convolution, weight=randn(4, 3, 3, 3, seed=1)),
        (randn(2, 4, 5, 6),),
    ),
    "average pooling": (lambda x: F.avg_pool2d(x, 2), (randn(2, 3, 6, 9),)),
    "average pooling, padded": (
        lambda x: F.avg_pool2d(x, (3, 2), 2, (1, 0), ceil_mode=True, count_include_pad=False),
        (randn(2, 3, 8, 9),),
    ),
    "average pooling, divisor": (lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5), (randn(2, 3, 8, 9),)),
    "adaptive average pooling": (lambda x: F.adaptive_avg_pool2d(x, (3, 5)), (randn(2, 3, 7, 8),)),
    "batch norm": (
        partial(_batch_norm, weight=randn(3, seed=2), bias=randn(3, seed=3)),
        (randn(2, 3, 5, 4),),
    ),
    "batch norm without weights": (_batch_norm, (randn(2, 3, 5),)),
    "Mish": (F.mish, (randn(2, 3),)),
    "gather": (lambda x: x.gather(1, torch.tensor([[2], [0]])), (randn(2, 3),)),
    "nearest": (resized("nearest"), (randn(2, 3, 5, 7),)),
    "nearest-exact": (resized("nearest-exact"), (randn(2, 3, 5, 7),)),
    "bilinear": (resized("bilinear"), (randn(2, 3, 5, 7),)),
    "bilinear, scale factor": (resized("bilinear", None, scale_factor=(1.7, 0.6)), (randn(2, 3, 5, 7),)),
    "bilinear, aligned corners": (resized("bilinear", align_corners=True), (randn(2, 3, 5, 7),)),
    "bicubic": (resized("bicubic"), (randn(2, 3, 5, 7),)),
    "adaptive pooling of channels last": (
        lambda x: F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), 1).flatten(1) ** 2,
        (randn(2, 4, 5, 3),),
    ),
    **{
        f"convolution, {name}": (partial(_convolution, weight=randn(*weight, seed=1), **options), (randn(*shape),))
        for name, (shape, weight, options) in CONVOLUTIONS.items()
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_decomposed_gradients_equal_those_of_autograd(name: str) -> None:
    function, inputs = FUNCTIONS[name]
    at_output = randn(*function(*inputs).shape, seed=9)

    def gradients(*values: Tensor) -> tuple[Tensor, ...]:
        leaves = [value.detach().requires_grad_() for value in values]
        return torch.autograd.grad(function(*leaves), leaves, at_output)

    graph = make_fx(gradients)(*inputs)
    assert {node.target for node in graph.graph.nodes} & TABLE.keys()
    decomposed = make_fx(torch.func.functionalize(graph), decomposition_table=TABLE)(*inputs)
    assert not {node.target for node in decomposed.graph.nodes} & TABLE.keys()
    for found, expected in zip(decomposed(*inputs), gradients(*inputs), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_batch_norms_in_half_precision_are_exact() -> None:
    x, mean = randn(2, 3, 5, 5).half() + 30, torch.full((3,), 30.0).half()
    weight, bias = randn(3, seed=2).half(), randn(3, seed=3).half()
    values, *_ = batch_norm(x, weight, bias, mean, torch.ones_like(mean), False, 0.1, 1e-5)
    exact = (x.double() - 30) * (weight / (1 + 1e-5) ** 0.5)[:, None, None] + bias.double()[:, None, None]
    torch.testing.assert_close(values.double(), exact, rtol=1e-3, atol=1e-3)


def test_strides_that_repeat_elements_stay() -> None:
    assert DECOMPOSITIONS[ATEN.as_strided.default](randn(4), (3, 2), (1, 1)) is NotImplemented


# ONNX Runtime.


def mixed_network() -> nn.Module:
    """A network with the operations whose backward is decomposed."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 1),
        nn.Hardswish(),
        nn.Upsample(scale_factor=1.5, mode="bilinear"),
        nn.AvgPool2d(3, 2, 1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


def one_block() -> nn.Module:
    """A vision transformer of one block, whose head is drawn."""
    model: nn.Module = torchvision_models().VisionTransformer(32, 16, 1, 2, 16, 32, num_classes=5)
    nn.init.normal_(model.get_parameter("heads.head.weight"))
    return model


def tiny_summand() -> nn.Module:
    """A network whose gradient is NaN without a summand that the optimizer of onnxscript takes for 0."""
    return FunctionModel(lambda x: (x.relu() / (x.relu() + 1e-15) + x).mean((1, 2, 3)))


def half_network() -> nn.Module:
    """A network in half precision."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ).half()


CELLS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], saliency.Attribution]]] = {
    "lrp": (half_network, saliency.LRP),
    "guided_backprop": (mixed_network, saliency.GuidedBackprop),
    "vanilla_gradient": (one_block, saliency.VanillaGradient),
    "input_x_gradient": (tiny_summand, saliency.InputXGradient),
}


def test_signs_are_copied_as_by_pytorch() -> None:
    x, other = randn(3, 4, seed=1), randn(3, 4, seed=2)
    copied = DECOMPOSITIONS[torch.ops.aten.copysign.Tensor](x, other)
    assert torch.equal(copied, x.copysign(other))


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.slow
def test_onnx_runtime_gives_the_map_of_attribute_for_one_and_three_images(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    make, create = CELLS[name]
    method = create(make().eval())
    dtype = next((own.dtype for own in method.model.parameters()), torch.float32)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    path = saliency.export(method, tmp_path / "model.onnx", images(2).to(dtype))
    assert [*tmp_path.iterdir()] == [path]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    assert (metadata["method"], metadata["torch"]) == (name, torch.__version__)
    assert metadata["checked"] == f"onnxruntime {onnxruntime.__version__}"
    assert str(Path(torch.__file__).parent).encode() not in path.read_bytes()
    for count in (1, 3):
        x = images(count).to(dtype)
        explanation = method.attribute(x)
        scores, classes, maps = map(torch.from_numpy, session.run(["scores", "classes", "map"], {"image": x.numpy()}))
        assert tuple(classes.tolist()) == explanation.target
        assert error(scores.gather(1, classes[:, None])[:, 0], explanation.scores) <= tolerance
        assert error(maps, saliency.heatmap(explanation)) <= tolerance


@pytest.mark.slow
def test_an_onnx_file_that_differs_from_attribute_replaces_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    wrong = FOR_ONNX | {ATEN.sigmoid.default: lambda x: 1.01 / (1 + (-x).exp())}
    monkeypatch.setattr("saliency.program.export.FOR_ONNX", wrong)
    (tmp_path / "model.onnx").write_text("old")
    model = FunctionModel(lambda x: x.sigmoid().mean((1, 2, 3))).eval()
    with pytest.raises(
        NotApplicableError, match=r"map of the ONNX file differs from attribute by 0\.\d+ of its maximum"
    ):
        saliency.export(saliency.VanillaGradient(model), tmp_path / "model.onnx", images(1, 8))
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


@pytest.mark.slow
def test_without_onnx_runtime_the_file_says_that_only_pytorch_checked_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx = pytest.importorskip("onnx")
    monkeypatch.setattr("saliency.program.export.find_spec", lambda name: None)
    model = FunctionModel(lambda x: x.sigmoid().mean((1, 2, 3))).eval()
    path = saliency.export(saliency.VanillaGradient(model), tmp_path / "model.onnx", images(1, 8))
    assert {entry.key: entry.value for entry in onnx.load(path).metadata_props}["checked"] == "torch"


@pytest.mark.slow
def test_an_operation_that_onnx_cannot_express_is_named_and_the_old_file_stays(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    (tmp_path / "model.onnx").write_text("old")
    model = FunctionModel(lambda x: torch.linalg.eigvalsh(x[:, 0] @ x[:, 0].mT).sum(1)).eval()
    with pytest.raises(NotApplicableError, match=r"export: ONNX cannot express aten\._linalg_eigh"):
        saliency.export(saliency.VanillaGradient(model), tmp_path / "model.onnx", images(1, 8))
    assert (tmp_path / "model.onnx").read_text() == "old"


@pytest.mark.slow
def test_a_view_by_strides_of_a_permuted_tensor_is_refused_in_an_onnx_file(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model = FunctionModel(lambda x: x.permute(0, 2, 3, 1).as_strided((len(x), 4), (192, 3)).sum(1)).eval()
    with pytest.raises(NotApplicableError, match=r"aten\.as_strided of a tensor that is not contiguous"):
        saliency.export(saliency.VanillaGradient(model), tmp_path / "model.onnx", images(1, 8))


@pytest.mark.slow
def test_the_example_of_the_page_draws_without_torch_and_this_package(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    code = next(block for block in PAGE.read_text().split("```python") if "InferenceSession" in block).split("```")[0]
    model, scenes = saliency.load("shapes_cnn"), saliency.testbed.draw_scenes(1, seed=1_000_000)
    scene = scenes.images[0].permute(1, 2, 0).numpy()
    Image.fromarray(scene).save(tmp_path / "scene.png")
    method = saliency.GradCAM(model)
    saliency.export(method, tmp_path / "model.onnx", scenes.images)
    blocked = "import sys; sys.modules |= {'saliency': None, 'torch': None}"
    command = [sys.executable, "-c", f"{blocked}\n{code}"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout  # noqa: S603
    explanation = method.attribute(Image.fromarray(scene))
    assert said.strip() == explanation.target_names[0]
    drawn = torch.from_numpy(np.asarray(Image.open(tmp_path / "overlay.png")).copy()).float()
    changed = (drawn - torch.from_numpy(scene)).abs().sum(-1)
    heat = saliency.heatmap(explanation)[0]
    assert changed[heat > 0.5 * heat.max()].mean() > 4 * changed[heat < 0.1 * heat.max()].mean()
