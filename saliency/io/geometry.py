"""Where the model's input lies on the image, and boxes in pixels of both."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image
from torch import Tensor

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the image
Range = tuple[float, float]  # pixel values that become 0 and 1


@dataclass(frozen=True, slots=True)
class Frame:
    """Position of the model's input on the original image.

    The box is in pixels of `image` (RGB, upright) and may be fractional. It extends beyond the image where the
    preprocessing padded it. `name` is the name of the file without its suffix, if the image was read from a path.
    `range` is the range of the preprocessing, with which a deep copy of the image is drawn.
    """

    image: Image.Image
    box: Box
    name: str = ""
    range: Range | None = None


@dataclass(frozen=True, slots=True)
class ImageBox:
    """Position of the model's input on an image that was not saved: a `Frame` without its image.

    `size` is the size (w, h) of the image, and `range` the range of a deep image.
    """

    size: tuple[int, int]
    box: Box
    range: Range | None = None


@dataclass(frozen=True, slots=True)
class Geometry:
    """Scale, offset and padding of the model's input on an image, in pixels of both.

    Attributes:
        box: The box of the input on the image, as in `Frame`.
        image_size: The size (w, h) of the image.
        input_size: The size (h, w) of the input; (d, h, w) of a volume.
    """

    box: Box
    image_size: tuple[int, int]
    input_size: tuple[int, ...]

    @classmethod
    def of(cls, frame: Frame | None, input_size: tuple[int, ...]) -> Geometry:
        """Return the geometry of a frame. Without a frame, the input itself is the image."""
        if frame is not None:
            return cls(frame.box, frame.image.size, input_size)
        height, width = input_size[-2:]
        return cls((0, 0, width, height), (width, height), input_size)

    @property
    def scale(self) -> tuple[float, float]:
        """Pixels of the image per pixel of the input, (x, y)."""
        left, top, right, bottom = self.box
        return (right - left) / self.input_size[1], (bottom - top) / self.input_size[0]

    @property
    def pads(self) -> Box:
        """Padding at the left, top, right and bottom, in pixels of the input; negative where the image was cropped."""
        (x, y), (left, top, right, bottom), (width, height) = self.scale, self.box, self.image_size
        return -left / x, -top / y, (right - width) / x, (bottom - height) / y

    def to_image(self, points: Tensor) -> Tensor:
        """Convert x and y in pixels of the input, (..., 2) or boxes (..., 4), to pixels of the image."""
        repeats = points.shape[-1] // 2
        return points * points.new_tensor(self.scale * repeats) + points.new_tensor(self.box[:2] * repeats)

    def to_input(self, box: Box) -> Box:
        """Convert a box in pixels of the image to pixels of the input."""
        (x, y), (left, top) = self.scale, self.box[:2]
        return (box[0] - left) / x, (box[1] - top) / y, (box[2] - left) / x, (box[3] - top) / y


def scaled_size(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Return the size (w, h) of an image after resizing its longer edge to `longest` pixels."""
    width, height = (max(1, round(edge * longest / max(size))) for edge in size)
    return width, height


def resize_box(box: Box, size: tuple[int, int], new_size: tuple[int, int]) -> Box:
    """Return a box after the image was resized from `size` to `new_size`, both (w, h)."""
    scale_x, scale_y = new_size[0] / size[0], new_size[1] / size[1]
    return box[0] * scale_x, box[1] * scale_y, box[2] * scale_x, box[3] * scale_y
