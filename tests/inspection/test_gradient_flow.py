"""The picture of the gradient through depth: what it says is what there is, and every degenerate case is drawn."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from saliency import RenderError
from saliency.inspection.statistics import FAR, GradientStatistics, LayerGradients, gradient_flow, gradient_statistics
from saliency.inspection.tables import Table
from saliency.testing import images, tiny_model

LABELS = torch.tensor([1, 2, 3, 4])


def rendered(drawing: Figure) -> Image.Image:
    """The picture, which has to come without a warning."""
    file = io.BytesIO()
    drawing.savefig(file, dpi=60)
    return Image.open(file)


def drawn(drawing: Figure) -> Axes:
    (axes,) = drawing.axes
    pixels = np.asarray(rendered(drawing).convert("L"))
    assert pixels.std() > 5
    return axes


def heights(axes: Axes) -> list[float]:
    """The line through all points, left to right."""
    return [float(each) for each in np.asarray(axes.lines[0].get_ydata(), dtype=float)]


def marked(axes: Axes) -> dict[str, list[int]]:
    """The places of each kind of point, by the words in the legend."""
    legend = axes.get_legend()
    assert legend is not None
    words = [each.get_text() for each in legend.get_texts()]
    lines = {str(line.get_label()): [round(float(x)) for x in np.asarray(line.get_xdata())] for line in axes.lines[1:]}
    assert set(words) == set(lines)
    return lines


def made(values: list[float | None], **changed: Any) -> GradientStatistics:
    """Statistics of layers whose gradients have these norms; None for no gradient."""
    rows = []
    for at, value in enumerate(values):
        nan = int(value is not None and not math.isfinite(value))
        figures: dict[str, Any] = dict.fromkeys(("norm", "rms", "mean", "std", "min", "max", "zero_share"), value)
        rows.append(
            LayerGradients(name=f"layer{at}", kind="Linear", call=0, calls=1, count=4, nan=nan, inf=0, **figures)
        )
    table = Table[LayerGradients](rows, ())
    whole = gradient_statistics(tiny_model(), images(1))
    return replace(whole, layers=table, **changed)


def mlp(depth: int, act: Callable[[], nn.Module], scale: float | None = None) -> nn.Module:
    torch.manual_seed(0)
    layers = [each for _ in range(depth) for each in (nn.Linear(32, 32), act())]
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(32, 5))
    for parameter in model.parameters():
        if scale is not None and parameter.dim() > 1:
            nn.init.normal_(parameter, 0, scale)
    return model


# What it says --------------------------------------------------------------------------------------------------------


def test_a_deep_sigmoid_network_is_said_to_vanish() -> None:
    statistics = gradient_statistics(mlp(12, nn.Sigmoid), torch.randn(4, 32), 0)
    axes = drawn(gradient_flow(statistics))
    title = axes.get_title(loc="left")
    first, last = statistics.layers["0"].norm, statistics.layers["25"].norm
    assert first is not None
    assert last is not None
    assert f"falls by a factor of {last / first:.2e}" in title
    assert title.endswith("from 25 Linear to 0 Flatten: vanishing")
    low = marked(axes)["less than 0.001 times the head's"]
    assert low == list(range(max(low) + 1))
    assert axes.get_yscale() == "log"


def test_a_badly_scaled_relu_network_is_said_to_explode() -> None:
    axes = drawn(gradient_flow(gradient_statistics(mlp(10, nn.ReLU, 1.0), torch.randn(4, 32), 0)))
    title = axes.get_title(loc="left")
    assert "grows by a factor of" in title
    assert title.endswith("from 21 Linear to 0 Flatten: exploding")
    assert 0 in marked(axes)["more than 1000 times the head's"]


def test_a_network_that_can_be_trained_is_said_to_do_neither() -> None:
    model = torchvision.models.resnet18(weights=None)
    statistics = gradient_statistics(model, [(images(4, (32, 32)), LABELS)], nn.CrossEntropyLoss(), training=True)
    axes = drawn(gradient_flow(statistics))
    assert "from fc to conv1: neither vanishing nor exploding" in axes.get_title(loc="left")
    assert list(marked(axes)) == ["0.001 to 1000 times the head's"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0, 1.0, 1.0], "stays within a factor of 1.00 from layer2 to layer0: neither vanishing nor exploding"),
        ([2.0], "The gradient is 2.00"),
        ([0.0], "The gradient is zero everywhere"),
        ([0.0, 0.0, None], "The gradient is zero everywhere"),
        ([None, None], "No layer has a gradient"),
        ([math.nan], "The gradient is NaN or infinite at 1 of 1; in the order of the backward pass, first at layer0"),
        (
            [math.nan, math.inf, 1.0, 2.0],
            "is NaN or infinite at 2 of 4; in the order of the backward pass, first at layer1",
        ),
        ([0.0, 0.0, 0.0, 1.0], "is zero at 3 of 4; in the order of the backward pass, first at layer2"),
        ([0.0, math.nan, 1.0], "is NaN or infinite at 1 of 3"),
        (
            [None, 3.0, 6.0],
            "factor of 2.00 from layer2 to layer1: neither vanishing nor exploding; 1 of 3 have no gradient",
        ),
        ([1.0, 2e-6, 1.0], "stays within a factor of 5.00e+05 from layer2 to layer0: uneven"),
        ([1 / FAR, 1.0], "falls by a factor of 1000 from layer1 to layer0: vanishing"),
        ([FAR, 1.0], "grows by a factor of 1000 from layer1 to layer0: exploding"),
        ([1e-45, 1.0], "vanishing"),
        ([3e38, 1e-45], "exploding"),
        ([1e-45, 1e-45], "neither"),
        ([3e38, 3e38], "neither"),
    ],
)
def test_every_case_is_drawn_without_a_warning_and_said_in_words(values: list[float | None], words: str) -> None:
    axes = drawn(gradient_flow(made(values)))
    assert words in axes.get_title(loc="left").replace("\n", " ")
    low, high = axes.get_ylim()
    assert 0 < low < high < math.inf
    for value, height in zip(values, heights(axes), strict=True):
        if value is None or not math.isfinite(value):
            assert math.isnan(height)
        elif value == 0:
            assert height == low
        else:
            assert height == value
            assert low < height < high


def test_what_is_zero_nan_or_missing_has_a_mark_of_its_own_on_the_edge() -> None:
    axes = drawn(gradient_flow(made([None, 0.0, math.nan, 1e-9, 1.0, 1e9, 1.0])))
    assert marked(axes) == {
        "0.001 to 1000 times the head's": [4, 6],
        "less than 0.001 times the head's": [3],
        "more than 1000 times the head's": [5],
        "exactly zero": [1],
        "NaN or infinity": [2],
        "no gradient": [0],
    }
    low, high = axes.get_ylim()
    at = {str(line.get_label()): float(np.asarray(line.get_ydata())[0]) for line in axes.lines[1:]}
    assert (at["exactly zero"], at["no gradient"], at["NaN or infinity"]) == (low, low, high)
    shapes = {line.get_marker() for line in axes.lines[1:]}
    assert len(shapes) == 6


# What it shows -------------------------------------------------------------------------------------------------------


def test_points_are_the_innermost_layers_in_forward_order() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Identity(), nn.ReLU()), nn.Flatten(), nn.Linear(784, 5))
    statistics = gradient_statistics(model, images(2))
    axes = drawn(gradient_flow(statistics))
    assert [each.get_text() for each in axes.get_xticklabels()] == ["0.0 Conv2d", "0.2 ReLU", "1 Flatten", "2 Linear"]
    assert heights(axes) == [statistics.layers[name].norm for name in ("0.0", "0.2", "1", "2")]
    containers = gradient_statistics(model, images(2), layers="0")
    assert [each.get_text() for each in gradient_flow(containers).axes[0].get_xticklabels()] == ["0 Sequential"]
    alone = gradient_statistics(nn.Sequential(nn.Identity()), images(2), lambda output: output.sum())
    assert len(heights(drawn(gradient_flow(alone)))) == 1
    itself = gradient_statistics(nn.Linear(3, 2), torch.randn(1, 3))
    assert [each.get_text() for each in gradient_flow(itself).axes[0].get_xticklabels()] == ["Linear"]
    both = gradient_statistics(model, images(2), layers=[model, "0.0", "2"])
    assert [each.name for each in both.layers] == ["", "0.0", "2"]
    assert [each.get_text() for each in gradient_flow(both).axes[0].get_xticklabels()] == ["0.0 Conv2d", "2 Linear"]


def test_calls_of_one_layer_are_told_apart() -> None:
    axes = drawn(gradient_flow(gradient_statistics(tiny_model(), images(2))))
    names = [each.get_text() for each in axes.get_xticklabels()]
    assert names == ["stem", "norm", "relu (1)", "down", "drop", "last", "relu (2)", "pool", "head"]


@pytest.mark.parametrize("count", [1, 2, 3, 27, 28, 29, 30, 55, 56, 57, 200, 1000])
def test_names_are_thinned_out_until_they_can_be_read_the_first_and_the_last_stay(count: int) -> None:
    axes = gradient_flow(made([1.0] * count)).axes[0]
    names = [each.get_text() for each in axes.get_xticklabels()]
    assert len(names) == count or 10 <= len(names) <= 28
    assert names[0] == "layer0"
    assert names[-1] == f"layer{count - 1}"
    places = [round(float(each)) for each in axes.get_xticks()]
    assert names == [f"layer{at}" for at in places]
    if count > 28:
        assert min(np.diff(places)) >= max(np.diff(places)) / 2


def test_what_makes_a_weight_is_no_point_on_the_way_of_the_gradient() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.ReLU())
    axes = gradient_flow(gradient_statistics(model, torch.randn(2, 4), 0)).axes[0]
    assert [each.get_text() for each in axes.get_xticklabels()] == ["0 ParametrizedLinear", "1 ReLU"]


def test_names_with_a_dollar_are_names_and_no_formulas() -> None:
    model = nn.Sequential()
    model.add_module("a$x", nn.Linear(3, 3))
    model.add_module("b$_{", nn.Linear(3, 3))
    axes = drawn(gradient_flow(gradient_statistics(model, torch.randn(2, 3))))
    assert [each.get_text() for each in axes.get_xticklabels()] == ["a$x", "b$_{"]
    assert not axes.xaxis.label.get_parse_math()  # it names the class


@pytest.mark.parametrize("size", [(4.0, 3.0), (16.0, 5.0)])
def test_the_size_is_in_inches(size: tuple[float, float]) -> None:
    drawing = gradient_flow(gradient_statistics(tiny_model(), images(2)), size=size)
    assert tuple(drawing.get_size_inches()) == size
    assert rendered(drawing).size == (60 * size[0], 60 * size[1])


def test_nothing_to_draw_is_an_error_that_says_so() -> None:
    with pytest.raises(RenderError, match="there are no layers in these statistics"):
        gradient_flow(made([]))


@pytest.mark.slow
def test_drawing_leaves_pyplot_and_the_styles_alone() -> None:
    code = (
        "import io, sys, matplotlib, torch\n"
        # To ask for the backend is to import pyplot.
        "state = lambda: {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != 'backend'}\n"
        "before = state()\n"
        "from saliency.inspection.statistics import gradient_flow\n"
        "from saliency.inspection.statistics import gradient_statistics\n"
        "gradient_flow(gradient_statistics(torch.nn.Linear(3, 2), torch.ones(1, 3))).savefig(io.BytesIO())\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert state() == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)  # noqa: S603


@pytest.mark.slow
def test_the_statistics_are_not_changed() -> None:
    statistics = gradient_statistics(tiny_model(), images(1))
    before = statistics.layers.rows, statistics.parameters.rows
    gradient_flow(statistics)
    assert (statistics.layers.rows, statistics.parameters.rows) == before
