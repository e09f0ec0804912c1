"""Chunk size, progress bar and listener of methods with many passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ..hooks.call import bound, current_call
from .explanation import BatchAttribution

Partial = Callable[[], BatchAttribution | None]
"""Returns the result of the passes so far, in a call with one image and one target; None if there is none yet."""
Listener = Callable[[float, Partial], None]
"""Called between the chunks of passes with the share that is done, 0 to 1, and the result so far. It may raise."""

CHUNK_CPU, CHUNK_FORWARD_CPU, CHUNK_WINDOW_CPU, CHUNK_ACCELERATOR = 4 * 224**2, 2 * 224**2, 16 * 224**2, 64 * 224**2
"""Pixels of an automatic chunk. They are fixed, so that the same call gives the same bits.

Larger chunks are not reliably faster on a CPU: glibc maps blocks above 32 MiB, such as an activation of 16 images of
resnet50, anew at each pass, and the system clears their pages. That took 86 of 323 ms per pass, and none after
`keep_memory`. Chunks that follow from the largest tensor of the model (8 for resnet50) gained at most 4 %.
Forwards without gradients free each activation at once, and glibc returns what exceeds `keep_small_heap`. RISE on
EfficientNet-Lite0 takes 3.0 s with chunks of 2, and 3.3 to 4.9 s with chunks of 4. Forwards within windows compute a
part of each activation: Occlusion takes 1.77 s with chunks of 16, and 2.23 s with chunks of 4.
"""
CHUNK_BYTES_CPU = 2**24
"""Bytes of the largest activation of a chunk that runs only the last layers of a model.

A pass from layer3 of resnet50 on takes 16.1 ms in chunks of 16 and 20.7 ms in chunks of 4. If the activation is larger,
as after the first blocks of EfficientNet-Lite0 or in ViT-B, chunks of 16 take up to 30 % longer than chunks of 4.
"""
MAX_CHUNK_CPU, MAX_CHUNK_ACCELERATOR = 16, 256
"""Largest automatic number of passes of a chunk, for small images."""

BAR_DELAY = 1.0
"""Delay in seconds before an automatic progress bar appears."""


def chunk_size(x: Tensor, on_cpu: int = CHUNK_CPU) -> int:
    """Return the number of passes of inputs like `x` (1, C, H, W) in a chunk, with `on_cpu` pixels on a CPU."""
    is_cpu = x.device.type == "cpu"
    pixels, most = (on_cpu, MAX_CHUNK_CPU) if is_cpu else (CHUNK_ACCELERATOR, MAX_CHUNK_ACCELERATOR)
    return max(1, min(most, pixels // x.shape[2:].numel()))


def progress_bar(label: str, total: int, unit: str, progress: bool | None) -> Any:
    """Return a progress bar. By default, terminals and notebooks show one after `BAR_DELAY`."""
    from tqdm.auto import tqdm

    delay, disable = 0 if progress else BAR_DELAY, None if progress is None else not progress
    return tqdm(desc=label, total=total, disable=disable, delay=delay, unit=unit, leave=False, dynamic_ncols=True)


def listening(listener: Listener) -> AbstractContextManager[None]:
    """Call a listener between the chunks of all passes in a block, in this thread.

    An error that it raises ends the call, and the model is left as after any other error.
    """
    return bound(listener=listener)


def current_listener() -> Listener | None:
    """Return the listener of the innermost block, or None."""
    return current_call().listener
