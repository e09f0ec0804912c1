"""Files that are there whole or not at all, whatever has their name already."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from saliency.io.atomic_write import atomic_write, inside


def write(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text)


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    write(tmp_path / "a", "first")
    write(tmp_path / "a", "second")
    assert (tmp_path / "a").read_text() == "second"
    with pytest.raises(UnicodeEncodeError):
        write(tmp_path / "a", "third, and half a character: \ud800")
    assert (tmp_path / "a").read_text() == "second"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for target in ("there/old", "there/new"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(target)
        write(tmp_path / "link", target)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / target).read_text() == target


def test_names_inside_a_folder_lead_nowhere_else(tmp_path: Path) -> None:
    home, link = tmp_path / "home", tmp_path / "link"
    (home / "real").mkdir(parents=True)
    (home / "file").write_text("here")
    link.symlink_to(home)  # the folder itself may be a link
    for folder in (home, link):
        for name in ("file", "new", "real", "real/new", "new/new"):
            assert inside(folder, name) == folder / name
    (home / "linked").symlink_to(tmp_path)
    (home / "here").symlink_to("file")
    for name in ("linked", "linked/new", "here", "..", "../new", "real/../../new", str(tmp_path / "new")):
        with pytest.raises(OSError, match="is a link, or leads out of the folder"):
            inside(home, name)


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="a device or a pipe has that name"):
        write(tmp_path / "pipe", "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert list(tmp_path.iterdir()) == [tmp_path / "pipe"]


def test_what_standard_output_leads_to_is_not_replaced() -> None:
    for name in ("/dev/stdout", "/dev/null", "/proc/self/fd/1"):
        with pytest.raises(FileExistsError, match="a device or a pipe has that name"):
            write(Path(name), "text")
