"""Tables and images as one self-contained HTML page."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image

from ..inspection.tables import escaped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THUMBNAIL = 240  # pixels of the longer side of the image


class Section(NamedTuple):
    """Part of a page: a heading, an explanation, and a table or figure as HTML."""

    title: str
    text: str
    body: str


def page(title: str, facts: Mapping[str, str], sections: Sequence[Section], image: str = "") -> str:
    """Return the HTML of the page.

    Args:
        title: The heading.
        facts: Facts about the model and its input, by label.
        sections: Sections in order. Their texts are escaped here; their bodies are HTML.
        image: An image as HTML, or "".
    """
    listed = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(fact)}</dd></div>" for name, fact in facts.items())
    links = "".join(f'<a href="#part-{at}">{escaped(section.title)}</a>' for at, section in enumerate(sections))
    parts = "\n".join(
        f'<section id="part-{at}"><h2>{escaped(title)}</h2><p>{escaped(text)}</p>\n{body}</section>'
        for at, (title, text, body) in enumerate(sections)
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><header>{image}<div><h1>{escaped(title)}</h1><dl>{listed}</dl>"
        f"{f'<nav>{links}</nav>' if len(sections) > 1 else ''}</div></header>\n{parts}\n</body></html>\n"
    )


def image_html(image: Image.Image, text: str) -> str:
    """Return a small copy of an image as HTML."""
    small = image.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, format="JPEG", quality=88)
    return _embedded(buffer, "image/jpeg", text)


def figure_html(figure: Figure, text: str) -> str:
    """Return a matplotlib figure as HTML."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, facecolor="white")
    return _embedded(buffer, "image/png", text)


def _embedded(buffer: io.BytesIO, kind: str, text: str) -> str:
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img src="data:{kind};base64,{data}" alt="{escaped(text)}">'


_STYLE = """
:root { color-scheme: light dark; --saliency-ground: #fff; --ink: #1c2128; --quiet: #59636e; --line: #d1d9e0; }
@media (prefers-color-scheme: dark) {
  :root { --saliency-ground: #14171c; --ink: #dde3ea; --quiet: #98a2ad; --line: #333b45; }
}
body { margin: 2rem clamp(1rem, 3vw, 3rem) 4rem; background: var(--saliency-ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; width: fit-content; min-width: min(60rem, 94%); }
/* A wide table widens the page; text and figures stay within the window. */
header { display: flex; flex-wrap: wrap; gap: 1rem 1.5rem; align-items: flex-start; max-width: 92vw; }
header > div { flex: 1 1 16rem; min-width: 0; }
header > img { max-width: 180px; max-height: 180px; border-radius: 6px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .6rem; }
h1, dd, section > p, .saliency-table p { overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .2rem; }
dl { display: flex; flex-wrap: wrap; gap: .3rem 2rem; margin: 0; }
dt { color: var(--quiet); font-size: .8rem; line-height: 1.2; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin-top: 1rem; }
a { color: inherit; text-underline-offset: .2em; text-decoration-color: var(--quiet); }
section > p { color: var(--quiet); margin: 0 0 .6rem; max-width: min(60rem, 92vw); }
section > img { max-width: min(62rem, 92vw); border-radius: 6px; border: 1px solid var(--line); }
section .saliency-table > div { max-height: none; max-width: none; overflow: visible; }
section .saliency-table p { color: var(--quiet); max-width: min(60rem, 88vw); }
/* On a phone a table scrolls within its own frame. */
@media screen and (max-width: 48rem) {
  body { width: auto; min-width: 0; }
  section .saliency-table > div { max-height: 85vh; max-width: 100%; overflow: auto; }
}
@media print { .saliency-table thead th { position: static; } }
"""
