"""Measure how good a map is: metrics with standard errors, compared with maps that ignore the prediction.

The names load on first use, from the modules of `saliency.evaluation.metrics`.
"""

from . import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
