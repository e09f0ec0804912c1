"""The result of `attribute`: the values, with everything needed to read, draw and save them."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from .. import notebook
from ..errors import ExplanationError, errors_as
from ..hooks.rectifiers import Coverage
from ..io.atomic_write import write_by_suffix
from ..io.inputs import decode, encode
from ..io.preprocess import Box, Frame, ImageBox
from .aliases import result_hint
from .options import RunStats

Sign = Literal["positive", "signed", "absolute"]
Setting = str | int | float | bool | None | list[Any] | dict[str, Any]

_FORMAT = "saliency explanation 1"
# The attributes with one entry for each image.
_LISTS = ("target", "target_names", "frames")
_OPTIONAL_LISTS = ("run_stats", "notes", "boxes", "contrasts", "target_boxes")


@dataclass(frozen=True, slots=True, eq=False)
class BatchAttribution:
    """Values and scores that a method returns for a batch and a target. `Explanation` describes the attributes."""

    values: Tensor  # (N, C, H, W) at the input or (N, 1, h, w) at a layer; one more axis for volumes
    scores: Tensor  # (N,)
    coverage: Coverage | None = None
    layer: str | None = None
    residual: Tensor | None = None  # (N,)
    error: Tensor | None = None  # in the shape of the values
    agreement: Tensor | None = None  # (N,)
    run_stats: tuple[RunStats, ...] = ()  # N
    ledger: Tensor | None = None  # (N, K)
    ledger_names: tuple[str, ...] = ()  # K
    outliers: Tensor | None = None  # (N, h, w) of bool
    tile_scores: Tensor | None = None  # (N, rows, columns)
    token_shares: Tensor | None = None  # (N, L)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name; each has one row for each image."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: part for name, part in parts.items() if isinstance(part, Tensor)}


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
        method: The method's name in the registry.
        settings: The method's options.
        target: The class index of each image; None if the target is not a class.
        target_names: The names of the target: a class name, `class 7`, `tiger cat rather than tabby`.
        probabilities: (N,) the probability of each image's class, and of the first class of a contrast; None if no
            class is explained.
        layer: The layer of the values; None at the input.
        input_size: (H, W) of the model's input; (D, H, W) for volumes and videos.
        frames: The position of the model's input on each original image; None for an image given as a tensor.
        sign: The sign that the method's authors show: "positive" values only, "signed", or "absolute" magnitude.
        coverage: The number of operations that each rule of the method handled, and of nonlinearities that it left;
            None for methods without rules.
        residual: (N,) for complete methods, the difference between the expected and the actual sum of the values. With
            a ledger, the score minus the sum of the ledger.
        error: The standard error of each value, in the shape and the units of `values`, if the method samples.
        agreement: (N,) the rank correlation of the maps of two halves of the samples, if the method samples; 1 means
            that more samples would not change the map.
        run_stats: The passes and time of each image, for methods of many passes; otherwise empty.
        ledger: (N, K) the shares of the score, in score units, if the method gives them. An image's shares and its
            residual sum to its score.
        ledger_names: The names of the K shares, such as "input" and "biases".
        outliers: (N, h, w) of bool, for methods of attention: the patches whose tokens have an outlying norm. Such
            tokens hold information about the whole image, so their values are not evidence for their position. None if
            the tokens are not known.
        tile_scores: (1, rows, columns) the score of each tile, of which `scores` is the mean, for an image in tiles. It
            is NaN where a tile has no pixel of the target's region. None without tiles.
        token_shares: (N, L) for an answer of `saliency.generate`, the share of each token that the language model
            reads, in score units, by relevance and gradient x input. None for other methods, for images, and if the
            model also adds the image after the embeddings of the tokens, as Qwen3-VL and Llama 3.2 Vision do.
        tokens: The texts of these L tokens, None for those of an image; empty for other explanations.
        notes: The limits of each image's map, for example that it is 0 everywhere; empty without limits.
        title: The name of the method's class; by default `method`.
        units: The units of the values; by default "<title> value".
        boxes: The size of each original image, and the position of the model's input on it, for a map of
            `saliency batch`, which is saved without its image. Empty for other explanations.
        contrasts: Whether the score of each image is a difference, as of `saliency.contrast`; empty if not known.
        target_boxes: The box that each image's target explains, (left, top, right, bottom) in pixels of the model's
            input; None for other targets. Empty without boxes.
        from_zero: Whether its colours begin at zero, as for standard errors, and not at the minimum of a positive map.
    """

    method: str
    settings: Mapping[str, Setting] = field(default_factory=dict)
    target: tuple[int | None, ...]
    target_names: tuple[str, ...]
    probabilities: Tensor | None = None
    input_size: tuple[int, ...]
    frames: tuple[Frame | None, ...]
    sign: Sign
    notes: tuple[str, ...] = ()
    title: str = ""
    units: str = ""
    boxes: tuple[ImageBox | None, ...] = ()
    contrasts: tuple[bool, ...] = ()
    target_boxes: tuple[Box | None, ...] = ()
    from_zero: bool = False
    tokens: tuple[str | None, ...] = ()

    def __post_init__(self) -> None:
        """Fill in the title and the units of a method that has none."""
        object.__setattr__(self, "title", self.title or self.method)
        object.__setattr__(self, "units", self.units or f"{self.title} value")

    @property
    def image_share(self) -> Tensor | None:
        """The share (N,) of the tokens of images in the sum of all absolute `token_shares`, 0 to 1; None without."""
        if self.token_shares is None:
            return None
        is_image = torch.tensor([token is None for token in self.tokens], device=self.token_shares.device)
        magnitude = self.token_shares.abs()
        return (magnitude * is_image).sum(1) / magnitude.sum(1)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.values)

    def __getitem__(self, index: int | slice) -> Explanation:
        """Return the explanation of one image (N = 1) or of a slice of images. Raises IndexError past the end."""
        chosen = range(len(self))[index]
        rows = chosen if isinstance(chosen, range) else range(chosen, chosen + 1)
        place = list(rows) if len(rows) != 1 else slice(rows[0], rows[0] + 1)
        parts: dict[str, Any] = {name: tensor[place] for name, tensor in self.tensors().items()}
        lists = {name: getattr(self, name) for name in (*_LISTS, *_OPTIONAL_LISTS)}
        parts |= {name: tuple(own[i] for i in rows) for name, own in lists.items() if own}
        return replace(self, **parts)

    def __iter__(self) -> Iterator[Explanation]:
        """Iterate over the explanations of single images."""
        return (self[i] for i in range(len(self)))

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError, with the function that draws or the attribute that has the values."""
            raise AttributeError(f'Explanation has no "{name}"{result_hint(name)}', name=name, obj=self)

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
        """Return the image that a notebook shows; None if it cannot be drawn, then it shows the text."""
        return notebook.draw_png(self)

    def to(self, device: torch.device | str) -> Explanation:
        """Return the explanation with its tensors on another device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

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
        path = Path(path)
        if path.suffix not in (".npy", ".safetensors"):
            raise ExplanationError(
                f'cannot save to "{path.name}": the suffix must be .safetensors, for everything, or .npy, for the '
                "values; to save a picture, draw it: saliency.overlay(explanation).save(...)"
            )
        if not path.parent.is_dir():
            raise FileNotFoundError(f"cannot write {path.name}: there is no folder {path.parent}")
        return write_by_suffix(path, {".npy": self._npy, ".safetensors": lambda: save(*pack_explanation(self))})

    def _npy(self) -> bytes:
        file = io.BytesIO()  # on a full disk, `np.save` to a file raises no error
        np.save(file, np.asarray(self))
        return file.getvalue()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Explanation:
        """Read a file that `save` wrote.

        Raises:
            ExplanationError: The file is missing, damaged, or of another kind, or one of its images is larger than an
                image may be.
        """
        with errors_as(ExplanationError, f"{path}: not a readable explanation"):
            with safe_open(str(path), framework="pt") as file:
                header = json.loads((file.metadata() or {}).get("saliency", "null"))
                if not isinstance(header, dict) or header.get("format") != _FORMAT:
                    raise ExplanationError(f"{path}: a safetensors file, but not one that Explanation.save wrote")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return cls(**_fields_from(header, tensors))

    def _header(self) -> dict[str, Any]:
        names = [field.name for field in fields(self) if not isinstance(getattr(self, field.name), Tensor)]
        plain = {name: getattr(self, name) for name in names}
        plain["settings"] = dict(self.settings)
        plain["frames"] = [None if frame is None else list(frame.box) for frame in self.frames]
        return {"format": _FORMAT, **plain}


def joined(explanations: Sequence[Explanation]) -> Explanation:
    """Return explanations of single images as one."""
    first, lists = explanations[0], _LISTS + _OPTIONAL_LISTS
    parts: dict[str, Any] = {}
    for name in first.tensors():  # a standard error may be missing: None if it is for one image
        tensors = [getattr(own, name) for own in explanations]
        parts[name] = None if any(tensor is None for tensor in tensors) else torch.cat(tensors)
    parts |= {name: tuple(chain.from_iterable(getattr(own, name) for own in explanations)) for name in lists}
    return replace(first, **parts)


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


def _fields_from(header: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    stored = {name: tensor for name, tensor in tensors.items() if not name.startswith("picture.")}
    if not stored.keys() >= {"values", "scores"}:
        raise ValueError("the values or the scores are missing")
    plain = {name: value for name, value in header.items() if name not in ("format", "image", "scale")}
    plain["coverage"] = Coverage(**plain["coverage"]) if plain["coverage"] else None
    plain["run_stats"] = tuple(RunStats(**own) for own in plain.get("run_stats", ()))
    tuples = ("target", "target_names", "input_size", "ledger_names", "notes", "contrasts", "tokens")
    plain |= {name: tuple(plain.get(name, ())) for name in tuples}
    plain["frames"] = tuple(
        None if box is None else _frame(tensors[f"picture.{i}"], *box) for i, box in enumerate(plain["frames"])
    )
    boxes = [header["image"]] if header.get("image") else plain.get("boxes", ())
    plain["target_boxes"] = tuple(box and tuple(box) for box in plain.get("target_boxes", ()))
    plain["boxes"] = tuple(box and ImageBox(tuple(box["size"]), tuple(box["box"]), box["range"]) for box in boxes)
    lists = [*map(plain.get, _LISTS), *filter(None, map(plain.get, _OPTIONAL_LISTS))]
    if {len(part) for part in (*lists, *stored.values())} != {len(stored["values"])}:
        raise ValueError("the tensors and lists have different numbers of images")
    if "scale" in header:
        stored["values"] = (stored["values"].double() * header["scale"]).float()
    return plain | stored


def _encode_png(image: Image.Image) -> Tensor:
    """Encode an image as PNG, which is lossless; the weakest compression is the fastest."""
    return torch.frombuffer(bytearray(encode(image, "PNG", compress_level=1)), dtype=torch.uint8)


def _frame(png: Tensor, left: float, top: float, right: float, bottom: float) -> Frame:
    return Frame(decode(io.BytesIO(png.numpy().tobytes()), "the image"), (left, top, right, bottom))
