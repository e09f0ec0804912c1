"""Measure how much of each map lies on the named object of drawn scenes: `python -m benchmarks.known_answers`.

With names of methods, only these are measured. The table is in docs/transformers.md. It is of transformers, also with
texts as targets, and of maps as they are drawn; `benchmarks.testbed` ranks all methods against controls.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

import saliency
from saliency import METHODS, Attribution, NotApplicableError, SaliencyError

NETWORKS = ("shapes_vit", "shapes_two_tower", "shapes_window")
OTHERS = (
    "attn_lrp",
    "cp_lrp",
    "lrp",
    "deep_lift",
    "integrated_gradients",
    "grad_cam",
    "hires_cam",
    "layer_cam",
    "xgrad_cam",
    "shapley_cam",
    "eigen_cam",
    "eigen_grad_cam",
    "excitation_backprop",
    "vanilla_gradient",
    "input_x_gradient",
    "full_grad",
)
SCENES = saliency.testbed.draw_scenes(50, seed=1_000_000)
LEAST_ERRORS = 2


def methods() -> list[str]:
    """Return the methods that read attention, and some others."""
    return [*(name for name, cls in METHODS.items() if cls.needs_attention), *OTHERS]


@cache
def model_and_target(network: str) -> tuple[Any, Any]:
    """Return a network and the named object of each scene: its class, or its caption."""
    texts = [saliency.text(captions[0]) for captions in SCENES.captions()]
    return saliency.load(network), texts if network == "shapes_two_tower" else SCENES.labels.tolist()


def shares(network: str, method: str, **options: Any) -> Tensor:
    """Return the shares of the positive map on the named object and on the distractor, (50, 2).

    Raises:
        SaliencyError: The method does not apply to the network.
    """
    model, target = model_and_target(network)
    explainer: Attribution = METHODS[method](model, **options)
    heatmap = saliency.heatmap(explainer.attribute(SCENES.images, target), sign="positive").double()  # (50, 64, 64)
    inside = (heatmap[:, None] * SCENES.masks).sum((2, 3))
    return inside / heatmap.sum((1, 2)).clamp(min=torch.finfo(torch.double).tiny)[:, None]


def standard_errors(found: Tensor) -> float:
    """Return by how many standard errors the mean difference of the shares (N, 2) exceeds zero."""
    difference = found[:, 0] - found[:, 1]
    return float(difference.mean() / difference.std() * len(difference) ** 0.5)


def cell(network: str, method: str) -> str:
    """Return the two mean shares and the standard errors, or the reason why there are none."""
    try:
        found = shares(network, method)
    except NotApplicableError:
        return "refused"
    except SaliencyError as error:
        return type(error).__name__
    errors = standard_errors(found)
    text = f"{found[:, 0].mean():.2f} / {found[:, 1].mean():.2f} ({errors:.1f})"
    return text if errors >= LEAST_ERRORS else f"**{text}**"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(f"| method | {' | '.join(NETWORKS)} |\n|---|{'---|' * len(NETWORKS)}")
    for name in sys.argv[1:] or methods():
        cells = " | ".join(cell(network, name) for network in NETWORKS)
        print(f"| `{METHODS[name].__name__}` | {cells} |", flush=True)
