"""Files for language models: `llms.txt` lists the pages, `llms-full.txt` has the text of guides and reference."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .markdown import title_of


def llms(pages: Mapping[str, str], navigation: list[dict[str, Any]], summary: str) -> dict[str, str]:
    """Return both files by name. https://llmstxt.org describes the first."""
    lines = ["# saliency", "", f"> {summary}", ""]
    full = []
    for section in navigation:
        for heading, entries in section.items():
            lines.append(f"## {heading}\n")
            for page in _pages(entries):
                lines.append(f"- [{title_of(pages[page])}]({page.replace('.md', '.html')}){_lead(pages[page])}")
                if not page.startswith(("notebooks/", "benchmarks/", "changelog")):
                    full.append(pages[page])
            lines.append("")
    return {"llms.txt": "\n".join(lines), "llms-full.txt": "\n\n".join(full)}


def _lead(text: str) -> str:
    """Return the first sentence of a page after a colon, if it begins with one."""
    _, paragraph, *_ = [*text.split("\n\n"), ""]
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    sentence = re.match(r"(?!```)[A-Z`].*?[.?](?= |$)", plain)
    return f": {sentence[0]}" if sentence else ""


def _pages(entries: Any) -> Iterator[str]:
    """Yield the pages of a part of the navigation."""
    if isinstance(entries, str):
        yield entries
    else:
        for entry in entries:
            yield from _pages(entry if isinstance(entry, str) else next(iter(entry.values())))
