"""`saliency explain`: explain photos one by one with the functions of `saliency batch`, without a manifest."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from PIL import Image
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from ...attribution.explanation import Explanation
from ...batch.drawing import write_results
from ...batch.errors import Failure
from ...batch.listing import ImageEntry, with_names
from ...batch.manifest import Row
from ...batch.network import LoadedImage, Network, Task
from ...batch.run import require_sensible_options
from ...batch.run_options import RunOptions
from ...batch.sources import find_images
from ...io.preprocess import Frame
from ...render.blending import color_table
from ...render.overlay import contact_sheet, save_picture
from ..console import GAP, Screen, UsageError, as_typed, count, visible
from ..options import ALL, overlay_style
from ..parsing import methods_and_photos, ready_model, require_folder

SHEET = "sheet.png"
THUMB = 240

Cells = tuple[str, str, str, str, Text]
"""Photo, class, probability, method and result, as printed."""


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Explain the photos, print the results, and return the exit code.

    Raises:
        SaliencyError: The command line is invalid. Nothing has been written.
    """
    names, more_photos = methods_and_photos(arguments.methods)
    images = with_names(find_images([*arguments.photos, *more_photos], literal=True))
    if not images:
        raise UsageError("no photo was given; try: saliency explain photo.jpg")
    options = RunOptions(
        model=arguments.model,
        weights=arguments.weights,
        methods=names,
        layer=arguments.layer,
        options=dict(arguments.settings),
        target=arguments.target,
        style=overlay_style(arguments),
        maps=arguments.save,
        with_manifest=False,
    )
    if options.style.colormap is not None:
        color_table(options.style.colormap)
    network = Network(options, ready_model(arguments.model, arguments.weights, arguments.device, screen))
    _protect_photos(images, names, arguments)
    require_folder(arguments.out)
    rows: list[Row] = []
    thumbs: list[dict[str, Explanation]] = []
    sheet, done, is_interrupted = None, 0, False
    try:
        with screen.progress() as show:
            for image in images:
                show(done, len(images), 0)
                screen.subject = visible(image.label)
                loaded = network.load(image)
                results = network.explain([loaded])[0]
                if not any(row["overlay"] for row in rows):
                    errors = [result if isinstance(result, Failure) else None for result in results.values()]
                    require_sensible_options(options, errors)
                thumbs.append({})
                for row in write_results(options, arguments.out, Task(done, image, tuple(names)), loaded, results):
                    rows.append(row)
                    if arguments.sheet and row["error"] is None:
                        thumbs[-1][row["method"]] = _thumb(results[row["method"]], loaded, options)
                done += 1
        screen.subject = ""
        if arguments.sheet:
            with screen.waiting("drawing the contact sheet"):
                sheet = _draw_sheet(thumbs, options, arguments.out)
    except KeyboardInterrupt:
        is_interrupted = True
    # With --method all, a method that does not apply to the model is not a failure.
    expected = "NotApplicableError" if ALL in (arguments.methods or ()) else None
    failures = _print_results(rows, expected, arguments.out, sheet, screen)
    if is_interrupted:
        raise KeyboardInterrupt(f"{done} of {len(images)} photos are done")
    return 1 if failures or not any(row["overlay"] for row in rows) else 0


def _protect_photos(images: Sequence[ImageEntry], methods: Sequence[str], arguments: argparse.Namespace) -> None:
    """Raise UsageError if a file of this run would replace one of its photos."""
    out = arguments.out.resolve()
    photos = {Path(image.path).parent.resolve() / image.label for image in images}
    files = [f"{image.name}.{method}.png" for image in images for method in methods]
    for file in [*files, *([SHEET] if arguments.sheet else [])]:
        if out / file in photos:
            raise UsageError(f"--out {arguments.out}: {file} would replace one of the photos; choose another folder")


def _thumb(result: object, loaded: LoadedImage, options: RunOptions) -> Explanation:
    """Return the explanation with a picture reduced to the size that the contact sheet needs, to save memory."""
    if not isinstance(result, Explanation) or loaded.picture is None:
        raise TypeError("only an explanation of a picture is on the sheet")
    small = loaded.picture.copy()
    small.thumbnail((2 * THUMB, 2 * THUMB), Image.Resampling.LANCZOS)
    across, down = small.width / loaded.size[0], small.height / loaded.size[1]
    left, top, right, bottom = loaded.box
    frame = Frame(small, (left * across, top * down, right * across, bottom * down))
    return replace(result, frames=(frame,), sign=options.style.sign or result.sign)


def _draw_sheet(thumbs: Sequence[dict[str, Explanation]], options: RunOptions, out: Path) -> Path | None:
    """Write the contact sheet with the methods that succeeded on most photos, and the photos on which all of them did.

    Returns None if there is no such method or photo.
    """
    rows = [row for row in thumbs if row]
    counts = Counter(method for row in rows for method in row)
    methods = [method for method in options.methods if 2 * counts[method] > len(rows)]
    complete = [[row[method] for method in methods] for row in rows if row.keys() >= set(methods)]
    if not methods or not complete:
        return None
    style = options.style
    sheet = contact_sheet(
        complete, thumb=THUMB, opacity=style.opacity, colormap=style.colormap, percentile=style.percentile
    )
    return save_picture(sheet, out / SHEET)


def _print_results(rows: Sequence[Row], expected: str | None, out: Path, sheet: Path | None, screen: Screen) -> int:
    """Print a table of the rows and the paths of the files, and return the number of failures.

    Failures are printed on stderr as well if the output is quiet or not a terminal. An error of the kind `expected` is
    not a failure.
    """
    failed = [row for row in rows if row["error"] is not None and row["error_kind"] != expected]
    if screen.quiet or not screen.is_terminal:
        for row in failed:
            screen.error(f"{' by '.join(filter(None, (row['source'], row['method'])))}: {row['error']}")
    if not rows:
        return 0
    cells = []
    for _, group in groupby(rows, itemgetter("index")):
        of_photo = list(group)
        # The row of a failed method has no target, but all methods explain the same target.
        known = next((row for row in of_photo if row["name"] is not None), of_photo[0])
        share = known["probability"]
        about = (
            visible(Path(known["source"]).name),
            known["name"] or "",
            "" if share is None else f"{100 * share:.1f} %",
        )
        cells.append([(*about, row["method"] or "", _result(row, out, expected)) for row in of_photo])
    if screen.is_terminal:
        _print_by_photo(cells, screen)
    else:
        columns = [Column("photo"), Column("class"), Column("prob."), Column("method"), Column("file")]
        screen.table(columns, [cell for of_photo in cells for cell in of_photo])
    _print_totals([row for row in rows if row["overlay"]], len(failed), out, sheet, screen)
    return len(failed)


def _result(row: Row, out: Path, expected: str | None) -> Text:
    if row["overlay"]:
        return Text(visible(out / row["overlay"]))
    return Text(as_typed(row["error"]), "dim" if row["error_kind"] == expected else "red")


def _print_by_photo(cells: Sequence[Sequence[Cells]], screen: Screen) -> None:
    """Print each photo and its class above a list of its methods and files, which fits any terminal width."""
    width = max(len(method) for of_photo in cells for *_, method, _ in of_photo)
    for of_photo in cells:
        photo, *target = of_photo[0][:3]
        screen.say(Text.assemble((photo, "bold"), *((f"  {part}", "cyan") for part in target if part)))
        grid = Table.grid(padding=(0, GAP, 0, 0))
        grid.add_column(width=width)
        grid.add_column(overflow="fold")
        for *_, method, result in of_photo:
            grid.add_row(method, result)
        screen.show(Padding(grid, (0, 0, 0, GAP)))


def _print_totals(written: Sequence[Row], failures: int, out: Path, sheet: Path | None, screen: Screen) -> None:
    screen.say()
    if written:
        photos = len({row["index"] for row in written})
        folder = "" if out == Path() else f" in {visible(out)}{os.sep}"
        screen.say(f"{count(len(written), 'overlay')} of {count(photos, 'photo')}{folder}")
    if sheet:
        screen.say(f"contact sheet: {visible(sheet)}")
    if written:
        screen.say(Text("bright: evidence for the class; tinted rectangle: the crop that the model saw", "dim"))
    layers = list(dict.fromkeys((row["layer"], row["method"]) for row in written if row["layer"]))
    if layers:
        usual = Counter(layer for layer, _ in layers).most_common(1)[0][0]
        others = [f"{method} at {layer}" for layer, method in layers if layer != usual]
        screen.say(Text(f"layer read by the CAMs: {'; '.join([str(usual), *others])}", "dim"))
    if failures:
        screen.say(Text(count(failures, "failure"), "red"))
