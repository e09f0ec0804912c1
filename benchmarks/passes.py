"""Measure methods of many passes: their time against plain passes.

The baseline is a loop over the same number of forward passes, or of forward and backward passes to the input. It uses
the same network and image, and the fastest of the chunk sizes 1, 2, 4, 8 and 16.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from benchmarks.memory import growth, in_new_processes
from benchmarks.timing import Contender, interleaved, ratio, verdict, wall_ratio
from saliency.attribution.allocator import keep_memory
from saliency.attribution.base import Attribution
from saliency.model.call import keep_small_heap

SIZES = (1, 2, 4, 8, 16)
PHOTOS = ("astronaut", "camera", "chelsea", "coffee", "rocket")
NETWORKS = ("resnet50", "efficientnet_lite0")
MASKS = 128
KEPT = 32  # the passes of a loop that keeps freed memory
WINDOWS = 169  # the forwards of an occlusion with window 32 and stride 16


@dataclass(frozen=True, slots=True)
class Case:
    """Network, an input for it, and the class to explain."""

    name: str
    model: nn.Module
    x: Tensor  # (1, 3, H, W)
    target: int


@cache
def load_case(name: str, photo: str = "chelsea") -> Case:
    """Load a network and a photo. Only the bundled network has trained weights."""
    model = saliency.load(name, weights="default" if name == "efficientnet_lite0" else None)
    x = saliency.VanillaGradient(model).read(f"assets/{photo}.jpg").inputs
    with torch.no_grad():
        return Case(name, model, x, int(model(x).argmax()))


def plain(case: Case, count: int, chunk: int, *, backward: bool) -> None:
    """Run `count` plain passes in chunks."""
    for start in range(0, count, chunk):
        rows = case.x.expand(min(chunk, count - start), -1, -1, -1).clone()
        if backward:
            rows.requires_grad_()
            torch.autograd.grad(case.model(rows)[:, case.target].sum(), rows)
        else:
            with torch.inference_mode():
                case.model(rows)


def header(*columns: str) -> str:
    """Return the header lines of a Markdown table."""
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def seconds(run: Contender) -> float:
    """Return the CPU seconds of one run."""
    start = time.process_time()
    run()
    return time.process_time() - start


@cache
def plain_times(name: str, *, backward: bool) -> dict[int, float]:
    """Return the CPU milliseconds of a plain pass of a network by chunk size."""
    case = load_case(name)
    plain(case, 4, 4, backward=backward)
    return {size: 1e3 / 16 * seconds(partial(plain, case, 16, size, backward=backward)) for size in SIZES}


def plain_passes(case: Case, count: int, *, backward: bool) -> Contender:
    """Return a function that runs plain passes in chunks of the best size."""
    times = plain_times(case.name, backward=backward)
    return partial(plain, case, count, min(times, key=times.__getitem__), backward=backward)


def engine() -> Iterator[str]:
    """Yield the rows of three methods."""
    yield header("network", "method", "ratio to plain passes (CPU)", "(wall)", "target")
    for name in NETWORKS:
        case = load_case(name)
        methods: dict[str, tuple[Attribution, int, bool]] = {
            "IG-50": (saliency.IntegratedGradients(case.model, steps=50), 50, True),
            "SmoothGrad-50": (saliency.SmoothGrad(case.model, passes=50), 50, True),
            "RISE": (saliency.RISE(case.model, passes=MASKS), MASKS, False),
        }
        for label, (method, count, backward) in methods.items():
            contenders: dict[str, Contender] = {
                "plain": plain_passes(case, count, backward=backward),
                "ours": partial(method.attribute, case.x, case.target),
            }
            timings = interleaved(contenders, warm_up=False)
            measured, walls = (compare(timings["ours"], timings["plain"]) for compare in (ratio, wall_ratio))
            yield f"| {name} | {label} | {measured:.3f} | {walls:.3f} | {verdict(measured, 1.08)} |"


def chunks() -> Iterator[str]:
    """Yield the time of a plain forward and backward pass by chunk size, one of which is used for the ratios above."""
    yield "\n### A plain forward and backward pass by chunk size, ms\n"
    yield header("network", *map(str, SIZES))
    for name in NETWORKS:
        times = plain_times(name, backward=True)
        yield f"| {name} | {' | '.join(f'{milliseconds:.0f}' for milliseconds in times.values())} |"


def in_kept_heap(run: Contender) -> None:
    """Run a function while glibc keeps freed memory; then restore three limits and return free memory to the system.

    The limits are those after the first call of a method, which raises the dynamic ones to their maximum.
    """
    assert keep_memory(), "only glibc can keep freed memory"
    try:
        run()
    finally:
        glibc = ctypes.CDLL(None)
        for option, value in ((-3, 2**25), (-1, 2**26), (-2, 2**17)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
            glibc.mallopt(option, value)
        glibc.malloc_trim(0)


def kept_peak(name: str, chunk: int, backward: bool) -> float:
    """Return the peak memory of a loop that keeps freed memory, in MiB."""
    case = load_case(name)
    torch.set_num_threads(1)
    return growth(lambda: in_kept_heap(lambda: plain(case, KEPT, chunk, backward=backward)))


def heap() -> Iterator[str]:
    """Yield the time and the peak memory of loops that keep freed memory until their end, by chunk size."""
    yield f"\n### {KEPT} plain passes that keep freed memory: ratio to the best loop that does not, and peak\n"
    keep_small_heap()  # as the first call of a method does
    sizes = SIZES[2:]
    columns = (f"in chunks of {size}" for size in sizes)
    yield header("network", "passes", *columns, *(f"MiB of {size}" for size in sizes), "target of the best")
    for (name, goal), backward in product(
        (("resnet50", 0.88), ("vgg16", 0.95), ("efficientnet_lite0", 0.95)), (True, False)
    ):
        case = load_case(name)
        loops = {str(size): partial(plain, case, KEPT, size, backward=backward) for size in sizes}
        contenders = {"plain": plain_passes(case, KEPT, backward=backward)}
        contenders |= {size: partial(in_kept_heap, loop) for size, loop in loops.items()}
        timings = interleaved(contenders, 60, warm_up=False)
        ratios = [ratio(timings[size], timings["plain"]) for size in loops]
        peaks = in_new_processes(kept_peak, [(name, size, backward) for size in sizes], 2**25)
        cells = [f"{measured:.3f}" for measured in ratios] + [f"{peak:.0f}" for peak in peaks]
        kind = "forward and backward" if backward else "forward"
        yield f"| {name} | {kind} | {' | '.join(cells)} | {verdict(min(ratios), goal)} |"


def score_cam() -> Iterator[str]:
    """Yield the rows of Score-CAM against grad-cam and torchcam on a photo."""
    yield "\n### Score-CAM, bundled network, one photo\n"
    yield header("ratio to", "ratio", "target", "largest difference")
    case = load_case("efficientnet_lite0", "coffee")
    net: Any = case.model
    # grad-cam puts the centres of the corner cells at the image corners; `align_corners` does the same.
    method = saliency.ScoreCAM(case.model, "bn2", align_corners=True)
    maps: dict[str, Tensor] = {}

    def ours() -> None:
        maps["ours"] = method.attribute(case.x, case.target).values

    def grad_cam() -> None:
        from pytorch_grad_cam import ScoreCAM
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

        with contextlib.redirect_stderr(io.StringIO()), ScoreCAM(model=case.model, target_layers=[net.bn2]) as cam:
            maps["grad-cam"] = torch.tensor(cam(case.x, [ClassifierOutputTarget(case.target)])[0])

    def torchcam() -> None:
        from torchcam.methods import ScoreCAM

        with ScoreCAM(case.model, "bn2") as cam, torch.no_grad():
            cam(case.target, case.model(case.x))

    contenders: dict[str, Contender] = {"ours": ours}
    contenders |= {"grad-cam": grad_cam} if find_spec("pytorch_grad_cam") else {}
    contenders |= {"torchcam": torchcam} if find_spec("torchcam") else {}
    timings = interleaved(contenders, warm_up=False)
    for name, goal in (("grad-cam", 0.35), ("torchcam", 0.20)):
        if name not in timings:
            yield f"| {name} | not installed | | |"
            continue
        measured, difference = ratio(timings["ours"], timings[name]), ""
        if name in maps:
            values = F.interpolate(maps["ours"].clamp(min=0), case.x.shape[-2:], mode="bilinear", align_corners=False)
            heatmap = (values - values.min()) / (values.max() - values.min()).clamp(min=1e-12)
            difference = f"{float((heatmap[0, 0] - maps[name]).abs().max()):.1e}"
        yield f"| {name} | {measured:.3f} | {verdict(measured, goal)} | {difference} |"


def ablation_cam() -> Iterator[str]:
    """Yield the rows of Ablation-CAM over all channels against a loop over the layers after the CAM layer."""
    yield "\n### Ablation-CAM, all channels: ratio to a loop over the layers after the CAM layer\n"
    yield header("network", "layer", "times", "ratio", "target")
    resnet, lite = (load_case(name) for name in NETWORKS)
    net: Any = resnet.model
    head: Any = lite.model.forward_head
    tails: list[tuple[Case, str, Callable[[Tensor], Tensor]]] = [
        (resnet, "layer4", lambda a: net.fc(torch.flatten(net.avgpool(a), 1))),
        (lite, "bn2", head),
    ]
    for case, layer, tail in tails:
        outputs: list[Tensor] = []
        with (
            torch.no_grad(),
            case.model.get_submodule(layer).register_forward_hook(
                lambda m, i, o, outputs=outputs: outputs.append(o)  # the output
            ),
        ):
            case.model(case.x)
        activation = outputs[0].detach()

        def by_hand(size: int, activation: Tensor = activation, tail: Callable[[Tensor], Tensor] = tail) -> None:
            channels = activation.shape[1]
            with torch.inference_mode():
                for start in range(0, channels, size):
                    stop = min(start + size, channels)
                    rows = activation.repeat(stop - start, 1, 1, 1)
                    rows[torch.arange(stop - start), torch.arange(start, stop)] = 0
                    tail(rows)

        times = {size: seconds(partial(by_hand, size)) for size in (4, 8, 16, 32)}
        method = saliency.AblationCAM(case.model, layer)
        timings = interleaved(
            {
                "hand": partial(by_hand, min(times, key=times.__getitem__)),
                "ours": partial(method.attribute, case.x, case.target),
            }
        )
        measured = ratio(timings["ours"], timings["hand"])
        both = f"{1e3 * timings['ours'].seconds:.0f} / {1e3 * timings['hand'].seconds:.0f} ms"
        yield f"| {case.name} | {layer} | {both} | {measured:.3f} | {verdict(measured, 1.3)} |"


def occlusion() -> Iterator[str]:
    """Yield the rows of Occlusion, window 32 and stride 16, against the same number of forward passes."""
    yield "\n### Occlusion 32/16: ratio to the same number of plain forward passes\n"
    yield header("network", "forwards", "ratio", "target")
    for name, goal in (("vgg16", 0.40), ("resnet50", 0.70), ("efficientnet_lite0", None)):
        case = load_case(name)
        method = saliency.Occlusion(case.model, window=32, stride=16)
        contenders: dict[str, Contender] = {
            "plain": plain_passes(case, WINDOWS, backward=False),
            "ours": partial(method.attribute, case.x, case.target),
        }
        timings = interleaved(contenders, warm_up=False)
        measured = ratio(timings["ours"], timings["plain"])
        yield f"| {name} | {WINDOWS} | {measured:.3f} | {verdict(measured, goal)} |"


def tolerance() -> Iterator[str]:
    """Yield the passes of integrated gradients with a tolerance of 1 % on five photos."""
    yield "\n### Integrated gradients with tolerance 1 %, bundled network\n"
    yield header("photo", "passes", "relative residual", "ratio to 50 passes", "target")
    for photo in PHOTOS:
        case = load_case("efficientnet_lite0", photo)
        explanation = saliency.IntegratedGradients(case.model, tolerance=0.01).attribute(case.x, case.target)
        assert explanation.residual is not None
        total = float(explanation.values.sum())
        passes = explanation.run_stats[0].passes
        share = float(explanation.residual.abs()) / max(abs(total), 1e-12)
        yield f"| {photo} | {passes} | {share:.2e} | {passes / 50:.2f} | {verdict(passes / 50, 0.5)} |"


def peers() -> Iterator[str]:
    """Yield the time of other toolkits against the same number of plain passes."""
    yield "\n### Other toolkits: ratio to plain passes (bundled network, one image)\n"
    yield header("", "ratio")
    case = load_case("efficientnet_lite0")
    jobs: dict[str, tuple[Contender, int, bool]] = {}
    if find_spec("captum"):
        from captum.attr import IntegratedGradients, NoiseTunnel, Occlusion, Saliency

        tunnel, integrated, windows = (
            method(case.model)
            for method in (lambda model: NoiseTunnel(Saliency(model)), IntegratedGradients, Occlusion)
        )
        image = {"inputs": case.x, "target": case.target}
        jobs["captum IntegratedGradients, 50 steps"] = partial(integrated.attribute, **image), 50, True
        noise = {"nt_samples": 50, "stdevs": 0.3, "abs": False}
        jobs["captum NoiseTunnel, 50 samples"] = partial(tunnel.attribute, **image, **noise), 50, True
        sizes = {"sliding_window_shapes": (3, 32, 32), "strides": (3, 16, 16)}
        jobs["captum Occlusion 32/16"] = partial(windows.attribute, **image, **sizes), WINDOWS, False
    if find_spec("zennit"):
        from zennit.attribution import IntegratedGradients as ZennitIG
        from zennit.attribution import SmoothGrad as ZennitSmoothGrad

        one = torch.eye(1000)[[case.target]]
        jobs["zennit IntegratedGradients, 50"] = partial(ZennitIG(case.model, n_iter=50), case.x, one), 50, True
        smooth = ZennitSmoothGrad(case.model, n_iter=50, noise_level=0.15)
        jobs["zennit SmoothGrad, 50"] = partial(smooth, case.x, one), 50, True
    for name, (run, count, backward) in jobs.items():
        contenders = {"plain": plain_passes(case, count, backward=backward), "theirs": run}
        timings = interleaved(contenders, 10, warm_up=False)
        yield f"| {name} | {ratio(timings['theirs'], timings['plain']):.2f} |"


PARTS = {part.__name__: part for part in (engine, chunks, heap, score_cam, ablation_cam, occlusion, tolerance, peers)}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"parts to measure (default: all): {', '.join(PARTS)}")
    names = parser.parse_args().parts or list(PARTS)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("## Methods of many passes: one thread, contenders in turn, median of the ratios per round\n")
    for name in names:
        for line in PARTS[name]():
            print(line, flush=True)


if __name__ == "__main__":
    main()
