"""Figure of the features of several images: principal components in colours, and the similarity to a point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ..attribution.dense_features import Features
from ..io.preprocess import Frame
from .blending import SEQUENTIAL, frame_of
from .figure import LARGEST_PANEL, TEXT_SIZE, TITLE_SIZE, WIDTH, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

SIMILARITY_OPACITY = 0.65  # the image stays visible


def draw_features(
    features: Features, point: Sequence[float] | None = None, image: int = 0, *, foreground: bool = True
) -> Figure:
    """Draw one column per image: the image, its principal components in colours, and its similarity to a point.

    A cross marks the point. The similarities of all images have one scale, and so have the colours of the components.

    Args:
        features: The result of `saliency.features` for images that are not tensors.
        point: (x, y) in pixels of the image with the index `image`; without it, there is no row of similarities.
        image: The index of the image with the point.
        foreground: As in `Features.pca`.

    Returns:
        A matplotlib Figure, which a notebook shows.

    Raises:
        LayerError: As for `Features.pca`.
        RenderError: An image was given as a tensor, so it is not known.
        TargetError: As for `Features.similarity`.
    """
    similarity, colors = features.similarity(point, image), features.pca(foreground=foreground)
    maps = similarity.values
    if features.outliers is not None:
        maps = maps.masked_fill(features.outliers[:, None], math.nan)  # not drawn
    planes, pixels = (values.movedim(1, -1).double().cpu().numpy() for values in (maps, colors))  # (N, h, w, channels)
    frames = [frame_of(one) for one in similarity]
    labels = ["image", "components", "similarity"][: 3 if point is not None else 2]
    width = min(LARGEST_PANEL, WIDTH / len(frames))
    tallest = max(frame.image.height / frame.image.width for frame in frames)
    drawing = new_figure(width * len(frames), len(labels) * width * tallest, crop="tight")
    panels = drawing.subplots(len(labels), len(frames), squeeze=False)
    for axes, label in zip(panels[:, 0], labels, strict=True):
        axes.set_ylabel(label, fontsize=TITLE_SIZE)
    shades = {"cmap": SEQUENTIAL, "vmin": np.nanmin(planes), "vmax": np.nanmax(planes), "alpha": SIMILARITY_OPACITY}
    for number, (frame, column) in enumerate(zip(frames, panels.T, strict=True)):
        _show(column[0], frame)
        _show(column[1], replace(frame, image=Image.new("RGB", frame.image.size)), pixels[number])
        if point is not None:
            drawn = _show(column[2], frame, planes[number], **shades)
    if point is not None:
        for axes in panels[:, image]:
            for color, size, edge in (("white", 12, 3), ("black", 11, 1)):
                axes.plot(point[0] - 0.5, point[1] - 0.5, "+", color=color, markersize=size, markeredgewidth=edge)
        bar = drawing.colorbar(drawn, ax=panels[2].tolist(), shrink=0.8)
        bar.set_label(similarity.units, fontsize=TEXT_SIZE)
        bar.ax.tick_params(labelsize=TEXT_SIZE)
    return drawing


def _show(axes: Axes, frame: Frame, values: Any = None, **style: Any) -> AxesImage:
    """Show an image, and values (h, w, channels) on the box of the model's input."""
    drawn = axes.imshow(frame.image)
    axes.set(xticks=[], yticks=[])
    if values is not None:
        left, top, right, bottom = (edge - 0.5 for edge in frame.box)  # in matplotlib, a pixel is around its number
        limits = axes.axis()
        drawn = axes.imshow(values, extent=(left, right, bottom, top), interpolation="nearest", **style)
        axes.axis(limits)
    return drawn
