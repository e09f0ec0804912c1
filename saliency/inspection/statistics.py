"""Statistics of activations and gradients over any number of batches, and a plot of the gradient by layer.

They show moments, zeros, dead channels and the first NaN, and where the gradient vanishes, explodes, is zero or NaN.
"""

from __future__ import annotations

import inspect
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ImageError, LayerError, ModelError, RenderError, TargetError
from ..hooks.autograd_graph import this_backward
from ..hooks.manager import HookManager
from ..hooks.model_state import leaf
from ..hooks.pytree import tree_map_tensors, tree_tensors
from ..hooks.rectifiers import refuse_checkpoints
from ..layers.layout import Grid, layout_from
from ..render.figure import new_figure
from ..targets.targets import Categories, OutputTarget, TargetLike, as_target
from ..validation import check_choice, check_number, is_real
from .arguments import Batches, LayersLike, ModelCall, categories_of, is_finite
from .moments import Moments, moments
from .record import Call, Recording
from .tables import Column, Table, listed, number, plural, share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_POOLING_1D = (nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d)
# Subclasses may permute the axes, as LayerNorm2d of torchvision and timm does.
_NORMS_LAST = (nn.LayerNorm, nn.RMSNorm)
_CHANNELS_LAST = (nn.Linear, nn.Bilinear, nn.Embedding, nn.MultiheadAttention, nn.RNNBase)
# Affine layers: their outputs are zeros only if weights or inputs are. Exact types, since subclasses may rectify.
_AFFINE = (*_CONVOLUTIONS, *_NORMS, *_NORMS_LAST, nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag)

_Value = TypeVar("_Value", float, float | None)

Loss = Callable[..., Tensor]
"""Function loss(output) or loss(output, labels) that returns a scalar, or one number per image to be averaged."""

_LABELS = ("label", "labels", "target", "targets", "y", "y_true")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Statistics(Generic[_Value]):
    """Statistics of the finite values of a tensor over all batches; None if there is no gradient."""

    name: str
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
    count: int  # values


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations(_LayerStatistics[float]):
    """Output of one layer in one of its calls, over all images and positions."""

    channels: int | None  # None without a channel axis, or with a varying number of channels
    dead: tuple[int, ...]  # channels that were never above zero and never NaN, in any layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGradients(_LayerStatistics[float | None]):
    """Gradient at the output of one layer in one of its calls; values are None without a gradient."""

    ratio: float | None = None
    """Norm of the update or gradient, divided by the norm of the weights, for all parameters of the layer together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGradients(_Statistics[float | None]):
    """Gradient of one parameter; values are None without a gradient."""

    shape: tuple[int, ...]
    trainable: bool
    weight_norm: float
    ratio: float | None  # norm of the update or gradient, divided by that of the weight; None for a zero weight


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
        learning_rate: The learning rate of the ratios; None for ratios of the gradient itself.
        first_nonfinite: The first layer with NaN or infinity in its gradient, in the order of the backward pass.
        images: The number of images.
        batches: The number of batches.
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
        """Return both tables as text."""
        return f"{self.layers}\n\n{self.parameters}"

    def __repr__(self) -> str:
        return (
            f"<GradientStatistics of a {self.of} of {number(self.loss)}: {len(self.layers)} layers, "
            f"{len(self.parameters)} parameters>"
        )

    def to_html(self) -> str:
        """Return both tables as HTML."""
        return self.layers.to_html() + self.parameters.to_html()

    def _repr_html_(self) -> str:
        return self.to_html()


@dataclass
class _RunningStats:
    """Statistics of one call of one layer over the batches so far."""

    moments: Moments = field(default_factory=Moments)
    alive: Tensor | None = None  # (channels,), whether a channel was ever above zero
    can_rectify: bool = False


class _Collector:
    """Base of both collectors: the layers, statistics of their calls, and the first NaN or infinity."""

    def __init__(self, batches: Batches, layers: LayersLike) -> None:
        self.batches = batches
        self.modules = batches.modules(layers)
        self.first_nonfinite: str | None = None
        self.notes: list[str] = []
        self._stats: dict[tuple[str, int], _RunningStats] = {}
        self._order: list[tuple[str, int]] = []  # keys of `_stats`, in the order in which the calls begin

    def stats_of(self, calls: Iterable[Call]) -> dict[Call, _RunningStats]:
        """Return the statistics of those calls of a batch that returned a tensor."""
        stats = {}
        before: tuple[str, int] | None = None
        for call in calls:
            key = (call.layer, call.index)
            if call.outputs and key not in self._stats:
                # A call that is new in a later batch follows the call before it.
                self._order.insert(0 if before is None else self._order.index(before) + 1, key)
                self._stats[key] = _RunningStats()
            if call.outputs:
                before, stats[call] = key, self._stats[key]
        return stats

    def rows(self, scale: float = 1.0) -> Iterator[tuple[dict[str, Any], _RunningStats]]:
        """Yield the fields that rows of both kinds have in common, with the values multiplied by `scale`."""
        calls, indices = Counter(name for name, _ in self._order), Counter[str]()
        for name, index in self._order:
            stats = self._stats[name, index]
            fields = {"name": name, "kind": type(self.modules[name]).__name__, "count": stats.moments.count}
            fields |= {"call": indices[name], "calls": calls[name], **_statistics(stats.moments.scaled(scale))}
            yield fields, stats
            indices[name] += 1

    def uncalled_note(self) -> list[str]:
        """Return a note that lists the layers without a row."""
        called = {name for name, _ in self._order}
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
    times, such as a reused ReLU, has a row for each call. If an output has several tensors, the first one is measured.
    A functional ReLU is not a layer: its zeros appear in the layer that contains it.

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
        training: Whether to run a private copy of the model in training mode, where normalisation uses the batch and
            dropout draws from separate seeds. Use it for untrained batch normalisation: its running statistics are
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
    """Moments of a tensor, and its live channels for either position of the channel axis."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.moments = moments(tensor)
        values = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
        values = values.abs() if values.is_complex() else values
        axes = range(values.dim())
        self.alive = {
            # Also true for NaN.
            axis: ~(values.amax([other for other in axes if other != axis]) <= 0)
            for axis in {1, len(axes) - 1}
            if len(axes) > 1 and values.numel()
        }


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
            bad = next((at for at, one in enumerate(call.outputs) if one.moments.nan or one.moments.inf), None)
            if bad is not None and self.first_nonfinite is None:
                self._note_nonfinite(call, bad, all(map(is_finite, inputs)))
        if not self.notes and not all(map(is_finite, tree_tensors(output))):
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
            layout = layout_from(shape, images, size, ()) if axes == 4 and size is not None else None
            return axes - 1 if axes == 3 or (layout is not None and layout.kind == "NHWC") else 1
        self._axes.setdefault(shape[1:], axis)
        return axis

    def _note_nonfinite(self, call: Call, index: int, is_input_finite: bool) -> None:
        """Record the first layer with NaN or infinity, in the tensor of its output with that index."""
        name, known = call.layer, call.outputs[index].moments
        self.first_nonfinite = name
        kinds = " and ".join(kind for kind, count in (("NaN", known.nan), ("infinity", known.inf)) if count)
        part = "a later tensor of the output" if index else "the output"
        tensors = (*self.modules[name].named_parameters(), *self.modules[name].named_buffers())
        weight = next((key for key, tensor in tensors if not is_finite(tensor)), None)
        cause = "" if weight is None else f": its {weight} contains NaN or infinity"
        if not is_input_finite:
            cause = ": the input itself contains NaN or infinity"
        label = f'"{name}"' if name else "the model"
        self.notes.append(f"{kinds} first in {part} of {label}{self.in_batch}{cause}")

    def table(self) -> ActivationStatistics:
        rows, rectifiers = [], []
        for fields, stats in self.rows():
            channels = None if stats.alive is None else len(stats.alive)
            dead = () if stats.alive is None else tuple((~stats.alive).nonzero().flatten().tolist())
            rows.append(LayerActivations(channels=channels, dead=dead, **fields))
            if stats.can_rectify and rows[-1].min == 0 and channels is not None:
                rectifiers.append(rows[-1])
        if not rows:
            raise LayerError(
                f"none of the {len(self.modules)} layers was called; hooks do not run inside scripted modules"
            )
        names = {row.name for row in rectifiers}
        inner = [row for row in rectifiers if not any(_is_inside(name, row.name) for name in names)]
        images = self.batches.images
        nonfinite = self.notes or ["no NaN, no infinity"]
        notes = [str(self.batches), _dead_note(inner, images), *nonfinite, *self.uncalled_note()]
        title = f"Activations of {type(self.batches.original).__name__}"
        table = ActivationStatistics(rows, _activation_columns(rows, rectifiers, images), title, notes)
        table.first_nonfinite = self.first_nonfinite
        table.dead_channels = sum(len(row.dead) for row in inner)
        table.images, table.batches = images, self.batches.batches
        return table


def _is_inside(name: str, container: str) -> bool:
    return name != container and (not container or name.startswith(f"{container}."))


def _is_callable(module: nn.Module) -> bool:
    """Return whether a module has a forward; a ModuleList or ParameterList has none."""
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    return is_scripted or type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _dead_note(rectifiers: Sequence[LayerActivations], images: int) -> str:
    if not rectifiers:
        return "no layer rectifies (a functional ReLU is not a layer), so no channel counts as dead"
    dead, channels = sum(len(row.dead) for row in rectifiers), sum(row.channels or 0 for row in rectifiers)
    if not dead:
        return f"no dead channel among {channels} in layers that rectify"
    worst = max(rectifiers, key=lambda row: len(row.dead))
    note = (
        f"{plural(dead, 'dead channel')} among {channels} in layers that rectify, most of them in "
        f"{worst.name or 'the model'}: {len(worst.dead)} of {worst.channels}"
    )
    return note if images > 1 else f"{note} (for one image; other images activate many of them)"


def _activation_columns(
    rows: Sequence[LayerActivations], rectifiers: Sequence[LayerActivations], images: int
) -> list[Column[LayerActivations]]:
    dead = {(row.name, row.call): str(len(row.dead)) for row in rectifiers if row.dead}
    columns: list[Column[LayerActivations]] = [
        *_layer_columns(rows),
        *_statistics_columns(rows, "mean", "std", "min", "max"),
        Column("channels", lambda row: "" if row.channels is None else str(row.channels)),
        Column(
            "dead",
            lambda row: dead.get((row.name, row.call), ""),
            hint="channels that were never above zero, in layers that rectify",
            # No alert for a single image: other images activate most of its dead channels.
            alert=lambda row: images > 1 and (row.name, row.call) in dead,
        ),
    ]
    return columns


def gradient_statistics(
    model: nn.Module,
    data: Any,
    loss_or_target: Loss | TargetLike = None,
    *,
    layers: LayersLike = "*",
    learning_rate: float | None = None,
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
        loss_or_target: A function `loss(output)` or `loss(output, labels)`, such as `torch.nn.CrossEntropyLoss()`, that
            returns a scalar, or one number per image to be averaged. Or a target: a class index or name, any other
            target, or None for the top class of each image. The score is then the mean over the images.
        layers: Names, patterns as in "layer4.*.conv?", modules, classes of modules, or several of these.
        learning_rate: The learning rate of plain gradient descent. The `ratio` of a parameter is then the norm of its
            update divided by the norm of the weight; about 0.001 is usual. The ratio of a layer covers all its
            parameters with a gradient. None gives ratios of the gradient itself.
        training: Whether to run a private copy of the model in training mode, where normalisation uses the batch and
            dropout draws from separate seeds. Use it for untrained batch normalisation, for which evaluation mode gives
            misleading gradients.

    Raises:
        ImageError: The data contain no batch, or a batch is empty or cannot be read.
        LayerError: A name or pattern matches no layer.
        MethodError: The learning rate is not a number above zero.
        ModelError: The model has parameters without values, cannot run with gradients, or cannot be copied for
            `training`.
        NotApplicableError: A part of the model uses reentrant checkpoints, which do not support `torch.autograd.grad`,
            or returns a nested or quantised tensor.
        TargetError: The target does not fit the output, or the loss is not a number with a gradient.
    """
    if learning_rate is not None:
        learning_rate = check_number("learning_rate", learning_rate, above=0)
    batches = Batches(model, data, training=training)
    if any(tensor.is_inference() for tensor in (*batches.model.parameters(), *batches.model.buffers())):
        raise ModelError("the model was created under torch.inference_mode() and has no gradients; create it outside")
    collector = _GradientCollector(batches, layers, loss_or_target, categories_of(model))
    for batch in batches:
        collector.run(batch)
    of = f"Gradients of a {collector.of} of {number(collector.mean)} at the"
    kind = type(batches.original).__name__
    rows = [collector.parameter_row(name, learning_rate) for name in collector.parameters]
    return GradientStatistics(
        layers=collector.layer_table(rows, learning_rate, f"{of} layers of {kind}"),
        parameters=_parameter_table(rows, learning_rate, f"{of} parameters of {kind}"),
        loss=collector.mean,
        of=collector.of,
        learning_rate=learning_rate,
        first_nonfinite=collector.first_nonfinite,
        images=batches.images,
        batches=batches.batches,
    )


def _is_loss(loss_or_target: Any) -> bool:
    return callable(loss_or_target) and not isinstance(loss_or_target, OutputTarget | Tensor)


def _objective(loss_or_target: Any, categories: Categories, output: Any, batch: ModelCall) -> Tensor:
    """Return the loss or the mean score of a batch, which is differentiated, as a scalar tensor."""
    if _is_loss(loss_or_target):
        name, value = "loss", _loss(loss_or_target, output, batch)
    else:
        target = as_target(loss_or_target, batch.size, categories)
        name, value = "score", target.resolve_from(output)(output)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() > 1:
        got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TargetError(f"the {name} is {got}; expected a float tensor of one number, or of one per image")
    if value.dim() == 1 and len(value) not in (1, batch.size):
        raise TargetError(f"the {name} has {len(value)} numbers for {batch.size} images; expected one per image")
    if not value.requires_grad:
        raise TargetError(f"the {name} has no gradient: the loss or the model detaches the output, or uses argmax")
    return value.mean()


def _loss(loss: Any, output: Any, batch: ModelCall) -> Any:
    takes_labels = _takes_labels(loss)
    if takes_labels and batch.labels is None:
        name = str(getattr(loss, "__name__", type(loss).__name__)).strip("<>")
        raise TargetError(f"the loss {name} requires labels, but the data have none; pass pairs of a batch and labels")
    if takes_labels is False or batch.labels is None:
        return loss(output)
    # Copy: tensors created under inference_mode cannot be saved for the backward pass.
    return loss(output, tree_map_tensors(batch.labels, torch.clone))


def _takes_labels(loss: Any) -> bool | None:
    """Return whether a loss requires labels as its second argument; None if they are optional."""
    try:
        # The `__call__` of modules has no signature of its own.
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (ValueError, TypeError):  # functions written in C, such as torch.sum
        return False
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2:
        return None if any(p.kind is p.VAR_POSITIONAL for p in parameters) else False
    if positional[1].default is inspect.Parameter.empty:
        return True
    return None if positional[1].name in _LABELS else False


class _GradientCollector(_Collector):
    """Collects moments of the gradients at layers and sums of the gradients of parameters, over all batches."""

    def __init__(self, batches: Batches, layers: LayersLike, loss_or_target: Any, categories: Categories) -> None:
        super().__init__(batches, layers)
        self.parameters = dict(batches.model.named_parameters())
        self.of = "loss" if _is_loss(loss_or_target) else "score"
        self._objective = partial(_objective, loss_or_target, categories)
        self._sums: dict[str, Tensor] = {}  # of gradients, weighted by the number of images of the batch
        self._total = 0.0

    @property
    def mean(self) -> float:
        """Mean of the objective over all images."""
        return self._total / self.batches.images

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
            # The loss may itself have computed gradients.
            earlier = {call: len(call.backwards) for call in recording}
            try:
                gradients = torch.autograd.grad(objective, [*starts, *trainable.values()], allow_unused=True)
            except RuntimeError:
                refuse_checkpoints(objective)
                raise
        # The backward pass reaches the last call first.
        for call, stats in reversed(self.stats_of(recording).items()):
            for backward in call.backwards[earlier[call] :]:
                known: Moments | None = backward.grad_outputs[0]
                if known is not None:
                    stats.moments += known.scaled(batch.size)
                    self._check_finite(call.layer, known)
        for name, gradient in zip(trainable, gradients[len(starts) :], strict=True):
            if gradient is not None:
                part = _wide(gradient if gradient.layout == torch.strided else gradient.to_dense()) * batch.size
                self._sums[name] = self._sums[name] + part if name in self._sums else part
        value = float(objective.detach())
        if not math.isfinite(value) and math.isfinite(self._total):
            if not all(map(is_finite, tree_tensors((batch.args, batch.kwargs)))):
                self.notes.append(f"the input itself contains NaN or infinity{self.in_batch}")
            self.notes.append(f"the {self.of} is {value}{self.in_batch}")
        self._total += batch.size * value

    def _check_finite(self, name: str, gradient: Moments) -> None:
        if self.first_nonfinite is None and (gradient.nan or gradient.inf):
            self.first_nonfinite = name
            label = f'"{name}"' if name else "the model's output"
            self.notes.append(f"NaN or infinity first in the gradient at {label}{self.in_batch}")

    def parameter_row(self, name: str, learning_rate: float | None) -> ParameterGradients:
        parameter, gradient = self.parameters[name], self._sums.get(name)
        known = Moments() if gradient is None else moments(gradient).scaled(1 / self.batches.images)
        weight_norm = moments(parameter).norm
        return ParameterGradients(
            name=name,
            shape=tuple(parameter.shape),
            trainable=parameter.requires_grad,
            **_statistics(known),
            weight_norm=weight_norm,
            ratio=None if gradient is None else _ratio(known.norm, weight_norm, learning_rate),
        )

    def layer_table(
        self, parameters: Sequence[ParameterGradients], learning_rate: float | None, title: str
    ) -> Table[LayerGradients]:
        norms = {id(self.parameters[row.name]): row for row in parameters if row.norm is not None}
        rows = []
        for fields, _ in self.rows(1 / self.batches.images):
            own = self.modules[fields["name"]].parameters()
            inside = [norms[id(parameter)] for parameter in own if id(parameter) in norms]
            norm = math.hypot(*(row.norm or 0.0 for row in inside))
            weight_norm = math.hypot(*(row.weight_norm for row in inside))
            rows.append(LayerGradients(ratio=_ratio(norm, weight_norm, learning_rate), **fields))
        columns = [*_layer_columns(rows), *_statistics_columns(rows, *_GRADIENT_STATISTICS)]
        if any(row.ratio is not None for row in rows):
            hint = "for all parameters inside the layer together"
            columns.append(Column(_ratio_title(learning_rate), lambda row: number(row.ratio), hint=hint))
        has_nonfinite_sum = not all(map(is_finite, self._sums.values()))
        notes = [
            str(self.batches),
            *(self.notes or ["no NaN, no infinity" + (" at the layers" if has_nonfinite_sum else "")]),
            *listed("no gradient at", dict.fromkeys(row.name for row in rows if row.norm is None)),
            *self.uncalled_note(),
        ]
        return Table(rows, columns, title, notes)


def _gradient_moments(tensor: Tensor) -> Moments | None:
    """Return the moments in the backward pass. Outputs are only counted."""
    return None if this_backward() == -1 else moments(tensor)


def _leaf_copy(starts: list[Tensor], tensor: Tensor) -> Tensor:
    """Copy an input such that it requires a gradient, so that gradients also flow through frozen layers."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.clone()
    starts.append(leaf(tensor))
    return starts[-1].clone()


def _wide(tensor: Tensor) -> Tensor:
    """Convert to double precision if the device supports it."""
    return tensor if tensor.device.type == "mps" else tensor.to(torch.promote_types(tensor.dtype, torch.float64))


def _ratio(norm: float, weight_norm: float, learning_rate: float | None) -> float | None:
    """Return the norm of the update or gradient, divided by that of the weight; None for a zero weight."""
    return (1.0 if learning_rate is None else learning_rate) * norm / weight_norm if weight_norm else None


def _ratio_title(learning_rate: float | None) -> str:
    return "gradient / weight" if learning_rate is None else "update / weight"


def _parameter_table(
    rows: Sequence[ParameterGradients], learning_rate: float | None, title: str
) -> Table[ParameterGradients]:
    kind = "gradient" if learning_rate is None else "update"
    columns: list[Column[ParameterGradients]] = [
        Column("parameter", lambda row: row.name, "left"),
        Column("shape", lambda row: "x".join(map(str, row.shape)) or "1", "left"),
        *_statistics_columns(rows, *_GRADIENT_STATISTICS),
        Column("weight norm", lambda row: number(row.weight_norm)),
        Column(
            _ratio_title(learning_rate),
            partial(_text, "ratio"),
            hint=f"norm of the {kind} divided by that of the weight",
        ),
    ]
    rate = "no learning rate was given" if learning_rate is None else f"at a learning rate of {learning_rate:g}"
    notes = [
        f"ratios of the {kind} to the weight{':' if learning_rate is None else ','} {rate}",
        *listed("frozen:", [row.name for row in rows if not row.trainable]),
        *listed(
            "trainable, but not used for the result:", [row.name for row in rows if row.trainable and row.norm is None]
        ),
        *listed("NaN or infinity in the gradient of", [row.name for row in rows if row.nan or row.inf]),
    ]
    return Table(rows, columns, title, notes)


def _statistics(known: Moments) -> dict[str, Any]:
    """Return the fields of a row that describe the values; None for those without any value."""
    names = ("norm", "rms", "mean", "std", "min", "max", "zero_share")
    values = {name: getattr(known, name) if known.count else None for name in names}
    return {**values, "nan": known.nan, "inf": known.inf}


_Row = TypeVar("_Row", LayerActivations, LayerGradients, ParameterGradients)
_LayerRow = TypeVar("_LayerRow", LayerActivations, LayerGradients)
_GRADIENT_STATISTICS = ("norm", "rms", "mean", "std", "min", "max")


def _layer_columns(rows: Sequence[_LayerRow]) -> list[Column[_LayerRow]]:
    columns: list[Column[_LayerRow]] = [
        Column("layer", lambda row: row.name or "(the model)", "left"),
        Column("kind", lambda row: row.kind, "left"),
    ]
    if any(row.calls > 1 for row in rows):
        columns.append(Column("call", lambda row: f"{row.call + 1} of {row.calls}" if row.calls > 1 else ""))
    return columns


def _statistics_columns(rows: Sequence[_Row], *names: str) -> list[Column[_Row]]:
    """Return the columns of the values. NaN and infinity have a column only if they occur."""
    columns: list[Column[_Row]] = [
        Column(name, partial(_text, name), hint="the root mean square" if name == "rms" else "") for name in names
    ]
    columns.append(Column("zeros", lambda row: share(row.zero_share), hint="exactly 0", bar=lambda row: row.zero_share))
    if any(row.nan for row in rows):
        columns.append(Column("NaN", lambda row: str(row.nan or ""), alert=lambda row: row.nan > 0))
    if any(row.inf for row in rows):
        columns.append(Column("Inf", lambda row: str(row.inf or ""), alert=lambda row: row.inf > 0))
    return columns


def _text(name: str, row: _Statistics[Any]) -> str:
    return number(getattr(row, name)) or "-"


# Plot of the gradient by layer.

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
    sides = list(size)
    if len(sides) != 2 or not all(is_real(side) and side > 0 for side in sides):
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
    axes.set(yscale="log", ylim=(low, high), xlim=(-0.7, len(points) - 0.3), axisbelow=True)
    widths = [point.width for point in (points[0], *points, points[-1])]
    lower, upper = ([max(limit / width, _LOWEST) for width in widths] for limit in usual)
    axes.fill_between(range(-1, len(points) + 1), lower, upper, color=_STYLES["fine"][0], alpha=0.07, linewidth=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
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
