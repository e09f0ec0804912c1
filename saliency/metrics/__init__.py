"""Measure how good a map is: metrics with standard errors, each next to maps that ignore the prediction."""

from importlib import import_module
from pkgutil import walk_packages

from .base import METRICS as METRICS
from .base import Control as Control
from .base import Measurement as Measurement
from .base import Metric as Metric
from .base import Outcome as Outcome
from .base import Subject as Subject
from .base import measure as measure
from .changed_images import PerturbationMetric as PerturbationMetric
from .changed_images import PerturbedImage as PerturbedImage

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)
