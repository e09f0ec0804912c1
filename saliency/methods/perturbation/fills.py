"""What stands where pixels are hidden: a colour, the picture's mean or blur, what its surroundings suggest, another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import MethodError, did_you_mean
from ...validation import is_real

BLUR = 1 / 20
"""The blur's standard deviation, as a share of the picture's shorter edge: 11 pixels at 224."""
_REACH = 3  # pixels: how far around itself a pixel that is painted in looks
_NAMES = ("mean", "blur", "inpaint")


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """Another picture (C, H, W), normalised as the model's input, to show where pixels are hidden."""

    tensor: Tensor
    name: str = "image"


FillLike = float | str | Sequence[float] | Tensor | Image
"""A number or one per channel in the model's normalised space (0 is the mean colour of the training pictures), "mean",
"blur", "inpaint", or a picture (C, H, W) as the model takes it."""

Fill = float | str | tuple[float, ...] | Image


def as_fill(like: FillLike) -> Fill:
    """A fill that can be kept: names and numbers checked, tensors as an `Image`.

    Raises:
        MethodError: It is none.
    """
    made: Any = like
    if isinstance(made, Tensor):
        if made.dim() == 4 and len(made) == 1:
            made = made[0]
        if made.dim() != 3 or not made.is_floating_point() or not torch.isfinite(made).all():
            raise MethodError(
                f"fill is a {made.dtype} tensor of shape {tuple(made.shape)}; expected a picture as the model takes "
                "it, finite floating point numbers (C, H, W)"
            )
        return Image(made.detach().clone())
    if isinstance(made, Image) or (isinstance(made, str) and made in _NAMES):
        kept: Fill = made
        return kept
    if isinstance(made, str):
        raise MethodError(f'fill="{made}" is not one of {", ".join(_NAMES)}{did_you_mean(made, _NAMES)}')
    if isinstance(made, list | tuple) and made and all(map(is_real, made)):
        return tuple(float(each) for each in made)
    if is_real(made):
        return float(made)
    raise MethodError(
        f"fill={made!r} is no finite number, no number per channel, none of {', '.join(_NAMES)}, and no picture "
        "(C, H, W) as the model takes it"
    )


class Filler:
    """Variants of one image with some of its pixels hidden.

    Args:
        x: (1, C, H, W) the image.
        fill: What stands where pixels are hidden.

    Attributes:
        still: (1, C, H, W) the image with everything hidden, where that does not depend on what is hidden; None for
            "inpaint".

    Raises:
        MethodError: The fill has other channels or another size than the image.
    """

    def __init__(self, x: Tensor, fill: Fill) -> None:
        self.x = x
        self.still = None if fill == "inpaint" else _still(x, fill)

    def __call__(self, hidden: Tensor) -> Tensor:
        """The images (k, C, H, W) in which the pixels `hidden` (k, 1, H, W), a boolean mask, are replaced."""
        if self.still is not None:
            return torch.where(hidden, self.still, self.x)
        return torch.stack([self._painted(self.x[0], each[0]) for each in hidden])

    def hidden_entirely(self) -> Tensor:
        """The image (1, C, H, W) of which nothing is left. What is painted in has nothing to go by then, and is 0."""
        return torch.zeros_like(self.x) if self.still is None else self.still

    def patch(self, top: int, left: int, size: tuple[int, int]) -> Tensor:
        """What stands in a window of `size` (h, w) that is hidden, (C, h, w)."""
        height, width = size
        if self.still is not None:
            return self.still[0, :, top : top + height, left : left + width]
        # Painting looks at the near surroundings only, so the rest of the picture can stay away.
        above, before = max(top - 2 * _REACH, 0), max(left - 2 * _REACH, 0)
        around = self.x[0, :, above : top + height + 2 * _REACH, before : left + width + 2 * _REACH]
        hidden = torch.zeros(around.shape[1:], dtype=torch.bool, device="cpu")
        inside = (slice(top - above, top - above + height), slice(left - before, left - before + width))
        hidden[inside] = True
        return self._painted(around, hidden)[:, inside[0], inside[1]]

    def _painted(self, image: Tensor, hidden: Tensor) -> Tensor:
        """A picture or a part of it, (C, h, w), with the pixels `hidden` (h, w) painted in from around them.

        By the equations of fluids, Bertalmio et al. (2001), https://doi.org/10.1109/CVPR.2001.990497. OpenCV's rules
        expect values of 0 to 255, and depend on that.
        """
        import cv2

        if bool(hidden.all()):
            return torch.zeros_like(image)
        low, high = (each.cpu().double()[:, None, None] for each in self.x[0].flatten(1).aminmax(dim=1))
        stretch = (high - low).clamp(min=1e-30) / 255
        mask = hidden.cpu().numpy().astype(np.uint8)
        channels = ((image.cpu().double() - low) / stretch).float().numpy()
        painted = np.stack([cv2.inpaint(each, mask, _REACH, cv2.INPAINT_NS) for each in channels])
        made = torch.from_numpy(painted).double() * stretch + low
        return torch.where(hidden.to(image.device), made.to(image), image)


def _still(x: Tensor, fill: Fill) -> Tensor:
    if fill == "mean":
        return x.mean((2, 3), keepdim=True).expand_as(x)
    if fill == "blur":
        return _blurred(x)
    if isinstance(fill, Image):
        if fill.tensor.shape != x.shape[1:]:
            came = f"a fill of shape {tuple(fill.tensor.shape)} came for an input of {tuple(x.shape[1:])}"
            raise MethodError(f"{came}; give it the size and the channels of the model's input")
        return fill.tensor.to(x)[None]
    if isinstance(fill, tuple):
        if len(fill) not in (1, x.shape[1]):
            raise MethodError(f"a fill of {len(fill)} numbers came for {x.shape[1]} channels; give one per channel")
        return torch.tensor(fill, dtype=x.dtype, device=x.device).view(1, -1, 1, 1).expand_as(x)
    return torch.full_like(x, float(fill))


def _blurred(x: Tensor) -> Tensor:
    """The image behind a Gaussian blur; at the border the last pixel goes on, so that edges do not darken."""
    import cv2

    sigma = BLUR * min(x.shape[2:])
    planes = x[0].detach().cpu().double().numpy()
    blurred = [cv2.GaussianBlur(each, (0, 0), sigma, borderType=cv2.BORDER_REPLICATE) for each in planes]
    return torch.from_numpy(np.stack(blurred)).to(x)[None]
