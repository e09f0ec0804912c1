"""Raw maps in files of their own: float16, signed, as small as they came, with all that drawing them again takes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..attribution.explanation import Explanation
from ..errors import ExplanationError
from .image_entry import leads_out
from .output_folder import FORMAT, MAP_SUFFIX

_HEADER, _VALUES = "saliency", "values"
_FACTS = (
    *("index", "source", "id", "entry", "method", "target", "name", "probability", "score", "sign", "layer"),
    *("settings", "scale", "width", "height", "input_width", "input_height", "box"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A map as it is kept.

    Attributes:
        values: (C, h, w) float16; times `about["scale"]` they are in the units of the map.
        about: What drawing it again takes, as JSON.
    """

    values: NDArray[np.float16]
    about: dict[str, Any]

    @classmethod
    def of(cls, explanation: Explanation, about: Mapping[str, Any]) -> Kept:
        """The values of an explanation of one image.

        They are scaled by a power of two such that the largest lies between 1/2 and 1: neither does it overflow nor
        does a gradient of 1e-8 become zero.
        """
        values = explanation.values[0].detach().double().cpu().numpy()
        largest = float(np.abs(values).max(initial=0.0))
        scale = math.ldexp(1.0, math.frexp(largest)[1]) if 0 < largest < math.inf else 1.0
        settings = dict(explanation.settings)
        facts = {"shape": list(values.shape), "scale": scale, "settings": settings, "layer": explanation.layer}
        return cls((values / scale).astype(np.float16), {**about, **facts})

    def encoded(self) -> bytes:
        """The content of its file."""
        text = json.dumps({"format": FORMAT, "map": self.about}, sort_keys=True)
        return save({_VALUES: self.values}, metadata={_HEADER: text})

    def explanation(self) -> Explanation:
        """The same as an explanation, without the picture. Raises LookupError where something is missing."""
        about = self.about
        probability = about["probability"]
        return Explanation(
            values=torch.from_numpy(self.values.astype(np.float32) * np.float32(about["scale"]))[None],
            scores=torch.tensor([about["score"]], dtype=torch.float32, device="cpu"),
            method=about["method"],
            settings=about["settings"],
            target=(about["target"],),
            target_names=(about["name"],),
            probabilities=None
            if probability is None
            else torch.tensor([probability], dtype=torch.float32, device="cpu"),
            layer=about["layer"],
            input_size=(about["input_height"], about["input_width"]),
            frames=(None,),
            sign=about["sign"],
        )


def read_map(path: Path) -> Kept:
    """The map in a file.

    Raises:
        ExplanationError: It is no map of `saliency batch`, or is damaged.
    """
    try:
        with safe_open(str(path), framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER, "null"))
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                raise ExplanationError(f"{path} is no map of saliency batch; pass DIR or DIR/maps/*.{MAP_SUFFIX}")
            about = header["map"]
            lacking = [name for name in _FACTS if name not in about]
            if lacking:
                raise ExplanationError(f"{path} is damaged: it lacks {', '.join(lacking)}")
            if leads_out(f"{about['id']}.{about['method']}"):
                raise ExplanationError(f"{path} is not to be trusted: it would be written to {about['id']!r}")
            return Kept(file.get_tensor(_VALUES), about)
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, ExplanationError):
            raise
        raise ExplanationError(f"{path} cannot be read as a map: {error}") from error
