"""From the maps of one photo to its files, and to the rows that tell of them."""

from __future__ import annotations

import io
import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..attribution.explanation import Explanation
from ..io.atomic_write import atomic_write
from ..io.preprocess import Frame
from ..render.blending import Shade, paint, shade, spread, units, window
from ..render.colors import CENTRE, DIVERGING, SEQUENTIAL
from ..render.overlay import save_picture
from .errors import Failure, stops_everything
from .image_entry import Photo, open_photo, shown
from .loading import Prepared
from .manifest import Row, row
from .map_store import Kept
from .network import Found
from .output_folder import heat_file, map_file, overlay_file, preview_file
from .run_options import Job, Look

PREVIEW = 640  # the longest side of the plain photo that the page shows
PREVIEW_QUALITY, HEAT_QUALITY = 85, 80
CELL = 16  # pixels of the heat map that show a cell as well as more would
COARSEST = 3  # how many pixels of the preview one of the heat map stands for, at most


@dataclass(frozen=True, slots=True)
class Task:
    """A photo of a group.

    Attributes:
        index: Its number in the listing.
        photo: The photo.
        wanted: The methods whose rows are missing; none for a photo that only keeps its place in the group.
    """

    index: int
    photo: Photo
    wanted: tuple[str, ...]


@dataclass(slots=True)
class Made:
    """What was made of a photo.

    Attributes:
        index: Its number in the listing.
        rows: One row per method, in their order; a single one where the photo could not be read.
        fatal: Why nothing can be written any more.
    """

    index: int
    rows: list[Row] = field(default_factory=list)
    fatal: OSError | None = None


def draw(out: Path, job: Job, task: Task, prepared: Prepared, found: Found, seconds: float = 0.0) -> Made:
    """Write the files of one photo, and say so in rows.

    Args:
        out: The folder of the run.
        job: What is to be done.
        task: The photo.
        prepared: What was read of it.
        found: What the methods found on it.
        seconds: What the network took for each of them.
    """
    made = Made(task.index)
    if not task.wanted:
        return made
    facts: dict[str, Any] = {"index": task.index, "source": shown(task.photo.source), "id": task.photo.name}
    try:
        picture = prepared.picture
        if prepared.failure is None and picture is None:
            picture = open_photo(task.photo)
        if prepared.failure is not None or picture is None:
            made.rows.append(_failed(facts, prepared.failure or Failure("ImageError", "it could not be read")))
            return made
        frame = Frame(picture, prepared.box)
        preview = write_preview(out / preview_file(task.photo), picture)
    except Exception as error:  # noqa: BLE001 - told of this photo, and the next is due
        if stops_everything(error):
            made.fatal = _as_os_error(error)
        else:
            made.rows.append(_failed(facts, Failure.of(error, task.photo)))
        return made
    facts |= {"width": picture.width, "height": picture.height, "box": list(frame.box)}
    facts |= _sized(out, {"photo": preview_file(task.photo)})
    for name in task.wanted:
        start = time.perf_counter()
        result = found[name]
        if isinstance(result, Failure):
            made.rows.append(_failed({**facts, "method": name}, result))
            continue
        try:
            drawn = _drawn(out, job, task, replace(result, frames=(frame,)), preview, facts)
        except Exception as error:  # noqa: BLE001 - an odd map is told of this photo, and the next is due
            if stops_everything(error):
                made.fatal = _as_os_error(error)
                return made
            drawn = _failed({**facts, "method": name}, Failure.of(error, task.photo))
        else:
            drawn["seconds"] = round(seconds + time.perf_counter() - start, 4)
        made.rows.append(drawn)
    return made


def _drawn(
    out: Path,
    job: Job,
    task: Task,
    explanation: Explanation,
    preview: tuple[int, int],
    facts: dict[str, Any],
) -> Row:
    """The row of one method, whose files are in place."""
    look, method = job.look, explanation.method
    frame = explanation.frames[0]
    if frame is None:
        raise ValueError("there is no picture to draw on")
    shading = shade(explanation, look.sign, look.percentile)
    files = {"overlay": overlay_file(task.photo, method, look.format), "heat": heat_file(task.photo, method)}
    write_overlay(out / files["overlay"], paint(frame, shading, look.colormap, look.opacity))
    write_heat(out / files["heat"], shading, frame, preview, look)
    told = {
        **facts,
        "method": method,
        "target": explanation.target[0],
        "name": explanation.target_names[0],
        "probability": _probability(explanation),
        "score": float(explanation.scores[0]),
        "layer": explanation.layer,
        "input_width": explanation.input_size[1],
        "input_height": explanation.input_size[0],
        "settings": dict(explanation.settings),
        "sign": shading.sign,
        "units": units(explanation),
        "limit": shading.limit,
        "colormap": look.colormap or (DIVERGING if shading.sign == "signed" else SEQUENTIAL),
    }
    if job.maps:
        files["map"] = map_file(task.photo, method)
        about = {**told, "sign": explanation.sign, "path": shown(task.photo.path), "entry": task.photo.to_json()}
        kept = Kept.of(explanation, {name: about[name] for name in _KEPT_FACTS})
        _write(out / files["map"], kept.encoded())
    return row(**told, **_sized(out, files))


def _sized(out: Path, files: dict[str, str]) -> dict[str, Any]:
    """The names of files that are in place, and their bytes, by which a later run knows that they are whole."""
    return files | {f"{key}_bytes": (out / name).stat().st_size for key, name in files.items()}


_KEPT_FACTS = (
    *("index", "source", "id", "path", "entry", "method", "target", "name", "probability", "score", "units", "sign"),
    *("width", "height", "input_width", "input_height", "box"),
)


def _failed(facts: dict[str, Any], failure: Failure) -> Row:
    return row(**facts, error=failure.reason, error_kind=failure.kind)


def _probability(explanation: Explanation) -> float | None:
    found = explanation.probabilities
    return None if found is None else float(found[0])


def write_overlay(path: Path, picture: Image.Image) -> None:
    """Write a picture in the format of the path's suffix, and make its folder where it is not there yet."""
    try:
        save_picture(picture, path)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_picture(picture, path)


def write_preview(path: Path, picture: Image.Image) -> tuple[int, int]:
    """Write the photo as it is, no side longer than `PREVIEW`, and return its size (w, h)."""
    small = shrunk(picture, PREVIEW)
    _write(path, _encoded(small, "JPEG", quality=PREVIEW_QUALITY))
    return small.size


def write_heat(path: Path, shading: Shade, frame: Frame, preview: tuple[int, int], look: Look) -> None:
    """Write the map alone: its colours, as opaque as they can be where it lies, and nothing where it does not.

    It has the preview's proportions, and a half or a third of its size where cells are so large that nothing is lost.
    """
    import cv2

    left, top, right, bottom = frame.box
    cells = (right - left) / shading.values.shape[1], (bottom - top) / shading.values.shape[0]
    pitch = min(cells) * preview[0] / frame.picture.width
    coarseness = max(1, min(COARSEST, int(pitch / CELL)))
    width, height = (math.ceil(side / coarseness) for side in preview)
    across, down = width / frame.picture.width, height / frame.picture.height
    plane = Frame(Image.new("L", (width, height)), (left * across, top * down, right * across, bottom * down))
    inside = window(plane)
    shares = spread(shading.values, plane, inside)  # (rows, columns)
    base, gain = (CENTRE, 127) if shading.sign == "signed" else (0, 255)
    entries = (shares * np.float32(gain) + np.float32(base + 0.5)).astype(np.uint8)
    pixels: NDArray[np.uint8] = np.zeros((height, width, 4), np.uint8)
    pixels[inside.area][..., :3] = cv2.applyColorMap(entries, shading.table(look.colormap)[:, None])
    pixels[inside.area][..., 3] = 255 if look.opacity != "map" else np.rint(255 * np.abs(shares))
    _write(path, _encoded(Image.fromarray(pixels), "WEBP", quality=HEAT_QUALITY, method=0))


def shrunk(picture: Image.Image, longest: int) -> Image.Image:
    """The picture with no side longer than that."""
    import cv2

    share = longest / max(picture.size)
    if share >= 1:
        return picture
    size = (max(1, round(picture.width * share)), max(1, round(picture.height * share)))
    if share <= 1 / 2:
        return picture.resize(size, Image.Resampling.BILINEAR, reducing_gap=1.0)  # by whole blocks first
    return Image.fromarray(cv2.resize(np.asarray(picture), size, interpolation=cv2.INTER_LINEAR))


def _encoded(picture: Image.Image, format: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def _write(path: Path, data: bytes) -> None:
    try:
        _replace(path, data)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, data)


def _replace(path: Path, data: bytes) -> None:
    with atomic_write(path) as temporary:
        temporary.write_bytes(data)


def _as_os_error(error: BaseException) -> OSError:
    return error if isinstance(error, OSError) else OSError(str(error))
