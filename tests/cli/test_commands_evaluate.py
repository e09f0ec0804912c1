"""The command `saliency evaluate`: measured images, resumed runs, masks, failures and exit codes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from saliency import GradCAM
from saliency.batch import engines, folder_evaluation
from saliency.batch.engines import interruption
from saliency.cli import main
from saliency.errors import warn
from saliency.evaluation.comparison import MetricResult, measure_image
from saliency.evaluation.metrics.faithfulness import Deletion
from saliency.metrics import measure
from tests.batchwork import Tiny, noise, photos, plain

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    photos(tmp_path / "in", 3)
    return tmp_path / "in"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The images and methods that are measured, not read from files, in any order."""
    seen: list[tuple[str, str]] = []

    def spy(name: str, method_name: str, *arguments: Any, **options: Any) -> list[MetricResult]:
        seen.append((name, method_name))
        return measure_image(name, method_name, *arguments, **options)

    monkeypatch.setattr(folder_evaluation, "measure_image", spy)
    return seen


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setattr("saliency.batch.network.load", lambda name, weights: Tiny(nan_on_white=True))

    def go(*words: object) -> tuple[int, str, str]:
        common = ["--out", tmp_path / "out", "--set", "steps=2", "--metrics", "deletion"]
        code = main([str(word) for word in ["evaluate", *words, *common]])
        return code, *capsys.readouterr()

    return go


def content(tmp_path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    return read


def test_a_warning_of_a_metric_names_the_image_that_is_measured(
    run: Run, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warned(name: str, *arguments: Any, **options: Any) -> list[MetricResult]:
        warn(f"the map of {name} is flat")
        return measure_image(name, *arguments, **options)

    monkeypatch.setattr(folder_evaluation, "measure_image", warned)
    err = run(source, "-m", "grad_cam")[2]
    names = sorted(path.stem for path in source.iterdir())
    assert sorted(err.splitlines()) == [f"warning: {name}.png: the map of {name} is flat" for name in names]


def test_a_folder_becomes_a_table_a_page_and_a_file_of_values(run: Run, source: Path, tmp_path: Path) -> None:
    code, out, err = run(source, "-m", "grad_cam", "layer_cam", "--target", "cat")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].split()[:4] == ["metric", "better", "method", "mean"]
    assert "sign-flip test" in out
    assert f"table: {tmp_path}/out/evaluation.html" in out
    assert {row["name"] for row in content(tmp_path)["rows"]} == {"grad_cam", "layer_cam", "constant", "centre"}
    explanation = GradCAM(Tiny()).attribute(source / "01.png", "cat")
    (expected,) = measure([Deletion(steps=2)], explanation, method=GradCAM(Tiny()))
    own = [
        each["value"] for each in content(tmp_path)["results"] if (each["image"], each["method"]) == ("01", "grad_cam")
    ]
    assert own == [pytest.approx(float(expected.values))]


def test_a_rerun_reads_what_is_measured_and_measures_what_is_new(
    run: Run, source: Path, tmp_path: Path, measured: list[tuple[str, str]]
) -> None:
    run(source)
    first = content(tmp_path)
    assert sorted(measured) == [("00", "grad_cam"), ("01", "grad_cam"), ("02", "grad_cam")]
    measured.clear()
    noise(source / "01.png", 9)  # has changed
    assert run(source, "-m", "grad_cam", "layer_cam")[0] == 0
    assert sorted(measured) == [("00", "layer_cam"), ("01", "grad_cam"), ("01", "layer_cam"), ("02", "layer_cam")]
    measured.clear()
    assert run(source, "-m", "grad_cam", "layer_cam")[0] == 0
    assert measured == []
    assert len(content(tmp_path)["results"]) == 2 * len(first["results"])
    run(source, "--set", "fill=blur")
    assert len(measured) == 3


def test_an_interrupted_run_keeps_what_is_measured(
    run: Run, source: Path, measured: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:

    def interrupted(name: str, *arguments: Any, **options: Any) -> list[MetricResult]:
        if name == "02":
            raise KeyboardInterrupt
        return measure_image(name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(folder_evaluation, "measure_image", interrupted)
        assert run(source)[0] == 130
    measured.clear()
    assert run(source)[0] == 0
    assert measured == [("02", "grad_cam")]


def test_a_rerun_repairs_what_a_crash_left(
    run: Run, source: Path, tmp_path: Path, measured: list[tuple[str, str]]
) -> None:
    run(source)
    first, results = content(tmp_path), tmp_path / "out" / "results"
    parts = [folder / f".{'0' * 32}.part" for folder in (results, results.parent)]
    for file in (*parts, results / "01.grad_cam.json"):
        file.write_bytes(b"")
    measured.clear()
    assert run(source)[0] == 0
    assert measured == [("01", "grad_cam")]
    assert [row["mean"] for row in content(tmp_path)["rows"]] == [row["mean"] for row in first["rows"]]
    assert not any(part.exists() for part in parts)


def test_an_unreadable_image_is_reported_and_does_not_stop_the_others(run: Run, source: Path, tmp_path: Path) -> None:
    (source / "00.png").write_bytes(b"no image")
    plain(source / "03.png", (255, 255, 255))  # scores NaN
    code, out, err = run(source, "-m", "grad_cam", "layer_cam")
    assert code == 1
    assert err.count("00.png is not an AVIF") == 1
    assert "03.png by grad_cam" in err
    assert "2 images with failures" in out
    assert {each["image"] for each in content(tmp_path)["results"]} == {"01", "02"}


def test_nothing_is_written_if_every_image_fails(run: Run, tmp_path: Path) -> None:
    plain(noise(tmp_path / "in" / "a.png", 0), (255, 255, 255))
    assert run(tmp_path / "in")[0] == 1
    assert not (tmp_path / "out" / "evaluation.json").exists()


def test_masks_are_found_by_name_and_a_missing_one_is_a_failure(run: Run, source: Path, tmp_path: Path) -> None:
    (tmp_path / "masks").mkdir()
    for name in ("00", "01"):
        mask = Image.new("L", (40, 30))
        mask.paste(1, (10, 0, 40, 30))
        mask.save(tmp_path / "masks" / f"{name}.bmp")
    code, _, err = run(source, "--objects", tmp_path / "masks", "--metrics", "relevance_rank")
    assert code == 1
    assert '02.png has no mask: no mask in --objects (masks=) is called "02"' in err
    by_image = {each["image"] for each in content(tmp_path)["results"] if each["metric"] == "relevance_rank"}
    assert by_image == {"00", "01"}


def test_boxes_are_found_by_file_name_and_a_changed_one_is_measured_again(
    run: Run, source: Path, tmp_path: Path, measured: list[tuple[str, str]]
) -> None:
    boxes: dict[str, Any] = {"00.png": [10, 0, 40, 30], "01.png": [[0, 0, 5, 5], [10, 0, 40, 30]]}
    (tmp_path / "boxes.json").write_text(json.dumps(boxes))
    words = (source, "--objects", tmp_path / "boxes.json", "--metrics", "relevance_rank")
    code, _, err = run(*words)
    assert code == 1
    assert "02.png has no box: the file of --objects (boxes=) does not name it" in err
    by_image = {each["image"] for each in content(tmp_path)["results"] if each["metric"] == "relevance_rank"}
    assert by_image == {"00", "01"}
    (tmp_path / "list.json").write_text("[1]")
    code, _, err = run(source, "--objects", tmp_path / "list.json")
    assert (code, "list.json: expected masks named as the images, or JSON of boxes" in err) == (2, True)
    (tmp_path / "boxes.json").write_text(json.dumps(boxes | {"01.png": [9, 0, 40, 30], "02.png": [0, 0, 41, 30]}))
    measured.clear()
    assert "02.png: got the box [0, 0, 41, 30]; expected (x0, y0, x1, y1)" in run(*words)[2]
    assert sorted(measured) == [("01", "grad_cam"), ("02", "grad_cam")]


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_finishes_the_methods_in_progress_and_keeps_them(
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[Callable[[], bool]] = []

    @contextmanager
    def watched() -> Iterator[Callable[[], bool]]:
        with interruption() as is_interrupted:
            handled.append(is_interrupted)
            yield is_interrupted

    def pressed(*arguments: Any, **options: Any) -> list[MetricResult]:
        os.kill(os.getpid(), signal.SIGINT)
        while not handled[0]():  # the handler runs in the main thread, later than the signal on a busy machine
            time.sleep(0.001)
        return measure_image(*arguments, **options)

    monkeypatch.setattr(engines, "interruption", watched)
    monkeypatch.setattr(folder_evaluation, "measure_image", pressed)
    code, _, err = run(source, "-m", "grad_cam", "layer_cam", "--workers", "1")
    assert code == 130
    assert "0 of 3 images are done; re-run to resume" in err
    (kept,) = (tmp_path / "out" / "results").iterdir()
    assert kept.name.endswith(".grad_cam.json")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metrics", "insertoin"], 'no metric "insertoin"; did you mean "insertion"'),
        (["--metrics", "pointing_game"], "pass --objects FOLDER"),
        (["--metrics", "deletion,insertoin"], 'no metric "insertoin"'),
        (["-m", "grad_cma"], "grad_cam"),
        (["--set", "stpes=3"], 'no option "stpes" of grad_cam or the metric; did you mean "steps"'),
        (["--target", "zebra"], "zebra"),
        (["--objects", "nowhere"], "there is no image: nowhere"),
        (["--objects", "no.json"], "no.json: expected masks named as the images, or JSON of boxes"),
    ],
)
def test_an_invalid_command_line_exits_with_two(run: Run, source: Path, words: list[str], message: str) -> None:
    code, _, err = run(source, *words)
    assert code == 2
    assert message in err


def test_all_methods_may_include_some_that_do_not_apply(
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saliency.cli.batch_commands.select_methods", lambda names: ["grad_cam", "attention_rollout"])
    assert run(source, "--limit", "1", "-m", "all")[0] == 0
    assert run(source, "--limit", "1", "-m", "grad_cam", "attention_rollout")[0] == 1
    assert len(list((tmp_path / "out" / "results").iterdir())) == 1


def test_the_comparison_is_on_the_page_of_a_batch_run_in_the_same_folder(
    run: Run, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["batch", str(source), "--out", str(out), "--workers", "1"]) == 0
    assert f"table: {out}/index.html" in run(source)[1]
    assert not (out / "evaluation.html").exists()
    page = (out / "index.html").read_bytes()
    assert main(["batch", str(source), "--out", str(out), "--workers", "1", "--restart"]) == 0  # keeps the comparison
    assert (out / "index.html").read_bytes() == page
    (out / "evaluation.json").unlink()
    assert main(["report", str(out)]) == 0
    assert (out / "index.html").read_bytes() != page
