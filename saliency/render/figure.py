"""Matplotlib figures for papers and notebooks: an image, its maps side by side, and colour bars in their units."""

from __future__ import annotations

import io
import math
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import max_pool2d

from ..attribution.base import Attribution
from ..attribution.explanation import Explanation, Matches, fractions
from ..attribution.features import Features
from ..attribution.heatmap import method_titles, several, single_images
from ..attribution.inputs import InputExplanations
from ..errors import RenderError
from ..io.atomic_write import require_folder
from ..io.geometry import Frame
from ..model.answer import Answer
from ..model.call import bound
from ..targets.words import words
from ..validation import check_choice, check_integer
from .blending import HATCHED, Opacity, frame_of, paint, probability, shrink
from .scaling import SMOOTHING, ScaledMap, scale_map, shared_limit
from .sheet import require_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCREEN_DPI, PRINT_DPI = 100, 300
COLUMNS = 5  # most panels side by side by default

# Inches.
PAGE = 6.875  # text width of a page with two columns
GAP = 0.03  # at each side of a panel of such a figure
LABEL_WIDTH = 0.45  # width of the class names to the left of rows
BAR_HEIGHT, BAR_SPACE = 0.06, 0.8  # heights of the colour bars below columns, and of titles and bars together
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
        frame, titles = _print_frame(frame_of(group[0])), method_titles(group)
        has_one_class = _has_one_class(group)
        panels = [Panel(frame.image, [*islice(heads, 1), *[class_title(group[0])] * has_one_class])]
        for explanation, method in zip(group, titles, strict=True):
            scaled = scale_map(explanation, limit=limit, smoothing=smoothing)
            names = [method] if has_one_class else [method, class_title(explanation)]
            panels.append(Panel(paint(frame, scaled, colormap, opacity), names, scaled, label or explanation.units))
        groups.append(panels)
    rows, width = _in_rows(groups, columns)
    drawing, grid = draw_panels(rows, width, HEAD_AND_BAR, title or "", parse_math=parse_math)
    for axes, panel in zip(chain.from_iterable(grid), chain.from_iterable(rows), strict=True):
        if panel.scaled is not None:
            below = axes.inset_axes((0.0, -0.07, 1.0, 0.035))
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
    frames = [_print_frame(frame_of(row[0])) for row in rows]
    panels = [[Panel(frame.image, ["image"] * (index == 0))] for index, frame in enumerate(frames)]
    bars = []
    for column, method in zip(zip(*rows, strict=True), method_titles(rows[0]), strict=True):
        limit = shared_limit(column, smoothing=smoothing)
        scaled = [scale_map(explanation, limit=limit, smoothing=smoothing) for explanation in column]
        for index, explanation in enumerate(column):
            names = [_in_words(method, letters)] * (index == 0)
            names += [class_title(explanation)] * (not _has_one_class(rows[index]))
            panels[index].append(Panel(paint(frames[index], scaled[index], *style), names))
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
    height = width * min(frames[-1].image.height / frames[-1].image.width, TALLEST)
    for axes, bar, explanation in zip(grid[-1][1:], bars, rows[0], strict=True):
        below = axes.inset_axes((0.0, -2 * BAR_HEIGHT / height, 1.0, BAR_HEIGHT / height))
        bar_style = style[0], label or explanation.units, parse_math, round(1.3 * letters)
        add_bar(drawing, bar, *bar_style, cax=below, orientation="horizontal")
    return drawing


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
        group = next((group for group in groups if frame_of(group[0]) == frame_of(explanation)), None)
        if group is None:
            groups.append([explanation])
        else:
            group.append(explanation)
    return groups


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
