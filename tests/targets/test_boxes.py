"""A box of a detector as the target: which box it is, and its score."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import saliency
from saliency import GradCAM, Preprocess, VanillaGradient
from saliency.errors import TargetError
from saliency.evaluation.metrics.base import Subject
from saliency.io.geometry import Frame, Geometry
from saliency.methods import METHODS
from saliency.targets.candidates import ABSENT, candidates
from saliency.testing.unchanged import Snapshot

NAMES = ["cat", "dog", "cup"]


class GridDetector(nn.Module):
    """One box in each cell of 8 x 8 pixels, in the format of Ultralytics, from the features of the cell."""

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.features = nn.Conv2d(3, 6, 3, padding=1)
        self.head = nn.Conv2d(6, 7, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.6, generator=generator)
            self.head.bias.data[4:] += bias  # type: ignore[union-attr]
        self.categories = NAMES

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        feats = nn.functional.avg_pool2d(self.features(x).relu(), 8)
        out = self.head(feats)
        distances, scores = 1 + out[:, :4].sigmoid(), 3 * out[:, 4:]
        flat = distances.flatten(2), scores.flatten(2)
        y, x0 = torch.meshgrid(*(torch.arange(edge) + 0.5 for edge in feats.shape[2:]), indexing="ij")
        centre = torch.stack([x0, y]).flatten(1) * 8
        low, high = centre - 8 * flat[0][:, :2], centre + 8 * flat[0][:, 2:]
        boxes = torch.cat([(low + high) / 2, high - low], 1)
        return torch.cat([boxes, flat[1].sigmoid()], 1), {"boxes": flat[0], "scores": flat[1], "feats": [feats]}


def detector(bias: float = 0.0) -> nn.Module:
    return GridDetector(bias).eval()


X = torch.randn(2, 3, 48, 64, generator=torch.Generator().manual_seed(0))


def reference(model: nn.Module, x: Tensor, box: Any, label: int, against: int | None = None) -> Tensor:
    """The score by a plain loop over the candidates of one image."""
    y, raw = model(x[None])
    total, norm = torch.tensor(0.0 if against is not None else ABSENT), torch.tensor(1.0)
    for column in range(y.shape[2]):
        cx, cy, w, h = y[0, :4, column].detach().tolist()
        one, other = (cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2), box
        width = max(0, min(one[2], other[2]) - max(one[0], other[0]))
        height = max(0, min(one[3], other[3]) - max(one[1], other[1]))
        areas = sum((b[2] - b[0]) * (b[3] - b[1]) for b in (one, other))
        weight = float(np.expm1(20 * width * height / (areas - width * height)))
        logit = raw["scores"][0, label, column]
        logit = logit if against is None else logit - raw["scores"][0, against, column]
        total, norm = total + weight * logit, norm + weight
    return total / norm


def matches_of(resolved: Any) -> Any:
    """The boxes that a resolved target explains."""
    return [resolved[image].score.match for image in range(len(resolved))]


def found(name: str) -> tuple[float, ...]:
    return tuple(map(float, name.rpartition("(")[2].partition(")")[0].split(", ")))


@pytest.mark.parametrize("against", [None, "dog"])
def test_the_score_is_the_weighted_mean_of_the_logits_near_the_box(against: Any) -> None:
    model, box = detector(), (20.0, 12.0, 44.0, 34.0)
    explanation = VanillaGradient(model).attribute(X, saliency.box(box=box, cls="cup", against=against))
    target = explanation.target_names[0]
    assert target.startswith("cup rather than dog at (" if against else "cup at (")
    assert explanation.contrasts == (against is not None,) * len(X)
    assert ", IoU 0." in target
    method = VanillaGradient(model)
    resolved = method.questions(saliency.box(box=box, cls="cup", against=against), X)
    resolved(model(X))
    for row in range(2):
        x = X[row].clone().requires_grad_()
        score = reference(model, x, matches_of(resolved)[row].box, 2, 1 if against else None)
        torch.testing.assert_close(explanation.scores[row], score.detach(), rtol=1e-4, atol=1e-4)
        (grad,) = torch.autograd.grad(score, x)  # the weights are constant
        torch.testing.assert_close(explanation.values[row], grad, rtol=1e-3, atol=1e-5)


def test_the_mirrored_question_is_about_the_mirrored_box() -> None:
    model = detector()
    questions = VanillaGradient(model).questions(saliency.box(box=(20.0, 12.0, 44.0, 34.0), cls="cup"), X)
    boxes, raw = model(X)
    questions((boxes, raw))
    mirrored = boxes.clone()
    mirrored[:, 0] = X.shape[3] - boxes[:, 0]  # the centres
    question = questions[0]
    assert question.mirrored is not None
    assert torch.allclose(question.mirrored((mirrored, raw)), question.score((boxes, raw)), atol=1e-5)
    assert not torch.allclose(question.mirrored((boxes, raw)), question.score((boxes, raw)), atol=1e-3)


def test_the_score_is_continuous_where_another_candidate_becomes_the_best() -> None:
    box, other = (10.0, 10.0, 30.0, 30.0), (60.0, 10.0, 80.0, 30.0)

    def read(output: Tensor) -> list[saliency.Candidates]:  # a moves away from the box while b comes
        shift = float(output[0, 0])
        boxes = torch.tensor([box, (10 + 8 - shift, 10, 30 + 8 - shift, 30), other])
        boxes[0, 0::2] += shift
        return [saliency.Candidates(boxes, torch.tensor([[2.0], [-1.0], [9.0]]))]

    method = VanillaGradient(nn.Identity())
    resolved = method.questions(saliency.box(box=box, read=read), X[:1])
    scores = [float(resolved(torch.full((1, 1), shift))) for shift in np.linspace(0, 8, 801)]
    steps = np.abs(np.diff(scores))
    assert scores[0] > 1.9
    assert scores[-1] < -0.9
    assert steps.max() < 0.05


def test_the_class_is_compared_before_the_overlap() -> None:
    def read(output: Tensor) -> list[saliency.Candidates]:  # the best overlap has the other class
        boxes = torch.tensor([[10.0, 10, 30, 30], [10, 10, 30, 42]])
        return [saliency.Candidates(boxes, torch.tensor([[4.0, -6], [-6, 3]]) + output.mean())]

    target = saliency.box(box=(10, 10, 30, 30), cls=1, read=read)
    explanation = VanillaGradient(nn.Identity()).attribute(X[:1], target)
    assert explanation.target_names == ("class 1 at (10, 10, 30, 42), IoU 0.62",)
    assert float(explanation.scores) > 2.9


@pytest.mark.parametrize(("of", "own"), [("class", 4), ("x0", 0), ("y1", 3)])
def test_the_place_and_the_class_are_not_mixed(of: Any, own: int) -> None:
    def read(output: Tensor) -> list[saliency.Candidates]:
        return [saliency.Candidates(8 + 16 * output[:, 0, 0, :4], output[:, 0, 0, 4:5])]

    x = torch.zeros(1, 3, 40, 40)
    x[0, 0, 0, 2:5] = 1
    found = VanillaGradient(nn.Identity()).attribute(x, saliency.box(of=of, read=read)).values
    assert found[0, 0, 0, own] > 0
    assert found.count_nonzero() == 1


def test_the_score_of_a_vanished_box_is_the_absent_logit_and_keeps_its_graph() -> None:
    logits = torch.tensor([0.9], requires_grad=True)

    def output(n: int) -> Any:
        return [{"boxes": torch.tensor([[4.0, 4, 20, 20]])[:n], "scores": logits[:n], "labels": torch.ones(n).long()}]

    resolved = VanillaGradient(nn.Identity()).questions(saliency.box(), X[:1])
    assert float(resolved(output(1)).detach()) == pytest.approx(float(torch.logit(logits.detach())), abs=1e-4)
    gone = resolved(output(0))
    assert float(gone.detach()) == pytest.approx(ABSENT)
    assert gone.requires_grad


@pytest.mark.parametrize("name", ["grad_cam", "vanilla_gradient", "lrp"])
def test_boxes_of_one_call_read_the_output_once_and_have_the_maps_of_separate_calls(name: str) -> None:
    model, reads = detector(), []

    def read(output: Any) -> list[saliency.Candidates]:
        reads.append(output)
        return candidates(output, [Geometry.of(None, (48, 64))])

    method = METHODS[name](model, **({"layer": "features"} if name == "grad_cam" else {}))
    boxes = [saliency.box(index=0, read=read, of="y1"), saliency.box(index=1, read=read), saliency.box(read=read)]
    together = method.attribute_classes(X, boxes)
    assert len(reads) == 1
    for own, box in zip(together, boxes, strict=True):
        alone = method.attribute(X, box)
        assert torch.equal(own.values, alone.values)
        assert own.target_names == alone.target_names


def test_a_given_box_is_found_without_suppression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saliency.Candidates, "detections", None)  # which compares up to 1000 candidates with each other
    VanillaGradient(detector()).attribute(X, saliency.box(box=(20.0, 12.0, 44.0, 34.0), cls="cup"))


def test_a_point_an_index_and_a_box_find_the_same_detection() -> None:
    method = VanillaGradient(detector())
    first = method.attribute(X[0], saliency.box())
    box = found(first.target_names[0])
    centre = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
    for target in (saliency.box(index=0), saliency.box(point=centre), saliency.box(box=box)):
        again = method.attribute(X[0], target)
        assert again.target_names[0].startswith(first.target_names[0])
        assert torch.equal(again.values, first.values)
    assert method.attribute(X[0], saliency.box(index=1)).target_names != first.target_names
    best = detector(2)(X[:1])[0][0, 4:].amax(1).tolist()
    for label, probability in zip(NAMES, best, strict=True):
        own = VanillaGradient(detector(2)).attribute(X[0], saliency.box(cls=label))
        assert own.target_names[0].startswith(f"{label} at (")
        assert own.probabilities is not None
        assert float(own.probabilities[0]) == pytest.approx(probability)


@pytest.mark.parametrize("factor", ["objectness", "no object"])
def test_a_given_box_and_an_index_rank_the_boxes_of_a_class_by_the_same_probability(factor: str) -> None:
    def read(output: Tensor) -> list[saliency.Candidates]:  # the second box has the higher logit of class 1
        scores = torch.tensor([[-5.0, 2], [-5, 4]] if factor == "objectness" else [[-3.0, 5], [14, 8]]) + output.mean()
        objectness = torch.tensor([2.0, -7]) if factor == "objectness" else None
        link: Any = "sigmoid" if factor == "objectness" else "softmax"
        return [saliency.Candidates(torch.tensor([[10.0, 10, 30, 30], [9, 9, 29, 29]]), scores, objectness, link)]

    for target in (saliency.box(index=0, cls=1, read=read), saliency.box(box=(9, 9, 29, 29), cls=1, read=read)):
        explanation = VanillaGradient(nn.Identity()).attribute(0 * X[:1], target)
        assert explanation.target_names[0].startswith("class 1 at (10, 10, 30, 30)")


@pytest.mark.parametrize("of", ["x0", "y0", "x1", "y1"])
def test_an_edge_is_in_pixels_of_the_image(of: Any) -> None:
    picture = Image.fromarray((np.random.default_rng(0).random((96, 128, 3)) * 255).astype(np.uint8))
    prepare = Preprocess(resize=(48, 64), fit="stretch")
    explanation = VanillaGradient(detector(), preprocess=prepare).attribute(picture, saliency.box(of=of))
    name = explanation.target_names[0]
    assert name.startswith(f"{of} of ")
    edge = found(name)[["x0", "y0", "x1", "y1"].index(of)]
    assert float(explanation.scores[0]) == pytest.approx(edge, abs=8)  # the mean over boxes near it
    assert explanation.values.abs().sum() > 0


def test_the_second_class_is_the_next_best_of_the_box() -> None:
    method = VanillaGradient(detector())
    contrast = method.attribute(X[0], saliency.box(against="second"))
    name = contrast.target_names[0]
    explicit = method.attribute(X[0], saliency.box(against=name.split(" rather than ")[1].split(" at ")[0]))
    assert torch.equal(contrast.values, explicit.values)
    row = VanillaGradient(detector()).questions(saliency.box(against="second"), X[:1])
    row(detector()(X[:1]))
    match = matches_of(row)[0]
    assert match.label != match.against


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda: saliency.box(point=(70, 10)), r"the point \(70, 10\) is outside the image of 64 x 48 pixels"),
        (lambda: saliency.box(box=(70, 10, 90, 20)), r"the box .* is outside the image of 64 x 48 pixels"),
        (
            lambda: saliency.box(box=(0, 0, 64, 48)),
            r"is 0\.\d\d, below 0\.5; there, the model found \w+ 0\.\d\d at \(",
        ),
        (lambda: saliency.box(index=99), r"no detection with the index 99; the model found \w+ 0\.\d\d at"),
        (lambda: saliency.box(cls=3), r"class 3 is outside 0\.\.2"),
        (lambda: saliency.box(cls="bird"), r'no class "bird" among 3 classes'),
        (lambda: saliency.box(against="cat", cls="cat"), "needs a class other than 0"),
        (lambda: saliency.box(of="objectness"), "no objectness"),
        (lambda: saliency.box(point=(1, 2), index=0), "several of point="),
        (lambda: saliency.box(point=(1, 2, 3)), r"expected \(x, y\)"),
        (lambda: saliency.box(box=(5, 5, 5, 9)), "left < right"),
        (lambda: saliency.box(index=-1), "whole number from 0"),
        (lambda: saliency.box(of="x0", against=1), "cannot be combined with"),
        (lambda: saliency.box(of="width"), "width"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(target: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        VanillaGradient(detector()).attribute(X, target())


def test_a_point_where_nothing_was_found_lists_what_was() -> None:
    with pytest.raises(TargetError, match=r"no detection at the point \(5, 5\); the model found nothing"):
        VanillaGradient(detector(-9)).attribute(X, saliency.box(point=(5, 5)))


def test_an_output_that_is_no_detection_says_which_function_to_write() -> None:
    with pytest.raises(
        TargetError, match=r"no adapter reads boxes from this output: a tensor \(2, 3, 48, 64\); pass read="
    ):
        VanillaGradient(nn.Identity()).attribute(X, saliency.box())


def test_a_forward_without_a_return_is_named() -> None:
    class Forgetful(nn.Module):
        def forward(self, x: Tensor) -> None:
            x.mean()

    with pytest.raises(TargetError, match="no adapter reads boxes from this output: NoneType"):
        VanillaGradient(Forgetful()).attribute(X, saliency.box())


def test_after_suppression_no_class_can_be_compared() -> None:
    class Detections(nn.Module):
        def forward(self, x: Tensor) -> Any:
            scores = x.mean((1, 2, 3)).sigmoid()[:, None]
            return [
                {"boxes": torch.tensor([[4.0, 4, 20, 20]]), "scores": own, "labels": torch.tensor([1])}
                for own in scores
            ]

    with pytest.raises(TargetError, match="one class for each box only"):
        VanillaGradient(Detections()).attribute(X, saliency.box(against="second"))


@pytest.mark.parametrize(
    "name", ["grad_cam", "vanilla_gradient", "rise", "occlusion", "integrated_gradients", "lrp", "smooth_grad"]
)
def test_two_images_with_two_boxes_equal_single_calls_and_nothing_is_left_behind(name: str) -> None:
    model = detector()
    options = {"layer": "features"} if name == "grad_cam" else dict(METHODS[name].preview_options)
    arguments = (VanillaGradient(model),) if name == "smooth_grad" else (model,)
    method = METHODS[name](*arguments, **options)
    targets = [saliency.box(index=1), saliency.box(box=(20, 12, 44, 34), cls="dog")]
    before = Snapshot(model=model, x=X)
    both = method.attribute(X, targets)
    assert not before.changes()
    for row, target in enumerate(targets):
        single = method.attribute(X[row], target)
        assert single.target_names[0] == both.target_names[row]
        torch.testing.assert_close(both.scores[row], single.scores[0], rtol=1e-4, atol=1e-4)
        scale = float(single.values.abs().max())
        assert float((both.values[row] - single.values[0]).abs().max()) <= 1e-3 * scale
    shared = method.attribute(X, targets[0])
    torch.testing.assert_close(
        shared.values[0], both.values[0], rtol=1e-3, atol=1e-4 * float(both.values[0].abs().max())
    )


def test_relevance_sums_to_the_score_of_a_box() -> None:
    explanation = METHODS["lrp"](detector(), composite="epsilon").attribute(X[0], saliency.box())
    assert explanation.residual is not None
    assert float(explanation.residual[0].abs()) < 1e-2 * float(explanation.scores[0].abs())


def test_metrics_read_the_box_in_pixels_of_the_image() -> None:
    picture = Image.fromarray((np.random.default_rng(0).random((96, 128, 3)) * 255).astype(np.uint8))
    method = GradCAM(detector(), "features", preprocess=Preprocess(resize=(48, 64), fit="stretch"))
    target = saliency.box(box=found(method.attribute(picture, saliency.box()).target_names[0]))
    explanation = method.attribute(picture, target)
    subject = Subject(explanation, method=method, target=target)
    torch.testing.assert_close(subject.scores_of(subject.images), explanation.scores)


# Geometry

PLANTED = (70, 30, 110, 60)  # in an image of 160 x 100


class FindsBright(nn.Module):
    """Returns the box of the bright pixels, in pixels of its input or relative to its size."""

    def __init__(self, relative: bool = False) -> None:
        super().__init__()
        self.relative = relative

    def forward(self, x: Tensor) -> Any:
        height, width = x.shape[2:]
        boxes = []
        for image in x:
            light = image.mean(0)
            rows, columns = (light > 0.8 * light.max()).nonzero().T
            boxes.append([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
        low_high = torch.tensor(boxes).float()
        centred = torch.cat([(low_high[:, :2] + low_high[:, 2:]) / 2, low_high[:, 2:] - low_high[:, :2]], 1)[:, None]
        logits = 5 + 0 * x.mean((1, 2, 3))[:, None, None]
        if self.relative:
            relative = centred / torch.tensor([width, height, width, height])
            return {"pred_boxes": relative, "pred_logits": torch.cat([logits, 0 * logits], 2)}
        return torch.cat([centred, logits.sigmoid()], 2).mT.repeat(1, 1, 9)


def planted() -> Image.Image:
    values = np.zeros((100, 160, 3), np.uint8)
    values[30:60, 70:110] = 255
    return Image.fromarray(values)


GREY: dict[str, Any] = {"mean": (0, 0, 0), "std": (1, 1, 1)}
PREPROCESSINGS: dict[str, Any] = {
    "letterbox": Preprocess.letterbox(128),
    "letterbox of the whole size": Preprocess.letterbox(128, None),
    "letterbox at the right and bottom": Preprocess.letterbox((128, 96), None, centre=False),
    "letterbox, stride 64": Preprocess.letterbox(96, 64),
    "squash": Preprocess((96, 96), (96, 96), **GREY),
    "longest side, right and bottom": Preprocess((128, 128), (128, 128), fit="contain", centre=False, **GREY),
    "shorter edge": Preprocess(resize=80, **GREY),
    "crop": Preprocess((80, 96), 80, **GREY),
    "none": Preprocess(**GREY),
}


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("name", PREPROCESSINGS)
def test_a_planted_object_comes_back_on_the_image(name: str, relative: bool) -> None:
    prepare = PREPROCESSINGS[name]
    method = VanillaGradient(FindsBright(relative), preprocess=prepare)
    target = saliency.box(box=PLANTED, link="sigmoid")
    with pytest.warns(saliency.errors.SaliencyWarning, match="0 everywhere|at most"):
        explanation = method.attribute(planted(), target)
    frame = explanation.frames[0]
    assert frame is not None
    cell = max(Geometry.of(frame, explanation.input_size).scale)
    assert np.abs(np.subtract(found(explanation.target_names[0].rpartition(",")[0]), PLANTED)).max() <= cell + 0.51


@pytest.mark.parametrize(
    "name", ["DetrImageProcessor", "RTDetrImageProcessor", "Owlv2ImageProcessor", "SamImageProcessor"]
)
def test_a_planted_object_comes_back_under_processors_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, name)()
    method = VanillaGradient(FindsBright(relative=True), preprocess=processor)
    with pytest.warns(saliency.errors.SaliencyWarning, match="0 everywhere|at most"):
        explanation = method.attribute(planted(), saliency.box(box=PLANTED, link="sigmoid"))
    assert np.abs(np.subtract(found(explanation.target_names[0].rpartition(",")[0]), PLANTED)).max() <= 2


def test_a_letterbox_knows_its_scale_and_pads() -> None:
    prepare = Preprocess.letterbox(640)
    picture = Image.new("RGB", (1000, 500), "white")
    tensor = prepare(picture)
    assert tensor.shape == (3, 320, 640)
    assert Preprocess.letterbox(640)(Image.new("RGB", (640, 480))).shape == (3, 480, 640)
    tensor = Preprocess.letterbox(640, None)(picture)
    assert tensor.shape == (3, 640, 640)
    assert float(tensor[0, 0, 0]) == pytest.approx(114 / 255)
    frame = Frame(picture, Preprocess.letterbox(640, None).box(picture.size))
    geometry = Geometry.of(frame, (640, 640))
    assert geometry.scale == pytest.approx((1000 / 640, 1000 / 640))
    assert geometry.pads == pytest.approx((0, 160, 0, 160))
    frame = Frame(picture, Preprocess.letterbox(640, None, centre=False).box(picture.size))
    assert Geometry.of(frame, (640, 640)).pads == pytest.approx((0, 0, 0, 320))


# Models of users


class CachedHead(GridDetector):
    """Keeps its grid between calls, as the heads of Ultralytics do, also from a call under inference_mode."""

    shape: Any = None
    scale = torch.empty(0)

    def forward(self, x: Tensor) -> Any:
        if self.shape != x.shape:
            self.scale, self.shape = torch.ones(1, 4, 1), x.shape
        y, raw = super().forward(x)
        return torch.cat([y[:, :4] * self.scale, y[:, 4:]], 1), raw | {"scores": raw["scores"] * self.scale[:, :1]}


def test_a_head_with_tensors_of_inference_mode_works_and_is_as_it_was() -> None:
    model = CachedHead().eval()
    with torch.inference_mode():
        model(X)
    scale, shape = model.scale, model.shape
    assert scale.is_inference()
    with pytest.raises(RuntimeError, match=r"[Ii]nference tensors"):
        model(X.clone().requires_grad_())[1]["scores"].sum().backward()
    for x in (X, X[:1]):
        values = VanillaGradient(model).attribute(x, saliency.box()).values
        torch.testing.assert_close(values, VanillaGradient(detector()).attribute(x, saliency.box()).values)
        assert model.scale is scale
        assert model.shape == shape


def test_the_pipeline_around_a_yolo_is_unwrapped_with_its_names() -> None:
    class Pipeline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            model: Any = detector()
            del model.categories
            model.names = dict(enumerate(NAMES))
            self.model, self.predictor, self.overrides = model, None, None

        def forward(self, x: Tensor) -> None:
            raise AssertionError

    name = VanillaGradient(Pipeline()).attribute(X[:1], saliency.box()).target_names[0]
    assert name.split(" at ")[0] in NAMES


def test_torchvision_detectors_are_explained_by_box_and_by_joint() -> None:
    detection = pytest.importorskip("torchvision").models.detection
    torch.manual_seed(0)
    options: dict[str, Any] = {"weights": None, "weights_backbone": None, "min_size": 64, "max_size": 96}
    options |= {"rpn_post_nms_top_n_test": 20, "box_detections_per_img": 5}  # the heads run once per box
    model = detection.fasterrcnn_mobilenet_v3_large_320_fpn(**options, num_classes=4).eval()
    explanation = METHODS["rise"](model, passes=4).attribute(X[:1].sigmoid(), saliency.box())
    assert explanation.target_names[0].startswith("class ")
    model = detection.keypointrcnn_resnet50_fpn(**options).eval()
    explanation = VanillaGradient(model).attribute(X[:1].sigmoid(), saliency.keypoint("left_eye"))
    assert explanation.target_names[0].startswith("left_eye of class 1 at (")


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # transformers creates YOLOS so
def test_detectors_of_transformers_are_explained() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], layer_type="basic", out_features=["stage4"]
    )
    small = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "num_queries": 5}
    small |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = transformers.DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, backbone=None, num_labels=3, **small
    )
    yolos = transformers.YolosConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=[48, 64],
        patch_size=8,
        num_detection_tokens=5,
        num_labels=3,
    )
    for model in (transformers.DetrForObjectDetection(config), transformers.YolosForObjectDetection(yolos)):
        explanation = VanillaGradient(model.eval()).attribute(X, [saliency.box(), saliency.box(of="objectness")])
        assert explanation.values.abs().flatten(1).sum(1).min() > 0
        output = model(X[:1])
        assert explanation.probabilities is not None
        assert float(explanation.probabilities[0]) == pytest.approx(
            float(output.logits[0].detach().softmax(1)[:, :-1].max())
        )


class Labelled(nn.Module):
    """One detection after suppression, of class 1, in the format of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        box, label = torch.tensor([[1.0, 1, 9, 9]]), torch.tensor([1])
        return [{"boxes": box, "labels": label, "scores": maps.mean()[None].sigmoid()} for maps in self.conv(x)]


def test_a_class_that_the_output_does_not_hold_is_refused_also_by_box() -> None:
    method, x = VanillaGradient(Labelled()), torch.rand(2, 3, 16, 16)
    assert method.attribute(x[:1], saliency.box(box=(1, 1, 9, 9), cls=1)).values.abs().sum() > 0
    with pytest.raises(TargetError, match=r"the best IoU of class 77 .*, the model found class 1"):
        method.attribute(x[:1], saliency.box(box=(1, 1, 9, 9), cls=77))
    with pytest.raises(TargetError, match="image 0: there is no detection"):
        method.attribute(x, saliency.box(point=(12, 12)))


def test_a_detector_of_one_class_has_no_second_class_whatever_its_names() -> None:
    def read(output: Tensor) -> list[saliency.Candidates]:
        return [saliency.Candidates(torch.tensor([[1.0, 1, 9, 9]]), output.mean()[None, None])]

    method = VanillaGradient(nn.Identity(), categories=["background", "face"])
    with pytest.raises(TargetError, match=r"class 1 is outside 0\.\.0, the classes of the detector"):
        method.attribute(X[:1], saliency.box(box=(1, 1, 9, 9), cls="face", read=read))


def test_wrong_links_and_candidates_of_wrong_shapes_are_refused() -> None:
    with pytest.raises(TargetError, match="link"):
        saliency.box(link="soft")  # type: ignore[arg-type]
    for boxes, scores in (((2, 4), (3, 5)), ((2, 3), (2, 5)), ((2, 4), (2,))):
        with pytest.raises(TargetError, match=r"expected boxes \(n, 4\)"):
            saliency.Candidates(torch.zeros(boxes), torch.zeros(scores))


def test_masks_and_joints_of_ultralytics_are_not_classes() -> None:
    y = torch.full((1, 4 + 2 + 32, 50), 3.0)
    y[:, 4:6] = 0.01
    y[:, :4, 7], y[:, 5, 7] = torch.tensor([20.0, 20, 8, 8]), 0.9

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Any:
            out = y + 0 * x.mean()
            return out, ([], out[:, 6:], torch.zeros(1, 32, 8, 8))

    explanation = VanillaGradient(Masked()).attribute(torch.rand(1, 3, 64, 64), saliency.box(index=0))
    assert explanation.target_names == ("class 1 at (16, 16, 24, 24)",)


def test_the_best_box_of_a_half_precision_detector_is_found_whatever_its_size() -> None:
    def read(output: Tensor) -> list[saliency.Candidates]:  # the area of the first is above the maximum of float16
        boxes = torch.tensor([[0.0, 0, 300, 300], [310, 310, 318, 318]]).half()
        scores = torch.tensor([[2.2, -9], [-9, 0.4]]).half() + 0 * output[0, 0]
        return [saliency.Candidates(boxes, scores)]

    method = VanillaGradient(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 1)), categories=["cat", "cup"])
    names = method.attribute(torch.rand(1, 3, 8, 8), saliency.box(index=0, read=read)).target_names
    assert names == ("cat at (0, 0, 300, 300)",)
