"""Six rows of the table in benchmarks/results/zoo_features.md, which `make zoo` checks as a whole."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("transformers Dinov2Model", "48 x 4 x 4", "works, outlier tokens known"),
        ("transformers DINOv3ViTModel", "48 x 4 x 4", "works, outlier tokens known"),
        ("transformers CLIPVisionModel", "48 x 4 x 4", "works, outlier tokens known"),
        ("transformers SwinModel", "48 x 8 x 8", "works"),
        ("transformers ConvNextModel", "32 x 2 x 2", "works"),
        ("a network without maps", "", "refused: no layer of Sequential has a spatial output"),
    ],
)
def test_the_features_of_a_backbone_are_right_or_refused_with_the_reason(name: str, shape: str, text: str) -> None:
    found = pytest.importorskip("benchmarks.zoo_features", exc_type=ImportError).verdict(name)
    assert found[1] == shape
    assert found[2].startswith(text)
