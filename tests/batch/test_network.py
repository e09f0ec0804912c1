"""Compiled runs: the same files up to rounding, from programs of the main thread, with the time that they save."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import saliency
from saliency import Explanation, GradCAM, evaluate
from saliency.batch import BatchError, Progress
from saliency.batch.network import trust_card
from saliency.errors import SaliencyWarning
from saliency.metrics import Deletion
from tests.batchwork import Tiny, assert_same, kinds, noise, photos, plain, quick, rows
from tests.program.test_compiled import needs_compiler


class Programs:
    """Graphs that run as they are instead of compiled code, and the threads that compiled and ran them."""

    def __init__(self) -> None:
        self.compiling: list[str] = []
        self.running: list[str] = []
        self.counts: list[int] = []
        self.threads: list[int] = []

    def __call__(self, graph: Callable[..., Any], inputs: Sequence[Any], mode: str | None) -> Callable[..., Any]:
        self.compiling.append(threading.current_thread().name)
        self.threads.append(torch.get_num_threads())

        def run(*inputs: Tensor) -> Any:
            self.running.append(threading.current_thread().name)
            self.counts.append(len(inputs[0]))
            return graph(*inputs)

        return run


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setattr("saliency.program.compiled.frozen", counted := Programs())
    return counted


@pytest.fixture
def source(tmp_path: Path) -> Path:
    photos(tmp_path / "in", 5)
    return tmp_path / "in"


def assert_close(out: Path, other: Path) -> None:
    """Assert that two folders of runs hold the same rows and maps up to rounding."""
    for row, exact in zip(rows(out), rows(other), strict=True):
        same = ("source", "method", "target", "name", "layer", "overlay", "map", "error", "settings")
        assert [row[name] for name in same] == [exact[name] for name in same]
        values, expected = (
            Explanation.load(folder / exact["map"]).values.float() for folder in (out, other)
        )  # kept in float16
        torch.testing.assert_close(values, expected, rtol=2e-3, atol=1e-3 * float(expected.abs().max()))
        pixels, drawn = (np.asarray(Image.open(folder / exact["overlay"])).astype(int) for folder in (out, other))
        assert abs(pixels - drawn).max() <= 3


@pytest.mark.parametrize(
    "methods", [("grad_cam", "lrp"), pytest.param(("grad_cam", "integrated_gradients"), marks=pytest.mark.slow)]
)
def test_a_compiled_run_writes_the_same_files_by_programs_of_the_main_thread(
    methods: Sequence[str], source: Path, tmp_path: Path, programs: Programs
) -> None:
    options: dict[str, Any] = {"methods": methods, "maps": True, "batch_size": 2, "workers": 2}
    quick(source, tmp_path / "exact", **options)
    quick(source, tmp_path / "out", compile=True, **options)
    assert_close(tmp_path / "out", tmp_path / "exact")
    assert set(programs.compiling) == {"MainThread"}
    in_workers = [count for name, count in zip(programs.running, programs.counts, strict=True) if "batch" in name]
    assert in_workers.count(2) >= 2 * len(methods)
    assert in_workers.count(1) >= 1  # the last batch, of the same programs
    assert set(programs.threads) == {1}  # as many as each worker has


def test_the_forwards_of_the_metrics_of_a_compiled_evaluation_are_compiled_before_it(
    source: Path, tmp_path: Path, programs: Programs
) -> None:
    results = []
    for name in ("exact", "out"):
        options: dict[str, Any] = {"metrics": Deletion(steps=6), "workers": 2, "compile": name == "out"}
        made = evaluate(source, tmp_path / name, Tiny(), **options)
        results.append([result.value for result in made.results])
    assert results[1] == pytest.approx(results[0])
    assert set(programs.compiling) == {"MainThread"}
    assert sum("batch" in name for name in programs.running) > 2 * 5  # more than the maps of five images


@needs_compiler
@pytest.mark.slow
def test_a_compiled_run_writes_the_same_files_with_the_compiler(source: Path, tmp_path: Path) -> None:
    for name in ("exact", "out"):
        quick(source, tmp_path / name, maps=True, batch_size=2, compile=name == "out")
    assert_close(tmp_path / "out", tmp_path / "exact")


def test_the_time_and_the_gain_are_said_before_the_first_image(
    source: Path, tmp_path: Path, programs: Programs
) -> None:
    said: list[Progress] = []
    quick(source, tmp_path / "out", compile=True, on_progress=said.append)
    gain = r"saves [\d.e+-]+ ms an image: pays off from [\d,]+ images on"
    assert said[0].note.startswith("compiling the methods")
    assert re.fullmatch(rf"compiled in \d+ s; ({gain}|saves no time on these images)", said[1].note)
    assert [progress.done for progress in said] == [0, 0, 1, 2, 3, 4, 5]
    assert not any(progress.note for progress in said[2:])


def test_a_run_that_gains_nothing_says_so(
    source: Path, tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saliency.batch.network.perf_counter", lambda: 1.0)
    said: list[Progress] = []
    quick(source, tmp_path / "out", compile=True, limit=1, on_progress=said.append)
    assert said[1].note == "compiled in 0 s; saves no time on these images"


def test_a_run_is_resumed_with_and_without_programs(source: Path, tmp_path: Path, programs: Programs) -> None:
    quick(source, tmp_path / "exact", maps=True, batch_size=2)
    quick(source, tmp_path / "out", maps=True, batch_size=2, compile=True, limit=2)
    before = len(programs.compiling)
    assert quick(source, tmp_path / "out", maps=True, batch_size=2, limit=4).fresh == 2
    assert len(programs.compiling) == before == 1
    assert quick(source, tmp_path / "out", maps=True, batch_size=2, compile=True).fresh == 1
    assert_close(tmp_path / "out", tmp_path / "exact")
    assert quick(source, tmp_path / "out", maps=True, batch_size=2, compile=True).fresh == 0
    assert len(programs.compiling) == 2  # a finished run compiles nothing


def test_images_of_another_size_are_explained_exactly_and_one_warning_says_so(
    source: Path, tmp_path: Path, programs: Programs
) -> None:
    for number in (5, 6):
        noise(source / f"0{number}.png", number, (30, 60))
    options: dict[str, Any] = {"whole": "aspect", "batch_size": 2, "maps": True, "workers": 1}
    quick(source, tmp_path / "exact", **options)
    with pytest.warns(SaliencyWarning, match="images differ in size or number from those") as caught:
        quick(source, tmp_path / "out", compile=True, **options)
    assert (len(caught), len(programs.compiling)) == (1, 1)
    assert_close(tmp_path / "out", tmp_path / "exact")


def test_a_target_that_is_no_class_is_explained_exactly(source: Path, tmp_path: Path, programs: Programs) -> None:
    target = saliency.contrast("cat", "dog")
    quick(source, tmp_path / "exact", target=target)
    said: list[Progress] = []
    with pytest.warns(SaliencyWarning, match="grad_cam: this call is not compiled: the target is not a class"):
        quick(source, tmp_path / "out", target=target, compile=True, on_progress=said.append)
    assert not programs.compiling
    assert said[1].note == "not compiled: the target is not a class"
    assert_same(tmp_path / "out", tmp_path / "exact")


def test_an_image_that_cannot_be_read_is_not_compiled_for(source: Path, tmp_path: Path, programs: Programs) -> None:
    (source / "00.png").write_bytes(b"")
    quick(source, tmp_path / "out", compile=True, batch_size=2)
    assert kinds(tmp_path / "out") == ["ImageError", None, None, None, None]
    assert len(programs.compiling) == 1
    for path in source.iterdir():
        path.write_bytes(b"")
    said: list[Progress] = []
    quick(source, tmp_path / "none", compile=True, on_progress=said.append)
    assert "no image can be read" in said[1].note


def test_errors_of_single_images_stay_theirs(source: Path, tmp_path: Path, programs: Programs) -> None:
    plain(source / "03.png", (255, 255, 255))
    quick(source, tmp_path / "out", model=Tiny(nan_on_white=True), compile=True, batch_size=2)
    assert kinds(tmp_path / "out") == [None, None, None, "NonFiniteError", None]


def test_ray_refuses_to_compile(source: Path, tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=r"--compile .* use --engine local"):
        quick(source, tmp_path / "out", compile=True, engine="ray")


@pytest.mark.slow
def test_trust_cards_are_of_the_exact_methods(
    source: Path, tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = list[bool]()

    def measure(method: saliency.Attribution, *arguments: Any, **options: Any) -> Any:
        measured.append(method.is_compiled)
        return trust_card(method, *arguments, **options)

    monkeypatch.setattr("saliency.batch.drawing.trust_card", measure)
    quick(source, tmp_path / "out", compile=True, trust=True, seconds=0.01, limit=1)
    assert measured == [False]


def test_a_compiled_evaluation_has_the_values_of_an_exact_one(source: Path, tmp_path: Path, programs: Programs) -> None:
    metrics = (Deletion(steps=2), "random_logit")
    exact, compiled = (
        evaluate(source, tmp_path / name, Tiny(), ["grad_cam"], metrics, compile=name == "out")
        for name in ("exact", "out")
    )
    assert set(programs.compiling) == {"MainThread"}
    assert [name for name in programs.running if "batch" in name]
    values = [[(each.method, each.metric, each.value) for each in results.results] for results in (exact, compiled)]
    assert values[1] == [(*key, pytest.approx(value, abs=1e-4)) for *key, value in values[0]]


def test_the_model_is_unchanged(source: Path, tmp_path: Path, programs: Programs) -> None:
    model = Tiny().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    threads = torch.get_num_threads()
    quick(source, tmp_path / "out", model=model, compile=True)
    assert torch.get_num_threads() == threads
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    GradCAM(model).attribute(source / "00.png")  # eager again
