"""Images with a known correct map, and small networks trained on them.

The names load on first use.
"""

from .. import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
