"""Faster private copies: they meet their tolerances, are not used if slower, and are freed after the call."""

from __future__ import annotations

import copy
import gc
import itertools
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saliency import METHODS
from saliency.engine import fast_copy
from saliency.engine.fast_copy import (
    FasterModel,
    error_and_cosine,
    faster_model,
    fold,
    foldable_pairs,
    private_copy,
)
from saliency.errors import ModelError
from saliency.hooks.manager import HookManager
from saliency.hooks.model_state import prepared_for_attribution, run_model
from tests.threads import in_threads

named: dict[str, Any] = {**METHODS}


def settled(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model in evaluation mode whose batch norms have statistics that matter."""
    for each in model.modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm) and each.running_mean is not None:
            assert each.running_var is not None
            each.running_mean.normal_()
            each.running_var.uniform_(0.5, 2)
            if each.affine:
                nn.init.normal_(each.weight, 1, 0.3)
                nn.init.normal_(each.bias)
    return model.to(dtype).eval()


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    return settled(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False, padding_mode="circular"),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, groups=8),
            nn.BatchNorm2d(8, affine=False),
            nn.SiLU(),
            nn.ConvTranspose2d(8, 6, 2, stride=2),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(24, 10),
            nn.BatchNorm1d(10),
            nn.ReLU(),
            nn.Linear(10, 5),
        ),
        dtype,
    )


def folded(model: nn.Module, x: Tensor) -> tuple[nn.Module, list[str]]:
    """A folded copy, and the batch norms that are folded away."""
    pairs, made = foldable_pairs(model, x), private_copy(model)
    fold(made, pairs)
    torch.testing.assert_close(made(x), model(x), rtol=1e-10, atol=1e-10)
    return made, [norm for _, norm in pairs]


X = torch.randn(2, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


# Folding.


def test_every_batch_norm_after_a_convolution_is_folded_to_rounding() -> None:
    model = network()
    made, norms = folded(model, X)
    assert norms == ["1", "4", "7"]
    assert not any(isinstance(each, nn.BatchNorm2d) for each in made.modules())
    other = torch.randn(5, 3, 9, 14, dtype=torch.float64)
    torch.testing.assert_close(made(other), model(other), rtol=1e-10, atol=1e-10)


def test_the_activation_inside_a_batch_norm_stays() -> None:
    from timm.layers.norm_act import BatchNormAct2d

    model = settled(nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct2d(4, act_layer=nn.SiLU)))
    made, norms = folded(model, X)
    assert norms == ["1"]
    assert isinstance(made.get_submodule("1.act"), nn.SiLU)


def test_a_subclass_that_only_pads_is_folded_and_one_that_reworks_its_weights_is_not() -> None:
    from timm.layers.conv2d_same import Conv2dSame
    from timm.layers.std_conv import StdConv2d

    same = settled(nn.Sequential(Conv2dSame(3, 4, 3, stride=2), nn.BatchNorm2d(4)))
    assert folded(same, X)[1] == ["1"]
    standard = settled(nn.Sequential(StdConv2d(3, 4, 3), nn.BatchNorm2d(4)))
    assert foldable_pairs(standard, X) == ()


class Shaped(nn.Module):
    """A convolution and a batch norm, combined as a test needs."""

    def __init__(self, way: Callable[[Shaped, Tensor], Any], **norm: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.bn = nn.BatchNorm2d(3, **norm)
        self.gate = nn.Parameter(torch.zeros(1))
        self.last = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.way = way

    def forward(self, x: Tensor) -> Any:
        return self.last(self.way(self, x))


def _residual(model: Shaped, x: Tensor) -> Tensor:
    y = model.conv(x)
    return model.bn(y) + model.gate * y  # type: ignore[no-any-return]


def _not_yet(model: Shaped, x: Tensor) -> Tensor:
    y = model.conv(x)
    z: Tensor = model.bn(y)
    return torch.where(z > 1e6, y, z)


UNFOLDABLE: dict[str, Callable[[Shaped, Tensor], Any]] = {
    "another reader, that makes no difference yet": _residual,
    "another reader, that makes none on this input": _not_yet,
    "convolution called twice": lambda m, x: m.bn(m.conv(m.conv(x))),
    "batch norm called twice": lambda m, x: m.bn(m.bn(m.conv(x))),
    "batch norm first": lambda m, x: m.conv(m.bn(x)),
    "something in between": lambda m, x: m.bn(m.conv(x).abs()),
    "weight read elsewhere": lambda m, x: F.conv2d(m.bn(m.conv(x)), m.conv.weight, padding=1),
    "written over in place": lambda m, x: m.bn(m.conv(x).relu_()),
}


@pytest.mark.parametrize("name", UNFOLDABLE)
def test_what_is_not_exact_is_left_alone_and_the_rest_is_folded(name: str) -> None:
    assert folded(settled(Shaped(UNFOLDABLE[name])), X)[1] == ["last.1"]


@pytest.mark.parametrize(
    "is_bright",
    [
        lambda x: x.mean() > 0,
        lambda x: x.mean().item() > 0,
        lambda x: x.mean((1, 2, 3)).tolist()[0] > 0,
        lambda x: x.mean().numpy() > 0,
        lambda x: len((x.mean((1, 2, 3)) > 0).nonzero()),
        lambda x: [False, True][(x.mean() > 0).long()],
    ],
)
def test_a_batch_norm_that_only_some_images_take_is_left_alone(is_bright: Callable[[Tensor], Any]) -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            maps = self.conv(x)
            out: Tensor = self.head((self.norm(maps) if is_bright(x) else maps).mean((2, 3)))
            return out

    model, bright = settled(Routed()), torch.rand(1, 3, 8, 8, dtype=torch.float64)
    made = private_copy(model)
    fold(made, foldable_pairs(model, bright))
    for x in (bright, -bright):
        assert error_and_cosine(made(x), model(x))[0] < 1e-12


def test_batch_norms_without_statistics_are_left_alone() -> None:
    assert folded(settled(Shaped(lambda m, x: m.bn(m.conv(x)), track_running_stats=False)), X)[1] == ["last.1"]


def test_tied_parametrised_and_weight_normed_layers_are_left_alone() -> None:
    def twice(model: Shaped, x: Tensor) -> Any:
        return model.get_submodule("other")(model.bn(model.conv(x)))

    tied, other = Shaped(twice), nn.Conv2d(3, 3, 3, padding=1)
    other.weight = tied.conv.weight
    tied.add_module("other", other)
    assert folded(settled(tied), X)[1] == ["last.1"]
    normed = Shaped(lambda m, x: m.bn(m.conv(x)))
    torch.nn.utils.parametrizations.weight_norm(normed.conv)
    assert folded(settled(normed), X)[1] == ["last.1"]


def test_a_batch_norm_with_two_names_is_left_alone() -> None:
    model = Shaped(lambda m, x: m.bn(m.conv(x)))
    model.add_module("alias", model.bn)
    assert folded(settled(model), X)[1] == ["last.1"]


class Collector:
    """A user's hook that collects outputs in its own list."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.seen.append(output.detach().clone())

    def method(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self(module, inputs, output)


@pytest.mark.parametrize("way", ["object", "method"])
def test_the_users_hooks_on_a_copy_are_the_users_own_and_see_the_same(way: str) -> None:
    model, collector = network(), Collector()
    handle = model[3].register_forward_hook(collector if way == "object" else collector.method)  # type: ignore[index]
    made, norms = folded(model, X)
    assert norms == ["1", "7"]
    collector.seen.clear()
    model(X)
    made(X)
    handle.remove()
    assert len(collector.seen) == 2
    torch.testing.assert_close(*collector.seen)


def test_modules_with_hooks_of_any_kind_are_left_alone() -> None:
    def idle(*given: Any) -> None:
        """Reads nothing, so that only its registration has an effect."""

    for at, register in (
        ("3", nn.Module.register_forward_hook),
        ("3", nn.Module.register_forward_pre_hook),
        ("4", nn.Module.register_full_backward_hook),
        ("4", nn.Module.register_full_backward_pre_hook),
    ):
        model = network()
        register(model.get_submodule(at), idle)
        assert folded(model, X)[1] == ["1", "7"]
    model = network()
    handle = nn.modules.module.register_module_forward_hook(idle)
    try:
        assert foldable_pairs(model, X) == ()
    finally:
        handle.remove()


def test_error_and_cosine_are_those_of_the_worst_tensor() -> None:
    a, b = torch.randn(3, 4), torch.randn(5)
    assert error_and_cosine({"a": a, "n": torch.tensor(3)}, {"a": a, "n": torch.tensor(4)}) == (0, 1)
    error, cosine = error_and_cosine((a, 2 * b), (a, b))
    assert error == pytest.approx(1)
    assert cosine == pytest.approx(1)
    assert error_and_cosine(-b, b)[1] == pytest.approx(-1)
    for other in (b[:2], b * float("nan"), b * float("inf"), (b, b), "nothing"):
        assert error_and_cosine(other, b) == (float("inf"), -1)
    assert error_and_cosine(torch.tensor(3), torch.tensor(3)) == (float("inf"), -1)


# Running.


def run_with(model: nn.Module, x: Tensor, **options: Any) -> FasterModel:
    with prepared_for_attribution(model):
        return faster_model(model, x, **options)


def gradient(model: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(model(leaf).square().sum(), leaf)[0]


@pytest.mark.parametrize("backward", [False, True])
def test_fast_gives_the_same_values_and_gradients(backward: bool) -> None:
    model = network(torch.float32)
    ours = run_with(model, X.float(), backward=backward)
    assert ours.note == "fast: cosine 1.0000, 3 batch norms folded"
    assert ours.model is not model
    torch.testing.assert_close(ours.model(X.float()), model(X.float()), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient(ours.model, X.float()), gradient(model, X.float()), rtol=1e-3, atol=1e-3)


def test_a_model_without_convolutions_is_not_copied() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    model(X.float())
    ours = run_with(model, X.float())
    assert ours.model is model
    assert ours.note == "exact: fast speeds up convolutions, of which there are fewer than two"


def test_no_clock_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = network(torch.float32), X.float()
    notes = set[str]()
    for seconds in (itertools.count(0, 1), itertools.count(0, 1e-9)):
        monkeypatch.setattr(time, "perf_counter", lambda seconds=seconds: next(seconds))
        fast_copy._choices.clear()
        notes.add(run_with(model, x, backward=True).note)
    assert notes == {"fast: cosine 1.0000, 3 batch norms folded"}


class Picky(nn.Module):
    """A model whose values depend on the memory layout of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        sign = 1 if x.is_contiguous() else -1
        return sign * self.conv(x).mean((2, 3))  # type: ignore[no-any-return]


class Locked(nn.Sequential):
    """A model that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("there is one of me")


def test_what_is_not_exact_enough_or_fails_is_dropped_and_said_so() -> None:
    x = X.float()
    ours = run_with(Picky(), x)
    assert ours.note == "exact: fast was not exact enough here (cosine -1.0000)"
    locked = Locked(nn.Conv2d(3, 2, 3), nn.Conv2d(2, 2, 1))
    ours = run_with(locked, x)
    assert (ours.model, ours.note) == (locked, "exact: fast failed here (RuntimeError)")


def test_a_copy_whose_folded_batch_norm_is_reached_past_the_module_tree_is_dropped() -> None:
    def past(model: Shaped, x: Tensor) -> Tensor:
        return model.hidden[0](model.conv(x))  # type: ignore[no-any-return,operator,index]

    model = Shaped(past)
    model.hidden = [model.bn]  # type: ignore[assignment]
    model = settled(model, torch.float32)  # type: ignore[assignment]
    fast = run_with(model, X.float())
    assert fast.model is model
    assert "fast was not exact enough here" in fast.note


def test_a_gradient_that_differs_is_not_exact_enough() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            sign = 1 if x.is_contiguous() else -1
            return x.detach().sum((1, 2, 3)) + sign * (x - x.detach()).sum((1, 2, 3))

    assert "not exact enough here (cosine -1.0000)" in run_with(Turned(), X.float(), backward=True).note


def test_the_models_own_error_is_left_to_the_pass_that_is_asked_for() -> None:
    ours = run_with(nn.Linear(7, 2), X.float())
    assert ours.note == "exact: the trial of fast failed (ModelError)"
    with pytest.raises(ModelError, match="shapes cannot be multiplied"):
        run_model(ours.model, X.float())


def test_a_model_in_half_precision_is_not_copied() -> None:
    ours = run_with(network(torch.bfloat16), X.bfloat16())
    assert ours.note == "exact: fast is not for models in bfloat16"


def test_fast_serves_double_precision() -> None:
    model = network()
    ours = run_with(model, X)
    assert ours.note.startswith("fast")
    torch.testing.assert_close(ours.model(X), model(X), rtol=1e-10, atol=1e-10)


# What is remembered.


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """The list to which each call of a function of `fast_copy` adds its name."""
    calls: list[str] = []
    function = getattr(fast_copy, name)

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        return function(*arguments, **options)

    monkeypatch.setattr(fast_copy, name, call)
    return calls


def test_what_was_found_is_remembered_for_this_model_and_kind_of_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = network(torch.float32), X.float()
    tried = counted(monkeypatch, "_choose")
    cases = [(model, x, False), (model, x, True), (model, x[..., :10], False), (network(torch.float32), x, False)]
    for module, images, backward in cases * 2:
        assert run_with(module, images, backward=backward).note.startswith("fast")
    assert len(tried) == len(cases)


def test_the_weights_are_those_of_the_moment() -> None:
    model, x = network(torch.float32), X.float()
    run_with(model, x)
    with torch.no_grad():
        for each in model.parameters():
            each.data.mul_(1.2)
    ours = run_with(model, x)
    assert not any(isinstance(each, nn.BatchNorm2d) for each in ours.model.modules())
    torch.testing.assert_close(ours.model(x), model(x), rtol=1e-4, atol=1e-4)


def test_what_was_exact_enough_is_checked_again_on_the_weights_of_the_moment() -> None:
    class Fickle(Picky):
        fickle = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if self.fickle else x.contiguous())

    model = Fickle()
    assert run_with(model, X.float()).note.startswith("fast")
    model.fickle = True
    ours = run_with(model, X.float())
    assert (ours.model, ours.note) == (model, "exact: fast was not exact enough here (cosine -1.0000)")


def test_hooks_that_come_later_are_kept_from_folding_too() -> None:
    model, x, collector = network(torch.float32), X.float(), Collector()
    run_with(model, x)
    model[0].register_forward_hook(collector)  # type: ignore[index]
    ours = run_with(model, x)
    assert "2 batch norms folded" in ours.note
    collector.seen.clear()
    model(x)
    ours.model(x)
    torch.testing.assert_close(*collector.seen)


def test_neither_the_model_nor_its_copy_is_kept_alive() -> None:
    model = network(torch.float32)
    ours = run_with(model, X.float())
    original, private = weakref.ref(model), weakref.ref(ours.model)
    gc.collect()
    gc.disable()
    try:
        del ours
        assert private() is None
        del model
        assert original() is None
    finally:
        gc.enable()


# What is left as it was.


def test_the_model_is_left_bit_for_bit() -> None:
    model, x = network(torch.float32), X.float()
    for each in model.parameters():
        each.requires_grad = False
    model.train()
    before = copy.deepcopy(model.state_dict())
    attributes = {name: dict(vars(each)) for name, each in model.named_modules()}
    ours = run_with(model, x, backward=True)
    gradient(ours.model, x)
    assert all(each.requires_grad for each in ours.model.parameters())
    assert not any(each.training for each in ours.model.modules())
    after = model.state_dict()
    assert all(
        torch.equal(after[name], each) and after[name].stride() == each.stride() for name, each in before.items()
    )
    assert {name: vars(each) for name, each in model.named_modules()} == attributes
    assert all(each.training and not each._forward_hooks for each in model.modules())
    assert not any(each.requires_grad or each.grad is not None for each in model.parameters())


def test_an_input_that_the_model_overwrites_is_left_alone() -> None:
    model, x = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 2, 3), nn.Conv2d(2, 2, 1)), X.float()
    x = x.contiguous(memory_format=torch.channels_last)
    before = x.clone()
    ours = run_with(model, x)
    run_model(ours.model, x)
    assert ours.note.startswith("fast")
    assert torch.equal(x, before)


def test_trials_leave_the_random_state() -> None:
    class Noisy(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1e-6 * torch.rand(())

    model = nn.Sequential(Noisy(3, 2, 3), nn.Conv2d(2, 2, 1))
    before = torch.get_rng_state()
    assert run_with(model, X.float()).note.startswith("fast")
    assert torch.equal(torch.get_rng_state(), before)


def test_standing_managers_see_the_passes_and_not_the_trials() -> None:
    model, x = network(torch.float32), X.float()
    seen: list[Any] = []
    with HookManager(persistent=True) as hooks:
        hooks.observe(model[9], lambda output: seen.append(output))  # type: ignore[index]
        ours = run_with(model, x)
        assert ours.note.startswith("fast")
        assert not seen
        ours.model(x)
        assert len(seen) == 1
    ours.model(x)
    assert len(seen) == 1


def test_an_interrupt_in_a_trial_goes_on_and_leaves_nothing() -> None:
    class Interrupted(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            if type(self).calls == 3:
                raise KeyboardInterrupt
            return x

    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), Interrupted())
    with pytest.raises(KeyboardInterrupt):
        run_with(model, X.float())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    assert run_with(model, X.float()).note.startswith("fast")


@pytest.mark.slow
def test_a_runner_of_a_private_copy_is_a_runner() -> None:
    model, x = network(torch.float32), X.float()
    inner = run_with(model, x)
    outer = run_with(inner.model, x)
    del inner
    gc.collect()
    assert outer.note.startswith("fast")
    assert error_and_cosine(outer.model(x), model(x))[1] > 0.99


def test_threads_share_a_model() -> None:
    model, x = network(torch.float32), X.float()

    def work(number: int) -> Tensor:
        with prepared_for_attribution(model):
            output: Tensor = faster_model(model, x, backward=bool(number % 2)).model(x)
            return output.detach()

    expected = model(x)
    for each in in_threads(work, range(4), times=3).values():
        assert error_and_cosine(each, expected)[1] > 0.99


@pytest.mark.parametrize("name", ["smooth_grad", "idgi", "guided_ig", "integrated_gradients"])
def test_gradients_are_computed_faster_where_that_is_asked(name: str) -> None:
    """Methods run with gradients off, and passes turn them on: a trial has to do so too."""
    model, x = network(torch.float32), X.float()[:1]
    asked = named[name](model, **named[name].preview_options, precision="fast").attribute(x, 1)
    assert asked.run_stats[0].precision == "fast: cosine 1.0000, 3 batch norms folded"
    plain = named[name](model, **named[name].preview_options).attribute(x, 1)
    torch.testing.assert_close(asked.values, plain.values, rtol=2e-2, atol=2e-2 * float(plain.values.abs().max()))


@pytest.mark.parametrize("name", ["guided_ig", "integrated_gradients"])
def test_the_model_is_copied_once_for_an_image(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = network(torch.float32), X.float()[:1]
    method = named[name](model, **named[name].preview_options, precision="fast")
    method.attribute(x, 1)  # chooses the copy
    made = counted(monkeypatch, "private_copy")
    method.attribute(x, 1)
    assert len(made) == 1


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_a_smoothed_method_says_how_the_one_within_was_run(precision: str) -> None:
    model, x = network(torch.float32), X.float()[:1]
    inner = named["occlusion"](model, window=6, stride=6, precision="fast")
    (stats,) = named["smooth_grad"](inner, passes=3, precision=precision).attribute(x, 1).run_stats
    assert stats.precision == "fast: cosine 1.0000, 3 batch norms folded"
    assert stats.note == ("occlusion runs the model by its own precision" if precision == "fast" else "")
    guided = named["guided_backprop"](model)
    (stats,) = named["smooth_grad"](guided, passes=3, precision=precision).attribute(x, 1).run_stats
    assert stats.precision == "exact"
    assert stats.note == ("guided_backprop runs the model exactly" if precision == "fast" else "")
