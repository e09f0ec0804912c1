"""Quantus as an oracle where it is right, and its differences, each with its cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from saliency import Explanation
from saliency.evaluation.metrics.faithfulness import Deletion, FaithfulnessCorrelation, Infidelity
from saliency.evaluation.metrics.map_metrics import PointingGame
from saliency.evaluation.metrics.road import ROAD
from saliency.metrics import Measurement, Metric, measure
from tests.evaluation.maps import explanation_of

pytestmark = pytest.mark.filterwarnings("ignore")


def quantus() -> Any:
    return pytest.importorskip("quantus")  # its import takes more than a second


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


MAPS = random(4, 8, 8, seed=0)
IMAGES = random(4, 1, 8, 8, seed=1)
MASKS = torch.zeros(4, 8, 8, dtype=torch.bool)
MASKS[:, 2:6, 3:7] = True


def network(channels: int) -> nn.Module:
    layers = (nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            parameter.data = random(*parameter.shape, seed=number) / 3
    return nn.Sequential(*layers).eval()


GREY = network(1)


def plain(maps: Tensor) -> Explanation:
    """An explanation whose values are contributions to the score."""
    return replace(explanation_of(maps), method="grad_cam")


def ours(metric: str | Metric, maps: Tensor = MAPS, **context: Any) -> Measurement:
    options: dict[str, Any] = {"model": GREY, "inputs": IMAGES, "masks": MASKS, "controls": False}
    return measure(metric, plain(maps), **options | context)[0]


def theirs(
    name: str, maps: Tensor = MAPS, x: Tensor = IMAGES, model: nn.Module = GREY, masks: Tensor = MASKS, **options: Any
) -> NDArray[Any]:
    metric = getattr(quantus(), name)(disable_warnings=True, **{"normalise": False} | options)
    arguments = (x.numpy(), np.zeros(len(x), int), maps[:, None].numpy())
    values = metric(model, *arguments, s_batch=masks[:, None].numpy(), softmax=True, device="cpu")
    return np.asarray(values)


def curve(measurement: Measurement) -> Tensor:
    assert measurement.curve is not None
    return measurement.curve


# Equal.


@pytest.mark.parametrize(
    ("name", "metric", "options"),
    [
        ("PointingGame", PointingGame(tolerance=0), {}),
        ("RelevanceMassAccuracy", "energy_pointing_game", {}),
        ("RelevanceRankAccuracy", "relevance_rank", {}),
        ("AUC", "roc_auc", {}),
        ("Sparseness", "gini", {}),
        ("Complexity", "entropy", {}),
    ],
)
def test_localisation_and_complexity_of_maps_without_negative_values(
    name: str, metric: Any, options: dict[str, Any]
) -> None:
    values = theirs(name, MAPS.abs(), **options).astype(float)
    np.testing.assert_allclose(ours(metric, MAPS.abs()).values, values, rtol=1e-5)


def test_curves_of_grey_images() -> None:
    flipped = theirs("PixelFlipping", features_in_step=4, perturb_baseline=0.0)
    np.testing.assert_allclose(curve(ours(Deletion(steps=16)))[:, 1:], flipped, atol=1e-6)


def test_faithfulness_correlation_of_grey_images_within_five_errors() -> None:
    options: dict[str, Any] = {"subset_size": 16, "nr_runs": 500, "return_aggregate": False}
    values = torch.from_numpy(theirs("FaithfulnessCorrelation", perturb_baseline=0.0, **options))
    own = ours(FaithfulnessCorrelation(segments=(8, 8), share=0.25, passes=500))
    assert own.error is not None
    assert ((own.values - values).abs() < 5 * 2**0.5 * own.error).all()


# Different.


def test_pixel_flipping_there_takes_each_channel_as_a_feature() -> None:
    x = IMAGES.expand(-1, 3, -1, -1).contiguous()
    assert theirs("PixelFlipping", x=x, model=network(3), features_in_step=4, perturb_baseline=0.0).shape == (4, 3 * 16)
    assert curve(ours(Deletion(steps=16), model=network(3), inputs=x)).shape == (4, 1 + 16)


def test_the_area_there_is_in_steps_without_the_score_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "trapz", np.trapezoid, raising=False)  # NumPy 2.4 has removed it
    options: dict[str, Any] = {"features_in_step": 4, "perturb_baseline": 0.0, "return_auc_per_sample": True}
    own = ours(Deletion(steps=16))
    areas = torch.from_numpy(theirs("PixelFlipping", **options))
    torch.testing.assert_close(areas.double(), torch.trapezoid(curve(own)[:, 1:]), atol=1e-5, rtol=0)
    torch.testing.assert_close(own.values, torch.trapezoid(curve(own), dx=1 / 16))


def test_road_there_takes_ranks_of_channels_as_places_of_pixels() -> None:
    x, model = IMAGES.expand(-1, 3, -1, -1).contiguous(), network(3)
    with pytest.raises(IndexError):
        theirs("ROAD", x=x, model=model, percentages=[50])
    assert ours(ROAD(shares=(0.5,)), model=model, inputs=x).values.isfinite().all()


def test_road_there_is_accuracy_over_the_batch() -> None:
    metric = quantus().ROAD(percentages=[50], disable_warnings=True, normalise=False)
    shares = metric(GREY, IMAGES.numpy(), np.zeros(4, int), MAPS[:, None].numpy(), softmax=True, device="cpu")
    assert list(shares) == [50]
    assert float(shares[50]) * 4 in range(5)
    assert len(set(ours(ROAD(shares=(0.5,))).values.tolist())) == 4


def test_irof_there_has_a_mask_of_one_channel() -> None:
    x, model = IMAGES.expand(-1, 3, -1, -1).contiguous(), network(3)
    with pytest.raises(AssertionError, match="shape"):
        theirs("IROF", x=x, model=model)


def test_infidelity_there_keeps_earlier_squares_hidden() -> None:
    seen: list[list[int]] = []
    model = network(1)
    model.register_forward_pre_hook(lambda net, args: seen.append((args[0] == 0).flatten(1).sum(1).tolist()))
    options: dict[str, Any] = {"perturb_patch_sizes": [4], "n_perturb_samples": 1, "perturb_baseline": 0.0}
    theirs("Infidelity", MAPS[:1], IMAGES[:1], model, MASKS[:1], **options)
    assert [count for counts in seen for count in counts if count] == [16, 32, 48, 64]
    seen.clear()
    ours(Infidelity(side=0.5, passes=4), MAPS[:1], model=model, inputs=IMAGES[:1], masks=MASKS[:1])
    assert [count for counts in seen for count in counts if count] == [16] * 4


def test_sensitivity_n_there_is_one_number_for_all_images() -> None:
    assert theirs("SensitivityN", features_in_step=8, perturb_baseline=0.0).shape == (1,)
    assert ours("sensitivity_n").values.shape == (4,)


def test_the_pointing_game_there_hits_an_empty_mask_and_any_of_equal_maxima() -> None:
    none = torch.zeros_like(MASKS)
    assert theirs("PointingGame", MAPS.abs(), masks=none).all()
    assert ours("pointing_game", masks=none).values.isnan().all()
    maps = torch.zeros_like(MAPS)
    maps[:, 0, 0] = maps[:, 3, 3] = 1
    assert theirs("PointingGame", maps).all()
    assert ours(PointingGame(tolerance=0), maps).values.tolist() == [0.5] * 4


def test_mass_there_sums_negative_relevance_or_magnitudes() -> None:
    assert theirs("RelevanceMassAccuracy").max() > 1
    inside = (MAPS.abs() * MASKS).sum((1, 2)) / MAPS.abs().sum((1, 2))
    np.testing.assert_allclose(theirs("AttributionLocalisation"), inside, rtol=1e-5)
    positive = MAPS.clamp(min=0)
    expected = (positive * MASKS).sum((1, 2)) / positive.sum((1, 2))
    np.testing.assert_allclose(ours("energy_pointing_game").values, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["PointingGame", "RelevanceMassAccuracy", "Sparseness", "Complexity"])
def test_constant_maps_raise_there(name: str) -> None:
    with pytest.raises(AssertionError):
        theirs(name, torch.ones_like(MAPS))
