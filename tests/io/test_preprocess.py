"""The preprocessing is the library's own to the bit, and knows where its crop lies."""

from __future__ import annotations

import importlib
import threading
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
from saliency.errors import ImageError
from saliency.io.geometry import Box
from saliency.io.inputs import read
from saliency.io.preprocess import Preprocess, TransformPreprocess, as_preprocess, without_crop
from tests.models import torchvision_models

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
SIZES = [(333, 257), (257, 333), (97, 640), (640, 97), (31, 17), (7, 5), (224, 224), (1, 1)]
WEIGHTS = [
    "ResNet18_Weights.DEFAULT",
    "ResNet50_Weights.IMAGENET1K_V2",
    "EfficientNet_B0_Weights.DEFAULT",
    "EfficientNet_V2_S_Weights.DEFAULT",
    "Inception_V3_Weights.DEFAULT",
    "ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1",
    "Swin_T_Weights.DEFAULT",
    "FCN_ResNet50_Weights.DEFAULT",
    "LRASPP_MobileNet_V3_Large_Weights.DEFAULT",
    "FasterRCNN_ResNet50_FPN_Weights.DEFAULT",
]
TIMM = [
    {"input_size": (3, 224, 224), "crop_pct": 0.875, "interpolation": "bicubic", **IMAGENET},
    {"input_size": (3, 224, 224), "crop_pct": 0.95, "interpolation": "bilinear", "crop_mode": "center", **IMAGENET},
    {"input_size": (3, 240, 240), "crop_pct": 0.882, "interpolation": "bicubic", "mean": (0.5,) * 3, "std": (0.5,) * 3},
    {"input_size": (3, 192, 256), "crop_pct": 0.9, "interpolation": "bicubic", "crop_mode": "center", **IMAGENET},
    {"input_size": (3, 256, 192), "crop_pct": 1.0, "interpolation": "bilinear", "crop_mode": "center", **IMAGENET},
    {"input_size": (3, 224, 224), "crop_pct": 1.0, "interpolation": "bicubic", "crop_mode": "squash", **IMAGENET},
    {"input_size": (3, 160, 224), "crop_pct": 0.9, "interpolation": "lanczos", "crop_mode": "squash", **IMAGENET},
    {"input_size": (3, 224, 224), "crop_pct": 1.0, "interpolation": "bicubic", "crop_mode": "border", **IMAGENET},
    {"input_size": (3, 200, 160), "crop_pct": 0.8, "interpolation": "nearest", "crop_mode": "border", **IMAGENET},
    {"input_size": (3, 128, 128), "crop_pct": 0.5, "interpolation": "bicubic", "mean": (0,) * 3, "std": (1 / 255,) * 3},
]


def pretrained(name: str) -> dict[str, Any]:
    import timm

    config: Any = timm.get_pretrained_cfg(name)
    return dict(config.to_dict())


def timm_data() -> Any:
    return importlib.import_module("timm.data")  # it declares no types


def transforms(version: str = "transforms") -> Any:
    """The transforms of torchvision, whose import takes two seconds."""
    return importlib.import_module(f"torchvision.{version}")


def to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def noise(size: tuple[int, int]) -> Image.Image:
    generator = np.random.default_rng(size[0] * 1000 + size[1])
    return Image.fromarray(generator.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def photo(size: tuple[int, int]) -> Image.Image:
    """A image whose red tells the column and whose green tells the row."""
    red, green = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
    return Image.fromarray(np.stack([red, green, 255 - red], 2).astype(np.uint8))


# Bit for bit


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_torchvision_presets_are_met_bit_for_bit(weights: str, size: tuple[int, int]) -> None:
    preset = torchvision_models().get_weight(weights).transforms()
    assert torch.equal(as_preprocess(preset)(noise(size)), preset(noise(size)))


@pytest.mark.parametrize("config", TIMM, ids=lambda c: f"{c['input_size']}-{c.get('crop_mode')}-{c['interpolation']}")
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.slow
def test_timm_transforms_are_met_bit_for_bit(config: dict[str, Any], size: tuple[int, int]) -> None:
    theirs = timm_data().create_transform(**config)
    assert torch.equal(as_preprocess(config)(noise(size)), theirs(noise(size)))


@pytest.mark.parametrize("name", ["resnet18", "tf_efficientnet_lite0", "vit_base_patch16_224", "convnext_tiny"])
def test_a_timm_models_own_config_is_met_bit_for_bit(name: str) -> None:
    config = pretrained(name)
    theirs = timm_data().create_transform(**timm_data().resolve_data_config(pretrained_cfg=config))
    assert torch.equal(Preprocess.from_timm(config)(noise((501, 375))), theirs(noise((501, 375))))


def test_the_output_is_contiguous_and_the_picture_unchanged() -> None:
    image = noise((300, 200))
    before = image.tobytes()
    output = Preprocess((224, 224), 256)(image)
    assert output.shape == (3, 224, 224)
    assert output.dtype == torch.float32
    assert output.is_contiguous()
    assert image.tobytes() == before


def test_normalise_and_denormalise_undo_each_other_and_keep_the_tensor() -> None:
    preprocess, values = Preprocess((4, 4), 4), torch.rand(2, 3, 4, 4, dtype=torch.float64)
    kept = values.clone()
    assert torch.allclose(preprocess.denormalise(preprocess.normalise(values)), values, atol=1e-12)
    assert torch.equal(values, kept)
    whole = Preprocess(None, None)
    expected = (torch.tensor(np.array(noise((9, 7)))).permute(2, 0, 1) / 255).sub(0)
    assert torch.equal(whole(noise((9, 7))), whole.normalise(expected))


# Geometry


def corners(size: tuple[int, int], preprocess: Callable[[Image.Image], Tensor], box: Box) -> None:
    """Paint the box on the image in one colour per quarter; the model must see just these four quarters."""
    left, top, right, bottom = (round(edge) for edge in box)
    array = np.zeros((size[1], size[0], 3), np.uint8)
    rows, columns = np.mgrid[: size[1], : size[0]]
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    array[..., 0] = 255 * (inside & (rows < (top + bottom) / 2))
    array[..., 1] = 255 * (inside & (columns < (left + right) / 2))
    array[..., 2] = 255 * inside
    red, green, blue = preprocess(Image.fromarray(array))
    height, width = red.shape
    y, x = max(1, round(1.5 * height / (bottom - top))), max(1, round(1.5 * width / (right - left)))
    assert (blue[y:-y, x:-x] > 0.97).all()
    assert (red[y : height // 2 - y, x:-x] > 0.97).all()
    assert (red[height // 2 + y :, :] < 0.03).all()
    assert (green[y:-y, x : width // 2 - x] > 0.97).all()
    assert (green[:, width // 2 + x :] < 0.03).all()


@pytest.mark.parametrize("size", [(1600, 900), (900, 1600), (500, 375), (2000, 300), (300, 2000), (640, 640)], ids=str)
@pytest.mark.parametrize("fit", ["stretch", "cover", "shorter edge"])
def test_coloured_corners_of_the_box_are_the_corners_of_the_input(size: tuple[int, int], fit: str) -> None:
    plain = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "interpolation": "box"}
    preprocess = {
        "stretch": Preprocess((200, 160), (230, 190), **plain),  # type: ignore[arg-type]
        "cover": Preprocess((200, 160), (230, 190), fit="cover", **plain),  # type: ignore[arg-type]
        "shorter edge": Preprocess((224, 224), 256, **plain),  # type: ignore[arg-type]
    }[fit]
    corners(size, preprocess, preprocess.box(size))


@pytest.mark.parametrize("size", [(1600, 900), (333, 257), (2000, 300), (300, 2000), (64, 48), (24, 31)], ids=str)
@pytest.mark.parametrize("config", TIMM[:8], ids=lambda c: f"{c['input_size']}-{c.get('crop_mode')}")
def test_the_box_is_where_a_ramp_says_to_a_pixel(config: dict[str, Any], size: tuple[int, int]) -> None:
    preprocess = as_preprocess({**config, "interpolation": "bilinear"})
    assert isinstance(preprocess, Preprocess)
    seen = preprocess.denormalise(preprocess(photo(size)))
    left, top, right, bottom = preprocess.box(size)
    height, width = seen.shape[1:]
    columns = left + (torch.arange(width) + 0.5) * (right - left) / width
    rows = top + (torch.arange(height) + 0.5) * (bottom - top) / height
    red = seen[0, height // 2] * (size[0] - 1) + 0.5
    green = seen[1, :, width // 2] * (size[1] - 1) + 0.5
    for place, ramp, length, step in (
        (columns, red, size[0], (right - left) / width),
        (rows, green, size[1], (bottom - top) / height),
    ):
        inner = (place > 2 * step + 1) & (place < length - 2 * step - 1)
        assert inner.any()
        # The photo's 256 levels are length / 255 pixels apart, rounded down once and to the nearest once.
        assert ((place - ramp)[inner] - 0.5 * length / 255).abs().max() < 1 + length / 255


def test_a_smaller_picture_lies_inside_its_box() -> None:
    preprocess = Preprocess((224, 224), resize=False)
    assert preprocess.box((100, 50)) == (-62, -87, 162, 137)
    assert preprocess.box((101, 51)) == (-61, -86, 163, 138)
    assert torch.equal(
        preprocess.denormalise(preprocess(Image.new("RGB", (101, 51), "white"))).sum((1, 2)).round(),
        torch.full((3,), 101.0 * 51),
    )


def test_a_picture_as_it_comes_is_its_own_box() -> None:
    assert Preprocess(None, None).box((640, 480)) == (0, 0, 640, 480)
    assert Preprocess((480, 640), resize=False).box((640, 480)) == (0, 0, 640, 480)


@pytest.mark.parametrize("size", [(224, 224), (100, 224), (224, 100)])
@pytest.mark.parametrize("image_size", [(300, 200), (200, 300), (150, 150)])
def test_a_size_alone_covers_the_input_with_as_little_resizing_as_possible(
    size: tuple[int, int], image_size: tuple[int, int]
) -> None:
    preprocess = Preprocess(size=size)
    left, top, right, bottom = preprocess.box(image_size)
    assert (right - left) / (bottom - top) == pytest.approx(size[1] / size[0], rel=0.02)
    assert ((left, right) == (0, image_size[0])) or ((top, bottom) == (0, image_size[1]))
    assert "resize=False" not in repr(preprocess)  # the resolved value, for the manifest
    if size == (224, 224):
        assert torch.equal(preprocess(noise(image_size)), Preprocess(size, resize=224)(noise(image_size)))
    contained = Preprocess(size=size, fit="contain").box(image_size)
    assert contained[0] <= 0
    assert contained[1] <= 0


def test_a_preset_that_only_crops_keeps_its_crop() -> None:
    from torchvision.transforms._presets import SemanticSegmentation

    preset = SemanticSegmentation(resize_size=None)
    assert as_preprocess(preset).box((500, 400)) == (0, 0, 500, 400)

    class CropOnly(torchvision_models().ResNet18_Weights.DEFAULT.transforms.func):  # type: ignore[misc]
        """A preset without resizing."""

        def __init__(self) -> None:
            super().__init__(crop_size=20)
            self.resize_size = None

    assert as_preprocess(CropOnly()) == Preprocess((20, 20), resize=False)
    assert Preprocess((20, 20), resize=False).box((60, 40)) == (20, 10, 40, 30)


CROP = Preprocess((20, 20), resize=False)


@pytest.mark.parametrize("prepare", [CROP, lambda image: CROP(image)], ids=["description", "function"])
def test_a_crop_of_less_than_half_of_the_shorter_edge_is_said(prepare: Any) -> None:
    with pytest.warns(saliency.errors.SaliencyWarning, match="less than half of the image's shorter edge"):
        read(noise((60, 41)), prepare)
    read(noise((60, 40)), prepare)


def test_a_strip_that_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(ImageError, match="1 x 60000 pixels would be resized to 256 x 15360000"):
        Preprocess((224, 224), 256)(Image.new("RGB", (1, 60000)))


# Descriptions


# Without the crop.

CROPS = [
    Preprocess(size=(20, 20), resize=24),
    Preprocess(size=(20, 16), resize=(24, 18), fit="cover"),
    Preprocess(size=(20, 20), resize=(24, 24), fit="stretch"),
    Preprocess(size=(20, 20), resize=(24, 24), fit="contain"),
    Preprocess(size=(20, 20)),
    Preprocess(size=(20, 20), resize=False),
]


@pytest.mark.parametrize("size", [(90, 40), (40, 90), (64, 64)])
@pytest.mark.parametrize("crop", CROPS, ids=str)
def test_a_whole_image_is_the_box_of_the_input(crop: Preprocess, size: tuple[int, int]) -> None:
    stretched, own = crop.without_crop(whole=True), crop.without_crop("aspect")
    assert stretched.box(size) == own.box(size) == (0, 0, *size)
    assert stretched(noise(size)).shape[1:] == crop.size
    height, width = own(noise(size)).shape[1:]
    assert width / height == pytest.approx(size[0] / size[1], rel=0.07)
    assert crop.without_crop(whole=False) is crop
    assert own.without_crop("aspect") == own


@pytest.mark.parametrize("size", [(90, 40), (40, 90), (64, 64)])
def test_the_crop_is_a_part_of_the_whole_image_at_its_own_aspect(size: tuple[int, int]) -> None:
    crop = Preprocess(size=(20, 20), resize=24)
    whole = crop.without_crop("aspect")(noise(size))
    top, left = ((edge - 20) // 2 for edge in whole.shape[1:])
    inside = [whole[:, t : t + 20, x : x + 20] for t in (top, top + 1) for x in (left, left + 1)]
    assert any(torch.equal(crop(noise(size)), part) for part in inside)


def test_the_crop_of_a_function_is_left_out_with_its_size_and_normalisation() -> None:
    tv = transforms()
    for channels in (tv.Lambda(lambda image: image), tv.Grayscale()):
        parts = [tv.Resize(24), tv.CenterCrop((20, 16)), channels, tv.ToTensor()]
        function = tv.Compose([*parts, tv.Normalize(0.4, 0.2)])
        found = without_crop(function, whole=True)
        assert (found.size, found.resize, found.fit) == ((20, 16), (20, 16), "stretch")
        exact = noise((16, 20))  # neither resized nor cropped
        wanted = tv.Compose(function.transforms[2:])(exact)
        torch.testing.assert_close(found(exact), wanted, rtol=0, atol=1e-5)


def test_the_whole_image_is_resampled_as_by_the_image_processor() -> None:
    transformers = pytest.importorskip("transformers")
    found = without_crop(transformers.CLIPImageProcessor(), whole=True)
    assert (found.size, found.interpolation) == ((224, 224), "bicubic")


def without_normalisation(image: Image.Image) -> Tensor:
    return to_tensor(image.resize((8, 8)))


@pytest.mark.parametrize(
    ("like", "whole", "words"),
    [
        (None, "aspect", "no preprocessing"),
        (without_normalisation, "aspect", "is a function"),
        (lambda image: without_normalisation(image).flip(0), True, "is a function"),  # BGR
        (to_tensor, True, "is a function"),  # any size
    ],
)
def test_a_crop_that_cannot_be_taken_out_is_refused(like: Any, whole: Any, words: str) -> None:
    with pytest.raises(ImageError, match=rf"whole={whole!r}: .*{words}.*saliency.Preprocess\(size="):
        without_crop(like, whole)


def test_equal_descriptions_are_equal_and_hash_alike() -> None:
    models = torchvision_models()
    one = as_preprocess(models.ResNet18_Weights.DEFAULT.transforms())
    same = as_preprocess(models.VGG11_Weights.DEFAULT.transforms())
    other = as_preprocess(models.ResNet50_Weights.IMAGENET1K_V2.transforms())
    assert one == same
    assert len({one, same, other}) == 2
    assert "resize=232" in repr(other)


def test_random_interpolation_of_timm_means_bilinear() -> None:
    config = {**TIMM[0], "interpolation": "random"}
    assert Preprocess.from_timm(config).interpolation == "bilinear"


def test_a_resolved_test_size_is_taken() -> None:
    config = pretrained("resnet18")
    resolved = timm_data().resolve_data_config(pretrained_cfg=config, use_test_size=True)
    assert Preprocess.from_timm(resolved).size == (288, 288)
    assert Preprocess.from_timm(config).size == (224, 224)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Preprocess((224, 224), 256, interpolation="bicubik"), 'did you mean "bicubic"'),
        (lambda: Preprocess((224, 224), 256, mean=(0.5,)), "expected the same number of channels"),
        (lambda: Preprocess((224, 224), 256, std=(0.5, 0.0, 0.5)), "divide by zero"),
        (lambda: Preprocess((0, 224), 256), "at least one pixel"),
        (lambda: Preprocess(size=128, resize=128), r"size=128: expected \(height, width\)"),  # type: ignore[arg-type]
        (lambda: Preprocess(range=(0, 0)), r"range=\(0, 0\): expected two different values"),
        (lambda: Preprocess(range=4095), "range=4095"),  # type: ignore[arg-type]
        (lambda: Preprocess(size=False), "size=False: expected"),  # type: ignore[arg-type]
        (lambda: Preprocess((8, 8), resize=True), "resize=True: expected the length of the shorter edge"),
        (lambda: Preprocess((8, 8), resize=(8, 8.5)), "resize=.* at least one pixel"),  # type: ignore[arg-type]
        (lambda: Preprocess(mean=0.5), "mean=0.5: expected one finite number per channel"),  # type: ignore[arg-type]
        (lambda: Preprocess(std=(1, True, 1)), "std=.*: expected one finite number per channel"),
        (lambda: Preprocess(fill=0), "fill=0: expected three whole numbers"),  # type: ignore[arg-type]
        (lambda: Preprocess(interpolation=None), "interpolation=None is not one of"),  # type: ignore[arg-type]
        (lambda: Preprocess((4, 4), (4, 4), fit="crop"), "'stretch', 'cover', 'contain'"),  # type: ignore[arg-type]
        (lambda: Preprocess.from_timm({"mean": 1}), 'has no "input_size"'),
        (lambda: Preprocess.from_timm({"input_size": (1, 28, 28)}), "1 channels and mean="),
        (lambda: Preprocess.from_timm({"input_size": (4, 28, 28)}), "takes 4 channels"),
        (lambda: Preprocess.from_timm({**TIMM[0], "crop_mode": "middle"}), "crop_mode='middle' is not one of"),
        (lambda: Preprocess.from_torchvision(torch.nn.Identity()), "Identity is not a torchvision image preset"),
        (lambda: as_preprocess(7), "got int as preprocess; expected a saliency.Preprocess"),  # type: ignore[arg-type]
    ],
)
def test_an_option_without_sense_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ImageError, match=words):
        make()


# Any callable


def compose(resize: Any, crop: Any, interpolation: str = "bilinear") -> Any:
    v2 = transforms("transforms.v2")
    return v2.Compose(
        [
            v2.Resize(resize, interpolation=v2.InterpolationMode(interpolation)),
            v2.CenterCrop(crop),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.2, 0.7], [0.229, 2.0, 0.01]),
        ]
    )


@pytest.mark.parametrize("size", [(4000, 3000), (3000, 4000), (3999, 257), (30, 500), (5, 7), (1, 9), (1, 1)])
@pytest.mark.parametrize("resize", [256, (300, 200), 100])
@pytest.mark.slow
def test_the_crop_of_a_callable_is_found_to_a_pixel(size: tuple[int, int], resize: Any) -> None:
    found = TransformPreprocess(compose([resize] if isinstance(resize, int) else resize, 224)).box(size)
    assert np.abs(np.subtract(found, Preprocess((224, 224), resize).box(size))).max() < 1


@pytest.mark.parametrize("size", [(640, 480), (33, 21)], ids=str)
@pytest.mark.parametrize("name", ["bicubic", "nearest", "lanczos"])
def test_the_crop_is_found_under_every_interpolation(size: tuple[int, int], name: str) -> None:
    found = TransformPreprocess(compose([256], 224, name)).box(size)
    assert np.abs(np.subtract(found, Preprocess((224, 224), 256).box(size))).max() < 1


def test_the_crop_is_found_off_the_centre_and_with_the_channels_in_any_order() -> None:
    def odd(image: Image.Image) -> Tensor:
        array = np.asarray(image.crop((100, 50, 420, 350)).resize((160, 150)))[..., ::-1]
        return 3 - torch.from_numpy(array.copy()).permute(2, 0, 1) / 50.0

    assert np.abs(np.subtract(TransformPreprocess(odd).box((500, 400)), (100, 50, 420, 350))).max() < 1


def test_the_crop_is_found_where_the_model_takes_one_channel() -> None:
    v2 = transforms("transforms.v2")
    grey = v2.Compose(
        [v2.Grayscale(1), v2.Resize(64), v2.CenterCrop(48), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    )
    found = TransformPreprocess(grey)
    assert found(noise((200, 100))).shape == (1, 48, 48)
    assert np.abs(np.subtract(found.box((200, 100)), (62.5, 12.5, 137.5, 87.5))).max() < 1


def test_a_callable_is_probed_once_per_size_also_by_threads() -> None:
    calls: list[tuple[int, int]] = []
    transform = compose([64], 56)

    def counted(image: Image.Image) -> Tensor:
        calls.append(image.size)
        output: Tensor = transform(image)
        return output

    preprocess = TransformPreprocess(counted)
    threads = [threading.Thread(target=preprocess.box, args=((90, 70),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    once = len(calls)
    preprocess.box((90, 70))
    assert len(calls) == once < 20


def cropped(image: Image.Image) -> Tensor:
    return Preprocess((64, 64), 64)(image)


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (lambda p: cropped(p.crop((int(torch.randint(9, ())), 0, 70, 70))), "the preprocessing is random"),
        (lambda p: cropped(p).flip(2) if torch.rand(()) < 0.5 else cropped(p), "the preprocessing is random"),
        (lambda p: cropped(p).flip(2), "flips or rotates"),
        (lambda p: cropped(p).flip(1), "flips or rotates"),
        (lambda p: cropped(p).rot90(1, (1, 2)), "rotates or warps"),
        (lambda p: cropped(p.rotate(20)), "rotates or warps"),
        (lambda p: torch.zeros(3, 8, 8), "equal or non-finite values"),
        (lambda p: torch.full((3, 8, 8), torch.nan), "equal or non-finite values"),
        (lambda p: p, "returned Image; expected floating-point values"),
        (lambda p: {"pixel_values": 1}, "returned dict; expected floating-point values"),
        (lambda p: torch.zeros(1, 3, 8, 8), r"shape \(1, 3, 8, 8\)"),
        (lambda p: torch.zeros(3, 8, 8, dtype=torch.uint8), "torch.uint8"),
        (lambda p: torch.zeros(8, 8), r"expected floating-point values of shape \(C, H, W\)"),
    ],
)
def test_a_callable_that_cannot_be_followed_is_refused(transform: Any, words: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(ImageError, match=words):
        as_preprocess(transform).box((80, 70))


@pytest.mark.parametrize("given", [[0.5, 0.5, 0.5], np.full(3, 0.5), torch.full((3,), 0.5)])
def test_means_may_be_lists_arrays_and_tensors(given: Any) -> None:
    assert Preprocess(mean=given).mean == (0.5, 0.5, 0.5)
    assert hash(Preprocess(mean=given)) == hash(Preprocess(mean=(0.5, 0.5, 0.5)))


# Greyscale models.

GREY = Preprocess(size=(20, 24), resize=20, mean=(0.5,), std=(0.25,))


def test_one_number_per_channel_describes_a_greyscale_model() -> None:
    colour = Image.effect_noise((40, 30), 60).convert("RGB")
    colour.putpixel((20, 15), (255, 0, 0))
    tv = transforms()
    steps = [tv.Grayscale(), tv.Resize(20), tv.CenterCrop((20, 24)), tv.ToTensor()]
    reference = tv.Compose([*steps, tv.Normalize([0.5], [0.25])])(colour)
    assert torch.equal(GREY(colour), reference)
    assert torch.equal(GREY(colour.convert("L")), GREY(colour.convert("L").convert("RGB")))
    assert GREY.input_range == (-2.0, 2.0)
    assert torch.allclose(GREY.denormalise(GREY(colour)), GREY(colour) / 4 + 0.5)
    bare = Preprocess(size=(4, 4), resize=False, mean=(0.0,), std=(1.0,), fill=(255, 255, 255))
    padded = bare(Image.new("RGB", (2, 2)))
    assert padded.tolist()[0] == [[1, 1, 1, 1], [1, 0, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]]


def test_greyscale_presets_of_timm_and_torchvision_are_converted() -> None:
    from torchvision.transforms._presets import ImageClassification

    config = {"input_size": (1, 20, 24), "mean": (0.5,), "std": (0.25,), "crop_mode": "border"}
    assert Preprocess.from_timm(config)(Image.new("RGB", (30, 30))).shape == (1, 20, 24)
    assert Preprocess.from_timm({**config, "input_size": (3, 20, 24)}).mean == (0.5, 0.5, 0.5)
    preset = ImageClassification(crop_size=20, resize_size=20, mean=(0.5,), std=(0.25,))
    image = Image.effect_noise((40, 30), 60)
    assert torch.equal(Preprocess.from_torchvision(preset)(image), preset(image))


def test_a_greyscale_model_explains_a_photo_and_draws_on_its_colours() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 18 * 22, 3)).eval()
    photo = Image.new("RGB", (48, 40), (200, 40, 40))
    for method in (saliency.VanillaGradient, saliency.IntegratedGradients):
        explanation = method(model, preprocess=GREY).attribute(photo, 1)
        assert explanation.values.shape == (1, 1, 20, 24)
        frame = explanation.frames[0]
        assert frame is not None
        assert frame.image.getpixel((0, 0)) == (200, 40, 40)
    assert saliency.overlay(explanation).mode == "RGB"


class Processor:
    """An image processor of Hugging Face, by its shape."""

    model_input_names = ("pixel_values",)

    def __call__(self, images: Image.Image, return_tensors: str | None = None) -> dict[str, Any]:
        values = to_tensor(images.resize((16, 16)))[None] - 0.5
        return {"pixel_values": values if return_tensors == "pt" else values.tolist()}


def test_a_processor_of_hugging_face_is_a_preprocessing() -> None:
    processor: Any = Processor()
    image = Image.effect_noise((40, 30), 60).convert("RGB")
    prepare = as_preprocess(processor)
    assert torch.equal(prepare(image), processor(image, "pt")["pixel_values"][0])
    assert prepare.box((40, 30)) == pytest.approx((0, 0, 40, 30), abs=1)
    assert prepare == as_preprocess(processor)  # methods of one model share it


# One channel of 16 or 32 bits

SCAN = np.random.default_rng(0).integers(900, 3026, (40, 60)).astype(np.uint16)  # 12 bits
TWELVE = Preprocess((32, 32), range=(0, 4095))
DARK = "a 16-bit image lies below 8191 of 65535.*range=\\(0, 4095\\)"


def test_a_range_keeps_more_than_8_bits_for_the_model() -> None:
    prepare = Preprocess(range=(0, 4095), mean=(0.0,), std=(1.0,))
    expected = SCAN / 4095
    assert np.allclose(prepare(Image.fromarray(SCAN))[0].numpy(), expected, atol=1e-6)
    assert len(np.unique(prepare(Image.fromarray(SCAN)))) > 1000
    with pytest.warns(saliency.errors.SaliencyWarning, match=DARK):
        assert np.allclose(replace(prepare, range=None)(Image.fromarray(SCAN))[0].numpy(), SCAN / 65535, atol=1e-6)


def test_a_range_applies_before_resizing_and_clamps() -> None:
    low, high = 1500, 2500
    clamped = Image.fromarray(((np.float32(SCAN) - low) / (high - low)).clip(0, 1))
    expected = np.asarray(clamped.resize((48, 32), Image.Resampling.BILINEAR))
    prepare = Preprocess(resize=32, range=(low, high), mean=(0.0,) * 3, std=(1.0,) * 3)
    got = prepare(Image.fromarray(SCAN)).numpy()
    assert got.shape == (3, 32, 48)
    assert np.allclose(got, expected, atol=1e-5)
    inverted = replace(prepare, range=(high, low))(Image.fromarray(SCAN)).numpy()
    assert np.allclose(inverted, 1 - expected, atol=1e-5)


@pytest.mark.parametrize("range", [None, (0, 255 * 257)])
def test_16_bits_of_which_8_are_used_equal_8_bits(range: Any) -> None:
    grey = noise((60, 41)).convert("L")
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    for prepare in (Preprocess((32, 32), range=range), Preprocess((64, 90), resize=False, range=range)):
        assert torch.allclose(prepare(deep), prepare(grey), atol=0.005 / 0.22)  # 8 bits are rounded after resizing
        assert prepare.box(deep.size) == prepare.box(grey.size)
        (frame,) = read(deep, prepare).frames
        assert frame is not None
        assert frame.image.tobytes() == grey.convert("RGB").tobytes()


@pytest.mark.parametrize("kind", ["png", "tiff", "array", "array with a channel", "int16", "int32", "float64", "PIL"])
def test_the_reader_equals_the_preprocessing_called_by_hand(tmp_path: Path, kind: str) -> None:
    deep = Image.fromarray(SCAN)
    deep.save(tmp_path / "a.png")
    deep.save(tmp_path / "a.tiff")
    images: dict[str, Any] = {"array": SCAN, "array with a channel": SCAN[..., None], "PIL": deep}
    images |= {"png": tmp_path / "a.png", "tiff": tmp_path / "a.tiff"}
    image = images[kind] if kind in images else SCAN.astype(kind)
    batch = read(image, TWELVE)
    assert torch.equal(batch.inputs[0], TWELVE(deep))
    (frame,) = batch.frames
    assert frame is not None
    assert frame.image.mode == "RGB"
    assert np.abs(np.asarray(frame.image)[..., 0] - SCAN * (255 / 4095)).max() <= 0.51


def test_hounsfield_units_are_shown_through_a_window() -> None:
    hounsfield = SCAN.astype(np.float64) - 1024
    centre, width = 40, 400
    batch = read(hounsfield, Preprocess(range=(centre - width / 2, centre + width / 2), mean=(0.0,), std=(1.0,)))
    assert np.allclose(batch.inputs[0, 0], ((hounsfield + 160) / 400).clip(0, 1), atol=1e-6)


def test_only_a_dark_image_without_a_range_is_stretched_for_drawing_and_named() -> None:
    prepare = replace(TWELVE, range=None)
    with pytest.warns(saliency.errors.SaliencyWarning, match=DARK) as caught:
        (dark,) = read(SCAN, prepare).frames
    (bright,) = read(SCAN + np.uint16(6000), prepare).frames  # a maximum of 9025
    assert len(caught) == 1
    assert dark is not None
    assert bright is not None
    assert dark.image.getextrema() == ((0, 255),) * 3
    assert bright.image.getextrema()[0] == (round(6900 / 257), round(9025 / 257))
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.LazyLinear(3)).eval()
    model(torch.zeros(1, 3, 32, 32))
    explanation = saliency.VanillaGradient(model, preprocess=TWELVE).attribute(SCAN, 1)
    own, copy = (saliency.overlay(explanation, image, opacity=0) for image in (None, SCAN))  # without a warning
    assert own.tobytes() == copy.tobytes()  # in the range of the preprocessing
    with pytest.warns(saliency.errors.SaliencyWarning, match=DARK):
        explanation = saliency.VanillaGradient(model, preprocess=prepare).attribute(SCAN, 1)
    assert np.ptp(np.asarray(saliency.overlay(explanation, SCAN, opacity=0))) == 255


def test_a_function_receives_the_image_in_its_own_mode() -> None:
    modes = []

    def function(image: Image.Image) -> Tensor:
        modes.append(image.mode)
        values = np.asarray(image, np.float32)
        return torch.from_numpy(values.clip(0, 4095) / 4095)[None, 4:36, 10:42]

    batch = read(SCAN, function)
    assert set(modes) == {"I;16"}
    assert np.allclose(batch.inputs[0, 0], SCAN[4:36, 10:42] / 4095)
    (frame,) = batch.frames
    assert frame is not None
    assert frame.box == pytest.approx((10, 4, 42, 36), abs=1)
    assert frame.image.getextrema() == ((0, 255),) * 3


@pytest.mark.parametrize(
    ("scan", "mode", "ends"),
    [
        (SCAN.astype(np.float32) / 3025, "F", (0, 1)),
        (SCAN.astype(np.int16) - 2000, "I", (-2000, 4095)),
        (SCAN.astype(np.int32) * 100, "I", (0, 409500)),
    ],
)
def test_a_function_receives_floats_and_other_integers_which_are_drawn_in_their_own_range(
    scan: Any, mode: str, ends: tuple[float, float]
) -> None:
    modes = []

    def function(image: Image.Image) -> Tensor:
        modes.append(image.mode)
        return torch.from_numpy(np.array(image, np.float32).clip(*ends))[None, 4:36, 10:42]

    batch = read(scan, function)
    assert set(modes) == {mode}
    assert np.allclose(batch.inputs[0, 0], scan[4:36, 10:42])
    (frame,) = batch.frames
    assert frame is not None
    assert frame.box == pytest.approx((10, 4, 42, 36), abs=1)
    assert frame.image.getextrema() == ((0, 255),) * 3
    assert read(np.full_like(scan, scan.max()), function).frames[0].image.getextrema() == ((0, 0),) * 3  # type: ignore[union-attr]
    with pytest.raises(ImageError, match="state the range of the pixels"):
        read(scan, replace(TWELVE, range=None))


def test_an_image_processor_of_hugging_face_receives_8_bits() -> None:
    processor: Any = Processor()
    with pytest.warns(saliency.errors.SaliencyWarning, match=DARK) as caught:
        batch = read(SCAN, processor)
    assert len(caught) == 1
    assert batch.inputs.shape == (1, 3, 16, 16)
    assert batch.frames[0] is not None
    assert batch.frames[0].box == pytest.approx((0, 0, 60, 40), abs=1)
    assert torch.equal(read(SCAN * np.uint16(16), processor).inputs, as_preprocess(processor)(drawn(SCAN * 16.0))[None])


def drawn(values: Any) -> Image.Image:
    return Image.fromarray(np.uint8(values / 257 + 0.5)).convert("RGB")


def test_nan_in_an_image_is_refused() -> None:
    values = SCAN.astype(np.float32)
    values[3, 3] = np.nan
    with pytest.raises(saliency.errors.NonFiniteError, match="holds NaN"):
        read(values, TWELVE)
