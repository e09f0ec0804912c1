"""Draw explanations: overlays, contact sheets and figures. Importing this package lets notebooks show explanations."""

from ..attribution.explanation import Explanation
from .notebook import notebook_png

Explanation.draw_png = notebook_png
