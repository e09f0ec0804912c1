"""The public names of `saliency`, apart from `__init__.py`, which PAIR's package of the same name replaces."""

import importlib
from pathlib import Path

from . import lazy, tables

# Drawing loads when the first result is shown or saved.
tables.draw_png = lambda result: importlib.import_module(".render.figure", __package__).notebook_png(result)
tables.draw_card = lambda card: importlib.import_module(".render.measurements", __package__).card_png(card)
lazy.compiled = lambda method, mode: importlib.import_module(".program.compiled", __package__).compiled(method, mode)


def _hint(name: str, known: list[str]) -> str:
    """Return the end of an error about an unknown name: its module, its name here, or the closest public names."""
    from . import errors, extending
    from .aliases import public_hint

    modules = [module.__name__ for module in (extending, errors) if name in module.__all__]
    return f"; it is {modules[0]}.{name}" if modules else public_hint(name, known)


__getattr__, __dir__, __all__ = lazy.attach(__package__, str(Path(__file__).with_name("__init__.py")), _hint)
