"""Bases and helpers for authors of methods. docs/extending.md has an example of each.

The names load on first use.
"""

from . import lazy
from .errors import did_you_mean

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__, did_you_mean)
