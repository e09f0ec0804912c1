"""The promises of names: no two photos share one, and a folder is the pictures in it."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from saliency.cli.images import find_photos, labels


@given(st.lists(st.sampled_from(["a", "A", "b", "a-2", "a.jpg", "ä", "a\u0308"]), max_size=9), st.data())
def test_no_two_photos_ever_share_a_label(stems: list[str], data: st.DataObject) -> None:
    paths = [
        Path(data.draw(st.sampled_from(["x", "y"])), stem + data.draw(st.sampled_from([".jpg", ".png", ".JPG", ""])))
        for stem in stems
    ]
    given_labels = labels(paths)
    assert len({label.casefold() for label in given_labels}) == len(paths)
    for path, label in zip(paths, given_labels, strict=True):
        assert label.startswith(path.stem)


def test_a_folder_is_its_pictures_sorted_and_each_photo_comes_once(tmp_path: Path) -> None:
    for name in ("b.JPG", "a.webp", "c.txt", ".d.png"):
        (tmp_path / name).touch()
    found = find_photos([tmp_path / "b.JPG", tmp_path, f"{tmp_path}/./a.webp"])
    assert [photo.path.name for photo in found] == ["b.JPG", "a.webp"]
