"""`keep_memory` makes glibc keep freed memory, and changes nothing on other systems."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from saliency.attribution.allocator import keep_memory

FAULTS = """
import ctypes, resource, sys
from concurrent.futures import ThreadPoolExecutor
{first}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
libc.free.argtypes = (ctypes.c_void_p,)

def run():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        block = libc.malloc(64 * 2**20)
        ctypes.memset(block, 1, 64 * 2**20)
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

run()
counts = [run()]
with ThreadPoolExecutor(1) as pool:
    pool.submit(run).result()
    counts.append(pool.submit(run).result())
print(*counts, "torch" in sys.modules)
"""

on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep memory")


def faults(first: str = "") -> tuple[int, int]:
    """Return the page faults of a second run of allocations, in the main thread and another one of a fresh process."""
    code = FAULTS.format(first=first)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    count, count_in_thread, with_torch = result.stdout.split()
    assert with_torch == "False"
    return int(count), int(count_in_thread)


@on_glibc
@pytest.mark.slow
def test_memory_that_is_freed_is_not_faulted_in_again() -> None:
    # Pages may be as large as 2 MiB.
    assert min(faults()) >= 4 * 32
    keep = "from saliency.attribution.allocator import keep_memory; assert keep_memory()"
    assert max(faults(keep)) <= 8
    assert max(faults(f"{keep} and keep_memory()")) <= 8


class Library:
    """A fake C library that records its calls."""

    def __init__(self, *refuses: int) -> None:
        self.told: list[tuple[int, int]] = []
        library = self

        class Mallopt:
            def __call__(self, option: int, value: int) -> int:
                library.told.append((option, value))
                return int(option not in refuses)

        self.mallopt = Mallopt()


def test_an_older_glibc_that_refuses_the_threshold_is_told_not_to_map_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.31"))
    for library, expected, kept in (
        (Library(), [-3, -1, -2, -8], True),
        (Library(-3), [-3, -4, -1, -2, -8], True),
        (Library(-3, -4), [-3, -4], False),
    ):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, library=library: library)
        assert keep_memory() is kept
        assert [option for option, _ in library.told] == expected


@pytest.mark.parametrize("system", ["darwin", "win32", "emscripten"])
def test_other_systems_are_left_alone(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(sys, "platform", system)
    assert keep_memory() is False
    assert not library.told


@pytest.mark.parametrize("name", ["", "libc", "musl"])
def test_other_c_libraries_are_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "libc_ver", lambda: (name, ""))
    assert keep_memory() is False
    assert not library.told
