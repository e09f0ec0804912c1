"""Names from other toolkits and their equivalents here, for error messages."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from functools import cache
from importlib import resources

from .errors import did_you_mean


@cache
def table(name: str) -> dict[str, list[str]]:
    """Return a table of `aliases.toml`: for each name or advice here, the names of others that it replaces."""
    tables = tomllib.loads(resources.files(__package__).joinpath("aliases.toml").read_text(encoding="utf-8"))
    return {ours: theirs.split() for ours, theirs in tables[name].items()}


def matches(name: str, table_name: str) -> list[str]:
    """Return the names or advice of this toolkit for a name from elsewhere, from a table of `aliases.toml`."""
    return [ours for ours, theirs in table(table_name).items() if name in theirs]


def option_hint(name: str, names: Collection[str]) -> str:
    """Return the end of an error about an unknown option, such as `; it is called steps here`."""
    for ours in matches(name, "options"):
        if ours in names:
            difference = ", as a fraction of the range of each image instead of in units of the input"
            return f"; it is called {ours} here{difference if name == 'stdevs' else ''}"
    for advice in matches(name, "advice"):
        return f"; {advice}"
    return did_you_mean(name, names) or (f"; the options are {', '.join(names)}" if names else "; there are no options")


def public_hint(name: str, names: Collection[str]) -> str:
    """Return the end of an error about an unknown public name, such as `; did you mean "GradCAM"?`."""
    for ours in matches(name, "public"):
        return f"; it is called {ours} here"
    for nearest in matches(name, "absent"):
        return f"; not offered here; nearest: {nearest}"
    return did_you_mean(name, names)


def result_hint(name: str) -> str:
    """Return the end of an error about an unknown attribute of an explanation."""
    return next((f"; {advice}" for advice in matches(name, "result")), "")
