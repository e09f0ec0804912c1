"""The site: each method and public name has a page; the built site opens, searches and links without an error."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pytest

import saliency
from docs.site import examples, gallery, methods, reference
from docs.site.__main__ import main
from docs.site.docstrings import as_markdown
from docs.site.markdown import OUT, ROOT, URLS, as_page, with_blank_lines
from saliency.attribution.base import summary
from tests.browser import Visit, chromium, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HTML = OUT / "html"
WORDS = {"occlusion": "Occlusion", "heatmap": "heatmap", "blank": "My map is blank"}
built = pytest.mark.skipif(not HTML.exists(), reason="no site was built: make docs")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The text of all pages by path, from the files that the generator writes."""
    out = tmp_path_factory.mktemp("site")
    main(out)
    folder = out / "pages"
    files = [*folder.rglob("*.md"), *folder.glob("*.txt")]
    configuration = {"mkdocs.yml": (out / "mkdocs.yml").read_text()}
    return configuration | {str(file.relative_to(folder)): file.read_text() for file in files}


@pytest.mark.parametrize("cls", methods.classes(), ids=lambda cls: cls.__name__)
def test_a_method_has_a_page_with_its_summary_options_cost_source_and_code(
    cls: type[saliency.Attribution], pages: dict[str, str]
) -> None:
    text = pages[methods.page(cls)]
    plain = re.sub(r"\[(`[^`]*`)\]\([^)]*\)", r"\1", text).replace("\\", "")
    assert summary(cls) in " ".join(plain.split())
    assert cls.cost[1:] in text
    assert methods.formula(cls) in text
    assert '<p class="formula">S' in methods.formula(cls)
    options = list(inspect.signature(cls).parameters)[1:]
    assert not [name for name in options if not re.search(rf"^\| `{name}` \| `.*` \| \S", plain, re.MULTILINE)]
    assert examples.example(cls) in text
    assert "mean rank of" in text or "not measured" in text
    assert f"]({cls.name}.md)" in pages["methods/index.md"]


def test_the_limits_and_the_findings_of_a_method_are_on_its_page(pages: dict[str, str]) -> None:
    assert "EigenCAM is the same for every class" in pages["methods/eigen_cam.md"]
    assert "EigenCAM is the same for every class" not in pages["methods/grad_cam.md"]
    assert "interpret activations as evidence" in pages["methods/grad_cam_plus_plus.md"]
    assert "Worse than the best map that ignores the network: `shortcut`" in pages["methods/eigen_cam.md"]
    assert "Mean rank in the first half of" in pages["methods/lrp.md"]
    assert (
        "It does not distinguish them on `shapes_detector`, `shapes_queries`, `shapes_unet`."
        in pages["methods/grad_cam.md"]
    )


def test_every_public_name_is_in_the_reference(pages: dict[str, str]) -> None:
    own = {cls.__name__ for cls in methods.classes()}
    named = {name for name in dir(saliency) if not name.startswith("_")} - own
    modules = {name for name in named if isinstance(getattr(saliency, name), ModuleType)}
    text = "\n".join(text for path, text in pages.items() if path.startswith("reference/"))
    missing = [name for name in named - modules if f"{{ #{reference.anchor(name)} }}" not in text]
    assert not missing
    metrics = {name for name in dir(saliency.metrics) if not name.startswith("_")} - {"METRICS"}
    assert not [name for name in metrics if f"`metrics.{name}`" not in text]
    for module in (saliency.extending, saliency.errors):
        names: list[str] = vars(module)["__all__"]
        assert not [name for name in names if f"{{ #{reference.anchor(module.__name__[9:])}.{name} }}" not in text]


def test_a_docstring_links_to_the_public_names_that_it_mentions(pages: dict[str, str]) -> None:
    assert "[`LayerError`](../reference/errors.md#saliency.errors.LayerError)" in pages["methods/grad_cam.md"]
    assert "[`heatmap`](../reference/attribution.md#saliency.heatmap)" in pages["methods/grad_cam.md"]
    assert as_markdown("The value <title> of a page.", "", {}).startswith("The value &lt;title> of")  # no HTML element


def test_a_notebook_is_a_page_with_its_pictures(pages: dict[str, str]) -> None:
    text = pages["notebooks/03_first_heatmap.md"]
    assert "```python\n" in text
    assert re.search(r"!\[.*\]\(03_first_heatmap/\d+-1\.(jpg|png)\)", text)


def test_links_lead_to_pages_of_the_site() -> None:
    text = "[a](../notebooks/03_first_heatmap.ipynb) [b](../benchmarks/results/testbed.md#x) [c](https://d.org)"
    mended = "[a](notebooks/03_first_heatmap.md) [b](benchmarks/testbed.md#x) [c](https://d.org)"
    assert as_page("docs/trust.md", text) == mended
    assert as_page("CONTRIBUTING.md", "[a](docs/extending.md)\n```\n[a](docs/b.md)\n```") == (
        "[a](extending.md)\n```\n[a](docs/b.md)\n```"
    )


def test_no_page_links_to_markdown_that_is_not_a_page(pages: dict[str, str]) -> None:
    links = {
        (name, os.path.normpath(Path(name).parent / link))
        for name, text in pages.items()
        if name.endswith(".md")
        for link in re.findall(r"\]\((?!https?:)([^)#\s]+\.md)[)#]", text)
    }
    assert len(links) > 100
    assert not [(name, page) for name, page in links if page not in pages]


def test_each_page_links_to_the_file_that_it_is_made_from(pages: dict[str, str]) -> None:
    address = re.escape(URLS["Repository"]) + r"/blob/main/([^#)]*)(?:#L\d+)?\)\{ \.source \}\n\Z"
    texts = {name: text for name, text in pages.items() if name.endswith(".md")}
    files = {name: re.search(address, text) for name, text in texts.items()}
    assert not [name for name, file in files.items() if file is None or not (ROOT / file[1]).exists()]
    assert (
        as_page("docs/trust.md", "[a](../tests/test_site.py)")
        == f"[a]({URLS['Repository']}/blob/main/tests/test_site.py)"
    )
    assert json.loads(pages["mkdocs.yml"])["site_url"] == URLS["Documentation"]


def test_lists_and_tables_begin_after_a_blank_line() -> None:
    assert with_blank_lines("a:\n- b\n  c\n- d\n  - e\n| f |") == "a:\n\n- b\n  c\n- d\n    - e\n\n| f |"


def test_the_text_for_language_models_has_all_guides_and_the_recipes(pages: dict[str, str]) -> None:
    assert pages["llms.txt"].startswith("# saliency\n\n> Which pixels drove the prediction?")
    guides = {path for path in pages if re.fullmatch(r"[\w-]+\.md|methods/.*\.md", path)}
    listed = {path.replace(".html", ".md") for path in re.findall(r"\]\(([^)]*)\)", pages["llms.txt"])}
    assert guides <= listed
    assert "(methods/grad_cam.html): Activations weighted by the mean gradient of their channel." in pages["llms.txt"]
    recipes = pages["recipes.md"]
    assert recipes in pages["llms-full.txt"]
    assert (
        len(re.findall(r"^## ", recipes, re.MULTILINE)) == len(re.findall(r"^```python", recipes, re.MULTILINE)) == 15
    )


def test_a_picture_is_drawn_again_only_if_the_code_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "PICTURES", tmp_path / "gallery")
    monkeypatch.setattr(methods, "PICTURES", tmp_path / "gallery")
    code = 'from pathlib import Path\nassert Path("assets/coffee.jpg").exists()\nPath("grad_cam.jpg").touch()\n'
    monkeypatch.setattr(gallery, "example", lambda cls: code)
    assert "](../gallery/grad_cam.jpg)" not in methods.method_page(saliency.GradCAM, {})
    assert gallery.draw([saliency.GradCAM]) == ["grad_cam"]
    assert gallery.draw([saliency.GradCAM]) == []
    assert "](../gallery/grad_cam.jpg)" in methods.method_page(saliency.GradCAM, {})
    monkeypatch.setattr(gallery, "example", lambda cls: code + "# changed\n")
    assert gallery.draw([saliency.GradCAM]) == ["grad_cam"]


def test_each_message_of_the_page_on_troubleshooting_is_in_the_code() -> None:
    texts = {
        node.value
        for file in (ROOT / "saliency").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    quoted = re.findall(
        r"^```text\n(.*?)^```", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE | re.DOTALL
    )
    parts = [part.strip() for block in quoted for part in re.split(r"\.\.\.|\n", block) if len(part.strip()) > 3]
    assert len(parts) > 25
    assert not [part for part in parts if not any(part in text for text in texts)]


def test_a_picture_does_not_depend_on_comments_and_docstrings() -> None:
    code = '"""A module."""\n\n\ndef double(x):\n    """Double."""\n    return 2 * x  # twice\n'
    assert gallery._code(code) == gallery._code("def double(x): return 2 * x")
    assert gallery._code(code) != gallery._code(code.replace("2 *", "3 *"))


def test_the_page_of_a_method_states_why_its_code_does_not_use_the_default() -> None:
    text = methods.method_page(saliency.ExtremalPerturbation, {})
    assert "ExtremalPerturbation(model, steps=200)" in text
    assert "`steps=200` keeps five photos below a few minutes" in text


def test_a_picture_depends_on_the_code_that_its_method_imports() -> None:
    files = {str(file.relative_to(ROOT / "saliency")) for file in gallery._imported(["saliency.methods.smoothing"])}
    assert {"methods/smoothing.py", "methods/gradient.py", "attribution/base.py", "hooks/rectifiers.py"} <= files
    assert not {"methods/lrp.py", "evaluation/trust.py", "batch/engines.py", "cli/commands.py"} & files


class Links(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = {""}
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src") and value:
                self.links.add(value)


@built
def test_every_link_of_the_built_site_leads_to_a_file_and_an_anchor() -> None:
    files = {file: Links(file) for file in HTML.rglob("*.html")}
    assert len(files) > 100
    broken = []
    for file, page in files.items():
        for link in page.links:
            parts = urlsplit(link)
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if parts.scheme or parts.netloc or file.name == "404.html":
                continue
            if not target.is_file() or (target in files and unquote(parts.fragment) not in files[target].anchors):
                broken.append(f"{file.relative_to(HTML)}: {link}")
    assert not broken


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@built
@pytest.mark.slow
@pytest.mark.parametrize("screen", [{}, PHONE, {"color_scheme": "dark"}], ids=["desktop", "phone", "dark"])
def test_the_site_opens_from_files_without_an_error_and_without_a_request_elsewhere(
    screen: dict[str, Any], browser: Browser
) -> None:
    with visit(browser, **screen) as window:
        for name in ("index", "recipes", "methods/index", "methods/grad_cam", "reference/render", "notebooks/01"):
            file = next(HTML.glob(f"{name}*.html"))
            window.page.goto(file.as_uri())
            window.page.wait_for_selector("h1")
            scheme = window.page.evaluate("document.body.dataset.mdColorScheme")
            assert scheme == ("slate" if "color_scheme" in screen else "default")
            assert window.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is too wide"
            pictures = "[...document.images].every(image => !image.complete || image.naturalWidth > 0)"
            assert window.page.evaluate(pictures), f"{name} lacks a picture"
            narrow = "[...document.querySelectorAll('h1, h2')].filter((each) => each.offsetWidth < 200).length"
            assert not window.page.evaluate(narrow), f"{name} has headings that a picture squeezes"
        assert_no_complaint(window)


@built
@pytest.mark.slow
@pytest.mark.parametrize("page", ["index", "methods/grad_cam"])
def test_the_header_of_a_page_has_a_link_to_the_repository(page: str, browser: Browser) -> None:
    with visit(browser) as window:
        window.page.goto((HTML / f"{page}.html").as_uri())
        link = window.page.locator("header").get_by_role("link", name="GitHub")
        assert link.is_visible()
        assert link.get_attribute("href") == URLS["Repository"]


def test_the_page_of_all_methods_has_a_picture_without_a_drawn_gallery(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(methods, "PICTURES", tmp_path / "gallery")
    page = methods.gallery_page()
    assert page.startswith("# All methods\n")
    (picture,) = re.findall(r"!\[.*\]\((.*)\)", page)
    assert (ROOT / "docs" / picture).exists()


@built
@pytest.mark.slow
def test_search_works_on_files(browser: Browser) -> None:
    with visit(browser) as window:
        for word, title in WORDS.items():
            window.page.goto((HTML / "methods" / "grad_cam.html").as_uri())
            window.page.wait_for_selector("h1")
            window.page.keyboard.press("Control+k")
            window.page.keyboard.type(word)
            window.page.get_by_role("option", name=re.compile(title)).first.wait_for()
        assert_no_complaint(window)


def assert_no_complaint(window: Visit) -> None:
    assert window.complaints == []
    elsewhere = [each for each in window.requests if not each.startswith(("file:", "data:", "about:", "blob:"))]
    assert elsewhere == []


def test_the_navigation_has_the_pages_in_the_order_of_reading(pages: dict[str, str]) -> None:
    navigation = json.loads(pages["mkdocs.yml"])["nav"]
    order = [heading for section in navigation for heading in section]
    assert order[:8] == [
        "Start in five minutes",
        "By task",
        "All methods",
        "Choosing a method",
        "Reference",
        "Notebooks",
        "Metrics",
        "Benchmarks",
    ]
