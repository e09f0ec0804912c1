"""Measure the time of maps of a detector's boxes against bare loops of PyTorch: one box, and ten boxes over one.

A bare loop runs the same forwards and backwards without this package. Its own ratio of ten boxes to one is the least
that a backward pass for each box allows.

The second table compares the search of VXCODE in windows with the paper's search, which tries all patches at each
choice: the forwards, and the area under the similarity while the patches are shown in the order of the map.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import saliency
from benchmarks.timing import Contender, interleaved, verdict, wall_ratio
from benchmarks.zoo import make_usable
from saliency.attribution.passes import ImageAttribution, Passes

BOXES = 10
SCENES, PATCHES, FORWARDS, AREA = 12, 64, 450, 0.95


def shapes() -> tuple[nn.Module, Tensor, Callable[[Any], Tensor], int]:
    """Return `shapes_detector`, a drawn image with 16 objects, a function to scores, and the passes of D-RISE."""
    images = saliency.testbed.draw_scenes(4, seed=5, task="several").images / 127.5 - 1
    street = torch.cat([torch.cat([*images[:2]], 2), torch.cat([*images[2:]], 2)], 1)[None]  # (1, 3, 128, 128)
    return saliency.load("shapes_detector"), street, lambda output: output[1]["scores"][0].amax(0).topk(BOXES)[0], 256


def fcos() -> tuple[nn.Module, Tensor, Callable[[Any], Tensor], int]:
    """Return FCOS of torchvision with random weights, and noise."""
    from torchvision.models.detection import fcos_resnet50_fpn

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"min_size": 128, "max_size": 192}
    model = fcos_resnet50_fpn(weights=None, weights_backbone=None, num_classes=4, score_thresh=0.0, **sizes).eval()
    x = torch.rand(1, 3, 128, 192)
    make_usable(model, x)
    return model, x, lambda output: output[0]["scores"][:BOXES], 8


def forward_and_backwards(
    model: nn.Module, x: Tensor, scores: Callable[[Any], Tensor], count: int, layers: tuple[str, ...] = ()
) -> None:
    """Run one forward and `count` backward passes, to the input or to layers; then record only what follows them."""
    ends: list[Tensor] = []

    def cut(module: object, inputs: object, output: Tensor) -> Tensor:
        torch.set_grad_enabled(True)  # until the block without gradients ends
        ends.append(output.detach().requires_grad_())
        return ends[-1]

    handles = [model.get_submodule(name).register_forward_hook(cut) for name in layers]
    if not layers:
        ends.append(x.detach().requires_grad_())
    with torch.set_grad_enabled(not layers):
        output = model(x if layers else ends[0])
        torch.set_grad_enabled(True)
        values = scores(output)[:count]
    for handle in handles:
        handle.remove()
    for number, score in enumerate(values):
        torch.autograd.grad(score, ends, retain_graph=number + 1 < count, allow_unused=True)


def over_its_forwards(model: nn.Module, run: Callable[[], object]) -> float:
    """Return the time of a run, divided by the time of the forwards in it.

    The same forwards alone may be faster or slower than within a run: their memory is reused in another order.
    """
    starts: list[float] = []
    spent: list[float] = []
    handles = [
        model.register_forward_pre_hook(lambda *call: starts.append(time.perf_counter())),
        model.register_forward_hook(lambda *call: spent.append(time.perf_counter() - starts[-1])),
    ]
    start = time.perf_counter()
    run()
    total = time.perf_counter() - start
    for handle in handles:
        handle.remove()
    return total / sum(spent)


def measure(name: str, case: tuple[nn.Module, Tensor, Callable[[Any], Tensor], int]) -> None:
    """Print the rows of one detector."""
    model, x, scores, passes = case
    boxes = [saliency.box(index=index) for index in range(BOXES)]
    methods: dict[str, Any] = {"cam": saliency.GradCAM(model), "gradient": saliency.VanillaGradient(model)}
    methods |= {"d-rise": saliency.DRISE(model, passes=passes)}
    layers = tuple(str(methods["cam"].attribute(x, boxes[0]).layer).split(", "))
    contenders: dict[str, Contender] = {}
    for count in (1, BOXES):
        for method, explainer in methods.items():
            contenders[f"{method} {count}"] = partial(explainer.attribute_classes, x, boxes[:count])
        for method, ends in (("cam", layers), ("gradient", ())):
            contenders[f"bare {method} {count}"] = partial(forward_and_backwards, model, x, scores, count, ends)
    timings = interleaved(contenders, 30)

    def row(text: str, one: str, other: str, goal: float, bare: str = "") -> None:
        measured = wall_ratio(timings[one], timings[other])
        least = f"{wall_ratio(timings[f'bare {one}'], timings[f'bare {other}']):.2f}" if bare else ""
        times = f"{1e3 * timings[one].seconds:.1f} / {1e3 * timings[other].seconds:.1f} ms"
        print(f"| {name} | {text} | {times} | {measured:.2f} | {least} | {verdict(measured, goal)} |", flush=True)

    row("Grad-CAM of a box, over one forward and backward to the input", "cam 1", "bare gradient 1", 1.1)
    row("Grad-CAM, ten boxes over one", f"cam {BOXES}", "cam 1", 1.5, "bare")
    row("gradient at the input, ten boxes over one", f"gradient {BOXES}", "gradient 1", (1 + BOXES) / 2, "bare")
    share = statistics.median(over_its_forwards(model, contenders["d-rise 1"]) for _ in range(3))
    print(f"| {name} | D-RISE of a box, over its forwards | | {share:.2f} | | {verdict(share, 1.1)} |", flush=True)
    row("D-RISE, ten boxes over one", f"d-rise {BOXES}", "d-rise 1", 1.2)


class InsertionArea(saliency.VXCODE):
    """VXCODE that also measures the insertion area of each image, and counts the forwards of the search alone."""

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Explain an image, and store its area and forwards in `agreement` and `notes`."""
        result = super().explain_image(passes, score)
        segments, filler = self.segmented(passes.x)
        values, forwards = torch.zeros(segments.count), passes.budget.used
        values[segments.labels.flatten()] = result.values.flatten()
        turns = values.argsort(descending=True, stable=True).argsort()
        shown = turns < torch.arange(segments.count + 1)[:, None]
        curve = passes.scores(lambda start, stop: filler(segments.hidden(shown[start:stop])), len(shown))[:, 0]
        return result._replace(agreement=[float(torch.trapezoid(curve) / segments.count)], notes=[str(forwards)])


def search(name: str, model: nn.Module, images: Tensor, boxes: int) -> str:
    """Return the row of VXCODE for the first boxes of each image of a detector."""
    areas, forwards = [], []
    for trials in (saliency.VXCODE(model).trials, PATCHES):
        found = [InsertionArea(model, trials=trials).attribute(images, saliency.box(index=n)) for n in range(boxes)]
        areas.append(torch.cat([explanation.evidence["agreement"] for explanation in found]))
        forwards.append([int(stats.note) for explanation in found for stats in explanation.run_stats])
    share, most = float(areas[0].mean() / areas[1].mean()), max(forwards[0])
    means = " / ".join(f"{statistics.mean(numbers):.0f}" for numbers in forwards)
    held = "holds" if share >= AREA and most <= FORWARDS else "MISSED"
    return f"| {name} | {len(areas[0])} | {means} | {most} / {max(forwards[1])} | {share:.2f} | {held} |"


def main() -> None:
    """Print the tables."""
    torch.set_flush_denormal(True)  # gradients of random weights are so small that their arithmetic is slow
    print("One thread. The bare loop runs one forward, and a backward pass for each box, without this package.\n")
    print("| detector | ratio | times | measured | of the bare loop | goal |\n|---|---|---|---|---|---|")
    measure("shapes_detector, 128 x 128", shapes())
    measure("FCOS of torchvision, random weights, 128 x 192", fcos())
    print(f"\nVXCODE in windows / with all patches at each choice: <= {FORWARDS} forwards, {AREA} of the area.\n")
    print("| detector | boxes | mean forwards | most forwards | area / area | goal |")
    print("|---|---|---|---|---|---|", flush=True)
    scenes = saliency.testbed.draw_scenes(SCENES, seed=5, task="several").images / 127.5 - 1
    print(search("shapes_detector, 64 x 64", saliency.load("shapes_detector"), scenes, 2), flush=True)
    print(search("FCOS of torchvision, random weights, 128 x 192", *fcos()[:2], 2), flush=True)
    torch.set_flush_denormal(False)


if __name__ == "__main__":
    main()
