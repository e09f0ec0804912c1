"""Kill workers of a run on Ray at random, and check that nothing is lost: `python -m benchmarks.ray_faults`.

Four workers on this machine explain small photos. After every share of the photos, a random worker gets SIGKILL. Every
photo must have one row without an error, and every file must equal the file of a run on this machine alone. If a file
differs, a second run on this machine shows which of the two runs is the exception.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import tempfile
import time
import warnings
from itertools import combinations
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image
from torch import Tensor, nn

from saliency import Preprocess
from saliency.batch import Progress, batch
from saliency.batch.store import IMAGE_FILES, MANIFEST, read_rows

WORKERS = 4


class Small(nn.Module):
    """A classifier of two convolutions with random weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU())
        self.head = nn.Linear(8, 5)
        self.preprocess = Preprocess(size=(64, 64), resize=64, mean=(0.5,) * 3, std=(0.5,) * 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(x).mean((2, 3)))
        return scores


def write_photos(folder: Path, count: int) -> None:
    """Write different small photos of random colours."""
    folder.mkdir()
    colors = torch.randint(0, 256, (count, 3, 4, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for number, blocks in enumerate(colors.numpy()):
        Image.fromarray(blocks).resize((120, 90), Image.Resampling.BICUBIC).save(folder / f"{number:05d}.jpg")


def kill_worker() -> int:
    """Kill a random process that holds the model, and return its number; 0 if all are restarting."""
    for one in random.sample(children := psutil.Process().children(recursive=True), len(children)):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "MapWorker" in " ".join(one.cmdline()):
                one.kill()
                return int(one.pid)
    return 0


def describe(name: str, runs: dict[str, Path]) -> str:
    """Return which runs have equal files of a name, and the largest difference of a pixel between the first two."""
    files = {run: (folder / name).read_bytes() for run, folder in runs.items()}
    equal = [f"{one} = {two}" for one, two in combinations(files, 2) if files[one] == files[two]]
    one, two = (np.asarray(Image.open(io.BytesIO(file)).convert("RGBA"), int) for file in list(files.values())[:2])
    size = abs(one - two) if one.shape == two.shape else np.array([255])
    return (
        f"{name}: {', '.join(equal) or 'all differ'}; {(size > 0).sum()} values differ, by at most {size.max()} of 255"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the number of killed workers, and of lost or different files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=10)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    killed: list[int] = []

    def kill_now_and_then(progress: Progress) -> None:
        if len(killed) < options.kills and progress.fresh > len(killed) * options.photos // (options.kills + 1):
            killed.extend(filter(None, [kill_worker()]))

    with tempfile.TemporaryDirectory() as folder:
        source, here, there, again = (Path(folder, name) for name in ("in", "local", "ray", "again"))
        write_photos(source, options.photos)
        batch(source, here, Small(), batch_size=8)
        start = time.perf_counter()
        batch(source, there, Small(), engine="ray", workers=WORKERS, batch_size=8, on_progress=kill_now_and_then)
        seconds = time.perf_counter() - start
        rows = [row for row, _ in read_rows(there / MANIFEST)]
        names = [row[name] for row in rows for name in IMAGE_FILES if row[name]]
        lost = options.photos - sum(row["error"] is None for row in rows)
        different = [name for name in names if (there / name).read_bytes() != (here / name).read_bytes()]
        if different:
            batch(source, again, Small(), batch_size=8)
        runs = {"local": here, "ray": there, "local again": again}
        descriptions = [describe(name, runs) for name in different]
    print(
        "| photos | workers | killed | rows lost | files | files that differ | seconds |\n|---|---|---|---|---|---|---|"
    )
    print(
        f"| {options.photos} | {WORKERS} | {len(killed)} | {lost} | {len(names)} | {len(different)} | {seconds:.0f} |",
    )
    print("\n".join(descriptions))
    if lost or different or len(rows) != options.photos:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
