"""Every metric of the registry keeps every promise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from saliency.metrics import METRICS, Outcome, PerturbationMetric, PerturbedImage
from tests.evaluation.metric_checks import metric_checks
from tests.selection import case

# CombinedROAD measures with ROAD, twice.
CASES = [
    case(check, id=f"{name}-{promise}", by_default=name != "combined_road")
    for name in METRICS
    for promise, check in metric_checks(METRICS[name])
]


@pytest.mark.parametrize("check", CASES)
def test_every_metric_keeps_every_promise(check: Callable[[], None]) -> None:
    check()


def test_a_metric_that_reads_the_global_random_state_fails() -> None:
    class Unseeded(PerturbationMetric):
        """Random numbers.

        Values: (N,), of no meaning.

        Source: none, https://example.org.
        """

        def measure_image(self, image: PerturbedImage) -> Outcome:
            return Outcome(torch.rand(len(image.maps), dtype=torch.float64))

    with pytest.raises(AssertionError, match="images measured alone"):
        dict(metric_checks(Unseeded))["images_alone"]()
