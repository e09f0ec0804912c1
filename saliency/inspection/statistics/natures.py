"""What a layer does by its nature, where its zeros alone do not tell whether it rectifies."""

from __future__ import annotations

import torch
from torch import nn

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
