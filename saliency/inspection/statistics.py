"""Statistics of activations and gradients over any number of batches: moments, zeros, dead channels, the first NaN."""

from __future__ import annotations

import inspect
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ImageError, LayerError, ModelError, TargetError
from ..hooks.autograd_graph import tensor_version
from ..hooks.manager import HookManager
from ..hooks.model_state import leaf
from ..hooks.pytree import first_tensor, tree_map_tensors, tree_tensors
from ..hooks.rectifiers import refuse_checkpoints
from ..layers.layout import Grid, layout_from
from ..targets.targets import Categories, OutputTarget, TargetLike, as_target
from ..validation import check_number
from .layer_selection import LayersLike
from .model_inputs import Batches, ModelCall, categories_of, is_finite
from .moments import Moments, moments
from .tables import Column, Table, listed, number, plural, share

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
class LayerActivations(_Statistics[float]):
    """Output of one layer in one of its calls, over all images and positions."""

    kind: str  # class of the module
    call: int  # index of the call in a forward pass
    calls: int  # calls in a forward pass
    count: int  # values
    channels: int | None  # None without a channel axis, or with a varying number of channels
    dead: tuple[int, ...]  # channels that were never above zero and never NaN, in any layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGradients(_Statistics[float | None]):
    """Gradient at the output of one layer in one of its calls; values are None without a gradient."""

    kind: str  # class of the module
    call: int  # index of the call in a forward pass
    calls: int  # calls in a forward pass
    count: int  # values
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


class RunningStats:
    """Statistics of one call of one layer over the batches so far."""

    def __init__(self) -> None:
        self.has_output = False  # whether a call returned a tensor
        self.moments: Moments | None = None
        self.alive: Tensor | None = None  # (channels,), whether a channel was ever above zero
        self.can_rectify = False

    def add(self, more: Moments) -> None:
        """Add the moments of one batch."""
        self.moments = more if self.moments is None else self.moments + more

    def add_channels(self, alive: Tensor | None) -> None:
        """Add the live channels of one batch. Must be called before `add`."""
        if self.moments is None or not self.moments.count:
            self.alive = alive
        elif self.alive is None or alive is None or len(alive) != len(self.alive):
            self.alive = None
        else:
            self.alive = self.alive | alive

    @property
    def dead(self) -> tuple[int, ...]:
        """Channels that were never above zero and never NaN."""
        return () if self.alive is None else tuple((~self.alive).nonzero().flatten().tolist())


class CallIndex:
    """Statistics of each call of each layer in a forward pass, in the order in which the calls begin."""

    def __init__(self) -> None:
        self._stats: dict[tuple[str, int], RunningStats] = {}
        self._order: list[tuple[str, int]] = []
        self._counts: Counter[str] = Counter()
        self._last: tuple[str, int] | None = None

    def start_pass(self) -> None:
        """Start another forward pass."""
        self._counts.clear()
        self._last = None

    def next(self, name: str) -> RunningStats:
        """Return the statistics of the call that begins. Calls that are new in a later pass follow the call before."""
        call = (name, self._counts[name])
        self._counts[name] += 1
        if call not in self._stats:
            self._stats[call] = RunningStats()
            self._order.insert(self._order.index(self._last) + 1 if self._last is not None else 0, call)
        self._last = call
        return self._stats[call]

    def __iter__(self) -> Iterator[tuple[str, int, int, RunningStats]]:
        """Yield name, index, number of calls and statistics of the calls that returned a tensor."""
        shown = [(name, self._stats[name, index]) for name, index in self._order if self._stats[name, index].has_output]
        counts, indices = Counter(name for name, _ in shown), Counter[str]()
        for name, stats in shown:
            yield name, indices[name], counts[name], stats
            indices[name] += 1


class _Collector:
    """Base of both collectors: the layers, their calls, and the first NaN or infinity."""

    def __init__(self, batches: Batches, layers: LayersLike) -> None:
        self.batches = batches
        self.modules = batches.modules(layers)
        self.calls = CallIndex()
        self.first_nonfinite: str | None = None
        self.notes: list[str] = []

    def uncalled_note(self) -> list[str]:
        """Return a note that lists the layers without a row."""
        seen = {name for name, *_ in self.calls}
        uncalled = [name for name, module in self.modules.items() if name not in seen and _is_callable(module)]
        return listed("never called, or without a tensor in the output:", uncalled)

    def fields(self, name: str, known: Moments | None) -> dict[str, Any]:
        """Return the fields that rows of both kinds have in common."""
        count = 0 if known is None else known.count
        return {"name": name, "kind": type(self.modules[name]).__name__, "count": count, **_statistics(known)}

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


class _TensorCache:
    """Cache of the moments and live channels of the last tensor, which containers often return again."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._version = tensor_version(tensor)
        self._alive: dict[int | None, Tensor | None] = {None: None}
        self.moments = moments(tensor)

    def is_for(self, tensor: Tensor) -> bool:
        return self._tensor() is tensor and tensor_version(tensor) == self._version

    def alive(self, tensor: Tensor, axis: int | None) -> Tensor | None:
        """Return for each channel whether any value is above zero or NaN; None without channels."""
        if axis not in self._alive:
            values = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
            others = [other for other in range(tensor.dim()) if other != axis]
            self._alive[axis] = ~(values.amax(others) <= 0) if tensor.numel() else None
        return self._alive[axis]


class _ActivationCollector(_Collector):
    def __init__(self, batches: Batches, layers: LayersLike) -> None:
        super().__init__(batches, layers)
        self._axes: dict[tuple[int, ...], int] = {}  # by shape of the output without the batch
        self._cache: _TensorCache | None = None
        self._images = 0
        self._size: Grid | None = None
        self._is_input_finite = True

    def run(self, batch: ModelCall) -> None:
        inputs = list(tree_tensors((batch.args, batch.kwargs)))
        self._images = batch.size
        self._size = next(((int(x.shape[-2]), int(x.shape[-1])) for x in inputs if x.dim() == 4), None)
        self._is_input_finite = all(map(is_finite, inputs))
        self.calls.start_pass()
        with self.batches.prepared_model() as model, HookManager() as hooks, torch.no_grad():
            for name, module in self.modules.items():
                hooks.around(module, partial(self._begin, name), partial(self._end, name))
            output = batch.run(model)
            if not self.notes and not all(map(is_finite, tree_tensors(output))):
                self.notes.append(
                    f"NaN or infinity in the model's output{self.in_batch}, but not in any layer of this table: a "
                    "function after the layers creates it"
                )

    def _begin(self, name: str, args: Any, kwargs: Any) -> RunningStats:
        stats, x, module = self.calls.next(name), first_tensor((args, kwargs)), self.modules[name]
        if x is not None and not stats.can_rectify and type(module) not in _AFFINE:
            stats.can_rectify = any(True for _ in module.parameters()) or self._measured(x).moments.min < 0
        return stats

    def _measured(self, tensor: Tensor) -> _TensorCache:
        if self._cache is None or not self._cache.is_for(tensor):
            self._cache = _TensorCache(tensor)
        return self._cache

    def _end(self, name: str, stats: RunningStats, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is None:
            return
        stats.has_output = True
        if self._cache is not None and self._cache.is_for(tensor):
            stats.can_rectify = False  # the layer returns its input or the output of another one
        seen = self._measured(tensor)
        stats.add_channels(seen.alive(tensor, self._channel_axis(self.modules[name], tuple(tensor.shape))))
        stats.add(seen.moments)
        if self.first_nonfinite is None:
            self._find_nonfinite(name, output, seen.moments)

    def _channel_axis(self, module: nn.Module, shape: tuple[int, ...]) -> int | None:
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
            layout = layout_from(shape, self._images, self._size, ()) if axes == 4 and self._size is not None else None
            return axes - 1 if axes == 3 or (layout is not None and layout.kind == "NHWC") else 1
        self._axes.setdefault(shape[1:], axis)
        return axis

    def _find_nonfinite(self, name: str, output: Any, first: Moments) -> None:
        """Record the layer as the first one if any tensor in its output has NaN or infinity."""
        later = [(moments(tensor), "a later tensor of the output") for tensor in islice(tree_tensors(output), 1, None)]
        broken = [(known, part) for known, part in [(first, "the output"), *later] if known.nan or known.inf]
        if not broken:
            return
        known, part = broken[0]
        self.first_nonfinite = name
        kinds = " and ".join(kind for kind, count in (("NaN", known.nan), ("infinity", known.inf)) if count)
        label = f'"{name}"' if name else "the model"
        tensors = (*self.modules[name].named_parameters(), *self.modules[name].named_buffers())
        weight = next((key for key, tensor in tensors if not is_finite(tensor)), None)
        cause = f": its {weight} contains NaN or infinity" if weight is not None else ""
        if not self._is_input_finite:
            cause = ": the input itself contains NaN or infinity"
        self.notes.append(f"{kinds} first in {part} of {label}{self.in_batch}{cause}")

    def table(self) -> ActivationStatistics:
        rows, rectifiers = [], []
        for name, call, calls, stats in self.calls:
            channels = None if stats.alive is None else len(stats.alive)
            fields = self.fields(name, stats.moments)
            row = LayerActivations(call=call, calls=calls, channels=channels, dead=stats.dead, **fields)
            rows.append(row)
            if stats.can_rectify and row.min == 0 and row.channels is not None:
                rectifiers.append(row)
        if not rows:
            raise LayerError(
                f"none of the {len(self.modules)} layers was called and returned a tensor (hooks do not run inside "
                "scripted modules)"
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
    objective = Objective(loss_or_target, categories_of(model))
    batches = Batches(model, data, training=training)
    parameters = dict(batches.model.named_parameters())
    if any(tensor.is_inference() for tensor in (*parameters.values(), *batches.model.buffers())):
        raise ModelError("the model was created under torch.inference_mode() and has no gradients; create it outside")
    collector = _GradientCollector(batches, layers, parameters, objective)
    for batch in batches:
        collector.run(batch)
    of = f"Gradients of a {objective.name} of {number(collector.mean)} at the"
    kind = type(batches.original).__name__
    rows = [collector.parameter_row(name, learning_rate) for name in parameters]
    return GradientStatistics(
        layers=collector.layer_table(rows, learning_rate, f"{of} layers of {kind}"),
        parameters=_parameter_table(rows, learning_rate, f"{of} parameters of {kind}"),
        loss=collector.mean,
        of=objective.name,
        learning_rate=learning_rate,
        first_nonfinite=collector.first_nonfinite,
        images=batches.images,
        batches=batches.batches,
    )


class Objective:
    """Loss or mean score of a batch, the function that is differentiated.

    Args:
        loss_or_target: A loss, or a target of the model's output.
        categories: The class names in the order of the output.
    """

    def __init__(self, loss_or_target: Loss | TargetLike, categories: Categories = None) -> None:
        self._given: Any = loss_or_target
        self._categories = categories
        self._is_loss = callable(loss_or_target) and not isinstance(loss_or_target, OutputTarget | Tensor)
        self.name = "loss" if self._is_loss else "score"

    def __call__(self, output: Any, batch: ModelCall) -> Tensor:
        """Return the loss or the mean score of a batch as a scalar tensor.

        Raises:
            TargetError: The value is not a number or has no gradient, the target does not fit the output, or labels
                are missing.
        """
        value = self._loss(output, batch) if self._is_loss else self._score(output, batch)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() > 1:
            got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TargetError(f"the {self.name} is {got}; expected a float tensor of one number, or of one per image")
        if value.dim() == 1 and len(value) not in (1, batch.size):
            raise TargetError(
                f"the {self.name} has {len(value)} numbers for {batch.size} images; expected one per image"
            )
        if not value.requires_grad:
            raise TargetError(
                f"the {self.name} has no gradient: the loss or the model detaches the output, or converts it with "
                "argmax or to a Python number"
            )
        return value.mean()

    def _score(self, output: Any, batch: ModelCall) -> Any:
        return as_target(self._given, batch.size, self._categories).resolve_from(output)(output)

    def _loss(self, output: Any, batch: ModelCall) -> Any:
        takes_labels = _takes_labels(self._given)
        if takes_labels and batch.labels is None:
            name = str(getattr(self._given, "__name__", type(self._given).__name__)).strip("<>")
            raise TargetError(
                f"the loss {name} requires labels, but the data have none; pass pairs of a batch and labels, or a loss "
                "that takes only the output"
            )
        if takes_labels is False or batch.labels is None:
            return self._given(output)
        # Copy: tensors created under inference_mode cannot be saved for the backward pass.
        return self._given(output, tree_map_tensors(batch.labels, torch.clone))


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

    def __init__(
        self, batches: Batches, layers: LayersLike, parameters: dict[str, nn.Parameter], objective: Objective
    ) -> None:
        super().__init__(batches, layers)
        self._parameters = parameters
        self._objective = objective
        self._sums: dict[str, Tensor] = {}
        self._first_size = 0
        self._weight = 1.0  # images of the batch, relative to the first one
        self._total_weight = 0.0
        self._total = 0.0
        self._is_backward = False

    @property
    def mean(self) -> float:
        """Mean of the objective over all images."""
        return self._total / self._total_weight

    def run(self, batch: ModelCall) -> None:
        """Run one batch. Raises ImageError if it is empty."""
        if not batch.size:
            raise ImageError(f"batch {self.batches.batches} is empty, so it has no mean over its images")
        self._first_size = self._first_size or batch.size
        self._weight = batch.size / self._first_size
        self._total_weight += self._weight
        self.calls.start_pass()
        starts: list[Tensor] = []
        trainable = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        with self.batches.prepared_model() as model, HookManager() as gradient_hooks:
            with HookManager() as hooks:
                for name, module in self.modules.items():
                    hooks.around(module, partial(self._begin, name), partial(self._end, gradient_hooks, name))
                output = batch.run(model, partial(_leaf_copy, starts))
            # The call hooks are removed by now, since checkpointed parts call their layers again in the backward pass.
            objective = self._objective(output, batch)
            gradients = self._gradients(objective, [*starts, *trainable.values()])[len(starts) :]
        value = float(objective.detach())
        self._total += self._weight * value
        for name, gradient in zip(trainable, gradients, strict=True):
            if gradient is not None:
                self._add_parameter(name, gradient)
        if not math.isfinite(value) and not any(self._objective.name in note for note in self.notes):
            if not all(map(is_finite, tree_tensors((batch.args, batch.kwargs)))):
                self.notes.append(f"the input itself contains NaN or infinity{self.in_batch}")
            self.notes.append(f"the {self._objective.name} is {value}{self.in_batch}")

    def _begin(self, name: str, args: Any, kwargs: Any) -> RunningStats:
        return self.calls.next(name)

    def _end(self, gradient_hooks: HookManager, name: str, stats: RunningStats, output: Any) -> Any:
        """Replace the output by a copy with a hook, so that later in-place operations do not affect its gradient."""
        tensor = first_tensor(output)
        if tensor is None:
            return None
        stats.has_output = True
        if not tensor.requires_grad:
            return None
        copied = tensor.clone()
        gradient_hooks.at_gradient(copied, partial(self._add_gradient, name, stats))
        return tree_map_tensors(output, lambda t: copied if t is tensor else t)

    def _add_gradient(self, name: str, stats: RunningStats, gradient: Tensor) -> None:
        # Ignore gradients that the loss function itself computes.
        if not self._is_backward:
            return
        more = moments(gradient)
        if self.first_nonfinite is None and (more.nan or more.inf):
            self.first_nonfinite = name
            label = f'"{name}"' if name else "the model's output"
            self.notes.append(f"NaN or infinity first in the gradient at {label}{self.in_batch}")
        stats.add(more.scaled(self._weight))

    def _gradients(self, objective: Tensor, inputs: list[Tensor]) -> tuple[Tensor | None, ...]:
        self._is_backward = True
        try:
            return torch.autograd.grad(objective, inputs, allow_unused=True)
        except RuntimeError:
            refuse_checkpoints(objective)
            raise
        finally:
            self._is_backward = False

    def _add_parameter(self, name: str, gradient: Tensor) -> None:
        gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
        part = gradient if self._weight == 1 else _wide(gradient) * self._weight
        self._sums[name] = _wide(self._sums[name]) + part if name in self._sums else part

    def parameter_row(self, name: str, learning_rate: float | None) -> ParameterGradients:
        parameter, gradient = self._parameters[name], self._sums.get(name)
        known = None if gradient is None else moments(gradient).scaled(1 / self._total_weight)
        weight_norm = moments(parameter).norm
        return ParameterGradients(
            name=name,
            shape=tuple(parameter.shape),
            trainable=parameter.requires_grad,
            **_statistics(known),
            weight_norm=weight_norm,
            ratio=None if known is None else _ratio(known.norm, weight_norm, learning_rate),
        )

    def layer_table(
        self, parameters: Sequence[ParameterGradients], learning_rate: float | None, title: str
    ) -> Table[LayerGradients]:
        norms = {id(self._parameters[row.name]): row for row in parameters if row.norm is not None}
        rows = []
        for name, call, calls, stats in self.calls:
            inside = [norms[id(parameter)] for parameter in self.modules[name].parameters() if id(parameter) in norms]
            norm = math.hypot(*(row.norm or 0.0 for row in inside))
            weight_norm = math.hypot(*(row.weight_norm for row in inside))
            known = stats.moments and stats.moments.scaled(1 / self._total_weight)
            ratio = _ratio(norm, weight_norm, learning_rate)
            rows.append(LayerGradients(call=call, calls=calls, ratio=ratio, **self.fields(name, known)))
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
            lambda row: _text(row.ratio),
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


def _statistics(known: Moments | None) -> dict[str, Any]:
    """Return the fields of a row that describe the values."""
    if known is None:
        return {**dict.fromkeys(("norm", "rms", "mean", "std", "min", "max", "zero_share")), "nan": 0, "inf": 0}
    names = ("norm", "mean", "std", "min", "max", "zero_share", "nan", "inf")
    rms = known.norm / math.sqrt(known.finite) if known.finite else math.nan
    return {"rms": rms, **{name: getattr(known, name) for name in names}}


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
        Column(name, partial(_field_text, name), hint=_HINTS.get(name, "")) for name in names
    ]
    columns.append(Column("zeros", lambda row: share(row.zero_share), hint="exactly 0", bar=lambda row: row.zero_share))
    if any(row.nan for row in rows):
        columns.append(Column("NaN", lambda row: str(row.nan or ""), alert=lambda row: row.nan > 0))
    if any(row.inf for row in rows):
        columns.append(Column("Inf", lambda row: str(row.inf or ""), alert=lambda row: row.inf > 0))
    return columns


_HINTS = {"rms": "the root mean square"}


def _field_text(name: str, row: _Statistics[Any]) -> str:
    return _text(getattr(row, name))


def _text(value: float | None) -> str:
    return number(value) or "-"
