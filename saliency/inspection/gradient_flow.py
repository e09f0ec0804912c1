"""The gradient through the depth of a network, as a matplotlib figure: where it vanishes, explodes, dies or breaks.

As in `figure`, nothing of pyplot is touched.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import RenderError
from ..render.figure import new_figure
from ..validation import check_choice, is_real
from .statistics import GradientStatistics, LayerGradients, ParameterGradients
from .tables import number, share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAR = 1e3
"""By what factor a gradient may differ from that at the head before it counts as vanishing or exploding."""
USUAL = (1e-4, 1e-2)
"""Which share of a weight an update usually is."""

_LABELS = 2.8  # as many for each inch as can be read below the axis
_LEAST, _MOST = 1e-120, 1e120  # what an axis can be drawn for
_LONGEST = 30  # letters of a label
_MOST_TICKS = 120  # without a name
_QUANTITIES = {
    "norm": "norm of the gradient",
    "rms": "root mean square of the gradient",
    "ratio": "gradient / weight",
}
# What a verdict is about. The root mean square falls wherever a layer is wider than the next: norms are what is judged.
_JUDGED = {"norm": "The gradient", "rms": "The norm of the gradient", "ratio": "The gradient over the weight"}

# Told apart by colour-blind eyes too, and by their shapes (Okabe and Ito).
_STYLES = {
    "fine": ("#0072B2", "o", "within a factor of 1000 of the head"),
    "low": ("#E69F00", "v", "less than a thousandth of the head's"),
    "high": ("#CC3311", "^", "more than a thousand times the head's"),
    "zero": ("#444444", "s", "exactly zero"),
    "broken": ("#AA0077", "X", "NaN or infinity"),
    "none": ("#777777", "D", "no gradient comes here"),
}
_STYLES_OF_UPDATES = {
    **_STYLES,
    "fine": ("#0072B2", "o", "0.01 to 1 % of the weight, as is usual"),
    "low": ("#E69F00", "v", "less than 0.01 %"),
    "high": ("#CC3311", "^", "more than 1 %"),
}


@dataclass(frozen=True, slots=True)
class _Point:
    """One layer or parameter on the axis of depth."""

    label: str
    value: float | None  # None: no gradient
    broken: bool
    width: float = 1.0  # what the value is multiplied by before it is judged: makes a norm of a root mean square

    @property
    def height(self) -> float:
        """Where it stands on a log axis; NaN where it has no place there."""
        if self.value is None or self.broken or self.value <= 0:
            return math.nan
        return min(max(self.value, _LEAST), _MOST)

    @property
    def strength(self) -> float:
        """What is held against that of others, whatever their size."""
        return self.height * self.width

    @property
    def is_drawn(self) -> bool:
        """Whether it has a place on a log axis."""
        return not math.isnan(self.height)


def gradient_flow(
    statistics: GradientStatistics,
    *,
    of: Literal["layers", "parameters"] = "layers",
    measure: Literal["norm", "rms", "ratio"] = "norm",
    size: tuple[float, float] = (10.0, 4.8),
) -> Figure:
    """The strength of the gradient from the input on the left to the output on the right, on a log axis.

    Each point is one call of a layer, in forward order: the innermost layers of the statistics, `nn.Identity` aside.
    The gradient comes from the right, so a line that falls towards the left vanishes, and one that rises explodes. What
    is more than a factor of 1000 away from the last layer, the head, has another colour and shape; so has what is zero,
    NaN or infinite, which stands on the lower or the upper edge. The title says it in words.

    Args:
        statistics: From `gradient_statistics`.
        of: The gradients at the outputs of layers, or those of the weights with more than one axis.
        measure: The Euclidean norm; the root mean square "rms", the norm for a single number, which is smaller where
            a layer is wider, so that verdict, colours and band go by the norm all the same; or for parameters the
            "ratio", of the update to the weight where there is a learning rate, else of the gradient.
        size: Width and height in inches.

    Returns:
        A matplotlib Figure: `gradient_flow(s).savefig("flow.png")`. A notebook shows it by itself.

    Raises:
        RenderError: There is nothing to draw, or an option is impossible.
    """
    if not isinstance(statistics, GradientStatistics):
        raise RenderError(
            f"gradient_flow takes what gradient_statistics(...) returned; got {type(statistics).__name__}"
        )
    check_choice("of", of, ("layers", "parameters"), error=RenderError)
    check_choice("measure", measure, ("norm", "rms", "ratio"), error=RenderError)
    if of == "layers" and measure == "ratio":
        raise RenderError(
            'a ratio to the weight is of parameters: gradient_flow(..., of="parameters", measure="ratio")'
        )
    given: object = size
    if not (
        isinstance(given, list | tuple) and len(given) == 2 and all(is_real(each) and float(each) > 0 for each in given)
    ):
        raise RenderError(f"size={size!r} is not a width and a height in inches, both above 0")
    points = _layers(statistics, measure) if of == "layers" else _parameters(statistics, measure)
    if not points:
        raise RenderError(f"there are no {of} in these statistics to draw")
    is_update = measure == "ratio" and statistics.learning_rate is not None
    usual = USUAL if is_update else _around_head(points)
    drawing = new_figure(*size)
    axes = drawing.subplots()
    _draw(axes, points, usual, _STYLES_OF_UPDATES if is_update else _STYLES)
    _name_the_places(axes, [each.label for each in points], max(2, round(_LABELS * size[0])))
    axes.set_ylabel(_QUANTITIES[measure] if not is_update else "update / weight")
    width = max(20, round(11 * size[0]))
    depth = f"{of}, from the input to the output; the gradient of the {statistics.of} comes from the right"
    axes.set_xlabel(textwrap.fill(depth, width))
    text = _verdict(points, measure) if not is_update else _verdict_on_updates(points, statistics.learning_rate)
    axes.set_title(_plain(textwrap.fill(text, width)), loc="left", fontsize="medium")
    return drawing


def _layers(statistics: GradientStatistics, measure: str) -> list[_Point]:
    # What makes a weight, as weight_norm does, is no layer that the gradient comes through.
    rows = [row for row in statistics.layers if "parametrizations" not in row.name.split(".")]
    around = {row.name[:at] for row in rows for at in range(len(row.name)) if row.name[at] == "."}
    inner = [row for row in rows if row.name not in around and (row.name or len(rows) == row.calls)]
    shown = [row for row in inner if row.kind != "Identity"] or inner
    return [_point(_label(row), row, measure) for row in shown]


def _label(row: LayerGradients) -> str:
    """The name of a layer, and its kind where the name is only a number."""
    name = row.name if any(each.isalpha() for each in row.name) else f"{row.name} {row.kind}".strip()
    return f"{name} ({row.call + 1})" if row.calls > 1 else name


def _parameters(statistics: GradientStatistics, measure: str) -> list[_Point]:
    rows = list(statistics.parameters)
    weights = [row for row in rows if len(row.shape) > 1] or rows
    return [_point(row.name.removesuffix(".weight"), row, measure) for row in weights]


def _point(label: str, row: LayerGradients | ParameterGradients, measure: str) -> _Point:
    if row.norm is None:
        return _Point(label, None, broken=False)
    value: float | None = getattr(row, measure)
    is_broken = bool(row.nan or row.inf) or value is None or math.isnan(value)
    count = row.count if isinstance(row, LayerGradients) else math.prod(row.shape)
    return _Point(label, value, is_broken, math.sqrt(count or 1) if measure == "rms" else 1.0)


def _around_head(points: Sequence[_Point]) -> tuple[float, float]:
    """What is not far from the gradient next to the output."""
    head = next((each.strength for each in reversed(points) if each.is_drawn), 1.0)
    return head / FAR, head * FAR


def _kind(point: _Point, usual: tuple[float, float]) -> str:
    if point.broken:
        return "broken"
    if point.value is None:
        return "none"
    if point.value == 0:
        return "zero"
    strength = point.value * point.width
    return "low" if strength < usual[0] else "high" if strength > usual[1] else "fine"


def _draw(
    axes: Axes, points: Sequence[_Point], usual: tuple[float, float], styles: dict[str, tuple[str, str, str]]
) -> None:
    low, high = _limits([each.height for each in points if each.is_drawn])
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_xlim(-0.7, len(points) - 0.3)
    ends = [-1, *range(len(points)), len(points)]
    widths = [each.width for each in (points[0], *points, points[-1])]
    lower, upper = ([max(limit / width, _LEAST) for width in widths] for limit in usual)
    axes.fill_between(ends, lower, upper, color=styles["fine"][0], alpha=0.07, linewidth=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    kinds = [_kind(each, usual) for each in points]
    edges = {"zero": low, "none": low, "broken": high}
    heights = [edges.get(kind, each.height) for kind, each in zip(kinds, points, strict=True)]
    line = [each if kind not in ("none", "broken") else math.nan for kind, each in zip(kinds, heights, strict=True)]
    axes.plot(range(len(points)), line, color="#777777", linewidth=1, zorder=2)
    for kind, (color, marker, label) in styles.items():
        places = [at for at, each in enumerate(kinds) if each == kind]
        if not places:
            continue
        axes.plot(
            places,
            [heights[at] for at in places],
            linestyle="none",
            marker=marker,
            color=color,
            markerfacecolor="white" if kind == "none" else color,
            markersize=5 if len(points) > 80 else 7,
            label=label,
            clip_on=False,
            zorder=3,
        )
        if kind == "broken":
            axes.vlines(places, low, high, color=color, alpha=0.25, linewidth=1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=True, framealpha=0.9, fontsize="small")


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """The ends of a log axis: room around the values, and three decades at least."""
    least, most = (min(values), max(values)) if values else (1.0, 1.0)
    low, high = math.log10(least) - 0.5, math.log10(most) + 0.5
    missing = max(0.0, 3 - (high - low)) / 2
    return 10 ** (low - missing), 10 ** (high + missing)


def _name_the_places(axes: Axes, labels: Sequence[str], most: int) -> None:
    """As many names below the axis as can be read, the first and the last among them."""
    step = max(1, math.ceil((len(labels) - 1) / (most - 1)))
    # Evenly from the output on, and the input in the place of its neighbour where that is too near.
    places = [0, *(at for at in range(len(labels) - 1, -1, -step)[::-1] if at >= max(step / 2, 1))]
    axes.set_xticks(
        places, [_plain(_short(labels[at])) for at in places], rotation=90 if len(places) > 8 else 0, fontsize="small"
    )
    if len(labels) <= _MOST_TICKS:
        # What stands between two names is seen to be there.
        axes.set_xticks(range(len(labels)), minor=True)


def _short(label: str) -> str:
    return label if len(label) <= _LONGEST else f"…{label[1 - _LONGEST :]}"


def _plain(text: str) -> str:
    """Text as it is, where matplotlib would read formulas."""
    return text.replace("$", r"\$")


def _verdict(points: Sequence[_Point], measure: str) -> str:
    """What there is to see, in words."""
    broken = [each for each in points if each.broken]
    zeros = [each for each in points if each.value == 0 and not each.broken]
    drawn = [each for each in points if each.is_drawn]
    if broken:
        at, what, few = broken[-1], "NaN or infinite", len(broken)
    elif not drawn:
        return "The gradient is zero everywhere" if zeros else "No gradient comes here"
    elif zeros:
        at, what, few = zeros[-1], "zero", len(zeros)
    else:
        missing = sum(each.value is None for each in points)
        none = f"; none comes to {missing} of {len(points)}" if missing else ""
        return _verdict_on_lengths(drawn, _JUDGED[measure]) + none
    return f"The gradient is {what} at {few} of {len(points)}; coming from the output, first at {_short(at.label)}"


def _verdict_on_lengths(points: Sequence[_Point], what: str) -> str:
    strengths = [each.strength for each in points]
    if len(points) == 1:
        return f"{what} is {number(strengths[0])}"
    factor, spread = strengths[-1] / strengths[0], max(strengths) / min(strengths)
    way = f"from {_short(points[-1].label)} to {_short(points[0].label)}"
    if factor >= FAR:
        return f"{what} falls by a factor of {number(factor)} {way}: vanishing"
    if factor <= 1 / FAR:
        return f"{what} grows by a factor of {number(1 / factor)} {way}: exploding"
    judgement = "neither vanishing nor exploding" if spread < FAR else "uneven"
    return f"{what} stays within a factor of {number(spread)} {way}: {judgement}"


def _verdict_on_updates(points: Sequence[_Point], learning_rate: float | None) -> str:
    kinds = [_kind(each, USUAL) for each in points]
    heights = [each.height for each in points if each.is_drawn]
    if not heights or "broken" in kinds or "zero" in kinds:
        return _verdict(points, "ratio")
    lengths = f"{share(min(heights))} to {share(max(heights))}" if len(heights) > 1 else share(heights[0])
    off = [f"{words} at {kinds.count(kind)}" for kind, words in (("high", "more"), ("low", "less")) if kind in kinds]
    judgement = f"{' and '.join(off)} of {len(points)} than is usual" if off else "as is usual"
    return f"At a learning rate of {learning_rate:g} an update is {lengths} of the weight: {judgement}"
