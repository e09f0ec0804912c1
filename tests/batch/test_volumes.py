"""Volumes in files: NIfTI and DICOM series in, maps as NIfTI at the same position out."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

import saliency
from saliency.batch import BatchError, batch
from saliency.cli import main
from saliency.errors import ImageError, NonFiniteError
from saliency.io.inputs import open_image, read
from saliency.io.volumes import read_volume
from tests.batchwork import assert_same, noise, rows

nibabel: Any = pytest.importorskip("nibabel")
pydicom: Any = pytest.importorskip("pydicom")

SIZE = (7, 6, 5)
BRIGHT = (5, 1, 3)  # a voxel
OBLIQUE = np.array(
    [[-1.9, 0.1, 0.3, 20.0], [0.2, 0.7, 0.4, -30.0], [-0.4, -0.2, 2.9, 11.0], [0, 0, 0, 1]]
)  # the first axis descends to the left, as in many files
STRAIGHT = np.diag([2.0, 3.0, 4.0, 1.0])


class Squares(nn.Module):
    """Scores: the sum of the squares, and the mean. Gradient x input of the first is twice the squares."""

    preprocess: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        volumes = self.weight * x
        return torch.stack([volumes.square().flatten(1).sum(1), volumes.flatten(1).mean(1)], 1)


def dark(*channels: int, size: Sequence[int] = SIZE) -> NDArray[np.float32]:
    """A dark volume with a bright voxel."""
    values = np.random.default_rng(0).uniform(0, 0.1, (*size, *channels)).astype(np.float32)
    values[BRIGHT] = 1
    return values


def write_nifti(path: Path, affine: NDArray[np.float64] = STRAIGHT, *channels: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(dark(*channels), affine), path)
    return path


def write_series(folder: Path, numbers: Sequence[int] = (3, 0, 4, 1, 2), series: str = "1.2.3") -> Path:
    """Write slices of dark() in file order `numbers`, in Hounsfield units of slope 2 and intercept -1024.

    Columns run to the patient's back, rows to the left and down, so that the volume is oblique.
    """
    folder.mkdir(parents=True, exist_ok=True)
    across, down = np.array([0, 1, 0]), np.array([0.8, 0, -0.6])
    for name, k in enumerate(numbers):
        file = pydicom.Dataset()
        file.file_meta = pydicom.dataset.FileMetaDataset()
        file.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        file.SOPClassUID, file.SOPInstanceUID = pydicom.uid.CTImageStorage, f"1.2.3.{k}"
        file.SeriesInstanceUID, file.InstanceNumber = series, 100 - k
        file.Columns, file.Rows = SIZE[:2]
        file.PixelSpacing = [2.5, 0.5]  # from row to row, then from column to column
        file.ImageOrientationPatient = [*across, *down]
        file.ImagePositionPatient = [*(np.array([10.0, 20, 30]) + 3 * k * np.cross(across, down)).round(6)]
        file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
        file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = 16, 16, 15, 0
        file.RescaleSlope, file.RescaleIntercept = 2, -1024
        file.PixelData = (dark()[:, :, k].T * 1000 + 512).astype(np.uint16).tobytes()
        file.save_as(folder / f"{name}{series[-1]}.dcm", enforce_file_format=True)
    return folder


def write_frames(path: Path, kind: str, **changes: Any) -> Path:
    """Write the volume of `write_series` as one file, with its slices in another order if their positions are given."""
    parts = [pydicom.dcmread(file) for file in sorted(write_series(path.parent / "slices").iterdir())]
    shutil.rmtree(path.parent / "slices")
    ordered = sorted(parts, key=lambda part: -part.InstanceNumber)
    file, geometry = parts[0], ("PixelSpacing", "ImageOrientationPatient", "RescaleSlope", "RescaleIntercept")
    if kind == "enhanced":
        file.SharedFunctionalGroupsSequence = [_groups(file, *geometry)]
        file.SharedFunctionalGroupsSequence[0].private_block(0x21, "MAKER", create=True).add_new(1, "LO", "text")
        file.PerFrameFunctionalGroupsSequence = [_groups(part, "ImagePositionPatient") for part in parts]
        for name in (*geometry, "ImagePositionPatient"):
            delattr(file, name)
    else:
        file.ImagePositionPatient = ordered[0].ImagePositionPatient
        if kind == "offsets":
            file.GridFrameOffsetVector, file.SliceThickness = [3 * number for number in range(len(parts))], 9
        else:
            file.SliceThickness = 3
    frames = parts if kind == "enhanced" else ordered
    file.NumberOfFrames, file.PixelData = len(parts), b"".join(part.PixelData for part in frames)
    for name, value in changes.items():
        setattr(file, name, value)
    file.save_as(path, enforce_file_format=True)
    return path


def _groups(part: Any, *names: str) -> Any:
    """A group for each attribute, as of an enhanced file."""
    group = pydicom.Dataset()
    for name, sequence in zip(names, ("PixelMeasures", "PlaneOrientation", "PixelValueTransformation"), strict=False):
        item = pydicom.Dataset()
        for attribute in (name, *(("RescaleIntercept",) if name == "RescaleSlope" else ())):
            setattr(item, attribute, getattr(part, attribute))
        setattr(group, ("PlanePosition" if name == "ImagePositionPatient" else sequence) + "Sequence", [item])
    return group


def world(affine: NDArray[np.float64], index: Sequence[int]) -> list[float]:
    return [round(value, 4) for value in (affine @ [*index, 1])[:3].tolist()]


def explained(source: Path, out: Path, model: nn.Module | None = None, **options: Any) -> Any:
    batch(source, out, model or Squares(), ["input_x_gradient"], target=0, **options)
    return [nibabel.load(out / row["map"]) for row in rows(out) if row["map"]]


def brightest(volume: Any) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(volume.get_fdata().argmax(), volume.shape)))


@pytest.mark.parametrize("affine", [STRAIGHT, OBLIQUE])
@pytest.mark.parametrize("name", ["scan.nii", "scan.nii.gz"])
def test_the_map_of_a_nifti_file_lies_in_the_same_place(tmp_path: Path, affine: NDArray[np.float64], name: str) -> None:
    scan = nibabel.load(write_nifti(tmp_path / "in" / name, affine))
    (heat,) = explained(tmp_path / "in", tmp_path / "out")
    assert rows(tmp_path / "out")[0]["map"] == "maps/scan.input_x_gradient.nii.gz"
    assert np.array_equal(heat.affine, scan.affine)
    assert heat.header.get_data_dtype() == np.float32
    assert heat.shape == SIZE
    assert brightest(heat) == BRIGHT
    assert np.allclose(heat.get_fdata(), 2 * scan.get_fdata() ** 2)


def test_the_map_of_a_dicom_series_lies_in_the_same_place(tmp_path: Path) -> None:
    write_series(tmp_path / "in" / "ct")
    (heat,) = explained(tmp_path / "in", tmp_path / "out", recursive=True)
    assert rows(tmp_path / "out")[0]["map"] == "maps/ct.input_x_gradient.nii.gz"
    assert heat.shape == SIZE
    # By hand: column 5, row 1, slice 3 in LPS; R and A have the other sign.
    left, back, up = (
        np.array([10, 20, 30])
        + 5 * 0.5 * np.array([0, 1, 0])
        + 2.5 * np.array([0.8, 0, -0.6])
        + 9 * np.cross([0, 1, 0], [0.8, 0, -0.6])
    )
    assert world(heat.affine, brightest(heat)) == pytest.approx([-left, -back, up])
    volume = read_volume(tmp_path / "in" / "ct" / "01.dcm")
    assert np.allclose(volume.values[0], 2 * np.floor(dark() * 1000 + 512) - 1024)
    assert heat.get_fdata() == pytest.approx(2 * volume.values[0].numpy() ** 2)


def test_a_series_is_one_entry_as_a_folder_a_pattern_or_a_file(tmp_path: Path) -> None:
    folder = write_series(tmp_path / "ct")
    for number, source in enumerate((folder, folder / "*.dcm", folder / "21.dcm")):
        assert len(explained(source, tmp_path / f"out{number}")) == 1


def test_channels_and_preprocessing_of_another_size(tmp_path: Path) -> None:
    scan = nibabel.load(write_nifti(tmp_path / "scan.nii.gz", OBLIQUE, 2))
    seen = []

    def halve(volume: Tensor) -> Tensor:
        seen.append(tuple(volume.shape))
        return torch.nn.functional.interpolate(volume[None], (14, 12, 10))[0]

    (heat,) = explained(tmp_path / "scan.nii.gz", tmp_path / "out", preprocess=halve)
    assert set(seen) == {(2, *SIZE)}
    assert heat.shape == SIZE
    assert np.array_equal(heat.affine, scan.affine)
    assert brightest(heat) == BRIGHT


def corner(volume: Tensor) -> Tensor:
    return volume[:, 2:, :-1]


MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "normalised": lambda volume: (volume - volume.mean()) / volume.std(),
    "flipped": lambda volume: volume.flip(1),
    "permuted": lambda volume: volume.permute(0, 3, 2, 1),
    "cropped": corner,
    "padded": lambda volume: nn.functional.pad(volume, (1, 2, 0, 0, 3, 1)),
    "all": lambda volume: corner(((volume - volume.mean()) / volume.std()).flip(3)).permute(0, 2, 1, 3),
    "NumPy": lambda volume: torch.from_numpy(volume.numpy()[:, ::-1, :, 1:].copy()),
}


@pytest.mark.parametrize("name", MOVED)
def test_the_map_lies_in_its_place_whatever_the_preprocessing_moves(tmp_path: Path, name: str) -> None:
    scan = nibabel.load(write_nifti(tmp_path / "scan.nii.gz", OBLIQUE))
    (heat,) = explained(tmp_path / "scan.nii.gz", tmp_path / "out", preprocess=MOVED[name])
    # Each value of the map is twice the square of the input; the coordinates go through the preprocessing alone.
    numbers = torch.arange(1, 1 + math.prod(SIZE)).float().view(1, *SIZE)
    x = MOVED[name](torch.from_numpy(scan.get_fdata(dtype=np.float32))[None])[0]
    where = MOVED[name](numbers)[0]
    if name in ("normalised", "all"):  # by the order of the numbers
        where = (where * numbers.std() + numbers.mean()).round()
    expected = np.zeros(math.prod(SIZE) + 1)
    expected[where.long().flatten().numpy()] = 2 * x.flatten().numpy() ** 2
    expected[0] = 0  # of the padding
    assert heat.get_fdata().flatten() == pytest.approx(expected[1:], abs=1e-4 * expected.max())


@pytest.mark.filterwarnings("ignore::Warning:monai")
@pytest.mark.parametrize("kind", ["head", "CT"])
def test_crops_to_the_foreground_and_orientations_of_monai_are_undone(tmp_path: Path, kind: str) -> None:
    monai: Any = pytest.importorskip("monai.transforms")
    size = (32, 28, 24)
    values = torch.full(size, -1000.0 if kind == "CT" else 0.0)
    values[6:25, 5:20, 4:18] = 100 + 300 * torch.rand(19, 15, 14, generator=torch.Generator().manual_seed(0))
    values[15, 7, 12] = 700
    nibabel.save(nibabel.Nifti1Image(values.numpy(), OBLIQUE), tmp_path / "scan.nii.gz")
    crop = monai.CropForeground(select_fn=lambda volume: volume > 0, margin=1)
    labels = (("L", "R"), ("P", "A"), ("I", "S"))
    steps = [monai.Orientation("LPS", labels=labels), crop, monai.ScaleIntensityRange(-100, 800, 0, 1, clip=True)]
    resampled = [*steps, monai.Spacing((0.8, 1.3, 0.9), mode="bilinear"), monai.SpatialPad((30, 30, 30))]
    for number, transforms in enumerate((steps, resampled)):
        folder = tmp_path / f"out{number}"
        (heat,) = explained(tmp_path / "scan.nii.gz", folder, preprocess=monai.Compose(transforms))
        assert np.abs(np.subtract(brightest(heat), (15, 7, 12))).max() <= number  # exact without resampling
        assert heat.get_fdata()[0].max() == 0


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "warps": lambda volume: volume[:, (torch.linspace(0, 1, 30) ** 2 * 29).round().long()],
    "keeps a corner": lambda volume: volume[:, :3, :3, :3],
    "constant": torch.ones_like,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_volume_whose_position_cannot_be_found_is_an_error(tmp_path: Path, name: str) -> None:
    nibabel.save(nibabel.Nifti1Image(dark(size=(30, 30, 30)), STRAIGHT), tmp_path / "scan.nii")
    assert not explained(tmp_path / "scan.nii", tmp_path / "out", preprocess=REFUSED[name])
    (row,) = rows(tmp_path / "out")
    assert (row["error_kind"], "no position on the volume" in row["error"]) == ("ImageError", True)


def test_a_resumed_run_gives_the_same_bytes_and_other_files_go_on(tmp_path: Path) -> None:
    for name in ("a.nii.gz", "c.nii.gz"):
        write_nifti(tmp_path / "in" / name)
    damaged = tmp_path / "in" / "bad.nii.gz"
    damaged.write_bytes((tmp_path / "in" / "a.nii.gz").read_bytes()[:200])
    write_series(tmp_path / "in" / "gap", (0, 1, 3))
    write_series(tmp_path / "in" / "two")
    write_series(tmp_path / "in" / "two", series="1.2.4")
    explained(tmp_path / "in", tmp_path / "whole", recursive=True)
    explained(tmp_path / "in", tmp_path / "parts", recursive=True, limit=1)
    explained(tmp_path / "in", tmp_path / "parts", recursive=True)
    assert_same(tmp_path / "parts", tmp_path / "whole")
    failed = {
        Path(row["source"]).name: (row["error_kind"], row["error"]) for row in rows(tmp_path / "whole") if row["error"]
    }
    assert failed.keys() == {"bad.nii.gz", "gap", "two"}
    assert {kind for kind, _ in failed.values()} == {"ImageError"}
    assert failed["bad.nii.gz"][1].startswith("cannot be read:")
    assert "not evenly spaced" in failed["gap"][1]
    assert "10 files .dcm of 2 series" in failed["two"][1]
    write_nifti(damaged)
    assert len(explained(tmp_path / "in", tmp_path / "whole", recursive=True, retry=True)) == 3


def test_the_page_shows_slices_through_the_maximum(tmp_path: Path) -> None:
    write_nifti(tmp_path / "scan.nii.gz")
    explained(tmp_path / "scan.nii.gz", tmp_path / "out")
    (row,) = rows(tmp_path / "out")
    with Image.open(tmp_path / "out" / row["overlay"]) as image:
        assert image.size == (row["width"], row["height"])
    assert (row["input_height"], row["input_width"]) == SIZE[1:]
    assert row["thumbnail"] is None


def test_slices_are_drawn_with_the_head_up_and_the_right_at_the_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    slices = saliency.slices

    def draw(*given: Any, **options: Any) -> Any:
        drawn.append(slices(*given, **options))
        return drawn[-1]

    monkeypatch.setattr("saliency.render.figure.slices", draw)
    # The axes of the file run to the head, to the left and to the front.
    affine = np.array([[0, -2.0, 0, 0], [0, 0, 3, 0], [4, 0, 0, 0], [0, 0, 0, 1]])
    write_nifti(tmp_path / "scan.nii", affine)
    explained(tmp_path / "scan.nii", tmp_path / "out")
    panels = drawn[0].axes[:3]
    assert [panel.get_title().partition(" of")[0] for panel in panels] == [
        "axial, slice 5",
        "coronal, slice 3",
        "sagittal, slice 1",
    ]
    assert [(panel.yaxis_inverted(), panel.xaxis_inverted()) for panel in panels] == [
        (False, False),  # front up; the index of the columns grows to the left
        (False, False),  # head up
        (False, True),  # head up; the index of the columns grows to the front, which is at the left
    ]
    assert [panel.get_aspect() for panel in panels] == pytest.approx([3 / 2, 4 / 2, 4 / 3])


def test_images_and_volumes_in_one_folder(tmp_path: Path) -> None:
    noise(tmp_path / "in" / "photo.png", 1)
    write_nifti(tmp_path / "in" / "scan.nii.gz")
    with pytest.raises(BatchError, match="has no preprocessing"):
        explained(tmp_path / "in", tmp_path / "none")
    model = Squares()
    model.preprocess = saliency.Preprocess(size=(16, 16))
    explained(tmp_path / "in", tmp_path / "out", model)
    of_image, of_volume = rows(tmp_path / "out")
    assert of_image["error"] is None
    assert "is a function from a tensor (C, D, H, W)" in of_volume["error"]
    assert of_volume["error"].endswith("got Preprocess, for a model of images; see docs/volumes.md")


def test_a_volume_has_no_trust_card(tmp_path: Path) -> None:
    write_nifti(tmp_path / "scan.nii")
    assert len(explained(tmp_path / "scan.nii", tmp_path / "out", trust=True)) == 1
    assert "no trust card: metrics, trust cards" in rows(tmp_path / "out")[0]["error"]


@pytest.mark.parametrize("kind", ["enhanced", "offsets", "thickness"])
def test_a_dicom_file_of_several_frames_is_the_volume_of_its_slices(tmp_path: Path, kind: str) -> None:
    path = write_frames(tmp_path / "in" / "ct.dcm", kind)
    of_frames, of_series = read_volume(path), read_volume(write_series(tmp_path / "series"))
    assert torch.equal(of_frames.values, of_series.values)
    assert np.allclose(of_frames.affine, of_series.affine, atol=1e-4)
    explanation = saliency.METHODS["input_x_gradient"](Squares()).attribute(path, 0)
    (heat,) = explained(tmp_path / "in", tmp_path / "out")
    assert heat.shape == explanation.input_size == SIZE
    assert np.allclose(heat.affine, of_series.affine, atol=1e-4)
    assert np.allclose(heat.get_fdata(), explanation.values[0, 0])


def test_frames_of_a_dose_a_palette_and_a_video_of_one_place_are_read_as_such_or_refused(tmp_path: Path) -> None:
    ct = read_volume(write_frames(tmp_path / "ct.dcm", "offsets"))
    dose = read_volume(
        write_frames(tmp_path / "dose.dcm", "offsets", DoseGridScaling=0.5, GridFrameOffsetVector=[*range(9, 24, 3)])
    )
    assert torch.allclose(dose.values, ct.values * 0.5)
    assert np.allclose(dose.affine, ct.affine)
    with pytest.raises(ImageError, match="indices of a palette; convert its frames to PNG"):
        read_volume(write_frames(tmp_path / "palette.dcm", "offsets", PhotometricInterpretation="PALETTE COLOR"))
    place = pydicom.dcmread(write_frames(tmp_path / "place.dcm", "enhanced")).PerFrameFunctionalGroupsSequence
    video = read_volume(
        write_frames(tmp_path / "video.dcm", "enhanced", PerFrameFunctionalGroupsSequence=[place[0]] * len(place))
    )
    assert video.values.shape == ct.values.shape


def test_a_video_of_dicom_has_its_colours_as_channels() -> None:
    path = Path(pydicom.__file__).parent / "data" / "test_files" / "SC_rgb_rle_2frame.dcm"
    frames = pydicom.pixels.pixel_array(path)  # (2, H, W, 3)
    volume = read_volume(path)
    assert np.array_equal(volume.values, frames.transpose(3, 2, 1, 0))
    assert np.array_equal(volume.affine, np.diag([-1.0, -1.0, 1.0, 1.0]))


def test_explain_on_the_command_line_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import tests.batch.test_volumes as own\nmodel = own.Squares()\nmodel.preprocess = lambda volume: 3 * volume\n"
    )
    (tmp_path / "mine.py").write_text(code)
    scan, out = str(write_nifti(tmp_path / "scan.nii.gz", OBLIQUE)), str(tmp_path)
    command = ["explain", scan, "--model", f"{tmp_path}/mine.py:model", "-m", "input_x_gradient", "-t", "0", "--sheet"]
    assert main([*command, "-o", out]) == 0
    heat = nibabel.load(tmp_path / "scan.input_x_gradient.nii.gz")
    assert np.array_equal(heat.affine, nibabel.load(scan).affine)
    assert np.allclose(heat.get_fdata(), 2 * (3 * dark()) ** 2)
    assert (tmp_path / "scan.input_x_gradient.png").is_file()
    # The map beside the scan is not explained.
    assert main(["explain", out, *command[2:], "-o", f"{tmp_path}/again"]) == 0
    assert len(list((tmp_path / "again").iterdir())) == 2


def test_attribute_reads_the_file_of_a_volume(tmp_path: Path) -> None:
    explanation = saliency.METHODS["input_x_gradient"](Squares()).attribute(write_nifti(tmp_path / "scan.nii"), 0)
    assert explanation.input_size == SIZE
    assert explanation.frames == (None,)
    with pytest.raises(ImageError, match=r"none.nii' cannot be read: No such file"):
        saliency.METHODS["input_x_gradient"](Squares()).attribute(tmp_path / "none.nii", 0)
    (tmp_path / "five.nii").write_bytes(nibabel.Nifti1Image(np.zeros((2, 2, 2, 1, 3)), STRAIGHT).to_bytes())
    with pytest.raises(ImageError, match=r"shape \(2, 2, 2, 1, 3\); expected \(X, Y, Z\)"):
        read_volume(tmp_path / "five.nii")


def write_xray(path: Path, **changes: Any) -> Path:
    """Write a DICOM file of one image, with the stored values 0, 10, ... in its columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = pydicom.Dataset()
    file.file_meta = pydicom.dataset.FileMetaDataset()
    file.SOPClassUID, file.SOPInstanceUID, file.SeriesInstanceUID = pydicom.uid.CTImageStorage, "1.2", "1.2"
    file.Columns, file.Rows, file.SamplesPerPixel, file.PhotometricInterpretation = 32, 24, 1, "MONOCHROME2"
    file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = 16, 12, 11, 0
    file.RescaleSlope, file.RescaleIntercept, file.WindowCenter, file.WindowWidth = 2, -100, [150.5, 9], [201, 9]
    file.file_meta.TransferSyntaxUID = changes.pop("syntax", pydicom.uid.ExplicitVRLittleEndian)
    for name, value in changes.items():
        setattr(file, name, value)
    stored = np.tile(np.arange(0, 320, 10, dtype=np.uint16), (24, 1)).tobytes()
    is_compressed = file.file_meta.TransferSyntaxUID.is_compressed
    file.PixelData = pydicom.encaps.encapsulate([stored]) if is_compressed else stored
    file.save_as(path, enforce_file_format=True)
    return path


@pytest.mark.parametrize("window", [None, (0.0, 400.0)])
@pytest.mark.parametrize("kind", ["MONOCHROME1", "MONOCHROME2"])
def test_a_dicom_file_of_one_image_is_read_in_its_units_by_its_window(
    tmp_path: Path, kind: str, window: tuple[float, float] | None
) -> None:
    path = write_xray(tmp_path / "x.dcm", PhotometricInterpretation=kind)
    prepare = saliency.Preprocess(resize=False, mean=(0,), std=(1,), range=window)
    (frame,), x = (batch := read(path, prepare)).frames, batch.inputs
    low, high = window or (50, 250)
    expected = ((np.arange(0, 320, 10) * 2 - 100 - low) / (high - low)).clip(0, 1)
    expected = 1 - expected if kind == "MONOCHROME1" else expected
    assert x[0, 0, 0].numpy() == pytest.approx(expected, abs=1e-5)
    assert frame is not None
    assert np.asarray(frame.image)[0, :, 0] / 255 == pytest.approx(expected, abs=0.003)
    if window is None:  # a function gets an RGB image
        of_function = read(path, lambda image: torch.from_numpy(np.asarray(image) / 255).permute(2, 0, 1))
        assert of_function.inputs[0, 0, 0].numpy() == pytest.approx(expected, abs=0.003)


def test_xrays_of_a_folder_are_images_and_a_slice_is_one_for_a_model_of_images(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_xray(tmp_path / "in" / f"{name}.dcm")
    model = Squares()
    model.preprocess = saliency.Preprocess(size=(16, 16))
    batch(tmp_path / "in", tmp_path / "out", model, ["input_x_gradient"], target=0)
    assert [(row["id"], row["error"]) for row in rows(tmp_path / "out")] == [("a", None), ("b", None), ("c", None)]
    (frame,) = read(write_series(tmp_path / "ct") / "03.dcm", model.preprocess).frames
    assert frame is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"NumberOfFrames": 3}, r"has 3 frames, a volume, .*: pydicom.pixels.pixel_array\(file\)\[0\]"),
        ({"PhotometricInterpretation": "PALETTE COLOR"}, "of the kind PALETTE COLOR; convert it to PNG"),
        ({"Rows": 9999}, "cannot be decoded .*; the file is damaged"),
        ({"syntax": pydicom.uid.JPEG2000Lossless}, "cannot be decoded .* decompress it"),
    ],
)
def test_a_dicom_file_that_is_no_single_image_names_its_cure(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        read(write_xray(tmp_path / "x.dcm", **changes), saliency.Preprocess())


def test_a_volume_for_a_model_of_images_says_so(tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.ones(SIZE, np.float32), STRAIGHT), tmp_path / "scan.nii")
    with pytest.raises(ImageError, match="got Preprocess, for a model of images"):
        read(tmp_path / "scan.nii", saliency.Preprocess())


def test_a_volume_with_nan_names_the_cure(tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.full(SIZE, np.nan, np.float32), STRAIGHT), tmp_path / "scan.nii")
    with pytest.raises(NonFiniteError, match=r"nan_to_num\(\) does, for a file in its preprocessing"):
        read(tmp_path / "scan.nii")
    batch(tmp_path / "scan.nii", tmp_path / "out", Squares(), ["input_x_gradient"], target=0)
    (row,) = rows(tmp_path / "out")
    assert row["error_kind"] == "NonFiniteError"
    assert "nan_to_num()" in row["error"]


def test_an_xray_that_was_opened_keeps_its_window(tmp_path: Path) -> None:
    path = write_xray(tmp_path / "x.dcm")
    once, again = (read(image, saliency.Preprocess(size=(16, 16))) for image in (path, open_image(path)))
    assert torch.equal(once.inputs, again.inputs)
