"""Targets for detectors: the class, the objectness or an edge of one box."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import NotFoundError, TargetError
from ..io.preprocess import Box, Geometry
from ..validation import check_choice, is_integer, is_real
from .candidates import ABSENT, BoxLink, Candidates, CandidatesFunction, Detections, candidates, iou
from .targets import NO_FLIPS, Categories, OutputFacts, OutputTarget, Target, class_index, class_name, require_class

BoxPart = Literal["class", "objectness", "x0", "y0", "x1", "y1"]
_EDGES = ("x0", "y0", "x1", "y1")
_SECOND = "second"
_LEAST_OVERLAP = 0.5  # below this IoU, a box was not found
_SHARPNESS = 20.0  # of two boxes whose IoU differs by 0.1, one weighs 7 times as much
_MOST_LISTED = 5


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LocatedTarget(OutputTarget):
    """Target of a place, a point (x, y) or a box in pixels of the image, on images with known geometries."""

    place: tuple[float, ...] | None = None
    geometries: tuple[Geometry, ...] = field(default=(), repr=False)

    def locate(self, geometries: Sequence[Geometry]) -> Self:
        """Return the target with the position of each image. Raises TargetError if the place is outside an image."""
        if self.geometries:
            return self
        for width, height in (own.image_size for own in geometries):
            place = self.place or (0, 0)
            if not (place[0] < width and place[1] < height and min(place[-2:]) >= 0):
                kind = "point" if len(place) == 2 else "box"
                raise NotFoundError(f"the {kind} {as_text(place)} is outside the image of {width} x {height} pixels")
        return replace(self, geometries=tuple(geometries))


class Match(NamedTuple):
    """Box of one image that a target explains, in pixels of the image."""

    box: Box
    label: int
    against: int | None  # the class that it is compared with
    overlap: float  # the IoU with the box that was asked for; 1 if none was
    probability: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BoxScore(LocatedTarget):
    """Score of one box of a detector; see `box`."""

    index: int = 0
    label: Any = None
    of: BoxPart | int = "class"  # an integer is a joint
    against: Any = None
    link: BoxLink | None = None
    read: CandidatesFunction | None = None
    joint: str = ""
    classes: int | None = field(default=None, repr=False)
    matches: tuple[Match, ...] = field(default=(), repr=False)  # one per image

    def resolve(self, images: int, categories: Categories) -> BoxScore:
        """Return the target with class indices instead of names."""
        label = None if self.label is None else class_index(self.label, categories)
        is_class = self.against is not None and self.against != _SECOND
        against = class_index(self.against, categories) if is_class else self.against
        return replace(self, label=label, against=against, classes=_class_count(categories))

    def part(self, output: Any, image: int) -> Any:
        """Return the candidates of one image, in pixels of the input."""
        plain = [Geometry.of(None, self.geometries[0].input_size)]
        return [candidates(output, plain, self.classes, self.link, self.read)[image]]

    def resolve_from(self, output: Any, facts: OutputFacts) -> BoxScore:
        """Return the target with the box of each image. Raises TargetError if an image has no such box."""
        if self.matches:  # of an earlier call, for images that metrics have changed
            return self
        rows, matches = self._rows(output), []
        for image, row in enumerate(rows):
            try:
                matches.append(self._match(row, facts))
            except NotFoundError as error:
                raise NotFoundError(f"image {image}: {error}" if len(rows) > 1 else str(error)) from None
        return replace(self, matches=tuple(matches))

    def found(self, output: Any, categories: Categories) -> list[Match]:
        """Return the detections of the class in one image, in descending order of their probability."""
        (row,) = replace(self, classes=_class_count(categories))._rows(output)
        return [_match(row, at, self.label) for at in row.detections(label=self.label)]

    @property
    def reading(self) -> Hashable:
        """The options with which `candidates` reads an output; boxes with equal ones share the candidates."""
        return self.link, self.read, self.classes

    def detections(self, output: Any) -> Detections:
        """Return the candidates of all images."""
        return Detections.of(self._rows(output))

    def class_probabilities(self, found: Detections) -> Tensor:
        """Return the class probabilities (C,) of the first image's box; only its class if another is the top one."""
        match, boxes, known = self.matches[0], found.boxes[0], found.probabilities[0]
        classes = max(known.shape[1], match.label + 1)
        own = F.one_hot(torch.tensor(match.label, device=known.device), classes).to(known)
        near = iou(boxes.to(known), known.new_tensor(match.box)) * (1 + known @ own[: known.shape[1]])
        top = known[near.argmax()]
        return top if int(top.argmax()) == match.label else own

    def _rows(self, output: Any) -> list[Candidates]:
        if not self.geometries:
            raise TargetError("a box is a target of methods only")
        return candidates(output, self.geometries, self.classes, self.link, self.read)

    def _match(self, row: Candidates, facts: OutputFacts) -> Match:
        """Return the box of one image that the target asks for."""
        if row.link != "label":
            count = facts.class_count(row.scores.shape[1])
            for wanted in (self.label, self.against):
                require_class(wanted if isinstance(wanted, int) else 0, count, "the classes of the detector")
        known, boxes, overlap = row.probabilities.detach(), row.boxes.detach(), 1.0
        of = "" if self.label is None else f" of {class_name(self.label, facts.categories)}"
        if self.place is not None and len(self.place) == 4:
            overlaps = iou(boxes, boxes.new_tensor(self.place))
            near = overlaps > 0
            if row.link == "label" and self.label is not None:  # the output has no score of other classes
                overlaps = overlaps * (row.column(self.label).detach() != ABSENT)
            best = max(overlaps.tolist(), default=0.0)
            if best < _LEAST_OVERLAP:
                problem = f"the best overlap{of} with the box {as_text(self.place)} is an IoU of {best:.2f}, below 0.5"
                there = [at for at in row.detections(0) if near[at]]
                raise NotFoundError(f"{problem}; there, the model found {_listing(row, there, facts.categories)}")
            of_label = known.amax(1) if self.label is None else row.column(self.label).detach().sigmoid()
            found = int((of_label + 1e-9).mul(overlaps >= _LEAST_OVERLAP).mul(overlaps).argmax())
            overlap = float(overlaps[found])
        else:
            rows = [at for at in row.detections(label=self.label) if _contains(boxes[at].tolist(), self.place)]
            if self.index >= len(rows):
                at = f"at the point {as_text(self.place)}" if self.place else f"with the index {self.index}"
                every = _listing(row, row.detections(), facts.categories)
                raise NotFoundError(f"there is no detection{of} {at}; the model found {every}")
            found = rows[self.index]
        match = _match(row, found, self.label)
        return match._replace(against=self._other(row, found, match.label), overlap=overlap)

    def _other(self, row: Candidates, found: int, label: int) -> int | None:
        """Return the class to compare with. Raises TargetError if it is the same, or the output does not hold it."""
        if self.against is None:
            return None
        if row.link == "label":
            raise TargetError("the output has the score of one class for each box only, so none can be compared")
        second = next((at for at in row.scores[found].argsort(descending=True).tolist() if at != label), label)
        other = second if self.against == _SECOND else int(self.against)
        if other == label:
            raise TargetError(f"against= needs a class other than {label}")
        return other

    def __call__(self, output: Any) -> Tensor:
        """Return the scores (N,): the weighted means over the candidates near each box."""
        return torch.stack([self._score(*pair) for pair in zip(self._rows(output), self.matches, strict=True)])

    def _score(self, row: Candidates, match: Match) -> Tensor:
        # Without the gradient of the weights, a map of the class does not mix in the place of the box.
        boxes = row.boxes.detach()
        overlaps = iou(boxes, boxes.new_tensor(match.box))
        near = overlaps > 0
        weights = (_SHARPNESS * overlaps[near]).expm1()
        values, absent = self._values(row, match)
        total = weights.sum() + 1
        # As a linear layer, for which every method has a rule.
        return F.linear(values[None, near].to(weights.dtype), (weights / total)[None])[0, 0] + absent / total

    def _values(self, row: Candidates, match: Match) -> tuple[Tensor, float]:
        """Return the numbers (n,) to average, and the number that represents the absence of a box."""
        if isinstance(self.of, int):
            return cast("Tensor", row.keypoints)[:, self.of], 0.0
        if self.of in _EDGES:
            return row.boxes[:, _EDGES.index(self.of)], match.box[_EDGES.index(self.of)]
        if self.of == "objectness":
            objectness = row.scores.logsumexp(1) if row.link == "softmax" else row.objectness
            if objectness is None:
                raise TargetError('the detector has no objectness; pass of="class"')
            return objectness, ABSENT
        if match.against is not None:
            return row.column(match.label) - row.column(match.against), 0.0
        return row.column(match.label), ABSENT

    def probabilities(self, output: Any) -> Tensor | None:
        """Return the probabilities (N,) of the classes of the boxes."""
        return torch.tensor([match.probability for match in self.matches], device="cpu")

    def repeated(self, image: int, count: int) -> BoxScore:
        """Return the target for the box of one image."""
        return replace(
            self, geometries=self.geometries[image : image + 1] * count, matches=(self.matches[image],) * count
        )

    def others(self, output: Any, of: Literal["class", "box"]) -> list[BoxScore]:
        """Return the targets of the other classes, or joints, of the box, or of the top classes of other detections."""
        (row,), (match,) = self._rows(output), self.matches
        if of == "class" and isinstance(self.of, int):
            return [replace(self, of=at) for at in range(cast("Tensor", row.keypoints).shape[1]) if at != self.of]
        if of == "box":
            known, boxes = row.probabilities.detach(), row.boxes.detach()
            far = iou(boxes, boxes.new_tensor(match.box)) < _LEAST_OVERLAP
            found = [(int(known[at].argmax()), boxes[at].tolist()) for at in row.detections() if far[at]]
        else:
            count = row.scores.shape[1] if self.of == "class" and row.link != "label" else 0
            found = [(label, list(match.box)) for label in range(count) if label != match.label]
        rest = [match._replace(box=cast("Box", tuple(box)), label=label, against=None) for label, box in found]
        return [replace(self, matches=(other,)) for other in rest]

    def mirrored(self) -> BoxScore:
        """Return the target for the mirrored boxes. Raises TargetError for a left or right edge, or a joint."""
        if self.of not in ("class", "objectness", "y0", "y1"):
            raise TargetError(f"{self.joint or self.of} of a box is not the same in a mirrored image; {NO_FLIPS}")
        matches = []
        for match, geometry in zip(self.matches, self.geometries, strict=True):
            ends, (x0, y0, x1, y1) = geometry.box[0] + geometry.box[2], match.box
            matches.append(match._replace(box=(ends - x1, y0, ends - x0, y1)))
        return replace(self, matches=tuple(matches))

    def names(self, images: int, categories: Categories) -> tuple[str, ...]:
        """Return names such as `cat at (120, 40, 300, 260), IoU 0.87`."""
        return tuple(self._name(match, categories) for match in self.matches) or ("box",) * images

    def contrasts(self, images: int) -> tuple[bool, ...]:
        """Return whether another class is subtracted."""
        return (self.against is not None,) * images

    def boxes(self) -> tuple[Box | None, ...]:
        """Return the box of each image, in pixels of the input."""
        pairs = zip(self.geometries, self.matches, strict=False)
        return tuple(geometry.to_input(match.box) for geometry, match in pairs)

    def _name(self, match: Match, categories: Categories) -> str:
        of = self.joint if isinstance(self.of, int) else "" if self.of == "class" else self.of
        label = f"{of} of {class_name(match.label, categories)}" if of else class_name(match.label, categories)
        other = "" if match.against is None else f" rather than {class_name(match.against, categories)}"
        overlap = f", IoU {match.overlap:.2f}" if len(self.place or ()) == 4 else ""
        return f"{label}{other} at {as_text(match.box)}{overlap}"


def _match(row: Candidates, at: int, label: int | None) -> Match:
    """Return a candidate as a box of a class, by default its top class."""
    known = row.probabilities[at].detach()
    label = int(known.argmax()) if label is None else label
    probability = float(known[label]) if label < len(known) else 0.0
    return Match(cast("Box", tuple(row.boxes[at].tolist())), label, None, 1.0, probability)


def _class_count(names: Categories) -> int | None:
    """Return the number of classes if all are named; a list that grows on demand has no number."""
    return len(names) if type(names) is tuple else None


def as_text(place: Sequence[float]) -> str:
    """Return a box or a point as text: `(120, 40, 300, 260)`."""
    return f"({', '.join(f'{edge:.0f}' for edge in place)})"


def _contains(box: Sequence[float], point: Sequence[float] | None) -> bool:
    return point is None or (box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3])


def _listing(row: Candidates, found: Sequence[int], names: Categories) -> str:
    """Return a list of detections: their classes, probabilities and boxes."""
    known, tops = row.probabilities.detach(), []
    for at in found[:_MOST_LISTED]:
        top = int(known[at].argmax())
        tops.append(f"{class_name(top, names)} {float(known[at, top]):.2f} at {as_text(row.boxes[at].tolist())}")
    return ", ".join(tops) or "nothing"


def as_place(name: str, numbers: Any, count: int) -> tuple[float, ...] | None:
    """Return a point or a box as floats. Raises TargetError if it is not `count` numbers, or an empty box."""
    values = numbers.tolist() if hasattr(numbers, "tolist") else numbers
    if values is None:
        return None
    is_place = isinstance(values, list | tuple) and len(values) == count and all(map(is_real, values))
    if not is_place or (count == 4 and not (values[0] < values[2] and values[1] < values[3])):
        expected = "(x, y)" if count == 2 else "(left, top, right, bottom), with left < right and top < bottom,"
        raise TargetError(f"{name}={numbers!r}: expected {expected} in pixels of the image")
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
        point: (x, y) in the box, in pixels of the image, or of a float tensor. Of several boxes, the one with the
            highest probability is taken; `cls` selects others.
        index: The rank of the detection by its probability, from 0, among those of at least 5 %, without duplicates.
        box: (left, top, right, bottom); of the boxes with an IoU of at least 0.5, the best by IoU times probability.
        cls: The class, by index or name; by default the top class of the box. Together with `box`, any class of it. In
            Grounding DINO, it is the index of a phrase of the text.
        of: "class"; "objectness"; or an edge, "x0", "y0", "x1" or "y1", in pixels.
        against: Another class: the score is then the difference of both logits. "second" is the class with the next
            highest logit.
        link: For outputs like DETR's, whether the last class means "no object" ("softmax") or not ("sigmoid"), if
            neither the output's class nor the class names tell.
        read: A function from the output of any other detector to one `saliency.Candidates` for each image.

    Raises:
        TargetError: Several of `point`, `index` and `box` are given, or an argument is invalid. In `attribute`: the
            image has no such box, the output is unknown, or it lacks the class, the objectness or the second class.
    """
    if sum(choice is not None for choice in (point, index, box)) > 1:
        raise TargetError("got several of point=, index= and box=; pass one")
    if index is not None and not is_integer(index, least=0):
        raise TargetError(f"index={index!r}: expected a whole number from 0")
    check_choice("of", of, get_args(BoxPart), error=TargetError)
    if link is not None:
        check_choice("link", link, ("softmax", "sigmoid"), error=TargetError)
    if against is not None and of != "class":
        raise TargetError(f'against= compares classes; it does not go with of="{of}"')
    place = as_place("box", box, 4) if point is None else as_place("point", point, 2)
    return BoxScore(place=place, index=int(index or 0), label=cls, of=of, against=against, link=link, read=read)
