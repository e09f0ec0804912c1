from __future__ import annotations

import pytest
import torch

from saliency.testbed import CLASSES, COLOURS, DISTRACTORS, Scenes, draw_scenes

SCENES = draw_scenes(200, seed=3)
TWO = draw_scenes(200, seed=4, two_classes=True)


def centres(scenes: Scenes) -> torch.Tensor:
    """The mean (x, y) of each mask, (N, 2, 2)."""
    masks, pixels = scenes.masks.double(), torch.arange(64) + 0.5
    sums = torch.stack([(masks * pixels).sum((2, 3)), (masks * pixels[:, None]).sum((2, 3))], 2)
    return sums / masks.sum((2, 3))[..., None]


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


def test_place_and_colour_do_not_tell_the_class() -> None:
    scenes = draw_scenes(2000, seed=9)
    places = centres(scenes)[:, 0]
    colours = torch.nn.functional.one_hot(scenes.colours[:, 0]).double()
    for label in range(len(CLASSES)):
        chosen = scenes.labels == label
        assert (colours[chosen].mean(0) - 1 / len(COLOURS)).abs().max() < 0.08
        assert (places[chosen].mean(0) - 32).abs().max() < 4  # of a triangle, the lower part is larger


@pytest.mark.parametrize("scenes", [SCENES, TWO])
def test_captions_name_what_is_in_the_image_and_where(scenes: Scenes) -> None:
    names, hues = CLASSES + DISTRACTORS, tuple(COLOURS)
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    places_of_all = centres(scenes).tolist()
    for image, captions in enumerate(scenes.captions()):
        objects = zip(scenes.shapes[image].tolist(), scenes.colours[image].tolist(), strict=True)
        one, other = (f"a {hues[hue]} {names[shape]}" for shape, hue in objects)
        (x, y), (other_x, other_y) = places_of_all[image]
        places = {"left of": x < other_x, "right of": x > other_x, "above": y < other_y, "below": y > other_y}
        relation = captions[2].removeprefix(one).removesuffix(other).strip()
        assert places[relation]
        assert captions == (one, other, f"{one} {relation} {other}", f"{other} {opposite[relation]} {one}")
