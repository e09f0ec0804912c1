"""Draw overlays from saved maps in another style, without the network."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from PIL import Image

from ..errors import ImageError
from ..io.image_io import open_picture
from ..io.preprocess import Frame
from ..render.overlay import overlay
from .drawing import write_overlay
from .engine_local import count_cores
from .errors import BatchError, Failure, stops_run, unwritable
from .listing import ImageEntry
from .output_folder import MAP_SUFFIX, MAPS, PREVIEWS
from .run_options import OverlayStyle
from .saved_map import SavedMap, read_map


@dataclass(frozen=True, slots=True)
class Redrawn:
    """Result for one map.

    Attributes:
        source: The image, as the user named it.
        method: The method.
        file: The overlay; None after a failure.
        is_small: Whether it was drawn on the preview, because the image no longer exists or has changed.
        failure: Why there is no overlay.
    """

    source: str
    method: str
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
    """Draw the overlays of saved maps: OUT/SUB/NAME.METHOD.png. Yields the result of every map as it is drawn.

    Args:
        maps: Files, folders of them, or folders that `batch` wrote with `maps=True`.
        out: The folder to write to.
        style: How overlays are drawn; by default as `batch` does.
        methods: Methods to draw; empty for all.
        workers: Threads that draw; by default one per core.

    Raises:
        BatchError: There are no maps, or none of these methods, or the folder cannot be written to.
        ExplanationError: A file is not a saved map, or is damaged.
    """
    paths = list(_map_files([maps] if isinstance(maps, str | os.PathLike) else maps))
    present: set[str] = set()
    drawn: set[str] = set()
    with ThreadPoolExecutor(workers or count_cores(), "saliency-draw") as pool:
        pairs = ((path, read_map(path)) for path in paths)
        for (root, _), group in groupby(pairs, key=lambda pair: (_root(*pair), pair[1].about["id"])):
            chosen = []
            for _, saved in group:
                present.add(saved.about["method"])
                if methods and saved.about["method"] not in methods:
                    continue
                if _name(saved) in drawn:
                    reason = "another of these maps has the same name; draw each folder into one of its own"
                    failure = Failure("BatchError", reason)
                    yield Redrawn(saved.about["source"], saved.about["method"], failure=failure)
                else:
                    drawn.add(_name(saved))
                    chosen.append(saved)
            if chosen:
                picture = _picture(root, chosen[0])
                yield from pool.map(
                    lambda saved, on=picture: _draw(saved, on, Path(out), style or OverlayStyle()), chosen
                )
    if not present & set(methods or present):
        raise BatchError(f"no maps of {', '.join(methods)} were saved; there are {', '.join(sorted(present))}")


def _map_files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        inside = path / MAPS if (path / MAPS).is_dir() else path
        files = sorted(inside.rglob(f"*.{MAP_SUFFIX}"))
        if not files:
            raise BatchError(f"{path} contains no maps; saliency batch --maps (maps=True) saves them")
        yield from files


def _root(path: Path, saved: SavedMap) -> Path:
    """Return the folder of the run that wrote a map, if the map was not moved."""
    return Path(str(path.absolute()).removesuffix(f"{MAPS}/{_name(saved)}.{MAP_SUFFIX}"))


def _name(saved: SavedMap) -> str:
    return f"{saved.about['id']}.{saved.about['method']}"


def _picture(root: Path, saved: SavedMap) -> tuple[Image.Image, bool] | Failure:
    """Return the picture of a map, and whether it is the preview."""
    image = ImageEntry.from_json(saved.about["entry"])
    try:
        picture = image.open()
        if image.current_stamp() != image.stamp:
            raise ImageError("it has changed since it was explained")
        return picture, False
    except ImageError as error:
        try:
            return open_picture(root / PREVIEWS / f"{saved.about['id']}.jpg"), True
        except ImageError:
            return Failure.of(error, image.path, image.source)


def _draw(saved: SavedMap, on: tuple[Image.Image, bool] | Failure, out: Path, style: OverlayStyle) -> Redrawn:
    about = saved.about
    result = Redrawn(about["source"], about["method"])
    if isinstance(on, Failure):
        return replace(result, failure=on)
    picture, is_small = on
    across, down = picture.width / about["width"], picture.height / about["height"]
    left, top, right, bottom = about["box"]
    frame = Frame(picture, (left * across, top * down, right * across, bottom * down))
    file = out / f"{_name(saved)}.{style.format}"
    try:
        drawing = overlay(
            replace(saved.explanation(), frames=(frame,)),
            opacity=style.opacity,
            colormap=style.colormap,
            sign=style.sign,
            percentile=style.percentile,
        )
        write_overlay(file, drawing)
    except Exception as error:
        if isinstance(error, OSError) and stops_run(error):
            raise unwritable(out, error) from error
        return replace(result, failure=Failure.of(error))
    return replace(result, file=file, is_small=is_small)
