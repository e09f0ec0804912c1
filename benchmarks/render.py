"""Measure one overlay of a 1600x1066 photo, from a JPEG file to a PNG file, without the network.

The baseline is fast matplotlib code: without pyplot, `imshow` of the map with the `extent` of the crop and bilinear
interpolation, and `savefig` at full size.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
from PIL import Image

from benchmarks.timing import interleaved, ratio, verdict, wall_ratio
from saliency import Explanation, Preprocess, overlay
from saliency.io.geometry import Frame
from saliency.io.inputs import open_image
from saliency.render.overlay import save_drawing
from saliency.targets.question import QuestionFacts

SIZE = (1600, 1066)
TARGET = 0.25  # of matplotlib's time
PHOTO = Path(__file__).parent.parent / "assets" / "coffee.jpg"
PREPROCESS = Preprocess(size=(224, 224), resize=256, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic")
SHAPES = {"CAM, 7x7": (1, 1, 7, 7), "gradient, 3x224x224": (1, 3, 224, 224)}


def draw(photo: Path, values: torch.Tensor, path: Path) -> None:
    """Draw the overlay with this project."""
    picture = open_image(photo)
    save_drawing(overlay(explained(values, Frame(picture, PREPROCESS.box(picture.size)))), path)


def draw_with_matplotlib(photo: Path, values: torch.Tensor, path: Path) -> None:
    """Draw the overlay with matplotlib."""
    from matplotlib.figure import Figure

    with Image.open(photo) as opened:
        picture = opened.convert("RGB")
    left, top, right, bottom = PREPROCESS.box(picture.size)
    figure = Figure(figsize=(picture.width / 100, picture.height / 100), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.imshow(picture)
    map_ = values.sum(dim=1)[0].numpy()
    axes.imshow(map_, cmap="inferno", alpha=0.5, extent=(left, right, bottom, top), interpolation="bilinear")
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    figure.savefig(path)


def explained(values: torch.Tensor, frame: Frame) -> Explanation:
    """Return an explanation with these values."""
    return Explanation(
        values,
        torch.ones(1),
        questions=(QuestionFacts("class 0", 0),),
        frames=(frame,),
        input_size=(224, 224),
        method="benchmark",
        title="benchmark",
        units="benchmark value",
        sign="positive",
    )


def main() -> None:
    """Print the table."""
    print("## Drawing: a 1600x1066 JPEG to an overlay PNG on disk, one thread\n")
    print("| map | ours, ms | matplotlib, ms | ratio (CPU) | (wall) | target |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        photo, png = Path(folder, "photo.jpg"), Path(folder, "overlay.png")
        open_image(PHOTO).resize(SIZE, Image.Resampling.BICUBIC).save(photo, quality=90)
        for name, shape in SHAPES.items():
            values = torch.rand(shape, generator=torch.Generator().manual_seed(0))
            contenders = {"ours": draw, "matplotlib": draw_with_matplotlib}
            timings = interleaved({name: partial(run, photo, values, png) for name, run in contenders.items()}, 10)
            ours, theirs = timings["ours"], timings["matplotlib"]
            cells = [f"{ours.seconds * 1000:.0f}", f"{theirs.seconds * 1000:.0f}", f"{ratio(ours, theirs):.3f}"]
            print(
                "|",
                " | ".join([name, *cells, f"{wall_ratio(ours, theirs):.3f}", verdict(ratio(ours, theirs), TARGET)]),
                "|",
            )
    print()


if __name__ == "__main__":
    main()
