"""Hooks on modules: what is called before and after a call, and which end belongs to which beginning."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from torch import nn

from .scope import HookScope

_Token = TypeVar("_Token")


class ModuleHook(partial[Any]):
    """A hook on one module. A copy that is made along with the module, by `deepcopy` or `pickle`, does nothing."""

    def __reduce__(self) -> Any:
        """What a copy is made from."""
        return ModuleHook, (_nothing,)


def _nothing(*given: Any) -> None:
    """What a copied hook does."""


class OutputOverride(ModuleHook):
    """A hook that changes what a layer gives, for everybody who comes after it."""


def call_hooks(
    mark: HookScope,
    begin: Callable[[tuple[Any, ...], dict[str, Any]], _Token],
    end: Callable[[_Token, Any], Any],
) -> tuple[ModuleHook, ModuleHook]:
    """A hook before and one after the calls of a layer: `end` gets what `begin` returned for the very same call."""
    begun: list[tuple[int, _Token]] = []  # each with the frame of its call

    # In another thread, a call that begins while a hook is put up or taken away may leave out the keywords.
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if mark.acts():
            frame = sys._getframe(1)
            if begun:
                # Calls that raised have left theirs.
                running = set(_frames_below(frame))
                begun[:] = [each for each in begun if each[0] in running]
            begun.append((id(frame), begin(args, kwargs or {})))

    def after(module: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> Any:
        if not begun or not mark.acts():
            return None
        here = id(sys._getframe(1))
        if begun[-1][0] != here:
            # Calls inside of this one raised, or this one began while nothing was to be seen.
            at = next((at for at, (frame, _) in enumerate(begun) if frame == here), None)
            if at is None:
                return None
            del begun[at + 1 :]
        return end(begun.pop()[1], kwargs_and_output[-1])

    return ModuleHook(before), ModuleHook(after)


def _frames_below(frame: FrameType) -> Iterator[int]:
    """The frames that a frame was called from, each by its id: whoever holds a frame holds all that is in it."""
    below = frame.f_back
    while below is not None:
        yield id(below)
        below = below.f_back
