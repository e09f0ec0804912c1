"""Cases of several inputs in a run over files: folders with equal names, and lists with a column for each input."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import saliency
from saliency.batch import BatchError, batch
from saliency.batch.sources import find_images
from saliency.cli import main
from saliency.errors import SaliencyWarning
from tests.several_inputs import Late


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Two folders of three cases, in the current folder."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for folder in ("rgb", "depth"):
        Path(folder).mkdir()
    for name in "abc":
        Image.fromarray(random.integers(0, 255, (20, 30, 3), np.uint8)).save(f"rgb/{name}.png")
        np.save(f"depth/{name}.npy", random.random((1, 12, 16), np.float32))
    return {"rgb": "rgb", "depth": "depth/"}


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    network = Late().eval()
    vars(network)["preprocess"] = {"rgb": saliency.Preprocess(size=(16, 16))}
    return network


def rows(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "manifest.jsonl").read_text().splitlines()]


def contents(folder: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def inputs_of(source: Any) -> list[tuple[str, Any]]:
    """The names of the files of each case, and the target."""
    found = find_images(source).entries
    return [("+".join(Path(str(file)).name for file in (entry.inputs or {}).values()), entry.target) for entry in found]


def test_a_case_has_one_picture_of_its_images_and_its_shares(sources: dict[str, str], model: torch.nn.Module) -> None:
    summary = batch(sources, "maps", model, ("input_x_gradient", "grad_cam"), target=1)
    assert (summary.images, summary.done, summary.failed) == (3, 3, 0)
    written = rows("maps")
    assert [(row["id"], row["method"]) for row in written[:2]] == [("a", "input_x_gradient"), ("a", "grad_cam")]
    inputs = {"rgb": "rgb/a.png", "depth": np.load("depth/a.npy")}
    expected = saliency.InputXGradient(model).attribute(inputs, 1)
    assert written[0]["shares"] == pytest.approx(expected.shares)
    assert written[0]["score"] == pytest.approx(float(expected.scores[0]))
    assert written[1]["layer"] == "rgb_stream, depth_stream"
    with Image.open(f"maps/{written[0]['overlay']}") as overlay, Image.open(f"maps/{written[0]['heat']}") as heat:
        assert overlay.height > 20  # the shares are below the images
        assert overlay.size[0] == heat.size[0] == 30 + 2 + 27  # the depth (12, 16) has the height of the photo
    assert heat.size == (written[0]["width"], written[0]["height"])


def test_a_run_over_cases_resumes_and_explains_changed_cases_again(
    sources: dict[str, str], model: torch.nn.Module
) -> None:
    run = partial(batch, sources, model=model, methods=["input_x_gradient"], target=1)
    run(out="whole")
    assert run(out="maps", limit=1).done == 1
    assert run(out="maps").fresh == 2
    assert contents("maps/overlays") == contents("whole/overlays")
    assert run(out="maps").fresh == 0
    shutil.copy("depth/a.npy", "depth/c.npy")
    assert (run(out="maps").fresh, run(out="maps").fresh) == (1, 0)
    Path("depth/b.npy").write_bytes(b"")
    summary = run(out="maps")
    assert summary.failed == 1
    assert "depth: " in summary.failures[0][2]


def test_files_without_a_partner_are_named_and_left_out(sources: dict[str, str]) -> None:
    Path("depth/b.npy").rename("depth/e.npy")
    with pytest.warns(SaliencyWarning, match=r"left out 2 files .*: rgb/b.png, depth/e.npy"):
        assert inputs_of(sources) == [("a.png+a.npy", None), ("c.png+c.npy", None)]
    for name in "ac":
        Path(f"depth/{name}.npy").unlink()
    with pytest.raises(BatchError, match=r"no name is in all of rgb, depth, such as rgb/a.png and depth/e.npy"):
        find_images(sources)
    with pytest.raises(BatchError, match=r"no name is in all of rgb, depth, such as rgb/a.png and depht/"):
        find_images(sources | {"depth": "depht/"})
    with pytest.raises(BatchError, match=r"rgb: no folder/\*.png: no file matches"):
        find_images({"rgb": "no folder/*.png", "depth": "depth"})


def test_a_single_file_and_a_text_are_in_all_cases(sources: dict[str, str]) -> None:
    source = {"rgb": "rgb/*.png", "depth": "depth/a.npy", "instruction": "which one?"}
    names = ["a.png+a.npy+which one?", "b.png+a.npy+which one?", "c.png+a.npy+which one?"]
    assert [name for name, _ in inputs_of(source)] == names
    assert inputs_of({"rgb": "rgb/a.png", "depth": "depth/b.npy"}) == [("a.png+b.npy", None)]
    with pytest.raises(BatchError, match="no image among the inputs rgb, depth"):
        find_images({"rgb": "no", "depth": 3})


@pytest.mark.parametrize("other", [Path("missing"), torch.zeros(2)])
def test_an_input_that_the_listing_cannot_store_is_refused(sources: dict[str, str], other: Any) -> None:
    with pytest.raises(BatchError, match=r"depth=.* is not an existing file or folder, or JSON"):
        find_images({"rgb": Path("rgb"), "depth": other})


def test_a_list_has_a_column_for_each_input(sources: dict[str, str], model: torch.nn.Module) -> None:
    Path("lists").mkdir()
    Path("lists/cases.csv").write_text(
        "target,rgb,depth\n2,../rgb/a.png,../depth/b.npy\n1,../rgb/a.png,../depth/c.npy\n"
    )
    assert inputs_of("lists/cases.csv") == [("a.png+b.npy", "2"), ("a.png+c.npy", "1")]
    row = {"rgb": "rgb/b.png", "depth": "depth/b.npy", "label": 3}
    Path("cases.jsonl").write_text(f"{json.dumps(row)}\n")
    assert inputs_of("cases.jsonl") == [("b.png+b.npy", 3)]
    batch("lists/cases.csv", "maps", model, "input_x_gradient")
    assert [(row["id"], row["target"]) for row in rows("maps")] == [("a", 2), ("a-2", 1)]
    Path("images.csv").write_text("image,depth\nrgb/a.png,depth/a.npy\n")  # a list of images, with a further column
    assert find_images("images.csv").entries[0].inputs is None


def test_numbers_of_a_list_are_an_array(sources: dict[str, str]) -> None:
    Path("cases.jsonl").write_text('{"image": "rgb/a.png"}\n{"rgb": "rgb/b.png", "state": [1, 2.5], "on": true}\n')
    opened = find_images("cases.jsonl").entries[1].open_inputs()
    assert opened["state"].tolist() == [1, 2.5]
    assert opened["on"] is True
    assert opened["rgb"].size == (30, 20)


def test_the_mask_of_a_row_is_relative_to_its_list(sources: dict[str, str]) -> None:
    Path("lists").mkdir()
    shutil.copy("rgb/a.png", "lists/mask.png")
    Path("lists/images.csv").write_text("path,target\n../rgb/a.png,region:1:mask.png\n../rgb/b.png,region:1:border\n")
    first, second = find_images("lists/images.csv").entries
    assert first.target == f"region:1:{Path('lists/mask.png').absolute()}"
    assert second.target == "region:1:border"


def test_the_mask_of_a_row_may_be_on_a_drive_of_windows(
    sources: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask, is_file = r"C:\masks\a.png", os.path.isfile
    Path("images.csv").write_text(f"path,target\nrgb/a.png,region:1:{mask}\n")
    monkeypatch.setattr("os.path.isfile", lambda path: str(path).endswith(mask) or is_file(path))
    assert find_images("images.csv").entries[0].target == f"region:1:{Path.cwd() / mask}"


def test_preprocessing_by_input_is_a_part_of_the_fingerprint(sources: dict[str, str], model: torch.nn.Module) -> None:
    for size in (16, 20):
        prepare: Any = {"rgb": saliency.Preprocess(size=(size, size)), "depth": None}
        if size == 20:
            with pytest.raises(BatchError, match="with other options: preprocess was"):
                batch(sources, "maps", model, "input_x_gradient", preprocess=prepare)
        else:
            batch(sources, "maps", model, "input_x_gradient", preprocess=prepare)


def test_what_is_of_one_image_is_refused_at_once(sources: dict[str, str], model: torch.nn.Module) -> None:
    for options in ({"maps": True}, {"trust": True}, {"detections": 1}):
        with pytest.raises(BatchError, match=r"are for models of one image, and rgb/a.png is a case of several"):
            batch(sources, "maps", model, "input_x_gradient", **options)
    with pytest.raises(BatchError, match="metrics, trust cards, saved maps"):
        saliency.evaluate(sources, "measured", model, "input_x_gradient")
    assert not Path("maps").exists()
    with pytest.raises(BatchError, match=r"forward takes rgb, depth, got a mapping of rgb, dep"):
        batch({"rgb": "rgb", "dep": "depth"}, "maps", model, "input_x_gradient")


def test_a_mapping_and_words_are_one_run(sources: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "import saliency, torch\nfrom tests.several_inputs import Late\ndef make():\n    torch.manual_seed(0)\n"
        "    model = Late().eval()\n    model.preprocess = {'rgb': saliency.Preprocess(size=(16, 16))}\n"
        "    return model\n"
    )
    words = ["rgb=rgb", "depth=depth/", "--model", "mine.py:make", "-m", "input_x_gradient"]
    assert main(["batch", *words, "--target", "1"]) == 0
    assert "3 of 3 images done" in capsys.readouterr().out
    assert len(rows("out")) == 3
    Path("cases.csv").write_text("rgb,depth\nrgb/a.png,depth/a.npy\n")
    assert main(["explain", "cases.csv", *words[2:], "--target", "1", "-o", "drawn"]) == 0
    assert Path("drawn/a.input_x_gradient.png").read_bytes() == Path("out/overlays/a.input_x_gradient.png").read_bytes()
    assert main(["explain", "cases.csv", *words[2:], "--sheet"]) == 2
    assert main(["trust", "cases.csv", *words[2:]]) == 2
    assert "cases.csv" not in (err := capsys.readouterr().err)
    assert err.count("rgb/a.png is a case of several") == 2
