"""Set-up that all tests share, and the quick tier."""

import gc
import math
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec

import pytest
import torch

from tests.registry import restored_registry

# A quick environment has no Jupyter.
collect_ignore = [] if find_spec("nbformat") else ["test_notebooks.py", "test_site.py"]

# Two threads on two cores lose more to each other, and to a second test process, than they gain.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--quick` and `--share`."""
    parser.addoption("--quick", action="store_true", help="no slow tests, and a sample of each parametrised test")
    parser.addoption("--share", action="append", default=[], metavar="FILE=N", help="sample one case in N of a file")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run slow tests first. With `--quick`, sample: of n cases of a test the square root of n, and at least three.

    `--share FILE=N` samples one case in N of a file, or more.
    """
    # Notebooks take longest, so they come first and no process ends on one.
    items.sort(key=lambda item: (item.path.name != "test_notebooks.py", item.get_closest_marker("slow") is None))
    if not config.getoption("--quick"):
        return
    options = [share.split("=") for share in config.getoption("--share")]
    shares = {config.rootpath / file: int(share) for file, share in options}
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    quick = set()
    for cases in tests.values():
        sampled = max(min(len(cases), 3), math.isqrt(len(cases)))
        if cases[0].path in shares:
            sampled = max(sampled, len(cases) // shares[cases[0].path])
        sample = (cases[number * len(cases) // sampled] for number in range(sampled))
        quick |= {case for case in sample if case.get_closest_marker("slow") is None}
    config.hook.pytest_deselected(items=[item for item in items if item not in quick])
    items[:] = [item for item in items if item in quick]


@lru_cache(1)
def _freeze(hundreds_of_modules: int) -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _frozen() -> None:
    """Leave imported modules out of each later collection of garbage, which takes half a second otherwise."""
    _freeze(len(sys.modules) // 100)


def pytest_unconfigure() -> None:
    """Let the interpreter free all modules at its end."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random weights in each run, whatever tests came before in this process."""
    torch.manual_seed(20_261_120)


@pytest.fixture
def _registry_restored() -> Iterator[None]:
    """Methods that a test defines do not reach the other tests."""
    with restored_registry():
        yield


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where this process was started to ignore it, as by nohup."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
