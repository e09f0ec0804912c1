"""Matplotlib figures: image, overlay and a colour bar in the map's units."""

from __future__ import annotations

import io
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from ..attribution.explanation import Explanation
from .blending import Opacity, Shade, frame_of, method_title, paint, shade, title, units
from .heatmap import several, shared_limit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

DPI = 100
PANEL = 3.6  # inches: the width of a panel, and its largest height


def new_figure(width: float, height: float) -> Figure:
    """Create an empty figure of a size in inches. It needs no display, and is not registered in pyplot."""
    figure: Figure = _figure_class()(figsize=(width, height), layout="constrained", dpi=DPI)
    return figure


@cache
def _figure_class() -> Any:
    import matplotlib.figure

    class Figure(matplotlib.figure.Figure):
        """Figure that a notebook shows without pyplot."""

        def _repr_png_(self) -> bytes:
            png = io.BytesIO()
            self.savefig(png, format="png", bbox_inches="tight")
            return png.getvalue()

    return Figure


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
    pictures = [frame_of(image).picture for image in images]
    heights = [PANEL * min(1.0, picture.height / picture.width) + 0.5 for picture in pictures]
    drawing = new_figure(2 * PANEL + 1.2, sum(heights))
    panels = drawing.subplots(len(images), 2, squeeze=False, height_ratios=heights)
    for (left, right), image in zip(panels, images, strict=True):
        _draw_row(drawing, left, right, image, shade(image, limit=limit), colormap, opacity, label or units(image))
    return drawing


def _draw_row(
    drawing: Figure,
    left: Axes,
    right: Axes,
    image: Explanation,
    shading: Shade,
    colormap: str | None,
    opacity: Opacity,
    label: str,
) -> None:
    from matplotlib.ticker import ScalarFormatter

    frame = frame_of(image)
    left.imshow(frame.picture)
    left.set_title(title(image))
    right.imshow(paint(frame, shading, colormap, opacity))
    right.set_title(method_title(image))
    for axes in (left, right):
        axes.set_axis_off()
    bar_axes = right.inset_axes((1.04, 0.0, 0.045, 1.0))  # as high as the image, for any aspect ratio
    numbers = ScalarFormatter()
    numbers.set_powerlimits((-3, 4))
    bar = drawing.colorbar(
        _color_scale(shading, colormap), cax=bar_axes, extend=_bar_extension(shading), format=numbers
    )
    bar.set_label(label)
    bar.outline.set_visible(False)


def _color_scale(shading: Shade, colormap: str | None) -> ScalarMappable:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    limit = shading.limit or 1.0  # a map of zeros has no scale of its own, and a bar needs one
    colors = shading.table(colormap)[1 if shading.sign == "signed" else 0 :]
    return ScalarMappable(Normalize(-limit if shading.sign == "signed" else 0.0, limit), ListedColormap(colors / 255))


def _bar_extension(shading: Shade) -> str:
    if not shading.saturated:
        return "neither"
    return "both" if shading.sign == "signed" else "max"
