"""Tables and pictures as one page of HTML that needs nothing but itself."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image

from ..inspection.tables import escaped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THUMB = 240  # pixels: the longer side of the photo


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page: a heading, what to see in it, and a table or a picture as HTML."""

    title: str
    text: str
    body: str


def page(title: str, facts: Mapping[str, str], sections: Sequence[Section], photo: str = "") -> str:
    """The page.

    Args:
        title: Its heading.
        facts: What the tables were made of, by what that is called.
        sections: One after the other; all texts are escaped here, bodies are HTML.
        photo: A picture as HTML.
    """
    listed = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(each)}</dd></div>" for name, each in facts.items())
    links = "".join(f'<a href="#part-{at}">{escaped(each.title)}</a>' for at, each in enumerate(sections))
    parts = "\n".join(
        f'<section id="part-{at}"><h2>{escaped(each.title)}</h2><p>{escaped(each.text)}</p>\n{each.body}</section>'
        for at, each in enumerate(sections)
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><header>{photo}<div><h1>{escaped(title)}</h1><dl>{listed}</dl>"
        f"{f'<nav>{links}</nav>' if len(sections) > 1 else ''}</div></header>\n{parts}\n</body></html>\n"
    )


def picture_html(picture: Image.Image, text: str) -> str:
    """A small copy of a photo as HTML."""
    small = picture.convert("RGB")
    small.thumbnail((THUMB, THUMB))
    written = io.BytesIO()
    small.save(written, format="JPEG", quality=88)
    return _embedded(written.getvalue(), "image/jpeg", text)


def figure_html(figure: Figure, text: str) -> str:
    """A matplotlib figure as HTML."""
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=160, facecolor="white")
    return _embedded(written.getvalue(), "image/png", text)


def _embedded(data: bytes, kind: str, text: str) -> str:
    return f'<img src="data:{kind};base64,{base64.b64encode(data).decode()}" alt="{escaped(text)}">'


_STYLE = """
:root { color-scheme: light dark; --saliency-ground: #fff; --ink: #1c2128; --quiet: #59636e; --line: #d1d9e0; }
@media (prefers-color-scheme: dark) {
  :root { --saliency-ground: #14171c; --ink: #dde3ea; --quiet: #98a2ad; --line: #333b45; }
}
body { margin: 2rem clamp(1rem, 3vw, 3rem) 4rem; background: var(--saliency-ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; width: fit-content; min-width: min(60rem, 94%); }
/* A wide table widens the page; what is read or looked at stays in sight. */
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
/* On a phone a table is moved within its own frame, and the page stays where it is. */
@media screen and (max-width: 48rem) {
  body { width: auto; min-width: 0; }
  section .saliency-table > div { max-height: 85vh; max-width: 100%; overflow: auto; }
}
@media print { .saliency-table thead th { position: static; } }
"""
