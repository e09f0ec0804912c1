"""Measure a batch run from JPEGs to Grad-CAM overlays, against its single stages and against other toolkits.

The stages are measured one by one on one thread: reading and preprocessing, the network at the batch size of the run,
drawing and writing. The ideal time of a run is the sum of their times divided by the number of cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from torch import nn

import saliency
from benchmarks.ray_faults import write_photos
from benchmarks.timing import Timing, verdict
from saliency.attribution.allocator import keep_memory
from saliency.batch import OverlayStyle, Progress, batch
from saliency.batch.drawing import ExplainMapper, ImageResults
from saliency.batch.engines import count_cores
from saliency.batch.listing import LISTING, with_names
from saliency.batch.network import Network
from saliency.batch.options import NetworkOptions, OutputOptions
from saliency.batch.plan import BatchSlot
from saliency.batch.sources import find_images
from saliency.io.inputs import open_image

ASSETS = Path(__file__).parent.parent / "assets"
SIZE = (1000, 750)
RATE, RESUME_LARGE, OPEN = 250, 2.0, 2.0
DISTINCT, WARM_UP = 1000, 200  # photos; of the others each is a link to one of them
OVERLAP, FIVE_OVER_ONE, GRAD_CAM, TORCHCAM, MEMORY, RESUME = 1.2, 1.6, 0.30, 0.20, 1.10, 3.0
FIVE = ("grad_cam", "grad_cam_plus_plus", "xgrad_cam", "hires_cam", "layer_cam")
MODELS = {"efficientnet_lite0": "default", "resnet50": None}


def photos(folder: Path, count: int) -> Path:
    """Write different JPEGs of about 1000 x 750 pixels, and return their folder."""
    folder.mkdir()
    originals = [open_image(path) for path in sorted(ASSETS.glob("*.jpg"))]
    for number in range(count):
        picture = originals[number % len(originals)]
        size = (SIZE[0] + number % 7 - 3, SIZE[1] + number % 5 - 2)
        picture.resize(size, Image.Resampling.BICUBIC).save(folder / f"{number:04d}.jpg", quality=90)
    return folder


def ours(source: Path, out: Path, model: nn.Module, methods: tuple[str, ...] = ("grad_cam",), **options: Any) -> None:
    """Run `batch` in this process, in a new output folder."""
    shutil.rmtree(out, ignore_errors=True)
    summary = batch(source, out, model, methods, device="auto", **options)
    if summary.failed:
        raise RuntimeError(str(summary.failures))


def stages(source: Path, out: Path, model: nn.Module, size: int) -> dict[str, float]:
    """Return the CPU seconds of each stage over all photos, one stage after the other."""
    out.mkdir(parents=True, exist_ok=True)
    options = NetworkOptions(model=model)
    network, mapper = Network(options, model), ExplainMapper(options=options, out=out, output=OutputOptions())
    entries = with_names(find_images([source]).entries)
    slots = [BatchSlot(index, entry, ("grad_cam",)) for index, entry in enumerate(entries)]
    times = [time.process_time()]
    loaded = [network.load(slot) for slot in slots]
    times.append(time.process_time())
    results = [
        result for start in range(0, len(loaded), size) for result, _ in network.explain(loaded[start : start + size])
    ]
    times.append(time.process_time())
    for image, result in zip(loaded, results, strict=True):
        mapper.finish(image, ImageResults(result))
    times.append(time.process_time())
    return dict(zip(("read", "network", "draw"), np.diff(times).tolist(), strict=True))


def batch_size(out: Path) -> int:
    """Return the first batch size of a run."""
    return int(json.loads((out / "manifest.json").read_text())["batch_sizes"][0][1])


def grad_cam(source: Path, out: Path, model: nn.Module) -> None:
    """Explain each photo as in the README of pytorch-grad-cam."""
    import cv2
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.image import show_cam_on_image

    out.mkdir(exist_ok=True)
    layer = model.get_submodule("layer4")
    prepare_one: Any = model.preprocess
    for path in sorted(source.iterdir()):
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
        with GradCAM(model=model, target_layers=[layer]) as cam:
            grey = cam(input_tensor=prepare_one(picture)[None], targets=None)[0]
        photo = np.asarray(picture, np.float32) / 255
        drawn = show_cam_on_image(photo, cv2.resize(grey, picture.size), use_rgb=True)
        Image.fromarray(drawn).save(out / f"{path.stem}.png")


def torchcam(source: Path, out: Path, model: nn.Module) -> None:
    """Explain each photo as in the README of torchcam."""
    from torchcam.methods import GradCAM
    from torchcam.utils import overlay_mask
    from torchvision.transforms.functional import to_pil_image

    out.mkdir(exist_ok=True)
    prepare_one: Any = model.preprocess
    for path in sorted(source.iterdir()):
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
        with GradCAM(model, "layer4") as cam:
            scores = model(prepare_one(picture)[None].requires_grad_())
            grey = cam(scores.squeeze(0).argmax().item(), scores)[0]
        drawn = overlay_mask(picture, to_pil_image(grey.squeeze(0), mode="F"), alpha=0.5)
        drawn.save(out / f"{path.stem}.png")


def timed(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Run every contender once per round on all cores. The first round is warm-up and is ignored."""
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, contender in contenders.items():
            cpu_start, start = time.process_time(), time.perf_counter()
            contender()
            if turn:
                cpu[name].append(time.process_time() - cpu_start)
                wall[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(cpu[name]), tuple(wall[name])) for name in contenders}


def overlapping(folder: Path, count: int, rounds: int) -> None:
    """Print the times of a run, its stages and five methods; on resnet50 also those of other toolkits."""
    source = photos(folder / "in", count)
    print(f"## A folder: {count} JPEGs of about 1000x750, Grad-CAM, {count_cores()} cores\n")
    print("| model | measured | seconds (wall) | CPU seconds | ratio (wall) | target |\n|---|---|---|---|---|---|")
    for name, weights in MODELS.items():
        model = saliency.load(name, weights=weights)
        out = folder / "out"
        jpg = OverlayStyle(format="jpg")
        contenders: dict[str, Callable[[], object]] = {
            "ours": partial(ours, source, out, model),
            "ours, one CAM to JPEG": partial(ours, source, out, model, style=jpg),
            "ours, five CAMs to JPEG": partial(ours, source, out, model, FIVE, style=jpg),
        }
        if name == "resnet50":
            contenders["grad-cam's way"] = partial(grad_cam, source, folder / "g", model)
            if find_spec("torchcam"):
                contenders["torchcam's README"] = partial(torchcam, source, folder / "t", model)
        timings = timed(contenders, rounds)
        ours(source, out, model)
        size = batch_size(out)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        stages(source, folder / "s", model, size)
        alone = stages(source, folder / "s", model, size)
        torch.set_num_threads(threads)
        best = sum(alone.values()) / count_cores()
        parts = ", ".join(f"{stage} {1000 * seconds / count:.1f}" for stage, seconds in alone.items())
        line(name, f"ideal: sum of stages / cores (CPU ms per photo: {parts}; batch {size})", best, sum(alone.values()))
        one = timings["ours"]
        line(name, "ours", one.seconds, min(one.cpu), one.seconds / best, OVERLAP)
        jpeg, five = timings["ours, one CAM to JPEG"], timings["ours, five CAMs to JPEG"]
        line(name, "ours, one CAM to JPEG", jpeg.seconds, min(jpeg.cpu))
        ratio = five.seconds / jpeg.seconds
        line(name, "ours, five CAMs to JPEG; ratio to one CAM", five.seconds, min(five.cpu), ratio, FIVE_OVER_ONE)
        for other, goal in (("grad-cam's way", GRAD_CAM), ("torchcam's README", TORCHCAM)):
            if other in timings:
                theirs = timings[other]
                line(
                    name,
                    f"{other}; ratio of ours to it",
                    theirs.seconds,
                    min(theirs.cpu),
                    one.seconds / theirs.seconds,
                    goal,
                )
    print()


def line(model: str, what: str, wall: float, cpu: float, ratio: float | None = None, goal: float | None = None) -> None:
    """Print a row of the table."""
    measured = "" if ratio is None else f"{ratio:.2f}"
    print(f"| {model} | {what} | {wall:.2f} | {cpu:.2f} | {measured} | {verdict(ratio or 0.0, goal)} |", flush=True)


def child(source: str, out: str) -> None:
    """Print the peak memory of a run, in MiB. Call it in a new process."""
    keep_memory()
    ours(Path(source), Path(out), saliency.load("resnet50", weights=None), batch_size=8)
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(int(match[1]) / 1024 if match else 0.0)


def peaks(folder: Path, counts: tuple[int, int]) -> None:
    """Print the peak memory of runs with two numbers of images."""
    peak = []
    for count in counts:
        source = photos(folder / f"in-{count}", count)
        words = ["-m", "benchmarks.folder", "--child", str(source), str(folder / f"out-{count}")]
        done = subprocess.run([sys.executable, "-W", "ignore", *words], capture_output=True, text=True, check=True)  # noqa: S603
        peak.append(float(done.stdout.split()[-1]))
    print("## Memory: peak of the process, resnet50\n\n| photos | MiB | ratio | target |\n|---|---|---|---|")
    print(f"| {counts[0]} | {peak[0]:.0f} | | |")
    print(f"| {counts[1]} | {peak[1]:.0f} | {peak[1] / peak[0]:.3f} | {verdict(peak[1] / peak[0], MEMORY)} |\n")


def link(file: Path, other: Path) -> None:
    """Create a hard link, or a copy if the file has as many links as the file system allows."""
    try:
        os.link(file, other)
    except OSError:
        shutil.copy2(file, other)  # with the time, or the image would count as changed


def finished(folder: Path, count: int) -> list[str]:
    """Create a finished run of many hard links to one image, and return the arguments of `saliency batch`."""
    source, out = folder / "many", folder / "many-out"
    source.mkdir()
    first = source / "00000.jpg"
    open_image(ASSETS / "coffee.jpg").resize((60, 40)).save(first)
    words = [str(source), "--out", str(out)]
    batch(source, out)
    about = json.loads((out / "manifest.json").read_text())
    listed, row = (json.loads((out / name).read_text()) for name in (LISTING, "manifest.jsonl"))
    listing, rows = [], []
    for number in range(count):
        name = f"{number:05d}"
        if number:
            link(first, source / f"{name}.jpg")
            for key in ("overlay", "thumbnail", "heat"):
                link(out / row[key], out / row[key].replace("00000", name))
        listing.append(json.dumps(listed).replace("00000", name))
        files = {key: row[key].replace("00000", name) for key in ("overlay", "thumbnail", "heat", "source", "id")}
        rows.append(json.dumps({**row, **files, "index": number}))
    (out / LISTING).write_text("\n".join(listing) + "\n")
    (out / "manifest.jsonl").write_text("\n".join(rows) + "\n")
    about |= {"counts": {"images": count, "rows": count, "failed": 0}}
    (out / "manifest.json").write_text(json.dumps(about))
    return words


def seconds_to_resume(words: list[str]) -> float:
    """Return the median seconds that `saliency batch` takes on a finished run, including the start of the process."""
    code = "import sys\nfrom saliency.cli import main\nsys.exit(main(['batch', *sys.argv[1:]]))"
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)  # noqa: S603
        seconds.append(time.perf_counter() - start)
        if "nothing to do" not in done.stdout:
            raise RuntimeError(done.stdout + done.stderr)
    return sorted(seconds[1:])[1]


def resuming(folder: Path, count: int) -> None:
    """Print how long `saliency batch` takes on a finished run of links to one image."""
    best = seconds_to_resume(finished(folder, count))
    print(f"## Resume: a finished run of {count} entries, including the start of the process\n")
    print(f"| seconds | target |\n|---|---|\n| {best:.2f} | {verdict(best, RESUME)} |\n")


def seconds_to_open(page: Path, browser: str) -> float:
    """Return the median seconds until a browser shows the first images of a page."""
    from playwright.sync_api import sync_playwright

    seconds = []
    with sync_playwright() as playwright:
        window = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page()
        for _ in range(3):
            window.goto("about:blank")
            start = time.perf_counter()
            window.goto(page.as_uri())
            window.wait_for_selector("html[data-ready] .card img")
            seconds.append(time.perf_counter() - start)
    return sorted(seconds)[1]


def large(folder: Path, count: int) -> None:
    """Print rates and memory of a new run over small photos, every tenth part, and how long it takes to resume it."""
    source, out, model = folder / "large", folder / "large-out", "benchmarks.ray_faults:Small"
    write_photos(source, min(count, DISTINCT))
    for number in range(DISTINCT, count):
        link(source / f"{number % DISTINCT:05d}.jpg", source / f"{number:05d}.jpg")
    marks: list[tuple[int, float, float]] = []

    def mark(progress: Progress) -> None:
        if progress.fresh in (WARM_UP, WARM_UP + 1000, count - 1000) or progress.fresh % max(1, count // 10) == 0:
            marks.append((progress.fresh, time.perf_counter(), psutil.Process().memory_info().rss / 2**20))

    batch(source, out, model, device="cpu", on_progress=mark)
    print(f"## A run: {count} photos of 120x90, a network of two convolutions, {count_cores()} cores\n")
    print("| rows | rows per second | memory, MiB |\n|---|---|---|")
    for (first, start, _), (last, end, memory) in pairwise(sorted(marks)):
        print(f"| {first + 1} to {last} | {(last - first) / (end - start):.0f} | {memory:.0f} |")
    (first, start, _), (last, end, _) = marks[0], marks[-1]
    rate = (last - first) / (end - start)
    print(f"| all | {rate:.0f} (>= {RATE}: {'holds' if rate >= RATE else 'MISSED'}) | |\n")
    best = seconds_to_resume([str(source), "--out", str(out), "--model", model, "--device", "cpu"])
    print("| measured | value | target |\n|---|---|---|")
    print(f"| resume, seconds | {best:.2f} | {verdict(best, RESUME_LARGE)} |")
    print(f"| page, MB | {(out / 'index.html').stat().st_size / 1e6:.1f} | |")
    if browser := shutil.which("chromium"):
        opened = seconds_to_open(out / "index.html", browser)
        print(f"| page, seconds until Chromium has drawn it | {opened:.2f} | {verdict(opened, OPEN)} |")
    print(f"| subfolders of overlays | {sum(path.is_dir() for path in (out / 'overlays').iterdir())} | |\n")


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--photos", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--large", type=int, help="run only a new run of that many small photos")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.child:
        child(*options.child)
        return
    keep_memory()
    with tempfile.TemporaryDirectory() as folder:
        if options.large:
            large(Path(folder), options.large)
            return
        overlapping(Path(folder), options.photos, options.rounds)
        peaks(Path(folder), (options.photos, 8 * options.photos))
        resuming(Path(folder), options.entries)


if __name__ == "__main__":
    main()
