"""The promises of `compile`: the same explanations, from programs that follow the model, or from the method itself."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import saliency
from saliency import METHODS
from saliency.errors import NonFiniteError, NotApplicableError, SaliencyWarning, TargetError
from tests.models import PooledNet
from tests.selection import of_each_family

needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
PASSES = ("integrated_gradients", "smooth_grad", "rise", "score_cam", "expected_gradients")


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(count))


def network() -> PooledNet:
    torch.manual_seed(0)
    return PooledNet().eval()


class Runs:
    """Graphs that run as they are instead of compiled code, with the number of graphs and of their runs."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: Callable[..., Any], inputs: Sequence[Any], mode: str | None) -> Callable[..., Any]:
        self.graphs += 1

        def run(*inputs: Tensor) -> Any:
            self.calls += 1
            return graph(*inputs)

        return run


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setattr("saliency.program.compiled.frozen", counted := Runs())
    return counted


def require_same(compiled: saliency.Explanation, exact: saliency.Explanation) -> None:
    torch.testing.assert_close(compiled.values, exact.values)
    torch.testing.assert_close(compiled.scores, exact.scores)
    for name in ("questions", "layer", "frames", "notes", "method", "title", "units", "sign", "settings"):
        assert getattr(compiled, name) == getattr(exact, name)
    if exact.probabilities is not None:
        torch.testing.assert_close(compiled.probabilities, exact.probabilities)


@needs_compiler
def test_a_compiled_call_gives_the_explanation_of_the_method() -> None:
    method, x = saliency.GradCAM(network()), images(1)
    fast = method.compile()
    require_same(fast.attribute(x), method.attribute(x))
    require_same(fast.attribute(x, 2), method.attribute(x, 2))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["vanilla_gradient", "guided_backprop", "lrp", "attn_lrp", "integrated_gradients"])
def test_compiled_batches_of_any_size_give_the_explanation_of_the_method(name: str) -> None:
    method = METHODS[name](network(), **METHODS[name].preview_options)
    fast = method.compile()
    for count in (3, 1, 5):
        require_same(fast.attribute(images(count), 1), method.attribute(images(count), 1))


@pytest.mark.filterwarnings("ignore:.*this call is not compiled")
@pytest.mark.parametrize("name", of_each_family(METHODS.keys() - {"recipro_cam"}))
def test_every_method_gives_the_same_explanation(name: str, runs: Runs) -> None:
    method = METHODS[name](network(), **METHODS[name].preview_options)
    try:
        exact = method.attribute(images(2))
    except NotApplicableError:
        pytest.skip("needs another network")
    require_same(method.compile().attribute(images(2)), exact)


@pytest.mark.parametrize("name", PASSES)
def test_the_passes_of_a_method_are_compiled(name: str, runs: Runs) -> None:
    method = METHODS[name](network(), **METHODS[name].preview_options)
    require_same(method.compile().attribute(images(1), 1), method.attribute(images(1), 1))
    assert runs.calls >= 2


def test_a_program_is_compiled_for_single_images_and_for_all_batches(runs: Runs) -> None:
    method = saliency.GradCAM(network())
    fast = method.compile()
    for count in (1, 3, 5, 1, 2):
        require_same(fast.attribute(images(count)), method.attribute(images(count)))
    assert runs.graphs == 2
    assert [e.target for e in fast.attribute_classes(images(2), [0, [3, None]])] == [
        (0, 0),
        (3, method.attribute(images(2)).target[1]),
    ]
    assert runs.graphs == 2


def test_compiled_methods_together_run_their_programs(runs: Runs) -> None:
    model = network()
    methods = saliency.GradCAM(model), saliency.LRP(model)
    fast = saliency.Together(*(method.compile() for method in methods)).attribute(images(1), 1)
    for compiled, exact in zip(fast, saliency.Together(*methods).attribute(images(1), 1), strict=True):
        require_same(compiled, exact)
    assert runs.graphs == 2


def scale(model: PooledNet) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)


def replace_weight(model: PooledNet) -> None:
    weight = next(model.features.parameters())
    model.features.get_submodule("0").weight = nn.Parameter(-weight.detach())


def hook(model: PooledNet) -> None:
    model.register_forward_hook(lambda module, args, output: 2 * output)


def test_a_changed_model_is_compiled_again(runs: Runs) -> None:
    model = network()
    method = saliency.GradCAM(model)
    fast = method.compile()
    fast.attribute(images(1), 1)
    for graphs, change in enumerate((scale, replace_weight, hook), 2):
        change(model)
        require_same(fast.attribute(images(1), 1), method.attribute(images(1), 1))
        assert runs.graphs == graphs


def test_a_deep_copy_is_the_method_itself(runs: Runs) -> None:
    fast = saliency.GradCAM(network()).compile()
    exact = copy.deepcopy(fast)
    assert type(exact) is saliency.GradCAM
    assert exact.model is not fast.model
    with torch.no_grad():
        next(exact.model.parameters()).mul_(1.5)
    assert not torch.equal(exact.attribute(images(1), 1).values, fast.attribute(images(1), 1).values)
    assert runs.graphs == 1


def test_what_cannot_be_a_program_runs_the_method_and_says_so_once(runs: Runs) -> None:
    fast = saliency.GradCAM(network()).compile()
    with pytest.warns(SaliencyWarning, match="grad_cam: this call is not compiled: the target is not a class"):
        found = fast.attribute(images(1), saliency.contrast(0, 1))
    fast.attribute(images(1), saliency.contrast(0, 1))  # a second warning would be an error
    require_same(found, saliency.GradCAM(network()).attribute(images(1), saliency.contrast(0, 1)))
    with pytest.warns(SaliencyWarning, match="autocast"), torch.autocast("cpu"):
        fast.attribute(images(1), 1)
    with pytest.warns(SaliencyWarning, match="deep_lift: this call is not compiled: it decides by values"):
        saliency.DeepLIFT(network()).compile().attribute(images(1), 1)
    assert not runs.graphs


def test_without_a_compiler_the_method_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx")

    monkeypatch.setattr("saliency.program.compiled.frozen", fail)
    method = saliency.GradCAM(network())
    with pytest.warns(SaliencyWarning, match=r"there is no C\+\+ compiler, such as g\+\+"):
        require_same(method.compile().attribute(images(1)), method.attribute(images(1)))


def test_a_program_that_differs_from_the_method_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: Callable[..., Any], *arguments: object) -> Callable[..., Any]:
        return lambda *inputs: [1.1 * part for part in graph(*inputs)]

    monkeypatch.setattr("saliency.program.compiled.frozen", wrong)
    method = saliency.GradCAM(network())
    with pytest.warns(SaliencyWarning, match=r"the compiled program differs from attribute by 0\.1"):
        require_same(method.compile().attribute(images(1)), method.attribute(images(1)))


def test_an_image_whose_score_is_not_finite_is_refused_and_the_next_one_compiled(runs: Runs) -> None:
    fast = saliency.GradCAM(network()).compile()
    with pytest.raises(NonFiniteError, match="the score of image 0 is"):
        fast.attribute(3e38 * images(1).sign(), 1)
    fast.attribute(images(1), 1)
    assert runs.graphs == 1


def test_a_class_that_the_model_does_not_have_is_refused(runs: Runs) -> None:
    with pytest.raises(TargetError, match=r"class 50 is outside 0\.\.4"):
        saliency.GradCAM(network()).compile().attribute(images(1), 50)


def test_the_model_is_unchanged_and_the_method_too(runs: Runs) -> None:
    model = network().train()
    before, method = {name: tensor.clone() for name, tensor in model.state_dict().items()}, saliency.GradCAM(model)
    options = dict(vars(method))
    method.compile().attribute(images(1))
    assert vars(method) == options
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.training and not module._forward_hooks for module in model.modules())


def test_the_tests_of_a_slow_compiled_method_use_as_few_passes(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saliency.evaluation.trust.SLOW", 0)
    method = saliency.RISE(network(), passes=400, grid=3)
    strips = [saliency.trust(each, images(1), 1, seconds=1e-6)["weights"].strip for each in (method, method.compile())]
    assert strips[0] == pytest.approx(strips[1])


def test_the_forwards_of_metrics_are_compiled(runs: Runs) -> None:
    method, metrics = (
        saliency.GradCAM(network()),
        [saliency.metrics.Deletion(steps=8), saliency.metrics.Insertion(steps=8)],
    )
    exact = saliency.metrics.measure(metrics, method.attribute(images(1), 1), method=method, inputs=images(1))
    compiled = method.compile()
    explanation, before = compiled.attribute(images(1), 1), runs.calls
    measured = saliency.metrics.measure(metrics, explanation, method=compiled, inputs=images(1))
    assert runs.calls > before
    for result, expected in zip(measured, exact, strict=True):
        torch.testing.assert_close(result.values, expected.values)


def test_gradients_of_convolutions_of_stride_1_are_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Conv2d(4, 6, (2, 3), padding=(0, 2), dilation=(3, 2)),
        nn.Conv2d(6, 8, 1),
    ]
    torch.manual_seed(0)
    model = nn.Sequential(*layers, nn.Conv2d(8, 8, 3, 2, 1), nn.Tanh(), nn.Flatten(), nn.LazyLinear(4)).eval()
    x, strides = images(1), list[list[int]]()
    model(x)

    def watched(graph: Any, inputs: Sequence[Any], mode: str | None) -> Any:
        nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
        strides.extend(node.args[3] for node in nodes if node.args[6])
        return graph

    monkeypatch.setattr("saliency.program.compiled.frozen", watched)
    method = saliency.VanillaGradient(model)
    require_same(method.compile().attribute(x, 1), method.attribute(x, 1))
    assert strides == [[2, 2]]
