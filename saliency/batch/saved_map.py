"""Saved maps: float16 values in their original resolution, with everything that drawing them again needs."""

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
from .listing import leads_out
from .output_folder import FORMAT, MAP_SUFFIX

_HEADER, _VALUES = "saliency", "values"
FACTS = (
    *("index", "source", "id", "method", "target", "name", "probability", "score", "units", "width", "height"),
    *("input_width", "input_height", "box", "layer", "settings"),
)
"""Columns of the manifest that a saved map repeats."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedMap:
    """The map of one image and method.

    Attributes:
        values: (C, h, w) float16; multiplied by `about["scale"]` they are in the units of the map.
        about: What drawing it needs, as JSON.
    """

    values: NDArray[np.float16]
    about: dict[str, Any]

    @classmethod
    def of(cls, explanation: Explanation, about: Mapping[str, Any]) -> SavedMap:
        """Convert the values of an explanation of one image.

        They are scaled by a power of two so that the largest lies between 1/2 and 1: it does not overflow, and a
        gradient of 1e-8 does not become zero.
        """
        values = explanation.values[0].detach().double().cpu().numpy()
        largest = float(np.abs(values).max(initial=0.0))
        scale = math.ldexp(1.0, math.frexp(largest)[1]) if 0 < largest < math.inf else 1.0
        facts = {"shape": list(values.shape), "scale": scale, "sign": explanation.sign}
        return cls((values / scale).astype(np.float16), {**about, **facts})

    def encode(self) -> bytes:
        """Return the content of the file."""
        text = json.dumps({"format": FORMAT, "map": self.about}, sort_keys=True)
        return save({_VALUES: self.values}, metadata={_HEADER: text})

    def explanation(self) -> Explanation:
        """Return the map as an explanation without a picture."""
        about = self.about
        numbers = torch.tensor([[about["score"]], [about["probability"] or 0.0]], dtype=torch.float32, device="cpu")
        return Explanation(
            values=torch.from_numpy(self.values.astype(np.float32) * np.float32(about["scale"]))[None],
            scores=numbers[0],
            method=about["method"],
            settings=about["settings"],
            target=(about["target"],),
            target_names=(about["name"],),
            probabilities=None if about["probability"] is None else numbers[1],
            layer=about["layer"],
            input_size=(about["input_height"], about["input_width"]),
            frames=(None,),
            sign=about["sign"],
        )


def read_map(path: Path) -> SavedMap:
    """Read a saved map.

    Raises:
        ExplanationError: The file is not a map of `saliency batch`, or is damaged.
    """
    try:
        with safe_open(str(path), framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER, "null"))
            values = file.get_tensor(_VALUES) if isinstance(header, dict) and header.get("format") == FORMAT else None
    except (OSError, SafetensorError, ValueError) as error:
        raise ExplanationError(f"{path} cannot be read as a map: {error}") from error
    if values is None or not isinstance(header.get("map"), dict):
        raise ExplanationError(f"{path} is not a map of saliency batch; pass DIR or DIR/maps/*.{MAP_SUFFIX}")
    about = header["map"]
    lacking = [name for name in (*FACTS, "entry", "sign", "scale") if name not in about]
    if lacking:
        raise ExplanationError(f"{path} is damaged: it lacks {', '.join(lacking)}")
    if leads_out(f"{about['id']}.{about['method']}"):
        raise ExplanationError(f"{path} cannot be trusted: it would be drawn outside of the folder, to {about['id']!r}")
    return SavedMap(values, about)
