"""Measure the peak memory of methods of many passes: 1000 passes must need about as much as 50.

Each method runs in its own process. The result is the peak of the resident set during the call, minus the resident set
with the loaded network. Linux only, since it reads /proc.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import saliency
from benchmarks.memory import status
from benchmarks.passes import header, load_case
from benchmarks.timing import verdict
from saliency.attribution.base import Attribution

FEW, MANY, TARGET = 50, 1000, 1.10

METHODS: dict[str, Callable[[nn.Module, int], Attribution]] = {
    "integrated_gradients": lambda model, count: saliency.IntegratedGradients(model, steps=count),
    "expected_gradients": lambda model, count: saliency.ExpectedGradients(model, passes=count),
    "smooth_grad": lambda model, count: saliency.SmoothGrad(model, passes=count),
    "rise": lambda model, count: saliency.RISE(model, passes=count),
    "kernel_shap": lambda model, count: saliency.KernelSHAP(model, passes=count),
    "shapley_sampling": lambda model, count: saliency.ShapleySampling(model, passes=count),
    "lime": lambda model, count: saliency.LIME(model, passes=count),
    "sobol": lambda model, count: saliency.Sobol(model, passes=count),
    "hsic": lambda model, count: saliency.HSIC(model, passes=count),
}


def child(name: str, count: int) -> None:
    """Print how much one call increases the peak memory of this process, in MiB."""
    torch.set_num_threads(1)
    case = load_case("efficientnet_lite0")
    method = METHODS[name](case.model, count)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    method.attribute(case.x, case.target)
    print(f"{(status('VmHWM') - before) / 1024:.1f}")


def growth(name: str, count: int) -> float:
    """Return how much one call increases the peak memory of a new process, in MiB."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.passes_memory", "--child", name, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    return float(done.stdout.split()[-1])


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options.child[0], int(options.child[1]))
        return
    print("## Memory of many passes: peak beyond the loaded network, EfficientNet-Lite0, one image\n")
    print(header("method", f"{FEW} passes, MiB", f"{MANY} passes, MiB", "ratio", "target"))
    for name in METHODS:
        few, many = growth(name, FEW), growth(name, MANY)
        print(f"| {name} | {few:.0f} | {many:.0f} | {many / few:.2f} | {verdict(many / few, TARGET)} |", flush=True)


if __name__ == "__main__":
    main()
