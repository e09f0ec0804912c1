"""Matplotlib figures: image, overlay and a colour bar in the map's units."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..attribution.explanation import Explanation
from .blending import Opacity, ScaledMap, frame_of, method_title, paint, probability, scale_map, units
from .heatmap import several, shared_limit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 100
PANEL = 3.6  # inches: the width of a panel, and its largest height


def new_figure(width: float, height: float) -> Figure:
    """Create an empty figure of a size in inches. It needs no display, and is not registered in pyplot."""
    import matplotlib.figure

    class NotebookFigure(matplotlib.figure.Figure):
        """Figure that a notebook shows without pyplot."""

        def _repr_png_(self) -> bytes:
            png = io.BytesIO()
            self.savefig(png, format="png", bbox_inches="tight")
            return png.getvalue()

    return NotebookFigure(figsize=(width, height), layout="constrained", dpi=DPI)


def figure(
    explanations: Explanation | Iterable[Explanation],
    *,
    opacity: Opacity = 0.5,
    colormap: str | None = None,
    shared: bool = False,
    label: str | None = None,
) -> Figure:
    """Draw one row per image: the image, the overlay, and a colour bar in the map's units.

    The bar shows the colours before they are mixed with the image. An end is pointed if values lie beyond it.

    Args:
        explanations: Any number of explanations, of one or more images.
        opacity: As in `overlay`.
        colormap: As in `overlay`.
        shared: Use one scale for all rows, so that equal colours mean equal values.
        label: The label of the bar; by default the method's units.

    Returns:
        A matplotlib Figure: `figure(e).savefig("cat.pdf")`. A notebook shows it directly.

    Raises:
        NonFiniteError: A value is NaN or infinite.
        RenderError: There is no explanation, an explanation has no image, or an option is invalid.

    Warns:
        SaliencyWarning: A map is constant, or below the rounding error, which is drawn as zero.
    """
    images = [image for explanation in several(explanations, "figure") for image in explanation]
    limit = shared_limit(images) if shared else None
    frames = [frame_of(image) for image in images]
    heights = [PANEL * min(1.0, frame.picture.height / frame.picture.width) + 0.5 for frame in frames]
    drawing = new_figure(2 * PANEL + 1.2, sum(heights))
    panels = drawing.subplots(len(images), 2, squeeze=False, height_ratios=heights)
    for (left, right), image, frame in zip(panels, images, frames, strict=True):
        scaled = scale_map(image, limit=limit)
        left.imshow(frame.picture)
        left.set_title(" ".join([image.target_names[0], *probability(image)]))
        right.imshow(paint(frame, scaled, colormap, opacity))
        right.set_title(method_title(image))
        left.set_axis_off()
        right.set_axis_off()
        _add_bar(drawing, right, scaled, colormap, label or units(image))
    return drawing


def _add_bar(drawing: Figure, axes: Axes, scaled: ScaledMap, colormap: str | None, label: str) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.ticker import ScalarFormatter

    is_signed = scaled.sign == "signed"
    limit = scaled.limit or 1.0  # a map of zeros has no scale of its own, and a bar needs one
    colors = scaled.colors(colormap)[int(is_signed) :]
    scale = ScalarMappable(Normalize(-limit if is_signed else 0.0, limit), ListedColormap(colors / 255))
    extend = ("both" if is_signed else "max") if scaled.is_saturated else "neither"
    numbers = ScalarFormatter()
    numbers.set_powerlimits((-3, 4))
    bar_axes = axes.inset_axes((1.04, 0.0, 0.045, 1.0))  # as high as the image, for any aspect ratio
    bar = drawing.colorbar(scale, cax=bar_axes, extend=extend, format=numbers)
    bar.set_label(label)
    bar.outline.set_visible(False)
