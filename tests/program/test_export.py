"""The promises of `saliency.export`: the map of a program is the map of `attribute`, without this package."""

from __future__ import annotations

import io
import json
import resource
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import saliency
from saliency import METHODS
from saliency.attribution.explanation import resized
from saliency.attribution.passes import SampledAttribution
from saliency.errors import MethodError, NotApplicableError, SaliencyError, TargetError
from saliency.program.export import NO_PROGRAM, _require_equal, captured
from tests.models import FunctionModel, PooledNet
from tests.selection import of_each_family


def images(count: int, size: int = 32) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(count))


def largest_difference(method: saliency.Attribution, size: int, target: int | None = None) -> float:
    """The largest difference of the maps and scores of a program and `attribute`, as a share of the maximum."""
    program = captured(method, images(2, size), target)[0].module()
    worst = 0.0
    for count in (1, 3):
        x = images(count, size)
        explanation = method.attribute(x, target)
        scores, classes, maps = program(x)
        expected = saliency.heatmap(explanation)
        worst = max(worst, float((maps - expected).abs().max() / expected.abs().max()))
        assert tuple(classes.tolist()) == explanation.target
        explained = (
            scores.gather(1, classes[:, None])[:, 0] if scores.shape[1] > 1 else scores[:, 0] * (2 * classes - 1)
        )
        torch.testing.assert_close(explained, explanation.scores)
    return worst


def timm_model(name: str) -> nn.Module:
    import timm

    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, num_classes=10)
    return model.eval()


# Guided backpropagation and AttnLRP run as ONNX files in `test_onnx.py`; `make zoo` checks 50 networks.
CELLS: dict[str, Callable[[], saliency.Attribution]] = {
    "grad_cam": lambda: saliency.GradCAM(timm_model("test_resnet")),
    "lrp": lambda: saliency.LRP(timm_model("test_resnet")),
}


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_programs_of_networks_equal_attribute_for_one_and_three_images(cell: str) -> None:
    assert largest_difference(CELLS[cell](), 64) <= 1e-5


EXPORTED = {
    *("grad_cam", "grad_cam_plus_plus", "xgrad_cam", "hires_cam", "layer_cam", "eigen_cam", "eigen_grad_cam"),
    *(
        "cam",
        "finer_cam",
        "shapley_cam",
        "fused_cam",
        "refine_cam",
        "guided_grad_cam",
        "integrated_gradients",
        "blur_ig",
        "augmented",
    ),
    *("vanilla_gradient", "input_x_gradient", "guided_backprop", "deconvnet", "rectgrad"),
    *("lrp", "attn_lrp", "cp_lrp", "excitation_backprop"),
}


# Mapping the 50 passes of recipro_cam over the batch takes 20 seconds.
@pytest.mark.parametrize("name", of_each_family(METHODS.keys() - {"recipro_cam"} - NO_PROGRAM.keys()))
def test_every_method_is_exact_or_refused_by_name(name: str) -> None:
    cls = METHODS[name]
    torch.manual_seed(0)
    # One step fewer than the previews: mapping the steps over the batch takes most of the time.
    options = {option: 2 if option == "steps" else value for option, value in cls.preview_options.items()}
    method = cls(PooledNet().eval(), **options)
    try:
        assert largest_difference(method, 32) <= 1e-5
    except SaliencyError as refusal:
        assert name not in EXPORTED
        assert name in str(refusal)  # noqa: PT017


def small_vit() -> nn.Module:
    """A vision transformer of two blocks."""
    from timm.models import VisionTransformer

    torch.manual_seed(0)
    model: nn.Module = VisionTransformer(32, 16, num_classes=5, embed_dim=16, depth=2, num_heads=2)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", NO_PROGRAM)
def test_tracing_refuses_each_method_that_is_listed_as_no_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # DeepLIFT compares values for the image with those for the baseline at activations other than ReLU.
    is_vit = name == "deep_lift" or "attention" in NO_PROGRAM[name]
    model = small_vit() if is_vit else PooledNet().eval()
    monkeypatch.delitem(NO_PROGRAM, name)
    method = METHODS[name](model, **METHODS[name].preview_options)
    with pytest.raises(NotApplicableError, match=r"cannot be a program: it (decides by a value|draws random)"):
        captured(method, images(1))


def writes_in_place(x: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[2:])
    mask[1:-1, :-3] = 1
    pooled = torch.nn.functional.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), 1)  # channels last
    return (x * mask).tanh().mean((1, 2, 3)) + (pooled.flatten(1) ** 2).sum(1)


def test_passes_over_a_model_that_writes_in_place_are_mapped_over_the_batch() -> None:
    method = saliency.IntegratedGradients(FunctionModel(writes_in_place), steps=2)
    assert largest_difference(method, 16) <= 1e-5


def test_a_method_that_no_program_can_run_is_refused_before_the_model_runs(tmp_path: Path) -> None:
    model = PooledNet().eval()
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    sampled = {name for name, cls in METHODS.items() if issubclass(cls, SampledAttribution)}
    assert not (EXPORTED & NO_PROGRAM.keys())
    for name in sampled | NO_PROGRAM.keys():
        method = METHODS[name](model, **METHODS[name].preview_options)
        with pytest.raises(NotApplicableError, match=f"export: {name} cannot be a program: it "):
            saliency.export(method, tmp_path / "model.pt2", images(1))


def test_a_fixed_class_is_explained_whatever_the_scores() -> None:
    assert largest_difference(saliency.GradCAM(PooledNet().eval()), 32, target=3) <= 1e-6


@pytest.mark.parametrize("cls", [saliency.GradCAM, saliency.IntegratedGradients])  # one program, and a mapped one
def test_the_class_is_an_input_of_the_program_for_the_target_input(cls: type[saliency.Attribution]) -> None:
    method, x = cls(PooledNet().eval(), **cls.preview_options), images(3)
    program, metadata, check = captured(method, images(1), "input")
    assert metadata["target"] == "input"
    check(program.module(), "the program")
    asked = torch.tensor([4, -1, 0])
    scores, classes, maps = program.module()(x, asked)
    expected = method.attribute(x, [4, None, 0])
    assert tuple(classes.tolist()) == expected.target
    torch.testing.assert_close(scores.gather(1, classes[:, None])[:, 0], expected.scores)
    torch.testing.assert_close(maps, saliency.heatmap(expected))


def test_one_number_per_image_explains_the_class_of_its_sign() -> None:
    model = nn.Sequential(PooledNet(), nn.Linear(5, 1)).eval()
    with torch.no_grad():
        model[1].bias -= model(images(8)).mean()
    method = saliency.VanillaGradient(model, categories=["no", "yes"])
    assert largest_difference(method, 32) <= 1e-6
    assert captured(method, images(1))[0].module()(images(8))[1].unique().tolist() == [0, 1]


def test_parameters_are_stored_once_under_their_own_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 1), nn.ReLU(), nn.Conv2d(64, 5, 32), nn.Flatten()).eval()
    path = saliency.export(saliency.GuidedBackprop(model), tmp_path / "model.pt2", images(1))
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    assert path.stat().st_size <= 1.1 * (tmp_path / "weights.pth").stat().st_size
    program = torch.export.load(path)
    assert program.state_dict.keys() == model.state_dict().keys()
    assert sum(tensor.numel() for tensor in program.constants.values()) < 10
    assert __file__.encode() not in path.read_bytes()


def test_the_file_runs_without_this_package(tmp_path: Path) -> None:
    method = saliency.GradCAM(PooledNet().eval(), categories=list("abcde"), preprocess={"size": (32, 32)})
    saliency.export(method, tmp_path / "model.pt2", images(1))
    torch.save(images(3), tmp_path / "x.pt")
    code = (
        "import sys, json; sys.modules['saliency'] = None; import torch; extra = {'metadata.json': ''}\n"
        "program = torch.export.load('model.pt2', extra_files=extra).module()\n"
        "torch.save(program(torch.load('x.pt')), 'y.pt'); print(extra['metadata.json'])"
    )
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout  # noqa: S603
    maps, expected = torch.load(tmp_path / "y.pt")[2], saliency.heatmap(method.attribute(images(3)))
    torch.testing.assert_close(maps, expected)
    metadata = json.loads(said)
    assert json.loads(metadata["classes"]) == ["a", "b", "c", "d", "e"]
    assert json.loads(metadata["preprocess"])["size"] == [32, 32]
    assert (metadata["method"], metadata["layer"], metadata["torch"]) == ("grad_cam", "features", torch.__version__)


def test_the_example_of_a_server_answers_an_image_with_its_heatmap(tmp_path: Path) -> None:
    testclient = pytest.importorskip("starlette.testclient")
    server = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "server.py"))
    method = saliency.GradCAM(PooledNet().eval(), categories=list("abcde"), preprocess={"size": (32, 48)})
    photo = Image.effect_noise((64, 50), 60).convert("RGB")
    saliency.export(method, tmp_path / "model.pt2", photo)
    photo.save(file := io.BytesIO(), "PNG")
    client = testclient.TestClient(server["create"](str(tmp_path / "model.pt2")))
    answer = client.post("/", content=file.getvalue())
    assert answer.headers["class"] == method.attribute(photo).target_names[0]
    drawn = Image.open(io.BytesIO(answer.content))
    assert drawn.size == photo.size
    assert np.abs(np.asarray(drawn, float) - np.asarray(photo, float)).max() > 20
    assert (client.post("/", content=b"no image").status_code, client.get("/").status_code) == (400, 405)


def test_the_model_is_unchanged() -> None:
    model = PooledNet().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    captured(saliency.GuidedBackprop(model), images(1), None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def reads_a_value(x: Tensor) -> Tensor:
    return x.sum((1, 2, 3)) * (2 if float(x.detach()[0, 0, 0, 0]) > 0 else 3)


def reads_a_list(x: Tensor) -> Tensor:
    return x.sum((1, 2, 3)) * float(x.detach().flatten().tolist()[0])


def reads_an_array(x: Tensor) -> Tensor:
    return x.sum((1, 2, 3)) * float(np.asarray(x.detach())[0, 0, 0, 0])


def reads_what_it_wrote(x: Tensor) -> Tensor:
    part = torch.zeros(2)
    part[:1] = x.detach()[0, 0, 0, :1]
    return x.sum((1, 2, 3)) * float(part[0])


def draws(x: Tensor) -> Tensor:
    return (x * torch.rand_like(x)).sum((1, 2, 3))


def chooses_a_kernel(x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return nn.functional.scaled_dot_product_attention(x, x, x).mean((1, 2, 3))


def grows(x: Tensor) -> Tensor:
    return sum((x[i : i + 1].sum() * torch.eye(len(x))[i] for i in range(len(x))), torch.zeros(len(x)))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (reads_a_value, "decides by a value"),
        (reads_a_list, "tolist"),
        (reads_an_array, "array"),
        (reads_what_it_wrote, "decides by a value"),
        (draws, "random"),
        (chooses_a_kernel, r"chooses a fused attention .*remove its sdpa_kernel"),
        (grows, "other operations"),
    ],
)
def test_a_model_that_no_program_can_run_is_refused(function: Callable[[Tensor], Tensor], reason: str) -> None:
    with pytest.raises(NotApplicableError, match=rf"export: vanilla_gradient .*{reason}"):
        captured(saliency.VanillaGradient(FunctionModel(function)), images(1))


def test_bfloat16_may_differ_by_its_rounding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saliency.export(saliency.LRP(PooledNet().eval().bfloat16()), tmp_path / "model.pt2", images(1).bfloat16())


def test_a_difference_of_an_image_is_accepted_up_to_the_effect_of_its_last_digits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    method, x = saliency.VanillaGradient(PooledNet().eval()), images(2)
    program = captured(method, x)[0].module()
    exact = method.attribute(x)

    def scaled(*factors: float) -> saliency.Explanation:
        return replace(exact, values=exact.values * torch.tensor(factors)[:, None, None, None])

    monkeypatch.setattr(saliency.VanillaGradient, "attribute", lambda self, *_: scaled(1.02, 1.0))
    _require_equal(method, scaled(1.01, 1.0), [x], program, "the program")
    monkeypatch.setattr(saliency.VanillaGradient, "attribute", lambda self, *_: scaled(1.01, 1.02))
    with pytest.raises(NotApplicableError, match=r"by 0\.01 of its maximum"):
        _require_equal(method, scaled(1.01, 1.0), [x], program, "the program")


def test_each_copy_changes_twice_as_many_last_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    method, x, changes = saliency.VanillaGradient(PooledNet().eval()), images(1), []
    program, exact = captured(method, x)[0].module(), method.attribute(x)
    other = replace(exact, values=1.01 * exact.values)

    def attribute(self: saliency.VanillaGradient, image: Tensor, *_: object) -> saliency.Explanation:
        changes.append(float((image - x).abs().mean()))
        return other

    monkeypatch.setattr(saliency.VanillaGradient, "attribute", attribute)
    with pytest.raises(NotApplicableError, match="of its maximum"):
        _require_equal(method, other, [x], program, "the program")
    assert [later / changes[0] for later in changes] == pytest.approx([1, 2, 4, 8], rel=0.2)


def test_a_difference_beyond_rounding_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = PooledNet().eval()
    monkeypatch.setattr("saliency.program.export.resized", lambda maps, size: 1.001 * resized(maps, size))
    with pytest.raises(NotApplicableError, match=r"by 0\.001 of its maximum; other last digits of the image explain"):
        saliency.export(saliency.VanillaGradient(model), tmp_path / "model.pt2", images(1))
    assert not [*tmp_path.iterdir()]


def test_a_file_that_cannot_be_written_is_an_error_and_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"old")
    model = nn.Sequential(nn.Conv2d(3, 64, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 500))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            saliency.export(saliency.VanillaGradient(model.eval()), tmp_path / "model.pt2", images(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("model.pt2", b"old")]


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    model = PooledNet().eval()
    with pytest.raises(MethodError, match=r"\.pt2 or \.onnx"):
        saliency.export(saliency.GradCAM(model), tmp_path / "model.pt", images(1))
    with pytest.raises(FileNotFoundError, match="no folder"):
        saliency.export(saliency.GradCAM(model), tmp_path / "none" / "model.pt2", images(1))
    with pytest.raises(MethodError, match="expected a method"):
        saliency.export(model, tmp_path / "model.pt2", images(1))  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="class"):
        captured(saliency.GradCAM(model), images(1), saliency.contrast(0, 1))  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="seconds"):
        captured(saliency.IntegratedGradients(model, seconds=1.0), images(1))


def test_a_link_is_followed_and_what_is_no_file_is_refused(tmp_path: Path) -> None:
    model, x = PooledNet().eval(), torch.randn(1, 3, 16, 16)
    link, file = tmp_path / "link.pt2", tmp_path / "file.pt2"
    link.symlink_to(file)
    assert saliency.export(saliency.VanillaGradient(model), link, x) == link
    assert link.is_symlink()
    assert file.stat().st_size > 0
    folder = tmp_path / "folder.pt2"
    folder.mkdir()
    with pytest.raises(FileExistsError, match="it is not a file"):
        saliency.export(saliency.VanillaGradient(model), folder, x)
