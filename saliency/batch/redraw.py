"""Overlays drawn again from kept maps, in other colours, without the network."""

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
from .engine_local import cores
from .errors import BatchError, Failure, stops_everything, unwritable
from .image_entry import Photo, open_photo, stamp_of
from .map_store import Kept, read_map
from .output_folder import MAP_SUFFIX, MAPS, PREVIEW_SUFFIX
from .output_folder import PHOTOS as PREVIEWS
from .run_options import Look


@dataclass(frozen=True, slots=True)
class Redrawn:
    """What became of one map.

    Attributes:
        source: The photo, as it was named.
        method: The method.
        file: The overlay; None where there is a failure.
        small: Whether it was drawn on the small preview, because the photo is gone or has changed.
        failure: Why there is none.
    """

    source: str
    method: str
    file: Path | None = None
    small: bool = False
    failure: Failure | None = None


def draw_again(
    maps: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    look: Look | None = None,
    methods: Sequence[str] = (),
    workers: int | None = None,
) -> Iterator[Redrawn]:
    """Draw every map of some files again: OUT/SUB/NAME.METHOD.png, one after the other as they are done.

    Args:
        maps: Files, folders of them, or folders that `batch` made with `maps=True`.
        out: Where to.
        look: How; by default as `batch` does.
        methods: Only these; all where none is named.
        workers: Threads that draw; by default one per core.

    Raises:
        BatchError: There are no maps, or none of these methods, or the folder cannot be written to.
        ExplanationError: A file is no map of ours, or is damaged.
    """
    chosen, folder = look or Look(), Path(out)
    files = list(_files([maps] if isinstance(maps, str | os.PathLike) else maps))
    there: set[str] = set()
    drawn: set[str] = set()
    with ThreadPoolExecutor(workers or cores(), "saliency-draw") as pool:
        read = ((file, read_map(file)) for file in files)
        for (root, _), group in groupby(read, key=lambda item: (_root(*item), item[1].about["id"])):
            every = [each for _, each in group]
            there.update(each.about["method"] for each in every)
            kept = [each for each in every if not methods or each.about["method"] in methods]
            twice = [each for each in kept if _name(each) in drawn]
            yield from map(_twice, twice)
            kept = [each for each in kept if _name(each) not in drawn]
            drawn.update(map(_name, kept))
            picture = _picture(root, kept[0]) if kept else None
            if picture is not None:
                yield from pool.map(lambda each, on=picture: _drawn(each, on, folder, chosen), kept)
    if not there & set(methods or there):
        raise BatchError(f"no maps of {', '.join(methods)} were kept; there are {', '.join(sorted(there))}")


def _files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        inside = path / MAPS if (path / MAPS).is_dir() else path
        found = sorted(inside.rglob(f"*.{MAP_SUFFIX}"))
        if not found:
            raise BatchError(f"{path} holds no maps; saliency batch --maps (maps=True) keeps them")
        yield from found


def _root(file: Path, kept: Kept) -> Path:
    """The folder of the run that a map was made by, as long as the map lies where it was written."""
    return Path(str(file.absolute()).removesuffix(f"{MAPS}/{_name(kept)}.{MAP_SUFFIX}"))


def _picture(root: Path, kept: Kept) -> tuple[Image.Image, bool] | Failure:
    """The photo of a map, and whether it is the small one."""
    photo = Photo.from_json(kept.about["entry"])
    try:
        picture = open_photo(photo)
        if stamp_of(photo) != photo.stamp:
            raise ImageError("it has changed since it was explained")
        return picture, False
    except ImageError as error:
        preview = root / PREVIEWS / f"{kept.about['id']}.{PREVIEW_SUFFIX}"
        try:
            return open_picture(preview), True
        except ImageError:
            return Failure.of(error, photo)


def _name(kept: Kept) -> str:
    return f"{kept.about['id']}.{kept.about['method']}"


def _twice(kept: Kept) -> Redrawn:
    why = "another of these maps has the same name; draw each folder into one of its own"
    return Redrawn(kept.about["source"], kept.about["method"], failure=Failure("BatchError", why))


def _drawn(kept: Kept, on: tuple[Image.Image, bool] | Failure, out: Path, look: Look) -> Redrawn:
    about = kept.about
    told = Redrawn(about["source"], about["method"])
    if isinstance(on, Failure):
        return replace(told, failure=on)
    picture, small = on
    across, down = picture.width / about["width"], picture.height / about["height"]
    left, top, right, bottom = about["box"]
    frame = Frame(picture, (left * across, top * down, right * across, bottom * down))
    file = out / f"{_name(kept)}.{look.format}"
    try:
        drawing = overlay(
            replace(kept.explanation(), frames=(frame,)),
            opacity=look.opacity,
            colormap=look.colormap,
            sign=look.sign,
            percentile=look.percentile,
        )
        write_overlay(file, drawing)
    except Exception as error:
        if isinstance(error, OSError) and stops_everything(error):
            raise unwritable(out, error) from error
        return replace(told, failure=Failure.of(error, Photo.from_json(about["entry"])))
    return replace(told, file=file, small=small)
