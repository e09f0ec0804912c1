"""Made-up photos and explanations for the tests of drawing."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from saliency import METHODS
from saliency.attribution.explanation import Explanation
from saliency.io.geometry import Frame
from saliency.targets.question import QuestionFacts
from saliency.validation import Sign


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A photo of random colours, in which every change shows."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def explained(
    values: Tensor,
    frame: Frame | None,
    sign: Sign = "positive",
    *,
    method: str = "made_up",
    name: str = "espresso",
    probability: float | None = 0.951,
) -> Explanation:
    """An explanation of one image with these values (C, h, w), as if a method had returned it."""
    return Explanation(
        values[None],
        torch.ones(1),
        evidence={} if probability is None else {"probabilities": torch.tensor([probability])},
        questions=(QuestionFacts(name, 7),),
        frames=(frame,),
        input_size=(224, 224),
        method=method,
        title=METHODS[method].__name__ if method in METHODS else method,
        units=METHODS[method].units if method in METHODS else f"{method} value",
        sign=sign,
    )


def whole(picture: Image.Image) -> Frame:
    return Frame(picture, (0.0, 0.0, float(picture.width), float(picture.height)))


def pixels_of(picture: Image.Image) -> NDArray[np.uint8]:
    return np.asarray(picture)


def hot(height: int, width: int, row: int, column: int) -> Tensor:
    values = torch.zeros(1, height, width)
    values[0, row, column] = 1.0
    return values
