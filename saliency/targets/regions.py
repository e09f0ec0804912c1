"""Targets for maps of scores: a region of a segmentation, its border, and a joint of a pose."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from ..errors import NotFoundError, TargetError
from ..io.axes import along_rows, max_pool
from ..io.geometry import Geometry
from ..validation import check_choice, check_mask, described, is_integer
from .boxes import BoxTarget, as_place, as_text, require_inside
from .candidates import CandidatesFunction, check_read
from .classes import class_index, class_name, output_tensor, require_class, threshold
from .question import Asked, Images, Question, Target

RegionChoice = Literal["predicted", "border"]

_PARTS = ("eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle")
COCO_JOINTS = ("nose", *(f"{side}_{part}" for part in _PARTS for side in ("left", "right")))
"""The 17 joints of the poses of COCO, in order."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Region(Target):
    """Mean score of a class over some pixels; see `region`."""

    label: Any
    position: tuple[float, ...] | None = None
    where: Tensor | RegionChoice | Literal["peak"] = "predicted"  # not used if there is a position
    is_sum: bool = False  # instead of the mean
    joint: str = ""
    reads_logits = True  # a probability saturates where the model is certain

    @property
    def part(self) -> Hashable:
        """The joints of a pose; None for a segmentation."""
        return ("joint", None) if self.joint else None

    def prepared(self, images: Images) -> Region:
        """Return the target with a class index instead of a name."""
        if self.position is not None:
            require_inside(self.position, images)
        return replace(self, label=class_index(self.label, images.categories))

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the questions about the pixels of the output. Raises TargetError if there are no such pixels."""
        index = int(self.label)
        scores = _scores(output, index)
        has_instances, is_binary = _has_instances(output), False
        if not has_instances:
            count = images.class_count(scores.shape[1]) if self.where != "peak" else scores.shape[1]
            require_class(index, count)
            is_binary = count > scores.shape[1]
        if self.position is not None or isinstance(self.where, Tensor):
            cells, problem = self._marked(scores, images), "the region has no pixel of the model's input in image {}"
        else:
            cells = self._predicted(scores, output, images, is_binary)[list(images.numbers)]
            problem = f"the model assigns no pixel to class {index} in image {{}}; pass them: region({index}, where)"
        is_empty = ~cells.flatten(1).any(1)
        if has_instances and not is_empty.any():
            is_empty = torch.tensor([index not in output[n]["labels"] for n in images.numbers], device="cpu")
            problem = f"the model found no instance of class {index} in image {{}}"
        if is_empty.any():
            raise NotFoundError(problem.format(images.numbers[int(is_empty.nonzero()[0])]))
        if self.where == "border":
            near = max_pool(torch.stack([cells, ~cells], 1).float(), 3, 1, 1)  # within one pixel of each side
            if near.flatten(2).amax(2).min() == 0:
                raise NotFoundError(f"class {index} has no border: the model assigns all pixels to it")
            signed = near[:, 1] * cells - near[:, 0] * ~cells
        else:
            signed = cells.float()
        label, kind = class_name(index, images.categories), "border" if self.where == "border" else "region"
        name = self.joint or f"{kind} of {label}{f' at {as_text(self.position)}' if self.position else ''}"
        last = images.last_operation(scores)
        score = RegionScore(index, signed, is_binary, self.is_sum, self.where == "border", last)
        questions = []
        for part in signed:
            single = replace(score, cells=part[None])
            mirrored = None if self.joint else single.mirrored()
            questions.append(Question(single, name, mirrored=mirrored, part=self.part, reads_logits=True))
        return questions, score

    def others(self, output: Any, images: Images, kind: Literal["class", "box"]) -> Sequence[Question]:
        """Return questions about the other classes of the same pixels, or about the other joints."""
        (question,), _ = self.ask(output, images)
        score = cast("RegionScore", question.score)
        count = max(_scores(output, score.label).shape[1], 1 + score.is_binary) if kind == "class" else 0
        labels = [label for label in range(count) if label != score.label]
        if self.where == "peak":
            joints = [replace(self, label=label, joint=f"joint {label}") for label in labels]
            return [joint.ask(output, images)[0][0] for joint in joints]
        names = [class_name(label, images.categories) for label in labels]
        scores = [replace(score, label=label) for label in labels]
        return [replace(question, score=s, name=name, mirrored=None) for s, name in zip(scores, names, strict=True)]

    def _predicted(self, scores: Tensor, output: Any, images: Images, is_binary: bool) -> Tensor:
        """Return the pixels (N, h, w) that the model assigns to the class, or around the maximum of its map."""
        index, detached = int(self.label), scores.detach()
        channel = detached[:, min(index, detached.shape[1] - 1)]
        if self.where == "peak":
            is_peak = channel == along_rows(channel.flatten(1).amax(1), channel)
            return max_pool(is_peak[:, None].float(), 3, 1, 1)[:, 0].bool()
        link = "identity" if _has_instances(output) else images.link(scores)
        competes = link == "softmax" or bool(((detached.sum(1) - 1).abs() < 1e-3).all())  # sigmoids do not
        # The masks of SAM are independent: its prompts do not compete for pixels.
        is_independent = isinstance(output, Mapping) and "pred_masks" in output and not _has_queries(output)
        if detached.shape[1] > 1 and competes and not is_independent:
            return detached.argmax(1) == index
        limit = threshold(link)
        return channel <= limit if is_binary and not index else channel > limit

    def _marked(self, scores: Tensor, images: Images) -> Tensor:
        """Return the pixels (k, h, w) in the given region, of the k images in `images.numbers`."""
        (count, _, *size), where = scores.shape, self.where
        rows = where if isinstance(where, Tensor) and where.dim() > len(size) else [self.position or where] * count
        if len(rows) != count:
            raise TargetError(f"the region has shape {tuple(cast('Tensor', where).shape)} for {count} images")
        geometries = images.geometries or [Geometry.of(None, tuple(size))] * count
        return torch.stack([_cells(rows[n], geometries[n], size) for n in images.numbers]).to(scores.device)


@dataclass(frozen=True, slots=True, eq=False)
class RegionScore:
    """Mean or sum of the scores of a class over some pixels of an output.

    Attributes:
        label: The index of the class.
        cells: (N, h, w) 1 for the pixels, -1 for pixels outside a border; or (1, h, w) for all rows of the output.
        is_binary: Whether one number is the score of two classes, as in `ClassScore`.
        is_sum: Whether the scores are summed.
        is_border: Whether the mean of the pixels outside a border is subtracted.
        last_operation: "sigmoid" or "softmax", if the scores are the values before it.
    """

    label: int
    cells: Tensor
    is_binary: bool
    is_sum: bool
    is_border: bool
    last_operation: str = ""

    def __call__(self, output: Any) -> Tensor:
        """Return the scores (N,)."""
        scores, reduce = _scores(output, self.label), torch.sum if self.is_sum else torch.mean
        channel = scores[:, min(self.label, scores.shape[1] - 1)]
        cells = self.cells.to(channel.device).expand(len(channel), *self.cells.shape[1:])
        # Index instead of multiplying by a mask: such a product looks like a hand-written ReLU in the graph.
        means = torch.stack([reduce(image[marks > 0]) for image, marks in zip(channel, cells, strict=True)])
        if self.is_border:
            means = means - torch.stack([reduce(image[marks < 0]) for image, marks in zip(channel, cells, strict=True)])
        return -means if self.is_binary and not self.label else means

    def mirrored(self) -> RegionScore:
        """Return the score of the mirrored pixels."""
        return replace(self, cells=self.cells.flip(-1))


def _scores(output: Any, index: int) -> Tensor:
    """Return the scores (N, C, h, w), with one channel for a class of instances."""
    if not _has_instances(output):
        return score_maps(output)
    masks = [(entry["scores"] * (entry["labels"] == index), entry["masks"][:, 0]) for entry in output]
    return torch.stack([torch.einsum("n,nhw->hw", *pair) for pair in masks])[:, None]


def _has_instances(output: Any) -> bool:
    """Return whether an output is a list of instances for each image, as in torchvision's Mask R-CNN."""
    return isinstance(output, list) and bool(output) and all(isinstance(e, Mapping) and "masks" in e for e in output)


def _has_queries(output: Any) -> bool:
    queries = output.get("class_queries_logits", output.get("logits"))
    return isinstance(queries, Tensor) and queries.dim() == 3


def score_maps(output: Any) -> Tensor:
    """Return the scores of classes (N, C, h, w) of a segmentation output.

    Queries times masks give sums of probabilities. The channels of SAM are all masks of all prompts.

    Raises:
        TargetError: The output has another format.
    """
    parts: Mapping[str, Any] = output if isinstance(output, Mapping) else {}
    masks = parts.get("masks_queries_logits", parts.get("pred_masks", parts.get("heatmaps")))  # the last is ViTPose's
    if not isinstance(masks, Tensor):
        masks = output_tensor(output)
    elif _has_queries(parts):
        classes = parts.get("class_queries_logits", parts.get("logits")).softmax(2)[..., :-1]
        return torch.einsum("nqc,nqhw->nchw", classes, masks.sigmoid())
    elif masks.dim() > 3:
        masks = masks.flatten(1, -3)
    if masks.dim() not in (4, 5):
        shape = tuple(masks.shape)
        raise TargetError(f"a region needs an output of shape (N, classes, H, W); this model's is {shape}")
    return masks


def _cells(where: Any, geometry: Geometry, size: Sequence[int]) -> Tensor:
    """Return the pixels of the output (h, w) that a region covers by half, or else the most covered pixels."""
    (left, top, right, bottom), (width, height) = geometry.box, geometry.image_size
    if len(size) > 2 and (isinstance(where, tuple) or where.shape != tuple(size)):
        raise NotFoundError(f"a region of a volume is a mask in the size of the output, {tuple(size)}")
    if isinstance(where, tuple):
        x0, y0, x1, y1 = (*where, where[0] + 1e-3, where[1] + 1e-3)[:4]
        across, down, mask = np.array([[x0, x1]]), np.array([[y0, y1]]), np.ones((1, 1))
    elif where.shape == (height, width):
        part = [slice(max(0, math.floor(low)), math.ceil(high)) for low, high in ((top, bottom), (left, right))]
        down, across = (np.arange(edge)[span, None] + [0, 1] for edge, span in zip((height, width), part, strict=True))
        mask = where[*part].bool().cpu().numpy()  # only the pixels of the input: the image may be much larger
    elif where.shape == tuple(size):
        return cast("Tensor", where.bool().cpu())
    else:
        sizes = f"{(height, width)} as the image, or {tuple(size)} as the output"
        raise NotFoundError(f"the region has shape {tuple(where.shape)}; expected {sizes}")
    covered = _overlaps(top, bottom, size[0], down) @ mask @ _overlaps(left, right, size[1], across).T
    return torch.as_tensor((covered > 1e-9) & (covered >= min(0.5, covered.max()) * 0.999), device="cpu")


def _overlaps(start: float, end: float, cells: int, spans: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the fraction (cells, k) of each cell between two ends that each of the spans (k, 2) covers."""
    edges = np.linspace(start, end, cells + 1)[:, None]
    inner = np.minimum(edges[1:], spans[:, 1]) - np.maximum(edges[:-1], spans[:, 0])
    return np.asarray(inner.clip(min=0) * (cells / (end - start)))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Keypoint(Target):
    """Score of a joint, of a heatmap or of a detector; see `keypoint`."""

    joint: int | str
    person: int = 0
    read: CandidatesFunction | None = None

    @property
    def reads_logits(self) -> bool:
        """Whether the output is read before its last sigmoid or softmax. A function `read` receives it unchanged."""
        return self.read is None

    @property
    def part(self) -> Hashable:
        """The joints."""
        return "joint", self.read

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the questions about the joint of each image. Raises TargetError if there is no such joint."""
        return self._found(output, images).ask(output, images)

    def others(self, output: Any, images: Images, kind: Literal["class", "box"]) -> Sequence[Question]:
        """Return questions about the other joints."""
        return self._found(output, images).others(output, images, kind)

    def _found(self, output: Any, images: Images) -> Target:
        """Return the joint as a target on a heatmap, or on the persons of a detector."""
        is_maps = self.read is None and not _has_persons(output)
        rows = None if is_maps else self._person(0).rows(output, images)
        scores = score_maps(output) if rows is None else rows[images.numbers[0]].keypoints
        if scores is None:
            raise TargetError("the detector's output has no scores of joints")
        if is_maps and self.person:
            raise TargetError(f"person={self.person}: the output has one heatmap for each joint, of one person")
        count = scores.shape[1]
        names = images.categories if len(images.categories or ()) == count else COCO_JOINTS if count == 17 else None
        index = class_index(self.joint, names)
        require_class(index, count, "the joints of the model's output")
        joint = class_name(index, names).replace("class", "joint")
        if is_maps:
            return Region(label=index, where="peak", joint=joint)
        return replace(self._person(index), joint=joint)

    def _person(self, joint: int) -> BoxTarget:
        return BoxTarget(index=self.person, quantity=joint, read=self.read)


def _has_persons(output: Any) -> bool:
    """Return whether an output is of a detector: of torchvision, or (y, raw) of Ultralytics with y (N, columns, n)."""
    first = output[0] if isinstance(output, tuple) and output else None
    return isinstance(output, list) or (isinstance(first, Tensor) and first.dim() == 3)


def region(label: int | str, where: Any = "predicted") -> Target:
    """Explain the mean score of a class over some pixels of a segmentation.

    The output may be maps (N, classes, H, W), also as `.logits`, `["out"]` or beside other tensors; queries with masks,
    as in Mask2Former, whose sum of class probabilities times masks is the score; the masks of SAM, where `label` counts
    all masks of all prompts; or the instances of Mask R-CNN, whose masks are weighted by their scores. If the model
    ends in a sigmoid or softmax, the scores are the values before it, and `explanation.notes` says so.

    Args:
        label: The class, by index or name.
        where: The pixels to average, in pixels of the image, or of a float tensor: a mask (H, W), or (N, H, W) with one
            for each image, of 0 and one other value; a box (left, top, right, bottom); or a point (x, y). They select
            the pixels of the output that they cover by half, or else the most covered pixels. A mask may also have the
            size of the output. For a volume, it must: (D, H, W) or (N, D, H, W). "predicted" takes the pixels that the
            model assigns to the class. "border" takes the outermost of these pixels, minus the mean of the other pixels
            that touch them: both sides of the predicted contour. With one channel, the model assigns the pixels with a
            logit above 0, or with a probability above 0.5 if its last operation is a sigmoid. The same holds for each
            of several channels that end in sigmoids. Other channels compete: a pixel belongs to the class with the
            highest score. If logits do not compete, pass a mask. With two class names, one channel belongs to class 1,
            and its negative to class 0.

    Raises:
        TargetError: `where` has another form. In `attribute`: the mask has another size, or the region is empty or
            outside.

    Source: Vinogradova et al., "Towards Interpretable Semantic Segmentation via Gradient-weighted Class Activation
        Mapping" (2020), https://arxiv.org/abs/2002.11434, who take the sum instead of the mean.
    """
    if where is None or isinstance(where, str):
        choice = check_choice("where", where or "predicted", get_args(RegionChoice), error=TargetError)
        return Region(label=label, where=choice)
    try:
        tensor = where if isinstance(where, Tensor) else torch.as_tensor(np.array(where), device="cpu")
    except (TypeError, ValueError) as error:
        expected = "a mask (H, W), masks of one size, a box, a point, 'predicted' or 'border'"
        raise TargetError(f"expected the pixels of a region as {expected}, got {type(where).__name__}") from error
    pixels = tensor.detach().as_subclass(Tensor)
    if pixels.dim() == 1:
        return Region(label=label, position=as_place("where", pixels, 2 if len(pixels) == 2 else 4))
    check_mask(pixels, TargetError)
    return Region(label=label, where=pixels)


def keypoint(joint: int | str, person: int = 0, *, read: CandidatesFunction | None = None) -> Target:
    """Explain the score of one joint of a pose model.

    For heatmaps (N, joints, H, W), the score is the mean of the joint's map over the 3 x 3 cells around its maximum,
    before a last sigmoid or softmax, as in `region`. For a detector of persons, it is the joint's score, averaged over
    the detections near the person as in `box`.

    Args:
        joint: The joint, by index or name. Names are the class names, if there is one for each joint, or the 17 names
            of COCO, such as "nose" and "left_wrist".
        person: The rank of the person by the detector's probability, from 0.
        read: As in `box`.

    Raises:
        TargetError: `person` is not a whole number, or `read` is not a function. In `attribute`: the model has no such
            joint, or the image has no such person.
    """
    if not is_integer(person, least=0):
        raise TargetError(f"person={described(person)}: expected a whole number from 0")
    check_read(read)
    return Keypoint(joint=joint, person=int(person), read=read)
