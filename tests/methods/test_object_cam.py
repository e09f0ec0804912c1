"""Methods for boxes and regions: the layers of all levels, D-RISE, VX-CODE, ODAM, CAMs of regions, augmentation."""

from __future__ import annotations

import itertools
import weakref
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from saliency import DRISE, METHODS, ODAM, VXCODE, Augmented, GradCAM, HiResCAM, LayerCAM, VanillaGradient
from saliency.errors import MethodError, TargetError
from saliency.methods.rise import RandomMasks
from saliency.testbed import draw_scenes
from tests.models import HeadsDetector, LevelDetector, PoseNet, cells
from tests.selection import case

EDGES = ((torch.maximum, slice(0, 2)), (torch.minimum, slice(2, 4)))
SCENES = draw_scenes(3, task="several", seed=1)
X = SCENES.images / 127.5 - 1
LEVELS = {"shapes_detector": "fine, coarse", "shapes_queries": "encoder"}
CAMS = ["grad_cam", "layer_cam", "hires_cam", "grad_cam_plus_plus", "xgrad_cam", "eigen_grad_cam", "odam"]


@cache
def network(name: str) -> Any:
    return saliency.load(name)


@pytest.mark.filterwarnings("ignore:.*activations of this layer are signed")
@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("method", [*CAMS, "fused_cam", "guided_grad_cam"])
def test_a_box_is_explained_at_all_layers_that_enter_the_head(name: str, method: str) -> None:
    found = METHODS[method](network(name)).attribute(X[:1], saliency.box())
    assert found.layer == LEVELS[name]
    assert found.values.abs().max() > 0


@pytest.mark.parametrize("method", ["fcos_resnet50_fpn", case("retinanet_resnet50_fpn", by_default=False)])
def test_all_levels_of_a_pyramid_enter_the_head_of_torchvision(method: str) -> None:
    detection = pytest.importorskip("torchvision").models.detection
    torch.manual_seed(0)
    options: dict[str, Any] = {"weights": None, "weights_backbone": None, "min_size": 96, "max_size": 96}
    model = getattr(detection, method)(**options, num_classes=4, score_thresh=0.0, topk_candidates=5).eval()
    x = torch.rand(1, 3, 96, 96)
    found = HiResCAM(model).attribute(x, saliency.box(box=model(x)[0]["boxes"][0].tolist()))
    blocks = [f"layer_blocks.{level}" for level in range(3)]
    levels = [*blocks, "extra_blocks.p6", "extra_blocks.p7"][: len(str(found.layer).split(", "))]
    assert found.layer == ", ".join(f"backbone.fpn.{level}" for level in levels)
    assert len(levels) >= 3


@pytest.mark.filterwarnings("ignore:.*activations of this layer are signed")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("method", [*CAMS, "eigen_cam", "fused_cam", "refine_cam"])
def test_levels_that_the_model_returns_and_shared_activations_are_levels_too(method: str, shared: bool) -> None:
    torch.manual_seed(0)
    model, x = LevelDetector(shared=shared).eval(), torch.rand(1, 3, 64, 64)
    found = METHODS[method](model).attribute(x, saliency.box())
    assert found.layer == "b2, b3"
    assert found.values.abs().max() > 0


@pytest.mark.parametrize("shared", [False, True])
def test_the_map_of_a_box_is_the_gradient_at_both_levels_of_a_detector_that_returns_them(shared: bool) -> None:
    torch.manual_seed(0)
    model, x = LevelDetector(shared=shared).eval().double(), torch.rand(1, 3, 64, 64, dtype=torch.float64)
    target = saliency.box(cls=1)
    _, raw = model(x)
    found = HiResCAM(model).attribute(x, target)
    at = int(raw["scores"][0, 1].argmax())
    boxes = torch.cat([cells(level, stride) for level, stride in zip(raw["feats"], (8, 16), strict=True)], 1).double()
    corners = torch.cat([boxes[:2] - boxes[2:] / 2, boxes[:2] + boxes[2:] / 2]).T
    low, high = (edge(corners[:, half], corners[at, half]) for edge, half in EDGES)
    inner, areas = (high - low).clamp(min=0).prod(1), boxes[2:].prod(0)
    near = (20 * inner / (areas + areas[at] - inner)).expm1()
    score = (raw["scores"][0, 1] * near).sum() / (near.sum() + 1)
    gradients = torch.autograd.grad(score, raw["feats"])
    sums = [(own * grad).sum() for own, grad in zip(raw["feats"], gradients, strict=True)]
    torch.testing.assert_close(found.values.sum(), torch.stack(sums).sum())


@pytest.mark.parametrize("of", ["class", "x0"])
def test_each_level_of_a_detector_with_several_heads_is_read(of: Any) -> None:
    torch.manual_seed(0)
    model, x = HeadsDetector().eval(), torch.rand(2, 3, 64, 64)
    assert LayerCAM(model).attribute(x, saliency.box(of=of, read=model.read)).layer == "backbone1, backbone2"


@pytest.mark.parametrize("method", ["grad_cam", "layer_cam", "fused_cam", "shapley_cam", "ablation_cam"])
def test_a_joint_is_read_at_the_layer_before_its_heatmaps_and_not_before_a_later_head(method: str) -> None:
    torch.manual_seed(0)
    model, x = PoseNet().eval(), torch.rand(1, 3, 32, 32)
    assert METHODS[method](model).attribute(x, saliency.keypoint(1)).layer == "trunk"


@pytest.mark.parametrize("method", [*CAMS, "eigen_cam", "guided_grad_cam"])
@pytest.mark.filterwarnings("ignore:.*activations of this layer are signed")
def test_the_levels_of_a_box_may_be_named_in_any_order(method: str) -> None:
    network, level = saliency.load("shapes_detector"), saliency.box()
    expected = METHODS[method](network).attribute(X[:1], level)
    found = METHODS[method](network, ["coarse", network.fine]).attribute(X[:1], level)
    assert found.layer == "coarse, fine"
    torch.testing.assert_close(found.values, expected.values)


@pytest.mark.parametrize("shared", [False, True])
def test_targets_of_one_call_have_the_layers_of_single_calls(shared: bool) -> None:
    torch.manual_seed(0)
    model, x = LevelDetector(shared=shared).eval(), torch.rand(1, 3, 64, 64)

    def deepest(output: Any) -> Tensor:
        maximum: Tensor = output[1]["scores"].amax((1, 2))
        return maximum

    orders: list[list[Any]] = [[saliency.box(), deepest], [deepest, saliency.box()]]
    for targets in orders:
        together = GradCAM(model).attribute_classes(x, targets)
        for found, target in zip(together, targets, strict=True):
            alone = GradCAM(model).attribute(x, target)
            assert found.layer == alone.layer
            torch.testing.assert_close(found.values, alone.values)


def test_a_second_call_for_a_box_runs_the_model_once() -> None:
    torch.manual_seed(0)
    model, x, calls = LevelDetector().eval(), torch.rand(1, 3, 64, 64), list[int]()
    GradCAM(model).attribute(x, saliency.box())
    model.register_forward_hook(lambda *_: calls.append(1))
    GradCAM(model).attribute(x, saliency.box(index=1))
    assert len(calls) == 1


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList([nn.Conv2d(4, 3, 1), nn.Conv2d(5, 3, 1)])

    def forward(self, levels: list[Tensor]) -> Tensor:
        return torch.cat([own(level).flatten(2) for own, level in zip(self.levels, levels, strict=True)], 2)


class Linear(nn.Module):
    """Detector with one box, whose scores are linear in two levels of 8 x 8 and 4 x 4 cells."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse, self.head = nn.Conv2d(3, 4, 2, 2), nn.Conv2d(3, 5, 4, 4), Head()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head([self.fine(x), self.coarse(x)]).mean(2)
        return logits


def whole(output: Tensor) -> list[saliency.Candidates]:
    box = output.new_tensor([[0.0, 0, 16, 16]])
    return [saliency.Candidates(box, logits[None]) for logits in output]


def test_each_level_counts_by_its_share_of_the_score() -> None:
    torch.manual_seed(0)
    model, x = Linear().double(), torch.rand(2, 3, 16, 16, dtype=torch.float64)
    explanation = HiResCAM(model).attribute(x, saliency.box(read=whole, cls=1))
    assert explanation.layer == "fine, coarse"
    with torch.no_grad():
        levels = [model.fine(x), model.coarse(x)]
        heads: Any = model.head.levels
        bias = sum(own.bias[1] * level[0, 0].numel() for own, level in zip(heads, levels, strict=True)) / 80
        weight = torch.tensor(20.0, dtype=torch.float64).expm1()  # of the box itself, of IoU 1, beside no box at all
        expected = (model(x)[:, 1] - bias) * weight / (weight + 1)
    torch.testing.assert_close(explanation.values.sum((1, 2, 3)), expected)


@pytest.mark.parametrize("name", LEVELS)
def test_a_batch_of_boxes_equals_single_calls_and_one_forward_of_several_boxes(name: str) -> None:
    model, boxes = network(name), [saliency.box(index=at) for at in range(2)]
    together = LayerCAM(model).attribute(X[:2], boxes)
    several = LayerCAM(model).attribute_classes(X[:1], boxes)
    torch.testing.assert_close(together[0].values, several[0].values)
    for at in range(2):
        alone = LayerCAM(model).attribute(X[at : at + 1], boxes[at])
        torch.testing.assert_close(together[at].values, alone.values)
    assert not torch.equal(several[0].values, several[1].values)


def iou(one: Tensor, other: Tensor) -> float:
    width, height = (min(one[at + 2], other[at + 2]) - max(one[at], other[at]) for at in (0, 1))
    inner = max(float(width), 0) * max(float(height), 0)
    areas = [float((own[2] - own[0]) * (own[3] - own[1])) for own in (one, other)]
    return inner / (sum(areas) - inner)


def plain_boxes(name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The boxes, the class probabilities and the objectness of all candidates of one image."""
    with torch.no_grad():
        output = network(name)(x)
    if name == "shapes_detector":
        boxes, known = output[0][0, :4].T, output[0][0, 4:].T
        certainty = known.amax(1)
    else:
        boxes, known = output["pred_boxes"][0] * 64, output["logits"][0].softmax(1)[:, :3]
        certainty = known.sum(1)
    corners = torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1)
    return corners, known, certainty


def plain_similarity(box: Tensor, own: Tensor, candidates: tuple[Tensor, Tensor, Tensor]) -> float:
    best = 0.0
    for corners, known, certainty in zip(*candidates, strict=True):
        cosine = float(own @ known / (own.norm() * known.norm()))
        best = max(best, iou(box, corners) * float(certainty) * cosine)
    return best


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("debiased", [True, False])
def test_d_rise_equals_a_plain_loop_over_masks_and_candidates(name: str, debiased: bool) -> None:
    passes, x = 10, X[:1]
    options: dict[str, Any] = {"passes": passes, "grid": 4, "seed": 3, "chunk": 7, "debiased": debiased}
    objects = [saliency.box(index=at) for at in range(2)]
    found = DRISE(network(name), **options).attribute_classes(x, objects)
    boxes, known, _ = plain_boxes(name, x)
    masks = RandomMasks(x, 4, 0.5, 3)
    drawn = masks(0, passes)
    candidates = [plain_boxes(name, x * mask) for mask in drawn]
    for explanation in found:
        place = torch.tensor([float(n) for n in explanation.target_names[0].split("(")[1].rstrip(")").split(", ")])
        own = max(range(len(boxes)), key=lambda at: iou(place, boxes[at]) + float(known[at].max()))
        scores = torch.tensor([plain_similarity(boxes[own], known[own], each) for each in candidates])
        if debiased:
            terms = (scores - scores.mean())[:, None, None] * (drawn[:, 0] - 0.5)
            expected = terms.sum(0) / (passes - 1) / masks.variance[0]
        else:
            terms = scores[:, None, None] * drawn[:, 0]
            expected = terms.mean(0) / 0.5
        torch.testing.assert_close(explanation.values[0, 0], expected, atol=1e-5, rtol=1e-5)
        assert explanation.error is not None
        assert explanation.error.shape == explanation.values.shape
        assert explanation.agreement is not None
        assert explanation.agreement.shape == (1,)
        assert float(explanation.scores) == pytest.approx(
            plain_similarity(boxes[own], known[own], plain_boxes(name, x))
        )


def test_d_rise_explains_all_boxes_by_one_set_of_masked_forwards() -> None:
    model, calls = network("shapes_detector"), list[int]()
    handle = model.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    counts = []
    for boxes in (1, 1, 3):  # the first call also tests whether images affect each other
        calls.clear()
        DRISE(model, passes=32).attribute_classes(X[:1], [saliency.box(index=at % 2) for at in range(boxes)])
        counts.append(sum(calls))
    handle.remove()
    assert counts[1] == counts[2]


@pytest.mark.parametrize(
    ("cls", "name", "options"),
    [*((DRISE, name, {"passes": 16}) for name in LEVELS), (VXCODE, "shapes_detector", {"segments": (4, 4)})],
)
def test_one_box_of_each_image_equals_single_calls(cls: Any, name: str, options: dict[str, Any]) -> None:
    method = cls(network(name), **options)
    boxes = [saliency.box(index=1), saliency.box(index=0)]
    together = method.attribute(X[:2], boxes)
    for at in range(2):
        alone = method.attribute(X[at : at + 1], boxes[at])
        torch.testing.assert_close(together[at].values, alone.values)
        torch.testing.assert_close(together[at].scores, alone.scores)


def test_d_rise_stops_at_its_tolerance_and_has_no_zero_map_when_detections_vanish() -> None:
    method = DRISE(network("shapes_detector"), tolerance=0.8, visible=0.1, passes=4000)
    found = method.attribute(X[:1], saliency.box())
    assert found.run_stats[0].stopped == "tolerance"
    assert found.values.abs().max() > 0


def test_d_rise_of_any_other_target_weights_the_masks_by_its_score() -> None:
    options: dict[str, Any] = {"passes": 16, "grid": 4}
    for name, target in (("shapes_detector", saliency.box(of="x0")), ("shapes_unet", saliency.region("circle"))):
        found = DRISE(network(name), **options).attribute(X[:1], target)
        torch.testing.assert_close(
            found.values, METHODS["rise"](network(name), **options).attribute(X[:1], target).values
        )


class PlainSearch:
    """VX-CODE of one box by plain loops, without batches."""

    def __init__(self, name: str, x: Tensor, place: Tensor, cells: int, order: str) -> None:
        self.name, self.x, self.cells, self.order = name, x, cells, order
        boxes, known, _ = plain_boxes(name, x)
        own = max(range(len(boxes)), key=lambda at: iou(place, boxes[at]) + float(known[at].max()))
        self.box, self.own = boxes[own], known[own]

    def score(self, changed: list[int]) -> float:
        """The similarity with the changed patches alone, or without them; its negative for deletion."""
        edge = 64 // self.cells
        image = torch.zeros_like(self.x) if self.order == "insertion" else self.x.clone()
        for patch in changed:
            row, column = divmod(patch, self.cells)
            part = (..., slice(row * edge, row * edge + edge), slice(column * edge, column * edge + edge))
            image[part] = self.x[part] if self.order == "insertion" else 0
        found = plain_similarity(self.box, self.own, plain_boxes(self.name, image))
        return found if self.order == "insertion" else -found

    def rise(self, chosen: list[int], order: tuple[int, ...]) -> float:
        return sum(self.score([*chosen, *order[: count + 1]]) for count in range(len(order)))

    def map(self, together: int, shortlist: int, share: float, trials: int) -> Tensor:
        every = list(range(self.cells**2))
        chosen: list[int] = []
        window: list[int] = []  # the patches of the last trial of all, the best first
        due = 0
        best, end = [self.score([])], self.score(every)
        while len(chosen) < len(every) and best[-1] < end - 0.01 * (end - best[0]):
            left = [patch for patch in every if patch not in chosen]
            in_groups = together > 1 and len(chosen) < share * len(every)
            tried = left if in_groups or len(chosen) >= due else [patch for patch in window if patch in left][:trials]
            ranked = sorted(tried, key=lambda patch: -self.score([*chosen, patch]))
            if tried is left:
                window, due = ranked, len(chosen) + 16
            group = ranked[:1]
            if in_groups:
                groups = itertools.combinations(sorted(ranked[:shortlist]), together)
                strongest = max(groups, key=lambda own: self.score([*chosen, *own]))
                group = list(max(itertools.permutations(strongest), key=partial(self.rise, chosen)))
            for patch in group:
                chosen.append(patch)
                best.append(max(best[-1], self.score(chosen)))
        values = torch.zeros(len(every))
        for patch, before in zip(chosen, best, strict=False):
            values[patch] = best[-1] - before
        return F.interpolate(values.view(1, 1, self.cells, self.cells), (64, 64))


@pytest.mark.parametrize(
    ("name", "mode", "group_size", "trials"),
    [
        ("shapes_detector", "deletion", 1, 2),
        *(("shapes_queries", "insertion", r, 4) for r in (1, 3)),
        pytest.param("shapes_queries", "insertion", 2, 4, marks=pytest.mark.slow),
        pytest.param("shapes_queries", "insertion", 1, 16, marks=pytest.mark.slow),
        ("shapes_queries", "deletion", 2, 4),
    ],
)
def test_vx_code_equals_a_plain_greedy_loop(
    name: str, mode: Any, group_size: int, trials: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr("saliency.methods.rise.SHORTLIST", 4)
    method = VXCODE(network(name), mode=mode, group_size=group_size, trials=trials, segments=(4, 4), chunk=5)
    found = method.attribute(X[:1], saliency.box())
    place = torch.tensor([float(n) for n in found.target_names[0].split("(")[1].rstrip(")").split(", ")])
    expected = PlainSearch(name, X[:1], place, 4, mode).map(group_size, 4, 0.1, trials)
    assert expected.count_nonzero() >= 16**2
    torch.testing.assert_close(found.values, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["insertion", "deletion"])
def test_vx_code_finds_patches_that_act_only_together(mode: Any) -> None:
    class Both(nn.Module):  # a score of 1 if two corners are seen, and of 0.2 for a third
        def forward(self, x: Tensor) -> Tensor:
            return (x[:, 0, 0, 0] * x[:, 0, 7, 7] + 0.2 * x[:, 0, 0, 7])[:, None]

    options: dict[str, Any] = {"segments": (4, 4), "mode": mode, "group_size": 2}
    found = VXCODE(Both(), **options).attribute(torch.ones(1, 3, 8, 8), 0).values[0, 0]
    corners = torch.stack([found[0, 0], found[7, 7]]).sort().values
    both = torch.tensor([1.2, 1.2]) if mode == "insertion" else torch.tensor([0.0, 1.2])
    torch.testing.assert_close(corners, both)  # hiding either of them is enough
    assert float(found[0, 7]) == pytest.approx(0.2)
    assert found.count_nonzero() == (12 if mode == "insertion" else 8)


def test_vx_code_tries_all_patches_in_windows_and_finds_the_order_of_a_linear_score() -> None:
    torch.manual_seed(0)
    head, image = nn.Linear(3 * 8 * 8, 1), torch.rand(1, 3, 8, 8)
    nn.init.uniform_(head.weight, 0, 1)
    model = nn.Sequential(nn.Flatten(), head)
    windows, every = (VXCODE(model, trials=trials).attribute(image, 0) for trials in (4, 64))
    torch.testing.assert_close(windows.values, every.values)
    assert every.run_stats[0].passes > 2000
    assert windows.run_stats[0].passes <= 395


def test_vx_code_ends_in_time_with_whole_selections_only() -> None:
    method = VXCODE(network("shapes_detector"), seconds=1e-6)
    found = method.attribute(X[:1], saliency.box())
    assert found.run_stats[0].stopped == "seconds"
    assert found.run_stats[0].passes == 1 + 64
    assert len(set(found.values.flatten().tolist())) == 2


def test_vx_code_of_any_other_target_searches_by_its_score() -> None:
    with torch.no_grad():
        mask = network("shapes_unet")(X[:1]).argmax(1) == 1
    found = VXCODE(network("shapes_unet")).attribute(X[:1], saliency.region("circle", where=mask))
    inside = F.interpolate(mask[None].float(), (64, 64)).bool()
    assert found.values[inside].mean() > 3 * found.values[~inside].mean()


@pytest.mark.parametrize("options", [{"mode": "both"}, {"group_size": 4}])
def test_vx_code_refuses_other_modes_and_numbers_of_patches(options: Any) -> None:
    with pytest.raises(MethodError, match="is not one of"):
        VXCODE(network("shapes_detector"), **options)


def test_vx_code_refuses_a_search_that_would_not_end_unless_its_time_is_limited() -> None:
    model, image = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), torch.rand(1, 2, 64, 64)
    with pytest.raises(MethodError, match="4096 segments need up to 541691 passes, more than 100000; use fewer"):
        VXCODE(model, segments=(64, 64)).attribute(image, 0)
    found = VXCODE(model, segments=(64, 64), seconds=1e-6).attribute(image, 0)
    assert found.run_stats[0].passes == 1 + 64**2


@pytest.mark.parametrize("of", ["class", "x0", "y0", "x1", "y1"])
def test_odam_equals_its_formula_by_autograd(of: Any) -> None:
    model: Any = saliency.load("shapes_detector").double()
    x = X[:1].double()
    explanation = ODAM(model, blur=0).attribute(x, saliency.box(of=of))
    parts = [float(n) for n in explanation.target_names[0].split("(")[1].rstrip(")").split(", ")]
    levels: list[Tensor] = []
    handles = [
        getattr(model, name).register_forward_hook(lambda module, args, output: levels.append(output))
        for name in ("coarse", "fine")
    ]
    (y, raw) = model(x)
    for handle in handles:
        handle.remove()
    corners = torch.cat([y[0, :2] - y[0, 2:4] / 2, y[0, :2] + y[0, 2:4] / 2]).T
    known = raw["scores"][0].detach().sigmoid()
    at = max(
        range(len(corners)), key=lambda i: iou(torch.tensor(parts), corners[i].detach()) + float(known[:, i].max())
    )
    overlaps = torch.tensor([iou(corners[at].detach(), own.detach()) for own in corners], dtype=torch.float64)
    weights = (20 * overlaps).expm1()
    label = int(known[:, at].argmax())
    values = raw["scores"][0, label] if of == "class" else corners[:, ["x0", "y0", "x1", "y1"].index(of)]
    score = (weights * values).sum() / (weights.sum() + 1)
    maps = [
        (gradient * level).sum(1, keepdim=True).clamp(min=0)
        for level, gradient in zip(levels, torch.autograd.grad(score, levels), strict=True)
    ]
    resized = [F.interpolate(own, (16, 16), mode="bilinear", align_corners=False) for own in maps]
    torch.testing.assert_close(explanation.values, torch.maximum(*resized).detach())
    assert not torch.equal(ODAM(model).attribute(x, saliency.box(of=of)).values, explanation.values)


def bottleneck(x: Tensor) -> tuple[Tensor, Tensor]:
    """The activations of the bottleneck of the U-Net in float64, and the gradient of the sum of the region there."""
    model: Any = saliency.load("shapes_unet").double()
    kept = list[Tensor]()
    handle = model.bottleneck.register_forward_hook(lambda module, args, output: kept.append(output))
    logits = model(x)
    handle.remove()
    region = logits.argmax(1) == 1
    return kept[0].detach(), torch.autograd.grad(logits[:, 1][region].sum() / region.sum(), kept[0])[0]


def test_a_region_at_the_bottleneck_is_seg_grad_cam_and_with_blocks_seg_xres_cam() -> None:
    x, model = X[:1].double(), saliency.load("shapes_unet").double()
    activation, gradient = bottleneck(x)
    target = saliency.region(1)
    found = GradCAM(model, "bottleneck").attribute(x, target)
    torch.testing.assert_close(found.values, (gradient.mean((2, 3), keepdim=True) * activation).sum(1, keepdim=True))
    for block in (1, 2, 3):  # with 3, the last block of an edge of 8 cells has 2
        maxima = gradient.clone()
        for row in range(0, 8, block):
            for column in range(0, 8, block):
                part = (..., slice(row, row + block), slice(column, column + block))
                maxima[part] = gradient[part].amax((2, 3), keepdim=True)
        found = HiResCAM(model, "bottleneck", block=block).attribute(x, target)
        torch.testing.assert_close(found.values, (maxima * activation).sum(1, keepdim=True))


CASES: dict[str, tuple[str, Any, Any]] = {  # the network, the target, and the target in the mirrored image
    "class": ("shapes_cnn", 1, 1),
    "box": ("shapes_detector", saliency.box(index=0), None),
    "region": ("shapes_unet", saliency.region("circle"), saliency.region("circle")),
}


@pytest.mark.parametrize("inner", ["layer_cam", "vanilla_gradient"])
@pytest.mark.parametrize("case", CASES)
def test_augmentation_is_the_mean_over_explicit_calls(case: str, inner: str) -> None:
    name, target, mirrored = CASES[case]
    model, x = saliency.load(name).double(), X[:1].double()
    method = METHODS[inner](model)
    found = Augmented(method, scales=(0.9, 1.1)).attribute(x, target)
    assert found.sign == method.sign
    if case == "region":  # the region of the clean image, also in the copies
        with torch.no_grad():
            mask = model(x).argmax(1) == 1
        target, mirrored = saliency.region("circle", where=mask), saliency.region("circle", where=mask.flip(-1))
    if case == "box":
        place = model(x)[0][0, :4].T
        best = model(x)[0][0, 4:].amax(0).argmax()
        centre, size = place[best].detach().chunk(2)
        x0, y0, x1, y1 = torch.cat([centre - size / 2, centre + size / 2]).tolist()
        label = int(model(x)[0][0, 4:, best].argmax())

        def near(box: Any) -> Any:
            def score(output: Any) -> Tensor:
                y, raw = output
                corners = torch.cat([y[:, :2] - y[:, 2:4] / 2, y[:, :2] + y[:, 2:4] / 2], 1).mT.detach()
                rows = []
                for own, logits in zip(corners, raw["scores"], strict=True):
                    overlaps = torch.tensor([iou(torch.tensor(box, dtype=own.dtype), each) for each in own])
                    weights = (20 * overlaps.double()).expm1()
                    rows.append((weights * logits[label]).sum() / (weights.sum() + 1))
                return torch.stack(rows)

            return score

        target, mirrored = near((x0, y0, x1, y1)), near((64 - x1, y0, 64 - x0, y1))
        if inner == "layer_cam":
            method = LayerCAM(model, "fine")
            found = Augmented(method, scales=(0.9, 1.1)).attribute(x, saliency.box(index=0))
    values = [method.attribute(x * scale, target).values for scale in (0.9, 1.1)]
    values += [method.attribute(x.flip(-1) * scale, mirrored).values.flip(-1) for scale in (0.9, 1.1)]
    torch.testing.assert_close(found.values, torch.cat(values).mean(0, keepdim=True))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("shapes_detector", saliency.box(of="x0")),
        ("shapes_keypoints", saliency.keypoint(1)),
        ("shapes_cnn", saliency.neuron("features.0", 0, at=(4, 4))),
    ],
)
def test_a_target_that_has_no_mirror_image_is_refused_by_augmentation(name: str, target: Any) -> None:
    method: Any = VanillaGradient(network(name))
    with pytest.raises(TargetError, match="mirrored image; pass flips=False"):
        Augmented(method).attribute(X[:1], target)
    assert Augmented(method, flips=False).attribute(X[:1], target).values.abs().max() > 0


@pytest.mark.parametrize("scales", [(), 1.0, (0.0,), ("large",)])
def test_scales_are_positive_numbers(scales: Any) -> None:
    with pytest.raises(MethodError, match="scales="):
        Augmented(GradCAM(network("shapes_cnn")), scales=scales)


# Errors of public code


class Fixed(nn.Module):
    """Detector of one box that does not depend on the image, or of none."""

    def __init__(self, boxes: int) -> None:
        super().__init__()
        self.boxes, self.scale = boxes, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        entry = {"boxes": torch.tensor([[8.0, 8, 40, 40]]), "scores": torch.tensor([0.9]), "labels": torch.tensor([1])}
        entry = {key: part[: self.boxes] for key, part in entry.items()}
        return [entry | {"scores": entry["scores"] + self.scale * own.mean()} for own in x]


@pytest.mark.parametrize("name", ["d_rise", "vx_code", "vanilla_gradient"])
def test_an_image_without_detections_is_an_error_that_says_so(name: str) -> None:
    with pytest.raises(saliency.errors.NotFoundError, match="the model found nothing"):
        METHODS[name](Fixed(0)).attribute(X[:1], saliency.box())


@pytest.mark.filterwarnings("ignore:.*0 everywhere")
@pytest.mark.parametrize("name", ["rise", "d_rise", "vx_code"])
def test_a_constant_score_is_a_map_of_zeros_and_not_of_nan(name: str) -> None:
    method = METHODS[name](Fixed(1), **METHODS[name].preview_options)
    assert method.attribute(X[:1], saliency.box()).values.count_nonzero() == 0


@pytest.mark.parametrize(
    ("name", "options"), [("d_rise", {"passes": 96}), ("vx_code", {"segments": (6, 6), "trials": 36})]
)
def test_masked_images_are_not_kept(name: str, options: dict[str, Any]) -> None:
    model, inputs = network("shapes_detector"), list[Any]()
    handle = model.register_forward_hook(lambda module, args, output: inputs.append(weakref.ref(args[0])))
    alive = list[int]()
    counter = model.register_forward_hook(lambda *_: alive.append(sum(own() is not None for own in inputs)))
    METHODS[name](model, chunk=4, **options).attribute(X[:1], saliency.box())
    handle.remove()
    counter.remove()
    assert len(alive) >= 24
    assert max(alive) <= 4


def test_odam_has_a_map_also_with_equal_maxima_and_for_a_box_of_low_overlap() -> None:
    model = Linear()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    explanation = ODAM(model).attribute(torch.ones(1, 3, 16, 16), saliency.box(read=whole, box=(0, 0, 16, 10)))
    assert explanation.target_names[0].endswith("IoU 0.62")
    assert explanation.values.min() > 0
    torch.testing.assert_close(explanation.values, explanation.values.max().expand_as(explanation.values))
