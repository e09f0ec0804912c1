"""RISE: the expected score when a pixel is visible, estimated with random masks."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..attribution.estimates import Estimate, generator, precise_type, rank_correlation
from ..attribution.explanation import BatchAttribution, Explanation
from ..attribution.options import MOST_PASSES, ConvertedOption, Option
from ..attribution.passes import ImageAttribution, Passes, SampledAttribution, TimedAttribution, from_estimate
from ..attribution.questions import Questions
from ..errors import MethodError
from ..io.axes import along_rows
from ..io.inputs import Batch
from ..targets.boxes import BoxScore
from ..targets.question import Question
from ..validation import check_choice, check_flag, check_integer, check_number
from .baselines import Filler, FillOption
from .segments import ResolvedSegments, SegmentAttribution, SegmentsLike, resolve_segments


class RISE(SampledAttribution):
    """The effect of each pixel's visibility on the score, estimated with random masks.

    Formula: S_i = Cov(y(x ⊙ M), M_i) / Var M_i, over random masks M.

    A mask M is a grid of cells, each shown with probability p, enlarged bilinearly and shifted by less than a cell. The
    paper's map is the mean of f(x M) M / p: the expected score when the pixel is visible. A large part of it is
    constant, the score of half an image, and with few masks the map shows how often a pixel happened to be visible. So
    by default the map is debiased: the covariance of score and mask at each pixel, divided by the variance of the mask.
    This is the slope of the score from hidden to visible. It is 0 if the score does not depend on the pixel, and can be
    negative. For masks of 0 and 1 the variance is p (1 - p). The map then equals the map of Hatakeyama et al., the
    difference of the mean scores with the pixel visible and hidden. The variance of enlarged masks is smaller, and
    smallest in the middle of the image. `debiased=False` gives the paper's map.

    With `saliency.similarity()` as the target it is RELAX: without a label, it explains the embedding of the image.

    The paper uses probabilities: `attribute(image, saliency.probability("espresso"))`. With them the
    paper's map is positive, but they saturate. A plain class target explains the logit, which does not saturate and may
    be negative.

    Args:
        grid: The number of cells of a mask along each edge.
        visible: The probability p with which a cell is visible.
        debiased: See above.
        uncertainty: Return the variance of the score over all masks, each weighted by its value at the pixel, instead
            of the map. It shows how much the score depends on the other pixels, and does not decrease with more masks;
            the standard error of the map, `error`, does.
        fill: The value of hidden pixels: a number, or one per channel, in the model's normalised space (0 is the mean
            colour of its training images), "mean" (of the image), "blur", or an image (C, H, W) as the model takes it.

    Values: (N, 1, H, W), in score units; signed if debiased. The uncertainty is in score units squared. The standard
    errors are computed for a mean over independent masks. If debiased, they ignore the error of the mean score, which
    is correct to first order in 1 / N.

    Raises:
        MethodError: An option is invalid, or does not fit the image.

    Source: Petsiuk et al., "RISE" (2018), https://arxiv.org/abs/1806.07421; debiased as in Hatakeyama et al.,
        "Visualizing Color-wise Saliency of Black-Box Image Classification Models" (2020),
        https://arxiv.org/abs/2010.02468; the uncertainty of Wickstrøm et al., "RELAX: Representation Learning
        Explainability" (2021), https://arxiv.org/abs/2112.10161.
    """

    name = "rise"
    cost = "4000 forwards"
    sign = "positive"
    default_passes = 4000
    preview_options: ClassVar = {"passes": 12, "grid": 3}

    grid: Option[int] = Option(7, check_integer)
    visible: Option[float] = Option(0.5, check_number, above=0, below=1)
    debiased: Option[bool] = Option(True, check_flag)
    uncertainty: Option[bool] = Option(False, check_flag)
    fill: FillOption = FillOption(partial="rise")

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the weighted sum of the masks."""
        x, masks = passes.x, RandomMasks(passes.x, self.grid, self.visible, self.seed)
        background = Filler(x, self.fill).background
        chunk: dict[int, Tensor] = {}  # the masks of the current chunk

        def make(start: int, stop: int) -> Tensor:
            chunk.clear()
            chunk[start] = masks(start, stop)  # (k, 1, H, W)
            return x * chunk[start] if self.fill == 0 else torch.lerp(background, x, chunk[start])

        estimate = self.new_estimate(masks, score)
        for done in passes.forwards(make, self.most_passes, estimate=estimate):
            estimate.take(done.scores, chunk[done.start])
        result = from_estimate(estimate, x)
        return result._replace(agreement=estimate.agreements) if score.dim() else result

    def new_estimate(self, masks: RandomMasks, score: Tensor) -> MaskedScores:
        """Return a new estimate of the map."""
        if self.uncertainty:
            return WeightedVariance(masks.variance, score)
        if self.debiased:  # subtracting the score of the whole image does not change the covariance
            return MaskedScores(self.visible, masks.variance, score, score.numel())
        return MaskedScores(self.visible, torch.full_like(masks.variance, self.visible), None, score.numel())

    def explanation(self, result: BatchAttribution, target: Questions, batch: Batch) -> Explanation:
        """Return the checked explanation. A variance has the units squared."""
        explanation = super().explanation(result, target, batch)
        return replace(explanation, units=f"{self.units} squared") if self.uncertainty else explanation


class JointQuestions(Questions):
    """Several targets of one call, whose scores (N, T) are read from one output; see `DRISE`."""

    def __init__(self, targets: Sequence[Questions]) -> None:
        super().__init__(None, targets[0].images)
        self._targets = targets
        self._probabilities: dict[tuple[int, int], Tensor] = {}  # (C,) by the number of the target and the image
        self._image: int | None = None  # the image of all passes; None for the batch

    def __call__(self, output: Any) -> Tensor:
        """Return the scores (N, T)."""
        numbers = range(len(self._targets))
        if self._image is None:
            return torch.stack([self._of_batch(number, output) for number in numbers], 1)
        boxes = {number: box for number in numbers if (box := _whole_box(self._targets[number][0]))}
        scores = {number: self._targets[number](output) for number in numbers if number not in boxes}
        for reading in {box.reading for box in boxes.values()}:
            group = [number for number, box in boxes.items() if box.reading == reading]
            similarities = self._similarities(self._image, {number: boxes[number] for number in group}, output)
            scores |= zip(group, similarities.T, strict=True)
        return torch.stack([scores[number] for number in numbers], 1)

    def _of_batch(self, number: int, output: Any) -> Tensor:
        """Return the scores (N,) of the images. This call finds the boxes."""
        target = self._targets[number]
        scores = target(output).clone()
        for image in range(len(target)):
            if (box := _whole_box(target[image])) is not None:
                self._probabilities[number, image] = box.class_probabilities(box.detections(output), image)
                scores[image] = self._similarities(image, {number: box}, output)[image, 0]
        return scores

    def _similarities(self, image: int, boxes: Mapping[int, BoxScore], output: Any) -> Tensor:
        """Return the similarities (N, T) to boxes of one image that are read in the same way."""
        detections = next(iter(boxes.values())).detections(output)
        explained = detections.boxes.new_tensor([box.match.box for box in boxes.values()])
        probabilities = pad_sequence([self._probabilities[number, image] for number in boxes], True)
        return detections.similarity(explained, probabilities)

    def variants(self, image: int, count: int, *, mirrored: bool = False) -> JointQuestions:
        """Return the questions of one image, for an output whose rows are variants of that image."""
        joint = copy.copy(self)
        joint._targets = [target.variants(image, count, mirrored=mirrored) for target in self._targets]
        joint._image = image
        return joint

    def serial_reason(self, *arguments: Any) -> str:
        """Return why the passes of an image cannot run together; empty if they can."""
        return next(filter(None, (target.serial_reason(*arguments) for target in self._targets)), "")


def _whole_box(question: Question) -> BoxScore | None:
    """Return the score of a box and its class; None for another question, such as about an edge of a box."""
    score = question.score
    return score if isinstance(score, BoxScore) and score.is_whole else None


class DRISE(RISE):
    """RISE for boxes of a detector: masks weighted by the similarity of the detections to the box.

    Formula: S_i = Cov(q(x ⊙ M), M_i) / Var M_i, with q the largest IoU · objectness · cos(p, p_box) of all candidates,
    and p their class probabilities.

    The weight of a mask is the highest similarity of all candidates, before suppression if the output holds them: their
    IoU with the box, times their probability of an object, times the cosine of both vectors of class probabilities.
    Without objectness, it is the highest class probability. All targets of `attribute_classes` share the masked
    forwards, so ten boxes take hardly longer than one. A tolerance applies to the least precise map. If the class is
    not the top class of the box, only this class is compared. Any other target, such as an edge of a box, a region or a
    class, weights the masks by its score, as in `RISE`.

    Values: (N, 1, H, W), the change of the similarity (0 to 1) from hidden to visible; signed if debiased. For other
    targets they are in score units. `scores` are the similarities for the whole image.

    Source: Petsiuk et al., "Black-box Explanation of Object Detectors via Saliency Maps" (2020),
        https://arxiv.org/abs/2006.03204.
    """

    name = "d_rise"
    cost = "5000 forwards for all targets of an image"
    units = "similarity"
    default_passes = 5000

    grid: Option[int] = Option(16, check_integer)

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        """Explain one target."""
        return self.explain_targets(x, [target])[0]

    def explain_targets(self, x: Tensor, targets: Sequence[Questions]) -> list[BatchAttribution]:
        """Explain several targets by the same masks."""
        joint = super().explain(x, JointQuestions(targets))  # values (N, T, H, W), scores (N, T)
        return [target_part(joint, number) for number in range(len(targets))]


def target_part(joint: BatchAttribution, number: int) -> BatchAttribution:
    """Return the attribution of one target of a `JointQuestions`, by its number."""
    tensors, column = joint.tensors().items(), slice(number, number + 1)
    return joint.with_tensors({name: part[:, column] if part.dim() > 2 else part[:, number] for name, part in tensors})


class RandomMasks:
    """Random masks for one image. The number of a mask determines its draws.

    Args:
        x: (1, C, H, W) the image.
        grid: The number of cells of a mask along each edge.
        visible: The probability with which a cell is visible.
        seed: The seed of all draws.

    Attributes:
        variance: (1, H, W) the variance of a mask at each pixel.
    """

    def __init__(self, x: Tensor, grid: int, visible: float, seed: int) -> None:
        self._size = tuple(x.shape[2:])
        self._grid, self._visible, self._seed = grid, visible, seed
        self._cell = [math.ceil(edge / grid) for edge in self._size]
        # Enlarging is linear along each edge: one matrix (enlarged, grid) for each.
        unit = torch.eye(grid, dtype=torch.float64, device="cpu")[None]
        enlarging = [F.interpolate(unit, size=(grid + 1) * cell, mode="linear")[0].T for cell in self._cell]
        self._enlarging = [matrix.to(x) for matrix in enlarging]
        variance = torch.tensor(visible * (1 - visible), dtype=torch.float64, device="cpu")
        for matrix, edge, cell in zip(enlarging, self._size, self._cell, strict=True):
            variance = variance[..., None] * matrix.square().sum(1).unfold(0, edge, 1)[:cell].mean(0)
        self.variance = variance.to(x)[None]

    def __call__(self, start: int, stop: int) -> Tensor:
        """Return masks (k, 1, H, W) from `start` to `stop`, 0 (hidden) to 1 (shown); all pixels have equal means."""
        axes = len(self._size)
        size, cell = self._grid**axes + axes, torch.tensor(self._cell, dtype=torch.float32, device="cpu")
        seeds = (generator(self._seed, number) for number in range(start, stop))
        draws = torch.stack([torch.rand(size, generator=seed, dtype=torch.float32, device="cpu") for seed in seeds])
        firsts = (draws[:, -axes:] * cell).long()[..., None].unbind(1)  # (k, 1) each
        parts = zip(self._enlarging, firsts, self._size, strict=True)
        *outer, down, across = (matrix[first + torch.arange(edge, device="cpu")] for matrix, first, edge in parts)
        visible = (draws[:, :-axes] < self._visible).view(-1, *[self._grid] * axes).to(down)
        for deep in outer:
            visible = torch.einsum("kdg,kghw->kdhw", deep, visible)
            down, across = down[:, None], across[:, None]
        return (down @ visible @ across.mT)[:, None]


class MaskedScores(Estimate):
    """Sum of masks weighted by their scores, in constant memory.

    Args:
        visible: The mean of a mask.
        scale: (1, H, W) the divisor of the sum.
        level: A constant close to the scores, which is subtracted from them for the debiased map; else None.
    """

    def __init__(self, visible: float, scale: Tensor, level: Tensor | float | None, targets: int = 1) -> None:
        super().__init__()
        self._debiased, self._level = level is not None, 0.0 if level is None else level
        self._centre = visible if self._debiased else 0.0
        self._scale = scale.to(precise_type(scale))
        self._scores = self._scale.new_zeros(2, targets)  # the sums of all masks, and of the even masks
        # With d a mask minus its mean, and s a score: sums of s d and d, also over even masks; of s s d d, s d d, d d.
        self._sizes = [targets, 1, targets, 1, targets, targets, 1]
        self._sums = self._scale.new_zeros(sum(self._sizes), *scale.shape[1:])

    def take(self, scores: Tensor, masks: Tensor) -> None:
        """Add the scores (k,) of masks (k, 1, H, W), or (k, T) of several targets."""
        masks = masks.to(torch.promote_types(masks.dtype, torch.float32))  # sums in half precision are wrong
        scores = (scores.to(masks) - self._level).reshape(len(masks), -1)
        ones, even = torch.ones_like(scores[:, :1]), torch.zeros_like(scores[:, :1])
        even[self.count % 2 :: 2] = 1
        self.count += len(scores)
        self._scores += torch.stack([scores, scores * even]).to(self._scores).sum(1)
        off = (masks - self._centre if self._centre else masks).flatten(1)  # (k, H W)
        first = torch.cat([scores, ones, scores * even, even], 1).T @ off
        second = torch.cat([scores.square(), scores, ones], 1).T @ off.square()
        self._sums += torch.cat([first, second]).view_as(self._sums)

    def _map(self, scored: Tensor, bare: Tensor, totals: Tensor, count: int) -> Tensor:
        """Return the sums of s d, with the mean subtracted from the scores if debiased."""
        return scored - bare * along_rows(totals / count, bare) if self._debiased else scored

    @property
    def mean(self) -> Tensor:
        """The maps (T, H, W) of the targets."""
        scored, bare, *_ = torch.split(self._sums, self._sizes)
        divisor = max(self.count - self._debiased, 1)
        return self._map(scored, bare, self._scores[0], self.count) / (self._scale * divisor)

    @property
    def variance(self) -> Tensor:
        """The variance (T, H, W) of the terms of the sum."""
        scored, bare, _, _, squares, mixed, alone = torch.split(self._sums, self._sizes)
        mean = along_rows(self._scores[0] * self._debiased / self.count, bare)
        total = scored - mean * bare
        spread: Tensor = squares - 2 * mean * mixed + mean * mean * alone - total.square() / self.count
        return spread.clamp(min=0) / (self._scale.square() * max(self.count - 1, 1))

    def halves(self) -> tuple[Tensor, Tensor]:
        """Return the maps of the even and of the odd masks, up to a factor."""
        scored, bare, even_scored, even_bare, *_ = torch.split(self._sums, self._sizes)
        evens, (total, of_even) = (self.count + 1) // 2, self._scores
        odd = self._map(scored - even_scored, bare - even_bare, total - of_even, self.count - evens)
        return self._map(even_scored, even_bare, of_even, evens), odd

    @property
    def agreements(self) -> list[float] | None:
        """The `agreement` of each target."""
        rows = zip(*(torch.split(half, 1) for half in self.halves()), strict=True)
        return [rank_correlation(*pair) for pair in rows] if self.count >= 4 else None


class WeightedVariance(MaskedScores):
    """Variance (T, H, W) of the scores, each weighted by the value of its mask at the pixel, in constant memory.

    Its standard error ignores the error of the weighted mean score, which is correct to first order in 1 / N.

    Args:
        like: (1, H, W) a tensor of the size of the masks.
        level: () or (T,) constants close to the scores, which improve the precision.
    """

    def __init__(self, like: Tensor, level: Tensor) -> None:
        super().__init__(0, torch.ones_like(like), None, 4 * level.numel())
        self._zero = level

    def take(self, scores: Tensor, masks: Tensor) -> None:
        """Add the powers 0 to 3 of the scores (k,) of masks (k, 1, H, W), or (k, T) of several targets."""
        super().take(torch.stack([(scores - self._zero) ** power for power in range(4)], 1), masks)

    @staticmethod
    def _central(moments: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted mean and the weighted variance (T, H, W), from the sums (4 T, H, W) of the powers."""
        weight, first, second, _ = moments.chunk(4)
        mean, square = first / weight.clamp(min=1e-30), second / weight.clamp(min=1e-30)
        return mean, (square - mean.square()).clamp(min=0)

    @property
    def mean(self) -> Tensor:
        """The weighted variance (T, H, W)."""
        return self._central(torch.split(self._sums, self._sizes)[0])[1]

    @property
    def variance(self) -> Tensor:
        """The variance (T, H, W) of the terms of the weighted variance."""
        scored, _, _, _, squares, mixed, _ = torch.split(self._sums, self._sizes)
        zeroth, first, second, third = mixed.chunk(4)  # of the scores, weighted by the squares of the masks
        mean, spread = self._central(scored)
        rest = mean.square() - spread  # each term is s^2 - 2 mean s + rest
        total: Tensor = squares.chunk(4)[2] - 4 * mean * third + (4 * mean.square() + 2 * rest) * second
        total = total - 4 * mean * rest * first + rest.square() * zeroth
        return total.clamp(min=0) * self.count / scored.chunk(4)[0].square().clamp(min=1e-30)

    def halves(self) -> tuple[Tensor, Tensor]:
        """Return the maps of the even and of the odd masks."""
        scored, _, even, *_ = torch.split(self._sums, self._sizes)
        return self._central(even)[1], self._central(scored - even)[1]


Mode = Literal["insertion", "deletion"]
SHORTLIST, COMBINED = 30, 0.1
"""The paper's m, the number of patches to combine, and its gamma, the fraction of patches that are chosen together."""
WINDOW = 16
"""The number of choices after which all remaining patches are tried again."""
NEGLIGIBLE = 0.01
"""The search ends when this fraction of the difference between the image and no image is left."""


class VXCODE(SegmentAttribution, TimedAttribution):
    """Greedy insertion or deletion of patches, for boxes: the change of the score from each chosen patch on.

    Formula: S_i = max_t y_t − max_t<n y_t, with y_t the score after t patches (for deletion, minus the score), and n
    the turn of the patch of pixel i.

    Insertion begins with all patches hidden, and shows the patch that raises the score most, then the next. Deletion
    begins with the image, and hides the patch that lowers the score most. Each patch is judged together with the
    patches before it. Every 16th choice tries all remaining patches; the choices in between try only the best of them.
    The score of a box is its similarity, as in `DRISE`: the highest product of IoU, probability of an object and cosine
    of the class probabilities, over all candidates. Other targets have their own score.

    The value of a patch is the best score of the search minus the best score before this patch. The search ends when
    1 % of the difference between the scores of the image and of all patches hidden is left; the other patches are 0.
    The paper takes 1 or 0 as the best score, and ends the search with the last patch. Its values follow the last score
    before the patch, so they rise again where patches lower the score.

    Args:
        mode: "insertion" marks patches that suffice for the box; "deletion" marks the few that are necessary.
        group_size: The number of patches that are chosen together, the paper's r: 1, 2 or 3. Until a tenth of all
            patches is chosen, all combinations of the 30 that are best alone are tried: 435 of two patches, 4060 of
            three.
        trials: The number of patches that each of the choices in between tries. The paper tries all patches at each
            choice, as `trials=64` does for 64 patches, in up to 2081 forwards.
        segments: By default a grid of patches, (rows, columns). The number of passes grows with its square.
        seconds: The maximum time per image, in seconds. At least one patch is chosen.

    Values: (N, 1, H, W), not negative, constant within a patch: similarity (0 to 1) for boxes, otherwise in score
    units. `scores` are the similarities for the whole image.

    Raises:
        DependencyError: Superpixels need scikit-image, which is not installed.
        MethodError: An option is invalid, or does not fit the image.

    Source: Yamauchi et al., "Explaining Object Detectors via Collective Contribution of Pixels" (2024),
        https://arxiv.org/abs/2412.00666; windows as in Gu et al., "PhaseWin Search Framework Enable Efficient
        Object-Level Interpretation" (2025), https://arxiv.org/abs/2511.10914.
    """

    name = "vx_code"
    cost = "at most 395 forwards for 64 patches"
    units = "similarity"
    sign = "positive"
    preview_options: ClassVar = {"segments": (3, 3), "mode": "deletion"}

    mode: Option[Mode] = Option("insertion", check_choice, get_args(Mode))
    group_size: Option[int] = Option(1, lambda name, value: check_choice(name, check_integer(name, value), (1, 2, 3)))
    trials: Option[int] = Option(4, check_integer)
    segments: ConvertedOption[SegmentsLike, ResolvedSegments] = ConvertedOption((8, 8), resolve_segments)

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        """Explain one target."""
        return target_part(super().explain(x, JointQuestions([target])), 0)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Choose the patches one by one."""
        segments, filler = self.segmented(passes.x)
        inserts, sign = (True, 1) if self.mode == "insertion" else (False, -1)
        count, chosen = segments.count, list[int]()
        tries = [min(count - turn, self.trials) if turn % WINDOW else count - turn for turn in range(count)]
        most = count if self.seconds else 1 + sum(tries)  # with a time limit, at least one selection
        if most > MOST_PASSES:
            raise MethodError(f"{count} segments need up to {most} passes, more than {MOST_PASSES}; use fewer segments")

        def gains(groups: Sequence[Sequence[int]], least: int = 1) -> Tensor:
            """Return the scores with each group of patches added to the chosen patches; negative for deletion.

            A time limit may leave out the last groups, but not the first `least`.
            """

            def make(start: int, stop: int) -> Tensor:
                changed = torch.zeros(stop - start, count, dtype=torch.bool, device="cpu")
                for row, group in zip(changed, groups[start:stop], strict=True):
                    row[[*chosen, *group]] = True
                return filler(segments.hidden(changed == inserts))

            return passes.scores(make, len(groups), least=least)[:, 0].cpu().double() * sign

        whole, none = sign * float(score), float(gains([[] if inserts else range(count)]))
        start, end = (none, whole) if inserts else (whole, none)
        enough = end - NEGLIGIBLE * (end - start) if end > start else math.inf
        best = [start]  # the best score before each chosen patch
        ranked, due = list(range(count)), 0  # the remaining patches, the best first, and when all are tried again
        while len(chosen) < count and best[-1] < enough and not (chosen and passes.budget.is_over()):
            size = min(self.group_size, count - len(chosen)) if len(chosen) < COMBINED * count else 1
            tried = ranked if size > 1 or len(chosen) >= due else ranked[: self.trials]
            alone = gains([[number] for number in tried], 1 if chosen else count)
            if len(alone) < len(tried):
                break
            by_score = sorted(zip(alone.tolist(), tried, strict=True), key=lambda pair: -pair[0])
            group, reached = [by_score[0][1]], [by_score[0][0]]
            if tried is ranked:
                ranked, due = [number for _, number in by_score], len(chosen) + WINDOW
            if size > 1:
                groups = list(combinations(sorted(ranked[:SHORTLIST]), size))
                orders = list(permutations(groups[int(gains(groups).argmax())]))
                steps = gains([order[: stop + 1] for order in orders for stop in range(size)])
                if len(steps) == size * len(orders):  # else the best patch alone
                    fastest = int(steps.view(-1, size).sum(1).argmax())
                    group, reached = list(orders[fastest]), steps.view(-1, size)[fastest].tolist()
            chosen += group
            ranked = [number for number in ranked if number not in group]
            best += [max(best[-1], *reached[: stop + 1]) for stop in range(len(reached))]
        values = torch.zeros(count, dtype=torch.float64, device="cpu")
        values[chosen] = best[-1] - torch.tensor(best[:-1], dtype=torch.float64, device="cpu")
        return ImageAttribution(values.to(passes.x)[segments.labels][None], notes=[segments.note])
