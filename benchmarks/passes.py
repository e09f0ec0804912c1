"""Time of methods of many passes over that of the plain passes, and agreement of their maps with the exact ones.

The baseline is written out by hand: the same number of forwards, or of forwards and backwards to the input, of the
same network on the same picture, at the chunk size that is the fastest of 1, 2, 4, 8 and 16 in the same run.
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
class Subject:
    """A network on a photo, as its input, with a class."""

    name: str
    model: nn.Module
    x: Tensor  # (1, 3, H, W)
    target: int


def subject(name: str, *, weights: str | None = None, photo: str = "chelsea") -> Subject:
    """A network by name; with random weights unless it is the bundled one."""
    model = saliency.load(name, weights="default" if name == "efficientnet_lite0" else weights)
    x = saliency.VanillaGradient(model).read(f"assets/{photo}.jpg").tensor
    with torch.no_grad():
        return Subject(name, model, x, int(model(x).argmax()))


def plain(on: Subject, count: int, chunk: int, *, backward: bool) -> None:
    """That many plain passes, in chunks."""
    for start in range(0, count, chunk):
        rows = on.x.expand(min(chunk, count - start), -1, -1, -1).clone()
        if backward:
            rows.requires_grad_()
            torch.autograd.grad(on.model(rows)[:, on.target].sum(), rows)
        else:
            with torch.inference_mode():
                on.model(rows)


def header(*columns: str) -> str:
    """The head of a table."""
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def seconds(run: Contender) -> float:
    """The CPU seconds of one run."""
    start = time.process_time()
    run()
    return time.process_time() - start


def once(contenders: dict[str, Contender]) -> dict[str, Timing]:
    """A single round, for work so long that a first one need not be left out."""
    timings = {}
    for name, run in contenders.items():
        wall = time.perf_counter()
        cpu = seconds(run)
        timings[name] = Timing((cpu,), (time.perf_counter() - wall,))
    return timings


def best_chunk(on: Subject, *, backward: bool, passes: int = 16, rounds: int = 3) -> int:
    """The fastest chunk size of the plain passes, by the minimum over some rounds."""
    took = {
        size: min(seconds(lambda size=size: plain(on, passes, size, backward=backward)) for _ in range(rounds))  # type: ignore[misc]
        for size in SIZES
    }
    return min(took, key=took.__getitem__)


@dataclass(frozen=True, slots=True)
class Work:
    """A method under test: its constructor, its number of plain passes, and its largest time over them."""

    label: str
    build: Callable[[nn.Module, str], Attribution]
    passes: int
    backward: bool
    targets: Mapping[str, float]


def works(passes_of_rise: int) -> list[Work]:
    """The methods under test, at each precision."""
    forwards = {"exact": 1.08, "fast": 0.85, "bf16": 0.50}
    backwards = {"exact": 1.08, "fast": 0.92}
    made: list[Work] = [
        Work("IG-50", lambda m, p: saliency.IntegratedGradients(m, steps=50, precision=p), 50, True, backwards),  # type: ignore[arg-type]
        Work("SmoothGrad-50", lambda m, p: saliency.SmoothGrad(m, passes=50, precision=p), 50, True, backwards),  # type: ignore[arg-type]
        Work(
            f"RISE-{passes_of_rise}",
            lambda m, p: saliency.RISE(m, passes=passes_of_rise, precision=p),  # type: ignore[arg-type]
            passes_of_rise,
            False,
            forwards,
        ),
    ]
    return made


def agreement(values: Tensor, exact: Tensor) -> str:
    """The cosine and the rank correlation of two maps."""
    a, b = (each.sum(1).flatten().double() for each in (values, exact))
    cosine = float(a @ b / (a.norm() * b.norm()))
    return f"{cosine:.4f} / {rank_correlation(values.sum(1), exact.sum(1)):.4f}"


def engine(names: list[str], rounds: int, passes_of_rise: int) -> Iterator[str]:
    """The rows of the three sampling methods at each precision."""
    yield header(
        "network",
        "method",
        "precision",
        "over the plain passes (CPU)",
        "(wall)",
        "target",
        "cosine / rank",
        "how the passes ran",
    )
    for name in names:
        on = subject(name)
        for work in works(passes_of_rise):
            size = best_chunk(on, backward=work.backward, rounds=min(3, rounds))
            methods = {p: work.build(on.model, p) for p in ("exact", "fast", "bf16")}
            contenders: dict[str, Contender] = {
                "plain": lambda on=on, work=work, size=size: plain(on, work.passes, size, backward=work.backward)  # type: ignore[misc]
            }
            contenders |= {p: lambda m=m, on=on: m.attribute(on.x, on.target) for p, m in methods.items()}  # type: ignore[misc]
            timings = interleaved(contenders, rounds)
            exact = methods["exact"].attribute(on.x, on.target)
            for precision, method in methods.items():
                found = method.attribute(on.x, on.target)
                measured = ratio(timings[precision], timings["plain"])
                walls = wall_ratio(timings[precision], timings["plain"])
                yield (
                    f"| {name} | {work.label} | {precision} | {measured:.3f} | {walls:.3f} | "
                    f"{verdict(measured, work.targets.get(precision))} | {agreement(found.values, exact.values)} | "
                    f"{found.effort[0].precision} |"
                )
            yield f"| {name} | {work.label} | plain, {size} at once | {timings['plain'].seconds:.2f} s | | | | |"


def score_cam(photos: list[str]) -> Iterator[str]:
    """Score-CAM against grad-cam and torchcam, on real photos."""
    yield "\n### Score-CAM, bundled network, real photos\n"
    yield header("photo", "of grad-cam's time", "target", "of torchcam's", "target", "largest difference from grad-cam")
    try:
        from pytorch_grad_cam import ScoreCAM
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
        from torchcam.methods import ScoreCAM as TorchcamScoreCAM
    except ImportError:
        yield "| grad-cam and torchcam are not installed | | | | | |"
        return
    for photo in photos:
        on = subject("efficientnet_lite0", photo=photo)
        net: Any = on.model
        # That peer lays the centres of the corner cells on the corners of the picture; so does ours where asked to.
        method = saliency.ScoreCAM(on.model, "bn2", align_corners=True)
        maps: dict[str, Tensor] = {}

        def theirs(on: Subject = on, net: Any = net, maps: dict[str, Tensor] = maps) -> None:
            with contextlib.redirect_stderr(io.StringIO()), ScoreCAM(model=on.model, target_layers=[net.bn2]) as cam:
                maps["grad-cam"] = torch.tensor(cam(on.x, [ClassifierOutputTarget(on.target)])[0])

        def torchcam(on: Subject = on) -> None:
            with TorchcamScoreCAM(on.model, "bn2") as cam, torch.no_grad():
                cam(on.target, on.model(on.x))

        contenders: dict[str, Contender] = {
            "ours": partial(method.attribute, on.x, on.target),
            "grad-cam": theirs,
            "torchcam": torchcam,
        }
        timings = once(contenders)
        values = method.attribute(on.x, on.target).values.clamp(min=0)
        found = F.interpolate(values, on.x.shape[-2:], mode="bilinear", align_corners=False)[0, 0]
        found = (found - found.min()) / (found.max() - found.min()).clamp(min=1e-12)
        off = float((found - maps["grad-cam"]).abs().max())
        a, b = ratio(timings["ours"], timings["grad-cam"]), ratio(timings["ours"], timings["torchcam"])
        yield f"| {photo} | {a:.3f} | {verdict(a, 0.35)} | {b:.3f} | {verdict(b, 0.20)} | {off:.1e} |"


def ablation_cam(rounds: int) -> Iterator[str]:
    """Ablation-CAM over all channels against the part after the layer, run by hand."""
    yield "\n### Ablation-CAM, all channels, over the part after the layer run by hand\n"
    yield header("network", "layer", "ratio", "target")
    resnet: Any = subject("resnet50")
    net: Any = resnet.model
    lite: Any = subject("efficientnet_lite0")
    tails: list[tuple[Any, str, Callable[[Tensor], Tensor]]] = [
        (resnet, "layer4", lambda a: net.fc(torch.flatten(net.avgpool(a), 1))),
        (resnet, "layer3", lambda a: net.fc(torch.flatten(net.avgpool(net.layer4(a)), 1))),
        (lite, "bn2", lite.model.forward_head),
    ]
    for on, layer, tail in tails:
        kept: list[Tensor] = []
        handle = on.model.get_submodule(layer).register_forward_hook(lambda m, i, o, kept=kept: kept.append(o))
        with torch.no_grad():
            on.model(on.x)
        handle.remove()
        activation = kept[0].detach()

        def by_hand(size: int, activation: Tensor = activation, tail: Callable[[Tensor], Tensor] = tail) -> None:
            channels = activation.shape[1]
            with torch.inference_mode():
                for start in range(0, channels, size):
                    stop = min(start + size, channels)
                    rows = activation.repeat(stop - start, 1, 1, 1)
                    rows[torch.arange(stop - start), torch.arange(start, stop)] = 0
                    tail(rows)

        took = {size: seconds(lambda size=size: by_hand(size)) for size in (4, 8, 16, 32)}  # type: ignore[misc]
        size = min(took, key=took.__getitem__)
        method = saliency.AblationCAM(on.model, layer)
        timings = interleaved(
            {"hand": lambda size=size: by_hand(size), "ours": lambda m=method, on=on: m.attribute(on.x, on.target)},  # type: ignore[misc]
            rounds,
        )
        measured = ratio(timings["ours"], timings["hand"])
        yield f"| {on.name} | {layer} | {measured:.3f} | {verdict(measured, 1.3)} |"


def occlusion() -> Iterator[str]:
    """Occlusion, window 32 and stride 16, over that many plain forwards."""
    yield "\n### Occlusion 32/16, over that many plain forwards\n"
    yield header("network", "forwards", "ratio", "target")
    for name, goal in (("vgg16", 0.40), ("resnet50", 0.70), ("efficientnet_lite0", None)):
        on = subject(name)
        method = saliency.Occlusion(on.model, window=32, stride=16)
        count = method.attribute(on.x, on.target).effort[0].passes
        size = best_chunk(on, backward=False, rounds=1)
        timings = once(
            {
                "plain": lambda on=on, count=count, size=size: plain(on, count, size, backward=False),  # type: ignore[misc]
                "ours": lambda m=method, on=on: m.attribute(on.x, on.target),  # type: ignore[misc]
            }
        )
        measured = ratio(timings["ours"], timings["plain"])
        yield f"| {name} | {count} | {measured:.3f} | {verdict(measured, goal)} |"


def tolerance() -> Iterator[str]:
    """The passes of integrated gradients with a tolerance of 1 %, on the five photos."""
    yield "\n### Integrated gradients with tolerance 1 %, bundled network\n"
    yield header("photo", "passes", "relative residual", "of a fixed 50", "target")
    for photo in PHOTOS:
        on = subject("efficientnet_lite0", photo=photo)
        found = saliency.IntegratedGradients(on.model, tolerance=0.01).attribute(on.x, on.target)
        assert found.residual is not None
        total = float(found.values.sum())
        passes = found.effort[0].passes
        share = float(found.residual.abs()) / max(abs(total), 1e-12)
        yield f"| {photo} | {passes} | {share:.2e} | {passes / 50:.2f} | {verdict(passes / 50, 0.5)} |"


def peers(rounds: int) -> Iterator[str]:
    """Time of other toolkits for the same passes, over the plain passes."""
    yield "\n### Other toolkits, over the plain passes (bundled network, one image)\n"
    yield header("", "ratio")
    on = subject("efficientnet_lite0")
    with contextlib.suppress(ImportError):
        from captum.attr import IntegratedGradients, NoiseTunnel, Occlusion, Saliency

        tunnel, saliency_map = NoiseTunnel(Saliency(on.model)), IntegratedGradients(on.model)
        windows = Occlusion(on.model)
        jobs: dict[str, tuple[Contender, int, bool]] = {
            "captum IntegratedGradients, 50 steps, default": (
                lambda: saliency_map.attribute(on.x, target=on.target),
                50,
                True,
            ),
            "captum NoiseTunnel, 50 samples, default": (
                lambda: tunnel.attribute(on.x, target=on.target, nt_samples=50, stdevs=0.3, abs=False),
                50,
                True,
            ),
            "captum Occlusion 32/16, default": (
                lambda: windows.attribute(on.x, (3, 32, 32), strides=(3, 16, 16), target=on.target),
                169,
                False,
            ),
        }
        for name, (run, count, backward) in jobs.items():
            size = best_chunk(on, backward=backward, rounds=1)
            timings = interleaved(
                {"plain": lambda c=count, s=size, b=backward: plain(on, c, s, backward=b), "theirs": run},  # type: ignore[misc]
                rounds,
            )
            yield f"| {name} | {ratio(timings['theirs'], timings['plain']):.2f} |"
    with contextlib.suppress(ImportError):
        from zennit.attribution import IntegratedGradients as ZennitIG
        from zennit.attribution import SmoothGrad as ZennitSmoothGrad

        eye = torch.eye(1000)[[on.target]]
        for label, attributor in (
            ("zennit IntegratedGradients, 50", ZennitIG(on.model, n_iter=50)),
            ("zennit SmoothGrad, 50", ZennitSmoothGrad(on.model, n_iter=50, noise_level=0.15)),
        ):
            size = best_chunk(on, backward=True, rounds=1)
            timings = interleaved(
                {
                    "plain": lambda s=size: plain(on, 50, s, backward=True),  # type: ignore[misc]
                    "theirs": lambda a=attributor: a(on.x.clone(), eye),  # type: ignore[misc]
                },
                rounds,
            )
            yield f"| {label} | {ratio(timings['theirs'], timings['plain']):.2f} |"


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--networks", nargs="+", default=["resnet50", "efficientnet_lite0"])
    parser.add_argument("--rise", type=int, default=512, help="passes of RISE")
    parser.add_argument("--photos", nargs="+", default=list(PHOTOS), help="for Score-CAM")
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
    print("## Methods of many passes: one thread, contenders in turn, medians of the ratios of each round\n")
    for part in options.parts:
        for line in parts[part]():
            print(line, flush=True)


if __name__ == "__main__":
    main()
