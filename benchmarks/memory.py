"""Measure the peak memory of Grad-CAM against a plain forward pass and against recording the whole graph.

The gradient of a volume of 96 voxels along each edge is measured against a forward and a backward by hand. A third
table has the peak of a gradient of a large image in tiles, with a network that needs almost nothing itself; a fourth
one has the peak of a map of a word of a vision-language model.

Each contender runs in its own process. The result is the peak of the resident set during the call, minus the resident
set before it. Linux only, since it reads /proc.
"""

from __future__ import annotations

import argparse
import gc
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import saliency
from benchmarks.timing import verdict

TARGET, VOLUME_TARGET, ANSWER_TARGET = 0.25, 1.15, 1.15
ANSWERS = ("backward by hand", "vanilla_gradient", "input_x_gradient", "attn_lrp", "cp_lrp")
TILED_TARGET = 1536  # MiB for an image of 10,000 x 10,000 pixels


def plain(model: torch.nn.Module, x: Tensor) -> None:
    """Run one forward pass without a graph."""
    with torch.no_grad():
        model(x)


def full_graph(model: torch.nn.Module, x: Tensor) -> None:
    """Run Grad-CAM in the usual way: with a hook on the layer, and a graph that starts at the input."""
    activations: list[Tensor] = []
    handle = model.get_submodule("layer4").register_forward_hook(
        lambda module, inputs, output: activations.append(output)
    )
    score = model(x.detach().requires_grad_())[:, 0].sum()
    handle.remove()
    (gradient,) = torch.autograd.grad(score, activations)
    (gradient.mean((2, 3), keepdim=True) * activations[0]).sum(1)


def ours(model: torch.nn.Module, x: Tensor) -> None:
    """Run this project's Grad-CAM on the default layer, for the first time on this model."""
    saliency.GradCAM(model).attribute(x, 0)


def captum(model: torch.nn.Module, x: Tensor) -> None:
    """Run captum's Grad-CAM."""
    from captum.attr import LayerGradCam

    LayerGradCam(model, model.get_submodule("layer4")).attribute(x, 0)


def grad_cam(model: torch.nn.Module, x: Tensor) -> None:
    """Run pytorch-grad-cam's Grad-CAM."""
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    with GradCAM(model=model, target_layers=[model.get_submodule("layer4")]) as cam:
        cam(input_tensor=x, targets=[ClassifierOutputTarget(0)] * len(x))


def torchcam(model: torch.nn.Module, x: Tensor) -> None:
    """Run torchcam's Grad-CAM."""
    from torchcam.methods import GradCAM

    with GradCAM(model, "layer4") as cam:
        cam(0, model(x.detach().requires_grad_()))


def backward(model: torch.nn.Module, x: Tensor) -> None:
    """Run a forward and a backward to the input by hand."""
    x = x.detach().requires_grad_()
    torch.autograd.grad(model(x)[:, 0].mean(), x)


def gradient(model: torch.nn.Module, x: Tensor) -> None:
    """Run this project's gradient of the mean of a class over all voxels."""
    saliency.VanillaGradient(model).attribute(x, lambda output: output[:, 0].flatten(1).mean(1))


def unet() -> torch.nn.Module:
    """Return a 3-D U-Net of MONAI."""
    import monai.networks.nets

    networks: Any = monai.networks.nets
    model: torch.nn.Module = networks.BasicUNet(3, in_channels=1, out_channels=2, features=(8, 8, 16, 32, 64, 8))
    return model.eval()


VOLUMES = {contender.__name__: contender for contender in (backward, gradient)}
CONTENDERS: dict[str, Callable[[torch.nn.Module, Tensor], None]] = {
    contender.__name__: contender for contender in (plain, full_graph, ours, captum, grad_cam, torchcam)
}


def child(name: str, batch: int, size: int) -> None:
    """Print the peak memory of one contender, in MiB."""
    torch.set_num_threads(1)
    is_volume = name in VOLUMES
    model = unet() if is_volume else saliency.load("resnet50", weights=None)
    contender = (CONTENDERS | VOLUMES)[name]
    shape = (1, size, size, size) if is_volume else (3, size, size)
    # Make a small call first, so that libraries and kernels are loaded before the peak is reset.
    contender(model, torch.zeros(1, shape[0], *[32 if is_volume else 64] * (len(shape) - 1)))
    if name == "ours":
        model = saliency.load("resnet50", weights=None)
    x = torch.randn(batch, *shape)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    contender(model, x)
    print(f"{(status('VmHWM') - before) / 1024:.1f}")


def tiled_child(kind: str, size: int) -> None:
    """Print the peak memory of a gradient of an image of size x size in tiles, in MiB."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, 8), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    method = saliency.VanillaGradient(model, preprocess=saliency.Preprocess((224, 224)))
    method.attribute(np.zeros((600, 600, 3), np.uint8), 0, tiles=512)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image"
        pixels = np.memmap(path, np.uint8, "w+", shape=(size, size, 3))
        pixels[:] = np.arange(size, dtype=np.uint32)[:, None].astype(np.uint8)
        if kind == "path":
            Image.fromarray(pixels).save(path, "PNG", compress_level=1)
        image = path if kind == "path" else np.memmap(path, np.uint8, "r", shape=(size, size, 3))
        del pixels
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        method.attribute(image, 0, tiles=512)
        print(f"{(status('VmHWM') - before) / 1024:.1f}")


def answer_child(name: str) -> None:
    """Print the peak memory of a map of a word of LLaVA with random weights, 576 patches and 8 layers, in MiB."""
    from tests.vision_language import llava, scene

    torch.set_num_threads(1)

    def run(edge: int, patch: int, **sizes: int) -> float:
        model, processor = llava(edge, patch, **sizes)
        answer = saliency.generate(model.eval(), processor, scene(), "what color is the car", answer="a red car")
        token = answer.written.ids[1]
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        if name == ANSWERS[0]:
            arguments = answer.arguments(answer.inputs, [0])
            pixels = arguments["pixel_values"].detach().requires_grad_()
            row = model(**{**arguments, "pixel_values": pixels}).logits[:, 1]
            torch.autograd.grad((row[:, token] - row.logsumexp(1)).sum(), pixels)
        else:
            saliency.METHODS[name](model).attribute(answer, saliency.words("red"))
        return (status("VmHWM") - before) / 1024

    run(28, 7)  # loads libraries and kernels
    print(f"{run(336, 14, hidden_size=256, intermediate_size=1024, num_hidden_layers=8):.1f}")


def answer_table() -> None:
    """Print the peaks of maps of a word."""
    print(
        "### a word of an answer, LLaVA with 576 patches and 8 layers\n\n| | MiB | share | target |\n|---|---|---|---|"
    )
    peaks = {}
    for name in ANSWERS:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory", "--answer", name]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(3)]  # noqa: S603
        peaks[name] = min(float(run.split()[-1]) for run in runs)
        share = peaks[name] / peaks[ANSWERS[0]]
        goal = "" if name == ANSWERS[0] else verdict(share, ANSWER_TARGET)
        print(f"| {name} | {peaks[name]:.0f} | {share:.3f} | {goal} |", flush=True)


def status(field: str) -> int:
    """Return a field of /proc/self/status, in KiB."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1])


def measure(batch: int, size: int, contenders: Iterable[str] = CONTENDERS) -> dict[str, float]:
    """Return the peak memory of each installed contender, in MiB."""
    peaks = {}
    for name in contenders:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory", "--child", name, str(batch), str(size)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode == 0:
            peaks[name] = float(done.stdout.split()[-1])
        elif "ModuleNotFoundError" not in done.stderr:
            raise RuntimeError(done.stderr)
    return peaks


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--tiled", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    parser.add_argument("--answers", action="store_true", help="print the table of answers alone")
    options = parser.parse_args(arguments)
    if options.answer:
        answer_child(options.answer)
        return
    if options.answers:
        answer_table()
        return
    if options.tiled:
        tiled_child(options.tiled[0], int(options.tiled[1]))
        return
    if options.child:
        child(options.child[0], int(options.child[1]), int(options.child[2]))
        return
    print("## Memory: peak beyond the loaded model, Grad-CAM on resnet50\n")
    for batch, size in ((16, 224), (1, 896)):
        peaks = measure(batch, size)
        print(
            f"### batch {batch} at {size} px\n\n| | MiB | over a forward | share of the full graph's growth | target |"
        )
        print("|---|---|---|---|---|")
        growth = peaks["full_graph"] - peaks["plain"]
        for name, peak in peaks.items():
            share = (peak - peaks["plain"]) / growth
            whole = peak / peaks["full_graph"]
            goal = verdict(whole, TARGET) if name == "ours" else ""
            print(f"| {name} | {peak:.0f} | {peak - peaks['plain']:+.0f} | {share:.3f} (peak: {whole:.3f}) | {goal} |")
        print()
    runs = [measure(1, 96, VOLUMES) for _ in range(3)]
    peaks = {name: min(run[name] for run in runs) for name in VOLUMES}
    share = peaks["gradient"] / peaks["backward"]
    print(
        "### gradient of a volume of 96 x 96 x 96, BasicUNet of MONAI\n\n| | MiB | share | target |\n|---|---|---|---|"
    )
    print(f"| backward by hand | {peaks['backward']:.0f} | | |")
    print(f"| saliency | {peaks['gradient']:.0f} | {share:.3f} | {verdict(share, VOLUME_TARGET)} |")
    print()
    print("### a gradient of 10,000 x 10,000 px in tiles of 512\n\n| image | MiB | target |\n|---|---|---|")
    for kind in ("path", "memmap"):
        command = [sys.executable, "-m", "benchmarks.memory", "--tiled", kind, "10000"]
        peak = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)  # noqa: S603
        print(f"| {kind} | {peak:.0f} | {verdict(peak, TILED_TARGET)} |")
    print()
    answer_table()


if __name__ == "__main__":
    main()
