"""What runs by default: one method of each family, and no test that is marked slow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saliency import METHODS
from tests.conftest import pytest_collection_modifyitems
from tests.selection import of_each_family


def test_one_method_of_each_family_runs_by_default() -> None:
    cases = of_each_family()
    assert sorted(case.values[0] for case in cases) == sorted(METHODS)
    chosen = [METHODS[case.values[0]].__module__ for case in cases if not case.marks]
    assert len(chosen) == len(set(chosen))
    assert set(chosen) == {method.__module__ for method in METHODS.values()}


@pytest.mark.parametrize("runs_all", [False, True])
def test_slow_tests_run_with_all_only(runs_all: bool) -> None:
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config: Any = SimpleNamespace(getoption=lambda name: runs_all, hook=hook)
    fast, slow, notebook = item("test_a.py"), item("test_b.py", "slow"), item("test_notebooks.py", "slow")
    items = [fast, slow, notebook]
    pytest_collection_modifyitems(config, items)
    assert items == ([notebook, slow, fast] if runs_all else [fast])


def item(file: str, *markers: str) -> Any:
    return SimpleNamespace(path=Path(file), get_closest_marker=lambda name: name in markers)
