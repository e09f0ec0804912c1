"""Volumes, and whether the map of one object lies on it rather than on the object of another class."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import saliency
from benchmarks import testbed
from benchmarks.train_testbed import volume_accuracy
from saliency import METHODS
from saliency.errors import MethodError, NotApplicableError
from saliency.testbed import SOLIDS, Volumes, draw_volumes
from tests.selection import of_each_family

DRAWN = draw_volumes(100, seed=3)
BLOCKS = {"segments": (2, 4, 4), "passes": 96}
QUICK: dict[str, dict[str, Any]] = {
    **{name: {"steps": 8} for name in ("integrated_gradients", "idgi", "guided_ig", "blur_ig")},
    **{name: {"passes": 96} for name in ("rise", "d_rise")},
    "expected_gradients": {"passes": 8},
    "smooth_grad_cam_plus_plus": {"passes": 6},
    "lime": BLOCKS,
    "kernel_shap": BLOCKS,
    "shapley_sampling": BLOCKS | {"passes": 99},
    "feature_ablation": {"segments": (3, 4, 4)},
    "vx_code": {"segments": (2, 3, 3)},
    "occlusion": {"window": 8, "stride": 8},
}
REFUSED = {name for name, cls in METHODS.items() if cls.needs.attention} | {"extremal_perturbation", "xrai"}
SLOW = {"d_rise", "lime", "rise"}
# Within two standard errors on six volumes: benchmarks/results/testbed_volumes.md has more volumes and passes.
UNCLEAR = {
    *("eigen_cam", "vanilla_gradient", "deconvnet", "smooth_grad", "smooth_grad_squared", "var_grad", "deep_shap"),
    *("full_grad", "sobol"),
}


def test_a_seed_fixes_the_volumes_and_leaves_the_global_random_state_alone() -> None:
    state = torch.get_rng_state()
    one, again, other = (draw_volumes(5, seed=seed) for seed in (3, 3, 5))
    for field in Volumes.__slots__:
        assert torch.equal(getattr(one, field), getattr(again, field))
    assert not torch.equal(one.volumes, other.volumes)
    assert torch.equal(torch.get_rng_state(), state)


def test_two_objects_of_different_classes_are_brighter_than_the_noise_and_apart() -> None:
    assert DRAWN.volumes.shape == (100, 1, 24, 32, 32)
    assert (DRAWN.shapes[:, 0] != DRAWN.shapes[:, 1]).all()
    assert torch.equal(DRAWN.labels, DRAWN.shapes[:, 0])
    assert not DRAWN.masks.all(1).any()
    sizes = DRAWN.masks.sum((2, 3, 4))
    assert sizes.min() > 200
    assert sizes.max() < 300
    objects = (DRAWN.volumes * DRAWN.masks).sum((2, 3, 4)) / sizes
    assert objects.min() > 0.4
    assert abs(float(DRAWN.volumes[~DRAWN.masks.any(1, keepdim=True)].mean())) < 0.02


def test_solids_are_whole_and_differ_as_their_names_say() -> None:
    extents = [DRAWN.masks.any(axes).sum(2) for axes in ((3, 4), (2, 4), (2, 3))]  # along each axis, (N, 2)
    for number, sides in enumerate(((8, 8, 8), (6, 6, 6), (8, 8, 8), (4, 11, 11))):
        for along, side in zip(extents, sides, strict=True):
            assert (along[DRAWN.shapes == number] - side).abs().max() <= 1, SOLIDS[number]


def test_a_count_of_no_volumes_is_an_error() -> None:
    with pytest.raises(MethodError, match="count=0 is not a whole number of at least 1"):
        draw_volumes(0)


def test_the_network_names_both_objects_of_volumes_on_which_it_was_not_trained() -> None:
    model: Any = saliency.load("shapes_volume")
    assert model.categories == SOLIDS
    assert model.preprocess is None
    assert volume_accuracy("shapes_volume", volumes=64) >= 0.97


def margins(method: str) -> torch.Tensor:
    """The share of each map on the object of its class, minus the share on the other one, for six volumes."""
    return testbed.object_margins(method, "shapes_volume", 6, **QUICK.get(method, {}))


@pytest.mark.parametrize(
    "method",
    [
        *of_each_family(METHODS.keys() - REFUSED - UNCLEAR - SLOW),
        *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(SLOW)),
    ],
)
def test_the_map_of_a_class_lies_on_its_object_rather_than_on_the_other(method: str) -> None:
    found = margins(method)
    assert found.mean() > 2 * testbed.standard_error(found)


def test_a_map_that_does_not_depend_on_the_class_lies_on_neither_object() -> None:
    found = margins("eigen_cam")
    assert abs(float(found.mean())) < 2 * testbed.standard_error(found)


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_other_methods_say_why_they_do_not_apply(method: str) -> None:
    with pytest.raises(NotApplicableError, match=r"has no attention|two spatial axes"):
        margins(method)
