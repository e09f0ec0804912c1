"""The promises of `saliency.evaluate`: the comparison of `saliency.compare`, for files, kept and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import saliency
from saliency import GradCAM, LayerCAM, compare, evaluate
from saliency.batch import Progress, StoppedError
from saliency.errors import SaliencyError
from saliency.metrics import Deletion
from tests.batchwork import Tiny, photos, plain, quick, rows

METRICS = (Deletion(steps=2), "relevance_rank")
METHODS = ("grad_cam", "layer_cam")


def values(comparison: saliency.Comparison) -> list[tuple[str, str, float | None]]:
    return [(each.method, each.metric, each.value) for each in comparison.results]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    photos(tmp_path / "in", 3)
    return tmp_path / "in"


def test_a_folder_gives_the_comparison_of_the_library(source: Path, tmp_path: Path) -> None:
    model = Tiny()
    boxes = {f"{number:02d}.png": (0, 0, 20, 10) for number in range(3)}
    made = evaluate(source, tmp_path / "out", model, METHODS, METRICS, boxes=boxes, target="cat")
    images, methods = sorted(source.iterdir()), [GradCAM(model), LayerCAM(model)]
    own = compare(methods, images, "cat", METRICS, boxes=list(boxes.values()))
    assert isinstance(made, saliency.Comparison)
    assert values(made) == [(*key, pytest.approx(value)) for *key, value in values(own)]
    assert [(row.name, row.metric) for row in made] == [(row.name, row.metric) for row in own]
    assert (made.failures, made.left_out) == ([], 0)
    assert made.page == tmp_path / "out" / "evaluation.html"
    assert (tmp_path / "out" / "evaluation.json").is_file()


def test_a_repeated_call_reads_the_results_and_measures_only_new_ones(source: Path, tmp_path: Path) -> None:
    def measure(*methods: str, **options: Any) -> tuple[saliency.Comparison, int]:
        reported: list[Progress] = []
        made = evaluate(source, tmp_path / "out", Tiny(), methods, METRICS[0], on_progress=reported.append, **options)
        return made, len(reported)

    first, count = measure("grad_cam", limit=2)
    assert count == 2
    again, count = measure("grad_cam", limit=2)
    assert (again.results, count) == (first.results, 0)
    second, count = measure(*METHODS)
    assert count == 3
    assert [each for each in second.results if (each.image, each.method) == ("00", "grad_cam")] == [first.results[0]]


def test_results_in_the_folder_of_a_batch_have_the_names_of_its_images(tmp_path: Path) -> None:
    for name in "abc":
        photos(tmp_path / name, 1)
    out = tmp_path / "out"
    before = evaluate(tmp_path / "b", out, Tiny(), METHODS[:1], METRICS[:1])
    assert [result.image for result in before.results] == ["00"]
    quick([tmp_path / "a", tmp_path / "b"], out)
    after = evaluate([tmp_path / "b", tmp_path / "c"], out, Tiny(), METHODS[:1], METRICS[:1])
    listed = {row["id"]: row["source"] for row in rows(out)}
    assert [listed.get(result.image) for result in after.results] == [str(tmp_path / "b" / "00.png"), None]


def test_a_result_of_another_shape_is_measured_again(source: Path, tmp_path: Path) -> None:
    def measure() -> tuple[saliency.Comparison, int]:
        reported: list[Progress] = []
        made = evaluate(source, tmp_path / "out", Tiny(), METHODS[:1], METRICS[0], limit=1, on_progress=reported.append)
        return made, len(reported)

    first, _ = measure()
    file = tmp_path / "out" / "results" / "00.grad_cam.json"
    good = json.loads(file.read_text())
    (result,) = good["results"]
    bad: list[Any] = [[], None, {}, {"key": good["key"]}, good | {"results": {}}, good | {"results": [3]}]
    bad += [good | {"results": [{name: value for name, value in result.items() if name != left}]} for left in result]
    bad += [good | {"results": [result | {name: [1]}]} for name in result]
    for content in (*map(json.dumps, bad), "", file.read_text()[:-30], "[" * 100_000):
        file.write_text(content)
        made, count = measure()
        assert (count, values(made)) == (1, values(first)), content


def test_a_link_among_the_results_is_not_followed(source: Path, tmp_path: Path) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim"
    victim.write_text("precious")
    for name in ("evaluation.json", "evaluation.html", "results", "results/00.grad_cam.json"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).symlink_to(victim)
        with pytest.raises(StoppedError, match=f"{name} is a link"):
            evaluate(source, out, Tiny(), METHODS[:1], METRICS[0], limit=1)
        (out / name).unlink()
    assert victim.read_text() == "precious"


def test_metrics_of_one_name_and_options_of_tensors_are_told_apart(source: Path, tmp_path: Path) -> None:
    def measure(*metrics: Deletion) -> list[str]:
        reported: list[Progress] = []
        made = evaluate(source, tmp_path / "out", Tiny(), metrics=metrics, limit=1, on_progress=reported.append)
        return [each.metric for each in made.results] * len(reported)

    black, grey = torch.zeros(3, 16, 16), torch.full((3, 16, 16), 0.5)
    assert len(set(measure(Deletion(steps=2, fill=black), Deletion(steps=4)))) == 2
    assert measure(Deletion(steps=2, fill=black), Deletion(steps=4)) == []
    assert len(measure(Deletion(steps=3, fill=black), Deletion(steps=4))) == 2
    assert len(measure(Deletion(steps=3, fill=grey), Deletion(steps=4))) == 2


def test_masks_are_a_folder_or_files(source: Path, tmp_path: Path) -> None:
    (tmp_path / "masks").mkdir()
    for number in range(3):
        Image.new("L", (40, 30), 1).save(tmp_path / "masks" / f"{number:02d}.bmp")
    masks = sorted((tmp_path / "masks").iterdir())
    by_folder = evaluate(source, tmp_path / "a", Tiny(), metrics="relevance_rank", masks=tmp_path / "masks")
    by_files = evaluate(source, tmp_path / "b", Tiny(), metrics="relevance_rank", masks=masks)
    assert values(by_folder) == values(by_files)
    assert len(by_folder.results) == 3


def test_failures_are_rows_of_the_result(source: Path, tmp_path: Path) -> None:
    (source / "00.png").write_bytes(b"no image")
    plain(source / "03.png", (255, 255, 255))  # scores NaN
    made = evaluate(source, tmp_path / "out", Tiny(nan_on_white=True), METHODS, METRICS[0])
    rows = {(row["index"], row["method"], row["error_kind"]) for row in made.failures}
    assert rows == {(0, None, "ImageError"), (3, "grad_cam", "NonFiniteError"), (3, "layer_cam", "NonFiniteError")}
    assert {each.image for each in made.results} == {"01", "02"}


def test_without_results_there_is_no_page(tmp_path: Path) -> None:
    photos(tmp_path / "in", 1)[0].write_bytes(b"no image")
    made = evaluate(tmp_path / "in", tmp_path / "out", Tiny(), metrics=METRICS[0])
    assert (len(made), made.page, len(made.failures)) == (0, None, 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"methods": "grad_cm"}, 'did you mean "grad_cam"'),
        ({"metrics": "deletoin"}, 'did you mean "deletion"'),
        ({"target": "zebra"}, "zebra"),
        ({"engine": "dask"}, "engine"),
        ({"masks": "nowhere"}, "there is no image: nowhere"),
    ],
)
def test_invalid_options_leave_no_folder(source: Path, tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(SaliencyError, match=reason):
        evaluate(source, tmp_path / "out", Tiny(), **{"metrics": METRICS[0], **options})
    assert not (tmp_path / "out").exists()


def test_the_threads_of_pytorch_are_unchanged(source: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    evaluate(source, tmp_path / "out", Tiny(), metrics=METRICS[0], workers=2)
    assert torch.get_num_threads() == before
