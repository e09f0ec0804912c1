"""Targets for detectors: the class, the objectness or an edge of one box."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import NotFoundError, TargetError
from ..io.geometry import Box, Geometry
from ..validation import check_choice, described, is_integer, is_real
from .candidates import ABSENT, BoxLink, Candidates, CandidatesFunction, Detections, candidates, check_read, iou
from .classes import class_index, class_name, require_class
from .question import Asked, Categories, Images, Question, Target

BoxPart = Literal["class", "objectness", "x0", "y0", "x1", "y1"]
_EDGES = ("x0", "y0", "x1", "y1")
_SECOND = "second"
_LEAST_OVERLAP = 0.5  # below this IoU, a box was not found
_SHARPNESS = 20.0  # a box whose IoU is 0.1 higher has 7 times the weight
_MOST_LISTED = 5


def require_inside(position: tuple[float, ...] | None, images: Images) -> None:
    """Raise NotFoundError if a point or a box is outside one of the images. Images without a size are not checked."""
    for width, height in (images.geometries[number].image_size for number in images.numbers if images.geometries):
        left, top, *_ = ends = position or (0, 0)
        if not (left < width and top < height and min(ends[-2:]) >= 0):
            kind = "point" if len(ends) == 2 else "box"
            raise NotFoundError(f"the {kind} {as_text(ends)} is outside the image of {width} x {height} pixels")


class Match(NamedTuple):
    """Box of one image that a target explains, in pixels of the image."""

    box: Box
    label: int
    against: int | None  # the class to compare with
    overlap: float  # the IoU with the given box; 1 without a given box
    probability: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BoxTarget(Target):
    """Score of one box of a detector; see `box`."""

    position: tuple[float, ...] | None = None
    index: int = 0
    label: Any = None
    quantity: BoxPart | int = "class"  # an integer is a joint
    against: Any = None
    link: BoxLink | None = None
    read: CandidatesFunction | None = None
    joint: str = ""

    @property
    def part(self) -> Hashable:
        """The class, the objectness, an edge or the joints of a box, and the function that reads it."""
        return "joint" if self.joint else self.quantity, self.read

    def prepared(self, images: Images) -> BoxTarget:
        """Return the target with class indices instead of names."""
        require_inside(self.position, images)
        label = None if self.label is None else class_index(self.label, images.categories)
        is_class = self.against is not None and self.against != _SECOND
        against = class_index(self.against, images.categories) if is_class else self.against
        return replace(self, label=label, against=against)

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the questions about the box of each image. Raises TargetError if an image has no such box."""
        rows, boxes = self.rows(output, images), []
        for image in images.numbers:
            try:
                match = self._match(rows[image], images)
            except NotFoundError as error:
                raise NotFoundError(f"image {image}: {error}" if images.count > 1 else str(error)) from None
            boxes.append(BoxScore(self, match, images.geometries[image], images))
        score = boxes[0] if len(boxes) == 1 else partial(_scores, boxes)
        return [box.question() for box in boxes], score

    def others(self, output: Any, images: Images, kind: Literal["class", "box"]) -> Sequence[Question]:
        """Return questions about other classes, or joints, of the box, or about the top classes of other detections."""
        (image,), rows = images.numbers, self.rows(output, images)
        row, match, geometry = rows[image], self._match(rows[image], images), images.geometries[image]
        if kind == "class" and isinstance(self.quantity, int):
            count = cast("Tensor", row.keypoints).shape[1]
            joints = [replace(self, quantity=n, joint=f"joint {n}") for n in range(count) if n != self.quantity]
            return [BoxScore(joint, match, geometry, images).question() for joint in joints]
        if kind == "box":
            probabilities, boxes = row.probabilities.detach(), row.boxes.detach()
            far = iou(boxes, boxes.new_tensor(match.box)) < _LEAST_OVERLAP
            pairs = [(int(probabilities[n].argmax()), boxes[n].tolist()) for n in row.detections() if far[n]]
        else:
            count = row.scores.shape[1] if self.quantity == "class" and row.link != "label" else 0
            pairs = [(label, list(match.box)) for label in range(count) if label != match.label]
        rest = [match._replace(box=cast("Box", tuple(box)), label=label, against=None) for label, box in pairs]
        return [BoxScore(self, other, geometry, images).question() for other in rest]

    def detections(self, output: Any, images: Images) -> list[Match]:
        """Return the detections of the class in one image, in descending order of their probability."""
        (row,) = self.rows(output, images)
        return [_match(row, index, self.label) for index in row.detections(label=self.label)]

    def rows(self, output: Any, images: Images, geometries: tuple[Geometry, ...] = ()) -> list[Candidates]:
        """Return the candidates of each row of an output, by default of the images, cached for other boxes."""
        geometries = geometries or images.geometries
        if not geometries:
            raise TargetError("a box is a target of methods only")
        # The names may be those of joints, and a list that grows on demand has no number.
        has_count = type(names := images.categories) is tuple and not isinstance(self.quantity, int)
        key = geometries, len(names or ()) if has_count else None, self.link, self.read
        return images.candidates(output, key, lambda: candidates(output, *key))

    def _match(self, row: Candidates, images: Images) -> Match:
        """Return the box of one image that the target explains."""
        if row.link != "label":
            count = row.scores.shape[1]
            images.class_count(count)  # raises for a wrong number of class names
            for cls in (self.label, self.against):
                require_class(cls if isinstance(cls, int) else 0, count, "the classes of the detector")
        boxes, overlap = row.boxes.detach(), 1.0
        name = "" if self.label is None else f" of {class_name(self.label, images.categories)}"
        if self.position is not None and len(self.position) == 4:
            overlaps = iou(boxes, boxes.new_tensor(self.position))
            near = overlaps > 0
            if row.link == "label" and self.label is not None:  # the output has no score of other classes
                overlaps = overlaps * (row.column(self.label).detach() != ABSENT)
            best = max(overlaps.tolist(), default=0.0)
            if best < _LEAST_OVERLAP:
                problem = f"the best IoU{name} with the box {as_text(self.position)} is {best:.2f}, below 0.5"
                nearby = [index for index in row.detections(0) if near[index]]
                raise NotFoundError(f"{problem}; there, the model found {_listing(row, nearby, images.categories)}")
            probabilities = row.probabilities.detach()
            scores = probabilities.amax(1) if self.label is None else probabilities[:, self.label]
            index = int((scores + 1e-9).mul(overlaps >= _LEAST_OVERLAP).mul(overlaps).argmax())
            overlap = float(overlaps[index])
        else:
            rows = [n for n in row.detections(label=self.label) if _contains(boxes[n].tolist(), self.position)]
            if self.index >= len(rows):
                where = f"at the point {as_text(self.position)}" if self.position else f"with the index {self.index}"
                every = _listing(row, row.detections(), images.categories)
                raise NotFoundError(f"there is no detection{name} {where}; the model found {every}")
            index = rows[self.index]
        match = _match(row, index, self.label)
        return match._replace(against=self._other(row, index, match.label), overlap=overlap)

    def _other(self, row: Candidates, candidate: int, label: int) -> int | None:
        """Return the class to compare with. Raises TargetError if it equals `label`, or the output does not hold it."""
        if self.against is None:
            return None
        if row.link == "label":
            raise TargetError("the output has the score of one class for each box only, so classes cannot be compared")
        second = next((cls for cls in row.scores[candidate].argsort(descending=True).tolist() if cls != label), label)
        other = second if self.against == _SECOND else int(self.against)
        if other == label:
            raise TargetError(f"against= needs a class other than {label}")
        return other


@dataclass(frozen=True, slots=True, eq=False)
class BoxScore:
    """Score of a box that was found in an image.

    Attributes:
        target: The question about the box.
        match: The box.
        geometry: The position of the model's input on the image.
        images: The class names, and the candidates of the last output.
    """

    target: BoxTarget
    match: Match
    geometry: Geometry
    images: Images

    @property
    def is_whole(self) -> bool:
        """Whether the score is the class of the box, not an edge, a joint or a contrast."""
        return self.target.quantity == "class" and self.target.against is None

    @property
    def reading(self) -> Hashable:
        """The options with which `candidates` reads an output; boxes with equal options share the candidates."""
        return self.target.link, self.target.read

    def question(self) -> Question:
        """Return the question about the box."""
        match, target = self.match, self.target
        return Question(
            self,
            self._name(),
            probability=torch.tensor(match.probability, device="cpu"),
            is_difference=target.against is not None,
            box=self.geometry.to_input(match.box),
            mirrored=self.mirrored() if target.quantity in ("class", "objectness", "y0", "y1") else None,
            part=target.part,
        )

    def rows(self, output: Any) -> list[Candidates]:
        """Return the candidates of variants of the image."""
        return self.target.rows(output, self.images, (self.geometry,))

    def detections(self, output: Any) -> Detections:
        """Return the candidates of variants of the image, as tensors."""
        return Detections.of(self.rows(output))

    def class_probabilities(self, detections: Detections, image: int) -> Tensor:
        """Return the class probabilities (C,) of an image's box; only its class if another class is the top class."""
        match, boxes, rows = self.match, detections.boxes[image], detections.probabilities[image]
        classes = max(rows.shape[1], match.label + 1)
        one_hot = F.one_hot(torch.tensor(match.label, device=rows.device), classes).to(rows)
        near = iou(boxes.to(rows), rows.new_tensor(match.box)) * (1 + rows @ one_hot[: rows.shape[1]])
        top = rows[near.argmax()]
        return top if int(top.argmax()) == match.label else one_hot

    def __call__(self, output: Any) -> Tensor:
        """Return the scores (n,): the weighted means over the candidates near the box."""
        return torch.stack([self.of_row(row) for row in self.rows(output)])

    def of_row(self, row: Candidates) -> Tensor:
        """Return the score of one variant of the image."""
        # Without the gradient of the weights, a map of the class does not mix in the position of the box.
        boxes = row.boxes.detach()
        overlaps = iou(boxes, boxes.new_tensor(self.match.box))
        near = overlaps > 0
        weights = (_SHARPNESS * overlaps[near]).expm1()
        values, absent = self._values(row)
        total = weights.sum() + 1
        # As a linear layer, for which every method has a rule.
        return F.linear(values[None, near].to(weights.dtype), (weights / total)[None])[0, 0] + absent / total

    def _values(self, row: Candidates) -> tuple[Tensor, float]:
        """Return the numbers (n,) to average, and the number that represents the absence of a box."""
        match, quantity = self.match, self.target.quantity
        if isinstance(quantity, int):
            return cast("Tensor", row.keypoints)[:, quantity], 0.0
        if quantity in _EDGES:
            return row.boxes[:, _EDGES.index(quantity)], match.box[_EDGES.index(quantity)]
        if quantity == "objectness":
            objectness = row.scores.logsumexp(1) if row.link == "softmax" else row.objectness
            if objectness is None:
                raise TargetError('the detector has no objectness; pass of="class"')
            return objectness, ABSENT
        if match.against is not None:
            return row.column(match.label) - row.column(match.against), 0.0
        return row.column(match.label), ABSENT

    def mirrored(self) -> BoxScore:
        """Return the score of the mirrored box."""
        ends, (x0, y0, x1, y1) = self.geometry.box[0] + self.geometry.box[2], self.match.box
        return replace(self, match=self.match._replace(box=(ends - x1, y0, ends - x0, y1)))

    def _name(self) -> str:
        target, match, names = self.target, self.match, self.images.categories
        quantity = target.joint if isinstance(target.quantity, int) else target.quantity
        label = ("" if quantity == "class" else f"{quantity} of ") + class_name(match.label, names)
        other = "" if match.against is None else f" rather than {class_name(match.against, names)}"
        overlap = f", IoU {match.overlap:.2f}" if len(target.position or ()) == 4 else ""
        return f"{label}{other} at {as_text(match.box)}{overlap}"


def _scores(boxes: Sequence[BoxScore], output: Any) -> Tensor:
    """Return the scores (N,) of the boxes of a batch, one for each image."""
    rows = boxes[0].target.rows(output, boxes[0].images, tuple(box.geometry for box in boxes))
    return torch.stack([box.of_row(row) for box, row in zip(boxes, rows, strict=True)])


def _match(row: Candidates, index: int, label: int | None) -> Match:
    """Return a candidate as a box of a class, by default its top class."""
    probabilities = row.probabilities[index].detach()
    label = int(probabilities.argmax()) if label is None else label
    probability = float(probabilities[label]) if label < len(probabilities) else 0.0
    return Match(cast("Box", tuple(row.boxes[index].tolist())), label, None, 1.0, probability)


def as_text(position: Sequence[float]) -> str:
    """Return a box or a point as text: `(120, 40, 300, 260)`."""
    return f"({', '.join(f'{edge:.0f}' for edge in position)})"


def _contains(box: Sequence[float], point: Sequence[float] | None) -> bool:
    return point is None or (box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3])


def _listing(row: Candidates, indices: Sequence[int], names: Categories) -> str:
    """Return a list of detections: their classes, probabilities and boxes."""
    probabilities, tops = row.probabilities.detach(), []
    for n in indices[:_MOST_LISTED]:
        top = int(probabilities[n].argmax())
        tops.append(f"{class_name(top, names)} {float(probabilities[n, top]):.2f} at {as_text(row.boxes[n].tolist())}")
    return ", ".join(tops) or "nothing"


def as_place(name: str, numbers: Any, count: int) -> tuple[float, ...] | None:
    """Return a point or a box as floats. Raises TargetError for another number of values, or an empty box."""
    values = numbers.tolist() if hasattr(numbers, "tolist") else numbers
    if values is None:
        return None
    is_place = isinstance(values, list | tuple) and len(values) == count and all(map(is_real, values))
    if not is_place or (count == 4 and not (values[0] < values[2] and values[1] < values[3])):
        expected = "(x, y)" if count == 2 else "(left, top, right, bottom), with left < right and top < bottom,"
        raise TargetError(f"{name}={described(numbers)}: expected {expected} in pixels of the image")
    return tuple(map(float, values))


def box(
    *,
    point: Sequence[float] | None = None,
    index: int | None = None,
    box: Sequence[float] | None = None,
    cls: int | str | None = None,
    of: BoxPart = "class",
    against: int | str | None = None,
    link: Literal["softmax", "sigmoid"] | None = None,
    read: CandidatesFunction | None = None,
) -> Target:
    """Explain one box of a detector, by default the box with the highest probability.

    The score is the mean logit of the class over the candidates before suppression, if the output holds them. Their
    weights are a softmax of 20 times their IoU with the box, so the score does not jump if another candidate becomes
    the best. Where nothing overlaps the box, the score is -4.6, the logit of a probability of 1 %. Gradients do not
    pass through the weights. Logits of a softmax are relative to "no object". The name of the target says which box was
    found, and its class.

    Args:
        point: (x, y) in the box, in pixels of the image, or of a float tensor. If several boxes contain the point, the
            box with the highest probability is taken; `cls` selects boxes of a class.
        index: The rank of the detection by its probability, from 0. Detections have at least 5 %, and no duplicates.
        box: (left, top, right, bottom); of the boxes with an IoU of at least 0.5, the best by IoU times probability.
        cls: The class, by index or name; by default the top class of the box. Together with `box`, any class of the
            box. In Grounding DINO, it is the index of a phrase of the text.
        of: "class"; "objectness"; or an edge, "x0", "y0", "x1" or "y1", in pixels.
        against: Another class: the score is then the difference of both logits. "second" is the class with the next
            highest logit.
        link: For outputs like DETR's, whether the last class means "no object" ("softmax") or not ("sigmoid"), if
            neither the output's class nor the class names show it.
        read: A function from the output of any other detector to one `saliency.Candidates` for each image.

    Raises:
        TargetError: Several of `point`, `index` and `box` are given, or an argument is invalid. In `attribute`: the
            image has no such box, the output is unknown, or it lacks the class, the objectness or the second class.
    """
    if sum(choice is not None for choice in (point, index, box)) > 1:
        raise TargetError("got several of point=, index= and box=; pass one")
    if index is not None and not is_integer(index, least=0):
        raise TargetError(f"index={described(index)}: expected a whole number from 0")
    check_choice("of", of, get_args(BoxPart), error=TargetError)
    if link is not None:
        check_choice("link", link, ("softmax", "sigmoid"), error=TargetError)
    if against is not None and of != "class":
        raise TargetError(f'against= compares classes; it cannot be combined with of="{of}"')
    check_read(read)
    position, index = as_place("box", box, 4) if point is None else as_place("point", point, 2), int(index or 0)
    return BoxTarget(position=position, index=index, label=cls, quantity=of, against=against, link=link, read=read)
