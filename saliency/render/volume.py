"""Matplotlib figures of volumes and videos: slices through the maximum of the map, and a montage along an axis."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..attribution.explanation import Explanation
from ..attribution.heatmap import heatmap, require_explanation, resized
from ..errors import RenderError, errors_as, plural
from ..io.geometry import Frame
from ..io.volumes import Volume
from ..validation import check_choice, check_integer, described
from .blending import Opacity, paint
from .figure import TITLE_SIZE, WIDTH, add_bar, class_title, new_figure
from .scaling import SMOOTHING, scale_map

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXES = ("depth", "height", "width")
EDGES = ((1, 2), (0, 2), (0, 1))  # the axes of the rows and the columns of a slice along each axis
COLUMNS = 8  # maximum number of slices in a row of a montage
HEAD = 0.25  # inches for the title of a panel
BAR = 0.6  # inches for the title of the figure and its colour bar
CROSS = (0.0, 0.9, 0.25)  # the colour of cross-hairs, which no default colour map has
WINDOW = (0.1, 99.9)  # percentiles of the volume that are drawn in black and in white


def slices(
    explanation: Explanation,
    volume: Any = None,
    *,
    index: Sequence[int] | None = None,
    names: Sequence[str] = AXES,
    spacing: Sequence[float] = (1.0, 1.0, 1.0),
    colormap: str | None = None,
) -> Figure:
    """Draw three slices of a volume, one along each axis, through the maximum of its map.

    All slices have one scale of colours, and one colour bar in the map's units. Thin lines mark the positions of
    the other two slices. Slices are counted from 0.

    Args:
        explanation: An explanation of one volume or video.
        volume: The volume below the map, in grey: (D, H, W), with any leading axes of length 1; or (3, D, H, W), in
            colour. Percentile 0.1 and NaN are drawn in black, and 99.9 in white. None draws the map alone.
        index: The indices (d, h, w) of the slices; by default the voxel with the largest magnitude of the map.
        names: The names of the axes, such as ("axial", "coronal", "sagittal").
        spacing: The size of a voxel along each axis, in any unit; slices are drawn in these proportions.
        colormap: As in `overlay`.

    Returns:
        A matplotlib Figure, as from `figure`.

    Raises:
        NonFiniteError: A value is NaN or infinite.
        RenderError: The explanation is of several volumes or of an image, the volume has another shape, or an option is
            invalid.

    Warns:
        SaliencyWarning: The map is nearly even, or below the rounding error, and is drawn as zero.
    """
    drawn = _DrawnVolume(explanation, volume, spacing, colormap)
    point = drawn.peak if index is None else index
    if np.shape(point) != (3,) or any(i not in range(edge) for i, edge in zip(point, drawn.shape, strict=True)):
        raise RenderError(f"index={described(index)} is not one index for each axis of a volume of {drawn.shape}")
    if len(names) != 3:
        raise RenderError(f"names={described(names)} are not the names of three axes")
    widths = [drawn.size[columns] for _, columns in EDGES]
    tallest = max(drawn.size[rows] for rows, _ in EDGES)
    drawing = new_figure(WIDTH, WIDTH * tallest / sum(widths) + HEAD + BAR, crop="tight")
    panels = drawing.subplots(1, 3, width_ratios=widths)
    for axis, (axes, (rows, columns)) in enumerate(zip(panels, EDGES, strict=True)):
        drawn.show(axes, axis, int(point[axis]), f"{names[axis]}, ")
        axes.axhline(point[rows], color=CROSS, linewidth=0.8)
        axes.axvline(point[columns], color=CROSS, linewidth=0.8)
    return drawn.finish(drawing, panels)


def anatomical_slices(explanation: Explanation, volume: Volume, colormap: str | None) -> Image.Image:
    """Draw slices through the maximum as ITK-SNAP and 3D Slicer do: head and front up, the patient's right at the left.

    The first channel of the volume is drawn in grey.
    """
    order, ascends = volume.world_axes()
    values = explanation.values.permute(0, 1, *(2 + axis for axis in order))
    grey = volume.values[0].permute(order)
    explanation = replace(explanation.with_evidence(error=None), values=values, input_size=tuple(grey.shape))
    spacing = np.linalg.norm(volume.affine[:3, :3], axis=0)[order].tolist()
    drawing = slices(explanation, grey, names=("axial", "coronal", "sagittal"), spacing=spacing, colormap=colormap)
    for axis, panel in enumerate(drawing.axes[:3]):
        rows, columns = (ascends[other] for other in range(3) if other != axis)
        panel.yaxis.set_inverted(not rows)
        panel.xaxis.set_inverted(columns)
    file = io.BytesIO()
    # Not `savefig`, which changes parameters of matplotlib for a moment: several threads draw.
    drawing.canvas.print_figure(file, format="png", dpi=150, bbox_inches="tight")
    return Image.open(file).convert("RGB")


def montage(
    explanation: Explanation,
    volume: Any = None,
    *,
    axis: int = 0,
    count: int = 16,
    spacing: Sequence[float] = (1.0, 1.0, 1.0),
    colormap: str | None = None,
) -> Figure:
    """Draw slices of a volume side by side, evenly spaced along an axis; for a video, images in the order of time.

    The slice with the maximum of the map is included. Scale, colour bar and slice numbers are as in `slices`.

    Args:
        explanation: As in `slices`.
        volume: As in `slices`.
        axis: The axis: 0 for depth or time, 1 for height, 2 for width.
        count: The maximum number of slices.
        spacing: As in `slices`.
        colormap: As in `overlay`.

    Returns:
        A matplotlib Figure, as from `figure`.

    Raises:
        NonFiniteError: A value is NaN or infinite.
        RenderError: As for `slices`.

    Warns:
        SaliencyWarning: As for `slices`.
    """
    drawn = _DrawnVolume(explanation, volume, spacing, colormap)
    length = drawn.shape[check_choice("axis", axis, (0, 1, 2), error=RenderError)]
    count = min(length, check_integer("count", count, error=RenderError))
    indices = ((np.arange(count) + 0.5) * length / count).astype(int)
    indices[np.abs(indices - drawn.peak[axis]).argmin()] = drawn.peak[axis]
    rows, columns = EDGES[axis]
    across = math.ceil(count / math.ceil(count / COLUMNS))
    down = math.ceil(count / across)
    tall = WIDTH / across * drawn.size[rows] / drawn.size[columns]
    drawing = new_figure(WIDTH, down * (tall + HEAD) + BAR, crop="tight")
    panels = drawing.subplots(down, across, squeeze=False)
    for axes, index in itertools.zip_longest(panels.flat, indices.tolist()):
        axes.set_axis_off()
        if index is not None:
            drawn.show(axes, axis, index)
    return drawn.finish(drawing, panels)


class _DrawnVolume:
    """The map of one volume on one scale, and the pixels below it."""

    def __init__(self, explanation: Explanation, volume: Any, spacing: Sequence[float], colormap: str | None) -> None:
        require_explanation(explanation, "a drawing of a volume")
        self.explanation, self.colormap, self.spacing = explanation, colormap, spacing
        self.shape = explanation.input_size
        if len(self.shape) != 3 or len(explanation) != 1:
            got = f"{plural(len(explanation), 'explanation')} of inputs of {' x '.join(map(str, self.shape))}"
            raise RenderError(f"slices and montage draw one volume or video; got {got}; draw images with overlay")
        if np.shape(spacing) != (3,) or min(spacing) <= 0:
            raise RenderError(f"spacing={described(spacing)} is not the size of a voxel along three axes")
        self.size = [length * step for length, step in zip(self.shape, spacing, strict=True)]
        self.scaled = scale_map(explanation, smoothing=SMOOTHING)
        self.values = resized(torch.from_numpy(self.scaled.values)[None], self.shape)[0].numpy()
        largest = int(heatmap(explanation).abs().argmax())  # the maximum of the map without clipping
        self.peak = np.unravel_index(largest, self.shape)
        self.pixels = np.full((*self.shape, 3), 255, np.uint8) if volume is None else _as_pixels(volume, self.shape)
        self.opacity: Opacity = 1.0 if volume is None else "map"

    def show(self, axes: Axes, axis: int, index: int, name: str = "") -> None:
        """Draw a slice, given by its axis and index, with its title."""
        rows, columns = EDGES[axis]
        image = Image.fromarray(self.pixels.take(index, axis))
        frame = Frame(image, (0.0, 0.0, float(image.width), float(image.height)))
        scaled = replace(self.scaled, values=self.values.take(index, axis))
        drawing = paint(frame, scaled, self.colormap, self.opacity)
        axes.imshow(drawing, aspect=self.spacing[rows] / self.spacing[columns])
        axes.set_title(f"{name}slice {index} of {self.shape[axis]}", fontsize=TITLE_SIZE, pad=4, parse_math=False)
        axes.set_axis_off()
        axes.set_anchor("N")

    def finish(self, drawing: Figure, panels: Any) -> Figure:
        """Add the title and the colour bar."""
        title = f"{self.explanation.title}, {class_title(self.explanation)}"
        drawing.suptitle(title, fontsize=TITLE_SIZE + 2, parse_math=False)
        where = {"ax": panels, "location": "bottom", "shrink": 0.4, "aspect": 40, "pad": 0.02, "panchor": False}
        add_bar(drawing, self.scaled, self.colormap, self.explanation.units, **where)
        return drawing


def _as_pixels(volume: Any, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return a volume (D, H, W) in grey, or (3, D, H, W) in its colours: (D, H, W, 3).

    Raises:
        RenderError: The volume has another shape.
    """
    numbers = volume.detach().cpu().double() if isinstance(volume, Tensor) else volume
    with errors_as(RenderError, f"volume={described(volume)} is not an array"):  # tensors refuse flipped arrays
        values = np.asarray(numbers, np.float64)
    while values.ndim > 3 and len(values) == 1:
        values = values[0]
    colors = values.shape[: values.ndim - 3]
    if values.shape[values.ndim - 3 :] != shape or colors not in ((), (3,)):
        raise RenderError(f"the volume has the shape {values.shape}; expected {shape} in grey, or (3, ...) in colour")
    low, high = np.nanpercentile(values, WINDOW)  # scans are often NaN outside the field of view
    grey = (255 * np.nan_to_num(np.clip((values - low) / max(high - low, 1e-12), 0, 1))).round().astype(np.uint8)
    return np.moveaxis(np.broadcast_to(grey, (3, *shape)), 0, -1)
