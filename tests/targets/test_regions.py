"""A region of a segmentation, its border, a joint and a neuron as the target."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import saliency
from saliency import Preprocess, VanillaGradient
from saliency.errors import LayerError, TargetError
from saliency.evaluation.metrics.base import Subject
from saliency.inspection import record
from saliency.methods import METHODS
from saliency.testing import images, tiny_model
from saliency.testing.unchanged import Snapshot

X = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))


class Output(nn.Module):
    """Returns a function of its input, which is its only layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def maps(x: Tensor, stride: int = 4) -> Tensor:
    """Scores (N, 3, h, w) that are means of the pixels of a cell."""
    return nn.functional.avg_pool2d(x, stride)


def pixels(explanation: saliency.Explanation) -> Tensor:
    """The pixels (N, H, W) on which the score depends."""
    return explanation.values.abs().sum(1) > 0


@pytest.mark.parametrize("stride", [1, 4, 16])
def test_a_point_and_a_box_are_in_pixels_of_the_image_whatever_the_stride(stride: int) -> None:
    method = VanillaGradient(Output(lambda x: maps(x, stride)))
    at = pixels(method.attribute(X, saliency.region(1, (37, 9))))
    expected = torch.zeros(32, 48, dtype=torch.bool)
    top, left = 9 // stride * stride, 37 // stride * stride
    expected[top : top + stride, left : left + stride] = True
    assert torch.equal(at, expected.expand(2, -1, -1))
    box = method.attribute(X, saliency.region(1, (16, 0, 48, 16)))
    assert torch.equal(pixels(box)[0], nn.functional.pad(torch.ones(16, 32), (16, 0, 0, 16)).bool())
    assert box.target_names[0] == "region of class 1 at (16, 0, 48, 16)"
    torch.testing.assert_close(box.scores, X[:, 1, :16, 16:].mean((1, 2)))


def test_a_mask_has_the_size_of_the_image_and_covers_half_of_a_cell() -> None:
    mask = torch.zeros(32, 48, dtype=torch.bool)
    mask[8:18, 12:21] = True  # all of rows 8..15, half of 16..19; all of columns 12..19, a quarter of 20..23
    explanation = VanillaGradient(Output(maps)).attribute(X, saliency.region(0, mask))
    torch.testing.assert_close(explanation.scores, X[:, 0, 8:20, 12:20].mean((1, 2)))
    mask[:] = False
    mask[9, 13] = True  # smaller than any cell
    explanation = VanillaGradient(Output(maps)).attribute(X, saliency.region(0, mask))
    torch.testing.assert_close(explanation.scores, X[:, 0, 8:12, 12:16].mean((1, 2)))


@pytest.mark.parametrize(
    "prepare",
    [
        Preprocess((32, 48), (32, 48), fit="contain", mean=(0, 0, 0), std=(1, 1, 1)),
        Preprocess((32, 48), (32, 48), mean=(0, 0, 0), std=(1, 1, 1)),
        Preprocess((32, 48), 40, mean=(0, 0, 0), std=(1, 1, 1)),
        Preprocess.letterbox(48, 16),
    ],
    ids=["padded", "squashed", "cropped", "letterbox"],
)
def test_a_region_of_the_image_is_where_the_model_sees_it(prepare: Preprocess) -> None:
    values = np.zeros((100, 120, 3), np.uint8)
    values[20:80, 70:110] = 255
    method = VanillaGradient(Output(lambda x: maps(x, 2)), preprocess=prepare)
    bright = values[..., 0] > 0
    for where in (bright, (70, 20, 110, 80), Image.fromarray(bright)):
        assert float(method.attribute(Image.fromarray(values), saliency.region(0, where)).scores) > 0.85
    outside = float(method.attribute(Image.fromarray(values), saliency.region(0, ~bright)).scores)
    assert outside < 0.3


def test_a_region_outside_the_crop_is_refused() -> None:
    method = VanillaGradient(Output(maps), preprocess=Preprocess((32, 32), 32))
    with pytest.raises(TargetError, match="no pixel of the model's input in image 0"):
        method.attribute(Image.new("RGB", (200, 100)), saliency.region(0, (5, 50)))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (torch.ones(5, 5), r"shape \(5, 5\); expected \(32, 48\) as the image, or \[?\(?8, 12\]?\)? as the output"),
        (torch.ones(3, 32, 48), r"\(3, 32, 48\) for 2 images"),
        ((70, 3), r"point \(70, 3\) is outside the image of 48 x 32"),
        ((1, 2, 3), "left < right"),
        ("inside", "predicted"),
    ],
)
def test_places_that_cannot_be_are_refused(where: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        VanillaGradient(Output(maps)).attribute(X, saliency.region(0, where))


@pytest.mark.parametrize("scale", [1, 255, 0.7])
def test_a_mask_has_two_values(scale: float) -> None:
    labels, method = torch.zeros(32, 48), VanillaGradient(Output(maps))
    labels[4:8], labels[20:28] = 1, 2
    expected = method.attribute(X, saliency.region(1, labels == 2))
    assert torch.equal(method.attribute(X, saliency.region(1, scale * (labels == 2))).values, expected.values)
    for where in (labels, labels.long(), (labels - 1).sigmoid(), labels.expand(2, -1, -1), labels * torch.nan):
        with pytest.raises(
            TargetError, match=r"the mask has values from .*; expected 0 and one other: pass labels == 3"
        ):
            saliency.region(1, where)


class Sigmoids(nn.Module):
    """Three overlapping classes (N, 3, 8, 12), as in BraTS: the whole tumour, its core, and a part of the core."""

    def forward(self, x: Tensor) -> Tensor:
        centre = torch.tensor([4.0, 3, 1]).view(3, 1, 1)
        distance = (torch.arange(12.0) - 5.6).abs().expand(8, 12)
        return (centre * 2 - 2 * distance + 0.01 * maps(x)).sigmoid()


def test_channels_that_end_in_sigmoids_do_not_compete_for_pixels() -> None:
    both: Any = [saliency.region(2), saliency.region(1)]
    cells = torch.stack([Sigmoids()(X)[0, 2] > 0.5, Sigmoids()(X)[1, 1] > 0.5])
    listed: Any = [saliency.region(2, cells[0]), saliency.region(1, cells[1])]
    method: Any = VanillaGradient(Sigmoids())
    torch.testing.assert_close(method.attribute(X, both).values, method.attribute(X, listed).values)
    for run_model_only in (False, True):  # without gradients, the model is asked how it ends
        method = METHODS["rise"](Sigmoids(), passes=4) if run_model_only else method
        for label in range(3):
            cells = Sigmoids()(X)[:, label] > 0.5
            resolved = method.attribute(X, saliency.region(label))
            marked = method.attribute(X, saliency.region(label, cells))
            torch.testing.assert_close(resolved.scores, marked.scores)
            torch.testing.assert_close(resolved.values, marked.values)
    softmax = VanillaGradient(Output(lambda x: Sigmoids()(x).logit().softmax(1)))
    cells = Sigmoids()(X).argmax(1) == 0  # all pixels: the classes contain each other
    marked = softmax.attribute(X, saliency.region(0, cells))
    torch.testing.assert_close(softmax.attribute(X, saliency.region(0)).values, marked.values)


def segmenter(bias: float, end: Any) -> nn.Sequential:
    """A segmenter whose class 1 has logits of about `bias`, and whose output passes through `end`."""
    torch.manual_seed(0)
    last = nn.Conv2d(8, 3, 1)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), last, end).eval()
    cast("Tensor", last.bias).data[1] = bias
    return net


ENDS = {
    "nn.Sigmoid": nn.Sigmoid(),
    "nn.Softmax": nn.Softmax(1),
    "a function in a dict": Output(lambda z: {"out": torch.sigmoid(z), "features": z.mean((2, 3))}),
    "clamped": Output(lambda z: torch.clamp(z.sigmoid(), min=1e-4, max=1 - 1e-4)),
}


@pytest.mark.parametrize("name", ["vanilla_gradient", "grad_cam", "lrp", "rise", "integrated_gradients"])
@pytest.mark.parametrize("end", ENDS)
def test_a_region_and_a_joint_are_read_before_the_last_sigmoid_or_softmax(end: str, name: str) -> None:
    for bias in (0.0, 8, 40):  # probabilities of 0.5, 0.9997 and 1
        options = {} if name == "grad_cam" else METHODS[name].preview_options
        model, logits = segmenter(bias, ENDS[end]), segmenter(bias, nn.Identity())
        method, expected = (METHODS[name](own, **options) for own in (model, logits))
        before = Snapshot(model=model, x=X)
        for target in (
            saliency.region(1, (8, 8, 24, 24)),
            saliency.keypoint(2),
            [saliency.region(1, (2, 3)), saliency.keypoint(0)],
        ):
            explanation, reference = method.attribute(X, target), expected.attribute(X, target)
            assert torch.equal(explanation.scores, reference.scores)
            assert torch.equal(explanation.values, reference.values)
            assert all("the value before the last s" in note for note in explanation.notes)
        assert not before.changes()


def test_hooks_of_the_user_do_not_change_what_a_region_reads() -> None:
    model, target = segmenter(40, nn.Sigmoid()), saliency.region(1, (8, 8, 24, 24))
    expected = VanillaGradient(model).attribute(X, target)
    for module in model:
        module.register_full_backward_hook(lambda module, before, after: None)
        module.register_forward_hook(lambda module, args, output: output.clone())
    assert torch.equal(VanillaGradient(model).attribute(X, target).values, expected.values)
    with record(model):
        assert torch.equal(VanillaGradient(model).attribute(X, target).values, expected.values)


def test_functions_get_the_probabilities_and_are_not_mixed_with_regions() -> None:
    method = VanillaGradient(segmenter(8, nn.Sigmoid()))
    explanation = method.attribute(X, lambda output: output[:, 1].mean((1, 2)))
    assert float(explanation.scores.max()) < 1
    for targets in ([saliency.region(1), saliency.value(0, 0, 0)], [saliency.value(0, 0, 0), saliency.region(1)]):
        with pytest.raises(TargetError, match="explain them in another call"):
            method.attribute(X, targets)
        with pytest.raises(TargetError, match="explain them in another call"):
            method.attribute_classes(X, targets)
    VanillaGradient(segmenter(8, nn.Identity())).attribute(X, targets)


def test_metrics_score_a_region_before_the_last_sigmoid() -> None:
    scores = []
    for end in (nn.Sigmoid(), nn.Identity()):
        method, target = VanillaGradient(segmenter(8, end)), saliency.region(1)
        subject = Subject(method.attribute(X, target), target=target, method=method, inputs=X)
        scores.append(subject.scores_of(X.flip(2)))
        assert [len(others) for others in subject.others()] == [2, 2]
    assert torch.equal(*scores)


def test_a_border_is_the_inside_minus_the_outside_of_the_contour() -> None:
    x = torch.zeros(1, 3, 8, 8)
    x[0, 1] = torch.arange(64.0).view(8, 8)
    x[0, 1, :, :4] -= 1000  # class 1 where x >= 4
    explanation = VanillaGradient(Output(lambda x: x)).attribute(x, saliency.region(1, "border"))
    expected = x[0, 1, :, 4].mean() - x[0, 1, :, 3].mean()
    torch.testing.assert_close(explanation.scores[0], expected)
    assert explanation.target_names == ("border of class 1",)
    with pytest.raises(TargetError, match="no border"):
        VanillaGradient(Output(lambda x: x + torch.tensor([0, 9e9, 0]).view(3, 1, 1))).attribute(
            x, saliency.region(1, "border")
        )


def test_queries_times_masks_are_scores_of_classes() -> None:
    torch.manual_seed(0)
    logits, masks = torch.randn(2, 5, 4), torch.randn(2, 5, 8, 12)

    def output(x: Tensor) -> Any:
        return {"class_queries_logits": logits + x.mean(), "masks_queries_logits": masks + maps(x)[:, :1]}

    expected = torch.einsum(
        "nqc,nqhw->nchw", (logits + X.mean()).softmax(2)[..., :3], (masks + maps(X)[:, :1]).sigmoid()
    )
    explanation = VanillaGradient(Output(output)).attribute(X, saliency.region(2, (0, 0, 24, 16)))
    torch.testing.assert_close(explanation.scores, expected[:, 2, :4, :6].mean((1, 2)))
    predicted = VanillaGradient(Output(output)).attribute(X, saliency.region(0))
    own = expected.argmax(1) == 0
    torch.testing.assert_close(
        predicted.scores, torch.stack([e[0][at].mean() for e, at in zip(expected, own, strict=True)])
    )


def test_other_outputs_of_segmentation_are_read() -> None:
    target = saliency.region(1, (0, 0, 24, 16))
    expected = VanillaGradient(Output(maps)).attribute(X, target).values
    for pack in (
        lambda x: {"out": maps(x), "aux": maps(x)},
        lambda x: (maps(x), x.mean((2, 3))),  # masks and labels
        lambda x: {"logits": maps(x), "hidden_states": x},
        lambda x: {"pred_masks": maps(x)[:, None], "iou_scores": x.mean((2, 3))[:, None]},  # SAM, one prompt
    ):
        assert torch.equal(VanillaGradient(Output(pack)).attribute(X, target).values, expected)


def test_a_mask_of_sam_is_where_its_logit_is_positive() -> None:
    def output(x: Tensor) -> Any:
        return {"pred_masks": maps(x)[:, None], "iou_scores": x.mean((2, 3))[:, None]}

    explanation = VanillaGradient(Output(output)).attribute(X, saliency.region(2))
    own = maps(X)[:, 2]
    torch.testing.assert_close(explanation.scores, torch.stack([e[e > 0].mean() for e in own]))


def test_instances_are_weighted_by_their_scores() -> None:
    torch.manual_seed(0)
    masks, labels = torch.rand(3, 1, 32, 48), torch.tensor([1, 2, 1])

    def output(x: Tensor) -> Any:
        return [
            {
                "boxes": torch.zeros(3, 4),
                "scores": image.mean((1, 2)).sigmoid(),
                "labels": labels,
                "masks": masks * image.mean().sigmoid(),
            }
            for image in x
        ]

    explanation = VanillaGradient(Output(output)).attribute(X, saliency.region(1, (0, 0, 10, 8)))
    entries = output(X)
    for row, entry in enumerate(entries):
        expected = sum(entry["scores"][i] * entry["masks"][i, 0, :8, :10].mean() for i in (0, 2))
        torch.testing.assert_close(explanation.scores[row], expected)
    mixed = VanillaGradient(Output(output)).attribute(
        X, [saliency.region(1, (0, 0, 10, 8)), saliency.region(2, (9, 9))]
    )
    torch.testing.assert_close(mixed.values[0], explanation.values[0])


@pytest.mark.parametrize("name", ["hires_cam", "vanilla_gradient", "rise", "occlusion", "vx_code", "lrp"])
@pytest.mark.parametrize("where", [(16, 8, 40, 24), "border", "predicted"], ids=str)
def test_regions_of_two_images_equal_single_calls_and_nothing_is_left_behind(name: str, where: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(4, 2, 1)).eval()
    method = METHODS[name](model, **({"layer": "0"} if "res_cam" in name else METHODS[name].preview_options))
    targets = [saliency.region(0, where), saliency.region(1, where)]
    before = Snapshot(model=model, x=X)
    both = method.attribute(X, targets)
    assert not before.changes()
    for row, target in enumerate(targets):
        single = method.attribute(X[row], target)
        torch.testing.assert_close(both.scores[row], single.scores[0], rtol=1e-4, atol=1e-5)
        scale = float(single.values.abs().max())
        assert float((both.values[row] - single.values[0]).abs().max()) <= 1e-3 * scale


# Joints


def heatmaps(x: Tensor) -> Tensor:
    return nn.functional.avg_pool2d(x, 4).repeat(1, 6, 1, 1)[:, :17]


@pytest.mark.parametrize("pack", [lambda maps: maps, lambda maps: {"heatmaps": maps}])
def test_a_joint_of_a_heatmap_is_the_mean_around_its_maximum(pack: Any) -> None:
    model = Output(lambda x: pack(heatmaps(x)))
    explanation = VanillaGradient(model).attribute(X, [saliency.keypoint("nose"), saliency.keypoint(2)])
    padded = nn.functional.avg_pool2d(heatmaps(X), 3, 1, 1, count_include_pad=False)
    for row, joint in enumerate((0, 2)):
        peak = heatmaps(X)[row, joint].flatten().argmax()
        torch.testing.assert_close(explanation.scores[row], padded[row, joint].flatten()[peak])
    assert explanation.target_names == ("nose", "right_eye")
    with pytest.raises(TargetError, match="of one person"):
        VanillaGradient(model).attribute(X, saliency.keypoint("nose", person=1))
    with pytest.raises(TargetError, match=r'no class "tail" among 17'):
        VanillaGradient(model).attribute(X, saliency.keypoint("tail"))


def test_a_joint_of_a_detector_is_the_score_at_its_person() -> None:
    boxes = torch.tensor([[2.0, 2, 12, 20], [30, 5, 44, 28]])

    def output(x: Tensor) -> Any:
        scores = torch.tensor([0.9, 0.8])
        joints = torch.arange(10.0).view(2, 5)
        return [
            {"boxes": boxes, "scores": scores, "labels": torch.ones(2).long(), "keypoints_scores": joints * i.mean()}
            for i in x
        ]

    method = VanillaGradient(Output(output))
    for person in (0, 1):
        explanation = method.attribute(X, saliency.keypoint(3, person))
        torch.testing.assert_close(explanation.scores, (3.0 + 5 * person) * X.mean((1, 2, 3)), rtol=1e-4, atol=1e-5)
    assert explanation.target_names[0] == "joint 3 of class 1 at (30, 5, 44, 28)"
    with pytest.raises(TargetError, match=r"index 2; the model found class 1 0\.90"):
        method.attribute(X, saliency.keypoint(3, 2))
    with pytest.raises(TargetError, match=r"class 7 is outside 0\.\.4, the joints"):
        method.attribute(X, saliency.keypoint(7))


def test_a_joint_of_ultralytics_is_the_logit_at_its_person() -> None:
    def output(x: Tensor) -> Any:  # two persons among 40 cells, and five joints of x, y and visibility
        raw = torch.arange(15.0)[:, None] + 10 * torch.arange(40.0)
        raw = raw * x.mean((1, 2, 3))[:, None, None]
        y = torch.full((len(x), 5, 40), 0.01)
        y[..., :2] = torch.tensor([[10.0, 40], [12, 20], [8, 10], [16, 20], [0.9, 0.8]])
        joints = raw * 8
        joints[:, 2::3] = raw[:, 2::3].sigmoid()
        return torch.cat([y, joints], 1), ([], raw)

    method = VanillaGradient(Output(output), categories=["person"])
    for person in (0, 1):
        explanation = method.attribute(X, saliency.keypoint(3, person))
        torch.testing.assert_close(explanation.scores, (11.0 + 10 * person) * X.mean((1, 2, 3)), rtol=1e-4, atol=1e-5)
    assert explanation.target_names[0] == "joint 3 of person at (35, 10, 45, 30)"
    assert explanation.values.abs().max() > 0


def test_a_function_reads_the_same_output_for_a_box_and_for_a_joint() -> None:
    outputs = []

    def read(output: Any) -> list[saliency.Candidates]:
        outputs.append(output["score"].detach())
        boxes = torch.tensor([[2.0, 2, 12, 20]])
        return [saliency.Candidates(boxes, one[None].logit(), keypoints=one[None].logit()) for one in output["score"]]

    method = VanillaGradient(Output(lambda x: {"score": x.mean((2, 3)).sigmoid()}))
    for target in (saliency.box(read=read), saliency.keypoint(0, read=read)):
        method.attribute(X[:1], target)
    assert torch.equal(outputs[0], outputs[-1])


# Neurons


@pytest.mark.parametrize("name", ["grad_cam", "vanilla_gradient", "rise", "occlusion", "integrated_gradients", "lrp"])
def test_a_neuron_is_the_activation_of_a_channel_in_every_method(name: str) -> None:
    model: Any = tiny_model()
    x = images(2)
    outputs: list[Tensor] = []
    handle = model.down.register_forward_hook(lambda module, args, output: outputs.append(output))
    model(x)
    handle.remove()
    method = METHODS[name](model, **({"layer": "norm"} if name == "grad_cam" else METHODS[name].preview_options))
    before = Snapshot(model=model, x=x)
    mean = method.attribute(x, saliency.neuron("down", 3))
    place = method.attribute(x, saliency.neuron("down", 3, at=(2, 5)))
    both = method.attribute(x, [saliency.neuron("down", 3, at=(2, 5)), saliency.neuron("down", 1)])
    assert not before.changes()
    torch.testing.assert_close(mean.scores, outputs[0][:, 3].mean((1, 2)))
    torch.testing.assert_close(place.scores, outputs[0][:, 3, 2, 5])
    torch.testing.assert_close(both.values[0], place.values[0], rtol=1e-3, atol=1e-6)
    assert both.target_names == ("channel 3 of down at (2, 5)", "channel 1 of down")
    if name == "vanilla_gradient":
        leaf = x.clone().requires_grad_()
        score = model.down(model.relu(model.norm(model.stem(leaf))))[:, 3, 2, 5].sum()
        torch.testing.assert_close(place.values, torch.autograd.grad(score, leaf)[0])


class Channels(nn.Module):
    """Features in the layouts that networks use, of 5 channels on a grid of 8 x 12."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 4, 4)
        self.last, self.tokens = Output(lambda maps: maps.movedim(1, -1)), Output(lambda maps: maps.flatten(1, 2))
        self.rows, self.line = nn.Linear(5, 5), nn.Conv1d(5, 7, 3)
        self.pooled, self.odd = Output(lambda line: line.mean(2)), Output(lambda line: line.sort(2).values)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.rows(self.tokens(self.last(self.first(x)).relu()))
        pooled: Tensor = self.pooled(self.odd(self.line(tokens.mT)))
        return pooled


def layer_output(model: nn.Module, layer: str, x: Tensor) -> Tensor:
    outputs: list[Tensor] = []
    with torch.no_grad():
        handle = model.get_submodule(layer).register_forward_hook(lambda module, args, output: outputs.append(output))
        model(x)
        handle.remove()
    return outputs[-1]


@pytest.mark.parametrize(
    ("layer", "axis", "at"),
    [
        *(("first", 1, (7, 11)), ("last", -1, (7, 11)), ("tokens", -1, (95,)), ("rows", -1, (95,))),
        *(("line", 1, (93,)), ("pooled", 1, None)),
    ],
)
def test_the_channels_of_a_neuron_are_on_the_axis_of_its_layer(layer: str, axis: int, at: Any) -> None:
    torch.manual_seed(0)
    model = Channels().eval()
    values = layer_output(model, layer, X).movedim(axis, 1)
    channel, method = values.shape[1] - 1, VanillaGradient(model)
    mean = method.attribute(X, saliency.neuron(layer, channel))
    torch.testing.assert_close(mean.scores, values[:, channel].reshape(2, -1).mean(1))
    with pytest.raises(TargetError, match=f"no channel {channel + 1}"):
        method.attribute(X, saliency.neuron(layer, channel + 1))
    if at is not None:
        both = [saliency.neuron(layer, 0, at=at), saliency.neuron(layer, 2, at=at)]
        torch.testing.assert_close(
            method.attribute(X, both).scores, torch.stack([values[(0, 0, *at)], values[(1, 2, *at)]])
        )


def test_channels_of_a_swin_are_last() -> None:
    swin = pytest.importorskip("torchvision").models.swin_transformer
    torch.manual_seed(0)
    model = swin.SwinTransformer([4, 4], 24, [1, 1], [1, 2], [4, 4]).eval()
    x = torch.randn(1, 3, 64, 64)
    explanation = VanillaGradient(model).attribute(x, saliency.neuron("features.1", 23, at=(15, 3)))
    torch.testing.assert_close(explanation.scores, layer_output(model, "features.1", x)[:, 15, 3, 23])


def test_a_neuron_of_a_layer_whose_axes_are_unknown_is_refused() -> None:
    with pytest.raises(TargetError, match=r"\(2, 7, 94\) of the layer odd does not show its axis of channels"):
        VanillaGradient(Channels()).attribute(X, saliency.neuron("odd", 0))


def test_the_layer_of_a_neuron_may_be_the_module_itself() -> None:
    model: Any = Channels()
    method = VanillaGradient(model)
    named = method.attribute(X, saliency.neuron("first", 2))
    targets: Any = [saliency.neuron(model.first, 2), saliency.neuron("first", 2)]
    for target in (targets[0], targets):
        explanation = method.attribute(X, target)
        assert torch.equal(explanation.values, named.values)
        assert explanation.target_names == named.target_names == ("channel 2 of first",) * 2
    with pytest.raises(LayerError, match="expected a layer as a dotted name or a module, got Tensor"):
        method.attribute(X, saliency.neuron(model.first(X), 2))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (saliency.neuron("down", 99), "no channel 99"),
        (saliency.neuron("down", 0, at=(9, 0)), r"no position \(9, 0\)"),
        (saliency.neuron("down", 0, at=1), r"no position \(1,\)"),
        ([saliency.neuron("down", 0), saliency.value(1)], "neurons of one layer, or none"),
        ([saliency.neuron("", 0), saliency.value(1)], "neurons of one layer, or none"),  # of the whole model
        ([saliency.neuron("down", 0), saliency.neuron("stem", 0)], "neurons of one layer"),
    ],
)
def test_a_neuron_that_is_not_there_is_refused(target: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        VanillaGradient(tiny_model()).attribute(images(2), target)


def test_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(LayerError, match="dwon"):
        VanillaGradient(tiny_model()).attribute(images(2), saliency.neuron("dwon", 0))


def test_masks_of_real_libraries_are_read() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.SegformerConfig(
        hidden_sizes=[8, 8, 8, 8],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 1, 1],
        decoder_hidden_size=8,
        num_labels=3,
    )
    model = transformers.SegformerForSemanticSegmentation(config).eval()
    x = torch.randn(1, 3, 64, 64)
    explanation = VanillaGradient(model).attribute(x, saliency.region(1, (0, 0, 32, 64)))
    torch.testing.assert_close(explanation.scores, model(x).logits[:, 1, :, :8].mean((1, 2)))


@pytest.mark.parametrize("library", ["segmentation_models_pytorch", "monai.networks.nets"])
def test_networks_of_segmentation_libraries_are_explained(library: str) -> None:
    module: Any = pytest.importorskip(library)
    if library.startswith("monai"):
        model = module.BasicUNet(2, 3, 3, (4, 4, 8, 8, 8, 4))
    else:
        model = module.Unet("mobilenet_v2", encoder_weights=None, classes=3, aux_params={"classes": 2})
    explanation = VanillaGradient(model.eval()).attribute(torch.randn(1, 3, 64, 64), saliency.region(1, (0, 0, 32, 32)))
    assert explanation.values.abs().sum() > 0
