"""Turn the repository's Markdown, which GitHub renders, into pages of the site: links, lists and tables."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "mkdocs.yml"
OUT = ROOT / "build" / "site"
PICTURES = ROOT / "build" / "gallery"
URLS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
PATTERNS = ("*.md", "docs/*.md", "notebooks/README.md", "benchmarks/results/*.md", "assets/*.md")
_NOT_PAGES = ("AGENTS.md", "README.zh.md")
FILES = [file.relative_to(ROOT).as_posix() for pattern in PATTERNS for file in sorted(ROOT.glob(pattern))]
FILES = [file for file in FILES if file not in _NOT_PAGES]
"""The files of the repository that are pages."""

_FENCED = re.compile(r"^((?:```|~~~).*?^(?:```|~~~)[^\S\n]*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
_LIST_ITEM = re.compile(r"\s*(?:- |\d+\. )")
_OWN_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "assets/CREDITS.md": "credits.md",
    "notebooks/README.md": "notebooks/index.md",
}


def page_of(file: str) -> str:
    """Return the page of the site that shows a file of the repository, or the file's own name if it is copied."""
    folder, name = os.path.split(file)
    if file in _OWN_PAGES:
        return _OWN_PAGES[file]
    if folder == "docs":
        return name
    if folder == "benchmarks/results":
        return f"benchmarks/{name}"
    return file.replace(".ipynb", ".md")


def as_page(file: str, text: str) -> str:
    """Return the Markdown of a file of the repository for the site: its links lead to pages of the site."""
    page = page_of(file)

    def mended(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(file), link[1]))  # noqa: PTH118, PTH120
        is_code = target.startswith(("benchmarks", "tests")) and not target.endswith(".md")
        return at_repository(target) if is_code or target in _NOT_PAGES else relative(page_of(target), page)

    return outside_code(text, lambda part: with_blank_lines(_LINK.sub(mended, part)))


def at_repository(file: str) -> str:
    """Return the address of a file of the repository, with an anchor such as "#L7" if it has one."""
    return f"{URLS['Repository']}/blob/main/{file}"


def relative(target: str, page: str) -> str:
    """Return the address of one page of the site as seen from another."""
    return Path(os.path.relpath(target, Path(page).parent)).as_posix()


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return the text with `change` applied to all parts between fenced blocks of code."""
    parts = _FENCED.split(text)
    return "".join(part if index % 2 else change(part) for index, part in enumerate(parts))


def with_blank_lines(text: str) -> str:
    """Return the text with a blank line before each list and table, and four spaces before nested items.

    GitHub needs neither, Python-Markdown needs both.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        before = lines[-1] if lines else ""
        starts = line.startswith("|") and not before.startswith("|")
        starts |= bool(_LIST_ITEM.match(line)) and not _LIST_ITEM.match(before) and not before.startswith(" ")
        if before.strip() and starts:
            lines.append("")
        lines.append(f"  {line}" if re.match(r"  (?:- |\d+\. )", line) else line)
    return "\n".join(lines)


def title_of(text: str) -> str:
    """Return the text of the first heading, without code marks."""
    return re.search(r"^# (.*)$", text, re.MULTILINE)[1].replace("`", "")  # type: ignore[index]
