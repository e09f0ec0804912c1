"""The code that draws a method on five images: shown on its page, and run by `make gallery`."""

from __future__ import annotations

from saliency.attribution.base import Attribution

_PHOTOS = """\
from pathlib import Path

import saliency

model = saliency.load("efficientnet_lite0")
photos = sorted(Path("assets").glob("*.jpg"))
explanations = saliency.{name}(model{budget}).attribute(photos)
saliency.contact_sheet([[each] for each in explanations], thumb=200).save("{file}.jpg")
"""
_DRAWN = """\
import saliency

model = saliency.load("{network}")
scenes = saliency.testbed.draw_scenes(5, seed=1_000_000{task})
explanations = saliency.{name}(model).attribute(scenes.images{target})
saliency.contact_sheet([[each] for each in explanations], thumb=200).save("{file}.jpg")
"""
_OBJECTS = ', task="several"'
_DETECTED = {"network": "shapes_detector", "task": _OBJECTS, "target": ", saliency.box()"}
_PATCHES = {"network": "shapes_vit", "task": "", "target": ""}
_TARGETS = {
    "ODAM": _DETECTED,
    "DRISE": _DETECTED,
    "VXCODE": _DETECTED,
    "AttnLRP": _PATCHES,
    "CPLRP": _PATCHES,
    "ViTCX": _PATCHES,
}
BUDGETS = {
    "ScoreCAM": "channels=200",
    "ExpectedGradients": "passes=100",
    "GuidedIG": "steps=100",
    "LIME": "passes=500",
    "KernelSHAP": "passes=500",
    "ShapleySampling": "passes=500",
    "RISE": "passes=1000",
    "Sobol": "passes=528",
    "ExtremalPerturbation": "steps=200",
}
"""Options of methods that take minutes for five photos by default, on one core."""


def example(cls: type[Attribution]) -> str:
    """Return the code that draws a method on five photos, or on drawn scenes if it needs attention or objects."""
    budget = f", {BUDGETS[cls.__name__]}" if cls.__name__ in BUDGETS else ""
    names = {"name": cls.__name__, "file": cls.name, "budget": budget}
    if cls.__name__ in _TARGETS:
        return _DRAWN.format(**names, **_TARGETS[cls.__name__])
    if cls.needs.attention:
        return _DRAWN.format(**names, **_PATCHES)
    return _PHOTOS.format(**names)
