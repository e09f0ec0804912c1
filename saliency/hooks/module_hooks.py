"""Hooks on modules, and the scopes that decide whether they act."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from torch import nn

_Token = TypeVar("_Token")


class HookScope:
    """State of one `HookManager` that its hooks share. They do not hold the manager, so it can be freed."""

    def __init__(self, persistent: bool, exclusive: bool) -> None:
        self.persistent, self.exclusive = persistent, exclusive
        self.thread = threading.get_ident()
        self.closed = False

    def acts(self) -> bool:
        """Return whether hooks on modules act: this scope is active in this thread, and no inner scope disables it."""
        scopes = active_scopes.scopes
        if not scopes:
            return False
        if scopes[-1] is self:
            return True
        if self not in scopes:
            return False
        inner = (scope for scope in scopes[scopes.index(self) + 1 :] if not scope.closed)
        return not any(scope.exclusive if self.persistent else not scope.persistent for scope in inner)

    def acts_on_leaves(self) -> bool:
        """Return whether hooks on leaves act. Threads share leaves, but hooks ignore backward passes of other threads.

        On an accelerator, threads of the autograd engine run the backward pass, and hooks act in all of them: it is
        unknown which thread started the pass.
        """
        is_engine_thread = isinstance(threading.current_thread(), threading._DummyThread)
        return not self.closed and (is_engine_thread or threading.get_ident() == self.thread)


class _ActiveScopes(threading.local):
    """Scopes that are open in a thread, the innermost last."""

    def __init__(self) -> None:
        self.scopes: list[HookScope] = []

    def add(self, scope: HookScope) -> None:
        """Add the innermost scope, and drop those that another thread has closed."""
        self.scopes[:] = [*(other for other in self.scopes if not other.closed), scope]


active_scopes = _ActiveScopes()


class ModuleHook(partial[Any]):
    """Hook on one module. A copy that `deepcopy` or `pickle` creates together with the module does nothing."""

    def __reduce__(self) -> Any:
        return ModuleHook, (_do_nothing,)


def _do_nothing(*args: Any) -> None:
    pass


class OutputOverride(ModuleHook):
    """Hook that replaces the output of a layer before any other hook sees it."""


def call_hooks(
    scope: HookScope,
    begin: Callable[[tuple[Any, ...], dict[str, Any]], _Token],
    end: Callable[[_Token, Any], Any],
) -> tuple[ModuleHook, ModuleHook]:
    """Return a hook before and a hook after the calls of a layer: `end` gets what `begin` returned for that call."""
    begun: list[tuple[int, _Token]] = []  # each with the id of the frame of its call

    # If another thread registers or removes a hook meanwhile, PyTorch may leave out the keyword arguments.
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if scope.acts():
            frame = sys._getframe(1)
            if begun:
                # Remove the entries of calls that raised.
                running = set(_callers(frame))
                begun[:] = [call for call in begun if call[0] in running]
            begun.append((id(frame), begin(args, kwargs or {})))

    def after(module: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> Any:
        frame = id(sys._getframe(1))
        # Calls inside this one may have raised, and this one may have begun before the scope acted.
        if not begun or not scope.acts() or all(call[0] != frame for call in begun):
            return None
        while begun[-1][0] != frame:
            begun.pop()
        return end(begun.pop()[1], kwargs_and_output[-1])

    return ModuleHook(before), ModuleHook(after)


def _callers(frame: FrameType) -> Iterator[int]:
    """Yield the ids of the frames that called a frame. Ids, unlike frames, do not keep the variables alive."""
    caller = frame.f_back
    while caller is not None:
        yield id(caller)
        caller = caller.f_back
