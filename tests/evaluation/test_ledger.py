"""A ledger accounts for the whole score, in numbers and in bars."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from saliency import Explanation, figure, ledger_table
from saliency.attribution.explanation import joined
from saliency.errors import RenderError
from saliency.hooks.rectifiers import Coverage
from saliency.render.measurements import NEGATIVE, POSITIVE, SCORE
from tests.drawing import explained

NAMES = ("input", "biases", "softmax")


def with_ledger(
    shares: Sequence[float] = (6.0, -3.0, 1.0), residual: float = 0.5, *, method: str = "made_up", name: str = "cat"
) -> Explanation:
    ledger, missing = torch.tensor([shares]), torch.tensor([residual])
    explanation = explained(torch.zeros(1, 2, 2), None, method=method, name=name)
    scores = ledger.sum(1) + missing
    return replace(explanation, scores=scores).with_evidence(ledger=ledger, ledger_names=NAMES, residual=missing)


def batch_of(one: Explanation, other: Explanation) -> Explanation:
    return joined([one, other])


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
    coverage = Coverage(handled={"conv by z+": 53, "linear by epsilon": 1})
    images = [with_ledger().with_evidence(coverage=coverage)] * 2
    assert ledger_table([*images, with_ledger()]).notes == ("made_up: 53 conv by z+, 1 linear by epsilon",)


def test_a_score_of_zero_has_no_percentages() -> None:
    table = ledger_table(with_ledger((1.0, -1.0, 0.0), 0.0))
    assert all(math.isnan(row.percent) for row in table)
    assert [(left, right) for _, left, right in bars(with_ledger((0.0, 0.0, 0.0), 0.0))] == [(0.0, 0.0)] * 5


def test_an_explanation_without_a_ledger_is_refused_with_its_method() -> None:
    with pytest.raises(RenderError, match=r"by grad_cam has no ledger"):
        ledger_table([with_ledger(), explained(torch.zeros(1, 2, 2), None, method="grad_cam")])


def bars(explanations: Explanation | list[Explanation]) -> list[tuple[str, float, float]]:
    """The colour, start and end of every bar of a drawing, in score units."""
    drawing = figure(ledger_table(explanations))
    drawing.savefig(io.BytesIO())  # draws without a warning
    assert len({axes.get_xlim() for axes in drawing.axes}) == 1
    return [
        (to_hex(bar.get_facecolor()), bar.get_x(), bar.get_x() + bar.get_width())
        for axes in drawing.axes
        for bar in axes.patches
        if isinstance(bar, Rectangle)
    ]


def test_each_bar_begins_where_the_previous_one_ends_and_the_score_at_zero() -> None:
    drawn = bars(with_ledger((6.0, -3.0, 1.0), 0.5))
    assert drawn == [
        (POSITIVE, 0.0, 6.0),
        (NEGATIVE, 6.0, 3.0),
        (POSITIVE, 3.0, 4.0),
        (POSITIVE, 4.0, 4.5),
        (SCORE, 0.0, 4.5),
    ]


def test_a_negative_score_goes_to_the_left_of_zero() -> None:
    loss, *_, score = bars(with_ledger((-6.0, 2.0, -2.0), -1.0))
    assert (loss, score) == ((NEGATIVE, 0.0, -6.0), (SCORE, 0.0, -7.0))


def test_rows_are_labelled_with_names_shares_and_percentages() -> None:
    (axes,) = figure(ledger_table(with_ledger())).axes
    labels = [label.get_text().split() for label in axes.get_yticklabels()]
    assert labels[1] == ["biases", "-3.00", "-66.7", "%"]
    assert labels[-1] == ["score", "4.50", "100.0", "%"]
    assert axes.yaxis_inverted()


def test_several_images_are_drawn_on_one_scale_below_each_other() -> None:
    several = [with_ledger((4.0, 4.0, 4.0), 4.0), with_ledger((2.0, 2.0, 2.0), 2.0, name="dog")]
    assert [round(right - left, 6) for _, left, right in bars(several)] == [4, 4, 4, 4, 16, 2, 2, 2, 2, 8]
    assert [axes.get_title(loc="left") for axes in figure(ledger_table(several)).axes] == [
        "made_up: cat",
        "made_up: dog",
    ]


@pytest.mark.parametrize("name", ["a name " * 99, "$5 or $6", "Ελλάδα", "ℊ"])  # the last one is not in DejaVu Sans
def test_any_name_of_a_target_fits(name: str) -> None:
    drawing = figure(ledger_table(with_ledger(name=name)))
    drawing.savefig(io.BytesIO())  # draws without a warning
    title = drawing.axes[0].get_title(loc="left")
    assert len(title) <= 80
    assert title.startswith(f"made_up: {name[:20]}")
