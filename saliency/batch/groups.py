"""Groups of the saved maps of one class: does the model recognise some images of the class by other features?

Each image is a vector: its features at the explained layer, weighted by the map and summed ("channels"), or its map in
cells of the image ("places"). The graph of the nearest vectors is divided by spectral clustering. The number of groups
is at the largest gap of the eigenvalues, and may be 1: then the class has no groups.

Sources: Lapuschkin et al., "Unmasking Clever Hans Predictors" (2019), https://arxiv.org/abs/1902.10178; Zelnik-Manor
and Perona, "Self-Tuning Spectral Clustering" (2004); Damle et al., "Simple, Direct, and Efficient Multi-Way Spectral
Clustering" (2019), https://arxiv.org/abs/1609.08251; Liu et al., "Statistical Significance of Clustering" (2008);
Besag and Clifford, "Sequential Monte Carlo p-values" (1991).
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..attribution.explanation import Explanation, reduced_maps, resized
from ..attribution.features import features
from ..errors import optional_import, plural
from ..evaluation.comparison import LEVEL, holm
from ..hooks.manager import HookManager
from ..io.atomic_write import inside
from ..io.inputs import encode
from ..render.scaling import SEQUENTIAL, color_table
from ..tables import Column, Table, number, share
from ..validation import check_integer
from .failures import BatchError
from .report import report
from .runs import SavedRun, figure, on_grid, write_page
from .store import GROUPS, GROUPS_CSV, write_csv

View = Literal["channels", "places"]
GRID = 8  # cells per edge of the map of an image
MOST_GROUPS, NEIGHBOURS, EXAMPLES = 8, 7, 9
LEAST = 20  # images of a class
LANDMARKS = 600  # images that are clustered; all others join the group of the nearest clustered image
DRAWS, HALVES = 100, 10  # for p-values, at least, and for stabilities
ENOUGH = 10  # draws as clear as a division, after which its p-value is precise enough
TOGETHER = 32  # images per forward
_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Group:
    """A group of the images of one class by their maps.

    Attributes:
        name: The class.
        method: The method.
        images: The number of images.
        fraction: Their fraction of the class.
        probability: The mean probability of the class; None if the run has no probabilities.
        accuracy: The fraction of the images whose top class is the class of the group; None if no target was given, and
            for "places".
        outside: The fraction of the group's mean map outside of the cells with 95 % of the mean map of all other
            images.
        stability: The mean overlap (Jaccard) with the most similar group when half of the images are clustered; 1 means
            that the group is always found.
        p: The fraction of random data sets that divide into groups as clearly, corrected by Holm for all classes. They
            are drawn from one normal distribution, which has no groups.
        examples: The overlays of the images nearest to the mean.
        mean_map: The mean map in cells.
    """

    name: str
    method: str
    images: int
    fraction: float
    probability: float | None
    accuracy: float | None
    outside: float
    stability: float
    p: float
    examples: tuple[str, ...]
    mean_map: tuple[tuple[float, ...], ...]

    @property
    def is_significant(self) -> bool:
        """Whether the corrected p-value is at most `LEVEL`."""
        return self.p <= LEVEL


_COLUMNS = (
    Column("class", "name", align="left"),
    Column("method", "method", align="left"),
    Column("images", "images"),
    Column("of the class", "fraction", share),
    Column("probability", "probability", share, hint="mean probability of the class"),
    Column("accuracy", "accuracy", share, hint="images whose top class it is, if a target was given"),
    Column("outside", "outside", share, hint="of the map, where the maps of the others are not"),
    Column("stability", "stability", number, hint="1 if half of the images give the same group"),
    Column("p", "p", number, hint="of groups as clear by chance, corrected for all classes"),
    Column("", "is_significant", "significant".format, "left"),
)


def groups(folder: Path, view: View = "channels", seed: int = 0) -> Table[Group]:
    """Return the groups of each class of a run, sorted by their p-value, then by their size.

    Args:
        folder: The folder of a run of `saliency batch --maps`.
        view: "channels" finds images that the model recognises by the same features, wherever they are. It loads the
            model. "places" finds maps at the same place.
        seed: The seed of all draws.

    Raises:
        BatchError: The folder has no maps, no class has enough of them, or its model cannot be loaded by name.
        DependencyError: SciPy is not installed.
        MethodError: The seed is negative.
    """
    optional_import("scipy", "perturbation", "saliency groups")
    random = np.random.default_rng(check_integer("seed", seed, least=0))
    run, classes = SavedRun(folder), dict[tuple[str, str], list[tuple[str, str]]]()
    for key, row in run.rows.items():
        classes.setdefault((row["method"], row["name"]), []).append(key)
    large = [keys for keys in classes.values() if len(keys) >= LEAST]
    if not large:
        raise BatchError(f"{folder} has no class with {LEAST} maps by one method; explain more images of a class")
    vectors, maps = _vectors(run, view)
    draws, divided = max(DRAWS, round(2 * len(large) / LEVEL)) - 1, []  # enough for a small p-value after Holm
    for keys in large:
        points = np.stack([vectors[key] for key in keys])
        divided.append((keys, points, *_divided(points, draws, random)))
    corrected = holm(np.array([p for *_, p in divided]))
    rows = [
        _group(run, keys, points, np.stack([maps[key] for key in keys]), labels == label, stabilities[label], float(p))
        for (keys, points, labels, stabilities, _), p in zip(divided, corrected, strict=True)
        for label in np.unique(labels)
    ]
    rows.sort(key=lambda group: (group.p, group.fraction))
    small = len(classes) - len(large)
    notes = [f"classes with fewer than {LEAST} images, left out: {small}"] * bool(small)
    alone = sum(len(stabilities) == 1 for *_, stabilities, _ in divided)
    notes += [f"classes of one group: {alone} of {len(divided)}"]
    return Table([row for row in rows if row.fraction < 1], _COLUMNS, "Groups of maps", notes)


def _vectors(run: SavedRun, view: View) -> tuple[dict[tuple[str, str], _Array], dict[tuple[str, str], _Array]]:
    """Return the vector and the map (GRID, GRID) of each image and method."""
    vectors, maps = {}, {}
    with_places = ((key, run.load(key), None) for key in run.rows)
    for key, explanation, values in with_places if view == "places" else _weighted(run):
        row = run.rows[key]
        cells = on_grid(explanation, row["box"], (0, 0, row["width"], row["height"]), GRID).numpy().clip(0)
        maps[key] = cells / max(cells.sum(), 1e-30)
        vector = maps[key].ravel() if values is None else values
        vectors[key] = vector / max(float(np.linalg.norm(vector)), 1e-30)
    return vectors, maps


def _weighted(run: SavedRun) -> Iterator[tuple[tuple[str, str], Explanation, _Array]]:
    """Yield each map, with the features of its image weighted by the map and summed."""
    options, model = run.network("--view places needs no model")
    outputs = deque[Any](maxlen=1)
    batches: dict[tuple[str | None, tuple[int, int]], list[tuple[str, str]]] = {}
    for key, row in run.rows.items():
        layer = (row["layer"] or "").rpartition(", ")[2] or None  # the last of several layers
        batches.setdefault((layer, (row["input_width"], row["input_height"])), []).append(key)
    for (layer, _), keys in batches.items():
        for start in range(0, len(keys), TOGETHER):
            part = keys[start : start + TOGETHER]
            images = [run.open(name) for name, _ in part]
            with HookManager(persistent=True) as hooks:
                hooks.observe(model, outputs.append)
                read = features(model, images, layer, preprocess=options.preprocess, whole=options.whole)
            for key, top in zip(part, _top_classes(outputs.pop()), strict=False):
                if run.given_target(key) is not None and run.explains_class(key):  # it is a label
                    run.rows[key]["is_top"] = top == run.rows[key]["target"]
            for key, values in zip(part, read.values, strict=True):  # (K, h, w)
                explanation = run.load(key)
                weights = resized(reduced_maps(explanation, None), values.shape[1:])[0]
                yield key, explanation, (values * weights).sum((1, 2)).double().numpy()


def _top_classes(output: Any) -> list[int]:
    """Return the top class of each image; empty unless an output has the scores (N, classes) of classes."""
    is_classifier = isinstance(output, Tensor) and output.dim() == 2 and output.shape[1] > 1
    return output.argmax(1).tolist() if is_classifier else []


def _divided(points: _Array, draws: int, random: np.random.Generator) -> tuple[NDArray[np.int64], list[float], float]:
    """Return the group of each point, the stability of each group, and the p-value of the division by some draws."""
    chosen = np.sort(random.permutation(len(points))[:LANDMARKS])
    landmarks = points[chosen]
    values, states = _spectrum(landmarks)
    count = int(np.argmax(values[:MOST_GROUPS] - values[1 : MOST_GROUPS + 1])) + 1
    labels = _clusters(states[:, :count])
    if count == 1:
        return np.zeros(len(points), np.int64), [1.0], 1.0
    overlaps = np.zeros((HALVES, count))
    for row in overlaps:
        half = random.permutation(len(landmarks))[: len(landmarks) // 2]
        again = _clusters(_spectrum(landmarks[half])[1][:, :count])
        both = np.array([[_jaccard(labels[half] == a, again == b) for b in range(count)] for a in range(count)])
        row[:] = both.max(1)
    centred, above, draw = landmarks - landmarks.mean(0), 0, 0
    while above < ENOUGH and draw < draws:
        drawn = random.normal(size=(len(centred), len(centred))) @ centred / np.sqrt(len(centred)) + landmarks.mean(0)
        drawn /= np.linalg.norm(drawn, axis=1, keepdims=True).clip(1e-30)
        above += int(_spectrum(drawn)[0][count - 1] >= values[count - 1])
        draw += 1
    p = above / draw if above == ENOUGH else (1 + above) / (1 + draws)
    nearest = [int(np.argmax(landmarks @ point)) for point in points]
    return labels[nearest], overlaps.mean(0).tolist(), p


def _spectrum(points: _Array) -> tuple[_Array, _Array]:
    """Return the largest eigenvalues of the graph of points, in descending order, and their eigenvectors."""
    from scipy.linalg import eigh

    squared = (2 - 2 * points @ points.T).clip(0)
    scale = np.sqrt(np.sort(squared, 1)[:, min(NEIGHBOURS, len(points) - 1)]).clip(1e-12)
    near = np.exp(-squared / np.outer(scale, scale))
    np.fill_diagonal(near, 0)
    root = near.sum(1).clip(1e-30) ** -0.5
    largest = (len(points) - MOST_GROUPS - 1, len(points) - 1)
    values, states = eigh(near * np.outer(root, root), subset_by_index=largest)
    return values[::-1], states[:, ::-1]


def _clusters(states: _Array) -> NDArray[np.int64]:
    """Return the group of each row, with as many groups as columns, by QR with pivoting: it needs no start."""
    from scipy.linalg import qr

    pivots = qr(states.T, mode="r", pivoting=True)[1][: states.shape[1]]
    left, _, right = np.linalg.svd(states[pivots].T)
    labels: NDArray[np.int64] = np.abs(states @ left @ right).argmax(1)
    return labels


def _jaccard(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> float:
    return float((first & second).sum() / max(1, (first | second).sum()))


def _group(
    run: SavedRun,
    keys: Sequence[tuple[str, str]],
    points: _Array,
    cells: _Array,
    inside: NDArray[np.bool_],
    stability: float,
    p: float,
) -> Group:
    mean, others = cells[inside].mean(0), cells[~inside].mean(0) if not inside.all() else cells.mean(0)
    order = np.argsort(-others, axis=None)
    core = np.cumsum(others.ravel()[order]) <= 0.95
    typical = np.argsort(-points[inside] @ points[inside].mean(0))[:EXAMPLES]
    rows = [run.rows[key] for key, chosen in zip(keys, inside, strict=True) if chosen]
    probabilities = [row["probability"] for row in rows if row["probability"] is not None]
    are_top = [row["is_top"] for row in rows if "is_top" in row]
    return Group(
        name=rows[0]["name"],
        method=rows[0]["method"],
        images=len(rows),
        fraction=len(rows) / len(keys),
        probability=float(np.mean(probabilities)) if probabilities else None,
        accuracy=float(np.mean(are_top)) if are_top else None,
        outside=float(mean.ravel()[order][~core].sum()),
        stability=stability,
        p=p,
        examples=tuple(rows[index]["overlay"] for index in typical),
        mean_map=tuple(map(tuple, mean.tolist())),
    )


def write_groups(table: Table[Group], folder: Path) -> Path:
    """Write the groups as a page and as CSV into the folder of the run, and return the path of the page."""
    names = [name for name in Group.__dataclass_fields__ if name not in ("examples", "mean_map")]
    write_csv(inside(folder, GROUPS_CSV), names, map(asdict, table))
    page = write_page(inside(folder, GROUPS), table, map(_figure, table))
    report(folder)  # with a tab that leads to the groups
    return page


def _figure(group: Group) -> str:
    """Return the examples and the mean map of a group as HTML."""
    cells = np.array(group.mean_map) / max(np.max(group.mean_map), 1e-30)
    colors = color_table(SEQUENTIAL)[(255 * cells).round().astype(int)]
    png = base64.b64encode(encode(Image.fromarray(colors.astype(np.uint8)), "PNG")).decode()
    text = f"{group.name} by {group.method}: {plural(group.images, 'image')}, {share(group.fraction)} of the class"
    mean = f'<img class="cells" src="data:image/png;base64,{png}" alt="mean map">'
    return figure("group", group.examples, f"{text}; last, the mean map", mean)
