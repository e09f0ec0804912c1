"""Relevance propagation: a walk of the autograd graph of one call, its rules, and composites of rules.

The names load on first use.
"""

from .. import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
