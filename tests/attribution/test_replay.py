"""Forwards from a layer on equal whole forwards, and run only what follows the layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import saliency
from saliency.attribution.replay import Replay, TailForward
from saliency.errors import LayerError, ModelError
from saliency.hooks.manager import HookManager
from saliency.hooks.pytree import first_tensor, tree_map_tensors, tree_tensors
from saliency.model.call import prepared_for_attribution
from tests.models import small_vit, torchvision_models


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[int] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.convolution.default:
            self.rows.append(len(args[0]))
        return op(*args, **(kwargs or {}))


class Small(nn.Module):
    """Convolutions that a subclass combines."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 4, 3, padding=1)
        self.two = nn.Conv2d(4, 4, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 5)

    def pooled(self, x: Tensor) -> Tensor:
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class SkipAndCat(Small):
    """A skip connection and a cat over the cut, and in-place operations on both sides of it."""

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.1
        front = self.act(self.one(x))
        back = self.act(self.two(front))
        front += back
        both = torch.cat([front, back[:, :2], x], 1)
        return self.pooled((both.view(x.shape[0], 9, -1).softmax(1).view(x.shape[0], 9, *x.shape[2:]) + both)[:, :4])


class FrontIsOverwritten(Small):
    """What was computed before the cut is used behind it, and overwritten there and again later."""

    def forward(self, x: Tensor) -> Tensor:
        front = self.one(x)
        back = self.two(front)
        late = front * back
        front.mul_(2).sub_(x.mean())
        late = late + front
        front.add_(back)
        return self.pooled(late + front)


class SizesTakenBefore(Small):
    """The number of rows is read before the cut, and tensors of that size are created after it."""

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        tokens = torch.zeros(n, 4, 1).expand(n, 4, 2).to(x) + x.mean((1, 2, 3))[:, None, None]
        back = self.two(self.one(x)).reshape(n * 4, h * w).view(n, 4, h * w)
        return self.head(torch.cat([tokens, back], 2).sum(2).view(n, 4) / n * x.shape[0])  # type: ignore[no-any-return]


class CalledTwice(Small):
    """The layer is called two times, one behind the other, and gives a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.twin = Twin()

    def forward(self, x: Tensor) -> Tensor:
        first, other = self.twin(self.one(x))
        second, other = self.twin(first.relu_() + other)
        return self.pooled(self.act(second) * other)


class Twin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.conv(x)
        return made, made.tanh()


class Nested(Small):
    """An output of many tensors, one of which does not depend on the layer."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        front = self.one(x)
        return {"logits": self.pooled(self.two(front)), "all": [front, (front.mean(), "name")]}


class Counts(Small):
    def __init__(self) -> None:
        super().__init__()
        self.counter = nn.Buffer(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.counter.add_(1)
        return self.pooled(self.two(self.one(x)))


class WholeTransformer(Small):
    """Attention of both kinds behind the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.two(self.one(x)).flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return self.head(F.scaled_dot_product_attention(tokens, tokens, tokens).mean(1))  # type: ignore[no-any-return]


def plain(model: nn.Module, name: str, x: Tensor, activations: Tensor) -> Any:
    """The definition: a forward of the whole model on copies of the picture, the layer's last output replaced."""
    layer = model.get_submodule(name)
    with HookManager() as hooks, torch.no_grad():
        calls = hooks.capture(layer)
        model(x.clone())
    left = len(calls)

    def change(output: Any) -> Any:
        nonlocal left
        left -= 1
        first = first_tensor(output)
        return None if left else tree_map_tensors(output, lambda each: activations.clone() if each is first else each)

    with HookManager() as hooks, torch.no_grad():
        hooks.observe(layer, change)
        return model(x.repeat(len(activations), 1, 1, 1))


def same(one: Any, two: Any) -> None:
    pairs = list(zip(tree_tensors(one), tree_tensors(two), strict=True))
    assert pairs
    for first, second in pairs:
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-10)


def changed(activation: Tensor, rows: int) -> Tensor:
    return activation * torch.rand(rows, *activation.shape[1:], dtype=activation.dtype) + 0.1


def picture(size: int = 12) -> Tensor:
    return torch.randn(1, 3, size, size + 4, dtype=torch.float64)


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    """A model in double precision whose output depends on all of it: weights of 0 are drawn."""
    model = kind().double().eval()
    for each in [*model.parameters(), *model.buffers()]:
        if each.is_floating_point() and (not each.any() or bool((each == each.flatten()[0]).all())):
            each.data = torch.rand_like(each) + 0.5
    return model


def small_resnet() -> nn.Module:
    model: nn.Module = torchvision_models().ResNet(torchvision_models().resnet.BasicBlock, [1, 1, 1, 1], num_classes=7)
    return model


def googlenet() -> nn.Module:
    model: nn.Module = torchvision_models().GoogLeNet(num_classes=7, aux_logits=False, init_weights=False)
    return model


NETWORKS: list[tuple[Callable[[], nn.Module], str]] = [
    *((kind, layer) for kind in (SkipAndCat, FrontIsOverwritten, Nested, Counts) for layer in ("one", "two")),
    (SkipAndCat, "act"),
    *((kind, "two") for kind in (SizesTakenBefore, WholeTransformer)),
    (CalledTwice, "twin"),
]

LARGER: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "resnet": (small_resnet, ("layer1", "layer3.0.bn1", "layer3.0.downsample", "layer4")),
    "densenet": (
        lambda: torchvision_models().DenseNet(8, (2, 3), 8, num_classes=7),
        ("features.denseblock1", "features.denseblock2.denselayer1.norm1", "features.transition1.relu"),
    ),
    "googlenet": (googlenet, ("inception4c", "inception4c.branch2")),
    "mobilenet": (
        lambda: torchvision_models().mobilenet_v3_small(num_classes=7),
        ("features.4", "features.4.block.1", "features.12"),
    ),
    "convnext": (
        lambda: torchvision_models().ConvNeXt(
            [
                torchvision_models().convnext.CNBlockConfig(8, 16, 2),
                torchvision_models().convnext.CNBlockConfig(16, None, 2),
            ]
        ),
        ("features.1", "features.3.0.block.0"),
    ),
    "vit": (
        lambda: small_vit(7, 64, 16),
        ("conv_proj", "encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1.ln_1"),
    ),
    "swin": (
        lambda: torchvision_models().SwinTransformer([4, 4], 8, [2, 2], [2, 2], [4, 4], num_classes=7),
        ("features.1.0", "features.1", "features.3.1.norm1", "permute"),
    ),
}


@pytest.mark.parametrize(("kind", "name"), NETWORKS)
def test_it_gives_what_whole_forwards_give(kind: Callable[[], nn.Module], name: str) -> None:
    model, x = made(kind), picture()
    with prepared_for_attribution(model):
        behind = TailForward(model, name, x)
        assert behind.how == TailForward.part, behind.why
        same(behind.output, model(x.clone()))
        for rows in (1, 5, 2):
            activations = changed(behind.activation, rows)
            given = activations.clone()
            expected = plain(model, name, x, activations)
            same(behind(activations), expected)
            same(behind(activations), expected)  # what is kept is not overwritten
            assert torch.equal(activations, given)


@pytest.mark.parametrize("name", LARGER)
def test_known_architectures_are_right_and_done_behind_the_layer_only(name: str) -> None:
    kind, layers = LARGER[name]
    model, x = made(kind), torch.randn(1, 3, 64, 64, dtype=torch.float64)
    with prepared_for_attribution(model):
        for layer in layers:
            behind = TailForward(model, layer, x)
            assert behind.how == TailForward.part, behind.why
            activations = changed(behind.activation, 3)
            expected = plain(model, layer, x, activations)
            assert not torch.allclose(expected[0], expected[1], rtol=1e-6)
            same(behind(activations), expected)


def test_the_bundled_network_is_done_behind_the_layer_only() -> None:
    model = saliency.load("efficientnet_lite0")
    x = torch.randn(1, 3, 64, 64)
    with prepared_for_attribution(model):
        behind = TailForward(model, "blocks.4", x)
        assert behind.how == TailForward.part, behind.why
        activations = changed(behind.activation, 3)
        torch.testing.assert_close(behind(activations), plain(model, "blocks.4", x, activations), rtol=1e-4, atol=1e-4)


def test_nothing_before_the_layer_is_computed_again() -> None:
    model = made(small_resnet)
    with prepared_for_attribution(model):
        behind = TailForward(model, "layer3", torch.randn(1, 3, 64, 64, dtype=torch.float64))
        with Counted() as done:
            behind(changed(behind.activation, 7))
    assert done.rows == [7] * 3  # layer4, with its downsample


def test_the_layers_output_and_the_models_are_those_of_the_picture() -> None:
    model, x = made(SkipAndCat), picture()
    with prepared_for_attribution(model), torch.no_grad():
        behind = TailForward(model, model.two, x)  # type: ignore[arg-type]
        front = F.conv2d(x - 0.1, model.one.weight, model.one.bias, padding=1).relu()  # type: ignore[union-attr, arg-type]
        assert torch.equal(behind.activation, F.conv2d(front, model.two.weight, model.two.bias, padding=1))  # type: ignore[union-attr, arg-type]
        assert torch.equal(behind.output, model(x.clone()))


class LooksAtValues(Small):
    def forward(self, x: Tensor) -> Tensor:
        back = self.two(self.one(x))
        if back[-1].sum() > 0:
            return self.pooled(back)
        return self.pooled(-2 * back)


class ThroughNumpy(Small):
    def forward(self, x: Tensor) -> Tensor:
        back = self.two(self.one(x))
        return self.pooled(back * torch.from_numpy(back.numpy() ** 2))


class CutsByValues(Small):
    def forward(self, x: Tensor) -> Tensor:
        back = self.two(self.one(x))
        return self.pooled(back + back[back > 0].mean())


class UnderTwoNames(Small):
    def forward(self, x: Tensor) -> Tensor:
        made = torch.zeros(x.shape[0], 4, *x.shape[2:], dtype=x.dtype)
        made[:, 1:] = self.two(self.one(x))[:, :3]
        return self.pooled(made)


class KnowsItsRows(Small):
    def forward(self, x: Tensor) -> Tensor:
        back = self.two(self.one(x))
        return self.pooled(back * torch.arange(1, x.shape[0] + 1, dtype=x.dtype).view(-1, 1, 1, 1))


class MixesRows(Small):
    def forward(self, x: Tensor) -> Tensor:
        back = self.two(self.one(x))
        return self.pooled(back) / (1 + x.shape[0])


class GoesByItsState(Small):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.pooled(self.two(self.one(x)) * (1 if self.calls % 2 else self.calls))


class GoesByAnArray(Small):
    def forward(self, x: Tensor) -> Tensor:
        back = self.two(self.one(x))
        return self.pooled(back if np.asarray(back).max() < 30 else -back)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (LooksAtValues, "a number or a shape"),
        (CutsByValues, "a number or a shape"),
        (ThroughNumpy, "numpy"),
        (GoesByAnArray, "__array__"),
        (UnderTwoNames, "written to through another tensor"),
        (KnowsItsRows, "not the same for each row"),
        (MixesRows, "an argument is"),
    ],
)
def test_what_cannot_be_done_again_is_whole_forwards(kind: Callable[[], nn.Module], why: str) -> None:
    model, x = made(kind), picture()
    with prepared_for_attribution(model):
        behind = TailForward(model, "two", x)
        assert behind.how == "whole forwards"
        assert why in behind.why
        for rows in (1, 3):
            activations = 40 * changed(behind.activation, rows) - 0.3
            same(behind(activations), plain(model, "two", x, activations))


class Splits(Small):
    """The rest of the network runs four images at a time."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.pooled(part) for part in self.act(self.two(self.one(x))).split(4)])


class Slices(Small):
    """As `Splits`, by a loop over slices."""

    def forward(self, x: Tensor) -> Tensor:
        back = self.two(self.one(x))
        return torch.cat([self.pooled(back[at : at + 4]) for at in range(0, len(back), 4)])


@pytest.mark.parametrize("kind", [Splits, Slices])
def test_a_batch_in_parts_is_whole_forwards(kind: Callable[[], nn.Module]) -> None:
    model, x = made(kind), picture()
    with prepared_for_attribution(model):
        behind = TailForward(model, "two", x)
        for rows in (3, 9, 4):
            activations = changed(behind.activation, rows)
            expected = plain(model, "two", x, activations)
            same(behind(activations), expected)
        assert behind.how == "whole forwards"
        assert "for 9 rows" in behind.why


@pytest.mark.parametrize("method", [saliency.AblationCAM, saliency.ReciproCAM, saliency.Occlusion])
def test_methods_read_a_model_that_runs_its_batch_in_parts(method: type[saliency.Attribution]) -> None:
    model, whole, x = made(Splits), made(Splits), picture()
    whole.load_state_dict(model.state_dict())
    whole.forward = lambda x: whole.pooled(whole.act(whole.two(whole.one(x))))  # type: ignore[operator]
    options: dict[str, Any] = {"window": 4, "stride": 4} if method is saliency.Occlusion else {"layer": "act"}
    found, expected = (method(each, chunk=16, **options).attribute(x, 1) for each in (model, whole))
    torch.testing.assert_close(found.values, expected.values)


def test_a_wrong_program_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Replay.__init__

    def wrong(replay: Replay, *arguments: Any) -> None:
        right(replay, *arguments)
        replay.external = [1.001 * tensor for tensor in replay.external]

    monkeypatch.setattr(Replay, "__init__", wrong)
    model, x = made(SkipAndCat), picture()
    with prepared_for_attribution(model):
        behind = TailForward(model, "two", x)
        assert "differs from the model's" in behind.why
        activations = changed(behind.activation, 2)
        same(behind(activations), plain(model, "two", x, activations))


class Draws(Small):
    def forward(self, x: Tensor) -> Tensor:
        return self.pooled(F.dropout(self.two(self.one(x)), training=True))


@pytest.mark.parametrize(("kind", "why"), [(Draws, "differs from the model's"), (GoesByItsState, "an argument is")])
def test_a_model_that_is_not_the_same_twice_is_run_each_time(kind: Callable[[], nn.Module], why: str) -> None:
    model = made(kind)
    with prepared_for_attribution(model):
        assert why in TailForward(model, "two", picture()).why


def test_values_before_the_layer_may_be_looked_at() -> None:
    class Model(Small):
        def forward(self, x: Tensor) -> Tensor:
            factor = x[0].mean().item()
            return self.pooled(self.two(self.one(x)) * factor)

    model, x = made(Model), picture()
    with prepared_for_attribution(model):
        behind = TailForward(model, "two", x)
        assert behind.how == TailForward.part
        activations = changed(behind.activation, 3)
        same(behind(activations), plain(model, "two", x, activations))


class GivesItAll(Small):
    """The layer's output, an earlier tensor and a weight are returned as they are."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        front = self.one(x)
        back = self.two(front)
        return back, front, self.head.weight, back.flatten(1)


def test_what_is_given_out_can_be_changed() -> None:
    model, x = made(GivesItAll), picture()
    with prepared_for_attribution(model), torch.no_grad():
        behind = TailForward(model, "two", x)
        assert behind.how == TailForward.part
        activations = changed(behind.activation, 3)
        before, expected = activations.clone(), [each.clone() for each in plain(model, "two", x, activations)]
        for _ in range(2):
            found = behind(activations)
            same(found, expected)
            for each in found:
                each.mul_(3)
            assert torch.equal(activations, before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_calls_work_in_any_mode(mode: Callable[[], Any]) -> None:
    model, x = made(FrontIsOverwritten), picture()
    with prepared_for_attribution(model):
        behind = TailForward(model, "two", x)
        activations = changed(behind.activation, 3)
        expected = plain(model, "two", x, activations)
        with mode():
            found = behind(activations)
        assert not found.requires_grad
        same(found, expected)


def test_channels_last_and_strided_activations_are_taken() -> None:
    model, x = made(SkipAndCat), picture()
    with prepared_for_attribution(model):
        behind = TailForward(model, "two", x)
        activations = changed(behind.activation, 3)
        expected = plain(model, "two", x, activations)
        same(behind(activations.to(memory_format=torch.channels_last)), expected)
        same(behind(activations.repeat(2, 1, 1, 1)[::2][:1].expand(3, -1, -1, -1)), expected[:1].expand(3, -1))


def test_a_scripted_part_behind_the_layer_is_followed() -> None:
    model, x = made(SkipAndCat), picture()
    traced: Any = torch.jit.trace(model, x)  # type: ignore[no-untyped-call]
    scripted = nn.Sequential(nn.Conv2d(3, 3, 1), traced).double()
    with prepared_for_attribution(scripted):
        behind = TailForward(scripted, "0", x)
        assert behind.how == TailForward.part, behind.why
        activations = changed(behind.activation, 3)
        same(behind(activations), plain(scripted, "0", x, activations))


class Raises(Small):
    error: type[BaseException] = RuntimeError
    at = 2

    def forward(self, x: Tensor) -> Tensor:
        back = self.two(self.one(x))
        if x.shape[0] == self.at:
            raise self.error("no")
        return self.pooled(back)


def _state(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield module.training, sorted(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks)
    yield {name: (each.data_ptr(), each._version) for name, each in model.state_dict().items()}
    yield torch.utils._python_dispatch._get_current_dispatch_mode()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 2])
def test_the_model_is_left_as_it_was_also_where_it_raises(error: type[BaseException], at: int) -> None:
    model = made(Raises)
    Raises.error, Raises.at = error, at
    before, random = list(_state(model)), torch.get_rng_state()
    with prepared_for_attribution(model):
        if at == 1 or error is KeyboardInterrupt:
            with pytest.raises(ModelError if error is RuntimeError else error, match="no"):
                TailForward(model, "two", torch.ones(1, 3, 9, 9, dtype=torch.float64))
        else:
            behind = TailForward(model, "two", torch.ones(1, 3, 9, 9, dtype=torch.float64))
            assert behind.how == "whole forwards"
            with pytest.raises(ModelError):
                behind(behind.activation.repeat(2, 1, 1, 1))
    assert list(_state(model)) == before
    assert torch.equal(torch.get_rng_state(), random)


def test_layers_that_cannot_be_cut_behind_are_named() -> None:
    model = made(CalledTwice)
    model.register_module("unused", nn.ReLU())
    with prepared_for_attribution(model), pytest.raises(LayerError, match="was not run"):
        TailForward(model, "unused", picture())
    with prepared_for_attribution(model), pytest.raises(LayerError, match="closest"):
        TailForward(model, "twoo", picture())
