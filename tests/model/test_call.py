"""A call evaluates the model in any state and from any thread, and restores its state."""

from __future__ import annotations

import gc
import importlib
import os
import platform
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import saliency
from saliency import GradCAM, GuidedBackprop, VanillaGradient
from saliency.errors import ImageError, LayerError, ModelError, TargetError
from saliency.hooks.manager import HookManager
from saliency.model.call import leaf, prepared_for_attribution, reference_tensor, run_model, unwrap
from saliency.testing import tiny_model
from saliency.testing.case import images
from tests.models import PooledNet, Raises


def flags(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def mixed(model: nn.Module) -> nn.Module:
    for i, module in enumerate(model.modules()):
        module.training = i % 2 == 0
    return model


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


# The lease.


def test_the_model_is_in_evaluation_mode_inside_and_as_it_was_outside() -> None:
    model = mixed(tiny_model())
    before = flags(model)
    with prepared_for_attribution(model):
        assert not any(flags(model))
    assert flags(model) == before
    assert len(set(before)) == 2


def test_a_nested_lease_is_given_back_by_the_last_holder() -> None:
    model = mixed(tiny_model())
    before = flags(model)
    with prepared_for_attribution(model):
        with prepared_for_attribution(model):
            assert not any(flags(model))
        assert not any(flags(model))
    assert flags(model) == before


def test_holders_may_leave_in_any_order() -> None:
    model = mixed(tiny_model())
    before = flags(model)
    first, second = prepared_for_attribution(model), prepared_for_attribution(model)
    of_first, of_second = copy_context(), copy_context()  # each thread has a call of its own
    of_first.run(first.__enter__)
    of_second.run(second.__enter__)
    of_first.run(first.__exit__, None, None, None)
    assert not any(flags(model))
    of_second.run(second.__exit__, None, None, None)
    assert flags(model) == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit, SystemExit])
def test_an_exception_gives_the_model_back(error: type[BaseException]) -> None:
    model = mixed(tiny_model())
    before = flags(model)
    with pytest.raises(error), prepared_for_attribution(model):
        raise error
    assert flags(model) == before


def test_many_threads_share_one_lease() -> None:
    model = mixed(tiny_model())
    before, seen = flags(model), []

    def hold() -> None:
        for _ in range(200):
            with prepared_for_attribution(model):
                seen.append(any(flags(model)))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=hold) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen == [False] * 1600
    assert flags(model) == before


def test_models_that_share_a_part_do_not_take_it_from_each_other() -> None:
    shared = nn.Dropout().train()
    one, other = nn.Sequential(shared, nn.Flatten()).train(), nn.Sequential(nn.Identity(), shared).train()
    with prepared_for_attribution(one):
        with prepared_for_attribution(other):
            assert not shared.training
        assert not shared.training
        assert other[0].training
    assert shared.training


def test_the_lease_keeps_no_model_alive() -> None:
    model = mixed(tiny_model())
    with prepared_for_attribution(model), prepared_for_attribution(model):
        held = weakref.ref(model)
    del model
    gc.collect()
    assert held() is None


class Guarded(nn.Module):
    """A model whose train() does more than set flags, and may not be called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()
        self.calls = 0

    def train(self, mode: bool = True) -> Guarded:
        self.calls += 1
        return super().train(False)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def test_an_overridden_train_is_not_called() -> None:
    model = Guarded()
    model.training = model.inner.training = True
    VanillaGradient(model).attribute(noise(1, 3, 16, 16), 0)
    assert model.calls == 0
    assert model.training
    assert model.inner.training


def test_flags_that_cannot_be_set_leave_those_before_them_as_they_were() -> None:
    class Stubborn(nn.Module):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "training" and not value:
                raise RuntimeError("this part cannot be evaluated")
            super().__setattr__(name, value)

    model = nn.Sequential(nn.Dropout(), Stubborn(), nn.Dropout())
    with pytest.raises(RuntimeError, match="cannot be evaluated"):
        VanillaGradient(model).attribute(noise(1, 3, 4, 4), lambda output: output.flatten(1).sum(1))
    assert flags(model) == [True] * 4
    with prepared_for_attribution(model[0]):
        assert not model[0].training
    assert model[0].training


# Scripted, traced and frozen models.


def plain_net() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Dropout(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.append(nn.Linear(6, 4))
    for i, parameter in enumerate(model.parameters()):
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) / 3)
    return model.eval()


def scripted(model: nn.Module) -> nn.Module:
    made: nn.Module = torch.jit.script(model)
    return made


def traced(model: nn.Module) -> nn.Module:
    trace: Any = torch.jit.trace
    made: nn.Module = trace(model, noise(2, 3, 12, 12))
    return made


def frozen(model: nn.Module) -> nn.Module:
    made: nn.Module = torch.jit.freeze(torch.jit.script(model))
    return made


@pytest.mark.parametrize("make", [scripted, traced, frozen])
@pytest.mark.parametrize("method", [VanillaGradient, GuidedBackprop])
def test_a_scripted_model_is_explained_as_its_original(
    make: Callable[[nn.Module], nn.Module], method: type[saliency.Attribution]
) -> None:
    model, x = plain_net(), noise(2, 3, 12, 12)
    expected = method(model).attribute(x, [0, 3])
    script = make(model)
    for _ in range(3):  # the executor profiles at first, and would fuse then
        found = method(script).attribute(x, [0, 3])
        torch.testing.assert_close(found.values, expected.values, rtol=1e-5, atol=1e-7)


def test_the_training_flags_of_a_scripted_model_are_restored() -> None:
    script = scripted(plain_net().train())
    VanillaGradient(script).attribute(noise(1, 3, 12, 12), 0)
    assert all(flags(script))
    with prepared_for_attribution(script):
        assert not any(flags(script))


# Modes of the caller's.


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradients_are_at_hand_whatever_the_callers_mode_is(mode: Callable[[], Any]) -> None:
    model = tiny_model()
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        with prepared_for_attribution(model):
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before


def test_a_model_made_under_inference_mode_is_refused_with_the_cure() -> None:
    with torch.inference_mode():
        model = tiny_model()
    with pytest.raises(ModelError, match=r"created under torch\.inference_mode\(\).*build or load the model outside"):
        VanillaGradient(model).attribute(noise(1, 3, 16, 16), 0)


def test_statistics_made_under_inference_mode_are_refused_too() -> None:
    model = tiny_model()
    with torch.inference_mode():
        model.get_submodule("norm").register_buffer("running_mean", torch.zeros(6))
    with pytest.raises(ModelError, match=r"created under torch\.inference_mode"):
        VanillaGradient(model).attribute(noise(1, 3, 16, 16), 0)


def test_a_part_made_under_inference_mode_is_refused_too() -> None:
    model = tiny_model()
    with torch.inference_mode():
        head = nn.Linear(8, 5)
    model.add_module("head", head)
    with pytest.raises(ModelError, match=r"created under torch\.inference_mode"):
        VanillaGradient(model).attribute(noise(1, 3, 16, 16), 0)


# The compiler.


def test_a_compiled_part_runs_eagerly_and_the_stance_is_restored() -> None:
    stance = importlib.import_module("torch._dynamo.eval_frame")
    torch.compiler.reset()  # the compiler compiles the code of a layer only so often
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    model = plain_net()
    expected = GuidedBackprop(model).attribute(noise(1, 3, 12, 12), 0)
    for name in ("0", "1"):
        part: Any = torch.compile(model.get_submodule(name), backend=backend)
        model.add_module(name, part)
    found = GuidedBackprop(model).attribute(noise(1, 3, 12, 12), 0)
    assert graphs == []
    assert torch.equal(found.values, expected.values)
    assert stance._stance.stance == "default"
    with torch.no_grad():
        model(noise(1, 3, 12, 12))
    # Before torch 2.14, layers that other tests compiled can use up the compiler's cache, also after a reset.
    assert graphs or torch.__version__ < "2.14"
    torch.compiler.reset()


def test_the_callers_own_stance_comes_back() -> None:
    stance = importlib.import_module("torch._dynamo.eval_frame")
    with torch.compiler.set_stance("eager_on_recompile"):
        VanillaGradient(plain_net()).attribute(noise(1, 3, 12, 12), 0)
        assert stance._stance.stance == "eager_on_recompile"
    assert stance._stance.stance == "default"


def test_the_stance_comes_back_after_an_error_and_from_nested_holders() -> None:
    stance = importlib.import_module("torch._dynamo.eval_frame")

    def fail() -> None:
        with prepared_for_attribution(plain_net()), prepared_for_attribution(plain_net()):
            assert stance._stance.stance == "force_eager"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert stance._stance.stance == "default"


# Unwrapping.


def test_wrappers_are_taken_off_in_any_number_and_order() -> None:
    model = plain_net()
    compiled: Any = torch.compile(nn.DataParallel(model), backend="eager")
    for wrapped in (model, nn.DataParallel(model), nn.DataParallel(nn.DataParallel(model)), compiled):
        assert unwrap(wrapped) is model


def test_a_module_of_that_name_is_not_taken_for_a_wrapper() -> None:
    model = nn.Module()
    model.module = nn.Identity()
    assert unwrap(model) is model


@pytest.mark.parametrize("wrong", [lambda x: x, nn.ReLU, "resnet18", None, {}])
def test_what_is_no_module_is_refused(wrong: Any) -> None:
    with pytest.raises(ModelError, match=f"expected a torch.nn.Module, got {type(wrong).__name__}"):
        VanillaGradient(wrong)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [nn.DataParallel, compiled])
def test_class_names_on_the_wrapper_count_as_on_the_model(wrap: Callable[[nn.Module], Any]) -> None:
    names = ["ant", "bee", "cat", "dog"]
    wrapped = wrap(plain_net())
    wrapped.categories = names
    assert VanillaGradient(wrapped).categories == tuple(names)
    inside = plain_net()
    inside.categories = names  # type: ignore[assignment]
    assert VanillaGradient(wrap(inside)).categories == tuple(names)


def test_layers_of_a_wrapped_model_are_found_by_either_name() -> None:
    model, x = plain_net(), noise(1, 3, 12, 12)
    expected = GradCAM(model, "0").attribute(x, 0).values
    for name in ("0", "module.0"):
        assert torch.equal(GradCAM(nn.DataParallel(model), name).attribute(x, 0).values, expected)
    assert torch.equal(GradCAM(compiled(model), "_orig_mod.0").attribute(x, 0).values, expected)


# Running.


class Normalising(nn.Module):
    """A model that normalises its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x.sub_(0.5).div_(0.25))


@pytest.mark.parametrize("method", [VanillaGradient, GuidedBackprop, GradCAM])
@pytest.mark.parametrize("dims", [3, 4])
def test_a_model_that_normalises_in_place_changes_no_tensor_of_the_users(
    method: type[saliency.Attribution], dims: int
) -> None:
    x = noise(1, 3, 16, 16)[0] if dims == 3 else noise(2, 3, 16, 16)
    before, version = x.clone(), x._version
    found = method(Normalising()).attribute(x, 0)
    assert torch.equal(x, before)
    assert x._version == version
    scale = 1 if method is GradCAM else 4  # d / dx of (x - 0.5) / 0.25
    expected = method(tiny_model()).attribute((before - 0.5) / 0.25, 0)
    torch.testing.assert_close(found.values, expected.values * scale)


@pytest.mark.parametrize("name", ["vanilla_gradient", "grad_cam", "rise", "occlusion", "full_grad", "ablation_cam"])
def test_an_input_that_the_model_refuses_is_an_error_that_says_what_went_in(name: str) -> None:
    words = r"TinyNet\) refused an input of \d+x5x16x16 \(float32 on cpu\): Given groups=1"
    with pytest.raises(ModelError, match=words) as caught:
        saliency.METHODS[name](tiny_model()).attribute(noise(2, 5, 16, 16), 0)
    assert type(caught.value.__cause__) is RuntimeError


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "name", ["vanilla_gradient", "guided_backprop", "integrated_gradients", "full_grad", "grad_cam"]
)
def test_a_quantised_head_is_not_said_to_be_independent_of_the_input(name: str) -> None:
    model = PooledNet().eval()
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"layer": "features"} if name == "grad_cam" else {}
    with pytest.raises(
        (TargetError, LayerError), match=r"or the gradient is cut in between, for example by a quantised layer"
    ):
        saliency.METHODS[name](quantised, **options).attribute(noise(1, 3, 8, 8), 0)


class Tagged(Tensor):
    """A tensor subclass as data loaders of other libraries return it."""


class Wrapper(Tensor):
    """A tensor that stands for others."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (1, 3, 8, 8), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize(
    "name", ["vanilla_gradient", "guided_backprop", "integrated_gradients", "full_grad", "occlusion"]
)
def test_an_input_of_a_subclass_of_tensor_is_explained_as_a_plain_one(name: str) -> None:
    cls, x = saliency.METHODS[name], noise(1, 3, 16, 16)
    method = cls(tiny_model(), **cls.preview_options)
    values = method.attribute(x.as_subclass(Tagged), 0).values
    assert type(values) is Tensor
    torch.testing.assert_close(values, method.attribute(x, 0).values)
    with pytest.raises(ImageError, match=r"is a Wrapper .*expected a plain"):
        method.attribute(Wrapper(), 0)


class OwnError(ValueError):
    """An error of the user's own."""


@pytest.mark.parametrize(
    "error", [OwnError("mine"), ZeroDivisionError(), MemoryError(), RuntimeError("can't allocate memory"), KeyError(3)]
)
def test_other_errors_in_the_model_come_out_as_they_are_with_a_note(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        VanillaGradient(Raises(error)).attribute(noise(2, 3, 4, 4), 0)
    assert caught.value is error
    assert error.__notes__ == ["saliency ran Raises on an input of 2x3x4x4 (float32 on cpu)"]


def test_an_interrupt_in_the_model_comes_out_as_it_is() -> None:
    with pytest.raises(KeyboardInterrupt):
        VanillaGradient(Raises(KeyboardInterrupt())).attribute(noise(2, 3, 4, 4), 0)


def test_the_input_takes_the_models_type() -> None:
    found = VanillaGradient(tiny_model().double()).attribute(noise(1, 3, 16, 16), 0)
    assert found.values.dtype == torch.float64
    assert reference_tensor(nn.Flatten()) is None
    assert reference_tensor(nn.BatchNorm2d(3, affine=False).double()) is not None
    counting = nn.Module()
    counting.register_buffer("steps", torch.zeros(1, dtype=torch.long))
    assert reference_tensor(counting) is None


def test_a_model_without_parameters_is_explained() -> None:
    x = noise(2, 3, 2, 2)
    found = VanillaGradient(nn.Flatten()).attribute(x, [0, 7])
    assert found.values.flatten(1).nonzero().tolist() == [[0, 0], [1, 7]]


def test_a_leaf_is_fresh_and_leaves_the_tensor_alone() -> None:
    x = noise(1, 3, 4, 4)
    fresh = leaf(x)
    assert fresh.requires_grad
    assert fresh.is_leaf
    assert not x.requires_grad
    assert torch.equal(fresh, x)
    hanging = noise(1, 3, 4, 4).requires_grad_() * 2
    assert leaf(hanging).is_leaf
    with torch.inference_mode():
        made = noise(1, 3, 4, 4)
    assert not leaf(made).is_inference()


def test_the_model_runs_on_a_clone() -> None:
    seen: list[Tensor] = []

    class Seeing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return x

    x = noise(1, 3, 4, 4)
    run_model(Seeing(), x)
    assert torch.equal(seen[0], x)
    assert seen[0].data_ptr() != x.data_ptr()


def test_a_call_inside_the_forward_of_another_is_not_captured_by_it() -> None:
    """A model that computes one of its own explanations in its forward."""
    model, x, other = tiny_model(), noise(2, 3, 16, 16), noise(1, 3, 16, 16) + 1
    outer, inner = GradCAM(model, "relu").attribute(x, 0), GradCAM(model, "relu").attribute(other, 1)
    inside: list[Tensor] = []

    def nest(module: nn.Module, inputs: Any, output: Any) -> None:
        if not inside:
            inside.append(torch.empty(0))
            inside[0] = GradCAM(model, "relu").attribute(other, 1).values

    handle = model.register_forward_hook(nest)
    found = GradCAM(model, "relu").attribute(x, 0)
    handle.remove()
    assert torch.equal(inside[0], inner.values)
    assert torch.equal(found.values, outer.values)


def test_captures_in_one_block_see_one_call_each() -> None:
    model = tiny_model()
    with HookManager() as outer:
        seen = outer.capture(model.get_submodule("last"))
        model(noise(1, 3, 16, 16))
        with HookManager() as inner:
            inside = inner.capture(model.get_submodule("last"))
            model(noise(1, 3, 16, 16))
        model(noise(1, 3, 16, 16))
    assert (len(seen), len(inside)) == (2, 1)


# Models of Hugging Face, by their shape.


class HuggingFace(nn.Module):
    """A classifier with class names in its configuration and an output with `.logits`."""

    def __init__(self, labels: dict[int, str]) -> None:
        super().__init__()
        self.net, self.config = tiny_model(), SimpleNamespace(id2label=labels)

    def forward(self, pixel_values: Tensor) -> Any:
        return SimpleNamespace(logits=self.net(pixel_values))


def test_a_model_of_hugging_face_brings_its_class_names() -> None:
    classes = tiny_model()(images(1)).shape[1]
    names = {index: f"animal {index}" for index in reversed(range(classes))}
    model = HuggingFace(names).eval()
    explanation = GradCAM(model).attribute(images(1), "animal 1")
    assert (explanation.target, explanation.target_names) == ((1,), ("animal 1",))
    assert GradCAM(model, categories=["own"] * classes).categories == ("own",) * classes
    vars(model)["categories"] = [f"mine {index}" for index in range(classes)]
    assert GradCAM(model).attribute(images(1), 1).target_names == ("mine 1",)
    generic = HuggingFace({index: f"LABEL_{index}" for index in range(classes)}).eval()
    assert GradCAM(generic).attribute(images(1), 1).target_names == ("class 1",)


def of_timm() -> nn.Module:
    return pytest.importorskip("timm").create_model("vit_tiny_patch16_224", depth=1).eval()  # type: ignore[no-any-return]


def of_open_clip() -> nn.Module:
    open_clip = pytest.importorskip("open_clip")
    sizes = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 32}
    model = open_clip.CLIP(8, sizes, {"context_length": 8, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1})
    open_clip.set_model_preprocess_cfg(
        model, {"size": 32, "resize_mode": "squash", "mean": (0.4,) * 3, "std": (0.2,) * 3}
    )
    return saliency.DualEncoder(model, None)


def detector() -> nn.Module:
    detection = pytest.importorskip("torchvision").models.detection
    return detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None).eval()  # type: ignore[no-any-return]


CARRIED = {
    of_timm: saliency.Preprocess((224, 224), 248, (0.5,) * 3, (0.5,) * 3, "bicubic"),
    of_open_clip: saliency.Preprocess((32, 32), (32, 32), (0.4,) * 3, (0.2,) * 3, "bicubic"),
    detector: saliency.Preprocess(mean=(0, 0, 0), std=(1, 1, 1)),
}


@pytest.mark.parametrize("build", CARRIED)
def test_the_preprocessing_that_a_model_carries_is_used(build: Callable[[], nn.Module]) -> None:
    model: Any = build()
    assert VanillaGradient(model).preprocess == CARRIED[build]
    model.preprocess = saliency.Preprocess((8, 8), 8)
    assert VanillaGradient(model).preprocess == model.preprocess


def test_a_model_without_preprocessing_is_offered_no_constants() -> None:
    with pytest.raises(ImageError, match="the preprocessing of its training") as caught:
        GradCAM(PooledNet()).attribute(np.zeros((16, 16, 3), np.uint8))
    assert "mean=..., std=..." in str(caught.value)


MAPPED_BLOCKS = """
import ctypes
import torch
from saliency.model.call import prepared_for_attribution

class Counters(ctypes.Structure):  # mallinfo2(3)
    _fields_ = [("before", ctypes.c_size_t * 3), ("hblks", ctypes.c_size_t), ("after", ctypes.c_size_t * 6)]

malloc_counters = ctypes.CDLL(None).mallinfo2
malloc_counters.restype = Counters
blocks = []  # a block that is freed would move the limit

def mapped():
    before = malloc_counters().hblks
    blocks.append(torch.empty(30 * 2**18))  # 30 MiB
    return malloc_counters().hblks - before

print(mapped())
with prepared_for_attribution(torch.nn.ReLU()):
    print(mapped())
"""


def keeps_counters() -> bool:
    library, version = platform.libc_ver()
    return library == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 33)  # the first with mallinfo2


@pytest.mark.slow
@pytest.mark.skipif(not keeps_counters(), reason="other C libraries keep memory by other rules")
def test_the_activations_of_small_networks_stay_in_the_process() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "LD_PRELOAD"))}
    result = subprocess.run(  # noqa: S603
        [sys.executable, "-c", MAPPED_BLOCKS], capture_output=True, text=True, check=True, env=environment
    )
    before, after = result.stdout.split()
    if before == "0":
        pytest.skip("the process has another allocator")
    assert after == "0"
