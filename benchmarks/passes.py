"""Measure methods of many passes: their time against plain passes, and the agreement of fast and exact maps.

The baseline is a loop over the same number of forward passes, or of forward and backward passes to the input. It uses
the same network and image, and the fastest of the chunk sizes 1, 2, 4, 8 and 16.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from benchmarks.timing import Timing, interleaved, ratio, verdict, wall_ratio
from saliency.attribution.base import Attribution
from saliency.engine.estimates import rank_correlation

SIZES = (1, 2, 4, 8, 16)
PHOTOS = ("astronaut", "camera", "chelsea", "coffee", "rocket")

Contender = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """Network, an input for it, and the class to explain."""

    name: str
    model: nn.Module
    x: Tensor  # (1, 3, H, W)
    target: int


def load_case(name: str, *, weights: str | None = None, photo: str = "chelsea") -> Case:
    """Load a network and a photo. Only the bundled network has trained weights by default."""
    model = saliency.load(name, weights="default" if name == "efficientnet_lite0" else weights)
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


def once(contenders: dict[str, Contender]) -> dict[str, Timing]:
    """Run each contender once, without warm-up, for runs so long that warm-up does not matter."""
    timings = {}
    for name, run in contenders.items():
        wall = time.perf_counter()
        cpu = seconds(run)
        timings[name] = Timing((cpu,), (time.perf_counter() - wall,))
    return timings


def best_chunk(case: Case, *, backward: bool, passes: int = 16, rounds: int = 3) -> int:
    """Return the chunk size with the fastest plain passes, by the minimum over `rounds`."""
    times = {
        size: min(seconds(lambda size=size: plain(case, passes, size, backward=backward)) for _ in range(rounds))  # type: ignore[misc]
        for size in SIZES
    }
    return min(times, key=times.__getitem__)


@dataclass(frozen=True, slots=True)
class MethodCase:
    """A method to measure: its constructor, its number of passes, and the largest accepted ratio to plain passes."""

    label: str
    build: Callable[[nn.Module, str], Attribution]
    passes: int
    backward: bool
    targets: Mapping[str, float]


def method_cases(passes_of_rise: int) -> list[MethodCase]:
    """Return the methods to measure, with targets for each precision."""
    forwards = {"exact": 1.08, "fast": 0.85}
    backwards = {"exact": 1.08, "fast": 0.92}
    return [
        MethodCase("IG-50", lambda m, p: saliency.IntegratedGradients(m, steps=50, precision=p), 50, True, backwards),  # type: ignore[arg-type]
        MethodCase("SmoothGrad-50", lambda m, p: saliency.SmoothGrad(m, passes=50, precision=p), 50, True, backwards),  # type: ignore[arg-type]
        MethodCase(
            f"RISE-{passes_of_rise}",
            lambda m, p: saliency.RISE(m, passes=passes_of_rise, precision=p),  # type: ignore[arg-type]
            passes_of_rise,
            False,
            forwards,
        ),
    ]


def agreement(values: Tensor, exact: Tensor) -> str:
    """Return the cosine and the rank correlation of two maps as text."""
    a, b = (maps.sum(1).flatten().double() for maps in (values, exact))
    cosine = float(a @ b / (a.norm() * b.norm()))
    return f"{cosine:.4f} / {rank_correlation(values.sum(1), exact.sum(1)):.4f}"


def engine(names: list[str], rounds: int, passes_of_rise: int) -> Iterator[str]:
    """Yield the rows of three methods at each precision."""
    yield header(
        "network",
        "method",
        "precision",
        "ratio to plain passes (CPU)",
        "(wall)",
        "target",
        "cosine / rank",
        "precision used",
    )
    for name in names:
        case = load_case(name)
        for entry in method_cases(passes_of_rise):
            size = best_chunk(case, backward=entry.backward, rounds=min(3, rounds))
            methods = {p: entry.build(case.model, p) for p in ("exact", "fast")}
            contenders: dict[str, Contender] = {
                "plain": lambda case=case, entry=entry, size=size: plain(
                    case, entry.passes, size, backward=entry.backward
                )  # type: ignore[misc]
            }
            contenders |= {p: lambda m=m, case=case: m.attribute(case.x, case.target) for p, m in methods.items()}  # type: ignore[misc]
            timings = interleaved(contenders, rounds)
            exact = methods["exact"].attribute(case.x, case.target)
            for precision, method in methods.items():
                explanation = method.attribute(case.x, case.target)
                measured = ratio(timings[precision], timings["plain"])
                walls = wall_ratio(timings[precision], timings["plain"])
                yield (
                    f"| {name} | {entry.label} | {precision} | {measured:.3f} | {walls:.3f} | "
                    f"{verdict(measured, entry.targets.get(precision))} | "
                    f"{agreement(explanation.values, exact.values)} | {explanation.run_stats[0].precision} |"
                )
            yield f"| {name} | {entry.label} | plain, chunks of {size} | {timings['plain'].seconds:.2f} s | | | | |"


def score_cam(photos: list[str]) -> Iterator[str]:
    """Yield the rows of Score-CAM against grad-cam and torchcam on photos."""
    yield "\n### Score-CAM, bundled network, photos\n"
    yield header(
        "photo", "ratio to grad-cam", "target", "ratio to torchcam", "target", "largest difference from grad-cam"
    )
    try:
        from pytorch_grad_cam import ScoreCAM
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
        from torchcam.methods import ScoreCAM as TorchcamScoreCAM
    except ImportError:
        yield "| grad-cam and torchcam are not installed | | | | | |"
        return
    for photo in photos:
        case = load_case("efficientnet_lite0", photo=photo)
        net: Any = case.model
        # grad-cam puts the centres of the corner cells at the image corners; `align_corners` does the same.
        method = saliency.ScoreCAM(case.model, "bn2", align_corners=True)
        maps: dict[str, Tensor] = {}

        def theirs(case: Case = case, net: Any = net, maps: dict[str, Tensor] = maps) -> None:
            with contextlib.redirect_stderr(io.StringIO()), ScoreCAM(model=case.model, target_layers=[net.bn2]) as cam:
                maps["grad-cam"] = torch.tensor(cam(case.x, [ClassifierOutputTarget(case.target)])[0])

        def torchcam(case: Case = case) -> None:
            with TorchcamScoreCAM(case.model, "bn2") as cam, torch.no_grad():
                cam(case.target, case.model(case.x))

        contenders: dict[str, Contender] = {
            "ours": partial(method.attribute, case.x, case.target),
            "grad-cam": theirs,
            "torchcam": torchcam,
        }
        timings = once(contenders)
        values = method.attribute(case.x, case.target).values.clamp(min=0)
        heatmap = F.interpolate(values, case.x.shape[-2:], mode="bilinear", align_corners=False)[0, 0]
        heatmap = (heatmap - heatmap.min()) / (heatmap.max() - heatmap.min()).clamp(min=1e-12)
        difference = float((heatmap - maps["grad-cam"]).abs().max())
        a, b = ratio(timings["ours"], timings["grad-cam"]), ratio(timings["ours"], timings["torchcam"])
        yield f"| {photo} | {a:.3f} | {verdict(a, 0.35)} | {b:.3f} | {verdict(b, 0.20)} | {difference:.1e} |"


def ablation_cam(rounds: int) -> Iterator[str]:
    """Yield the rows of Ablation-CAM over all channels against a loop over the layers after the CAM layer."""
    yield "\n### Ablation-CAM, all channels: ratio to a loop over the layers after the CAM layer\n"
    yield header("network", "layer", "ratio", "target")
    resnet: Any = load_case("resnet50")
    net: Any = resnet.model
    lite: Any = load_case("efficientnet_lite0")
    tails: list[tuple[Any, str, Callable[[Tensor], Tensor]]] = [
        (resnet, "layer4", lambda a: net.fc(torch.flatten(net.avgpool(a), 1))),
        (resnet, "layer3", lambda a: net.fc(torch.flatten(net.avgpool(net.layer4(a)), 1))),
        (lite, "bn2", lite.model.forward_head),
    ]
    for case, layer, tail in tails:
        outputs: list[Tensor] = []
        handle = case.model.get_submodule(layer).register_forward_hook(
            lambda m, i, o, outputs=outputs: outputs.append(o)
        )
        with torch.no_grad():
            case.model(case.x)
        handle.remove()
        activation = outputs[0].detach()

        def by_hand(size: int, activation: Tensor = activation, tail: Callable[[Tensor], Tensor] = tail) -> None:
            channels = activation.shape[1]
            with torch.inference_mode():
                for start in range(0, channels, size):
                    stop = min(start + size, channels)
                    rows = activation.repeat(stop - start, 1, 1, 1)
                    rows[torch.arange(stop - start), torch.arange(start, stop)] = 0
                    tail(rows)

        times = {size: seconds(lambda size=size: by_hand(size)) for size in (4, 8, 16, 32)}  # type: ignore[misc]
        size = min(times, key=times.__getitem__)
        method = saliency.AblationCAM(case.model, layer)
        timings = interleaved(
            {
                "hand": lambda size=size: by_hand(size),  # type: ignore[misc]
                "ours": lambda m=method, case=case: m.attribute(case.x, case.target),  # type: ignore[misc]
            },
            rounds,
        )
        measured = ratio(timings["ours"], timings["hand"])
        yield f"| {case.name} | {layer} | {measured:.3f} | {verdict(measured, 1.3)} |"


def occlusion() -> Iterator[str]:
    """Yield the rows of Occlusion, window 32 and stride 16, against the same number of forward passes."""
    yield "\n### Occlusion 32/16: ratio to the same number of plain forward passes\n"
    yield header("network", "forwards", "ratio", "target")
    for name, goal in (("vgg16", 0.40), ("resnet50", 0.70), ("efficientnet_lite0", None)):
        case = load_case(name)
        method = saliency.Occlusion(case.model, window=32, stride=16)
        count = method.attribute(case.x, case.target).run_stats[0].passes
        size = best_chunk(case, backward=False, rounds=1)
        timings = once(
            {
                "plain": lambda case=case, count=count, size=size: plain(case, count, size, backward=False),  # type: ignore[misc]
                "ours": lambda m=method, case=case: m.attribute(case.x, case.target),  # type: ignore[misc]
            }
        )
        measured = ratio(timings["ours"], timings["plain"])
        yield f"| {name} | {count} | {measured:.3f} | {verdict(measured, goal)} |"


def tolerance() -> Iterator[str]:
    """Yield the passes of integrated gradients with a tolerance of 1 % on five photos."""
    yield "\n### Integrated gradients with tolerance 1 %, bundled network\n"
    yield header("photo", "passes", "relative residual", "ratio to 50 passes", "target")
    for photo in PHOTOS:
        case = load_case("efficientnet_lite0", photo=photo)
        explanation = saliency.IntegratedGradients(case.model, tolerance=0.01).attribute(case.x, case.target)
        assert explanation.residual is not None
        total = float(explanation.values.sum())
        passes = explanation.run_stats[0].passes
        share = float(explanation.residual.abs()) / max(abs(total), 1e-12)
        yield f"| {photo} | {passes} | {share:.2e} | {passes / 50:.2f} | {verdict(passes / 50, 0.5)} |"


def peers(rounds: int) -> Iterator[str]:
    """Yield the time of other toolkits against the same number of plain passes."""
    yield "\n### Other toolkits: ratio to plain passes (bundled network, one image)\n"
    yield header("", "ratio")
    case = load_case("efficientnet_lite0")
    with contextlib.suppress(ImportError):
        from captum.attr import IntegratedGradients, NoiseTunnel, Occlusion, Saliency

        tunnel, saliency_map = NoiseTunnel(Saliency(case.model)), IntegratedGradients(case.model)
        windows = Occlusion(case.model)
        jobs: dict[str, tuple[Contender, int, bool]] = {
            "captum IntegratedGradients, 50 steps, default": (
                lambda: saliency_map.attribute(case.x, target=case.target),
                50,
                True,
            ),
            "captum NoiseTunnel, 50 samples, default": (
                lambda: tunnel.attribute(case.x, target=case.target, nt_samples=50, stdevs=0.3, abs=False),
                50,
                True,
            ),
            "captum Occlusion 32/16, default": (
                lambda: windows.attribute(case.x, (3, 32, 32), strides=(3, 16, 16), target=case.target),
                169,
                False,
            ),
        }
        for name, (run, count, backward) in jobs.items():
            size = best_chunk(case, backward=backward, rounds=1)
            timings = interleaved(
                {"plain": lambda c=count, s=size, b=backward: plain(case, c, s, backward=b), "theirs": run},  # type: ignore[misc]
                rounds,
            )
            yield f"| {name} | {ratio(timings['theirs'], timings['plain']):.2f} |"
    with contextlib.suppress(ImportError):
        from zennit.attribution import IntegratedGradients as ZennitIG
        from zennit.attribution import SmoothGrad as ZennitSmoothGrad

        eye = torch.eye(1000)[[case.target]]
        for label, attributor in (
            ("zennit IntegratedGradients, 50", ZennitIG(case.model, n_iter=50)),
            ("zennit SmoothGrad, 50", ZennitSmoothGrad(case.model, n_iter=50, noise_level=0.15)),
        ):
            size = best_chunk(case, backward=True, rounds=1)
            timings = interleaved(
                {
                    "plain": lambda s=size: plain(case, 50, s, backward=True),  # type: ignore[misc]
                    "theirs": lambda a=attributor: a(case.x.clone(), eye),  # type: ignore[misc]
                },
                rounds,
            )
            yield f"| {label} | {ratio(timings['theirs'], timings['plain']):.2f} |"


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--networks", nargs="+", default=["resnet50", "efficientnet_lite0"])
    parser.add_argument("--rise", type=int, default=512, help="number of passes of RISE")
    parser.add_argument("--photos", nargs="+", default=list(PHOTOS), help="photos for Score-CAM")
    parser.add_argument(
        "--parts", nargs="+", default=["engine", "score", "ablation", "occlusion", "tolerance", "peers"]
    )
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "engine": lambda: engine(options.networks, options.rounds, options.rise),
        "score": lambda: score_cam(options.photos),
        "ablation": lambda: ablation_cam(options.rounds),
        "occlusion": occlusion,
        "tolerance": tolerance,
        "peers": lambda: peers(1),
    }
    print("## Methods of many passes: one thread, contenders in turn, median of the ratios per round\n")
    for part in options.parts:
        for line in parts[part]():
            print(line, flush=True)


if __name__ == "__main__":
    main()
