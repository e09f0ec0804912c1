"""Metrics and trust cards of boxes, regions and keypoints on drawn scenes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import saliency
from saliency import Attribution, Explanation, GradCAM, VanillaGradient
from saliency.errors import MethodError, TargetError
from saliency.evaluation.metrics.base import Subject
from saliency.evaluation.metrics.method_metrics import RandomLogit
from saliency.evaluation.metrics.road import ROAD
from saliency.metrics import Deletion, Insertion, measure
from saliency.targets.boxes import BoxScore
from saliency.targets.question import Question
from saliency.targets.regions import RegionScore
from saliency.testbed import draw_scenes
from tests import selection

SCENES = draw_scenes(6, seed=1_000_003, task="several")
CORNERS = draw_scenes(6, seed=1_000_003, task="corners")
LAYERS = {"shapes_detector": "backbone.layer2", "shapes_unet": "decoder.2", "shapes_keypoints": "decoder.1"}


@cache
def case(name: str) -> tuple[Attribution, Tensor, list[Any]]:
    """Return Grad-CAM on a bundled network, 6 images as its input, and a target of the first object of each."""
    method = GradCAM(saliency.load(name), LAYERS[name])
    scenes = CORNERS if name == "shapes_keypoints" else SCENES
    boxes = [tuple(box) for box in scenes.boxes[:, 0].tolist()]
    targets: list[Any] = [saliency.box(box=box) for box in boxes]
    if name == "shapes_unet":
        targets = [saliency.region(int(label) + 1, box) for label, box in zip(scenes.labels, boxes, strict=True)]
    if name == "shapes_keypoints":
        targets = [saliency.keypoint("top") for _ in boxes]
    return method, scenes.images / 127.5 - 1, targets


def clear(explanation: Explanation, **context: Any) -> int:
    """Return how many values of the faithfulness metrics of a card are clear."""
    metrics = [Deletion(steps=2, until=0.25), Insertion(steps=2, until=0.25), ROAD(shares=(0.3,))]
    rows = measure(metrics, explanation, controls=("centre", "edges", "random"), **context)
    return sum(int(row.beats_controls.sum()) for row in rows)


@pytest.mark.parametrize("name", [selection.case(name, by_default=name == "shapes_detector") for name in LAYERS])
def test_the_right_map_of_a_place_is_clear_and_the_same_map_shuffled_is_not(name: str) -> None:
    method, x, targets = case(name)
    x, targets = x[:3], targets[:3]
    explanation = method.attribute(x, targets)
    context: dict[str, Any] = {"method": method, "inputs": x, "target": targets}
    order = torch.randperm(explanation.values[0].numel(), generator=torch.Generator().manual_seed(0))
    shuffled = explanation.values.flatten(1)[:, order].view_as(explanation.values)
    right, wrong = clear(explanation, **context), clear(replace(explanation, values=shuffled), **context)
    assert right >= 2
    assert wrong <= 1  # of 9


@pytest.mark.parametrize("name", [selection.case(name, by_default=name == "shapes_detector") for name in LAYERS])
def test_a_card_of_a_place_compares_its_map_with_those_of_other_objects(name: str) -> None:
    method, x, targets = case(name)
    card = saliency.trust(method, x[3], targets[3])
    if name == "shapes_keypoints":
        assert card["class"].verdict.endswith("joints or words, and the image has 2")
    else:
        assert card["class"].is_clear
        assert card["class"].size > 0.7
    assert 0 < (card["weights"].p or 0) <= 1


def test_a_map_that_ignores_the_box_does_not_depend_on_it() -> None:
    _, x, targets = case("shapes_detector")
    method = saliency.EigenCAM(saliency.load("shapes_detector"), LAYERS["shapes_detector"])
    for of in ("class", "box"):
        explanation = method.attribute(x[0], targets[0])
        result = RandomLogit(of=of).measure(explanation, method=method, inputs=x[:1], target=targets[0])
        assert float(result.values) == 0
        assert not result.beats_controls.any()
    row = saliency.trust(method, x[0], targets[0])["class"]
    assert (row.p, row.size) == (1, 0)


def test_the_box_of_the_image_is_kept_where_nothing_is_found() -> None:
    method, x, _ = case("shapes_detector")
    x0, y0, x1, y1 = SCENES.boxes[0, 0].tolist()
    target = saliency.box(point=((x0 + x1) / 2, (y0 + y1) / 2))
    explanation = method.attribute(x[0], target)
    subject = Subject(explanation, method=method, inputs=x[:1], target=target)
    scores = [float(subject.scores_of(image)) for image in (x[:1], x[:1] * 0.5, x[:1] * 0)]
    assert scores[0] == pytest.approx(float(explanation.scores))
    assert scores[2] < -4  # no object at all, and no error
    assert subject.method.attribute(x[:1] * 0, subject.explained_target).target_names == explanation.target_names
    with pytest.raises(TargetError, match="there is no detection at the point"):
        method.attribute(x[:1] * 0, target)


def test_the_predicted_region_of_the_image_is_kept() -> None:
    method, x, _ = case("shapes_unet")
    target = saliency.region(int(SCENES.labels[0]) + 1)
    subject = Subject(method.attribute(x[0], target), method=method, inputs=x[:1], target=target)
    assert torch.isfinite(subject.scores_of(x[:1] * 0)).all()
    with pytest.raises(TargetError, match="assigns no pixel"):
        method.attribute(x[:1] * 0, target)


def test_others_of_a_box_are_its_other_classes_and_the_other_detections() -> None:
    method, x, targets = case("shapes_detector")
    subject = Subject(method.attribute(x, targets), method=method, inputs=x, target=targets)
    for image, (classes, boxes) in enumerate(zip(subject.others(), subject.others("box"), strict=True)):
        own = int(SCENES.labels[image])
        assert [one.score.match.label for one in classes if isinstance(one.score, BoxScore)] == [*{0, 1, 2} - {own}]
        found = torch.tensor([one.score.match.box for one in boxes if isinstance(one.score, BoxScore)])
        truth = SCENES.boxes[image, 1:]
        assert len(found) == 3
        assert float(torch.cdist(found, truth, p=float("inf")).amin(1).max()) < 4


def cells_of(question: object) -> Tensor:
    """The pixels of a question about a region."""
    assert isinstance(question, Question)
    assert isinstance(question.score, RegionScore)
    return question.score.cells


def test_others_of_regions_and_joints_keep_their_pixels_or_find_their_maximum() -> None:
    for name, count in (("shapes_unet", 3), ("shapes_keypoints", 2)):
        method, x, targets = case(name)
        subject = Subject(method.attribute(x[0], targets[0]), method=method, inputs=x[:1], target=targets[0])
        own, others = cells_of((subject.fixed_target or [])[0]), subject.others()[0]
        assert len(others) == count
        for other in others:
            assert torch.equal(cells_of(other), own) == (name == "shapes_unet")


def test_a_single_box_and_a_single_class_have_no_others() -> None:
    class OneBox(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            boxes = x.new_tensor([8.0, 8, 8, 8, 0])[None, :, None].repeat(len(x), 1, 40)
            return boxes + torch.tensor([0.0, 0, 0, 0, 1])[:, None] * x.mean((1, 2, 3)).sigmoid()[:, None, None]

    x, method = torch.rand(1, 3, 16, 16), VanillaGradient(OneBox())
    explanation = method.attribute(x, saliency.box())
    metrics = (
        (RandomLogit(of="class"), "is not a class with others"),
        (RandomLogit(of="box"), "has no other box in the"),
    )
    for metric, problem in metrics:
        with pytest.raises(TargetError, match=problem):
            metric.measure(explanation, method=method, inputs=x, target=saliency.box())


def test_the_explained_box_is_not_taken_as_the_truth() -> None:
    method, x, targets = case("shapes_detector")
    explanation = method.attribute(x[0], targets[0])
    with pytest.raises(MethodError, match="the explained position is not ground truth"):
        measure("energy_pointing_game", explanation, method=method, inputs=x[:1], target=targets[0])
    truth = SCENES.masks[:1, 0]
    assert measure("energy_pointing_game", explanation, target=targets[0], masks=truth)[0].values > 0
