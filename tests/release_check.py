"""Print what a release lacks, each with what to do about it: `make release-check TAG=v1.2.3`."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]

Check = Callable[[Path, str], Iterator[str]]
"""Function of the repository and the version of the release, which yields what is missing and what to do."""


def clean_tree(root: Path, version: str) -> Iterator[str]:
    """Check that everything is committed."""
    changed = git(root, "status", "--porcelain")
    if changed:
        yield f"uncommitted: {', '.join(line[3:] for line in changed.splitlines()[:5])}; commit or remove these files"


def tag(root: Path, version: str) -> Iterator[str]:
    """Check that the tag is of this commit, if it exists."""
    tagged = git(root, "rev-list", "-n1", f"v{version}") if git(root, "tag", "--list", f"v{version}") else ""
    if tagged and tagged != git(root, "rev-parse", "HEAD"):
        yield f"the tag v{version} is of the commit {tagged[:7]}, not of this one; choose another version"


def changelog(root: Path, version: str) -> Iterator[str]:
    """Check that the changes have a section with the version and a date, and that nothing is above it."""
    sections = changelog_sections(root)
    heading = heading_of(root, version)
    if not sections.get(heading):
        yield f"CHANGELOG.md has no section [{version}] with changes; rename the section Unreleased"
    elif not is_date(heading.rpartition(" - ")[2]):
        yield f'CHANGELOG.md: "## {heading}" has no date; write "## [{version}] - {date.today()}"'  # noqa: DTZ011
    if sections.get("[Unreleased]"):
        yield f"CHANGELOG.md has changes under Unreleased; move them to [{version}], and keep the empty heading"


def citation(root: Path, version: str) -> Iterator[str]:
    """Check that CITATION.cff has the version, the date of the changelog and the address."""
    cited, released = (
        yaml.safe_load((root / "CITATION.cff").read_text()),
        heading_of(root, version).rpartition(" - ")[2],
    )
    expected = {"version": version, "date-released": released, "repository-code": urls(root).get("Repository")}
    for name, value in expected.items():
        if str(cited.get(name)) != str(value):
            yield f"CITATION.cff: {name} is {cited.get(name)}; write {name}: {value}"


def addresses(root: Path, version: str) -> Iterator[str]:
    """Check that the addresses of the project are stated, and that PyPI's copy of the README has only whole ones."""
    for name in ("Documentation", "Repository", "Changelog", "Issues"):
        if not re.fullmatch(r"https://[\w.-]+/[\w./-]*", urls(root).get(name, "")):
            yield f"pyproject.toml: [project.urls] has no address {name}; add it"
    hook = pyproject(root)["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    readme, repository = (root / "README.md").read_text(), urls(root).get("Repository", "")
    for each in hook["substitutions"]:
        readme = re.sub(each["pattern"], each["replacement"], readme)
        if not each["replacement"].startswith(f"\\1{repository}/"):
            yield f"pyproject.toml: fancy-pypi-readme leads to {each['replacement'][2:]}; begin it with {repository}/"
    for link in re.findall(r"\]\((?!https://|#)([^)]*)\)", readme):
        yield f"README.md: the link {link} is broken on PyPI; mend the substitutions of fancy-pypi-readme"


def nothing_to_do(root: Path, version: str) -> Iterator[str]:
    """Check that no file has a note on work that is left."""
    found = git(root, "grep", "-nwIE", "TO" + "DO|FIX" + "ME|XX" + "X", "--", ":!*.ipynb")
    for line in found.splitlines():
        yield f"{line.strip()[:90]}; do it, or file an issue"


def licences(root: Path, version: str) -> Iterator[str]:
    """Check that each picture and photo has its author and licence in assets/CREDITS.md."""
    credits_page = (root / "assets" / "CREDITS.md").read_text()
    for file in sorted(path.relative_to(root / "assets").as_posix() for path in (root / "assets").rglob("*.*")):
        if file != "CREDITS.md" and f"`{file}`" not in credits_page:
            yield f"assets/CREDITS.md does not name {file}; add its author and licence"


def pinned_actions(root: Path, version: str) -> Iterator[str]:
    """Check that each action is pinned by a commit, with its version as a comment."""
    for file in sorted((root / ".github" / "workflows").glob("*.yml")):
        for used in re.findall(r"uses: *(.*)", file.read_text()):
            if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", used):
                yield f"{file.name}: {used} is not pinned; write NAME@COMMIT  # VERSION"


def removals(root: Path, version: str) -> Iterator[str]:
    """Check that no old name is left that was announced to go in this version or before."""
    for file in sorted((root / "saliency").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "warn_deprecated":
                old, _, removed_in = (ast.literal_eval(argument) for argument in node.args)
                if Version(removed_in) <= Version(version):
                    yield f"{file.name}: {old} is due for removal in {removed_in}; remove the old name"


def docs(root: Path, version: str) -> Iterator[str]:
    """Check that the site builds without a warning."""
    yield from built("docs", root, version)


def distributions(root: Path, version: str) -> Iterator[str]:
    """Check that the wheel and the sdist of this version build, pass twine, and work with the core dependencies."""
    problems = list(built("dist", root, version))
    if not problems and not list((root / "dist").glob(f"*-{version}-*.whl")):
        problems.append(f"dist/ has no wheel of {version}; see the output of make dist")
    yield from problems


def built(target: str, root: Path, version: str) -> Iterator[str]:
    """Run a target of the Makefile as the version, and yield the end of its output if it fails."""
    environment = os.environ | {"SETUPTOOLS_SCM_PRETEND_VERSION": version}
    words = ["make", "--no-print-directory", target]
    run = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if run.returncode:
        yield f"make {target} failed; run it, and mend: {' '.join((run.stdout + run.stderr).split()[-30:])}"


ALWAYS: tuple[Check, ...] = (addresses, nothing_to_do, licences, pinned_actions)
"""Checks that hold for every commit; the tests run them."""
RELEASE: tuple[Check, ...] = (clean_tree, tag, changelog, citation, removals, docs, distributions)


def git(root: Path, *arguments: str) -> str:
    """Return the output of git; empty if nothing matches."""
    run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)  # noqa: S603, S607
    return run.stdout.rstrip("\n")


def pyproject(root: Path) -> dict[str, Any]:
    """Return the contents of pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text())


def urls(root: Path) -> dict[str, str]:
    """Return the addresses of the project by name."""
    found: dict[str, str] = pyproject(root)["project"].get("urls", {})
    return found


def changelog_sections(root: Path) -> dict[str, str]:
    """Return the text of each section of the changelog by its heading."""
    parts = re.split(r"^## (.*)\n", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True))


def heading_of(root: Path, version: str) -> str:
    """Return the heading of a version in the changelog, `[1.2.3] - 2026-01-31`; empty if it has none."""
    return next((heading for heading in changelog_sections(root) if heading.startswith(f"[{version}]")), "")


def is_date(text: str) -> bool:
    """Return whether a text is a date such as 2026-01-31."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def owner(root: Path, version: str) -> Iterator[str]:
    """Check what only the owner of the project can fill in or do."""
    if "authors: []" in (root / "paper" / "paper.md").read_text():
        yield "paper/paper.md has no authors; write their names, affiliations and ORCIDs"
    if [author.get("name") for author in yaml.safe_load((root / "CITATION.cff").read_text())["authors"]] == [
        "saliency contributors"
    ]:
        yield "CITATION.cff names no person; write family-names and given-names of the authors"
    recipe = (root / "recipe" / "meta.yaml").read_text()
    if f'version = "{version}"' not in recipe:
        yield f'recipe/meta.yaml: write {{% set version = "{version}" %}}'
    if "sha256: 00000000" in recipe:
        yield "recipe/meta.yaml: write the sha256 of the sdist, after the release is on PyPI"
    if "recipe-maintainers: []" in recipe:
        yield "recipe/meta.yaml: write the names of the maintainers on GitHub"
    if not git(root, "remote", "get-url", "origin").removesuffix(".git").endswith(urls(root)["Repository"][8:]):
        yield f"no remote origin at {urls(root)['Repository']}; create the repository there, or change [project.urls]"
    if not git(root, "tag", "--list", f"v{version}"):
        yield f"no tag: git tag v{version}, and push the tag"


def main(given: str) -> int:
    """Run all checks of a tag, print their results, and return the exit code."""
    try:
        version = str(Version(given.removeprefix("v")))
    except InvalidVersion:
        version = ""
    if given != f"v{version}":
        print(f'"{given}" is not the tag of a version; write: make release-check TAG=v1.2.3')
        return 2
    missing = 0
    for check in (*ALWAYS, *RELEASE):
        problems = list(check(ROOT, version))
        missing += len(problems)
        print(f"{'MISSING' if problems else 'ok':8}{check.__name__.replace('_', ' ')}", flush=True)
        for problem in problems:
            print(f"        - {problem}")
    print("left for the owner:")
    for problem in owner(ROOT, version):
        print(f"        - {problem}")
    print(f"missing: {missing}" if missing else f"nothing is missing: git tag v{version}, and push the tag")
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
