"""The trust card: verdicts only against all controls, the same for the same seed, and its forms."""

from __future__ import annotations

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
from saliency.errors import MethodError
from saliency.evaluation.metrics.map_metrics import RankCorrelation
from saliency.evaluation.trust import GROUPS, UNCLEAR, WORSE, TrustCard, property_of, trust
from saliency.io.atomic_write import is_drawing
from saliency.metrics import Control
from saliency.testing import Snapshot, images, tiny_model


class Constant(Attribution):
    """A method that ignores the model."""

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        return BatchAttribution(torch.ones_like(x), target(self.model(x)))


@pytest.fixture(scope="module")
def card() -> TrustCard:
    return trust(VanillaGradient(tiny_model()), images(1), 1)


def test_a_verdict_needs_to_beat_all_draws_of_all_controls(card: TrustCard) -> None:
    assert any(row.is_clear for row in card)
    for row in card:
        ends = [end for ends in row.control_ranges.values() for end in ends]
        above, below = row.value > max(ends), row.value < min(ends)
        assert (row.is_clear, row.is_worse) == ((above, below) if row.higher_is_better else (below, above))


def test_a_constant_map_gets_no_verdict() -> None:
    assert [row.verdict for row in trust(Constant(tiny_model()), images(1), 1)] == [UNCLEAR] * 8


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


def test_a_map_with_the_wrong_sign_depends_on_the_model_and_is_worse_than_the_controls() -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 256, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.rand(parameter.shape, generator=generator) - 0.1)
    x = torch.rand(1, 3, 16, 16, generator=generator) - 0.5
    right, wrong = (trust(method(model), x, 1) for method in (Signed, Negated))
    order = ("deletion", "insertion", "infidelity")
    assert all(right[name].is_clear for name in order)
    assert all(wrong[name].is_worse and wrong[name].verdict == WORSE for name in order[:2])
    assert wrong["mprt"].is_clear
    assert wrong["mprt"].group == "depends on the model"
    assert "; worse than all controls: needed for the score (deletion), enough" in wrong.summary


def test_the_seed_determines_the_card(card: TrustCard) -> None:
    again = trust(VanillaGradient(tiny_model()), images(1), 1)
    assert [row.value for row in again] == pytest.approx([row.value for row in card], rel=1e-4, abs=1e-6)
    other = trust(VanillaGradient(tiny_model()), images(1), 1, seed=1)
    assert other["infidelity"].value != pytest.approx(card["infidelity"].value, rel=1e-4)


def test_a_short_time_draws_fewer_samples(card: TrustCard) -> None:
    short = trust(VanillaGradient(tiny_model()), images(1), 1, seconds=1e-6)
    assert len(short) < len(card)
    assert "not measured: depends on the weights (MPRT)" in str(short)
    assert "; not measured: depends on the weights (MPRT), " in short.summary
    assert "not measured" not in card.summary
    for name in ("mprt", "random_logit", "noise_margin"):
        with pytest.raises(
            saliency.errors.LayerError, match=f'"{name}" was not measured.* fit into seconds=1e-06; leave it out'
        ):
            short[name]
    with pytest.raises(saliency.errors.LayerError, match='no row "random_bxo" in this table of 5'):
        short["random_bxo"]
    few, usual = (sum(each.passes for each in one.measurements.values()) for one in (short, card))
    assert few < 0.6 * usual


def test_the_card_touches_nothing() -> None:
    method, x = VanillaGradient(tiny_model().train()), images(1)
    before = Snapshot(model=method.model, method=method, x=x)
    trust(method, x, 1)
    assert not before.changes()


def test_the_card_prints_and_saves(card: TrustCard, tmp_path: Path) -> None:
    assert "vanilla_gradient" in str(card)
    assert "deletion" in str(card)
    saved: Any = json.loads(card.save(tmp_path / "card.json").read_text("utf-8"))
    assert [row["name"] for row in saved["properties"]] == [row.name for row in card]
    drawn = card.save(tmp_path / "cat.rise.trust.png")
    assert drawn.read_bytes()[1:4] == b"PNG"
    assert is_drawing(str(drawn))
    with pytest.raises(MethodError, match=r"'.pdf' is not one of '.json', '.html', '.png'"):
        card.save(tmp_path / "card.pdf")


def test_the_page_has_the_figure_and_the_table_in_one_file(card: TrustCard, tmp_path: Path) -> None:
    page = card.save(tmp_path / "card.html").read_text("utf-8")
    assert page.count("<tr>") == 1 + len(card)
    assert re.findall(r'(?:src|href)="(.{0,22})', page) == ["data:image/png;base64,"]


def test_the_card_names_properties_in_plain_words_and_counts_the_clear_ones(card: TrustCard) -> None:
    assert "depends on the weights (MPRT)" in str(card)
    counts = [[row.is_clear for row in card if row.group == group].count(True) for group in GROUPS]
    expected = f"depends on the model: {counts[0]} of 3 clear; marks what matters: {counts[1]} of 5 clear"
    assert card.summary.startswith(expected)


def test_a_slight_dependence_is_called_slight(card: TrustCard) -> None:
    controls = {"constant": Control(torch.zeros(1), torch.full((1,), -1e-4), torch.full((1,), 1e-4))}
    for value, ending in ((0.002, "class, but only slightly"), (0.2, "class")):
        measurement = replace(card.measurements["random_logit"], values=torch.tensor([value]), controls=controls)
        assert property_of(measurement).verdict == f"the map changes with the explained {ending}"


def test_input_x_gradient_of_a_model_without_spatial_layers_is_compared_with_the_gradient() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(75, 8), nn.Tanh(), nn.Linear(8, 3))
    x = images(1)[..., :5, :5]
    method = InputXGradient(model)
    reference = VanillaGradient(model).attribute(x, 1)
    expected = RankCorrelation().measure(method.attribute(x, 1), reference=reference)
    assert trust(method, x, 1)["rank_correlation"].value == pytest.approx(float(expected.values[0]))


def test_the_card_draws_each_property_on_an_axis() -> None:
    model = saliency.load("shapes_cnn")
    photo = saliency.testbed.draw_scenes(1, seed=3).images[0].permute(1, 2, 0).numpy()
    method = VanillaGradient(model)
    card = trust(method, photo)
    drawing = saliency.figure(card)
    (title,) = [each for each in drawing.findobj(Text) if each.get_text() == card.title]
    assert not title.get_parse_math()  # it names the class
    assert len(drawing.axes) == 1 + len(card)
    assert drawing.axes[1].get_title(loc="left")


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
    assert {row.name for row in card} >= {"mprt", "deletion", "insertion", "road", "infidelity"}
    assert "agrees with others (rank correlation)" in card.summary.split("not measured: ")[1]
    assert card.measurements["deletion"].curve is not None
    assert float(card.measurements["deletion"].curve[0, 0]) == pytest.approx(1)  # the cosine of the image itself
