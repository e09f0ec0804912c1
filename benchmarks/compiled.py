"""Compiled calls against eager calls, in turn on one thread: CPU time, and the time of the first, compiling call."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import saliency
from benchmarks.timing import interleaved, ratio

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "efficientnet_lite0": partial(saliency.load, "efficientnet_lite0"),
    "resnet50": torchvision.models.resnet50,
}
CELLS: Sequence[tuple[str, int, Sequence[type[saliency.Attribution]]]] = (
    (
        "efficientnet_lite0",
        1,
        (saliency.GradCAM, saliency.VanillaGradient, saliency.GuidedBackprop, saliency.LRP, saliency.AttnLRP),
    ),
    ("resnet50", 8, (saliency.GradCAM, saliency.GuidedBackprop, saliency.LRP)),
)


def multiplication_rate() -> float:
    """Return the operations a second of a product of large matrices, about the most that convolutions can reach."""
    a, seconds = torch.randn(2048, 2048), []
    for _ in range(8):
        start = time.process_time()
        a @ a
        seconds.append(time.process_time() - start)
    return 2 * len(a) ** 3 / min(seconds)


def row(name: str, batch: int, method: saliency.Attribution, rate: float) -> str:
    """Return a row of the table, for a rate of operations a second."""
    x = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    fast, start = method.compile(), time.process_time()
    explanation, exact = fast.attribute(x), method.attribute(x)
    first = time.process_time() - start
    difference = float((explanation.values - exact.values).abs().max() / exact.values.abs().max())
    times = interleaved({"eager": lambda: method.attribute(x), "compiled": lambda: fast.attribute(x)}, 30)
    eager, share = min(times["eager"].cpu), ratio(times["compiled"], times["eager"])
    with FlopCounterMode(display=False) as operations:
        method.attribute(x)
    arithmetic = operations.get_total_flops() / rate / eager
    figures = f"{1000 * eager:.0f} | {share:.2f} | {arithmetic:.2f} | {difference:.0e} | {first:.0f}"
    return f"| {name} | {batch} | {method.name} | {figures} |"


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("\nCPU time at 224 px, one thread; the largest difference as a fraction of the largest value\n")
    rate = multiplication_rate()
    print(f"Arithmetic: the time of the operations at {rate / 1e9:.0f} GFLOP/s, over eager")
    print("This is the rate of a product of 2,048 x 2,048 matrices.\n")
    print("| network | images | method | eager, ms | compiled over eager | arithmetic | difference | first call, s |")
    print("|---|---|---|---|---|---|---|---|")
    for name, batch, classes in CELLS:
        torch.manual_seed(0)
        model = NETWORKS[name]().eval()
        for cls in classes:
            print(row(name, batch, cls(model), rate), flush=True)
    model = NETWORKS["efficientnet_lite0"]().eval()
    for many in (saliency.IntegratedGradients(model, steps=32), saliency.RISE(model, passes=100)):
        print(row("efficientnet_lite0", 1, many, rate), flush=True)


if __name__ == "__main__":
    main()
