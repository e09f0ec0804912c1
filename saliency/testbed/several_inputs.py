"""Drawn scenes for networks with several inputs: colours and depth, and the two cameras of a robot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..validation import check_choice
from .shapes import CLASSES, COLOURS, SIZE, draw_noise, draw_scenes

RgbdTask = Literal["colour", "depth", "both"]
RGBD_TASKS: tuple[RgbdTask, ...] = get_args(RgbdTask)
CAMERAS = ("observation.images.top", "observation.images.wrist")
INSTRUCTION = "observation.instruction"
STEPS = 4  # points of a motion


@dataclass(frozen=True, slots=True)
class InputScenes:
    """Scenes of two images, by the names of the inputs of a network. Each image shows up to two objects."""

    inputs: dict[str, Tensor]  # images (N, C, 64, 64), uint8 or float32, and others
    masks: dict[str, Tensor]  # for each image (N, 2, 64, 64), bool; empty for objects that it does not show
    shapes: dict[str, Tensor]  # (N, 2), indices into CLASSES + DISTRACTORS
    importance: dict[str, Tensor]  # (N, 2), 1 for the object that decides the answer, if the image shows it
    answers: Tensor  # (N,), classes; or motions (N, 4, 2)

    @property
    def evidence(self) -> dict[str, Tensor]:
        """The pixels of the object that decides the answer, (N, 1, 64, 64), bool; empty if the image shows none."""
        important = {name: (own > 0)[..., None, None] for name, own in self.importance.items()}
        return {name: (own & important[name]).any(1, keepdim=True) for name, own in self.masks.items()}

    @property
    def distractor(self) -> dict[str, Tensor]:
        """The pixels of all other objects, (N, 1, 64, 64), bool."""
        return {name: self.masks[name].any(1, keepdim=True) & ~own for name, own in self.evidence.items()}


def draw_rgbd(count: int, *, seed: int = 0, task: RgbdTask = "both") -> InputScenes:
    """Draw colours and depths of the scenes of `draw_scenes`: an object of a class, and a distractor.

    "rgb" is an image, and "depth" (N, 1, 64, 64) the height above the background, whose mean is 0. The answer is the
    class. The tasks differ in where both objects show:

    - "colour": in the colours only, as prints on a wall.
    - "depth": in the depth only, in the colours of the background.
    - "both": in both, at the same place.

    Args:
        count: The number of scenes.
        seed: Fixes the scenes, with the count. The global random state is neither read nor changed.
        task: The inputs that show the objects.

    Raises:
        MethodError: The task is unknown, or the count is below 1.
    """
    check_choice("task", task, RGBD_TASKS)
    scenes, random = draw_scenes(count, seed=seed), torch.Generator("cpu").manual_seed(~seed)
    shows = {"rgb": task != "depth", "depth": task != "colour"}
    heights = 0.5 + 0.5 * torch.rand(count, 2, 1, 1, generator=random, device="cpu", dtype=torch.float32)
    ground, grain = draw_noise(count, random)
    objects = (scenes.masks * heights * shows["depth"]).sum(1, keepdim=True)
    depth = (ground - 0.5 + grain)[:, :1] + objects
    return InputScenes(
        {"rgb": scenes.images if shows["rgb"] else scenes.backgrounds, "depth": depth},
        {name: scenes.masks & own for name, own in shows.items()},
        dict.fromkeys(shows, scenes.shapes),
        {name: scenes.importance * own for name, own in shows.items()},
        scenes.labels,
    )


def draw_cameras(count: int, *, seed: int = 0) -> InputScenes:
    """Draw what two cameras of a robot see, and an instruction such as "move to the red circle".

    Each camera sees two objects of different classes and colours. Only one camera sees the object of the instruction,
    which is one-hot: its colour, then its class. The answer is the motion from the centre of the image to the object,
    as four points (x, y) at equal distances; the edges of the image are at -1 and 1.

    Args:
        count: The number of scenes.
        seed: Fixes the scenes, with the count. The global random state is neither read nor changed.

    Raises:
        MethodError: The count is below 1.
    """
    views = [draw_scenes(count, seed=2 * seed + camera, task="two_objects") for camera in range(len(CAMERAS))]
    random = torch.Generator("cpu").manual_seed(~seed)
    seen = torch.randint(len(CAMERAS), (count,), generator=random, device="cpu")
    rows = torch.arange(count, device="cpu")
    shapes, colours = torch.stack([own.shapes for own in views]), torch.stack([own.colours for own in views])
    shape, colour = shapes[seen, rows, 0], colours[seen, rows, 0]
    importance = torch.zeros_like(shapes)  # (cameras, N, 2)
    importance[seen, rows, 0] = 1
    # An equal object in the other camera is left out.
    kept = (shapes != shape[:, None]) | (colours != colour[:, None]) | (importance > 0)
    masks = torch.stack([own.masks for own in views]) & kept[..., None, None]
    images = [own.without((own.masks ^ mask).any(1, keepdim=True)) for own, mask in zip(views, masks, strict=True)]
    pixels = 2 * torch.arange(0.5, SIZE, device="cpu", dtype=torch.float32) / SIZE - 1
    mask = masks[seen, rows, 0].float()
    centres = torch.stack([mask.sum(1) @ pixels, mask.sum(2) @ pixels], 1) / mask.sum((1, 2))[:, None]
    steps = torch.arange(1, STEPS + 1, device="cpu", dtype=torch.float32)
    instruction = torch.cat([F.one_hot(colour, len(COLOURS)), F.one_hot(shape, len(CLASSES))], 1).float()
    return InputScenes(
        dict(zip(CAMERAS, images, strict=True)) | {INSTRUCTION: instruction},
        dict(zip(CAMERAS, masks, strict=True)),
        dict(zip(CAMERAS, shapes, strict=True)),
        dict(zip(CAMERAS, importance, strict=True)),
        centres[:, None] * steps[:, None] / STEPS,
    )
