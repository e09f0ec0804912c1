"""The promises of the gallery page, kept in a real browser that opens it as a file."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from saliency.batch.report import report
from saliency.evaluation.comparison import Comparison, MetricResult
from tests.batch.test_report import HOSTILE, NOTHING, Row, failed, folder, row
from tests.browser import Visit, chromium, until, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

METHODS = ("grad_cam", "layer_cam", "guided_backprop")
CLASSES = {0: "tiger cat", 1: "espresso", 2: "tripod"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def opened(browser: Browser) -> Iterator[Visit]:
    """A window; nothing may have gone wrong in it, and nothing but files may have been asked for."""
    with visit(browser) as window:
        yield window
        assert window.complaints == []
        assert all(each.startswith(("file:", "data:", "about:")) for each in window.requests)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 photos by three methods: one that cannot be read, one with an error in one method."""
    rows: list[Row] = []
    for at in range(24):
        source = f"photos/Zoës {at}.jpg" if at == 7 else f"photos/photo-{at}.jpg"
        said = {"source": source, "target": at % 3, "name": CLASSES[at % 3], "probability": (at * 7 % 24) / 24 + 0.01}
        for method in METHODS:
            rows.append(row(at, method, **said, settings={"smooth": "positive"}))  # noqa: PERF401
    rows[3 * 5 + 1] |= {**NOTHING, "error": "12 values are NaN or infinite", "error_kind": "NonFiniteError"}
    rows[2] |= {"sign": "signed", "colormap": "RdBu_r", "limit": 0.25, "units": "score per unit"}
    rows[2] |= {"coverage": "3 conv by z+", "residual": -1e-7, "ledger": {"input": 8.5, "biases": -1.4}}
    rows.append(failed(24))
    return report(folder(tmp_path_factory.mktemp("run") / "out", rows, pictures=True))


CURVES = {"at": [0.0, 1.0], "map": [0.9, 0.1], "centre": [0.9, 0.4], "random": [0.9, 0.4]}


@pytest.fixture(scope="module")
def compared(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with a comparison of two of its methods on 12 of its photos, and of a method that is not in it."""
    out = tmp_path_factory.mktemp("compared") / "out"
    shutil.copytree(run.parent, out)
    results = []
    for at, (method, shift) in product(range(12), {"grad_cam": 0.5, "layer_cam": 0.1, "lrp": -0.2}.items()):
        value = shift + at * 7 % 12 / 100
        deletion = MetricResult(
            f"photo-{at}", method, "deletion", value, {"centre": 0.3, "random": 0.3}, False, shift + 1, CURVES
        )
        results += [
            deletion,
            MetricResult(f"photo-{at}", method, "gini", -value, {"centre": 0.0, "random": 0.0}, None, shift + 1),
        ]
    Comparison(results).save(out / "evaluation.json")
    return report(out)


def names(page: Page) -> list[str]:
    """The files in the grid, in the order in which they stand."""
    return page.locator(".card .name").all_inner_texts()


def style(page: Page, element: str, name: str) -> str:
    """What a style of the first such element has come to."""
    value = page.locator(element).first.evaluate("(element, name) => getComputedStyle(element)[name]", name)
    return str(value)


def focused(page: Page) -> str:
    """The file whose card has the focus."""
    return str(page.evaluate("document.activeElement.closest('.card')?.querySelector('.name').textContent"))


def shares(page: Page) -> list[float]:
    """The probabilities in the grid, in percent."""
    return [float(each.rstrip("%")) for each in page.locator(".card .probability").all_inner_texts() if each]


def leave(page: Page) -> None:
    """Close the large view by the keyboard; the browser tells the page of it a moment later."""
    page.keyboard.press("Escape")
    until(page, "!document.getElementById('view').open && !location.hash.includes('photo=')")


def count(page: Page) -> str:
    return page.locator("#count").inner_text()


def test_the_page_opens_as_a_file_with_its_pictures(opened: Visit, run: Path) -> None:
    page = opened.go(run)
    assert page.title() == "efficientnet_lite0: 25 images"
    assert count(page) == "25 images, 2 with errors"
    until(page, "document.querySelectorAll('.card img').length > 8")
    until(page, "[...document.querySelectorAll('.card img')].slice(0, 8).every(each => each.naturalWidth === 40)")
    asked = {each.rpartition("/out/")[2] for each in opened.requests}
    assert {"thumbnails/photo-0.jpg", "heat/photo-0.grad_cam.webp"} <= asked
    assert not [each for each in asked if each.startswith("overlays/")]


def test_the_explained_box_lies_on_the_photo_with_the_class_and_the_probability(opened: Visit, tmp_path: Path) -> None:
    found: Row = {"source": "photos/street.jpg", "target": None, "probability": 0.9}
    boxes = {"car": [100.0, 75.0, 500.0, 375.0], "dog": [600.0, 375.0, 900.0, 750.0]}
    listed = [
        row(at, name=f"{label} at ({', '.join(f'{edge:.0f}' for edge in box)})", target_box=box, **found)
        for at, (label, box) in enumerate(boxes.items())
    ]
    about: Row = {"fingerprint": {"opacity": "map", "detections": "all"}}
    page = opened.go(report(folder(tmp_path / "out", listed, pictures=True, **about)))
    assert count(page) == "2 detections"
    assert page.locator(".card .class").all_inner_texts() == list(boxes)
    assert page.locator(".card .name").all_inner_texts() == ["street.jpg"] * 2
    assert page.locator("#class option").all_inner_texts() == ["All classes (2)", "car (1)", "dog (1)"]
    page.locator(".card a").first.click()
    assert "car at (100, 75, 500, 375)" in page.locator("#panels").inner_text()
    for panel in page.locator(".panel .frame").all():  # the photo alone, and under the map
        frame, box = (part.bounding_box() for part in (panel, panel.locator("rect").last))
        assert frame is not None
        assert box is not None
        share = box["x"] - frame["x"], box["y"] - frame["y"], box["width"], box["height"]
        wanted = (0.1 * frame["width"], 0.1 * frame["height"], 0.4 * frame["width"], 0.4 * frame["height"])
        assert all(abs(one - other) < 3 for one, other in zip(share, wanted, strict=True))
    leave(page)


def test_the_slider_fades_the_heat_map_over_the_photo(opened: Visit, run: Path) -> None:
    page = opened.go(run)
    assert style(page, ".card .heat", "opacity") == "0.8"
    page.locator("#opacity").fill("20")
    assert style(page, ".card .heat", "opacity") == "0.2"
    assert style(page, ".card .photo", "opacity") == "1"
    page.locator("#opacity").press("ArrowRight")
    assert style(page, ".card .heat", "opacity") == "0.21"
    assert page.locator("#opacity + output").inner_text() == "21%"
    page.locator("#opacity").press("h")
    assert style(page, ".card .heat", "opacity") == "0"
    page.keyboard.press("h")
    assert style(page, ".card .heat", "opacity") == "0.21"


def test_another_method_changes_the_heat_maps_and_leaves_the_photos(opened: Visit, run: Path) -> None:
    page = opened.go(run)
    page.evaluate("document.querySelector('.card .photo').kept = true")
    page.select_option("#method", label="layer_cam")
    assert page.locator(".card .heat").first.get_attribute("src") == "./heat/photo-0.layer_cam.webp"
    assert page.evaluate("document.querySelector('.card .photo').kept") is True
    assert page.url.endswith("#method=layer_cam")
    assert page.locator(".card.failed .class").first.inner_text() == "NonFiniteError"
    page.locator("#grid a").first.focus()
    page.keyboard.press("m")
    assert page.locator("#method").evaluate("each => each.selectedOptions[0].text") == "guided_backprop"
    page.keyboard.press("Shift+M")
    assert page.locator("#method").evaluate("each => each.selectedOptions[0].text") == "layer_cam"


def test_images_of_one_name_are_told_apart_by_the_folders_that_differ(opened: Visit, tmp_path: Path) -> None:
    sources = ["data/a/1/scan00.png", "data/b/1/scan00.png", "data/b/2/scan00.png", "data/b/2/other.png"]
    rows = [row(at, source=source) for at, source in enumerate([*sources, "data/b/2/twice.png", "data/b/2/twice.png"])]
    page = opened.go(report(folder(tmp_path / "out", rows, pictures=True)))
    assert names(page) == ["a/1/scan00.png", "b/1/scan00.png", "2/scan00.png", "other.png", *["twice.png"] * 2]


def test_photos_are_filtered_by_class(opened: Visit, run: Path) -> None:
    page = opened.go(run)
    options = page.locator("#class option").all_inner_texts()
    assert options == ["All classes (3)", "espresso (8)", "tiger cat (8)", "tripod (8)"]
    page.select_option("#class", label="espresso (8)")
    assert names(page) == [f"Zoës {at}.jpg" if at == 7 else f"photo-{at}.jpg" for at in range(1, 24, 3)]
    assert set(page.locator(".card .class").all_inner_texts()) == {"espresso"}
    assert count(page) == "8 of 25 images"


def test_photos_are_filtered_by_text(opened: Visit, run: Path) -> None:
    page = opened.go(run)
    for typed, found in {  # each finds another number of photos than the one before
        "photo-13": ["photo-13.jpg"],
        "ESPRESSO  photo-1": ["photo-1.jpg", "photo-10.jpg", "photo-13.jpg", "photo-16.jpg", "photo-19.jpg"],
        "ZOES": ["Zoës 7.jpg"],
        "nothing of the kind": [],
        "file is empty": ["bad-24.jpg"],
        "photo-2": [f"photo-{at}.jpg" for at in (2, 20, 21, 22, 23)],
        "nan or infinite": ["photo-5.jpg"],
    }.items():
        page.locator("#query").fill(typed)
        until(page, f"document.getElementById('count').textContent.startsWith('{len(found)} of ')")
        assert names(page) == found
        assert page.locator("#empty").is_visible() is (not found)


def test_photos_are_filtered_by_failure_and_the_filters_cleared(opened: Visit, run: Path) -> None:
    page = opened.go(run)
    page.select_option("#show", label="With errors (2)")
    assert names(page) == ["photo-5.jpg", "bad-24.jpg"]
    assert page.locator(".badge").first.inner_text() == "partly failed"
    assert page.locator(".card.failed .why").inner_text() == "the file is empty"
    page.select_option("#show", "fine")
    assert count(page) == "24 of 25 images"
    page.select_option("#method", label="layer_cam")
    assert count(page) == "23 of 25 images"
    page.locator("#query").fill("bad")
    page.locator("#reset").click()
    assert count(page) == "25 images, 2 with errors"
    assert page.locator("#query").input_value() == ""


def test_photos_are_sorted(opened: Visit, run: Path) -> None:
    page = opened.go(run)
    page.select_option("#sort", "likely")
    likely = shares(page)
    assert likely == sorted(likely, reverse=True)
    assert names(page)[0] == "photo-17.jpg"  # 17 * 7 % 24 is 23
    page.select_option("#sort", "unlikely")
    unlikely = shares(page)
    assert unlikely == sorted(unlikely)
    assert names(page)[0] == "photo-0.jpg"
    page.select_option("#sort", "name")
    assert names(page)[:4] == ["bad-24.jpg", "photo-0.jpg", "photo-1.jpg", "photo-2.jpg"]
    page.select_option("#sort", "class")
    assert page.locator(".card .class").all_inner_texts()[:9] == ["espresso"] * 8 + ["tiger cat"]
    for order in ("likely", "unlikely", "class"):
        page.select_option("#sort", order)
        page.locator("#query").fill("bad-24")
        page.locator("#query").fill("")
        page.keyboard.press("Escape")
        page.locator("#grid a[tabindex='0']").press("End")
        assert focused(page) == "bad-24.jpg"


def test_the_keyboard_leads_through_everything(opened: Visit, run: Path) -> None:
    page = opened.go(run)
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "query"
    page.keyboard.press("Escape")
    page.locator("#sort").focus()
    page.keyboard.press("Tab")
    assert focused(page) == "photo-0.jpg"
    page.keyboard.press("ArrowRight")
    assert focused(page) == "photo-1.jpg"
    page.keyboard.press("ArrowDown")
    below = focused(page)
    assert below not in ("photo-0.jpg", "photo-1.jpg", "photo-2.jpg")
    page.keyboard.press("ArrowUp")
    assert focused(page) == "photo-1.jpg"
    page.keyboard.press("Enter")
    view = page.locator("#view")
    assert view.is_visible()
    assert (page.locator("#view-name").inner_text(), page.locator("#view-place").inner_text()) == (
        "photo-1.jpg",
        "2 of 25",
    )
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#view-name").inner_text() == "photo-3.jpg"
    page.keyboard.press("ArrowLeft")
    assert page.locator("#view-name").inner_text() == "photo-2.jpg"
    page.keyboard.press("End")
    assert page.locator("#view-name").inner_text() == "bad-24.jpg"
    assert page.locator("#next").is_disabled()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowRight")
    leave(page)
    assert not view.is_visible()
    assert focused(page) == "photo-1.jpg"
    page.keyboard.press("?")
    assert page.locator("#facts").is_visible()
    assert "saliency batch photos --out out" in page.locator("#run").inner_text()
    page.keyboard.press("Escape")
    assert not page.locator("#facts").is_visible()


def test_the_large_view_shows_all_methods_side_by_side(opened: Visit, run: Path) -> None:
    page = opened.go(run)
    page.locator(".card a").first.click()
    panels = page.locator(".panel")
    assert panels.locator("h3").all_inner_texts() == ["Image", *METHODS]
    tops = {round(each["y"]) for at in range(4) if (each := panels.nth(at).bounding_box())}
    assert len(tops) == 1
    for at in range(1, 4):
        said = " ".join(panels.nth(at).locator("dl").inner_text().split())
        shares = " coverage 3 conv by z+ residual −1.0e−7 ledger input 8.5, biases −1.4" if at == 3 else ""
        assert said == f"class tiger cat (0) probability 1.0% score 7.1 layer conv_head smooth positive{shares}"
        assert panels.nth(at).locator(".heat").get_attribute("src") == f"./heat/photo-0.{METHODS[at - 1]}.webp"
        assert panels.nth(at).locator("a").get_attribute("href") == f"./overlays/photo-0.{METHODS[at - 1]}.png"
    assert panels.nth(1).locator(".ticks span").all_inner_texts() == ["0", "3.2"]
    assert panels.nth(3).locator(".ticks span").all_inner_texts() == ["−0.25", "0", "0.25"]
    assert panels.nth(3).locator(".unit").inner_text() == "score per unit"
    assert "linear-gradient(to right, rgb(0, 0, 3)" in style(page, ".bar-colours", "backgroundImage")
    photo = " ".join(panels.first.locator("dl").inner_text().split())
    assert "1000 × 750" in photo
    crop = panels.first.locator(".crop").evaluate("each => [each.style.left, each.style.top, each.style.right]")
    assert crop == ["12.5%", "0%", "12.5%"]


def test_the_large_view_shows_the_trust_card_of_each_method(opened: Visit, tmp_path: Path) -> None:
    weights: Row = {"title": "marks what matters", "is_clear": True, "is_worse": False, "p": 0.05, "value": 1.0}
    weights |= {"verdict": "better than 2 of 2", "error": 0.0, "higher_is_better": True, "controls": {}}
    weights["strip"] = [0.8, 0.4, 0.6]
    worse = {**weights, "is_clear": False, "is_worse": True, "p": 1.0, "verdict": "worse", "strip": [0.2, 0.4, 0.6]}
    missing = {**worse, "is_worse": False, "p": None, "value": None, "error": None, "verdict": "not measured"}
    deletion: Row = {"title": "needed (deletion)", "is_clear": False, "is_worse": False, "value": 0.1, "error": 0.05}
    deletion |= {"verdict": "better than edges", "higher_is_better": False, "controls": {"edges": 0.6}, "strip": []}
    files: Row = {
        "card": "trust/photo-0.grad_cam.html",
        "trust": {"class": missing | {"strip": []}, "weights": weights, "other": worse, "deletion": deletion},
    }
    lacking = {"error": "no trust card: out of memory", "error_kind": "OutOfMemoryError"}
    out = folder(tmp_path / "out", [row(0, **files), row(0, "layer_cam", **lacking)], pictures=True)
    page = opened.go(report(out), "#photo=0")
    card = page.locator(".trust")
    assert card.locator("h5").all_inner_texts() == ["Tests: 1 of 3 clear", "Numbers"]
    verdicts = ["not measured", "better than 2 of 2", "worse", "better than edges"]
    assert card.locator(".verdict").all_inner_texts() == verdicts
    names = ["? marks what matters", "✓ marks what matters\np = 0.05", "✗ marks what matters\np = 1"]
    assert [name.strip() for name in card.locator(".name").all_inner_texts()] == [
        *names,
        "needed (deletion)\n0.1 ± 0.05",
    ]
    assert "at most 0.05 divided by their number" in card.inner_text()
    assert page.get_by_role("img", name="edges 0.6, map 0.1").count() == 1
    lefts = "[...document.querySelectorAll('.mark')].map(each => parseFloat(each.style.left))"
    expected = [0, 50, 100, 50, 100, 0, 0, 100]  # better values lie to the right
    assert page.evaluate(lefts) == pytest.approx(expected, abs=0.01)
    assert page.get_by_role("link", name="Trust card").get_attribute("href") == "./trust/photo-0.grad_cam.html"
    # A method whose card failed keeps its overlay.
    assert page.locator(".panel.failed").count() == 0
    assert "no trust card: out of memory" in page.locator(".panel").nth(2).inner_text()
    assert page.locator(".panel").nth(2).locator(".heat").count() == 1
    leave(page)
    assert count(page) == "1 image, 1 with errors"


def test_a_run_without_a_comparison_has_no_tabs(opened: Visit, run: Path) -> None:
    page = opened.go(run, "#tab=comparison")
    assert not page.locator("#tabs").is_visible()
    assert page.locator(".card").first.is_visible()
    assert page.locator("#show option").count() == 3


def test_the_comparison_is_a_table_that_any_column_sorts(opened: Visit, compared: Path) -> None:
    page = opened.go(compared)
    page.get_by_role("link", name="Comparison").click()
    until(page, "document.documentElement.dataset.tab === 'comparison'")
    assert not page.locator(".card").first.is_visible()
    methods = page.locator("#comparison tbody th")
    assert methods.all_inner_texts() == ["lrp", "layer_cam", "grad_cam", "centre"]
    first = page.locator("#comparison tbody tr").first.locator("td").all_inner_texts()
    assert [" ".join(each.split()) for each in first] == [
        "−0.145 ± 0.0104 rank 1, random 0.3",
        "0.145 ± 0.0104 random 0",
        "0.8",
    ]
    assert "sign-flip test" in page.locator("#comparison p").nth(2).inner_text()
    for column, expected in {
        "deletion": ["lrp", "layer_cam", "centre", "grad_cam"],
        "Method": ["centre", "grad_cam", "layer_cam", "lrp"],
        "Seconds": ["lrp", "layer_cam", "grad_cam", "centre"],
    }.items():
        head = page.get_by_role("columnheader", name=column)
        head.get_by_role("button").press("Enter")
        assert (methods.all_inner_texts(), head.get_attribute("aria-sort")) == (expected, "ascending")
        head.get_by_role("button").click()
        assert (methods.all_inner_texts(), head.get_attribute("aria-sort")) == (expected[::-1], "descending")
    assert page.locator("[aria-sort]").count() == 1
    page.go_back()
    until(page, "document.documentElement.dataset.tab === 'images'")
    assert page.locator(".card").first.is_visible()


def test_a_cell_leads_to_its_curves_and_to_its_images_worst_first(opened: Visit, compared: Path) -> None:
    page = opened.go(compared, "#tab=comparison")
    page.locator("tr[data-name=grad_cam] a").first.press("Enter")
    dialog = page.get_by_role("dialog", name="grad_cam by deletion")
    assert dialog.get_by_role("img", name="Curves of layer_cam, lrp, centre, random, grad_cam").count() == 1
    assert dialog.locator(".chart .own").get_attribute("points") == "2.0,4.0 338.0,148.0"
    assert dialog.locator(".chart span").all_inner_texts() == ["0.9", "0.1", "0", "1"]
    difference = dialog.locator("table tbody tr").first.inner_text().split()
    assert (difference[:2], difference[-1]) == (["layer_cam", "0.4"], "significant")
    worst = dialog.locator(".worst li")
    assert worst.first.inner_text().split() == ["photo-5.jpg", "0.61"]  # 5 * 7 % 12 is 11
    dialog.get_by_role("link", name="Show all").click()
    until(page, "!document.getElementById('cell').open")
    assert count(page) == "12 of 25 images"
    assert names(page)[:2] == ["photo-5.jpg", "photo-10.jpg"]
    assert page.locator(".card .probability").first.inner_text() == "0.61"
    assert page.locator("#sort").evaluate("each => each.selectedOptions[0].text") == "deletion, worst first"
    page.go_back()
    until(page, "document.getElementById('cell').open")
    page.keyboard.press("Escape")
    until(page, "!location.hash.includes('cell=')")
    assert page.locator("#comparison").is_visible()


def test_a_metric_without_curves_shows_its_values_and_a_method_without_a_run_says_so(
    opened: Visit, compared: Path
) -> None:
    page = opened.go(compared, "#tab=comparison")
    page.locator("tr[data-name=lrp] a").nth(1).click()
    dialog = page.get_by_role("dialog", name="lrp by gini")
    assert "Values of all images, from low to high" in dialog.inner_text()
    assert len((dialog.locator(".chart .own").get_attribute("points") or "").split()) == 12
    assert "saliency batch -m lrp" in dialog.inner_text()
    assert dialog.locator(".worst a").count() == 0
    assert dialog.locator(".worst li").count() == 12


def test_arrows_on_the_slider_of_the_large_view_move_the_slider(opened: Visit, run: Path) -> None:
    page = opened.go(run, "#photo=2")
    page.locator("#view-opacity").press("ArrowRight")
    assert page.locator("#view-name").inner_text() == "photo-2.jpg"
    assert style(page, ".panel .heat", "opacity") == "0.81"
    assert page.locator("#opacity").input_value() == "81"


def test_a_method_that_failed_says_so_in_the_large_view(opened: Visit, run: Path) -> None:
    page = opened.go(run, "#photo=5")
    assert page.locator(".panel.failed h3").inner_text() == "layer_cam"
    assert page.locator(".panel.failed .why").inner_text() == "12 values are NaN or infinite"
    page.keyboard.press("End")
    assert page.locator(".panel h3").all_inner_texts() == ["All methods"]
    assert page.locator(".panel .why").inner_text() == "the file is empty"


def test_a_link_leads_to_a_photo_and_back_to_the_grid(opened: Visit, run: Path) -> None:
    page = opened.go(run, "#method=guided_backprop&class=1&sort=unlikely&photo=4")
    assert page.locator("#view-name").inner_text() == "photo-4.jpg"
    leave(page)
    assert page.url.endswith("#method=guided_backprop&class=1&sort=unlikely")
    assert count(page) == "8 of 25 images"
    page.locator(".card a").nth(2).click()
    chosen = page.locator("#view-name").inner_text()
    assert "photo=" in page.url
    page.keyboard.press("ArrowRight")
    page.go_back()
    until(page, "!document.getElementById('view').open")
    assert page.url.endswith("#method=guided_backprop&class=1&sort=unlikely")
    page.go_forward()
    until(page, "document.getElementById('view').open")
    assert page.locator("#view-name").inner_text() != chosen


@pytest.mark.parametrize("address", ["#photo=99999", "#photo=x&sort=__proto__&method=constructor", "#%E0%A4%A&show=1"])
def test_an_address_that_leads_nowhere_opens_the_grid(address: str, opened: Visit, run: Path) -> None:
    page = opened.go(run, address)
    assert count(page) == "25 images, 2 with errors"
    assert not page.locator("#view").is_visible()
    assert page.locator("#sort").input_value() == "order"


def test_no_text_of_a_file_runs_or_becomes_an_element(opened: Visit, tmp_path: Path) -> None:
    texts = dict.fromkeys(("source", "id", "name", "layer", "units", "sign"), HOSTILE)
    method = "mine"  # a run refuses names of methods that are no names
    rows = [
        row(
            0, method, **texts, settings={HOSTILE: HOSTILE}, thumbnail=None, heat=None, overlay="overlays/a#b?c% d'.png"
        ),
        failed(1, method, source=HOSTILE, error=HOSTILE, error_kind=HOSTILE),
        failed(2, source="javascript:alert(1)", error=HOSTILE),
    ]
    out = folder(tmp_path / "out", rows, pictures=True, model={"name": HOSTILE, "weights": HOSTILE}, command=[HOSTILE])
    page = opened.go(report(out))
    assert page.locator("#model").text_content() == HOSTILE
    for key in ("/", "a", "Enter", "Enter", "ArrowRight", "ArrowRight", "Escape", "?"):
        page.keyboard.press(key)
        page.wait_for_timeout(50)
        assert page.locator("img:not(.photo, .heat)").count() == 0
        assert page.locator("script").count() == 2
        assert page.locator("[onerror], [onload], iframe, object, embed").count() == 0
    page.keyboard.press("Escape")
    page.locator(".card a").first.click()
    panel = page.locator(".panel").first
    assert "onerror=alert(2)" in panel.locator("dl").inner_text()
    # The picture behind an awkward name is found.
    assert panel.locator("img").evaluate("each => each.decode().then(() => each.naturalWidth)") == 40


def test_a_script_that_is_not_of_the_page_is_refused(browser: Browser, run: Path, tmp_path: Path) -> None:
    text = run.read_text("utf-8").replace("<body>", "<body><img src=x onerror='alert(1)'><script>alert(2)</script>")
    (tmp_path / "index.html").write_text(text, "utf-8")
    with visit(browser) as window:
        window.go(tmp_path / "index.html")
        window.page.wait_for_timeout(100)
        assert not [each for each in window.complaints if "a script spoke" in each]
        assert any("Content Security Policy" in each for each in window.complaints)


def test_ten_thousand_photos_open_at_once_and_only_those_in_sight_are_elements(opened: Visit, tmp_path: Path) -> None:
    same = {"thumbnail": "thumbnails/same.jpg", "heat": "heat/same.webp", "overlay": None}
    rows = (
        row(at, probability=at / 10_000, target=at % 1000, name=f"class {at % 1000}", **same) for at in range(10_000)
    )
    file = report(folder(tmp_path / "out", rows, pictures=True))
    page = opened.go(file)
    until(page, "document.querySelector('.card .heat').naturalWidth === 40")
    elements = "document.querySelectorAll('*').length - document.querySelectorAll('option').length"
    assert count(page) == "10,000 images"
    assert page.evaluate(elements) < 1500
    page.select_option("#sort", "likely")
    assert names(page)[0] == "photo-9999.jpg"
    page.locator(".card a").first.focus()
    for _ in range(3):
        page.mouse.wheel(0, 30_000)
        page.wait_for_timeout(60)
    assert page.evaluate(elements) < 1500
    # The keyboard goes on from the photo that was left, not from the top of the page.
    page.keyboard.press("ArrowRight")
    assert focused(page) == "photo-9998.jpg"
    page.keyboard.press("End")
    assert focused(page) == "photo-0.jpg"
    assert page.evaluate(elements) < 1500
    box = page.locator(".card a:focus").bounding_box()
    assert box is not None
    assert 0 < box["y"] < 800
    page.keyboard.press("Enter")
    assert page.locator("#view-place").inner_text() == "10,000 of 10,000"


def test_dark_and_light_follow_the_system_and_then_the_reader(browser: Browser, run: Path) -> None:
    for scheme in ("dark", "light"):
        with visit(browser, color_scheme=scheme) as window:
            page = window.go(run)

            def is_dark(page: Page = page) -> bool:
                return style(page, "body", "backgroundColor") == "rgb(18, 19, 21)"

            assert is_dark() is (scheme == "dark")
            page.locator("#theme").click()
            assert is_dark() is (scheme == "light")
            assert page.locator("#theme").get_attribute("aria-pressed") == str(scheme == "light").lower()
            page.reload()
            assert is_dark() is (scheme == "light")
            assert window.complaints == []


def test_on_a_phone_everything_is_in_reach_and_nothing_is_wider(browser: Browser, run: Path) -> None:
    with visit(browser, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True) as window:
        page = window.go(run)
        width = "document.documentElement.scrollWidth"
        assert page.evaluate(width) == 360
        assert not page.locator("#sort").is_visible()
        page.locator("#more").tap()
        page.select_option("#sort", "likely")
        assert page.locator("#more").get_attribute("aria-expanded") == "true"
        dock = page.locator(".dock").bounding_box()
        assert dock is not None
        assert dock["y"] + dock["height"] == pytest.approx(740, abs=1)
        page.locator(".card a").first.tap()
        assert page.evaluate(width) == 360
        for button in ("#previous", "#next", "#close"):
            box = page.locator(button).bounding_box()
            assert box is not None
            assert min(box["width"], box["height"]) >= 36
        first = page.locator("#view-name").inner_text()
        swipe(page, -150)
        assert page.locator("#view-name").inner_text() != first
        swipe(page, 150)
        assert page.locator("#view-name").inner_text() == first
        page.locator("#close").tap()
        assert not page.locator("#view").is_visible()
        assert window.complaints == []


def swipe(page: Page, across: int) -> None:
    """A finger that moves over the panels."""
    page.evaluate(
        """across => {
            const target = document.getElementById("panels");
            const touch = (x) => [new Touch({ identifier: 1, target, clientX: x, clientY: 300 })];
            target.dispatchEvent(new TouchEvent("touchstart", { touches: touch(180), changedTouches: touch(180) }));
            target.dispatchEvent(new TouchEvent("touchend", { touches: [], changedTouches: touch(180 + across) }));
        }""",
        across,
    )


def test_what_is_missing_is_said_in_its_place(browser: Browser, tmp_path: Path) -> None:
    rows = [
        row(0, heat=None, thumbnail=None),
        row(1, heat=None, thumbnail=None, overlay=None),
        row(2, thumbnail="thumbnails/gone.jpg"),
        row(3, target=None, name=None, probability=None, width=None, height=None, limit=None, box=None),
        row(4),
        row(4, "layer_cam"),
    ]
    out = folder(tmp_path / "out", rows, pictures=True)
    (out / "thumbnails" / "gone.jpg").unlink()
    (out / "heat" / "photo-3.grad_cam.webp").unlink()
    with visit(browser) as window:
        page = window.go(report(out))
        cards = page.locator(".card")
        assert cards.nth(0).locator("img").get_attribute("src") == "./overlays/photo-0.grad_cam.png"
        assert cards.nth(1).locator(".why").inner_text() == "There is no picture of this image."
        page.wait_for_selector(".frame.lost-photo")
        page.wait_for_selector(".frame.lost-heat")
        assert page.locator(".lost-photo .photo").get_attribute("src") == "./thumbnails/gone.jpg"
        assert page.locator(".lost-heat .heat").get_attribute("src") == "./heat/photo-3.grad_cam.webp"
        assert cards.nth(3).locator(".class").inner_text() == ""
        page.select_option("#method", label="layer_cam")
        assert cards.nth(0).locator(".class").inner_text() == "Not explained yet"
        assert all("ERR_FILE_NOT_FOUND" in each for each in window.complaints)


def test_a_run_without_photos_says_so(opened: Visit, tmp_path: Path) -> None:
    page = opened.go(report(folder(tmp_path / "out", [])))
    assert page.locator("#why").inner_text() == "No image has been explained yet."
    assert count(page) == "0 images"
    page.keyboard.press("m")
    page.keyboard.press("/")


def test_cards_and_controls_have_names_for_those_who_listen(opened: Visit, run: Path) -> None:
    page = opened.go(run)
    for role, name in (("combobox", "Method"), ("combobox", "Class"), ("slider", "Heat map"), ("searchbox", "Search")):
        assert page.get_by_role(role, name=re.compile(name)).count() == 1  # type: ignore[arg-type]
    for name in ("Dark colours", "About this run, and keys"):
        assert page.get_by_role("button", name=name).count() == 1
    card = page.get_by_role("listitem").nth(1)
    assert (card.get_attribute("aria-setsize"), card.get_attribute("aria-posinset")) == ("25", "2")
    assert page.locator(".card img.photo").nth(1).get_attribute("alt") == "photo-1.jpg, espresso, 30.2%"
    assert page.locator(".card a[tabindex='0']").count() == 1
    page.locator(".card a").first.click()
    assert page.get_by_role("dialog", name="photo-0.jpg").count() == 1
    bar = page.get_by_role("img", name=re.compile("Colours from 0 to 3.2 score"))
    assert bar.count() == 2
