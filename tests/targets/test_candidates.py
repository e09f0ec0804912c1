"""The boxes and scores of every family of detectors, from outputs of its format with known contents."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from saliency import Candidates
from saliency.errors import TargetError
from saliency.io.geometry import Geometry
from saliency.targets.candidates import ABSENT, Detections, candidates, iou

HEIGHT, WIDTH = 64, 96
PLACE = [Geometry.of(None, (HEIGHT, WIDTH))]
BOX = torch.tensor([24.0, 16, 56, 40])
LOGITS = torch.tensor([[-3.0, 2, -1], [-4, -5, -2]])  # the first candidate has the box
OTHER = torch.tensor([60.0, 8, 80, 30])
BOXES = torch.stack([BOX, OTHER])


def centred(boxes: Tensor) -> Tensor:
    return torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], 1)


def unit(boxes: Tensor) -> Tensor:
    return centred(boxes) / torch.tensor([WIDTH, HEIGHT, WIDTH, HEIGHT])


def with_no_object(logits: Tensor) -> Tensor:
    return torch.cat([logits + 0.7, torch.full((len(logits), 1), 0.7)], 1)


def levels(bins: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Feature maps at strides 8 and 16, distances (1, 4 * bins, n) and scores (1, 3, n) of a grid with the two boxes.

    The boxes lie in the cells (3, 4) of stride 8 and (1, 4) of stride 16, 0.01 in each distribution elsewhere.
    """
    feats = [torch.zeros(1, 5, HEIGHT // stride, WIDTH // stride) for stride in (8, 16)]
    count = sum(feat[0, 0].numel() for feat in feats)
    distances, scores = torch.zeros(1, 4, bins, count), torch.full((1, 3, count), -9.0)
    for row, (at, stride, x, y) in enumerate([(3 * 12 + 4, 8, 4.5, 3.5), (96 + 1 * 6 + 4, 16, 4.5, 1.5)]):
        left, top, right, bottom = (BOXES[row] / stride).tolist()
        for side, value in enumerate((x - left, y - top, right - x, bottom - y)):
            if bins == 1:
                distances[0, side, 0, at] = value
            else:  # a distribution over two neighbouring bins
                low = int(value)
                distances[0, side, :, at] = -40
                distances[0, side, low : low + 2, at] = torch.tensor([1 - value + low, value - low]).clamp(1e-12).log()
        scores[0, :, at] = LOGITS[row]
    return feats, distances.flatten(1, 2), scores


def decoded(scores: Tensor) -> Tensor:
    """An output (1, 4 + 3, n) in which all boxes but the two are a small one."""
    boxes = torch.full((1, 4, scores.shape[2]), 2.0)
    for row, at in enumerate((3 * 12 + 4, 96 + 1 * 6 + 4)):
        boxes[0, :, at] = centred(BOXES)[row]
    return torch.cat([boxes, scores.sigmoid()], 1)


def ultralytics(bins: int = 16, *, nested: bool = False) -> Any:
    feats, distances, scores = levels(bins)
    y = decoded(scores)
    return ((y, torch.zeros(1, 32, 8, 8)) if nested else y), {"boxes": distances, "scores": scores, "feats": feats}


def ultralytics_before(bins: int = 16) -> Any:
    feats, distances, scores = levels(bins)
    counts = [feat[0, 0].numel() for feat in feats]
    parts = zip(torch.split(torch.cat([distances, scores], 1), counts, 2), feats, strict=True)
    return decoded(scores), [part.view(*part.shape[:2], *feat.shape[2:]) for part, feat in parts]


def end_to_end() -> Any:
    _, raw = ultralytics(1)
    top = torch.zeros(1, 3, 6)
    return top, {"one2many": {name: torch.zeros_like(raw["scores"]) for name in ("boxes", "scores")}, "one2one": raw}


def end_to_end_before() -> Any:
    maps = ultralytics_before()[1]
    return torch.zeros(1, 3, 6), {"one2many": [torch.zeros_like(level) for level in maps], "one2one": maps}


def exported_top() -> Tensor:
    best, labels = LOGITS.sigmoid().max(1)
    return torch.cat([BOXES, best[:, None], labels[:, None].float()], 1)[None]


OBJECTNESS = torch.tensor([1.5, -2.0])


def columns(with_levels: bool) -> Any:
    logits = torch.cat([OBJECTNESS[:, None], LOGITS], 1)
    y = torch.cat([centred(BOXES), logits.sigmoid()], 1).repeat(1, 6, 1)
    maps = torch.cat([torch.zeros(2, 4), logits], 1).repeat(6, 1).view(1, 3, 2, 2, 8)
    return (y, [maps]) if with_levels else y


def torchvision() -> Any:
    best, labels = LOGITS.sigmoid().max(1)
    return [{"boxes": BOXES, "scores": best, "labels": labels}]


def rt_detr(columns: int) -> Any:
    """The last part of the output, for the loss, also holds the queries of the encoder."""
    boxes, scores = unit(BOXES)[None], LOGITS[None]
    return torch.zeros(1, 2, columns), (boxes[None], scores[None], torch.zeros(1, 2, 4), torch.zeros(1, 2, 3), None)


class DetrObjectDetectionOutput(SimpleNamespace):
    """Named as the output of transformers, whose last class is "no object"."""


class RTDetrObjectDetectionOutput(SimpleNamespace):
    """Named as an output of transformers without such a class."""


SIGMOID: dict[str, Any] = {
    "Ultralytics": ultralytics(),
    "Ultralytics with one bin": ultralytics(1),
    "Ultralytics with masks": ultralytics(nested=True),
    "Ultralytics before 8.4": ultralytics_before(),
    "Ultralytics exported": decoded(levels(16)[2]),
    "Ultralytics end to end": end_to_end(),
    "Ultralytics end to end before 8.4": end_to_end_before(),
    "Ultralytics RT-DETR": rt_detr(6),
    "Ultralytics RT-DETR before 8.4": rt_detr(4 + 3),
    "RT-DETR": RTDetrObjectDetectionOutput(logits=LOGITS[None], pred_boxes=unit(BOXES)[None]),
    "OWLv2": {"logits": LOGITS[None], "pred_boxes": unit(BOXES)[None], "objectness_logits": OBJECTNESS[None]},
    "YOLOv5": columns(True),
    "YOLOX": columns(False),
}


def the_two(row: Candidates) -> list[int]:
    """The candidates with the two boxes."""
    return [int((row.boxes - box).abs().amax(1).argmin()) for box in BOXES]


@pytest.mark.parametrize("name", SIGMOID)
def test_boxes_and_logits_of_a_sigmoid_are_read(name: str) -> None:
    (row,) = candidates(SIGMOID[name], PLACE, 3)
    both = the_two(row)
    torch.testing.assert_close(row.boxes[both], BOXES, rtol=0, atol=1e-3)
    torch.testing.assert_close(row.scores[both], LOGITS, rtol=1e-3, atol=1e-3)
    assert (row.objectness is not None) == (name in ("OWLv2", "YOLOv5", "YOLOX"))
    if row.objectness is not None:
        torch.testing.assert_close(row.objectness[both], OBJECTNESS, rtol=1e-4, atol=1e-4)
    factor = OBJECTNESS[:, None].sigmoid() if name.startswith("YOLO") else 1
    torch.testing.assert_close(row.probabilities[both], LOGITS.sigmoid() * factor, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("logit", [17.5, 40.0])
@pytest.mark.parametrize("build", [ultralytics, ultralytics_before, lambda: columns(True)])
def test_logits_do_not_saturate_if_the_output_holds_them(build: Any, logit: float, monkeypatch: Any) -> None:
    monkeypatch.setitem(globals(), "LOGITS", torch.tensor([[-3.0, logit, -1], [-4, -5, -2]]))
    (row,) = candidates(build(), PLACE, 3)
    assert float(row.scores.max()) == pytest.approx(logit)


@pytest.mark.parametrize(
    ("output", "classes", "link"),
    [
        (DetrObjectDetectionOutput(logits=with_no_object(LOGITS)[None], pred_boxes=unit(BOXES)[None]), None, None),
        ({"pred_logits": with_no_object(LOGITS)[None], "pred_boxes": unit(BOXES)[None]}, 3, None),
        ({"pred_logits": with_no_object(LOGITS)[None], "pred_boxes": unit(BOXES)[None]}, None, "softmax"),
    ],
)
def test_logits_of_a_softmax_are_relative_to_no_object(output: Any, classes: Any, link: Any) -> None:
    (row,) = candidates(output, PLACE, classes, link)
    torch.testing.assert_close(row.boxes, BOXES)
    torch.testing.assert_close(row.scores, LOGITS)
    torch.testing.assert_close(row.probabilities, with_no_object(LOGITS).softmax(1)[:, :-1])


def test_a_detr_that_does_not_say_what_its_last_class_is_asks_for_it() -> None:
    output = {"pred_logits": LOGITS[None], "pred_boxes": unit(BOXES)[None]}
    with pytest.raises(TargetError, match=r"the last of 3 logits.*link="):
        candidates(output, PLACE)
    assert candidates(output, PLACE, 3)[0].link == candidates(output, PLACE, link="sigmoid")[0].link == "sigmoid"
    assert candidates(output, PLACE, 2)[0].link == "softmax"


@pytest.mark.parametrize("output", [torchvision(), exported_top()], ids=["torchvision", "end to end, exported"])
def test_after_suppression_each_detection_has_one_class(output: Any) -> None:
    (row,) = candidates(output, PLACE, 3)
    expected = torch.full((2, 3), ABSENT)
    expected[0, 1], expected[1, 2] = LOGITS[0, 1], LOGITS[1, 2]
    torch.testing.assert_close(row.boxes, BOXES)
    torch.testing.assert_close(row.scores, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", [0, 3])
def test_phrases_of_grounding_dino_are_classes(padding: int) -> None:
    logits = torch.full((1, 2, 256), -torch.inf)
    logits[0, :, :7] = torch.arange(14.0).view(2, 7) - 20
    output = {
        "logits": logits,
        "pred_boxes": unit(BOXES)[None],
        "input_ids": torch.tensor([[101, 7, 8, 1012, 9, 1012, 102, *[0] * padding]]),
    }
    (row,) = candidates(RTDetrObjectDetectionOutput(**output), PLACE)
    torch.testing.assert_close(row.scores, torch.tensor([[-18.0, -16], [-11, -9]]))  # tokens 1, 2 and 4
    (row,) = candidates(RTDetrObjectDetectionOutput(logits=logits, pred_boxes=unit(BOXES)[None]), PLACE)
    assert torch.isfinite(row.scores).all()


def test_a_function_reads_any_other_detector() -> None:
    def read(output: Tensor) -> list[Candidates]:
        return [Candidates(image[:, :4], image[:, 4:]) for image in output]

    output = torch.cat([BOXES, LOGITS], 1)[None].repeat(2, 1, 1)
    rows = candidates(output, PLACE * 2, read=read)
    torch.testing.assert_close(rows[1].boxes, BOXES)
    with pytest.raises(TargetError, match=r"expected a list of saliency\.Candidates"):
        candidates(output, PLACE, read=lambda output: output)


def test_candidates_of_images_with_different_counts_and_classes_are_compared_as_each_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for count, classes in ((3, 2), (5, 4), (0, 1)):
        boxes = torch.rand(count, 4, generator=generator).cumsum(1)
        rows.append(Candidates(boxes, torch.randn(count, classes, generator=generator), link="label"))
    found, known, others = Detections.of(rows), torch.rand(2, 4, generator=generator), rows[1].boxes[:2] + 0.1
    similarity = found.similarity(others, known)
    for image, row in enumerate(rows):
        count, classes = row.scores.shape
        torch.testing.assert_close(found.probabilities[image, :count, :classes], row.probabilities)
        assert not found.probabilities[image, count:].any()
        assert not found.probabilities[image, :, classes:].any()
        torch.testing.assert_close(similarity[image], Detections.of([row]).similarity(others, known)[0])


@pytest.mark.parametrize(
    ("output", "shapes"),
    [
        (torch.zeros(2, 5), r"a tensor \(2, 5\)"),
        ({"heat": torch.zeros(1, 2, 8, 8)}, r"heat: a tensor \(1, 2, 8, 8\)"),
        ((torch.zeros(1, 3), [torch.zeros(4)]), r"a tensor \(1, 3\), a list of 1 \(a tensor \(4,\)\)"),
        ([], "a list of 0"),
    ],
)
def test_an_output_that_is_not_read_is_described_with_the_function_to_write(output: Any, shapes: str) -> None:
    with pytest.raises(TargetError, match=rf"no adapter reads boxes.*{shapes}.*read=.*boxes \(n, 4\)"):
        candidates(output, PLACE)


def test_boxes_with_an_angle_are_refused() -> None:
    y, raw = ultralytics()
    angle = torch.zeros(1, 1, y.shape[2])
    before = torch.cat([y, angle], 1), (ultralytics_before()[1], angle)
    for output in ((y, raw | {"angle": angle}), before):
        with pytest.raises(TargetError, match="angle"):
            candidates(output, PLACE)


def test_duplicates_are_suppressed_within_a_class_only() -> None:
    boxes = torch.stack([BOX, BOX + 1, BOX + 1, OTHER, torch.tensor([5.0, 5, 5, 9])])
    scores = torch.tensor([[1.0, -9], [2, -9], [-9, 3], [-9, 0], [4, 4]])
    row = Candidates(boxes, scores)
    assert row.detections() == [2, 1, 3]
    assert row.detections(label=0) == [1]
    assert row.detections(0.9) == [2]


def pose(form: str, joints: int = 4, dims: int = 3) -> Any:
    """The output of a pose model of Ultralytics, and the logits (joints,) of the joints of the first box."""
    feats, distances, scores = levels(16)
    raw = torch.linspace(-2, 2, joints * dims)[None, :, None].repeat(1, 1, scores.shape[2])
    decoded_joints = raw * 8 + 40
    if dims == 3:
        decoded_joints[:, 2::3] = raw[:, 2::3].sigmoid()
    y = torch.cat([decoded(scores), decoded_joints], 1)
    if form == "before 8.4":
        return (y, (ultralytics_before()[1], raw)), raw[0, 2::3, 0]
    parts = {"boxes": distances, "scores": scores, "feats": feats, "kpts": raw}
    if form == "8.4":
        return (y, parts), raw[0, 2::3, 0]
    top = torch.cat([torch.zeros(1, 5, 6), decoded_joints[..., :5].mT], 2)
    return (top, {"one2many": {}, "one2one": parts}), raw[0, 2::3, 0]


@pytest.mark.parametrize("form", ["before 8.4", "8.4", "end to end"])
def test_joints_of_ultralytics_have_the_logits_of_their_visibility(form: str) -> None:
    output, logits = pose(form)
    (row,) = candidates(output, PLACE, 3)
    torch.testing.assert_close(row.boxes[the_two(row)], BOXES, rtol=0, atol=1e-3)
    torch.testing.assert_close(row.scores[the_two(row)], LOGITS, rtol=1e-3, atol=1e-3)
    assert row.keypoints is not None
    torch.testing.assert_close(row.keypoints[the_two(row)[0]], logits)
    (row,) = candidates(pose(form, 6, 2)[0], PLACE, 3)  # x and y only
    assert row.keypoints is None


def test_candidates_keep_their_graph() -> None:
    scores = LOGITS.clone().requires_grad_()
    (row,) = candidates(RTDetrObjectDetectionOutput(logits=scores[None], pred_boxes=unit(BOXES)[None]), PLACE)
    (grad,) = torch.autograd.grad(row.scores[0, 1], scores)
    assert grad.tolist() == [[0, 1, 0], [0, 0, 0]]


def test_the_overlap_of_boxes_is_of_areas_in_any_unit() -> None:
    one, other = torch.tensor([0.0, 0, 2, 2]), torch.tensor([1.0, 0, 3, 2])
    for scale in (1e-2, 1, 100):  # others add a pixel to each edge
        assert float(iou(scale * one, scale * other)) == pytest.approx(1 / 3)


def test_the_similarity_takes_the_cosine_and_not_the_product_of_class_probabilities() -> None:
    row = Candidates(
        BOXES, torch.tensor([[0.4, 0.1], [0.1, 0.4]]).logit(), torch.tensor([0.5, 0.8]).logit(), is_factor=False
    )
    found = Detections.of([row]).similarity(BOXES, torch.tensor([[0.8, 0.2], [0.2, 0.8]]))
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.8]]))  # parallel vectors: the probability of an object


def test_a_box_of_a_class_that_only_variants_have_is_not_similar() -> None:
    own, other = (
        candidates([{"boxes": BOX[None], "scores": torch.tensor([0.9]), "labels": torch.tensor([label])}], PLACE)
        for label in (1, 18)
    )
    known = own[0].probabilities  # (1, 2), because the output has no class above 1
    similarity = Detections.of(other).similarity(BOX[None], known)
    torch.testing.assert_close(similarity, Detections.of(other).similarity(BOX[None], F.pad(known, (0, 17))))
    assert float(similarity) < 0.05


def rows_of(batch: int, count: int, classes: int, *, with_objectness: bool) -> tuple[Tensor, Tensor]:
    """A decoded output, (B, 4 + C, n) or (B, n, 5 + C), and its class logits (B, n, C); the boxes are in pixels."""
    generator = torch.Generator().manual_seed(0)
    boxes = torch.rand(batch, count, 4, generator=generator) * 60 + 2
    logits = torch.randn(batch, count, classes + with_objectness, generator=generator)
    y = torch.cat([boxes, logits.sigmoid()], 2)
    return (y, logits[..., 1:]) if with_objectness else (y.mT, logits)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("with_objectness", [True, False])
@pytest.mark.parametrize(("count", "classes"), [(84, 80), (21, 80), (100, 365), (85, 80), (84, 79), (4, 3), (300, 3)])
def test_values_tell_rows_of_boxes_from_columns(count: int, classes: int, with_objectness: bool, named: bool) -> None:
    y, logits = rows_of(2, count, classes, with_objectness=with_objectness)
    for row, own in zip(candidates(y, [*PLACE, *PLACE], classes if named else None), logits, strict=True):
        torch.testing.assert_close(row.scores, own, rtol=1e-3, atol=1e-4)
        assert (row.objectness is not None) == with_objectness


@pytest.mark.parametrize("y", [torch.full((1, 20, 20), 0.5), torch.full((1, 20, 20), 7.0)], ids=["both", "neither"])
def test_an_output_that_fits_both_orders_or_neither_is_refused(y: Tensor) -> None:
    with pytest.raises(TargetError, match=r"unclear.*\(batch, 4 \+ 16 classes, boxes\).*read="):
        candidates(y, PLACE)


@pytest.mark.parametrize("output", [torchvision(), exported_top()], ids=["torchvision", "end to end, exported"])
def test_a_label_without_a_name_is_refused(output: Any) -> None:
    with pytest.raises(TargetError, match=r"class 2 is outside 0\.\.1, the model's class names"):
        candidates(output, PLACE, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.float64])
def test_boxes_of_any_type_are_those_of_float32(dtype: torch.dtype) -> None:
    boxes = torch.tensor([[0, 0, 320, 320], [16, 8, 24, 40]])
    place = [Geometry((0, 0, 1024, 768), (1024, 768), (480, 640))]  # 1.6 pixels of the image per pixel of the input
    rows = [
        candidates(None, place, read=lambda output: [Candidates(own, LOGITS[:, :1])])[0]  # noqa: B023
        for own in (boxes.float(), boxes.to(dtype))
    ]
    assert torch.equal(rows[0].boxes, torch.tensor([[0, 0, 512, 512], [25.6, 12.8, 38.4, 64]]))
    torch.testing.assert_close(rows[1].boxes, rows[0].boxes, check_dtype=False)
    assert float(iou(rows[1].boxes[0], rows[1].boxes[0])) == 1
    assert rows[1].detections() == rows[0].detections()


@pytest.mark.parametrize("name", ["Ultralytics", "Ultralytics exported", "RT-DETR", "YOLOX"])
def test_boxes_of_half_precision_are_decoded_in_float32(name: str) -> None:
    half = tree_map(lambda part: part.half() if isinstance(part, Tensor) else part, SIGMOID[name])
    exact = tree_map(lambda part: part.float() if isinstance(part, Tensor) else part, half)
    found, expected = (candidates(output, PLACE, 3)[0] for output in (half, exact))
    assert torch.equal(found.boxes, expected.boxes)


def tree_map(function: Any, output: Any) -> Any:
    if isinstance(output, dict):
        return {key: tree_map(function, part) for key, part in output.items()}
    if isinstance(output, tuple | list):
        return type(output)(tree_map(function, part) for part in output)
    if isinstance(output, SimpleNamespace):
        return type(output)(**tree_map(function, vars(output)))
    return function(output)
