"""List, prepare and check tasks for coding agents; see the package."""

from __future__ import annotations

import sys
from pathlib import Path

from . import TASKS


def main(words: list[str]) -> None:
    if not words:
        print("\n".join(f"{task.name}: {task.text}" for task in TASKS))
        return
    (task,) = (task for task in TASKS if task.name.startswith(words[0]))
    if "--check" in words:
        task.run("check", Path(words[1]))
        print("the check passes")
    else:
        task.run("given", Path(words[1]))
        print(task.text)


if __name__ == "__main__":
    main(sys.argv[1:])
