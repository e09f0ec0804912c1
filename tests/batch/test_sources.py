"""Sources of images: folders, files, patterns, lists and shards, in a fixed order."""

from __future__ import annotations

import inspect
import io
import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from saliency.batch import BatchError, batch, sources
from saliency.batch.failures import printable
from saliency.batch.listing import ImageEntry, merge_listing
from saliency.batch.sources import target_of_row
from saliency.batch.store import FORMAT
from saliency.errors import ImageError
from saliency.io.inputs import open_image
from saliency.render.overlay import save_drawing


def find_images(*places: Any, **options: Any) -> list[ImageEntry]:
    return sources.find_images(*places, **options).entries


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names(photos: list[ImageEntry], folder: Path) -> list[str]:
    return [os.path.relpath(photo.path, folder) for photo in photos]


# Folders and patterns ----------------------------------------------------------------------------------------------


def test_a_folder_gives_its_images_sorted_by_name(tmp_path: Path) -> None:
    touch(tmp_path, "b.JPG", "a.webp", "c.txt", ".d.png", "sub/e.png")
    assert names(find_images([tmp_path]), tmp_path) == ["a.webp", "b.JPG"]


@pytest.mark.parametrize("suffix", [".jfif", ".jpe", ".mpo", ".apng", ".dib", ".jpx", ".pfm", ".avifs"])
def test_every_format_that_is_read_is_taken_from_a_folder(tmp_path: Path, suffix: str) -> None:
    image = Image.effect_noise((20, 10), 90)
    (image.convert("F") if suffix == ".pfm" else image.convert("RGB")).save(tmp_path / f"a{suffix}")
    (entry,) = find_images([tmp_path])
    assert entry.open().size == (20, 10)


def test_other_files_of_folders_are_counted_by_suffix(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", "b.TGA", "c.tga", "README", ".d.png", "sub.x/e.ico", ".git/f")
    assert sources.find_images([tmp_path, tmp_path]).others == {".tga": 2, "no suffix": 1, "hidden": 1}
    assert sources.find_images([tmp_path], recursive=True).others[".ico"] == 1


def test_images_of_unsupported_formats_are_listed(tmp_path: Path) -> None:
    touch(tmp_path, "a.jpg", "b.HEIC", "c.jxl")
    assert names(find_images([tmp_path]), tmp_path) == ["a.jpg", "b.HEIC", "c.jxl"]


def test_subfolders_come_after_the_images_beside_them(tmp_path: Path) -> None:
    touch(tmp_path, "b/x.png", "b/a/y.png", "a/z.png", "c.png", ".hidden/h.png")
    photos = find_images([tmp_path], recursive=True)
    assert names(photos, tmp_path) == ["c.png", "a/z.png", "b/x.png", "b/a/y.png"]
    assert [photo.folder for photo in photos] == [(), ("a",), ("b",), ("b", "a")]


def test_links_to_folders_are_followed_once_and_loops_end(tmp_path: Path) -> None:
    touch(tmp_path, "in/a/x.png", "other/y.png")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "a" / "up").symlink_to("..")
    (tmp_path / "in" / "b").symlink_to(tmp_path / "other")
    (tmp_path / "in" / "c").symlink_to(tmp_path / "other")
    (tmp_path / "in" / "d").symlink_to("d")
    assert names(find_images([tmp_path / "in"], recursive=True), tmp_path) == ["in/a/x.png", "in/b/y.png"]


def test_a_tree_is_searched_with_one_nested_call_for_each_level(tmp_path: Path) -> None:
    inside = tmp_path.joinpath(*["d"] * 120)
    inside.mkdir(parents=True)
    (inside / "x.png").touch()
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)
    try:
        (found,) = find_images([tmp_path], recursive=True)
    finally:
        sys.setrecursionlimit(limit)
    assert len(found.folder) == 120


def test_a_folder_with_an_image_suffix_is_a_failure_and_is_searched(tmp_path: Path) -> None:
    touch(tmp_path, "x.png/y.png")
    assert names(find_images([tmp_path]), tmp_path) == ["x.png"]
    assert names(find_images([tmp_path], recursive=True), tmp_path) == ["x.png", "x.png/y.png"]


def test_sources_keep_their_order_and_an_image_comes_once(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", "b.png", "c.png")
    words: list[Path | str] = [tmp_path / "c.png", tmp_path, f"{tmp_path}/./a.png"]
    assert names(find_images(words), tmp_path) == ["c.png", "a.png", "b.png"]


def test_patterns_are_expanded_unless_a_file_has_that_name(tmp_path: Path) -> None:
    touch(tmp_path, "b1.png", "b2.png", "c.png", "d/b3.png", "[x].png")
    assert names(find_images([f"{tmp_path}/b*.png"]), tmp_path) == ["b1.png", "b2.png"]
    assert names(find_images([f"{tmp_path}/**/b*.png"]), tmp_path) == ["b1.png", "b2.png", "d/b3.png"]
    assert names(find_images([f"{tmp_path}/[x].png"]), tmp_path) == ["[x].png"]
    assert "no file matches" in find_images([f"{tmp_path}/z*.png"])[0].problem


def test_the_files_of_a_run_are_left_out(tmp_path: Path) -> None:
    made = ("out/overlays/b.png", "out/heat/x/b.webp", "out/thumbnails/b.jpg")
    others = ("out/manifest.json", "out/listing.jsonl", "out/manifest.jsonl", "out/index.html")
    theirs = ("thumbnails/d.png", "site/thumbnails/e.png", "site/manifest.json")
    touch(tmp_path, "a.png", *made, *others, "out/c.png", *theirs)
    (tmp_path / "out" / "manifest.json").write_text(json.dumps({"format": FORMAT}))
    kept = ["a.png", "out/c.png", "site/thumbnails/e.png", "thumbnails/d.png"]
    each_named = [f"{tmp_path}/{name}" for name in ("a.png", *made, *others, "out", "site/thumbnails", "thumbnails")]
    for words in ([str(tmp_path)], [f"{tmp_path}/**/*.*g", f"{tmp_path}/**/*.webp"], each_named):
        found, left_out, _ = sources.find_images(words, recursive=True)
        assert names(found, tmp_path) == kept
        assert left_out == len(made)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_overlays_are_recognised_by_their_metadata_in_every_format(tmp_path: Path, suffix: str) -> None:
    drawing = Image.effect_noise((90, 60), 90).convert("RGB")
    save_drawing(drawing, tmp_path / f"cat.grad_cam.{suffix}")
    save_drawing(drawing, tmp_path / f"sheet.{suffix}")
    for name in ("cat", "my.cat", "sheet.of.music"):
        drawing.save(tmp_path / f"{name}.{suffix}")
    touch(tmp_path, "empty.image.png")
    os.mkfifo(tmp_path / "no.file.png")  # opening it would block
    found, left_out, _ = sources.find_images([tmp_path])
    assert names(found, tmp_path) == sorted(
        [f"{name}.{suffix}" for name in ("cat", "my.cat", "sheet.of.music")] + ["empty.image.png", "no.file.png"]
    )
    assert left_out == 2
    shell = [str(path) for path in tmp_path.iterdir()]  # as a shell expands a pattern
    assert sources.find_images(shell).left_out == 2
    (alone,), left_out, _ = sources.find_images([tmp_path / f"cat.grad_cam.{suffix}"])
    assert left_out == 1
    with pytest.raises(ImageError, match="is a file that saliency wrote"):
        alone.open()


@pytest.mark.parametrize("word", ["thumbnails", "thumbnails/a.jpg", "thumbnails/*", "."])
def test_images_where_the_run_would_write_are_refused(tmp_path: Path, word: str) -> None:
    touch(tmp_path, "thumbnails/a.jpg")
    with pytest.raises(BatchError, match=r"thumbnails exists.*choose another folder"):
        batch(f"{tmp_path}/{word}", tmp_path, recursive=True)
    assert not (tmp_path / "manifest.json").exists()


def test_undecodable_names_survive_the_listing(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff\xfe.png")).write_bytes(picture(0))
    photo = find_images([tmp_path])[0]
    again = ImageEntry.from_fields(json.loads(photo.to_json()))
    assert again == photo
    assert again.open().size == (5, 4)
    assert printable(photo.source).endswith("/\\xff\\xfe.png")
    assert photo.to_json().isascii()


# Lists ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.csv", "path,target\na.png,cat\nsub/b.png,7\n\nc.png,\n"),
        ("list.csv", "a.png,cat\nsub/b.png,7\nc.png\n"),
        ("list.csv", "\ufefftarget,note,File\ncat,x,a.png\n7,y,sub/b.png\n,z,c.png\n"),
        ("list.csv", "\ufeff# made by hand, 2026\n# x;y;z\nPath;Target\na.png;cat\n#b.png;9\nsub/b.png;7\nc.png;\n"),
        ("list.csv", "a.png;cat\nsub/b.png;7\nc.png;\n"),
        ("list.tsv", "path\ttarget\na.png\tcat\nsub/b.png\t7\nc.png\t\n"),
        ("list.jsonl", '{"path": "a.png", "target": "cat"}\n{"target": 7, "path": "sub/b.png"}\n\n"c.png"\n'),
        ("list.ndjson", '{"image": "a.png", "label": "cat"}\n{"label": "7", "image": "sub/b.png"}\n{"file": "c.png"}'),
    ],
)
def test_lists_of_every_format_give_the_same_images(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, "utf-8")
    found = find_images([tmp_path / name])
    assert names(found, tmp_path) == ["a.png", "sub/b.png", "c.png"]
    assert [photo.target for photo in found] in (["cat", "7", None], ["cat", 7, None])
    assert [photo.source for photo in found] == ["a.png", "sub/b.png", "c.png"]


def test_plain_lines_are_paths_with_any_characters(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a, b.png\n\n/x/c.png\r\n")
    found = find_images([tmp_path / "list.txt"])
    assert [photo.path for photo in found] == [f"{tmp_path}/a, b.png", "/x/c.png"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [("notes.txt", "Dear reader,\nthis is prose.\n", "one path per line"), ("a.csv", "x,1\ny,2\n", "a column path")],
)
def test_text_that_is_not_a_list_is_an_error_with_the_form_of_a_list(
    tmp_path: Path, name: str, text: str, expected: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(
        BatchError, match=rf"no row of the list .*{name} names an image, such as .*; expected {expected}"
    ):
        find_images([tmp_path / name])
    (tmp_path / name).write_text(text + "removed.png\n")  # a list whose images were removed
    assert len(find_images([tmp_path / name])) == 3


def test_an_address_is_an_image_with_the_cure() -> None:
    (image,) = find_images(["https://example.org/cat.jpg?size=3"])
    assert "download it first, as in: curl -s URL | saliency explain -" in image.problem
    with pytest.raises(ImageError, match="curl"):
        open_image("https://example.org/cat.jpg")


def test_a_line_without_a_path_is_named_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "list.jsonl").write_text('"a.png"\nnot json\n{"target": 1}\n[1]\n')
    found = find_images([tmp_path / "list.jsonl"])
    assert [photo.problem for photo in found] == ["", *["the line has no path"] * 3]
    assert found[1].source.endswith("list.jsonl:2")


def test_every_row_of_a_list_counts(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("a.png,cat\na.png,dog\n")
    assert [photo.target for photo in find_images([tmp_path / "list.csv"])] == ["cat", "dog"]


def test_an_unreadable_list_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_bytes(b'"' + b"x" * 200_000)
    with pytest.raises(BatchError, match=r"list\.csv cannot be read: field larger"):
        find_images([tmp_path / "list.csv"])


@pytest.mark.parametrize(
    ("text", "target"), [("3", "3"), (" -1 ", "-1"), ("tiger cat", "tiger cat"), ("", None), (None, None), (4, 4)]
)
def test_a_target_is_an_index_a_text_or_nothing(text: object, target: object) -> None:
    assert target_of_row(text) == target


def test_targets_match_by_path_or_by_a_unique_name(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.png", "in/b.png", "in/x/c.png", "in/y/c.png")
    (tmp_path / "t.csv").write_text("path,target\nin/a.png,1\nb.png,2\nc.png,3\nin/y/c.png,4\n")
    found = find_images([tmp_path / "in"], recursive=True, targets=tmp_path / "t.csv")
    assert [photo.target for photo in found] == ["1", "2", None, "4"]
    (tmp_path / "t.csv").write_text("path,target\nz.png,1\n")
    with pytest.raises(BatchError, match="matches none of the 4 images"):
        find_images([tmp_path / "in"], recursive=True, targets=tmp_path / "t.csv")
    with pytest.raises(BatchError, match="does not exist"):
        find_images([tmp_path / "in"], targets=tmp_path / "u.csv")


def test_targets_are_for_images_without_a_target_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,target\na.png,cat\nb.png,\nc.png,0\n")
    (tmp_path / "t.csv").write_text("path,target\na.png,dog\nb.png,dog\nc.png,1\n")
    found = find_images([tmp_path / "list.csv"], targets=tmp_path / "t.csv")
    assert [photo.target for photo in found] == ["cat", "dog", "0"]


# Shards --------------------------------------------------------------------------------------------------------------


def picture(color: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), (color, color, color)).save(buffer, format="PNG")
    return buffer.getvalue()


def shard(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def test_a_shard_gives_its_images_with_their_classes(tmp_path: Path) -> None:
    members = {
        "a/0.png": picture(0),
        "a/0.cls": b"3\n",
        "a/1.json": json.dumps({"label": "cat"}).encode(),
        "a/1.seg.png": picture(1),
        "2.PNG": picture(2),
        "3.txt": b"no photo",
        "../../4.png": picture(4),
    }
    path = shard(tmp_path / "s-0.tar", members)
    found = find_images([path])
    assert [photo.label for photo in found] == ["0.png", "1.seg.png", "2.PNG", "4.png"]
    assert [photo.target for photo in found] == ["3", "cat", None, None]
    assert [photo.open().getpixel((0, 0)) for photo in found] == [(n, n, n) for n in (0, 1, 2, 4)]
    assert found[0].source == f"{path}/a/0.png"
    assert list(tmp_path.iterdir()) == [path]


def test_a_truncated_shard_gives_its_complete_images_and_an_error(tmp_path: Path) -> None:
    path = shard(tmp_path / "s.tar", {f"{number}.png": picture(number) for number in range(4)})
    data = path.read_bytes()
    path.write_bytes(data[: 512 * 5 + 20])
    found = find_images([path])
    assert [photo.label for photo in found] == ["0.png", "1.png", "2.png", "s.tar"]
    assert "cannot be read to its end" in found[-1].problem
    assert found[0].open().size == (5, 4)
    path.write_bytes(b"no tar at all" * 100)
    assert "the shard cannot be read" in find_images([path])[0].problem


def test_a_member_beyond_the_end_of_its_shard_is_an_error(tmp_path: Path) -> None:
    path = shard(tmp_path / "s.tar", {"0.png": picture(0)})
    photo = find_images([path])[0]
    path.write_bytes(path.read_bytes()[:520])
    with pytest.raises(ImageError, match="is truncated"):
        photo.open()
    path.unlink()
    with pytest.raises(ImageError, match="cannot be read: No such file"):
        photo.open()


def test_a_shard_that_was_written_again_needs_another_folder_unless_it_has_the_same_places(tmp_path: Path) -> None:
    members = {f"{number}.png": picture(number) for number in range(3)}
    path = shard(tmp_path / "s.tar", members)
    listed = merge_listing([], find_images([path])).entries
    shard(path, members | {"3.png": picture(3)})
    merged = merge_listing(listed, find_images([path]))
    assert (len(merged.entries), merged.changed) == (4, frozenset(range(3)))
    shard(path, members | {"1.png": picture(1) + b"more"})
    with pytest.raises(BatchError, match=r"the shard .*s\.tar was written again.*--restart"):
        merge_listing(listed, find_images([path]))


@pytest.mark.parametrize("sources", [np.zeros((8, 8, 3), np.uint8), Image.new("RGB", (8, 8)), torch.zeros(2, 3, 8), 3])
def test_images_in_memory_are_not_sources(sources: Any) -> None:
    with pytest.raises(BatchError, match="expected paths of images; `attribute` and `compare` take images in memory"):
        find_images(sources)
