"""Save maps as float16 values in their original resolution, and redraw overlays from them without the network."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..attribution.explanation import Explanation
from ..errors import ExplanationError, ImageError
from ..io.image_io import open_picture
from ..io.preprocess import Frame
from ..render.overlay import overlay, save_picture
from .errors import BatchError, Failure, stops_run, unwritable
from .listing import ImageEntry
from .output_folder import FORMAT, MAP_SUFFIX, MAPS, PREVIEWS
from .run_options import OverlayStyle

_HEADER, _VALUES = "saliency", "values"
FACTS = (
    *("index", "source", "id", "method", "target", "name", "probability", "score", "units", "width", "height"),
    *("input_width", "input_height", "box", "layer", "settings"),
)
"""Columns of the manifest that a saved map contains too."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedMap:
    """The map of one image and method.

    Attributes:
        values: (C, h, w) float16, to be multiplied by `about["scale"]` to get the units of the map.
        about: Metadata for drawing, as JSON values.
    """

    values: NDArray[np.float16]
    about: dict[str, Any]

    @classmethod
    def of(cls, explanation: Explanation, about: Mapping[str, Any]) -> SavedMap:
        """Convert the values of an explanation of one image.

        The values are divided by a power of two so that the largest magnitude lies between 1/2 and 1. In float16, large
        values then do not overflow, and a gradient of 1e-8 does not become zero.
        """
        values = explanation.values[0].detach().double().cpu().numpy()
        largest = float(np.abs(values).max(initial=0.0))
        scale = math.ldexp(1.0, math.frexp(largest)[1]) if 0 < largest < math.inf else 1.0
        facts = {"shape": list(values.shape), "scale": scale, "sign": explanation.sign}
        return cls((values / scale).astype(np.float16), {**about, **facts})

    def encode(self) -> bytes:
        """Return the content of the file."""
        text = json.dumps({"format": FORMAT, "map": self.about}, sort_keys=True)
        return save({_VALUES: self.values}, metadata={_HEADER: text})

    def explanation(self) -> Explanation:
        """Return the map as an explanation without a picture."""
        about = self.about
        numbers = torch.tensor([[about["score"]], [about["probability"] or 0.0]], dtype=torch.float32, device="cpu")
        return Explanation(
            values=torch.from_numpy(self.values.astype(np.float32) * np.float32(about["scale"]))[None],
            scores=numbers[0],
            method=about["method"],
            settings=about["settings"],
            target=(about["target"],),
            target_names=(about["name"],),
            probabilities=None if about["probability"] is None else numbers[1],
            layer=about["layer"],
            input_size=(about["input_height"], about["input_width"]),
            frames=(None,),
            sign=about["sign"],
        )


def read_map(path: Path) -> SavedMap:
    """Read a saved map.

    Raises:
        ExplanationError: The file is not a map of `saliency batch`, or is damaged.
    """
    try:
        with safe_open(str(path), framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER, "null"))
            values = file.get_tensor(_VALUES) if isinstance(header, dict) and header.get("format") == FORMAT else None
    except (OSError, SafetensorError, ValueError) as error:
        raise ExplanationError(f"{path} cannot be read as a map: {error}") from error
    if values is None or not isinstance(header.get("map"), dict):
        raise ExplanationError(f"{path} is not a map of saliency batch; pass DIR or DIR/maps/*.{MAP_SUFFIX}")
    lacking = [name for name in (*FACTS, "entry", "sign", "scale") if name not in header["map"]]
    if lacking:
        raise ExplanationError(f"{path} is damaged: missing {', '.join(lacking)}")
    return SavedMap(values, header["map"])


@dataclass(frozen=True, slots=True)
class Redrawn:
    """Result for one map.

    Attributes:
        map: The file of the map.
        file: The overlay; None after a failure.
        is_small: Whether the overlay was drawn on the preview, because the image no longer exists or has changed.
        failure: Reason why there is no overlay.
    """

    map: Path
    file: Path | None = None
    is_small: bool = False
    failure: Failure | None = None


def redraw(
    maps: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    style: OverlayStyle | None = None,
    methods: Sequence[str] = (),
    workers: int | None = None,
) -> Iterator[Redrawn]:
    """Draw the overlays of saved maps as OUT/SUB/NAME.METHOD.png, and yield the result of each map in order.

    Args:
        maps: Files, folders of them, or folders that `batch` wrote with `maps=True`.
        out: The folder to write to.
        style: Style of the overlays; by default that of `batch`.
        methods: Methods to draw; empty for all.
        workers: Number of drawing threads; None for the default of `ThreadPoolExecutor`.

    Raises:
        BatchError: There are no maps, there are no maps of these methods, or the folder cannot be written to.
        ExplanationError: A file is not a saved map, or is damaged.
    """
    chosen = style or OverlayStyle()
    files = list(_map_files([maps] if isinstance(maps, str | os.PathLike) else maps))
    present = {path.stem.rpartition(".")[2] for path, _ in files}
    if methods and not present & set(methods):
        raise BatchError(f"no maps of {', '.join(methods)} were saved; there are {', '.join(sorted(present))}")
    first: dict[Path, Path] = {}  # the map of each overlay
    for path, name in files:
        if not methods or path.stem.rpartition(".")[2] in methods:
            overlay_file = Path(out) / name.with_suffix(f".{chosen.format}")
            if first.setdefault(overlay_file, path) != path:
                why = "another of these maps has the same name; draw each folder into a separate output folder"
                yield Redrawn(path, failure=Failure("BatchError", why))
    pictures = lru_cache(maxsize=8)(_picture)  # the methods of an image share its picture
    with ThreadPoolExecutor(workers, "saliency-draw") as pool:
        yield from pool.map(lambda file: _draw(first[file], file, chosen, pictures), first)


def _map_files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[tuple[Path, Path]]:
    """Yield the map files, each with its path relative to the folder of maps."""
    for path in map(Path, paths):
        if not path.is_dir():
            yield path, Path(path.name)
            continue
        inside = path / MAPS if (path / MAPS).is_dir() else path
        files = sorted(inside.rglob(f"*.{MAP_SUFFIX}"))
        if not files:
            raise BatchError(f"{path} contains no maps; saliency batch --maps (maps=True) saves them")
        yield from ((file, file.relative_to(inside)) for file in files)


def _picture(entry: str, previews: Path) -> tuple[Image.Image, bool]:
    """Return the picture of a map, or else its preview, and whether it is the preview."""
    image = ImageEntry.from_json(entry)
    try:
        picture = image.open()
        if image.current_stamp() != image.stamp:
            raise ImageError("it has changed since it was explained")
        return picture, False
    except ImageError:
        try:
            return open_picture(previews / f"{image.name}.jpg"), True
        except ImageError:
            pass
        raise


def _draw(
    path: Path, file: Path, style: OverlayStyle, pictures: Callable[[str, Path], tuple[Image.Image, bool]]
) -> Redrawn:
    saved = read_map(path)
    about = saved.about
    root = str(path.absolute()).removesuffix(f"{MAPS}/{about['id']}.{about['method']}.{MAP_SUFFIX}")
    try:
        picture, is_small = pictures(about["entry"], Path(root) / PREVIEWS)
        across, down = picture.width / about["width"], picture.height / about["height"]
        left, top, right, bottom = about["box"]
        frame = Frame(picture, (left * across, top * down, right * across, bottom * down))
        drawing = overlay(
            replace(saved.explanation(), frames=(frame,)),
            opacity=style.opacity,
            colormap=style.colormap,
            sign=style.sign,
            percentile=style.percentile,
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        save_picture(drawing, file)
    except Exception as error:
        if stops_run(error):
            raise unwritable(file.parent, error) from error  # type: ignore[arg-type]
        return Redrawn(path, failure=Failure.of(error))
    return Redrawn(path, file, is_small)
