"""The promises of the explorer's page, kept in a real browser: drop, change, compare, click, stream, cancel, errors."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from PIL import Image

import saliency
from saliency import METHODS
from saliency.batch.options import NetworkOptions
from saliency.explorer.page import static_files, widget_module
from saliency.explorer.session import PageAnswer, Session
from saliency.testbed import draw_rgbd
from saliency.testbed.shapes import draw_scenes
from tests.browser import PATIENCE, chromium, until, visit
from tests.explorer.serving import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CAT = Path(__file__).parents[2] / "assets" / "chelsea.jpg"
FRAMES = "document.querySelectorAll('.frame')"
DONE = f"{FRAMES}.length && [...{FRAMES}].every(each => each.getAttribute('aria-busy') === 'false')"
DROP = """([bytes, name, area]) => {
  const data = new DataTransfer();
  data.items.add(new File([Uint8Array.from(atob(bytes), each => each.charCodeAt(0))], name));
  const target = document.querySelector(area);
  for (const type of ['dragover', 'drop']) {
    target.dispatchEvent(new DragEvent(type, { dataTransfer: data, bubbles: true, cancelable: true }));
  }
}"""
PASTE = """([bytes, name]) => {
  const data = new DataTransfer();
  data.items.add(new File([Uint8Array.from(atob(bytes), each => each.charCodeAt(0))], name));
  document.body.dispatchEvent(new ClipboardEvent('paste', { clipboardData: data, bubbles: true }));
}"""
# The contrast of each text with the ground under it: the colours of its ancestors, one over the other.
CONTRASTS = """() => {
  const canvas = Object.assign(document.createElement('canvas'), { width: 1, height: 1 });
  const context = canvas.getContext('2d', { willReadFrequently: true });
  const over = (colors) => {
    context.clearRect(0, 0, 1, 1);
    for (const color of colors) { context.fillStyle = color; context.fillRect(0, 0, 1, 1); }
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = (each) => each <= 10 ? each / 255 / 12.92 : ((each / 255 + .055) / 1.055) ** 2.4;
  const light = ([red, green, blue]) => .2126 * linear(red) + .7152 * linear(green) + .0722 * linear(blue);
  const found = [];
  for (const element of document.querySelectorAll('.explorer *')) {
    const own = [...element.childNodes].some(each => each.nodeType === 3 && each.data.trim());
    if (!own || !element.checkVisibility({ visibilityProperty: true })) continue;
    if (element.closest('.hidden, .marks, option')) continue;
    const grounds = [];
    for (let each = element; each; each = each.parentElement) grounds.unshift(getComputedStyle(each).backgroundColor);
    const text = light(over([...grounds, getComputedStyle(element).color]));
    const [low, high] = [light(over(grounds)), text].sort((a, b) => a - b);
    found.push([element.textContent.trim().slice(0, 40), (high + .05) / (low + .05)]);
  }
  return found;
}"""
UNNAMED = """() => [...document.querySelectorAll('.explorer :is(button, input, select, progress, dialog)')]
  .filter(each => !(each.getAttribute('aria-label') || each.labels?.length || each.textContent.trim()))
  .map(each => each.outerHTML)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def session() -> Session:
    return Session(NetworkOptions(model="efficientnet_lite0"))


@pytest.fixture(scope="module")
def address(session: Session) -> Iterator[str]:
    with served(session) as page:
        yield page


@contextmanager
def at(browser: Browser, address: str, *, complaints: bool = False, **options: Any) -> Iterator[Page]:
    """A window with the page; nothing may go wrong in it, and nobody else may be asked for anything."""
    with visit(browser, **options) as window:
        window.page.goto(address)
        window.page.wait_for_selector("html[data-ready]")
        yield window.page
        assert complaints or window.complaints == []
        assert all(each.startswith((address, "blob:")) for each in window.requests)


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """The page with the explained cat."""
    with at(browser, address) as opened:
        drop(opened, CAT.read_bytes())
        settle(opened)
        yield opened


def drop(page: Page, content: bytes, name: str = "cat.jpg", area: str = ".explorer") -> None:
    page.evaluate(DROP, [base64.b64encode(content).decode(), name, area])


def settle(page: Page) -> None:
    until(page, DONE)


def titles(page: Page) -> list[str]:
    return page.locator(".panel h3").all_inner_texts()


def choose(page: Page, label: str, value: str) -> None:
    """Choose an option, and wait for the maps."""
    page.get_by_label(label, exact=False).select_option(value)
    settle(page)


def drawn(page: Page, at: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The colours (H, W, 3) and the opacity (H, W, 1) of the canvas of a map."""
    address = page.locator("canvas.heat").nth(at).evaluate("each => each.toDataURL()")
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))).convert("RGBA"))
    return pixels[..., :3].astype(float), pixels[..., 3:] / 255


def test_the_colours_in_the_browser_are_those_of_overlay(page: Page, session: Session) -> None:
    image = np.asarray(Image.open(CAT)).astype(float)
    styles = {"grad_cam": None, "input_x_gradient": None, "layer_cam": 90, "vanilla_gradient": 100}
    for name, percentile in styles.items():
        choose(page, "Method", name)
        if percentile is not None:
            page.get_by_label("Full colour at").fill(str(percentile))
        explanation = METHODS[name](session.model).attribute(CAT)
        wanted = np.asarray(saliency.overlay(explanation, percentile=percentile or "auto")).astype(float)
        left, top, right, bottom = map(round, explanation.frames[0].box)  # type: ignore[union-attr]
        inside = slice(top + 4, bottom - 4), slice(left + 4, right - 4)  # without the two lines around the crop
        colors, opacity = drawn(page)
        mixed = image[top:bottom, left:right] * (1 - 0.8 * opacity) + colors * 0.8 * opacity
        difference = np.abs(mixed[4:-4, 4:-4] - wanted[inside])
        assert difference.max() <= 3, name  # the canvas holds 8 bits of colour times opacity
        assert difference.mean() < 0.4, name


def test_the_scripts_make_no_html_out_of_text_and_ask_nobody_else() -> None:
    text = "".join(content.decode() for content, _ in static_files().values()) + widget_module()
    unsafe = ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", "DOMParser", "srcdoc")
    assert not [word for word in unsafe if word in text]
    addresses = set(re.findall(r"https?://[^\s\"'`]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}


@pytest.mark.slow
def test_a_dropped_photo_shows_its_classes_and_its_first_map(page: Page) -> None:
    assert page.locator(".choice").all_inner_texts()[0].split("\n") == ["tiger cat", "38.6%"]
    assert titles(page) == ["tiger cat\nby GradCAM"]
    assert page.get_by_role("status").first.inner_text() == "tiger cat, explained by GradCAM"
    assert page.locator(".bar-colours").get_attribute("aria-label").startswith("Colours from 0")  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_photo_may_be_pasted_or_chosen(browser: Browser, address: str) -> None:
    with at(browser, address) as page:
        page.locator("input[type=file]").set_input_files(CAT)
        settle(page)
        assert titles(page) == ["tiger cat\nby GradCAM"]
        coffee = CAT.with_name("coffee.jpg").read_bytes()
        page.evaluate(PASTE, [base64.b64encode(coffee).decode(), "image.jpg"])
        until(page, "document.querySelector('.panel h3').textContent.includes('espresso')")


@pytest.mark.slow
def test_the_first_page_says_what_to_do_and_has_a_sample(browser: Browser, address: str) -> None:
    with at(browser, address) as page:
        assert "Drop a photo here, paste one, or" in page.locator(".drop").inner_text()
        page.locator(".thumb img").wait_for()
        page.get_by_role("button", name="sample").click()
        settle(page)
        assert titles(page) == ["tiger cat\nby GradCAM"]


@pytest.mark.slow
def test_a_class_is_found_by_its_name_and_set_against_another_one(page: Page) -> None:
    page.get_by_label("Search all classes").fill("siamese")
    found = page.locator(".choice").inner_text().split("\n")
    assert found[0] == "Siamese cat"
    assert re.fullmatch(r"[< \d.]+%", found[1])  # its probability
    page.locator(".choice").click()
    settle(page)
    assert titles(page) == ["Siamese cat\nby GradCAM"]
    assert page.locator(".choice[aria-pressed=true]").inner_text().split("\n") == found
    page.get_by_role("button", name="Rather than tabby").click()
    settle(page)
    assert titles(page) == ["Siamese cat rather than tabby\nby GradCAM"]
    page.get_by_role("button", name="explain it alone").click()
    settle(page)
    assert titles(page) == ["Siamese cat\nby GradCAM"]


@pytest.mark.slow
def test_two_methods_are_compared_under_one_slider_and_read_at_one_point(page: Page, session: Session) -> None:
    choose(page, "Compare with", "layer_cam")
    assert titles(page) == ["tiger cat\nby GradCAM", "tiger cat\nby LayerCAM"]
    page.get_by_label("Heat map").fill("30")
    style = "[...document.querySelectorAll('.heat')].map(each => getComputedStyle(each).opacity)"
    assert page.evaluate(style) == ["0.3", "0.3"]
    spot = page.locator(".pick").first.bounding_box()
    assert spot is not None
    page.locator(".pick").first.click(position={"x": spot["width"] / 2, "y": spot["height"] / 2})
    cells = saliency.GradCAM(session.model).attribute(CAT).values[0, 0]
    value = float(page.locator(".reading").first.inner_text().split(" ")[0])
    assert value == pytest.approx(float(cells[3, 3]), abs=2e-3)
    assert all("at the marker" in text for text in page.locator(".reading").all_inner_texts())
    page.keyboard.press("ArrowRight")
    left = page.evaluate("[...document.querySelectorAll('.marker')].map(each => parseFloat(each.style.left))")
    assert left == pytest.approx([52, 52], abs=0.3)


@pytest.mark.slow
def test_values_below_the_threshold_are_transparent(page: Page) -> None:
    page.get_by_label("Hide values below").fill("50")
    _, opacity = drawn(page)
    assert 0 < (opacity > 0).mean() < 1
    assert opacity[opacity > 0].min() == pytest.approx(0.5, abs=0.01)
    page.get_by_role("button", name="Reset").click()
    assert drawn(page)[1].min() < 0.5


@pytest.mark.slow
def test_methods_that_do_not_apply_are_marked_before_they_are_chosen(page: Page) -> None:
    group = page.locator("label", has_text=re.compile("^Method")).locator("optgroup[label^='Does not apply']")
    assert "AttentionRollout" in group.inner_text()
    assert "GradCAM" not in group.inner_text().split()
    assert "no attention" in str(group.locator("option").first.get_attribute("title"))


@pytest.mark.slow
def test_a_reload_keeps_the_photo_the_question_and_the_appearance(page: Page) -> None:
    page.get_by_role("button", name="Rather than tabby").click()
    choose(page, "Method", "layer_cam")
    page.get_by_label("Heat map").fill("30")
    page.get_by_label("Hide values below").fill("50")
    before = titles(page)
    assert before == ["tiger cat rather than tabby\nby LayerCAM"]
    page.reload()
    page.wait_for_selector("html[data-ready]")
    settle(page)
    assert titles(page) == before
    assert [page.get_by_label(name).input_value() for name in ("Heat map", "Hide values below")] == ["30", "50"]
    assert page.locator("canvas.heat").first.is_visible()


@pytest.mark.slow
def test_the_layers_are_grouped_by_block(page: Page) -> None:
    groups = page.locator("label", has_text=re.compile("^Layer")).locator("optgroup")
    labels = groups.evaluate_all("groups => groups.map(each => each.label)")
    assert labels == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "blocks.4", "blocks.5", "blocks.6"]
    assert "blocks.3.1.conv_dw" in groups.nth(3).inner_text()


def test_the_scripts_need_no_iterator_helpers() -> None:
    text = widget_module()  # Safari has them since 18.4
    assert not re.search(r"\.(?:keys|values|entries)\(\)\.|\.(?:take|drop)\(", text)


@contextmanager
def scripted(session: Session, explain: Callable[..., None]) -> Iterator[None]:
    """Answer questions by a script instead of the model."""
    vars(session)["explain"] = explain
    try:
        yield
    finally:
        del vars(session)["explain"]


def answer(name: str, method: str, value: float, progress: float) -> PageAnswer:
    """A map of 2 x 2 cells."""
    row = {"name": name, "sign": "positive", "units": "score", "floor": 0.0, "limit": 1.0, "colormap": "inferno"}
    values = np.full(4, value, "<f4").tobytes()
    plane = {"width": 2, "height": 2, "values": values}
    return {"method": method, "row": row, "map": plane, "progress": progress, "done": progress == 1}


@pytest.mark.slow
def test_a_map_of_many_passes_is_shown_early_and_refined_in_place(page: Page, session: Session) -> None:
    refined = threading.Event()

    def explain(asked: PageAnswer, send: Callable[[PageAnswer], None], check: Callable[[], None]) -> None:
        send(answer("a cat", "rise", 0.25, 0.3))
        refined.wait(PATIENCE)
        send({"method": "rise", "progress": 0.6, "done": False})
        send(answer("a cat", "rise", 1.0, 1.0))

    with scripted(session, explain):
        page.get_by_label("Method", exact=False).select_option("rise")
        until(page, "document.querySelector('.status').textContent.includes('refining')")
        assert drawn(page)[1].max() == pytest.approx(0.25, abs=0.01)
        assert page.locator("progress").first.get_attribute("value") == "0.3"
        assert page.locator(".saves").is_hidden()
        page.evaluate("document.querySelector('canvas.heat').kept = true")
        refined.set()
        settle(page)
    assert drawn(page)[1].max() == 1
    assert page.evaluate("document.querySelector('canvas.heat').kept") is True
    assert page.locator(".saves").is_visible()


@pytest.mark.slow
def test_another_question_cancels_the_one_before_whose_answers_are_never_shown(page: Page, session: Session) -> None:
    stopped = threading.Event()

    def explain(asked: PageAnswer, send: Callable[[PageAnswer], None], check: Callable[[], None]) -> None:
        (name,) = asked["methods"]
        send(answer(name, name, 0.5, 0.5 if name == "rise" else 1))
        try:
            while name == "rise":
                check()
        finally:
            if name == "rise":
                stopped.set()
                send(answer("too late", name, 0.5, 1))

    page.evaluate("window.seen = new Set()")
    page.evaluate("window.heading = document.querySelector('.panel h3')")
    page.evaluate("new MutationObserver(() => seen.add(heading.textContent)).observe(heading, { childList: true })")
    with scripted(session, explain):
        page.get_by_label("Method", exact=False).select_option("rise")
        until(page, "document.querySelector('.status').textContent.includes('refining')")
        page.get_by_label("Method", exact=False).select_option("layer_cam")
        settle(page)
        assert stopped.wait(PATIENCE)
    page.wait_for_timeout(100)
    assert titles(page) == ["layer_cam\nby LayerCAM"]
    assert not [text for text in page.evaluate("[...window.seen]") if "late" in text]


@pytest.mark.slow
def test_a_file_that_is_refused_while_a_map_is_refined_leaves_the_map(browser: Browser, session: Session) -> None:
    def explain(asked: PageAnswer, send: Callable[[PageAnswer], None], check: Callable[[], None]) -> None:
        (name,), is_first = asked["methods"], not asks
        asks.append(name)
        send(answer(name, name, 0.5, 0.5 if is_first else 1))
        while is_first:
            check()

    asks: list[str] = []
    with served(session) as address, at(browser, address, complaints=True) as page, scripted(session, explain):
        drop(page, CAT.read_bytes())
        until(page, "document.querySelector('.status').textContent.includes('refining')")
        drop(page, b"not an image", "notes.txt")
        until(page, "!document.querySelector('.notice').hidden")
        settle(page)
        assert "image" in page.get_by_role("alert").inner_text()
        assert page.locator(".saves").is_visible()


@pytest.mark.slow
def test_a_method_that_is_chosen_while_a_photo_is_opened_explains_this_photo(page: Page, session: Session) -> None:
    is_opened = threading.Event()
    opened = session.open

    def slow(*arguments: Any) -> PageAnswer:
        is_opened.wait(PATIENCE)
        return opened(*arguments)

    vars(session)["open"] = slow
    try:
        drop(page, (CAT.parent / "coffee.jpg").read_bytes(), "coffee.jpg")
        page.get_by_label("Method", exact=False).select_option("layer_cam")
        page.wait_for_timeout(100)
        is_opened.set()
        until(page, "document.querySelector('.status').textContent === 'espresso, explained by LayerCAM'")
    finally:
        del vars(session)["open"]
    assert page.locator(".opening").count() == 0


@pytest.mark.slow
def test_a_long_wait_is_explained(browser: Browser, session: Session) -> None:
    with served(session) as address, visit(browser) as window:
        window.page.clock.install()
        window.page.goto(address)
        window.page.wait_for_selector("html[data-ready]")
        window.page.route("**/image", lambda route: None)
        drop(window.page, CAT.read_bytes())
        window.page.clock.run_for(6000)
        assert "another page uses it" in window.page.get_by_role("status").first.inner_text()


@pytest.mark.slow
def test_a_method_that_does_not_apply_says_so_in_its_frame_beside_the_other_one(page: Page) -> None:
    choose(page, "Compare with", "attention_rollout")
    assert "attention" in page.locator(".panel").nth(1).locator(".why").inner_text()
    assert titles(page)[0] == "tiger cat\nby GradCAM"
    assert page.locator("canvas.heat").first.is_visible()
    assert page.locator("canvas.heat").nth(1).is_hidden()


@pytest.mark.slow
def test_a_file_that_is_no_image_is_refused_in_one_sentence(browser: Browser, address: str) -> None:
    with at(browser, address, complaints=True) as page:
        drop(page, b"not an image", "notes.txt")
        until(page, "!document.querySelector('.notice').hidden")
        assert "image" in page.get_by_role("alert").inner_text()
        assert page.locator(".drop").is_visible()


@pytest.mark.slow
def test_a_lost_server_is_named(browser: Browser, address: str) -> None:
    with at(browser, address, complaints=True) as page:
        drop(page, CAT.read_bytes())
        settle(page)
        page.route("**/explain", lambda route: route.abort())
        choose(page, "Method", "layer_cam")
        assert "Start saliency serve again" in page.get_by_role("alert").inner_text()


@pytest.mark.slow
def test_the_card_and_the_files_are_made_on_demand(page: Page) -> None:
    page.get_by_role("button", name="Python").click()
    assert "saliency.GradCAM(model)" in page.locator("dialog pre").inner_text()
    page.keyboard.press("Escape")
    with page.expect_download() as download:
        page.get_by_role("button", name="Overlay").click()
    assert download.value.suggested_filename == "cat.grad_cam.overlay.png"
    with Image.open(download.value.path()) as saved, Image.open(CAT) as image:
        assert saved.size == image.size
    page.route("**/trust", lambda route: route.fulfill(content_type="application/json", body=json.dumps(CARD)))
    page.get_by_role("button", name="Can I trust this map?").click()
    assert "✓ depends on the weights" in page.locator("dialog .trust").inner_text()


PROPERTY = {
    "title": "depends on the weights",
    "is_clear": True,
    "is_worse": False,
    "verdict": "the map changes",
    "p": 0.05,
    "value": 1.0,
    "error": 0.1,
    "higher_is_better": True,
    "controls": {},
    "strip": [0.3, 0.1, 0.2],
}
CARD = {"summary": "depends on the weights: clear", "notes": [], "trust": {"weights": PROPERTY}}


@pytest.mark.slow
def test_code_that_cannot_be_copied_can_be_selected(page: Page) -> None:
    page.evaluate("delete Navigator.prototype.clipboard")  # as with --host, without https
    page.get_by_role("button", name="Python").click()
    page.get_by_role("button", name="Copy").click()
    until(page, "document.querySelector('dialog .actions').textContent.startsWith('Select the text')")


@pytest.mark.slow
def test_two_maps_fit_on_a_phone(browser: Browser, address: str) -> None:
    with at(browser, address, viewport={"width": 375, "height": 740}) as page:
        drop(page, CAT.read_bytes())
        settle(page)
        choose(page, "Compare with", "lrp")
        assert page.evaluate("document.documentElement.scrollWidth") == 375


SMALL = """() => [...document.querySelectorAll('.explorer :is(button, select, summary, input)')]
  .filter(each => each.checkVisibility({ visibilityProperty: true }) && !each.matches('.pick, .spot, .hidden'))
  .map(each => [each.outerHTML.slice(0, 60), each.getBoundingClientRect()])
  .filter(([, box]) => box.width < 44 || box.height < 44).map(([html, box]) => [html, box.width, box.height])"""


@pytest.mark.slow
def test_targets_of_a_phone_are_large_enough_for_fingers(browser: Browser, address: str) -> None:
    phone: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
    with at(browser, address, **phone) as page:
        assert page.evaluate(SMALL) == []
        drop(page, CAT.read_bytes())
        settle(page)
        page.get_by_role("button", name="Rather than tabby").click()
        settle(page)
        assert page.evaluate(SMALL) == []
        assert page.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.slow
def test_a_detector_that_finds_nothing_is_still_a_detector(browser: Browser) -> None:
    model = Session(NetworkOptions(model="shapes_detector"))
    model._detections = lambda output, batch: []  # type: ignore[method-assign]
    with served(model) as address, at(browser, address) as page:
        drop(page, scene(), "scene.png")
        settle(page)
        assert page.get_by_role("heading", name="Explain a detection").is_visible()


@pytest.mark.slow
def test_texts_have_contrast_and_controls_have_names_on_desktop_and_phone(browser: Browser, address: str) -> None:
    with at(browser, address) as page:
        contrasts: list[tuple[str, float]] = []

        def look() -> None:
            for theme, width in (("light", 1280), ("dark", 1280), ("dark", 390), ("light", 390)):
                page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
                page.set_viewport_size({"width": width, "height": 844})
                contrasts.extend(page.evaluate(CONTRASTS))
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

        look()
        drop(page, CAT.read_bytes())
        settle(page)
        page.get_by_role("button", name="Rather than tabby").click()
        settle(page)
        page.locator("summary").click()
        look()
        assert len(dict(contrasts)) > 30
        assert not [(text, contrast) for text, contrast in contrasts if contrast < 4.5]
        assert page.evaluate(UNNAMED) == []
        page.get_by_label("Heat map").focus()
        page.keyboard.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def scene() -> bytes:
    """An image of two objects."""
    file = io.BytesIO()
    image = draw_scenes(1, task="several").images[0]
    Image.fromarray((image.permute(1, 2, 0) * 255).round().byte().numpy()).save(file, "PNG")
    return file.getvalue()


@pytest.mark.slow
def test_a_box_is_explained_by_a_click_on_it(browser: Browser) -> None:
    with served(Session(NetworkOptions(model="shapes_detector"))) as address, at(browser, address) as page:
        drop(page, scene(), "scene.png")
        settle(page)
        spots = page.locator(".spot")
        assert spots.count() >= 2
        spots.nth(1).click()
        settle(page)
        assert spots.nth(1).get_attribute("aria-pressed") == "true"
        assert page.locator(".frame svg.box").count() == 1


@pytest.mark.slow
def test_a_region_is_explained_by_a_click_on_it_as_a_whole_and_at_a_point(browser: Browser) -> None:
    with served(Session(NetworkOptions(model="shapes_unet"))) as address, at(browser, address) as page:
        drop(page, scene(), "scene.png")
        settle(page)
        second = page.locator(".choice").nth(1)
        second.click()
        settle(page)
        assert second.get_attribute("aria-pressed") == "true"
        whole = titles(page)
        choose(page, "Part of the region", "border")
        assert titles(page) != whole
        box = page.locator(".pick").bounding_box()
        assert box is not None
        page.locator(".pick").click(position={"x": 3, "y": 3})
        settle(page)
        assert "background" in titles(page)[0]


@pytest.mark.slow
def test_a_text_is_explained_by_a_model_of_images_and_texts(browser: Browser) -> None:
    with served(Session(NetworkOptions(model="shapes_two_tower"))) as address, at(browser, address) as page:
        drop(page, scene(), "scene.png")
        settle(page)
        assert "Write a text" in page.locator(".why").inner_text()
        page.get_by_label("Text", exact=True).fill("a circle")
        page.keyboard.press("Enter")
        settle(page)
        assert titles(page) == ["a circle\nby GradCAM"]
        assert page.get_by_label("Search all classes").count() == 0
        page.reload()
        page.wait_for_selector("html[data-ready]")
        settle(page)
        assert titles(page) == ["a circle\nby GradCAM"]
        assert page.get_by_label("Text", exact=True).input_value() == "a circle"


@pytest.mark.slow
def test_each_input_of_a_case_has_a_drop_area_a_map_and_a_share(browser: Browser) -> None:
    scenes = draw_rgbd(2, seed=1_000_003, task="depth").inputs
    inputs = {"rgb": Image.fromarray(scenes["rgb"][0].permute(1, 2, 0).numpy()), "depth": scenes["depth"][0]}
    session = Session(NetworkOptions(model="shapes_rgbd", methods=("lrp",)), inputs)
    file = io.BytesIO()
    np.save(file, scenes["depth"][1].numpy())
    with served(session) as address, at(browser, address) as page:
        settle(page)
        first = titles(page)
        assert [title.partition(":")[0] for title in first] == ["rgb", "depth"]
        thumbs = page.locator(".area img").evaluate_all("each => each.map(one => one.src)")
        assert all(thumb.startswith("blob:") for thumb in thumbs)
        tops = page.locator(".panel").evaluate_all("each => each.map(one => one.getBoundingClientRect().top)")
        assert tops[0] == tops[1]  # in one row
        drop(page, file.getvalue(), "depth.npy")
        assert page.locator(".notice").inner_text() == "Drop the file on one of the inputs: rgb, depth."
        drop(page, file.getvalue(), "depth.npy", ".area[data-input='1']")
        until(page, f"{DONE} && document.querySelector('.panel h3').innerText !== {json.dumps(first[0])}")
        expected = saliency.LRP(session.model).attribute(inputs | {"depth": scenes["depth"][1]})
        assert [round(100 * cast("float", expected.shares[name])) for name in ("rgb", "depth")] == [
            int(re.findall(r": (\S+) %", title)[0].replace("−", "-")) for title in titles(page)
        ]
        page.get_by_label("Compare with", exact=False).select_option("grad_cam")
        settle(page)
        assert len(titles(page)) == 4
        assert page.evaluate(UNNAMED) == []
