"""Run benchmarks: `python -m benchmarks [NAME ...]` prints the tables and writes them to benchmarks/results/.

Without names, all benchmarks run, which takes about two hours. Run nothing else on the machine meanwhile: other
processes change all results.
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

from benchmarks import (
    boxes,
    claims,
    export,
    folder,
    imports,
    layer_table,
    memory,
    metrics,
    passes,
    passes_memory,
    recording,
    relevance,
    render,
    serve,
    speed,
)

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "captum",
    "zennit",
    "grad-cam",
    "onnxruntime",
    "torchcam",
    "quantus",
    "matplotlib",
    "opencv-python",
)


class Tee(io.StringIO):
    """Stream that stores the printed text and also prints it."""

    def write(self, text: str) -> int:
        sys.__stdout__.write(text) if sys.__stdout__ else None
        return super().write(text)


def machine() -> str:
    """Return one line on the machine and the versions of the packages."""
    versions = []
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    processor = "unknown processor"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    where = f"{processor}, {os.cpu_count()} cores, no accelerator" if not torch.cuda.is_available() else processor
    return f"Measured on {where}, Python {platform.python_version()}, {', '.join(versions)}.\n"


def run_and_save(name: str, benchmark: Callable[[], None]) -> None:
    """Run a benchmark and write its output to a file in `RESULTS`."""
    output = Tee()
    with contextlib.redirect_stdout(output):
        benchmark()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(f"{machine()}\n{output.getvalue().strip()}\n")


BENCHMARKS: dict[str, Callable[[], None]] = {
    "imports": imports.main,
    "render": render.main,
    "memory": lambda: memory.main([]),
    "speed": lambda: speed.main([]),
    "relevance": lambda: relevance.main([]),
    "recording": lambda: recording.main([]),
    "layer_table": lambda: layer_table.main([]),
    "passes": lambda: passes.main([]),
    "passes_memory": lambda: passes_memory.main([]),
    "boxes": lambda: boxes.main([]),
    "folder": lambda: folder.main([]),
    "metrics": lambda: metrics.main([]),
    "serve": serve.main,
    "export": lambda: export.main([]),
    "claims": claims.main,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"benchmark to run (default: all): {', '.join(BENCHMARKS)}"
    )
    named = parser.parse_args().names or list(BENCHMARKS)
    if unknown := [name for name in named if name not in BENCHMARKS]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    for name in named:
        run_and_save(name, BENCHMARKS[name])
