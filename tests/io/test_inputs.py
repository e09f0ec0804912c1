"""Whatever is handed over becomes an upright RGB picture or an ImageError that says why not."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import struct
import tempfile
import threading
import warnings
import zlib
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, ImageFile
from torch import Tensor

from saliency.errors import ImageError, ModelError, NonFiniteError, SaliencyWarning
from saliency.io.inputs import Bytes, open_image, read
from saliency.io.preprocess import Preprocess, drawable
from saliency.model.call import call

Path = pathlib.Path
PLAIN = Preprocess((8, 8), (8, 8), (0.0,) * 3, (1.0,) * 3)
IMAGENET = Preprocess((8, 8), 8)
OPEN_FILES = Path("/proc/self/fd")  # where there is such a thing


def gradient(width: int = 24, height: int = 16) -> Image.Image:
    red, green = np.meshgrid(np.arange(width) * 10, np.arange(height) * 15)
    return Image.fromarray(np.stack([red, green, 255 - red], 2).astype(np.uint8))


def pixels(picture: Image.Image) -> Any:
    return np.asarray(picture).astype(int)


def saved(folder: Path, picture: Image.Image, name: str = "a.png", **options: Any) -> Path:
    path = folder / name
    picture.save(path, **options)
    return path


# What is accepted


@pytest.mark.parametrize("kind", ["png", "bmp", "gif", "ppm", "tiff", "webp", "jp2", "jpeg", "avif"])
def test_every_format_opens_whatever_the_file_is_called(tmp_path: Path, kind: str) -> None:
    options: dict[str, dict[str, Any]] = {"webp": {"lossless": True}, "jpeg": {"quality": 98, "subsampling": 0}}
    path = saved(tmp_path, gradient(), f"a.{kind}", **options.get(kind, {}))
    unnamed = path.rename(tmp_path / "anything.txt")
    picture = open_image(unnamed)
    assert type(picture) is Image.Image
    assert (picture.mode, picture.size) == ("RGB", (24, 16))
    assert np.abs(pixels(picture) - pixels(gradient())).max() <= {"jpeg": 12, "avif": 60, "gif": 60}.get(kind, 0)
    assert torch.equal(read(str(unnamed), PLAIN).inputs, read(unnamed, PLAIN).inputs)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "tiff", "webp"])
def test_exif_orientation_is_applied_once(tmp_path: Path, orientation: int, kind: str) -> None:
    turns = {
        1: [],
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.ROTATE_90, Image.Transpose.FLIP_TOP_BOTTOM],
        6: [Image.Transpose.ROTATE_90],
        7: [Image.Transpose.ROTATE_270, Image.Transpose.FLIP_TOP_BOTTOM],
        8: [Image.Transpose.ROTATE_270],
    }[orientation]
    stored = gradient()
    for turn in turns:  # as a camera held askew stores it
        stored = stored.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(tmp_path, stored, f"a.{kind}", exif=exif, **({"quality": 98} if kind == "jpeg" else {}))
    upright = open_image(path)
    assert upright.size == (24, 16)
    assert np.abs(pixels(upright) - pixels(gradient())).max() <= (40 if kind in ("jpeg", "webp") else 0)
    assert open_image(upright).tobytes() == upright.tobytes()
    with Image.open(path) as theirs:
        assert open_image(theirs).tobytes() == upright.tobytes()
        assert kind == "tiff" or theirs.size == stored.size  # Pillow turns a TIFF while it loads


def test_an_orientation_told_by_xmp_is_applied(tmp_path: Path) -> None:
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    assert open_image(saved(tmp_path, gradient(), "a.jpg", xmp=xmp)).size == (16, 24)
    exif = Image.Exif()
    exif[0x0110] = "camera"
    assert open_image(saved(tmp_path, gradient(), "b.jpg", xmp=xmp, exif=exif)).size == (16, 24)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.filterwarnings("ignore")  # Pillow's own
def test_an_image_with_damaged_exif_data_is_read(tmp_path: Path, order: str) -> None:
    mark = b"II" if order == "<" else b"MM"
    entries = struct.pack(f"{order}HHLHH", 0x0112, 3, 1, 8, 0) + struct.pack(f"{order}HHLL", 0x010E, 2, 500, 9999)
    exif = b"Exif\0\0" + mark + struct.pack(f"{order}HLH", 42, 8, 9) + entries
    path = saved(tmp_path, gradient(), "a.jpg", exif=exif)
    assert open_image(path).size == (16, 24)
    for length in range(len(exif)):
        assert open_image(saved(tmp_path, gradient(), "b.jpg", exif=exif[:length])).size in {(24, 16), (16, 24)}


def modes() -> dict[str, tuple[Image.Image, tuple[int, int, int]]]:
    """One-colour pictures of each mode, and the colour that they must have."""
    size = (5, 4)
    palette = Image.new("P", size, 1)
    palette.putpalette([0, 0, 0, 200, 100, 50])
    see_through = palette.copy()
    see_through.info["transparency"] = 1
    half = palette.copy()
    half.info["transparency"] = bytes([255, 128])
    keyed = Image.new("RGB", size, (9, 8, 7))
    keyed.info["transparency"] = (9, 8, 7)
    grey_keyed = Image.new("L", size, 9)
    grey_keyed.info["transparency"] = 9
    return {
        "1": (Image.new("1", size, 1), (255, 255, 255)),
        "L": (Image.new("L", size, 77), (77, 77, 77)),
        "L, one grey transparent": (grey_keyed, (255, 255, 255)),
        "LA": (Image.new("LA", size, (0, 51)), (204, 204, 204)),
        "La": (Image.new("LA", size, (0, 51)).convert("La"), (204, 204, 204)),
        "P": (palette, (200, 100, 50)),
        "P, one colour transparent": (see_through, (255, 255, 255)),
        "P, alpha": (half, (227, 177, 152)),
        "PA": (palette.convert("PA"), (200, 100, 50)),
        "RGB, one colour transparent": (keyed, (255, 255, 255)),
        "RGBX": (Image.new("RGBX", size, (1, 2, 3, 4)), (1, 2, 3)),
        "RGBA": (Image.new("RGBA", size, (255, 0, 100, 51)), (255, 204, 224)),
        "RGBA, invisible": (Image.new("RGBA", size, (1, 2, 3, 0)), (255, 255, 255)),
        "RGBa": (Image.new("RGBA", size, (255, 0, 100, 51)).convert("RGBa"), (255, 204, 224)),
        "CMYK": (Image.new("CMYK", size, (0, 255, 255, 0)), (255, 0, 0)),
        "YCbCr": (Image.new("YCbCr", size, (128, 128, 128)), (128, 128, 128)),
        "HSV": (Image.new("HSV", size, (0, 0, 90)), (90, 90, 90)),
        "LAB": (Image.new("LAB", size, (0, 128, 128)), (0, 0, 0)),
        "I;16": (Image.fromarray(np.full((4, 5), 257 * 40, np.uint16)), (40, 40, 40)),
        "I;16, white": (Image.fromarray(np.full((4, 5), 65535, np.uint16)), (255, 255, 255)),
        "I;16B": (Image.frombytes("I;16B", size, struct.pack(">H", 257 * 40) * 20), (40, 40, 40)),
        "I": (Image.new("I", size, 257 * 40), (40, 40, 40)),
    }


@pytest.mark.parametrize("name", modes())
def test_every_mode_of_pillow_becomes_rgb_over_white(name: str) -> None:
    picture, colour = modes()[name]
    before = (picture.mode, picture.tobytes(), dict(picture.info))
    opened = drawable(open_image(picture))
    assert (opened.mode, opened.size) == ("RGB", (5, 4))
    assert np.abs(pixels(opened) - np.array(colour)).max() <= 2
    assert (picture.mode, picture.tobytes(), picture.info) == before


@pytest.mark.parametrize("name", ["I;16", "LA", "RGBA", "P", "1", "CMYK"])
def test_modes_survive_a_file(tmp_path: Path, name: str) -> None:
    picture, colour = modes()[name]
    path = saved(tmp_path, picture, "a.tiff" if name == "CMYK" else "a.png")
    assert np.abs(pixels(drawable(open_image(path))) - np.array(colour)).max() <= 2


@pytest.mark.parametrize("kind", ["gif", "png", "webp", "tiff", "mpo"])
def test_of_an_animation_the_first_frame_is_taken(tmp_path: Path, kind: str) -> None:
    frames = [Image.new("RGB", (20, 12), colour) for colour in ("red", "lime", "blue")]
    path = saved(tmp_path, frames[0], f"a.{kind}", save_all=True, append_images=frames[1:])
    is_animation = kind not in ("tiff", "mpo")  # pages, and views of one photo
    with pytest.warns(SaliencyWarning, match="first frame") if is_animation else contextlib.nullcontext():
        assert np.abs(pixels(open_image(path)) - (255, 0, 0)).max() <= 5


@pytest.mark.parametrize(
    "make",
    [
        lambda a: a,
        lambda a: a.astype(np.uint16) * 257,
        lambda a: np.dstack([a, np.full(a.shape[:2], 255, np.uint8)]),
        lambda a: np.asfortranarray(a),
        lambda a: a[::-1][::-1],
        lambda a: torch.from_numpy(a).permute(2, 0, 1),
        lambda a: torch.from_numpy(a).permute(2, 0, 1).contiguous(),
        lambda a: Image.fromarray(a),
    ],
)
def test_arrays_and_uint8_tensors_are_pictures(make: Callable[[Any], Any]) -> None:
    image = make(np.asarray(gradient()).copy())
    assert open_image(image).tobytes() == gradient().tobytes()


def test_16_bits_of_a_colour_are_rounded_to_8() -> None:
    values = np.arange(0, 65536, 41).astype(np.uint16).reshape(41, 13, 3)
    assert (pixels(open_image(values)) == np.rint(values / 257)).all()


def test_a_dark_colour_array_of_16_bits_is_named() -> None:
    values = np.arange(0, 4096).astype(np.uint16).reshape(32, 32, 4)
    values[..., 3] = 65535  # opaque
    with pytest.warns(SaliencyWarning, match=r"below 8191 of 65535.*such as 16 \* array for 12 bits") as caught:
        open_image(values)
    assert len(caught) == 1
    open_image(16 * values)  # without a word


@pytest.mark.parametrize("shape", [(16, 24), (16, 24, 1)])
def test_grey_arrays_are_pictures(shape: tuple[int, ...]) -> None:
    assert (pixels(open_image(np.full(shape, 9, np.uint8))) == 9).all()
    assert (pixels(open_image(torch.full((1, 16, 24), 9, dtype=torch.uint8))) == 9).all()


def test_the_opened_picture_is_the_callers_own() -> None:
    given = gradient()
    opened = open_image(given)
    opened.putpixel((0, 0), (1, 2, 3))
    assert given.tobytes() == gradient().tobytes()
    array = np.asarray(gradient()).copy()
    opened = open_image(array)
    array[:] = 0
    assert opened.tobytes() == gradient().tobytes()


def test_the_file_is_closed(tmp_path: Path) -> None:
    path = saved(tmp_path, gradient(), "a.tiff", compression="tiff_lzw")
    kept = len(list(OPEN_FILES.iterdir())) if OPEN_FILES.exists() else None
    picture = open_image(path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ImageError):
        open_image(path)
    if kept is not None:
        assert len(list(OPEN_FILES.iterdir())) == kept
    assert picture.tobytes() == gradient().tobytes()


# What is refused


def bomb() -> bytes:
    """A PNG of 60000 x 60000 pixels in a few bytes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">L", len(data)) + name + data + struct.pack(">L", zlib.crc32(name + data))

    header = struct.pack(">LLBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 9)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"hello, this is text", "is not an AVIF, BMP, GIF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an AVIF"),
        (
            b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
            "WebP image but HEIC, the photo format of many phones; save it as JPEG or PNG",
        ),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "is not an AVIF"),
        (b'\n<svg xmlns="http://www.w3.org/2000/svg"/>', "WebP image but XML, as SVG drawings are; save it as PNG"),
        (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "but XML"),
        (b"\x89PNG\r\n\x1a\n", "is damaged"),
        (b"\xff\xd8\xff\xe0", "is damaged"),
        (b"BM" + bytes(9), "is damaged"),
        (b"II*\0\xff\xff\xff\xff", "is damaged"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "is damaged"),
        (b"\0\0\0\x20ftypavif" + bytes(20), "is damaged"),
        (b"P6\n-3 4\n255\n", "of a kind that Pillow cannot read"),
        (b"GIF89a\0\0\0\0\0\0\0", "is damaged"),
        (bomb(), "has 60000 x 60000 pixels, more than the limit of 178956970"),
    ],
    ids=range(16),
)
def test_a_file_that_is_no_picture_is_named_with_the_reason(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=words) as caught:
        open_image(path)
    assert "cat.png" in str(caught.value)


@pytest.mark.parametrize("kind", ["png", "bmp", "gif", "ppm", "tiff", "webp", "jp2", "jpeg", "avif"])
def test_a_truncated_file_is_a_picture_or_an_image_error_and_half_of_one_is_an_error(tmp_path: Path, kind: str) -> None:
    content = saved(tmp_path, gradient(64, 48).resize((200, 150)), f"a.{kind}").read_bytes()
    path = tmp_path / "cut"
    for length in range(0, len(content), max(1, len(content) // 60)):
        path.write_bytes(content[:length])
        with contextlib.suppress(ImageError):
            assert open_image(path).mode == "RGB"
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ImageError, match="damaged"):
        open_image(path)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "x.png"
    folder.mkdir()
    with pytest.raises(ImageError, match="a folder"):
        open_image(folder)
    fifo = tmp_path / "fifo.png"
    os.mkfifo(fifo)
    with pytest.raises(ImageError, match="not a regular file"):
        open_image(fifo)
    with pytest.raises(ImageError, match="not a regular file"):
        open_image("/dev/zero")


@pytest.mark.parametrize("name", ["none.png", "", "a\0b.png", "x" * 5000])
def test_a_path_that_cannot_be_opened_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ImageError, match=r"cannot be read|folder"):
        open_image(name)
    with pytest.raises(ImageError, match=r"cannot be read: No such file"):
        open_image(tmp_path / "none.png")


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, gradient())

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ImageError, match=r"a\.png' cannot be read: Permission denied"):
        open_image(path)


def test_the_limit_holds_for_whatever_is_handed_over(tmp_path: Path) -> None:
    path = saved(tmp_path, gradient())
    assert open_image(path, max_pixels=24 * 16).size == (24, 16)
    for image in (path, gradient(), np.asarray(gradient()), torch.zeros(3, 16, 24, dtype=torch.uint8)):
        with pytest.raises(ImageError, match="24 x 16 pixels, more than the limit of 383"):
            open_image(image, max_pixels=383)


def test_pillows_globals_and_the_warning_filters_stay_as_they_are_and_are_not_needed(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(bomb())
    good = saved(tmp_path, gradient())
    filters = list(warnings.filters)
    seen: list[str] = []

    def work() -> None:
        for _ in range(20):
            open_image(good)
            try:
                open_image(path)
            except ImageError as error:
                seen.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 80
    assert warnings.filters == filters
    assert Image.MAX_IMAGE_PIXELS == 89_478_485
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.zeros((3, 16, 24), np.uint8), r"transpose\(1, 2, 0\)"),
        (np.zeros((16, 24, 3)), "float64.*uint8 in 0..255"),
        (np.zeros((16, 24, 3), bool), "type bool"),
        (np.zeros((2, 16, 24, 3), np.uint8), r"list\(array\)"),
        (np.zeros((16, 24, 2), np.uint8), "is not an image"),
        (np.zeros((0, 24, 3), np.uint8), "no pixels"),
        (np.zeros(5, np.uint8), "is not an image"),
        (np.array("cat.png"), "is not an image"),
        (torch.zeros(16, 24, 3, dtype=torch.uint8), r"permute\(2, 0, 1\)"),
        (torch.zeros(16, 24, dtype=torch.uint8), "is not an image"),
        (torch.zeros(3, 0, 24, dtype=torch.uint8), "no pixels"),
        (torch.zeros(3, 16, 24), "normalised input"),
        (torch.zeros(3, 16, 24, dtype=torch.int64), "torch.int64"),
        (Image.new("F", (4, 4)), "no agreed range"),
        (Image.new("I", (4, 4), -5), "in -5..-5, expected 0..65535"),
        (Image.new("I", (4, 4), 70000), "70000"),
        (Image.new("RGB", (0, 4)), "no pixels: it is 0 x 4"),
        (None, "NoneType is not an image"),
        (7, "int is not an image"),
        (b"cat.png", "the bytes. is not an AVIF"),
    ],
)
def test_what_is_no_image_is_refused_in_words(image: Any, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        PLAIN(open_image(image))


# The batch


def test_one_image_and_a_list_of_them_make_a_batch_with_frames(tmp_path: Path) -> None:
    path = saved(tmp_path, gradient())
    one = read(path, IMAGENET)
    assert one.inputs.shape == (1, 3, 8, 8)
    assert one.frames[0] is not None
    assert one.frames[0].box == IMAGENET.box((24, 16))
    assert one.frames[0].image.tobytes() == gradient().tobytes()
    array = np.asarray(gradient())
    many = read([path, str(path), gradient(), array, torch.from_numpy(array.copy()).permute(2, 0, 1)], IMAGENET)
    assert torch.equal(many.inputs, one.inputs.expand(5, -1, -1, -1))
    assert len(many.frames) == 5


def test_a_uint8_batch_is_that_many_pictures() -> None:
    batch = torch.randint(0, 256, (3, 3, 20, 30), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    result = read(batch, IMAGENET)
    assert torch.equal(result.inputs, torch.cat([read(each, IMAGENET).inputs for each in batch]))
    assert [frame.image.size for frame in result.frames if frame] == [(30, 20)] * 3


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 3, 8, 8), (1, 8, 8), (2, 5, 9, 7), (1, 1, 1)])
def test_a_float_tensor_is_passed_on_uncopied_detached_and_unchanged(shape: tuple[int, ...]) -> None:
    given = torch.randn(shape).requires_grad_()
    kept = given.detach().clone()
    result = read(given)
    assert result.inputs.data_ptr() == given.data_ptr()
    assert not result.inputs.requires_grad
    assert given.requires_grad
    assert torch.equal(given, kept)
    assert result.inputs.shape == ((1, *shape) if len(shape) == 3 else shape)
    assert result.frames == (None,) * len(result.inputs)
    assert read(given, IMAGENET, like=torch.zeros(1)).inputs.data_ptr() == given.data_ptr()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_one_pass_over_a_float_tensor_and_one_transfer(memory_format: torch.memory_format) -> None:
    given = torch.randn(4, 3, 8, 8).to(memory_format=memory_format)
    with torch.profiler.profile() as seen:
        read(given)
    names = [event.name for event in seen.events() or ()]
    assert names.count("aten::aminmax") == 4
    assert not {"aten::clone", "aten::contiguous", "aten::copy_", "aten::item"} & set(names)


def test_the_batch_takes_the_type_of_the_tensor_it_is_to_be_like() -> None:
    for like in (torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.bfloat16)):
        assert read(gradient(), IMAGENET, like=like).inputs.dtype == like.dtype
        assert read(torch.randn(3, 8, 8), like=like).inputs.dtype == like.dtype
    assert read(gradient(), IMAGENET, like=torch.zeros(1, dtype=torch.int8)).inputs.dtype == torch.float32
    mixed = read([gradient(), torch.randn(2, 3, 8, 8, dtype=torch.float64)], IMAGENET)
    assert mixed.inputs.dtype == torch.float64
    assert mixed.frames[0] is not None
    assert mixed.frames[1:] == (None, None)


BYTES = torch.linspace(0, 255, 192).reshape(3, 8, 8)


def towards(black: float, white: float) -> Callable[[Image.Image], Tensor]:
    return lambda picture: black + (white - black) * torch.full((3, 8, 8), picture.getpixel((0, 0))[0] / 255)  # type: ignore[index]


@pytest.mark.parametrize(
    ("values", "preprocess", "words"),
    [
        (BYTES, None, r"0\.\.255.*std=\(1 / 255,\) \* 3"),
        (BYTES, IMAGENET, r"0\.\.255, but preprocessing gives -2\.12\.\.2\.64"),
        (BYTES, Preprocess(mean=(0, 0, 0), std=(1 / 100,) * 3), r"0\.\.255"),
        (BYTES, towards(-1, 1), r"0\.\.255"),
        (BYTES / 255, IMAGENET, r"0\.\.1, but preprocessing gives -2\.12\.\.2\.64.*std=\(1, 1, 1\)"),
        (BYTES / 255, towards(-1, 1), r"0\.\.1, but preprocessing gives -1\.\.1"),
        (torch.stack([BYTES - 100, BYTES / 255, BYTES]), IMAGENET, "image 1 "),
    ],
)
def test_a_float_tensor_that_looks_like_a_picture_is_passed_on_with_one_warning(
    values: Tensor, preprocess: Any, words: str
) -> None:
    with pytest.warns(SaliencyWarning, match=words) as caught:
        batch = read(values, preprocess)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert torch.equal(batch.inputs, values.reshape(batch.inputs.shape))


@pytest.mark.parametrize(
    ("values", "preprocess"),
    [
        (BYTES, Preprocess(mean=(0, 0, 0), std=(1 / 255,) * 3)),
        (BYTES, towards(0, 255)),
        (BYTES / 255, None),
        (BYTES / 255, Preprocess(mean=(0, 0, 0), std=(1, 1, 1))),
        (BYTES / 255, towards(0, 1)),
        (BYTES, lambda x: (x - 0.5) / 0.25),  # a network's own method `preprocess` may take tensors only
        (BYTES / 255, lambda x: (x - 0.5) / 0.25),
        (torch.zeros(3, 8, 8), IMAGENET),  # the mean colour
        (torch.full((3, 8, 8), 0.5), IMAGENET),
        (BYTES - 100, IMAGENET),
        (torch.linspace(0, 5000, 64).reshape(1, 8, 8), None),
        (torch.linspace(0, 1, 128).reshape(2, 8, 8), IMAGENET),
    ],
)
def test_a_float_tensor_that_may_be_the_models_own_input_is_passed_on_without_a_word(
    values: Tensor, preprocess: Any
) -> None:
    assert torch.equal(read(values, preprocess).inputs[0], values)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_are_refused_with_the_image_they_are_in(value: float) -> None:
    tensor = torch.randn(3, 3, 8, 8)
    tensor[2, 1, 4, 4] = value
    with pytest.raises(NonFiniteError, match="image 2 holds NaN"):
        read(tensor)
    with pytest.raises(NonFiniteError, match="image 3 holds NaN"):
        read([torch.randn(3, 8, 8), tensor])


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([], "there is no image"),
        ((), "there is no image"),
        (torch.zeros(0, 3, 8, 8), "is empty"),
        (torch.zeros(0, 3, 8, 8, dtype=torch.uint8), "there is no image"),
        (torch.zeros(3, 0, 8), "is empty"),
        (torch.zeros(8, 8), r"expected \(C, H, W\), \(N, C, H, W\) or"),
        (torch.zeros(1, 1, 1, 3, 8, 8), r"shape \(1, 1, 1, 3, 8, 8\)"),
        (torch.zeros(3, 8, 8, dtype=torch.int32), "torch.int32"),
        (torch.zeros(3, 8, 8, dtype=torch.bool), "torch.bool"),
        (torch.zeros(3, 8, 8, dtype=torch.complex64), "torch.complex64"),
        (torch.zeros(3, 8, 8).to_sparse(), "sparse"),
        (torch.zeros(3, 8, 8, device="meta"), "meta"),
        (torch.zeros(3, 8, 8).to(torch.float8_e4m3fn), "float8"),
        (np.zeros((3, 8, 8), np.float32), "float32"),
        (None, "NoneType is not an image"),
        (3, "int is not an image"),
        ([gradient(), 3], "image 1: int is not an image"),
        ([[gradient()]], "one flat list"),
        ((gradient() for _ in range(2)), "generator is not an image.*list"),
        ([torch.zeros(3, 8, 8), torch.zeros(3, 9, 8)], "image 0 is 3 x 8 x 8 and image 1 is 3 x 9 x 8"),
        ([torch.zeros(2, 3, 8, 8), gradient(), torch.zeros(1, 8, 8)], "and image 3 is 1 x 8 x 8"),
        ([gradient(), "none.png"], "image 1: 'none.png' cannot be read"),
    ],
)
def test_what_makes_no_batch_is_refused_in_words(images: Any, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        read(images, IMAGENET)


def test_a_picture_without_preprocessing_is_an_error_that_names_the_cure() -> None:
    with pytest.raises(ImageError, match=r"as preprocess=: .*saliency\.Preprocess\(size=..., "):
        read(gradient())


def test_a_subclass_of_tensor_comes_out_as_a_plain_one() -> None:
    given = torch.nn.Parameter(torch.randn(3, 8, 8))
    assert type(read(given).inputs) is Tensor


def test_in_memory_and_on_disk_are_the_same_picture(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    gradient().save(buffer, "JPEG")
    path = tmp_path / "a.jpg"
    path.write_bytes(buffer.getvalue())
    assert open_image(Image.open(buffer)).tobytes() == open_image(path).tobytes()


# Open files and bytes, and what processors return.


def test_the_features_of_a_processor_are_the_models_input() -> None:
    values = torch.randn(2, 3, 8, 8)
    for features in ({"pixel_values": values}, UserDict(pixel_values=list(values.numpy()))):
        assert torch.equal(read(features, PLAIN).inputs, values)
    with pytest.raises(ImageError, match=r"UserDict that also has pixel_mask; .*forward_args="):
        read(UserDict(pixel_values=values, pixel_mask=torch.ones(2, 8, 8)))
    with pytest.raises(ImageError, match="dict is not an image"):
        read({"image": values})


def encoded() -> bytes:
    buffer = io.BytesIO()
    gradient().save(buffer, "PNG")
    return buffer.getvalue()


def test_bytes_and_open_files_are_images_and_files_stay_as_they_were(tmp_path: Path) -> None:
    content = encoded()
    (tmp_path / "a.png").write_bytes(content)
    likes: tuple[Bytes, ...] = (content, bytearray(content), memoryview(content))
    for image in likes:
        assert np.array_equal(pixels(open_image(image)), pixels(gradient()))
    with (
        (tmp_path / "a.png").open("rb") as file,
        tempfile.SpooledTemporaryFile() as upload,
        io.BytesIO(content) as memory,
    ):
        upload.write(content)  # its position is now at its end
        file.seek(7)
        batch = read([file, upload, memory, content], PLAIN)
        assert [file.tell(), upload.tell(), memory.tell()] == [7, len(content), 0]
        assert [file.closed, upload.closed, memory.closed] == [False] * 3
    expected = read(gradient(), PLAIN).inputs
    assert torch.equal(batch.inputs, expected.expand(4, -1, -1, -1))
    assert torch.equal(read(content, PLAIN).inputs, expected)


def test_a_stream_that_cannot_be_rewound_is_read_once() -> None:
    ends = os.pipe()
    with os.fdopen(ends[1], "wb") as writer:
        writer.write(encoded())
    with os.fdopen(ends[0], "rb") as stream:
        assert np.array_equal(pixels(open_image(stream)), pixels(gradient()))


def test_files_that_are_no_images_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no image")
    closed = (tmp_path / "a.txt").open("rb")
    closed.close()
    with (tmp_path / "a.txt").open() as text, (tmp_path / "a.txt").open("rb") as binary:
        for file, message in (
            (text, "a.txt' cannot be read.*expected a file open in binary mode"),
            (closed, "a.txt' cannot be read.*: I/O operation on closed file"),
            (binary, "a.txt' is not an AVIF"),
            (b"", "'the bytes' is empty"),
            (io.BytesIO(b"GIF89a"), "'BytesIO' is damaged"),
        ):
            with pytest.raises(ImageError, match=message):
                open_image(file)  # type: ignore[arg-type] # a text file


@pytest.mark.parametrize("width", [1, 3, 4])
def test_a_batch_of_narrow_images_is_taken_and_a_refusing_model_gets_the_hint(width: int) -> None:
    x = torch.randn(2, 8, 8, width)
    assert torch.equal(read(x).inputs, x)
    assert torch.equal(read(x[0]).inputs, x[:1])
    with pytest.raises(ModelError, match=r"looks like \(N, H, W, C\): pass x.permute"):
        call(torch.nn.Conv2d(3, 1, 1), (x,))


def test_a_healthy_file_that_pillow_cannot_read_is_to_be_converted() -> None:
    file = io.BytesIO()
    Image.new("F", (4, 3)).save(file, "TIFF")
    bits = b"\x02\x01\x03\x00\x01\x00\x00\x00"
    assert bits + b"\x20" in file.getvalue()
    deep = file.getvalue().replace(bits + b"\x20", bits + b"\x40")  # 64 bits
    with pytest.raises(
        ImageError, match=r"of a kind that Pillow cannot read \(unknown pixel mode\); convert it to PNG"
    ):
        open_image(deep)
    with pytest.raises(ImageError, match="is damaged: "):
        open_image(file.getvalue()[:-8])
    with pytest.raises(ImageError, match="but HEIC"):
        open_image(b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic")


# Colour profiles


def profile(space: bytes, pcs: bytes = b"XYZ ", **tags: bytes) -> bytes:
    """Return an ICC profile of version 2 with these tags, by default with a gamma of 2.2."""
    curve = b"curv" + struct.pack(">4xIH2x", 1, round(2.2 * 256))
    name = b"desc" + struct.pack(">4xI5s", 5, b"made\0") + bytes(83)
    white = b"XYZ " + struct.pack(">4x3i", 63190, 65536, 54061)
    curves = dict.fromkeys([b"kTRC"] if space == b"GRAY" else [b"rTRC", b"gTRC", b"bTRC"], curve)
    parts = {b"desc": name, b"wtpt": white, **curves, **{tag.encode(): data for tag, data in tags.items()}}
    table, data = struct.pack(">I", len(parts)), b""
    for tag, part in parts.items():
        table += tag + struct.pack(">II", 132 + 12 * len(parts) + len(data), len(part))
        data += part + bytes(-len(part) % 4)
    date = struct.pack(">6H", 2026, 1, 1, 0, 0, 0)
    words = 128 + len(table) + len(data), 0x02100000, b"mntr", space, pcs, date, b"acsp"
    head = struct.pack(">I4xI4s4s4s12s4s", *words)
    return head.ljust(68, b"\0") + struct.pack(">3i", 63190, 65536, 54061) + bytes(48) + table + data


def primary(*xyz: float) -> bytes:
    return b"XYZ " + struct.pack(">4x3i", *(round(value * 65536) for value in xyz))


P3 = profile(  # the primaries of Display P3, adapted to D50
    b"RGB ",
    rXYZ=primary(0.5151, 0.2412, -0.0011),
    gXYZ=primary(0.2920, 0.6922, 0.0419),
    bXYZ=primary(0.1571, 0.0666, 0.7841),
)
GREY = profile(b"GRAY")


def in_srgb(image: Image.Image, icc: bytes) -> Any:
    """Return the pixels of an image as Pillow converts them."""
    converted = ImageCms.profileToProfile(image, io.BytesIO(icc), ImageCms.createProfile("sRGB"), outputMode="RGB")
    assert converted is not None
    return pixels(converted)


def test_an_image_with_a_profile_is_drawn_in_its_colours_and_the_model_sees_its_pixels(tmp_path: Path) -> None:
    expected = in_srgb(gradient(), P3)
    assert np.abs(expected - pixels(gradient())).max() > 20
    for name in ("a.png", "a.tiff", "a.webp"):
        path = saved(tmp_path, gradient(), name, icc_profile=P3, **{"lossless": True} if name == "a.webp" else {})
        tagged, plain = read(path, PLAIN), read(gradient(), PLAIN)
        assert torch.equal(tagged.inputs, plain.inputs)
        frame = tagged.frames[0]
        assert frame is not None
        assert (pixels(frame.image) == expected).all()
        assert not frame.image.info
        again = read(open_image(path), PLAIN).frames[0]  # as a trust card of a batch reads it
        assert again is not None
        assert (pixels(again.image) == expected).all()


def test_a_grey_image_is_drawn_by_its_profile(tmp_path: Path) -> None:
    path = saved(tmp_path, gradient().convert("L"), icc_profile=GREY)
    expected = in_srgb(gradient().convert("L"), GREY)
    assert np.abs(expected - pixels(gradient().convert("L").convert("RGB"))).max() > 3
    assert (pixels(drawable(open_image(path))) == expected).all()


def test_a_cmyk_image_is_drawn_from_its_inks(tmp_path: Path) -> None:
    inks, ramp = gradient().convert("CMYK"), bytes(range(256))
    head = struct.pack(">4s4x4B9i", b"mft1", 4, 3, 2, 0, *(65536 * (i in (0, 4, 8)) for i in range(9)))
    lab = [(255 >> mix.bit_count(), 128 + 9 * (mix & 4), 128 - 5 * (mix & 3)) for mix in range(16)]
    icc = profile(b"CMYK", b"Lab ", A2B0=head + 4 * ramp + bytes(sum(lab, ())) + 3 * ramp)
    expected = in_srgb(inks, icc)
    path = saved(tmp_path, inks, "a.tiff", icc_profile=icc)
    for image in (open_image(path), open_image(open_image(path))):
        assert (pixels(image) == pixels(inks.convert("RGB"))).all()
        assert (pixels(drawable(image)) == expected).all()


def test_a_profile_that_cannot_be_used_is_ignored(tmp_path: Path) -> None:
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for icc in (b"damaged", P3[:200], profile(b"CMYK"), srgb):
        drawn = drawable(open_image(saved(tmp_path, gradient(), icc_profile=icc)))
        assert (pixels(drawn) == pixels(gradient())).all()
        assert not drawn.info
