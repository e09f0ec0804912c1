"""`saliency explain`: write overlays of photos."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from ...attribution.base import Attribution, explain_together
from ...attribution.explanation import Explanation, Sign
from ...errors import ImageError, LayerError, NotApplicableError, TargetError
from ...io.image_io import open_picture
from ...io.preprocess import Frame
from ...render.blending import Opacity, probability
from ...render.colors import table
from ...render.heatmap import Percentile
from ...render.overlay import contact_sheet, overlay, save_picture
from ..console import Screen, UsageError, visible
from ..images import Photo, find_photos, labels
from ..parsing import ALL, build_methods, methods_and_photos, ready_model, require_folder, target_of
from ..summary import Outcome, print_summary

SHEET = "sheet.png"
THUMB = 240

Found = Mapping[str, Explanation | Exception]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was typed behind `saliency explain`."""

    photos: Sequence[str]
    methods: Sequence[str] | None
    model: str
    weights: str | None
    target: str | None
    layer: str | None
    settings: Sequence[tuple[str, Any]]
    out: Path
    opacity: Opacity
    colormap: str | None
    sign: Sign | None
    percentile: Percentile
    sheet: bool
    save: bool
    device: str
    quiet: bool


class Together:
    """Several methods on one model, from one forward where that is enough. A failing one does not cost the others."""

    def __init__(self, methods: Sequence[Attribution]) -> None:
        self.methods = methods
        self._alone: set[str] = set()

    def __call__(self, picture: Image.Image, target: int | None) -> Found:
        """The explanation of each method, or its error, in the order of the methods."""
        found = self._attempt([each for each in self.methods if each.name not in self._alone], picture, target)
        for each in self.methods:
            if each.name in self._alone:
                found |= self._attempt([each], picture, target)
        failed = {name for name, result in found.items() if isinstance(result, Exception)}
        # What failed where others did not is asked for by itself next time, so that the others share again.
        self._alone = failed if len(failed) < len(found) else set()
        return {each.name: found[each.name] for each in self.methods}

    def _attempt(
        self, methods: Sequence[Attribution], picture: Image.Image, target: int | None
    ) -> dict[str, Explanation | Exception]:
        if not methods:
            return {}
        try:
            explanations = explain_together(methods, picture, target)
        except Exception as error:  # noqa: BLE001 - whatever a model raises is told of this photo, and the next is due
            if len(methods) == 1:
                return {methods[0].name: error}
            return {name: one for each in methods for name, one in self._attempt([each], picture, target).items()}
        return {each.name: one for each, one in zip(methods, explanations, strict=True)}


class Work:
    """One run: every photo by every method."""

    def __init__(self, request: Request, photos: Sequence[Photo], methods: Sequence[Attribution]) -> None:
        self.request = request
        self.photos = photos
        self.together = Together(methods)
        self.target = target_of(request.target, methods[0].categories)
        self.names = labels([photo.path for photo in photos])
        self.done = 0  # photos
        self.outcomes: list[Outcome] = []
        self.rows: list[dict[str, Explanation]] = []  # of the contact sheet

    def run(self, screen: Screen) -> None:
        """Explain all photos. What is made stays, also when this is interrupted."""
        with screen.progress() as show:
            for photo, name in zip(self.photos, self.names, strict=True):
                screen.subject = visible(photo.path.name)
                show(self.done, len(self.photos), 0)
                self.rows.append({})
                self.outcomes.extend(self._explained(photo, name))
                self.done += 1
        screen.subject = ""

    def _explained(self, photo: Photo, name: str) -> Iterator[Outcome]:
        try:
            picture = open_picture(photo.path) if not photo.problem else None
        except ImageError as error:
            yield Outcome(photo.path, error=error)
            return
        if picture is None:
            yield Outcome(photo.path, error=ImageError(photo.problem))
            return
        found = self.together(picture, self.target)
        self._require_sense(found)
        some = next((each for each in found.values() if isinstance(each, Explanation)), None)
        about = ("", "") if some is None else (some.target_names[0], " ".join(probability(some)))
        for method, result in found.items():
            outcome = Outcome(photo.path, method, *about)
            if isinstance(result, Exception):
                expected = isinstance(result, NotApplicableError) and ALL in (self.request.methods or ())
                yield replace(outcome, error=result, expected=expected)
            else:
                yield self._drawn(replace(outcome, layer=result.layer), name, result)

    def _drawn(self, outcome: Outcome, name: str, explanation: Explanation) -> Outcome:
        request, stem = self.request, f"{name}.{explanation.method}"
        try:
            picture = overlay(
                explanation,
                opacity=request.opacity,
                colormap=request.colormap,
                sign=request.sign,
                percentile=request.percentile,
            )
            file = save_picture(picture, request.out / f"{stem}.png")
            if request.save:
                explanation.save(request.out / f"{stem}.safetensors")
        except Exception as error:  # noqa: BLE001 - a full disk, a file in the way: told of this file, and the next is due
            return replace(outcome, error=error)
        if request.sheet:
            self.rows[-1][explanation.method] = self._thumb(explanation)
        return replace(outcome, file=file)

    def _require_sense(self, found: Found) -> None:
        """Raise what is wrong with the command rather than with a photo, as long as nothing was made."""
        errors = [each for each in found.values() if isinstance(each, Exception)]
        if any(outcome.file for outcome in self.outcomes):
            return
        if len(errors) == len(found) and all(isinstance(each, TargetError) for each in errors):
            raise errors[0]
        for error in errors:
            if self.request.layer is not None and isinstance(error, LayerError):
                raise error

    def _thumb(self, explanation: Explanation) -> Explanation:
        """The explanation on a picture no larger than the sheet needs: a run of any length fits into memory."""
        frame = explanation.frames[0]
        if frame is not None:
            small = frame.picture.copy()
            small.thumbnail((2 * THUMB, 2 * THUMB), Image.Resampling.LANCZOS)
            across, down = small.width / frame.picture.width, small.height / frame.picture.height
            left, top, right, bottom = frame.box
            frame = Frame(small, (left * across, top * down, right * across, bottom * down))
        sign = self.request.sign if self.request.sign is not None else explanation.sign
        return replace(explanation.to("cpu"), frames=(frame,), sign=sign)

    def draw_sheet(self) -> Path | None:
        """The contact sheet of the methods that worked on most photos, and of the photos on which all of these did."""
        rows = [row for row in self.rows if row]
        counts = Counter(method for row in rows for method in row)
        methods = [each.name for each in self.together.methods if 2 * counts[each.name] > len(rows)]
        whole = [[row[method] for method in methods] for row in rows if row.keys() >= set(methods)]
        if not methods or not whole:
            return None
        sheet = contact_sheet(
            whole,
            thumb=THUMB,
            opacity=self.request.opacity,
            colormap=self.request.colormap,
            percentile=self.request.percentile,
        )
        return save_picture(sheet, self.request.out / SHEET)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Explain the photos, print the results, and return the exit code.

    Raises:
        SaliencyError: What was typed cannot be done; nothing has been made.
    """
    request = Request(**vars(arguments))
    names, more_photos = methods_and_photos(request.methods)
    photos = find_photos([*request.photos, *more_photos])
    if not photos:
        raise UsageError("no photo was named; try: saliency explain photo.jpg")
    if request.colormap is not None:
        table(request.colormap)
    model = ready_model(request.model, request.weights, request.device, screen)
    work = Work(request, photos, build_methods(names, model, request.layer, request.settings))
    _spare_the_photos(work)
    require_folder(request.out)
    sheet = None
    interrupted = False
    try:
        work.run(screen)
        if request.sheet:
            with screen.waiting("drawing the contact sheet"):
                sheet = work.draw_sheet()
    except KeyboardInterrupt:
        interrupted = True
    print_summary(work.outcomes, request.out, sheet, screen)
    if interrupted:
        raise KeyboardInterrupt(f"{work.done} of {len(photos)} photos are done")
    return _exit_code(work.outcomes)


def _exit_code(outcomes: Sequence[Outcome]) -> int:
    failed = any(outcome.error and not outcome.expected for outcome in outcomes)
    return 1 if failed or not any(outcome.file for outcome in outcomes) else 0


def _spare_the_photos(work: Work) -> None:
    """Raise where a file of this run would replace one of its photos."""
    out = work.request.out.resolve()
    photos = {photo.path.parent.resolve() / photo.path.name for photo in work.photos}
    made = [f"{name}.{method.name}.png" for name in work.names for method in work.together.methods]
    for file in [*made, *([SHEET] if work.request.sheet else [])]:
        if out / file in photos:
            raise UsageError(f"--out {work.request.out}: {file} would replace one of the photos; choose another folder")
