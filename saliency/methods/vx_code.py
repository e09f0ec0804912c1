"""VX-CODE: greedy insertion or deletion of patches, for boxes of a detector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, permutations
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from ..attribution.explanation import BatchAttribution
from ..attribution.options import ConvertedOption, Option
from ..attribution.questions import Questions
from ..engine.multi_pass import MOST_PASSES, ImageAttribution, Passes, TimedAttribution
from ..errors import MethodError
from ..validation import check_choice, check_integer
from .rise import JointQuestions, target_part
from .segments import ResolvedSegments, SegmentAttribution, SegmentsLike, resolve_segments

Mode = Literal["insertion", "deletion"]
SHORTLIST, COMBINED = 30, 0.1
"""The paper's m, the number of patches to combine, and its gamma, the share of patches that are chosen together."""
NEGLIGIBLE = 0.01
"""The search ends when this share of the difference between the image and no image is left."""


class VXCODE(SegmentAttribution, TimedAttribution):
    """Greedy insertion or deletion of patches, for boxes: the change of the score from each chosen patch on.

    Formula: S_i = max_t y_t − max_t<n y_t, with y_t the score after t patches (for deletion, minus the score), and n
    the turn of the patch of pixel i.

    Insertion begins with all patches hidden, and shows the patch that raises the score most, then the next. Deletion
    begins with the image, and hides the patch that lowers the score most. Each patch is judged together with the
    patches before it. The score of a box is its similarity, as in `DRISE`: the highest product of IoU, probability of
    an object and cosine of the class probabilities, over all candidates. Other targets have their own score.

    The value of a patch is the best score of the search minus the best score before this patch. The search ends when
    1 % of the difference between the scores of the image and of all patches hidden is left; the other patches are 0.
    In the paper, the best score is taken as 1 or 0, the search ends with the last patch, and values follow the last
    score before the patch, so they rise again where patches lower the score.

    Args:
        mode: "insertion" marks patches that suffice for the box; "deletion" marks the few that are necessary.
        group_size: The number of patches that are chosen together, the paper's r: 1, 2 or 3. Until a tenth of all
            patches is chosen, all combinations of the 30 that are best alone are tried: 435 of two patches, 4060 of
            three.
        segments: By default a grid of patches, (rows, columns). The number of passes grows with its square.
        seconds: The maximum time per image, in seconds. At least one patch is chosen.

    Values: (N, 1, H, W), not negative, constant within a patch: similarity (0 to 1) for boxes, otherwise in score
    units. `scores` are the similarities for the whole image.

    Raises:
        DependencyError: Superpixels need scikit-image, which is not installed.
        MethodError: An option is invalid, or does not fit the image.

    Source: Yamauchi et al., "Explaining Object Detectors via Collective Contribution of Pixels" (2024),
        https://arxiv.org/abs/2412.00666.
    """

    name = "vx_code"
    cost = "at most 2081 forwards for 64 patches"
    units = "similarity"
    sign = "positive"
    preview_options: ClassVar = {"segments": (3, 3), "mode": "deletion"}

    mode: Option[Mode] = Option("insertion", check_choice, get_args(Mode))
    group_size: Option[int] = Option(1, lambda name, value: check_choice(name, check_integer(name, value), (1, 2, 3)))
    segments: ConvertedOption[SegmentsLike, ResolvedSegments] = ConvertedOption((8, 8), resolve_segments)

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        """Explain one target."""
        return target_part(super().explain(x, JointQuestions([target])), 0)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Choose the patches one after the other."""
        segments, filler = self.segmented(passes.x)
        inserts, sign = (True, 1) if self.mode == "insertion" else (False, -1)
        count, chosen = segments.count, list[int]()
        most = count if self.seconds else 1 + count * (count + 1) // 2  # with a time limit, at least one selection
        if most > MOST_PASSES:
            raise MethodError(f"{count} segments need up to {most} passes, more than {MOST_PASSES}; use fewer segments")

        def gains(groups: Sequence[Sequence[int]], least: int = 1) -> Tensor:
            """Return the scores after each group of patches, in addition to the chosen ones; negative for deletion.

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
        while len(chosen) < count and best[-1] < enough and not (chosen and passes.budget.is_over()):
            left = [number for number in range(count) if number not in chosen]
            alone = gains([[number] for number in left], 1 if chosen else count)
            if len(alone) < len(left):
                break
            group, reached = [left[int(alone.argmax())]], [float(alone.max())]
            size = min(self.group_size, len(left)) if len(chosen) < COMBINED * count else 1
            if size > 1:
                first = alone.topk(min(SHORTLIST, len(left))).indices.sort().values.tolist()
                groups = list(combinations([left[at] for at in first], size))
                orders = list(permutations(groups[int(gains(groups).argmax())]))
                steps = gains([own[: stop + 1] for own in orders for stop in range(size)])
                if len(steps) == size * len(orders):  # else the best patch alone
                    fastest = int(steps.view(-1, size).sum(1).argmax())
                    group, reached = list(orders[fastest]), steps.view(-1, size)[fastest].tolist()
            chosen += group
            best += [max(best[-1], *reached[: stop + 1]) for stop in range(len(reached))]
        values = torch.zeros(count, dtype=torch.float64, device="cpu")
        values[chosen] = best[-1] - torch.tensor(best[:-1], dtype=torch.float64, device="cpu")
        return ImageAttribution(values.to(passes.x)[segments.labels][None], notes=[segments.note])
