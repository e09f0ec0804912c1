"""Set-up that all tests share, and what runs by default."""

import gc
import signal
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec

import pytest
import torch

from tests.registry import restored_registry

# The environment of the oldest PyTorch has no Jupyter.
collect_ignore = [] if find_spec("nbformat") else ["test_notebooks.py", "test_site.py"]

# Two threads on two cores lose more to each other, and to a second test process, than they gain.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--all`."""
    parser.addoption("--all", action="store_true", help="run every test, also those marked slow")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while tests are collected, which takes seconds and frees little."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked slow, unless `--all` is given. With `--all`, they run first."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    if not config.getoption("--all"):
        config.hook.pytest_deselected(items=slow)
        slow = []
    others = [item for item in items if not item.get_closest_marker("slow")]
    # Notebooks take longest, so they come first and no process ends on one.
    items[:] = sorted(slow + others, key=lambda item: item.path.name != "test_notebooks.py")


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
    """The same random weights in each run, whatever tests came before in this process.

    `torch.manual_seed` also records a call for CUDA with its whole stack, which takes half a millisecond.
    """
    torch.default_generator.manual_seed(20_261_120)


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
