"""The plot of the gradient by layer shows the norms of the statistics, and draws every degenerate case."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from saliency import figure
from saliency.errors import RenderError
from saliency.inspection import GradientStatistics, LayerGradients, gradient_statistics
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
    """The places of each kind of mark, by the words in the legend."""
    lines = {str(line.get_label()): [round(float(x)) for x in np.asarray(line.get_xdata())] for line in axes.lines[1:]}
    legend = axes.get_legend()
    words = [] if legend is None else [each.get_text() for each in legend.get_texts()]
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
    table = gradient_statistics(tiny_model(), images(1)).of(rows)
    vars(table).update(changed)
    return table


# What it draws -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("act", "scale", "sign"), [(nn.Sigmoid, None, 1), (nn.ReLU, 1.0, -1)])
def test_a_gradient_that_vanishes_falls_to_the_left_and_one_that_explodes_rises(
    act: type[nn.Module], scale: float | None, sign: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(each for _ in range(12) for each in (nn.Linear(32, 32), act())), nn.Linear(32, 5))
    for parameter in model.parameters():
        if scale is not None and parameter.dim() > 1:
            nn.init.normal_(parameter, 0, scale)
    statistics = gradient_statistics(model, torch.randn(4, 32), 0)
    axes = drawn(figure(statistics))
    assert heights(axes) == [row.norm for row in statistics]
    first, last = np.log10(heights(axes)[0]), np.log10(heights(axes)[-1])
    assert sign * (last - first) > 3
    assert axes.get_yscale() == "log"
    assert axes.get_ylabel() == "norm of the gradient of the score"
    assert marked(axes) == {}


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 1.0, 1.0],
        [2.0],
        [0.0],
        [0.0, 0.0, None],
        [None, None],
        [math.nan],
        [math.nan, math.inf, 1.0, 2.0],
        [1e-45, 1.0],
        [3e38, 1e-45],
        [1e-45, 1e-45],
        [3e38, 3e38],
    ],
)
def test_every_case_is_drawn_without_a_warning(values: list[float | None]) -> None:
    axes = drawn(figure(made(values)))
    low, high = axes.get_ylim()
    assert 0 < low < high < math.inf
    for value, height in zip(values, heights(axes), strict=True):
        if value is None or not math.isfinite(value):
            assert math.isnan(height)
        else:
            assert height == value
            assert value == 0 or low < height < high


def test_what_is_zero_nan_or_missing_has_a_mark_of_its_own_on_the_edge() -> None:
    axes = drawn(figure(made([None, 0.0, math.nan, 1e-9, 1.0, 1e9, math.nan])))
    assert marked(axes) == {"zero": [1], "NaN or infinity": [2, 6], "no gradient": [0]}
    at = {str(line.get_label()): float(np.asarray(line.get_ydata())[0]) for line in axes.lines[1:]}
    assert (at["zero"], at["no gradient"], at["NaN or infinity"]) == (0, 0, 1)
    assert len({line.get_marker() for line in axes.lines[1:]}) == 3


# What it shows -------------------------------------------------------------------------------------------------------


def test_points_are_the_innermost_layers_in_forward_order() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Identity(), nn.ReLU()), nn.Flatten(), nn.Linear(784, 5))
    statistics = gradient_statistics(model, images(2))
    axes = drawn(figure(statistics))
    assert [each.get_text() for each in axes.get_xticklabels()] == ["0.0 Conv2d", "0.2 ReLU", "1 Flatten", "2 Linear"]
    assert heights(axes) == [statistics[name].norm for name in ("0.0", "0.2", "1", "2")]
    containers = gradient_statistics(model, images(2), layers="0")
    assert [each.get_text() for each in figure(containers).axes[0].get_xticklabels()] == ["0 Sequential"]
    alone = gradient_statistics(nn.Sequential(nn.Identity()), images(2), lambda output: output.sum())
    assert len(heights(drawn(figure(alone)))) == 1
    itself = gradient_statistics(nn.Linear(3, 2), torch.randn(1, 3))
    assert [each.get_text() for each in figure(itself).axes[0].get_xticklabels()] == ["Linear"]
    both = gradient_statistics(model, images(2), layers=[model, "0.0", "2"])
    assert [each.name for each in both] == ["", "0.0", "2"]
    assert [each.get_text() for each in figure(both).axes[0].get_xticklabels()] == ["0.0 Conv2d", "2 Linear"]


def test_calls_of_one_layer_are_told_apart() -> None:
    axes = drawn(figure(gradient_statistics(tiny_model(), images(2))))
    names = [each.get_text() for each in axes.get_xticklabels()]
    assert names == ["stem", "norm", "relu (1)", "down", "drop", "last", "relu (2)", "pool", "head"]


@pytest.mark.parametrize("count", [1, 28, 29, 1000])
def test_names_are_thinned_out_until_they_can_be_read(count: int) -> None:
    axes = drawn(figure(made([1.0] * count)))
    names = [each.get_text() for each in axes.get_xticklabels()]
    assert min(count, 10) <= len(names) <= 28
    assert names == [f"layer{round(float(at))}" for at in axes.get_xticks()]


def test_what_makes_a_weight_is_no_point_on_the_way_of_the_gradient() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.ReLU())
    axes = figure(gradient_statistics(model, torch.randn(2, 4), 0)).axes[0]
    assert [each.get_text() for each in axes.get_xticklabels()] == ["0 ParametrizedLinear", "1 ReLU"]


def test_names_with_a_dollar_are_names_and_no_formulas() -> None:
    model = nn.Sequential()
    model.add_module("a$x", nn.Linear(3, 3))
    model.add_module("b$_{", nn.Linear(3, 3))
    axes = drawn(figure(gradient_statistics(model, torch.randn(2, 3))))
    assert [each.get_text() for each in axes.get_xticklabels()] == ["a$x", "b$_{"]


@pytest.mark.parametrize("size", [(4.0, 3.0), (16.0, 5.0)])
def test_the_size_is_in_inches(size: tuple[float, float]) -> None:
    drawing = figure(gradient_statistics(tiny_model(), images(2)), size=size)
    assert tuple(drawing.get_size_inches()) == size
    assert rendered(drawing).size == (60 * size[0], 60 * size[1])


def test_nothing_to_draw_is_an_error_that_says_so() -> None:
    with pytest.raises(RenderError, match="there are no layers in these statistics"):
        figure(made([]))


@pytest.mark.slow
def test_drawing_leaves_pyplot_and_the_styles_alone() -> None:
    code = (
        "import io, sys, matplotlib, torch\n"
        # To ask for the backend is to import pyplot.
        "state = lambda: {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != 'backend'}\n"
        "before = state()\n"
        "from saliency import figure\n"
        "from saliency.inspection import gradient_statistics\n"
        "figure(gradient_statistics(torch.nn.Linear(3, 2), torch.ones(1, 3))).savefig(io.BytesIO())\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert state() == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)  # noqa: S603


@pytest.mark.slow
def test_the_statistics_are_not_changed() -> None:
    statistics = gradient_statistics(tiny_model(), images(1))
    before = statistics.rows
    figure(statistics)
    assert statistics.rows == before
