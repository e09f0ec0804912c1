"""Compiled calls and runs against eager ones: `python -m benchmarks.compiled [calls|batch]`.

calls: in turn on one thread, the CPU time, and the time of the first, compiling call.
batch: images a second of `saliency batch --compile` on all cores, once the first batches are done, in turn with runs
without it; and what the run says about its gain.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import saliency
from benchmarks.folder import ours, photos
from benchmarks.timing import interleaved, ratio
from saliency.batch import Progress


def transformer() -> nn.Module:
    """Return vit_b_16 with random weights, also in the last layer, which are zero by default."""
    model: nn.Module = torchvision.models.vit_b_16()
    nn.init.normal_(model.get_parameter("heads.head.weight"), std=0.02)
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "efficientnet_lite0": partial(saliency.load, "efficientnet_lite0"),
    "resnet50": torchvision.models.resnet50,
    "vit_b_16": transformer,
}
CELLS: Sequence[tuple[str, int, Sequence[type[saliency.Attribution]]]] = (
    (
        "efficientnet_lite0",
        1,
        (saliency.GradCAM, saliency.VanillaGradient, saliency.GuidedBackprop, saliency.LRP, saliency.AttnLRP),
    ),
    (
        "resnet50",
        8,
        (saliency.GradCAM, saliency.VanillaGradient, saliency.GuidedBackprop, saliency.LRP, saliency.AttnLRP),
    ),
    ("vit_b_16", 8, (saliency.GradCAM, saliency.AttnLRP)),
)
GAIN, ROUNDS, WARM_UP = 1.7, 2, 32


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
    times = interleaved({"eager": lambda: method.attribute(x), "compiled": lambda: fast.attribute(x)}, 15)
    eager, share = min(times["eager"].cpu), ratio(times["compiled"], times["eager"])
    with FlopCounterMode(display=False) as operations:
        method.attribute(x)
    arithmetic = operations.get_total_flops() / rate / eager
    figures = f"{1000 * eager:.0f} | {share:.2f} | {arithmetic:.2f} | {difference:.0e} | {first:.0f}"
    return f"| {name} | {batch} | {method.name} | {figures} |"


def metric_row(name: str, method: saliency.Attribution, steps: int = 24) -> str:
    """Return a row of deletion and insertion together, without the method itself."""
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    metrics = [saliency.metrics.Deletion(steps=steps), saliency.metrics.Insertion(steps=steps)]

    def values(method: saliency.Attribution, explanation: saliency.Explanation) -> list[float]:
        rows = saliency.metrics.measure(metrics, explanation, progress=False, method=method, inputs=x, controls=False)
        return [float(row.values) for row in rows]

    fast, explanation, start = method.compile(), method.attribute(x), time.process_time()
    difference = max(
        abs(a - b) / b for a, b in zip(values(fast, explanation), values(method, explanation), strict=True)
    )
    first = time.process_time() - start
    runs = {"eager": partial(values, method, explanation), "compiled": partial(values, fast, explanation)}
    times = interleaved(runs, 15)
    figures = f"{1000 * min(times['eager'].cpu):.0f} | {ratio(times['compiled'], times['eager']):.2f} | "
    return f"| {name} | 1 | deletion, insertion | {figures} | {difference:.0e} | {first:.0f} |"


def run(source: Path, model: nn.Module, method: str, *, compiles: bool) -> tuple[float, str]:
    """Return the images a second of a run over photos after the first `WARM_UP` images, and its note."""
    times, notes = list[float](), list[str]()

    def report(progress: Progress) -> None:
        if progress.note:
            notes.append(progress.note)
        else:
            times.append(time.perf_counter())

    ours(source, source.parent / "out", model, (method,), compile=compiles, on_progress=report)
    return (len(times) - WARM_UP) / (times[-1] - times[WARM_UP - 1]), notes[-1] if notes else ""


def runs(count: int) -> None:
    """Print the table of runs over photos of 1000 x 750 pixels."""
    print(f"\nRuns over {count} photos of 1000 x 750 pixels, overlays included; the best of {ROUNDS} runs in turn\n")
    print("| network | method | eager, images a second | compiled | ratio | target | note of the run |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        source = photos(Path(folder, "photos"), count)
        for name in ("efficientnet_lite0", "resnet50"):
            torch.manual_seed(0)
            model = NETWORKS[name]().eval()
            if name == "resnet50":
                vars(model)["preprocess"] = saliency.Preprocess((224, 224), resize=256)
            for method in ("grad_cam", "lrp"):
                rates: dict[bool, list[tuple[float, str]]] = {False: [], True: []}
                for compiles in (False, True) * ROUNDS:
                    rates[compiles].append(run(source, model, method, compiles=compiles))
                (eager, _), (compiled, note) = max(rates[False]), max(rates[True])
                target = f"{GAIN} {'holds' if compiled >= GAIN * eager else 'MISSED'}"
                figures = f"{eager:.1f} | {compiled:.1f} | {compiled / eager:.2f} | {target} | {note}"
                print(f"| {name} | {method} | {figures} |", flush=True)


def main() -> None:
    """Print the tables."""
    warnings.simplefilter("ignore")
    if sys.argv[1:2] != ["batch"]:
        calls()
    if sys.argv[1:2] != ["calls"]:
        runs(int((sys.argv[2:] or ["160"])[0]))


def calls() -> None:
    """Print the table of calls."""
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
    for name in ("efficientnet_lite0", "resnet50"):
        torch.manual_seed(0)
        model = NETWORKS[name]().eval()
        for many in (
            saliency.IntegratedGradients(model, steps=32),
            saliency.SmoothGrad(model, passes=32),
            saliency.RISE(model, passes=100),
            saliency.ScoreCAM(model, channels=64),
        ):
            print(row(name, 1, many, rate), flush=True)
        print(metric_row(name, saliency.GradCAM(model)), flush=True)


if __name__ == "__main__":
    main()
