"""Tasks for coding agents can be solved, and their checks fail without a solution; what agents read is true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

import saliency
from benchmarks.agents import TASKS, AgentTask
from saliency.cli import COMMANDS
from tests.selection import case

ROOT = Path(__file__).parents[1]
TEXTS = [ROOT / "AGENTS.md", ROOT / "skills" / "saliency" / "SKILL.md"]


@pytest.mark.parametrize("task", [case(task, by_default=task.name[:2] in ("04", "06"), id=task.name) for task in TASKS])
@pytest.mark.filterwarnings("ignore::saliency.errors.SaliencyWarning")
def test_the_solution_of_a_task_passes_its_check_and_nothing_does_not(task: AgentTask, tmp_path: Path) -> None:
    task.run("given", tmp_path)
    with pytest.raises(Exception):  # noqa: B017, PT011 - of any kind: the file is missing
        task.run("check", tmp_path)
    task.run("solution", tmp_path)
    task.run("check", tmp_path)


def test_there_are_twenty_tasks_in_short_texts() -> None:
    assert len(TASKS) == 20
    assert all(40 < len(task.text) < 400 for task in TASKS)
    for task in TASKS:
        ast.parse(task.solution)


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_the_names_that_agents_read_exist(text: Path) -> None:
    page = text.read_text()
    for name in set(re.findall(r"saliency\.([A-Za-z_]\w*)", page)) - {"pyi"}:
        assert hasattr(saliency, name), name
    for command in set(re.findall(r"^saliency (\w+)|`saliency (\w+)", page, re.MULTILINE)):
        assert "".join(command) in COMMANDS, command
    for file in re.findall(r"`((?:docs|benchmarks|tests|saliency|skills)/[\w./]+\.\w+)`", page):
        assert (ROOT / file).exists(), file
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        ast.parse(block)


def test_the_skill_has_the_facts_by_which_agents_find_it() -> None:
    facts = yaml.safe_load((ROOT / "skills" / "saliency" / "SKILL.md").read_text().split("---\n")[1])
    assert facts["name"] == "saliency"
    assert 100 < len(facts["description"]) < 1024
