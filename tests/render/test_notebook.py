"""The picture of an explanation at the end of a notebook cell."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from saliency import GradCAM, overlay
from saliency.attribution.explanation import Explanation
from saliency.testing import tiny_model
from tests.drawing import explained, hot, noise, pixels_of, whole


def shown(explanation: Explanation) -> Image.Image:
    png = explanation._repr_png_()
    assert png is not None
    return Image.open(io.BytesIO(png))


def test_a_notebook_shows_the_overlay() -> None:
    explanation = explained(hot(7, 7, 3, 3), whole(noise(90, 60)))
    assert np.array_equal(pixels_of(shown(explanation)), pixels_of(overlay(explanation, size=480)))


def test_a_notebook_shows_several_images_as_one_picture() -> None:
    explanation = GradCAM(tiny_model()).attribute(torch.rand(3, 3, 16, 16), 1)
    one = shown(explanation[0])
    assert one.size == (480, 480)
    assert pixels_of(one).std() > 8
    assert shown(explanation).height > 3 * shown(explanation[:2]).height / 2.5


def test_a_notebook_shows_the_overlay_after_any_import() -> None:
    code = """
from saliency.methods.cam import GradCAM
from saliency.testing import tiny_model
import torch
print(GradCAM(tiny_model()).attribute(torch.rand(1, 3, 16, 16), 1)._repr_png_()[:4])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.startswith(r"b'\x89PNG")


@pytest.mark.filterwarnings("ignore:the made_up map")
def test_what_cannot_be_drawn_is_shown_as_text() -> None:
    explanation = explained(torch.full((1, 4, 4), torch.nan), whole(noise(9, 9)))
    assert explanation._repr_png_() is None
    assert explained(torch.zeros(1, 4, 4), None)._repr_png_() is not None
    assert replace(explanation, sign="unknown")._repr_png_() is None  # type: ignore[arg-type]
