"""What the README says is so: its code runs, its table is the registry's, its files exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.readme import README, with_table
from saliency.methods import METHODS

ROOT = README.parent
TEXT = README.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _registry_restored() -> Iterator[None]:
    """The README defines a method of its own, which the other tests need not know."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


def test_every_code_block_runs_in_order_as_one_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    monkeypatch.chdir(tmp_path)
    session: dict[str, object] = {}
    assert len(BLOCKS) >= 6
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"README.md, python block {number + 1}", "exec"), session)  # noqa: S102
    with Image.open(tmp_path / "espresso.png") as drawn, Image.open(ROOT / "assets/coffee.jpg") as photo:
        assert drawn.size == photo.size
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_what_comments_in_the_code_promise_is_what_comes() -> None:
    promises = re.findall(
        r"^(?P<code>[^#\n]+?)  # (?P<value>\(.*\)|\d+ relu rewritten)$", "\n".join(BLOCKS), re.MULTILINE
    )
    assert len(promises) >= 3
    session: dict[str, object] = {}
    for block in BLOCKS:
        if ".save" in block or "savefig" in block:
            block = re.sub(r"^.*(\.save|savefig).*$", "", block, flags=re.MULTILINE)
        exec(block, session)  # noqa: S102
        for code, value in promises:
            if code in block:
                found = eval(code, session)  # noqa: S307
                assert str(tuple(found) if isinstance(found, tuple) else found) == value


def test_the_table_of_methods_is_the_registry() -> None:
    assert with_table(TEXT) == TEXT, "run: python -m benchmarks.readme"


def test_every_file_that_is_linked_exists() -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", TEXT)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\$ make (\w+)", TEXT, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
