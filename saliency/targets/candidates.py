"""Candidates of a detector: its boxes and scores before suppression, wherever its output holds them.

This is the only file that knows the formats of detectors. It distinguishes them by shapes and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import TargetError
from ..io.geometry import Geometry
from ..validation import described
from .classes import require_class

BoxLink = Literal["sigmoid", "softmax", "label"]
"""How class scores become probabilities. "label" is for outputs after suppression, with one class per detection."""

ABSENT = -4.6
"""The logit of a probability of 1 %: the score of a class that the output does not hold for a box."""

_SOFTMAX = ("Detr", "Yolos", "TableTransformer")  # classes of transformers whose last class is "no object"
_SEPARATORS = (0, 101, 102, 1012, 1029)  # BERT's [PAD], [CLS], [SEP], "." and "?", between phrases of Grounding DINO
_ANGLE = "boxes with an angle are not read; pass read=, a function that gives upright boxes"
_MOST_COMPARED = 1000  # candidates among which duplicates are suppressed


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Boxes that a detector considers in one image, and their scores, with their graph.

    Attributes:
        boxes: (n, 4) left, top, right and bottom, in pixels; converted to float32 unless they are float64.
        scores: (n, C) the logits of the classes; with "softmax", minus the logit of "no object".
        objectness: (n,) the logits of an object of any class, or None.
        link: The function from the scores to probabilities.
        is_factor: Whether probabilities of classes are multiplied by the probability of an object.
        keypoints: (n, K) the scores of the joints of each box, or None.
    """

    boxes: Tensor
    scores: Tensor
    objectness: Tensor | None = None
    link: BoxLink = "sigmoid"
    is_factor: bool = True
    keypoints: Tensor | None = None
    _distinct: dict[tuple[float, int | None], list[int]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the shapes. Raises TargetError for a wrong shape."""
        parts: tuple[Any, ...] = self.boxes, self.scores
        if not all(isinstance(part, Tensor) for part in parts):
            raise TargetError(f"got {' and '.join(map(described, parts))}; expected tensors of boxes and scores")
        object.__setattr__(self, "boxes", _wide(self.boxes))
        count, shapes = len(self.boxes), [tuple(part.shape) for part in (self.boxes, self.scores)]
        is_fitting = shapes[0] == (count, 4) and len(shapes[1]) == 2 and shapes[1][0] == count
        if not is_fitting or (self.objectness is not None and self.objectness.shape != (count,)):
            got = f"boxes {shapes[0]}, scores {shapes[1]}"
            raise TargetError(f"got {got}; expected boxes (n, 4), scores (n, classes), objectness (n,) or None")

    @property
    def probabilities(self) -> Tensor:
        """The probabilities (n, C) of the classes, in float32 or wider."""
        scores = _wide(self.scores)
        if self.link == "softmax":
            return F.pad(scores, (0, 1)).softmax(1)[:, :-1]
        is_scaled = self.objectness is not None and self.is_factor
        return scores.sigmoid() * (cast("Tensor", self.objectness)[:, None].sigmoid() if is_scaled else 1)

    @property
    def certainty(self) -> Tensor:
        """The probability (n,) of an object: from objectness or "no object", else the highest class probability."""
        if self.objectness is not None:
            return _wide(self.objectness).sigmoid()
        return self.probabilities.sum(1) if self.link == "softmax" else self.probabilities.amax(1)

    def column(self, index: int) -> Tensor:
        """Return the scores (n,) of a class. After suppression, the output may not hold the class at all."""
        has_class = index < self.scores.shape[1]
        return self.scores[:, index] if has_class else self.scores[:, 0] * 0 + ABSENT  # with a graph

    def detections(self, least: float = 0.05, label: int | None = None) -> list[int]:
        """Return the rows of distinct objects, in descending order of their probability.

        A box is dropped if it overlaps a better box of the same class with an IoU above 0.5.

        Args:
            least: The lowest probability.
            label: The class; by default the top class of each box.
        """
        key = least, label
        if key not in self._distinct:
            self._distinct[key] = self._suppressed(least, label)
        return self._distinct[key]

    def _suppressed(self, least: float, label: int | None) -> list[int]:
        rows = self.probabilities.detach()
        if rows.numel() == 0 or (label is not None and label >= rows.shape[1]):
            return []
        top, classes = rows.max(1) if label is None else (rows[:, label], rows[:, label].mul(0).long() + label)
        order = top.argsort(descending=True, stable=True)[:_MOST_COMPARED]
        order = order[top[order] >= least]
        boxes, labels = self.boxes.detach()[order], classes[order]
        is_same = (iou(boxes[:, None], boxes) > 0.5) & (labels[:, None] == labels)
        distinct: list[int] = []
        for index, duplicates in enumerate(is_same.cpu().numpy()):
            if duplicates[index] and not duplicates[distinct].any():  # a box without area has an IoU of 0 with itself
                distinct.append(index)
        return cast("list[int]", order[distinct].tolist())


class Detections(NamedTuple):
    """Candidates of several images, padded with empty boxes to the same number.

    Attributes:
        boxes: (N, n, 4) as for `Candidates`.
        probabilities: (N, n, C) of the classes.
        certainty: (N, n) the probability of an object.
    """

    boxes: Tensor
    probabilities: Tensor
    certainty: Tensor

    @classmethod
    def of(cls, rows: Sequence[Candidates]) -> Detections:
        """Return the candidates of images."""
        classes, objects = max(row.scores.shape[1] for row in rows), [row.objectness for row in rows]
        missing = [(row.scores, classes - row.scores.shape[1]) for row in rows]
        scores = [F.pad(part, (0, count), value=-torch.inf) if count else part for part, count in missing]
        objectness = None if objects[0] is None else torch.cat(cast("list[Tensor]", objects))
        # All images at once, which is faster.
        whole = replace(
            rows[0], boxes=torch.cat([row.boxes for row in rows]), scores=torch.cat(scores), objectness=objectness
        )
        parts, counts = (whole.boxes, whole.probabilities, whole.certainty), [len(row.boxes) for row in rows]
        if len({*counts}) == 1:
            return cls(*(part.view(len(rows), counts[0], *part.shape[1:]) for part in parts))
        return cls(*(pad_sequence(list(torch.split(part, counts)), True) for part in parts))

    def similarity(self, boxes: Tensor, probabilities: Tensor) -> Tensor:
        """Return the highest product of IoU, probability of an object, and cosine of class probabilities, (N, T).

        Args:
            boxes: (T, 4) the boxes to compare with.
            probabilities: (T, C) their class probabilities.
        """
        added = probabilities.shape[1] - self.probabilities.shape[2]  # negative if only variants have further classes
        rows = F.pad(F.normalize(self.probabilities, dim=2), (0, added))
        cosines = rows @ F.normalize(probabilities, dim=1).mT  # (N, n, T)
        overlaps = iou(self.boxes.to(rows)[:, :, None], boxes.to(rows))
        similarities = (overlaps * cosines).mul_(self.certainty[..., None])
        return F.pad(similarities, (0, 0, 0, 1)).amax(1)  # 0 without boxes


CandidatesFunction = Callable[[Any], Sequence[Candidates]]
"""A detector's output -> the candidates of each image, with boxes in pixels of the model's input."""


def _wide(numbers: Tensor) -> Tensor:
    """Convert to float32 or wider: areas overflow in float16, and integers have no logits and no fractions."""
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))


def iou(first: Tensor, second: Tensor) -> Tensor:
    """Return the intersection over union of boxes (..., 4) of shapes that broadcast; 0 for empty boxes."""
    low, high = torch.maximum(first[..., :2], second[..., :2]), torch.minimum(first[..., 2:], second[..., 2:])
    inner = _area(low, high)
    return inner / (_area(*first.chunk(2, -1)) + _area(*second.chunk(2, -1)) - inner).clamp(min=1e-12)


def _area(low: Tensor, high: Tensor) -> Tensor:
    width, height = (high - low).clamp(min=0).unbind(-1)
    return width * height  # `prod` over two numbers is several times as slow


def candidates(
    output: Any,
    geometries: Sequence[Geometry],
    classes: int | None = None,
    link: BoxLink | None = None,
    read: CandidatesFunction | None = None,
) -> list[Candidates]:
    """Return the candidates of each image of a batch, with boxes in pixels of the images.

    Args:
        output: The output of a detector. Supported are torchvision's detectors; Ultralytics v3 to 12 and 26, RT-DETR,
            YOLOv5, v7 and YOLOX; DETR and its descendants, YOLOS, OWL-ViT, OWLv2 and Grounding DINO of transformers.
        geometries: The position of the model's input on each image, or one position for all images.
        classes: The number of classes, or None. DETR's output has one more class: "no object".
        link: How the class scores of a DETR become probabilities: "softmax" with "no object" as the last class, or
            "sigmoid". By default it follows from `classes`, or from the class of a transformers output.
        read: A function that reads the output of any other detector.

    Raises:
        TargetError: The output has another format, or it is unclear whether the last class is "no object".
    """
    height, width = geometries[0].input_size[-2:]
    size = height, width
    rows = output if _are_candidates(output) else _read(output, size, classes, link) if read is None else read(output)
    if not _are_candidates(rows) or (len(rows) not in (1, len(geometries)) and len(geometries) > 1):
        problem = f"got {type(rows).__name__} from the function that reads the detector's output"
        raise TargetError(f"{problem}; expected a list of saliency.Candidates, one for each image")
    boxes: Sequence[Tensor] = [row.boxes for row in rows]
    if len(geometries) == len(rows):
        boxes = [geometry.to_image(part) for geometry, part in zip(geometries, boxes, strict=True)]
    else:  # all images at once, which is faster
        boxes = torch.split(geometries[0].to_image(torch.cat([*boxes])), [len(part) for part in boxes])
    return [replace(row, boxes=part) for row, part in zip(rows, boxes, strict=True)]


def _are_candidates(rows: Any) -> bool:
    return isinstance(rows, list | tuple) and len(rows) > 0 and all(isinstance(row, Candidates) for row in rows)


def _read(output: Any, size: tuple[int, int], classes: int | None, link: BoxLink | None) -> list[Candidates]:
    """Return the candidates of each image, with boxes in pixels of the input (h, w)."""
    entries = list(output) if isinstance(output, list | tuple) else [output]
    if entries and all(isinstance(entry, Mapping) and {"boxes", "scores", "labels"} <= {*entry} for entry in entries):
        rows = [_labelled(entry["boxes"], entry["scores"], entry["labels"], classes) for entry in entries]
        return [replace(row, keypoints=entry.get("keypoints_scores")) for row, entry in zip(rows, entries, strict=True)]
    named = next((entry for entry in entries if not isinstance(entry, Tensor | list | tuple)), None)
    parts = dict(named) if isinstance(named, Mapping) else getattr(named, "__dict__", {})
    raw = parts.get("one2one") or parts
    if isinstance(raw, list):  # YOLOv10 before 8.4, with 16 bins for each edge
        return _of_levels(raw, 64, size)
    if {"boxes", "scores"} <= {*raw} and isinstance(raw["scores"], Tensor) and raw["scores"].dim() == 3:
        if "angle" in raw:
            raise TargetError(_ANGLE)
        y, (_, count, cells) = entries[0], raw["scores"].shape
        if isinstance(y, Tensor) and y.shape[1:] == (4 + count, cells):
            return _batch(_corners(y[:, :4].mT), raw["scores"].mT)
        sizes = [level.shape[-2:] for level in raw["feats"]]
        rows = _batch(_decoded(raw["boxes"], sizes, size), raw["scores"].mT)
        return _with_joints(rows, y, raw["kpts"]) if "kpts" in raw else rows
    y, scores = entries[0] if entries else None, raw.get("scores")
    if isinstance(y, Tensor) and isinstance(scores, Tensor) and y[:, 4:].shape == scores.shape:
        return _batch(_corners(y[:, :4].mT), scores.mT)  # decoded boxes, and logits without their levels
    logits, boxes = parts.get("logits", parts.get("pred_logits")), parts.get("pred_boxes")
    if isinstance(logits, Tensor) and isinstance(boxes, Tensor):
        return _queries(parts, logits, _corners(boxes) * _unit(size, boxes), _detr_link(output, logits, classes, link))
    if entries and isinstance(entries[0], Tensor) and entries[0].dim() == 3 and named is None:
        return _columns(entries[0], entries[1] if len(entries) > 1 else None, size, classes)
    raise TargetError(
        f"no adapter reads boxes from this output: {_described(output)}; pass read=, a function from the output to "
        "[saliency.Candidates(boxes, scores), ...], one for each image: boxes (n, 4), left, top, right and bottom in "
        "pixels of the model's input, and logits (n, classes)"
    )


def _columns(y: Tensor, levels: Any, size: tuple[int, int], classes: int | None) -> list[Candidates]:
    """Read (B, 4 + C, n) of Ultralytics, (B, n, 6) of its heads without suppression, or (B, n, 5 + C) of YOLOv5.

    Sigmoids saturate, so the logits of the levels are used if the output holds them.
    """
    levels = levels if isinstance(levels, list | tuple) else []
    maps = [level for level in levels if isinstance(level, Tensor) and level.dim() == 4]
    if len(maps) > 1 and maps[0].shape[-1] == 4 and maps[0].shape[:3] == maps[1].shape[:3]:
        return _batch(_corners(maps[0][-1]) * _unit(size, y), maps[1][-1])  # RT-DETR of Ultralytics
    extra = [part for part in levels if isinstance(part, Tensor) and part.shape[::2] == y.shape[::2]]
    if extra:  # the masks, joints or angle of Ultralytics follow the classes
        if extra[0].shape[1] == 1:
            raise TargetError(_ANGLE)
        count = y.shape[1] - extra[0].shape[1]
        return _with_joints(_columns(y[:, :count], levels[0], size, count - 4), y, extra[0])
    levels = [level for level in levels if isinstance(level, Tensor)]
    dims = {level.dim() for level in levels}
    ranked, last = y.detach()[..., 4:5], y.detach()[..., -1]
    has_labels = y.shape[2] == 6 and last.numel() > 0 and bool((last == last.round()).all())
    if has_labels and bool((ranked[:, :-1] >= ranked[:, 1:]).all()):
        return [_labelled(row[:, :4], row[:, 4], row[:, 5].long(), classes) for row in y]
    if not _has_objectness(y, dims, classes):
        count = y.shape[1] - 4
        if dims == {4}:
            return _of_levels(levels, -count, size)
        return _batch(_corners(y[:, :4].mT), _logit(y[:, 4:].mT))
    logits = torch.cat([level.flatten(1, 3) for level in levels], 1)[..., 4:] if dims == {5} else _logit(y[..., 4:])
    return _batch(_corners(y[..., :4]), logits[..., 1:], logits[..., 0])


def _of_levels(levels: Sequence[Tensor], first: int, size: tuple[int, int]) -> list[Candidates]:
    """Read feature maps (B, channels, h, w) of Ultralytics, whose class scores begin at the channel `first`."""
    maps = torch.cat([level.flatten(2) for level in levels], 2)
    return _batch(_decoded(maps[:, :first], [level.shape[-2:] for level in levels], size), maps[:, first:].mT)


def _has_objectness(y: Tensor, dims: set[int], classes: int | None) -> bool:
    """Return whether an output is (B, n, 5 + C) of YOLOv5, with objectness, instead of (B, 4 + C, n) of Ultralytics.

    The levels (4 or 5 axes) decide, then the number of classes, then the values: only boxes are outside of 0..1.

    Raises:
        TargetError: Both formats fit, or neither.
    """
    if dims in ({4}, {5}):
        return dims == {5}
    counts = y.shape[1] - 4, y.shape[2] - 5
    fits = [count == classes for count in counts]
    if fits[0] == fits[1]:
        ranges = [part.detach().aminmax() for part in (y[:, 4:], y[..., 4:]) if min(counts) > 0]
        fits = [bool(low >= 0 and high <= 1) for low, high in ranges] or [count > 0 for count in counts]
    if fits[0] == fits[1]:
        orders = f"(batch, 4 + {counts[0]} classes, boxes) or (batch, boxes, 5 + {counts[1]} classes)"
        problem = f"it is unclear by its values whether the output {tuple(y.shape)} is {orders}"
        raise TargetError(f"{problem}; pass all class names as categories=, or read=, as for other detectors")
    return fits[1]


def _with_joints(rows: list[Candidates], y: Tensor, raw: Tensor) -> list[Candidates]:
    """Add the logits of joints, if the last columns of y are x, y and visibility; raw (B, 3 K, n) has the logits."""
    count = raw.shape[1]
    visible = (y[:, -count:] if y.shape[2] == raw.shape[2] else y[..., -count:].mT)[:, 2::3]
    if count % 3 or not bool(((visible >= 0) & (visible <= 1)).all()):  # masks, or joints without visibility
        return rows
    return [replace(row, keypoints=joints) for row, joints in zip(rows, raw[:, 2::3].mT, strict=True)]


def _queries(parts: Mapping[str, Any], logits: Tensor, boxes: Tensor, link: BoxLink) -> list[Candidates]:
    """Read the queries of transformers: logits (B, Q, C) and boxes (B, Q, 4)."""
    if link == "softmax":
        return _batch(boxes, logits[..., :-1] - logits[..., -1:], link=link)
    objectness = parts.get("objectness_logits")
    scores: Any = logits.masked_fill(logits == -torch.inf, ABSENT)  # beyond the text of Grounding DINO
    if isinstance(parts.get("input_ids"), Tensor):
        scores = [_phrases(row, ids.tolist()) for row, ids in zip(scores, parts["input_ids"], strict=True)]
    rows = _batch(boxes, scores, objectness if isinstance(objectness, Tensor) else None)
    return [replace(row, is_factor=False) for row in rows]


def _phrases(scores: Tensor, ids: Sequence[int]) -> Tensor:
    """Return the scores (Q, phrases) of a text: the maximum over the tokens of each phrase."""
    ends = [index for index, number in enumerate([*ids, _SEPARATORS[1]]) if number in _SEPARATORS]
    spans = [slice(start + 1, stop) for start, stop in zip([-1, *ends], ends, strict=False) if stop > start + 1]
    return torch.stack([scores[:, span].amax(1) for span in spans], 1)


def _detr_link(output: Any, logits: Tensor, classes: int | None, link: BoxLink | None) -> BoxLink:
    """Return the function from the logits of a DETR to probabilities, which their shape does not show."""
    name, count = type(output).__name__, logits.shape[-1]
    if link is not None:
        return link
    if name.endswith("DetectionOutput"):
        return "softmax" if name.startswith(_SOFTMAX) else "sigmoid"
    if classes in (count, count - 1):
        return "sigmoid" if classes == count else "softmax"
    hint = 'pass link="softmax" or link="sigmoid", or the class names as categories='
    raise TargetError(f"it is unclear whether the last of {count} logits is the class no object of a softmax; {hint}")


def _labelled(boxes: Tensor, scores: Tensor, labels: Tensor, classes: int | None) -> Candidates:
    """Return detections after suppression, with the logit of one class each. Raises TargetError if it has no name."""
    if classes is not None and len(labels):
        require_class(int(labels.max()), classes, "the model's class names")
    count = max(classes or 1, int(labels.max()) + 1 if len(labels) else 1)
    absent = scores.new_full((len(scores), count), ABSENT)
    return Candidates(boxes, absent.scatter(1, labels[:, None], _logit(scores)[:, None]), link="label")


def _batch(boxes: Tensor, scores: Any, objectness: Tensor | None = None, link: BoxLink = "sigmoid") -> list[Candidates]:
    objects = [None] * len(boxes) if objectness is None else objectness
    return [Candidates(*row, link) for row in zip(boxes, scores, objects, strict=True)]


def _decoded(distances: Tensor, sizes: Sequence[Sequence[int]], size: tuple[int, int]) -> Tensor:
    """Return boxes (B, n, 4) from the distances (B, 4 * bins, n) of cell centres to the edges, in cells.

    With several bins, a distance is the expectation of a softmax over 0, 1, 2, ...
    """
    images, channels, count = distances.shape
    bins = _wide(distances).view(images, 4, channels // 4, count).movedim(3, 1)  # (B, n, 4, bins)
    if bins.shape[3] > 1:
        bins = bins.softmax(3) * torch.arange(bins.shape[3], device=bins.device).to(bins.dtype)
    near, far = bins.sum(3).chunk(2, 2)
    centres, strides = [], []
    for height, width in sizes:
        y, x = torch.meshgrid(*(torch.arange(edge, device=distances.device) for edge in (height, width)), indexing="ij")
        centres.append(torch.stack([x, y], 2).flatten(0, 1).to(bins.dtype) + 0.5)
        strides.append(centres[-1].new_tensor((size[1] / width, size[0] / height)).expand_as(centres[-1]))
    centre, stride = torch.cat(centres), torch.cat(strides)
    return torch.cat([(centre - near) * stride, (centre + far) * stride], 2)


def _corners(boxes: Tensor) -> Tensor:
    """Convert (..., 4) centre and size to left, top, right and bottom."""
    centre, extent = _wide(boxes).chunk(2, -1)
    return torch.cat([centre - extent / 2, centre + extent / 2], -1)


def _unit(size: tuple[int, int], like: Tensor) -> Tensor:
    return _wide(like).new_tensor((size[1], size[0]) * 2)


def _logit(probabilities: Tensor) -> Tensor:
    """Return logits. In float32, probabilities of 1 are below infinity."""
    return torch.logit(probabilities, torch.finfo(probabilities.dtype).eps)


def check_read(read: object) -> None:
    """Raise TargetError unless `read` is None, or a function that can be the key of a cache."""
    if read is not None and not (callable(read) and isinstance(read, Hashable)):
        raise TargetError(f"read={described(read)}: expected a hashable function of the output")


def _described(output: Any) -> str:
    """Return the types and shapes of an output, such as `list of (Tensor 1x5x7, 3 maps)`."""
    if isinstance(output, Tensor):
        return f"a tensor {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return f"{type(output).__name__} of {', '.join(f'{key}: {_described(part)}' for key, part in output.items())}"
    if isinstance(output, list | tuple):
        shown = ", ".join(map(_described, output[:4]))
        return f"a {type(output).__name__} of {len(output)}{shown and f' ({shown})'}"
    return type(output).__name__
