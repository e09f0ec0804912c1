"""Components that all pages share: elements, image with heatmap, colour bar, trust card and theme.

They are plain JavaScript and CSS without a build step. The files of a page are concatenated to one module.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files

COMPONENTS = ("elements.js", "numbers.js", "frame.js", "colour_bar.js", "trust_card.js", "theme.js")


def scripts(package: str, names: Iterable[str]) -> str:
    """Return the shared scripts, followed by scripts of a package, as one text."""
    shared = [read(__name__, name) for name in COMPONENTS]
    return "\n".join([*shared, *(read(package, name) for name in names)])


def styles(package: str, name: str) -> str:
    """Return the shared styles, followed by the styles of a package, as one text."""
    return read(__name__, "shared.css") + "\n" + read(package, name)


def read(package: str, name: str) -> str:
    """Return a text file of a package."""
    return files(package).joinpath(name).read_text("utf-8")
