"""The README and the pages under docs/ are true: their code runs, their tables are current, their files exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import saliency
from benchmarks.methods_table import PAGE, with_table
from docs.site.markdown import URLS
from docs.site.methods import families
from saliency import LRP, Attribution
from saliency.attribution.base import summary
from saliency.methods import METHODS
from saliency.relevance import Epsilon
from saliency.testing import check_method, images, tiny_model
from tests.evaluation.metric_checks import metric_checks
from tests.integrations import stand_in
from tests.registry import restored_registry

pytestmark = pytest.mark.usefixtures("_registry_restored")

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
PROMISE = re.compile(r"^([^#\n\s=][^#\n=]*[^:])  # (\(.*\)|\d+ relu rewritten|True|blocks\.\d)$", re.MULTILINE)
EXTENDING = ROOT / "docs" / "extending.md"
# A test measures fewer images than a page.
SHORTER = {"draw_scenes(8,": "draw_scenes(2,"}


def blocks(page: Path) -> list[str]:
    """The blocks of Python code of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the image has only")  # words such as "of" follow from the text
def test_the_code_of_a_page_runs_in_order_and_gives_what_its_comments_say(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    (tmp_path / "out").mkdir()  # by `make demo`
    monkeypatch.chdir(tmp_path)
    stand_in(monkeypatch)
    session: dict[str, object] = {}
    for number, block in enumerate(blocks(page)):
        for text, shorter in SHORTER.items():
            block = block.replace(text, shorter)
        exec(compile(block, f"{page.name}, python block {number + 1}", "exec"), session)  # noqa: S102
        for code, value in PROMISE.findall(block):
            found = eval(code, session)  # noqa: S307
            assert str(tuple(found) if isinstance(found, tuple) else found) == value


def test_the_first_lines_of_the_readme_draw_the_photo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    (tmp_path / "out").mkdir()  # by `make demo`
    monkeypatch.chdir(tmp_path)
    exec(blocks(README)[0], {})  # noqa: S102
    with Image.open(tmp_path / "out" / "espresso.png") as drawn, Image.open(ROOT / "assets/coffee.jpg") as photo:
        assert drawn.size == photo.size


def test_the_readme_is_short_and_lists_a_dozen_methods_with_their_summaries() -> None:
    text = README.read_text()
    assert text.count("\n") <= 140
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE)
    methods = {cls.__name__: summary(cls) for cls in METHODS.values()}
    assert len(rows) == 12
    assert dict(rows).items() <= methods.items()
    assert f"[all {len(methods)} methods](docs/choosing-a-method.md)" in text
    assert f"with {len(methods)} attribution" in text


def test_every_method_belongs_to_a_family_on_the_page_that_lists_all() -> None:
    assert "other methods" not in families()
    assert sorted(cls.__name__ for members in families().values() for cls in members) == sorted(
        cls.__name__ for cls in METHODS.values() if cls.__module__.startswith("saliency.methods.")
    )


def test_the_table_of_methods_is_the_registry() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "run: python -m benchmarks.methods_table"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_that_is_linked_exists(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?://)([^)#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


MEASURED = re.compile(r"\d ?%|\d times (?:the|as)\b|times faster|(?:faster|slower) than|as long as")
SUBJECT = re.compile(
    r"EfficientNet|[Rr]es[Nn]et|shapes_|vit_|ViT-|bundled network|[a-z]+ photos?\b|machine|seeds|scenes"
)
EVIDENCE = re.compile(r"\]\([^)]*(?:benchmarks|tests)[/.][^)]*\)|python -m benchmarks")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_figure_that_was_measured_on_a_network_or_a_photo_links_to_its_benchmark_or_test(page: Path) -> None:
    text = re.sub(r"^```.*?^```|^\|.*?$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\n|\n(?=- )", text)]
    claims = [part for part in paragraphs if MEASURED.search(part) and SUBJECT.search(part)]
    assert not [part for part in claims if not EVIDENCE.search(part)]


@pytest.mark.parametrize("name", ["deletion", "road", "combined_road", "average_drop", "random_logit"])
def test_a_metric_takes_as_many_forwards_as_its_page_states(name: str) -> None:
    row = re.search(rf"^\| `{name}`.*\| (\d+)[^|]*\|$", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    model, scenes = saliency.load("shapes_cnn"), saliency.testbed.draw_scenes(1, seed=1_000_000)
    method = saliency.GradCAM(model)
    explanation = method.attribute(scenes.images, scenes.labels.tolist())
    passes: list[int] = []
    with model.register_forward_hook(lambda module, args, output: passes.append(len(args[0]))):
        saliency.metrics.measure(name, explanation, method=method, inputs=scenes.images, controls=False)
    # The first call also checks whether the images of a batch affect each other.
    assert 0 <= sum(passes) - int(row[1]) <= 4  # type: ignore[index]


def test_every_metric_has_a_row() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    assert set(saliency.metrics.METRICS) <= {name for row in rows for name in re.findall(r"\w+", row)}


def test_every_page_is_linked_from_the_readme() -> None:
    links = re.findall(r"\]\((docs/[^)#]+)\)", README.read_text())
    assert {ROOT / link for link in links} == set(PAGES) - {README}


def test_the_readme_begins_with_the_clone_the_demo_and_the_lines_that_draw_the_picture() -> None:
    first, second = re.findall(r"^```(\w+\n.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)[:2]
    assert first.startswith(f"bash\ngit clone {URLS['Repository']} && cd saliency\nmake demo ")
    assert re.search("^demo:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert second.startswith("python\nimport saliency\n")
    assert README.read_text().index("```python") < README.read_text().index("](assets/readme/") < 1200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_to_copy_have_no_prompt(page: Path) -> None:
    code = re.findall(r"^```\w+\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert not [line for block in code for line in block.splitlines() if line.startswith("$ ")]


def test_the_examples_of_the_readme_write_into_one_folder_that_git_ignores() -> None:
    text = README.read_text()
    written = re.findall(r'\.save\("([^"]+)"\)|--out (\S+)', text)
    assert len(written) >= 3
    assert {Path(file or folder).parts[0] for file, folder in written} == {"out"}
    assert "out/" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_recipes_and_the_page_on_batch_jobs_write_into_different_folders() -> None:
    recipes, batch = (
        set(re.findall(r'batch\("\w+", "(\w+)"|--out (\w+)', (ROOT / "docs" / name).read_text()))
        for name in ("recipes.md", "batch.md")
    )
    assert recipes
    assert not recipes & batch


def methods_of_the_page() -> dict[str, type[Attribution]]:
    """The classes that the page on extending defines, one for each family."""
    before, session = set(METHODS), dict[str, object]()
    with restored_registry():
        for block in blocks(EXTENDING):
            exec(block, session)  # noqa: S102
        return {name: cls for name, cls in METHODS.items() if name not in before}


def test_the_rule_and_the_metric_of_the_page_keep_their_promises() -> None:
    session: dict[str, Any] = {}
    for block in blocks(EXTENDING):
        exec(block, session)  # noqa: S102
    for _, check in metric_checks(session["BorderShare"]):
        check()
    model, x = tiny_model(), images(2)
    found = LRP(model, composite={"conv": session["SquaredParts"](), "linear": Epsilon(0)}).attribute(x, 1)
    assert found.residual is not None
    torch.testing.assert_close(found.residual, torch.zeros(2), atol=1e-4, rtol=0)


def test_the_methods_of_the_page_use_public_names_only() -> None:
    trees = [ast.parse(block) for block in blocks(EXTENDING)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imports = {ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)}
    assert imports == {"import torch", "import saliency"}
    used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    for name in (name.split(".") for name in used if name.startswith("saliency.")):
        module = saliency if len(name) == 2 else getattr(saliency, name[1])
        assert name[-1] in dir(module), ".".join(name)
    families = {base.__name__ for cls in methods_of_the_page().values() for base in cls.__bases__}
    listed = re.findall(r"^\| [^|]* \| `(\w+)` \|", EXTENDING.read_text(), re.MULTILINE)
    assert families == set(listed)


@pytest.mark.parametrize("name", sorted(methods_of_the_page()))
@pytest.mark.slow
def test_a_method_of_each_family_from_public_names_keeps_every_promise(name: str) -> None:
    cls = methods_of_the_page()[name]
    METHODS[name] = cls
    check_method(cls)


def test_the_chinese_readme_has_the_code_and_the_number_of_methods_of_the_readme() -> None:
    english, chinese = README.read_text(), (ROOT / "README.zh.md").read_text()
    fenced = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    assert fenced.findall(chinese) == fenced.findall(english)
    assert f"{len(METHODS)} 种归因方法" in chinese
    for link in re.findall(r"\]\((?!https?://)([^)#]+)\)", chinese):
        assert (ROOT / link).exists(), link


def test_the_paper_states_figures_of_the_benchmarks() -> None:
    paper = (ROOT / "paper" / "paper.md").read_text()
    for file in re.findall(r"`(benchmarks/results/[\w.]+)`", paper):
        assert (ROOT / file).is_file()
    speed = (ROOT / "benchmarks" / "results" / "speed.md").read_text()
    for row in ("| grad_cam | cam | 1.014 |", "| five CAMs together | grad_cam | 1.007 |"):
        assert row in speed
        assert row.split("| ")[-1].strip(" |") in paper
    assert f"{len(METHODS)} methods" in paper
