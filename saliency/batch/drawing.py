"""Draw one image: overlays, images of the page, saved maps and manifest rows; and redraw overlays from saved maps.

A map is a file for `Explanation.load`, with float16 values in their original resolution.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from PIL import Image
from safetensors.torch import save

from ..attribution.explanation import Explanation, pack_explanation, read_explanation
from ..errors import ExplanationError, ImageError
from ..evaluation.trust import TrustCard
from ..io.atomic_write import atomic_write
from ..io.inputs import encode, open_image
from ..io.preprocess import Frame, drawable, resize_box, scaled_size
from ..render.blending import (
    DIVERGING,
    SEQUENTIAL,
    ScaledMap,
    box_pixels,
    hatching,
    outline,
    paint,
    placed_box,
    scale_map,
)
from ..render.overlay import save_drawing
from .failures import BatchError, Failure, printable, stops_run, unwritable
from .listing import ImageEntry
from .manifest import Row, make_row
from .network import Cards, LoadedImage, Results, Slot
from .output_folder import MAP_SUFFIX, MAPS, THUMBNAILS, file_names
from .run_options import OverlayStyle, RunOptions

THUMBNAIL_SIDE = 640  # longest side, in pixels, of the image that the page shows
THUMBNAIL_QUALITY, HEAT_QUALITY = 85, 80
CARD_SUFFIXES = ("html", "png")  # files of a trust card of a run without a manifest
CARD_FACTS = (
    *("title", "group", "is_clear", "is_worse", "verdict"),
    *("value", "error", "controls", "control_ranges", "higher_is_better"),
)
CELL_PIXELS = 16  # pixels of the heat image per cell of the map; more pixels add no detail
MAX_COARSENESS = 3  # largest number of thumbnail pixels per heat image pixel, along one side


def write_results(
    options: RunOptions,
    out: Path,
    loaded: LoadedImage,
    results: Results,
    cards: Cards,
    seconds: float = 0.0,
) -> Iterator[Row]:
    """Write the files of one image, and yield one row per method, or a single row if the image could not be read.

    Args:
        options: Options of the run.
        out: Folder of the run.
        loaded: The image.
        results: Results of the methods.
        cards: Trust cards of the methods, if the run has them.
        seconds: Seconds that the network took per method.

    Raises:
        StoppedError: The folder cannot be written to. A run without a manifest reports this as a failed row instead.
    """
    slot = loaded.slot
    facts: dict[str, Any] = {"index": slot.index, "source": printable(slot.entry.source), "id": slot.entry.name}

    def failed(error: Exception, method: str | None, *, is_writing: bool = False) -> Row:
        failure = Failure.of(error, slot.entry.path, slot.entry.source, method or "")
        reason = failure.reason
        if is_writing and stops_run(error):
            if options.with_manifest:
                raise unwritable(out, error) from error
            reason = f"cannot be written: {error.strerror or error}"
        return make_row(**facts | {"method": method, "error": reason, "error_kind": failure.kind})

    if not slot.methods:
        return
    if loaded.failure is not None:
        yield failed(loaded.failure, None)
        return
    try:
        frame = loaded.frame()
        image = frame.image
        facts |= {"width": image.width, "height": image.height, "box": list(frame.box)}
        facts["range"] = loaded.range and list(loaded.range)
        thumbnail = _shrink(image, THUMBNAIL_SIDE) if options.with_manifest else None
        if thumbnail is not None:
            name = file_names(slot.entry, "", "")["photo"]
            facts |= _write(out, "photo", name, encode(thumbnail, "JPEG", quality=THUMBNAIL_QUALITY))
    except Exception as error:  # noqa: BLE001 - any error becomes a failed row
        yield failed(error, None, is_writing=True)
        return
    for method in slot.methods:
        result = results[method]
        if isinstance(result, Exception):
            yield failed(result, method)
            continue
        start = perf_counter()
        try:
            row = _write_method(options, out, slot, result, frame, thumbnail, facts)
        except Exception as error:  # noqa: BLE001 - any error becomes a failed row
            row = failed(error, method, is_writing=True)
        else:
            row["seconds"] = round(seconds + perf_counter() - start, 4)
            try:
                row |= _write_card(options, out, slot, cards[method]) if method in cards else {}
            except Exception as error:  # noqa: BLE001 - any error fails the card; the overlay stays
                why = failed(error, method, is_writing=True)
                row |= {"error": f"no trust card: {why['error']}", "error_kind": why["error_kind"]}
        yield row


def _write_method(
    options: RunOptions,
    out: Path,
    slot: Slot,
    explanation: Explanation,
    frame: Frame,
    thumbnail: Image.Image | None,
    facts: dict[str, Any],
) -> Row:
    """Write the files of one method, and return its row."""
    style, method = options.style, explanation.method
    residual, ledger = explanation.residual, explanation.ledger
    scaled = scale_map(explanation, style.sign, style.percentile, smoothing=style.smoothing)
    probabilities = explanation.probabilities
    facts = {
        **facts,
        "method": method,
        "target": explanation.target[0],
        "target_box": scaled.target_box and list(placed_box(frame, scaled.target_box)),
        "name": explanation.target_names[0],
        "probability": None if probabilities is None else float(probabilities[0]),
        "score": float(explanation.scores[0]),
        "layer": explanation.layer,
        "input_width": explanation.input_size[1],
        "input_height": explanation.input_size[0],
        "settings": dict(explanation.settings),
        "coverage": None if explanation.coverage is None else str(explanation.coverage),
        "residual": None if residual is None else float(residual[0]),
        "ledger": None if ledger is None else dict(zip(explanation.ledger_names, ledger[0].tolist(), strict=True)),
        "sign": scaled.sign,
        "units": explanation.units,
        "floor": scaled.floor,
        "limit": scaled.limit,
        "colormap": style.colormap or (DIVERGING if scaled.sign == "signed" else SEQUENTIAL),
    }
    drawing = paint(frame, scaled, style.colormap, style.opacity)
    if thumbnail is None:
        name = f"{slot.entry.name}.{method}"
        save_drawing(drawing, out / f"{name}.{style.format}")
        if options.maps:
            replace(explanation, frames=(frame,)).save(out / f"{name}.safetensors")
        return make_row(**facts, overlay=f"{name}.{style.format}")
    names = file_names(slot.entry, method, style.format)
    file = out / names["overlay"]
    file.parent.mkdir(parents=True, exist_ok=True)
    save_drawing(drawing, file)
    facts |= {"overlay": names["overlay"], "overlay_bytes": file.stat().st_size}
    facts |= _write(out, "heat", names["heat"], _heat_image(scaled, frame, thumbnail.size, style))
    if options.maps:
        facts |= _write(out, "map", names["map"], _encode_map(explanation, slot.entry, frame, facts["range"]))
    return make_row(**facts)


def _write(out: Path, column: str, name: str, data: bytes) -> dict[str, Any]:
    """Write a file, and return its name and size for the row."""
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out / name) as temporary:
        temporary.write_bytes(data)
    return {column: name, f"{column}_bytes": len(data)}


def _encode_map(explanation: Explanation, entry: ImageEntry, frame: Frame, range: list[float] | None) -> bytes:
    """Return the file of a map, for `Explanation.load`: values in float16, no standard errors, no picture, no times."""
    facts = {"entry": entry.to_json(), "size": frame.image.size, "box": frame.box, "range": range}
    return save(*pack_explanation(replace(explanation, error=None, run_stats=()), facts))


def _write_card(options: RunOptions, out: Path, slot: Slot, card: TrustCard | Exception) -> Row:
    """Write the files of a trust card, and return its columns of the row. Raises `card` if it is an error."""
    if isinstance(card, Exception):
        raise card
    method = card.explanation.method
    if not options.with_manifest:
        for suffix in CARD_SUFFIXES:
            card.save(out / f"{slot.entry.name}.{method}.trust.{suffix}")
        return {"trust": {"summary": card.summary}}
    rows = json.loads(card.to_json())["properties"]
    facts: Row = {"trust": {row["name"]: {key: row[key] for key in CARD_FACTS} for row in rows}}
    names = file_names(slot.entry, method, options.style.format)
    for column in ("card", "card_json"):
        (out / names[column]).parent.mkdir(parents=True, exist_ok=True)
        size = card.save(out / names[column]).stat().st_size
        facts |= {column: names[column], f"{column}_bytes": size}
    return facts


def _heat_image(scaled: ScaledMap, frame: Frame, thumbnail: tuple[int, int], style: OverlayStyle) -> bytes:
    """Encode the heatmap without the image: transparent outside the crop.

    Inside the crop it is opaque. If the opacity follows the map, it is as opaque as the scaled map is strong, with the
    lines around the crop; the page multiplies it by its own opacity.

    The image has the proportions of the thumbnail, and a half or a third of its size if the map cells are large enough.
    """
    scaled = replace(scaled, target_box=None)  # the page draws it
    left, top, right, bottom = frame.box
    cells = (right - left) / scaled.values.shape[1], (bottom - top) / scaled.values.shape[0]
    pitch = min(cells) * thumbnail[0] / frame.image.width
    coarseness = max(1, min(MAX_COARSENESS, int(pitch / CELL_PIXELS)))
    size = math.ceil(thumbnail[0] / coarseness), math.ceil(thumbnail[1] / coarseness)
    plane = Frame(Image.new("RGB", size), resize_box(frame.box, frame.image.size, size))
    heat = paint(plane, scaled, style.colormap, 1.0)
    visibility = np.abs(scaled.values) if style.opacity == "map" else np.ones_like(scaled.values)
    alpha = paint(plane, replace(scaled, values=visibility, sign="positive"), "gray", 1.0)
    heat.putalpha(alpha.convert("L"))
    area = box_pixels(plane)
    pixels = np.array(heat)
    for tone, share, place in hatching(scaled, plane, area):
        pixels[area][place] = (tone, tone, tone, 255 * share)
    if style.opacity == "map":
        for tone, edge in outline(pixels, area):
            edge[:] = (tone, tone, tone, 128)
    heat = Image.fromarray(pixels)
    return encode(heat, "WEBP", quality=HEAT_QUALITY, method=0)


def _shrink(image: Image.Image, longest: int) -> Image.Image:
    """Return the image with no side longer than `longest`."""
    if max(image.size) <= longest:
        return image
    size = scaled_size(image.size, longest)
    return image.resize(size, Image.Resampling.BILINEAR, reducing_gap=1.0)  # averages whole blocks first


# Saved maps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Redrawn:
    """Result for one map.

    Attributes:
        map: The file of the map.
        file: The overlay; None after a failure.
        is_small: Whether the overlay was drawn on the thumbnail, because the image no longer exists or has changed.
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
        style: Style of the overlays; by default the default style of `batch`.
        methods: Methods to draw; empty for all.
        workers: Number of drawing threads; None for the default of `ThreadPoolExecutor`.

    Raises:
        BatchError: The folder contains no maps of these methods, or the output folder cannot be written to.
        ExplanationError: A file is not a saved map, or is damaged.
    """
    chosen = style or OverlayStyle()
    files = list(_map_files([maps] if isinstance(maps, str | os.PathLike) else maps))
    present = {path.stem.rpartition(".")[2] for path, _ in files}
    if methods and not present & set(methods):
        raise BatchError(f"no maps of {', '.join(methods)} were saved; there are maps of {', '.join(sorted(present))}")
    first: dict[Path, Path] = {}  # the map of each overlay
    for path, name in files:
        if not methods or path.stem.rpartition(".")[2] in methods:
            overlay_file = Path(out) / name.with_suffix(f".{chosen.format}")
            if first.setdefault(overlay_file, path) != path:
                why = "another of these maps has the same name; draw each folder into a separate output folder"
                yield Redrawn(path, failure=Failure("BatchError", why))
    images = lru_cache(maxsize=8)(_image)  # the methods share the decoded image
    with ThreadPoolExecutor(workers, "saliency-draw") as pool:
        yield from pool.map(lambda file: _draw(first[file], file, chosen, images), first)


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


def _image(entry: ImageEntry, thumbnails: Path) -> tuple[Image.Image, bool]:
    """Return the image of a map, or else its thumbnail, and whether it is the thumbnail."""
    thumbnail = thumbnails / f"{entry.name}.jpg"
    if entry.current_stamp() == entry.stamp:
        return entry.open(), False
    if not thumbnail.is_file():
        raise ImageError(f"{entry.source!r} was removed or has changed, and there is no thumbnail {thumbnail}")
    return open_image(thumbnail), True


def _draw(
    path: Path, file: Path, style: OverlayStyle, images: Callable[[ImageEntry, Path], tuple[Image.Image, bool]]
) -> Redrawn:
    explanation, facts = read_explanation(path)
    if facts is None:
        raise ExplanationError(f"{path} is not a map of saliency batch; pass DIR or DIR/maps/*.{MAP_SUFFIX}")
    try:
        entry = ImageEntry.from_json(facts["entry"])
        root = str(path.absolute()).removesuffix(f"{MAPS}/{entry.name}.{explanation.method}.{MAP_SUFFIX}")
        image, is_small = images(entry, Path(root) / THUMBNAILS)
        image = drawable(image, facts["range"])
        frame = Frame(image, resize_box(facts["box"], facts["size"], image.size))
        scaled = scale_map(explanation, style.sign, style.percentile, smoothing=style.smoothing)
        drawing = paint(frame, scaled, style.colormap, style.opacity)
        file.parent.mkdir(parents=True, exist_ok=True)
        save_drawing(drawing, file)
    except Exception as error:
        if stops_run(error):
            raise unwritable(file.parent, error) from error
        return Redrawn(path, failure=Failure.of(error))
    return Redrawn(path, file, is_small)
