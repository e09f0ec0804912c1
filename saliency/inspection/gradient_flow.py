"""Plot the gradient by layer, which shows where it vanishes, explodes, is zero or NaN."""

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
"""Factor relative to the gradient at the head beyond which a gradient counts as vanishing or exploding."""
USUAL = (1e-4, 1e-2)
"""Usual range of the ratio of an update to the weight."""

_LABELS_PER_INCH = 2.8
_LOWEST, _HIGHEST = 1e-120, 1e120  # limits of an axis that matplotlib can draw
_MAX_LABEL = 30  # characters
_MAX_TICKS = 120  # largest number of unlabelled ticks
_QUANTITIES = {
    "norm": "norm of the gradient",
    "rms": "root mean square of the gradient",
    "ratio": "gradient / weight",
}
# The subject of the title. Titles compare norms even for "rms", which is smaller in wider layers.
_SUBJECTS = {"norm": "The gradient", "rms": "The norm of the gradient", "ratio": "The gradient over the weight"}
# Colours (Okabe and Ito) and shapes that colour-blind readers can distinguish.
_STYLES = {
    "fine": ("#0072B2", "o", "within a factor of 1000 of the head"),
    "low": ("#E69F00", "v", "less than a thousandth of the head's"),
    "high": ("#CC3311", "^", "more than a thousand times the head's"),
    "zero": ("#444444", "s", "exactly zero"),
    "broken": ("#AA0077", "X", "NaN or infinity"),
    "none": ("#777777", "D", "no gradient"),
}
_UPDATE_LABELS = {
    "fine": "0.01 to 1 % of the weight (usual)",
    "low": "less than 0.01 %",
    "high": "more than 1 %",
}


@dataclass(frozen=True, slots=True)
class _Point:
    """One layer or parameter of the plot."""

    label: str
    value: float | None  # NaN if the gradient holds NaN or infinity, None without a gradient
    width: float = 1.0  # factor that converts the value to a norm, for comparisons

    @property
    def height(self) -> float:
        """The position on the log axis; NaN if there is none."""
        return min(max(self.value, _LOWEST), _HIGHEST) if self.value is not None and self.value > 0 else math.nan

    @property
    def strength(self) -> float:
        """The value for comparisons between points."""
        return self.height * self.width

    def kind(self, usual: tuple[float, float]) -> str:
        """Return the key of the style of the point."""
        if self.value is None or not self.value > 0:
            return "none" if self.value is None else "zero" if self.value == 0 else "broken"
        strength = self.value * self.width
        return "low" if strength < usual[0] else "high" if strength > usual[1] else "fine"


def gradient_flow(
    statistics: GradientStatistics,
    *,
    of: Literal["layers", "parameters"] = "layers",
    measure: Literal["norm", "rms", "ratio"] = "norm",
    size: tuple[float, float] = (10.0, 4.8),
) -> Figure:
    """Plot the magnitude of the gradient from the input (left) to the output (right), on a log axis.

    Each point is one call of a layer, in forward order. Only the innermost layers are shown, without `nn.Identity`. The
    backward pass runs from right to left: a gradient that falls towards the left vanishes, and one that rises explodes.
    Points that differ from the last layer, the head, by more than a factor of 1000 have another colour and shape. Zero,
    NaN and infinite gradients have others, at the lower or upper edge. The title summarises the result in words.

    Args:
        statistics: From `gradient_statistics`.
        of: "layers" for the gradients at the outputs of layers, "parameters" for those of weights with more than one
            axis.
        measure: "norm" for the Euclidean norm, "rms" for the root mean square, or for parameters "ratio". The root mean
            square is smaller in wider layers, so title, colours and band still compare norms. The ratio is that of the
            update to the weight with a learning rate, else of the gradient to the weight.
        size: Width and height in inches.

    Returns:
        A matplotlib Figure, independent of pyplot: `gradient_flow(s).savefig("flow.png")`. Notebooks display it.

    Raises:
        RenderError: There is nothing to draw, or an option is invalid.
    """
    if not isinstance(statistics, GradientStatistics):
        raise RenderError(f"gradient_flow expects the result of gradient_statistics; got {type(statistics).__name__}")
    check_choice("of", of, ("layers", "parameters"), error=RenderError)
    check_choice("measure", measure, ("norm", "rms", "ratio"), error=RenderError)
    if of == "layers" and measure == "ratio":
        raise RenderError('the ratio requires parameters: gradient_flow(..., of="parameters", measure="ratio")')
    given: object = size
    is_pair = isinstance(given, list | tuple) and len(given) == 2
    if not is_pair or not all(is_real(side) and float(side) > 0 for side in size):
        raise RenderError(f"size={size!r}: expected a width and a height in inches, both above 0")
    points = _layer_points(statistics, measure) if of == "layers" else _parameter_points(statistics, measure)
    if not points:
        raise RenderError(f"there are no {of} in these statistics to draw")
    rate = statistics.learning_rate if measure == "ratio" else None
    head = next((point.strength for point in reversed(points) if point.height > 0), 1.0)
    usual = USUAL if rate is not None else (head / FAR, head * FAR)
    drawing = new_figure(*size)
    axes = drawing.subplots()
    _draw(axes, points, usual, {} if rate is None else _UPDATE_LABELS)
    _label_points(axes, [point.label for point in points], max(2, round(_LABELS_PER_INCH * size[0])))
    axes.set_ylabel(_QUANTITIES[measure] if rate is None else "update / weight")
    columns = max(20, round(11 * size[0]))
    xlabel = f"{of}, from the input to the output; the gradient of the {statistics.of} flows from right to left"
    axes.set_xlabel(textwrap.fill(xlabel, columns))
    title = _title(points, measure) if rate is None else _update_title(points, rate)
    axes.set_title(_plain(textwrap.fill(title, columns)), loc="left", fontsize="medium")
    return drawing


def _layer_points(statistics: GradientStatistics, measure: str) -> list[_Point]:
    # Skip modules that compute a weight, such as weight_norm: activations do not pass through them.
    rows = [row for row in statistics.layers if "parametrizations" not in row.name.split(".")]
    containers = {row.name[:at] for row in rows for at in range(len(row.name)) if row.name[at] == "."}
    inner = [row for row in rows if row.name not in containers and (row.name or len(rows) == row.calls)]
    shown = [row for row in inner if row.kind != "Identity"] or inner
    return [_point(_layer_label(row), row, row.count, measure) for row in shown]


def _layer_label(row: LayerGradients) -> str:
    """Return the name of a layer, with its kind if the name contains no letters."""
    name = row.name if any(map(str.isalpha, row.name)) else f"{row.name} {row.kind}".strip()
    return f"{name} ({row.call + 1})" if row.calls > 1 else name


def _parameter_points(statistics: GradientStatistics, measure: str) -> list[_Point]:
    rows = list(statistics.parameters)
    weights = [row for row in rows if len(row.shape) > 1] or rows
    return [_point(row.name.removesuffix(".weight"), row, math.prod(row.shape), measure) for row in weights]


def _point(label: str, row: LayerGradients | ParameterGradients, count: int, measure: str) -> _Point:
    value: float | None = getattr(row, measure)
    if row.norm is not None and (row.nan or row.inf or value is None):
        value = math.nan
    return _Point(label, None if row.norm is None else value, math.sqrt(count or 1) if measure == "rms" else 1.0)


def _draw(axes: Axes, points: Sequence[_Point], usual: tuple[float, float], labels: dict[str, str]) -> None:
    low, high = _limits([point.height for point in points if point.height > 0])
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_xlim(-0.7, len(points) - 0.3)
    widths = [point.width for point in (points[0], *points, points[-1])]
    lower, upper = ([max(limit / width, _LOWEST) for width in widths] for limit in usual)
    axes.fill_between(range(-1, len(points) + 1), lower, upper, color=_STYLES["fine"][0], alpha=0.07, linewidth=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    kinds = [point.kind(usual) for point in points]
    edges = {"zero": low, "none": low, "broken": high}
    heights = [edges.get(kind, point.height) for kind, point in zip(kinds, points, strict=True)]
    line = [math.nan if kind in ("none", "broken") else height for kind, height in zip(kinds, heights, strict=True)]
    axes.plot(range(len(points)), line, color="#777777", linewidth=1, zorder=2)
    for kind, (color, marker, label) in _STYLES.items():
        places = [at for at, other in enumerate(kinds) if other == kind]
        if not places:
            continue
        fill = "white" if kind == "none" else color
        size = 5 if len(points) > 80 else 7
        (dots,) = axes.plot(places, [heights[at] for at in places], marker, color=color, markersize=size, zorder=3)
        dots.set(markerfacecolor=fill, clip_on=False, label=labels.get(kind, label))
        if kind == "broken":
            axes.vlines(places, low, high, color=color, alpha=0.25, linewidth=1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=True, framealpha=0.9, fontsize="small")


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Return the limits of the log axis: a margin around the values, and at least three decades."""
    low, high = math.log10(min(values, default=1.0)) - 0.5, math.log10(max(values, default=1.0)) + 0.5
    missing = max(0.0, 3 - (high - low)) / 2
    return 10 ** (low - missing), 10 ** (high + missing)


def _label_points(axes: Axes, labels: Sequence[str], most: int) -> None:
    """Label at most `most` points, including the first and the last."""
    step = max(1, math.ceil((len(labels) - 1) / (most - 1)))
    # Label evenly from the output; drop the label next to the input if it is too close.
    places = [0, *(at for at in range(len(labels) - 1, -1, -step)[::-1] if at >= max(step / 2, 1))]
    names = [_plain(_short(labels[at])) for at in places]
    axes.set_xticks(places, names, rotation=90 if len(places) > 8 else 0, fontsize="small")
    if len(labels) <= _MAX_TICKS:
        axes.set_xticks(range(len(labels)), minor=True)


def _short(label: str) -> str:
    return label if len(label) <= _MAX_LABEL else f"…{label[1 - _MAX_LABEL :]}"


def _plain(text: str) -> str:
    """Escape dollar signs, which matplotlib would interpret as formulas."""
    return text.replace("$", r"\$")


def _title(points: Sequence[_Point], measure: str) -> str:
    drawn = [point for point in points if point.height > 0]
    for kind, text in (("broken", "NaN or infinite"), ("zero", "zero")):
        some = [point for point in points if point.kind((0.0, math.inf)) == kind]
        if some and kind == "zero" and not drawn:
            return "The gradient is zero everywhere"
        if some:
            where = f"in the order of the backward pass, first at {_short(some[-1].label)}"
            return f"The gradient is {text} at {len(some)} of {len(points)}; {where}"
    if not drawn:
        return "No layer or parameter has a gradient"
    missing = sum(point.value is None for point in points)
    none = f"; {missing} of {len(points)} have no gradient" if missing else ""
    return f"{_SUBJECTS[measure]} {_trend(drawn)}{none}"


def _trend(points: Sequence[_Point]) -> str:
    strengths = [point.strength for point in points]
    if len(points) == 1:
        return f"is {number(strengths[0])}"
    factor, spread = strengths[-1] / strengths[0], max(strengths) / min(strengths)
    ends = f"from {_short(points[-1].label)} to {_short(points[0].label)}"
    if factor >= FAR:
        return f"falls by a factor of {number(factor)} {ends}: vanishing"
    if factor <= 1 / FAR:
        return f"grows by a factor of {number(1 / factor)} {ends}: exploding"
    judgement = "neither vanishing nor exploding" if spread < FAR else "uneven"
    return f"stays within a factor of {number(spread)} {ends}: {judgement}"


def _update_title(points: Sequence[_Point], learning_rate: float) -> str:
    kinds = [point.kind(USUAL) for point in points]
    heights = [point.height for point in points if point.height > 0]
    if not heights or "broken" in kinds or "zero" in kinds:
        return _title(points, "ratio")
    lengths = " to ".join(share(height) for height in dict.fromkeys((min(heights), max(heights))))
    off = [f"{text} at {kinds.count(kind)}" for kind, text in (("high", "more"), ("low", "less")) if kind in kinds]
    judgement = f"{' and '.join(off)} of {len(points)} than usual" if off else "the usual range"
    return f"At a learning rate of {learning_rate:g} an update is {lengths} of the weight: {judgement}"
