"""The release check names each thing that is missing; renamed public names warn, and go when they are due."""

from __future__ import annotations

import re
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import saliency
from saliency.errors import warn_deprecated
from tests import release_check
from tests.release_check import ALWAYS, ROOT, Check, changelog_sections, removals

VERSION = "1.2.0"
PARTS = ("pyproject.toml", "README.md", ".github", "assets/CREDITS.md", "assets/coffee.jpg")


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)  # noqa: S603, S607


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A repository with all that a release needs."""
    (tmp_path / "assets").mkdir()
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    (tmp_path / "saliency").mkdir()
    (tmp_path / "saliency" / "names.py").write_text('warn_deprecated("old()", "new()", "1.3.0")\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [Unreleased]\n\n## [{VERSION}] - 2030-01-31\n\n- A.\n")
    repository = release_check.urls(ROOT)["Repository"]
    cited = f"version: {VERSION}\ndate-released: 2030-01-31\nrepository-code: {repository}\n"
    (tmp_path / "CITATION.cff").write_text(cited)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "Release")
    return tmp_path


def replaced(file: str, old: str, new: str) -> Callable[[Path], None]:
    """Return a function that changes a file of a repository."""

    def change(root: Path) -> None:
        text = (root / file).read_text()
        assert old in text
        (root / file).write_text(text.replace(old, new))

    return change


def tag_an_older_commit(root: Path) -> None:
    git(root, "tag", f"v{VERSION}")
    git(root, "commit", "-q", "--allow-empty", "-m", "Later")


STATIC = [check for check in (*ALWAYS, *release_check.RELEASE) if check.__name__ not in ("docs", "distributions")]
BROKEN: list[tuple[str, Callable[[Path], object], str]] = [
    ("clean_tree", lambda root: (root / "new.txt").touch(), r"uncommitted: new\.txt; commit or remove"),
    ("tag", tag_an_older_commit, rf"the tag v{VERSION} is of the commit \w+, not of this one"),
    ("changelog", replaced("CHANGELOG.md", VERSION, "1.1.0"), rf"no section \[{VERSION}\] with changes; rename"),
    ("changelog", replaced("CHANGELOG.md", " - 2030-01-31", ""), "has no date; write"),
    ("changelog", replaced("CHANGELOG.md", "2030-01-31", "31.01.2030"), "has no date; write"),
    (
        "changelog",
        replaced("CHANGELOG.md", "[Unreleased]\n", "[Unreleased]\n\n- B.\n"),
        "changes under Unreleased; move",
    ),
    ("citation", replaced("CITATION.cff", VERSION, "1.1.0"), rf"version is 1\.1\.0; write version: {VERSION}"),
    ("citation", replaced("CITATION.cff", "2030-01-31", "2029-01-31"), "write date-released: 2030-01-31"),
    ("citation", replaced("CITATION.cff", "https://", "https://my."), "write repository-code: https://github.com"),
    ("addresses", replaced("pyproject.toml", "Issues = ", "Bugs = "), "has no address Issues; add it"),
    ("addresses", replaced("pyproject.toml", "'((?<!!)", "'((?<!!)no"), r"the link [\w./]+\.md is broken"),
    (
        "addresses",
        replaced("pyproject.toml", "'\\1https://github.com", "'\\1https://github.org"),
        "leads to .* begin it with",
    ),
    (
        "nothing_to_do",
        replaced("README.md", "# saliency\n", "# saliency\n\nTODO: more\n"),
        "README.md:3:.*do it, or file",
    ),
    (
        "licences",
        lambda root: shutil.copy(ROOT / "assets/coffee.jpg", root / "assets/tea.jpg"),
        "does not name tea.jpg",
    ),
    (
        "pinned_actions",
        replaced(".github/workflows/tests.yml", "11bd7190", "v4"),
        "tests.yml: actions/checkout@.* not pinned",
    ),
    (
        "removals",
        replaced("saliency/names.py", "1.3.0", VERSION),
        rf"names.py: old\(\) is due for removal in {VERSION}",
    ),
]


@pytest.mark.parametrize("check", STATIC, ids=lambda check: check.__name__)
def test_nothing_is_missing_in_a_repository_that_is_ready(check: Check, ready: Path) -> None:
    assert list(check(ready, VERSION)) == []


@pytest.mark.parametrize(("name", "damage", "expected"), BROKEN)
def test_what_is_missing_is_named_with_what_to_do(
    name: str, damage: Callable[[Path], object], expected: str, ready: Path
) -> None:
    damage(ready)
    git(ready, "add", "--intent-to-add", ".")
    (problem, *_) = getattr(release_check, name)(ready, VERSION)
    assert re.search(expected, problem)


def test_a_target_of_the_makefile_that_fails_is_named_with_the_end_of_its_output(ready: Path) -> None:
    (ready / "Makefile").write_text("docs:\n\t@echo a broken link; exit 1\ndist:\n\t@true\n")
    assert re.search("make docs failed; run it, and mend: a broken link", next(release_check.docs(ready, VERSION)))
    assert list(release_check.distributions(ready, VERSION)) == [
        f"dist/ has no wheel of {VERSION}; see the output of make dist"
    ]


@pytest.mark.parametrize("given", ["", "1.2.0", "v1.2.x", "later"])
def test_a_tag_of_another_form_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert release_check.main(given) == 2
    assert "TAG=v1.2.3" in capsys.readouterr().out


@pytest.mark.parametrize("check", ALWAYS, ids=lambda check: check.__name__)
def test_every_commit_has_what_does_not_depend_on_a_version(check: Check) -> None:
    assert list(check(ROOT, VERSION)) == []


def test_the_forms_and_workflows_are_valid_and_a_bug_comes_with_the_layers_of_its_model() -> None:
    forms = {file.name: yaml.safe_load(file.read_text()) for file in (ROOT / ".github").rglob("*.yml")}
    assert {"bug.yml", "feature.yml", "wrong_map.yml", "dependabot.yml", "release.yml"} <= set(forms)
    asked = {part["id"]: part for part in forms["bug.yml"]["body"]}
    assert "saliency layers MODEL" in asked["layers"]["attributes"]["description"]
    assert asked["versions"]["validations"]["required"]


def test_no_old_name_of_this_repository_is_due_for_removal() -> None:
    newest = next(heading[1:].partition("]")[0] for heading in changelog_sections(ROOT) if heading[1].isdigit())
    assert list(removals(ROOT, newest)) == []


def test_an_old_name_warns_at_the_line_of_the_user() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # a user sees it without asking for it
        warn_deprecated("slices(at=)", "slices(index=)", "0.3.0")
    (warning,) = caught
    assert (warning.category, warning.filename) == (FutureWarning, __file__)
    assert str(warning.message) == "slices(at=) is called slices(index=) now; the old name is removed in version 0.3.0"


def test_the_provisional_names_exist_and_all_others_are_stable() -> None:
    text = (ROOT / "docs" / "stability.md").read_text()
    provisional = text.partition("## Provisional")[2].partition("\n## ")[0]
    named = set(re.findall(r"`saliency\.(\w+)`", provisional))
    assert named
    assert not named - set(dir(saliency))


def test_the_requirements_of_the_recipe_are_those_of_the_project() -> None:
    text = re.sub(r"{%.*?%}|{{ (\w+) }}", r"\1", (ROOT / "recipe" / "meta.yaml").read_text())
    recipe = yaml.safe_load(text.replace(">=python_min", "").replace(" python_min", ""))
    project = release_check.pyproject(ROOT)
    names = {"torch": "pytorch", "matplotlib": "matplotlib-base"}

    def renamed(requirements: list[str]) -> set[tuple[str, ...]]:
        pairs = [re.fullmatch(r"([\w-]+)\s*(.*)", requirement) for requirement in requirements]
        return {(names.get(pair[1], pair[1]), pair[2]) for pair in pairs if pair}

    assert renamed(recipe["requirements"]["run"]) - {("python", "")} == renamed(project["project"]["dependencies"])
    host = renamed(recipe["requirements"]["host"]) - {("python", ""), ("pip", "")}
    assert host == renamed(project["build-system"]["requires"])
    scripts = {line.partition(" = ")[0]: line.partition(" = ")[2] for line in recipe["build"]["entry_points"]}
    assert scripts == project["project"]["scripts"]
    assert recipe["package"]["name"] == project["project"]["name"]


def test_what_is_left_for_the_owner_is_listed() -> None:
    left = "\n".join(release_check.owner(ROOT, "99.0.0"))
    for word in ("authors", "family-names", 'version = "99.0.0"', "sha256", "maintainers", "git tag v99.0.0"):
        assert word in left
