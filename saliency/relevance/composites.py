"""Composites: the rules of each kind of operation, by name."""

from __future__ import annotations

from .propagation import Composite
from .rules import AlphaBeta, Epsilon, Flat, Gamma, Rule, ZBox, ZPlus


def _named(conv: Rule, linear: Rule, first: Rule | None = None) -> Composite:
    rules = {"conv": conv, "linear": linear} | ({} if first is None else {"first": first})
    return Composite(rules)


COMPOSITES: dict[str, Composite] = {
    "epsilon": _named(Epsilon(), Epsilon()),
    "gamma": _named(Gamma(), Gamma()),
    "epsilon_plus": _named(ZPlus(), Epsilon()),
    "epsilon_plus_flat": _named(ZPlus(), Epsilon(), Flat()),
    "epsilon_gamma_box": _named(Gamma(), Epsilon(), ZBox()),
    "epsilon_alpha2_beta1": _named(AlphaBeta(), Epsilon()),
    "epsilon_alpha2_beta1_flat": _named(AlphaBeta(), Epsilon(), Flat()),
    "attn_lrp": Composite(),
    "cp_lrp": Composite(constant_gates=True),
    "deep_taylor": _named(ZPlus(), ZPlus(), ZBox()),
}
"""Composites by name."""
