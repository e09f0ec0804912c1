"""The result of `attribute`, with everything needed to read, draw and save it; its heatmap, and its significance.

A heatmap has one number per pixel, in the method's own units. The order of the steps is fixed: channels are reduced,
the sign is applied, outliers are clipped, and then the map is resized. Nothing is normalised. By default, the sign is
`Explanation.sign`, as in the paper of the method, and channels are summed; for magnitudes, the largest of the channels
is taken (Simonyan 2013).
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from .. import tables
from ..aliases import result_hint
from ..errors import ExplanationError, NonFiniteError, RenderError, errors_as
from ..hooks.rectifiers import Coverage
from ..io.atomic_write import write_by_suffix
from ..io.axes import along_rows, at_least_float32, resize
from ..io.geometry import Box, Frame, ImageBox
from ..io.inputs import decode, encode
from ..targets.question import QuestionFacts
from ..validation import SIGNS, Sign, check_choice, check_number, check_path, described, is_integer
from .options import RunStats

Setting = str | int | float | bool | None | list[Any] | dict[str, Any]

PER_UNIT = "score per unit of normalised input"
# Units of values that are in proportion to the score.
_IN_SCORE = ("score", "score, up to a factor", PER_UNIT, "score per attention", "relevance")

_FORMATS = "saliency explanation 2", "saliency explanation 3"
_BY_IMAGE = ("notes", "run_stats", "boxes")
"""The entries of evidence that are tuples with one element for each image. Tensors have one row for each image."""
_EMPTY: dict[str, Any] = {
    "from_zero": False,
    **dict.fromkeys(("boxes", "ledger_names", "notes", "run_stats", "tokens"), ()),
}
"""The values of these entries if a result does not have them; other missing entries are None."""


class Evidence:
    """Entries of `evidence` as attributes; `Explanation` describes them."""

    __slots__ = ()
    agreement: Tensor | None
    boxes: tuple[ImageBox | None, ...]
    coverage: Coverage | None
    error: Tensor | None
    from_zero: bool
    ledger: Tensor | None
    ledger_names: tuple[str, ...]
    notes: tuple[str, ...]
    outliers: Tensor | None
    probabilities: Tensor | None
    residual: Tensor | None
    run_stats: tuple[RunStats, ...]
    tile_scores: Tensor | None
    token_shares: Tensor | None
    tokens: tuple[str | None, ...]

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            """Return an entry. The error for another name suggests the right function or attribute."""
            if name in Evidence.__annotations__:
                return self.evidence.get(name, _EMPTY.get(name))
            raise AttributeError(f'Explanation has no "{name}"{result_hint(name)}', name=name, obj=self)


@dataclass(frozen=True, slots=True, eq=False)
class BatchAttribution(Evidence):
    """Values and scores that a method returns for a batch and a target. `Explanation` describes the attributes."""

    values: Tensor  # (N, C, H, W) at the input or (N, 1, h, w) at a layer; one more axis for volumes
    scores: Tensor  # (N,)
    layer: str | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name; each has one row for each image."""
        parts = {"values": self.values, "scores": self.scores, **self.evidence}
        return {name: part for name, part in parts.items() if isinstance(part, Tensor)}

    def with_evidence(self, **entries: Any) -> Self:
        """Return the result with other entries of `evidence`; None removes an entry."""
        return replace(self, evidence=_present({**self.evidence, **entries}))

    def with_tensors(self, tensors: Mapping[str, Tensor], **others: Any) -> Self:
        """Return the result with other tensors, named as in `tensors()`, and other entries of `evidence`."""
        evidence = {**self.evidence, **tensors, **others}
        return replace(self, values=evidence.pop("values"), scores=evidence.pop("scores"), evidence=_present(evidence))


def _present(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are not None."""
    return {name: entry for name, entry in entries.items() if entry is not None}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Explanation(BatchAttribution):
    """Result of a method on a batch: one signed number per pixel or cell, never normalised.

    It is a sequence: `len(e)` is the number of images, `e[0]` and iteration give explanations of one image, and
    `np.asarray(e)` gives the values.

    Attributes:
        values: (N, C, H, W) at the input, or (N, 1, h, w) at a layer; (N, C, D, H, W) or (N, 1, d, h, w) for volumes
            and videos. The units at the input are score units per unit of the normalised input, unless the method
            states others. At a layer they are score units.
        scores: (N,) the explained scores, in the units of the model's output.
        layer: The layer of the values; None at the input.
        evidence: Results that only some methods have, by name. Each entry is also an attribute, see below.
        questions: The question that was explained for each image: `name`, `index`, `is_difference` and `box`.
        frames: The position of the model's input on each original image; None for an image given as a tensor.
        input_size: (H, W) of the model's input; (D, H, W) for volumes and videos.
        method: The method's name in the registry.
        title: The name of the method's class.
        units: The units of the values.
        sign: The sign that the method's authors show: "positive" values only, "signed", or "absolute" magnitude.
        settings: The method's options.
        target: The class index of each image; None if the target is not a class.
        target_names: The names of the target: a class name, `class 7`, `tiger cat rather than tabby`.
        contrasts: Whether the score of each image is a difference, as for `saliency.contrast`.
        target_boxes: The box that each image's target explains, (left, top, right, bottom) in pixels of the model's
            input; None for other targets. Empty without boxes.
        probabilities: (N,) the probability of each image's class, and of the first class of a contrast; None if no
            class is explained.
        coverage: The number of operations that each rule of the method handled, and of nonlinearities without a rule;
            None for methods without rules.
        residual: (N,) for complete methods, the difference between the expected and the actual sum of the values. With
            a ledger, the score minus the sum of the ledger.
        error: The standard error of each value, in the shape and the units of `values`, if the method samples.
        agreement: (N,) the rank correlation of the maps of two halves of the samples, if the method samples; 1 means
            that more samples would not change the map.
        run_stats: The passes and time of each image, for methods of many passes; otherwise empty.
        ledger: (N, K) the parts of the score, in score units, if the method gives them. An image's parts and its
            residual sum to its score.
        ledger_names: The names of the K parts, such as "input" and "biases".
        outliers: (N, h, w) of bool, for methods of attention: the patches whose tokens have an outlying norm. Such
            tokens hold information about the whole image, so their values are not evidence for their position. None if
            the model's tokens cannot be determined.
        tile_scores: (1, rows, columns) the score of each tile, of which `scores` is the mean, for an image in tiles. It
            is NaN where a tile has no pixel of the target's region. None without tiles.
        token_shares: (N, L) for an answer of `saliency.generate`, the part of the score of each token that the
            language model reads, in score units, by relevance and gradient x input. None for other methods, for images,
            and if the model also adds the image after the embeddings of the tokens, as Qwen3-VL and Llama 3.2 Vision.
        tokens: The texts of these L tokens, None for tokens of an image; empty for other explanations.
        notes: The limits of each image's map, for example that it is 0 everywhere; empty without limits.
        boxes: The size of each original image, and the position of the model's input on it, for a map of
            `saliency batch`, which is saved without its image. Empty for other explanations.
        from_zero: Whether the colours begin at zero, as for standard errors, and not at the minimum of a positive map.
    """

    questions: tuple[QuestionFacts, ...]
    frames: tuple[Frame | None, ...]
    input_size: tuple[int, ...]
    method: str
    title: str
    units: str
    sign: Sign
    settings: Mapping[str, Setting] = field(default_factory=dict)

    @property
    def target(self) -> tuple[int | None, ...]:
        """The class index of each image; None if the target is not a class."""
        return tuple(question.index for question in self.questions)

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names of the target."""
        return tuple(question.name for question in self.questions)

    @property
    def contrasts(self) -> tuple[bool, ...]:
        """Whether each score is the difference of two scores, such as the scores of two classes."""
        return tuple(question.is_difference for question in self.questions)

    @property
    def target_boxes(self) -> tuple[Box | None, ...]:
        """The box that each image's target explains; empty without boxes."""
        boxes = tuple(question.box for question in self.questions)
        return boxes if any(boxes) else ()

    @property
    def image_share(self) -> Tensor | None:
        """The fraction (N,) of the absolute `token_shares` that image tokens have; None without `token_shares`."""
        if self.token_shares is None:
            return None
        is_image = torch.tensor([token is None for token in self.tokens], device=self.token_shares.device)
        return (fractions(self.token_shares, 1).abs() * is_image).sum(1)

    @property
    def rounding(self) -> float:
        """The rounding error of a score, relative to it; 0 if the values have other units, or relative errors.

        It was compared with measured errors, float32 against float64, on five networks. The similarity of an image to
        itself has a gradient of zero. For this score, the largest values of gradients, Grad-CAM and Layer-CAM are at
        most 0.23 times this error. The largest values of Grad-CAM++ and DeconvNet reach 5 times this error. For a
        probability of 1 - 1e-6 the maps are still correct, and their largest values are at least 2.8 times this error.
        float16 and bfloat16 are treated as float32: the errors of their gradients are relative, and far below the
        rounding error of the score.

        It is 0 with a ledger, as in LRP. The errors of its values are relative too: where biases absorb all but 1e-4 of
        the score, the values at the pixels still have errors of at most 6e-6 of the largest value with z+ and gamma,
        and 1e-3 to 7e-2 with epsilon and alpha-beta.
        """
        is_in_score = self.units in _IN_SCORE and "ledger" not in self.evidence
        kind = torch.float64 if self.values.dtype == torch.float64 else torch.float32
        return torch.finfo(kind).eps / 2 if is_in_score else 0.0

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.values)

    def __getitem__(self, index: int | slice) -> Explanation:
        """Return the explanation of one image (N = 1) or of a slice of images. Raises IndexError past the end."""
        chosen = range(len(self))[index]
        rows = chosen if isinstance(chosen, range) else range(chosen, chosen + 1)
        indices = list(rows) if len(rows) != 1 else slice(rows[0], rows[0] + 1)
        tensors = {name: tensor[indices] for name, tensor in self.tensors().items()}
        lists = {name: tuple(entry[i] for i in rows) for name in _BY_IMAGE if (entry := self.evidence.get(name))}
        questions, frames = tuple(self.questions[i] for i in rows), tuple(self.frames[i] for i in rows)
        return replace(self.with_tensors(tensors, **lists), questions=questions, frames=frames)

    def __iter__(self) -> Iterator[Explanation]:
        """Iterate over the explanations of single images."""
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the values as an array (N, C, H, W)."""
        values = self.values.detach().cpu()
        array = (values if values.dtype != torch.bfloat16 else values.float()).numpy()
        return np.array(array, dtype=dtype, copy=True) if copy else np.asarray(array, dtype=dtype)

    def __repr__(self) -> str:
        """Return one line: the target, the method, and the shape of the values."""
        targets = ", ".join(self.target_names[:3]) + (", ..." if len(self) > 3 else "")
        where = f" at {self.layer}" if self.layer else ""
        return f"<Explanation of {targets} by {self.method}{where}, values {tuple(self.values.shape)}>"

    def _repr_png_(self) -> bytes | None:
        """Return the image that a notebook shows; None to show text, if the explanation cannot be drawn."""
        return tables.draw_png(self)

    def to(self, device: torch.device | str) -> Explanation:
        """Return the explanation with its tensors on another device."""
        return self.with_tensors({name: tensor.to(device) for name, tensor in self.tensors().items()})

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the explanation in the format of the path's suffix, and return the path.

        The file is written atomically: under a temporary name, and then renamed.

        Args:
            path: `.safetensors` keeps everything, including the original images, for `Explanation.load`. `.npy` keeps
                the values, as `np.asarray(explanation)` returns them: (N, C, H, W).

        Raises:
            ExplanationError: The suffix is not supported.
            FileNotFoundError: The folder does not exist.
            OSError: The file cannot be written.
        """
        path = check_path("path", path)
        if path.suffix not in (".npy", ".safetensors"):
            raise ExplanationError(
                f'cannot save to "{path.name}": the suffix must be .safetensors, for everything, or .npy, for the '
                "values; to save a picture, draw it: saliency.overlay(explanation).save(...)"
            )
        return write_by_suffix(path, {".npy": self._npy, ".safetensors": lambda: save(*pack_explanation(self))})

    def _npy(self) -> bytes:
        file = io.BytesIO()  # on a full disk, `np.save` to a file raises no error
        np.save(file, np.asarray(self))
        return file.getvalue()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote, as an object of this class, with the fields of a subclass.

        Raises:
            ExplanationError: The file is missing, damaged, or of another kind, or one of its images exceeds the size
                limit.
        """
        path = check_path("path", path)
        with errors_as(ExplanationError, f"{path}: not a readable explanation"):
            with safe_open(str(path), framework="pt") as file:
                header = json.loads((file.metadata() or {}).get("saliency", "null"))
                if not isinstance(header, dict) or header.get("format") not in _FORMATS:
                    raise ExplanationError(
                        f"{path}: a safetensors file that this version of Explanation.save did not write"
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return cast("Self", _from_file(cls, header, tensors))

    def _header(self) -> dict[str, Any]:
        tensors = self.tensors()
        names = [field.name for field in fields(self) if field.name not in tensors]
        header = {name: getattr(self, name) for name in names}
        header |= {"format": _FORMATS[-1], "settings": dict(self.settings)}
        header["evidence"] = {name: entry for name, entry in self.evidence.items() if name not in tensors}
        header["frames"] = [frame and [frame.box, frame.name, frame.range] for frame in self.frames]
        return header


def joined(explanations: Sequence[Explanation]) -> Explanation:
    """Join explanations of single images into one."""
    if len(explanations) == 1:
        return explanations[0]
    parts: dict[str, Any] = {}
    for name in explanations[0].tensors():  # a standard error that one image lacks is None for all
        tensors = [explanation.tensors().get(name) for explanation in explanations]
        parts[name] = None if any(tensor is None for tensor in tensors) else torch.cat(cast("list[Tensor]", tensors))
    for name in _BY_IMAGE:
        parts[name] = tuple(chain.from_iterable(e.evidence.get(name, ()) for e in explanations)) or None
    questions = tuple(chain.from_iterable(explanation.questions for explanation in explanations))
    frames = tuple(chain.from_iterable(explanation.frames for explanation in explanations))
    return replace(explanations[0].with_tensors(parts), questions=questions, frames=frames)


def pack_explanation(
    explanation: Explanation, image: Mapping[str, Any] | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file for `Explanation.load`.

    Args:
        explanation: The explanation.
        image: Facts about its image, as JSON values, if the values are to be stored in float16. The values are divided
            by a power of two, stored as "scale", so that the largest magnitude lies between 1/2 and 1. Large values
            then do not overflow, and a gradient of 1e-8 does not become zero.
    """
    copied = partial(torch.clone, memory_format=torch.contiguous_format)
    tensors = {name: copied(tensor.detach().cpu()) for name, tensor in explanation.tensors().items()}
    tensors |= {f"picture.{i}": _encode_png(f.image) for i, f in enumerate(explanation.frames) if f is not None}
    header = explanation._header()
    if image is not None:
        values = tensors["values"].double()
        largest = float(values.abs().max())
        scale = math.ldexp(1.0, math.frexp(largest)[1]) if 0 < largest < math.inf else 1.0
        header |= {"image": image, "scale": scale}
        tensors["values"] = (values / scale).half()
    return tensors, {"saliency": json.dumps(header, default=asdict)}


def fractions(parts: Tensor, axis: int) -> Tensor:
    """Divide parts of a score by the sum of their magnitudes along an axis."""
    return parts / parts.abs().sum(axis, keepdim=True).clamp(min=torch.finfo(parts.dtype).tiny)


_DECODED: dict[str, Callable[[Any], Any]] = {
    "coverage": lambda entry: Coverage(**entry),
    "run_stats": lambda rows: tuple(RunStats(**row) for row in rows),
    "boxes": lambda rows: tuple(
        row and ImageBox(*(row[name] and tuple(row[name]) for name in ("size", "box", "range"))) for row in rows
    ),
}
"""Functions from the JSON of an entry of evidence to the entry. The rest are tensors, tuples of texts, and numbers."""


def _frame(entry: Sequence[Any], picture: Tensor) -> Frame:
    """Return the frame of a file, from its box, name and range, and the file of its image as bytes."""
    box, name, limits = entry if isinstance(entry[0], list) else (entry, "", None)
    return Frame(decode(io.BytesIO(picture.numpy().tobytes()), "the image"), tuple(box), name, limits and tuple(limits))


def _from_file(cls: type[Explanation], header: dict[str, Any], tensors: dict[str, Tensor]) -> Explanation:
    """Return the explanation of a file. The error of a damaged file may have any type."""
    attributes = {name: value for name, value in header.items() if name not in ("format", "image", "scale", "evidence")}
    attributes["input_size"] = tuple(header["input_size"])
    attributes["frames"] = tuple(
        entry and _frame(entry, tensors.pop(f"picture.{number}")) for number, entry in enumerate(header["frames"])
    )
    attributes["questions"] = tuple(
        QuestionFacts(**facts | {"box": facts["box"] and tuple(facts["box"])}) for facts in header["questions"]
    )
    entries = header["evidence"] | ({"boxes": [header["image"]]} if header.get("image") else {})
    entries = {name: _DECODED.get(name, lambda entry: entry)(entry) for name, entry in entries.items()}
    evidence: dict[str, Any] = {name: tuple(e) if isinstance(e, list) else e for name, e in entries.items()}
    evidence |= tensors
    values, scores = evidence.pop("values"), evidence.pop("scores")
    if "scale" in header:
        values = (values.double() * header["scale"]).float()
    explanation = cls(values, scores, evidence=evidence, **attributes)
    lists = [attributes["questions"], attributes["frames"], *(evidence[name] for name in _BY_IMAGE if name in evidence)]
    if {len(rows) for rows in (*lists, *explanation.tensors().values())} != {len(values)}:
        raise ValueError("the tensors and lists have different numbers of images")
    return explanation


def _encode_png(image: Image.Image) -> Tensor:
    """Encode an image as PNG, which is lossless; the weakest compression is the fastest."""
    return torch.frombuffer(bytearray(encode(image, "PNG", compress_level=1)), dtype=torch.uint8)


Product = Literal["cosine", "dot"]
"""Similarities that are a sum over pairs of cells."""


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """Result of `matches`: the contribution of each pair of cells to the similarity of two images.

    Attributes:
        values: (h, w, h', w') the contributions, signed, in units of the score: `values[i, j, k, l]` belongs to
            the cell in row i and column j of the first image, and the cell in row k and column l of the second.
        score: The similarity of both images.
        measure: The similarity: "cosine", or "dot" for the inner product of the embeddings.
        method: The method's name in the registry.
        frames: The position of the model's input on each original image; None for an image given as a tensor.
    """

    values: Tensor = field(repr=False)
    score: float
    measure: Product
    method: str
    frames: tuple[Frame | None, Frame | None] = field(repr=False)


def heatmap(
    explanation: Explanation,
    *,
    size: tuple[int, ...] | None = None,
    sign: Sign | None = None,
    percentile: float | None = None,
) -> Tensor:
    """Return one number per pixel of the model's input: (N, H, W), on the device of the values and in their units.

    For volumes and videos, return one number per voxel: (N, D, H, W).

    Half and bfloat16 values are reduced in float32; other types are unchanged. The resize is bilinear by pixel centres
    (`align_corners=False`), with antialiasing if the map shrinks; trilinear without antialiasing for a volume.

    Args:
        explanation: The result of a method; it does not change.
        size: (H, W) or (D, H, W) of the map; by default the size of the model's input.
        sign: "positive" keeps values above zero, "signed" keeps all values, "absolute" takes the largest magnitude of
            the channels; by default as in the paper of the method. Otherwise channels are summed.
        percentile: Clip the magnitudes of each image at this percentile (99 suits gradients); by default nothing is
            clipped. The units do not change.

    Raises:
        NonFiniteError: A value is NaN or infinite; the message names the image.
        RenderError: `explanation` is not an explanation, or an option is invalid.
    """
    require_explanation(explanation, "heatmap")
    maps = reduced_maps(explanation, sign)
    if percentile is not None:
        limit = along_rows(limits(maps, percentile), maps)
        maps = maps.clamp(-limit, limit)
    return resized(maps, explanation.input_size if size is None else size)


def require_explanation(value: object, name: str) -> None:
    """Raise RenderError unless a value is an explanation. `name` is the function that takes it."""
    if not isinstance(value, Explanation):
        hint = "; take the one of an input, result[NAME]" if isinstance(value, Mapping) else ""
        if isinstance(value, str | os.PathLike | Image.Image):
            hint = "; the explanation comes first, as in overlay(explanation, image)"
        raise RenderError(
            f"{name} takes an Explanation, the result of attribute(...); got {type(value).__name__}{hint}"
        )


def reduced_maps(explanation: Explanation, sign: Sign | None) -> Tensor:
    """Return the values with their channels reduced and the sign applied: (N, h, w).

    Raises:
        NonFiniteError: A value, or the sum of finite values, is NaN or infinite.
        RenderError: The sign is unknown.
    """
    used = check_choice("sign", explanation.sign if sign is None else sign, SIGNS, error=RenderError)
    maps = reduce_channels(explanation.values, used)
    _require_finite(maps, explanation)
    return maps.clamp(min=0) if used == "positive" else maps


def reduce_channels(values: Tensor, sign: Sign) -> Tensor:
    """Return values (N, C, h, w) as maps (N, h, w): the largest magnitudes of the channels, or their sums."""
    values = at_least_float32(values.detach())
    return values.abs().amax(dim=1) if sign == "absolute" else values.sum(dim=1)


def limits(maps: Tensor, percentile: float | None) -> Tensor:
    """Return the magnitude that `percentile` % of each map's pixels do not exceed: (N,); the largest for None.

    The limit is always the magnitude of a pixel. If it would be zero for a map with a few nonzero pixels, the largest
    magnitude is returned: clipping must not erase a map.

    Raises:
        RenderError: The percentile is not above 0 and at most 100.
    """
    magnitudes = maps.abs().flatten(1)  # (N, h * w)
    largest = magnitudes.amax(dim=1)
    if percentile is None:
        return largest
    hint = "; 99 clips the highest 1 % of a map"
    percentile = check_number("percentile", percentile, above=0, most=100, hint=hint, error=RenderError)
    pixels = magnitudes.shape[1]
    rank = max(1, math.ceil(pixels * percentile / 100 - 1e-9))
    limit = magnitudes.topk(pixels - rank + 1, dim=1).values[:, -1]
    return torch.where(limit > 0, limit, largest)


def several(explanations: Explanation | Iterable[Explanation], name: str) -> list[Explanation]:
    """Return one or several explanations as a list. Raises RenderError if there is none."""
    is_one = isinstance(explanations, Explanation | Tensor | Mapping) or not isinstance(explanations, Iterable)
    listed: list[Any] = [explanations] if is_one else list(explanations)
    for explanation in listed:
        require_explanation(explanation, name)
    if not listed:
        raise RenderError(f"{name} got no explanation; pass at least one")
    return listed


def single_images(explanations: Explanation | Iterable[Explanation], name: str) -> list[Explanation]:
    """Return the explanations of single images, in order. Raises RenderError if there is none."""
    return [image for explanation in several(explanations, name) for image in explanation]


def method_titles(explanations: Sequence[Explanation]) -> list[str]:
    """Return the title of each method, with the layer and the settings that distinguish explanations by one method."""
    facts = [{"layer": explanation.layer, **explanation.settings} for explanation in explanations]
    titles = []
    for explanation, settings in zip(explanations, facts, strict=True):
        same = [other for other, peer in zip(facts, explanations, strict=True) if peer.title == explanation.title]
        words = [
            value if isinstance(value, str) else f"{name}={value}"
            for name, value in settings.items()
            if value is not None and any(other.get(name) != value for other in same)
        ]
        titles.append(" ".join([explanation.title, *words]))
    return titles


def _require_finite(maps: Tensor, explanation: Explanation) -> None:
    bad = (~torch.isfinite(maps)).flatten(1).sum(dim=1).tolist()
    for image, count in enumerate(bad):
        if count:
            raise NonFiniteError(
                f"the {explanation.method} map of image {image} is NaN or infinite at {count} of "
                f"{maps[image].numel()} pixels; check the score, the model's weights and the dtype"
            )


def resized(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Resize maps (N, h, w) to a size (H, W), as `heatmap` does. Raises RenderError if `size` is invalid."""
    axes = ("depth", "height", "width")[1 - maps.dim() :]
    if not isinstance(size, list | tuple) or len(size) != len(axes) or not all(map(is_integer, size)):
        raise RenderError(f"size={described(size)} is not ({', '.join(axes)}) in pixels, each at least 1")
    shrinks = any(new < old for new, old in zip(size, maps.shape[1:], strict=True))
    return resize(maps[:, None], list(map(int, size)), antialias=shrinks)[:, 0]


def standard_error(explanation: Explanation) -> Explanation:
    """Return the standard errors of an explanation as an explanation, which can be drawn and measured.

    Its colours begin at zero.

    Args:
        explanation: An explanation by a method that samples.

    Raises:
        RenderError: The explanation has no standard error.
    """
    error = _require_error(explanation, "standard_error")
    questions = tuple(replace(asked, name=f"standard error of {asked.name}") for asked in explanation.questions)
    about_values = dict.fromkeys(("error", "residual", "agreement", "ledger", "ledger_names"))
    explanation = explanation.with_evidence(**about_values, from_zero=True)
    return replace(explanation, values=error, sign="positive", questions=questions)


def significance(explanation: Explanation, *, sign: Sign | None = None) -> Tensor:
    """Return how many standard errors each pixel of the map is away from zero: (N, h, w), dimensionless.

    About 95 % of the pixels of a random map lie below 2. If channels are summed, their errors are summed too, as for
    fully correlated errors. The true significance is not smaller. A nonzero value without error has infinite
    significance, and a zero value has significance 0.

    Args:
        explanation: An explanation by a method that samples.
        sign: As in `heatmap`.

    Raises:
        NonFiniteError: A value is NaN or infinite.
        RenderError: The explanation has no standard error, or the sign is unknown.
    """
    error = _require_error(explanation, "significance").to(explanation.values.dtype)
    magnitudes = reduced_maps(explanation, sign).abs()
    if (explanation.sign if sign is None else sign) == "absolute":
        strongest = explanation.values.abs().argmax(1, keepdim=True)
        errors = error.gather(1, strongest)[:, 0]
    else:
        errors = error.sum(1)
    distance = magnitudes / errors.to(magnitudes.dtype)
    return torch.where(magnitudes == 0, torch.zeros_like(distance), distance)


def _require_error(explanation: Explanation, name: str) -> Tensor:
    require_explanation(explanation, name)
    if explanation.error is None:
        count = f" (passes: {stats[0].passes})" if (stats := explanation.run_stats) else ""
        raise RenderError(
            f"the explanation by {explanation.method} has no standard error{count}; methods that sample, such as "
            "smooth_grad and kernel_shap, have one after at least two samples, except in tiles"
        )
    return explanation.error
