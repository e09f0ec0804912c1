"""Which pixels drove the prediction? The public names load on first use."""

from ._public import __all__ as __all__
from ._public import __dir__ as __dir__
from ._public import __getattr__ as __getattr__
