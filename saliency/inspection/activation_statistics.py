"""What the layers of a model give on some data: their moments, their dead channels, and where NaN begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from ..errors import LayerError
from ..hooks.manager import HookManager
from ..hooks.pytree import first_tensor, tree_tensors
from ..layers.layout import Grid, layout_from
from .accumulators import Call, Calls, Heap, Seen
from .batches import Passes, is_finite
from .layer_selection import LayersLike
from .model_inputs import Feed, called
from .moments import Moments, moments
from .tables import Column, Table, listed, number, share

POOLING = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
_FIRST = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LocalResponseNorm, nn.PReLU),
    *(nn.Upsample, nn.PixelShuffle, nn.PixelUnshuffle, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *POOLING,
)
_LAST = (nn.Linear, nn.Bilinear, nn.Embedding, nn.MultiheadAttention, nn.RNNBase)
# Derived classes permute their axes, as LayerNorm2d of torchvision and timm does.
_LAST_THEMSELVES = (nn.LayerNorm, nn.RMSNorm)


class ChannelAxes:
    """Which axis of an output holds the channels.

    Convolutions, their norms and pooling have them first, after the images; linear layers, attention and
    `nn.LayerNorm` last, by their definition. Whatever else has the shape of one of these outputs is taken to lie like
    it. Else: (N, K) has its channels second and (N, T, C) last; of four axes those two are the places whose proportions
    are the input's, so that Swin's (N, h, w, K) is told from (N, K, h, w); where neither fits, they come second, as
    they do where there are more axes. An output of fewer than two axes has no channels.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], int] = {}

    def of(self, module: nn.Module, shape: tuple[int, ...], images: int, size: Grid | None) -> int | None:
        """The axis of an output.

        Args:
            module: The layer.
            shape: Of its output.
            images: How many images there are in the batch.
            size: (H, W) of the input; None where it is no picture.
        """
        if len(shape) < 2:
            return None
        axis = _by_definition(module, len(shape))
        if axis is not None:
            self._known.setdefault(shape[1:], axis)
            return axis
        return self._known.get(shape[1:], _by_shape(shape, images, size))


def _by_definition(module: nn.Module, axes: int) -> int | None:
    if isinstance(module, _FIRST):
        return 1
    if isinstance(module, _LAST) or type(module) in _LAST_THEMSELVES:
        return axes - 1
    return None


def _by_shape(shape: tuple[int, ...], images: int, size: Grid | None) -> int:
    if len(shape) == 3:
        return 2
    if len(shape) == 4 and size is not None:
        layout = layout_from(shape, images, size, ())
        return 3 if layout is not None and layout.kind == "NHWC" else 1
    return 1


# The files of torch.nn.modules whose modules give zeros because they were given them.
_HANDING_ON = frozenset("channelshuffle dropout flatten padding pixelshuffle pooling upsampling".split())  # noqa: SIM905
_NAMES = ("pool", "drop", "flatten")
# Those whose modules cut nothing off, and give zeros where their weights are zeros.
_WEIGHING = frozenset("batchnorm conv instancenorm linear normalization sparse".split())  # noqa: SIM905


def can_be_called(module: nn.Module) -> bool:
    """Whether a module computes something when it is called: a ModuleList or a ParameterList does not."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def hands_on(module: nn.Module) -> bool:
    """Whether a module gives zeros only because it was given them: pooling, dropout, or what consists of such.

    Of classes that are not torch's own, the name tells: `FastAdaptiveAvgPool`, `DropPath`.
    """
    if isinstance(module, nn.Identity) or not _HANDING_ON.isdisjoint(map(_file, type(module).__mro__)):
        return True
    if any(True for _ in module.parameters()):
        return False
    children = list(module.children())
    name = type(module).__name__.lower()
    return all(map(hands_on, children)) if children else any(each in name for each in _NAMES)


def cuts_nothing_off(module: nn.Module) -> bool:
    """Whether a module gives nothing but zeros only if its weights or its input are: linear layers and norms.

    Of torch's own classes, since derived ones may rectify, and of an `nn.Sequential` that ends with one.
    """
    if type(module) is nn.Sequential:
        return len(module) > 0 and cuts_nothing_off(module[-1])
    return _file(type(module)) in _WEIGHING


def _file(kind: type) -> str:
    package, _, file = kind.__module__.rpartition(".")
    return file if package == "torch.nn.modules" else ""


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """What one layer gave in one of its calls, over all images and places.

    Mean, std, min and max are of the finite numbers.
    """

    name: str
    kind: str  # the module's class
    call: int  # which of its calls in a forward pass, from 0
    calls: int  # how many there are in a forward pass
    count: int  # of numbers
    mean: float
    std: float
    min: float
    max: float
    zero_share: float  # how many are exactly 0, from 0 to 1
    channels: int | None  # None where the output has no axis of channels, or another number of them each time
    dead: tuple[int, ...]  # the channels that were never above zero, and never NaN; of any layer, rectifying or not
    nan: int
    inf: int


class ActivationStatistics(Table[LayerActivations]):
    """See `activation_statistics`.

    Attributes:
        first_nonfinite: The name of the first layer with NaN or infinity in its output; None where there is none.
        dead_channels: How many channels are dead, each counted where it dies: in the innermost layers that give zeros
            and nothing below zero, aside from linear layers, norms, pooling, dropout, and what consists of these.
        images: How many images there were.
        batches: How many batches there were.
    """

    first_nonfinite: str | None = None
    dead_channels: int = 0
    images: int = 0
    batches: int = 0


def activation_statistics(
    model: nn.Module, data: Any, *, layers: LayersLike = "*", training: bool = False
) -> ActivationStatistics:
    """The activations of each layer in numbers: moments, zeros, dead channels, NaN and infinities.

    One row per layer, in the order in which the layers begin in a forward pass; a layer that is called several times
    in one, such as a ReLU that is used again, has a row for each call. Of an output of several tensors the first one
    counts. A ReLU that is a function and no module is no layer: its zeros show in whatever layer comes behind it.

    All numbers are exact over all batches together, summed in double precision. No activation is kept: the memory that
    is needed does not grow with the batches.

    Channels lie where the layer's definition puts them: second in (N, K, h, w) and (N, K), last in (N, T, C) and in the
    (N, h, w, K) of Swin; `saliency.inspection.activation_statistics` has the details.

    Args:
        model: Any `torch.nn.Module`. It is left bit for bit as it was.
        data: A batch as the model takes it; pictures or their paths, where the model carries its preprocessing; or any
            iterable of batches, or of pairs of a batch and labels. A shape such as (8, 3, 224, 224) stands for noise.
        layers: Names, patterns as in "layer4.*.conv?", modules, classes of modules, or several of these.
        training: A private copy of the model runs in training mode: normalisation goes by the batch, and dropout drops
            by seeds of our own. The running statistics of a network that has never been trained are zeros and ones, so
            that evaluation mode, the default, shows activations that no training step of it would.

    Raises:
        ImageError: The data hold no batch, or one that cannot be read.
        LayerError: A name or pattern fits no layer, or none of the layers is ever called.
        ModelError: It has no numbers yet, or cannot for `training` be copied.
    """
    passes = Passes(model, data, training=training)
    modules = passes.modules(layers)
    watch = _Watch(modules)
    for feed in passes:
        with passes.lent() as lent, HookManager() as hooks, torch.no_grad():
            watch.begin(feed)
            for name, module in modules.items():
                hooks.around(module, partial(watch.called, name), watch.see)
            watch.end(called(lent, feed))
    return watch.table(passes)


class _Watch:
    """Looks at each output as it comes by, and lets go of it."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules
        self.calls = Calls(Heap)
        self.axes = ChannelAxes()
        self.first: str | None = None
        self.notes: list[str] = []
        self._before: Seen | None = None
        self._batch = 0
        self._images = 0
        self._size: Grid | None = None
        self._input_is_finite = True

    def begin(self, feed: Feed) -> None:
        """A batch is about to be run."""
        self._batch += 1
        self.calls.begin()
        self._images = feed.size
        inputs = list(tree_tensors((feed.args, feed.kwargs)))
        self._size = next(((int(each.shape[-2]), int(each.shape[-1])) for each in inputs if each.dim() == 4), None)
        self._input_is_finite = all(map(is_finite, inputs))

    def called(self, name: str, args: Any, kwargs: Any) -> Call:
        """A layer has been called."""
        return self.calls.next(name)

    def see(self, call: Call, output: Any) -> None:
        """A layer has returned."""
        tensor = first_tensor(output)
        if tensor is None:
            return
        name, heap = call[0], self.calls.of(call)
        seen = self._before
        # A container mostly returns what its last part returned.
        if seen is None or not seen.is_still(tensor):
            seen = self._before = Seen(tensor)
        axis = self.axes.of(self.modules[name], tuple(tensor.shape), self._images, self._size)
        heap.add(seen.moments, seen.alive(tensor, axis))
        if self.first is None:
            self._look_for_nonfinite(name, output, seen.moments)

    def _look_for_nonfinite(self, name: str, output: Any, found: Moments) -> None:
        """Note the layer where NaN or infinity is in what it returned, also behind the first of several tensors."""
        later = ((moments(each), "a later tensor of the output") for each in islice(tree_tensors(output), 1, None))
        for each, part in chain([(found, "the output")], later):
            if each.nan or each.inf:
                self.first = name
                self.notes.append(self._first_note(name, each, part))
                return

    def end(self, output: Any) -> None:
        """The batch was run."""
        if self.first is None and not self.notes and not all(map(is_finite, tree_tensors(output))):
            self.notes.append(
                f"NaN or infinity in the model's output{self._where()}, though no layer in this table gave any: it "
                "comes from a function behind them"
            )

    def table(self, passes: Passes) -> ActivationStatistics:
        """What was seen, once there is nothing more to see."""
        rows = [
            _row(name, type(self.modules[name]).__name__, call, calls, heap) for name, call, calls, heap in self.calls
        ]
        if not rows:
            raise LayerError(
                f"none of the {len(self.modules)} layers was called, or gave a tensor (a scripted part does not call "
                "its layers)"
            )
        # Whatever gives zeros and nothing below zero, unless it is linear: an untrained head may be all zeros.
        rectified = [row for row in rows if row.min == 0 and not cuts_nothing_off(self.modules[row.name])]
        dying = _where_channels_die(
            [row for row in rectified if row.channels is not None and not hands_on(self.modules[row.name])]
        )
        seen = {row.name for row in rows}
        silent = [name for name, each in self.modules.items() if name not in seen and can_be_called(each)]
        notes = [
            str(passes),
            _dead_note(dying, passes.images),
            *(self.notes or ["no NaN, no infinity"]),
            *listed("never called, or without a tensor to show:", silent),
        ]
        model = type(passes.original).__name__
        table = ActivationStatistics(rows, _columns(rows, rectified, passes.images), f"Activations of {model}", notes)
        table.first_nonfinite = self.first
        table.dead_channels = sum(len(row.dead) for row in dying)
        table.images, table.batches = passes.images, passes.batches
        return table

    def _where(self) -> str:
        return f" of batch {self._batch}" if self._batch > 1 else ""

    def _first_note(self, name: str, found: Moments, part: str) -> str:
        what = " and ".join(each for each, count in (("NaN", found.nan), ("infinity", found.inf)) if count)
        label = f'"{name}"' if name else "the model"
        note = f"{what} first in {part} of {label}{self._where()}"
        if not self._input_is_finite:
            return f"{note}: the input itself holds NaN or infinity"
        module = self.modules[name]
        tensors = (*module.named_parameters(), *module.named_buffers())
        bad = next((key for key, each in tensors if not is_finite(each)), None)
        return f"{note}: its {bad} holds NaN or infinity" if bad is not None else note


def _row(name: str, kind: str, call: int, calls: int, heap: Heap) -> LayerActivations:
    found = heap.moments
    return LayerActivations(
        name=name,
        kind=kind,
        call=call,
        calls=calls,
        count=found.count,
        mean=found.mean,
        std=found.std,
        min=found.min,
        max=found.max,
        zero_share=found.zero_share,
        channels=None if heap.alive is None else len(heap.alive),
        dead=heap.dead(),
        nan=found.nan,
        inf=found.inf,
    )


def _where_channels_die(rectified: Iterable[LayerActivations]) -> list[LayerActivations]:
    """The rows of the innermost layers that rectify."""
    names = {row.name for row in rectified}

    def is_around(name: str) -> bool:
        return any(inner != name and (not name or inner.startswith(f"{name}.")) for inner in names)

    return [row for row in rectified if not is_around(row.name)]


def _dead_note(dying: Sequence[LayerActivations], images: int) -> str:
    if not dying:
        return "no layer here rectifies (a ReLU that is a function is no layer), so no channel counts as dead"
    dead, channels = sum(len(row.dead) for row in dying), sum(row.channels or 0 for row in dying)
    if not dead:
        return f"no dead channel among {channels} behind rectifiers"
    worst = max(dying, key=lambda row: len(row.dead))
    note = (
        f"{dead} dead channel{'' if dead == 1 else 's'} among {channels} behind rectifiers, most of them in "
        f"{worst.name or 'the model'}: {len(worst.dead)} of {worst.channels}"
    )
    return note if images > 1 else f"{note} (on one image, which leaves many silent that others wake)"


def _columns(
    rows: Sequence[LayerActivations], rectified: Iterable[LayerActivations], images: int
) -> list[Column[LayerActivations]]:
    """What is shown of so many images; columns in which there would be nothing are left out."""
    dead = {(row.name, row.call): str(len(row.dead)) for row in rectified if row.dead}
    made: list[Column[LayerActivations]] = [
        Column("layer", lambda row: row.name or "(the model)", "left"),
        Column("kind", lambda row: row.kind, "left"),
    ]
    if any(row.calls > 1 for row in rows):
        made.append(Column("call", lambda row: f"{row.call + 1} of {row.calls}" if row.calls > 1 else ""))
    made += [
        Column("mean", lambda row: number(row.mean)),
        Column("std", lambda row: number(row.std)),
        Column("min", lambda row: number(row.min)),
        Column("max", lambda row: number(row.max)),
        Column("zeros", lambda row: share(row.zero_share), hint="exactly 0", bar=lambda row: row.zero_share),
        Column("channels", lambda row: "" if row.channels is None else str(row.channels)),
        Column(
            "dead",
            lambda row: dead.get((row.name, row.call), ""),
            hint="channels that were never above zero, of layers that rectify",
            # What one image leaves silent, another mostly wakes.
            alert=lambda row: images > 1 and (row.name, row.call) in dead,
        ),
    ]
    if any(row.nan for row in rows):
        made.append(Column("NaN", lambda row: str(row.nan or ""), alert=lambda row: row.nan > 0))
    if any(row.inf for row in rows):
        made.append(Column("Inf", lambda row: str(row.inf or ""), alert=lambda row: row.inf > 0))
    return made
