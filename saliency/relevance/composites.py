"""Composites: the rules of each kind of operation, by name."""

from __future__ import annotations

from .propagation import Composite, RuleKey
from .rules import AlphaBeta, AnyRule, Epsilon, Flat, Gamma, ZBox, ZPlus

_RULES: dict[str, dict[RuleKey, AnyRule]] = {
    # A quarter of the root mean square: with a smaller epsilon, the map approaches the gradient times the input.
    "epsilon": {"conv": Epsilon(0.25), "linear": Epsilon(0.25)},
    "gamma": {"conv": Gamma(), "linear": Gamma()},
    "epsilon_plus": {"conv": ZPlus(), "linear": Epsilon()},
    "epsilon_plus_flat": {"conv": ZPlus(), "linear": Epsilon(), "first": Flat()},
    "epsilon_gamma_box": {"conv": Gamma(), "linear": Epsilon(), "first": ZBox()},
    "epsilon_alpha2_beta1": {"conv": AlphaBeta(), "linear": Epsilon()},
    "epsilon_alpha2_beta1_flat": {"conv": AlphaBeta(), "linear": Epsilon(), "first": Flat()},
    "attn_lrp": {},
    "cp_lrp": {},
    "deep_taylor": {"conv": ZPlus(), "linear": ZPlus(), "first": ZBox()},
    "excitation_backprop": {"conv": ZPlus(bias=False), "linear": ZPlus(bias=False)},
}
COMPOSITES = {name: Composite(rules, constant_gates=name == "cp_lrp", name=name) for name, rules in _RULES.items()}
"""Composites by name."""
