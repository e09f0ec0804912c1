"""The methods. Importing this package imports every module in it, and so fills the registry."""

from importlib import import_module
from pkgutil import iter_modules

from ..attribution import METHODS as METHODS

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
