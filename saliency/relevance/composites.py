"""Composites: tables of the rules of each kind of operation, type of modules and layer."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..errors import MethodError, did_you_mean
from ..hooks.rectifiers import table
from .rules import AlphaBeta, AnyRule, Epsilon, Flat, Gamma, NonlinearRule, Rule, ZBox, ZPlus

RuleKey = str | type[nn.Module]
_KINDS = ("conv", "linear", "activation", "norm", "first", "last")


@dataclass(frozen=True)
class Composite:
    """The rules of a walk.

    Attributes:
        rules: From an operation kind, a type of modules, a layer's name, or a pattern of names, to a rule. The kinds
            are "conv", "linear", "first" or "last" for those before or after which no other convolution or matrix
            product runs, and "activation" and "norm" for a `NonlinearRule`. The most specific key wins: an exact name
            (of the innermost module), then the longest pattern, then "last", then "first", then a type (of the
            innermost module, then the most derived one), then the others. Convolutions and matrix products without an
            entry pass their gradient.
        constant_gates: Whether attention weights and gates are constants, so that the other factor of a product gets
            all relevance. Otherwise each factor gets half.
        name: The name in settings.
    """

    rules: Mapping[RuleKey, AnyRule] = field(default_factory=dict)
    constant_gates: bool = False
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for kind in _KINDS:
            base = NonlinearRule if kind in ("activation", "norm") else Rule
            if kind in self.rules and not isinstance(self.rules[kind], base):
                raise MethodError(f'composite: "{kind}" takes a {base.__name__}, got {self.rules[kind]}')

    def __str__(self) -> str:
        """Return a table of operations and rules."""
        return table({key_name(key): str(rule) for key, rule in self.rules.items()})

    def layers(self, model: nn.Module) -> dict[RuleKey, list[str]]:
        """Return the names of the modules of each pattern and type. Raises MethodError for a pattern that fits none."""
        keys = [key for key in self.rules if key not in _KINDS]
        modules = {name: module for name, module in model.named_modules() if name} if keys else {}
        layers: dict[RuleKey, list[str]] = {}
        for key in keys:
            if isinstance(key, type):
                layers[key] = [name for name, module in modules.items() if isinstance(module, key)]
            elif not layers.setdefault(key, fnmatch.filter(modules, key)):
                kinds = ", ".join(_KINDS)
                raise MethodError(f'composite: no layer "{key}"{did_you_mean(key, modules)} (the kinds are {kinds})')
        return layers


def key_name(key: RuleKey) -> str:
    """Return the name of a key of a composite."""
    return key.__name__ if isinstance(key, type) else key


CompositeLike = str | Composite | Mapping[Any, AnyRule]  # names and types, as keys of a dict, have no common type
# A rule of positive parts passes a negative score unchanged, with the wrong sign for pixels that support it. So the
# last operation divides it by epsilon. Operations before it mostly have outputs of at least 0.
_RULES: dict[str, dict[RuleKey, AnyRule]] = {
    # A quarter of the root mean square: with a smaller epsilon, the map approaches the gradient times the input.
    "epsilon": {"conv": Epsilon(0.25), "linear": Epsilon(0.25)},
    "gamma": {"conv": Gamma(), "linear": Gamma()},
    "epsilon_plus": {"conv": ZPlus(), "linear": Epsilon(), "last": Epsilon()},
    "epsilon_plus_flat": {"conv": ZPlus(), "linear": Epsilon(), "first": Flat(), "last": Epsilon()},
    "epsilon_gamma_box": {"conv": Gamma(), "linear": Epsilon(), "first": ZBox(), "last": Epsilon()},
    "epsilon_alpha2_beta1": {"conv": AlphaBeta(), "linear": Epsilon(), "last": Epsilon()},
    "epsilon_alpha2_beta1_flat": {"conv": AlphaBeta(), "linear": Epsilon(), "first": Flat(), "last": Epsilon()},
    "attn_lrp": {},
    "cp_lrp": {},
    "deep_taylor": {"conv": ZPlus(), "linear": ZPlus(), "first": ZBox(), "last": Epsilon()},
    "excitation_backprop": {"conv": ZPlus(bias=False), "linear": ZPlus(bias=False), "last": Epsilon()},
}
COMPOSITES = {name: Composite(rules, constant_gates=name == "cp_lrp", name=name) for name, rules in _RULES.items()}
"""Composites by name."""


def as_composite(option: str, composite: CompositeLike) -> Composite:
    """Return a composite given by name, or as a table of rules. Raises MethodError for anything else."""
    if isinstance(composite, Composite):
        return composite
    if isinstance(composite, str) and composite in COMPOSITES:
        return COMPOSITES[composite]
    if isinstance(composite, Mapping) and all(_is_entry(key, rule) for key, rule in composite.items()):
        return Composite(composite, name=str(dict(composite)))
    hint = did_you_mean(str(composite), COMPOSITES) or "; the composites are " + ", ".join(COMPOSITES)
    raise MethodError(
        f"{option}={composite!r}: expected a composite's name, or a mapping from an operation kind, a type of modules "
        f"or a layer's name to a rule{hint}"
    )


def _is_entry(key: object, rule: object) -> bool:
    """Return whether a composite may have a rule for a key: an operation kind, a name, or a type of modules."""
    is_type = isinstance(key, type) and issubclass(key, nn.Module)
    return (is_type or isinstance(key, str)) and isinstance(rule, AnyRule)
