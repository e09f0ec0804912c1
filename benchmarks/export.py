"""Speed of exported programs, on one thread: `attribute`, the program in PyTorch, and the ONNX file in ONNX Runtime."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnxruntime
import torch
import torchvision
from torch import Tensor, nn

import saliency
from benchmarks.timing import Contender, Timing, interleaved, wall_ratio
from saliency.program.export import captured, write_onnx


def vit_b_16() -> nn.Module:
    """Return a vision transformer whose head, zero by default, is drawn."""
    model: nn.Module = torchvision.models.vit_b_16()
    nn.init.normal_(model.get_parameter("heads.head.weight"), std=0.02)
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": torchvision.models.resnet50,
    "mobilenet_v3_large": torchvision.models.mobilenet_v3_large,
    "efficientnet_lite0": partial(saliency.load, "efficientnet_lite0"),
    "vit_b_16": vit_b_16,
}
METHODS = (saliency.GradCAM, saliency.GuidedBackprop)


def measure(method: saliency.Attribution, x: Tensor) -> dict[str, Timing]:
    """Return the times of the map of one image."""
    program, metadata, _ = captured(method, x)
    run = program.module()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write_onnx(program, path, metadata)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def in_pytorch() -> None:
        with torch.no_grad():
            run(x)

    contenders: dict[str, Contender] = {
        "attribute": lambda: saliency.heatmap(method.attribute(x)),
        "pt2": in_pytorch,
        "onnx": lambda: session.run(None, {"image": x.numpy()}),
    }
    return interleaved(contenders, 5)


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    print("\nOne image of 224 px, one thread: the score and the map\n")
    print("| network | method | attribute, ms | .pt2, ms | ratio | .onnx, ms | ratio |\n|---|---|---|---|---|---|---|")
    for name, network in NETWORKS.items():
        torch.manual_seed(0)
        model = network().eval()
        for cls in METHODS:
            try:
                times = measure(cls(model), x)
            except saliency.errors.SaliencyError as refusal:
                print(f"| {name} | {cls.name} | refused: {refusal} | | | | |".replace("\n", " "), flush=True)
                continue
            cells = [f"{1000 * times['attribute'].seconds:.0f}"]
            for kind in ("pt2", "onnx"):
                cells += [f"{1000 * times[kind].seconds:.0f}", f"{wall_ratio(times[kind], times['attribute']):.2f}"]
            print(f"| {name} | {cls.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
