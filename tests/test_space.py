"""The hosted demo answers once, where Gradio is installed; the package does not depend on it."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import pytest
from PIL import Image

import saliency

ROOT = Path(__file__).parents[1]
CAT = ROOT / "assets" / "chelsea.jpg"


@pytest.mark.slow
def test_the_demo_explains_a_photo() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages
        gradio = pytest.importorskip("gradio")
        app = runpy.run_path(str(ROOT / "examples" / "space" / "app.py"))
    drawn, text = app["explain"](Image.open(CAT), "tabby", "GradCAM")
    wanted = saliency.overlay(saliency.GradCAM(app["model"]).attribute(CAT, "tabby"), size=800)
    assert drawn.tobytes() == wanted.tobytes()
    assert text.startswith("tabby, 18.")
    assert isinstance(app["demo"], gradio.Interface)
    with pytest.raises(gradio.Error, match="Choose a photo"):
        app["explain"](None, app["TOP"], "GradCAM")
