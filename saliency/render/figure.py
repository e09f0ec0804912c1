"""Matplotlib figures for papers and notebooks: an image, its maps side by side, and colour bars in their units."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image

from ..attribution.explanation import Explanation
from ..errors import RenderError
from ..io.preprocess import Frame
from ..validation import check_integer
from .blending import Opacity, ScaledMap, frame_of, method_title, paint, probability, scale_map, shrink, units
from .heatmap import SMOOTHING, shared_limit, single_images

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCREEN_DPI, PRINT_DPI = 100, 300
COLUMNS = 5  # most panels side by side by default

# Inches.
WIDTH = 10.0  # of the panels together
SMALLEST_PANEL, LARGEST_PANEL = 1.8, 3.4
TALLEST = 1.5  # height of a panel, as a multiple of its width
GAP, LINE = 0.12, 0.17
BAR, BAR_TEXT = 0.07, 0.5

TITLE_SIZE, TEXT_SIZE = 9.0, 7.0  # points
NAME = 24  # longest class name in a title, in characters


def new_figure(width: float, height: float) -> Figure:
    """Create an empty figure of a size in inches. It needs no display, and is not registered in pyplot.

    Saved files have 300 dots per inch, and their text remains text in PDF and SVG.
    """
    import matplotlib as mpl
    import matplotlib.figure

    class NotebookFigure(matplotlib.figure.Figure):
        """Figure that a notebook shows without pyplot."""

        def savefig(self, fname: Any, **kwargs: Any) -> None:
            with mpl.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
                super().savefig(fname, **{"dpi": PRINT_DPI, **kwargs})

        def _repr_png_(self) -> bytes:
            png = io.BytesIO()
            self.savefig(png, format="png", bbox_inches="tight", dpi=SCREEN_DPI)
            return png.getvalue()

    return NotebookFigure(figsize=(width, height), layout="constrained", dpi=SCREEN_DPI)


def figure(
    explanations: Explanation | Iterable[Explanation],
    *,
    columns: int | None = None,
    title: str | None = None,
    opacity: Opacity = "map",
    colormap: str | None = None,
    smoothing: float = SMOOTHING,
    shared: bool = False,
    label: str | None = None,
) -> Figure:
    """Draw each image once, then its maps side by side, each with a colour bar in the map's units.

    Explanations of the same image stand next to each other. The bar shows the colours before they are mixed with the
    image. An end is pointed if values lie beyond it.

    Args:
        explanations: Any number of explanations, of one or more images.
        columns: Number of panels side by side, with the image; by default at most 5, in rows of equal length.
        title: A title above everything.
        opacity: As in `overlay`.
        colormap: As in `overlay`.
        smoothing: As in `overlay`.
        shared: Use one scale for all maps, so that equal colours mean equal values.
        label: The label of the bars; by default the method's units.

    Returns:
        A matplotlib Figure: `figure(e).savefig("cat.pdf")`. In PDF and SVG, text is text, and images have 300 dots per
        inch. A notebook shows it directly.

    Raises:
        NonFiniteError: A value is NaN or infinite.
        RenderError: There is no explanation, an explanation has no image, or an option is invalid.

    Warns:
        SaliencyWarning: A map is constant, or below the rounding error, which is drawn as zero.
    """
    images = single_images(explanations, "figure")
    limit = shared_limit(images, smoothing=smoothing) if shared else None
    groups = _by_photo(images)
    most = 1 + max(map(len, groups))
    if columns is None:
        columns = math.ceil(most / math.ceil(most / COLUMNS))
    page = _Page(groups, min(most, check_integer("columns", columns, least=1, error=RenderError)), title)
    for group in groups:
        page.add(group.frame.picture, group.title, group)
        for image in group.images:
            scaled = scale_map(image, limit=limit, smoothing=smoothing)
            axes = page.add(paint(group.frame, scaled, colormap, opacity), group.title_of(image), group)
            _add_bar(page.drawing, axes, scaled, colormap, label or units(image))
        page.end_row(group)
    return page.drawing


class _Group:
    """Explanations of one image, with the image in the size of print."""

    def __init__(self, frame: Frame) -> None:
        longest = round(LARGEST_PANEL * TALLEST * PRINT_DPI)
        self.original = frame
        self.frame = shrink(frame, longest) if max(frame.picture.size) > longest else frame
        self.images: list[Explanation] = []

    def __len__(self) -> int:
        return len(self.images)

    @property
    def title(self) -> str:
        """The class, if all maps have the same one."""
        return _class_title(self.images[0]) if len({image.target_names[0] for image in self.images}) == 1 else ""

    def title_of(self, image: Explanation) -> str:
        """Return the method, and the class if the maps have several."""
        return method_title(image) if self.title else f"{method_title(image)}\n{_class_title(image)}"

    def size(self, panel: float) -> tuple[float, float]:
        """Return the width and height of the image in a panel of this width, in inches."""
        ratio = self.frame.picture.height / self.frame.picture.width
        return min(panel, panel * TALLEST / ratio), panel * min(ratio, TALLEST)


def _class_title(image: Explanation) -> str:
    return " ".join([textwrap.shorten(image.target_names[0], NAME, placeholder="…"), *probability(image)])


def _by_photo(images: Sequence[Explanation]) -> list[_Group]:
    """Group explanations by their image, in the order of the first ones."""
    groups: list[_Group] = []
    for image in images:
        frame = frame_of(image)
        known = [group for group in groups if group.original == frame]
        if not known:
            groups.append(_Group(frame))
        (known or groups[-1:])[0].images.append(image)
    return groups


class _Page:
    """Empty figure in the size of its panels, which are added from left to right and from the top downwards."""

    def __init__(self, groups: Sequence[_Group], columns: int, title: str | None) -> None:
        self.columns, self.column = columns, 0
        self.panel = min(LARGEST_PANEL, max(SMALLEST_PANEL, WIDTH / columns))
        self.width = GAP + columns * (self.panel + GAP)
        rows = sum(self._row_height(group) * math.ceil((1 + len(group)) / columns) for group in groups)
        self.height = rows + (2 * LINE if title else 0.0) + GAP
        self.top = GAP + (2 * LINE if title else 0.0)  # inches from the upper edge
        self.drawing = new_figure(self.width, self.height)
        self.drawing.set_layout_engine("none")
        if title:
            self.drawing.suptitle(title, y=1 - GAP / self.height, va="top", fontsize=TITLE_SIZE + 2)

    def _head(self, group: _Group) -> float:
        return LINE * (1.3 if group.title else 2.3)

    def _row_height(self, group: _Group) -> float:
        return self._head(group) + group.size(self.panel)[1] + BAR_TEXT + GAP

    def add(self, picture: Image.Image, title: str, group: _Group) -> Axes:
        """Draw a picture with a title at the next place."""
        if self.column == self.columns:
            self.end_row(group)
        width, height = group.size(self.panel)
        left = GAP + self.column * (self.panel + GAP) + (self.panel - width) / 2
        bottom = self.height - self.top - self._head(group) - height
        place = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        axes = self.drawing.add_axes(place)
        axes.imshow(picture, aspect="auto")
        axes.set_title(title, fontsize=TITLE_SIZE, pad=4)
        axes.set_axis_off()
        self.column += 1
        return axes

    def end_row(self, group: _Group) -> None:
        """Continue below the panels of a group."""
        self.column = 0
        self.top += self._row_height(group)


def _add_bar(drawing: Figure, axes: Axes, scaled: ScaledMap, colormap: str | None, label: str) -> None:
    """Add a horizontal bar below a panel, as wide as its image."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    is_signed = scaled.sign == "signed"
    limit = scaled.limit or 1.0  # a map of zeros has no scale of its own, and a bar needs one
    colors = scaled.colors(colormap)[int(is_signed) :]
    scale = ScalarMappable(Normalize(-limit if is_signed else 0.0, limit), ListedColormap(colors / 255))
    extend = ("both" if is_signed else "max") if scaled.is_saturated else "neither"
    numbers = ScalarFormatter()
    numbers.set_powerlimits((-3, 4))
    height = axes.get_position().height * drawing.get_figheight()
    bar_axes = axes.inset_axes((0.0, -2 * BAR / height, 1.0, BAR / height))
    bar = drawing.colorbar(
        scale, cax=bar_axes, extend=extend, format=numbers, orientation="horizontal", ticks=MaxNLocator(3)
    )
    bar.set_label(label, fontsize=TEXT_SIZE, labelpad=1)
    bar.ax.tick_params(labelsize=TEXT_SIZE, length=2, pad=1)
    bar.ax.xaxis.get_offset_text().set_fontsize(TEXT_SIZE)
    bar.outline.set_visible(False)
