"""What a run does to each photo: everything that its files depend on, besides the photos."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..validation import real_number
from .errors import BatchError

if TYPE_CHECKING:
    from torch import Tensor, nn

Format = Literal["png", "jpg", "webp"]
Sign = Literal["positive", "signed", "absolute"]

FORMATS: tuple[Format, ...] = ("png", "jpg", "webp")
SIGNS: tuple[Sign, ...] = ("positive", "signed", "absolute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How the overlays are drawn; see `saliency.overlay`.

    Attributes:
        format: Of the overlays: "png" loses nothing, "jpg" is a seventh of its size and several times faster.
        opacity: 0..1, or "map".
        colormap: Any name of matplotlib; None for the usual ones.
        sign: How the values are read: "positive", "signed" or "absolute"; None as the method's authors do.
        percentile: Where colours saturate.
    """

    format: Format = "png"
    opacity: float | Literal["map"] = 0.5
    colormap: str | None = None
    sign: Sign | None = None
    percentile: float | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise BatchError(f'format "{self.format}" is not one of {", ".join(FORMATS)}')
        if self.opacity != "map":
            real_number("opacity", self.opacity, least=0, most=1, hint=', or "map"', error=BatchError)
        if self.percentile not in (None, "auto"):
            hint = ', "auto" or None'
            real_number("percentile", self.percentile, above=0, most=100, hint=hint, error=BatchError)
        if self.sign not in (None, *SIGNS):
            raise BatchError(f'sign "{self.sign}" is not one of {", ".join(SIGNS)}')


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, methods and a look.

    Attributes:
        model: A name that `saliency.load` takes, or a model.
        weights: As for `saliency.load`; of no meaning where the model is one.
        methods: Names in the registry.
        layer: For the methods that read one; None for the one that is found by itself.
        options: Options of the methods, each for those that have it.
        target: A class index or name for all photos that name none; None for each photo's top class.
        look: How the overlays are drawn.
        maps: Whether the values are kept too.
    """

    model: str | nn.Module
    weights: str | None = "default"
    methods: tuple[str, ...] = ("grad_cam",)
    layer: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    target: int | str | None = None
    look: Look = field(default_factory=Look)
    maps: bool = False

    def __post_init__(self) -> None:
        methods: object = self.methods
        if isinstance(methods, str) or not isinstance(methods, Sequence) or not methods:
            raise BatchError(f"methods={methods!r}: expected a list of names, such as ['grad_cam']")
        if len(set(methods)) < len(methods):
            raise BatchError(f"methods={list(methods)}: a method is named twice")

    @property
    def model_name(self) -> str:
        """What the model is called."""
        return self.model if isinstance(self.model, str) else type(self.model).__name__

    def fingerprint(self) -> dict[str, Any]:
        """What the files depend on, as JSON: two runs with the same one may go on with each other's folder."""
        look = self.look
        found = {
            "model": self.model_name,
            "weights": self._weights(),
            "methods": list(self.methods),
            "layer": self.layer,
            "options": dict(sorted(self.options.items())),
            "target": self.target,
            "format": look.format,
            "opacity": look.opacity,
            "colormap": look.colormap,
            "sign": look.sign,
            "percentile": look.percentile,
            "maps": self.maps,
        }
        plain: dict[str, Any] = json.loads(json.dumps(found, default=_plain))  # as it comes back from the file
        return plain

    def _weights(self) -> str | None:
        """The weights by name, or by what they are where they come from a file or are in memory."""
        if not isinstance(self.model, str):
            return f"sha256:{_digest(self.model)}"
        if self.weights is None or not os.path.isfile(self.weights):  # noqa: PTH113 - unlike Path, never raises
            return self.weights
        with Path(self.weights).open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What is not the same in two fingerprints, in words."""
    return [
        f"{name} was {old.get(name)!r} and is {new.get(name)!r}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def _digest(model: nn.Module) -> str:
    import torch

    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode())
        if isinstance(value, torch.Tensor):
            found.update(_bytes(value))
    return found.hexdigest()[:16]


def _bytes(values: Tensor) -> memoryview:
    import torch

    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _plain(value: object) -> str:
    """An option that JSON does not take; a tensor by all its values, of which its text leaves out most."""
    import torch

    if isinstance(value, torch.Tensor):
        digest = hashlib.sha256(_bytes(value)).hexdigest()[:16]
        return f"{value.dtype} {tuple(value.shape)} sha256:{digest}"
    return str(value)
