"""Statistics of activations and gradients over any number of batches, and a plot of the gradient by layer.

The statistics are moments, zeros, dead channels and the first NaN. The plot shows where the gradient vanishes,
explodes, is zero or is NaN.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..errors import ImageError, LayerError, RenderError, TargetError, plural
from ..hooks.autograd_graph import ends_in_probability, this_backward
from ..hooks.manager import HookManager
from ..hooks.model_state import categories_of, leaf
from ..hooks.pytree import tree_map_tensors, tree_tensors
from ..hooks.rectifiers import differentiate
from ..layers.layout import layout_from
from ..layers.positions import Grid
from ..render.figure import new_figure
from ..targets.targets import Categories, OutputFacts, OutputTarget, TargetLike, as_target, output_tensor
from .arguments import Batches, LayersLike, ModelCall
from .moments import Moments, moments, real_values
from .record import Call, Recording
from .tables import Column, Table, listed, number, share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm, *_INSTANCE_NORMS)
_POOLING_1D = (nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d)
# Subclasses may permute the axes, as LayerNorm2d of torchvision and timm does.
_NORMS_LAST = (nn.LayerNorm, nn.RMSNorm)
_CHANNELS_LAST = (nn.Linear, nn.Bilinear, nn.Embedding, nn.MultiheadAttention, nn.RNNBase)
# Affine layers: their outputs are zeros only if weights or inputs are. Exact types, since subclasses may rectify.
_AFFINE = (*_CONVOLUTIONS, *_NORMS, *_NORMS_LAST, nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag)

_Value = TypeVar("_Value", float, float | None)

Loss = Callable[..., Tensor]
"""Function loss(output), or loss(output, labels) for data with labels: a scalar, or one number per image to average."""

_GRADIENT_STATISTICS = ("norm", "rms", "mean", "std", "min", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Statistics(Generic[_Value]):
    """Statistics of the finite values of a tensor over all batches; None if there is no gradient."""

    name: str
    count: int  # values; 0 without a gradient
    norm: _Value
    rms: _Value  # root mean square
    mean: _Value
    std: _Value
    min: _Value
    max: _Value
    zero_share: _Value  # share of values that are exactly 0, from 0 to 1
    nan: int
    inf: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerStatistics(_Statistics[_Value]):
    """Statistics of one layer in one of its calls."""

    kind: str  # class of the module
    call: int  # index of the call in a forward pass
    calls: int  # calls in a forward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations(_LayerStatistics[float]):
    """Output of one layer in one of its calls, over all images and positions."""

    channels: int | None  # None without a channel axis, or with a varying number of channels
    dead: tuple[int, ...]  # channels that were never above zero and never NaN, in any layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGradients(_LayerStatistics[float | None]):
    """Gradient at the output of one layer in one of its calls; values are None without a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGradients(_Statistics[float | None]):
    """Gradient of one parameter; values are None without a gradient."""

    shape: tuple[int, ...]
    trainable: bool
    weight_norm: float
    ratio: float | None  # norm of the gradient, divided by that of the weight; None for a zero weight


class ActivationStatistics(Table[LayerActivations]):
    """Table of activation statistics; see `activation_statistics`.

    Attributes:
        first_nonfinite: The name of the first layer with NaN or infinity in its output; None without any.
        dead_channels: The number of dead channels, counted only in the innermost layers that rectify.
        images: The number of images.
        batches: The number of batches.
    """

    first_nonfinite: str | None = None
    dead_channels: int = 0
    images: int = 0
    batches: int = 0


@dataclass(frozen=True, slots=True)
class GradientStatistics:
    """Gradient statistics; see `gradient_statistics`.

    Attributes:
        layers: One row per call of each layer, in the order in which the calls begin.
        parameters: One row per parameter, in the order of the model.
        loss: The mean loss or score over all images.
        of: "loss" or "score".
        first_nonfinite: The first layer with NaN or infinity in its gradient, in the order of the backward pass.
        images: The number of images.
        batches: The number of batches.
    """

    layers: Table[LayerGradients]
    parameters: Table[ParameterGradients]
    loss: float
    of: str
    first_nonfinite: str | None
    images: int
    batches: int

    def __str__(self) -> str:
        """Return both tables as text."""
        return f"{self.layers}\n\n{self.parameters}"

    def to_html(self) -> str:
        """Return both tables as HTML."""
        return self.layers.to_html() + self.parameters.to_html()

    _repr_html_ = to_html


@dataclass
class _RunningStats:
    """Statistics of one call of one layer over the batches so far."""

    moments: Moments = field(default_factory=Moments)
    alive: Tensor | None = None  # (channels,), whether a channel was ever above zero
    can_rectify: bool = False


class _Collector:
    """Base class of both collectors, with the layers, statistics of their calls, and the first NaN or infinity."""

    def __init__(self, batches: Batches, layers: LayersLike) -> None:
        self.batches = batches
        self.modules = batches.modules(layers)
        self.first_nonfinite: str | None = None
        self.notes: list[str] = []
        self._stats: dict[tuple[str, int], _RunningStats] = {}

    def stats_of(self, calls: Iterable[Call]) -> dict[Call, _RunningStats]:
        """Return the statistics of those calls of a batch that returned a tensor."""
        calls = [call for call in calls if call.outputs]
        return {call: self._stats.setdefault((call.layer, call.index), _RunningStats()) for call in calls}

    def rows(self, scale: float = 1.0) -> Iterator[tuple[dict[str, Any], _RunningStats]]:
        """Yield the fields that rows of both kinds have in common, with the values multiplied by `scale`."""
        calls, indices = Counter(name for name, _ in self._stats), Counter[str]()
        for (name, _), stats in self._stats.items():
            fields = {"name": name, "kind": type(self.modules[name]).__name__, "call": indices[name]}
            yield {**fields, "calls": calls[name], **_statistics(stats.moments.scaled(scale))}, stats
            indices[name] += 1

    def note_nonfinite(self, layer: str, where: str, values: Iterable[Moments]) -> None:
        """Note the first layer with NaN or infinity."""
        if self.first_nonfinite is None and any(known.nan or known.inf for known in values):
            self.first_nonfinite = layer
            label = f'"{layer}"' if layer else "the model"
            self.notes.append(f"NaN or infinity first in {where} {label}{self.in_batch}")

    def uncalled_note(self) -> list[str]:
        """Return a note that lists the layers without a row."""
        called = {name for name, _ in self._stats}
        uncalled = [name for name, module in self.modules.items() if name not in called and _is_callable(module)]
        return listed("never called, or without a tensor in the output:", uncalled)

    @property
    def in_batch(self) -> str:
        return f" in batch {self.batches.batches}" if self.batches.batches > 1 else ""


def activation_statistics(
    model: nn.Module, data: Any, *, layers: LayersLike = "*", training: bool = False
) -> ActivationStatistics:
    """Return statistics of the activations of each layer: moments, zeros, dead channels, NaN and infinities.

    There is one row per layer, in the order in which the layers begin in a forward pass. A layer that is called several
    times, such as a reused ReLU, has a row for each call. Calls that occur only in later batches come last. If an
    output has several tensors, the first one is measured. A functional ReLU is not a layer: its zeros appear in the
    layer that contains it.

    All numbers are exact over all batches, summed in double precision. Activations are not stored, so memory use does
    not grow with the number of batches.

    Channels are on axis 1 for convolutions, batch, group and instance norms and 1D pooling. They are on the last axis
    for linear layers, attention and `nn.LayerNorm`. Other layers use the axis of these layers if an output has the same
    shape. Otherwise channels are on axis 1 of (N, K) and on the last axis of (N, T, C). For four axes, the axis is
    chosen such that the other two have the proportions of the input.

    A channel is dead if it was never above zero in a layer that rectifies. A layer rectifies if its smallest output is
    zero, it is not affine, and it has parameters or receives negative values. For nested layers, only the innermost one
    counts.

    Args:
        model: Any `torch.nn.Module`. It is left bit for bit unchanged.
        data: A batch as the model takes it; images or their paths, if the model has a `preprocess`; or any iterable of
            batches, or of pairs of a batch and labels. A shape such as (8, 3, 224, 224) stands for noise.
        layers: Names, patterns as in "layer4.*.conv?", modules, classes of modules, or several of these.
        training: Whether to run a private copy of the model in training mode. Normalisation then uses batch statistics,
            and dropout uses its own seeds. Use it for untrained batch normalisation: its running statistics are
            zeros and ones, so evaluation mode gives activations that do not occur in training.

    Raises:
        ImageError: The data contain no batch, or a batch cannot be read.
        LayerError: A name or pattern matches no layer, or none of the layers is called.
        ModelError: The model has parameters without values, or cannot be copied for `training`.
        NotApplicableError: A layer returns a nested or quantised tensor.
    """
    collector = _ActivationCollector(Batches(model, data, training=training), layers)
    for batch in collector.batches:
        collector.run(batch)
    return collector.table()


class _Measured:
    """Moments of a tensor, and its channels with values above zero or NaN, for both possible channel axes."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.moments = moments(tensor)
        values = real_values(tensor)
        dims = values.dim()
        self.alive: dict[int, Tensor] = {}
        if dims > 1 and values.numel():
            outer = values.flatten(0, max(0, dims - 3)).amax(0)  # several times faster than all axes at once
            largest = {dims - 1: outer.amax(0) if outer.dim() > 1 else outer, 1: values.amax([0, *range(2, dims)])}
            self.alive = {axis: ~(value <= 0) for axis, value in largest.items()}  # also true for NaN


class _ActivationCollector(_Collector):
    def __init__(self, batches: Batches, layers: LayersLike) -> None:
        super().__init__(batches, layers)
        self._axes: dict[tuple[int, ...], int] = {}  # by shape of the output without the batch

    def run(self, batch: ModelCall) -> None:
        recording = Recording(self.modules, _Measured, ("inputs", "outputs"))
        with self.batches.prepared_model() as model, HookManager() as hooks, torch.no_grad():
            recording.attach(hooks, hooks)
            output = batch.run(model)
        inputs = list(tree_tensors((batch.args, batch.kwargs)))
        size = next(((int(x.shape[-2]), int(x.shape[-1])) for x in inputs if x.dim() == 4), None)
        stats = self.stats_of(recording)
        seen: set[_Measured] = set()
        for call in recording.in_end_order():
            seen.update(call.flat_inputs)
            if call in stats:
                self._add(call, stats[call], seen, batch.size, size)
            seen.update(call.outputs)
            is_passed_on = any(one.moments.nan or one.moments.inf for one in call.flat_inputs)
            where = "the input and the output of" if is_passed_on else "the output of"
            self.note_nonfinite(call.layer, where, [one.moments for one in call.outputs])
        if not self.notes and not all(bool(tensor.isfinite().all()) for tensor in tree_tensors(output)):
            self.notes.append(f"NaN or infinity in the model's output{self.in_batch}, but in no layer of this table")

    def _add(self, call: Call, stats: _RunningStats, seen: set[_Measured], images: int, size: Grid | None) -> None:
        module, output = self.modules[call.layer], call.outputs[0]
        if type(module) not in _AFFINE and call.flat_inputs:
            has_parameters = any(True for _ in module.parameters())
            stats.can_rectify |= has_parameters or call.flat_inputs[0].moments.min < 0
        if output in seen:
            stats.can_rectify = False  # the layer returns its input or the output of another one
        axis = self._channel_axis(module, output.shape, images, size)
        alive = output.alive.get(axis)
        before = stats.alive if stats.moments.count else alive
        stats.alive = None
        if alive is not None and before is not None and len(alive) == len(before):
            stats.alive = before | alive
        stats.moments += output.moments

    def _channel_axis(self, module: nn.Module, shape: tuple[int, ...], images: int, size: Grid | None) -> int | None:
        axes = len(shape)
        if axes < 2:
            return None
        if isinstance(module, (*_CONVOLUTIONS, *_NORMS, *_POOLING_1D)):
            axis = 1
        elif isinstance(module, _CHANNELS_LAST) or type(module) in _NORMS_LAST:
            axis = axes - 1
        elif shape[1:] in self._axes:
            return self._axes[shape[1:]]
        else:
            layout = layout_from(shape, images, size) if axes == 4 and size is not None else None
            return axes - 1 if axes == 3 or (layout is not None and layout.kind == "NHWC") else 1
        self._axes.setdefault(shape[1:], axis)
        return axis

    def table(self) -> ActivationStatistics:
        rows, rectifiers = [], []
        for fields, stats in self.rows():
            channels = None if stats.alive is None else len(stats.alive)
            dead = () if stats.alive is None else tuple((~stats.alive).nonzero().flatten().tolist())
            rows.append(LayerActivations(channels=channels, dead=dead, **fields))
            if stats.can_rectify and rows[-1].min == 0 and channels is not None:
                rectifiers.append(rows[-1])
        if not rows:
            count = len(self.modules)
            raise LayerError(f"none of the {count} layers was called; hooks do not run inside scripted modules")
        names = {row.name for row in rectifiers}
        inner = [row for row in rectifiers if not any(_is_inside(name, row.name) for name in names)]
        images = self.batches.images
        nonfinite = self.notes or ["no NaN, no infinity"]
        notes = [str(self.batches), _dead_note(inner, images), *nonfinite, *self.uncalled_note()]
        title = f"Activations of {type(self.batches.original).__name__}"
        table = ActivationStatistics(rows, _activation_columns(rectifiers), title, notes)
        table.first_nonfinite = self.first_nonfinite
        table.dead_channels = sum(len(row.dead) for row in inner)
        table.images, table.batches = images, self.batches.batches
        return table


def _is_inside(name: str, container: str) -> bool:
    return name != container and (not container or name.startswith(f"{container}."))


def _is_callable(module: nn.Module) -> bool:
    """Return whether a module has a forward; a ModuleList or ParameterList has none."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _dead_note(rectifiers: Sequence[LayerActivations], images: int) -> str:
    if not rectifiers:
        return "no layer rectifies (a functional ReLU is not a layer), so no channel counts as dead"
    dead, channels = sum(len(row.dead) for row in rectifiers), sum(row.channels or 0 for row in rectifiers)
    note = f"{plural(dead, 'dead channel')} among {channels} in layers that rectify"
    return f"{note} (for one image; other images activate many of them)" if dead and images == 1 else note


def _activation_columns(rectifiers: Sequence[LayerActivations]) -> list[Column[LayerActivations]]:
    dead = {(row.name, row.call): str(len(row.dead)) for row in rectifiers if row.dead}
    hint = "channels that were never above zero, in layers that rectify"
    return [
        *_layer_columns("mean", "std", "min", "max"),
        Column("channels", lambda row: "" if row.channels is None else str(row.channels)),
        Column("dead", lambda row: dead.get((row.name, row.call), ""), hint=hint),
    ]


def gradient_statistics(
    model: nn.Module,
    data: Any,
    loss_or_target: Loss | TargetLike = None,
    *,
    layers: LayersLike = "*",
    training: bool = False,
) -> GradientStatistics:
    """Return statistics of the gradients of a loss or a score, at the output of each layer and for each parameter.

    Several batches count as one: the loss is the mean over all images. The loss of a batch is treated as the mean over
    its images. Sums are in double precision. Activations and gradients of layers are not stored, so memory use does not
    grow with the number of batches.

    The gradient at a layer is the gradient of its output, even if a later operation changes the output in place. A
    layer that is called several times in a forward pass has a row for each call. If an output has several tensors, the
    first one is measured. Layers with frozen parameters also have a gradient at their output. `.grad`, flags and
    buffers are unchanged.

    Args:
        model: Any `torch.nn.Module`. It is left bit for bit unchanged.
        data: A batch as the model takes it; images or their paths, if the model has a `preprocess`; or any iterable of
            batches, or of pairs of a batch and labels. A shape such as (8, 3, 224, 224) stands for noise.
        loss_or_target: A function `loss(output)`, or `loss(output, labels)` if the data have labels, such as
            `torch.nn.CrossEntropyLoss()`, that returns a scalar, or one number per image to be averaged. Or a target: a
            class index or name, any other target, or None for the top class of each image. The score is then the mean
            over the images.
        layers: Names, patterns as in "layer4.*.conv?", modules, classes of modules, or several of these.
        training: Whether to run a private copy of the model in training mode. Normalisation then uses batch statistics,
            and dropout uses its own seeds. Use it for untrained batch normalisation, for which evaluation mode gives
            misleading gradients.

    Raises:
        ImageError: The data contain no batch, or a batch is empty or cannot be read.
        LayerError: A name or pattern matches no layer.
        ModelError: The model has parameters without values, cannot run with gradients, or cannot be copied for
            `training`.
        NotApplicableError: A part of the model uses reentrant checkpoints, which do not support `torch.autograd.grad`,
            or returns a nested or quantised tensor.
        TargetError: The target does not fit the output, or the loss is not a number with a gradient.
    """
    batches = Batches(model, data, training=training)
    objective = partial(_objective, loss_or_target, categories_of(model))
    collector = _GradientCollector(batches, layers, "loss" if _is_loss(loss_or_target) else "score", objective)
    for batch in batches:
        collector.run(batch)
    return collector.statistics()


def _is_loss(loss_or_target: Any) -> bool:
    return callable(loss_or_target) and not isinstance(loss_or_target, OutputTarget | Tensor)


def _objective(loss_or_target: Any, categories: Categories, output: Any, batch: ModelCall) -> Tensor:
    """Return the loss or the mean score of a batch, which is differentiated, as a scalar tensor."""
    if _is_loss(loss_or_target):
        # Copy: tensors created under inference_mode cannot be saved for the backward pass.
        labels = [] if batch.labels is None else [tree_map_tensors(batch.labels, torch.clone)]
        name, value = "loss", loss_or_target(output, *labels)
    else:
        target = as_target(loss_or_target, batch.size, categories)
        facts = OutputFacts(categories, lambda output: ends_in_probability(output_tensor(output)))
        name, value = "score", target.resolve_from(output, facts)(output)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape not in ((), (1,), (batch.size,)):
        got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TargetError(f"the {name} is {got}; expected one float, or one for each of {plural(batch.size, 'image')}")
    if not value.requires_grad:
        raise TargetError(f"the {name} has no gradient: the loss or the model detaches the output, or uses argmax")
    return value.mean()


class _GradientCollector(_Collector):
    """Collects moments of the gradients at layers and sums of the gradients of parameters, over all batches."""

    def __init__(
        self, batches: Batches, layers: LayersLike, of: str, objective: Callable[[Any, ModelCall], Tensor]
    ) -> None:
        super().__init__(batches, layers)
        self.parameters = dict(batches.model.named_parameters())
        self.of = of
        self._objective = objective
        self._sums: dict[str, Tensor] = {}  # of gradients, weighted by the number of images of the batch
        self._total = 0.0

    def run(self, batch: ModelCall) -> None:
        """Run one batch. Raises ImageError if it is empty."""
        if not batch.size:
            raise ImageError(f"batch {self.batches.batches} is empty, so it has no mean over its images")
        starts: list[Tensor] = []
        trainable = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        recording = Recording(self.modules, _gradient_moments, ("outputs", "grad_outputs"))
        with self.batches.prepared_model() as model, HookManager() as gradient_hooks:
            with HookManager() as hooks:
                recording.attach(hooks, gradient_hooks)
                output = batch.run(model, partial(_leaf_copy, starts))
            objective = self._objective(output, batch)
            # Ignore backward passes that the loss ran itself.
            earlier = {call: len(call.backwards) for call in recording}
            gradients = differentiate(objective, [*starts, *trainable.values()])
        # The backward pass reaches the last call first.
        for call, stats in reversed(self.stats_of(recording).items()):
            for backward in call.backwards[earlier[call] :]:
                known: Moments = backward.grad_outputs[0] or Moments()
                stats.moments += known.scaled(batch.size)
                self.note_nonfinite(call.layer, "the gradient at the output of", [known])
        for name, gradient in zip(trainable, gradients[len(starts) :], strict=True):
            if gradient is not None:
                self._sums[name] = self._sums.get(name, 0) + _to_double(gradient.to_dense()) * batch.size
        value = float(objective.detach())
        if not math.isfinite(value) and math.isfinite(self._total):
            self.notes.append(f"the {self.of} is {value}{self.in_batch}")
        self._total += batch.size * value

    def statistics(self) -> GradientStatistics:
        """Return the statistics over all batches."""
        loss = self._total / self.batches.images
        title = f"Gradients of a {self.of} of {number(loss)} at the {{}} of {type(self.batches.original).__name__}"
        return GradientStatistics(
            layers=self._layer_table(title.format("layers")),
            parameters=_parameter_table(map(self._parameter_row, self.parameters), title.format("parameters")),
            loss=loss,
            of=self.of,
            first_nonfinite=self.first_nonfinite,
            images=self.batches.images,
            batches=self.batches.batches,
        )

    def _parameter_row(self, name: str) -> ParameterGradients:
        parameter, gradient = self.parameters[name], self._sums.get(name)
        known = Moments() if gradient is None else moments(gradient).scaled(1 / self.batches.images)
        weight_norm = moments(parameter).norm
        return ParameterGradients(
            name=name,
            shape=tuple(parameter.shape),
            trainable=parameter.requires_grad,
            **_statistics(known),
            weight_norm=weight_norm,
            ratio=known.norm / weight_norm if gradient is not None and weight_norm else None,
        )

    def _layer_table(self, title: str) -> Table[LayerGradients]:
        rows = [LayerGradients(**fields) for fields, _ in self.rows(1 / self.batches.images)]
        notes = [
            str(self.batches),
            *(self.notes or ["no NaN, no infinity at the layers"]),
            *listed("no gradient at", dict.fromkeys(row.name for row in rows if row.norm is None)),
            *self.uncalled_note(),
        ]
        return Table(rows, _layer_columns(*_GRADIENT_STATISTICS), title, notes)


def _gradient_moments(tensor: Tensor) -> Moments | None:
    """Return the moments of a gradient; None in the forward pass, where outputs are recorded without statistics."""
    return None if this_backward() == -1 else moments(tensor)


def _leaf_copy(starts: list[Tensor], tensor: Tensor) -> Tensor:
    """Copy an input as a tensor that requires a gradient, so that gradients also flow through frozen layers."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.clone()
    starts.append(leaf(tensor))
    return starts[-1].clone()


def _to_double(tensor: Tensor) -> Tensor:
    """Convert to double precision if the device supports it."""
    return tensor if tensor.device.type == "mps" else tensor.to(torch.promote_types(tensor.dtype, torch.float64))


def _parameter_table(parameters: Iterable[ParameterGradients], title: str) -> Table[ParameterGradients]:
    rows = list(parameters)
    columns: list[Column[ParameterGradients]] = [
        Column("parameter", lambda row: row.name, "left"),
        Column("shape", lambda row: "x".join(map(str, row.shape)) or "1", "left"),
        *_statistics_columns(*_GRADIENT_STATISTICS),
        Column("weight norm", lambda row: number(row.weight_norm)),
        Column("gradient / weight", partial(_text, "ratio"), hint="ratio of the norms"),
    ]
    unused = [row.name for row in rows if row.trainable and row.norm is None]
    notes = [
        *listed("frozen:", [row.name for row in rows if not row.trainable]),
        *listed("trainable, but not used for the result:", unused),
        *listed("NaN or infinity in the gradient of", [row.name for row in rows if row.nan or row.inf]),
    ]
    return Table(rows, columns, title, notes)


def _statistics(known: Moments) -> dict[str, Any]:
    """Return the fields of a row with statistics of the values; None without a value."""
    names = (*_GRADIENT_STATISTICS, "zero_share")
    values = {name: getattr(known, name) if known.count else None for name in names}
    return {**values, "count": known.count, "nan": known.nan, "inf": known.inf}


def _layer_columns(*names: str) -> list[Column[Any]]:
    return [
        Column("layer", lambda row: _label(row, row.name or "(the model)"), "left"),
        Column("kind", lambda row: row.kind, "left"),
        *_statistics_columns(*names),
    ]


def _label(row: _LayerStatistics[Any], name: str) -> str:
    """Return the name with the number of the call, if the layer is called several times: "relu (2)"."""
    return f"{name} ({row.call + 1})" if row.calls > 1 else name


def _statistics_columns(*names: str) -> list[Column[Any]]:
    """Return the columns of the values."""
    columns: list[Column[Any]] = [Column(name, partial(_text, name)) for name in names]
    columns.append(Column("zeros", lambda row: share(row.zero_share), hint="exactly 0", bar=lambda row: row.zero_share))
    columns.append(Column("NaN, Inf", lambda r: str(r.nan + r.inf or ""), alert=lambda r: r.nan + r.inf > 0))
    return columns


def _text(name: str, row: _Statistics[Any]) -> str:
    return number(getattr(row, name)) or "-"


# Plot of the gradient by layer.

FAR = 1e3
"""The factor relative to the gradient at the head beyond which a gradient counts as vanishing or exploding."""

_LABELS_PER_INCH = 2.8
_MAX_LABEL = 30  # characters
# Colours (Okabe and Ito) and shapes that colour-blind readers can distinguish.
_STYLES = {
    "fine": ("#0072B2", "o", "0.001 to 1000 times the head's"),
    "low": ("#E69F00", "v", "less than 0.001 times the head's"),
    "high": ("#CC3311", "^", "more than 1000 times the head's"),
    "zero": ("#444444", "s", "exactly zero"),
    "broken": ("#AA0077", "X", "NaN or infinity"),
    "none": ("#777777", "D", "no gradient"),
}


class _Points:
    """Layers of the plot, from the input to the output, with the norms of their gradients.

    A norm is NaN without a gradient, and infinity if the gradient contains NaN or infinity.
    """

    def __init__(self, rows: Mapping[str, LayerGradients]) -> None:
        self.labels = [name if len(name) <= _MAX_LABEL else f"…{name[1 - _MAX_LABEL :]}" for name in rows]
        norms = [math.inf if row.nan or row.inf else row.norm for row in rows.values()]
        self.values = np.array(norms, dtype=float)  # None becomes NaN
        self.is_drawn = np.isfinite(self.values) & (self.values > 0)

    def kinds(self, low: float, high: float) -> NDArray[np.str_]:
        """Return the key of the style of each point, for this usual range."""
        conditions = [np.isnan(self.values), np.isinf(self.values), self.values == 0]
        conditions += [self.values < low, self.values > high]
        return np.select(conditions, ["none", "broken", "zero", "low", "high"], "fine")


def gradient_flow(statistics: GradientStatistics, *, size: tuple[float, float] = (10.0, 4.8)) -> Figure:
    """Plot the norm of the gradient at each layer from the input (left) to the output (right), on a log axis.

    Each point is one call of a layer, in forward order. Only the innermost layers are shown, without `nn.Identity`. The
    backward pass runs from right to left: a gradient that falls towards the left vanishes, and one that rises explodes.
    Points that differ from the last layer (the head) by more than a factor of 1000 have another colour and shape. Zero,
    NaN and infinite gradients have further colours and shapes, and lie at the lower or upper edge. The title
    summarises the result in words.

    Args:
        statistics: From `gradient_statistics`.
        size: Width and height in inches.

    Returns:
        A matplotlib Figure, independent of pyplot: `gradient_flow(s).savefig("flow.png")`. Notebooks display it.

    Raises:
        RenderError: There is nothing to draw.
    """
    rows = _innermost(statistics.layers)
    if not rows:
        raise RenderError("there are no layers in these statistics to draw")
    points = _Points(rows)
    drawing = new_figure(*size)
    axes = drawing.subplots()
    _draw(axes, points)
    _label_points(axes, points.labels, max(2, round(_LABELS_PER_INCH * size[0])))
    axes.set_ylabel("norm of the gradient")
    columns = max(20, round(11 * size[0]))
    xlabel = f"layers, from the input to the output; the gradient of the {statistics.of} flows from right to left"
    axes.set_xlabel(textwrap.fill(xlabel, columns), parse_math=False)
    axes.set_title(textwrap.fill(_title(points), columns), loc="left", fontsize="medium", parse_math=False)
    return drawing


def _innermost(table: Iterable[LayerGradients]) -> dict[str, LayerGradients]:
    """Return the innermost layers by label: their name, with the kind if the name contains no letters."""
    # Skip modules that compute a weight, such as weight_norm: activations do not pass through them.
    rows = [row for row in table if "parametrizations" not in row.name.split(".")]
    containers = {row.name[:at] for row in rows for at in range(len(row.name)) if row.name[at] == "."}
    inner = [row for row in rows if row.name not in containers and (row.name or len(rows) == row.calls)]
    labelled = {}
    for row in [row for row in inner if row.kind != "Identity"] or inner:
        label = row.name if any(map(str.isalpha, row.name)) else f"{row.name} {row.kind}".strip()
        labelled[_label(row, label)] = row
    return labelled


def _draw(axes: Axes, points: _Points) -> None:
    head = next(reversed(points.values[points.is_drawn].tolist()), 1.0)
    count, kinds = len(points.labels), points.kinds(head / FAR, head * FAR)
    # A margin around the values, and at least three decades.
    exponents = np.log10(points.values[points.is_drawn]) if points.is_drawn.any() else np.zeros(1)
    margin = max(0.5, (3 - np.ptp(exponents)) / 2)
    low, high = 10 ** (exponents.min() - margin), 10 ** (exponents.max() + margin)
    axes.set(yscale="log", ylim=(low, high), xlim=(-0.7, count - 0.3), axisbelow=True)
    axes.axhspan(head / FAR, head * FAR, color=_STYLES["fine"][0], alpha=0.07, linewidth=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    heights = np.select([kinds == "broken", ~points.is_drawn], [high, low], points.values)
    line = np.where(np.isin(kinds, ("none", "broken")), math.nan, heights)
    axes.plot(range(count), line, color="#777777", linewidth=1, zorder=2)
    for kind, (color, marker, text) in _STYLES.items():
        places = np.flatnonzero(kinds == kind)
        if len(places):
            style: dict[str, Any] = {"color": color, "markerfacecolor": "white" if kind == "none" else color}
            axes.plot(places, heights[places], marker, clip_on=False, zorder=3, label=text, **style)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=True, framealpha=0.9, fontsize="small")


def _label_points(axes: Axes, labels: Sequence[str], most: int) -> None:
    """Label at most `most` points, including the first and the last."""
    step = max(1, math.ceil((len(labels) - 1) / (most - 1)))
    # Label evenly from the output; drop the label next to the input if it is too close.
    places = [0, *(at for at in range(len(labels) - 1, -1, -step)[::-1] if at >= max(step / 2, 1))]
    names = [labels[at] for at in places]
    axes.set_xticks(places, names, rotation=90 if len(places) > 8 else 0, fontsize="small", parse_math=False)


def _title(points: _Points) -> str:
    total, drawn = len(points.labels), points.values[points.is_drawn]
    for text, is_found in (("NaN or infinite", np.isinf(points.values)), ("zero", points.values == 0)):
        if is_found.any() and (len(drawn) or text != "zero"):
            where = f"in the order of the backward pass, first at {points.labels[np.flatnonzero(is_found)[-1]]}"
            return f"The gradient is {text} at {is_found.sum()} of {total}; {where}"
    if not len(drawn):
        return "The gradient is zero everywhere" if 0 in points.values else "No layer has a gradient"
    missing = int(np.isnan(points.values).sum())
    suffix = f"; {missing} of {total} have no gradient" if missing else ""
    return f"The gradient {_trend(points)}{suffix}"


def _trend(points: _Points) -> str:
    values, places = points.values[points.is_drawn], np.flatnonzero(points.is_drawn)
    factor, spread = values[-1] / values[0], values.max() / values.min()
    ends = f"from {points.labels[places[-1]]} to {points.labels[places[0]]}"
    if len(values) == 1:
        return f"is {number(values[0])}"
    if factor >= FAR:
        return f"falls by a factor of {number(factor)} {ends}: vanishing"
    if factor <= 1 / FAR:
        return f"grows by a factor of {number(1 / factor)} {ends}: exploding"
    judgement = "neither vanishing nor exploding" if spread < FAR else "uneven"
    return f"stays within a factor of {number(spread)} {ends}: {judgement}"
