"""Compare the maps of two runs of `saliency batch` over the same images, relative to the change by chance.

Maps are compared on a grid over the part of the image that either network saw. The change by chance is measured by a
yardstick: runs that differ only in what should not matter, such as the seed of the method or of the training, or
mirrored copies of the images.

`write_labels` writes the saved maps of a run as labels of FiftyOne.
"""

from __future__ import annotations

import ast
import html
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree as ET

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn

from ..attribution.base import Attribution, get_method
from ..attribution.estimates import rank_correlation
from ..attribution.explanation import Explanation, heatmap
from ..errors import errors_as, optional_import
from ..evaluation.comparison import LEVEL, holm, sign_flip_test
from ..io.atomic_write import durable_write
from ..io.geometry import Box, ImageBox
from ..tables import Column, Table, number, share
from .failures import BatchError
from .listing import read_listing
from .network import create_method, load_model
from .options import NetworkOptions, OutputOptions, fingerprint
from .store import MANIFEST, Row, read_rows, read_run

SIDE = 64  # cells per edge of the grid on which maps are compared
LEAST = 0.1  # fraction of a map that must move beyond chance; two trainings differ by less, but significantly
NAMES = ("comparison.html", "comparison.json", "comparison.xml")
MOST = 500  # images on the page
FEWEST = round(1 / LEVEL) - 1  # images of a method, so that p can be as small as LEVEL


@dataclass(frozen=True, slots=True)
class ImageChange:
    """Change of the map of one image and method between two runs.

    Attributes:
        name: The image.
        method: The method.
        classes: The explained class in each run.
        rank: The rank correlation of both maps.
        moved: The fraction of the map's magnitude that moved, from 0 to 1.
        chance: The largest fraction that moved between the first run and a run of the yardstick; None if there is no
            yardstick.
        overlays: The overlay of each run.
        p: The fraction of the maps of the method that move as much by chance; None if there is no yardstick.
    """

    name: str
    method: str
    classes: tuple[str, str]
    rank: float
    moved: float
    chance: float | None
    overlays: tuple[str, str]
    p: float | None = None

    @property
    def is_changed(self) -> bool:
        """Whether the map moved further than 95 % of the maps do by chance."""
        return self.p is not None and self.p <= LEVEL


@dataclass(frozen=True, slots=True)
class ClassChange:
    """Mean change over the images of one class (in the first run), by one method.

    Attributes:
        name: The class.
        method: The method.
        images: The number of images.
        rank, moved, chance: The means over the images.
        changed: The number of changed images.
        p: The p-value of the sign-flip test of `moved` against `chance`, corrected by Holm; None if there is no
            yardstick.
    """

    name: str
    method: str
    images: int
    rank: float
    moved: float
    chance: float | None
    changed: int
    p: float | None

    @property
    def is_changed(self) -> bool:
        """Whether the maps of the class moved significantly more than by chance, by at least a tenth of the map."""
        return self.p is not None and self.p <= LEVEL and self.moved - (self.chance or 0) >= LEAST


def _changed(row: ClassChange) -> int | None:
    return None if row.p is None else row.changed


_COLUMNS = (
    Column("class", "name", align="left"),
    Column("method", "method", align="left"),
    Column("images", "images"),
    Column("rank correlation", "rank", number, hint="mean over the images"),
    Column("moved", "moved", share, hint="mean fraction of the map that moved"),
    Column("by chance", "chance", share, hint="the same, between runs that differ only by chance"),
    Column("changed", _changed, hint="images beyond 95 % of chance"),
    Column("p", "p", number, hint="corrected for all classes"),
    Column("", "is_changed", "changed".format, "left"),
)


class RunComparison(Table[ClassChange]):
    """Table of the classes of two runs, most changed first.

    Args:
        images: The changes of the images, without their `p`.
        notes: Notes below the table.

    Attributes:
        images: The changes of the images, largest first.
        few: Methods with too few images for any of them to be marked as changed.
    """

    def __init__(self, images: Iterable[ImageChange], notes: Iterable[str] = ()) -> None:
        images = sorted(images, key=lambda change: -change.moved)
        methods = dict.fromkeys(change.method for change in images)
        known = [change for change in images if change.chance is not None]
        chances = {name: np.array([change.chance for change in known if change.method == name]) for name in methods}
        self.images = [replace(change, p=_image_p(change.moved, chances[change.method])) for change in images]
        self.few = [name for name, values in chances.items() if 0 < len(values) < FEWEST]
        notes = [*notes, *(f"{name}: fewer than {FEWEST} images, so none can be marked" for name in self.few)]
        groups: dict[tuple[str, str], list[ImageChange]] = {}
        for change in self.images:
            groups.setdefault((change.method, change.classes[0]), []).append(change)
        p = holm(np.array([_class_p(changes) for changes in groups.values()]))
        rows = [_class_change(changes, float(value)) for changes, value in zip(groups.values(), p, strict=True)]
        rows.sort(key=lambda row: (row.chance or 0) - row.moved)
        super().__init__(rows, _COLUMNS, "Changes between two runs", notes)

    @property
    def unchanged(self) -> float:
        """The fraction of the maps that did not change by more than chance."""
        return 1 - sum(change.is_changed for change in self.images) / len(self.images)

    def save(self, folder: Path) -> Path:
        """Write the page, the JSON and the JUnit file into a folder, and return the path of the page."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "classes": [asdict(row) | {"is_changed": row.is_changed} for row in self],
            "images": [asdict(change) | {"is_changed": change.is_changed} for change in self.images],
        }
        durable_write(folder / NAMES[1], [(json.dumps(content, indent=1) + "\n").encode()])
        durable_write(folder / NAMES[2], [ET.tostring(self._junit(), "utf-8", xml_declaration=True)])
        return write_page(folder / NAMES[0], self, [_figure(change, folder) for change in self.images[:MOST]])

    def _junit(self) -> ET.Element:
        failures = str(sum(row.is_changed for row in self))
        suite = ET.Element("testsuite", {"name": "saliency compare", "tests": str(len(self)), "failures": failures})
        for row in self:
            case = ET.SubElement(suite, "testcase", {"classname": row.method, "name": row.name})
            if row.is_changed:
                message = f"{share(row.moved)} of the maps moved, {share(row.chance)} by chance; p = {number(row.p)}"
                ET.SubElement(case, "failure", {"message": message})
        return suite


def compare_runs(first: Path, second: Path, same: Sequence[Path] = (), *, mirrored: bool = False) -> RunComparison:
    """Compare the saved maps of two runs over the same images, by method and class.

    Args:
        first: Output folder of `saliency batch --maps`.
        second: Another one.
        same: Runs that differ from the first one only in what should not matter, such as a seed.
        mirrored: Whether the first run is also compared with maps of the mirrored images by its model.

    Raises:
        BatchError: A folder has no maps, no image has a map by one method in all runs, or the model of the first run
            cannot be loaded by its name alone for mirrored images.
    """
    runs = [SavedRun(folder) for folder in (first, second, *same)]
    keys = [key for key in runs[0].rows if all(key in run.rows for run in runs)]
    if not keys:
        folders = ", ".join(str(run.folder) for run in runs)
        raise BatchError(f"no image has a map by the same method in all of {folders}")
    sources: list[Callable[[tuple[str, str]], Explanation]] = [run.load for run in runs]
    if mirrored:
        sources.append(_mirrored(runs[0]))
    changes = []
    for key in keys:
        maps = _on_one_grid([load(key) for load in sources])
        moved = [float((maps[0] - other).abs().sum()) / 2 for other in maps[1:]]
        rank, chance = rank_correlation(maps[0], maps[1]), max(moved[1:], default=None)
        (old, new), (a, b) = [run.rows[key] for run in runs[:2]], [first, second]
        overlays = str(a / old["overlay"]), str(b / new["overlay"])
        changes.append(ImageChange(*key, (old["name"], new["name"]), rank, moved[0], chance, overlays))
    left_out = len(set[tuple[str, str]]().union(*(run.rows for run in runs))) - len(keys)
    notes = [f"left: {first}; right: {second}"]
    return RunComparison(changes, notes + [f"maps that are not in all runs, left out: {left_out}"] * bool(left_out))


class SavedRun:
    """A finished run with maps.

    Attributes:
        folder: Its folder.
        head: The content of `manifest.json`.
        entries: The images by name.
        rows: The rows with maps, by the name of the image and the method.

    Raises:
        BatchError: The folder is not of a run, or has no maps.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.head = folder, read_run(folder)
        self.entries = {entry.name: entry for entry in read_listing(folder)}
        rows = (row for row, _ in read_rows(folder / MANIFEST) if str(row["map"]).endswith(".safetensors"))
        self.rows: dict[tuple[str, str], Row] = {(row["id"], row["method"]): row | _class_of(row) for row in rows}
        if not self.rows:
            raise BatchError(f"{folder} has no maps of images; expected the folder of a run with saliency batch --maps")

    def load(self, key: tuple[str, str]) -> Explanation:
        """Return the saved map of an image and method."""
        return Explanation.load(self.folder / self.rows[key]["map"])

    def open(self, name: str) -> Image.Image:
        """Return an image as the run read it. Raises BatchError if its file has changed since."""
        entry = self.entries[name]
        if entry.stamp != entry.current_stamp():
            raise BatchError(f"{entry.source} changed after the run in {self.folder}; run saliency batch again")
        return entry.open()

    def given_target(self, key: tuple[str, str]) -> Any:
        """Return the target of an image as it was given; None if its top class was explained."""
        target = self.entries[key[0]].target
        return self.head["fingerprint"]["target"] if target is None else target

    def explains_class(self, key: tuple[str, str]) -> bool:
        """Return whether the score of a class was explained, rather than its probability or its contrast to another."""
        row, given = self.rows[key], self.given_target(key)
        name = row["name"].casefold()
        words = (str(row["target"]), name, *re.split(r",\s*", name))  # as `class_index` reads them
        return row["target"] is not None and (given is None or str(given).casefold() in words)

    def network(self, cure: str) -> tuple[NetworkOptions, nn.Module]:
        """Return the options of the network, and the network.

        Raises:
            BatchError: The model cannot be loaded as in the run. The message ends with the cure.
        """
        values, name = self.head["fingerprint"], self.head["fingerprint"]["model"]
        name = str(Path(self.head["folder"], name)) if ".py:" in name else name
        weights, stored = self.head["model"].get("file") or values["weights"], values["preprocess"] or ""
        preprocess: dict[str, Any] | None = None
        if stored.startswith("Preprocess("):
            call: Any = ast.parse(stored, mode="eval").body
            preprocess = {field.arg: ast.literal_eval(field.value) for field in call.keywords}
        options = NetworkOptions(model=name, weights=weights, whole=values["whole"], preprocess=preprocess)
        now = fingerprint(options, OutputOptions())
        changed = [name for name in ("preprocess", "weights", "model source") if values[name] != now[name]]
        changed += ["weights"] * str(weights).startswith("sha256:")  # the model was passed as a module
        if changed:
            why = f"{changed[0]}: not stored, or changed since"
            run = f"{self.folder}, which ran in {self.head['folder']},"
            raise BatchError(f"the model of {run} cannot be loaded again ({why}); {cure}")
        return options, load_model(options)


def _class_of(row: Row) -> Row:
    """Return the name of the class of a row. That of a detection also contains the box: "cat at (1, 2, 3, 4)"."""
    return {"name": row["name"].rpartition(" at (")[0]} if row["target_box"] and " at (" in row["name"] else {}


def _mirrored(run: SavedRun) -> Callable[[tuple[str, str]], Explanation]:
    """Return a function that explains the mirrored image by the model of the run, and mirrors the map back."""
    options, model = run.network("give a run with another seed instead of --null")
    if not all(map(run.explains_class, run.rows)):
        raise BatchError(f"{run.folder} explains targets other than classes; give another run instead of --null")
    values, methods = run.head["fingerprint"], dict[str, Attribution]()
    for name in dict.fromkeys(method for _, method in run.rows):
        of_method = {"layer": values[f"layer of {name}"], "options": values[f"options of {name}"]}
        methods[name] = create_method(get_method(name), replace(options, **of_method), model)

    def explain(key: tuple[str, str]) -> Explanation:
        image = run.open(key[0])
        explanation = methods[key[1]].attribute(ImageOps.mirror(image), run.rows[key]["target"])
        left, top, right, bottom = explanation.frames[0].box if explanation.frames[0] else (0, 0, *image.size)
        box = ImageBox(image.size, (image.width - right, top, image.width - left, bottom))
        return replace(explanation.with_evidence(boxes=(box,)), values=explanation.values.flip(-1))

    return explain


def _on_one_grid(explanations: Sequence[Explanation]) -> list[Tensor]:
    """Return the heatmaps (SIDE, SIDE) on a grid over the union of their boxes, with magnitudes that sum to 1."""
    boxes = [box.box for explanation in explanations for box in explanation.boxes if box]
    sides = list(zip(*boxes, strict=True))
    area = min(sides[0]), min(sides[1]), max(sides[2]), max(sides[3])
    placed = [on_grid(explanation, box, area, SIDE) for explanation, box in zip(explanations, boxes, strict=True)]
    return [maps / maps.abs().sum().clamp(min=torch.finfo(maps.dtype).tiny) for maps in placed]


def on_grid(explanation: Explanation, box: Box, area: Box, side: int) -> Tensor:
    """Return the heatmap of an explanation of a box as (side, side) cells of an area; 0 outside of the box."""
    maps = heatmap(explanation, size=(side, side)).double()
    axes = []
    for low, high, start, stop in ((box[0], box[2], area[0], area[2]), (box[1], box[3], area[1], area[3])):
        centres = start + (stop - start) * (torch.arange(side, dtype=torch.float64, device="cpu") + 0.5) / side
        axes.append(2 * (centres - low) / (high - low) - 1)
    y, x = torch.meshgrid(axes[1], axes[0], indexing="ij")
    return F.grid_sample(maps[None], torch.stack([x, y], -1)[None], align_corners=False)[0, 0]


def _image_p(moved: float, chances: NDArray[np.float64]) -> float | None:
    """Return the fraction of the maps of a method that move as much by chance; None if there is no yardstick."""
    return float((1 + (chances >= moved).sum()) / (1 + len(chances))) if len(chances) else None


def _class_p(changes: Sequence[ImageChange]) -> float:
    """Return the one-sided p-value of the hypothesis that the images moved as by chance."""
    differences = np.array([change.moved - (change.chance or 0) for change in changes])[:, None]
    return float(sign_flip_test(differences)[0]) / 2 if differences.mean() > 0 else 1.0


def _class_change(changes: Sequence[ImageChange], p: float) -> ClassChange:
    chances = [change.chance for change in changes if change.chance is not None]
    return ClassChange(
        name=changes[0].classes[0],
        method=changes[0].method,
        images=len(changes),
        rank=float(np.mean([change.rank for change in changes])),
        moved=float(np.mean([change.moved for change in changes])),
        chance=float(np.mean(chances)) if chances else None,
        changed=sum(change.is_changed for change in changes),
        p=p if chances else None,
    )


def write_page(path: Path, table: Table[Any], figures: Iterable[str]) -> Path:
    """Write a page of a table with figures, and return its path."""
    page = files(__package__).joinpath("runs.html").read_text("utf-8")
    parts = {"title": html.escape(table.title), "table": table.to_html(), "figures": "\n".join(figures)}
    page = re.sub(r"<!-- (\w+) -->", lambda match: parts[match[1]], page)
    return durable_write(path, [page.encode("utf-8", "backslashreplace")])


def figure(kind: str, overlays: Iterable[str], text: str, more: str = "") -> str:
    """Return overlays, by their paths relative to the page, with more images and a text below, as HTML of a class."""
    images = "".join(f'<img src="{quote(overlay)}" alt="" loading="lazy">' for overlay in overlays)
    return f'<figure class="{kind}">{images}{more}<figcaption>{html.escape(text)}</figcaption></figure>'


def _figure(change: ImageChange, folder: Path) -> str:
    """Return both overlays of an image as HTML, for a page in a folder."""
    overlays, names = [os.path.relpath(overlay, folder) for overlay in change.overlays], dict.fromkeys(change.classes)
    moved = f"{share(change.moved)} moved, rank {number(change.rank)}"
    text = f"{change.name} by {change.method}: {' → '.join(names)}; {moved}"
    return figure("changed" * change.is_changed, overlays, text)


LABEL_SIDE = 256  # values per edge; FiftyOne stretches a heatmap over its image


def write_labels(folder: Path, name: str) -> int:
    """Write each saved map of a run into a dataset of FiftyOne, and return the number of maps.

    The dataset is created if it does not exist, and images that it lacks are added. A label is a `fiftyone.Heatmap` in
    a field named after the method, such as `grad_cam`, or `grad_cam_0` for a detection. Its values are those of
    `saliency.heatmap`, and 0 where the model did not see the image.

    Raises:
        DependencyError: FiftyOne is not installed.
        BatchError: The folder has no maps of images, or several images of one file, as from a shard; or FiftyOne has no
            database.
    """
    fiftyone = optional_import("fiftyone", "fiftyone", "--fiftyone")
    run = SavedRun(folder)
    if len({(entry.path, entry.detection) for entry in run.entries.values()}) < len(run.entries):
        raise BatchError(f"{folder} has several images of one file, a sample of FiftyOne; give each image a file")
    with errors_as(BatchError, f"the dataset {name} of FiftyOne cannot be opened"):
        dataset = fiftyone.load_dataset(name, create_if_necessary=True)
    dataset.persistent = True
    for (image, method), row in run.rows.items():
        entry = run.entries[image]
        try:
            sample = dataset[entry.path]
        except KeyError:
            sample = fiftyone.Sample(filepath=entry.path)
            dataset.add_sample(sample)
        values = on_grid(run.load((image, method)), row["box"], (0, 0, row["width"], row["height"]), LABEL_SIDE)
        low = -row["limit"] if row["sign"] == "signed" else row["floor"]
        field = method if entry.detection is None else f"{method}_{entry.detection}"
        sample[field] = fiftyone.Heatmap(map=values.float().numpy(), range=[low, row["limit"]])
        sample.save()
    return len(run.rows)
