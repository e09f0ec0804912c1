"""The user's model, borrowed: put into evaluation mode for a while, run, and given back as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from ..errors import ModelError
from .autograd_graph import child_modules, compiler_is_loaded
from .pytree import tree_tensors


def retry_on_interrupt(undo: Callable[[], None]) -> None:
    """Undo, and begin again where a Ctrl-C interrupts it; the interrupt is raised afterwards.

    What is to be undone must bear to be undone twice.
    """
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            undo()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`, `DataParallel` and `DistributedDataParallel`.

    Raises:
        ModelError: It is no `torch.nn.Module`.
    """
    while isinstance(model, nn.Module):
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
    raise ModelError(
        f"expected a torch.nn.Module, got {type(model).__name__}; "
        "load one with saliency.load(name), or wrap your function in a module"
    )


def model_attribute(name: str, serves: Callable[[Any], bool], model: nn.Module) -> Any:
    """An attribute of a model that means by its name what we do; None where it carries none.

    What stands on a wrapper, as of `torch.compile`, counts as on the model within.
    """
    found = (getattr(each, name, None) for each in (model, unwrap(model)))
    return next((each for each in found if each is not None and serves(each)), None)


def is_preprocess(like: Any) -> bool:
    """Whether an attribute of a model can be the preprocessing of its pictures."""
    return callable(like) or isinstance(like, Mapping)


def is_categories(like: Any) -> bool:
    """Whether an attribute of a model can be the names of its classes."""
    return isinstance(like, Sequence | Mapping)


class _Leases:
    """Which calls hold which modules in evaluation mode, and which of these modules were training before.

    Every step can be interrupted and done again: what is to be undone is written down before it is done.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: dict[object, list[nn.Module]] = {}
        self.was_training: set[nn.Module] = set()

    def take(self, holder: object, modules: list[nn.Module]) -> None:
        with self.lock:
            self.held[holder] = modules
            for module in modules:
                # A frozen ScriptModule has no such flag.
                if getattr(module, "training", False):
                    self.was_training.add(module)
                    module.training = False

    def give_back(self, holder: object) -> None:
        with self.lock:
            if self.was_training:
                others = [modules for each, modules in self.held.items() if each is not holder]
                still = {module for modules in others for module in modules}
                for module in self.held.get(holder, ()):
                    if module in self.was_training and module not in still:
                        module.training = True
                        self.was_training.discard(module)
            self.held.pop(holder, None)


_evaluation = _Leases()


@contextmanager
def evaluating(model: nn.Module, modules: list[nn.Module] | None = None) -> Iterator[None]:
    """The model in evaluation mode, shared by any number of threads; the last to leave restores every training flag.

    The flags are set one by one, since `model.eval()` may be overridden to do more than that. They are held module by
    module, because two models may share a part.

    Args:
        model: The model.
        modules: Its parts, where they are known already.
    """
    holder, modules = object(), unique_modules(model) if modules is None else modules
    try:
        _evaluation.take(holder, modules)
        yield
    finally:
        try:
            retry_on_interrupt(lambda: _evaluation.give_back(holder))
        except KeyboardInterrupt:  # perhaps on its threshold, before it began
            retry_on_interrupt(lambda: _evaluation.give_back(holder))
            raise


class _EagerStance:
    """The compiler's stance, which is one for the whole process; its holders are counted."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders: set[object] = set()
        self.stance: Any = None

    def take(self, holder: object) -> None:
        with self.lock:
            self.holders.add(holder)
            if self.stance is None:
                self.stance = torch.compiler.set_stance("force_eager")

    def give_back(self, holder: object) -> None:
        with self.lock:
            self.holders.discard(holder)
            if not self.holders and self.stance is not None:
                self.stance.__exit__(None, None, None)
                self.stance = None


_stance = _EagerStance()


@contextmanager
def eager() -> Iterator[None]:
    """Compiled parts run as they are written."""
    # Nothing can be compiled in a process that has not imported the compiler, which takes seconds to import.
    if not compiler_is_loaded():
        yield
        return
    holder = object()
    try:
        _stance.take(holder)
        yield
    finally:
        try:
            retry_on_interrupt(lambda: _stance.give_back(holder))
        except KeyboardInterrupt:  # perhaps on its threshold, before it began
            retry_on_interrupt(lambda: _stance.give_back(holder))
            raise


@contextmanager
def prepared_for_attribution(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, run eagerly, with gradients at hand, whatever the caller's own modes are.

    Works under `no_grad` and `inference_mode`, on training, frozen, compiled and scripted models.

    """
    modules = unique_modules(model)
    kinds = set(map(type, modules))
    if any(issubclass(kind, LazyModuleMixin) for kind in kinds):
        raise ModelError("the model has lazy parameters, which have no shape yet; run it once on an input first")
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(eager())
        if any(issubclass(kind, torch.jit.ScriptModule) for kind in kinds):
            # The optimised executor of TorchScript fuses operations into nodes that hide their ReLUs.
            stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
        stack.enter_context(evaluating(model, modules))
        yield


def unique_modules(model: nn.Module) -> list[nn.Module]:
    """The model and all modules in it, each once: `model.modules()` in a third of its time."""
    found = {model: None}
    waiting = [model]
    while waiting:
        for child in child_modules(waiting.pop()).values():
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return list(found)


def run_model(model: nn.Module, x: Tensor) -> Any:
    """The model's output for a batch. The model gets a clone: it may normalise its input in place.

    Raises:
        ModelError: As for `call`.
    """
    return call(model, (x.clone(),))


def call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Any:
    """The model's output. A lack of memory and errors of the user's own kinds come out as they are, with a note.

    Raises:
        ModelError: The model refused its input, or its parameters or buffers were made under `inference_mode`, and no
            gradient can pass them. What it raised is the cause.
    """
    try:
        return model(*args, **(kwargs or {}))
    except Exception as error:
        if "inference" in str(error).lower() and any(
            each.is_inference() for group in (model.parameters(), model.buffers()) for each in group
        ):
            raise ModelError(
                "parameters or buffers of the model were made under torch.inference_mode(), so no gradient can pass "
                "them; build or load the model outside of it (running it inside is fine)"
            ) from error
        given = " and ".join(map(_described, tree_tensors((args, kwargs)))) or "no tensor"
        if type(error) in _REFUSALS and not is_out_of_memory(error):
            reason = str(error) or type(error).__name__
            raise ModelError(f"the model ({type(model).__name__}) refused an input of {given}: {reason}") from error
        error.add_note(f"saliency ran {type(model).__name__} on an input of {given}")
        raise


# What PyTorch and models raise where an input does not fit.
_REFUSALS = {RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError}


def _described(tensor: Tensor) -> str:
    """For example `1x3x224x224 (float32 on cpu)`."""
    shape = "x".join(map(str, tensor.shape)) or "one number"
    return f"{shape} ({str(tensor.dtype).removeprefix('torch.')} on {tensor.device})"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("out of memory", "can't allocate memory", "not enough memory", "alloc_cpu")
    )


def reference_tensor(model: nn.Module) -> Tensor | None:
    """A floating-point parameter or buffer whose device and dtype an input should have; None for a model without.

    The first weight decides; scales and counters only where there is none.
    """
    tensors = (each for group in (model.parameters(), model.buffers()) for each in group)
    real = (each for each in tensors if not is_lazy(each) and each.is_floating_point() and not each.is_meta)
    some: Tensor | None = None
    for each in real:
        if each.dim() > 1:
            return each
        some = each if some is None else some
    return some


def leaf(x: Tensor) -> Tensor:
    """The same values as a fresh leaf of a graph, so that the caller's tensor is neither changed nor recorded on."""
    if x.is_inference():
        x = x.clone()
    return x.detach().requires_grad_()
