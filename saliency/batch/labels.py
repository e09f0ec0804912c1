"""Write the saved maps of a run as labels of FiftyOne."""

from __future__ import annotations

from pathlib import Path

from ..errors import errors_as, optional_import
from .failures import BatchError
from .runs import SavedRun, on_grid

SIDE = 256  # values per edge; FiftyOne stretches a heatmap over its image


def write_labels(folder: Path, name: str) -> int:
    """Write each saved map of a run into a dataset of FiftyOne, and return the number of maps.

    The dataset is created if it does not exist, and images that it lacks are added. A label is a `fiftyone.Heatmap` in
    a field named after the method, such as `grad_cam`, or `grad_cam_0` for a detection. Its values are those of
    `saliency.heatmap`, and 0 where the model did not see the image.

    Raises:
        DependencyError: FiftyOne is not installed.
        BatchError: The folder has no maps of images, or FiftyOne has no database.
    """
    fiftyone = optional_import("fiftyone", "fiftyone", "--fiftyone")
    run = SavedRun(folder)
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
        values = on_grid(run.load((image, method)), row["box"], (0, 0, row["width"], row["height"]), SIDE)
        low = -row["limit"] if row["sign"] == "signed" else row["floor"]
        field = method if entry.detection is None else f"{method}_{entry.detection}"
        sample[field] = fiftyone.Heatmap(map=values.float().numpy(), range=[low, row["limit"]])
        sample.save()
    return len(run.rows)
