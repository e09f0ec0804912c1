"""The checks find common mistakes of authors of methods, with one message that names the cure."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import saliency
from saliency.testing import check_method, checks

pytestmark = pytest.mark.usefixtures("_registry_restored")


def test_inputs_drawn_from_a_generator_that_moves_are_found_without_a_lack_of_memory() -> None:
    class MovingGenerator(saliency.SampledAttribution):
        """The mean gradient over copies with a random brightness, drawn one after the other."""

        name = "moving_generator"
        quick_options: ClassVar = {"passes": 4}

        def explain_image(self, passes: Any, score: Tensor) -> Any:
            estimate, source = saliency.Estimate(), saliency.generator(self.seed, 0)
            x: Tensor = passes.x

            def make(start: int, stop: int) -> Tensor:
                brightness: Tensor = torch.rand(stop - start, 1, 1, 1, generator=source)
                return brightness.to(x) + x

            for done in passes.gradients(make, self.most_passes):
                estimate.add(done.gradients)
            return saliency.from_estimate(estimate, x)

    with pytest.raises(AssertionError, match="must return the same inputs for the same pass numbers"):
        dict(checks(MovingGenerator))["chunks_do_not_show"]()


def test_more_backward_passes_than_declared_are_named() -> None:
    class TwoBackwards(saliency.TracedAttribution):
        """The gradient, computed twice."""

        name = "two_backwards"
        backwards = 1

        def explain_gradients(self, grads: Any, layers: tuple[str, ...]) -> Any:
            grads.rewritten_gradient([], None)
            return saliency.BatchAttribution(grads.input_gradient(), grads.scores)

    with pytest.raises(AssertionError, match=r"result: RuntimeError: more backward passes than .*`backwards`"):
        check_method(TwoBackwards)
