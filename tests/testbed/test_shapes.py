from __future__ import annotations

import math

import pytest
import torch

from saliency.errors import MethodError
from saliency.testbed import CLASSES, COLOURS, DISTRACTORS, TASKS, Scenes, Task, draw_scenes

SCENES = draw_scenes(200, seed=3)
TWO = draw_scenes(200, seed=4, task="two_objects")


def centres(scenes: Scenes) -> torch.Tensor:
    """The mean (x, y) of each mask, (N, 2, 2)."""
    masks, pixels = scenes.masks.double(), torch.arange(64) + 0.5
    sums = torch.stack([(masks * pixels).sum((2, 3)), (masks * pixels[:, None]).sum((2, 3))], 2)
    return sums / masks.sum((2, 3))[..., None]


NAMES = CLASSES + DISTRACTORS


def shapes_of(scenes: Scenes) -> list[list[str]]:
    return [[NAMES[shape] for shape in row] for row in scenes.shapes.tolist()]


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_fixes_the_scenes_of_each_task(task: Task) -> None:
    one, again, other = (draw_scenes(20, seed=seed, task=task) for seed in (3, 3, 5))
    for field in Scenes.__slots__:
        assert torch.equal(getattr(one, field), getattr(again, field))
    assert not torch.equal(one.images, other.images)
    assert not torch.equal(one.shapes, other.shapes)


@pytest.mark.parametrize("task", TASKS)
def test_masks_are_exactly_what_is_drawn_and_do_not_overlap(task: Task) -> None:
    scenes = draw_scenes(100, seed=6, task=task, watermarked=(0.9, 0.5, 0, 0, 0))
    covered = scenes.evidence.long() + scenes.distractor + scenes.watermark
    assert covered.max() == 1
    assert (scenes.masks.sum(1, keepdim=True) + scenes.watermark).max() == 1
    assert torch.equal((scenes.images != scenes.backgrounds).any(1, keepdim=True), covered.bool())
    assert torch.equal(scenes.without(covered.bool()), scenes.backgrounds)
    for each, pixels in enumerate(scenes.masks.unbind(1)):
        changed = scenes.without(scenes.masks[:, each, None]) != scenes.images
        assert torch.equal(changed.any(1), pixels)


@pytest.mark.parametrize("task", ["planted", "two_objects", "sizes", "shortcut"])
def test_the_label_is_the_class_of_the_first_object(task: Task) -> None:
    scenes = draw_scenes(100, seed=2, task=task)
    assert torch.equal(scenes.labels, scenes.shapes[:, 0])
    assert torch.equal(scenes.evidence, scenes.masks[:, :1])
    assert torch.equal(scenes.distractor, scenes.masks[:, 1:])


@pytest.mark.parametrize("task", ["several", "corners"])
def test_objects_of_one_class_occur_twice_and_the_first_object_is_the_label(task: Task) -> None:
    scenes = draw_scenes(100, seed=2, task=task)
    assert torch.equal(scenes.labels, scenes.shapes[:, 0])
    assert torch.equal(scenes.evidence, scenes.masks[:, :1])
    if task == "several":
        assert torch.equal(scenes.shapes[:, 0], scenes.shapes[:, 1])
        assert set(scenes.shapes.flatten().tolist()) == {0, 1, 2}
    else:
        assert (scenes.shapes == 2).sum(1).tolist() == [1] * 100
    areas = scenes.masks.sum((2, 3)).double()
    assert areas.min() < 100 < 230 < areas.max()


def test_boxes_enclose_the_masks_and_keypoints_are_the_corners_of_triangles() -> None:
    scenes = draw_scenes(30, seed=2, task="corners")
    for mask, box in zip(scenes.masks.flatten(0, 1), scenes.boxes.flatten(0, 1), strict=True):
        x0, y0, x1, y1 = (int(side) for side in box)
        assert mask[y0:y1, x0:x1].sum() == mask.sum()
        assert all(line.any() for line in (mask[y0], mask[y1 - 1], mask[:, x0], mask[:, x1 - 1]))
    points = scenes.keypoints
    assert torch.equal(points.isnan().any((2, 3)), scenes.shapes != 2)
    for mask, (top, left, right) in zip(scenes.masks[:, 0], points[:, 0].tolist(), strict=True):
        places = mask.nonzero().flip(1) + 0.5
        for corner in (top, left, right):
            assert (places - torch.tensor(corner)).norm(dim=1).min() < 1.6
        assert top[1] < left[1] == right[1]
        assert left[0] < top[0] < right[0]


def test_small_and_large_objects_are_whole_and_their_sizes_are_independent() -> None:
    scenes = draw_scenes(600, seed=1, task="sizes")
    small, large = (math.pi * radius**2 for radius in (5, 10))
    areas = scenes.masks.sum((2, 3))
    is_large = areas > (small + large) / 2
    assert (areas[is_large] / large - 1).abs().max() < 0.1
    assert (areas[~is_large] / small - 1).abs().max() < 0.3
    assert (is_large.double().mean(0) - 0.5).abs().max() < 0.08
    assert abs(float((is_large[:, 0] == is_large[:, 1]).double().mean()) - 0.5) < 0.08


def test_a_watermark_is_on_the_given_share_of_each_class_and_changes_nothing_else() -> None:
    shares = (0.8, 0, 0.3, 0, 1)
    scenes, planted = draw_scenes(500, seed=8, task="shortcut", watermarked=shares), draw_scenes(500, seed=8)
    marked = scenes.watermark.any((1, 2, 3))
    for label, share in enumerate(shares):
        assert abs(float(marked[scenes.labels == label].double().mean()) - share) < (0.15 if 0 < share < 1 else 1e-9)
    assert set(scenes.watermark[marked].sum((1, 2, 3)).tolist()) == {72}
    assert torch.equal(scenes.without(scenes.watermark), planted.images)
    assert torch.equal(scenes.masks, planted.masks)
    assert not planted.watermark.any()


def test_the_label_of_xor_needs_both_parts() -> None:
    scenes = draw_scenes(500, seed=3, task="xor")
    for (one, other, third), label in zip(shapes_of(scenes), scenes.labels.tolist(), strict=True):
        assert {one, other} <= {"circle", "square"}
        assert third in DISTRACTORS
        assert label == (one != other)
    assert torch.equal(scenes.evidence, scenes.masks[:, :2].any(1, keepdim=True))
    assert torch.equal(scenes.distractor, scenes.masks[:, 2:])
    for part in range(2):  # neither part alone tells the label
        for shape in range(2):
            assert abs(float(scenes.labels[scenes.shapes[:, part] == shape].double().mean()) - 0.5) < 0.1


def test_the_label_of_occlusion_follows_from_the_weights_of_the_objects() -> None:
    scenes = draw_scenes(200, seed=3, task="occlusion")
    weights = {"circle": 3, "square": 2, "triangle": 1} | dict.fromkeys(DISTRACTORS, 0)
    assert scenes.importance.tolist() == [[weights[shape] for shape in shapes] for shapes in shapes_of(scenes)]
    assert scenes.labels.tolist() == [int(sum(row) >= 6) for row in scenes.importance.tolist()]
    for each in range(4):
        important = (scenes.importance[:, each] > 0)[:, None, None]
        assert torch.equal(scenes.masks[:, each] & scenes.evidence[:, 0], scenes.masks[:, each] & important)


def test_an_unknown_task_is_an_error() -> None:
    with pytest.raises(MethodError, match='did you mean "xor"'):
        draw_scenes(1, task="xnor")  # type: ignore[arg-type]


def test_a_seed_fixes_the_images_and_leaves_the_global_random_state_alone() -> None:
    state = torch.get_rng_state()
    again, other = draw_scenes(200, seed=3), draw_scenes(200, seed=5)
    assert torch.equal(again.images, SCENES.images)
    assert torch.equal(again.masks, SCENES.masks)
    assert not torch.equal(other.images, SCENES.images)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("scenes", [SCENES, TWO])
def test_the_pixels_of_a_mask_have_the_colour_of_the_object_and_all_others_are_grey(scenes: Scenes) -> None:
    palette = torch.tensor(list(COLOURS.values()))
    for each in range(2):
        pixels = (scenes.images / 255).movedim(1, 3)[scenes.masks[:, each]]
        wanted = palette[scenes.colours[:, each]].repeat_interleave(scenes.masks[:, each].sum((1, 2)), 0)
        assert (pixels - wanted).mean(0).abs().max() < 0.02
        assert ((pixels - wanted).abs().amax(1) < 0.45).all()
    ground = (scenes.images / 255).movedim(1, 3)[~scenes.masks.any(1)]
    assert (ground.mean(0) - 0.5).abs().max() < 0.01


def test_objects_are_whole_and_apart_and_of_one_area() -> None:
    for scenes in (SCENES, TWO):
        assert not (scenes.masks[:, 0] & scenes.masks[:, 1]).any()
        assert not scenes.masks[..., [0, -1], :].any()
        assert not scenes.masks[..., [0, -1]].any()
        areas = scenes.masks.sum((2, 3))
        assert areas.min() >= 180
        assert areas.max() <= 220


def test_only_the_named_object_is_of_a_class_unless_both_are() -> None:
    assert set(SCENES.labels.tolist()) == set(range(len(CLASSES)))
    assert set(SCENES.shapes[:, 1].tolist()) == {len(CLASSES) + each for each in range(len(DISTRACTORS))}
    assert set(TWO.shapes.flatten().tolist()) == set(range(len(CLASSES)))
    assert (TWO.shapes[:, 0] != TWO.shapes[:, 1]).all()
    assert (TWO.colours[:, 0] != TWO.colours[:, 1]).all()


@pytest.mark.slow
def test_place_and_colour_do_not_tell_the_class() -> None:
    scenes = draw_scenes(2000, seed=9)
    places = centres(scenes)[:, 0]
    colours = torch.nn.functional.one_hot(scenes.colours[:, 0]).double()
    for label in range(len(CLASSES)):
        chosen = scenes.labels == label
        assert (colours[chosen].mean(0) - 1 / len(COLOURS)).abs().max() < 0.08
        assert (places[chosen].mean(0) - 32).abs().max() < 4  # of a triangle, the lower part is larger


@pytest.mark.parametrize("scenes", [SCENES, TWO, draw_scenes(100, task="xor"), draw_scenes(100, task="occlusion")])
def test_captions_name_what_is_in_the_image_and_where(scenes: Scenes) -> None:
    names, hues = CLASSES + DISTRACTORS, tuple(COLOURS)
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    places_of_all = centres(scenes).tolist()
    for image, captions in enumerate(scenes.captions()):
        objects = zip(scenes.shapes[image, :2].tolist(), scenes.colours[image, :2].tolist(), strict=True)
        one, other = (f"a {hues[hue]} {names[shape]}" for shape, hue in objects)
        (x, y), (other_x, other_y) = places_of_all[image][:2]
        places = {"left of": x < other_x, "right of": x > other_x, "above": y < other_y, "below": y > other_y}
        relation = captions[2].removeprefix(one).removesuffix(other).strip()
        assert places[relation]
        assert captions == (one, other, f"{one} {relation} {other}", f"{other} {opposite[relation]} {one}")


@pytest.mark.parametrize("count", [0, -1, 2.5])
def test_a_count_of_no_images_is_an_error(count: float) -> None:
    with pytest.raises(MethodError, match=f"count={count} is not a whole number of at least 1"):
        draw_scenes(count)  # type: ignore[arg-type]
