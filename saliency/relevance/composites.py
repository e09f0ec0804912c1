"""Composites: the rules of each kind of operation, by name."""

from __future__ import annotations

from dataclasses import replace

from .propagation import Composite
from .rules import AlphaBeta, Epsilon, Flat, Gamma, Rule, ZBox, ZPlus


def _named(conv: Rule, linear: Rule, first: Rule | None = None) -> Composite:
    rules = {"conv": conv, "linear": linear} | ({} if first is None else {"first": first})
    return Composite(rules)


_COMPOSITES = {
    # A quarter of the root mean square: with less, the map approaches the gradient times the input.
    "epsilon": _named(Epsilon(0.25), Epsilon(0.25)),
    "gamma": _named(Gamma(), Gamma()),
    "epsilon_plus": _named(ZPlus(), Epsilon()),
    "epsilon_plus_flat": _named(ZPlus(), Epsilon(), Flat()),
    "epsilon_gamma_box": _named(Gamma(), Epsilon(), ZBox()),
    "epsilon_alpha2_beta1": _named(AlphaBeta(), Epsilon()),
    "epsilon_alpha2_beta1_flat": _named(AlphaBeta(), Epsilon(), Flat()),
    "attn_lrp": Composite(),
    "cp_lrp": Composite(constant_gates=True),
    "deep_taylor": _named(ZPlus(), ZPlus(), ZBox()),
    "excitation_backprop": _named(ZPlus(bias=False), ZPlus(bias=False)),
}
COMPOSITES: dict[str, Composite] = {name: replace(rules, name=name) for name, rules in _COMPOSITES.items()}
"""Composites by name."""
