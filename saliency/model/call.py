"""One call: its state, and the model in it.

The state holds the extra arguments of the model's forward, the layout of its layers, and the listener. It is bound to
the thread, because methods, recordings and user's targets run the model in many places. All of them use `run_model`.
"""

from __future__ import annotations

import inspect
import itertools
import os
import re
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, lru_cache, partial
from operator import methodcaller
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import CALL, LayerError, MethodError, ModelError
from ..hooks.autograd_graph import compiler_is_loaded, tensor_version, unique_modules, view_base
from ..hooks.manager import HookManager
from ..hooks.pytree import tree_map_tensors, tree_tensors
from ..io.inputs import Batch, at_once
from ..targets.classes import ModuleOutput, as_categories

ForwardArgs = tuple[Any, ...] | list[Any] | Mapping[str, Any]
"""Arguments after the image, by position or by name."""


T = TypeVar("T")

Reading = tuple[str, int, tuple[int, ...]]
"""A layer, the number of its call, and the rows of its output that read an image; no rows stand for all."""


class Call(NamedTuple):
    """State of one call.

    Attributes:
        values: Extra arguments by position or name.
        batch: The images, for which the arguments have rows; None without arguments.
        image: The image of which each pass runs variants; None for the whole batch.
        caches: The caches of a call with arguments, on which results may depend.
        layer: The layer whose output is the model's output.
        layout: The user's function from the output of a layer to maps.
        listener: The function that is called between chunks of passes.
        logits: The sigmoid or softmax before which the values of each tensor of an output were read; None
            if the output is read unchanged.
        is_tracing: Whether the call is traced into a program, so that no value can be read.
        modules: The modules of the prepared model, the model first.
        other_layers: A function that returns the calls of layers that read other images, which are never default
            layers.
        warned: The lines of the toolkit that have warned, if each line may warn only once; None for no such limit.
        warns: Whether the call may warn. `warnings.catch_warnings` is not safe in threads.
        subjects: The images of a run that the thread processes.
        checks: The pending checks, which run after the result; see `check_later`.
        compiled: Two compiled functions of passes and their questions. They return scores, and scores and gradients, or
            None for passes that cannot be compiled. None if the method is not compiled.
        compiles: Whether a compiled method may compile, and checks whether the model has changed. False in the threads
            of a run, which share a model that does not change.
    """

    values: Mapping[Any, Any] = {}
    batch: Batch | None = None
    image: int | None = None
    caches: dict[int | None, dict[Any, Any]] | None = None
    layer: str | None = None
    layout: Callable[[Tensor], Tensor] | None = None
    listener: Callable[..., None] | None = None
    logits: MutableMapping[Tensor, str] | None = None
    is_tracing: bool = False
    modules: Sequence[nn.Module] = ()
    other_layers: Callable[[], frozenset[Reading]] | None = None
    warned: set[tuple[str, int]] | None = None
    warns: bool = True
    subjects: tuple[str, ...] = ()
    checks: list[tuple[list[Tensor], Callable[..., None]]] | None = None
    compiled: Sequence[Callable[..., Any]] | None = None
    compiles: bool = True

    @property
    def subject(self) -> str:
        """The image of a run that the thread processes; empty if it processes several at once."""
        number = 0 if len(self.subjects) == 1 else self.image
        return "" if number is None or not self.subjects else self.subjects[number]

    def numbers(self, x: Tensor) -> list[int]:
        """Return the number of the image that each row of a batch (k, C, H, W) shows."""
        return list(range(len(x))) if self.image is None else [self.image] * len(x)

    def rows(self, value: Any, x: Tensor) -> Any:
        """Return the rows of an argument for a batch (k, C, H, W); an argument without rows is returned unchanged."""
        shape = (len(value),) if isinstance(value, list) else getattr(value, "shape", ())
        if self.batch is None:
            return value
        images, count = self.numbers(x), len(self.batch.inputs)
        if shape[:1] != (count,):
            return rows_of_states(value, images, count)
        rows = [value[image] for image in images] if isinstance(value, list) else value[images]
        return rows.detach().to(x.device) if isinstance(rows, Tensor) else rows


def rows_of_states(value: Any, images: Sequence[int], count: int) -> Any:
    """Return the rows of a tuple of states (layers, N, H), as of an LSTM; any other value unchanged."""
    if type(value) is tuple and all(getattr(part, "ndim", 0) == 3 and part.shape[1] == count for part in value):
        return tuple(part[:, images] for part in value)
    return value


_NOTHING = Call()


@contextmanager
def bound(**state: Any) -> Iterator[None]:
    """Change the state of the call of this thread in a block."""
    token = CALL.set(current_call()._replace(**state))
    try:
        yield
    finally:
        CALL.reset(token)


def arguments_of(like: ForwardArgs, batch: Batch, layer: str | None = None) -> dict[str, Any]:
    """Return the state of a call with the extra arguments of a batch, which replace the arguments of an outer call.

    Args:
        like: Tensors, arrays, lists and states with one row per image are divided into images; others are passed
            unchanged.
        batch: The images.
        layer: The layer whose output `run_model` returns instead of the model's output.

    Raises:
        MethodError: `like` is neither a tuple nor a mapping of names.
    """
    if not isinstance(like, tuple | list | Mapping):
        raise MethodError(f"forward_args is a {type(like).__name__}; expected a tuple (mask,) or a mapping of names")
    values: Mapping[Any, Any] = like if isinstance(like, Mapping) else dict(enumerate(like))
    image = 0 if len(batch.inputs) == 1 else None
    if not (values or layer or batch.arguments):
        return NO_ARGUMENTS | {"image": image}
    return {"values": values, "batch": batch, "image": image, "caches": {}, "layer": layer}


NO_ARGUMENTS: dict[str, Any] = {"values": {}, "batch": None, "image": None, "caches": None, "layer": None}


def bind_image(image: int) -> AbstractContextManager[None]:
    """Bind one image of the batch, with its arguments and options, in a block that runs only variants of the image."""
    number = current_call().image
    return bound(image=image if number is None else number)


def current_call() -> Call:
    """Return the state of the innermost call of this thread."""
    return cast("Call", CALL.get(_NOTHING))


def name_subjects(*names: str) -> None:
    """Set the images of a run that this thread processes, which the command line names in front of their warnings."""
    CALL.set(current_call()._replace(subjects=names))


def check_later(check: Callable[..., None], *numbers: Tensor) -> None:
    """Check numbers later in a call, so that no operation waits for them; outside of calls, check them at once.

    The next transfer from the device, such as that of the result, also reads these numbers.

    Args:
        check: The function that checks the numbers; it may warn or raise.
        numbers: Tensors () or (n,).
    """
    call = current_call()
    if call.checks is None:
        at_once(check, *numbers)
    elif not call.is_tracing:
        call.checks.append(([*map(Tensor.detach, map(torch.flatten, numbers))], check))


def read_back(*rows: Tensor) -> list[float]:
    """Return the numbers of tensors (n,), row by row, and run the pending checks, after one transfer."""
    waiting = current_call().checks or []  # an explanation may be made after its call
    checks, waiting[:] = waiting[:], []
    whole = list(rows)
    for pending, _ in checks:
        whole += pending
    numbers = iter(torch.cat([*map(methodcaller("to", whole[0].device), whole)]).tolist() if whole else ())
    read = list(itertools.islice(numbers, sum(map(len, rows))))
    for pending, check in checks:
        check(*itertools.islice(numbers, sum(map(len, pending))))
    return read


def modules_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return each module of a model once, the model first. A call lists the modules of its prepared model once."""
    modules = current_call().modules
    return modules if modules and modules[0] is model else unique_modules(model)


def shown_images(x: Tensor) -> list[int]:
    """Return the number of the image that each row of a batch (k, C, H, W) shows."""
    return current_call().numbers(x)


def forward_args(x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the extra arguments for a batch (k, C, H, W), by position and by name; all arguments for an answer."""
    call = current_call()
    arguments = call.batch and call.batch.arguments
    values: dict[Any, Any] = arguments(x, cast("int", call.image)) if arguments else {}
    values |= {key: call.rows(value, x) for key, value in call.values.items()}
    positional = tuple(values.pop(key) for key in list(values) if isinstance(key, int))
    return positional, values


_caches: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()


def cached(
    model: nn.Module, key: Hashable, compute: Callable[[], T], keeps: Callable[[T], bool] = lambda result: True
) -> T:
    """Return the result of a function for a model, computed once for each key; `keeps` says which results are kept.

    It is computed again if a module was replaced. A call with extra arguments has its own cache, since results may
    depend on them.
    """
    call, key = current_call(), (key, tuple(map(id, modules_of(model))))
    cache = _caches.setdefault(model, {}) if call.caches is None else call.caches.setdefault(call.image, {})
    if key in cache:
        return cast("T", cache[key])
    result = compute()
    if keeps(result):
        cache[key] = result
    return result


# The model in a call.

_lock = threading.RLock()
_held: dict[int, list[nn.Module]] = {}  # by holder, the modules that it keeps in evaluation mode
_was_training: set[nn.Module] = set()
_attributes: dict[nn.Module, dict[str, Any]] = {}  # attributes of modules that cache inference tensors
_eager_holders: set[int] = set()
_eager_stance: list[Any] = []  # the compiler's stance, while there are holders


class _Holder:
    """Identity of one block that changes a shared state."""


@contextmanager
def _lease(acquire: Callable[[int], None], release: Callable[[int], None]) -> Iterator[None]:
    """Call `acquire(holder)` before and `release(holder)` after a block, or when its frame is freed after Ctrl-C."""
    holder = _Holder()
    finalizer = weakref.finalize(holder, release, id(holder))
    try:
        acquire(id(holder))
        yield
    finally:
        release(id(holder))
        finalizer.detach()


def _evaluate(modules: list[nn.Module], others: frozenset[type], holder: int) -> None:
    """Set modules to evaluation mode; the last block to end restores every training flag.

    Tensors of inference mode in attributes of modules are replaced by copies, and restored likewise. The flags are set
    one by one, since `model.eval()` may be overridden to do more. They are tracked per module, since two
    models may share modules. Blocks may overlap in several threads.

    Args:
        modules: The modules.
        others: The types of modules that are not from torch.nn.
        holder: The identity of the block.
    """
    with _lock:
        _held[holder] = modules
        for module in modules:
            # A frozen ScriptModule has no such flag.
            if getattr(module, "training", False):
                _was_training.add(module)
                module.training = False
            # Heads of YOLO cache anchors under inference_mode, and no gradient can pass such tensors.
            if type(module) not in others or Tensor not in map(type, vars(module).values()):
                continue
            tensors = [(name, value) for name, value in vars(module).items() if type(value) is Tensor]
            cached = {name: tensor.clone() for name, tensor in tensors if tensor.is_inference()}
            if cached and module not in _attributes:
                _attributes[module] = {name: value for name, value in vars(module).items() if name != "training"}
                vars(module).update(cached)


def _end_evaluation(holder: int) -> None:
    with _lock:
        _held.pop(holder, None)
        if _was_training:
            for module in _was_training.difference(*_held.values()):
                module.training = True
                _was_training.discard(module)
        for module in set(_attributes).difference(*_held.values()):
            vars(module).update(_attributes.pop(module))


def eager() -> AbstractContextManager[None]:
    """Run compiled parts eagerly in a block. The compiler's stance is global; the last block to end restores it."""
    # Without the compiler, whose import takes seconds, nothing in this process can be compiled.
    return _lease(_make_eager, _end_eager) if compiler_is_loaded() else nullcontext()


def _make_eager(holder: int) -> None:
    with _lock:
        _eager_holders.add(holder)
        if not _eager_stance:
            # Python handles Ctrl-C after a call returns. `extend` stores the old stance before that, while `append`
            # does not.
            _eager_stance.extend(map(torch.compiler.set_stance, ["force_eager"]))  # type: ignore[arg-type]


def _end_eager(holder: int) -> None:
    with _lock:
        _eager_holders.discard(holder)
        if not _eager_holders and _eager_stance:
            _eager_stance[0].__exit__(None, None, None)
            _eager_stance.clear()


@cache
def keep_small_heap() -> None:
    """Let glibc keep up to 64 MiB of free memory for each thread, as glibc does after a block of 32 MiB was freed.

    By default, glibc keeps twice the largest mapped block that was freed, and maps larger blocks (M_MMAP_THRESHOLD in
    mallopt(3)). The activations of small networks exceed this, so the system clears their pages again at each pass. A
    forward of EfficientNet-Lite0 without gradients takes 20 ms instead of 29. The block is not written, so it takes no
    memory.
    """
    storage: Any = torch.UntypedStorage  # unlike `empty`, not filled by deterministic algorithms
    storage(2**25 - 2**16, device="cpu")


@contextmanager
def prepared_for_attribution(model: nn.Module, enter_result: Any = None, **call: Any) -> Iterator[Any]:
    """Prepare the model: evaluation mode, eager execution and gradients, regardless of the caller's own modes.

    Works under `no_grad` and `inference_mode`, on training, frozen, compiled and scripted models.

    Args:
        model: The model.
        enter_result: The value of the context, as for `contextlib.nullcontext`.
        **call: The state of a call: its arguments and its layout; see `Call`.

    Raises:
        ModelError: The model has lazy parameters.
    """
    modules = unique_modules(model)
    is_lazy, is_scripted, others = _traits(frozenset(map(type, modules)))
    if is_lazy:
        raise ModelError("the model has lazy parameters, which have no shape yet; run it once on an input first")
    keep_small_heap()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        if compiler_is_loaded():
            stack.enter_context(eager())
        if is_scripted:  # the optimised executor fuses operations into nodes that hide their ReLUs
            stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
        stack.enter_context(_lease(partial(_evaluate, modules, others), _end_evaluation))
        stack.enter_context(bound(**{"checks": [], **call}, modules=modules))
        try:
            yield enter_result
        except Exception:
            with bound(warns=False):  # a score that is not finite is the reason of other errors
                read_back()
            raise
        read_back()  # the checks of a method whose result did not become an explanation


@lru_cache
def _traits(kinds: frozenset[type]) -> tuple[bool, bool, frozenset[type]]:
    """Return whether a model with modules of these types is lazy, and is scripted; and the types not from torch.nn."""
    lazy, scripted = (any(issubclass(cls, kind) for cls in kinds) for kind in (LazyModuleMixin, torch.jit.ScriptModule))
    return lazy, scripted, frozenset(cls for cls in kinds if not cls.__module__.startswith("torch.nn."))


def run_model(model: nn.Module, x: Tensor) -> Any:
    """Return the model's output for a batch and the bound `forward_args`. The model may change its input in place.

    The image is the first argument, or `pixel_values` of a model of Hugging Face that takes `input_ids` first. If
    the target is a neuron, the output is the `ModuleOutput` of its layer. If targets of the call read logits, tensors
    that a sigmoid or softmax computed are replaced by the values before it.

    Raises:
        LayerError: The layer of the neuron was not run, or returned no tensor.
        ModelError: As for `call`.
    """
    state = current_call()
    args, kwargs = ((), {}) if state.caches is None else forward_args(x)
    if state.batch is None or state.batch.arguments is None:  # else the arguments hold the images
        kind: Any = type(model)
        if _takes_words_first(kind):
            kwargs = {**kwargs, "pixel_values": x.clone()}
        else:
            args = (x.clone(), *args)
    if state.layer is not None:
        return _layer_output(model, state.layer, args, kwargs)
    if state.logits is None:
        return call(model, args, kwargs)
    with (mode := _Logits(state.logits)):
        output = call(model, args, kwargs)
    return output if isinstance(output, list) else tree_map_tensors(output, mode.before)  # a list of detections


@torch.no_grad()
def run_without_arguments(model: nn.Module, x: Tensor) -> Any:
    """Return the model's output for images that are not of the call, without its arguments and without gradients."""
    with bound(**NO_ARGUMENTS):
        return run_model(model, x)


def _layer_output(model: nn.Module, layer: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModuleOutput:
    """Return the output of a layer in a forward of the model."""
    with HookManager(persistent=True) as hooks:  # the hooks of the method act, too
        outputs = hooks.capture(model.get_submodule(layer))
        call(model, args, kwargs)
    if not outputs:
        raise LayerError(f'layer "{layer}" of the neuron was not run, or returned no tensor')
    return ModuleOutput(outputs[-1])


_COPIES = ("clone", "contiguous", "float", "to", "interpolate", "clamp")  # also of hooks that observe a layer


class _Logits(TorchFunctionMode):
    """Mode that keeps the values before each sigmoid and softmax while the result is in use.

    Args:
        names: Receives the operation of each tensor that `before` returns.
    """

    def __init__(self, names: MutableMapping[Tensor, str]) -> None:
        super().__init__()
        self.names = names
        # The versions of both tensors are stored too: after an in-place change, the pair is no longer valid.
        self.recorded: MutableMapping[Tensor, tuple[str, Tensor, list[int]]] = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        result = func(*args, **kwargs)
        if name in ("sigmoid", "softmax"):
            self._keep(result, name, (*args, *kwargs.values())[0])
        elif name in _COPIES and args and (pair := self._logits_of(args[0])):
            self._keep(result, pair[0], pair[1] if name == "clamp" else func(pair[1], *args[1:], **kwargs))
        return result

    def _keep(self, result: Tensor, name: str, logits: Tensor) -> None:
        self.recorded[result] = name, logits, [tensor_version(result), tensor_version(logits)]

    def _logits_of(self, result: Tensor) -> tuple[str, Tensor] | None:
        name, logits, versions = self.recorded.get(result, ("", result, []))
        return (name, logits) if versions == [tensor_version(result), tensor_version(logits)] else None

    def before(self, tensor: Tensor) -> Tensor:
        """Return the values before the last sigmoid or softmax of a tensor; the tensor itself if there is none."""
        base = view_base(tensor)  # full backward hooks of a module return a view of its output
        is_whole = base is not None and (base.shape, base.stride()) == (tensor.shape, tensor.stride())
        name, logits = self._logits_of(cast("Tensor", base) if is_whole else tensor) or ("", tensor)
        if name:
            whole = view_base(logits)
            self.names[logits if whole is None else whole] = name
        return logits


@lru_cache
def _takes_words_first(kind: Any) -> bool:
    forward = getattr(kind, "forward", None)  # a ScriptModule's belongs to the object
    names = [] if forward is None else list(inspect.signature(forward).parameters)
    return names[1:2] == ["input_ids"] and "pixel_values" in names


def call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return the model's output. Out-of-memory errors and the user's own error types get a note and propagate.

    Raises:
        ModelError: The model refused its input, or its parameters or buffers were created under `inference_mode`, so no
            gradient can pass them. The original error is the cause.
    """
    try:
        return model(*args, **(kwargs or {}))
    except Exception as error:
        tensors = itertools.chain(model.parameters(), model.buffers())
        if "inference" in str(error).lower() and any(tensor.is_inference() for tensor in tensors):
            problem = "parameters or buffers of the model were created under torch.inference_mode()"
            hint = "build or load the model outside of it (running it inside is fine)"
            raise ModelError(f"{problem}, so no gradient can pass them; {hint}") from error
        is_mapping = isinstance(next(iter(args), None), Mapping)
        named = {**(args[0] if is_mapping else {}), **(kwargs or {})}
        names = {id(tensor): f"{name} " for name, tensor in named.items()}
        described = [names.get(id(tensor), "") + _described(tensor) for tensor in tree_tensors((args, kwargs))]
        received = " and ".join(described) or "no tensor"
        is_key = isinstance(error, KeyError) and is_mapping
        is_dict = is_mapping and isinstance(error, AttributeError | TypeError) and "dict" in str(error)
        if (is_key or is_dict or type(error) in _REFUSALS) and not is_out_of_memory(error):
            reason = str(error) or type(error).__name__
            if is_key:
                reason = f"there is no {reason} among {', '.join(map(str, args[0]))}"
            if is_dict:
                reason += f"; it got a mapping of {', '.join(map(str, args[0]))}: pass one image if it takes one"
            axes = [x.dim() for x in args[:1] if isinstance(x, Tensor)]
            if axes == [4] and any(parameter.dim() == 5 for parameter in model.parameters()):
                reason += "; a batch of volumes or videos has five axes, so pass a single one as x[None]"
            if axes == [4] and args[0].shape[-1] in (1, 3, 4) and min(args[0].shape[1:3]) > 4:
                reason += "; the tensor looks like (N, H, W, C): pass x.permute(0, 3, 1, 2)"
            for name, value in named.items():
                if isinstance(value, Tensor) and value.dim() > 3 and not value.is_floating_point():
                    reason += f"; pass {name} as a float tensor"
            if missing := re.search(r"missing .*argument.*?'(\w+)'", reason):
                name, first = missing[1], next(iter(inspect.signature(model.forward).parameters))
                cure = f'forward_args={{"{name}": value}}, or images by name, {{"{first}": image, "{name}": other}}'
                reason += f"; pass it as {cure}"
            if "input_ids" in reason:
                reason += "; pass an answer of saliency.generate. Export and metrics of the predicted class take none"
            raise ModelError(f"the model ({type(model).__name__}) refused an input of {received}: {reason}") from error
        error.add_note(f"saliency ran {type(model).__name__} on an input of {received}")
        raise


# The errors that PyTorch and models raise if an input does not fit.
_REFUSALS = {RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError}


def _described(tensor: Tensor) -> str:
    """Describe a tensor, for example `1x3x224x224 (float32 on cpu)`."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} ({str(tensor.dtype).removeprefix('torch.')} on {tensor.device})"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory, on any device."""
    text, signs = str(error).lower(), ("out of memory", "can't allocate memory", "not enough memory", "alloc_cpu")
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def reference_tensor(model: nn.Module) -> Tensor | None:
    """Return a floating-point parameter or buffer whose device and dtype an input should have, or None.

    It is the first tensor with two or more dimensions, or else the first tensor, such as a scale or a counter.
    """
    first: Tensor | None = None
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if not is_lazy(tensor) and tensor.is_floating_point() and not tensor.is_meta:
            if tensor.dim() > 1:
                return tensor
            first = tensor if first is None else first
    return first


def leaf(x: Tensor) -> Tensor:
    """Return a new leaf tensor with the same values that requires a gradient; the caller's tensor is unchanged."""
    if x.is_inference():
        x = x.clone()
    return x.detach().requires_grad_()


def unwrap(model: object) -> nn.Module:
    """Return the model inside `torch.compile`, `DataParallel`, `DistributedDataParallel`, and `YOLO` of Ultralytics.

    Raises:
        ModelError: `model` is not a `torch.nn.Module`.
    """
    while isinstance(model, nn.Module):
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None and hasattr(model, "predictor") and hasattr(model, "overrides"):
            inner = getattr(model, "model", None)  # YOLO: its own call is a pipeline under inference_mode
        if not isinstance(inner, nn.Module):
            return model
        model = inner
    raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}; {_module_hint(model)}")


def _module_hint(model: object) -> str:
    """Return how to get a module from what a caller has in its place."""
    if isinstance(model, Mapping):
        whole = [name for name, part in model.items() if isinstance(part, nn.Module)]
        weights = 'it holds weights: build the network, or saliency.load("mine.py:make", weights="best.pt")'
        return f"it holds the module under [{whole[0]!r}]" if whole else weights
    if isinstance(model, str | os.PathLike):
        return "load one with saliency.load(name)"
    name = getattr(model, "__name__", "")
    called = f"; if {name} returns the module, call it: {name}()" if callable(model) and name else ""
    return f"load one with saliency.load(name), or wrap your function in a module{called}"


_ATTRIBUTES: dict[str, tuple[Any, ...]] = {
    "preprocess": (Callable, Mapping),
    "categories": (Sequence, Mapping),
    "layout": (FunctionType,),
}


def model_attribute(name: str, model: nn.Module) -> Any:
    """Return the preprocessing, the class names or the layout of a model or of the model in its wrapper; else None.

    A model of Hugging Face has its class names in `config.id2label`, unless they are "LABEL_0", "LABEL_1", ... A YOLO
    has class names in `names`. Models of timm and open_clip carry the configuration of their preprocessing. Detectors
    of torchvision normalise images themselves.
    """
    values = [getattr(owner, name, None) for owner in (model, unwrap(model))]
    if name == "categories":
        labels = getattr(getattr(unwrap(model), "config", None), "id2label", None)  # of Hugging Face
        has_names = isinstance(labels, Mapping) and labels != {key: f"LABEL_{key}" for key in labels}
        names = getattr(unwrap(model), "names", None)  # of YOLO
        values += [labels if has_names else None, names if isinstance(names, Mapping) else None]
    if name == "preprocess":
        values.append(_carried_preprocess(unwrap(model)))
    return next((value for value in values if isinstance(value, _ATTRIBUTES[name])), None)


def _carried_preprocess(model: nn.Module) -> Mapping[str, Any] | None:
    timm: Any = getattr(model, "pretrained_cfg", None)
    if isinstance(timm, Mapping) and (timm.get("input_size") or (0,))[0] in (1, 3):
        return timm
    open_clip: Any = getattr(getattr(model, "visual", None), "preprocess_cfg", None)
    if isinstance(open_clip, Mapping):
        size = open_clip["size"] if isinstance(open_clip["size"], Sequence) else (open_clip["size"],) * 2
        mode = {"shortest": "center"}.get(open_clip["resize_mode"], open_clip["resize_mode"])
        return {**open_clip, "input_size": size, "crop_pct": 1.0, "crop_mode": mode}
    if hasattr(getattr(model, "transform", None), "image_mean"):  # of torchvision; it also resizes
        return {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    return None


def categories_of(model: nn.Module) -> tuple[str, ...] | None:
    """Return the class names stored on a model, or None."""
    names = model_attribute("categories", model)
    return None if names is None else as_categories(names)
