"""Measure how good a map is: metrics with standard errors, compared with maps that ignore the prediction.

The names load on first use, from the modules of `saliency.evaluation.metrics`.
"""

import lazy_loader

from .errors import did_you_mean

_load, __dir__, __all__ = lazy_loader.attach_stub(__package__, __file__)


def __getattr__(name: str) -> object:
    """Load a public name. Raises AttributeError for another one, with the closest public names."""
    if name in __all__:
        return _load(name)
    raise AttributeError(f'saliency.metrics has no "{name}"{did_you_mean(name, __all__)}', name=name, obj=None)
