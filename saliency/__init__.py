"""Which pixels drove the prediction? The public names load on first use."""

import importlib

import lazy_loader

from . import tables

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

# Drawing loads when the first result is shown or saved.
tables.draw_png = lambda result: importlib.import_module(".render.notebook", __name__).notebook_png(result)
tables.draw_card = lambda card: importlib.import_module(".render.measurements", __name__).card_png(card)


def __getattr__(name: str) -> object:
    """Load a public name. Raises AttributeError for another one, with the closest public names."""
    if name in __all__:
        return _load(name)
    from .aliases import public_hint

    # Without an object, the traceback adds no suggestion of its own.
    raise AttributeError(f'saliency has no "{name}"{public_hint(name, __all__)}', name=name, obj=None)
