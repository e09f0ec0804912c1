"""Metrics with standard errors, compared with maps that ignore the prediction. `saliency.metrics` has the names."""

from importlib import import_module
from pkgutil import walk_packages

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)
