"""`saliency explain`: the same run as `saliency batch`, image by image and without a manifest."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image

from ...attribution.explanation import Explanation
from ...batch.drawing import write_results
from ...batch.errors import Failure
from ...batch.listing import ImageEntry, with_names
from ...batch.manifest import Row
from ...batch.network import LoadedImage, Network, Results, Task
from ...batch.run import require_sensible_options
from ...batch.run_options import RunOptions
from ...batch.sources import find_images
from ...io.preprocess import Frame
from ...render.blending import probability
from ...render.colors import table
from ...render.overlay import contact_sheet, save_picture
from ..console import Screen, UsageError, visible
from ..options import overlay_style
from ..parsing import ALL, methods_and_photos, ready_model, require_folder
from ..summary import Outcome, print_summary

SHEET = "sheet.png"
THUMB = 240


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Explain the photos, print the results, and return the exit code.

    Raises:
        SaliencyError: The command line asks for something impossible; nothing has been written.
    """
    names, more_photos = methods_and_photos(arguments.methods)
    images = with_names(find_images([*arguments.photos, *more_photos], literal=True))
    if not images:
        raise UsageError("no photo was named; try: saliency explain photo.jpg")
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
        table(options.style.colormap)
    network = Network(options, ready_model(arguments.model, arguments.weights, arguments.device, screen))
    _protect_photos(images, names, arguments)
    require_folder(arguments.out)
    outcomes: list[Outcome] = []
    thumbs: list[dict[str, Explanation]] = []
    sheet, done, is_interrupted = None, 0, False
    try:
        with screen.progress() as show:
            for image in images:
                show(done, len(images), 0)
                screen.subject = visible(image.label)
                loaded = network.load(image)
                results = network.explain([loaded])[0]
                if not any(outcome.file for outcome in outcomes):
                    failures = [result if isinstance(result, Failure) else None for result in results.values()]
                    require_sensible_options(options, failures)
                thumbs.append({})
                for row in write_results(options, arguments.out, Task(done, image, tuple(names)), loaded, results):
                    outcomes.append(_outcome(arguments, image, row, results))
                    if arguments.sheet and row["error"] is None:
                        thumbs[-1][row["method"]] = _thumb(results[row["method"]], loaded, options)
                done += 1
        screen.subject = ""
        if arguments.sheet:
            with screen.waiting("drawing the contact sheet"):
                sheet = _draw_sheet(thumbs, options, arguments.out)
    except KeyboardInterrupt:
        is_interrupted = True
    print_summary(outcomes, arguments.out, sheet, screen)
    if is_interrupted:
        raise KeyboardInterrupt(f"{done} of {len(images)} photos are done")
    has_failed = any(outcome.reason and not outcome.expected for outcome in outcomes)
    return 1 if has_failed or not any(outcome.file for outcome in outcomes) else 0


def _protect_photos(images: Sequence[ImageEntry], methods: Sequence[str], arguments: argparse.Namespace) -> None:
    """Raise UsageError if a file of this run would replace one of its photos."""
    out = arguments.out.resolve()
    photos = {Path(image.path).parent.resolve() / image.label for image in images}
    files = [f"{image.name}.{method}.png" for image in images for method in methods]
    for file in [*files, *([SHEET] if arguments.sheet else [])]:
        if out / file in photos:
            raise UsageError(f"--out {arguments.out}: {file} would replace one of the photos; choose another folder")


def _outcome(arguments: argparse.Namespace, image: ImageEntry, row: Row, results: Results) -> Outcome:
    """Return a row of the manifest as a line of the summary."""
    known = next((result for result in results.values() if isinstance(result, Explanation)), None)
    return Outcome(
        Path(image.source),
        row["method"] or "",
        target="" if known is None else known.target_names[0],
        probability="" if known is None else " ".join(probability(known)),
        layer=row["layer"],
        file=None if row["overlay"] is None else arguments.out / row["overlay"],
        reason=row["error"] or "",
        expected=row["error_kind"] == "NotApplicableError" and ALL in (arguments.methods or ()),
    )


def _thumb(result: object, loaded: LoadedImage, options: RunOptions) -> Explanation:
    """Return the explanation on a picture no larger than the sheet needs: any number of them fits into memory."""
    if not isinstance(result, Explanation) or loaded.picture is None:
        raise TypeError("only an explanation of a picture is on the sheet")
    small = loaded.picture.copy()
    small.thumbnail((2 * THUMB, 2 * THUMB), Image.Resampling.LANCZOS)
    across, down = small.width / loaded.size[0], small.height / loaded.size[1]
    left, top, right, bottom = loaded.box
    frame = Frame(small, (left * across, top * down, right * across, bottom * down))
    return replace(result, frames=(frame,), sign=options.style.sign or result.sign)


def _draw_sheet(thumbs: Sequence[dict[str, Explanation]], options: RunOptions, out: Path) -> Path | None:
    """Write the contact sheet: methods that succeeded on most photos, photos on which all of these did."""
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
