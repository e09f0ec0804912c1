"""Every benchmark in one command: `python -m benchmarks` prints the tables and keeps them in benchmarks/results/.

Keep the machine quiet meanwhile: a busy neighbour shows in every figure.
"""

from __future__ import annotations

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


if __name__ == "__main__":
    keep("imports", imports.main)
    keep("render", render.main)
    keep("memory", lambda: memory.main([]))
    keep("speed", lambda: speed.main([]))
    keep("recording", lambda: recording.main([]))
    keep("layer_table", lambda: layer_table.main([]))
    keep("passes", lambda: passes.main([]))
    keep("passes_memory", lambda: passes_memory.main([]))
    keep("folder", lambda: folder.main([]))
