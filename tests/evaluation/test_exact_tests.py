"""Exact tests: their level for methods that must fail, ties, early stopping, and permuted networks that work."""

from __future__ import annotations

import warnings
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import saliency
from saliency import Attribution, InputXGradient, VanillaGradient
from saliency.attribution.explanation import BatchAttribution
from saliency.attribution.questions import Questions
from saliency.errors import MethodError, SaliencyWarning
from saliency.evaluation.comparison import combined_p
from saliency.evaluation.metrics import method_metrics
from saliency.evaluation.metrics.base import SharedResults, Subject, full_size
from saliency.evaluation.metrics.method_metrics import randomise, untrained, untrained_map
from saliency.metrics import ClassTest, Deletion, WeightsTest, measure
from saliency.testing import images, tiny_model
from tests.evaluation.colours import ColourClasses, coloured

LEVELS = (0.05, 0.1, 0.15, 0.25, 0.5)


class Noise(Attribution):
    """New noise for every image of every call."""

    source = torch.Generator().manual_seed(0)

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        return BatchAttribution(torch.rand(x.shape, generator=self.source), target(self.model(x)))


@pytest.mark.parametrize("stop", [None, 3])
def test_a_rank_by_chance_has_an_exact_level_also_if_the_draws_stop_early(
    stop: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    test, subject = WeightsTest(stop=stop), Subject(VanillaGradient(tiny_model()).attribute(images(1), 1))
    drawn = torch.rand(4000, 20, generator=torch.Generator().manual_seed(0)).tolist()
    p = []
    for own, *others in drawn:
        monkeypatch.setattr(WeightsTest, "scores", lambda self, subject, own=own, others=others: (own, others, 0))
        p.append(test.test(subject)[2])
    for level in LEVELS:
        expected = level if stop is None or level < 0.16 else max(3 / n for n in range(3, 21) if 3 / n <= level)
        assert np.mean(np.array(p) <= level + 1e-9) == pytest.approx(expected, abs=3 * (level / 4000) ** 0.5)


def test_noise_depends_neither_on_the_class_nor_on_the_weights() -> None:
    method, x = Noise(ColourClasses()), coloured(*[0] * 60)
    explanation = method.attribute(x, [0] * 60)
    context: dict[str, Any] = {"method": method, "inputs": x, "others": coloured(1, 2, 3)}
    for result in measure([ClassTest(), WeightsTest(draws=4)], explanation, **context):
        assert result.p is not None
        assert float((result.p <= 0.21).double().mean()) == pytest.approx(0.2, abs=0.16)
        assert result.controls == {}


def test_ties_count_against_the_map() -> None:
    test, explanation = WeightsTest(), VanillaGradient(tiny_model()).attribute(images(1), 1)
    for others, worse in (([0.5] * 19, 0), ([0.4] * 18 + [0.5 - 1e-9], 18)):
        subject = Subject(explanation)
        subject.once(test, lambda others=others: (0.5, others, 0))
        value, _, p = test.test(subject)
        assert value == pytest.approx(worse / 19)
        assert p == pytest.approx((20 - worse) / 20)


@pytest.mark.parametrize("usable", [12, 5])
def test_networks_without_a_map_are_replaced_by_others_or_tied(usable: int, monkeypatch: pytest.MonkeyPatch) -> None:
    method = InputXGradient(ColourClasses())
    subject = Subject(method.attribute(coloured(0), 0), method=method, inputs=coloured(0), controls=False)
    no_map = torch.zeros(1, 16, 16)
    found = method_metrics.untrained_map
    monkeypatch.setattr(
        method_metrics, "untrained_map", lambda s, draw: found(s, draw) if draw % 2 and draw < 2 * usable else no_map
    )
    test = WeightsTest(draws=9)
    own, others, missing = test.scores(subject)
    assert len(others) == 9
    assert missing == (9 if usable == 12 else 27 - usable)
    assert others.count(own) == max(9 - usable, 0)
    assert test.test(subject)[2] == pytest.approx((1 + max(9 - usable, 0)) / 10)


def test_after_the_time_limit_no_further_network_is_drawn_if_the_maps_are_constant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, drawn = InputXGradient(ColourClasses()), list[int]()

    def constant(subject: Subject, draw: int) -> Tensor:
        drawn.append(draw)
        return torch.zeros(1, 16, 16)

    monkeypatch.setattr(method_metrics, "untrained_map", constant)
    test = WeightsTest(draws=9, seconds=1e-6)
    (result,) = measure([test], method.attribute(coloured(0), 0), method=method, inputs=coloured(0))
    assert drawn == [0]
    assert result.p is not None
    assert (result.values.item(), result.p.item()) == (0, 1)


def test_the_p_value_of_a_mosaic_counts_the_assignments_that_are_at_least_as_good() -> None:
    method = InputXGradient(ColourClasses())
    x = coloured(0)
    x[:, 1, :8] = 0.1  # some of class 1 lies on the first image
    (result,) = measure("class", method.attribute(x, 0), method=method, inputs=x, others=coloured(1, 2, 3))
    assert result.p is not None
    assert float(result.p) == pytest.approx(1 / 24)
    assert 0.5 < float(result.values) < 1
    assert result.error is not None
    assert float(result.error) > 0
    assert len(list(permutations(range(4)))) == 24


def test_other_images_of_the_class_are_left_out() -> None:
    method, others = InputXGradient(ColourClasses()), coloured(0, 1, 1, 2, 3)
    context: dict[str, Any] = {"method": method, "inputs": coloured(0)}
    explanation = method.attribute(coloured(0), 0)
    assert measure("class", explanation, others=others, **context)[0].values == pytest.approx(1)
    with pytest.raises(MethodError, match=r"the model finds 2: pass others=\[...\]"):
        measure("class", explanation, others=others[:4], **context)


class MeanColour(nn.Module):
    """Scores of red, green, blue and white, for images of any size."""

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat([2 * torch.eye(3) - 1, torch.full((1, 3), 0.5)])
        return x.mean((2, 3)) @ weight.T


def plain(*labels: int, size: tuple[int, int]) -> Tensor:
    """Images (N, 3, H, W) of one colour each, of `MeanColour`."""
    return torch.cat([torch.eye(3), torch.ones(1, 3)])[list(labels), :, None, None].expand(-1, -1, *size)


def test_other_images_may_differ_in_size_from_the_image_and_from_each_other() -> None:
    method, x = InputXGradient(MeanColour()), plain(0, size=(10, 12))
    others = [plain(1, 2, size=(20, 8)), plain(3, size=(6, 5))[0]]
    (result,) = measure("class", method.attribute(x, 0), method=method, inputs=x, others=others)
    assert result.values == pytest.approx((1 + 1 + 1 + 0.5) / 4)


@pytest.mark.parametrize(("size", "dtype"), [(15, torch.float32), (16, torch.bfloat16)])
def test_mosaics_have_the_size_and_precision_of_the_image(size: int, dtype: torch.dtype) -> None:
    x, *others = (coloured(label)[..., :size, :size].to(dtype) for label in range(4))
    model = ColourClasses()
    model.weight = nn.Parameter(model.weight[..., :size, :size].to(dtype))  # refuses images of other sizes
    method = InputXGradient(model)
    (result,) = measure("class", method.attribute(x, 0), method=method, inputs=x, others=torch.cat(others))
    assert result.values == pytest.approx(1)


def test_the_image_the_mosaic_and_each_map_run_no_more_than_once() -> None:
    model, rows = ColourClasses(), list[int]()
    model.register_forward_pre_hook(lambda model, args: rows.append(len(args[0])))  # the permuted copies have it too
    method, x = InputXGradient(model), coloured(0)
    explanation = method.attribute(x, 0)
    others, maps, steps = 3, 1 + 4, 4
    expected = {"class": others + 1, "weights": 2 + maps * steps + 4}  # 2: the image, and the image blurred
    context: dict[str, Any] = {"method": method, "inputs": x, "others": coloured(1, 2, 3)}
    WeightsTest(draws=1).measure(explanation, **context)  # checks the model, once
    for test in (ClassTest(), WeightsTest(draws=4)):
        rows.clear()
        test.measure(explanation, **context)
        assert sum(rows) == expected[test.name]


def test_photos_of_the_package_take_the_place_of_others_for_the_classes_of_imagenet() -> None:
    model = saliency.load("efficientnet_lite0")
    method = saliency.GradCAM(model)
    explanation = method.attribute("assets/coffee.jpg")
    (result,) = measure("class", explanation, method=method)
    assert result.p is not None
    assert float(result.p) == pytest.approx(1 / 24)
    assert float(result.values) > 0.5


def test_the_maps_of_words_are_compared_by_the_words_that_they_change() -> None:
    model, processor = saliency.load("shapes_caption"), saliency.testbed.CaptionProcessor()
    scenes = saliency.testbed.draw_scenes(1, seed=1_000_000, task="two_objects")
    answer = saliency.generate(model, processor, scenes.images[0], "caption")
    card = saliency.trust(InputXGradient(model), answer, saliency.words("ring"), seconds=1e-6)
    assert card["class"].is_clear
    assert card["class"].size > 0.5


class Normalised(nn.Module):
    """A deep network whose permuted activations vanish or explode without new statistics of its batch norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [(nn.Conv2d(3 if n == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for n in range(8)]
        self.layers = nn.Sequential(*[layer for block in blocks for layer in block])
        self.head = nn.Linear(8, 3)
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm2d) and layer.running_var is not None:
                layer.running_var.copy_(torch.logspace(-4, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(x).mean((2, 3)))
        return y


def test_permuted_networks_keep_their_values_and_normalise_activations() -> None:
    method = VanillaGradient(Normalised().eval())
    explanation = method.attribute(images(1), 1)
    subject = Subject(explanation, method=method, inputs=images(1))
    permuted = untrained(subject, 0).model
    assert isinstance(permuted, Normalised)
    for name, weight in method.model.named_parameters():
        other = permuted.get_parameter(name)
        assert torch.equal(weight.flatten().sort().values, other.flatten().sort().values)
    last = permuted.layers[-2]
    assert isinstance(last, nn.BatchNorm2d)
    x = permuted.layers[:-2](images(1))
    assert last.running_mean is not None
    assert torch.allclose(last.running_mean, x.mean((0, 2, 3)), atol=1e-5)
    assert not torch.equal(untrained_map(subject, 0), full_size(explanation))
    assert torch.equal(untrained_map(subject, 0), untrained_map(subject, 0))


def test_methods_on_one_image_share_the_permuted_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shared, calls = tiny_model(), SharedResults(), []

    def spy(*arguments: Any) -> None:
        calls.append(1)
        randomise(*arguments)

    monkeypatch.setattr(method_metrics, "randomise", spy)
    maps = []
    for cls in (VanillaGradient, InputXGradient):
        method = cls(model)
        subject = Subject(method.attribute(images(1), 1), method=method, inputs=images(1), shared=shared)
        maps += [untrained_map(subject, draw) for draw in range(2)]
    assert len(calls) == 2
    alone = Subject(method.attribute(images(1), 1), method=method, inputs=images(1))
    assert torch.equal(untrained_map(alone, 1), maps[3])


def test_the_p_value_of_all_images_is_that_of_a_sum_of_uniform_numbers() -> None:
    for p in (0.05, 1 / 24, 0.5, 1.0):
        assert combined_p(np.array([p])) == pytest.approx(p)
    assert combined_p(np.array([0.05, 0.05])) == pytest.approx(0.05**2 * 2, rel=0.4)  # conservative on a grid
    assert combined_p(np.full(16, 0.05)) < 1e-9
    draws = np.random.default_rng(0).integers(1, 21, (3000, 5)) / 20
    rates = np.array([combined_p(row) for row in draws]) <= 0.05
    assert 0.03 < rates.mean() < 0.055


def test_a_comparison_combines_the_ranks_of_all_images() -> None:
    model, x = ColourClasses(), coloured(0, 0, 0)
    methods = [InputXGradient(model), Noise(model)]
    table = saliency.compare(methods, x, [0, 0, 0], WeightsTest(), seed=0)
    right, noise = table
    assert (right.mean, right.metric, right.images) == (1, "weights", 3)
    assert right.p == pytest.approx(combined_p(np.full(3, 0.05)))
    assert noise.p is not None
    assert noise.p > 0.05


def test_the_other_images_of_a_comparison_are_those_of_other_classes() -> None:
    table = saliency.compare([InputXGradient(ColourClasses())], coloured(0, 1, 2, 3), None, "class")
    assert table[0].mean == pytest.approx(1)
    assert table[0].p == pytest.approx(combined_p(np.full(4, 1 / 24)))


def test_the_images_of_a_comparison_may_be_tensors_of_different_sizes_or_photos_in_one_tensor() -> None:
    method = InputXGradient(MeanColour(), preprocess=saliency.Preprocess(mean=(0, 0, 0), std=(1, 1, 1)))
    tensors = [plain(label, size=(8, 8 + 2 * label))[0] for label in range(4)]
    photos = (255 * plain(0, 1, 2, 3, size=(8, 8))).to(torch.uint8)
    for given in (tensors, photos):
        rows = saliency.compare([method], given, None, ["class", Deletion(steps=2)], controls=False)
        assert [(row.metric, row.images) for row in rows] == [("class", 4), ("deletion", 4)]
        assert rows[0].mean == pytest.approx((1 + 1 + 1 + 0.5) / 4)


def test_maps_of_untrained_networks_do_not_warn_and_leave_the_filters_of_the_process() -> None:
    class Dead(nn.Module):  # a map of zeros, of which `attribute` warns
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return x.mean((2, 3)) * self.weight

    method, x = VanillaGradient(Dead()), torch.rand(1, 3, 8, 8)
    with pytest.warns(SaliencyWarning, match="is 0 everywhere"):
        explanation = method.attribute(x, 0)
    before = [*warnings.filters]
    WeightsTest(draws=3).measure(explanation, method=method, inputs=x)  # a warning would be an error
    assert warnings.filters == before
