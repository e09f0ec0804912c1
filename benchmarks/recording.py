"""Measure a recorder on every layer: time against the same passes without it, and memory after many passes."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import saliency
from benchmarks.memory import status
from benchmarks.timing import interleaved, ratio, verdict, wall_ratio
from saliency.inspection.record import PARTS, Keep, record

FORWARD, BOTH = 1.15, 1.25
CALLS = 200


def forward(model: nn.Module, x: Tensor) -> None:
    """Run a forward pass without a graph."""
    with torch.no_grad():
        model(x)


def forward_and_backward(model: nn.Module, x: Tensor) -> None:
    """Run a forward pass and a backward pass to all parameters, as in training."""
    model.zero_grad(set_to_none=True)
    torch.autograd.backward(model(x).square().mean())


def recorded(
    run: Callable[[nn.Module, Tensor], None], model: nn.Module, x: Tensor, keep: Keep, parts: tuple[str, ...]
) -> None:
    """Run a pass with a recorder on every layer, including its attachment and removal."""
    with record(model, keep=keep, parts=parts):
        run(model, x)


def nothing(tensor: Tensor) -> None:
    """Keep nothing, so that only the time of the hooks is measured."""


RECORDERS: dict[str, tuple[Keep, tuple[str, ...], bool]] = {
    "statistics of everything": ("statistics", PARTS, True),
    "statistics of outputs": ("statistics", ("outputs", "grad_outputs"), False),
    "nothing kept": (nothing, PARTS, False),
}


def print_times(model: nn.Module, batch: int, rounds: int) -> None:
    """Print one row for each kind of pass and each recorder."""
    x = torch.randn(batch, 3, 224, 224)
    for run, target in ((forward, FORWARD), (forward_and_backward, BOTH)):
        contenders: dict[str, Callable[[], object]] = {"plain": partial(run, model, x)}
        for name, (keep, parts, _) in RECORDERS.items():
            contenders[name] = partial(recorded, run, model, x, keep, parts)
        timings = interleaved(contenders, rounds)
        plain = timings["plain"]
        for name, (_, _, is_target) in RECORDERS.items():
            measured, passes = ratio(timings[name], plain), run.__name__.replace("_", " ")
            times = f"{1e3 * plain.seconds:.0f} ms | {1e3 * timings[name].seconds:.0f} ms"
            ratios = f"{measured:.2f} | {wall_ratio(timings[name], plain):.2f}"
            goal = verdict(measured, target if is_target else None)
            print(f"| {batch} | {passes} | {name} | {times} | {ratios} | {goal} |")


def print_growth(model: nn.Module) -> None:
    """Print the resident set after 20 passes and after `CALLS` more."""
    x = torch.randn(1, 3, 224, 224)

    def memory_after(passes: int) -> float:
        for _ in range(passes):
            recorded(forward_and_backward, model, x, "statistics", PARTS)
        gc.collect()
        return status("VmRSS") / 1024

    before = memory_after(20)
    print(
        f"\nResident set after 20 recorded passes {before:.0f} MiB, after {CALLS} more {memory_after(CALLS):.0f} MiB."
    )


def main(arguments: list[str]) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    model = saliency.load("resnet50", weights=None)
    layers = sum(1 for _ in model.modules()) - 1
    print(f"A recorder on all {layers} layers of resnet50, attached and removed for each pass, one thread.\n")
    print("| batch | pass | kept | plain | recorded | ratio of CPU time | of wall time | target |")
    print("|---|---|---|---|---|---|---|---|")
    for batch in (1, 16):
        print_times(model, batch, options.rounds if batch == 1 else max(3, options.rounds // 3))
    print_growth(model)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
