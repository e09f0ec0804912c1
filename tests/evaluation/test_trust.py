"""The trust card: two exact tests, numbers next to those of other maps, the same for the same seed, and its forms."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.text import Text
from torch import Tensor, nn

import saliency
from saliency import InputXGradient, VanillaGradient
from saliency.attribution.base import Attribution
from saliency.attribution.explanation import BatchAttribution
from saliency.attribution.questions import Questions
from saliency.errors import LayerError, MethodError
from saliency.evaluation.trust import TITLES, UNCLEAR, WORSE, TrustCard, trust
from saliency.io.atomic_write import is_drawing
from saliency.testing import Snapshot, images, tiny_model
from tests.evaluation.colours import ColourClasses, coloured


class Constant(Attribution):
    """A method that ignores the model."""

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        return BatchAttribution(torch.ones_like(x), target(self.model(x)))


class OfTheImage(Attribution):
    """A method whose map is the image."""

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        return BatchAttribution(x.clone(), target(self.model(x)))


@pytest.fixture(scope="module")
def card() -> TrustCard:
    return trust(InputXGradient(ColourClasses()), coloured(0), 0, others=coloured(1, 2, 3))


def test_the_map_of_a_class_lies_on_its_image_and_of_24_assignments_the_right_one_is_best(card: TrustCard) -> None:
    row = card["class"]
    assert row.p == pytest.approx(1 / 24)
    assert row.is_clear
    assert row.size == pytest.approx(1)
    assert row.verdict == "100 % of the map lies on the image of its class (25 % by chance)"


def test_the_map_of_learned_weights_is_better_than_those_of_all_permuted_networks(card: TrustCard) -> None:
    row = card["weights"]
    assert row.p == pytest.approx(1 / 20)
    assert (row.size, row.error) == (1, 0)
    assert row.verdict == "better than the maps of 19 of 19 untrained networks"
    assert len(row.strip) == 20
    assert max(row.strip[1:]) < row.strip[0]


@pytest.mark.parametrize("cls", [Constant, OfTheImage])
def test_maps_that_ignore_the_model_are_tied_in_both_tests(cls: type[Attribution]) -> None:
    card = trust(cls(ColourClasses()), coloured(0), 0, others=coloured(1, 2, 3))
    assert [row.p for row in card.tests] == [1, 1]
    assert all(row.verdict.startswith(UNCLEAR) for row in card.tests)
    assert len(card["weights"].strip) == 1 + (19 if cls is Constant else 3)  # no further map after three ties
    assert card["mprt"].value == 0


def test_more_draws_have_a_smaller_level(card: TrustCard) -> None:
    more = trust(InputXGradient(ColourClasses()), coloured(0), 0, others=coloured(1, 2, 3), draws=29)
    assert more["weights"].p == pytest.approx(1 / 30)


def test_without_images_of_other_classes_the_row_says_what_to_pass() -> None:
    for others, found in ((None, ""), (coloured(1, 2, 2, 0), ", and the model finds 2")):
        row = trust(InputXGradient(ColourClasses()), coloured(0), 0, others=others, seconds=1e-6)["class"]
        assert row.verdict == f"not measured: the test needs images of three other classes{found}: pass others=[...]"
        assert not row.is_clear


class Signed(Attribution):
    """Input x gradient, or its negative, which depends on the model and marks what matters least."""

    sign_of_values = 1

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        with torch.enable_grad():
            leaf = x.clone().requires_grad_()
            scores = target(self.model(leaf))
        (gradient,) = torch.autograd.grad(scores.sum(), leaf)
        return BatchAttribution(self.sign_of_values * x * gradient, scores.detach())


class Negated(Signed):
    sign_of_values = -1


def test_a_map_with_the_wrong_sign_is_worse_than_those_of_untrained_networks() -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 256, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.rand(parameter.shape, generator=generator) - 0.1)
    x = torch.rand(1, 3, 16, 16, generator=generator) - 0.5
    right, wrong = (trust(method(model), x, 1)["weights"] for method in (Signed, Negated))
    assert right.is_clear
    assert (wrong.verdict, wrong.is_worse, wrong.p) == (WORSE, True, 1)


def test_numbers_without_a_test_are_compared_by_name(card: TrustCard) -> None:
    assert list(card["deletion"].controls) == ["centre", "edges", "smoothed edges", "colour contrast"]
    worse = trust(OfTheImage(ColourClasses()), coloured(0), 1)["deletion"]
    assert worse.verdict.startswith("no better than a spot at the centre, ")
    assert not worse.is_clear
    assert worse.p is None


def test_maps_that_are_the_same_do_not_agree() -> None:
    model = ColourClasses()
    names = [row.name for row in trust(OfTheImage(model), coloured(0), 0)]
    assert "rank_correlation" in names
    assert "rank_correlation" not in [row.name for row in trust(InputXGradient(model), coloured(0), 0)]


def test_the_seed_determines_the_card() -> None:
    first, again, other = (trust(VanillaGradient(tiny_model()), images(1), 1, seed=seed) for seed in (0, 0, 1))
    assert [row.value for row in again] == pytest.approx([row.value for row in first], rel=1e-4, abs=1e-6, nan_ok=True)
    assert other["infidelity"].value != pytest.approx(first["infidelity"].value, rel=1e-4)


def test_after_the_time_limit_the_tests_remain_and_the_numbers_are_left_out(card: TrustCard) -> None:
    short = trust(InputXGradient(ColourClasses()), coloured(0), 0, others=coloured(1, 2, 3), seconds=1e-6)
    assert [row.name for row in short] == ["class", "weights"]
    assert short["weights"].p is not None
    assert 1 / 20 < short["weights"].p < 1
    assert short["weights"].verdict.endswith("; seconds=1e-06 allows no more than 1 of 19")
    with pytest.raises(LayerError, match='"mprt" was not measured: it does not fit into seconds=1e-06'):
        short["mprt"]
    with pytest.raises(LayerError, match='no row "random_bxo" in this table of 2'):
        short["random_bxo"]


def test_the_tests_of_a_slow_method_use_fewer_passes_and_the_card_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saliency.evaluation.trust.SLOW", 0)
    card = trust(saliency.RISE(tiny_model(), passes=400, grid=3), images(1), 1, seconds=1e-6)
    assert "the method is slow, so both tests are of its map with passes=100" in card.notes
    assert card.explanation.settings["passes"] == 400


@pytest.mark.parametrize("size", [16, 64])
def test_the_windows_of_a_slow_occlusion_fit_images_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saliency.evaluation.trust.SLOW", 0)
    x = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 3))
    card = trust(saliency.Occlusion(model, window=2, stride=1), x, 1, draws=1, seconds=1e-6)
    window, stride = 2 * size // 7, size // 7
    assert f"the method is slow, so both tests are of its map with window={window}, stride={stride}" in card.notes
    assert min(card["weights"].strip) < max(card["weights"].strip)  # a constant map is tied with itself


def test_a_model_without_weights_has_no_test_of_the_weights() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean((2, 3))

    row = trust(VanillaGradient(Plain()), images(1), 1)["weights"]
    problem = "Plain has no parameters or buffers, so nothing can be randomised"
    assert row.verdict == f"not measured: {problem}; explain the model before it was quantised or exported"


def test_a_model_without_gradients_has_a_card_of_a_method_that_needs_none() -> None:
    class Detached(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach().mean((2, 3))

    names = [row.name for row in trust(saliency.Occlusion(Detached(), window=4, stride=4), images(1), 1)]
    assert "deletion" in names
    assert "rank_correlation" not in names


def test_the_card_touches_nothing() -> None:
    method, x = VanillaGradient(tiny_model().train()), images(1)
    before = Snapshot(model=method.model, method=method, x=x)
    trust(method, x, 1)
    assert not before.changes()


def test_the_card_prints_and_saves(card: TrustCard, tmp_path: Path) -> None:
    assert "input_x_gradient" in str(card)
    assert "deletion" in str(card)
    assert card.summary == (
        "depends on the class: 100 % of the map lies on the image of its class (25 % by chance); marks what the model "
        "learned to use: better than the maps of 19 of 19 untrained networks"
    )
    saved: Any = json.loads(card.save(tmp_path / "card.json").read_text("utf-8"))
    assert [row["name"] for row in saved["properties"]] == [row.name for row in card]
    assert [row["name"] for row in saved["properties"] if "p" in row] == ["class", "weights"]
    drawn = card.save(tmp_path / "cat.rise.trust.png")
    assert drawn.read_bytes()[1:4] == b"PNG"
    assert is_drawing(str(drawn))
    with pytest.raises(MethodError, match=r"'.pdf' is not one of '.json', '.html', '.png'"):
        card.save(tmp_path / "card.pdf")


def test_the_page_has_the_figure_and_the_table_in_one_file(card: TrustCard, tmp_path: Path) -> None:
    page = card.save(tmp_path / "card.html").read_text("utf-8")
    assert page.count("<tr>") == 1 + len(card)
    assert re.findall(r'(?:src|href)="(.{0,22})', page) == ["data:image/png;base64,"]


def test_the_card_draws_each_rank_and_comparison_on_an_axis() -> None:
    model = saliency.load("shapes_cnn")
    photo = saliency.testbed.draw_scenes(1, seed=3).images[0].permute(1, 2, 0).numpy()
    card = trust(VanillaGradient(model), photo)
    assert [row.name for row in card] == list(TITLES)
    drawing = saliency.figure(card)
    (title,) = [each for each in drawing.findobj(Text) if each.get_text() == card.title]
    assert not title.get_parse_math()  # it names the class
    assert len(drawing.axes) == 1 + 6
    assert drawing.axes[1].get_title(loc="left")


def test_the_axis_of_a_fraction_has_all_fractions(card: TrustCard) -> None:
    assert saliency.figure(card).axes[1].get_xlim() == (-0.02, 1.02)


def test_long_verdicts_are_drawn_within_the_figure(card: TrustCard) -> None:
    verdict = (
        "cannot be told from chance: better than the maps of 17 of 19 untrained networks, and 2 others have no map"
    )
    long = copy.copy(card)
    long.rows = tuple(replace(row, verdict=verdict) for row in card)
    drawing = saliency.figure(long)
    drawing.canvas.draw()
    titles = [text for text in drawing.findobj(Text) if text.get_text().replace("\n", " ").endswith(verdict)]
    assert len(titles) == len(drawing.axes) - 1
    assert max(text.get_window_extent().x1 for text in titles) <= drawing.bbox.x1


def test_the_name_of_a_method_is_refused() -> None:
    with pytest.raises(MethodError, match=r"expected a method, such as GradCAM\(model\), got 'grad_cam'"):
        trust("grad_cam", images(1))  # type: ignore[arg-type]


def test_several_images_are_refused() -> None:
    with pytest.raises(MethodError, match="of one image, got 2"):
        trust(VanillaGradient(tiny_model()), images(2), 1)


@pytest.mark.parametrize("cls", [saliency.RISE, saliency.Occlusion])
def test_an_embedding_without_a_label_has_a_card_by_the_score_that_is_deleted(cls: Any) -> None:
    model, x = tiny_model(), images(1)
    options = {"passes": 12, "grid": 3} if cls is saliency.RISE else {"window": 4, "stride": 4}
    card = trust(cls(model, **options), x, saliency.similarity())
    assert {row.name for row in card} >= {"weights", "mprt", "deletion", "insertion"}
    assert "rank_correlation" not in [row.name for row in card]
    assert card["class"].verdict.startswith("not measured: the test needs three other boxes, regions, joints or words")
    assert card.measurements["deletion"].curve is not None
    assert float(card.measurements["deletion"].curve[0, 0]) == pytest.approx(1)  # the cosine of the image itself
