"""What comes back to the layers and the parameters of a model: the gradients of a loss or a score, in numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from ..errors import ModelError
from ..targets.targets import TargetLike
from ..validation import real_number
from .activation_statistics import can_be_called
from .batches import Passes
from .gradient_collector import Arrivals, ratio_of, ratios_of_layers
from .gradient_objective import Loss, Objective
from .layer_selection import LayersLike
from .model_inputs import categories_of
from .moments import Moments, moments
from .tables import Column, Table, listed, number, share


@dataclass(frozen=True, slots=True)
class LayerGradients:
    """The gradient that arrives at what one layer returned in one of its calls; None where none arrives.

    Norm, mean, std, min and max are of the finite numbers.
    """

    name: str
    kind: str  # the module's class
    call: int  # which of its calls in a forward pass, from 0
    calls: int  # how many there are in a forward pass
    count: int  # of numbers
    norm: float | None
    rms: float | None  # the root of the mean square: the norm of a single number, as it were
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    zero_share: float | None  # how many are exactly 0, from 0 to 1
    nan: int
    inf: int
    ratio: float | None = None
    """Of the update, or of the gradient, of all its parameters together to these, its parts included."""


@dataclass(frozen=True, slots=True)
class ParameterGradients:
    """The gradient of one parameter; None where it has none.

    Norm, mean, std, min and max are of the finite numbers.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool  # whether it requires a gradient
    norm: float | None
    rms: float | None
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    zero_share: float | None  # how many are exactly 0, from 0 to 1
    nan: int
    inf: int
    weight_norm: float
    ratio: float | None  # of the update, or of the gradient, to the weight; None for a weight of zeros


@dataclass(frozen=True, slots=True)
class GradientStatistics:
    """See `gradient_statistics`.

    Attributes:
        layers: A row for each call of each layer, in the order in which they begin in a forward pass.
        parameters: A row for each parameter, in the order of the model.
        loss: The mean over all images of the loss or the score.
        of: "loss" or "score".
        learning_rate: What the ratios of the parameters are for; None where they are of the gradient itself.
        first_nonfinite: The first layer with NaN or infinity in its gradient, in the order of the backward pass.
        images: How many images there were.
        batches: How many batches there were.
    """

    layers: Table[LayerGradients]
    parameters: Table[ParameterGradients]
    loss: float
    of: str
    learning_rate: float | None
    first_nonfinite: str | None
    images: int
    batches: int

    def __str__(self) -> str:
        """Both tables as text."""
        return f"{self.layers}\n\n{self.parameters}"

    def __repr__(self) -> str:
        """How much there is."""
        return (
            f"<GradientStatistics of a {self.of} of {number(self.loss)}: {len(self.layers)} layers, "
            f"{len(self.parameters)} parameters>"
        )

    def to_html(self) -> str:
        """Both tables as a piece of HTML."""
        return self.layers.to_html() + self.parameters.to_html()

    def _repr_html_(self) -> str:
        return self.to_html()


def gradient_statistics(
    model: nn.Module,
    data: Any,
    loss_or_target: Loss | TargetLike = None,
    *,
    layers: LayersLike = "*",
    learning_rate: float | None = None,
    training: bool = False,
) -> GradientStatistics:
    """The gradients of a loss or a score in numbers: at what each layer returned, and of each parameter.

    Several batches count as if they were one: the loss is the mean over all images, each batch's own loss being taken
    as the mean over its images. Sums are taken in double precision, and no activation or gradient of a layer is kept,
    so that the memory that is needed does not grow with the batches.

    At a layer it is the gradient of what it returned, also where a later operation works on that in place; a layer that
    is called several times in a forward pass has a row for each call, and of an output of several tensors the first
    counts. Layers whose parameters are frozen get the gradient that flows through them all the same. Every `.grad`,
    flag and buffer stays as it is.

    Args:
        model: Any `torch.nn.Module`. It is left bit for bit as it was.
        data: A batch as the model takes it; pictures or their paths, where the model carries its preprocessing; or any
            iterable of batches, or of pairs of a batch and labels. A shape such as (8, 3, 224, 224) stands for noise.
        loss_or_target: A function `loss(output)` or, where it takes two arguments, `loss(output, labels)`, such as
            `torch.nn.CrossEntropyLoss()`, with a scalar as its result, or one number per image, of which the mean is
            taken. Or a class by index or name, another target, or None for the top class of each image: then it is the
            mean score over the images.
        layers: Names, patterns as in "layer4.*.conv?", modules, classes of modules, or several of these.
        learning_rate: Of plain gradient descent; each parameter's `ratio` is then that of its update to itself, the
            learning rate times the norm of the gradient over the norm of the weight, and each layer's that of all its
            parameters that have a gradient, as one. A thousandth is usual. None leaves the learning rate out.
        training: A private copy of the model runs in training mode: normalisation goes by the batch, and dropout drops
            by seeds of our own. The default, evaluation mode, misjudges batch normalisation that was never trained.

    Raises:
        ImageError: The data hold no batch, or one that is empty or cannot be read.
        LayerError: A name or pattern fits no layer.
        MethodError: The learning rate is no number above zero.
        ModelError: The model has no numbers yet, cannot be run with gradients, or for `training` not be copied.
        NotApplicableError: A part of it is checkpointed in the way that allows for no gradients but `.grad`.
        TargetError: The target does not fit the output, or the loss is no number with a gradient.
    """
    if learning_rate is not None:
        learning_rate = real_number("learning_rate", learning_rate, above=0)
    objective = Objective(loss_or_target, categories_of(model))
    passes = Passes(model, data, training=training)
    if any(each.is_inference() for each in (*passes.model.parameters(), *passes.model.buffers())):
        raise ModelError("the model was made under torch.inference_mode(), so no gradient can pass it; make it outside")
    modules = passes.modules(layers)
    arrivals = Arrivals(modules, dict(passes.model.named_parameters()), objective)
    for feed in passes:
        with passes.lent() as lent:
            arrivals.run(lent, feed)
    kind, of = type(passes.original).__name__, f"{objective.name} of {number(arrivals.mean)}"
    parameters = dict(passes.model.named_parameters())
    rows = [_parameter_row(name, each, arrivals.parameter(name), learning_rate) for name, each in parameters.items()]
    norms = {id(parameters[row.name]): (row.norm, row.weight_norm) for row in rows if row.norm is not None}
    ratios = ratios_of_layers(modules, norms, learning_rate)
    return GradientStatistics(
        layers=_layer_table(
            arrivals,
            modules,
            ratios,
            _ratio_title(learning_rate),
            f"Gradients of a {of} at the layers of {kind}",
            str(passes),
        ),
        parameters=_parameter_table(rows, learning_rate, f"Gradients of a {of} at the parameters of {kind}"),
        loss=arrivals.mean,
        of=objective.name,
        learning_rate=learning_rate,
        first_nonfinite=arrivals.first,
        images=passes.images,
        batches=passes.batches,
    )


def _layer_table(
    arrivals: Arrivals,
    modules: dict[str, nn.Module],
    ratios: dict[str, float | None],
    ratio_title: str,
    title: str,
    passes: str,
) -> Table[LayerGradients]:
    rows = [
        LayerGradients(
            name=name,
            kind=type(modules[name]).__name__,
            call=call,
            calls=calls,
            count=0 if found is None else found.count,
            **_figures(found),
            ratio=ratios[name],
        )
        for name, call, calls, found in arrivals.layers()
    ]
    columns: list[Column[LayerGradients]] = [
        Column("layer", lambda row: row.name or "(the model)", "left"),
        Column("kind", lambda row: row.kind, "left"),
    ]
    if any(row.calls > 1 for row in rows):
        columns.append(Column("call", lambda row: f"{row.call + 1} of {row.calls}" if row.calls > 1 else ""))
    columns += _columns(rows)
    if any(row.ratio is not None for row in rows):
        hint = "of all its parameters together, those of its parts included"
        columns.append(Column(ratio_title, lambda row: "" if row.ratio is None else number(row.ratio), hint=hint))
    none = list(dict.fromkeys(row.name for row in rows if row.norm is None))
    seen = {row.name for row in rows}
    silent = [name for name, each in modules.items() if name not in seen and can_be_called(each)]
    notes = [
        passes,
        *(arrivals.notes or ["no NaN, no infinity" + (" at the layers" if arrivals.breaks_a_parameter else "")]),
        *listed("no gradient comes to", none),
        *listed("never called, or without a tensor to show:", silent),
    ]
    return Table(rows, columns, title, notes)


def _ratio_title(learning_rate: float | None) -> str:
    return "gradient / weight" if learning_rate is None else "update / weight"


def _parameter_table(
    rows: Sequence[ParameterGradients], learning_rate: float | None, title: str
) -> Table[ParameterGradients]:
    of = "gradient" if learning_rate is None else "update"
    columns: list[Column[ParameterGradients]] = [
        Column("parameter", lambda row: row.name, "left"),
        Column("shape", lambda row: "x".join(map(str, row.shape)) or "1", "left"),
        *_columns(rows),
        Column("weight norm", lambda row: number(row.weight_norm)),
        Column(
            _ratio_title(learning_rate),
            lambda row: _text(row.ratio),
            hint=f"the norm of the {of} over that of the weight",
        ),
    ]
    rate = "ratios are of the gradient to the weight: no learning rate was given"
    if learning_rate is not None:
        rate = f"ratios are of the update to the weight, at a learning rate of {learning_rate:g}"
    notes = [
        rate,
        *listed("frozen:", [row.name for row in rows if not row.trainable]),
        *listed("no part in the result:", [row.name for row in rows if row.trainable and row.norm is None]),
        *listed("NaN or infinity in the gradient of", [row.name for row in rows if row.nan or row.inf]),
    ]
    return Table(rows, columns, title, notes)


def _parameter_row(
    name: str, parameter: nn.Parameter, found: Moments | None, learning_rate: float | None
) -> ParameterGradients:
    weight_norm = moments(parameter).norm
    return ParameterGradients(
        name=name,
        shape=tuple(parameter.shape),
        trainable=parameter.requires_grad,
        **_figures(found),
        weight_norm=weight_norm,
        ratio=None if found is None else ratio_of(found.norm, weight_norm, learning_rate),
    )


def _figures(found: Moments | None) -> dict[str, Any]:
    """What both kinds of rows say of a gradient."""
    if found is None:
        return {**dict.fromkeys(("norm", "rms", "mean", "std", "min", "max", "zero_share")), "nan": 0, "inf": 0}
    return {
        "norm": found.norm,
        "rms": found.norm / math.sqrt(found.finite) if found.finite else math.nan,
        "mean": found.mean,
        "std": found.std,
        "min": found.min,
        "max": found.max,
        "zero_share": found.zero_share,
        "nan": found.nan,
        "inf": found.inf,
    }


_Row = TypeVar("_Row", LayerGradients, ParameterGradients)


def _columns(rows: Sequence[_Row]) -> list[Column[_Row]]:
    """What is shown of a gradient; columns in which there would be nothing are left out."""
    made: list[Column[_Row]] = [
        Column("norm", lambda row: _text(row.norm)),
        Column("rms", lambda row: _text(row.rms), hint="the root of the mean square"),
        Column("mean", lambda row: _text(row.mean)),
        Column("std", lambda row: _text(row.std)),
        Column("min", lambda row: _text(row.min)),
        Column("max", lambda row: _text(row.max)),
        Column("zeros", lambda row: share(row.zero_share), hint="exactly 0", bar=lambda row: row.zero_share),
    ]
    if any(row.nan for row in rows):
        made.append(Column("NaN", lambda row: str(row.nan or ""), alert=lambda row: row.nan > 0))
    if any(row.inf for row in rows):
        made.append(Column("Inf", lambda row: str(row.inf or ""), alert=lambda row: row.inf > 0))
    return made


def _text(value: float | None) -> str:
    return "-" if value is None else number(value)
