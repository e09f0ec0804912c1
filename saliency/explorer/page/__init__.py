"""The page of the explorer, as files of a server and as the module of a notebook widget."""

from __future__ import annotations

import json
from functools import cache

from ...frontend import read, scripts, styles

SCRIPTS = ("colours.js", "choices.js", "panel.js", "explorer.js")


@cache
def static_files() -> dict[str, tuple[bytes, str]]:
    """Return the files of the page by address, each with its content type. The page itself has the address ""."""
    texts = {
        "": (read(__name__, "page.html"), "text/html; charset=utf-8"),
        "static/explorer.js": (scripts(__name__, [*SCRIPTS, "server.js"]), "text/javascript; charset=utf-8"),
        "static/explorer.css": (styles(__name__, "explorer.css"), "text/css; charset=utf-8"),
        "static/icon.svg": (read(__name__, "icon.svg"), "image/svg+xml"),
    }
    return {address: (text.encode(), kind) for address, (text, kind) in texts.items()}


@cache
def widget_module() -> str:
    """Return the JavaScript module of the notebook widget, with its styles."""
    style = json.dumps(styles(__name__, "explorer.css"))
    return f"const STYLE = {style};\n" + scripts(__name__, [*SCRIPTS, "widget.js"])
