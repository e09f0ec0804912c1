"""Exact tests of two hypotheses about a method: the class does not matter, and the learned weights do not matter."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from itertools import permutations
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from ...attribution.base import Attribution
from ...attribution.options import Option
from ...errors import MethodError, SaliencyError
from ...hooks.manager import HookManager
from ...io.geometry import Box
from ...model.answer import Answer
from ...model.call import bound, prepared_for_attribution, run_model
from ...targets.classes import class_scores
from ...targets.words import words
from ...validation import check_integer, check_number
from .base import ABSOLUTE, RELATIVE, Metric, Outcome, SharedResults, Subject, full_size
from .faithfulness import Deletion, Insertion, area, digest
from .method_metrics import copied, randomise, require_weights, restore, tensors_of

UNTIL = 0.25
"""The fraction of the pixels that are deleted or inserted: a map marks about that many."""

CURVES = (Deletion(steps=2, until=UNTIL), Insertion(steps=2, until=UNTIL))
"""The curves of the statistic. More steps gave little on the photos for choosing, and take twice the time."""

OBJECTS = 4
"""The number of classes, boxes or words: of their 24 assignments, the right one has a p-value of 1/24."""

TRIES = 3
"""The largest number of permuted networks for each draw. If too few of them have a map, the missing maps are ties."""

KEPT = 2**25
"""The largest size of the weights of a network, in bytes, whose permutations all methods on an image share."""


class ExactTest(Metric):
    """Base class of tests by ranks. The p-value is at most a with probability a, whatever the images and methods.

    Their null hypothesis takes the place of controls. Higher values are better.
    """

    higher_is_better = True

    @abstractmethod
    def test(self, subject: Subject) -> tuple[float, float, float]:
        """Return the value of one image, its standard error, and the p-value."""

    def outcome(self, subject: Subject) -> Outcome:
        """Compute the values of all images, (1, N)."""
        with torch.no_grad():
            rows = [self.test(subject.single(index)) for index in range(len(subject.explanation))]
        values, errors, p = torch.tensor(rows, dtype=torch.float64, device="cpu").T[:, None]
        return Outcome(values, errors, p, controls=())


def effects(subject: Subject, maps: Tensor) -> Tensor:
    """Return how well maps (M, H, W) order the pixels of the image of a subject: (M,), higher is better.

    It is the mean root of the score while the first quarter of the pixels is inserted, minus the same while they are
    deleted. The root makes the variances of small and large probabilities similar; a score below 0 becomes minus the
    root of its magnitude. Each map is scored alone, not relative to the others: else their ranks would not be exact if
    the draws stop early.
    """
    outcomes = CURVES[0].together(CURVES, subject.of_maps(maps[:, None]))
    curves = (cast("Tensor", outcomes[curve].curves)[:, 0] for curve in CURVES)  # (M, steps)
    deletion, insertion = (area(curve.sign() * curve.abs().sqrt()) for curve in curves)
    return insertion - deletion


def slack(value: float) -> float:
    """Return the difference up to which another value is tied with a value."""
    return RELATIVE * abs(value) + ABSOLUTE


def reached(own: float, others: Sequence[float]) -> list[int]:
    """Return the numbers, counted from 1, of the scores that are better than the score of the map, or tied with it."""
    return [number for number, score in enumerate(others, 1) if not score < own - slack(own)]


def is_worst(own: float, others: Sequence[float]) -> bool:
    """Return whether all other scores are better than the score of the map."""
    return all(score > own + slack(own) for score in others)


class WeightsTest(ExactTest):
    """Rank of a map among maps of the same method on networks with permuted weights; higher is better.

    If the learned weights do not matter, the map and the other maps are exchangeable, whatever their structure: all are
    scored by the unchanged model, each alone. So each rank is equally likely. Ties count against the map, so a method
    that ignores the weights has a p-value of 1. So does a constant map. A network whose map is constant is replaced by
    another: among maps that are not constant, each rank is still equally likely.

    Args:
        draws: The number of networks: 19 for a level of 5 %, 99 for 1 %.
        stop: The number of better or tied maps after which no further map is drawn; None to draw all. The p-value stays
            exact; it is then `stop` divided by the number of draws.
        seconds: The time after which no further map is drawn. With fewer draws, the p-value is larger, but still exact.

    Values: (N,), the fraction of the networks whose map is worse: 1 is the best value, and 0.5 is expected by chance.
    The weights are permuted within each parameter. Batch norms then use the statistics of the image, without which
    activations vanish or explode.

    Raises:
        MethodError: The model has no parameters or buffers.

    Source: Besag and Clifford, "Sequential Monte Carlo p-values" (1991), https://doi.org/10.1093/biomet/78.2.301.
    """

    name = "weights"

    draws: Option[int] = Option(19, check_integer)
    stop: Option[int | None] = Option(None, check_integer)
    seconds: Option[float | None] = Option(None, check_number, above=0)

    def test(self, subject: Subject) -> tuple[float, float, float]:
        """Return the fraction of worse maps, its standard error, and the p-value."""
        own, others, _ = self.scores(subject)
        numbers = reached(own, others)
        worse, p = 1 - len(numbers) / len(others), (len(numbers) + 1) / (len(others) + 1)
        if self.stop is not None and len(numbers) >= self.stop:
            p = self.stop / numbers[self.stop - 1]
        return worse, math.sqrt(worse * (1 - worse) / len(others)), p

    def scores(self, subject: Subject) -> tuple[float, list[float], int]:
        """Return the score of the map of one image, of the maps of permuted networks, and how many had no map."""
        return subject.once(self, self._scores, subject)

    def _scores(self, subject: Subject) -> tuple[float, list[float], int]:
        require_weights(subject.method.model)
        began, map_, others = time.perf_counter(), full_size(subject.explanation), list[float]()
        own, tries = float(effects(subject, map_)), 0 if _is_constant(map_) else TRIES * self.draws
        for draw in range(tries):
            if _is_constant(map_ := untrained_map(subject, draw)):
                continue
            others.append(float(effects(subject, map_)))
            is_late = self.seconds is not None and time.perf_counter() - began > self.seconds
            # A map that is worse than all others also has a verdict: continue drawing until it is certain.
            is_decided = self.stop is not None and len(reached(own, others)) >= self.stop and not is_worst(own, others)
            if len(others) == self.draws or is_decided or is_late:
                return own, others, draw + 1 - len(others)
        return own, others + (self.draws - len(others)) * [own], tries - len(others)  # networks without a map are tied


def _is_constant(map_: Tensor) -> bool:
    return bool(map_.amax() == map_.amin())


def untrained_map(subject: Subject, draw: int) -> Tensor:
    """Return the map of the image of a subject by its method on a network with permuted weights (1, H, W).

    It is zero if the network has no map, because its output is not finite or its target does not exist.
    """
    return subject.once(("map", draw), _untrained_map, subject, draw)


def _untrained_map(subject: Subject, draw: int) -> Tensor:
    method = untrained(subject, draw)
    try:
        with bound(warns=False):  # do not warn about maps that are zero
            return full_size(method.attribute(subject.inputs_for(method, subject.images), subject.explained_target))
    except SaliencyError:
        return torch.zeros_like(subject.images[:, 0])


def untrained(subject: Subject, draw: int) -> Attribution:
    """Return the method on a copy of its model with permuted weights, until the next call.

    Each image has different permutations, so that the ranks of several images are independent, given the model. The
    permuted weights are kept for other methods on the image, unless they are larger than `KEPT`.
    """
    method, model = subject.once("copy", copied, subject), subject.method.model
    numbers = subject.seed, draw, int.from_bytes(digest(subject.images)[:4])
    weights = tensors_of(method.model, recurse=True)
    is_kept = sum(weight.nbytes for weight in weights) <= KEPT

    def permuted() -> list[Tensor]:
        restore(method.model, model)
        randomise(method.model, [name for name, _ in model.named_modules()], *numbers)
        with subject.bound(subject.images):
            normalise(method.model, subject.images)
        return [weight.clone() for weight in weights] if is_kept else weights

    with torch.no_grad():
        results = subject.shared if is_kept else SharedResults()
        values = results.once(("permuted", id(model), *numbers), permuted)
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)
    return method


def normalise(model: nn.Module, x: Tensor) -> None:
    """Replace the statistics of batch norms by those of the activations for images x."""
    norms = [module for module in model.modules() if getattr(module, "running_mean", None) is not None]

    def replace(norm: nn.Module, args: tuple[Tensor, ...], kwargs: object) -> None:
        values = args[0].transpose(0, 1).flatten(1)  # (C, n)
        cast("Tensor", norm.running_mean).copy_(values.mean(1))
        cast("Tensor", norm.running_var).copy_(values.var(1, correction=0))

    with prepared_for_attribution(model), torch.no_grad(), HookManager() as hooks:
        for norm in norms:
            hooks.around(norm, partial(replace, norm), lambda *_: None)
        if norms:
            run_model(model, x)


class ClassTest(ExactTest):
    """Fraction of a map of a class that lies on the image of the class, in a mosaic of four images; higher is better.

    Four images of different classes fill the quarters of a mosaic, and the method explains the class of each image. If
    the class does not matter, the four maps are exchangeable, so each of the 24 assignments of maps to images is
    equally likely. The p-value is the fraction of the assignments in which the maps lie on their images at least as
    much.

    For a box, a region, a joint or words of an answer, other boxes, classes, joints or words of the same image take the
    place of classes. The relevance in each box is compared, or the scores of each region, joint or word while the
    pixels of each map are inserted and deleted.

    Values: (N,), the mean fraction of the positive relevance, 0.25 by chance. For boxes, regions, joints and words, the
    fraction of the maps of others that are worse for each, 0.5 by chance.

    Raises:
        MethodError: There are no three images of other classes, or no three other boxes, regions, joints or words.

    Source: The mosaic is from Arias-Duart et al., "Focus! Rating XAI Methods and Finding Biases" (2022),
        https://arxiv.org/abs/2109.15035; the test is ours.
    """

    name = "class"

    def test(self, subject: Subject) -> tuple[float, float, float]:
        """Return the mean fraction, its standard error over the four maps, and the p-value."""
        is_class = None not in subject.explanation.target and not subject.fixed_target
        table = mosaic_shares(subject) if is_class else object_effects(subject)  # (4, 4) of a map, on an image
        orders = torch.tensor(list(permutations(range(OBJECTS))), device="cpu")
        sums = table[torch.arange(OBJECTS, device="cpu"), orders].sum(1)
        p = float((sums >= sums[0] - slack(float(sums[0]))).double().mean())
        fractions = table.diagonal() if is_class else (table < table.diagonal()).double().sum(0) / (OBJECTS - 1)
        return float(fractions.mean()), float(fractions.std()) / math.sqrt(OBJECTS), p


def mosaic_shares(subject: Subject) -> Tensor:
    """Return the fraction of the positive relevance of each class on each image of a mosaic (classes, images)."""
    method, label = subject.method, subject.explanation.target[0]
    others, labels = subject.shared.once(("others", id(method.model)), _other_images, subject)
    chosen = {other: number for number, other in reversed([*enumerate(labels)]) if other != label}
    numbers = sorted(chosen.values())[: OBJECTS - 1]
    if len(numbers) < OBJECTS - 1:
        found = f"the model finds {len(numbers)}"
        raise MethodError(f"the test needs images of three other classes, and {found}: pass others=[...]")
    height, width = subject.images.shape[2:]
    half = (height + 1) // 2, (width + 1) // 2
    images = torch.cat([subject.images, others[numbers]])
    tiles = interpolate(images.float(), half, mode="bilinear", antialias=True).to(images)  # not defined for halves
    first, second, third, fourth = tiles
    mosaic = torch.cat([torch.cat([first, second], 2), torch.cat([third, fourth], 2)], 1)[None, :, :height, :width]
    explanations = method.attribute_classes(subject.inputs_for(method, mosaic), [label, *(labels[n] for n in numbers)])
    maps = torch.cat([full_size(explanation) for explanation in explanations]).cpu().double().clamp(min=0)
    even = pad(maps, (0, width % 2, 0, height % 2))
    quarters = even.view(OBJECTS, 2, half[0], 2, half[1]).sum((2, 4)).flatten(1)
    totals = quarters.sum(1, keepdim=True)
    return torch.where(totals > 0, quarters / totals, 1 / OBJECTS)


def _other_images(subject: Subject) -> tuple[Tensor, list[int]]:
    """Return the images of other classes as the model's input (k, C, H, W), and their classes."""
    others, method = subject.other_images, subject.method
    if others is None:
        if class_scores(subject.output).shape[1] != 1000 or method.preprocess is None:
            raise MethodError("the test needs images of three other classes: pass others=[...]")
        others = sorted(str(photo) for photo in files(__package__).joinpath("photos").iterdir())
    images = method.read(others).inputs
    return images, class_scores(subject.output_for(images)).argmax(1).tolist()


def object_effects(subject: Subject) -> Tensor:
    """Return how well the map of each of four boxes, regions, joints or words fits each of them (maps, objects)."""
    method, explained = subject.method, subject.explained_target
    inputs = subject.inputs_for(method, subject.images)
    explained = explained[0] if isinstance(explained, list | tuple) else explained
    if isinstance(inputs, Answer):
        rest = [span for word, span in inputs.words if word not in subject.explanation.target_names[0]]
        questions: list[Any] = [words(at=span) for span in sorted(rest, key=lambda span: span.start - span.stop)]
    else:
        questions = [*subject.others("box")[0]] or [*subject.others()[0]]
    targets = [explained, *questions[: OBJECTS - 1]]
    if len(targets) < OBJECTS:
        found = f"and the image has {len(targets) - 1}"
        raise MethodError(f"the test needs three other boxes, regions, joints or words, {found}")
    explanations = [subject.explanation, *method.attribute_classes(inputs, targets[1:])]
    maps = torch.cat([full_size(explanation) for explanation in explanations])
    boxes = [getattr(target, "box", None) for target in targets]
    if None not in boxes:
        positive = maps.cpu().double().clamp(min=0)
        fractions = positive / positive.sum((1, 2), keepdim=True).clamp(min=1e-30)
        corners = [[max(0, round(edge)) for edge in cast("Box", box)] for box in boxes]
        return torch.stack([fractions[:, top:end, left:right].sum((1, 2)) for left, top, right, end in corners], 1)
    pairs = zip(explanations, targets, strict=True)
    return torch.stack([effects(subject.of(each, target=target), maps) for each, target in pairs], 1)
