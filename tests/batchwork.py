"""A tiny network, tiny images and strict comparisons of folders, for the tests of batch runs."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from saliency import Preprocess
from saliency.batch import Summary, batch
from saliency.batch.engines import LocalEngine
from saliency.batch.report import report
from saliency.batch.store import Manifest, Row, encode

IMPORTED: list[object] = [mpl, LocalEngine, report]
"""What a run imports lazily, imported before the processes that the tests kill."""

WHITE, BLACK = (255, 255, 255), (0, 0, 0)


class Tiny(nn.Module):
    """A classifier of 16 x 16 images that can be told to fail.

    Args:
        nan_on_white: Whether a white image scores NaN.
        error_on_black: Whether a batch with a black image raises.
        most: The largest batch that fits into memory.
    """

    def __init__(self, *, nan_on_white: bool = False, error_on_black: bool = False, most: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU())
        self.head = nn.Linear(8, 5)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        self.preprocess = Preprocess(size=(16, 16), resize=16, mean=(0.5,) * 3, std=(0.5,) * 3)
        self.categories = ("ant", "bee", "cat", "dog", "emu")
        self.nan_on_white, self.error_on_black, self.most = nan_on_white, error_on_black, most
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        means = x.mean((1, 2, 3))
        if self.error_on_black and bool((means < -0.99).any()):
            raise RuntimeError("a black photo is more than this model can bear")
        scores: Tensor = self.head(self.features(x).mean((2, 3)))
        if self.nan_on_white:
            scores = scores + torch.where(means > 0.99, torch.nan, 0.0)[:, None]
        return scores


class FailsOnce(Tiny):
    """A model whose first batch of four images raises, for a reason that no image explains."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 4 and 4 not in self.sizes:
            self.sizes.append(4)
            raise RuntimeError("the driver was restarted")
        return super().forward(x)


def noise(path: Path, seed: int, size: tuple[int, int] = (40, 30)) -> Path:
    """Write an image of coloured noise, in large blocks."""
    blocks = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(blocks).resize(size, Image.Resampling.BICUBIC).save(path)
    return path


def plain(path: Path, color: tuple[int, int, int]) -> Path:
    """Write an image of one colour."""
    Image.new("RGB", (40, 30), color).save(path)
    return path


def photos(folder: Path, count: int) -> list[Path]:
    """Write images 00.png, 01.png, ... of noise."""
    return [noise(folder / f"{number:02d}.png", number) for number in range(count)]


def rows(out: Path) -> list[dict[str, Any]]:
    """Return the rows of the manifest."""
    return [json.loads(line) for line in (out / "manifest.jsonl").read_text("utf-8").splitlines()]


def kinds(out: Path) -> list[str | None]:
    """Return the class of error of each row."""
    return [row["error_kind"] for row in rows(out)]


def contents(out: Path) -> dict[str, object]:
    """Return every file of a folder byte for byte, without time, process and command."""
    found: dict[str, object] = {}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if path.is_dir() or name == ".lock":
            continue
        if name == "manifest.jsonl":
            found[name] = [{**row, "seconds": None} for row in rows(out)]
        elif name == "manifest.json":
            about = json.loads(path.read_text("utf-8"))
            found[name] = {**about, "created": None, "command": None}
        else:
            found[name] = path.read_bytes()
    return found


def assert_same(out: Path, other: Path) -> None:
    """Assert that two folders hold equal files."""
    one, two = contents(out), contents(other)
    assert one.keys() == two.keys(), one.keys() ^ two.keys()
    different = [name for name in one if one[name] != two[name]]
    assert not different, different  # this module's assertions are not rewritten


def forked(function: Callable[..., None], *arguments: object) -> Any:
    """Start a process that has imported everything, and runs a function of this module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.batchwork", "timm"])
    child = context.Process(target=function, args=arguments)
    child.start()
    return child


def run_batch(source: Path, out: Path, options: dict[str, Any], slow: bool = False) -> None:
    """Run a batch in a process that will be killed; on a slow disk it is nearly always in the middle of a file."""
    torch.set_num_threads(1)
    if slow:
        Path.write_bytes = _write_slowly  # type: ignore[assignment, method-assign]
        Manifest.append = _append_slowly  # type: ignore[assignment, method-assign]
    quick(source, out, **options)


def _write_slowly(path: Path, data: bytes) -> int:
    with path.open("wb", buffering=0) as file:
        for half in (data[: len(data) // 2], data[len(data) // 2 :]):
            file.write(half)
            time.sleep(0.001)
    return len(data)


def _append_slowly(
    manifest: Manifest, rows: Sequence[Row], real: Callable[[Manifest, Sequence[Row]], None] = Manifest.append
) -> None:
    whole = b"".join(map(encode, rows))
    end = manifest.path.stat().st_size if manifest.path.exists() else 0
    with manifest.path.open("ab", buffering=0) as file:
        file.write(whole[: len(whole) // 2])
        time.sleep(0.001)
        os.truncate(manifest.path, end)
    real(manifest, rows)


def quick(source: str | Path | list[Path], out: Path, **options: Any) -> Summary:
    """Run a batch with the tiny network."""
    given: dict[str, Any] = {"model": Tiny(), "batch_size": 4, "workers": 2, **options}
    return batch(source, out, **given)
