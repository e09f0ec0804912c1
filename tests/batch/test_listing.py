"""Names of files: safe, unique and reproducible."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saliency.batch.listing import LONGEST, ImageEntry, with_names
from saliency.batch.store import is_output


def photo(name: str, *folder: str) -> ImageEntry:
    return ImageEntry(f"/in/{name}", name, folder=folder, label=name)


def names(images: list[ImageEntry], taken: list[ImageEntry] | None = None) -> list[str]:
    return [image.name for image in with_names(images, taken or [])]


def named(*labels: str) -> list[str]:
    return names([photo(label) for label in labels])


def folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFKC", name).casefold())


def test_a_name_is_the_file_name_without_its_suffix() -> None:
    assert named("cat.jpg", "tiger.cat.png") == ["cat", "tiger.cat"]


def test_images_of_one_name_are_numbered() -> None:
    assert named("a.jpg", "a.jpg", "a.png", "a-2.jpg") == ["a", "a-2", "a-3", "a-2-2"]
    assert named("a-2.jpg", "a.jpg", "a.jpg") == ["a-2", "a", "a-3"]


def test_case_and_unicode_forms_do_not_distinguish_names() -> None:
    assert (
        len({folded(name) for name in named("A.png", "a.png", "É.png", "é.png", "E\u0301.png", "ﬁ.png", "fi.png")}) == 7
    )


def test_folders_keep_equal_names_apart() -> None:
    found = names([photo("a.jpg", "x"), photo("a.jpg", "y"), photo("a.jpg"), photo("a.jpg", "X")])
    assert found == ["x/a", "y/a", "a", "X/a-2"]


def test_a_folder_never_has_the_name_of_a_file() -> None:
    assert names([photo("a.jpg", "cat.grad_cam.png"), photo("cat.jpg")]) == ["cat_grad_cam_png/a", "cat"]


def test_names_of_earlier_runs_are_not_given_again() -> None:
    assert names([photo("a.png"), photo("b.png")], taken=[ImageEntry("/a", "a", name="a")]) == ["a-2", "b"]


def test_large_folders_are_split_into_numbered_ones_and_only_in_new_runs() -> None:
    flat, more = ([photo(f"{number}.png", "x") for number in numbers] for numbers in (range(5), range(5, 7)))
    new = with_names([*flat, photo("a.png")], most_per_folder=2)
    assert [one.name for one in new] == ["x/0000/0", "x/0000/1", "x/0001/2", "x/0001/3", "x/0002/4", "a"]
    assert [one.name for one in with_names(more, new, 2)] == ["x/0002/5", "x/0003/6"]
    assert [one.name for one in with_names(more, with_names(flat[:2], (), 2), 2)] == ["x/5", "x/6"]


@pytest.mark.parametrize("label", ["..", "...", "a/../../b", "/etc/passwd", "\\", "C:x", "a\nb", "<b>.png", " ", ""])
def test_no_name_leads_out_of_the_folder_or_breaks_a_line(label: str) -> None:
    (name,) = named(label)
    assert name.isprintable()
    assert not set(name) & set('/\\:*?"<>|')
    assert name not in ("", ".", "..")
    assert not name.startswith(".")


def test_a_long_name_leaves_room_for_what_follows_it() -> None:
    found = named(f"{'x' * 250}.png", f"{'x' * 251}.png", f"{'é' * 125}.png", 60 * "\U0001f408" + ".png")
    assert len(set(found)) == 4
    assert all(len(f"{name}.a_method_with_a_long_name.webp".encode()) <= 255 for name in found)
    assert all(len(name.encode()) <= LONGEST + 4 for name in found)


def test_ten_thousand_images_of_one_name_are_numbered_quickly() -> None:
    assert len(set(named(*["a.jpg"] * 10_000))) == 10_000


_TEXTS = st.text(st.characters(), max_size=12) | st.sampled_from(
    ["a.png", "A.png", "a.jpg", "a", "a-2.png", "..", "a.b"]
)


@given(st.lists(st.tuples(st.lists(_TEXTS, max_size=2), _TEXTS), max_size=12))
def test_any_names_give_unique_names_inside_the_folder(found: list[tuple[list[str], str]]) -> None:
    photos = [photo(label, *folder) for folder, label in found]
    given_names = names(photos)
    assert names(photos) == given_names
    assert len({folded(name) for name in given_names}) == len(photos)
    for name in given_names:
        parts = Path(name).parts
        assert not Path(name).is_absolute()
        assert ".." not in parts
        assert all(part.encode("utf-8") and part.isprintable() for part in parts)
        assert all("." not in part for part in parts[:-1])


def test_pictures_in_folders_of_earlier_versions_are_no_photos(tmp_path: Path) -> None:
    (tmp_path / "thumbnails").mkdir()
    (tmp_path / "manifest.json").write_text('{"format": "saliency batch 2"}')
    assert is_output(str(tmp_path / "thumbnails" / "a.jpg"))
    (tmp_path / "manifest.json").write_text('{"format": "photos 2"}')
    assert not is_output(str(tmp_path / "thumbnails" / "a.jpg"))
