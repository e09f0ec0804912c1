"""Cells of the tables of methods in benchmarks/results, which `make zoo` checks as a whole."""

from __future__ import annotations

import pytest

CELLS = {
    "places": [
        ("shapes_detector, as Ultralytics", "layer_cam", "works"),
        ("transformers OWLv2", "score_cam", "works"),
        ("transformers Mask2Former", "full_grad", "works"),
        ("transformers SegFormer", "lrp", "works"),
        ("MONAI BasicUNet", "guided_backprop", "refused: guided_backprop: no ReLU was called"),
        ("MONAI BasicUNet", "lrp", "works"),
    ],
    "volumes": [
        ("MONAI UNet", "lrp", "works"),
        ("MONAI resnet10", "grad_cam", "works"),
        ("torchvision r3d_18", "guided_backprop", "works"),
        ("torchvision mc3_18", "xrai", "refused: xrai is defined for images of two spatial axes, and the input has 3"),
    ],
    "answers": [
        ("llava", "deep_lift", "works"),
        ("llava_next", "smooth_grad", "works"),
        ("qwen3_vl", "cp_lrp", "works"),
        ("blip_2", "occlusion", "works"),
        ("internvl", "guided_backprop", "refused"),
    ],
}
SLOW = {"MONAI resnet10", "torchvision r3d_18"}
CASES = [
    pytest.param(table, *cell, marks=[pytest.mark.slow] * (cell[0] in SLOW))
    for table, cells in CELLS.items()
    for cell in cells
]


@pytest.mark.parametrize(("table", "kind", "method", "verdict"), CASES)
def test_a_method_gives_a_map_or_says_why_not(table: str, kind: str, method: str, verdict: str) -> None:
    # Its libraries take seconds to import.
    module = pytest.importorskip(f"benchmarks.zoo_{table}", exc_type=ImportError)
    assert getattr(module, table.upper()).cell(kind, method).startswith(verdict)
