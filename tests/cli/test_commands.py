"""The promises of the command line: real runs on real photos, and a plain answer to every mistake."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import saliency
from saliency import Preprocess, cli, zoo
from saliency._version import __version__
from saliency.attribution.base import Together
from saliency.attribution.forward import SharedForward
from saliency.batch.drawing import write_file
from saliency.cli import arguments, command_parser, main
from saliency.io.preprocess import as_preprocess
from saliency.methods import METHODS
from saliency.render.overlay import overlay
from saliency.testing import tiny_model
from tests.commandline import ASSETS, COFFEE, copies, forked_command, loaded, share_models, started

PHOTOS = sorted(ASSETS.glob("*.jpg"))
# A few passes for each method of many.
FEW = ("passes=30", "steps=2", "channels=4", "segments=[3,3]", "grid=2", "window=96", "stride=96")
QUICK = tuple(word for setting in FEW for word in ("--set", setting))
SMALL = ("--set", "window=16", "--set", "stride=16")  # for images of 32 x 32 pixels
SILU = ("--model", "efficientnet_b0", "--weights", "none")  # a network without a ReLU


@pytest.fixture(autouse=True)
def _one_model_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    share_models(monkeypatch)


class Run:
    """What a command line answered."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    def go(*words: object) -> Run:
        code = main([str(word) for word in words])
        return Run(code, *capsys.readouterr())

    return go


def explain(run: Callable[..., Run], out: Path, *words: object) -> Run:
    return run("explain", "--out", out, *words)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


# A run ---------------------------------------------------------------------------------------------------------


def test_a_photo_becomes_an_overlay_as_large_as_the_photo(run: Callable[..., Run], tmp_path: Path) -> None:
    answer = explain(run, tmp_path / "deep" / "out", COFFEE)
    assert (answer.code, answer.err) == (0, "")
    assert names(tmp_path / "deep" / "out") == ["coffee.grad_cam.png"]
    with Image.open(tmp_path / "deep" / "out" / "coffee.grad_cam.png") as picture:
        assert picture.size == (600, 400)
    assert re.search(r"coffee\.jpg +espresso +95\.\d % +grad_cam +\S+coffee\.grad_cam\.png\n", answer.out)


def test_the_overlay_and_the_kept_values_are_those_of_the_library(run: Callable[..., Run], tmp_path: Path) -> None:
    style = ("opacity=map", "colormap=viridis", "sign=signed", "percentile=90")
    drawing = [word for setting in style for word in ("--set", setting)]
    answer = explain(run, tmp_path, COFFEE, "--target", "cup", "--layer", "blocks.4", "--maps", *drawing)
    assert answer.code == 0, answer.err
    ours = saliency.GradCAM(loaded("efficientnet_lite0"), "blocks.4").attribute(COFFEE, "cup")
    kept = saliency.Explanation.load(tmp_path / "coffee.grad_cam.safetensors")
    assert (kept.layer, kept.target_names, kept.sign) == ("blocks.4", ("cup",), "positive")
    assert np.array_equal(np.asarray(kept), np.asarray(ours))
    expected = overlay(ours, opacity="map", colormap="viridis", sign="signed", percentile=90)
    with Image.open(tmp_path / "coffee.grad_cam.png") as picture:
        assert np.array_equal(np.asarray(picture), np.asarray(expected))


def test_json_has_the_facts_of_each_map_and_nothing_else(run: Callable[..., Run], tmp_path: Path) -> None:
    methods = ("-m", "grad_cam", "attn_lrp", "chefer_attention")
    answer = explain(run, tmp_path, COFFEE, *methods, "--sheet", "--json")
    first, second, third = json.loads(answer.out)
    assert first["source"].endswith("coffee.jpg")
    assert (first["name"], first["target"], first["layer"]) == ("espresso", 967, "bn2")
    assert 0.95 < first["probability"] < 0.96
    assert (first["residual"], first["error"], first["notes"]) == (None, None, [])
    assert abs(second["residual"]) < 1e-4
    assert (tmp_path / second["overlay"]).is_file()
    assert (third["error_kind"], third["overlay"]) == ("NotApplicableError", None)
    assert (answer.code, "attention" in answer.err) == (1, True)


def test_every_photo_of_a_folder_is_drawn_in_its_size_and_on_the_sheet(run: Callable[..., Run], tmp_path: Path) -> None:
    answer = explain(run, tmp_path, ASSETS, "--sheet")
    assert answer.code == 0, answer.err
    assert set(names(tmp_path)) == {f"{photo.stem}.grad_cam.png" for photo in PHOTOS} | {"sheet.png"}
    for photo in PHOTOS:
        with Image.open(photo) as original, Image.open(tmp_path / f"{photo.stem}.grad_cam.png") as drawn:
            assert drawn.size == original.size
    assert f"5 overlays of 5 images in {tmp_path}/\n" in answer.out
    assert f"contact sheet: {tmp_path / 'sheet.png'}\n" in answer.out


@pytest.mark.slow
def test_every_method_is_drawn_and_on_the_sheet(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_model()  # every method applies to it that does not need attention
    drawn = [name for name, cls in METHODS.items() if not cls.needs.attention]
    model.preprocess, model.categories = Preprocess(size=(32, 32), resize=32, mean=(0.5,) * 3, std=(0.5,) * 3), None
    monkeypatch.setattr("saliency.batch.network.load", lambda name, weights: model)
    (photo,) = copies(tmp_path, "coffee.jpg")
    answer = explain(run, tmp_path / "out", photo, "--method", "all", *QUICK, *SMALL, "--sheet")
    assert answer.code == 0, answer.err
    assert set(names(tmp_path / "out")) == {f"coffee.{method}.png" for method in drawn} | {"sheet.png"}
    with Image.open(tmp_path / "out" / "sheet.png") as sheet:
        assert sheet.width > (len(drawn) + 1) * 240
    rows = [line for line in answer.out.splitlines() if line.startswith("coffee.jpg") and line.endswith(".png")]
    assert len(rows) == len(drawn)
    assert f"contact sheet: {tmp_path / 'out' / 'sheet.png'}" in answer.out


@pytest.mark.parametrize(
    "words",
    [
        ["--method", "grad_cam", "eigen_cam", COFFEE],
        [COFFEE, "--method", "grad_cam", "--method", "eigen_cam"],
        ["-m", "grad_cam", "-m", "eigen_cam", "grad_cam", "--", COFFEE],
        ["--model", "efficientnet_lite0", COFFEE, "-m", "grad_cam", "eigen_cam", "--quiet"],
    ],
)
def test_photos_and_methods_may_come_in_any_order(run: Callable[..., Run], tmp_path: Path, words: list[str]) -> None:
    assert explain(run, tmp_path, *words).code == 0
    assert names(tmp_path) == ["coffee.eigen_cam.png", "coffee.grad_cam.png"]


def test_the_target_may_be_a_name_or_an_index(run: Callable[..., Run], tmp_path: Path) -> None:
    by_name = explain(run, tmp_path, COFFEE, "--target", "Espresso")
    by_index = explain(run, tmp_path, COFFEE, "--target", "967")
    assert by_name.out == by_index.out
    assert "espresso" in by_name.out


def test_each_text_is_explained_against_the_others(run: Callable[..., Run], tmp_path: Path) -> None:
    model = ("--model", "tests.dual_encoders:for_photos")
    texts = ["a cat", "a photo of a dog", "a bus"]
    found = run(
        "explain",
        *copies(tmp_path, "cat.jpg"),
        *model,
        "-t",
        *(f"text:{text}" for text in texts),
        "--maps",
        "-o",
        tmp_path / "out",
    )
    assert found.code == 0
    assert "3 overlays of 1 image" in found.out
    for name, number in (("a_cat", 0), ("a_photo_of_a_dog", 1), ("a_bus", 2)):
        assert (tmp_path / "out" / f"cat-{name}.grad_cam.png").is_file()
        saved = saliency.Explanation.load(tmp_path / "out" / f"cat-{name}.grad_cam.safetensors")
        target = saliency.text(texts[number], against=[text for text in texts if text != texts[number]])
        own = saliency.GradCAM(loaded(model[1])).attribute(tmp_path / "cat.jpg", target)
        assert torch.equal(saved.values, own.values)
        assert saved.target_names == own.target_names
        assert saved.probabilities is not None
        assert f"{100 * float(saved.probabilities):.1f} %" in found.out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model", "tests.dual_encoders:for_photos"], r"no scores of classes; pass \"text:a photo of a cat\""),
        (["--target", "text:a cat"], "EfficientNet has no text encoder"),
        (["-t", "text:a cat", "-t", "espresso"], "got the targets text:a cat, espresso; several .* only as texts"),
    ],
)
def test_a_text_needs_a_model_of_texts_which_needs_a_text(
    run: Callable[..., Run], tmp_path: Path, words: list[str], reason: str
) -> None:
    found = run("explain", *copies(tmp_path, "cat.jpg"), *words, "-o", tmp_path / "out")
    assert found.code == 2
    assert re.search(reason, found.err)


def test_an_option_goes_to_the_methods_that_have_it(run: Callable[..., Run], tmp_path: Path) -> None:
    words = ("-m", "rectgrad", "grad_cam", "--set", "method.percentile=50", "--maps")
    assert explain(run, tmp_path, COFFEE, *words).code == 0
    kept = saliency.Explanation.load(tmp_path / "coffee.rectgrad.safetensors")
    assert kept.settings["percentile"] == 50


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("names.txt", "\ufeffant\nbee\r\n\ncat\ndog\nemu\n"),
        ("names.json", '["ant", "bee", "cat", "dog", "emu"]'),
        ("config.json", '{"id2label": {"0": "ant", "2": "cat", "1": "bee", "4": "emu", "3": "dog"}}'),
        ("keras.json", '{"dog": 3, "ant": 0, "bee": 1, "cat": 2, "emu": 4}'),
        (
            "imagenet.json",
            '{"0": ["n0", "ant"], "1": ["n1", "bee"], "2": ["n2", "cat"], "3": ["", "dog"], "4": ["emu"]}',
        ),
    ],
)
def test_class_names_come_from_files_of_any_kind(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    arguments = command_parser("explain").parse(["--classes", str(tmp_path / name)])
    assert arguments.categories == ["ant", "bee", "cat", "dog", "emu"]


def test_class_names_from_a_file_may_have_gaps(tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text('{"1": "ant", "4": "bee"}')
    arguments = command_parser("explain").parse(["--classes", str(tmp_path / "names.json")])
    assert arguments.categories == {1: "ant", 4: "bee"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("imagenet", saliency.Preprocess(size=(224, 224), resize=256)),
        ("size=224,resize=256", saliency.Preprocess(size=(224, 224), resize=256)),
        (
            "size=8,9,resize=10,12,mean=.5,0.5,.5,std=1,1,1,interpolation=bicubic,fit=cover",
            saliency.Preprocess(
                size=(8, 9), resize=(10, 12), mean=(0.5,) * 3, std=(1,) * 3, interpolation="bicubic", fit="cover"
            ),
        ),
        ("size=224,resize=false", saliency.Preprocess(size=(224, 224), resize=False)),
        ("range=-160,240.5,size=8", saliency.Preprocess(size=(8, 8), range=(-160, 240.5))),
        ({"size": [8, 9], "resize": 10}, saliency.Preprocess(size=(8, 9), resize=10)),
        (
            {"input_size": [3, 8, 8], "crop_pct": 1},
            saliency.Preprocess.from_timm({"input_size": (3, 8, 8), "crop_pct": 1}),
        ),
        ({"pretrained_cfg": {"input_size": [3, 8, 8]}}, saliency.Preprocess.from_timm({"input_size": (3, 8, 8)})),
    ],
)
def test_preprocessing_is_a_word_fields_or_a_file(tmp_path: Path, text: Any, expected: saliency.Preprocess) -> None:
    if isinstance(text, dict):
        (tmp_path / "p.json").write_text(json.dumps(text))
        text = str(tmp_path / "p.json")
    assert as_preprocess(command_parser("explain").parse(["--preprocess", text]).preprocess) == expected


def test_one_photo_may_come_and_go_through_pipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(COFFEE.read_bytes())))
    assert main(["explain", str(COFFEE), "-o", str(tmp_path), "-q"]) == 0
    capfdbinary.readouterr()
    assert main(["explain", "-", "-o", "-", "-m", "grad_cam"]) == 0
    out, err = capfdbinary.readouterr()
    assert (out, err) == ((tmp_path / "coffee.grad_cam.png").read_bytes(), b"")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"no picture")))
    assert main(["explain", "-m", "grad_cam", "-", "-o", "-"]) == 1
    out, err = capfdbinary.readouterr()
    assert out == b""
    assert err.startswith(b"saliency: stdin is not an AVIF")
    for words in ([COFFEE], ["-m", "layer_cam", "grad_cam"], ["--sheet"], ["--maps"]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(COFFEE.read_bytes())))
        assert main(["explain", "-", "-o", "-", *map(str, words)]) == 2
        out, err = capfdbinary.readouterr()
        assert out == b""
        assert b"-o - writes one overlay" in err


def test_the_overlay_of_an_image_in_a_subfolder_goes_to_a_pipe(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    Image.new("RGB", (64, 64), "red").save(tmp_path / "in" / "sub" / "a.png")
    assert main(["explain", "-r", str(tmp_path / "in"), "--model", "shapes_cnn", "-o", "-"]) == 0
    assert capfdbinary.readouterr().out.startswith(b"\x89PNG")


def test_an_own_model_is_explained_with_own_classes_and_preprocessing(run: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("a\nb\nc\nd\ne")
    model = (
        "--model",
        "tests.batchwork:Tiny",
        "--classes",
        tmp_path / "names.txt",
        "--preprocess",
        "size=32,resize=32",
    )
    assert explain(run, tmp_path / "out", COFFEE, *model, "--target", "d", "--maps").code == 0
    kept = saliency.Explanation.load(tmp_path / "out" / "coffee.grad_cam.safetensors")
    assert (kept.target_names, kept.input_size) == (("d",), (32, 32))
    assert run("layers", *model[1:], "--gradients", "--target", "d").code == 0
    (tmp_path / "names.txt").write_text("a\nb")
    assert "got 2 class names for a model of 5 classes; pass" in explain(run, tmp_path / "out", COFFEE, *model).err
    answer = explain(run, tmp_path / "out", COFFEE, *model[:4], "--preprocess", "sise=3")
    assert "fields of saliency.Preprocess: size, resize" in answer.err
    answer = explain(run, tmp_path / "out", COFFEE, "--preprocess", "imagent")
    assert "imagent: expected imagenet, a JSON file" in answer.err


def test_all_methods_of_a_photo_share_one_forward(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = counted(monkeypatch)
    words = ("-m", "grad_cam", "xgrad_cam", "guided_backprop", "fused_cam")
    answer = explain(run, tmp_path, *PHOTOS[:2], *words)
    assert answer.code == 0
    assert len(traces) == 2
    assert answer.out.count("guided_backprop: 33 relu6 rewritten") == 1


def counted(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one for each forward that methods read."""
    traces: list[None] = []

    class Counting(SharedForward):
        def __init__(self, *arguments: Any) -> None:
            traces.append(None)
            super().__init__(*arguments)

    monkeypatch.setattr("saliency.attribution.base.SharedForward", Counting)
    return traces


# Failures ------------------------------------------------------------------------------------------------------


def test_a_bad_photo_does_not_cost_the_others(run: Callable[..., Run], tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    copies(folder, "fine.jpg")
    (folder / "broken.jpg").write_bytes(COFFEE.read_bytes()[:20_000])
    (folder / "empty.png").touch()
    (folder / "folder.png").mkdir()
    (folder / "notes.doc").write_text("no picture")
    (folder / ".hidden.jpg").write_text("no picture")
    (tmp_path / "nothing").mkdir()
    answer = explain(
        run, tmp_path / "out", folder, folder / "notes.doc", tmp_path / "nothing", "missing.jpg", "--sheet"
    )
    assert answer.code == 1
    assert names(tmp_path / "out") == ["fine.grad_cam.png", "sheet.png"]
    for reason in (
        "broken.jpg is damaged: image file is truncated",
        "empty.png is empty",
        "folder.png is a folder",
        "notes.doc is not an AVIF",
        "nothing: the folder contains no images",
        "missing.jpg cannot be read: No such file",
    ):
        assert reason in answer.err
        assert reason.partition(" ")[2] not in answer.out  # once, and where errors belong
    assert answer.err.count("\n") == 6
    assert "left out: 2 other files (.doc 1, hidden 1)" in answer.out


@pytest.mark.slow
def test_a_method_that_does_not_apply_does_not_cost_the_others(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = counted(monkeypatch)
    words = ("-m", "guided_backprop", "grad_cam", "layer_cam", *SILU, "--sheet")
    answer = explain(run, tmp_path, *PHOTOS[:3], *words)
    assert answer.code == 1
    made = {f"{photo.stem}.{method}.png" for photo in PHOTOS[:3] for method in ("grad_cam", "layer_cam")}
    assert set(names(tmp_path)) == made | {"sheet.png"}
    assert answer.err.count("guided_backprop: no ReLU was called") == 3
    assert "--set smooth=positive" in answer.err
    assert len(traces) == 4 + 2 + 2  # once it is known to fail, it is asked by itself and the others share


def test_among_all_methods_one_that_does_not_apply_is_no_failure(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each of them is run by `all` above; here it matters that one of them does not apply.
    chosen = {name: METHODS[name] for name in ("grad_cam", "guided_backprop", "vanilla_gradient")}
    monkeypatch.setattr("saliency.methods.METHODS", chosen)  # which "all" reads
    answer = explain(run, tmp_path, COFFEE, "-m", "all", *SILU, "--quiet")
    assert (answer.code, answer.out, answer.err) == (0, "", "")
    assert names(tmp_path) == ["coffee.grad_cam.png", "coffee.vanilla_gradient.png"]


def test_nothing_but_methods_that_do_not_apply_is_a_failure(run: Callable[..., Run], tmp_path: Path) -> None:
    assert explain(run, tmp_path, COFFEE, "-m", "guided_backprop", *SILU).code == 1
    assert names(tmp_path) == []


def test_an_error_in_the_model_costs_only_its_photo(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[torch.Tensor] = []

    class Fragile(Together):
        def attribute(self, inputs: Any, target: Any = None, **arguments: Any) -> list[saliency.Explanation]:
            batches.append(inputs.inputs)
            if len(batches) <= 2:
                raise RuntimeError("out of memory\nfor 3 reasons")
            return super().attribute(inputs, target, **arguments)

    monkeypatch.setattr("saliency.batch.network.Together", Fragile)
    answer = explain(run, tmp_path, *PHOTOS)
    assert answer.code == 1
    assert names(tmp_path) == ["chelsea.grad_cam.png", "coffee.grad_cam.png", "rocket.grad_cam.png"]
    assert answer.err.count("RuntimeError: out of memory for 3 reasons\n") == 2


def test_a_full_disk_is_told_of_the_file(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        if path.name.startswith("coffee"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(path, content)

    monkeypatch.setattr("saliency.batch.drawing.write_file", full)
    answer = explain(run, tmp_path, *PHOTOS)
    assert answer.code == 1
    assert names(tmp_path) == ["astronaut.grad_cam.png", "camera.grad_cam.png", "chelsea.grad_cam.png"]
    assert answer.out.startswith("image ")  # a row for each finished image
    reason = "cannot be written to: No space left on device; finished images are kept: free disk space"
    assert f"{reason}, and run the command again\n" in answer.err


def test_quiet_prints_nothing_but_errors(run: Callable[..., Run], tmp_path: Path) -> None:
    answer = explain(run, tmp_path, COFFEE, "missing.jpg", "-q", "--sheet")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == "saliency: missing.jpg cannot be read: No such file or directory\n"
    assert explain(run, tmp_path, COFFEE, "-q", "-m", "grad_cam_plus_plus", *SILU).err == ""


def test_a_warning_is_one_line_without_source_code(run: Callable[..., Run], tmp_path: Path) -> None:
    answer = explain(run, tmp_path, *PHOTOS[:4], "-m", "grad_cam_plus_plus", *SILU)
    assert answer.code == 0
    (line,) = answer.err.splitlines()
    assert line.startswith("warning: astronaut.jpg, camera.jpg and 2 more: grad_cam_plus_plus: the activations")


# Usage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--method", "gradcam"], 'no method "gradcam"; did you mean "grad_cam"'),
        (["--method", "zzz"], 'no method "zzz"; the methods are grad_cam, '),
        (["--method", "other.jpg"], 'no method "other.jpg"; the methods are grad_cam, '),
        (["--methods", "grad_cam"], 'no option "--methods"; did you mean "--method"'),
        (["--model", "efficientnet_lite9"], 'no model "efficientnet_lite9"; did you mean "efficientnet_lite'),
        (["--weights", "v2"], 'only the weights "default", not "v2"'),
        (["--weights", "gone.safetensors"], "no checkpoint file at gone.safetensors"),
        (["--target", "espreso"], 'no class "espreso" among 1000 classes; did you mean "espresso"'),
        (["--target", "5000"], "class 5000 is outside 0..999, the model's class names"),
        (["--target", "-1"], "class -1 is negative"),
        (["--target", "2.5"], 'no class "2.5"'),
        (["--layer", "block.5"], 'no layer "block.5" in EfficientNet; the closest are blocks.5'),
        (["--layer", "classifier"], 'the output of layer "classifier" has shape (1, 1000)'),
        (["--layer", "bn2", "-m", "vanilla_gradient"], "vanilla_gradient reads no layer"),
        (
            ["--set", "smoth=positive", "-m", "deconvnet"],
            'no option "smoth" of deconvnet or the overlay; did you mean "smooth"',
        ),
        (["--set", "foo=1", "-m", "rise"], 'no option "foo" of rise or the overlay; the options are grid'),
        (["--set", "foo=1"], 'no option "foo" of grad_cam or the overlay; the options are calls, opacity'),
        (["--set", "n_steps=3", "-m", "idgi"], 'no option "n_steps" of idgi or the overlay; it is called steps here'),
        (["--target", "cat"], 'no class "cat" among 1000 classes; did you mean "tiger cat" or "Persian cat"'),
        (["--set", "smooth=positiv", "-m", "deconvnet"], 'did you mean "positive"'),
        (["--set", "method.percentile=high", "-m", "rectgrad"], "percentile='high' is not a finite number"),
        (["--set", "smooth"], "expected OPTION=VALUE"),
        (["--set", "colormap=infernal"], 'no colour map "infernal"; use the name of a matplotlib colour map'),
        (["--set", "percentile=50", "-m", "rectgrad"], "write method.percentile or overlay.percentile"),
        (["--set", "opacity=2"], 'opacity=2 is not a finite number of at least 0 and of at most 1, or "map"'),
        (["--set", "percentile=NaN"], "percentile=nan is not a finite number above 0"),
        (["--set", "sign=both"], "sign='both' is not one of"),
        (["--device", "gpu"], 'no device "gpu": Expected one of cpu, cuda'),
        (["--device", "cuda:99"], 'no device "cuda:99": '),
        (["--model", "lraspp_mobilenet_v3_large", "--weights", "none"], "not (N, classes)"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_done_is_said_before_any_work(
    run: Callable[..., Run], tmp_path: Path, words: list[str], answer: str
) -> None:
    got = explain(run, tmp_path / "out", COFFEE, *words)
    assert (got.code, got.out) == (2, "")
    assert got.err.startswith("saliency: ")
    assert answer in got.err
    assert "Traceback" not in got.err
    assert not (tmp_path / "out").exists() or names(tmp_path / "out") == []


def test_a_class_outside_a_model_without_class_names_is_a_usage_error(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = zoo.load("efficientnet_lite0")
    model.categories = None
    monkeypatch.setattr("saliency.batch.network.load", lambda name, weights: model)
    got = explain(run, tmp_path, COFFEE, "--target", "1000", "-m", "grad_cam", "vanilla_gradient")
    assert (got.code, got.err) == (2, "saliency: class 1000 is outside 0..999, the classes of the model's output\n")
    assert "the model has no class names" in explain(run, tmp_path, COFFEE, "--target", "espresso").err
    assert "class 967" in explain(run, tmp_path, COFFEE, "--target", "967").out


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["explan", "x.jpg"], 'no command "explan"; did you mean "explain"?'),
        (["explore"], 'no command "explore"; did you mean "serve"?'),
        (["serve", "--port", "x"], "argument --port: x: expected a whole number: port of the page"),
        (["trust", "x.jpg", "--draws", "x"], "99 for a level of 1 % (default: 19)"),
        ([str(COFFEE)], f"to explain it: saliency explain {COFFEE}"),
        (
            ["qqqq"],
            "there are explain, batch, evaluate, trust, serve, export, report, compare, groups, methods, layers, "
            "models",
        ),
        (["--verbose"], "unrecognized arguments: --verbose"),
        (["explain"], "no image was given; try: saliency explain photo.jpg"),
        (["models", "efficientnet_lite9"], 'no model matches "efficientnet_lite9"; did you mean'),
        (["layers", "efficientnet_lite9"], 'no model "efficientnet_lite9"; did you mean'),
        (["layers", "--image", "missing.jpg"], "missing.jpg' cannot be read: No such file"),
        (["layers", "--imag", "missing.jpg"], 'no option "--imag"; did you mean "--image"'),
        (["methods", "gradcam"], 'no method "gradcam"; did you mean "grad_cam"'),
        (["trust", "cat.jpg", "-o", "card.jpg"], "card.jpg: expected file of the card, .html, .png or .json"),
    ],
)
def test_every_slip_gets_the_closest_right_word(run: Callable[..., Run], words: list[str], answer: str) -> None:
    got = run(*words)
    assert (got.code, got.out) == (2, "")
    assert answer in got.err


def test_a_folder_that_cannot_be_written_to_is_said_before_any_work(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert f"{file} cannot be written to: File exists; finished images are kept" in explain(run, file, COFFEE).err
    assert "Not a directory" in explain(run, file / "out", COFFEE).err
    assert file.read_text() == "mine"

    def refused(**options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    got = explain(run, tmp_path / "out", COFFEE)
    assert (got.code, got.out) == (1, "")
    assert "out cannot be written to: Permission denied; finished images are kept: check the folder" in got.err


def test_no_photo_of_the_run_is_ever_replaced(run: Callable[..., Run], tmp_path: Path) -> None:
    photos = copies(tmp_path, "a.png", "a.grad_cam.png")
    before = [photo.read_bytes() for photo in photos]
    got = explain(run, tmp_path, *photos)
    assert got.code == 2
    assert "a.grad_cam.png would replace one of the images" in got.err
    (sheet,) = copies(tmp_path, "sheet.png")
    assert explain(run, tmp_path / "." / "..", sheet.rename(tmp_path.parent / "sheet.png"), "--sheet").code == 2
    assert [photo.read_bytes() for photo in photos] == before


# Interruption --------------------------------------------------------------------------------------------------


def test_an_interrupted_run_keeps_what_is_made(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, content: bytes) -> None:
        if path.name == "chelsea.layer_cam.png":
            raise KeyboardInterrupt
        write_file(path, content)

    monkeypatch.setattr("saliency.batch.drawing.write_file", interrupted)
    got = explain(run, tmp_path, *PHOTOS, "-m", "grad_cam", "layer_cam", "--sheet")
    assert got.code == 130
    made = [f"{name}.{method}.png" for name in ("astronaut", "camera") for method in ("grad_cam", "layer_cam")]
    assert names(tmp_path) == [*made, "chelsea.grad_cam.png"]
    assert all(file in got.out for file in [*made, "chelsea.grad_cam.png"])
    assert got.err == "saliency: interrupted; 2 of 5 images are done\n"


@pytest.mark.usefixtures("_ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_control_c_and_sigterm_end_with_130_and_leave_no_partial_file(tmp_path: Path, number: int) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for i in range(300):
        shutil.copy(COFFEE, photos / f"{i:03}.jpg")
    process = forked_command(tmp_path / "said", "explain", photos, "--out", tmp_path / "out")
    deadline = time.monotonic() + 120
    while not list((tmp_path / "out").glob("*.png")) and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.join(60)
    err = (tmp_path / "said").read_text()
    assert process.exitcode == 130, err
    assert re.search(r"interrupted; \d+ of 300 images are done", err)
    assert "Traceback" not in err
    made = names(tmp_path / "out")
    assert made
    assert all(re.fullmatch(r"\d{3}\.grad_cam\.png", name) for name in made)
    for name in made:
        with Image.open(tmp_path / "out" / name) as picture:
            picture.load()


# Names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", [(), ("--sheet",), ("-m", "layer_cam")])
def test_its_own_drawings_are_never_explained(run: Callable[..., Run], tmp_path: Path, style: tuple[str, ...]) -> None:
    copies(tmp_path, "coffee.jpg", "my.cup.png")
    first = explain(run, tmp_path, tmp_path, "--sheet")
    assert (first.code, first.err) == (0, "")
    assert "left out" not in first.out
    again = explain(run, tmp_path, tmp_path, *style)
    assert (again.code, again.err) == (0, "")
    assert again.out.endswith("left out, since saliency wrote them: 3 images\n")
    assert "2 overlays of 2 images" in again.out
    alone = explain(run, tmp_path, tmp_path / "sheet.png")
    assert (alone.code, "sheet.png is a file that saliency wrote" in alone.err) == (1, True)


def test_files_of_photos_that_differ_in_the_suffix_or_the_folder_do_not_collide(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    copies(tmp_path / "in", "a.jpg", "a.png", "b.jpg")
    copies(tmp_path / "in2", "b.jpg", "c d.jpg")
    photos = [tmp_path / "in", tmp_path / "in2", tmp_path / "in" / "a.jpg"]
    assert explain(run, tmp_path / "out", *photos).code == 0
    expected = ["a", "a-2", "b", "b-2", "c d"]
    assert names(tmp_path / "out") == sorted(f"{label}.grad_cam.png" for label in expected)


def test_hostile_names_are_written_and_shown_harmlessly(run: Callable[..., Run], tmp_path: Path) -> None:
    hostile = ["[red]x\x1b[2J.jpg", "line\nbreak.jpg", "é" * 100 + ".jpg", "\U0001f600" * 60 + ".jpg", "-o.jpg"]
    folder = tmp_path / "in"
    copies(folder, *hostile)
    (folder / os.fsdecode(b"\xff.jpg")).write_bytes((folder / "-o.jpg").read_bytes())
    answer = explain(run, tmp_path / "out", folder)
    assert answer.code == 0, answer.err
    assert len(names(tmp_path / "out")) == 6
    assert "\x1b" not in answer.out
    assert "[red]x\\x1b[2J.jpg" in answer.out
    assert "line\\nbreak.jpg" in answer.out
    assert "\\xff.jpg" in answer.out  # the byte, as in a manifest


# Lists ---------------------------------------------------------------------------------------------------------


def test_methods_lists_the_whole_registry_with_papers(run: Callable[..., Run]) -> None:
    answer = run("methods")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(METHODS)
    for line in lines[1:]:
        assert re.search(r"forward.*  \S.* (19|20)\d\d +https?://\S+ +\S.*\.$", line), line
    assert "Selvaraju et al. 2016" in lines[1]


def test_a_method_is_described_with_every_option(run: Callable[..., Run]) -> None:
    text = run("methods", "rise").out
    assert "The paper uses probabilities" in text
    assert "Petsiuk et al." in text
    assert re.search(r"^Cost: \d+ forwards. Units: score. Sign: positive.$", text, re.MULTILINE)
    assert re.search(r"^grid=7 +The number of cells of a mask along each edge.$", text, re.MULTILINE)
    assert re.search(r"^debiased=true +", text, re.MULTILINE)
    assert "precision" not in text
    assert "--set" not in run("methods", "cam").out


def test_methods_are_described_for_programs(run: Callable[..., Run]) -> None:
    described = {about["method"]: about for about in json.loads(run("methods", "--json").out)}
    assert list(described) == list(METHODS)
    for name, about in described.items():
        assert tuple(about["options"]) == METHODS[name].options()
        assert all(option["description"] for option in about["options"].values()), name
        for option in about["options"].values():  # a reader of one method has not read another one
            assert not re.search(r"As for|saliency\.methods", option["description"]), name
    segments = [described[name]["options"]["segments"] for name in ("feature_ablation", "kernel_shap")]
    assert segments[0] == segments[1]
    assert json.loads(run("methods", "rise", "--json").out) == [described["rise"]]
    smooth = described["guided_backprop"]["options"]["smooth"]
    assert (smooth["default"], smooth["choices"]) == ("leave", ["leave", "positive"])


def test_models_lists_the_bundled_ones_first_and_others_on_request(run: Callable[..., Run]) -> None:
    few = run("models").out.splitlines()
    assert [line.split()[:2] for line in few[1:4]] == [[f"efficientnet_lite{i}", "bundled"] for i in range(3)]
    assert "torchvision" in few[-1]
    assert len(run("models", "--all").out.splitlines()) > 1000
    fitting = run("models", "resnet1?").out.splitlines()[1:]
    assert {line.split()[0].rpartition("/")[2] for line in fitting} >= {"resnet18"}
    assert all(re.match(r"(\w+/)?resnet1.( |d)", line) for line in fitting)
    assert all("vgg1" in line for line in run("models", "vgg1").out.splitlines()[1:])


# Lightness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "answer"),
    [
        (["--help"], 0, "saliency explain photo.jpg"),
        (["explain", "--help"], 0, "cat-2.grad_cam.png"),
        (["--version"], 0, "saliency 0."),
        ([], 2, "usage: saliency COMMAND"),
        (["explain", "--metod", "x"], 2, "--method"),
        (["expl"], 2, "explain"),
        (["explain", "cat.jpg", "-o", "x.txt"], 2, "x.txt is the name of a file; pass the folder"),
        (["batch", "photos", "--out", "maps.png"], 2, "saliency explain -o - > cat.png"),
    ],
)
def test_help_version_and_slips_answer_without_torch(words: list[str], code: int, answer: str) -> None:
    program = (
        "import sys; from saliency.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'PIL', 'rich', 'matplotlib'} & set(sys.modules); "
        "print(heavy or 'light', code)"
    )
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.endswith(f"light {code}\n")
    assert answer in done.stdout + done.stderr


def test_the_installed_command_is_this_one() -> None:
    (command,) = entry_points(group="console_scripts", name="saliency")
    assert command.load() is main
    process = started("--version", stdout=subprocess.PIPE)
    assert process.communicate()[0].decode() == f"saliency {__version__}\n"


def test_help_fits_eighty_columns(run: Callable[..., Run]) -> None:
    for command in cli.COMMANDS:
        text = run(command, "--help").out
        assert max(map(len, text.splitlines())) <= 80


def test_the_help_of_a_command_speaks_of_no_other_one(run: Callable[..., Run]) -> None:
    for command in cli.COMMANDS:
        text = " ".join(run(command, "--help").out.split())
        assert not re.search(r"(explain|batch|evaluate): ", text)
    assert "usage: saliency methods [METHOD] [options]" in run("methods", "--help").out
    assert "usage: saliency trust FILE [options]" in run("trust", "--help").out


def test_choices_of_the_parser_are_those_of_the_library() -> None:
    assert arguments.METHOD in METHODS
