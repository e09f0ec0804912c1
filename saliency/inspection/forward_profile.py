"""One forward of a model, watched: which modules run, in what order, what they give, and what runs between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..hooks.manager import HookManager
from ..hooks.model_state import unique_modules
from ..hooks.pytree import first_tensor, tree_tensors
from .flops import Operations, closed_form, known_kind
from .model_inputs import Feed, called


class Layer:
    """What one module did in a forward.

    Attributes:
        order: The place of its first call among those of all modules.
        calls: How often it was called.
        output: The shapes of what its last call returned, nested as that was.
        varies: Whether its calls returned different shapes.
        multiply_adds: Of all that ran while it did.
        functional: The functions that it called between its parts, by name, with how often.
    """

    __slots__ = ("_watch", "calls", "formula", "functional", "has_names", "multiply_adds", "order", "output", "varies")

    def __init__(self, watch: _Watch, module: nn.Module) -> None:
        self._watch = watch
        self.has_names = not known_kind(module)
        self.formula = closed_form(module)
        self.order = -1
        self.calls = 0
        self.output: Any = None
        self.varies = False
        self.multiply_adds = 0
        self.functional: dict[str, int] = {}

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, Any, int, int]:
        """Before a call."""
        watch = self._watch
        if self.order < 0:
            self.order = watch.begun
        watch.begun += 1
        depth = len(watch.running)
        watch.running.append(self)
        x = args[0] if args else kwargs.get("input", next(iter(kwargs.values()), None))
        return depth, x, self.multiply_adds, watch.multiply_adds

    def end(self, token: tuple[int, Any, int, int], output: Any) -> None:
        """After a call that ended well."""
        watch = self._watch
        depth, x, own, of_all = token
        if self.formula is not None:
            watch.multiply_adds += self.formula(x, output)
        # What a call of the same module inside of this one has added is a part of this.
        self.multiply_adds = own + watch.multiply_adds - of_all
        shapes = tuple(output.shape) if type(output) is Tensor else shapes_of(output)
        if self.calls and shapes != self.output:
            self.varies = True
        self.calls += 1
        self.output = shapes
        # Also what did not end, because it raised what its caller caught.
        del watch.running[depth:]


def watched(model: nn.Module, feed: Feed) -> dict[nn.Module, Layer]:
    """What each module of the model did in one forward, without a graph, those that were called.

    Modules of TorchScript take no hooks, so those inside a model are not seen; their multiply-adds are those of what
    calls them. What the user records or edits meanwhile is left out: the model itself is watched. The model is expected
    to be borrowed. Raises ModelError where it refuses its input.
    """
    modules = unique_modules(model)
    watch = _Watch()
    layers = {module: Layer(watch, module) for module in modules}
    with HookManager(exclusive=True) as hooks, torch.no_grad():
        for module, layer in layers.items():
            if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                hooks.around(module, layer.begin, layer.end)
        # Functions inside of TorchScript, or of a model that hooks do not see, pass by the mode that names them.
        has_own_call = type(model).__call__ is not nn.Module.__call__
        if has_own_call or any(isinstance(module, torch.jit.ScriptModule) for module in modules):
            watch.has_all = True
            hooks.enter_context(watch.operations)
        hooks.enter_context(watch)
        output = called(model, feed)
    if not layers[model].calls:  # which no hook saw: TorchScript, or a `__call__` of its own
        layers[model].end((0, first_tensor(feed[:2]), 0, 0), output)
    return {module: layer for module, layer in layers.items() if layer.calls}


class _Watch(TorchFunctionMode):
    """Names the functions that the innermost running module calls, and counts their multiply-adds.

    It sees each function where it is called, from the outside: what it calls in turn is a part of it.

    Attributes:
        running: The modules that have begun and not ended, the innermost last.
        begun: How many calls of modules have begun.
        multiply_adds: Of all that ran so far.
        has_all: Whether operations are watched all the time, and not only while functions run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Layer] = []
        self.begun = 0
        self.multiply_adds = 0
        self.operations = Operations(self._count)
        self.has_all = False
        self._names: dict[Any, str | None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        layer = self.running[-1] if self.running else None
        if layer is None or layer.formula is not None:
            return func(*args, **kwargs)
        try:
            name = self._names[func]
        except KeyError:
            name = self._names[func] = name_of(func)
        if name is None:
            return func(*args, **kwargs)
        if self.has_all or name in _PRODUCTLESS:
            output = func(*args, **kwargs)
        else:
            with self.operations:
                output = func(*args, **kwargs)
        if not isinstance(output, Tensor) and name != "setitem" and not any(True for _ in tree_tensors(output)):
            # A question, such as for the size, is no computation.
            self._names[func] = None
        elif layer.has_names:
            layer.functional[name] = layer.functional.get(name, 0) + 1
        return output

    def _count(self, multiply_adds: int) -> None:
        if not self.running or self.running[-1].formula is None:
            self.multiply_adds += multiply_adds


def shapes_of(nest: Any) -> Any:
    """The shapes of a nest's tensors in tuples, lists and dicts; what is no tensor is None or the name of its type."""
    if isinstance(nest, Tensor):
        return tuple(nest.shape)
    if isinstance(nest, Mapping):
        return {key: shapes_of(each) for key, each in nest.items()}
    if isinstance(nest, tuple | list):
        shapes = (shapes_of(each) for each in nest)
        return list(shapes) if isinstance(nest, list) else tuple(shapes)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return {each.name: shapes_of(getattr(nest, each.name)) for each in dataclasses.fields(nest)}
    return None if nest is None else type(nest).__name__


def name_of(function: Any) -> str | None:
    """What a function of torch is called, however it was spelled: `+`, `+=` and `add_` are "add".

    None for what computes nothing, such as looking at an attribute.
    """
    name = getattr(function, "__name__", None) or str(function)
    if name in _NO_COMPUTATION:
        return None
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        name = name[1:] if name[:1] in ("r", "i") and name[1:] in _OPERATORS else name
        return _SPELLED.get(name, name)
    return name.partition(".")[0].strip("_")


_NO_COMPUTATION = frozenset(("__get__", "__set__", "__delete__", "requires_grad_", "retain_grad", "as_subclass"))
# Functions as common as they are free of matrix products: the time of watching their operations is saved.
_PRODUCTLESS = frozenset(
    "adaptive_avg_pool2d add avg_pool2d batch_norm cat chunk clone contiguous div dropout expand flatten gelu getitem "  # noqa: SIM905
    "group_norm hardsigmoid hardswish hardtanh interpolate layer_norm max_pool2d mean mul normalize pad permute relu "
    "relu6 reshape roll sigmoid silu softmax split squeeze stack sub sum tanh transpose unbind unflatten unsqueeze "
    "view".split()
)
_OPERATORS = frozenset(
    "add sub mul div truediv floordiv mod pow matmul and or xor lshift rshift".split()  # noqa: SIM905
)
_SPELLED = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "invert": "bitwise_not"}
