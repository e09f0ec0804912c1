"""Keep freed memory in the process instead of returning it to the system after every pass."""

from __future__ import annotations

import ctypes
import platform
import sys

# These numbers from glibc's malloc.h are part of its binary interface.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -2, -3, -4, -8
_NEVER = 2**30  # bytes
_PAD = 2**26


def keep_memory() -> bool:
    """Keep the memory that this process frees, and return whether this succeeded.

    By default, glibc maps each block above 32 MiB and returns it when it is freed. The system then clears and maps its
    pages again at each pass. This call raises three limits of glibc (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD).
    They hold for the whole process and stay raised. The call can be repeated. Blocks of a gigabyte and more are still
    returned.

    Only the heap of the main thread holds blocks above 64 MiB, so threads that start after this call share it, with one
    lock (M_ARENA_MAX). Call it before any threads start: it has no effect once the process has more than eight heaps.

    The cost: the process keeps up to 1 GiB of free memory at the end of its heap, and all free memory below a block
    that is in use. Peak memory grew by 0 to 30 %.

    The gain, in ms of CPU time per image, before and after (one thread, AMD EPYC, glibc 2.36; fresh processes
    that called no method before, see `keep_small_heap`):

    | batch | EfficientNet-Lite0 forward | forward and backward | resnet50 forward | forward and backward |
    |---|---|---|---|---|
    | 1 | 26, 17 | 49, 47 | 82, 82 | 191, 177 |
    | 4 | 27, 18 | 53, 42 | 78, 76 | 167, 164 |
    | 16 | 34, 13 | 57, 37 | 90, 55 | 146, 123 |

    Returns:
        True if glibc keeps memory from now on; False on other systems and C libraries, where nothing is changed.
    """
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return False
    # Take the function of the running process, since another allocator may be in use.
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    # Before 2.35, glibc refuses a threshold above 32 MiB, but accepts a limit of 0 mapped blocks.
    is_raised = mallopt(_MMAP_THRESHOLD, _NEVER) or mallopt(_MMAP_MAX, 0)
    is_kept = is_raised and mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_TOP_PAD, _PAD)
    return bool(is_kept and mallopt(_ARENA_MAX, 1))
