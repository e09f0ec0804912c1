"""Which pixels drove the prediction? The public names load on first use."""

import importlib

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Load a public name. Raises AttributeError for another one, with the closest public names."""
    if name in __all__:
        if name != "__version__":
            importlib.import_module(".render", __name__)  # lets notebooks show explanations
        return _load(name)
    from .attribution.aliases import public_hint

    # Without an object, the traceback adds no suggestion of its own.
    raise AttributeError(f'saliency has no "{name}"{public_hint(name, __all__)}', name=name, obj=None)
