"""The user's model, borrowed: put into evaluation mode for a while, run, and given back as it was."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ModelError


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


class _Lease:
    """The training flags of the modules that are held, and how many hold each.

    The first holder of a module switches it to evaluation and the last one restores it, in any order, from any thread.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders: dict[nn.Module, int] = {}
        self.was_training: set[nn.Module] = set()

    def take(self, modules: list[nn.Module]) -> None:
        holders = self.holders
        with self.lock:
            for at, module in enumerate(modules):
                held = holders.get(module, 0)
                # A frozen ScriptModule has no such flag.
                if not held and getattr(module, "training", False):
                    try:
                        module.training = False
                    except BaseException:
                        self._give_back(modules[:at])
                        raise
                    self.was_training.add(module)
                holders[module] = held + 1

    def give_back(self, modules: list[nn.Module]) -> None:
        with self.lock:
            self._give_back(modules)

    def _give_back(self, modules: list[nn.Module]) -> None:
        holders = self.holders
        for module in modules:
            held = holders.pop(module)
            if held > 1:
                holders[module] = held - 1
            elif module in self.was_training:
                self.was_training.remove(module)
                module.training = True


_evaluation = _Lease()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, shared by any number of threads; the last to leave restores every training flag.

    The flags are set one by one, since `model.eval()` may be overridden to do more than that. They are counted per
    module, because two models may share a part.
    """
    modules = list(model.modules())
    _evaluation.take(modules)
    try:
        yield
    finally:
        _evaluation.give_back(modules)


class _EagerStance:
    """The compiler's stance is one for the whole process, so its holders are counted too."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders = 0
        self.stance: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        # Nothing can be compiled in a process that has not imported the compiler, which takes seconds to import.
        if "torch._dynamo" not in sys.modules:
            yield
            return
        with self.lock:
            if self.holders == 0:
                self.stance = torch.compiler.set_stance("force_eager")
            self.holders += 1
        try:
            yield
        finally:
            with self.lock:
                self.holders -= 1
                if self.holders == 0:
                    self.stance.__exit__(None, None, None)


_eager = _EagerStance()


@contextmanager
def _unoptimised() -> Iterator[None]:
    """TorchScript as it is written: its optimised executor fuses operations into nodes that hide their ReLUs.

    The switch is the thread's own.
    """
    optimise = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        torch._C._set_graph_executor_optimize(optimise)


@contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, run eagerly, with gradients at hand, whatever the caller's own modes are.

    Works under `no_grad` and `inference_mode`, on training, frozen, compiled and scripted models.

    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_eager())
        stack.enter_context(_unoptimised())
        stack.enter_context(evaluating(model))
        yield


def run(model: nn.Module, x: Tensor) -> Any:
    """The model's output for a batch. The model gets a clone: it may normalise its input in place.

    An error in the model comes out as it is, with a note on what went in.

    Raises:
        ModelError: Parameters or buffers were made under `inference_mode`, and no gradient can pass them.
    """
    try:
        return model(x.clone())
    except Exception as error:
        if any(each.is_inference() for group in (model.parameters(), model.buffers()) for each in group):
            raise ModelError(
                "parameters or buffers of the model were made under torch.inference_mode(), so no gradient can pass "
                "them; build or load the model outside of it (running it inside is fine)"
            ) from error
        error.add_note(
            f"saliency ran {type(model).__name__} on an input of shape {tuple(x.shape)}, {x.dtype}, on {x.device}"
        )
        raise


def reference(model: nn.Module) -> Tensor | None:
    """A floating-point parameter or buffer whose device and dtype an input should have; None for a model without."""
    tensors = (each for group in (model.parameters(), model.buffers()) for each in group)
    return next((each for each in tensors if each.is_floating_point()), None)


def leaf(x: Tensor) -> Tensor:
    """The same values as a fresh leaf of a graph, so that the caller's tensor is neither changed nor recorded on."""
    if x.is_inference():
        x = x.clone()
    return x.detach().requires_grad_()
