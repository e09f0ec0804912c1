"""The command `saliency batch`: it wraps the library, and tells what became of it."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import saliency
from saliency.batch import batch
from saliency.batch.network import Network, trust_card
from saliency.batch.options import NetworkOptions
from saliency.batch.plan import BatchSlot
from saliency.batch.sources import find_images
from saliency.cli import batch_commands as batching
from saliency.cli import command_parser, main
from saliency.cli.console import Screen
from saliency.evaluation.trust import TrustCard
from tests.batchwork import FailsOnce, Tiny, assert_same, noise, photos, quick, rows
from tests.commandline import forked_command
from tests.dual_encoders import for_photos

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    photos(tmp_path / "in", 5)
    return tmp_path / "in"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("saliency.batch.network.load", lambda name, weights: Tiny())

    def go(*words: object) -> tuple[int, str, str]:
        code = batching.run(command_parser("batch").parse([str(word) for word in words]), Screen())
        return code, *capsys.readouterr()

    return go


# saliency batch ----------------------------------------------------------------------------------------------------


def test_a_run_says_how_much_was_done_and_where(run: Run, source: Path, tmp_path: Path) -> None:
    code, out, err = run(source, "--out", tmp_path / "out", "-m", "grad_cam", "layer_cam", "--batch-size", "2")
    assert (code, err) == (0, "")
    assert "5 of 5 images done, 5 in this run" in out
    assert f"gallery page: {tmp_path}/out/index.html" in out
    assert len(rows(tmp_path / "out")) == 10
    code, out, _ = run(source, "--out", tmp_path / "out", "-m", "grad_cam", "layer_cam")
    assert code == 0
    assert "5 of 5 images done by earlier runs" in out


def test_the_gain_of_compiling_is_printed_before_the_progress_unless_quiet(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("saliency.batch.network.load", lambda name, weights: Tiny())
    monkeypatch.setattr("saliency.program.compiled.frozen", lambda graph, inputs, mode: graph)
    words = ["batch", str(source), "--out", str(tmp_path / "out"), "--compile"]
    assert main([*words, "--limit", "2", "--quiet"]) == 0
    assert not "".join(capsys.readouterr())
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"compiling the methods.*\ncompiled in \d+ s; saves .*\n", err)
    assert "5 of 5 images done, 3 in this run" in out


def test_the_output_folder_may_be_that_of_the_photos(run: Run, source: Path) -> None:
    out = run(source, "--recursive", "--out", source)[1]
    assert "left out" not in out
    code, out, err = run(source, "--recursive", "--out", source / "new", "-m", "vanilla_gradient", "--format", "jpg")
    assert (code, err) == (0, "")
    assert "5 of 5 images done, 5 in this run" in out
    assert "left out, since saliency wrote them: 15 images" in out  # overlays, photos and heat
    code, out, err = run(source, "--recursive", "--out", source)
    assert "5 of 5 images done by earlier runs" in out
    assert "left out, since saliency wrote them: 30 images" in out


def test_the_summary_counts_the_files_that_are_not_images(run: Run, source: Path, tmp_path: Path) -> None:
    for name in ("a.tga", "b.tga", "c.ico", "d.raw", "e.xyz", ".f.png"):
        (source / name).touch()
    out = run(source, "--limit", 1, "--out", tmp_path / "out")[1]
    assert "left out: 6 other files (.tga 2, " in out
    assert ", ...)" in out


def test_failures_above_twenty_are_counted_with_their_file(run: Run, source: Path, tmp_path: Path) -> None:
    for number in range(23):
        (source / f"bad{number}.png").touch()
    _, _, err = run(source, "--out", tmp_path / "out")
    assert err.count("is empty") == 20
    assert f"3 more failures are in {tmp_path}/out/manifest.jsonl" in err


def test_a_bright_file_is_not_judged_as_a_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Tiny()
    model.preprocess = saliency.Preprocess((16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)
    monkeypatch.setattr("saliency.batch.network.load", lambda name, weights: model)
    (tmp_path / "in").mkdir()
    for value in (140, 200, 250):  # above the mean in each pixel, as in 0..1
        Image.new("RGB", (20, 16), (value, value, 255)).save(tmp_path / "in" / f"{value}.png")
    assert main(["batch", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 0
    assert "float tensor" not in capsys.readouterr().err


def test_warnings_of_a_run_name_their_files_once_with_a_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("saliency.batch.network.load", lambda name, weights: Tiny())
    (tmp_path / "in").mkdir()
    for index in range(5):
        frames = [Image.effect_noise((20, 16), 40 + index).convert("RGB") for _ in range(2)]
        frames[0].save(tmp_path / "in" / f"{index}.gif", save_all=True, append_images=frames[1:])
    assert main(["batch", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "first frame" in line]
    files, _, rest = line.removeprefix("warning: ").partition(": ")
    assert rest == "of an animation, the first frame is explained"
    assert files.count(".gif") == 2
    assert files.endswith(" and 3 more")


class Bright(nn.Module):
    """The mean of what is brighter than the preprocessing's mean; 0 for dark images, with a gradient of 0."""

    preprocess = saliency.Preprocess((16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(x).mean((2, 3)))
        return out


@pytest.mark.parametrize("width", [20, 16])  # the last image differs in size: a batch of its own
def test_a_warning_about_an_image_of_a_batch_names_its_file(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("saliency.batch.network.load", lambda name, weights: Bright())
    (tmp_path / "in").mkdir()
    for name, value, size in (("a", 250, 20), ("b", 10, 20), ("c", 250, 20), ("d", 20, width)):
        Image.new("RGB", (size, 16), (value,) * 3).save(tmp_path / "in" / f"{name}.png")
    words = ("--whole", "aspect", "-m", "vanilla_gradient", "--batch-size", "4")
    assert main(["batch", str(tmp_path / "in"), "--out", str(tmp_path / "out"), *words]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "is 0 everywhere" in line]
    assert re.match(r"warning: (b\.png, d\.png|d\.png, b\.png): the vanilla_gradient map", line)


def test_the_lines_of_libtiff_stay_off_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "a.tiff"
    Image.effect_noise((64, 64), 90).save(file, compression="tiff_lzw")
    content = file.read_bytes()
    file.write_bytes(content[:200] + bytes(255 - byte for byte in content[200:400]) + content[400:])
    read = "try: open_image(file)\nexcept ImageError: print('refused')"
    start = "from saliency.cli import main; main(); print('started', file=sys.stderr, flush=True)"
    code = f"import sys\nfrom saliency.io.inputs import *\nfile = sys.argv.pop(1)\n{read}\n{start}\n{read}"
    command = [sys.executable, "-c", code, str(file), "--version"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    assert re.fullmatch(r"refused\n.*\nrefused\n", told.stdout)
    before, after = told.stderr.split("started\n")
    assert before
    assert not after


@pytest.mark.parametrize("separator", [b"\n", b"\r\n", b"\0"])
def test_paths_may_come_through_a_pipe(
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: bytes
) -> None:
    (source / "04.png").rename(source / os.fsdecode(b"x \xff.png"))
    paths = [*sorted(map(os.fsencode, source.iterdir())), b""]
    for _ in range(2):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(separator.join(paths))))
        assert "5 of 5 images done" in run("-", "--out", tmp_path / "out")[1]


def test_failures_are_told_and_the_exit_code_says_so(
    run: Run, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "02.png").write_bytes(b"")
    code, out, err = run(source, "--out", tmp_path / "out")
    assert code == 1
    assert "is empty" not in out  # once, and where errors belong
    assert err == f"saliency: {source}/02.png is empty\n"
    assert "1 image with failures: 1 ImageError; --retry" in out
    assert run(source, "--out", tmp_path / "out")[0] == 1
    assert main(["batch", str(source), "--out", str(tmp_path / "strict"), "--strict"]) == 1
    assert "--strict" in capsys.readouterr().err


def test_photos_that_changed_or_were_removed_are_told(run: Run, source: Path, tmp_path: Path) -> None:
    run(source, "--out", tmp_path / "out")
    noise(source / "01.png", 9, (50, 20))
    (source / "03.png").unlink()
    code, out, err = run(source, "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    assert "5 of 5 images done, 1 in this run" in out
    assert "changed since the last run and explained again: 1 image" in out
    assert f"removed since the last run, overlays kept: 1 image, {source}/03.png" in out
    assert "changed since" not in run(source, "--out", tmp_path / "out")[1]


def test_a_batch_that_was_repeated_is_one_line_with_the_error(
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FailsOnce()
    monkeypatch.setattr("saliency.batch.network.load", lambda name, weights: model)
    out = run(source, "--out", tmp_path / "out", "--batch-size", "4", "--workers", "1")[1]
    (line,) = [line for line in out.splitlines() if "batches repeated" in line]
    assert line.startswith("batches repeated in parts after an error: 4 images (column repeated of manifest.jsonl), ")
    assert line.endswith("the driver was restarted")


def test_options_reach_the_library(run: Run, source: Path, tmp_path: Path) -> None:
    words = [
        "--target",
        "bee",
        "--format",
        "jpg",
        "--set",
        "opacity=map",
        "--set",
        "colormap=viridis",
        "--set",
        "sign=signed",
    ]
    more = ["--set", "percentile=90", "--limit", "2", "--maps", "--layer", "features.0", "--set", "smooth=positive"]
    code, _, err = run(source, "--out", tmp_path / "out", *words, *more, "-m", "grad_cam", "guided_grad_cam")
    assert (code, err) == (0, "")
    made = rows(tmp_path / "out")
    assert len(made) == 4
    assert {(each["name"], each["layer"], each["colormap"]) for each in made if each["method"] == "grad_cam"} == {
        ("bee", "features.0", "viridis")
    }
    about = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert about["fingerprint"]["percentile"] == 90
    assert about["command"][0] == "saliency"


def test_the_first_text_is_explained_against_the_others(
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saliency.batch.network.load", lambda name, weights: for_photos())
    assert run(source, "--out", tmp_path / "out", "-t", "text:a cat", "text:a dog", "text:a bus")[0] == 0
    assert {each["name"] for each in rows(tmp_path / "out")} == {"a cat rather than a dog or a bus"}


def test_all_methods_are_every_method_and_one_that_does_not_apply_is_no_failure(
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {name: saliency.METHODS[name] for name in ("grad_cam", "cam", "guided_backprop")}
    monkeypatch.setattr("saliency.methods.METHODS", chosen)
    model = Tiny()
    model.features[1] = torch.nn.SiLU()
    monkeypatch.setattr("saliency.batch.network.load", lambda name, weights: model)
    code, _, err = run(source, "--out", tmp_path / "out", "-m", "all", "--limit", "2")
    assert {each["error_kind"] for each in rows(tmp_path / "out")} == {None, "NotApplicableError"}
    assert code == 0, err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["-m", "grad_cm"], 'did you mean "grad_cam"'),
        (["--device", "gpu"], 'no device "gpu"'),
        (["--targets", "nowhere.csv"], "does not exist"),
        (["--batch-size", "0"], "batch_size=0 is not a whole number of at least 1"),
    ],
)
def test_what_cannot_be_done_is_an_error(run: Run, source: Path, tmp_path: Path, words: list[str], reason: str) -> None:
    with pytest.raises(saliency.errors.SaliencyError, match=reason):
        run(source, "--out", tmp_path / "out", *words)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--workers", "x"], "x: expected a whole number: number of threads"),
        (["--classes", "no.txt"], "no.txt: expected class names, one per line or JSON; No such file or directory\n"),
        (["--format", "gif"], "invalid choice"),
        (["--set", "smooth"], "expected OPTION=VALUE"),
        (["--limt", "3"], 'did you mean "--limit"'),
    ],
)
def test_slips_of_the_keyboard_are_one_line(
    run: Run, source: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(source, *words)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert reason in err
    assert "Error" not in err


def test_methods_may_be_separated_by_commas(run: Run, source: Path, tmp_path: Path) -> None:
    assert run(source, "--out", tmp_path / "out", "--limit", "1", "-m", "grad_cam,layer_cam")[0] == 0
    assert [row["method"] for row in rows(tmp_path / "out")] == ["grad_cam", "layer_cam"]


def test_a_full_disk_is_told_in_one_line_and_is_exit_code_1(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("saliency.batch.drawing.write_file", full)
    monkeypatch.setattr("saliency.batch.network.load", lambda name, weights: Tiny())
    assert main(["batch", str(source), "--out", str(tmp_path / "out")]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "No space left on device; finished images are kept: free disk space" in err


def test_the_bar_tells_speed_and_failures_on_a_terminal_and_is_quiet_elsewhere(
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "00.png").write_bytes(b"")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    code, _, _ = run(source, "--out", tmp_path / "out", "--batch-size", "1")
    assert code == 1
    assert "5/5" in screen.getvalue()
    assert "1 failed" in screen.getvalue()


@pytest.mark.slow
def test_a_command_that_is_terminated_is_interrupted_and_goes_on_to_the_same_files(tmp_path: Path) -> None:
    photos(tmp_path / "in", 200)
    out = tmp_path / "out"
    words = ("--out", out, "--maps", "--batch-size", 2, "--workers", 2)
    process = forked_command(tmp_path / "said", "batch", tmp_path / "in", *words)
    deadline = time.monotonic() + 120
    while not (out / "manifest.jsonl").exists() or not rows(out):
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.terminate()
    process.join(120)
    err = (tmp_path / "said").read_text()
    assert process.exitcode == 130, err
    done = len(rows(out))
    assert f"interrupted; {done} of 200 images are done; re-run to resume" in err
    assert 0 < done < 200
    command = json.loads((out / "manifest.json").read_text())["command"]  # which the page shows
    options: dict[str, Any] = {"maps": True, "batch_size": 2, "workers": 2, "limit": done + 6, "command": command}
    assert batch(tmp_path / "in", out, **options).fresh == 6
    batch(tmp_path / "in", tmp_path / "whole", **options)
    assert_same(out, tmp_path / "whole")


def test_help_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\nfrom saliency.cli import COMMANDS, command_parser\n"
        "for name in COMMANDS:\n    command_parser(name).format_help()\n"
        "print([name for name in ('torch', 'numpy', 'cv2', 'PIL') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout == "[]\n"


def test_a_finished_run_is_found_finished_without_torch(source: Path, tmp_path: Path, run: Run) -> None:
    words = [str(source), "--out", str(tmp_path / "out")]
    run(*words)
    code = (
        "import sys\nfrom saliency.cli import main\n"
        f"code = main({['batch', *words]!r})\n"
        "print(code, [name for name in ('torch', 'numpy', 'cv2', 'PIL') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.splitlines()[-1] == "0 []"


def scan(path: Path) -> Path:
    """Write a 16-bit image of 12 bits."""
    values = np.asarray(Image.open(noise(path, 7)).convert("L"), np.uint16) * np.uint16(8)
    Image.fromarray(values + np.uint16(100)).save(path)
    return path


def test_16_bits_are_drawn_with_their_range_in_all_files(run: Run, tmp_path: Path) -> None:
    path = scan(tmp_path / "in" / "scan.png")
    fields = "size=16,mean=0.5,0.5,0.5,std=0.5,0.5,0.5,range=0,4095"
    code, _, err = run(path.parent, "--out", tmp_path / "out", "--maps", "--preprocess", fields, "--set", "opacity=0")
    assert (code, err) == (0, "")
    assert rows(tmp_path / "out")[0]["range"] == [0, 4095]
    head = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert "resize=(16, 16)" in head["preprocess"]
    assert "range=(0.0, 4095.0)" in head["preprocess"]
    expected = np.asarray(Image.open(path), np.float64) * (255 / 4095)
    with Image.open(tmp_path / "out" / "overlays" / "scan.grad_cam.png") as overlay:
        assert np.abs(np.asarray(overlay)[..., 0] - expected).max() <= 0.51
    with Image.open(tmp_path / "out" / "thumbnails" / "scan.jpg") as photo:
        assert np.abs(np.asarray(photo)[..., 0] - expected).max() <= 12


def test_trust_cards_and_saved_explanations_are_of_the_16_bits_that_the_model_sees(tmp_path: Path) -> None:
    path = scan(tmp_path / "scan.png")
    model = Tiny()
    model.preprocess = replace(model.preprocess, range=(0, 4095))
    explanation = saliency.GradCAM(model).attribute(path)
    network, (entry,) = Network(NetworkOptions(model=model), model), find_images([path]).entries
    card = trust_card(network.methods[0], network.load(BatchSlot(0, entry, ())), 0.1)
    assert isinstance(card, TrustCard)
    assert torch.equal(card.explanation.values, explanation.values)
    loaded = saliency.Explanation.load(explanation.save(tmp_path / "e.safetensors"))
    quick(path, tmp_path / "out", model=model)
    with Image.open(tmp_path / "out" / "overlays" / "scan.grad_cam.png") as drawn:
        assert saliency.overlay(loaded).tobytes() == drawn.tobytes()


# saved maps -----------------------------------------------------------------------------------------------------


def test_kept_values_are_the_values_to_half_precision_however_small(source: Path, tmp_path: Path) -> None:
    model = Tiny()
    with torch.no_grad():
        model.head.weight *= 1e-9
        model.head.bias.mul_(1e-9)  # or the values would be below the rounding error of the score
    quick(source, tmp_path / "run", model=model, methods=("vanilla_gradient",), maps=True, batch_size=1, target=1)
    for index in range(5):
        alone = saliency.VanillaGradient(model).attribute(source / f"0{index}.png", 1)
        again = saliency.Explanation.load(tmp_path / "run" / "maps" / f"0{index}.vanilla_gradient.safetensors")
        assert float(alone.values.abs().max()) < 1e-8
        assert torch.allclose(again.values, alone.values, rtol=1e-3, atol=float(alone.values.abs().max()) * 1e-6)
        assert (again.target, again.target_names, again.method) == (alone.target, alone.target_names, alone.method)


def test_a_saved_map_is_the_explanation_without_the_picture(source: Path, tmp_path: Path) -> None:
    model = Tiny()
    quick(source, tmp_path / "run", model=model, methods=("integrated_gradients",), maps=True, batch_size=1, limit=1)
    loaded = saliency.Explanation.load(tmp_path / "run" / "maps" / "00.integrated_gradients.safetensors")
    alone = saliency.IntegratedGradients(model, progress=False).attribute(source / "00.png")
    assert loaded.frames == (None,)
    for name in ("method", "settings", "target_names", "layer", "input_size", "sign", "title", "units", "coverage"):
        assert getattr(loaded, name) == getattr(alone, name), name
    assert loaded.residual is not None
    assert loaded.scores == alone.scores
    assert loaded.probabilities == alone.probabilities
    assert loaded.values.dtype == torch.float32
    assert torch.allclose(loaded.values, alone.values, rtol=1e-3, atol=float(alone.values.abs().max()) * 1e-6)


def test_maps_of_sampled_methods_have_the_same_bytes_in_each_run(source: Path, tmp_path: Path) -> None:
    for out in ("one", "two"):
        quick(source, tmp_path / out, methods=("smooth_grad",), options={"passes": 4}, maps=True, batch_size=1, limit=2)
    assert_same(tmp_path / "one", tmp_path / "two")
