"""All methods. Importing this package imports each of its modules, which registers the methods in it."""

from importlib import import_module
from pkgutil import walk_packages

from ..attribution.base import METHODS as METHODS

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)
