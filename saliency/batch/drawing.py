"""Draw one image: overlays, images of the page, saved maps and manifest rows.

A map is a file for `Explanation.load`, with float16 values in their original resolution. Of a volume, it is a NIfTI
file with float32 values in the resolution of the volume.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from PIL import Image
from safetensors.torch import save

from ..attribution.explanation import Explanation, pack_explanation
from ..attribution.heatmap import heatmap
from ..errors import USER_CODE_ERRORS
from ..evaluation.trust import TrustCard
from ..io.atomic_write import atomic_write, inside
from ..io.inputs import encode
from ..io.preprocess import Frame, resize_box, scaled_size
from ..io.volumes import Volume, encode_map, place_map
from ..render.blending import (
    DIVERGING,
    SEQUENTIAL,
    ScaledMap,
    blend,
    box_pixels,
    colorize,
    corners,
    hatching,
    outline,
    paint,
    resize_to_pixels,
    scale_map,
)
from ..render.overlay import save_drawing
from ..render.volume import slices
from .failures import Failure, printable, stops_run, unwritable
from .manifest import Row, make_row
from .network import Cards, LoadedImage, Results
from .output_folder import CARD_FILES, file_names
from .run_options import OverlayStyle, RunOptions

THUMBNAIL_SIDE = 640  # longest side, in pixels, of the image that the page shows
THUMBNAIL_QUALITY, HEAT_QUALITY = 85, 80
CARD_FACTS = (
    *("title", "group", "is_clear", "is_worse", "verdict"),
    *("value", "error", "controls", "control_ranges", "higher_is_better"),
)
CELL_PIXELS = 16  # pixels of the heat image per cell of the map; more pixels add no detail
# Levels of the opacity of the heat image, which WebP then encodes faster; off by 2 of 255 levels at most.
ALPHA_LEVELS = np.float32(64)
MAX_COARSENESS = 3  # largest number of thumbnail pixels per heat image pixel, along one side


def write_results(
    options: RunOptions,
    out: Path,
    loaded: LoadedImage,
    results: Results,
    cards: Cards,
    seconds: float = 0.0,
    repeated: str | None = None,
) -> Iterator[Row]:
    """Write the files of one image, and yield one row per method, or a single row if the image could not be read.

    Args:
        options: Options of the run.
        out: Folder of the run.
        loaded: The image.
        results: Results of the methods.
        cards: Trust cards of the methods, if the run has them.
        seconds: Seconds that the network took per method.
        repeated: Error after which the batch of the image was repeated in parts.

    Raises:
        StoppedError: The folder cannot be written to.
    """
    slot = loaded.slot
    facts: dict[str, Any] = {"index": slot.index, "source": printable(slot.entry.source), "id": slot.entry.name}
    facts["repeated"] = repeated

    def failed(error: BaseException, method: str | None, *, is_writing: bool = False) -> Row:
        if is_writing and stops_run(error):
            raise unwritable(out, error) from error
        failure = Failure.of(error, slot.entry.path, slot.entry.source, method or "")
        return make_row(**facts | {"method": method, "error": failure.reason, "error_kind": failure.kind})

    if not slot.methods:
        return
    if loaded.failure is not None:
        yield failed(loaded.failure, None)
        return
    try:
        original: Frame | Volume = loaded.volume or loaded.frame()
        thumbnail = None
        if isinstance(original, Frame):
            image = original.image
            facts |= {"width": image.width, "height": image.height, "box": list(original.box)}
            facts["range"] = loaded.range and list(loaded.range)
            thumbnail = shrink(image, THUMBNAIL_SIDE) if options.with_manifest else None
        if thumbnail is not None:
            names = file_names(slot.entry, "", "")
            facts |= _write(out, names, "thumbnail", encode(thumbnail, "JPEG", quality=THUMBNAIL_QUALITY))
    except Exception as error:  # noqa: BLE001 - any error becomes a failed row
        yield failed(error, None, is_writing=True)
        return
    for method in slot.methods:
        result = results[method]
        if isinstance(result, BaseException):
            yield failed(result, method)
            continue
        start = perf_counter()
        try:
            names = file_names(slot.entry, method, options.style.format, with_manifest=options.with_manifest)
            row = _write_method(options, out, names, result, original, thumbnail, facts)
        except Exception as error:  # noqa: BLE001 - any error becomes a failed row
            row = failed(error, method, is_writing=True)
        else:
            row["seconds"] = round(seconds + perf_counter() - start, 4)
            try:
                row |= _write_card(options, out, names, cards[method]) if method in cards else {}
            except USER_CODE_ERRORS as error:  # any error fails the card; the overlay stays
                why = failed(error, method, is_writing=True)
                row |= {"error": f"no trust card: {why['error']}", "error_kind": why["error_kind"]}
        yield row


def _write_method(
    options: RunOptions,
    out: Path,
    names: Mapping[str, str],
    explanation: Explanation,
    original: Frame | Volume,
    thumbnail: Image.Image | None,
    facts: dict[str, Any],
) -> Row:
    """Write the files of one method, and return its row."""
    style = options.style
    if isinstance(original, Volume):  # as in `slices`
        style = OverlayStyle(sign=style.sign, colormap=style.colormap)
        if original.to_input is not None:
            maps = heatmap(explanation, sign=style.sign)
            maps = place_map(maps, original.to_input, original.values.shape[1:])
            explanation = replace(explanation.with_evidence(error=None), values=maps[:, None])
    scaled = scale_map(explanation, style.sign, style.percentile, smoothing=style.smoothing)
    facts = facts | explanation_facts(explanation, scaled, style.colormap)
    if isinstance(original, Volume):
        explanation = replace(explanation, sign=scaled.sign)
        drawing = _draw_slices(explanation, original, style.colormap)
        facts |= {"width": drawing.width, "height": drawing.height}
        facts |= _write(out, names, "overlay", lambda file: save_drawing(drawing, file))
        values = heatmap(explanation, size=tuple(original.values.shape[1:]))[0]
        return make_row(**facts | _write(out, names, "map", encode_map(values, original.affine)))
    facts["target_box"] = scaled.placed_box(original)
    drawing = paint(original, scaled, style.colormap, style.opacity)
    facts |= _write(out, names, "overlay", lambda file: save_drawing(drawing, file))
    if thumbnail is not None:
        facts |= _write(out, names, "heat", _heat_image(scaled, original, thumbnail.size, style))
    if options.maps:
        saved = replace(explanation, frames=(original,))
        content = _encode_map(saved, original, facts["range"]) if options.with_manifest else saved.save
        facts |= _write(out, names, "map", content)
    return make_row(**facts)


def explanation_facts(explanation: Explanation, scaled: ScaledMap, colormap: str | None) -> Row:
    """Return the columns of a row that follow from the explanation of one image and its scaled map."""
    residual, ledger, probabilities = explanation.residual, explanation.ledger, explanation.probabilities
    return {
        "method": explanation.method,
        "target": explanation.target[0],
        "name": explanation.target_names[0],
        "probability": None if probabilities is None else float(probabilities[0]),
        "score": float(explanation.scores[0]),
        "layer": explanation.layer,
        "input_width": explanation.input_size[-1],
        "input_height": explanation.input_size[-2],
        "settings": dict(explanation.settings),
        "coverage": None if explanation.coverage is None else str(explanation.coverage),
        "residual": None if residual is None else float(residual[0]),
        "ledger": None if ledger is None else dict(zip(explanation.ledger_names, ledger[0].tolist(), strict=True)),
        "sign": scaled.sign,
        "units": explanation.units,
        "floor": scaled.floor,
        "limit": scaled.limit,
        "colormap": colormap or (DIVERGING if scaled.sign == "signed" else SEQUENTIAL),
    }


def _draw_slices(explanation: Explanation, volume: Volume, colormap: str | None) -> Image.Image:
    """Draw slices through the maximum as ITK-SNAP and 3D Slicer do: head and front up, the patient's right at the left.

    The first channel of the volume is drawn in grey.
    """
    order, ascends = volume.world_axes()
    values = explanation.values.permute(0, 1, *(2 + axis for axis in order))
    grey = volume.values[0].permute(order)
    explanation = replace(explanation.with_evidence(error=None), values=values, input_size=tuple(grey.shape))
    spacing = np.linalg.norm(volume.affine[:3, :3], axis=0)[order].tolist()
    drawing = slices(explanation, grey, names=("axial", "coronal", "sagittal"), spacing=spacing, colormap=colormap)
    for axis, panel in enumerate(drawing.axes[:3]):
        rows, columns = (ascends[other] for other in range(3) if other != axis)
        panel.yaxis.set_inverted(not rows)
        panel.xaxis.set_inverted(columns)
    file = io.BytesIO()
    # Not `savefig`, which changes parameters of matplotlib for a moment: several threads draw.
    drawing.canvas.print_figure(file, format="png", dpi=150, bbox_inches="tight")
    return Image.open(file).convert("RGB")


def _write(
    out: Path, names: Mapping[str, str], column: str, content: bytes | Callable[[Path], object]
) -> dict[str, Any]:
    """Write a file, given its bytes or a function that saves it, and return its name and size for the row."""
    file = inside(out, names[column])
    file.parent.mkdir(parents=True, exist_ok=True)
    if callable(content):
        content(file)
    else:
        with atomic_write(file) as temporary:
            temporary.write_bytes(content)
    return {column: names[column], f"{column}_bytes": file.stat().st_size}


def _encode_map(explanation: Explanation, frame: Frame, range: list[float] | None) -> bytes:
    """Return the file of a map, for `Explanation.load`: values in float16, no standard errors, no picture, no times."""
    facts = {"size": frame.image.size, "box": frame.box, "range": range}
    explanation = explanation.with_evidence(error=None, run_stats=None)
    return save(*pack_explanation(replace(explanation, frames=(None,)), facts))


def _write_card(options: RunOptions, out: Path, names: Mapping[str, str], card: TrustCard | BaseException) -> Row:
    """Write the files of a trust card, and return its columns of the row. Raises `card` if it is an error."""
    if isinstance(card, BaseException):
        raise card
    facts: Row = {"trust": card_facts(card) if options.with_manifest else {"summary": card.summary}}
    for column in names.keys() & CARD_FILES:
        facts |= _write(out, names, column, card.save)
    return facts


def card_facts(card: TrustCard) -> dict[str, Row]:
    """Return the columns of each property of a trust card that the page shows, by the name of the property."""
    rows = json.loads(card.to_json())["properties"]
    return {row["name"]: {key: row[key] for key in CARD_FACTS} for row in rows}


def _heat_image(scaled: ScaledMap, frame: Frame, thumbnail: tuple[int, int], style: OverlayStyle) -> bytes:
    """Encode the heatmap without the image: transparent outside the crop.

    Inside the crop it is opaque. If the opacity follows the map, it is as opaque as the scaled map is strong, with the
    lines around the crop; the page multiplies it by its own opacity.

    The image has the proportions of the thumbnail, and a half or a third of its size if the map cells are large enough.
    """
    left, top, right, bottom = frame.box
    cells = (right - left) / scaled.values.shape[1], (bottom - top) / scaled.values.shape[0]
    pitch = min(cells) * thumbnail[0] / frame.image.width
    coarseness = max(1, min(MAX_COARSENESS, int(pitch / CELL_PIXELS)))
    size = math.ceil(thumbnail[0] / coarseness), math.ceil(thumbnail[1] / coarseness)
    plane = Frame(Image.new("RGB", size), resize_box(frame.box, frame.image.size, size))
    area = box_pixels(plane)
    values = resize_to_pixels(scaled.values, plane, area)
    heat = plane.image
    heat.paste(colorize(values, scaled, style.colormap), corners(area))
    alpha = Image.new("L", size)
    visibility = np.round(np.abs(values) * ALPHA_LEVELS) / ALPHA_LEVELS
    blend(alpha, (255,), area, visibility if style.opacity == "map" else np.ones_like(visibility))
    heat.putalpha(alpha)
    for tone, share, pixels in hatching(scaled, plane, area):
        blend(heat, (tone, tone, tone, 255 * share), area, pixels.astype(np.float32))
    if style.opacity == "map":
        outline(heat, area)
    return encode(heat, "WEBP", quality=HEAT_QUALITY, method=0)


def shrink(image: Image.Image, longest: int) -> Image.Image:
    """Return the image with no side longer than `longest`."""
    if max(image.size) <= longest:
        return image
    size = scaled_size(image.size, longest)
    return image.resize(size, Image.Resampling.BILINEAR, reducing_gap=1.0)  # averages whole blocks first
