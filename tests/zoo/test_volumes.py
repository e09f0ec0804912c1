"""Cells of the table in benchmarks/results/zoo_volumes.md, which `make zoo` checks as a whole."""

from __future__ import annotations

import pytest

pytest.importorskip("monai")
pytest.importorskip("segmentation_models_pytorch")
pytest.importorskip("transformers")

from benchmarks.zoo_places import cell
from benchmarks.zoo_volumes import KINDS, VOLUMES


@pytest.mark.parametrize(
    ("kind", "method", "verdict"),
    [
        ("MONAI UNet", "lrp", "works"),
        ("MONAI resnet10", "grad_cam", "works"),
        ("torchvision r3d_18", "guided_backprop", "works"),
        ("torchvision mc3_18", "xrai", "refused: xrai is defined for images of two spatial axes, and the input has 3"),
    ],
)
def test_a_method_explains_a_network_of_volumes_or_says_why_not(kind: str, method: str, verdict: str) -> None:
    assert kind in KINDS
    assert cell(kind, method, table=VOLUMES).startswith(verdict)
