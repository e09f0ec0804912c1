"""Measure how good a map is: metrics with standard errors, compared with maps that ignore the prediction.

The names load on first use, from the modules of `saliency.evaluation.metrics`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__package__, __file__)
