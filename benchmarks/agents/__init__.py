"""Tasks for coding agents: a text, a check of the files that are written, and a reference solution.

    python -m benchmarks.agents                    list the tasks
    python -m benchmarks.agents 06 FOLDER          prepare a folder, and print the task for the agent
    python -m benchmarks.agents 06 FOLDER --check  check what the agent wrote into the folder

The agent gets the text and the folder, and may read the documentation. It must not see this folder.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parent


@dataclass(frozen=True)
class AgentTask:
    """A task: its text, and the code that prepares the folder, solves the task and checks the result."""

    name: str
    text: str
    given: str
    solution: str
    check: str

    def run(self, part: str, folder: Path) -> None:
        """Run the code "given", "solution" or "check" in a folder with the photos of the repository."""
        folder.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(folder / "assets"):
            (folder / "assets").symlink_to(HOME.parents[1] / "assets")
        with chdir(folder):
            sys.path.insert(0, str(folder))
            try:
                exec(compile(getattr(self, part), f"{self.name}: {part}", "exec"), {"__name__": part})  # noqa: S102
            finally:
                sys.path.remove(str(folder))


def read(path: Path) -> AgentTask:
    """Read a task from its file."""
    sections = dict(re.findall(r"^## (\w+)\n\n```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL))
    text = path.read_text().partition("\n## ")[0].partition("\n\n")[2].strip()
    return AgentTask(path.stem, text, sections.get("Given", ""), sections["Solution"], sections["Check"])


TASKS = [read(path) for path in sorted(HOME.glob("[0-9][0-9]_*.md"))]
