"""What of an output belongs to which image, and passes that run one by one where images affect each other."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import saliency
from saliency import METHODS
from saliency.attribution.questions import cached_serial_reason, output_rows
from saliency.errors import SaliencyWarning, TargetError
from saliency.testing import tiny_model
from tests.models import Packed

named: dict[str, Any] = dict(METHODS)
SHAPE = (1, 3, 16, 16)


def one_image() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", ["rise", "integrated_gradients", "occlusion", "smooth_grad"])
@pytest.mark.parametrize("rows", [2, 4, 8, 16])
def test_a_constant_in_the_output_is_never_cut_with_default_options(name: str, rows: int) -> None:
    prototypes = torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows))
    model = Packed(lambda scores: {"scores": scores, "prototypes": prototypes})
    options = {"passes": 40} if "passes" in named[name].options() else {}
    options |= {"window": 4, "stride": 4} if name == "occlusion" else {}

    def similarity(output: dict[str, Tensor]) -> Tensor:
        return (output["scores"] @ output["prototypes"].T).sum(1)

    found = named[name](model, **options).attribute(one_image(), similarity)
    expected = named[name](model, **options, chunk=1).attribute(one_image(), similarity)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-4, atol=1e-4 * float(expected.values.abs().max()))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_list_with_one_entry_per_image_is_read_as_rows(count: int, chunk: int) -> None:
    model = Packed(lambda scores: [{"scores": each, "labels": torch.arange(5)} for each in scores])
    x = torch.randn(count, *SHAPE[1:], generator=torch.Generator().manual_seed(4))
    method = saliency.SmoothGrad(model, passes=6, chunk=chunk)
    found = method.attribute(x, lambda output: torch.stack([each["scores"][1] for each in output]))
    expected = saliency.SmoothGrad(model.inner, passes=6, chunk=1).attribute(x, 1)
    torch.testing.assert_close(found.values, expected.values)


def test_each_image_of_a_batch_keeps_its_own_part_of_a_function() -> None:
    model = Packed(lambda scores: (scores, torch.ones(2, 5)))
    x = torch.randn(2, *SHAPE[1:], generator=torch.Generator().manual_seed(4))
    method = saliency.RISE(model, passes=12, chunk=2)
    found = method.attribute(x, lambda output: (output[0] * output[1])[[0, 1], [3, 1]])
    torch.testing.assert_close(found.values, saliency.RISE(model.inner, passes=12, chunk=2).attribute(x, [3, 1]).values)


def test_an_output_that_does_not_divide_runs_one_by_one_and_says_so() -> None:
    model = Packed(lambda scores: {"scores": scores, "similarities": scores @ scores.T})
    found = saliency.RISE(model, passes=12, chunk=4).attribute(one_image(), lambda output: output["scores"][:, 1])
    expected = saliency.RISE(model.inner, passes=12, chunk=1).attribute(one_image(), 1)
    assert torch.equal(found.values, expected.values)
    assert "does not show which part of it belongs to which image" in found.run_stats[0].note


def test_an_output_that_does_not_divide_is_an_error_for_a_batch() -> None:
    model = Packed(lambda scores: {"scores": scores, "similarities": scores @ scores.T})
    with pytest.raises(TargetError, match=r"\(1, 1\).* explain one image at a time"):
        saliency.RISE(model, passes=4).attribute(one_image().repeat(2, 1, 1, 1), lambda output: output["scores"][:, 1])


def test_a_class_needs_no_division_of_the_output() -> None:
    model = Packed(lambda scores: {"logits": scores, "similarities": scores @ scores.T})
    found = saliency.RISE(model, passes=12, chunk=4).attribute(one_image(), 1)
    assert found.run_stats[0].note == ""
    torch.testing.assert_close(found.values, saliency.RISE(model.inner, passes=12).attribute(one_image(), 1).values)


# Images that affect each other.


def batch_coupled() -> nn.Sequential:
    torch.manual_seed(2)
    norm = nn.BatchNorm2d(6, track_running_stats=False)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4)
    ).eval()


@pytest.mark.parametrize(
    "name", ["rise", "occlusion", "integrated_gradients", "smooth_grad", "score_cam", "recipro_cam", "ablation_cam"]
)
@pytest.mark.parametrize("chunk", [4, "auto"])
def test_the_chunk_does_not_show_on_a_model_whose_images_affect_each_other(name: str, chunk: Any) -> None:
    model, options = batch_coupled(), dict(named[name].preview_options)
    found = named[name](model, **{**options, "chunk": chunk}).attribute(one_image(), 1)
    expected = named[name](model, **{**options, "chunk": 1}).attribute(one_image(), 1)
    assert torch.equal(found.values, expected.values)
    if chunk == 4:  # "auto" begins with single passes, and may need no more
        assert "the images of a batch affect each other" in found.run_stats[0].note


@pytest.mark.parametrize("name", ["vanilla_gradient", "grad_cam", "rise"])
def test_a_batch_of_images_that_affect_each_other_is_warned_of(name: str) -> None:
    method = named[name](batch_coupled(), **named[name].preview_options)
    with pytest.warns(SaliencyWarning, match="explain them one at a time"):
        method.attribute(one_image().repeat(2, 1, 1, 1), 1)


def test_a_norm_that_is_swapped_is_seen_in_the_next_call() -> None:
    model = batch_coupled()
    assert cached_serial_reason(model, one_image())
    model[1] = nn.BatchNorm2d(6).eval()
    assert not cached_serial_reason(model, one_image())


def test_a_black_image_does_not_hide_that_images_affect_each_other() -> None:
    model = batch_coupled()
    with pytest.warns(saliency.errors.SaliencyWarning, match="the rise map for class 1 is 0 everywhere"):
        saliency.RISE(model, passes=8, chunk=4).attribute(torch.zeros(SHAPE), 1)
    found = saliency.RISE(model, passes=8, chunk=4).attribute(one_image(), 1)
    assert torch.equal(found.values, saliency.RISE(model, passes=8, chunk=1).attribute(one_image(), 1).values)


def test_an_output_that_grows_between_two_calls_is_divided_anew() -> None:
    model = Packed(lambda scores: {"scores": scores})
    method = saliency.RISE(model, passes=8, chunk=4)
    before = method.attribute(one_image(), lambda output: output["scores"][:, 1])
    model.pack = lambda scores: {"hidden": torch.ones(2, 5), "scores": scores}
    after = method.attribute(one_image(), lambda output: output["scores"][:, 1])
    assert torch.equal(after.values, before.values)


def test_a_model_of_single_images_runs_one_by_one() -> None:
    model = Packed(lambda scores: scores.reshape(1, 5))
    found = saliency.RISE(model, passes=8).attribute(one_image(), 1)
    assert "does not run a batch of two images" in found.run_stats[0].note
    torch.testing.assert_close(found.values, saliency.RISE(model.inner, passes=8).attribute(one_image(), 1).values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_not_taken_for_images_that_affect_each_other(dtype: torch.dtype) -> None:
    model, x = tiny_model().to(dtype), one_image().to(dtype)
    model.register_forward_hook(lambda module, inputs, output: output.float())
    assert output_rows(model, x).serial_reason == ""


# Threads of the model's own.


class InAThread(nn.Module):
    """A model that runs its network in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(self.inner(x)))
        thread.start()
        thread.join()
        return found[0]


@pytest.mark.parametrize("name", ["rise", "occlusion", "kernel_shap", "feature_ablation", "sobol"])
def test_a_model_with_threads_of_its_own_is_explained_by_forwards(name: str) -> None:
    model, options = InAThread(), named[name].preview_options
    found = named[name](model, **options, chunk=2).attribute(one_image(), 1)
    expected = named[name](model.inner, **options, chunk=2).attribute(one_image(), 1)
    torch.testing.assert_close(found.values, expected.values)


def test_a_lack_of_memory_for_two_images_is_not_remembered() -> None:
    full = True

    def crammed(scores: Tensor) -> Tensor:
        if full and len(scores) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return scores

    model = Packed(crammed)
    assert "out of memory" in cached_serial_reason(model, one_image())
    full = False
    assert cached_serial_reason(model, one_image()) == ""


@pytest.mark.parametrize("end", [nn.Sigmoid(), nn.Softmax(1), nn.Identity()])
def test_a_map_that_is_lost_to_saturation_says_how_to_get_it(end: nn.Module) -> None:
    torch.manual_seed(0)
    last = nn.Linear(4 * 36, 3)
    logits = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), last)
    last.bias.data[1] += 40
    model, x = nn.Sequential(logits, end), torch.randn(2, 3, 8, 8)
    method, is_logit = saliency.VanillaGradient(model), isinstance(end, nn.Identity)
    with pytest.warns(
        saliency.errors.SaliencyWarning, match=r"vanishes near 0 and 1; .* saliency\.neuron\(NAME, CLASS\)"
    ):
        explanation = method.attribute(x, saliency.probability(1) if is_logit else 1)
    assert all("saliency.neuron" in note for note in explanation.notes)
    cured = method.attribute(x, saliency.neuron("0.3", 1))
    torch.testing.assert_close(cured.values, saliency.VanillaGradient(logits).attribute(x, 1).values)


def test_a_map_of_zeros_of_an_unsure_model_is_not_said_to_be_saturated() -> None:
    last = nn.Linear(2 * 36, 3)
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), last, nn.Sigmoid())
    nn.init.zeros_(last.weight)
    with pytest.warns(saliency.errors.SaliencyWarning, match="0 everywhere$"):
        saliency.VanillaGradient(model).attribute(torch.randn(1, 3, 8, 8), 1)
