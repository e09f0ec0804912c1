"""What a recorder on every layer costs: time over the same passes without one, and memory after many of them."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable

import torch
from torch import Tensor, nn

import saliency
from benchmarks.memory import status
from benchmarks.timing import interleaved, ratio, verdict, wall_ratio
from saliency.inspection import record

FORWARD, BOTH = 1.15, 1.25
CALLS = 200


def forward(model: nn.Module, x: Tensor) -> None:
    """A plain forward, as it is run for a result only."""
    with torch.no_grad():
        model(x)


def forward_and_backward(model: nn.Module, x: Tensor) -> None:
    """A forward and a backward to all parameters, as in training."""
    model.zero_grad(set_to_none=True)
    torch.autograd.backward(model(x).square().mean())


def recorded(run: Callable[[nn.Module, Tensor], None], model: nn.Module, x: Tensor) -> None:
    """The same with a recorder that keeps the statistics of everything."""
    with record(model, keep="statistics"):
        run(model, x)


def print_times(model: nn.Module, batch: int, rounds: int) -> None:
    """One row for each kind of pass."""
    x = torch.randn(batch, 3, 224, 224)
    contenders: dict[str, Callable[[], object]] = {}
    for run in (forward, forward_and_backward):
        contenders[run.__name__] = lambda run=run: run(model, x)  # type: ignore[misc]
        contenders[f"recorded {run.__name__}"] = lambda run=run: recorded(run, model, x)  # type: ignore[misc]
    timings = interleaved(contenders, rounds)
    for run, target in ((forward, FORWARD), (forward_and_backward, BOTH)):
        plain, ours = timings[run.__name__], timings[f"recorded {run.__name__}"]
        times = f"{1e3 * plain.seconds:.0f} ms | {1e3 * ours.seconds:.0f} ms"
        measured = ratio(ours, plain)
        name = run.__name__.replace("_", " ")
        ratios = f"{measured:.2f} | {wall_ratio(ours, plain):.2f}"
        print(f"| {batch} | {name} | {times} | {ratios} | {verdict(measured, target)} |")


def print_growth(model: nn.Module) -> None:
    """The resident set after some calls and after `CALLS` more."""
    x = torch.randn(1, 3, 224, 224)

    def grown(times: int) -> float:
        for _ in range(times):
            recorded(forward_and_backward, model, x)
        gc.collect()
        return status("VmRSS") / 1024

    before = grown(20)
    print(f"\nResident set after 20 recorded passes {before:.0f} MiB, after {CALLS} more {grown(CALLS):.0f} MiB.")


def main(arguments: list[str]) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    model = saliency.load("resnet50", weights=None)
    print('A recorder on all 151 layers of resnet50, keep="statistics", inputs, outputs and gradients, one thread.\n')
    print(
        "| batch | pass | plain | recorded | ratio of CPU time | of wall time | target |\n|---|---|---|---|---|---|---|"
    )
    for batch in (1, 16):
        print_times(model, batch, options.rounds if batch == 1 else max(3, options.rounds // 3))
    print_growth(model)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
