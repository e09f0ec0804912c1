"""What all tests share."""

import pytest
import torch

# Two threads on two cores lose more to each other, and to a second test process, than they gain.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random weights in each run, whatever tests came before in this process."""
    torch.manual_seed(20_261_120)
