"""The reference: a page per package, with the signature and the docstring of each public name."""

from __future__ import annotations

import inspect
import re
from functools import cache
from types import ModuleType
from typing import Any

import saliency

from . import methods
from .docstrings import as_markdown, signature
from .markdown import ROOT


@cache
def contents() -> dict[str, dict[str, Any]]:
    """Return the public names by page, and the object of each: names of `saliency` itself, and those of its modules."""
    public = {name: getattr(saliency, name) for name in dir(saliency) if not name.startswith("_")}
    own = {id(cls) for cls in methods.classes()}
    pages: dict[str, dict[str, Any]] = {}
    for name, value in public.items():
        if not isinstance(value, ModuleType) and id(value) not in own:
            home = getattr(value, "__module__", "saliency.methods").split(".")
            pages.setdefault(home[1], {})[name] = value
    seen = own | {id(value) for value in public.values()}
    for module in sorted(name for name, value in public.items() if isinstance(value, ModuleType)):
        listed = vars(public[module]).get("__all__")
        for name in listed or dir(public[module]):
            value = getattr(public[module], name)
            is_own = listed or getattr(value, "__module__", "").startswith(f"saliency.{module}")
            if not name.startswith("_") and is_own and callable(value) and id(value) not in seen:
                seen.add(id(value))
                pages.setdefault(module, {})[f"{module}.{name}"] = value
    return dict(sorted(pages.items()))


def page(package: str) -> str:
    """Return the path of the page of a package."""
    return f"reference/{package}.md"


def file_of(package: str) -> str:
    """Return the path of a package's folder or file in the repository."""
    patterns = (package, f"{package}.py", f"*/{package}")
    found = next(path for pattern in patterns for path in (ROOT / "saliency").glob(pattern))
    return found.relative_to(ROOT).as_posix()


@cache
def links() -> dict[str, str]:
    """Return the page and the anchor of each public name; a method has a page of its own."""
    found = {cls.__name__: methods.page(cls) for cls in methods.classes()}
    for package, names in contents().items():
        for name in names:
            found[name] = found[name.rpartition(".")[2]] = f"{page(package)}#{anchor(name)}"
    return found


def anchor(name: str) -> str:
    """Return the anchor of a name on its page."""
    return f"saliency.{name}"


def reference_page(package: str) -> str:
    """Return the page of a package."""
    row = re.search(rf"^\| .*?`{package}`.*? \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    described = [_entry(name, value, page(package)) for name, value in contents()[package].items()]
    lead = f"{row[1][0].upper()}{row[1][1:]}." if row else ""
    return "\n\n".join([f"# {package.capitalize()}", lead, *described]) + "\n"


def index_page() -> str:
    """Return the page that lists all public names."""
    rows = ["| name | summary |", "|---|---|"]
    for package, names in contents().items():
        for name, value in names.items():
            rows.append(f"| [`saliency.{name}`]({package}.md#{anchor(name)}) | {_summary(value)} |")
    lead = "All public names. Each [method](../methods/index.md) has a page of its own."
    return "\n\n".join(["# Reference", lead, "\n".join(rows)]) + "\n"


def _summary(value: Any) -> str:
    text = (inspect.getdoc(value) or "").partition("\n\n")[0] if callable(value) else ""
    return " ".join(text.split()).replace("|", r"\|")


def _entry(name: str, value: Any, here: str) -> str:
    """Return a heading, the signature and the docstring of a name, and its public members."""
    parts = [f"## `{name}` {{ #{anchor(name)} }}"]
    if not callable(value):
        return f"{parts[0]}\n\nA constant: `{type(value).__name__}`."
    parts += [
        f"```python\n{signature(f'saliency.{name}', value)}\n```",
        as_markdown(inspect.getdoc(value) or "", here, links()),
    ]
    for member, own in vars(value).items() if inspect.isclass(value) else ():
        function = own.fget if isinstance(own, property) else getattr(own, "__func__", own)
        if not member.startswith("_") and inspect.isfunction(function) and function.__doc__:
            short = f"{value.__name__}.{member}"
            call = short if isinstance(own, property) else signature(short, function)
            parts += [f"### `{short}` {{ #{anchor(name)}.{member} }}", f"```python\n{call}\n```"]
            parts.append(as_markdown(inspect.getdoc(function) or "", here, links()))
    return "\n\n".join(parts)
