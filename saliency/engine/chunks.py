"""The number of passes that run at once: chosen by the device, the image and the model, never by a clock.

The same call therefore gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..hooks.autograd_graph import DispatchMode
from ..hooks.pytree import tree_tensors

LARGEST_TENSOR_CPU = 2**25
"""Bytes of the largest tensor of an automatic chunk on a CPU.

glibc maps each larger block anew and returns it when it is freed, so the system clears its pages again at each pass.
This takes up to a third of the time of a pass of resnet50, and more than larger chunks gain.
"""
MAX_CHUNK_CPU = 16
"""Largest automatic number of passes of a chunk on a CPU. Larger chunks are not faster, and take more memory."""

PIXELS_ACCELERATOR, MAX_CHUNK_ACCELERATOR = 64 * 224**2, 256
"""Pixels of an automatic chunk on an accelerator, and its largest number of passes for small images."""


class LargestTensor(DispatchMode):
    """Context that finds the largest tensor of a forward pass on a CPU. It changes no values.

    The compiler does not run inside it, so a compiled model runs as it was before compilation.

    Tensors whose first dimension is not the batch, such as weights, do not count. So the result for one image does not
    depend on the other images of its batch.

    Args:
        x: (N, C, H, W) the batch.

    Attributes:
        bytes: The size of the largest tensor, per image.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self._rows, self.bytes = len(x), x[:1].nbytes

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation and compare the size of its results."""
        output = op(*args, **(kwargs or {}))
        for tensor in tree_tensors(output):
            is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
            if is_plain and tensor.dim() and len(tensor) == self._rows:
                # Expanded tensors take less memory than their shape, and slices keep the whole alive.
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes() // self._rows)
        return output


def chunk_size(x: Tensor, largest: int) -> int:
    """Return how many passes run at once: on a CPU, a power of two, so that it divides usual numbers of passes.

    Args:
        x: (1, C, H, W) the image.
        largest: Bytes of the largest tensor of one pass. On accelerators, the size of the image decides.
    """
    if x.device.type != "cpu":
        return max(1, min(MAX_CHUNK_ACCELERATOR, PIXELS_ACCELERATOR // x.shape[2:].numel()))
    fitting = max(1, min(MAX_CHUNK_CPU, LARGEST_TENSOR_CPU // largest))
    return 1 << (fitting.bit_length() - 1)
