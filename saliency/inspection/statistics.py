"""Statistics of activations and gradients over any number of batches.

The statistics are moments, zeros, dead channels and the first NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, Self, TypeVar, get_args

import torch
from torch import Tensor, nn

from ..attribution.questions import target_of
from ..errors import ImageError, LayerError, ModelError, TargetError, plural
from ..hooks.autograd_graph import differentiate, ends_in_probability, this_backward
from ..hooks.manager import HookManager
from ..hooks.pytree import tree_map_tensors, tree_tensors
from ..io.axes import at_least_float32
from ..model.call import categories_of, leaf, prepared_for_attribution, unwrap
from ..tables import Column, Table, number, share
from ..targets.classes import TargetLike
from ..targets.question import Categories, Images
from ..validation import check_choice
from .arguments import LayersLike, ModelCall, model_calls, select_layers
from .recording import ModuleCall, Moments, Recording, moments, real_values

_RECTIFIERS = (nn.ReLU, nn.ReLU6, nn.Threshold)

_Value = TypeVar("_Value", float, float | None)

Loss = Callable[..., Tensor]
"""Function loss(output), or loss(output, labels) for data with labels: a scalar, or one number per image to average."""

GradientsOf = Literal["layers", "parameters"]
"""The gradients at the outputs of layers, or the gradients of parameters."""

_GRADIENT_STATISTICS = ("norm", "rms", "mean", "std", "min", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerStatistics(Generic[_Value]):
    """Statistics of one layer in one of its calls, of the finite values over all batches; None without a gradient."""

    name: str  # of the layer, or of a parameter
    kind: str  # class of the module
    call: int  # index of the call in a forward pass
    calls: int  # calls in a forward pass
    count: int  # values; 0 without a gradient
    norm: _Value
    rms: _Value  # root mean square
    mean: _Value
    std: _Value
    min: _Value
    max: _Value
    zero_share: _Value  # fraction of values that are exactly 0, from 0 to 1
    nan: int
    inf: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations(_LayerStatistics[float]):
    """Output of one layer in one of its calls, over all images and positions."""

    channels: int | None  # None without a channel axis, or with a varying number of channels
    dead: tuple[int, ...]  # channels that were never above zero and never NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGradients(_LayerStatistics[float | None]):
    """Gradient at the output of one layer in one of its calls, or of one parameter; None without a gradient."""


class ActivationStatistics(Table[LayerActivations]):
    """Table of activation statistics; see `activation_statistics`.

    Attributes:
        first_nonfinite: The name of the first layer with NaN or infinity in its output; "" if only the model's output
            has them; None if all values are finite.
        dead_channels: The number of dead channels in ReLUs.
        images: The number of images.
        batches: The number of batches.
    """

    first_nonfinite: str | None = None
    dead_channels: int = 0
    images: int = 0
    batches: int = 0


class GradientStatistics(Table[LayerGradients]):
    """Table of gradient statistics; see `gradient_statistics`.

    Attributes:
        loss: The mean loss or score over all images.
        objective: "loss" or "score".
        first_nonfinite: The first layer with NaN or infinity in its gradient, in the order of the backward pass; or
            the last parameter with them, in the order of the model.
        images: The number of images.
        batches: The number of batches.
    """

    loss: float
    objective: str
    first_nonfinite: str | None
    images: int
    batches: int


@dataclass
class _RunningStats:
    """Statistics of one call of one layer, of one batch or over the batches so far."""

    moments: Moments = field(default_factory=Moments)
    alive: Tensor | None = None  # (channels,) whether a channel was ever above zero or NaN


class _Collector(ABC):
    """Base class of both collectors, with the layers, statistics of their calls, and the first NaN or infinity.

    Raises:
        ModelError: The model is not a module, or has parameters without values.
    """

    def __init__(self, model: nn.Module, data: Any, layers: LayersLike) -> None:
        self.model = unwrap(model)
        with prepared_for_attribution(self.model):  # raises ModelError for lazy parameters
            tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        empty = next((name for name, tensor in tensors if tensor.is_meta), None)
        if empty is not None:
            raise ModelError(f"{empty} is on the meta device and has no values; load or initialise the weights first")
        self.modules = select_layers(self.model, layers)
        self.first_nonfinite: str | None = None
        self.images = self.batches = 0
        self._calls = model_calls(model, data)
        self._stats: dict[tuple[str, int], _RunningStats] = {}

    def run(self) -> Self:
        """Measure all batches. Raises ImageError if the data contain no batch."""
        for batch in self._calls:
            self.batches += 1
            self.images += batch.size
            self.measure(batch)
        if not self.batches:
            raise ImageError("the data contain no batch; a generator that was used before is empty")
        return self

    @abstractmethod
    def measure(self, batch: ModelCall) -> None:
        """Run the model on one batch, and add its statistics. Raises ImageError if a mean needs images."""

    def stats_of(self, calls: Iterable[ModuleCall]) -> dict[ModuleCall, _RunningStats]:
        """Return the statistics of the calls of a batch that returned a tensor."""
        calls = [call for call in calls if call.outputs]
        return {call: self._stats.setdefault((call.layer, call.index), _RunningStats()) for call in calls}

    def rows(self, scale: float = 1.0) -> Iterator[tuple[dict[str, Any], _RunningStats]]:
        """Yield the fields that rows of both kinds have in common, with the values multiplied by `scale`."""
        calls, indices = Counter(name for name, _ in self._stats), Counter[str]()
        for (name, _), stats in self._stats.items():
            fields = {"name": name, "kind": type(self.modules[name]).__name__, "call": indices[name]}
            yield {**fields, "calls": calls[name], **_statistics(stats.moments.scaled(scale))}, stats
            indices[name] += 1

    def note_nonfinite(self, layer: str, values: Iterable[Moments]) -> None:
        """Note the first layer with NaN or infinity."""
        if self.first_nonfinite is None and any(part.nan or part.inf for part in values):
            self.first_nonfinite = layer

    def notes(self) -> list[str]:
        """Return the notes below the table of layers."""
        first, batches = self.first_nonfinite, f"{self.batches} batch{'es' * (self.batches > 1)}"
        counts = f"{batches}, {plural(self.images, 'image')}"
        return [counts, *([] if first is None else [f"NaN or infinity first in {first or 'the output'}"])]


def activation_statistics(
    model: nn.Module, data: Any, *, layers: LayersLike = "*", channel_axis: int = 1
) -> ActivationStatistics:
    """Return statistics of the activations of each layer: moments, zeros, dead channels, NaN and infinities.

    There is one row per layer, in the order in which the layers begin in a forward pass. A layer that is called several
    times, such as a reused ReLU, has a row for each call. Calls that occur only in later batches come last. If an
    output has several tensors, the first one is measured. A functional ReLU is not a layer: its zeros appear in the
    layer that contains it.

    All numbers are exact over all batches, summed in double precision. Activations are not stored, so memory use does
    not grow with the number of batches.

    A channel is dead if it was never above zero. `dead_channels` counts dead channels of `nn.ReLU`, `nn.ReLU6` and
    `nn.Threshold`; each row lists the channels of its layer.

    Args:
        model: Any `torch.nn.Module`. It is left bit for bit unchanged.
        data: A batch as the model takes it; images or their paths, if the model has a `preprocess`; or any iterable of
            batches, or of pairs of a batch and labels. A shape such as (8, 3, 224, 224) denotes noise.
        layers: Names, patterns as in "layer4.*.conv?", modules, classes of modules, or several of these.
        channel_axis: The axis of the channels in the outputs of these layers: 1 in (N, K), (N, K, h, w) and (N, K, L),
            -1 in tokens (N, T, C) and in (N, h, w, C).

    Raises:
        ImageError: The data contain no batch, or a batch cannot be read.
        LayerError: A name or pattern matches no layer, or none of the layers is called.
        MethodError: `channel_axis` is neither 1 nor -1.
        ModelError: The model has parameters without values.
        NotApplicableError: A layer returns a nested or quantised tensor.
    """
    check_choice("channel_axis", channel_axis, (1, -1))
    return _ActivationCollector(model, data, layers, channel_axis).run().table()


def _measured(channel_axis: int, tensor: Tensor) -> _RunningStats:
    """Return the statistics of one output."""
    stats, values, dims = _RunningStats(moments(tensor)), real_values(tensor), tensor.dim()
    if dims > 1 and values.numel():
        other_axes = [axis for axis in range(dims) if axis != channel_axis % dims]
        stats.alive = ~(values.amax(other_axes) <= 0)  # also true for NaN
    return stats


class _ActivationCollector(_Collector):
    def __init__(self, model: nn.Module, data: Any, layers: LayersLike, channel_axis: int) -> None:
        super().__init__(model, data, layers)
        self._channel_axis = channel_axis

    def measure(self, batch: ModelCall) -> None:
        recording = Recording(self.modules, partial(_measured, self._channel_axis), ("outputs",))
        with prepared_for_attribution(self.model), HookManager() as hooks, torch.no_grad():
            recording.attach(hooks, hooks)
            output = batch.run(self.model)
        for call, stats in self.stats_of(recording).items():
            _add(call.outputs[0], stats)
        for call in recording.in_end_order():
            self.note_nonfinite(call.layer, [stats.moments for stats in call.outputs])
        if self.first_nonfinite is None and not all(bool(tensor.isfinite().all()) for tensor in tree_tensors(output)):
            self.first_nonfinite = ""

    def table(self) -> ActivationStatistics:
        rows = []
        for fields, stats in self.rows():
            channels = None if stats.alive is None else len(stats.alive)
            dead = () if stats.alive is None else tuple((~stats.alive).nonzero().flatten().tolist())
            rows.append(LayerActivations(channels=channels, dead=dead, **fields))
        if not rows:
            count = len(self.modules)
            raise LayerError(f"none of the {count} layers was called; hooks do not run inside scripted modules")
        dead_channels = sum(len(row.dead) for row in rows if isinstance(self.modules[row.name], _RECTIFIERS))
        notes = [*self.notes(), f"{plural(dead_channels, 'dead channel')} in ReLUs"]
        title = f"Activations of {type(self.model).__name__}"
        table = ActivationStatistics(rows, [*_layer_columns("mean", "std", "min", "max"), _DEAD], title, notes)
        table.first_nonfinite, table.dead_channels = self.first_nonfinite, dead_channels
        table.images, table.batches = self.images, self.batches
        return table


def _add(output: _RunningStats, stats: _RunningStats) -> None:
    """Add one output to the statistics. If the number of channels varies, no channel is alive or dead."""
    before = stats.alive if stats.moments.count else output.alive
    stats.alive = None
    if output.alive is not None and before is not None and len(output.alive) == len(before):
        stats.alive = before | output.alive
    stats.moments += output.moments


def _dead(row: LayerActivations) -> int | None:
    return len(row.dead) or None if row.min == 0 else None


_DEAD = Column("dead", _dead, hint="channels that were never above zero, in layers whose smallest output is zero")


def gradient_statistics(
    model: nn.Module,
    data: Any,
    loss_or_target: Loss | TargetLike = None,
    *,
    layers: LayersLike = "*",
    of: GradientsOf = "layers",
) -> GradientStatistics:
    """Return statistics of the gradients of a loss or a score at the output of each layer, or of each parameter.

    The loss is the mean over all images of all batches. The loss of a batch is treated as the mean over its images.
    Sums are in double precision. Activations and gradients of layers are not stored, so memory use does not grow with
    the number of batches. The gradients of parameters are summed over the batches before they are measured, and take as
    much memory as the parameters.

    The gradient at a layer is the gradient of its output, even if a later operation changes the output in place. A
    layer that is called several times in a forward pass has a row for each call. If an output has several tensors, the
    first one is measured. Layers with frozen parameters also have a gradient at their output; the parameters themselves
    have no gradient. `.grad`, flags and buffers are unchanged.

    Args:
        model: Any `torch.nn.Module`. It is left bit for bit unchanged.
        data: A batch as the model takes it; images or their paths, if the model has a `preprocess`; or any iterable of
            batches, or of pairs of a batch and labels. A shape such as (8, 3, 224, 224) denotes noise.
        loss_or_target: A function `loss(output)`, or `loss(output, labels)` if the data have labels, such as
            `torch.nn.CrossEntropyLoss()`, that returns a scalar, or one number per image to be averaged. Or a target: a
            class index or name, any other target, or None for the top class of each image. The score is then the mean
            over the images.
        layers: Names, patterns as in "layer4.*.conv?", modules, classes of modules, or several of these.
        of: "layers" measures the gradient at the output of each layer, "parameters" the gradient of each
            parameter in the layers, such as "fc.bias", in the order of the model.

    Raises:
        ImageError: The data contain no batch, or a batch is empty or cannot be read.
        LayerError: A name or pattern matches no layer, or the layers have no parameters.
        MethodError: An unknown `of`.
        ModelError: The model has parameters without values, or cannot run with gradients.
        NotApplicableError: A part of the model uses reentrant checkpoints, which do not support `torch.autograd.grad`,
            or returns a nested or quantised tensor.
        TargetError: The target does not fit the output, or the loss is not a number with a gradient.
    """
    check_choice("of", of, get_args(GradientsOf))
    kind = _GradientCollector if of == "layers" else _ParameterCollector
    return kind(model, data, layers, loss_or_target).run().table()


def _is_loss(loss_or_target: Any) -> bool:
    return callable(loss_or_target) and not isinstance(loss_or_target, Tensor)


class _BatchImages(Images):
    """Images of a batch whose output has a graph."""

    def is_probability(self, scores: Tensor) -> bool:
        """Return whether the scores end in a sigmoid or softmax."""
        return ends_in_probability(scores)


def _objective(loss_or_target: Any, categories: Categories, output: Any, batch: ModelCall) -> Tensor:
    """Return the loss or the mean score of a batch, which is differentiated, as a scalar tensor."""
    if _is_loss(loss_or_target):
        # Copy: tensors created under inference_mode cannot be saved for the backward pass.
        labels = [] if batch.labels is None else [tree_map_tensors(batch.labels, torch.clone)]
        name, value = "loss", loss_or_target(output, *labels)
    else:
        images = _BatchImages(batch.size, categories)
        name, value = "score", target_of(loss_or_target, images).prepared(images).ask(output, images)[1](output)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape not in ((), (1,), (batch.size,)):
        got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TargetError(f"the {name} is {got}; expected one float, or one for each of {plural(batch.size, 'image')}")
    if not value.requires_grad:
        raise TargetError(f"the {name} has no gradient: the loss or the model detaches the output, or uses argmax")
    return value.mean()


class _GradientCollector(_Collector):
    """Collector of moments of the gradients at layers over all batches."""

    noun = "layer"

    def __init__(self, model: nn.Module, data: Any, layers: LayersLike, loss_or_target: Loss | TargetLike) -> None:
        super().__init__(model, data, layers)
        self.recorded = self.modules
        self.quantity = "loss" if _is_loss(loss_or_target) else "score"
        self._objective = partial(_objective, loss_or_target, categories_of(model))
        self._total = 0.0

    def measure(self, batch: ModelCall) -> None:
        if not batch.size:
            raise ImageError(f"batch {self.batches} is empty, so it has no mean over its images")
        starts: list[Tensor] = []
        trainable = {name: tensor for name, tensor in self.model.named_parameters() if tensor.requires_grad}
        recording = Recording(self.recorded, _gradient_moments, ("outputs", "grad_outputs"))
        with prepared_for_attribution(self.model), HookManager() as gradient_hooks:
            with HookManager() as hooks:
                recording.attach(hooks, gradient_hooks)
                output = batch.run(self.model, partial(_leaf_copy, starts))
            objective = self._objective(output, batch)
            # Ignore backward passes that the loss ran itself.
            earlier = {call: len(call.backwards) for call in recording}
            gradients = differentiate(objective, [*starts, *trainable.values()])
        # The backward pass reaches the last call first.
        for call, stats in reversed(self.stats_of(recording).items()):
            for backward in call.backwards[earlier[call] :]:
                gradient: Moments = backward.grad_outputs[0] or Moments()
                stats.moments += gradient.scaled(batch.size)
                self.note_nonfinite(call.layer, [gradient])
        self.add_parameters(dict(zip(trainable, gradients[len(starts) :], strict=True)), batch.size)
        self._total += batch.size * float(objective.detach())

    def add_parameters(self, gradients: dict[str, Tensor | None], size: int) -> None:
        """Add the gradients of the trainable parameters for a batch of some size."""

    def table(self) -> GradientStatistics:
        """Return the statistics over all batches."""
        loss = self._total / self.images
        network = type(self.model).__name__
        title = f"Gradients of a {self.quantity} of {number(loss)} at the {self.noun}s of {network}"
        rows = [LayerGradients(**fields) for fields, _ in self.rows(1 / self.images)]
        table = GradientStatistics(rows, _layer_columns(*_GRADIENT_STATISTICS, noun=self.noun), title, self.notes())
        table.loss, table.objective, table.first_nonfinite = loss, self.quantity, self.first_nonfinite
        table.images, table.batches = self.images, self.batches
        return table


class _ParameterCollector(_GradientCollector):
    """Collector of the gradients of parameters, summed over all batches."""

    noun = "parameter"

    def __init__(self, model: nn.Module, data: Any, layers: LayersLike, loss_or_target: Loss | TargetLike) -> None:
        super().__init__(model, data, layers, loss_or_target)
        inside = {id(tensor) for module in self.modules.values() for tensor in module.parameters()}
        names = [name for name, tensor in self.model.named_parameters() if layers == "*" or id(tensor) in inside]
        if not names:
            raise LayerError(f"the selected layers of {type(self.model).__name__} have no parameters")
        owners = dict(self.model.named_modules())
        self.modules, self.recorded = {name: owners[name.rpartition(".")[0]] for name in names}, {}
        self._sums: dict[str, Tensor] = {}

    def add_parameters(self, gradients: dict[str, Tensor | None], size: int) -> None:
        for name in self.modules:
            if (gradient := gradients.get(name)) is not None:
                self._sums[name] = self._sums.get(name, 0.0) + size * at_least_float32(gradient.to_dense())

    def table(self) -> GradientStatistics:
        for name in self.modules:
            self._stats[name, 0] = _RunningStats(moments(self._sums[name]) if name in self._sums else Moments())
        for (name, _), stats in reversed(self._stats.items()):
            self.note_nonfinite(name, [stats.moments])
        return super().table()


def _gradient_moments(tensor: Tensor) -> Moments | None:
    """Return the moments of a gradient; None in the forward pass, where outputs are recorded without statistics."""
    return None if this_backward() == -1 else moments(tensor)


def _leaf_copy(starts: list[Tensor], tensor: Tensor) -> Tensor:
    """Copy an input as a tensor that requires a gradient, so that gradients also flow through frozen layers."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.clone()
    starts.append(leaf(tensor))
    return starts[-1].clone()


def _statistics(summary: Moments) -> dict[str, Any]:
    """Return the fields of a row with statistics of the values; None if there are no values."""
    names = (*_GRADIENT_STATISTICS, "zero_share")
    values = {name: getattr(summary, name) if summary.count else None for name in names}
    return {**values, "count": summary.count, "nan": summary.nan, "inf": summary.inf}


def _layer_columns(*names: str, noun: str = "layer") -> list[Column]:
    return [
        Column(noun, call_label, align="left"),
        Column("kind", "kind", align="left"),
        *(Column(name, partial(_text, name)) for name in names),
        Column("zeros", "zero_share", share, hint="exactly 0"),
        Column("NaN, Inf", _nonfinite),
    ]


def call_label(row: _LayerStatistics[Any], name: str = "") -> str:
    """Return the name, or a shorter one, with the number of the call if the layer has several: "relu (2)"."""
    name = name or row.name or "(the model)"
    return f"{name} ({row.call + 1})" if row.calls > 1 else name


def _text(name: str, row: _LayerStatistics[Any]) -> str:
    return number(getattr(row, name)) or "-"


def _nonfinite(row: _LayerStatistics[Any]) -> int | None:
    return row.nan + row.inf or None
