"""Bases and helpers for authors of methods. docs/extending.md has an example of each.

The names load on first use.
"""

from . import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
