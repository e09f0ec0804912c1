"""One overlay of a 1600x1066 photo, from the JPEG on disk to the PNG on disk, without the network.

Ours against matplotlib's way: `imshow` of the photo, `imshow` of the map with alpha, `savefig` at full size.
Runs are interleaved on one thread, and the ratio is that of the medians. Run: python benchmarks/render.py [repeats]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":  # before the libraries start their threads
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")

import cv2
import torch
from PIL import Image

from saliency.explanation import Explanation
from saliency.pictures import open_picture
from saliency.preprocess import Frame, Preprocess
from saliency.render import overlay, save_picture

SIZE = (1600, 1066)
LIMIT = 0.25  # of matplotlib's time
PHOTO = Path(__file__).parent.parent / "assets" / "coffee.jpg"
PREPROCESS = Preprocess(size=(224, 224), resize=256, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic")


def measure(repeats: int = 15) -> dict[str, dict[str, float]]:
    """Seconds of wall and CPU time by way of drawing, for a CAM and for a gradient map, and their ratios."""
    before = cv2.getNumThreads(), torch.get_num_threads()
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return {name: _compare(values, Path(folder), repeats) for name, values in _maps().items()}
    finally:
        cv2.setNumThreads(before[0])
        torch.set_num_threads(before[1])


def _maps() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "CAM, 7x7": torch.rand(1, 1, 7, 7, generator=generator),
        "gradient, 3x224x224": torch.rand(1, 3, 224, 224, generator=generator),
    }


def _compare(values: torch.Tensor, folder: Path, repeats: int) -> dict[str, float]:
    photo = folder / "photo.jpg"
    open_picture(PHOTO).resize(SIZE, Image.Resampling.BICUBIC).save(photo, quality=90)
    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: draw(photo, values, folder / "ours.png"),
        "matplotlib": lambda: draw_with_matplotlib(photo, values, folder / "matplotlib.png"),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for round_ in range(repeats + 1):
        for name, way in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            way()
            if round_:  # the first round loads what is loaded lazily
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    found: dict[str, float] = {}
    for column, clock in enumerate(("wall", "cpu")):
        medians = {name: statistics.median(each[column] for each in taken) for name, taken in times.items()}
        found |= {f"{name}_{clock}": median for name, median in medians.items()}
        found[f"ratio_{clock}"] = medians["ours"] / medians["matplotlib"]
    return found


def draw(photo: Path, values: torch.Tensor, path: Path) -> None:
    """Our way."""
    picture = open_picture(photo)
    save_picture(overlay(_explained(values, Frame(picture, PREPROCESS.box(picture.size)))), path)


def draw_with_matplotlib(photo: Path, values: torch.Tensor, path: Path) -> None:
    """The usual way, at its best: without pyplot, the map laid on the crop by `extent` and interpolated there."""
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


def _explained(values: torch.Tensor, frame: Frame) -> Explanation:
    return Explanation(
        values=values,
        scores=torch.ones(1),
        method="benchmark",
        settings={},
        target=(0,),
        target_names=("class 0",),
        probabilities=None,
        layer=None,
        input_size=(224, 224),
        frames=(frame,),
        sign="positive",
    )


def main(repeats: int) -> int:
    """Print the table; the exit status says whether the promise holds."""
    measured = measure(repeats)
    print(f"{'map':24}{'ours, ms':>14}{'matplotlib, ms':>18}{'ratio':>16}   (wall / CPU; promised: {LIMIT:.2f})")
    for name, found in measured.items():
        cells = [
            f"{1000 * found[f'{way}_wall']:.1f} / {1000 * found[f'{way}_cpu']:.1f}" for way in ("ours", "matplotlib")
        ]
        ratio = f"{found['ratio_wall']:.3f} / {found['ratio_cpu']:.3f}"
        print(f"{name:24}{cells[0]:>14}{cells[1]:>18}{ratio:>16}")
    return int(any(found["ratio_cpu"] > LIMIT for found in measured.values()))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 15))
