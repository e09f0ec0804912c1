"""Signatures and docstrings as Markdown, with links between public names."""

from __future__ import annotations

import inspect
import re
from typing import Any

from .markdown import outside_code, relative, with_blank_lines

_SECTIONS = ("Args", "Attributes", "Raises", "Warns", "Returns", "Yields")
_TITLES = {"Args": "Parameters"}
_ENTRY = re.compile(r"^ {4}(\S[^:\n]*): (.*(?:\n {8}.*)*)", re.MULTILINE)
_NAME = re.compile(r"(?<!\[)`(?:saliency\.)?((?:\w+\.)?\w+)(?:\(\))?`")


def as_markdown(docstring: str, page: str, links: dict[str, str]) -> str:
    """Return a docstring as Markdown. `links` has the page and anchor of each public name."""
    text = "\n\n".join(map(_paragraph, docstring.split("\n\n")))
    return outside_code(text, lambda part: _linked(_escaped(part), page, links))


def entries(docstring: str, title: str) -> dict[str, str]:
    """Return the entries of a section of a docstring by name, each on one line."""
    section = next((part for part in docstring.split("\n\n") if part.startswith(f"{title}:\n")), "")
    return {name: " ".join(meaning.split()) for names, meaning in _ENTRY.findall(section) for name in names.split(", ")}


def _paragraph(text: str) -> str:
    """Return one paragraph: a section becomes a list, "Values: ..." a paragraph with a bold word, an example code."""
    title, colon, rest = text.partition(":")
    if colon and title in _SECTIONS and rest.startswith("\n"):
        entries = [f"- `{name}`: {' '.join(meaning.split())}" for name, meaning in _ENTRY.findall(rest)]
        return f"**{_TITLES.get(title, title)}**\n\n" + ("\n".join(entries) or inspect.cleandoc(rest))
    if title in ("Example", "Examples") and rest.startswith("\n"):
        return f"**{title}**\n\n```python\n{inspect.cleandoc(rest)}\n```"
    if title in ("Values", "Source", *_SECTIONS) and rest.startswith(" "):
        return f"**{title}:**{' '.join(['', *rest.split()])}"
    if text.startswith("    "):
        return f"```python\n{inspect.cleandoc(text)}\n```"
    return with_blank_lines(text)


def _escaped(text: str) -> str:
    """Return the text with "<", and with "*" between spaces, as characters instead of markup, except in code marks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if index % 2 else part.replace("<", "&lt;").replace(" * ", r" \* ") for index, part in enumerate(parts)
    )


def _linked(text: str, page: str, links: dict[str, str]) -> str:
    """Return the text with a link at each public name in code marks, except names that the page itself describes."""

    def link(name: re.Match[str]) -> str:
        target, _, anchor = links.get(name[1], page).partition("#")
        return name[0] if target == page else f"[{name[0]}]({relative(target, page)}{'#' * bool(anchor)}{anchor})"

    return _NAME.sub(link, text)


class _Verbatim:
    """Annotation that is printed as it is written, without quotes."""

    def __init__(self, text: Any) -> None:
        self.text = text if isinstance(text, str) else inspect.formatannotation(text)

    def __repr__(self) -> str:
        return self.text


def signature(name: str, function: Any) -> str:
    """Return the call of a function or class with its parameters, on several lines if it is long."""
    try:
        own = inspect.signature(function)
    except (TypeError, ValueError):
        return name
    empty = inspect.Signature.empty
    parameters = [
        each if each.annotation is empty else each.replace(annotation=_Verbatim(each.annotation))
        for each in own.parameters.values()
        if each.name != "self"
    ]
    returned = empty if own.return_annotation in (empty, None, "None") else _Verbatim(own.return_annotation)
    text = str(inspect.Signature(parameters, return_annotation=returned))
    if len(name + text) > 100:
        shown = [str(inspect.Signature([each]))[1:-1] for each in parameters]
        kinds = [each.kind for each in parameters]
        if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
            first = kinds.index(inspect.Parameter.KEYWORD_ONLY)
            shown = [*shown[:first], "*", *(one.removeprefix("*, ") for one in shown[first:])]
        text = "(\n    " + ",\n    ".join(shown) + ",\n)" + (f" -> {returned!r}" if returned is not empty else "")
    return name + text
