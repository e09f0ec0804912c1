"""`saliency completion`: completion in bash, zsh and fish.

The shell runs the command with the line so far in `COMP_LINE`. Names of methods are read from source files, since
importing torch takes seconds.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from . import COMMANDS
from .arguments import ALL, ARGUMENTS, Argument

SCRIPTS = {
    "bash": "complete -o default -C saliency saliency",
    "zsh": "autoload -Uz compinit bashcompinit; compinit; bashcompinit; complete -o default -C saliency saliency",
    "fish": "complete -c saliency -a '(COMP_LINE=(commandline -cp) saliency)'",
}


def run(arguments: argparse.Namespace, screen: object) -> int:
    """Print the script of a shell."""
    print(SCRIPTS[arguments.shell])
    return 0


def candidates(line: str) -> list[str]:
    """Return the words that can complete the last word of a line; none for file names, which the shell completes."""
    *words, last = line.split(" ")
    words = list(filter(None, words))[1:]
    if not words:
        names = [*COMMANDS, "--help", "--version"]
    else:
        of_command = COMMANDS[words[0]].options.split() if words[0] in COMMANDS else []
        arguments = [one for group in ARGUMENTS.values() for one in group if one.name in of_command]
        flags = ["--help", *(flag for one in arguments for flag in one.flags if flag.startswith("-"))]
        names = flags if last.startswith("-") else _values(arguments, words)
    return [name for name in dict.fromkeys(names) if name.startswith(last)]


def _values(arguments: Sequence[Argument], words: Sequence[str]) -> list[str]:
    """Return the values of the option before the cursor. Only --method takes several."""
    before = next(word for word in reversed(words) if word.startswith("-") or word == words[0])
    for one in arguments:
        flags = one.flags if one.name.startswith("-") else words[:1]
        if before in flags and (before == words[-1] or one.name == "--method"):
            return method_names() if one.name in ("--method", "METHOD") else one.keywords.get("choices", [])
    return []


def method_names() -> list[str]:
    """Return the names of all methods and "all", without importing them."""
    sources = sorted(Path(__file__).parents[1].joinpath("methods").glob("*.py"))
    return [
        *(name for file in sources for name in re.findall(r'(?m)^    name = "(\w+)"', file.read_text("utf-8"))),
        ALL,
    ]
