"""Figures of gradients by layer, and of the attention of a transformer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from ..axes import require_two_axes
from ..errors import RenderError
from ..inspection.attention_record import LayerAttention, Query
from ..inspection.statistics import GradientStatistics, LayerGradients, call_label
from ..io.preprocess import Frame
from .blending import ScaledMap, paint, shrink
from .figure import PRINT_DPI, TEXT_SIZE, Panel, draw_panels, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL, TITLE = 1.1, 0.4  # of `draw_attention`, in inches: the width of an image, and the height of its title
LONGEST_LAYER = 24  # characters of a layer's name in `draw_attention`
LABELS_PER_INCH = 2.8  # of `gradient_flow`
LONGEST_LABEL = 30  # characters


def gradient_flow(statistics: GradientStatistics, *, size: tuple[float, float] = (10.0, 4.8)) -> Figure:
    """Plot the norm of the gradient at each layer from the input (left) to the output (right), on a log axis.

    Each point is one call of a layer, in forward order, or one parameter. Only the innermost layers are shown, without
    `nn.Identity`. The backward pass runs from right to left: a gradient that decreases towards the left vanishes, and
    one that increases explodes. Marks at the lower edge show gradients that are zero or missing, and at the upper edge
    NaN or infinity.

    Args:
        statistics: From `gradient_statistics`.
        size: Width and height in inches.

    Returns:
        A matplotlib Figure, independent of pyplot: `gradient_flow(s).savefig("flow.png")`. Notebooks display it.

    Raises:
        RenderError: There is nothing to draw.
    """
    rows = _innermost(statistics)
    if not rows:
        raise RenderError("there are no layers in these statistics to draw")
    is_broken = np.array([row.nan + row.inf > 0 for row in rows.values()])
    norms = np.array([row.norm for row in rows.values()], dtype=float)  # None becomes NaN
    norms[is_broken] = math.nan
    drawing = new_figure(*size)
    axes = drawing.subplots()
    positive = norms[norms > 0] if (norms > 0).any() else np.ones(1)
    axes.set(yscale="log", ylim=(positive.min() / 10, 10 * positive.max()))
    axes.plot(norms, "o-", markersize=5)  # zeros are not drawn
    marks = (("zero", "s", 0, norms == 0), ("no gradient", "D", 0, np.isnan(norms) & ~is_broken))
    for label, marker, height, is_marked in (*marks, ("NaN or infinity", "X", 1, is_broken)):
        if is_marked.any():
            places, edge = np.flatnonzero(is_marked), axes.get_xaxis_transform()
            axes.plot(places, np.full(len(places), height), marker, label=label, transform=edge, clip_on=False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    step = math.ceil(len(rows) / (LABELS_PER_INCH * size[0]))
    names = [name[-LONGEST_LABEL:] for name in rows]
    axes.set_xticks(range(0, len(rows), step), names[::step], rotation=90, fontsize="small", parse_math=False)
    axes.set_xlabel(f"{statistics.columns[0].title}s, from the input to the output")
    axes.set_ylabel(f"norm of the gradient of the {statistics.objective}")
    axes.grid(axis="y", alpha=0.3)
    return drawing


def _innermost(table: Iterable[LayerGradients]) -> dict[str, LayerGradients]:
    """Return the innermost layers by label: their name, with the kind if the name contains no letters."""
    # Skip modules that compute a weight, such as weight_norm: activations do not pass through them.
    rows = [row for row in table if "parametrizations" not in row.name.split(".")]
    containers = {row.name[:at] for row in rows for at in range(len(row.name)) if row.name[at] == "."}
    inner = [row for row in rows if row.name not in containers and (row.name or len(rows) == row.calls)]
    labelled = {}
    for row in [row for row in inner if row.kind != "Identity"] or inner:
        label = row.name if any(map(str.isalpha, row.name)) else f"{row.name} {row.kind}".strip()
        labelled[call_label(row, label)] = row
    return labelled


def draw_attention(layers: Sequence[LayerAttention], query: Query = None, *, image: int = 0) -> Figure:
    """Draw one row per layer and one column per head: the attention of a query to each patch of an image.

    Each panel has its own scale. Its title has the value at full colour.

    Args:
        layers: The result of `attention`, or a part of it.
        query: As for `LayerAttention.maps`. A point is marked by a cross.
        image: The index of the image.

    Returns:
        A matplotlib Figure, as from `figure`.

    Raises:
        LayerError: As for `LayerAttention.maps`.
        NotApplicableError: The input is a volume.
        RenderError: There are no layers.
        TargetError: As for `LayerAttention.maps`.
    """
    if not layers:
        raise RenderError("draw_attention got nothing to draw; pass the result of saliency.attention")
    batch = layers[0].batch
    require_two_axes(batch.inputs, "draw_attention")
    height, width = batch.inputs.shape[2:]
    frame = batch.frames[image] or Frame(Image.new("RGB", (width, height)), (0, 0, width, height))
    small, rows = shrink(frame, round(PANEL * PRINT_DPI)), []
    for layer in layers:
        maps = layer.maps(query)[image]
        panels = []
        for head, values in enumerate(maps.reshape(-1, *maps.shape[-2:]).float().cpu().numpy()):
            limit = float(values.max())
            scaled = ScaledMap(values / (limit or 1), "positive", 0.0, limit, is_saturated=False, outliers=None)
            names = [f"head {head}"] * (maps.dim() == 3) + [f"max {limit:.2g}"]
            panels.append(Panel(paint(small, scaled, None, "map"), names))
        rows.append(panels)
    drawing, grid = draw_panels(rows, PANEL, TITLE)
    for layer, row in zip(layers, grid, strict=True):
        label = layer.layer[-LONGEST_LAYER:]
        row[0].text(-0.1, 0.5, label, fontsize=TEXT_SIZE, parse_math=False, ha="right", transform=row[0].transAxes)
        if isinstance(query, Sequence):
            x, y = (place * small.image.width / frame.image.width for place in query)
            for axes in row:
                axes.plot(x, y, "x", color="white", markersize=4)
    return drawing
