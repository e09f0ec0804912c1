"""What all tests share."""

import signal
from collections.abc import Iterator

import pytest
import torch

# Two threads on two cores lose more to each other, and to a second test process, than they gain.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random weights in each run, whatever tests came before in this process."""
    torch.manual_seed(20_261_120)


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where this process was started to ignore it, as by nohup."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
