"""The promises of `saliency.compare`: means, errors, tests and ranks over images, and the files that hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from saliency import GradCAM, InputXGradient, LayerCAM, VanillaGradient, compare
from saliency.errors import ImageError, MethodError
from saliency.evaluation.comparison import (
    Comparison,
    MetricResult,
    concordance,
    holm,
    rank_ranges,
    sign_flip_test,
    unique_names,
)
from saliency.evaluation.metrics.base import Metric
from saliency.evaluation.metrics.faithfulness import Deletion, Infidelity, Insertion
from saliency.io.inputs import read_mask
from saliency.metrics import ROAD, measure
from saliency.testing import images, tiny_model
from tests.batchwork import Tiny, noise
from tests.browser import chromium, visit


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


class Linear(nn.Module):
    """Two linear scores of an image (3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, 192, generator=torch.Generator().manual_seed(0)) - 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T


def results(
    values: Mapping[str, Sequence[float | None]], *, higher: bool | None = True, control: float = 0.0
) -> list[MetricResult]:
    """Return the results of one metric, by method."""
    return [
        MetricResult(str(image), method, "metric", value, {"constant": control}, higher, 0.5)
        for method, row in values.items()
        for image, value in enumerate(row)
    ]


# Statistics --------------------------------------------------------------------------------------------------------


def test_holm_corrects_as_by_hand() -> None:
    corrected = holm(np.array([0.01, 0.04, 0.03, 0.005]))
    assert np.allclose(corrected, [0.03, 0.06, 0.06, 0.02])  # 3 x 0.01; 0.04 after 2 x 0.03; 4 x 0.005
    assert np.array_equal(holm(np.array([0.6, 0.9])), [1.0, 1.0])


def test_sign_flips_are_counted_exactly_for_few_images() -> None:
    differences = np.array([3.0, 1.0, -1.0, 2.0])
    sums = [abs(np.dot(signs, differences)) for signs in product([1, -1], repeat=4)]
    assert sign_flip_test(differences[:, None])[0] == np.mean([total >= 5 for total in sums]) == 6 / 16
    assert sign_flip_test(np.ones((10, 1)))[0] == 2 / 2**10
    assert sign_flip_test(np.zeros((10, 1)))[0] == 1


def test_sign_flips_agree_with_scipy(random: np.random.Generator) -> None:
    stats = pytest.importorskip("scipy.stats")
    for count in (9, 40):
        differences = random.normal(0.25, 1, (count, 3))
        own = sign_flip_test(differences)
        for column, p in zip(differences.T, own, strict=True):
            oracle = stats.permutation_test((column,), np.mean, permutation_type="samples", n_resamples=20_000, rng=0)
            assert abs(oracle.pvalue - p) < (1e-9 if count == 9 else 0.015)
            assert abs(stats.ttest_1samp(column, 0).pvalue - p) < 0.06


def test_equal_methods_are_called_different_in_at_most_five_percent_of_comparisons(random: np.random.Generator) -> None:
    wrong = 0
    for _ in range(200):
        values = random.normal(size=(3, 12))
        p = sign_flip_test(np.stack([values[0] - values[1], values[0] - values[2], values[1] - values[2]], 1))
        wrong += bool(holm(p).min() <= 0.05)
    assert wrong / 200 <= 0.05 + 2 * (0.05 * 0.95 / 200) ** 0.5


def test_a_rank_that_all_images_agree_on_is_certain_and_a_coin_toss_is_not(random: np.random.Generator) -> None:
    base = random.normal(size=20)
    assert rank_ranges(np.stack([base + 1, base, base + 2])) == [(2, 2, 2), (1, 1, 1), (3, 3, 3)]
    ranges = rank_ranges(random.normal(size=(2, 20)) * [[1], [1]])
    assert sorted(ranges) == [(1, 1, 2), (2, 1, 2)]
    assert rank_ranges(np.zeros((2, 5))) == [(1, 1, 1), (1, 1, 1)]


# The table ---------------------------------------------------------------------------------------------------------


def test_rows_are_means_over_the_images_with_their_errors_and_controls_come_last() -> None:
    low, high = [1.0, 2.0, 3.0, 6.0], [2.0, 3.0, 4.5, 7.0]
    table = Comparison(results({"low": low, "high": high}, control=0.5))
    assert [row.name for row in table] == ["high", "low", "constant"]
    assert table["low"].mean == 3
    assert table["low"].error == pytest.approx(np.std(low, ddof=1) / 2)
    assert (table["high"].rank, table["high"].rank_low, table["high"].rank_high) == (1, 1, 1)
    assert (table["constant"].mean, table["constant"].rank, table["constant"].seconds) == (0.5, None, None)
    assert table["low"].seconds == 0.5
    difference = table.differences.rows[0]
    assert (difference.name, difference.other, difference.mean) == ("low", "high", -1.125)
    assert [(row.name, row.other) for row in table.differences][1:] == [("low", "constant"), ("high", "constant")]


@pytest.mark.parametrize("higher", [True, False])
def test_significant_differences_name_the_better_method(higher: bool, random: np.random.Generator) -> None:
    base = random.normal(size=12)
    table = Comparison(results({"a": list(base), "b": list(base + 1)}, higher=higher, control=9 if higher else -9))
    better, worse = ("b", "a") if higher else ("a", "b")
    assert table[better].better_than == (worse,)
    assert table[worse].better_than == table["constant"].better_than == ()
    assert all(row.is_significant and row.p == pytest.approx(3 * 2 / 2**12) for row in table.differences)


def test_a_metric_without_a_direction_has_neither_ranks_nor_tests() -> None:
    table = Comparison(results({"a": [1.0] * 12, "b": [2.0] * 12}, higher=None))
    assert [row.rank for row in table] == [None] * 3
    assert not len(table.differences)


def test_many_methods_can_still_be_told_apart(random: np.random.Generator) -> None:
    base = random.normal(size=20)
    values = {str(number): list(base + number) for number in range(40)}
    table = Comparison(results(values, control=-100))
    assert len(table["39"].better_than) == 40
    assert "0, 1, 2, 3 and 36 more" in str(table)


def test_rounding_is_no_difference(random: np.random.Generator) -> None:
    base = random.uniform(1, 2, 12)
    table = Comparison(results({"a": list(base), "b": list(base * (1 + 1e-15))}))
    assert table.differences.rows[0].p == 1


def test_an_image_counts_where_all_methods_have_a_value() -> None:
    values: dict[str, list[float | None]] = {"a": [1.0, None, 3.0], "b": [1.0, 9.0, 3.0]}
    table = Comparison(results(values))
    assert (table["a"].mean, table["b"].mean, table["b"].images) == (2, 2, 2)
    assert "metric: 1 image left out" in table.notes[0]
    assert not len(Comparison(results({"a": [None]})))


def test_an_image_counts_where_all_controls_have_a_value_and_files_have_no_nan(tmp_path: Path) -> None:
    x = images(2)
    x[1] = 0.0  # has no edges
    table = compare([VanillaGradient(tiny_model())], x, 0, "avg_sensitivity")
    assert table.results[1].value is not None
    assert table.results[1].controls["edges"] is None
    assert {row.images for row in table} == {1}

    def fail(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    json.loads(table.save(tmp_path / "table.json").read_bytes(), parse_constant=fail)


def test_each_method_has_its_own_random_controls() -> None:
    both = [
        MetricResult("0", name, "metric", 1.0, {"random": value}, True, 0.5) for name, value in (("a", 0.2), ("b", 0.4))
    ]
    table = Comparison(both)
    assert [(row.name, row.random) for row in table] == [("a", 0.2), ("b", 0.4)]
    assert ("a", "random") in [(row.name, row.other) for row in table.differences]


def test_the_agreement_of_metrics_is_kendalls_w() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.array([[1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 3.0, 4.0], [4.0, 1.0, 2.0, 3.0]])
    friedman = stats.friedmanchisquare(*values.T).statistic  # m (n - 1) W
    assert concordance(values) == pytest.approx(friedman / (3 * 3))
    values[0, 1] = values[2, 3] = 1.0
    assert concordance(values) == pytest.approx(stats.friedmanchisquare(*values.T).statistic / (3 * 3))
    assert concordance(np.stack([values[0], values[0]])) == pytest.approx(1)
    assert concordance(np.ones((2, 3))) is None


def test_the_table_states_whether_its_metrics_agree(tmp_path: Path) -> None:
    rows = [
        MetricResult("0", method, metric, value, {"constant": 0.0}, higher, 0.5)
        for metric, higher, values in (("up", True, (1.0, 2.0, 3.0)), ("down", False, (1.0, 2.0, 3.0)))
        for method, value in zip("abc", values, strict=True)
    ]
    table = Comparison(rows)
    assert table.agreement == 0
    assert "Kendall's W = 0 (1 if equal, 0.500 on average if unrelated)" in table.notes[-1]
    assert json.loads(table.save(tmp_path / "x.json").read_text())["agreement"] == 0
    assert Comparison(rows[:3]).agreement is None


def test_too_few_images_are_announced() -> None:
    differences = {"a": [1.0] * 5, "b": [2.0] * 5}
    table = Comparison(results(differences))
    assert not any(row.is_significant for row in table.differences)
    assert "with 5 images no difference can be significant; 7 or more are needed" in table.notes
    enough = Comparison(results({name: row[:1] * 7 for name, row in differences.items()}))
    assert all(row.is_significant for row in enough.differences)
    assert len(enough.notes) == 1


# Measuring ---------------------------------------------------------------------------------------------------------


def test_values_are_those_of_measure() -> None:
    model = Linear()
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    methods = [VanillaGradient(model), InputXGradient(model)]
    table = compare(methods, images, torch.tensor([0, 1]), [Deletion(steps=4), "gini"], seed=3)
    assert [row.metric for row in table] == [*["deletion"] * 4, *["gini"] * 4]
    explanation = methods[1].attribute(images[1], 1)
    expected = measure(
        [Deletion(steps=4)], explanation, method=methods[1], inputs=images[1], seed=3, random_controls=3
    )[0]
    (own,) = [
        each for each in table.results if (each.image, each.method, each.metric)[1:] == ("input_x_gradient", "deletion")
    ][1:]
    assert own.value == float(expected.values)
    assert own.controls == {name: float(each.values) for name, each in expected.controls.items()}


def test_methods_share_the_passes_of_what_does_not_depend_on_them_and_no_value_changes() -> None:
    model = Tiny()
    methods = [method(model) for method in (VanillaGradient, InputXGradient, GradCAM, LayerCAM)]
    metrics = [Deletion(steps=4), Insertion(steps=4), Infidelity(passes=10)]
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))

    def forwards(metrics: Sequence[str | Metric]) -> int:
        model.sizes.clear()
        compare(methods, [image], 0, metrics)
        return sum(model.sizes)

    forwards(metrics)  # finds out once what the model allows
    explained = forwards(["gini"]) + len(methods)  # and the score of the image, once for each method
    # The orders of four maps and of their random controls, a constant, and the Gaussian; and the empty image.
    assert forwards(metrics[:2]) == explained + 2 * (3 * (4 * (1 + 3) + 1 + 1) + 1)
    assert forwards(metrics[2:]) == explained + 10
    table = compare(methods, [image], 0, metrics)
    apart = [each for method in methods for each in compare([method], [image], 0, metrics).results]
    assert [(each.value, each.controls) for each in table.results] == [(each.value, each.controls) for each in apart]


def test_methods_of_other_models_share_nothing() -> None:
    image = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    models = [Linear(), Linear()]
    with torch.no_grad():
        models[1].weight.neg_()
    methods = [VanillaGradient(model) for model in models]
    together = compare(methods, image, 0, [Deletion(steps=4)]).results
    apart = [result for method in methods for result in compare([method], image, 0, [Deletion(steps=4)]).results]
    assert [each.controls for each in together] == [each.controls for each in apart]


def test_methods_and_metrics_of_one_name_are_named_with_their_options() -> None:
    model = Linear()
    metrics = [Deletion(steps=2), Deletion(order="lerf", steps=2)]
    table = compare([VanillaGradient(model)], [torch.rand(3, 8, 8)], 0, metrics)
    assert {row.metric for row in table} == set(map(repr, metrics))
    assert {row.better for row in table} == {"higher", "lower"}


def test_one_method_on_two_models_is_two_methods() -> None:
    models = [Linear(), Linear()]
    with torch.no_grad():
        models[1].weight.neg_()
    methods = [VanillaGradient(model) for model in models]
    table = compare(methods, [torch.rand(3, 8, 8)], 0, "deletion")
    assert [each.method for each in table.results] == ["VanillaGradient(Linear) 1", "VanillaGradient(Linear) 2"]
    assert table.results[0].value != table.results[1].value


def test_masks_are_seen_through_the_crop_of_the_model(tmp_path: Path) -> None:
    photo = Image.open(noise(tmp_path / "a.png", 0))  # 40 x 30; the model sees 3.8 to 34.3 of the columns
    mask = Image.new("L", (40, 30))
    mask.paste(255, (0, 0, 30, 30))
    mask.save(tmp_path / "mask.png")
    method = GradCAM(Tiny())
    seen = torch.zeros(16, 16, dtype=torch.bool)
    seen[:, :14] = True  # a stretched mask would cover 12 columns
    metrics = ("relevance_rank", "pointing_game")
    tables = [compare([method], [photo], None, metrics, masks=[each]) for each in (tmp_path / "mask.png", mask, seen)]
    assert tables[0].results[0].value == tables[1].results[0].value == tables[2].results[0].value
    assert [row.mean for row in tables[0]] == [row.mean for row in tables[2]]
    with pytest.raises(ImageError, match="20x30 pixels; expected the size of the image, 40x30"):
        compare([method], [photo], None, metrics, masks=[mask.crop((0, 0, 20, 30))])


def test_boxes_are_masks_in_pixels_of_the_image(tmp_path: Path) -> None:
    photo = Image.open(noise(tmp_path / "a.png", 0))  # 40 x 30
    mask = Image.new("L", (40, 30))
    mask.paste(255, (0, 0, 30, 30))
    mask.paste(255, (35, 10, 38, 20))
    metrics = ("relevance_rank", "energy_pointing_game")
    drawn = compare([GradCAM(Tiny())], [photo], None, metrics, masks=[mask])
    boxes = [(0, 0, 30, 30), (35.2, 10, 37.5, 20)]  # a pixel that a box covers in part belongs to it
    assert compare([GradCAM(Tiny())], [photo], None, metrics, boxes=[boxes]).rows[0].mean == drawn.rows[0].mean
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    seen = torch.zeros(2, 8, 8, dtype=torch.bool)
    seen[:, 2:5, 1:4] = True
    method = VanillaGradient(Linear())
    given = compare([method], images, 0, metrics, boxes=torch.tensor([[1, 2, 4, 5]] * 2))
    assert [each.value for each in given.results] == [
        each.value for each in compare([method], images, 0, metrics, masks=seen).results
    ]
    some = compare([method], images, 0, ["gini"], boxes=[None, (1, 2, 4, 5)])
    assert len(some.results) == 2


@pytest.mark.parametrize(
    "box",
    [(1, 2, 3), [(1, 2, 3, 4), (1, 2, 3)], "cat", [], (0, 0, 41, 30), (-1, 0, 4, 4), (5, 5, 5, 9), (9, 2, 4, 8)],
)
def test_a_box_that_is_none_or_is_not_within_the_image_is_an_error(box: object, tmp_path: Path) -> None:
    photo = Image.open(noise(tmp_path / "a.png", 0))
    with pytest.raises(ImageError, match=r"expected \(x0, y0, x1, y1\).* x1 <= 40 and .* y1 <= 30"):
        compare([GradCAM(Tiny())], [photo], None, ["roc_auc"], boxes=[box])


@pytest.mark.parametrize("methods", [["grad_cam"], [], GradCAM(Tiny())], ids=["name", "none", "single"])
def test_methods_that_are_not_a_list_of_methods_are_refused(methods: Any) -> None:
    with pytest.raises(MethodError, match=r"expected methods, such as \[GradCAM"):
        compare(methods, [torch.rand(3, 8, 8)])


def test_numbers_of_targets_and_masks_are_those_of_the_images() -> None:
    with pytest.raises(MethodError, match="got 1 targets for 2 images"):
        compare([VanillaGradient(Linear())], list(torch.rand(2, 3, 8, 8)), [0], masks=[None, None])
    with pytest.raises(MethodError, match="a mask and a box of the same image"):
        compare([VanillaGradient(Linear())], [torch.rand(3, 8, 8)], 0, masks=[torch.ones(8, 8)], boxes=[(0, 0, 2, 2)])


def test_the_target_of_a_comparison_has_the_name_that_it_has_everywhere() -> None:
    method, image = VanillaGradient(Linear()), torch.rand(1, 3, 8, 8)
    named, placed = compare([method], image, target=[1], metrics="gini"), compare([method], image, 1, "gini")
    assert named.results[0].value == placed.results[0].value
    with pytest.raises(TypeError, match='no argument "targets"; it is called target here'):
        compare([method], image, targets=[0], metrics="gini")


def test_a_mask_of_16_bits_is_of_one_object(tmp_path: Path) -> None:
    labels = np.zeros((64, 64), np.uint16)
    labels[:32] = 1
    Image.fromarray(labels).save(tmp_path / "mask.png")
    assert read_mask(tmp_path / "mask.png").tolist() == (labels == 1).tolist()
    labels[32:] = 5000
    Image.fromarray(labels).save(tmp_path / "mask.png")
    with pytest.raises(ImageError, match="the mask has values from 1 to 5000; expected 0 and one other"):
        read_mask(tmp_path / "mask.png")


@pytest.mark.parametrize("color", [0, 128, 255])
def test_the_object_of_a_mask_on_a_transparent_background_is_what_is_not_transparent(color: int) -> None:
    alpha = np.zeros((16, 16), np.uint8)
    alpha[4:8], alpha[8] = 255, 100  # a soft edge
    image = np.dstack([np.full((16, 16, 3), color, np.uint8), alpha])
    assert read_mask(image).tolist() == (alpha > 0).tolist()
    opaque = np.dstack([np.repeat(alpha[..., None], 3, 2), np.full_like(alpha, 255)])
    assert read_mask(opaque).tolist() == (alpha > 0).tolist()
    image[4], image[5] = (255, 0, 0, 255), (0, 255, 0, 255)
    with pytest.raises(ImageError, match="colours besides black, as labels have"):
        read_mask(image)


@pytest.mark.parametrize("mode", ["L", "P"])
def test_a_mask_of_8_bits_with_several_labels_is_refused_but_soft_edges_are_not(tmp_path: Path, mode: str) -> None:
    labels = np.zeros((8, 8), np.uint8)
    labels[:2], labels[2:4] = 1, 15
    image = Image.fromarray(labels)
    if mode == "P":  # as in VOC
        image.putpalette([0, 0, 0, *[128, 0, 0] * 14, *[192, 128, 128]])
    image.save(tmp_path / "labels.png")
    with pytest.raises(ImageError, match="the mask has 2 colours besides black, as labels have"):
        read_mask(tmp_path / "labels.png")
    soft = np.repeat(np.arange(0, 256, 51, dtype=np.uint8)[None], 6, 0)
    assert read_mask(soft).tolist() == (soft > 0).tolist()
    labels[4, 0] = 255  # ignored, as in VOC
    for refused in (labels, np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)):
        with pytest.raises(ImageError, match="colours besides black, as labels have"):
            read_mask(refused)
    labels[4, 0] = 0
    image.point(lambda value: value and 1).save(tmp_path / "one.png")  # one object
    assert read_mask(tmp_path / "one.png").tolist() == (labels > 0).tolist()


def test_curves_are_means_over_the_images_that_count() -> None:
    model = Linear()
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    table = compare([VanillaGradient(model)], images, 0, [Deletion(steps=4), "gini"])
    assert [len(each.curves) for each in table.results] == [5, 0, 5, 0]  # at, map and three controls
    each = [
        measure([Deletion(steps=4)], VanillaGradient(model).attribute(image, 0), model=model, inputs=image)[0]
        for image in images
    ]
    mean = torch.stack([one.curve[0] for one in each if one.curve is not None]).mean(0)
    deletion, gini = table._curves
    assert deletion["curves"]["map"][::12] == pytest.approx(mean.tolist())
    assert deletion["curves"]["at"][::12] == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert gini["curves"] == {}


# Files -------------------------------------------------------------------------------------------------------------


def test_files_hold_the_rows_the_differences_and_the_values(tmp_path: Path) -> None:
    table = Comparison(results({"a": [1.0, 2.0], "b": [2.0, 4.0]}))
    content = json.loads(table.save(tmp_path / "x.json").read_text())
    assert [row["name"] for row in content["rows"]] == ["b", "a", "constant"]
    assert Comparison(MetricResult(**each) for each in content["results"]).rows == table.rows
    assert len(content["differences"]) == 3
    page = table.save(tmp_path / "x.html").read_text()
    assert page.count("<table>") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.html", "x.json"]
    with pytest.raises(MethodError, match=r"\.json"):
        table.save(tmp_path / "x.csv")
    assert "3.00" in str(table)
    assert "significant: sign-flip test" in table.to_html()


@pytest.mark.slow
def test_columns_of_the_page_are_sorted_by_number_and_back(tmp_path: Path) -> None:
    values: dict[str, list[float | None]] = {"a": [10.0, 10.0], "b": [-2.0, -2.0], "c": [9.0, 9.0]}
    path = Comparison(results(values)).save(tmp_path / "x.html")
    with chromium() as browser, visit(browser) as window:
        window.page.goto(path.as_uri())
        table = window.page.locator("table").first
        names = table.locator("td:nth-child(3)")
        for expected in (["b", "constant", "c", "a"], ["a", "c", "constant", "b"]):
            table.get_by_text("mean", exact=True).click()
            assert names.all_text_contents() == expected


def test_a_dataframe_has_a_row_per_method_and_metric() -> None:
    pytest.importorskip("pandas")
    frame = Comparison(results({"a": [1.0, 2.0]})).dataframe()
    assert list(frame["name"]) == ["a", "constant"]


def test_volumes_are_refused_in_one_sentence() -> None:
    method = VanillaGradient(nn.Sequential(nn.Conv3d(1, 2, 3), nn.AdaptiveAvgPool3d(1), nn.Flatten()))
    with pytest.raises(MethodError, match="defined for images; this explanation is of a volume"):
        compare([method], torch.zeros(2, 1, 4, 4, 4), 1)


def test_one_image_in_any_form_is_one_image(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    photo = Image.fromarray(pixels)
    photo.save(tmp_path / "photo.png")
    methods = [VanillaGradient(Tiny())]
    metrics = [Deletion(steps=4)]
    expected = compare(methods, [photo], 0, metrics).results
    content = (tmp_path / "photo.png").read_bytes()
    for image in (
        pixels,
        photo,
        tmp_path / "photo.png",
        f"{tmp_path}/photo.png",
        content,
        torch.tensor(pixels).permute(2, 0, 1),
    ):
        assert [own.value for own in compare(methods, image, 0, metrics).results] == [own.value for own in expected]
    x = methods[0].read(photo).inputs
    assert compare(methods, x[0], 0, metrics).results[0].value == pytest.approx(expected[0].value)
    assert len(compare(methods, torch.cat([x, x]), 0, metrics).results) == 2
    mask = Image.new("L", (16, 16))
    mask.paste(255, (0, 0, 8, 8))
    assert compare(methods, photo, 0, "gini", masks=mask).rows


def test_a_section_of_a_model_card_has_the_figures_and_what_was_not_measured(tmp_path: Path) -> None:
    found = results({"a": [1.0, 2.0, 3.0], "b": [2.0, 3.0, 4.0]}, control=0.5)
    table = Comparison([replace(result, metric="deletion") for result in found], model="resnet50")
    card = table.save(tmp_path / "card.md").read_text()
    assert "Attribution methods on resnet50, and maps" in card
    rows = [line for line in card.splitlines() if line.startswith("|")]
    assert rows[0].split("|")[1:4] == [" metric ", " better ", " method "]
    assert len(rows) == 2 + len(table)
    assert {row.count("|") for row in rows} == {1 + len(table.columns)}
    assert all(f"- {note}" in card for note in table.notes)
    unmeasured = card.split("### Not measured")[1]
    assert "insertion" in unmeasured
    assert "deletion" not in unmeasured


def test_metrics_of_equal_name_are_not_among_those_that_were_not_measured(tmp_path: Path) -> None:
    names = unique_names([Deletion(steps=4), Deletion(steps=8), ROAD(), ROAD()])
    found = [replace(result, metric=name) for name in names for result in results({"a": [1.0, 2.0]})]
    unmeasured = Comparison(found).save(tmp_path / "card.md").read_text().split("### Not measured")[1]
    assert " insertion," in unmeasured
    assert " abpc," in unmeasured
    assert " deletion," not in unmeasured
    assert " road," not in unmeasured
