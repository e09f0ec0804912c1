"""Images with a known correct map, and small networks trained on them."""

from __future__ import annotations

from .networks import CaptionProcessor
from .shapes import CLASSES, COLOURS, DISTRACTORS, KEYPOINTS, TASKS, Scenes, Task, draw_scenes
from .volumes import SOLIDS, Volumes, draw_volumes

__all__ = [
    "CLASSES",
    "COLOURS",
    "DISTRACTORS",
    "KEYPOINTS",
    "SOLIDS",
    "TASKS",
    "CaptionProcessor",
    "Scenes",
    "Task",
    "Volumes",
    "draw_scenes",
    "draw_volumes",
]
