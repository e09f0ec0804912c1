"""Explain and draw images: overlays, images of the page, saved maps, trust cards and manifest rows.

A map is a file for `Explanation.load`, with float16 values in their original resolution. For a volume, it is a NIfTI
file with float32 values in the resolution of the volume.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, cast

from PIL import Image, ImageDraw
from safetensors.torch import save

from ..attribution.explanation import Explanation, heatmap, pack_explanation
from ..attribution.inputs import InputExplanations
from ..attribution.passes import listening
from ..evaluation.metrics.base import SharedResults
from ..evaluation.trust import TrustCard
from ..io.atomic_write import atomic_write, inside
from ..io.geometry import Frame, scaled_size
from ..io.inputs import encode
from ..io.volumes import Volume, encode_map, place_map
from ..model.call import name_subjects
from ..render.figure import anatomical_slices, pictured, share_labels
from ..render.overlay import as_drawing, encode_drawing, frame_of, heat_image, paint
from ..render.overlay import shrink as resize_frame
from ..render.scaling import DIVERGING, SEQUENTIAL, ScaledMap, scale_map, shared_limit
from ..render.sheet import INK, PAPER, ellipsised, font_for
from .engines import Mapper
from .failures import attempt, error_columns, printable, unwritable
from .listing import ImageEntry
from .network import LoadedImage, Network, Results, trust_card
from .options import OutputOptions, OverlayStyle
from .store import Row, file_names, make_row

THUMBNAIL_SIDE = 640  # longest side, in pixels, of the image that the page shows
THUMBNAIL_QUALITY, HEAT_QUALITY = 85, 80
CARD_FACTS = (
    *("title", "is_clear", "is_worse", "verdict", "p"),
    *("value", "error", "controls", "strip", "higher_is_better"),
)


class ImageResults(NamedTuple):
    """Results of one image.

    Attributes:
        explanations: Explanation or error of each method.
        cards: Trust card or error of the methods that explained the image, if the run has trust cards.
        seconds: Seconds that the network took per method.
        repeated: Error after which the batch of the image was repeated in parts.
    """

    explanations: Results
    cards: Mapping[str, TrustCard | BaseException] = {}
    seconds: float = 0.0
    repeated: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainMapper(Mapper):
    """Explains and draws images.

    Attributes:
        output: The files of each image.
    """

    output: OutputOptions

    def compute(self, network: Network, batch: Sequence[LoadedImage]) -> list[ImageResults]:
        """Explain the images of a batch, and measure their trust cards.

        Raises:
            KeyboardInterrupt: The run was interrupted during the passes of a method.
        """
        start = perf_counter()
        with listening(self.check):
            explained = network.explain(batch)
        seconds = (perf_counter() - start) / (len(batch) * len(network.methods))
        return [
            ImageResults(results, self._measure(network, loaded, results) if self.output.trust else {}, seconds, error)
            for loaded, (results, error) in zip(batch, explained, strict=True)
        ]

    def _measure(self, network: Network, loaded: LoadedImage, results: Results) -> dict[str, TrustCard | BaseException]:
        """Return the trust card of each method that explained an image."""
        methods = [method for method in network.exact if method.name in loaded.slot.methods]
        explained = [method for method in methods if isinstance(results.get(method.name), Explanation)]
        shared = SharedResults()
        name_subjects(loaded.slot.entry.source)
        return {method.name: trust_card(method, loaded, self.output.seconds, shared=shared) for method in explained}

    def finish(self, loaded: LoadedImage, results: ImageResults) -> list[Row]:
        """Draw and write the files of one image, and return its rows."""
        return list(self.write(loaded, results))

    def write(self, loaded: LoadedImage, results: ImageResults) -> Iterator[Row]:
        """Write the files of one image, and yield one row per method, or a single row if the image could not be read.

        Raises:
            StoppedError: The folder cannot be written to.
        """
        slot, entry, sizes = loaded.slot, loaded.slot.entry, dict[str, int]()
        name_subjects(entry.source)
        about: Row = {"index": slot.index, "source": printable(entry.source), "id": entry.name}
        about["repeated"] = results.repeated
        for drawn in draw(self.output, loaded, results) if slot.methods else ():
            names = file_names(entry, drawn["method"], self.output.style.format, self.output.with_manifest)
            row = about | drawn
            try:
                for column, content in drawn.items():
                    if isinstance(content, bytes):
                        name = names[column]
                        if name not in sizes:  # the thumbnail is a file of all rows
                            sizes[name] = write_file(inside(self.out, name), content)
                        row |= {column: name, f"{column}_bytes": sizes[name]}
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise unwritable(self.out, error) from error
                row = about | failure_columns(error, entry, drawn["method"])
            yield make_row(**row)


def write_file(path: Path, content: bytes) -> int:
    """Write a file atomically, and return its size. Its folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
    return len(content)


def failure_columns(error: BaseException, entry: ImageEntry, method: str | None, prefix: str = "") -> Row:
    """Return the columns of the error of a method, or of an image if there is no method."""
    columns = error_columns(error, entry.path, entry.source, method or "")
    return {"method": method, **columns, "error": prefix + columns["error"]}


def draw(output: OutputOptions, loaded: LoadedImage, results: ImageResults) -> Iterator[Row]:
    """Draw one image: yield the columns of each method, or of the error of the image. Files are their contents."""
    entry = loaded.slot.entry
    image = attempt(ImageDrawing, output, loaded)
    if isinstance(image, BaseException):
        yield failure_columns(image, entry, None)
        return
    for method in loaded.slot.methods:
        start, explanation, card = perf_counter(), results.explanations[method], results.cards.get(method)
        drawn = explanation if isinstance(explanation, BaseException) else attempt(image.draw, explanation)
        if isinstance(drawn, BaseException):
            yield image.columns | failure_columns(drawn, entry, method)
            continue
        pages = attempt(_draw_card, output, card) if isinstance(card, TrustCard) else card or {}
        if isinstance(pages, BaseException):
            pages = failure_columns(pages, entry, method, "no trust card: ")
        yield image.columns | drawn | pages | {"seconds": round(results.seconds + perf_counter() - start, 4)}


class ImageDrawing:
    """One image, on which the maps of methods are drawn.

    Args:
        output: The files of each image.
        loaded: The image.

    Attributes:
        columns: Columns of all rows of the image, with the content of the thumbnail, which the page shows.
    """

    def __init__(self, output: OutputOptions, loaded: LoadedImage) -> None:
        self._output, self._original = output, None if loaded.inputs else loaded.volume or loaded.frame()
        self.columns: Row = {}
        if isinstance(self._original, Frame):
            image = self._original.image
            self.columns |= {"width": image.width, "height": image.height, "box": list(self._original.box)}
            self.columns["range"] = loaded.range and list(loaded.range)
            if output.with_manifest:
                thumbnail = shrink(image, THUMBNAIL_SIDE)
                self._thumbnail_size = thumbnail.size
                self.columns["thumbnail"] = encode(thumbnail, "JPEG", quality=THUMBNAIL_QUALITY)

    def draw(self, explanation: Explanation | InputExplanations) -> Row:
        """Draw the map of one method."""
        output, style, frame = self._output, self._output.style, self._original
        if frame is None or isinstance(explanation, InputExplanations):
            return _draw_case(cast("InputExplanations", explanation), output)
        if isinstance(frame, Volume):
            return _draw_volume(explanation, frame, style)
        scaled = scale_map(explanation, style.sign, style.percentile, smoothing=style.smoothing)
        row = explanation_facts(explanation, scaled, style.colormap) | {"target_box": scaled.placed_box(frame)}
        row["overlay"] = encode_drawing(paint(frame, scaled, style.colormap, style.opacity), f".{style.format}")
        if output.with_manifest:
            heat = heat_image(scaled, frame, self._thumbnail_size, style.colormap, style.opacity)
            row["heat"] = encode(heat, "WEBP", quality=HEAT_QUALITY, method=0)
        if output.maps and output.with_manifest:  # saved without standard errors, the image and the times
            facts = {"size": frame.image.size, "box": frame.box, "range": self.columns["range"]}
            explanation = replace(explanation.with_evidence(error=None, run_stats=None), frames=(None,))
            row["map"] = save(*pack_explanation(explanation, facts))
        elif output.maps:
            row["map"] = save(*pack_explanation(replace(explanation, frames=(frame,))))
        return row


def _draw_case(result: InputExplanations, output: OutputOptions) -> Row:
    """Draw the maps of a case side by side, on one scale, each over its image and above its share."""
    style, maps = output.style, list(pictured(result))
    scale: dict[str, Any] = {"sign": style.sign, "percentile": style.percentile, "smoothing": style.smoothing}
    limit = shared_limit(maps, **scale)
    scaled = [scale_map(explanation, limit=limit, **scale) for explanation in maps]
    height = max(frame_of(explanation).image.height for explanation in maps)
    frames = [_of_height(frame_of(explanation), height) for explanation in maps]
    painted = [paint(frame, part, style.colormap, style.opacity) for frame, part in zip(frames, scaled, strict=True)]
    labels = [label for [label] in share_labels(result)]
    row = explanation_facts(maps[0], scaled[0], style.colormap) | {"shares": result.shares}
    row["layer"] = ", ".join(dict.fromkeys(part.layer for part in maps if part.layer)) or None
    row["overlay"] = encode_drawing(_side_by_side(painted, labels), f".{style.format}")
    if output.with_manifest:
        images = _side_by_side([frame.image for frame in frames])
        row["width"], row["height"] = images.size
        row["thumbnail"] = encode(shrink(images, THUMBNAIL_SIDE), "JPEG", quality=THUMBNAIL_QUALITY)
        heats = [
            heat_image(part, frame, frame.image.size, style.colormap, style.opacity).resize(frame.image.size)
            for part, frame in zip(scaled, frames, strict=True)
        ]
        row["heat"] = encode(shrink(_side_by_side(heats), THUMBNAIL_SIDE), "WEBP", quality=HEAT_QUALITY, method=0)
    return row


def _of_height(frame: Frame, height: int) -> Frame:
    return resize_frame(frame, round(height * max(1, frame.image.width / frame.image.height)))


def _side_by_side(images: Sequence[Image.Image], labels: Sequence[str] = ()) -> Image.Image:
    """Return images of one height side by side, on white, or transparent, with a label below each."""
    height, gap, size = images[0].height, max(2, images[0].height // 40), max(10, images[0].height / 20)
    width = sum(image.width + gap for image in images) - gap
    background = PAPER if images[0].mode == "RGB" else None
    drawing = as_drawing(Image.new(images[0].mode, (width, height + round(1.5 * size) * bool(labels)), background))
    pen, font, left = ImageDraw.Draw(drawing), font_for(labels, size), 0
    for index, image in enumerate(images):
        drawing.paste(image, (left, 0))
        for label in labels[index : index + 1]:
            text = ellipsised(label, font, image.width)
            pen.text((left + image.width / 2, height + 0.75 * size), text, INK, font, anchor="mm")
        left += image.width + gap
    return drawing


def _draw_volume(explanation: Explanation, volume: Volume, style: OverlayStyle) -> Row:
    """Draw the map of one method on a volume."""
    if volume.to_input is not None:
        maps = heatmap(explanation, sign=style.sign)
        maps = place_map(maps, volume.to_input, volume.values.shape[1:])
        explanation = replace(explanation.with_evidence(error=None), values=maps[:, None])
    of_slices = OverlayStyle()  # as in `slices`
    scaled = scale_map(explanation, style.sign, of_slices.percentile, smoothing=of_slices.smoothing)
    row = explanation_facts(explanation, scaled, style.colormap)
    explanation = replace(explanation, sign=scaled.sign)
    drawing = anatomical_slices(explanation, volume, style.colormap)
    row |= {"width": drawing.width, "height": drawing.height}
    row["overlay"] = encode_drawing(drawing, f".{style.format}")
    row["map"] = encode_map(heatmap(explanation, size=tuple(volume.values.shape[1:]))[0], volume.affine)
    return row


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


def _draw_card(output: OutputOptions, card: TrustCard) -> Row:
    """Draw a trust card."""
    facts = card_facts(card) if output.with_manifest else {"summary": card.summary}
    column, suffix = ("card_json", ".json") if output.with_manifest else ("card_image", ".png")
    return {"trust": facts, "card": card.encoders[".html"](), column: card.encoders[suffix]()}


def card_facts(card: TrustCard) -> dict[str, Row]:
    """Return the columns of each property of a trust card that the page shows, by the name of the property."""
    rows = json.loads(card.to_json())["properties"]
    return {row["name"]: {key: row[key] for key in CARD_FACTS if key in row} for row in rows}


def shrink(image: Image.Image, longest: int) -> Image.Image:
    """Return the image with no side longer than `longest`."""
    if max(image.size) <= longest:
        return image
    size = scaled_size(image.size, longest)
    return image.resize(size, Image.Resampling.BILINEAR, reducing_gap=1.0)  # averages whole blocks first
