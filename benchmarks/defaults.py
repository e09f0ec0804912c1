"""Share of maps on a letter that a text recogniser reads, and at a point that a network regresses.

pip install --no-deps rapidocr_onnxruntime onnx2torch facenet-pytorch, then: python -m benchmarks.defaults
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

import saliency

WORDS = ("harvest", "monkey", "plain", "guitar")
RADIUS = 6  # of a point, in pixels of 48

Case = tuple[Tensor, Any, Tensor]  # the input, the target, and the pixels (H, W) of the letter or point


class Part(nn.Module):
    """A model, of whose outputs one is returned."""

    def __init__(self, model: nn.Module, index: int | None = None) -> None:
        super().__init__()
        self.model, self.index = model.eval().requires_grad_(True), index

    def forward(self, x: Tensor) -> Any:
        """Run the model."""
        output = self.model(x)
        return output if self.index is None else output[self.index]


def recogniser() -> tuple[nn.Module, list[str]]:
    """Return PP-OCRv4, with its letters; the first is the blank."""
    onnx: Any = import_module("onnx")
    package: Any = find_spec("rapidocr_onnxruntime")
    raw = onnx.load(Path(package.submodule_search_locations[0]) / "models" / "ch_PP-OCRv4_rec_infer.onnx")
    for node in [node for node in raw.graph.node if node.op_type == "Constant"]:
        weights = onnx.helper.get_attribute_value(node.attribute[0])
        weights.name = node.output[0]
        raw.graph.initializer.append(weights)
        raw.graph.node.remove(node)
    norms: Any = import_module("onnx2torch.node_converters.batch_norm")
    norms.get_shape_from_value_info = lambda _info: (1, 1, 1, 1)  # the file states no shapes
    letters = next(entry.value for entry in raw.metadata_props if entry.key == "character")
    return Part(import_module("onnx2torch").convert(raw)), ["", *letters.split("\n"), " "]


def letters_of(model: nn.Module, letters: list[str]) -> Iterator[Case]:
    """Yield every second letter of the words that is read, with the logarithm of its probability as the target."""
    font = ImageFont.load_default(34)
    for word in WORDS:
        image, x = Image.new("RGB", (320, 48), "white"), 8.0
        draw, spans = ImageDraw.Draw(image), []
        for letter in word:
            draw.text((x, 3), letter, "black", font)
            spans.append((int(x), int(x := x + draw.textlength(letter, font))))
        batch = torch.tensor(np.array(image)).permute(2, 0, 1).float()[None] / 127.5 - 1
        with torch.no_grad():
            read = model(batch)[0]
        for letter, (left, right) in list(zip(word, spans, strict=True))[1::2]:
            index = letters.index(letter)
            step = int(read[:, index].argmax())
            pixels = torch.zeros(48, 320, dtype=torch.bool)
            pixels[:, left:right] = True
            if int(read[step].argmax()) == index:
                yield batch, lambda output, at=(step, index): output[:, *at].log(), pixels


def points_of(model: nn.Module, certain: nn.Module) -> Iterator[Case]:
    """Yield the ten coordinates of faces around the face of a photo."""
    photo = Image.open("assets/astronaut.jpg")
    scale = photo.width / 512
    for shift in ((-0.08, -0.08), (0, 0), (0.08, 0.08), (-0.08, 0.08), (0.08, -0.08)):
        for size in (1.0, 1.15):
            edge = 110 * size * scale
            left, top = ((centre + 110 * by) * scale - edge / 2 for centre, by in zip((224, 117), shift, strict=True))
            face = photo.crop((int(left), int(top), int(left + edge), int(top + edge))).resize((48, 48))
            batch = (torch.tensor(np.array(face)).permute(2, 0, 1).float()[None] - 127.5) / 128
            with torch.no_grad():
                if float(certain(batch)[0, 1]) < 0.9:
                    continue
                places = model(batch)[0] * 48
            rows, columns = torch.meshgrid(torch.arange(48), torch.arange(48), indexing="ij")
            for index in range(10):
                near = [(axis - places[index % 5 + add]).abs() <= RADIUS for axis, add in ((columns, 0), (rows, 5))]
                yield batch, index, near[0] & near[1]


def measure(name: str, model: nn.Module, cases: list[Case], window: tuple[int, int], stride: tuple[int, int]) -> None:
    """Print the mean share of each method's map, with its standard error."""
    area = np.mean([float(pixels.float().mean()) for *_, pixels in cases])
    print(f"\n{name}: {len(cases)} cases, {area:.3f} of the image\n\n| method | share |\n|---|---|")
    methods = [saliency.GradCAM, saliency.HiResCAM, saliency.LayerCAM, saliency.LRP, saliency.VanillaGradient]
    occlusion = saliency.Occlusion(model, window=window, stride=stride)
    for method in [*(method(model) for method in methods), occlusion]:
        shares = []
        for batch, target, pixels in cases:
            heat = saliency.heatmap(method.attribute(batch, target))[0]
            heat = heat.abs() if method.sign == "signed" else heat.clamp(min=0)
            shares.append(float(heat[pixels].sum() / heat.sum()))
        error = np.nanstd(shares) / len(shares) ** 0.5
        print(f"| `{type(method).__name__}` | {np.nanmean(shares):.2f} ± {error:.2f} |", flush=True)


def measure_field(name: str, model: nn.Module, x: Tensor) -> None:
    """Print how far the cells of the layer of CAMs read: means of 5 cells."""
    layer, outputs = saliency.GradCAM(model).attribute(x, lambda output: output.flatten(1)[:, 0]).layer, list[Tensor]()
    module = model.get_submodule(layer or "")
    handle = module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    x = x.clone().requires_grad_()
    model(x)
    handle.remove()
    sizes, pixels, shares = outputs[0].shape[2:], [], []
    for corner in ((0.0, 0.0), (0.0, 0.99), (0.5, 0.5), (0.5, 0.0), (0.99, 0.99)):
        row, column = (int(size * part) for size, part in zip(sizes, corner, strict=True))
        (gradient,) = torch.autograd.grad(outputs[0][0, :, row, column].square().sum(), x, retain_graph=True)
        centre = (row + 0.5) / sizes[0], (column + 0.5) / sizes[1]
        axes = [(torch.arange(n) + 0.5) / n - middle for n, middle in zip(x.shape[2:], centre, strict=True)]
        far = torch.maximum(*torch.meshgrid(*(axis.abs() for axis in axes), indexing="ij")) > 0.25
        values = gradient[0].abs().sum(0)
        pixels.append(float((values > 0).float().mean()))
        shares.append(float(values[far].sum() / values.sum()))
    print(f"| {name} | {np.mean(pixels):.2f} | {np.mean(shares):.2f} |", flush=True)


def main() -> None:
    """Print all tables."""
    warnings.simplefilter("ignore")
    reader, letters = recogniser()
    measure("letters of PP-OCRv4", reader, list(letters_of(reader, letters)), (48, 16), (48, 8))
    faces = import_module("facenet_pytorch").MTCNN(device="cpu").onet
    model = Part(faces, 1)
    points = list(points_of(model, Part(faces, 2)))
    measure("points of O-Net", model, points, (12, 12), (4, 4))
    lite: Any = saliency.load("efficientnet_lite0")
    print("\n| network | pixels that a cell reads | gradient beyond a quarter of the image |\n|---|---|---|")
    measure_field("EfficientNet-Lite0", lite, lite.preprocess(Image.open("assets/chelsea.jpg"))[None])
    measure_field("PP-OCRv4", reader, next(letters_of(reader, letters))[0])
    measure_field("O-Net", model, points[0][0])


if __name__ == "__main__":
    main()
