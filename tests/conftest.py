"""What all tests share."""

import torch

# Two threads on two cores lose more to each other, and to a second test process, than they gain.
torch.set_num_threads(1)
