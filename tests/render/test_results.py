"""`figure` draws any result, with the options of its type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import saliency
from saliency import LRP, GradCAM, figure
from tests.drawing import noise
from tests.models import PooledNet

PHOTO = noise(16, 16)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    network = PooledNet().eval()
    network.preprocess = saliency.Preprocess((16, 16))  # type: ignore[assignment]
    return network


# By the type: the result, options of it, and the number of axes of its figure.
RESULTS: dict[str, tuple[Callable[[], Any], dict[str, Any], int]] = {
    "Explanation": (lambda: GradCAM(model()).attribute(PHOTO, 1), {"title": "A title"}, 2),
    "list of explanations": (lambda: [GradCAM(model()).attribute(PHOTO, 1)] * 2, {"shared": True}, 3),
    "rows of explanations": (lambda: [[GradCAM(model()).attribute(PHOTO, target)] for target in (1, 2)], {}, 4),
    "generator": (lambda: (GradCAM(model()).attribute(PHOTO, target) for target in (1, 2)), {"columns": 2}, 4),
    "Features": (lambda: saliency.features(model(), [PHOTO, noise(16, 16, 1)]), {"foreground": False}, 4),
    "Matches": (
        lambda: saliency.matches(saliency.InputXGradient(model()), PHOTO, noise(16, 16, 1), cells=2),
        {"count": 3},
        2,
    ),
    "TrustCard": (lambda: saliency.trust(GradCAM(model()), PHOTO, 1), {}, 7),
    "ledger": (lambda: saliency.ledger_table(LRP(model()).attribute(PHOTO, 1)), {}, 1),
    "GradientStatistics": (
        lambda: saliency.inspection.gradient_statistics(model(), torch.rand(2, 3, 16, 16), 1),
        {"size": (5.0, 4.0)},
        1,
    ),
    "list of LayerAttention": (
        lambda: saliency.attention(saliency.load("shapes_vit"), torch.randn(1, 3, 64, 64)),
        {"query": 0, "image": 0},
        16,
    ),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_a_result_is_drawn_with_the_options_of_its_type_and_other_options_are_refused(kind: str) -> None:
    create, options, axes = RESULTS[kind]
    result = create()
    assert len(figure(result, **options).axes) == axes
    others = {name for _, other, _ in RESULTS.values() for name in other} - options.keys()
    maps = {"title", "shared", "columns"}
    for name in others - (maps if maps & options.keys() or "explanations" in kind else set()):
        with pytest.raises(TypeError, match=f'figure has no argument "{name}"; '):
            figure(result, **{name: 1})  # type: ignore[arg-type]


def test_what_is_no_result_is_refused() -> None:
    with pytest.raises(saliency.errors.RenderError, match="figure takes an Explanation"):
        figure(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match='figure has no argument "colums"; did you mean "columns"'):
        figure([], colums=3)  # type: ignore[call-arg]
