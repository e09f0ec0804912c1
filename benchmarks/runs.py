"""Measure `saliency compare` and `saliency groups` on drawn scenes: `python -m benchmarks.runs compare|groups|large`.

compare: 20 times 100 scenes. `shapes_cnn` is compared with a copy of itself, with `shapes_shortcut`, and with networks
of the same training from other initial weights, which are trained here, in 8 minutes, and kept in build/runs.
groups: 20 times 200 circles, of which 5 % have a watermark, and 2 times 50 times 200 circles without.
large: the time and memory of groups of 1,000 and 10,000 scenes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from PIL import Image
from torch import nn

import saliency
from benchmarks.train_testbed import train_network
from saliency.batch import batch
from saliency.batch.groups import Group, View, groups
from saliency.batch.runs import ImageChange, RunComparison, compare_runs
from saliency.evaluation.comparison import LEVEL
from saliency.testbed import Task, draw_scenes
from saliency.testbed.shapes import SIZE

BUILD = Path(__file__).parents[1] / "build" / "runs"
SEEDS, IMAGES, FIRST = 20, 100, 3_000_000
NETWORKS = 8  # of other initial weights


def with_seed(seed: int) -> nn.Module:
    """Return `shapes_cnn`, trained from other initial weights."""
    model, file = saliency.load("shapes_cnn"), BUILD / f"cnn-{seed}.pt"
    if not file.is_file():
        BUILD.mkdir(parents=True, exist_ok=True)
        torch.save(train_network("shapes_cnn", seed=seed).state_dict(), file)
    model.load_state_dict(torch.load(file))
    return model


def write_scenes(folder: Path, images: torch.Tensor) -> None:
    folder.mkdir(parents=True)
    for index, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{index:05}.png")


def run(photos: Path, out: Path, model: str | nn.Module, method: str = "grad_cam", **options: Any) -> Path:
    batch(photos, out, model, [method], maps=True, **options)
    return out


@contextmanager
def scenes_and_runs(task: Task) -> Iterator[tuple[Path, dict[str, Path]]]:
    """Yield the folders of the scenes and of the runs of all networks."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        drawn = [draw_scenes(IMAGES, seed=FIRST + seed, task=task).images for seed in range(SEEDS)]
        write_scenes(home / "photos", torch.cat(drawn))
        models: dict[str, str | nn.Module] = {name: f"shapes_{name}" for name in ("cnn", "shortcut")}
        models |= {"copy": "shapes_cnn"} | {f"seed {seed}": with_seed(seed) for seed in range(1, NETWORKS + 1)}
        yield home / "photos", {name: run(home / "photos", home / name, model) for name, model in models.items()}


def say(what: str, comparisons: Sequence[RunComparison]) -> None:
    """Print how often any class is changed, how often circles are the first of them, and the rate of changed images."""
    found = sum(any(row.is_changed for row in each) for each in comparisons)
    first = sum(each[0].is_changed and each[0].name == "circle" for each in comparisons)
    classes = sum(row.is_changed for each in comparisons for row in each) / sum(map(len, comparisons))
    images = 1 - sum(each.unchanged for each in comparisons) / len(comparisons)
    print(f"| {what} | {found} of {len(comparisons)} | {first} | {classes:.1%} | {images:.1%} |", flush=True)


def against(changes: dict[str, list[ImageChange]], name: str, same: Sequence[str]) -> list[RunComparison]:
    """Return the comparisons of each hundred images with a network, where others are the yardstick."""
    chances = [max(rows) for rows in zip(*([row.moved for row in changes[other]] for other in same), strict=True)]
    images = [replace(row, chance=chance) for row, chance in zip(changes[name], chances, strict=True)]
    return [RunComparison(images[start : start + IMAGES]) for start in range(0, len(images), IMAGES)]


def compare() -> None:
    print("| compared with `shapes_cnn`, yardstick | runs with a changed class | circles first | classes | images |")
    print("|---|---|---|---|---|")
    tasks: tuple[Task, ...] = ("shortcut", "planted")  # circles with a watermark, and the same scenes without
    for task in tasks:
        with scenes_and_runs(task) as (photos, runs):
            changes = {name: changes_of(runs["cnn"], run) for name, run in runs.items() if name != "cnn"}
            seeds = [f"seed {seed}" for seed in range(1, NETWORKS + 1)]
            mirrored = compare_runs(runs["cnn"], runs["copy"], mirrored=True).images
            by_name = {row.name: row.chance or 0.0 for row in mirrored}
            changes["mirrored"] = [replace(row, moved=by_name[row.name]) for row in changes["copy"]]
            for name in ("copy", "shortcut"):
                for same in (seeds[:1], seeds[:3], seeds, ["mirrored"]):
                    say(f"{task}, {name}; {same[0]}, {len(same)} in all", against(changes, name, same))
            for count in (1, 3, NETWORKS - 1):
                rotated = [(seeds[index], [*seeds[index + 1 :], *seeds[:index]][:count]) for index in range(NETWORKS)]
                found = [part for name, same in rotated for part in against(changes, name, same)]
                say(f"{task}, another seed; {count} seeds", found)
            say(f"{task}, another seed; mirrored", [p for name in seeds for p in against(changes, name, ["mirrored"])])
            if task == "planted":
                draws = [
                    run(
                        photos,
                        photos.parent / f"draw {seed}",
                        "shapes_cnn",
                        "smooth_grad",
                        options={"seed": seed, "passes": 5},
                    )
                    for seed in range(3)
                ]
                changes = {str(seed): changes_of(draws[0], draws[seed]) for seed in (1, 2)}
                say(f"{task}, SmoothGrad, another draw; 1 draw", against(changes, "1", ["2"]))


def circles(seed: int, share: float, corner: str, count: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of circles, and which of them have a watermark, at the upper left or the farthest corner."""
    scenes = draw_scenes(6 * count, seed=FIRST + seed, task="shortcut", watermarked=(share, 0, 0, 0, 0))
    kept = (scenes.labels == 0).nonzero()[:count, 0]
    marked = scenes.watermark[kept].flatten(1).any(1)
    if corner == "farthest":
        return scenes.images[kept], marked
    images, pixels = scenes.without(scenes.watermark)[kept], torch.arange(SIZE)
    stripes = 255 * (0.1 + 0.8 * ((pixels + pixels[:, None]) % 4 < 2).float())
    images[marked, :, 2:8, 2:14] = stripes[2:8, 2:14].to(torch.uint8)
    return images, marked


def found_groups(images: torch.Tensor, model: str, view: View) -> list[Group]:
    """Return the groups of one class of images."""
    with tempfile.TemporaryDirectory() as name:
        write_scenes(Path(name, "photos"), images)
        return list(groups(run(Path(name, "photos"), Path(name, "run"), model, target=0), view))


def find_groups() -> None:
    print("| circles | view | the watermark's group is first | it alone | p < 0.05 |")
    print("|---|---|---|---|---|")
    for corner in ("upper left", "farthest"):
        for view in get_args(View):
            first = alone = clear = 0
            for seed in range(SEEDS):
                images, marked = circles(seed, 0.05, corner)
                found = found_groups(images, "shapes_shortcut", view)
                if not found:
                    continue
                inside = {int(Path(overlay).name[:5]) for overlay in found[0].examples}
                hits = sum(bool(marked[index]) for index in inside)
                first += 2 * hits > len(inside)
                alone += found[0].images == int(marked.sum()) and hits == len(inside)
                clear += found[0].p < LEVEL
            print(f"| watermark, {corner} corner | {view} | {first} of {SEEDS} | {alone} | {clear} |", flush=True)
    for model in ("shapes_shortcut", "shapes_cnn"):
        clear = sum(
            bool(found) and found[0].p < LEVEL
            for found in (found_groups(circles(seed, 0, "farthest")[0], model, "channels") for seed in range(50, 100))
        )
        print(f"| without watermark, `{model}` | channels | | | {clear} of 50 |", flush=True)


# Prints the peak memory in KiB, without that of the parent, which `getrusage` includes.
MEASURED = """import re, sys
from pathlib import Path
from saliency.cli import main
main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+([0-9]+)", Path("/proc/self/status").read_text())[1])"""


def measure_large() -> None:
    print("| maps | view | seconds | peak memory (MiB) |")
    print("|---|---|---|---|")
    for count in (1_000, 10_000):
        with tempfile.TemporaryDirectory() as name:
            drawn = [
                draw_scenes(1_000, seed=2 * FIRST + seed, task="shortcut").images for seed in range(count // 1_000)
            ]
            write_scenes(Path(name, "photos"), torch.cat(drawn))
            folder = run(Path(name, "photos"), Path(name, "run"), "shapes_shortcut")
            for view in get_args(View):
                words = [sys.executable, "-c", MEASURED, "groups", str(folder), "--view", view, "--quiet"]
                start = time.monotonic()
                peak = int(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout) // 1024  # noqa: S603
                print(f"| {count:,} | {view} | {time.monotonic() - start:.0f} | {peak} |", flush=True)


def changes_of(first: Path, second: Path) -> list[ImageChange]:
    return sorted(compare_runs(first, second).images, key=lambda change: change.name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"compare": compare, "groups": find_groups, "large": measure_large}[sys.argv[1]]()
