"""Five cells of the table in benchmarks/results/zoo_places.md, which `make zoo` checks as a whole."""

from __future__ import annotations

import pytest


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
    # Its libraries take seconds to import.
    zoo_places = pytest.importorskip("benchmarks.zoo_places", exc_type=ImportError)
    assert kind in zoo_places.KINDS
    assert method in zoo_places.METHODS
    assert zoo_places.cell(kind, method).startswith(verdict)
