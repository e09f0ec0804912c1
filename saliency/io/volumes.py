"""Read volumes from NIfTI files and DICOM series, with their positions in the scanner, and write maps as NIfTI.

Only this module imports nibabel and pydicom, which the extra `volumes` installs.
"""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ImageError, errors_as, optional_import
from .atomic_write import SOFTWARE, is_volume
from .dicom import holds_frames
from .preprocess import Preprocess, TransformPreprocess

_PROBES, _ENOUGH = 32, 10
"""The most voxels that are changed to find the position of the model's input, and the number that must change it."""


class Volume(NamedTuple):
    """Volume and its position in the scanner.

    Attributes:
        values: (C, I, J, K), float32: the axes of the file, in the order of nibabel.
        affine: (4, 4), from the indices (i, j, k) to millimetres towards the patient's right, front and head (RAS).
        to_input: As from `locate_volume`.
    """

    values: Tensor
    affine: NDArray[np.float64]
    to_input: Tensor | None = None

    def world_axes(self) -> tuple[list[int], list[bool]]:
        """Return the axis of the values that is closest to each of S, A and R, and whether its indices ascend."""
        axis, direction = _nibabel().io_orientation(self.affine).T
        order = np.argsort(axis)[::-1]
        return order.tolist(), (direction[order] > 0).tolist()


def read_volume(path: str | os.PathLike[str]) -> Volume:
    """Read a NIfTI file, (X, Y, Z) or (X, Y, Z, C), the DICOM series of a folder, or a DICOM file of several frames.

    Slices and frames are sorted by their positions along their normal, and rescaled to their units (for CT, Hounsfield
    units). Columns, rows and slices are the axes I, J and K.

    Args:
        path: The file, the folder of a series (.dcm files), or one slice in it.

    Raises:
        DependencyError: The extra `volumes` is not installed.
        ImageError: The file is missing or damaged, or has other axes. The folder contains several series; or the
            slices differ in shape, pixel size or direction, or are not evenly spaced.
    """
    name = os.fsdecode(path)
    with errors_as(ImageError, f"{name!r} cannot be read"):
        return _read_nifti(name) if is_volume(name) else _read_dicom(Path(name))


def preprocess_volume(volume: Tensor, prepare: Preprocess | TransformPreprocess | None) -> Tensor:
    """Return the model's input (C, D, H, W) for a volume: the volume itself without preprocessing.

    Raises:
        ImageError: The preprocessing is for images, or does not return a float tensor (C, D, H, W).
    """
    x: Any = volume if prepare is None else prepare
    if isinstance(prepare, TransformPreprocess):
        x = prepare.transform(volume.clone())
    if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
        came = f"a {x.dtype} tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        came += ", for a model of images" if isinstance(x, Preprocess) else ""
        expected = "a function from a tensor (C, D, H, W) to the model's float input (C, D, H, W)"
        raise ImageError(f"the preprocessing of a volume is {expected}; got {came}; see docs/volumes.md")
    return x.detach().as_subclass(Tensor)


def locate_volume(volume: Tensor, prepare: Preprocess | TransformPreprocess | None, x: Tensor) -> Tensor | None:
    """Return the position of the model's input on a volume; None if the input covers the whole volume.

    The position is found by changing voxels of the volume, to see where the input changes. All other voxels stay
    unchanged, because a crop may depend on the values, and a normalisation always does.

    Args:
        volume: The volume (C, I, J, K).
        prepare: The preprocessing.
        x: The input (C, D, H, W) that it returned for the volume.

    Returns:
        (3, 4), from a position (k, j, i) on the volume to (w, h, d) on the input, each from -1 to 1 between its edges:
        `theta` of `torch.nn.functional.affine_grid`. Accurate to about one voxel; exact without resampling.

    Raises:
        ImageError: The position cannot be found.
    """
    if prepare is None:
        return None
    rows = np.array([*islice(_moved_blocks(volume, prepare, x), _ENOUGH)]).reshape(-1, 7)
    fit, _, rank, _ = np.linalg.lstsq(rows[:, :4], rows[:, 4:], rcond=1e-6)
    error = (np.abs(rows[:, :4] @ fit - rows[:, 4:]) * x.shape[1:] / 2).max(initial=0)  # in voxels of the input
    if len(rows) > rank == 4 and error < 1.2 * np.ptp(rows[:, :3], axis=0).min():
        shifts = np.abs(fit.T - np.eye(3, 4)).sum(1) * np.minimum(volume.shape[1:], x.shape[1:]) / 2  # at corners
        return torch.from_numpy(fit.T[::-1, [2, 1, 0, 3]].copy()) if shifts.max() > 0.5 + 3 * error else None
    problem = "is random or warps the volume, keeps a small part, or makes it constant"
    raise ImageError(f"the map has no position on the volume: the preprocessing {problem}; prepare the file instead")


def _moved_blocks(volume: Tensor, prepare: Preprocess | TransformPreprocess, x: Tensor) -> Iterator[list[float]]:
    """Change blocks of the volume, and yield the centres (i, j, k, 1) and (d, h, w) where the input changes.

    Each block changes by half of the range of the values. A normalisation then changes all other voxels too, but less.
    """
    finite, sizes = volume.nan_to_num(), np.array([volume.shape[1:], x.shape[1:]])
    low, high = (edge(finite, (1, 2, 3), True) for edge in (torch.amin, torch.amax))
    total, least = finite.sum(0).numpy(), 0.15 * (x.amax((1, 2, 3)) - x.amin((1, 2, 3))).sum()
    voxels = np.flatnonzero(total > total.mean())  # voxels of the foreground, since a crop may depend on the background
    voxels = voxels if len(voxels) > _PROBES else np.arange(total.size)
    # A block covers about three voxels of a coarse input, so that resampling cannot skip it.
    radius = max(0, int(2 * (total.size / x[0].numel()) ** (1 / 3) + 0.01) - 2)
    for index in np.transpose(np.unravel_index(np.random.default_rng(0).choice(voxels, _PROBES), total.shape)):
        starts, ends = np.maximum(index - radius, 0), np.minimum(index + radius + 1, sizes[0])
        changed = volume.clone()
        block = changed[:, *map(slice, starts, ends)]
        block += (high - low) / (2 if (2 * block - low - high).sum() < 0 else -2)
        result = preprocess_volume(changed, prepare)
        changes = (result - x).abs().sum(0).nan_to_num() if result.shape == x.shape else torch.zeros_like(x[0])
        positions = (changes > least).nonzero().numpy()
        if len(positions):
            first, last = positions.min(0), positions.max(0)
            is_cut = ((first == 0) | (last == sizes[1] - 1)).any() and not ((starts == 0) | (ends == sizes[0])).any()
            if (last - first <= np.maximum(sizes[1] / 3, 2 * radius + 2)).all() and not (radius and is_cut):
                centre = np.average(positions, axis=0, weights=changes[tuple(positions.T)])
                yield [*((starts + ends) / sizes[0] - 1), 1, *((2 * centre + 1) / sizes[1] - 1)]


def place_map(maps: Tensor, to_input: Tensor, size: Sequence[int]) -> Tensor:
    """Return maps (N, D, H, W) of the input in the voxels of a volume of size (I, J, K): (N, I, J, K), 0 outside.

    `to_input` is as from `locate_volume`.
    """
    grid = F.affine_grid(to_input.to(maps)[None], [1, 1, *size], align_corners=False)
    values = F.grid_sample(maps[None], grid, padding_mode="border", align_corners=False)[0]
    return values * (grid.abs() <= 1).all(-1)


def encode_map(values: Tensor, affine: NDArray[np.float64]) -> bytes:
    """Return a map (I, J, K) as the content of a .nii.gz file in float32. Equal maps give equal bytes."""
    image = _nibabel().Nifti1Image(values.float().cpu().numpy(), affine)
    image.header.set_xyzt_units("mm")
    file = io.BytesIO()
    # The name in the header, which gzip ignores, marks maps for `is_drawing`.
    with gzip.GzipFile(SOFTWARE, "wb", compresslevel=1, fileobj=file, mtime=0) as compressed:
        compressed.write(image.to_bytes())
    return file.getvalue()


def _nibabel() -> Any:
    return optional_import("nibabel", "volumes", "a NIfTI file")


def _read_nifti(path: str) -> Volume:
    image = _nibabel().load(path)
    if len(image.shape) not in (3, 4):
        raise ImageError(f"{path!r} has the shape {image.shape}; expected (X, Y, Z), or (X, Y, Z, C) with channels")
    values = image.get_fdata(dtype=np.float32)
    channels = torch.from_numpy(values.reshape(*values.shape[:3], -1)).permute(3, 0, 1, 2)
    return Volume(channels.contiguous(), image.affine)


def _read_dicom(path: Path) -> Volume:
    dicom, pixels = (optional_import(name, "volumes", "a DICOM series") for name in ("pydicom", "pydicom.pixels"))
    if path.is_file() and holds_frames(os.fspath(path)):
        file = dicom.dcmread(path)
        slices = _read_frames(dicom, file, pixels.pixel_array(file))
    else:
        path = path if path.is_dir() else path.parent
        files = [file for file in path.iterdir() if is_volume(file.name, (".dcm",)) and not file.name.startswith(".")]
        parts = [dicom.dcmread(file) for file in files]
        series = {part.SeriesInstanceUID for part in parts}
        if len(series) != 1 or len(parts) < 2:
            problem = f"has {len(parts)} files .dcm of {len(series)} series"
            raise ImageError(f"{str(path)!r} {problem}; expected the slices of one series in a separate folder")
        slices = [(part, part.pixel_array) for part in parts]
    first = slices[0][0]
    across, down = np.reshape(first.ImageOrientationPatient, (2, 3)).astype(float)
    normal = np.cross(across, down)
    slices.sort(key=lambda entry: float(np.dot(normal, entry[0].ImagePositionPatient)))
    rows = [(part.Rows, part.Columns, *part.PixelSpacing, *part.ImageOrientationPatient) for part, _ in slices]
    shapes = np.array(rows, float)
    positions = np.array([part.ImagePositionPatient for part, _ in slices], float)
    steps = np.diff(positions, axis=0)
    step = steps.mean(0)
    if np.abs(steps - step).max() >= 0.02 * np.linalg.norm(step) or not np.allclose(shapes, shapes[0], atol=1e-3):
        problem = f"its {len(slices)} slices differ in size or direction, or are not evenly spaced"
        raise ImageError(f"{str(path)!r}: {problem} (a slice may be missing); convert it to NIfTI")
    if first.get("PhotometricInterpretation") == "PALETTE COLOR":
        raise ImageError(f"{str(path)!r} holds indices of a palette; convert its frames to PNG")
    # The unit of a dose is stored in a separate attribute.
    scaling = float(first.get("DoseGridScaling") or 1)
    planes = [np.float32(pixels.apply_rescale(plane, part) * scaling).T for part, plane in slices]
    values = torch.from_numpy(np.stack(planes, -1))  # (I, J, K), or (C, I, J, K) of colours
    affine = np.eye(4)
    # The spacing of pixels is the distance of rows, then of columns.
    affine[:3] = np.stack([across * first.PixelSpacing[1], down * first.PixelSpacing[0], step, positions[0]], 1)
    affine = np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine  # from LPS
    return Volume(values if values.ndim == 4 else values[None], affine)


def _read_frames(dicom: Any, file: Any, planes: NDArray[Any]) -> list[tuple[Any, NDArray[Any]]]:
    """Return the frames of a file, each with the attributes of a slice: of the file, of all frames, and of this frame.

    Frames without positions, as of a dose or a video, or at one position, lie along their normal.
    """
    shared, by_frame = (file.get(f"{name}FunctionalGroupsSequence") for name in ("Shared", "PerFrame"))
    spacing = float(file.get("SpacingBetweenSlices") or file.get("SliceThickness") or 1)
    offsets = np.array(file.get("GridFrameOffsetVector") or np.arange(len(planes)) * spacing, float)
    origin, parts = file.get("ImagePositionPatient") or (0, 0, 0), []
    left_out = ("PixelData", "ImagePositionPatient")
    of_file = {item.tag: item for item in file if item.VR != "SQ" and item.keyword not in left_out}
    for number in range(len(planes)):
        part = dicom.Dataset(of_file.copy())
        groups = [*(shared[0] if shared else ()), *(by_frame[number] if by_frame else ())]
        public = [group.value for group in groups if group.VR == "SQ" and not group.tag.is_private]
        part.update({element.tag: element for items in public for item in items for element in item})
        part.PixelSpacing = part.get("PixelSpacing") or [1, 1]
        part.ImageOrientationPatient = part.get("ImageOrientationPatient") or [1, 0, 0, 0, 1, 0]
        parts.append(part)
    if len({tuple(part.get("ImagePositionPatient") or ()) for part in parts}) == 1:
        start = np.array(parts[0].get("ImagePositionPatient") or origin, float)
        for part, offset in zip(parts, offsets - offsets[0], strict=True):
            normal = np.cross(*np.reshape(part.ImageOrientationPatient, (2, 3)).astype(float))
            part.pop("ImagePositionPatient", None)  # frames share the element
            part.ImagePositionPatient = (start + offset * normal).tolist()
    return list(zip(parts, planes, strict=True))
