"""Batch runs: their files and rows, targets, resuming and execution."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import saliency
from saliency import GradCAM, overlay
from saliency.batch import BatchError, OverlayStyle, Progress, StoppedError, batch, engines
from saliency.batch.drawing import ImageResults
from saliency.batch.engines import LocalEngine, Mapper
from saliency.batch.listing import ImageEntry
from saliency.batch.network import Network, replicate
from saliency.batch.options import NetworkOptions, OutputOptions
from saliency.batch.plan import BatchSlot, Plan
from saliency.batch.report import report
from saliency.batch.store import COLUMNS, Row, make_row
from saliency.errors import ImageError, LayerError, SaliencyError, TargetError
from saliency.extending import BatchAttribution
from saliency.hooks.rectifiers import Coverage
from saliency.io.preprocess import Preprocess
from tests.batchwork import WHITE, Tiny, assert_same, contents, kinds, noise, photos, plain, quick, rows

BOTH = ("grad_cam", "vanilla_gradient")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    photos(tmp_path / "in", 10)
    return tmp_path / "in"


def test_a_class_stands_for_the_name_of_its_method() -> None:
    for methods in (GradCAM, [GradCAM], "grad_cam"):
        assert NetworkOptions.of({"model": "shapes_resnet", "methods": methods}).methods == ["grad_cam"]


def pixels(path: Path) -> Any:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGBA" if path.suffix == ".webp" else "RGB"))


# Files and rows ----------------------------------------------------------------------------------------------------


def test_the_module_is_called_as_its_function(source: Path, tmp_path: Path) -> None:
    call: Any = saliency.batch  # a type checker sees the module only
    summary = call(source, tmp_path / "out", Tiny(), limit=1)
    assert isinstance(summary, saliency.batch.Summary)
    assert (summary.done, summary.page.is_file()) == (1, True)
    assert inspect.signature(call) == inspect.signature(saliency.batch.batch)


def test_overlays_equal_those_of_the_library(source: Path, tmp_path: Path) -> None:
    summary = quick(source, tmp_path / "out", methods=BOTH, batch_size=1)
    assert (summary.images, summary.done, summary.fresh, summary.failed) == (10, 10, 10, 0)
    for name in ("00", "07"):
        for method in BOTH:
            alone = saliency.METHODS[method](Tiny()).attribute(source / f"{name}.png")
            drawn = pixels(tmp_path / "out" / "overlays" / f"{name}.{method}.png")
            assert np.array_equal(drawn, np.asarray(overlay(alone)))


def test_a_row_repeats_the_facts_of_the_explanation(source: Path, tmp_path: Path) -> None:
    quick(source, tmp_path / "out", batch_size=1)
    alone = GradCAM(Tiny()).attribute(source / "03.png")
    row = rows(tmp_path / "out")[3]
    assert tuple(row) == tuple(COLUMNS)
    assert (row["index"], row["id"], row["method"], row["error"]) == (3, "03", "grad_cam", None)
    assert row["source"] == str(source / "03.png")
    assert (row["target"], row["name"], row["layer"]) == (alone.target[0], alone.target_names[0], alone.layer)
    assert alone.probabilities is not None
    assert row["probability"] == float(alone.probabilities[0])
    assert row["score"] == float(alone.scores[0])
    assert (row["width"], row["height"], row["input_width"], row["input_height"]) == (40, 30, 16, 16)
    assert row["box"] == pytest.approx(list(alone.frames[0].box) if alone.frames[0] else [])
    assert row["limit"] == pytest.approx(saliency.shared_limit(alone))
    assert (row["sign"], row["units"], row["colormap"]) == ("positive", "score", "inferno")


class Binary(Tiny):
    """A model of one probability per image, that of the second name."""

    def __init__(self) -> None:
        super().__init__()
        self.categories = ("healthy", "sick")  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 0].sigmoid()


def test_the_rows_of_a_binary_model_have_the_probability_of_the_named_class(source: Path, tmp_path: Path) -> None:
    for target in ("sick", "healthy", None):
        quick(source, tmp_path / f"{target}", model=Binary(), target=target, methods=("vanilla_gradient",))
    parts = [rows(tmp_path / f"{target}") for target in ("sick", "healthy", None)]
    for sick, healthy, top in zip(*parts, strict=True):
        assert (sick["name"], healthy["name"], top["name"]) == ("sick", "healthy", ["healthy", "sick"][top["target"]])
        assert sick["probability"] == sick["score"]
        assert healthy["probability"] == pytest.approx(1 - sick["probability"])
        assert top["probability"] == pytest.approx(max(sick["probability"], healthy["probability"]))


def test_a_row_accounts_for_the_score_and_says_what_was_treated(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explain = GradCAM.explain_gradients

    def accounting(self: GradCAM, *given: Any) -> BatchAttribution:
        found = explain(self, *given)
        shares = torch.stack([found.scores * 2, -found.scores], 1)
        coverage = Coverage(handled={"conv by z+": 3})
        residual = torch.full_like(found.scores, 0.25)
        names = ("input", "biases")
        return found.with_evidence(ledger=shares, ledger_names=names, coverage=coverage, residual=residual)

    monkeypatch.setattr(GradCAM, "explain_gradients", accounting)
    quick(source, tmp_path / "out")
    for row in rows(tmp_path / "out"):
        score = row["score"]
        assert (row["coverage"], row["residual"]) == ("3 conv by z+", 0.25)
        assert row["ledger"] == {"input": 2 * score, "biases": -score}


def test_the_folder_has_the_files_that_the_page_shows(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary = quick(source, out, methods=BOTH, style=OverlayStyle(format="jpg"))
    assert summary.page == out / "index.html"
    assert (out / "index.html").is_file()
    for row in rows(out):
        assert row["overlay"] == f"overlays/{row['id']}.{row['method']}.jpg"
        assert row["thumbnail"] == f"thumbnails/{row['id']}.jpg"
        assert row["heat"] == f"heat/{row['id']}.{row['method']}.webp"
        assert pixels(out / row["overlay"]).shape == (30, 40, 3)
        assert pixels(out / row["thumbnail"]).shape == (30, 40, 3)
    about = json.loads((out / "manifest.json").read_text())
    assert about["format"] == "saliency batch 5"
    assert about["counts"] == {"images": 10, "rows": 20, "failed": 0}
    assert about["methods"] == list(BOTH)
    assert (about["batch_sizes"], about["finished"]) == ([[0, 4]], True)


def test_the_heat_image_is_opaque_inside_the_crop_only(tmp_path: Path) -> None:
    noise(tmp_path / "wide.png", 1, (1200, 300))
    quick(tmp_path / "wide.png", tmp_path / "out", style=OverlayStyle(opacity=0.5))
    with Image.open(tmp_path / "out" / "thumbnails" / "wide.jpg") as thumbnail:
        assert thumbnail.size == (640, 160)
    heat = pixels(tmp_path / "out" / "heat" / "wide.grad_cam.webp")
    height, width = heat.shape[:2]
    assert abs(width / height - 4) < 0.1
    opaque = np.flatnonzero((heat[..., 3] == 255).all(0))
    assert (heat[..., 3] == 0).any(0).sum() + len(opaque) == width
    assert opaque[0] == pytest.approx(width * 3 / 8, abs=1)
    assert opaque[-1] == pytest.approx(width * 5 / 8, abs=1)


def test_the_heat_image_has_the_opacity_of_the_map(source: Path, tmp_path: Path) -> None:
    quick(source, tmp_path / "out", methods=("vanilla_gradient",))
    heat = pixels(tmp_path / "out" / "heat" / "00.vanilla_gradient.webp")
    assert len(np.unique(heat[..., 3])) > 4


@pytest.mark.parametrize("whole", [True, "aspect"])
def test_whole_images_of_all_shapes_are_explained_and_resumed(tmp_path: Path, whole: Any) -> None:
    for number in range(6):
        noise(tmp_path / "in" / f"{number}.png", number, [(60, 30), (30, 60), (40, 40)][number % 3])
    options: dict[str, Any] = {"methods": BOTH, "whole": whole, "maps": True}
    quick(tmp_path / "in", tmp_path / "out", **options)
    quick(tmp_path / "in", tmp_path / "again", **options, limit=2)
    quick(tmp_path / "in", tmp_path / "again", **options)
    assert_same(tmp_path / "out", tmp_path / "again")
    for row in rows(tmp_path / "out"):
        assert row["box"] == [0, 0, row["width"], row["height"]]
        assert row["settings"]["whole"] == whole
    with pytest.raises(BatchError, match=f"whole was {whole!r} and is now False"):
        quick(tmp_path / "in", tmp_path / "out", **options | {"whole": False})


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_overlays_have_the_chosen_format(source: Path, tmp_path: Path, suffix: Any) -> None:
    quick(source, tmp_path / "out", style=OverlayStyle(format=suffix), limit=1)
    with Image.open(tmp_path / "out" / "overlays" / f"00.grad_cam.{suffix}") as picture:
        assert picture.format == {"png": "PNG", "jpg": "JPEG", "webp": "WEBP"}[suffix]


def test_images_of_different_input_sizes_run_in_one_batch(tmp_path: Path) -> None:
    model = Tiny()
    model.preprocess = saliency.Preprocess(size=None, resize=None)
    for number, size in enumerate([(40, 30), (20, 20), (40, 30), (31, 17), (20, 20)]):
        noise(tmp_path / "in" / f"{number}.png", number, size)
    quick(tmp_path / "in", tmp_path / "out", model=model, batch_size=5)
    alone = [GradCAM(model).attribute(tmp_path / "in" / f"{number}.png") for number in range(5)]
    assert [row["score"] for row in rows(tmp_path / "out")] == pytest.approx([float(each.scores[0]) for each in alone])
    assert [(row["input_width"], row["input_height"]) for row in rows(tmp_path / "out")] == [
        (40, 30),
        (20, 20),
        (40, 30),
        (31, 17),
        (20, 20),
    ]


# Targets -------------------------------------------------------------------------------------------------------------


def test_a_target_of_the_run_is_explained_in_every_image(source: Path, tmp_path: Path) -> None:
    quick(source, tmp_path / "out", target="bee")
    assert {(row["target"], row["name"]) for row in rows(tmp_path / "out")} == {(1, "bee")}


def test_listed_targets_replace_the_top_class(source: Path, tmp_path: Path) -> None:
    table = tmp_path / "targets.csv"
    table.write_text(f"path,target\n{source / '02.png'},emu\n05.png,0\n")
    quick(source, tmp_path / "top")
    top = [row["name"] for row in rows(tmp_path / "top")]
    quick(source, tmp_path / "out", targets=table)
    expected = [*top[:2], "emu", *top[3:5], "ant", *top[6:]]
    assert [row["name"] for row in rows(tmp_path / "out")] == expected


def test_an_unknown_target_fails_only_its_image(source: Path, tmp_path: Path) -> None:
    table = tmp_path / "list.csv"
    names = ["in/00.png,ant", "in/01.png,bea", "in/02.png,7", "in/03.png,"]
    table.write_text("\n".join(names))
    summary = quick(table, tmp_path / "out")
    assert kinds(tmp_path / "out") == [None, "TargetError", "TargetError", None]
    assert 'did you mean "bee"' in rows(tmp_path / "out")[1]["error"]
    assert summary.failed == 2


@pytest.mark.parametrize("target", ["bea", 7])
def test_an_unknown_target_of_the_run_stops_before_any_row(source: Path, tmp_path: Path, target: Any) -> None:
    with pytest.raises((TargetError, BatchError), match=r"bea|outside"):
        quick(source, tmp_path / "out", target=target)
    assert not (tmp_path / "out" / "overlays").exists() or not rows(tmp_path / "out")
    assert quick(source, tmp_path / "out", target="bee").failed == 0


# Resuming ------------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_recognised_without_a_model(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(source, tmp_path / "out")
    before = contents(tmp_path / "out")

    def refuse(*arguments: object) -> None:
        raise AssertionError("nothing is missing")

    monkeypatch.setattr("saliency.batch.engines.execute", refuse)
    again = quick(source, tmp_path / "out")
    assert (again.done, again.fresh, again.page) == (10, 0, tmp_path / "out" / "index.html")
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("maps", [False, True])
def test_only_lost_files_are_written_again(source: Path, tmp_path: Path, maps: bool) -> None:
    for out in (tmp_path / "whole", tmp_path / "out"):
        quick(source, out, methods=BOTH, maps=maps)
    out = tmp_path / "out"
    (out / "overlays" / "04.grad_cam.png").unlink()
    (out / "thumbnails" / "09.jpg").write_bytes(b"")
    untouched = out / "overlays" / "00.grad_cam.png"
    stamp = untouched.stat().st_mtime_ns
    summary = quick(source, out, methods=BOTH, maps=maps)
    assert summary.fresh == 2
    assert untouched.stat().st_mtime_ns == stamp
    assert_same(out, tmp_path / "whole")


def test_a_run_with_a_limit_is_resumed(source: Path, tmp_path: Path) -> None:
    quick(source, tmp_path / "whole")
    assert quick(source, tmp_path / "out", limit=3).images == 3
    assert len(rows(tmp_path / "out")) == 3
    assert quick(source, tmp_path / "out", limit=3).fresh == 0
    assert quick(source, tmp_path / "out").fresh == 7
    assert_same(tmp_path / "out", tmp_path / "whole")


def test_new_images_are_appended_and_others_keep_numbers_and_names(source: Path, tmp_path: Path) -> None:
    quick(source, tmp_path / "out")
    old = rows(tmp_path / "out")
    noise(source / "00.bmp", 50)
    noise(source / "000.png", 51)
    (source / "05.png").unlink()
    summary = quick(source, tmp_path / "out")
    assert (summary.images, summary.fresh) == (12, 2)
    new = rows(tmp_path / "out")
    assert new[:10] == old
    assert [row["id"] for row in new[10:]] == ["00-2", "000"]


def test_the_rows_of_a_batch_do_not_depend_on_what_is_missing(source: Path, tmp_path: Path) -> None:
    quick(source, tmp_path / "whole", maps=True, batch_size=8)
    quick(source, tmp_path / "out", maps=True, batch_size=8, limit=3)
    quick(source, tmp_path / "out", maps=True, batch_size=8)
    assert_same(tmp_path / "out", tmp_path / "whole")


def test_equal_options_in_another_spelling_resume(source: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"size": (16, 16), "resize": 16, "mean": [0.5] * 3}
    quick(source, tmp_path / "out", target=1, preprocess=fields)
    fields = {"mean": (0.5, 0.5, 0.5), "resize": 16, "size": [16, 16]}
    for same in (fields, Preprocess(**fields)):
        assert quick(source, tmp_path / "out", target="1", preprocess=same).fresh == 0
    with pytest.raises(BatchError, match=r"target was '1' and is now '0'"):
        quick(source, tmp_path / "out", target="0", preprocess=fields)


def test_the_target_of_an_image_may_be_a_number_or_its_digits(source: Path, tmp_path: Path) -> None:
    for file, target in (("a.csv", "1"), ("b.jsonl", 1)):
        row = (
            f"path,target\n{source}/00.png,1\n"
            if file == "a.csv"
            else json.dumps({"path": f"{source}/00.png", "target": target})
        )
        (tmp_path / file).write_text(row)
    assert quick(tmp_path / "a.csv", tmp_path / "out").fresh == 1
    assert quick(tmp_path / "b.jsonl", tmp_path / "out").fresh == 0


def test_a_run_with_other_options_is_refused_with_the_differences(source: Path, tmp_path: Path) -> None:
    quick(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    for methods in (("grad_cam",), ("layer_cam",)):
        with pytest.raises(BatchError, match=r"opacity was 'map' and is now 0.2; .*--restart"):
            quick(source, tmp_path / "out", methods=methods, style=OverlayStyle(opacity=0.2))
    with pytest.raises(BatchError, match=r"maps of grad_cam was False and is now True"):
        quick(source, tmp_path / "out", methods=("grad_cam", "layer_cam"), maps=True)
    other = Tiny()
    with torch.no_grad():
        other.head.bias.add_(1)
    with pytest.raises(BatchError, match="weights was 'sha256:"):
        quick(source, tmp_path / "out", model=other)
    noise(tmp_path / "elsewhere" / "x.png", 1)
    with pytest.raises(BatchError, match="over other images, such as"):
        quick(tmp_path / "elsewhere", tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_a_method_is_added_as_if_both_had_run_together(source: Path, tmp_path: Path) -> None:
    (source / "04.png").write_bytes(b"")
    quick(source, tmp_path / "whole", methods=BOTH, maps=True)
    out = tmp_path / "out"
    quick(source, out, methods=BOTH[:1], maps=True, command=["one"])
    stamp = (out / "overlays" / "00.grad_cam.png").stat().st_mtime_ns
    summary = quick(source, out, methods=BOTH[1:], maps=True, command=["two"])
    assert (summary.done, summary.fresh, summary.failed, summary.unfinished) == (10, 9, 1, {})
    assert (out / "overlays" / "00.grad_cam.png").stat().st_mtime_ns == stamp
    assert json.loads((out / "manifest.json").read_text())["command"] == ["one", "&&", "two"]
    quick(source, tmp_path / "again", methods=BOTH, maps=True, command=["one", "&&", "two"])
    assert_same(out, tmp_path / "again")
    for methods in (BOTH, BOTH[::-1], BOTH[:1], BOTH[1:]):
        assert quick(source, out, methods=methods, maps=True).fresh == 0


@pytest.mark.usefixtures("_ctrl_c")
def test_adding_a_method_resumes_after_an_interruption(source: Path, tmp_path: Path) -> None:
    def press(progress: Progress) -> None:
        if progress.fresh == 1:
            os.kill(os.getpid(), signal.SIGINT)

    photos(source, 30)
    quick(source, tmp_path / "whole", methods=BOTH, maps=True)
    quick(source, tmp_path / "out", methods=BOTH[:1], maps=True)
    with pytest.raises(KeyboardInterrupt, match="of 30 images are done"):
        quick(source, tmp_path / "out", methods=BOTH[1:], maps=True, on_progress=press)
    between = quick(source, tmp_path / "out", methods=BOTH[:1], maps=True)
    assert (between.done, between.fresh) == (30, 0)
    assert 0 < between.unfinished["vanilla_gradient"] < 30
    summary = quick(source, tmp_path / "out", methods=BOTH[1:], maps=True)
    assert summary.fresh == between.unfinished["vanilla_gradient"]
    assert_same(tmp_path / "out", tmp_path / "whole")


def test_an_added_method_has_options_of_its_own(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quick(source, out, layer="features.0")
    for layer in ("features.9", "head"):  # a mistake can be mended
        with pytest.raises(saliency.errors.SaliencyError, match=layer):
            quick(source, out, methods=["layer_cam"], layer=layer)
    quick(source, out, methods=["layer_cam", "rectgrad"], layer="features.1", options={"percentile": 50})
    layers = {row["method"]: row["layer"] for row in rows(out)}
    assert layers == {"grad_cam": "features.0", "layer_cam": "features.1", "rectgrad": None}
    with pytest.raises(BatchError, match=r"layer of grad_cam was 'features.0' and is now 'features.1'"):
        quick(source, out, layer="features.1")


def test_only_images_that_are_there_get_an_added_method(source: Path, tmp_path: Path) -> None:
    quick(source, tmp_path / "out")
    (source / "05.png").unlink()
    noise(source / "06.png", 106)
    noise(source / "10.png", 10)
    summary = quick(source, tmp_path / "out", methods=["layer_cam"])
    assert (summary.fresh, summary.failed, summary.changed, len(summary.removed)) == (10, 0, 1, 1)
    assert summary.unfinished == {"grad_cam": 2}
    found = {(row["index"], row["method"]) for row in rows(tmp_path / "out")}
    assert (5, "grad_cam") in found
    assert not {(5, "layer_cam"), (6, "grad_cam")} & found
    assert quick(source, tmp_path / "out").fresh == 2


def test_a_retry_leaves_the_failures_of_other_methods(source: Path, tmp_path: Path) -> None:
    plain(source / "04.png", WHITE)
    (source / "05.png").write_bytes(b"")
    broken = Tiny(nan_on_white=True)
    assert quick(source, tmp_path / "out", model=broken).failed == 2
    assert quick(source, tmp_path / "out", model=broken, methods=["layer_cam"]).failed == 2
    summary = quick(source, tmp_path / "out", methods=["layer_cam"], retry=True)
    assert (summary.fresh, summary.failed, summary.unfinished) == (2, 1, {})
    failed = {(row["index"], row["method"]) for row in rows(tmp_path / "out") if row["error"]}
    assert failed == {(4, "grad_cam"), (5, None)}


def test_restart_removes_the_files_of_the_run_only(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quick(source, out, methods=BOTH, maps=True)
    mine = [out / "notes.txt", out / "overlays" / "mine.png", out / "thumbnails" / "mine" / "a.jpg"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    quick(source, out, style=OverlayStyle(format="jpg"), restart=True)
    assert all(path.read_text() == "mine" for path in mine)
    quick(source, tmp_path / "fresh", style=OverlayStyle(format="jpg"))
    for path in mine:
        path.unlink()
    mine[2].parent.rmdir()
    assert_same(out, tmp_path / "fresh")


@pytest.mark.parametrize(
    "wrong", [{"model": "resnet5"}, {"methods": ["gradcm"]}, {"layer": "fc9"}, {"device": "cuda:99"}]
)
def test_a_restart_with_an_invalid_option_keeps_the_earlier_run(
    source: Path, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    quick(source, tmp_path / "out", limit=1)
    kept = contents(tmp_path / "out")
    with pytest.raises(SaliencyError):
        quick(source, tmp_path / "out", restart=True, **wrong)
    assert contents(tmp_path / "out") == kept


@pytest.mark.parametrize(
    "name", ["index.html", "thumbnails/03.jpg", "overlays/03.grad_cam.png", "maps/03.grad_cam.safetensors"]
)
def test_other_files_are_never_replaced(source: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    for restart in (False, True):
        with pytest.raises(BatchError, match=f"{name.split('/')[0]} exists in .*, without a run"):
            quick(source, tmp_path / "out", restart=restart)
    assert path.read_text() == "mine"
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_failures_are_repeated_with_retry_only(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ImageEntry.open

    def fail(image: ImageEntry) -> Image.Image:
        if image.label == "04.png":
            raise ImageError("the server is away")
        return real(image)

    quick(source, tmp_path / "whole")
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(ImageEntry, "open", fail)
        assert quick(source, out).failed == 1
    again = quick(source, out)
    assert (again.fresh, again.failed) == (0, 1)
    mended = quick(source, out, retry=True)
    assert (mended.fresh, mended.failed) == (1, 0)
    assert_same(out, tmp_path / "whole")


def change(source: Path) -> None:
    """Change three images: another size, the same size, and an unreadable file."""
    noise(source / "02.png", 102, (31, 17))
    noise(source / "10.bmp", 110)
    (source / "04.png").write_bytes(b"no picture")


def test_only_changed_images_are_explained_again(source: Path, tmp_path: Path) -> None:
    noise(source / "10.bmp", 10)
    out = tmp_path / "out"
    quick(source, out, methods=BOTH, maps=True)
    untouched = out / "overlays" / "00.grad_cam.png"
    stamp = untouched.stat().st_mtime_ns
    change(source)
    summary = quick(source, out, methods=BOTH, maps=True)
    assert (summary.fresh, summary.changed, summary.failed, summary.removed) == (3, 3, 1, ())
    assert untouched.stat().st_mtime_ns == stamp
    quick(source, tmp_path / "whole", methods=BOTH, maps=True)
    assert_same(out, tmp_path / "whole")
    again = quick(source, out, methods=BOTH, maps=True)
    assert (again.fresh, again.changed) == (0, 0)
    noise(source / "04.png", 4)  # a photo that could not be read is another one now: no --retry is needed
    assert quick(source, out, methods=BOTH, maps=True).failed == 0


@pytest.mark.parametrize("step", ["remove_files", "write_head", "write_listing"])
def test_changes_are_noticed_after_an_interruption_at_any_step(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def cut_short(*arguments: object) -> None:
        raise KeyboardInterrupt

    noise(source / "10.bmp", 10)
    quick(source, tmp_path / "out")
    change(source)
    with monkeypatch.context() as patch:
        patch.setattr(f"saliency.batch.store.{step}", cut_short)
        with pytest.raises(KeyboardInterrupt):
            quick(source, tmp_path / "out")
    assert quick(source, tmp_path / "out").fresh == 3
    quick(source, tmp_path / "whole")
    assert_same(tmp_path / "out", tmp_path / "whole")


def test_a_change_of_the_last_image_updates_the_page(source: Path, tmp_path: Path) -> None:
    quick(source, tmp_path / "out")
    noise(source / "09.png", 109)
    quick(source, tmp_path / "out")
    quick(source, tmp_path / "whole")
    assert_same(tmp_path / "out", tmp_path / "whole")


def test_removed_images_are_reported_and_their_files_kept(source: Path, tmp_path: Path) -> None:
    quick(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    kept, stamp = (source / "05.png").read_bytes(), (source / "05.png").stat()
    (source / "05.png").unlink()
    summary = quick(source, tmp_path / "out")
    assert (summary.fresh, summary.changed, summary.removed) == (0, 0, (str(source / "05.png"),))
    assert contents(tmp_path / "out") == before
    (source / "05.png").write_bytes(kept)
    os.utime(source / "05.png", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    back = quick(source, tmp_path / "out")
    assert (back.fresh, back.removed) == (0, ())


@pytest.mark.parametrize("key", ["overlay", "thumbnail", "heat", "map"])
def test_a_truncated_file_is_written_again(source: Path, tmp_path: Path, key: str) -> None:
    for out in (tmp_path / "whole", tmp_path / "out"):
        quick(source, out, methods=BOTH, maps=True)
    path = tmp_path / "out" / rows(tmp_path / "out")[6][key]
    os.truncate(path, 100)
    assert quick(source, tmp_path / "out", methods=BOTH, maps=True).fresh == 1
    assert_same(tmp_path / "out", tmp_path / "whole")


def test_strict_stops_at_the_first_failure_and_resumes(source: Path, tmp_path: Path) -> None:
    good = (source / "05.png").read_bytes()
    (source / "05.png").write_bytes(b"")
    with pytest.raises(StoppedError, match=r"05\.png is empty"):
        quick(source, tmp_path / "out", strict=True)
    assert [row["index"] for row in rows(tmp_path / "out")] == list(range(5))
    (source / "05.png").write_bytes(good)
    quick(source, tmp_path / "out", strict=True)
    quick(source, tmp_path / "whole")
    assert_same(tmp_path / "out", tmp_path / "whole")


# Execution -----------------------------------------------------------------------------------------------------


def test_devices_and_threads_do_not_change_the_files(source: Path, tmp_path: Path) -> None:
    quick(source, tmp_path / "one", device="cpu", workers=1, methods=BOTH, maps=True)
    quick(source, tmp_path / "two", device="cpu,cpu", workers=3, methods=BOTH, maps=True)
    quick(source, tmp_path / "own", workers=4, methods=BOTH, maps=True)
    assert_same(tmp_path / "two", tmp_path / "one")
    assert_same(tmp_path / "own", tmp_path / "one")


def test_a_sequential_engine_writes_the_same_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "06.png").write_bytes(b"")
    quick(source, tmp_path / "threads", methods=BOTH, maps=True)

    def in_one_go(engine: LocalEngine, mapper: Mapper, model: torch.nn.Module, plan: Plan) -> Iterator[list[Row]]:
        network = replicate(mapper.options, model, engine.devices)[0]
        for slots in plan:
            loaded = [network.load(slot) for slot in slots]
            results = [results for results, _ in network.explain(loaded)]
            for each in zip(loaded, results, strict=True):
                yield mapper.finish(each[0], ImageResults(each[1]))

    monkeypatch.setattr(LocalEngine, "map", in_one_go)
    quick(source, tmp_path / "one go", methods=BOTH, maps=True)
    assert_same(tmp_path / "one go", tmp_path / "threads")


def test_options_tasks_and_rows_can_be_pickled() -> None:
    options = NetworkOptions(model="tiny"), OutputOptions(style=OverlayStyle(format="jpg"))
    image = ImageEntry("/a.png", "a.png", name="a", folder=("x",), target="cat")
    given = options, BatchSlot(3, image, ("grad_cam",)), [make_row(index=3, score=0.5)]
    assert pickle.loads(pickle.dumps(given)) == given


def test_all_methods_of_a_group_share_one_pass(source: Path, tmp_path: Path) -> None:
    model = Tiny()
    cams = ("grad_cam", "layer_cam", "hires_cam", "xgrad_cam", "grad_cam_plus_plus")
    quick(source, tmp_path / "one", model=model, methods=cams[:1], workers=1)
    one = list(model.sizes)
    model.sizes.clear()
    quick(source, tmp_path / "five", model=model, methods=cams, workers=1)
    assert model.sizes.count(4) == one.count(4) == 2
    assert model.sizes.count(2) == one.count(2) == 1


def test_the_batch_size_is_settled_before_the_first_row_and_kept(source: Path, tmp_path: Path) -> None:
    photos(source, 70)
    sizes: list[list[list[int]]] = []

    def look(progress: Progress) -> None:
        sizes.append(json.loads((tmp_path / "out" / "manifest.json").read_text())["batch_sizes"])

    model = Tiny()
    quick(source, tmp_path / "out", model=model, batch_size=None, limit=3, on_progress=look)
    assert sizes == [[[0, 8]]] * 3
    model.sizes.clear()
    for number in range(70, 75):
        noise(source / f"{number}.png", number)
    quick(source, tmp_path / "out", model=model, batch_size=16, on_progress=look)
    assert sizes == [[[0, 8]]] * 75
    assert sorted(size for size in model.sizes if size > 1) == [3, *[8] * 9]  # batches run in parallel
    quick(source, tmp_path / "few", model=model, batch_size=None, workers=50, limit=2, on_progress=look)
    assert sizes[-1] == [[0, 8]]


def test_a_smaller_batch_size_is_taken_when_resuming(source: Path, tmp_path: Path) -> None:
    quick(source, tmp_path / "out", batch_size=4, limit=4)
    model = Tiny()
    quick(source, tmp_path / "out", model=model, batch_size=2)
    assert [size for size in model.sizes if size > 1] == [2] * 3
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["batch_sizes"] == [[0, 2]]


def test_the_model_and_the_threads_of_pytorch_are_unchanged(source: Path, tmp_path: Path) -> None:
    model = Tiny().train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    threads = torch.get_num_threads()
    quick(source, tmp_path / "out", model=model)
    assert model.training
    assert torch.get_num_threads() == threads
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("cores", "workers", "threads"), [(4, 1, 1), (4, None, 1), (16, None, 2), (16, 2, 1), (8, 32, 1)]
)
def test_networks_have_the_same_number_of_threads_and_at_most_one_per_core_and_worker(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, workers: int | None, threads: int
) -> None:
    """The number of threads changes the last bits of a map."""
    seen: set[int] = set()
    monkeypatch.setattr(engines, "count_cores", lambda: cores)
    explain = Network.explain

    def watched(self: Network, *args: Any) -> Any:
        seen.add(torch.get_num_threads())
        return explain(self, *args)

    monkeypatch.setattr(Network, "explain", watched)
    quick(source, tmp_path / "out", workers=workers, batch_size=1)
    assert seen == {threads}


def test_progress_counts_done_and_failed_images(source: Path, tmp_path: Path) -> None:
    (source / "03.png").write_bytes(b"nothing")
    reported: list[Progress] = []
    quick(source, tmp_path / "out", on_progress=reported.append)
    assert [each.done for each in reported] == sorted(each.done for each in reported)
    assert reported[-1] == Progress(10, 10, 10, 1)


@pytest.mark.usefixtures("_ctrl_c")
def test_the_first_sigterm_ends_a_method_of_many_passes(source: Path, tmp_path: Path) -> None:
    class Terminated(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            if len(self.sizes) == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().forward(x)

    model, passes = Terminated(), 1_000_000
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt, match="0 of 2 images are done; re-run to resume"):
            batch(source, tmp_path / "out", model, methods=["rise"], options={"passes": passes, "chunk": 1}, limit=2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(model.sizes) < passes


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_finishes_started_batches_and_the_run_resumes(source: Path, tmp_path: Path) -> None:
    photos(source, 40)
    quick(source, tmp_path / "whole", maps=True)

    pressed: list[Progress] = []

    def press(progress: Progress) -> None:
        if not pressed:
            pressed.append(progress)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match=r"\d+ of 40 images are done; re-run to resume"):
        quick(source, tmp_path / "out", maps=True, on_progress=press)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert 4 <= len(rows(tmp_path / "out")) < 40
    quick(source, tmp_path / "out", maps=True)
    assert_same(tmp_path / "out", tmp_path / "whole")


@pytest.mark.usefixtures("_ctrl_c")
def test_a_second_ctrl_c_does_not_wait_and_keeps_reported_images(source: Path, tmp_path: Path) -> None:
    quick(source, tmp_path / "whole")

    reported = []

    def press(progress: Progress) -> None:
        if progress.fresh:
            reported.append(progress.fresh)
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        quick(source, tmp_path / "out", on_progress=press)
    assert len(rows(tmp_path / "out")) == reported[0]
    quick(source, tmp_path / "out")
    assert_same(tmp_path / "out", tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"methods": ()}, "expected a list of names"),
        ({"methods": ("grad_cam", "grad_cam")}, "occurs twice"),
        ({"methods": ("grad_cm",)}, 'did you mean "grad_cam"'),
        ({"layer": "nothing"}, 'no layer "nothing"'),
        ({"options": {"smoth": 1}}, 'no option "smoth"'),
        ({"batch_size": 0}, "batch_size=0 is not a whole number"),
        ({"device": "cuda:9"}, "torch finds 0 CUDA devices|cuda:9"),
        ({"device": "gpu"}, 'no device "gpu"'),
        ({"model": torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3))}, "has no preprocessing"),
        ({"style": {"colormap": "infern"}}, "infern"),
        ({"style": {"opacity": 2}}, "opacity=2"),
        ({"style": {"format": "gif"}}, "format='gif'"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_written(
    source: Path, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(saliency.errors.SaliencyError, match=reason):
        quick(
            source,
            tmp_path / "out",
            **options | ({"style": OverlayStyle(**options["style"])} if "style" in options else {}),
        )
    assert not (tmp_path / "out").exists() or {each.name for each in (tmp_path / "out").iterdir()} <= {".lock"}


def test_a_call_that_writes_nothing_leaves_no_new_folder(source: Path, tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=r"there is no image: https://a.org/b.jpg is an address, not a file"):
        quick("https://a.org/b.jpg", tmp_path / "new")
    with pytest.raises(LayerError):
        quick(source, tmp_path / "new", layer="nothing")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with pytest.raises(BatchError, match="no image"):
        quick("nowhere.jpg", tmp_path / "old")
    assert (tmp_path / "old").is_dir()


def test_no_photo_at_all_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(BatchError, match="contains no images"):
        quick(tmp_path / "in", tmp_path / "out")
    with pytest.raises(BatchError, match="no such file"):
        batch("nowhere.jpg", tmp_path / "out", Tiny())


def test_an_output_that_cannot_be_a_folder_is_an_error(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(BatchError, match="is a file, not a folder"):
        quick(source, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"
    with pytest.raises(BatchError, match="File name too long"):
        quick(source, tmp_path / ("o" * 300))


def test_large_pictures_are_decoded_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(source, tmp_path / "whole")
    monkeypatch.setattr("saliency.batch.engines.MOST_PIXELS", 0)
    quick(source, tmp_path / "out")
    assert_same(tmp_path / "out", tmp_path / "whole")


def test_a_white_image_is_explained(tmp_path: Path) -> None:
    plain(tmp_path / "white.png", WHITE)
    assert quick(tmp_path / "white.png", tmp_path / "out", methods=("vanilla_gradient",)).failed == 0


def test_a_limit_counts_only_the_images_up_to_it(source: Path, tmp_path: Path) -> None:
    reported: list[Progress] = []
    quick(source, tmp_path / "out", limit=4)
    assert quick(source, tmp_path / "out", limit=2).done == 2
    summary = quick(source, tmp_path / "out", methods=["grad_cam"], limit=6, on_progress=reported.append)
    assert (summary.images, summary.done, summary.fresh) == (6, 6, 2)
    assert [(each.done, each.total) for each in reported][-1] == (6, 6)
    summary = quick(source, tmp_path / "out", limit=3)
    assert (summary.images, summary.done, summary.fresh) == (3, 3, 0)


@pytest.mark.parametrize(
    "line",
    [
        b"[1]\n",
        b"null\n",
        b'{"path": "/x.png", "source": "x.png", "name": "../../x"}\n',
        b'{"path": "/x.p',
    ],
)
def test_a_damaged_listing_is_refused(source: Path, tmp_path: Path, line: bytes) -> None:
    out = tmp_path / "out"
    quick(source, out)
    with (out / "listing.jsonl").open("ab") as file:
        file.write(line)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
    for restart in (False, True):
        with pytest.raises(BatchError, match=r"listing\.jsonl is damaged.*choose another folder"):
            quick(source, out, restart=restart)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"} == before


@pytest.mark.parametrize("content", [b"", b'{"format": "saliency batch 5", "vers', b"\0" * 100])
def test_a_damaged_head_is_refused(source: Path, tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "out"
    quick(source, out, limit=2)
    (out / "manifest.json").write_bytes(content)
    for restart in (False, True):
        with pytest.raises(BatchError, match=r"manifest\.json is damaged.*choose another folder"):
            quick(source, out, restart=restart)
    assert (out / "manifest.json").read_bytes() == content
    assert len(rows(out)) == 2


BAD_HEADS: dict[str, list[object]] = {
    "methods": [["/../../victim"], ["a/b"], ["../x"], ["a\\b"], ["a\0"], [""], [3], "grad_cam", None],
    "batch_sizes": [[[0]], [[0, 0]], [[0, -4]], [[4, 4]], [[0, 4], [8]], [], [[0, "4"]], [[0, 4.5]], {"0": 4}, None],
    "fingerprint": [None, 3, "x", [], {}, {"opacity": None}],
    "model": [None, "tiny", {}, {"name": 3, "weights": None}],
    "command": [None, "saliency", [3]],
    "folder": [None, 3],
    "versions": [None, []],
    "finished": [None, "yes"],
}


@pytest.mark.parametrize("key", BAD_HEADS)
def test_a_head_that_no_run_writes_is_refused_and_nothing_is_removed(source: Path, tmp_path: Path, key: str) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim.png"
    quick(source, out, limit=2)
    victim.write_text("precious")
    (out / "overlays" / "00.").mkdir()  # part of the path overlays/00./../../victim.png
    before, head = contents(out), json.loads((out / "manifest.json").read_bytes())
    assert key in head
    missing = {name: value for name, value in head.items() if name != key}
    for bad in (missing, *(head | {key: value} for value in BAD_HEADS[key])):
        (out / "manifest.json").write_text(json.dumps(bad))
        for restart in (False, True):
            with pytest.raises(BatchError, match=r"manifest\.json is damaged"):
                quick(source, out, restart=restart)
    (out / "manifest.json").write_text(json.dumps(head))
    assert contents(out) == before
    assert victim.read_text() == "precious"


def test_a_method_of_the_user_resumes_under_its_name(source: Path, tmp_path: Path) -> None:
    class Mine(saliency.VanillaGradient):
        name = "Größe-2 b.c"

    try:
        assert quick(source, tmp_path / "out", methods=[Mine.name], limit=1).fresh == 1
        assert quick(source, tmp_path / "out", methods=[Mine.name], limit=2).fresh == 1
    finally:
        del saliency.METHODS[Mine.name]


@pytest.mark.parametrize(
    "name",
    [".lock", "manifest.json", "listing.jsonl", "manifest.jsonl", "index.html", "manifest.csv", "overlays", "heat"],
)
def test_a_link_in_place_of_a_file_or_folder_of_a_run_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    out, victim, elsewhere = tmp_path / "out", tmp_path / "victim", tmp_path / "elsewhere"
    for start in ("new", "resumed"):
        if start == "resumed":
            quick(source, out, limit=2)
            shutil.rmtree(out / name, ignore_errors=True)
            (out / name).unlink(missing_ok=True)
        out.mkdir(exist_ok=True)
        elsewhere.mkdir(exist_ok=True)
        victim.write_text("precious")
        (elsewhere / f".{'0' * 32}.part").write_text("of another program")
        (out / name).symlink_to(elsewhere if "." not in name else victim)
        for restart in (False, True):
            with pytest.raises(StoppedError, match=f"{re.escape(name)} is a link"):
                quick(source, out, restart=restart)
        (out / name).unlink()
        assert victim.read_text() == "precious"
        assert [file.name for file in elsewhere.iterdir()] == [f".{'0' * 32}.part"]


def test_a_link_in_place_of_an_overlay_or_of_a_subfolder_is_not_followed(source: Path, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    noise(source / "sub" / "10.png", 10)
    quick(source, out, recursive=True)
    shutil.move(out / "overlays" / "sub", elsewhere)
    kept = {file.name: file.read_bytes() for file in elsewhere.iterdir()}
    assert kept
    (out / "overlays" / "sub").symlink_to(elsewhere)
    noise(source / "sub" / "10.png", 11)  # changed: its files are removed and written again
    with pytest.raises(StoppedError, match=r"overlays/sub/10\.grad_cam\.png is a link"):
        quick(source, out, recursive=True)
    with pytest.raises(StoppedError, match=r"overlays/sub/10\.grad_cam\.png is a link"):
        quick(source, out, recursive=True, restart=True)
    assert {file.name: file.read_bytes() for file in elsewhere.iterdir()} == kept
    (out / "overlays" / "sub").unlink()
    quick(source, out, recursive=True)
    overlay, victim = out / "overlays" / "00.grad_cam.png", tmp_path / "victim"
    overlay.unlink()
    victim.write_text("precious")
    overlay.symlink_to(victim)
    with pytest.raises(StoppedError, match=r"overlays/00\.grad_cam\.png is a link"):
        quick(source, out, recursive=True)
    assert victim.read_text() == "precious"


def test_all_files_that_a_resumed_run_needs_survive_a_power_cut(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, int]] = []
    sync, replace_file, out = os.fsync, Path.replace, tmp_path / "out"

    def fsync(file: int) -> None:
        synced.append((os.fstat(file).st_ino, os.fstat(file).st_size))
        sync(file)

    def replaced(path: Path, target: Path) -> Path:
        if Path(target).parent == out:
            assert (path.stat().st_ino, path.stat().st_size) in synced, target
            names.append(Path(target).name)
        return replace_file(path, target)

    names: list[str] = []
    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr(Path, "replace", replaced)
    quick(source, out)
    assert set(names) == {"manifest.json", "listing.jsonl", "index.html"}
    assert out.stat().st_ino in {inode for inode, _ in synced}  # the new names


@pytest.mark.parametrize("content", [b'{"name": "my page"}', b"", b"no JSON"])
def test_another_manifest_json_is_not_taken_for_a_damaged_head(source: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_bytes(content)
    for restart in (False, True):
        with pytest.raises(BatchError, match=r"manifest\.json is damaged, or from another version"):
            quick(source, tmp_path / "out", restart=restart)
    assert (tmp_path / "out" / "manifest.json").read_bytes() == content


@pytest.mark.parametrize("pattern", ["*", "**/*.*"])
def test_a_pattern_skips_the_output_folder_among_its_matches(source: Path, tmp_path: Path, pattern: str) -> None:
    for _ in range(2):
        assert quick(f"{source}/{pattern}", source / "out").images == 10


def test_an_option_that_fails_every_image_is_an_error_of_the_call(source: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(BatchError, match="needs 132 passes"):
            quick(source, tmp_path / "out", methods=["sobol"], options={"passes": 8})
    assert quick(source, tmp_path / "both", methods=["sobol", "grad_cam"], options={"passes": 8}).failed == 10


@pytest.mark.parametrize(
    "line",
    [
        r'{"path": "a\u0000b.png"}',
        r'{"path": "a\ud800b.png"}',
        r'{"path": "in/01.png", "target": "a\ud800b"}',
        '{"path": "in/01.png", "target": true}',
        "[" * 100_000,
    ],
)
def test_an_invalid_line_of_a_list_fails_only_its_image(source: Path, tmp_path: Path, line: str) -> None:
    listed = source.parent / "list.jsonl"
    listed.write_text(f'{{"path": "in/00.png"}}\n{line}\n{{"path": "in/02.png"}}\n', "utf-8")
    for _ in range(2):
        summary = quick(listed, tmp_path / "out")
        assert (summary.done, summary.failed) == (3, 1)
    assert [row["error"] is None for row in rows(tmp_path / "out")] == [True, False, True]


def test_other_values_of_a_tensor_option_are_other_options(source: Path, tmp_path: Path) -> None:
    def run(references: torch.Tensor) -> int:
        options = {"baseline": references, "passes": 2}
        return quick(source, tmp_path / "out", methods=["expected_gradients"], options=options, limit=2).fresh

    references = torch.zeros(20, 3, 16, 16)
    assert (run(references), run(references.clone())) == (2, 0)
    references[9, 1, 7, 7] = 1  # which its text leaves out
    with pytest.raises(BatchError, match="options of expected_gradients was"):
        run(references)


def test_the_files_of_a_large_folder_are_in_numbered_folders_and_a_resumed_run_and_the_page_find_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saliency.batch.store.MOST_PER_FOLDER", 2)
    photos(tmp_path / "in", 5)
    quick(tmp_path / "in", tmp_path / "out", limit=2)
    for number in (5, 6):
        noise(tmp_path / "in" / f"0{number}.png", number)
    summary = quick(tmp_path / "in", tmp_path / "out")
    assert (summary.done, summary.fresh) == (7, 5)
    assert quick(tmp_path / "in", tmp_path / "out").fresh == 0
    names = [row["overlay"] for row in rows(tmp_path / "out")]
    assert names == [f"overlays/000{number // 2}/0{number}.grad_cam.png" for number in range(7)]
    assert all((tmp_path / "out" / name).is_file() for name in names)
    before = (tmp_path / "out" / "index.html").read_bytes()
    report(tmp_path / "out")
    assert (tmp_path / "out" / "index.html").read_bytes() == before
