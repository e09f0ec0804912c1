"""Measure a recorder on every layer: time against the same passes without it, and memory after many passes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import saliency
from benchmarks.memory import status
from benchmarks.timing import interleaved, ratio, verdict, wall_ratio
from saliency.inspection.recording import PARTS, record

FORWARD, BOTH = 1.15, 1.25
CALLS = 100


def forward(model: nn.Module, x: Tensor) -> None:
    """Run a forward pass without a graph."""
    with torch.no_grad():
        model(x)


def forward_and_backward(model: nn.Module, x: Tensor) -> None:
    """Run a forward pass and a backward pass to all parameters, as in training."""
    model.zero_grad(set_to_none=True)
    torch.autograd.backward(model(x).square().mean())


def recorded(run: Callable[[nn.Module, Tensor], None], model: nn.Module, x: Tensor) -> None:
    """Run a pass with a recorder on every layer, including its attachment and removal."""
    with record(model, keep="statistics", parts=PARTS):
        run(model, x)


def print_times(model: nn.Module, batch: int) -> None:
    """Print one row for each kind of pass."""
    x = torch.randn(batch, 3, 224, 224)
    for run, target in ((forward, FORWARD), (forward_and_backward, BOTH)):
        timings = interleaved({"plain": partial(run, model, x), "recorded": partial(recorded, run, model, x)}, 15)
        plain, slower = timings["plain"], timings["recorded"]
        measured, passes = ratio(slower, plain), run.__name__.replace("_", " ")
        times = f"{1e3 * plain.seconds:.0f} ms | {1e3 * slower.seconds:.0f} ms"
        ratios = f"{measured:.2f} | {wall_ratio(slower, plain):.2f}"
        print(f"| {batch} | {passes} | {times} | {ratios} | {verdict(measured, target)} |", flush=True)


def print_growth(model: nn.Module) -> None:
    """Print the resident set after 20 passes and after `CALLS` more."""
    x = torch.randn(1, 3, 224, 224)

    def memory_after(passes: int) -> float:
        for _ in range(passes):
            recorded(forward_and_backward, model, x)
        gc.collect()
        return status("VmRSS") / 1024

    before = memory_after(20)
    print(
        f"\nResident set after 20 recorded passes {before:.0f} MiB, after {CALLS} more {memory_after(CALLS):.0f} MiB."
    )


def main() -> None:
    """Print the tables."""
    model = saliency.load("resnet50", weights=None)
    layers = sum(1 for _ in model.modules()) - 1
    print(
        f"Statistics of everything at all {layers} layers of resnet50, recorder attached and removed for each pass.\n"
    )
    print(
        "| batch | pass | plain | recorded | ratio of CPU time | of wall time | target |\n|---|---|---|---|---|---|---|"
    )
    for batch in (1, 16):
        print_times(model, batch)
    print_growth(model)


if __name__ == "__main__":
    main()
