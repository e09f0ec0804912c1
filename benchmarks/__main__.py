"""Every benchmark in one command: `python -m benchmarks` prints the tables and keeps them in benchmarks/results/.

Behind it stand the names of those that are wanted; without any, all of them run, for an hour or so.

Keep the machine quiet meanwhile: a busy neighbour shows in every figure.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks import folder, imports, layer_table, memory, passes, passes_memory, recording, render, speed

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "torchvision", "timm", "captum", "grad-cam", "torchcam", "matplotlib", "opencv-python-headless")


class Tee(io.StringIO):
    """Keeps what is printed, and shows it."""

    def write(self, text: str) -> int:
        sys.__stdout__.write(text) if sys.__stdout__ else None
        return super().write(text)


def machine() -> str:
    """What the figures were measured on."""
    found = []
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    processor = "unknown processor"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    where = f"{processor}, {os.cpu_count()} cores, no accelerator" if not torch.cuda.is_available() else processor
    return f"Measured on {where}, Python {platform.python_version()}, {', '.join(found)}.\n"


def keep(name: str, benchmark: Callable[[], None]) -> None:
    """Run a benchmark and keep what it prints."""
    printed = Tee()
    with contextlib.redirect_stdout(printed):
        benchmark()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(f"{machine()}\n{printed.getvalue().strip()}\n")


BENCHMARKS: dict[str, Callable[[], None]] = {
    "imports": imports.main,
    "render": render.main,
    "memory": lambda: memory.main([]),
    "speed": lambda: speed.main([]),
    "recording": lambda: recording.main([]),
    "layer_table": lambda: layer_table.main([]),
    "passes": lambda: passes.main([]),
    "passes_memory": lambda: passes_memory.main([]),
    "folder": lambda: folder.main([]),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which (default: all): {', '.join(BENCHMARKS)}")
    named = parser.parse_args().names or list(BENCHMARKS)
    if unknown := [each for each in named if each not in BENCHMARKS]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    for each in named:
        keep(each, BENCHMARKS[each])
