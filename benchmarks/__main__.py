"""Run benchmarks: `python -m benchmarks [NAME ...]` prints the tables and writes them to benchmarks/results/.

Without names, all benchmarks run, which takes about 100 minutes on two cores. Run nothing else on the machine
meanwhile: other processes change all results. Each file is written when its benchmark ends, so an interrupted run is
resumed by the names that are left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

BENCHMARKS = (
    "relevance",
    "attention",
    "speed",
    "passes",
    "metrics",
    "folder",
    "boxes",
    "memory",
    "export",
    "compiled",
    "serve",
    "render",
    "imports",
    "recording",
    "layer_table",
    "claims",
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
    "opencv-python-headless",
)


def machine() -> str:
    """Return one line on the date, the machine and the versions of the packages."""
    versions = []
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    processor = "unknown processor"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    where = f"{processor}, {os.cpu_count()} cores, no accelerator" if not torch.cuda.is_available() else processor
    versions.insert(0, f"Python {platform.python_version()}")
    return f"Measured on {time.strftime('%-d %B %Y')}, {where}, {', '.join(versions)}.\n"


def run_and_save(name: str) -> bool:
    """Run a benchmark in a new process, print its output and write it to a file in `RESULTS`, unless it failed."""
    lines = []
    command = [sys.executable, "-u", "-W", "ignore", "-m", f"benchmarks.{name}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode == 0:
        (RESULTS / f"{name}.md").write_text(f"{machine()}\n{''.join(lines).strip()}\n")
    return process.returncode == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"benchmark to run: {', '.join(BENCHMARKS)}")
    named = parser.parse_args().names or BENCHMARKS
    if unknown := [name for name in named if name not in BENCHMARKS]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    failed = []
    for name in named:
        start = time.perf_counter()
        if not run_and_save(name):
            failed.append(name)
        print(f"\n{name}: {time.perf_counter() - start:.0f} s\n", flush=True)
    if failed:
        parser.exit(1, f"failed: {' '.join(failed)}\n")
