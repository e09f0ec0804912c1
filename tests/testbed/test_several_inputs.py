"""Scenes for networks with several inputs: which image shows the object, and what the answer follows from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import testbed
from benchmarks.train_testbed import HELD_OUT
from saliency.errors import MethodError
from saliency.testbed import (
    CAMERAS,
    CLASSES,
    INSTRUCTION,
    RGBD_TASKS,
    InputScenes,
    RgbdTask,
    draw_cameras,
    draw_rgbd,
    draw_scenes,
)

SEEN = draw_cameras(200, seed=3)
# The fewest of 50 scenes with the right input for the colours and the depth, and with the object in both inputs.
RIGHT = {
    "input_x_gradient": (50, 50, 48),
    "integrated_gradients": (50, 50, 48),
    "lrp": (50, 50, 50),
    "attn_lrp": (50, 50, 48),
    "occlusion": (50, 50, 45),
    "kernel_shap": (50, 50, 0),
}
# The fewest of 50 scenes with the camera that sees the object, and with the object.
SEES = {
    "input_x_gradient": (48, 47),
    "integrated_gradients": (44, 44),
    "lrp": (47, 45),
    "attn_lrp": (47, 45),
    "occlusion": (46, 42),
    "kernel_shap": (43, 0),
    "layer_cam": (48, 48),
    "attention_rollout": (48, 0),
}


def depth_of(scenes: InputScenes, mask: torch.Tensor) -> torch.Tensor:
    return (scenes.inputs["depth"] * mask).sum((1, 2, 3)) / mask.sum((1, 2, 3)).clamp(1)


@pytest.mark.parametrize("draw", [draw_rgbd, draw_cameras])
def test_a_seed_fixes_the_scenes_and_leaves_the_global_random_state_alone(draw: Any) -> None:
    state = torch.get_rng_state()
    one, again, other = (draw(5, seed=seed) for seed in (3, 3, 5))
    for field in ("inputs", "masks", "shapes", "importance"):
        for name, own in getattr(one, field).items():
            assert torch.equal(own, getattr(again, field)[name])
    assert torch.equal(one.answers, again.answers)
    assert all(not torch.equal(own, other.inputs[name]) for name, own in one.inputs.items())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("task", RGBD_TASKS)
def test_the_object_and_the_distractor_show_in_the_inputs_of_the_task(task: RgbdTask) -> None:
    scenes, drawn = draw_rgbd(50, seed=4, task=task), draw_scenes(50, seed=4)
    assert torch.equal(scenes.answers, drawn.labels)
    assert torch.equal(scenes.inputs["rgb"], drawn.backgrounds if task == "depth" else drawn.images)
    assert abs(float(scenes.inputs["depth"][~drawn.masks.any(1, keepdim=True)].mean())) < 0.02
    for number in range(2):
        heights = depth_of(scenes, drawn.masks[:, number, None])
        assert (heights.abs().max() < 0.3) if task == "colour" else (heights.min() > 0.3)
    for name, other in (("rgb", "depth"), ("depth", "colour")):
        is_shown = task != other
        assert torch.equal(scenes.evidence[name], drawn.evidence & is_shown)
        assert torch.equal(scenes.distractor[name], drawn.distractor & is_shown)
        assert (scenes.importance[name][:, 0] == is_shown).all()


def test_the_depth_of_an_object_does_not_tell_its_class() -> None:
    scenes = draw_rgbd(500, seed=9)
    heights = depth_of(scenes, scenes.evidence["depth"])
    for label in range(len(CLASSES)):
        assert abs(float(heights[scenes.answers == label].mean()) - 0.75) < 0.06


def test_only_one_camera_sees_the_object_of_the_instruction() -> None:
    sees = torch.stack([SEEN.evidence[name].any((1, 2, 3)) for name in CAMERAS], 1)
    assert (sees.sum(1) == 1).all()
    assert abs(float(sees[:, 0].double().mean()) - 0.5) < 0.1
    assert torch.equal(sees, torch.stack([SEEN.importance[name].sum(1) for name in CAMERAS], 1).bool())
    assert SEEN.inputs[INSTRUCTION].sum(1).tolist() == [2] * 200
    shape = SEEN.inputs[INSTRUCTION][:, 4:].argmax(1)
    for number, name in enumerate(CAMERAS):
        assert torch.equal(SEEN.shapes[name][sees[:, number], 0], shape[sees[:, number]])


def test_the_colour_and_the_class_of_the_instruction_occur_once() -> None:
    palette = torch.tensor([[0.9, 0.2, 0.2], [0.1, 0.7, 0.2], [0.2, 0.3, 0.9], [0.9, 0.8, 0.1]])
    instruction = SEEN.inputs[INSTRUCTION]
    colour, shape = instruction[:, :4].argmax(1), instruction[:, 4:].argmax(1)
    same = torch.zeros(200)
    for name in CAMERAS:
        image, masks = SEEN.inputs[name] / 255, SEEN.masks[name]
        means = (image[:, None] * masks[:, :, None]).sum((3, 4)) / masks.sum((2, 3)).clamp(1)[..., None]  # (N, 2, 3)
        colours = torch.cdist(means, palette[None]).argmin(2)
        is_same = (colours == colour[:, None]) & (SEEN.shapes[name] == shape[:, None])
        same += (is_same & masks.any((2, 3))).sum(1)
    assert same.tolist() == [1] * 200


def test_the_motion_ends_at_the_object() -> None:
    mask = sum(SEEN.evidence[name].float() for name in CAMERAS)[:, 0]  # type: ignore[index]
    ends = (SEEN.answers[:, -1] + 1) * 32
    at = mask.nonzero()
    for row, (x, y) in enumerate(ends.tolist()):
        pixels = at[at[:, 0] == row, 1:].float() + 0.5
        assert (pixels.mean(0) - torch.tensor([y, x])).abs().max() < 1e-3
    assert torch.allclose(SEEN.answers[:, 0] * 4, SEEN.answers[:, -1])


def test_an_unknown_task_and_a_count_of_no_scenes_are_errors() -> None:
    with pytest.raises(MethodError, match='did you mean "colour"'):
        draw_rgbd(1, task="color")  # type: ignore[arg-type]
    for draw in (draw_rgbd, draw_cameras):
        with pytest.raises(MethodError, match="count=0 is not a whole number of at least 1"):
            draw(0)


def right(values: torch.Tensor) -> int:
    return int((values > 0).sum())


def check_rgbd(method: str, scenes: int, fewest: tuple[float, ...]) -> None:
    of_task = {task: testbed.rgbd_values(method, task, scenes) for task in RGBD_TASKS}
    assert right(-of_task["colour"]["depth"]) >= fewest[0]
    assert right(of_task["depth"]["depth"]) >= fewest[1]
    maps = [own for values in of_task.values() for name, own in values.items() if name != "depth"]
    assert len(maps) == (0 if method == "kernel_shap" else 4)
    for margins in maps:
        assert margins.mean() > 2 * testbed.standard_error(margins)
    if maps:
        assert right(torch.minimum(*maps[2:])) >= fewest[2]


@pytest.mark.parametrize("method", ["input_x_gradient", "lrp", "kernel_shap"])
def test_the_input_that_shows_the_class_has_the_larger_share_and_the_map_lies_on_the_object(method: str) -> None:
    check_rgbd(method, 12, (12, 12, 11))


@pytest.mark.slow
@pytest.mark.parametrize("method", RIGHT)
def test_shares_and_maps_are_right_as_often_as_the_documentation_says(method: str) -> None:
    check_rgbd(method, 50, RIGHT[method])


@pytest.mark.parametrize("method", ["input_x_gradient", "lrp", "layer_cam", "attention_rollout"])
def test_the_camera_that_sees_the_object_has_the_larger_share(method: str) -> None:
    values = testbed.policy_values(method, 12)
    assert right(values["camera"]) >= 11
    assert right(values["object"]) >= (0 if method == "attention_rollout" else 11)


@pytest.mark.slow
@pytest.mark.parametrize("method", SEES)
def test_cameras_and_objects_are_right_as_often_as_the_documentation_says(method: str) -> None:
    values = testbed.policy_values(method)
    for own, fewest in zip(values.values(), SEES[method], strict=False):
        assert right(own) >= fewest


@pytest.mark.slow
def test_windows_of_the_width_of_the_objects_find_rings_that_smaller_windows_miss() -> None:
    small, large = (testbed.policy_values("occlusion", **options) for options in ({}, testbed.OF_OBJECT_SIZE))
    named = draw_cameras(testbed.IMAGES, seed=HELD_OUT).inputs[INSTRUCTION][:, -len(CLASSES) :].argmax(1)
    is_ring = named == CLASSES.index("ring")
    assert right(large["object"][is_ring]) > right(small["object"][is_ring])
    assert min(right(values) for values in large.values()) >= 46
