"""What `attribute` returns: the values with everything needed to read, draw and keep them."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, PngImagePlugin
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ExplanationError
from ..hooks.rectifiers import Coverage
from ..io.atomic_write import save_tensors
from ..io.crop_detection import Box
from ..io.preprocess import Frame
from .options import RunStats

Sign = Literal["positive", "signed", "absolute"]
Setting = str | int | float | bool | None | list[Any]

_FORMAT = "saliency explanation 1"
_TENSORS = ("values", "scores", "probabilities", "residual", "error", "agreement")


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """One number for every pixel or cell of every image, signed and never normalised.

    A sequence of its images: `len(e)`, `e[0]` and iteration give explanations of one image each, and `np.asarray(e)`
    its values.

    Attributes:
        values: (N, C, H, W) at the input, in score units per unit of the normalised input unless the method says
            otherwise, or (N, 1, h, w) at a layer, in score units.
        scores: (N,) the explained scores, in the units of the model's output.
        method: The method's name in the registry.
        settings: The method's options.
        target: The class index of each image; None where the target is no class.
        target_names: What is explained, in words: a class name, `class 7`, `tiger cat rather than tabby`.
        probabilities: (N,) the probability of each image's class; None where no class is explained.
        layer: The layer that was read; None at the input.
        input_size: (H, W) of the model's input.
        frames: Where the model's input lies on each original picture; None for an image that came as a tensor.
        sign: How the method's authors read the values: "positive" evidence only, "signed", or "absolute" magnitude.
        coverage: How many rectifiers were rewritten, where the method rewrites them.
        residual: (N,) what the values miss of the sum that they should have, where the method is complete: the sum of
            the values and this make up that sum.
        error: The standard error of each value, in the shape and the units of `values`, where the method samples.
        agreement: (N,) the rank correlation of the maps of one half of the samples and of the other, where there are
            samples: 1 is a map that more samples would not change.
        effort: What was spent on each image, where a method makes many passes; otherwise empty.
    """

    values: Tensor
    scores: Tensor
    method: str
    settings: Mapping[str, Setting]
    target: tuple[int | None, ...]
    target_names: tuple[str, ...]
    probabilities: Tensor | None
    layer: str | None
    input_size: tuple[int, int]
    frames: tuple[Frame | None, ...]
    sign: Sign
    coverage: Coverage | None = None
    residual: Tensor | None = None
    error: Tensor | None = None
    agreement: Tensor | None = None
    effort: tuple[RunStats, ...] = ()

    def __len__(self) -> int:
        """The number of images."""
        return len(self.values)

    def __getitem__(self, index: int | slice) -> Explanation:
        """The explanation of one image, with its leading axis kept, or of several. Raises IndexError past the end."""
        at = range(len(self))[index]
        rows = at if isinstance(at, range) else range(at, at + 1)
        chosen: dict[str, Any] = {
            name: tensor[list(rows)] if len(rows) != 1 else tensor[rows[0] : rows[0] + 1]
            for name in _TENSORS
            if (tensor := getattr(self, name)) is not None
        }
        chosen |= {name: tuple(getattr(self, name)[i] for i in rows) for name in ("target", "target_names", "frames")}
        chosen["effort"] = tuple(self.effort[i] for i in rows) if self.effort else ()
        return replace(self, **chosen)

    def __iter__(self) -> Iterator[Explanation]:
        """The explanations of the images, one by one."""
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """The values as an array (N, C, H, W)."""
        values = self.values.detach().cpu()
        array = (values if values.dtype != torch.bfloat16 else values.float()).numpy()
        return np.array(array, dtype=dtype, copy=True) if copy else np.asarray(array, dtype=dtype)

    def __repr__(self) -> str:
        """One line: the method, what is explained, and the shape of the values."""
        what = ", ".join(self.target_names[:3]) + (", ..." if len(self) > 3 else "")
        where = f" at {self.layer}" if self.layer else ""
        return f"<Explanation of {what} by {self.method}{where}, values {tuple(self.values.shape)}>"

    def to(self, device: torch.device | str) -> Explanation:
        """The same with its tensors on another device."""
        moved = {name: tensor.to(device) for name in _TENSORS if (tensor := getattr(self, name)) is not None}
        return replace(self, **moved)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write everything, the pictures included, into one safetensors file with a JSON header.

        The file is written under a temporary name beside its place and moved into it.
        """
        path = Path(path)
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")
        tensors = {name: tensor for name in _TENSORS if (tensor := getattr(self, name)) is not None}
        tensors = {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
        }
        tensors |= {f"picture.{i}": _encoded(f.picture) for i, f in enumerate(self.frames) if f is not None}
        save_tensors(path, tensors, {"saliency": json.dumps(self._header())})
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Explanation:
        """Read what `save` wrote.

        Raises:
            ExplanationError: The file is not there, is damaged, or is something else.
        """
        try:
            with safe_open(str(path), framework="pt") as file:
                header = json.loads((file.metadata() or {}).get("saliency", "null"))
                if not isinstance(header, dict) or header.get("format") != _FORMAT:
                    raise ExplanationError(f"{path}: a safetensors file, but not one that Explanation.save wrote")
                return cls(**_fields_from(header, {name: file.get_tensor(name) for name in file.keys()}))  # noqa: SIM118
        except (OSError, SafetensorError, LookupError, RecursionError, SyntaxError, TypeError, ValueError) as error:
            if isinstance(error, ExplanationError):
                raise
            raise ExplanationError(f"{path}: no readable explanation: {error}") from error

    def _header(self) -> dict[str, Any]:
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _TENSORS}
        plain["settings"] = dict(self.settings)
        plain["coverage"] = asdict(self.coverage) if self.coverage else None
        plain["effort"] = [asdict(each) for each in self.effort]
        plain["frames"] = [None if frame is None else list(frame.box) for frame in self.frames]
        return {"format": _FORMAT, **plain}


def _fields_from(header: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    plain = {name: each for name, each in header.items() if name != "format"}
    plain |= {name: tuple(plain[name]) for name in ("target", "target_names", "input_size")}
    plain["coverage"] = Coverage(**plain["coverage"]) if plain["coverage"] else None
    plain["effort"] = tuple(RunStats(**each) for each in plain.get("effort", ()))
    plain["frames"] = tuple(
        None if box is None else Frame(_decoded(tensors[f"picture.{i}"]), _box(*box))
        for i, box in enumerate(plain["frames"])
    )
    kept = {name: tensors.get(name) for name in _TENSORS}
    per_image = [plain["target"], plain["target_names"], plain["frames"], plain["effort"] or None, *kept.values()]
    if kept["values"] is None or kept["scores"] is None:
        raise ValueError("it holds no values, or no scores")
    if {len(each) for each in per_image if each is not None} != {len(kept["values"])}:
        raise ValueError("its parts disagree on the number of images")
    return plain | kept


def _encoded(picture: Image.Image) -> Tensor:
    """A picture as the bytes of a PNG, which loses nothing; the weakest compression is the quick one."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", compress_level=1)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _decoded(data: Tensor) -> Image.Image:
    # The reader itself: Image.open has a limit on pixels, and what was kept has been read before.
    picture = PngImagePlugin.PngImageFile(io.BytesIO(data.numpy().tobytes()))
    picture.load()
    return picture.copy()


def _box(left: float, top: float, right: float, bottom: float) -> Box:
    return left, top, right, bottom
