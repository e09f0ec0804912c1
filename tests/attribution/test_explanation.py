"""An explanation is a sequence of its images, and a file keeps all of it."""

from __future__ import annotations

import io
import json
import random
import resource
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from saliency import METHODS, Explanation, GuidedBackprop
from saliency.attribution.explanation import joined
from saliency.attribution.options import RunStats
from saliency.errors import ExplanationError
from saliency.hooks.rectifiers import Coverage
from saliency.io.atomic_write import atomic_write
from saliency.io.geometry import Frame, ImageBox
from saliency.targets.question import QuestionFacts
from saliency.testing import tiny_model, tiny_model_for


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.fixture
def explanation() -> Explanation:
    return Explanation(
        numbers(3, 3, 4, 5),
        numbers(3),
        "features.0",
        evidence={
            "probabilities": numbers(3).sigmoid(),
            "coverage": Coverage({"relu": 3, "relu6": 1}, {"silu": 2}, {"where": 1}, {"conv by z+": 53}),
            "residual": numbers(3) / 9,
            "ledger": numbers(3, 2),
            "ledger_names": ("input", "biases"),
            "notes": ("", "the map is 0 everywhere", "é"),
            "run_stats": tuple(RunStats(passes, passes / 8, "complete") for passes in range(3)),
            "boxes": (ImageBox((7, 5), (1.5, 0.25, 6.125, 1 / 3)), None, None),
            "from_zero": True,
        },
        questions=(
            QuestionFacts("espresso", 4, box=(0.5, 1.0, 2.0, 1 / 3)),
            QuestionFacts("contrast of é and 日本", is_difference=True),
            QuestionFacts("", 0),
        ),
        frames=(
            Frame(picture(7, 5), (1.5, 0.25, 6.125, 1 / 3), "é", (-0.5, 4095.0)),
            None,
            Frame(picture(1, 1, 2), (0.0, 0.0, 1.0, 1.0)),
        ),
        input_size=(4, 5),
        method="guided_backprop",
        title="GuidedBackprop",
        units="score per unit of normalised input",
        sign="signed",
        settings={"smooth": "leave", "percentile": 98.5, "samples": 25, "on": True, "none": None, "list": [1, ["a"]]},
    )


def assert_same(found: Explanation, expected: Explanation) -> None:
    assert found.evidence.keys() == expected.evidence.keys()
    for name, wanted in facts(expected).items():
        came = facts(found)[name]
        if isinstance(wanted, Tensor):
            assert came.dtype == wanted.dtype, name
            assert came.shape == wanted.shape, name
            assert same_bits(came, wanted), name
        elif name == "frames":
            assert came == wanted
            assert [frame and pixels(frame) for frame in came] == [frame and pixels(frame) for frame in wanted]
        else:
            assert came == wanted, name
            assert type(came) is type(wanted), name


def facts(explanation: Explanation) -> dict[str, Any]:
    """Return the fields and the entries of evidence by name."""
    own = {field.name: getattr(explanation, field.name) for field in fields(explanation) if field.name != "evidence"}
    return own | dict(explanation.evidence)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))


def pixels(frame: Frame) -> tuple[str, tuple[int, int], bytes]:
    return frame.image.mode, frame.image.size, frame.image.tobytes()


# Saving and loading.


def test_a_file_loses_nothing(explanation: Explanation, tmp_path: Path) -> None:
    path = explanation.save(tmp_path / "kept.safetensors")
    assert path == tmp_path / "kept.safetensors"
    assert_same(Explanation.load(path), explanation)
    assert_same(Explanation.load(str(path)), explanation)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str
)
def test_every_type_of_number_comes_back_bit_for_bit(
    dtype: torch.dtype, explanation: Explanation, tmp_path: Path
) -> None:
    kept = replace(explanation, values=explanation.values.to(dtype), scores=explanation.scores.to(dtype))
    assert_same(Explanation.load(kept.save(tmp_path / "a.safetensors")), kept)


def test_extreme_numbers_come_back(explanation: Explanation, tmp_path: Path) -> None:
    extreme = torch.tensor([0.0, -0.0, 1e-45, 3e38, -1e-38]).reshape(1, 1, 1, 5)
    kept = replace(explanation[0], values=extreme)
    assert_same(Explanation.load(kept.save(tmp_path / "a.safetensors")), kept)


@pytest.mark.parametrize("name", ["probabilities", "layer", "coverage", "residual", "ledger"])
def test_what_is_not_there_stays_away(name: str, explanation: Explanation, tmp_path: Path) -> None:
    kept = replace(explanation, layer=None) if name == "layer" else explanation.with_evidence(**{name: None})
    loaded = Explanation.load(kept.save(tmp_path / "a.safetensors"))
    assert getattr(loaded, name) is None
    assert_same(loaded, kept)


def test_a_file_whose_coverage_counts_fewer_kinds_is_read(explanation: Explanation, tmp_path: Path) -> None:
    old = explanation.with_evidence(coverage=Coverage({"relu": 3}))
    header, tensors = opened(old.save(tmp_path / "a.safetensors"))
    del header["evidence"]["coverage"]["handled"]
    save_file(tensors, tmp_path / "a.safetensors", metadata={"saliency": json.dumps(header)})
    assert_same(Explanation.load(tmp_path / "a.safetensors"), old)


def test_a_coverage_reads_as_a_list_of_treated_operations() -> None:
    handled = {"conv by z+": 53, "batch_norm merged": 49, "linear by epsilon": 1}
    assert str(Coverage(handled=handled)) == "53 conv by z+, 49 batch_norm merged, 1 linear by epsilon"
    assert str(Coverage({"relu": 2}, handled={"conv by z+": 1})) == "1 conv by z+, 2 relu rewritten"


def test_an_empty_coverage_is_not_none(explanation: Explanation, tmp_path: Path) -> None:
    kept = explanation.with_evidence(coverage=Coverage())
    assert Explanation.load(kept.save(tmp_path / "a.safetensors")).coverage == Coverage()


def test_settings_that_are_not_finite_come_back(explanation: Explanation, tmp_path: Path) -> None:
    kept = replace(explanation, settings={"most": float("inf")})
    assert Explanation.load(kept.save(tmp_path / "a.safetensors")).settings == {"most": float("inf")}


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_gives_is_kept(name: str, tmp_path: Path) -> None:
    model = tiny_model_for(METHODS[name])()
    model.preprocess = _as_tensor  # type: ignore[assignment]
    model.categories = list("abcde")  # type: ignore[assignment]
    found = METHODS[name](model, **METHODS[name].preview_options).attribute(
        [picture(16, 16), picture(16, 16, 1)], ["b", "a"]
    )
    assert_same(Explanation.load(found.save(tmp_path / "a.safetensors")), found)
    assert_same(Explanation.load(found[1].save(tmp_path / "b.safetensors")), found[1])


def _as_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image, dtype=np.float32) / 255).permute(2, 0, 1)


def test_views_and_tensors_that_share_their_memory_are_kept(explanation: Explanation, tmp_path: Path) -> None:
    turned = replace(explanation, values=explanation.values.permute(0, 1, 3, 2), input_size=(5, 4))
    assert_same(Explanation.load(turned.save(tmp_path / "a.safetensors")), turned)
    shared = explanation.with_evidence(residual=explanation.scores)
    assert_same(Explanation.load(shared.save(tmp_path / "b.safetensors")), shared)
    expanded = replace(explanation, values=explanation.values[:, :1, :1, :1].expand(3, 3, 4, 5))
    assert_same(Explanation.load(expanded.save(tmp_path / "c.safetensors")), expanded)


def test_a_tensor_on_a_graph_is_kept_without_it(explanation: Explanation, tmp_path: Path) -> None:
    kept = replace(explanation, values=explanation.values.clone().requires_grad_() * 1)
    assert not Explanation.load(kept.save(tmp_path / "a.safetensors")).values.requires_grad


def test_an_npy_file_has_the_values_as_numpy_reads_them(explanation: Explanation, tmp_path: Path) -> None:
    path = explanation.save(tmp_path / "map.npy")
    assert np.array_equal(np.load(path), np.asarray(explanation))
    assert [each.name for each in tmp_path.iterdir()] == ["map.npy"]


@pytest.mark.parametrize("name", ["map.png", "map", "map.pt", "npy"])
def test_another_suffix_is_refused_with_those_that_are_written(
    name: str, explanation: Explanation, tmp_path: Path
) -> None:
    with pytest.raises(ExplanationError, match=rf'"{name}".*\.safetensors.*\.npy.*overlay\(explanation\)\.save'):
        explanation.save(tmp_path / name)


def test_a_picture_is_kept_however_many_pixels_pillow_opens(
    explanation: Explanation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = explanation.save(tmp_path / "a.safetensors")
    for limit in (30, 10):  # of 35 pixels: a warning of Pillow's, and an error of Pillow's
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        assert_same(Explanation.load(path), explanation)


def test_a_picture_of_more_pixels_than_an_image_may_have_is_refused_before_it_is_decoded(
    explanation: Explanation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, size = tmp_path / "a.safetensors", (20_000, 20_000)
    file = io.BytesIO()
    Image.new("1", size).save(file, "PNG")
    header, tensors = opened(explanation.save(path))
    tensors["picture.0"] = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    save_file(tensors, path, metadata={"saliency": json.dumps(header)})
    assert path.stat().st_size < 100_000
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", None)
    with pytest.raises(ExplanationError, match="20000 x 20000 pixels, more than the limit of 178956970"):
        Explanation.load(path)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Reviewed(Explanation):
    reviewer: str


def test_a_subclass_loads_its_own_files(explanation: Explanation, tmp_path: Path) -> None:
    attributes = {field.name: getattr(explanation, field.name) for field in fields(explanation)}
    path = Reviewed(**attributes, reviewer="Ada").save(tmp_path / "a.safetensors")
    loaded = Reviewed.load(path)
    assert (type(loaded), loaded.reviewer) == (Reviewed, "Ada")
    assert torch.equal(loaded.values, explanation.values)
    with pytest.raises(ExplanationError, match=r"argument .reviewer"):
        Explanation.load(path)


def test_saving_again_replaces_the_file(explanation: Explanation, tmp_path: Path) -> None:
    explanation.save(tmp_path / "a.safetensors")
    explanation[0].save(tmp_path / "a.safetensors")
    assert len(Explanation.load(tmp_path / "a.safetensors")) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("suffix", ["safetensors", "npy"])
def test_a_failure_leaves_nothing_behind_and_the_old_file_whole(
    explanation: Explanation, tmp_path: Path, suffix: str
) -> None:
    path = explanation.save(tmp_path / f"a.{suffix}")
    before, (soft, hard) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 1, hard))
        with pytest.raises(OSError, match="File too large"):
            explanation.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    def write() -> None:
        with atomic_write(tmp_path / "a") as temporary:
            temporary.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_an_os_error(explanation: Explanation, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        explanation.save(tmp_path / "nowhere" / "a.safetensors")


# Files that are no explanations.


@pytest.fixture
def kept(explanation: Explanation, tmp_path: Path) -> Path:
    return explanation.save(tmp_path / "kept.safetensors")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExplanationError, match=r"nothing\.safetensors: not a readable explanation"):
        Explanation.load(tmp_path / "nothing.safetensors")
    with pytest.raises(ExplanationError):
        Explanation.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"hello", b"\x89PNG\r\n\x1a\n" * 9, b"\xff" * 64, b'{"a":1}' * 9])
def test_a_file_of_another_kind_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ExplanationError, match="not a readable explanation"):
        Explanation.load(tmp_path / "a.safetensors")


def test_a_file_cut_anywhere_is_refused(kept: Path) -> None:
    whole = kept.read_bytes()
    for end in range(0, len(whole), 37):
        kept.write_bytes(whole[:end])
        with pytest.raises(ExplanationError):
            Explanation.load(kept)


def test_a_damaged_file_is_refused_or_read_and_never_ends_in_another_error(kept: Path) -> None:
    whole, chance = kept.read_bytes(), random.Random(0)  # noqa: S311
    refused = 0
    for _ in range(600):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        kept.write_bytes(damaged)
        try:
            Explanation.load(kept)
        except ExplanationError:
            refused += 1
    assert refused > 100


def opened(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(str(path), framework="pt") as file:
        return json.loads(file.metadata()["saliency"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_safetensors_of_somebody_elses_are_refused(kept: Path) -> None:
    header, tensors = opened(kept)
    for metadata in (None, {"format": "pt"}, {"saliency": "null"}, {"saliency": "[]"}, {"saliency": "{}"}):
        save_file(tensors, kept, metadata=metadata)
        with pytest.raises(ExplanationError, match=r"that this version of Explanation\.save did not write"):
            Explanation.load(kept)
    save_file(tensors, kept, metadata={"saliency": json.dumps({**header, "format": "saliency explanation 99"})})
    with pytest.raises(ExplanationError):
        Explanation.load(kept)


def test_a_file_of_version_0_1_0_is_read(kept: Path) -> None:
    header, tensors = opened(kept)
    header |= {"format": "saliency explanation 2", "frames": [frame and frame[0] for frame in header["frames"]]}
    save_file(tensors, kept, metadata={"saliency": json.dumps(header)})
    loaded = Explanation.load(kept)
    assert [frame and list(frame.box) for frame in loaded.frames] == header["frames"]
    assert [frame.name for frame in loaded.frames if frame] == [""] * sum(map(bool, header["frames"]))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda header, tensors: header.pop("method"),
        lambda header, tensors: header.pop("title"),
        lambda header, tensors: header.pop("questions"),
        lambda header, tensors: header.pop("evidence"),
        lambda header, tensors: header.pop("frames"),
        lambda header, tensors: header.update(unknown=1),
        lambda header, tensors: header.update(questions=None),
        lambda header, tensors: header.update(questions=[]),
        lambda header, tensors: header.update(questions=header["questions"][:1]),
        lambda header, tensors: header["questions"][0].update(unknown=1),
        lambda header, tensors: header["evidence"].update(notes=["one"]),
        lambda header, tensors: header["evidence"].update(run_stats=[]),
        lambda header, tensors: header.update(input_size=5),
        lambda header, tensors: header["evidence"].update(coverage=[1]),
        lambda header, tensors: header["evidence"].update(coverage={"unknown": 1}),
        lambda header, tensors: header.update(frames=[3, None, None]),
        lambda header, tensors: header.update(frames=[]),
        lambda header, tensors: header.update(frames=[[[1.0], "", None], None, None]),
        lambda header, tensors: tensors.pop("values"),
        lambda header, tensors: tensors.pop("scores"),
        lambda header, tensors: tensors.pop("picture.0"),
        lambda header, tensors: tensors.update({"picture.0": torch.zeros(20, dtype=torch.uint8)}),
        lambda header, tensors: tensors.update({"picture.0": tensors["picture.0"][:-30].clone()}),
        lambda header, tensors: tensors.update({"picture.0": torch.zeros(0, dtype=torch.uint8)}),
        lambda header, tensors: tensors.update(scores=torch.zeros(2)),
        lambda header, tensors: tensors.update(ledger=torch.zeros(2, 2)),
    ],
)
def test_a_header_or_content_that_does_not_fit_is_refused(
    spoil: Callable[[dict[str, Any], dict[str, Tensor]], Any], kept: Path
) -> None:
    header, tensors = opened(kept)
    spoil(header, tensors)
    save_file(tensors, kept, metadata={"saliency": json.dumps(header)})
    with pytest.raises(ExplanationError, match=r"kept\.safetensors: not a readable explanation"):
        Explanation.load(kept)


@pytest.mark.parametrize(
    "header", ["", "{", "[" * 100_000, "1" * 10_000, "\0"], ids=["empty", "open", "deep", "long", "nul"]
)
def test_a_header_that_is_no_json_is_refused(header: str, kept: Path) -> None:
    _, tensors = opened(kept)
    save_file(tensors, kept, metadata={"saliency": header})
    with pytest.raises(ExplanationError):
        Explanation.load(kept)


# A sequence of its images.


def test_an_explanation_is_a_sequence_of_its_images(explanation: Explanation) -> None:
    assert len(explanation) == 3
    parts = list(explanation)
    assert [len(each) for each in parts] == [1, 1, 1]
    assert torch.equal(torch.cat([each.values for each in parts]), explanation.values)
    assert [each.target for each in parts] == [(4,), (None,), (0,)]
    assert [each.target_names[0] for each in parts] == list(explanation.target_names)
    assert [each.frames[0] for each in parts] == list(explanation.frames)
    for at, each in enumerate(parts):
        assert each.ledger_names == explanation.ledger_names
        for name in ("scores", "probabilities", "residual", "ledger"):
            assert torch.equal(getattr(each, name), getattr(explanation, name)[at : at + 1])
        assert (each.method, each.settings, each.layer) == (
            explanation.method,
            explanation.settings,
            explanation.layer,
        )
        assert (each.coverage, each.sign, each.input_size) == (
            explanation.coverage,
            explanation.sign,
            explanation.input_size,
        )


def test_a_new_entry_of_evidence_is_sliced_moved_joined_and_kept(explanation: Explanation, tmp_path: Path) -> None:
    depth = numbers(3, 2)
    deep = replace(explanation, evidence={"depth": depth})
    assert torch.equal(deep[1].evidence["depth"], depth[1:2])
    assert torch.equal(deep[::2].evidence["depth"], depth[::2])
    assert deep.to("meta").evidence["depth"].is_meta
    assert_same(joined(list(deep)), deep)
    assert_same(Explanation.load(deep.save(tmp_path / "a.safetensors")), deep)


def test_evidence_is_replaced_and_removed_by_name(explanation: Explanation) -> None:
    other = explanation.with_evidence(residual=None, error=explanation.values)
    assert "residual" not in other.evidence
    assert other.residual is None
    assert other.error is explanation.values
    assert other.ledger is explanation.ledger
    assert explanation.error is None
    assert explanation.residual is not None


def test_the_questions_are_read_as_attributes(explanation: Explanation) -> None:
    assert explanation.target == (4, None, 0)
    assert explanation.target_names == ("espresso", "contrast of é and 日本", "")
    assert explanation.contrasts == (False, True, False)
    assert explanation.target_boxes == ((0.5, 1.0, 2.0, 1 / 3), None, None)
    assert explanation[1:].target_boxes == ()


def test_an_explanation_has_few_fields() -> None:
    assert len(fields(Explanation)) <= 12


def test_images_are_counted_from_either_end(explanation: Explanation) -> None:
    assert explanation[-1].target == (0,)
    assert torch.equal(explanation[-1].values, explanation.values[2:])
    assert explanation[np.int64(1)].target == (None,)  # type: ignore[index]
    assert torch.equal(explanation[-3].values, explanation[0].values)
    assert explanation[1][0].target == (None,)
    assert [each.target for each in reversed(explanation)] == [(0,), (None,), (4,)]
    for outside in (3, -4):
        with pytest.raises(IndexError):
            explanation[outside]
    for wrong in ("a", 1.5, None):
        with pytest.raises(TypeError):
            explanation[wrong]  # type: ignore[index]


def test_one_image_is_a_view_and_no_copy(explanation: Explanation) -> None:
    assert explanation[1].values.data_ptr() == explanation.values[1].data_ptr()


def test_an_array_is_the_values(explanation: Explanation) -> None:
    array = np.asarray(explanation)
    assert array.shape == (3, 3, 4, 5)
    assert array.dtype == np.float32
    assert np.array_equal(array, explanation.values.numpy())
    assert np.shares_memory(array, explanation.values.numpy())
    assert not np.shares_memory(np.array(explanation, copy=True), explanation.values.numpy())
    assert np.asarray(explanation, dtype=np.float64).dtype == np.float64
    half = replace(explanation, values=explanation.values.bfloat16())
    assert np.array_equal(np.asarray(half), half.values.float().numpy())
    hanging = replace(explanation, values=explanation.values.clone().requires_grad_())
    assert np.array_equal(np.asarray(hanging), array)


def test_an_explanation_does_not_change(explanation: Explanation) -> None:
    with pytest.raises(FrozenInstanceError):
        explanation.values = torch.zeros(1)  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        explanation.note = "mine"  # type: ignore[attr-defined]


def test_it_says_what_it_is(explanation: Explanation) -> None:
    assert repr(explanation) == (
        "<Explanation of espresso, contrast of é and 日本,  by guided_backprop at features.0, values (3, 3, 4, 5)>"
    )
    plain = GuidedBackprop(tiny_model()).attribute(numbers(5, 3, 16, 16), 1)
    assert repr(plain) == "<Explanation of class 1, class 1, class 1, ... by guided_backprop, values (5, 3, 16, 16)>"


def test_it_moves_to_another_device_whole(explanation: Explanation) -> None:
    moved = explanation.to("cpu")
    assert_same(moved, explanation)
    meta = explanation.to("meta")
    tensors = (meta.values, meta.scores, meta.probabilities, meta.residual, meta.ledger)
    assert all(each is not None and each.is_meta for each in tensors)
    assert meta.frames is explanation.frames
