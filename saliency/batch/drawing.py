"""Write the files of one image, and create its manifest rows."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..attribution.explanation import Explanation
from ..io.atomic_write import atomic_write
from ..io.preprocess import Frame
from ..render.blending import (
    DIVERGING,
    SEQUENTIAL,
    ScaledMap,
    box_pixels,
    paint,
    resize_to_pixels,
    scale_map,
    table_entries,
    units,
)
from ..render.overlay import save_picture
from .errors import Failure, printable, stops_run, unwritable
from .manifest import Row, make_row
from .network import LoadedImage, Results, Task
from .output_folder import file_names
from .run_options import OverlayStyle, RunOptions
from .saved_maps import FACTS, SavedMap

PREVIEW_SIDE = 640  # longest side, in pixels, of the preview that the page shows
PREVIEW_QUALITY, HEAT_QUALITY = 85, 80
CELL_PIXELS = 16  # pixels of the heat image per cell of the map; more pixels add no detail
MAX_COARSENESS = 3  # largest number of preview pixels per heat image pixel, along one side


def write_results(
    options: RunOptions, out: Path, task: Task, loaded: LoadedImage, results: Results, seconds: float = 0.0
) -> Iterator[Row]:
    """Write the files of one image, and yield one row per method, or a single row if the image could not be read.

    Args:
        options: Options of the run.
        out: Folder of the run.
        task: The image.
        loaded: The loaded image.
        results: Results of the methods.
        seconds: Seconds that the network took per method.

    Raises:
        StoppedError: The folder cannot be written to. A run without a manifest reports this as a failed row instead.
    """
    if not task.methods:
        return
    facts: dict[str, Any] = {"index": task.index, "source": printable(task.image.source), "id": task.image.name}

    def failed(error: BaseException | Failure, method: str | None) -> Row:
        if isinstance(error, OSError) and stops_run(error):
            if options.with_manifest:
                raise unwritable(out, error) from error
            error = Failure("OSError", f"cannot be written: {error.strerror or error}")
        if not isinstance(error, Failure):
            error = Failure.of(error, task.image.path, task.image.source, method or "")
        return make_row(**facts | {"method": method, "error": error.reason, "error_kind": error.kind})

    if loaded.failure is not None:
        yield failed(loaded.failure, None)
        return
    try:
        picture = loaded.picture or task.image.open()
        frame = Frame(picture, loaded.box)
        facts |= {"width": picture.width, "height": picture.height, "box": list(frame.box)}
        preview = _shrink(picture, PREVIEW_SIDE) if options.with_manifest else None
        if preview is not None:
            name = file_names(task.image, "", "")["photo"]
            facts |= _write(out, {"photo": (name, _encode(preview, "JPEG", quality=PREVIEW_QUALITY))})
    except Exception as error:  # noqa: BLE001 - any error becomes a failed row
        yield failed(error, None)
        return
    for method in task.methods:
        result = results[method]
        if isinstance(result, Failure):
            yield failed(result, method)
            continue
        start = time.perf_counter()
        try:
            row = _write_method(options, out, task, replace(result, frames=(frame,)), preview, facts)
        except Exception as error:  # noqa: BLE001 - any error becomes a failed row
            row = failed(error, method)
        else:
            row["seconds"] = round(seconds + time.perf_counter() - start, 4)
        yield row


def _write_method(
    options: RunOptions,
    out: Path,
    task: Task,
    explanation: Explanation,
    preview: Image.Image | None,
    facts: dict[str, Any],
) -> Row:
    """Write the files of one method, and return its row."""
    style, method = options.style, explanation.method
    frame = explanation.frames[0]
    if frame is None:
        raise ValueError("there is no picture to draw on")
    scaled = scale_map(explanation, style.sign, style.percentile)
    probabilities = explanation.probabilities
    facts = {
        **facts,
        "method": method,
        "target": explanation.target[0],
        "name": explanation.target_names[0],
        "probability": None if probabilities is None else float(probabilities[0]),
        "score": float(explanation.scores[0]),
        "layer": explanation.layer,
        "input_width": explanation.input_size[1],
        "input_height": explanation.input_size[0],
        "settings": dict(explanation.settings),
        "sign": scaled.sign,
        "units": units(explanation),
        "limit": scaled.limit,
        "colormap": style.colormap or (DIVERGING if scaled.sign == "signed" else SEQUENTIAL),
    }
    names = file_names(task.image, method, style.format)
    overlay = paint(frame, scaled, style.colormap, style.opacity)
    if preview is None:
        name = f"{task.image.name}.{method}"
        save_picture(overlay, out / f"{name}.{style.format}")
        if options.maps:
            explanation.save(out / f"{name}.safetensors")
        return make_row(**facts, overlay=f"{name}.{style.format}")
    (out / names["overlay"]).parent.mkdir(parents=True, exist_ok=True)
    save_picture(overlay, out / names["overlay"])
    facts |= {"overlay": names["overlay"], "overlay_bytes": (out / names["overlay"]).stat().st_size}
    files = {"heat": (names["heat"], _heat_image(scaled, frame, preview.size, style))}
    if options.maps:
        about = {name: facts[name] for name in FACTS} | {"entry": task.image.to_json()}
        files["map"] = (names["map"], SavedMap.of(explanation, about).encode())
    return make_row(**facts, **_write(out, files))


def _write(out: Path, files: dict[str, tuple[str, bytes]]) -> dict[str, Any]:
    """Write files, given as {column: (name, data)}, and return their names and sizes for the row."""
    facts: dict[str, Any] = {}
    for column, (name, data) in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(out / name) as temporary:
            temporary.write_bytes(data)
        facts |= {column: name, f"{column}_bytes": len(data)}
    return facts


def _heat_image(scaled: ScaledMap, frame: Frame, preview: tuple[int, int], style: OverlayStyle) -> bytes:
    """Encode the heatmap without the picture: opaque inside the crop, transparent outside.

    The image has the proportions of the preview, and a half or a third of its size if the map cells are large enough.
    """
    import cv2

    left, top, right, bottom = frame.box
    cells = (right - left) / scaled.values.shape[1], (bottom - top) / scaled.values.shape[0]
    pitch = min(cells) * preview[0] / frame.picture.width
    coarseness = max(1, min(MAX_COARSENESS, int(pitch / CELL_PIXELS)))
    width, height = (math.ceil(side / coarseness) for side in preview)
    across, down = width / frame.picture.width, height / frame.picture.height
    plane = Frame(Image.new("L", (width, height)), (left * across, top * down, right * across, bottom * down))
    area = box_pixels(plane)
    shares = resize_to_pixels(scaled.values, plane, area)  # (rows, columns)
    pixels: NDArray[np.uint8] = np.zeros((height, width, 4), np.uint8)
    pixels[area][..., :3] = cv2.applyColorMap(
        table_entries(shares, scaled.sign), scaled.colors(style.colormap)[:, None]
    )
    pixels[area][..., 3] = 255 if style.opacity != "map" else np.rint(255 * np.abs(shares))
    return _encode(Image.fromarray(pixels), "WEBP", quality=HEAT_QUALITY, method=0)


def _shrink(picture: Image.Image, longest: int) -> Image.Image:
    """Return the picture with no side longer than `longest`."""
    import cv2

    share = longest / max(picture.size)
    if share >= 1:
        return picture
    size = (max(1, round(picture.width * share)), max(1, round(picture.height * share)))
    if share <= 1 / 2:
        return picture.resize(size, Image.Resampling.BILINEAR, reducing_gap=1.0)  # averages whole blocks first
    return Image.fromarray(cv2.resize(np.asarray(picture), size, interpolation=cv2.INTER_LINEAR))


def _encode(picture: Image.Image, format: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format, **options)
    return buffer.getvalue()
