"""`saliency explain`: explain images one by one with the functions of `saliency batch`, without a manifest."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from rich.text import Text

from ..attribution.base import get_method
from ..attribution.explanation import Explanation
from ..batch.drawing import CARD_SUFFIXES, write_results
from ..batch.failures import Failure, sentence
from ..batch.listing import ImageEntry, with_names
from ..batch.manifest import Row
from ..batch.network import LoadedImage, Network, Task, find_devices, load_model, move_model
from ..batch.run import require_sensible_options
from ..batch.run_options import RunOptions
from ..batch.sources import Found, find_images
from ..errors import plural, visible
from ..evaluation.trust import TrustCard
from ..methods import METHODS
from ..render.blending import shrink
from ..render.overlay import save_drawing
from ..render.sheet import contact_sheet
from ..targets.embedding import text
from .arguments import ALL, METHOD, arguments_of, overlay_style
from .console import Screen, UsageError

SHEET = "sheet.png"
THUMB = 240


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Explain the images, print the results, and return the exit code.

    Raises:
        SaliencyError: The command line is invalid. Nothing has been written.
    """
    methods, more_images = methods_and_images(arguments.methods or [METHOD])
    with tempfile.TemporaryDirectory() as scratch:
        images, left_out = _find_images(arguments, more_images, Path(scratch))
        if arguments.out != Path("-"):
            code = _explain(arguments, methods, images, screen)
            screen.say_left_out(left_out)
            return code
        if (
            len(images) * len(methods) != 1
            or any((arguments.sheet, arguments.save, arguments.trust))
            or screen.is_terminal
        ):
            raise UsageError("-o - writes one overlay to a pipe or file; give one image and one method, and no --sheet")
        arguments.out = Path(scratch)
        code = _explain(arguments, methods, images, Screen(quiet=True))
        for overlay in Path(scratch).glob("*.png"):
            sys.stdout.buffer.write(overlay.read_bytes())
        return code


def _find_images(arguments: argparse.Namespace, more: Sequence[str], scratch: Path) -> Found:
    """Find the images. The name "-" denotes the image on standard input, which is written to a file."""
    names = [*arguments.images, *more]
    if "-" in names:
        (scratch / "stdin").write_bytes(sys.stdin.buffer.read())
    files = [str(scratch / "stdin") if name == "-" else name for name in names]
    images, left_out = find_images(files, recursive=arguments.recursive)
    images = [replace(image, source=image.source.removeprefix(f"{scratch}/")) for image in images]
    return Found(with_names([one for image in images for one in _once_per_text(image, arguments.texts)]), left_out)


def _once_per_text(image: ImageEntry, texts: Sequence[str]) -> list[ImageEntry]:
    """Return an image once for each text, which becomes a part of the names of its files."""
    stem, suffix = os.path.splitext(image.label)  # noqa: PTH122
    return [replace(image, label=f"{stem}-{one.replace(' ', '_')}{suffix}") for one in texts] or [image]


def _with_text(loaded: LoadedImage, texts: Sequence[str], index: int) -> LoadedImage:
    """Return the image of that number with its text, against the others, as the target."""
    others = list(texts)
    return replace(loaded, target=text(others.pop(index % len(texts)), against=others)) if texts else loaded


def _explain(arguments: argparse.Namespace, methods: list[str], images: Sequence[ImageEntry], screen: Screen) -> int:
    """Explain the images, and write the overlays to a folder."""
    if not images:
        raise UsageError("no image was given; try: saliency explain photo.jpg")
    given = arguments_of(RunOptions, arguments) | {"methods": methods, "options": dict(arguments.settings or ())}
    options = RunOptions(**given, style=overlay_style(arguments), maps=arguments.save, with_manifest=False)
    network = open_network(options, arguments.device, screen)
    suffixes = ["png", *(f"trust.{suffix}" for suffix in CARD_SUFFIXES if arguments.trust)]
    files = [f"{image.name}.{method}.{suffix}" for image in images for method in methods for suffix in suffixes]
    _prepare_folder(arguments.out, [*files, SHEET] if arguments.sheet else files, [image.path for image in images])
    rows: list[Row] = []
    thumbs: list[dict[str, Explanation]] = []
    cards: list[tuple[Row, TrustCard]] = []
    # With --method all, a method that does not apply to the model is not a failure.
    expected = "NotApplicableError" if ALL in (arguments.methods or ()) else None
    index = 0
    try:
        with screen.progress() as show:
            for index, image in enumerate(images):
                show(index, len(images), 0)
                screen.subject = visible(image.label)
                loaded = _with_text(network.load(image), arguments.texts, index)
                results = network.explain([loaded])[0]
                if not any(row["overlay"] for row in rows):
                    errors = [Failure.of(one) if isinstance(one, Exception) else None for one in results.values()]
                    require_sensible_options(options, errors)
                thumbs.append({})
                task = Task(index, image, tuple(methods))
                written = network.trust(task, loaded, results)
                for row in write_results(options, arguments.out, task, loaded, results, written):
                    rows.append(row)
                    result, card = results.get(row["method"]), written.get(row["method"])
                    cards += [(row, card)] if isinstance(card, TrustCard) else []
                    if arguments.sheet and row["overlay"] and isinstance(result, Explanation):
                        frame = shrink(loaded.frame(image), THUMB)
                        sign = options.style.sign or result.sign
                        thumbs[-1][row["method"]] = replace(result, frames=(frame,), sign=sign)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{index} of {len(images)} images are done") from None
    finally:
        screen.subject = ""
        failures = _print_results(rows, expected, arguments.out, screen)
        for row, card in cards:
            screen.say(f"{visible(Path(row['source']).name)} by {row['method']}: {card.summary}")
    if arguments.sheet:
        _write_sheet(thumbs, options, arguments.out, screen)
    return 1 if failures or not any(row["overlay"] for row in rows) else 0


def methods_and_images(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words after --method into methods without duplicates, and images that follow them.

    "all" selects every method. A word that is not a method is an image if it has a suffix or exists.

    Raises:
        MethodError: A word is neither a method nor an image, or no method is given. The message lists the closest
            names.
    """
    known = {*METHODS, ALL}
    images = [word for word in words if word not in known and (word == "-" or "." in word or os.path.exists(word))]  # noqa: PTH110
    names = [word for word in words if word not in images] or words
    methods = [method for name in names for method in (METHODS if name == ALL else [get_method(name).name])]
    return list(dict.fromkeys(methods)), images


def open_network(options: RunOptions, device: str, screen: Screen) -> Network:
    """Load the model on its device, with the methods."""
    first, *others = find_devices(device, options.model)
    if others:
        raise UsageError(f"--device {device}: only saliency batch and saliency evaluate use several devices")
    with screen.waiting(f"loading {options.model}"):
        return Network(options, move_model(load_model(options), first))


def _prepare_folder(out: Path, files: Sequence[str], images: Sequence[str]) -> None:
    """Create the output folder.

    Raises:
        UsageError: A file would replace one of the images.
        OSError: The folder cannot be written to.
    """
    protected = set(map(os.path.realpath, images))
    for file in files:
        if os.path.realpath(out / file) in protected:
            raise UsageError(f"--out {out}: {file} would replace one of the images; choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=out).close()


def _write_sheet(thumbs: Sequence[dict[str, Explanation]], options: RunOptions, out: Path, screen: Screen) -> None:
    """Write the contact sheet with the methods that succeeded on most images, and the images on which all of them did.

    Nothing is written if a method or an image does not exist.
    """
    rows = [row for row in thumbs if row]
    counts = Counter(method for row in rows for method in row)
    methods = [method for method in options.methods if 2 * counts[method] > len(rows)]
    complete = [[row[method] for method in methods] for row in rows if row.keys() >= set(methods)]
    if not methods or not complete:
        return
    style = {name: getattr(options.style, name) for name in ("opacity", "colormap", "percentile", "smoothing")}
    with screen.waiting("drawing the contact sheet"):
        path = save_drawing(contact_sheet(complete, thumb=THUMB, **style), out / SHEET)
    screen.say(f"contact sheet: {visible(path)}")


def _print_results(rows: Sequence[Row], expected: str | None, out: Path, screen: Screen) -> int:
    """Print the failures on standard error and a table of the other rows, and return the number of failures.

    An error of the kind `expected` is not a failure.
    """
    failed = [row for row in rows if row["error"] is not None and row["error_kind"] != expected]
    for row in failed:
        screen.error(sentence(row["source"], row["method"], row["error"]))
    if not rows:
        return 0
    rows = [row for row in rows if row not in failed or row["overlay"]]
    cells: list[tuple[str | Text, ...]] = []
    width = max((len(row["method"]) for row in rows), default=0)
    for _, group in groupby(rows, itemgetter("index")):
        of_image = list(group)
        # The row of a method that does not apply has no target, but all methods explain the same target.
        known = next((row for row in of_image if row["name"] is not None), of_image[0])
        share = "" if known["probability"] is None else f"{100 * known['probability']:.1f} %"
        about = (visible(Path(known["source"]).name), known["name"] or "", share)
        lines = [(row["method"], _result(row, out)) for row in of_image]
        if screen.is_terminal:  # a list for each image, which fits any width
            screen.say(Text.assemble((about[0], "bold"), (f"  {about[1]}  {share}", "cyan")))
            for method, result in lines:
                screen.say(Text.assemble(f"  {method:{width}}  ", result))
        cells += [(*about, *line) for line in lines]
    if cells and not screen.is_terminal:
        screen.table(["image", "class", "prob.", "method", "file"], cells)
    _print_totals([row for row in rows if row["overlay"]], len(failed), out, screen)
    return len(failed)


def _result(row: Row, out: Path) -> Text:
    return Text(visible(out / row["overlay"])) if row["overlay"] else Text(row["error"], "dim")


def _print_totals(written: Sequence[Row], failures: int, out: Path, screen: Screen) -> None:
    screen.say()
    if written:
        images = len({row["source"] for row in written})
        folder = "" if out == Path() else f" in {visible(out)}{os.sep}"
        screen.say(f"{plural(len(written), 'overlay')} of {plural(images, 'image')}{folder}")
        screen.say(Text("strong colours: what drove the score; rectangle: the crop that the model saw", "dim"))
    layers = dict.fromkeys(row["layer"] for row in written if row["layer"])
    if layers:
        screen.say(Text(f"layers read by the CAMs: {', '.join(layers)}", "dim"))
    for covered in dict.fromkeys(f"{row['method']}: {row['coverage']}" for row in written if row["coverage"]):
        screen.say(Text(covered, "dim"))
    if failures:
        screen.say(Text(plural(failures, "failure"), "red"))
