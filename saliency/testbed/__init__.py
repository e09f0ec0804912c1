"""Images where the right map is known, and small networks trained on them."""

from __future__ import annotations

from .networks import CaptionProcessor
from .several_inputs import CAMERAS, INSTRUCTION, RGBD_TASKS, InputScenes, RgbdTask, draw_cameras, draw_rgbd
from .shapes import CLASSES, COLOURS, DISTRACTORS, KEYPOINTS, TASKS, Scenes, Task, draw_scenes
from .volumes import SOLIDS, Volumes, draw_volumes

__all__ = [
    "CAMERAS",
    "CLASSES",
    "COLOURS",
    "DISTRACTORS",
    "INSTRUCTION",
    "KEYPOINTS",
    "RGBD_TASKS",
    "SOLIDS",
    "TASKS",
    "CaptionProcessor",
    "InputScenes",
    "RgbdTask",
    "Scenes",
    "Task",
    "Volumes",
    "draw_cameras",
    "draw_rgbd",
    "draw_scenes",
    "draw_volumes",
]
