"""Measure the peak memory of calls: CAMs, gradients of volumes and of large images, words of answers, many passes.

Grad-CAM is measured against a plain forward pass and against recording the whole graph; a gradient of a volume, and the
map of a word of a vision-language model, against a forward and a backward by hand. The network of the large image in
tiles needs almost nothing itself. A method of many passes must need as much memory for 500 passes as for 50.

Each call runs in its own process. The result is the peak of the resident set during the call, minus the resident set
before it. Linux only, since it reads /proc.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import saliency
from benchmarks.timing import verdict
from saliency.attribution.base import Attribution

TARGET, WHOLE_TARGET, PASSES_TARGET = 0.25, 1.15, 1.10
TILED_TARGET = 1536  # MiB for an image of 10,000 x 10,000 pixels
FEW, MANY = 50, 500
ANSWERS = ("backward by hand", "vanilla_gradient", "input_x_gradient", "attn_lrp", "cp_lrp")
MANY_PASSES: dict[str, Callable[[nn.Module, int], Attribution]] = {
    "integrated_gradients": lambda model, count: saliency.IntegratedGradients(model, steps=count),
    "smooth_grad": lambda model, count: saliency.SmoothGrad(model, passes=count),
    "rise": lambda model, count: saliency.RISE(model, passes=count),
    "kernel_shap": lambda model, count: saliency.KernelSHAP(model, passes=count),
}


def status(field: str) -> int:
    """Return a field of /proc/self/status, in KiB."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1])


def growth(run: Callable[[], object]) -> float:
    """Return how much a call increases the peak memory of this process, in MiB."""
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    run()
    return (status("VmHWM") - before) / 1024


def in_new_processes(
    function: Callable[..., float], calls: Sequence[tuple[object, ...]], threshold: int = 2**20
) -> Iterator[float]:
    """Yield the result of each call of a function of a benchmark, as many at a time as there are cores.

    A fixed threshold makes glibc return each larger block when it is freed, so holes in the heap, which differ by a
    third from run to run, do not count.
    """
    module, name = Path(function.__code__.co_filename).stem, function.__name__
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(threshold)}

    def run(arguments: tuple[object, ...]) -> float:
        code = f"from benchmarks.{module} import {name}; print({name}(*{arguments!r}))"
        command = [sys.executable, "-W", "ignore", "-c", code]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)  # noqa: S603
        return float(done.stdout.split()[-1])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(run, calls)


def plain(model: nn.Module, x: Tensor) -> None:
    """Run one forward pass without a graph."""
    with torch.no_grad():
        model(x)


def full_graph(model: nn.Module, x: Tensor) -> None:
    """Run Grad-CAM in the usual way: with a hook on the layer, and a graph that starts at the input."""
    activations: list[Tensor] = []
    handle = model.get_submodule("layer4").register_forward_hook(
        lambda module, inputs, output: activations.append(output)
    )
    score = model(x.detach().requires_grad_())[:, 0].sum()
    handle.remove()
    (gradient,) = torch.autograd.grad(score, activations)
    (gradient.mean((2, 3), keepdim=True) * activations[0]).sum(1)


def ours(model: nn.Module, x: Tensor) -> None:
    """Run this project's Grad-CAM on the default layer, for the first time on this model."""
    saliency.GradCAM(model).attribute(x, 0)


def captum(model: nn.Module, x: Tensor) -> None:
    """Run captum's Grad-CAM."""
    from captum.attr import LayerGradCam

    LayerGradCam(model, model.get_submodule("layer4")).attribute(x, 0)


def grad_cam(model: nn.Module, x: Tensor) -> None:
    """Run pytorch-grad-cam's Grad-CAM."""
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    with GradCAM(model=model, target_layers=[model.get_submodule("layer4")]) as cam:
        cam(input_tensor=x, targets=[ClassifierOutputTarget(0)] * len(x))


def torchcam(model: nn.Module, x: Tensor) -> None:
    """Run torchcam's Grad-CAM."""
    from torchcam.methods import GradCAM

    with GradCAM(model, "layer4") as cam:
        cam(0, model(x.detach().requires_grad_()))


def backward(model: nn.Module, x: Tensor) -> None:
    """Run a forward and a backward to the input by hand."""
    x = x.detach().requires_grad_()
    torch.autograd.grad(model(x)[:, 0].mean(), x)


def gradient(model: nn.Module, x: Tensor) -> None:
    """Run this project's gradient of the mean of a class over all voxels."""
    saliency.VanillaGradient(model).attribute(x, lambda output: output[:, 0].flatten(1).mean(1))


def unet() -> nn.Module:
    """Return a 3-D U-Net of MONAI."""
    import monai.networks.nets

    networks: Any = monai.networks.nets
    model: nn.Module = networks.BasicUNet(3, in_channels=1, out_channels=2, features=(8, 8, 16, 32, 64, 8))
    return model.eval()


VOLUMES = {contender.__name__: contender for contender in (backward, gradient)}
CONTENDERS: dict[str, Callable[[nn.Module, Tensor], None]] = {
    contender.__name__: contender for contender in (plain, full_graph, ours, captum, grad_cam, torchcam)
}
PACKAGES = {"captum": "captum", "grad_cam": "pytorch_grad_cam", "torchcam": "torchcam"}


def cam_peak(name: str, batch: int, size: int) -> float:
    """Return the peak memory of a contender for Grad-CAM, or for the gradient of a volume, in MiB."""
    is_volume = name in VOLUMES
    model = unet() if is_volume else saliency.load("resnet50", weights=None)
    contender = (CONTENDERS | VOLUMES)[name]
    shape = (1, size, size, size) if is_volume else (3, size, size)
    # Make a small call first, so that libraries and kernels are loaded before the peak is reset.
    contender(model, torch.zeros(1, shape[0], *[32 if is_volume else 64] * (len(shape) - 1)))
    if name == "ours":
        model = saliency.load("resnet50", weights=None)
    x = torch.randn(batch, *shape)
    return growth(lambda: contender(model, x))


def tiled_peak(kind: str, size: int) -> float:
    """Return the peak memory of a gradient of an image of size x size in tiles, in MiB."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    method = saliency.VanillaGradient(model, preprocess=saliency.Preprocess((224, 224)))
    saliency.Tiled(method, size=512).attribute(np.zeros((600, 600, 3), np.uint8), 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image"
        pixels = np.memmap(path, np.uint8, "w+", shape=(size, size, 3))
        pixels[:] = np.arange(size, dtype=np.uint32)[:, None].astype(np.uint8)
        if kind == "path":
            Image.fromarray(pixels).save(path, "PNG", compress_level=1)
        image = path if kind == "path" else np.memmap(path, np.uint8, "r", shape=(size, size, 3))
        del pixels
        return growth(lambda: saliency.Tiled(method, size=512).attribute(image, 0))


def answer_peak(name: str) -> float:
    """Return the peak memory of a map of a word of LLaVA with random weights, 576 patches and 8 layers, in MiB."""
    from tests.vision_language import llava, scene

    def explained(edge: int, patch: int, **sizes: int) -> float:
        model, processor = llava(edge, patch, **sizes)
        answer = saliency.generate(model.eval(), processor, scene(), "what color is the car", answer="a red car")
        token = answer.answer_text.ids[1]

        def by_hand() -> None:
            arguments = answer.arguments(answer.inputs, 0)
            pixels = arguments["pixel_values"].detach().requires_grad_()
            row = model(**{**arguments, "pixel_values": pixels}).logits[:, 1]
            torch.autograd.grad((row[:, token] - row.logsumexp(1)).sum(), pixels)

        if name == ANSWERS[0]:
            return growth(by_hand)
        return growth(lambda: saliency.METHODS[name](model).attribute(answer, saliency.words("red")))

    explained(28, 7)  # loads libraries and kernels
    return explained(336, 14, hidden_size=256, intermediate_size=1024, num_hidden_layers=8)


def passes_peak(name: str, count: int) -> float:
    """Return the peak memory of a method of many passes, in MiB."""
    method = MANY_PASSES[name](saliency.load("efficientnet_lite0"), count)
    x = method.read("assets/chelsea.jpg").inputs
    return growth(lambda: method.attribute(x, 285))


def print_shares(title: str, peaks: dict[str, float]) -> None:
    """Print the peaks, and their ratios to the first one."""
    print(f"### {title}\n\n| | MiB | ratio | target |\n|---|---|---|---|")
    first = next(iter(peaks.values()))
    for name, peak in peaks.items():
        goal = verdict(peak / first, WHOLE_TARGET) if peak is not first else ""
        print(f"| {name} | {peak:.0f} | {peak / first:.3f} | {goal} |")
    print(flush=True)


def main() -> None:
    """Print the tables."""
    print("## Memory: peak beyond the loaded model, Grad-CAM on resnet50\n")
    names = [name for name in CONTENDERS if find_spec(PACKAGES.get(name, "torch"))]
    for batch, size in ((16, 224), (1, 896)):
        peaks = dict(zip(names, in_new_processes(cam_peak, [(name, batch, size) for name in names]), strict=True))
        print(
            f"### batch {batch} at {size} px\n\n| | MiB | over a forward | share of the full graph's growth | target |"
        )
        print("|---|---|---|---|---|")
        extra = peaks["full_graph"] - peaks["plain"]
        for name, peak in peaks.items():
            share = (peak - peaks["plain"]) / extra
            whole = peak / peaks["full_graph"]
            goal = verdict(whole, TARGET) if name == "ours" else ""
            print(f"| {name} | {peak:.0f} | {peak - peaks['plain']:+.0f} | {share:.3f} (peak: {whole:.3f}) | {goal} |")
        print(flush=True)
    volumes = in_new_processes(cam_peak, [(name, 1, 96) for name in VOLUMES])
    titles = ("backward by hand", "vanilla_gradient")
    print_shares("gradient of a volume of 96 x 96 x 96, BasicUNet of MONAI", dict(zip(titles, volumes, strict=True)))
    print("### a gradient of 10,000 x 10,000 px in tiles of 512\n\n| image | MiB | target |\n|---|---|---|")
    kinds = ("path", "memmap")
    for kind, peak in zip(kinds, in_new_processes(tiled_peak, [(kind, 10_000) for kind in kinds]), strict=True):
        print(f"| {kind} | {peak:.0f} | {verdict(peak, TILED_TARGET)} |")
    print()
    answers = in_new_processes(answer_peak, [(name,) for name in ANSWERS])
    print_shares("a word of an answer, LLaVA with 576 patches and 8 layers", dict(zip(ANSWERS, answers, strict=True)))
    print("### many passes, EfficientNet-Lite0, one image\n")
    print(f"| | {FEW} passes, MiB | {MANY} passes, MiB | ratio | target |\n|---|---|---|---|---|")
    found = in_new_processes(passes_peak, list(product(MANY_PASSES, (FEW, MANY))), 2**25)
    for name, few, many in zip(MANY_PASSES, found, found, strict=True):
        print(
            f"| {name} | {few:.0f} | {many:.0f} | {many / few:.2f} | {verdict(many / few, PASSES_TARGET)} |", flush=True
        )


if __name__ == "__main__":
    main()
