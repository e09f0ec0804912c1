"""What runs by default: one method of each family, and no test that is marked slow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saliency import METHODS
from tests.conftest import pytest_collection_modifyitems
from tests.selection import family_of, of_each_family


def test_one_method_of_each_family_runs_by_default() -> None:
    cases = of_each_family()
    assert sorted(case.values[0] for case in cases) == sorted(METHODS)
    chosen = [family_of(case.values[0]) for case in cases if not case.marks]
    assert len(chosen) == len(set(chosen))
    assert set(chosen) == set(map(family_of, METHODS))
    assert family_of("chefer_lrp") == family_of("attention_rollout") == "saliency.methods.token_attention"


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
