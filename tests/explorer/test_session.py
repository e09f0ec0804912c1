"""The answers of a session: images, maps of four kinds of models, cards, pictures and the code that draws them."""

from __future__ import annotations

import io
import json
import re
from collections import UserDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from torch import nn

import saliency
from saliency import METHODS
from saliency.attribution.passes import TimedAttribution
from saliency.batch.options import NetworkOptions
from saliency.errors import ImageError, MethodError, ModelError, NotApplicableError, TargetError
from saliency.explorer import session as module
from saliency.explorer.session import Session, StoppedQuestion, UnknownImageError, read_target
from saliency.render.figure import pictured
from saliency.render.scaling import scale_map
from saliency.testbed import draw_rgbd
from saliency.testbed.shapes import draw_scenes
from saliency.testing.unchanged import Snapshot
from tests.batchwork import Tiny
from tests.dual_encoders import for_photos

Answer = dict[str, Any]


def photo(size: tuple[int, int] = (40, 24), seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def tiny(**options: Any) -> Session:
    return Session(NetworkOptions(model=Tiny(), **options), [photo()])


def answers(session: Session, check: Callable[[], None] = lambda: None, **asked: Any) -> list[Answer]:
    found: list[Answer] = []
    session.explain({"methods": ["grad_cam"], **asked}, found.append, check)
    return found


def values(answer: Answer) -> np.ndarray[Any, Any]:
    drawn = answer["map"]
    return np.frombuffer(drawn["values"], "<f4").reshape(drawn["height"], drawn["width"])


class Segmenter(nn.Module):
    """A background, and a class at bright pixels."""

    categories = ("background", "bright")
    preprocess = saliency.Preprocess(size=(16, 16), resize=16, mean=(0.5,) * 3, std=(0.5,) * 3)

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Conv2d(3, 2, 1)
        with torch.no_grad():
            self.scores.weight.copy_(torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1).expand(2, 3, 1, 1))
            nn.init.zeros_(cast("nn.Parameter", self.scores.bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.scores(x)
        return scores


@cache
def detector() -> Session:
    scene = draw_scenes(1, seed=1_000_009, task="several").images[0].permute(1, 2, 0).numpy()
    return Session(NetworkOptions(model="shapes_detector"), [Image.fromarray(scene)])


# What can be asked.


@pytest.mark.parametrize(
    ("session", "asks"),
    [
        (tiny, ["class"]),
        (detector, ["box", "point"]),
        (lambda: Session(NetworkOptions(model=Segmenter())), ["region", "point"]),
        (lambda: Session(NetworkOptions(model=for_photos())), ["text"]),
    ],
)
def test_the_kinds_of_targets_follow_from_the_output(session: Callable[[], Session], asks: list[str]) -> None:
    assert session().about()["asks"] == asks


def test_a_model_without_any_target_is_refused() -> None:
    model: Any = nn.Conv1d(3, 1, 1)
    model.forward = lambda x: {"a": x.mean((2, 3)), "b": x.mean((2, 3))}
    model.preprocess = Tiny().preprocess
    with pytest.raises(ModelError, match="no classes, boxes, regions or embeddings"):
        Session(NetworkOptions(model=model))


def test_the_page_learns_all_methods_classes_and_layers() -> None:
    about = json.loads(json.dumps(tiny(methods=["lrp"]).about()))
    assert [one["name"] for one in about["methods"]] == list(METHODS)
    assert (about["method"], about["classes"]) == ("lrp", ["ant", "bee", "cat", "dog", "emu"])
    assert about["layer"] in about["layers"]
    assert [len(about["colors"][name]) for name in ("inferno", "bwr")] == [256, 256]
    assert about["images"] == [{"index": 0, "name": "image 0"}]
    assert not about["sample"]
    assert not [name for name in about["layers"] if re.search("drop|act", name)]
    efficient = Session(NetworkOptions(model="efficientnet_lite0")).about()["layers"]
    assert {"conv_stem", "bn1", "blocks.3.1", "global_pool.pool"} <= set(efficient)
    assert not [name for name in efficient if name.endswith((".drop", ".act", ".drop_path"))]
    assert Session(NetworkOptions(model=Tiny())).about()["images"] == [{"index": 0, "name": "sample.jpg"}]


def test_methods_that_need_attention_are_marked_for_a_model_without_attention() -> None:
    marked = {one["name"]: one["inapplicable"] for one in tiny().about()["methods"] if one["inapplicable"]}
    assert {"attention_rollout", "chefer_attention", "le_grad"} <= set(marked)
    assert "no attention that can be read" in marked["attention_rollout"]
    assert "grad_cam" not in marked
    with_attention = Session(NetworkOptions(model="shapes_vit")).about()["methods"]
    assert not [one["name"] for one in with_attention if one["inapplicable"]]


# Images.


def test_an_image_has_its_top_classes() -> None:
    session = tiny()
    opened = session.open(photo(), "a.png")
    model: Any = session.model
    batch = saliency.GradCAM(model).read(photo())
    probabilities = model(batch.inputs).softmax(1)[0]
    assert (opened["width"], opened["height"], opened["name"]) == (40, 24, "a.png")
    assert [one["target"] for one in opened["top"]] == probabilities.argsort(descending=True).tolist()
    assert [one["probability"] for one in opened["top"]] == pytest.approx(sorted(probabilities.tolist())[::-1])
    assert opened["probabilities"] == pytest.approx(probabilities.tolist())
    picture = Image.open(io.BytesIO(session.picture(opened["image"])))
    assert (picture.format, picture.size) == ("JPEG", (40, 24))
    assert Image.open(io.BytesIO(session.thumbnail(0))).size == (40, 24)


def test_a_detector_lists_its_boxes_and_explains_a_click() -> None:
    opened = detector().open(0)
    assert [one["index"] for one in opened["boxes"]] == list(range(len(opened["boxes"])))
    assert len(opened["boxes"]) == 4
    second = opened["boxes"][1]
    left, top, right, bottom = second["box"]
    at = [(left + right) / 2, (top + bottom) / 2]
    for target in ({"box": {"index": 1}}, {"box": {"point": at}}):
        (answer,) = answers(detector(), image=opened["image"], target=target)
        assert answer["row"]["target_box"] == pytest.approx(second["box"], abs=1e-3)
    (answer,) = answers(detector(), image=opened["image"])  # the first box by default
    assert answer["row"]["target_box"] == pytest.approx(opened["boxes"][0]["box"], abs=1e-3)


def test_a_segmenter_lists_its_regions_and_where_they_are() -> None:
    session = Session(NetworkOptions(model=Segmenter()))
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:4] = 255
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    opened = session.open(file.getvalue())
    assert opened["regions"] == [
        {"target": 0, "name": "background", "share": 0.75},
        {"target": 1, "name": "bright", "share": 0.25},
    ]
    labels = np.frombuffer(opened["labels"]["values"], np.uint8).reshape(16, 16)
    assert (labels[:4] == 1).all()
    assert (labels[4:] == 0).all()
    for where in ("predicted", "border", [3, 2]):
        target = {"region": 1, "where": where}
        (answer,) = answers(session, image=opened["image"], methods=["vanilla_gradient"], target=target)
        assert "bright" in answer["row"]["name"]


def test_a_segmenter_of_one_sigmoid_has_a_region_where_it_is_above_a_half() -> None:
    class Sigmoid(Segmenter):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x)[:, 1:] - super().forward(x)[:, :1]).sigmoid()

    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:4] = 255
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    opened = Session(NetworkOptions(model=Sigmoid())).open(file.getvalue())
    assert {region["name"]: region["share"] for region in opened["regions"]} == {"background": 0.75, "bright": 0.25}


def test_texts_are_asked_of_models_of_texts() -> None:
    session = Session(NetworkOptions(model=for_photos()))
    opened = session.open(photo((64, 64)))
    (answer,) = answers(session, image=opened["image"], methods=["vanilla_gradient"])
    assert "type a text" in answer["row"]["error"]
    target = {"text": "a cat", "against": ["a dog"]}
    (answer,) = answers(session, image=opened["image"], methods=["vanilla_gradient"], target=target)
    assert answer["row"]["name"] == "a cat rather than a dog"


def test_a_volume_among_images_is_offered_last_and_answers_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(photo())
    (tmp_path / "0.nii.gz").touch()
    session = Session(NetworkOptions(model=Tiny(), methods=("grad_cam",)), tmp_path)
    assert [image["name"] for image in session.about()["images"]] == ["a.png", "0.nii.gz"]
    for ask in (session.open, session.thumbnail):
        with pytest.raises(NotApplicableError, match="the explorer are for images, not for volumes"):
            ask(1)


def test_few_images_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_IMAGES", 2)
    session = tiny()
    first, second, third = (session.open(photo(seed=seed))["image"] for seed in range(3))
    assert session.picture(second)
    assert session.picture(third)
    with pytest.raises(UnknownImageError, match="open it again"):
        session.picture(first)
    monkeypatch.setattr(module, "HELD_PIXELS", 1)
    last = session.open(photo(seed=3))["image"]  # the newest stays, whatever its size
    assert session.picture(last)
    with pytest.raises(UnknownImageError):
        session.picture(third)


# Maps.


@pytest.mark.parametrize("name", ["grad_cam", "vanilla_gradient", "integrated_gradients", "score_cam"])
def test_the_map_is_drawn_as_overlay_draws_it(name: str) -> None:
    session = tiny()
    opened = session.open(photo((16, 16)))
    answer = answers(session, image=opened["image"], methods=[name], target={"class": 2})[-1]
    row, drawn = answer["row"], values(answer)
    assert answer["done"]
    shares = (drawn - row["floor"]) / (row["limit"] - row["floor"]) if row["limit"] > row["floor"] else drawn
    explanation = METHODS[name](session.model).attribute(photo((16, 16)), 2)
    scaled = scale_map(explanation, smoothing=0.005)
    np.testing.assert_allclose(np.clip(shares, -1, 1), scaled.values, atol=1e-5)
    assert row["score"] == pytest.approx(float(explanation.scores[0]))


def test_the_default_method_is_compiled_before_the_first_image(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, runs = [0], [0]

    def frozen(graph: Any, inputs: Any, mode: str | None) -> Callable[..., Any]:
        compiled[0] += 1

        def run(*inputs: torch.Tensor) -> Any:
            runs[0] += 1
            return graph(*inputs)

        return run

    monkeypatch.setattr("saliency.program.compiled.frozen", frozen)
    session, exact = tiny(compile=True, whole="aspect"), tiny(whole="aspect")
    assert compiled == [1]
    before = runs[0]
    for size in ((16, 16), (16, 24)):
        shown = [answers(each, image=each.open(photo(size))["image"])[-1] for each in (session, exact)]
        np.testing.assert_allclose(values(shown[0]), values(shown[1]), atol=1e-5)
    assert runs[0] == before + 1  # an image of another size is explained by the method itself
    assert "images differ in size" in shown[0]["row"]["notes"][0]
    layer = session.about()["layers"][0]
    answers(session, image=session.open(photo((16, 16)))["image"], methods=["grad_cam", "lrp"], layer=layer)
    assert (compiled, runs[0]) == ([1], before + 1)


def test_a_class_against_another_and_a_layer() -> None:
    session = tiny()
    image = session.open(0)["image"]
    layer = session.about()["layers"][0]
    (answer,) = answers(session, image=image, target={"class": "cat", "against": 3}, layer=layer)
    assert answer["row"]["name"] == "cat rather than dog"
    assert answer["row"]["layer"] == layer


def test_no_layer_means_the_layer_of_the_session() -> None:
    session = tiny(layer=(layer := tiny().about()["layers"][0]))
    (answer,) = answers(session, image=session.open(0)["image"])
    assert answer["row"]["layer"] == session.about()["layer"] == layer


def test_an_error_of_one_method_leaves_the_other() -> None:
    session = tiny()
    image = session.open(0)["image"]
    found = answers(session, image=image, methods=["attention_rollout", "grad_cam"])
    assert [(one["method"], "error" in one["row"], one["done"]) for one in found] == [
        ("attention_rollout", True, True),
        ("grad_cam", False, True),
    ]
    assert found[0]["row"]["error_kind"] == "NotApplicableError"
    found = answers(session, image=image, methods=["no_cam"])
    assert found[0]["row"]["error_kind"] == "MethodError"


def test_warnings_are_notes() -> None:
    session = tiny()
    image = session.open(0)["image"]
    (answer,) = answers(session, image=image, methods=["lime"], target={"class": 0})[-1:]
    assert isinstance(answer["row"]["notes"], list)
    black = session.open(_plain())["image"]
    (answer,) = answers(session, image=black, methods=["input_x_gradient"], layer=None)
    assert answer["row"]["notes"] or values(answer).any()


def _plain() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (128, 128, 128)).save(file, "PNG")
    return file.getvalue()


def test_methods_of_many_passes_send_the_map_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.0)
    session = tiny(options={"passes": 64, "chunk": 16})
    image = session.open(0)["image"]
    found = answers(session, image=image, methods=["rise"])
    assert [one["progress"] for one in found] == [0.25, 0.5, 0.75, 1]
    assert [one["done"] for one in found] == [False] * 3 + [True]
    explanation = saliency.RISE(session.model, passes=16, chunk=16).attribute(photo())
    expected = scale_map(explanation, percentile=None, smoothing=0.005)
    np.testing.assert_allclose(
        values(found[0]), expected.values * (expected.limit - expected.floor) + expected.floor, rtol=1e-4, atol=1e-6
    )


def test_the_quick_method_of_two_is_first_and_the_slow_one_begins_with_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimedAttribution, "draft_options", {"seconds": 1e-6})
    session = tiny()
    image = session.open(0)["image"]
    found = answers(session, image=image, methods=["rise", "grad_cam"], target={"class": 1})
    maps = [(one["method"], one["progress"], one["done"]) for one in found if "map" in one]
    assert maps[0] == ("grad_cam", 1, True)
    assert maps[1] == ("rise", 0, False)
    assert maps[-1] == ("rise", 1, True)


def test_a_draft_that_is_complete_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimedAttribution, "draft_options", {"seconds": 1e9})
    session = tiny()
    image = session.open(0)["image"]
    (answer,) = answers(session, image=image, methods=["integrated_gradients"])
    assert answer["done"]
    assert answer["row"]["settings"]["seconds"] is None


def test_a_question_ends_between_passes_and_leaves_the_model_as_it_was() -> None:
    session = tiny(options={"chunk": 4})
    image = session.open(0)["image"]
    before = Snapshot(model=session.model)
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise StoppedQuestion

    sizes: list[int] = session.model.sizes  # type: ignore[assignment]
    del sizes[:]
    found: list[Answer] = []
    with pytest.raises(StoppedQuestion):
        session.explain({"image": image, "methods": ["rise"]}, found.append, check)
    assert len(sizes) < 10
    changed = [name for name in before.changes() if "sizes" not in name]
    assert not changed
    assert answers(session, image=image)[0]["done"]


@pytest.mark.parametrize("last", [6, 9])  # in the test of the weights, and in the method on permuted weights
def test_a_trust_card_ends_when_it_is_not_wanted_any_more(last: int) -> None:
    session, calls = tiny(options={"chunk": 4, "passes": 16}), 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls >= last:
            raise StoppedQuestion

    asked = {"image": session.open(0)["image"], "methods": ["rise"], "target": {"class": 1}, "seconds": 60}
    with pytest.raises(StoppedQuestion):
        session.trust(asked, check)
    assert calls == last


def test_an_explanation_is_kept_and_not_computed_again() -> None:
    session = tiny()
    image = session.open(0)["image"]
    first = answers(session, image=image)
    sizes: list[int] = session.model.sizes  # type: ignore[assignment]
    del sizes[:]
    assert answers(session, image=image) == first
    assert not sizes


@pytest.mark.parametrize("asked", [None, {}, {"class": 1.5}, {"class": [1]}, {"box": {}}, {"region": 1.5}])
def test_other_targets_are_refused(asked: Any) -> None:
    with pytest.raises(TargetError, match="expected a class, a box, a region or a text"):
        read_target(asked)


@pytest.mark.parametrize("methods", [None, [], ["grad_cam"] * 3, "grad_cam", {"grad_cam": 1}])
def test_one_or_two_methods_are_asked(methods: Any) -> None:
    session = tiny()
    with pytest.raises(MethodError, match="one or two"):
        answers(session, image=session.open(0)["image"], methods=methods)


# Cards, pictures, code.


def test_a_trust_card_has_the_columns_of_the_batch_page() -> None:
    session = tiny()
    asked = {"image": session.open(0)["image"], "methods": ["grad_cam"]}
    card = session.trust(asked, lambda: None)
    assert card["summary"]
    assert {"title", "is_clear", "value", "controls", "strip"} <= card["trust"]["deletion"].keys()


@pytest.mark.parametrize(
    "style", [{}, {"opacity": 0.8, "percentile": 90}, {"opacity": 0.4, "percentile": "auto"}, {"threshold": 0.5}]
)
def test_the_code_draws_the_saved_picture(
    style: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(NetworkOptions(model="shapes_vit", methods=["vanilla_gradient"]))
    (tmp_path / "it's.png").write_bytes(content := photo((64, 64)))
    monkeypatch.chdir(tmp_path)
    image = session.open(content, "it's.png")["image"]
    asked = {"image": image, "methods": ["vanilla_gradient"], "target": {"class": 0, "against": 1}, "style": style}
    saved = session.save(asked | {"as": "overlay"}, lambda: None)
    code = session.save(asked | {"as": "code"}, lambda: None)
    assert isinstance(saved, bytes)
    assert isinstance(code, str)
    exec(code, {})  # noqa: S102
    drawn = Image.open(tmp_path / "it's.vanilla_gradient.png")
    np.testing.assert_array_equal(np.asarray(drawn), np.asarray(Image.open(io.BytesIO(saved))))
    figure = session.save(asked | {"as": "figure"}, lambda: None)
    assert isinstance(figure, bytes)
    assert figure.startswith(b"\x89PNG")


def test_one_image_in_any_form_is_one_offered_image(tmp_path: Path) -> None:
    image = Image.open(io.BytesIO(photo()))
    for images in (np.asarray(image), image, photo(), [image]):
        session = Session(NetworkOptions(model=Tiny()), images)
        assert session.about()["images"] == [{"index": 0, "name": "image 0"}]
        assert (session.open(0)["width"], session.about()["sample"]) == (40, False)


def test_a_thumbnail_of_a_large_jpeg_is_decoded_in_a_part_of_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.linear_gradient("L").resize((1600, 1200)).convert("RGB").save(tmp_path / "large.jpg", exif=Image.Exif())
    session, decoded = Session(NetworkOptions(model=Tiny()), str(tmp_path)), list[tuple[int, int]]()
    load = JpegImageFile.load

    def record(image: Image.Image) -> Any:
        decoded.append(image.size)
        return load(cast("JpegImageFile", image))

    monkeypatch.setattr(JpegImageFile, "load", record)
    thumbnail = Image.open(io.BytesIO(session.thumbnail(0)))
    assert (thumbnail.size, max(decoded)) == ((160, 120), (400, 300))
    assert session.open(0)["width"] == 1600


@pytest.mark.parametrize("name", ["shapes_rgbd", "shapes_policy"])
def test_a_model_of_several_inputs_without_a_mapping_is_refused_with_the_call_that_shows_it(name: str) -> None:
    with pytest.raises(
        ModelError, match=r'saliency.explore\(model, {"rgb": image, "depth": depth}\), or saliency serve'
    ):
        Session(NetworkOptions(model=name))


SCENES = draw_rgbd(2, seed=1_000_003, task="depth")


def scene(number: int) -> dict[str, Any]:
    """The colours as an image, the depth as a tensor."""
    rgb = SCENES.inputs["rgb"][number].permute(1, 2, 0).numpy()
    return {"depth": SCENES.inputs["depth"][number], "rgb": Image.fromarray(rgb)}


@cache
def rgbd() -> Session:
    return Session(NetworkOptions(model="shapes_rgbd", methods=("lrp",)), scene(0))


def encoded(name: str, number: int) -> tuple[bytes, str]:
    """An input of a scene as the file that a user drops."""
    file = io.BytesIO()
    if name == "depth":
        np.save(file, scene(number)[name])
        return file.getvalue(), "depth.npy"
    scene(number)[name].save(file, "PNG")
    return file.getvalue(), "rgb.png"


@pytest.mark.parametrize("method", ["lrp", "occlusion"])
def test_each_input_of_a_case_has_a_map_over_its_image_on_one_scale_and_a_share(method: str) -> None:
    session = rgbd()
    assert session.about()["inputs"] == ["rgb", "depth"]  # the photo first
    image = session.open(0)
    result = METHODS[method](session.model).attribute(scene(0), 1)
    *_, rgb, depth = answers(session, image=image["image"], methods=[method], target={"class": 1})
    for number, (name, answer) in enumerate({"rgb": rgb, "depth": depth}.items()):
        assert (answer["input"], answer["done"]) == (number, True)
        assert answer["row"]["shares"] == pytest.approx(result.shares)
        scaled = scale_map(result[name], percentile=None, smoothing=0.005)
        np.testing.assert_allclose(values(answer), scaled.values * scaled.limit, atol=1e-5)
        assert session.picture(image["image"], number).startswith(b"\xff\xd8")
    assert rgb["row"]["limit"] == depth["row"]["limit"]


@pytest.mark.parametrize("name", ["rgb", "depth"])
def test_a_file_replaces_its_input_only(name: str) -> None:
    session, index = rgbd(), ["rgb", "depth"].index(name)
    before = session.open(0)["image"]
    after = session.open(*encoded(name, 1), case=before, index=index)["image"]
    same = [session.picture(before, number) == session.picture(after, number) for number in range(2)]
    assert same == [number != index for number in range(2)]
    result = saliency.LRP(session.model).attribute(scene(0) | {name: scene(1)[name]}, 0)
    got = answers(session, image=after, methods=["lrp"], target={"class": 0})
    assert [answer["row"]["score"] for answer in got] == [pytest.approx(float(result.scores[0]))] * 2


@pytest.mark.parametrize("kind", [dict, UserDict, tuple])
def test_a_file_replaces_an_image_of_a_nested_entry(kind: Any) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = saliency.load("shapes_rgbd")
            first = 1 if kind is tuple else "rgb"
            self.preprocess = {f"images.{first}": saliency.Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3)}

        def forward(self, images: Any, scale: float) -> Any:
            depth, rgb = images if isinstance(images, tuple) else (images["depth"], images["rgb"])
            return self.network(rgb, depth) * scale

    def case(rgb: int) -> dict[str, Any]:
        images = scene(0) | {"rgb": scene(rgb)["rgb"]}
        return {"images": tuple(images.values()) if kind is tuple else kind(images), "scale": 1.0}

    session = Session(NetworkOptions(model=Nested(), methods=("input_x_gradient",)), case(0))
    opened = session.open(*encoded("rgb", 1), case=session.open(0)["image"], index=0)
    (_, answer) = answers(session, image=opened["image"], methods=["input_x_gradient"], target={"class": 1})
    expected = saliency.InputXGradient(session.model).attribute(case(1), 1)
    assert answer["row"]["shares"] == pytest.approx(expected.shares)


def test_a_file_that_does_not_fit_its_input_is_refused_in_one_sentence() -> None:
    session = rgbd()
    case = session.open(0)["image"]
    flat, two = io.BytesIO(), io.BytesIO()
    np.save(flat, np.zeros(3, np.float32))
    np.save(two, np.zeros((2, 1, 64, 64), np.float32))
    for content, name, message in [
        (photo(), "depth.png", "depth.png: depth: .*preprocess"),
        (b"no array", "depth.npy", "'depth.npy' cannot be read"),
        (flat.getvalue(), "depth.npy", r"depth.npy \(3,\): expected one image for each of rgb, depth"),
        (two.getvalue(), "depth.npy", r"depth.npy \(2, 1, 64, 64\): expected one image for each of rgb, depth"),
    ]:
        with pytest.raises(ImageError, match=message):
            session.open(content, name, case, 1)
    channels = io.BytesIO()
    np.save(channels, np.zeros((5, 64, 64), np.float32))
    with pytest.raises(ModelError, match=r"^d.npy \(5, 64, 64\): the model .* refused an input of depth 1x5x64x64"):
        session.open(channels.getvalue(), "d.npy", case, 1)
    with pytest.raises(UnknownImageError, match="not in memory"):
        session.open(*encoded("rgb", 1), case="0", index=0)


def test_a_state_stays_as_it_was_given() -> None:
    class Reader(nn.Module):
        preprocess = saliency.Preprocess(size=(16, 16))

        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Conv2d(3, 2, 3)

        def forward(self, image: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.scores(image).mean((2, 3)) + state
            return scores

    inputs = {"image": photo(), "state": np.array([3.0, -2.0], np.float32)}
    session = Session(NetworkOptions(model=Reader(), methods=("input_x_gradient",)), inputs)
    assert session.about()["inputs"] == ["image"]
    case = session.open(photo(seed=1), "b.png", session.open(0)["image"])
    assert case["top"][0]["target"] == 0
    (answer,) = answers(session, image=case["image"], methods=["input_x_gradient"], target={"class": 0})
    shares = saliency.InputXGradient(session.model).attribute(inputs | {"image": photo(seed=1)}, 0).shares
    assert answer["row"]["shares"] == pytest.approx(shares)
    assert set(shares) == {"image", "state"}


def test_cards_and_files_are_of_one_input_and_figures_of_all() -> None:
    session = rgbd()
    asked = {"image": session.open(0)["image"], "methods": ["lrp"], "target": {"class": 0}, "input": 1}
    saved = session.save(asked | {"as": "overlay"}, lambda: None)
    result = saliency.LRP(session.model).attribute(scene(0), 0)
    assert isinstance(saved, bytes)
    assert np.asarray(Image.open(io.BytesIO(saved))).std() > 0
    expected = saliency.overlay(next(part for part in pictured(result) if part is not result["rgb"]))
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(saved))), np.asarray(expected))
    figure = session.save(asked | {"as": "figure"}, lambda: None)
    assert Image.open(io.BytesIO(cast("bytes", figure))).width > 1000
    card = session.trust(asked | {"seconds": 0.5}, lambda: None)
    assert {"class", "weights"} <= card["trust"].keys()


def test_the_code_of_a_case_explains_it_and_draws_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare = {"rgb": saliency.Preprocess(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)), "depth": None}
    options: Any = {"model": "shapes_rgbd", "preprocess": prepare, "options": {"steps": 4}}
    session = Session(NetworkOptions(**options, methods=("integrated_gradients",)), scene(0))
    asked = {"image": session.open(0)["image"], "methods": ["integrated_gradients"], "target": {"class": 2}}
    code = cast("str", session.save(asked | {"as": "code"}, lambda: None))
    names: dict[str, Any] = {"inputs": scene(0)}
    exec(code.replace("{'depth': ..., 'rgb': ...}", "inputs"), names)  # noqa: S102
    method = saliency.IntegratedGradients(session.model, preprocess=prepare, steps=4)
    assert names["result"].shares == method.attribute(scene(0), 2).shares
    assert Path("integrated_gradients.png").is_file()


def test_folders_of_each_input_are_offered_as_cases(tmp_path: Path) -> None:
    for name in ("rgb", "depth"):
        for number in range(2):
            content, file = encoded(name, number)
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / file.replace(name, "ab"[number])).write_bytes(content)
    folders = {name: tmp_path / name for name in ("rgb", "depth")}
    session = Session(NetworkOptions(model="shapes_rgbd"), folders)
    assert [image["name"] for image in session.about()["images"]] == ["a.png", "b.png"]
    assert session.thumbnail(0) != session.thumbnail(1)
    case = session.open(1)["image"]
    (rgb, _) = answers(session, image=case, methods=["lrp"], target={"class": 0})
    assert rgb["row"]["score"] == pytest.approx(float(saliency.LRP(session.model).attribute(scene(1), 0).scores[0]))
