"""A ledger accounts for the whole score, in numbers and in bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from saliency import Explanation, RenderError, draw_ledger
from saliency.hooks.rectifiers import Coverage
from saliency.inspection import ledger_table
from saliency.inspection.ledger import NEGATIVE, POSITIVE
from saliency.render.sheet import INK
from tests.drawing import explained, pixels_of

NAMES = ("input", "biases", "softmax")


def with_ledger(
    shares: Sequence[float] = (6.0, -3.0, 1.0), residual: float = 0.5, *, method: str = "made_up", name: str = "cat"
) -> Explanation:
    ledger, missing = torch.tensor([shares]), torch.tensor([residual])
    explanation = explained(torch.zeros(1, 2, 2), None, method=method, name=name)
    scores = ledger.sum(1) + missing
    return replace(explanation, ledger=ledger, ledger_names=NAMES, residual=missing, scores=scores)


def batch_of(one: Explanation, other: Explanation) -> Explanation:
    names = ("values", "scores", "probabilities", "ledger", "residual")
    both: dict[str, Any] = {name: torch.cat([getattr(one, name), getattr(other, name)]) for name in names}
    both |= {name: getattr(one, name) + getattr(other, name) for name in ("target", "target_names", "frames")}
    return replace(one, **both)


def test_a_table_ends_with_what_is_missing_and_the_score_that_all_sum_to() -> None:
    table = ledger_table(with_ledger())
    assert [row.name for row in table] == [*NAMES, "residual", "score"]
    assert [row.share for row in table] == [6.0, -3.0, 1.0, 0.5, 4.5]
    assert sum(row.share for row in table[:-1]) == table["score"].share
    assert sum(row.percent for row in table[:-1]) == pytest.approx(100)
    assert table["biases"].percent == pytest.approx(-200 / 3)
    lines = str(table).splitlines()
    assert lines[0] == "Ledger of cat by made_up"
    assert lines[2].split() == ["entry", "share", "percent"]
    assert lines[5].split() == ["biases", "-3.00", "-66.7", "%"]


def test_several_images_and_methods_have_rows_of_their_own() -> None:
    pair = batch_of(with_ledger(), with_ledger((1.0, 1.0, 2.0), 0.0, name="dog"))
    table = ledger_table([pair, with_ledger(method="grad_cam")])
    scores = [row for row in table if row.name == "score"]
    assert [(row.image, row.target, row.method, row.share) for row in scores] == [
        (0, "cat", "made_up", 4.5),
        (1, "dog", "made_up", 4.0),
        (2, "cat", "GradCAM", 4.5),
    ]
    assert str(table).splitlines()[2].split() == ["image", "target", "method", "entry", "share", "percent"]
    assert table.to_html().count("<tr>") == 1 + len(table)
    pytest.importorskip("pandas")
    frame = table.dataframe().pivot(index="name", columns="image", values="share")
    assert frame.loc["input"].tolist() == [6.0, 1.0, 6.0]


def test_the_notes_are_what_each_method_treated() -> None:
    coverage = Coverage(treated={"conv by z+": 53, "linear by epsilon": 1})
    images = [replace(with_ledger(), coverage=coverage)] * 2
    assert ledger_table([*images, with_ledger()]).notes == ("made_up: 53 conv by z+, 1 linear by epsilon",)


def test_a_score_of_zero_has_no_percentages() -> None:
    table = ledger_table(with_ledger((1.0, -1.0, 0.0), 0.0))
    assert all(math.isnan(row.percent) for row in table)
    assert draw_ledger(with_ledger((0.0, 0.0, 0.0), 0.0)).width == 900


def test_an_explanation_without_a_ledger_is_refused_with_its_method() -> None:
    for call in (ledger_table, draw_ledger):
        with pytest.raises(RenderError, match=r"by grad_cam has no ledger"):
            call([with_ledger(), explained(torch.zeros(1, 2, 2), None, method="grad_cam")])


def bars(explanations: Explanation | list[Explanation]) -> list[tuple[str, int, int]]:
    """The colour, left and right edge of every bar of a drawing."""
    pixels = pixels_of(draw_ledger(explanations))
    found = []
    for at, row in enumerate(pixels):
        for color in (POSITIVE, NEGATIVE, INK):
            places = np.flatnonzero((row == rgb(color)).all(1) & (pixels[at - 1] == rgb(color)).all(1))
            if len(places) > 20 and np.ptp(places) == len(places) - 1:
                found.append((color, int(places[0]), int(places[-1])))
    return [bar for at, bar in enumerate(found) if not at or bar != found[at - 1]]


def rgb(color: str) -> NDArray[np.uint8]:
    return np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)], dtype=np.uint8)


def test_each_bar_begins_where_the_previous_one_ends_and_the_score_at_zero() -> None:
    drawn = bars(with_ledger((6.0, -3.0, 1.0), 0.5))
    assert [color for color, _, _ in drawn] == [POSITIVE, NEGATIVE, POSITIVE, POSITIVE, INK]
    gain, biases, softmax, residual, score = [(left, right) for _, left, right in drawn]
    unit = (gain[1] - gain[0]) / 6
    assert biases == pytest.approx((gain[1] - 3 * unit, gain[1]), abs=1)
    assert softmax == pytest.approx((biases[0], biases[0] + unit), abs=1)
    assert residual == pytest.approx((softmax[1], softmax[1] + unit / 2), abs=1)
    assert score == pytest.approx((gain[0], residual[1]), abs=1)


def test_a_negative_score_goes_to_the_left_of_zero() -> None:
    loss, gain, *_, score = bars(with_ledger((-6.0, 2.0, -2.0), -1.0))
    assert (loss[0], gain[0], score[0]) == (NEGATIVE, POSITIVE, INK)
    assert loss[2] == score[2] == max(right for _, _, right in (loss, gain, score))
    assert score[2] - score[1] == pytest.approx(7 / 6 * (loss[2] - loss[1]), abs=2)


def test_several_images_are_drawn_on_one_scale() -> None:
    drawn = bars([with_ledger((4.0, 4.0, 4.0), 4.0), with_ledger((2.0, 2.0, 2.0), 2.0)])
    lengths = [right - left for _, left, right in drawn]
    assert lengths[:5] == pytest.approx([2 * length for length in lengths[5:]], abs=2)


def test_a_long_name_of_a_target_fits() -> None:
    short, long = (draw_ledger(with_ledger(name=name)) for name in ("cat", "a name " * 99))
    assert short.size == long.size
    assert (pixels_of(long)[:, -20:] == 255).all()
