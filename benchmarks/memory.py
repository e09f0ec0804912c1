"""Measure the peak memory of Grad-CAM against a plain forward pass and against recording the whole graph.

The gradient of a volume of 96 voxels along each edge is measured against a forward and a backward by hand.

Each contender runs in its own process. The result is the peak of the resident set during the call, minus the resident
set before it. Linux only, since it reads /proc.
"""

from __future__ import annotations

import argparse
import gc
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import saliency
from benchmarks.timing import verdict

TARGET, VOLUME_TARGET = 0.25, 1.15


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
    options = parser.parse_args(arguments)
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


if __name__ == "__main__":
    main()
