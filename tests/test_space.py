"""The hosted demo answers once, where Gradio is installed; the package does not depend on it."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import saliency

ROOT = Path(__file__).parents[1]
CAT = ROOT / "assets" / "chelsea.jpg"
# A process of its own, because Gradio leaves sockets and an event loop open.
ASK = """
import sys
from PIL import Image
import app

drawn, text = app.explain(Image.open(sys.argv[1]), "tabby", "GradCAM")
drawn.save(sys.argv[2])
print(text)
try:
    app.explain(None, app.TOP, "GradCAM")
except app.gr.Error as error:
    print(error.message)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gradio") is None, reason="Gradio is not installed")
def test_the_demo_explains_a_photo(tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    command = [sys.executable, "-c", ASK, str(CAT), str(out)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT / "examples" / "space")  # noqa: S603
    text, error = run.stdout.strip().splitlines()
    assert text.startswith("tabby, 18.")
    assert "Choose a photo" in error
    explanation = saliency.GradCAM(saliency.load("efficientnet_lite0")).attribute(CAT, "tabby")
    with Image.open(out) as drawn:
        assert np.array_equal(np.asarray(drawn), np.asarray(saliency.overlay(explanation, size=800)))
