"""Figures for papers and notebooks: maps side by side with colour bars in their units, and slices of volumes."""

from __future__ import annotations

import io
import itertools
import math
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import max_pool2d

from ..attribution.base import Attribution
from ..attribution.explanation import (
    Explanation,
    Matches,
    fractions,
    heatmap,
    method_titles,
    require_explanation,
    resized,
    several,
    single_images,
)
from ..attribution.features import Features
from ..attribution.inputs import InputExplanations
from ..errors import RenderError, errors_as, plural
from ..io.atomic_write import require_folder
from ..io.geometry import Frame
from ..io.inputs import encode
from ..io.volumes import Volume
from ..model.answer import Answer
from ..model.call import bound
from ..targets.words import words
from ..validation import check_choice, check_integer, described
from .overlay import HATCHED, Opacity, frame_of, overlay, paint, probability, shrink
from .scaling import SMOOTHING, ScaledMap, scale_map, shared_limit
from .sheet import contact_sheet, require_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SCREEN_DPI, PRINT_DPI = 100, 300
COLUMNS = 5  # most panels side by side by default

# Inches.
PAGE = 6.875  # text width of a page with two columns
GAP = 0.03  # at each side of a panel of such a figure
LABEL_WIDTH = 0.45  # width of the class names to the left of rows
BAR_HEIGHT, BAR_SPACE = 0.06, 0.8  # heights of colour bars, and of titles and bars of columns together
WIDTH = 10.0  # all panels together
SMALLEST_PANEL, LARGEST_PANEL = 1.8, 3.4
TALLEST = 1.5  # height of a panel, as a multiple of its width
HEAD_AND_BAR = 0.9  # height of the title and the colour bar of a panel
TITLE_HEIGHT = 0.3  # height of the title above all panels

RAISES, LOWERS = "#d62728", "#1f77dc"  # colours of matches
WIDEST = 6.0  # points, the line of the strongest match

NEAREST = Image.Resampling.NEAREST
TITLE_SIZE, TEXT_SIZE = 9.0, 7.0  # points
TABLE_HEAD, TABLE_ROW = 1.2, 0.17  # inches, of the shares of tokens: the title and the tokens, and a row
MOST_TOKENS = 40  # columns of the shares
SHOWN_SHARE = 0.02  # smallest share whose number is drawn

NAME, LABEL = 24, 32  # line of a class name in a title, and of a label, in characters
LETTERS = 14  # characters of a title per inch


class Panel(NamedTuple):
    """An image in a figure, with the lines of its title, and the scale and the units of its colour bar, if any."""

    image: Image.Image
    names: Sequence[str] = ()
    scaled: ScaledMap | None = None
    units: str = ""


def new_figure(width: float, height: float, crop: str | None = None) -> Figure:
    """Create an empty figure of a size in inches. It needs no display, and is not registered in pyplot.

    Saved files have 300 dots per inch, and their text remains text in PDF and SVG. With the crop "tight", they are as
    large as their content.
    """
    import matplotlib as mpl
    import matplotlib.figure

    class NotebookFigure(matplotlib.figure.Figure):
        """Figure that a notebook shows without pyplot."""

        def savefig(self, fname: Any, **kwargs: Any) -> None:
            if isinstance(fname, str | os.PathLike):
                require_folder(Path(fname))
            with mpl.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
                super().savefig(fname, **{"dpi": PRINT_DPI, "bbox_inches": crop, **kwargs})

        def _repr_png_(self) -> bytes:
            return as_png(self, SCREEN_DPI, bbox_inches="tight")

    return NotebookFigure(figsize=(width, height), layout="constrained", dpi=SCREEN_DPI)


def as_png(drawing: Figure, dpi: float, **options: Any) -> bytes:
    """Return a figure as the content of a PNG file, with options of `savefig`."""
    png = io.BytesIO()
    drawing.savefig(png, format="png", dpi=dpi, **options)
    return png.getvalue()


def draw_maps(
    explanations: Explanation | Mapping[Any, Any] | Iterable[Explanation] | Sequence[Sequence[Explanation]],
    *,
    columns: int | None = None,
    title: str | None = None,
    opacity: Opacity = "map",
    colormap: str | None = None,
    smoothing: float = SMOOTHING,
    shared: bool | Literal["method"] = False,
    label: str | None = None,
    parse_math: bool = False,
) -> Figure:
    """Draw each image once, then its maps side by side, each with a colour bar; see `results.figure`."""
    if columns is not None:
        check_integer("columns", columns, least=1, error=RenderError)
    check_choice("shared", shared, (False, True, "method"), error=RenderError)
    heads = chain[str]()
    if isinstance(explanations, InputExplanations):
        heads, shared = chain.from_iterable(share_labels(explanations)), True
        explanations = [[explanation] for explanation in pictured(explanations)]
    elif isinstance(explanations, Mapping):
        columns_by_title = [(str(name), several(column, "figure")) for name, column in explanations.items()]
        explanations = [replace(each, title=name) for name, column in columns_by_title for each in column]
    listed: list[Any] = list(explanations) if isinstance(explanations, list | tuple) else []
    if not listed or not all(isinstance(row, list | tuple) for row in listed):
        listed = [explanations]
    image_rows = [single_images(row, "figure") for row in listed]
    by_image = list(chain.from_iterable(map(_by_image, image_rows)))
    if shared == "method":
        if columns is not None:
            raise RenderError(f'shared="method" draws one column per method; leave out columns={columns}')
        return _draw_columns(by_image, title or "", (colormap, opacity), smoothing, label, parse_math)
    limit = shared_limit(chain.from_iterable(image_rows), smoothing=smoothing) if shared else None
    groups = []
    for group in by_image:
        image, titles = _print_frame(frame_of(group[0])).image, method_titles(group)
        has_one_class = _has_one_class(group)
        panels = [Panel(image, [*islice(heads, 1), *[class_title(group[0])] * has_one_class])]
        for explanation, method in zip(group, titles, strict=True):
            scaled = scale_map(explanation, limit=limit, smoothing=smoothing)
            names = [method] if has_one_class else [method, class_title(explanation)]
            drawn = paint(frame_of(explanation, image), scaled, colormap, opacity)
            panels.append(Panel(drawn, names, scaled, label or explanation.units))
        groups.append(panels)
    rows, width = _in_rows(groups, columns)
    drawing, grid = draw_panels(rows, width, HEAD_AND_BAR, title or "", parse_math=parse_math)
    for axes, panel in zip(chain.from_iterable(grid), chain.from_iterable(rows), strict=True):
        if panel.scaled is not None:
            below = _bar_below(axes, panel.image, width)
            add_bar(drawing, panel.scaled, colormap, panel.units, parse_math, cax=below, orientation="horizontal")
    return drawing


def _draw_columns(
    rows: Sequence[Sequence[Explanation]],
    title: str,
    style: tuple[str | None, Opacity],
    smoothing: float,
    label: str | None,
    parse_math: bool,
) -> Figure:
    """Draw one row per image and one column per method, with one scale and one colour bar per column."""
    require_columns(rows, "figure")
    width = min(SMALLEST_PANEL, (PAGE - LABEL_WIDTH) / (1 + len(rows[0])) - 2 * GAP)
    letters = round(LETTERS * width)
    images = [_print_frame(frame_of(row[0])).image for row in rows]
    panels = [[Panel(image, ["image"] * (index == 0))] for index, image in enumerate(images)]
    bars = []
    for column, method in zip(zip(*rows, strict=True), method_titles(rows[0]), strict=True):
        limit = shared_limit(column, smoothing=smoothing)
        scaled = [scale_map(explanation, limit=limit, smoothing=smoothing) for explanation in column]
        for index, explanation in enumerate(column):
            names = [_in_words(method, letters)] * (index == 0)
            names += [class_title(explanation)] * (not _has_one_class(rows[index]))
            frame = frame_of(explanation, images[index])
            panels[index].append(Panel(paint(frame, scaled[index], *style), names))
        outliers = next((part.outliers for part in scaled if part.outliers is not None), None)
        bars.append(replace(scaled[0], is_saturated=any(part.is_saturated for part in scaled), outliers=outliers))
    drawing, grid = draw_panels(panels, width, title=title, margins=(LABEL_WIDTH, BAR_SPACE), parse_math=parse_math)
    drawing.set_layout_engine("constrained", w_pad=GAP, h_pad=GAP, wspace=0, hspace=0)
    for axes in grid[0]:
        axes.title.set_parse_math(parse_math and _has_one_class(rows[0]))
    for row, [axes, *_] in zip(rows, grid, strict=True):
        lines = textwrap.wrap(getattr(row[0].frames[0], "name", ""), letters, max_lines=1, placeholder="…")
        if _has_one_class(row):
            lines += textwrap.wrap(row[0].target_names[0], letters, max_lines=2 - len(lines), placeholder="…")
            lines += probability(row[0])
        if lines:
            style_of_text: dict[str, Any] = {"rotation": 90, "ha": "right", "va": "center", "parse_math": False}
            axes.text(-0.04, 0.5, "\n".join(lines), fontsize=TITLE_SIZE, transform=axes.transAxes, **style_of_text)
    for axes, bar, explanation in zip(grid[-1][1:], bars, rows[0], strict=True):
        below = _bar_below(axes, images[-1], width)
        bar_style = style[0], label or explanation.units, parse_math, round(1.3 * letters)
        add_bar(drawing, bar, *bar_style, cax=below, orientation="horizontal")
    return drawing


def _bar_below(axes: Axes, image: Image.Image, width: float) -> Axes:
    """Return the axes of a colour bar below the image of a panel of a width in inches."""
    height = width * min(image.height / image.width, TALLEST)
    return axes.inset_axes((0.0, -2 * BAR_HEIGHT / height, 1.0, BAR_HEIGHT / height))


def _in_words(method: str, letters: int) -> str:
    """Return the title of a method; its words in lines if it is longer than a number of letters."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", method)
    return method if len(method) <= letters else textwrap.fill(words, letters, break_long_words=False)


def _has_one_class(explanations: Sequence[Explanation]) -> bool:
    return len({explanation.target_names[0] for explanation in explanations}) == 1


def share_labels(result: InputExplanations) -> Iterator[list[str]]:
    """Yield the name and the share of each image, and then of the other entries, for each case."""
    for name, shares in result.shares.items():
        label = ", ".join(map(str, name)) if isinstance(name, tuple) else str(name)
        yield [f"{label}: {round(100 * share)} %" for share in ([shares] if isinstance(shares, float) else shares)]


def pictured(result: InputExplanations) -> Iterator[Explanation]:
    """Yield the explanations, with a picture of the input where it was given as a tensor: its range in grey or RGB."""
    for name, explanation in result.items():
        x = result.inputs[name[0] if isinstance(name, tuple) else name]
        if None in explanation.frames and x.dim() == 4:
            frames = [frame or input_picture(image) for frame, image in zip(explanation.frames, x, strict=True)]
            explanation = replace(explanation, frames=tuple(frames))  # noqa: PLW2901
        yield explanation


def input_picture(x: Tensor) -> Frame:
    """Return the frame of a tensor (C, H, W): the colours of three channels, or the mean of others in grey."""
    pixels = x.double() if len(x) == 3 else x.double().mean(0, keepdim=True).expand(3, -1, -1)
    low, high = pixels.aminmax()
    scaled = ((pixels - low) / (high - low).clamp(min=1e-30) * 255).round().byte()
    return Frame(Image.fromarray(scaled.movedim(0, -1).cpu().numpy()), (0, 0, x.shape[2], x.shape[1]))


def draw_matches(matches: Matches, *, count: int = 20) -> Figure:
    """Draw both images side by side, and lines between the cells that match most; see `results.figure`."""
    from matplotlib.patches import ConnectionPatch

    check_integer("count", count, least=1, error=RenderError)
    frames = [_print_frame(frame) for frame in matches.frames if frame is not None]
    if len(frames) < 2:
        raise RenderError("the figure of matches needs the images; pass their paths or PIL images to saliency.matches")
    title = f"{matches.measure} similarity {matches.score:.3g}; red raises it, blue lowers it"
    drawing, [panels] = draw_panels([[Panel(frame.image) for frame in frames]], WIDTH / 2, title=title)
    values = matches.values.double().cpu()
    nearby = size = values.abs()
    for _ in range(2):  # the largest magnitude of the cells around one end, then around the other
        nearby = max_pool2d(nearby, 3, stride=1, padding=1).permute(2, 3, 0, 1)
    peaks = torch.where(size == nearby, size, 0).flatten()
    strongest = peaks.topk(min(count, int(peaks.count_nonzero()))).indices.flip(0)
    for cell in torch.stack(torch.unravel_index(strongest, values.shape), 1).tolist():
        value, cells = float(values[tuple(cell)]), values.shape
        ends = _centre(frames[0], cell[:2], cells[:2]), _centre(frames[1], cell[2:], cells[2:])
        width = WIDEST * abs(value) / float(size.max())
        style: dict[str, Any] = {"color": RAISES if value > 0 else LOWERS, "linewidth": width}
        drawing.add_artist(ConnectionPatch(*ends, "data", "data", axesA=panels[0], axesB=panels[1], alpha=0.8, **style))
        for axes, end in zip(panels, ends, strict=True):
            axes.plot(*end, "o", color=style["color"], markersize=WIDEST, markeredgecolor="white")
    return drawing


def word_sheet(answer: Answer, method: Attribution, *, columns: int | None = None) -> Figure:
    """Draw a map for each word of an answer, side by side, in the order of the answer.

    Each map has its own scale, and shows positive values only, which are visible on an object of any colour; `figure`
    draws both signs. The title of a map is the word, with its probability given the words before it. If the
    method gives the shares of the text, as `AttnLRP`, a table below shows them: one row per word; two columns for the
    parts of the image that raise and lower its score, and one for each token of the text. Red raises, blue lowers.

    Args:
        answer: The result of `generate`.
        method: A method of the same model.
        columns: Number of panels side by side, with the image; by default at most 5, in rows of equal length.

    Returns:
        A matplotlib Figure, as from `figure`.

    Raises:
        NotApplicableError: The method does not explain answers of the model.
        RenderError: The number of columns is invalid, or there is no answer or no method.

    Warns:
        SaliencyWarning: As for `figure`, once for all words; the image has little of the relevance of a word.
    """
    if not all((isinstance(answer, Answer), isinstance(method, Attribution))):
        got = f"{type(answer).__name__} and {type(method).__name__}"
        raise RenderError(f"word_sheet takes an answer of saliency.generate, then a method; got {got}")
    if columns is not None:
        check_integer("columns", columns, least=1, error=RenderError)
    names = [word for word, _ in answer.words]
    with bound(warned=set()):  # many words, such as "of", follow from the text
        explanations = method.attribute_classes(answer, [words(at=position) for _, position in answer.words])
    groups, images = [], len(answer.inputs)
    for image in range(images):
        frame = _print_frame(frame_of(explanations[0][image]))
        panels = [Panel(frame.image, ["image" if images == 1 else f"image {image + 1}"])]
        for name, batch in zip(names, explanations, strict=True):
            explanation = batch[image]
            sign = "positive" if explanation.sign == "signed" else explanation.sign
            scaled = scale_map(explanation, sign, smoothing=SMOOTHING)
            panels.append(Panel(paint(frame, scaled, None, "map"), [" ".join([name, *probability(explanation)])]))
        groups.append(panels)
    rows, width = _in_rows(groups, columns)
    longest = 2 * LABEL * max(map(len, rows))
    title = textwrap.shorten(f'{explanations[0].title}: "{answer.text}"', longest, placeholder="…")
    shares = _shares(explanations)
    below = 0.0 if shares is None else TABLE_HEAD + len(names) * TABLE_ROW
    drawing, _ = draw_panels(rows, width, TITLE_HEIGHT, title, below)
    if shares is not None:
        _draw_shares(drawing.subfigs[1].subplots(), shares, names)
    return drawing


def _shares(explanations: Sequence[Explanation]) -> tuple[list[str], Any] | None:
    """Return the names of the columns, and the shares of each word (words, 2 + tokens of text).

    The columns are the parts of the image that raise and lower the score of the word, and the tokens of the text. Each
    row is divided by the sum of its magnitudes. Of many tokens, those with the smallest shares are left out.
    None if the method gives no shares.
    """
    first = explanations[0]
    if first.token_shares is None:
        return None
    shares = [explanation.token_shares for explanation in explanations]
    values = fractions(torch.stack([share[0] for share in shares if share is not None]).double().cpu(), 1)
    is_image = torch.tensor([token is None for token in first.tokens], device="cpu")
    strongest = values.abs().amax(0).masked_fill(is_image, -1).topk(min(MOST_TOKENS, int((~is_image).sum()))).indices
    listed = strongest.sort().values
    names = [str(first.tokens[token]).strip() or "␣" for token in listed.tolist()]
    image = values[:, is_image]
    signs = [image.clamp(min=0).sum(1, keepdim=True), image.clamp(max=0).sum(1, keepdim=True)]
    return ["image +", "image −", *names], torch.cat([*signs, values[:, listed]], 1).numpy()


def _draw_shares(axes: Axes, shares: tuple[list[str], Any], names: Sequence[str]) -> None:
    """Draw the shares of the parts of the image and of each token of text, in percent, as a table of colours."""
    columns, values = shares
    limit = abs(values).max()
    axes.imshow(values, cmap="bwr", vmin=-limit, vmax=limit, aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=TEXT_SIZE, parse_math=False)
    axes.set_yticks(range(len(names)), names, fontsize=TEXT_SIZE, parse_math=False)
    title = "shares of the image and the text in the score of each word, % (red raises it, blue lowers it)"
    axes.set_title(title, fontsize=TITLE_SIZE)
    axes.tick_params(length=0)
    for row, column in zip(*(abs(values) >= SHOWN_SHARE).nonzero(), strict=True):
        text = f"{100 * values[row, column]:.0f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=TEXT_SIZE)


def draw_features(features: Features, *, foreground: bool = True, parts: int | None = None) -> Figure:
    """Draw the images, and the components or the parts of their features in colours; see `results.figure`."""
    frames = [_print_frame(frame_of(one)) for one in features.similarity()]
    shades = features.pca(foreground=foreground) if parts is None else _part_colors(features.parts(parts))
    colors = (255 * shades).round().byte().movedim(1, -1).cpu().numpy()
    components = []
    for frame, cells in zip(frames, colors, strict=True):
        left, top, right, bottom = map(round, frame.box)
        image = Image.new("RGB", frame.image.size)
        image.paste(Image.fromarray(cells).resize((right - left, bottom - top), NEAREST), (left, top))
        components.append(Panel(image))
    rows = [[Panel(frame.image) for frame in frames], components]
    drawing, _ = draw_panels(rows, min(LARGEST_PANEL, WIDTH / len(frames)))
    return drawing


def _part_colors(parts: Sequence[Explanation]) -> Tensor:
    """Return the hue of the largest part in each cell, as bright as its weight: (N, 3, h, w) from 0 to 1."""
    from matplotlib import colormaps

    weights, largest = torch.cat([part.values for part in parts], 1).max(1)  # (N, h, w)
    hues = colormaps["hsv"]([number / len(parts) for number in range(len(parts))])[:, :3]
    return weights[:, None] * torch.tensor(hues, dtype=weights.dtype, device=weights.device)[largest].movedim(-1, 1)


def _centre(frame: Frame, cell: Sequence[int], cells: Sequence[int]) -> tuple[float, float]:
    """Return the centre (x, y) in an image of a cell (row, column) of the model's input; pixel centres are integers."""
    left, top, right, bottom = frame.box
    x, y = ((index + 0.5) / number for index, number in zip(cell[::-1], cells[::-1], strict=True))
    return left + (right - left) * x - 0.5, top + (bottom - top) * y - 0.5


def _by_image(explanations: Sequence[Explanation]) -> list[list[Explanation]]:
    """Group explanations by their image, in the order of the first explanations."""
    groups: list[list[Explanation]] = []
    for explanation in explanations:
        group = next((group for group in groups if _show_one_image(frame_of(group[0]), frame_of(explanation))), None)
        if group is None:
            groups.append([explanation])
        else:
            group.append(explanation)
    return groups


def _show_one_image(frame: Frame, other: Frame) -> bool:
    """Return whether two frames have equal images, also with different boxes, and no different names of files."""
    if frame.name and other.name and frame.name != other.name:
        return False
    image, copy = frame.image, other.image
    return image is copy or (image.size == copy.size and image.tobytes() == copy.tobytes())


def _print_frame(frame: Frame) -> Frame:
    """Return a frame with at most the pixels that a panel has in print."""
    longest = round(LARGEST_PANEL * TALLEST * PRINT_DPI)
    return shrink(frame, longest) if max(frame.image.size) > longest else frame


def class_title(explanation: Explanation) -> str:
    """Return the class of one image with its probability, in at most two lines."""
    name = textwrap.wrap(explanation.target_names[0], NAME, max_lines=2, placeholder="…")
    return " ".join(["\n".join(name), *probability(explanation)])


def _in_rows(groups: Sequence[Sequence[Panel]], columns: int | None) -> tuple[list[Sequence[Panel]], float]:
    """Return groups of panels in rows of equal length, and the width of a panel."""
    most = max(map(len, groups))
    if columns is None:
        columns = math.ceil(most / math.ceil(most / COLUMNS))
    columns = min(most, columns)
    rows = [group[start : start + columns] for group in groups for start in range(0, len(group), columns)]
    return rows, min(LARGEST_PANEL, max(SMALLEST_PANEL, WIDTH / columns))


def draw_panels(
    rows: Sequence[Sequence[Panel]],
    width: float,
    space: float = 0.0,
    title: str = "",
    below: float = 0.0,
    margins: tuple[float, float] = (0.0, 0.0),
    parse_math: bool = False,
) -> tuple[Figure, list[list[Axes]]]:
    """Draw images with their titles in rows, and return the figure and the axes of each panel.

    Args:
        rows: The panels of each row.
        width: The width of a panel, in inches, like all lengths here.
        space: The height of the space at each row, for titles and colour bars.
        title: A title above everything.
        below: The height of an empty second subfigure; 0 for none.
        margins: The width to the left of all panels, and the height above and below them together.
        parse_math: Whether the title may contain formulas between dollar signs.
    """
    columns = max(map(len, rows))
    ratios = [max(panel.image.height / panel.image.width for panel in row) for row in rows]
    heights = [width * min(ratio, TALLEST) + space for ratio in ratios]
    height = sum(heights) + TITLE_HEIGHT * bool(title) + below
    drawing = new_figure(columns * width + margins[0], height + margins[1], crop="tight")
    drawing.suptitle(title, fontsize=TITLE_SIZE + 2, parse_math=parse_math)
    part = drawing.subfigures(2, 1, squeeze=False, height_ratios=(sum(heights), below))[0, 0] if below else drawing
    grid = part.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    for axes in grid.flat:
        axes.set_axis_off()
        axes.set_anchor("N")
    filled = [list(axes[: len(row)]) for axes, row in zip(grid, rows, strict=True)]
    for axes, panel in zip(chain.from_iterable(filled), chain.from_iterable(rows), strict=True):
        axes.imshow(panel.image)
        axes.set_title("\n".join(panel.names), fontsize=TITLE_SIZE, pad=4, parse_math=False)
    return drawing, filled


def add_bar(
    drawing: Figure,
    scaled: ScaledMap,
    colormap: str | None,
    label: str,
    parse_math: bool = False,
    letters: int = LABEL,
    **where: Any,
) -> None:
    """Add the colour bar of a map; `where` is passed to `Figure.colorbar`. A power of ten is written once."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    is_signed = scaled.sign == "signed"
    limit = scaled.limit or 1.0  # a map of zeros has no scale, and a bar needs one
    colors = scaled.colors(colormap)[int(is_signed) :]
    scale = ScalarMappable(Normalize(-limit if is_signed else scaled.floor, limit), ListedColormap(colors / 255))
    extend = ("both" if is_signed else "max") if scaled.is_saturated else "neither"
    power = math.floor(math.log10(limit))
    unit = 10.0**power if abs(power) > 3 else 1.0
    written = FuncFormatter(lambda value, _: f"{value / unit:.3g}")
    bar = drawing.colorbar(scale, extend=extend, format=written, ticks=MaxNLocator(3), **where)
    label = textwrap.fill(label if unit == 1 else f"× 10^{power} {label}", letters)
    if unit != 1:  # an exponent in the font of formulas; others may have no minus
        label = (label if parse_math else label.replace("$", r"\$")).replace(f"^{power}", f"$^{{{power}}}$", 1)
    label += "" if scaled.outliers is None else f"\n{HATCHED}"
    bar.set_label(label, fontsize=TEXT_SIZE, labelpad=1, parse_math=parse_math or unit != 1)
    bar.ax.tick_params(labelsize=TEXT_SIZE, length=2, pad=1)
    bar.outline.set_visible(False)


AXES = ("depth", "height", "width")
EDGES = ((1, 2), (0, 2), (0, 1))  # the axes of the rows and the columns of a slice along each axis
SLICES = 8  # maximum number of slices in a row of a montage
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
    across = math.ceil(count / math.ceil(count / SLICES))
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


SIDE = 480  # longest edge of an overlay in a notebook, in pixels
MOST_ROWS = 8  # images of a batch that a notebook shows


def notebook_png(explanation: Explanation) -> bytes | None:
    """Return a PNG of the overlay, of a contact sheet for several images, or of the slices of one volume.

    Return None if the explanation cannot be drawn, as for several volumes; a notebook then shows its text. For an image
    given as a tensor, the map is drawn on white.
    """
    try:
        if len(explanation.input_size) > 2:
            return as_png(slices(explanation), SCREEN_DPI, bbox_inches="tight")
        shown = [framed(row) for row in explanation[:MOST_ROWS]]
        image = overlay(shown[0], size=SIDE) if len(shown) == 1 else contact_sheet([[row] for row in shown])
        return encode(image, "PNG")
    except Exception:  # noqa: BLE001 - looking at a result must not fail
        return None


def framed(explanation: Explanation) -> Explanation:
    """Return the explanation of one image with a frame: white in the size of the model's input for a tensor."""
    height, width = explanation.input_size
    blank = Frame(Image.new("RGB", (width, height), "white"), (0.0, 0.0, float(width), float(height)))
    return replace(explanation, frames=(explanation.frames[0] or blank,))
