"""Five cells of the table in benchmarks/results/zoo_places.md, which `make zoo` checks as a whole."""

from __future__ import annotations

import pytest

pytest.importorskip("monai")
pytest.importorskip("segmentation_models_pytorch")
pytest.importorskip("transformers")

from benchmarks.zoo_places import KINDS, METHODS, cell


@pytest.mark.parametrize(
    ("kind", "method", "verdict"),
    [
        ("shapes_detector, as Ultralytics", "layer_cam", "works"),
        ("transformers OWLv2", "score_cam", "works"),
        ("transformers Mask2Former", "full_grad", "works"),
        ("transformers SegFormer", "lrp", "works"),
        ("MONAI BasicUNet", "guided_backprop", "refused: a leaky_relu works in place on a view"),
    ],
)
def test_a_method_gives_a_map_of_a_place_or_says_why_not(kind: str, method: str, verdict: str) -> None:
    assert kind in KINDS
    assert method in METHODS
    assert cell(kind, method).startswith(verdict)
