"""Listeners between the chunks of passes: they get the share that is done and the result so far, and may end a call."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import saliency
from saliency import METHODS
from saliency.attribution.explanation import BatchAttribution
from saliency.attribution.passes import MultiPassAttribution, Partial, SampledAttribution, listening
from saliency.errors import SaliencyWarning
from saliency.model.call import current_call
from saliency.testing import images, tiny_model, tiny_model_for
from saliency.testing.unchanged import Snapshot, with_user_state

MANY_PASSES = [name for name, cls in METHODS.items() if issubclass(cls, MultiPassAttribution)]
REFINED = [
    *(name for name in MANY_PASSES if issubclass(METHODS[name], SampledAttribution)),
    *("occlusion", "score_cam"),
]


class EndedError(Exception):
    pass


def create(name: str, model: Any = None, **options: Any) -> Any:
    cls = METHODS[name]
    given: dict[str, Any] = {**cls.preview_options, "chunk": 4, "progress": False, **options}
    return cls(tiny_model_for(cls)() if model is None else model, **given)


def heard(name: str) -> tuple[saliency.Explanation, list[float], list[BatchAttribution | None]]:
    shares: list[float] = []
    partials: list[BatchAttribution | None] = []

    def listener(share: float, partial: Partial) -> None:
        shares.append(share)
        partials.append(partial())

    with warnings.catch_warnings(), listening(listener):
        warnings.simplefilter("ignore", SaliencyWarning)
        return create(name).attribute(images(1), 0), shares, partials


@pytest.mark.parametrize("name", MANY_PASSES)
def test_a_listener_changes_nothing_and_hears_the_end(name: str) -> None:
    found, shares, _ = heard(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaliencyWarning)
        alone = create(name).attribute(images(1), 0)
    assert torch.equal(found.values, alone.values)
    assert shares
    assert all(0 <= share <= 1 for share in shares)
    assert found.run_stats[0].stopped != "complete" or shares[-1] == 1


@pytest.mark.parametrize("name", REFINED)
def test_the_result_after_all_passes_is_the_result(name: str) -> None:
    found, _, partials = heard(name)
    last = partials[-1]
    assert last is not None
    torch.testing.assert_close(last.values, found.values)
    assert torch.equal(last.scores, found.scores)


def test_the_result_so_far_is_the_result_of_as_many_passes() -> None:
    _, _, partials = heard("rise")
    fewer = create("rise", passes=8).attribute(images(1), 0)
    so_far = partials[1]
    assert so_far is not None
    assert torch.equal(so_far.values, fewer.values)
    assert so_far.run_stats[0].passes == 8


@pytest.mark.parametrize("name", MANY_PASSES)
@pytest.mark.parametrize("at", [1, 2])
def test_a_listener_that_raises_leaves_everything_as_it_was(name: str, at: int) -> None:
    heard_calls = 0

    def listener(share: float, partial: Partial) -> None:
        nonlocal heard_calls
        heard_calls += 1
        if heard_calls == at:
            raise EndedError

    model = with_user_state(tiny_model_for(METHODS[name])(), training=True)
    method, x = create(name, model), images(1)
    before = Snapshot(model=model, method=method, input=x)
    with warnings.catch_warnings(), listening(listener):
        warnings.simplefilter("ignore", SaliencyWarning)
        try:
            method.attribute(x, 0)
        except EndedError:
            pass
        else:
            assert heard_calls < at
    assert not before.changes()
    assert current_call().listener is None


@pytest.mark.parametrize(
    ("name", "module", "function", "most"),
    [("xrai", "skimage.segmentation", "felzenszwalb", 1), ("vit_cx", "scipy.cluster.hierarchy", "linkage", 0)],
)
def test_segmentations_and_clusters_can_be_ended_before_the_passes(
    name: str, module: str, function: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, calls = pytest.importorskip(module), 0
    run = getattr(library, function)

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return run(*arguments, **options)

    def listener(share: float, partial: Partial) -> None:
        raise EndedError

    monkeypatch.setattr(library, function, counted)
    with listening(listener), pytest.raises(EndedError):
        create(name).attribute(images(1), 0)
    assert calls == most


def test_a_wrapped_method_reports_the_progress_of_the_outer_one() -> None:
    inner = saliency.IntegratedGradients(tiny_model(), steps=4)
    method = saliency.SmoothGrad(inner, passes=8, chunk=2, progress=False)
    shares: list[float] = []
    found: list[bool] = []

    def listener(share: float, partial: Partial) -> None:
        shares.append(share)
        found.append(partial() is not None)

    with listening(listener):
        method.attribute(images(1), 0)
    assert shares == sorted(shares)
    assert len(shares) > 4  # also between the passes of the wrapped method
    assert set(shares) == {0, 0.25, 0.5, 0.75, 1}
    assert found == [share >= 0.5 for share in shares]  # four samples


def test_the_share_grows_with_each_step_of_a_path() -> None:
    _, shares, _ = heard("guided_ig")
    assert shares == [1 / 3, 2 / 3, 1, 1]  # three steps, and the score of the baseline


def test_a_trust_card_can_be_ended() -> None:
    def listener(share: float, partial: Partial) -> None:
        raise EndedError

    method = saliency.VanillaGradient(tiny_model())
    with listening(listener), pytest.raises(EndedError):
        saliency.trust(method, images(1), 0)
