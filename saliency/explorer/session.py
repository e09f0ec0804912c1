"""One model, and the questions about images that the page of the explorer asks it.

Questions and answers are dictionaries that JSON can hold, except for the bytes of maps and pictures. This module does
not depend on how they are transported.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import PurePath
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from PIL import Image

from .._version import __version__
from ..attribution.base import METHODS, Attribution, get_method, summary
from ..attribution.explanation import Explanation
from ..attribution.inputs import InputExplanations
from ..attribution.options import is_per_input
from ..attribution.passes import MultiPassAttribution, Partial, TimedAttribution, listening
from ..batch.drawing import card_facts, explanation_facts, shrink
from ..batch.failures import error_columns, printable
from ..batch.listing import ARRAY
from ..batch.network import create_method, find_devices, load_model, move_model, reads_layer, require_options
from ..batch.options import NetworkOptions, OverlayStyle
from ..batch.sources import find_images
from ..errors import (
    USER_CODE_ERRORS,
    ImageError,
    LayerError,
    MethodError,
    ModelError,
    NotApplicableError,
    NotFoundError,
    RenderError,
    SaliencyError,
    SaliencyWarning,
    TargetError,
    errors_as,
)
from ..evaluation.trust import trust
from ..io.atomic_write import SOFTWARE
from ..io.geometry import Frame, scaled_size
from ..io.inputs import Batch, ImagesLike, decode, encode, open_image, split_images
from ..io.preprocess import Preprocess, drawable
from ..model.call import bound, run_model
from ..model.dual_encoder import DualEncoder
from ..model.inputs import InputBatch, requires_several, with_image
from ..model.layers import scan_layers
from ..render.figure import as_png, input_picture
from ..render.overlay import MOST_OPACITY, encode_png, overlay
from ..render.results import figure
from ..render.scaling import DIVERGING, SEQUENTIAL, hex_colors, scale_map, shared_limit
from ..targets.boxes import BoxTarget, as_place, box
from ..targets.classes import ClassTarget, as_target, class_name, class_scores, contrast
from ..targets.question import Categories
from ..targets.regions import RegionScore, region, score_maps
from ..targets.similarity import text
from ..validation import check_choice, check_number

PageAnswer = dict[str, Any]
Asked = Mapping[str, Any]
Send = Callable[[PageAnswer], None]
Result = Explanation | InputExplanations
Poll = Callable[[], None]
"""Called between passes. It may raise `StoppedQuestion`."""

MOST_BYTES, MOST_PIXELS = 64 * 2**20, 100_000_000  # limits for one image
HELD_IMAGES, HELD_PIXELS = 16, 200_000_000  # in memory; the newest image always stays
HELD_RESULTS = 8  # explanations of one image
SAMPLE = "sample.jpg"
PICTURE_SIDE, THUMBNAIL_SIDE, PICTURE_QUALITY = 1600, 160, 88
LABELS_SIDE, NO_REGION = 256, 255
TOP, MOST_REGIONS = 5, 20
PAUSE = 1.0  # seconds until the first map of the passes so far, and between two maps
FIGURE_DPI = 200
SECONDS = 15.0  # for a trust card
STYLE = {"opacity", "percentile", "threshold"}
_HIDDEN = re.compile(r"\b(?:drop|act)(?:\d|_\w+)?$")  # layers inside the layers of timm that nobody chooses


class StoppedQuestion(Exception):  # noqa: N818 - nothing failed
    """The answer to a question is not wanted any more. Not a SaliencyError, which a trust card reports in a row."""


class UnknownImageError(SaliencyError, LookupError):
    """No image with this number is in memory."""


class Stop(threading.Event):
    """Stops a question that another thread answers."""

    def check(self) -> None:
        """Raise StoppedQuestion if the answer is not wanted any more."""
        if self.is_set():
            raise StoppedQuestion("a newer question replaced this one")


@dataclass(frozen=True, slots=True, eq=False)
class HeldImage:
    """An image, or a case of several inputs, in memory.

    Attributes:
        name: The name of its file.
        image: The decoded image; or the inputs by name, as for `Attribution.attribute`.
        batch: The model's input; the first photo of several inputs.
        frames: The images that are drawn, with the positions of the inputs.
        facts: The facts that the page shows first: top classes, boxes, regions.
        results: The last complete explanations.
    """

    name: str
    image: Any
    batch: Batch
    frames: Sequence[Frame]
    facts: PageAnswer
    results: dict[str, Result] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class PageQuestion:
    """A question about one image and one method.

    Attributes:
        held: The image, or the case.
        index: The number of the input of a case; 0 for an image.
        cls: The class of the method.
        layer: The layer, if the method reads a layer; None for the default layer.
        target: The target.
        code: The Python code that creates the target.
    """

    held: HeldImage
    index: int
    cls: type[Attribution]
    layer: str | None
    target: Any
    code: str

    @property
    def key(self) -> str:
        """Identifies the explanation of the image."""
        return f"{self.cls.name} {self.layer} {self.code}"


class Session:
    """One model in memory, the images that were opened last, and their explanations.

    Only one thread at a time may call a function that runs the model: all but `about`, `picture` and `thumbnail`.

    Args:
        options: The model with its preprocessing and class names, the default method with its layer and options, the
            device, the style of drawings, and whether the default method is compiled.
        images: Images to offer, or a folder of images; by default a sample photo. For a model with several inputs, a
            mapping of the inputs of one case, as for `Attribution.attribute`, or of a folder or file for each input.

    Raises:
        SaliencyError: The model cannot be loaded, has no preprocessing, or an option is invalid.
    """

    def __init__(self, options: NetworkOptions, images: ImagesLike | None = None) -> None:
        self._options, self._is_sample = options, isinstance(images, Sequence | None) and not images
        self._offered = _offered([files("saliency.frontend").joinpath(SAMPLE)] if self._is_sample else images)
        device, *_ = find_devices(options.device, options.model)
        self.model = move_model(load_model(options), device)
        require_options(options.options, METHODS.values())
        self._default = create_method(get_method(options.methods[0]), options, self.model)
        self._held: dict[str, HeldImage] = {}
        self._compiled: Attribution | None = None
        self._inputs = list[Any]()  # the names of the images of a case, the first photo first
        example: Any = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
        if isinstance(images, Mapping):
            _, example = self._open_offered(0)
            inputs = self._default.read_inputs(example)
            self._inputs = sorted(inputs.frames, key=lambda name: name != inputs.first)
        elif requires_several(self.model) or is_per_input(self._default.preprocess):
            cure = (
                'saliency.explore(model, {"rgb": image, "depth": depth}), or saliency serve MODEL rgb=FILE depth=FILE'
            )
            raise ModelError(f"the explorer needs the inputs of this model by name: {cure}")
        with self._default.call(self._read(example)) as batch, torch.no_grad():
            self._scan = scan_layers(self.model, batch.inputs)
            output = run_model(self.model, batch.inputs)
            self.asks = self._questions(output, batch)
        self._inapplicable = self._without_attention(example)
        if not self.asks:
            raise ModelError("the explorer finds no classes, boxes, regions or embeddings in the model's output")
        if options.compile:  # before other threads run, because tracing changes the state of the process
            self._compiled = self._default.compile()
            with suppress(*USER_CODE_ERRORS):  # shown when the method is chosen
                self._compiled.attribute(example)

    def _read(self, image: Any) -> Batch:
        """Read an image, or a case of several inputs, whose first photo is returned.

        Raises:
            ImageError: The image cannot be read, or the case has not one image of each name.
        """
        if not self._inputs:
            return self._default.read(image)
        inputs = self._default.read_inputs(image)
        shapes = {name: tuple(inputs.values[name].shape) for name in inputs.frames}
        if {*shapes} != {*self._inputs} or any(len(shape) != 4 or shape[0] > 1 for shape in shapes.values()):
            raise ImageError(f"expected one image for each of {', '.join(map(str, self._inputs))}, got {shapes}")
        return inputs.batch(self._inputs[0])

    def _frames(self, batch: Batch) -> list[Frame]:
        """Return the images that are drawn; of inputs that were given as tensors, pictures."""
        if not isinstance(batch, InputBatch):
            return [cast("Frame", batch.frames[0])]
        source = batch.source
        return [source.frames[name][0] or input_picture(source.values[name][0]) for name in self._inputs]

    def _without_attention(self, image: Any) -> dict[str, str]:
        """Return the methods that need attention which the model lacks, with the reason."""
        reasons: dict[str, str] = {}
        for name, cls in METHODS.items():
            if cls.needs.attention and not issubclass(cls, MultiPassAttribution):
                try:
                    with warnings.catch_warnings(action="ignore"):
                        create_method(cls, replace(self._options, layer=None), self.model).attribute(image)
                except NotApplicableError as error:
                    reasons[name] = str(error)
                except USER_CODE_ERRORS:  # the error is shown when the method is chosen
                    pass
        return reasons

    def _questions(self, output: Any, batch: Batch) -> list[str]:
        """Return the kinds of targets that the model's output has."""
        if isinstance(self.model, DualEncoder):
            return ["text"]
        readers: dict[str, Callable[[], object]] = {
            "class": lambda: class_scores(output),
            "region": lambda: self._regions(output, batch),
            "box": lambda: self._detections(output, batch),
        }
        kinds = []
        for kind, read in readers.items():
            with suppress(TargetError):
                read()
                kinds.append(kind)
            if kinds == ["class"]:
                return kinds
        return [*kinds, "point"] if kinds else []

    def about(self) -> PageAnswer:
        """Return the facts that the page needs before any image: methods, layers, classes, limits and colours."""
        names = self._default.categories
        methods = [
            {
                "name": name,
                "title": cls.__name__,
                "summary": summary(cls),
                "cost": cls.cost,
                "many_passes": issubclass(cls, MultiPassAttribution),
                "reads_layer": reads_layer(cls),
                "inapplicable": self._inapplicable.get(name),
            }
            for name, cls in METHODS.items()
        ]
        return {
            "model": self._options.model_name,
            "inputs": list(map(str, self._inputs)),
            "version": __version__,
            "methods": methods,
            "method": self._default.name,
            "layers": [layer.name for layer in self._scan.spatial if not _HIDDEN.search(layer.name)],
            "layer": self._options.layer or (None if self._inputs else self._scan.default),
            "classes": None if names is None else list(names),
            "asks": list(self.asks),
            "images": [{"index": index, "name": name} for index, (name, _) in enumerate(self._offered)],
            "sample": self._is_sample,
            "colors": {SEQUENTIAL: hex_colors(SEQUENTIAL), DIVERGING: hex_colors(DIVERGING, centred=True)},
            "limits": {"bytes": MOST_BYTES, "pixels": MOST_PIXELS},
            "opacity": MOST_OPACITY,
        }

    # Images

    def open(self, image: bytes | int, name: str = "image", case: Any = None, index: int = 0) -> PageAnswer:
        """Open the file of an image, or the offered image with this number, and return its facts.

        Args:
            image: The file, or the number.
            name: The name of the file.
            case: The number of an opened case of several inputs; the file then replaces one of its inputs.
            index: The number of this input.

        Raises:
            ImageError: The image cannot be read, or is too large.
            UnknownImageError: No image with this number is offered.
        """
        opened: Any
        shape = ""  # of an array
        if isinstance(image, int):
            name, opened = self._open_offered(image)
        elif self._inputs and name.endswith(ARRAY):
            with errors_as(ImageError, f"{name!r} cannot be read"):
                opened = np.load(io.BytesIO(image))
            shape = f" {opened.shape}"
        else:
            opened = decode(io.BytesIO(image), name, MOST_PIXELS)
        if self._inputs and not isinstance(image, int):
            opened = with_image(self._find(case).image, self._inputs[index], opened)
        try:
            with self._default.call(self._read(opened)) as batch, torch.no_grad():
                facts = self._facts(batch)
        except SaliencyError as error:
            raise type(error)(f"{name}{shape}: {error}") from error
        number = secrets.token_hex(8)
        self._held[number] = HeldImage(printable(name), opened, batch, self._frames(batch), facts)
        sizes = [sum(frame.image.width * frame.image.height for frame in held.frames) for held in self._held.values()]
        while len(sizes) > 1 and (len(sizes) > HELD_IMAGES or sum(sizes) > HELD_PIXELS):
            del self._held[next(iter(self._held))], sizes[0]
        return self.facts(number)

    def facts(self, number: str) -> PageAnswer:
        """Return the facts of an opened image, or of a case. Raises UnknownImageError."""
        held = self._find(number)
        sizes = [(frame.image.size, list(frame.box)) for frame in held.frames]
        images = [{"width": width, "height": height, "box": box} for (width, height), box in sizes]
        return {"image": number, "name": held.name, "images": images, **images[0], **held.facts}

    def _open_offered(self, index: int, draft: int | None = None) -> tuple[str, Any]:
        """Return the name of an offered image, and the image. Raises UnknownImageError, or ImageError."""
        if not 0 <= index < len(self._offered):
            raise UnknownImageError(f"no image {index}; {len(self._offered)} are offered")
        name, opened = self._offered[index]
        return name, opened(draft=draft)

    def thumbnail(self, index: int) -> bytes:
        """Return an offered image as JPEG, with no side longer than 160. Raises errors as `open`."""
        _, image = self._open_offered(index, THUMBNAIL_SIDE)
        if self._inputs:
            image = self._frames(self._read(image))[0].image
        else:
            image = drawable(image, cast("Preprocess", self._default.preprocess).range)
        return encode(shrink(image, THUMBNAIL_SIDE), "JPEG", quality=PICTURE_QUALITY)

    def _find(self, number: Any) -> HeldImage:
        held = self._held.get(number) if isinstance(number, str) else None
        if held is None:
            raise UnknownImageError("the image is not in memory any more; open it again")
        return held

    def picture(self, number: str, index: int = 0) -> bytes:
        """Return an opened image as JPEG, upright, with no side longer than 1600. Raises UnknownImageError."""
        return encode(shrink(self._find(number).frames[index].image, PICTURE_SIDE), "JPEG", quality=PICTURE_QUALITY)

    def _facts(self, batch: Batch) -> PageAnswer:
        """Return the top classes, the boxes and the regions of one image."""
        output = run_model(self.model, batch.inputs)
        return {
            **(self._top(output, batch) if "class" in self.asks else {"top": []}),
            "boxes": self._detections(output, batch) if "box" in self.asks else [],
            **(self._regions(output, batch) if "region" in self.asks else {"regions": []}),
        }

    def _top(self, output: Any, batch: Batch) -> PageAnswer:
        """Return the top classes, and the probabilities of all classes; None if they have none, or are two."""
        images = self._default.images(batch.inputs, batch.frames)
        score, scores = ClassTarget((None,)).find(output, images), class_scores(output)[0]
        best = score.classes[0]
        order = [best, 1 - best] if score.is_binary else scores.topk(min(TOP, len(scores))).indices.tolist()
        probabilities = [score.link and replace(score, classes=(index,)).probability(output) for index in order]
        top = [
            {
                "target": index,
                "name": class_name(index, self._default.categories),
                "probability": None if probability is None else float(probability[0]),
            }
            for index, probability in zip(order, probabilities, strict=True)
        ]
        scores = scores.float()
        links = {"softmax": scores.softmax(0), "sigmoid": scores.sigmoid(), "identity": scores}
        of_all = None if score.link is None or score.is_binary else links[score.link].tolist()
        return {"top": top, "probabilities": of_all}

    def _detections(self, output: Any, batch: Batch) -> list[PageAnswer]:
        target, images = cast("BoxTarget", box()), self._default.images(batch.inputs, batch.frames)
        return [
            {
                "index": index,
                "target": match.label,
                "name": class_name(match.label, self._default.categories),
                "probability": match.probability,
                "box": list(match.box),
            }
            for index, match in enumerate(target.detections(output, images))
        ]

    def _regions(self, output: Any, batch: Batch) -> PageAnswer:
        """Return the classes with pixels and their fractions of the image, largest first, and a plane of numbers."""
        names, planes = self._default.categories, {}
        images = self._default.images(batch.inputs, batch.frames)
        for label in _labels(output, names):
            with suppress(NotFoundError):
                (question,), _ = as_target(region(label)).ask(output, images)
                planes[label] = cast("RegionScore", question.score).cells[0] > 0  # (h, w)
        fractions = {label: float(plane.float().mean()) for label, plane in planes.items()}
        order = sorted(fractions, key=lambda label: -fractions[label])[:MOST_REGIONS]
        regions = [{"target": label, "name": class_name(label, names), "share": fractions[label]} for label in order]
        if not order:
            return {"regions": []}
        numbers = torch.full_like(planes[order[0]], NO_REGION, dtype=torch.uint8)
        for number, label in enumerate(order):  # small regions last, so that none is hidden
            numbers[planes[label]] = number
        plane = Image.fromarray(numbers.cpu().numpy())
        if max(plane.size) > LABELS_SIDE:
            plane = plane.resize(scaled_size(plane.size, LABELS_SIDE), Image.Resampling.NEAREST)
        return {"regions": regions, "labels": {"width": plane.width, "height": plane.height, "values": plane.tobytes()}}

    # Questions

    def _question(self, asked: Asked, name: Any) -> PageQuestion:
        """Return the question about one method. Raises SaliencyError if a part of it is invalid."""
        held, cls, layer = self._find(asked.get("image")), get_method(name), asked.get("layer")
        if not isinstance(layer, str | None):
            raise LayerError(f"layer={layer!r}: expected the name of a layer")
        layer = (layer or self._options.layer) if reads_layer(cls) else None
        if asked.get("options"):
            raise MethodError("the options of methods are set when the explorer starts: --set OPTION=VALUE")
        target = asked.get("target")
        asked_target = read_target(self._default_target(held) if target is None else target)
        return PageQuestion(held, asked.get("input", 0), cls, layer, *asked_target)

    def _create(self, question: PageQuestion, **draft: Any) -> Attribution:
        """Create the method of a question, with options of a draft."""
        options = replace(self._options, layer=question.layer, options={**self._options.options, **draft})
        return create_method(question.cls, options, self.model)

    def _default_target(self, held: HeldImage) -> PageAnswer:
        """Return the target that is explained first. Raises TargetError if there is none."""
        facts = held.facts
        if facts["top"]:
            return {"class": facts["top"][0]["target"]}
        if facts["boxes"]:
            return {"box": {"index": 0}}
        if facts["regions"]:
            return {"region": facts["regions"][0]["target"]}
        if "text" in self.asks:
            raise TargetError("this model compares images and texts; type a text")
        raise NotFoundError("the model found nothing in this image")

    def explain(self, asked: Asked, send: Send, check: Poll) -> None:
        """Explain an image by one method or two, and send each answer when it is ready.

        The last answer of each method has `done`. Earlier answers have a map from fewer passes, or only the progress.

        Args:
            asked: The question.
            send: Called with each answer. Its map holds the values as bytes: little-endian float32, row by row.
            check: Called between passes. It may raise `StoppedQuestion`.

        Raises:
            MethodError: The question names no methods, or more than two.
            UnknownImageError: The image is not in memory.
        """
        names = _method_names(asked, 2)
        self._find(asked.get("image"))
        questions: list[PageQuestion] = []
        for name in names:
            with _errors_answered(name, send):
                questions.append(self._question(asked, name))
        questions.sort(key=lambda question: issubclass(question.cls, MultiPassAttribution))
        rest = []
        for question in questions:
            draft = self._draft_options(question, len(names))
            is_slow = issubclass(question.cls, MultiPassAttribution) and not draft
            if is_slow or not self._explain_by(question, draft, send, check):
                rest.append(question)
        for question in rest:
            self._explain_by(question, {}, send, check)

    def _draft_options(self, question: PageQuestion, methods: int) -> Mapping[str, Any]:
        """Return the options of a first map; empty if the method needs none."""
        are_set = self._options.options.keys() & {"passes", "seconds", "steps"}
        if self._inputs or are_set or question.key in question.held.results:
            return {}
        if methods > 1 and issubclass(question.cls, TimedAttribution):
            # The other method must not wait for all passes of this one.
            return question.cls.draft_options or TimedAttribution.draft_options
        return question.cls.draft_options

    def _explain_by(self, question: PageQuestion, draft: Mapping[str, Any], send: Send, check: Poll) -> bool:
        """Explain by one method, and return whether the last answer was sent: the complete map, or an error."""
        with _errors_answered(question.cls.name, send) as caught:
            check()
            explanation = question.held.results.get(question.key)
            if explanation is None:
                explanation = self._explanation(question, draft, send, check)
                if draft and ("seconds" not in draft or explanation.run_stats[0].stopped != "complete"):
                    self._send(question, explanation, caught, 0.0, send)
                    return False
                explanation = self._keep(question, explanation)
            self._send(question, explanation, caught, 1.0, send)
        return True

    def _explanation(self, question: PageQuestion, draft: Mapping[str, Any], send: Send, check: Poll) -> Result:
        """Return the explanation. Maps of the passes so far are sent meanwhile, except for a draft and a case."""
        method, batch = self._create(question, **draft), question.held.batch
        if repr(method) == repr(self._compiled):  # the same method, layer and options
            method = cast("Attribution", self._compiled)
        due = perf_counter() + PAUSE

        def listener(progress: float, so_far: Partial) -> None:
            nonlocal due
            check()
            if draft or progress >= 1 or perf_counter() < due:
                return
            result = None if self._inputs else so_far()
            if result is None:
                send({"method": method.name, "progress": progress, "done": False})
            else:
                explanation = method.explanation(result, resolved, batch).to("cpu")
                self._send(question, explanation, [], progress, send)
            due = perf_counter() + PAUSE

        with bound(listener=listener, compiles=False):
            if self._inputs:
                return cast("InputExplanations", method.attribute(question.held.image, question.target)).to("cpu")
            with method.call(batch, [question.target]):
                resolved = method.questions(question.target, batch.inputs, batch.frames)
                (result,) = method.explain_targets(batch.inputs, [resolved])
        return method.explanation(result, resolved, batch).to("cpu")

    def _keep(self, question: PageQuestion, explanation: Result) -> Result:
        """Keep a complete explanation, with the settings of the question, and return it."""
        results = question.held.results
        if isinstance(explanation, Explanation):  # not a case of several inputs, which has no drafts
            explanation = replace(explanation, settings=self._create(question).settings)
        results[question.key] = explanation
        if len(results) > HELD_RESULTS:
            del results[next(iter(results))]
        return explanation

    def _send(
        self, question: PageQuestion, result: Result, caught: list[warnings.WarningMessage], progress: float, send: Send
    ) -> None:
        """Send the columns of a row, and the drawn map: smoothed, NaN at outliers, but not clipped.

        Of a case, send them for each input, on one scale, with its share.
        """
        style, limit, parts, shares = OverlayStyle(), None, list[Any]([result]), {}
        scale: dict[str, Any] = {"sign": style.sign, "smoothing": style.smoothing}
        if isinstance(result, InputExplanations):
            parts, shares = [result[name] for name in self._inputs], result.shares
            limit = shared_limit(parts, percentile=style.percentile, **scale)
        for index, (explanation, frame) in enumerate(zip(parts, question.held.frames, strict=True)):
            scaled = scale_map(explanation, percentile=style.percentile, limit=limit, **scale)
            whole = scale_map(explanation, percentile=None, **scale)
            values = whole.values * np.float32(whole.limit - whole.floor) + np.float32(whole.floor)
            if scaled.outliers is not None:
                values[scaled.outliers > 0] = np.nan
            row = explanation_facts(explanation, scaled, style.colormap)
            row["target_box"] = None if index else scaled.placed_box(frame)
            row["shares"] = shares
            notes = [str(warning.message) for warning in caught if issubclass(warning.category, SaliencyWarning)]
            row["notes"] = list(dict.fromkeys([*notes, *filter(None, explanation.notes)]))
            height, width = values.shape
            drawn = {"width": width, "height": height, "values": values.astype("<f4").tobytes()}
            about = {"method": question.cls.name, "input": index, "progress": progress, "done": progress == 1}
            send({**about, "row": row, "map": drawn})

    def trust(self, asked: Asked, check: Poll) -> PageAnswer:
        """Return the trust card of one method, in the form of the page of `saliency batch`."""
        question = self._question(asked, *_method_names(asked, 1))
        image, batch = question.held.image, question.held.batch
        if isinstance(batch, InputBatch):
            image = batch.source.batch(self._inputs[question.index])
        with listening(lambda *_: check()):
            card = trust(self._create(question), image, question.target, seconds=asked.get("seconds", SECONDS))
        return {"trust": card_facts(card), "summary": card.summary, "notes": list(card.notes)}

    def save(self, asked: Asked, check: Poll) -> bytes | str:
        """Return the overlay or the figure of one method as PNG, or the Python code that draws the overlay.

        Raises:
            RenderError: The form or a part of the style is invalid.
        """
        question, style = self._question(asked, *_method_names(asked, 1)), asked.get("style") or {}
        form = check_choice("as", asked.get("as"), ("overlay", "figure", "code"), error=RenderError)
        if not isinstance(style, dict) or not style.keys() <= STYLE:
            raise RenderError(f"style={style!r}: expected {', '.join(sorted(STYLE))}")
        opacity = check_number("opacity", style.get("opacity", MOST_OPACITY), least=0, most=1, error=RenderError)
        alpha = None if opacity == MOST_OPACITY else opacity / MOST_OPACITY
        style = {name: value for name, value in style.items() if value and name != "opacity"}
        if form == "code":
            return self._code(question, style, alpha)
        explanation = question.held.results.get(question.key)
        if explanation is None:
            explanation = self._keep(question, self._explanation(question, {}, lambda answer: None, check))
        if form == "figure":
            return as_png(figure(explanation), FIGURE_DPI)
        frame = question.held.frames[question.index]
        if isinstance(explanation, InputExplanations):
            explanation = replace(explanation[self._inputs[question.index]], frames=(frame,))
        drawing = overlay(explanation, **style)
        if alpha is not None:
            drawing = Image.blend(frame.image, drawing, alpha)
        return encode_png(np.asarray(drawing), SOFTWARE)

    def _code(self, question: PageQuestion, style: Mapping[str, Any], alpha: float | None) -> str:
        """Return the Python code that draws the overlay, with the weight `alpha` unless it is None.

        Of a case, it draws the figure.
        """
        options, cls, name = self._options, question.cls, question.held.name
        weights = {} if options.weights == "default" else {"weights": options.weights}
        model = f"saliency.load({options.model!r}{_keywords(weights)})"
        if not isinstance(options.model, str):
            model = f"...  # your {options.model_name}"
        keywords = {option: value for option, value in options.options.items() if option in cls.options()}
        keywords |= {"layer": question.layer} if question.layer else {}
        keywords |= {"whole": options.whole} if options.whole else {}
        keywords |= {"preprocess": options.preprocess} if isinstance(options.preprocess, Mapping) else {}
        lines = [f"model = {model}", f"method = saliency.{cls.__name__}(model{_keywords(keywords)})"]
        if self._inputs:
            entries = ", ".join(f"{entry!r}: ..." for entry in question.held.image)
            lines += [f"result = method.attribute({{{entries}}}, {question.code})  # your inputs"]
            lines += [f"saliency.figure(result).savefig({f'{cls.name}.png'!r})"]
            return "\n".join(["import saliency", "", *lines, ""]).replace("Preprocess(", "saliency.Preprocess(")
        imports, blend = ["import saliency"], []
        if alpha is not None:
            imports.append("from PIL import Image")
            blend.append(f"drawing = Image.blend(explanation.frames[0].image, drawing, {alpha!r})")
        lines += [
            f"explanation = method.attribute({name!r}, {question.code})",
            f"drawing = saliency.overlay(explanation{_keywords(style)})",
            *blend,
            f"drawing.save({f'{PurePath(name).stem}.{cls.name}.png'!r})",
        ]
        return "\n".join([*imports, "", *lines, ""])


@contextmanager
def _errors_answered(name: Any, send: Send) -> Iterator[list[warnings.WarningMessage]]:
    """Send an error of the block as the last answer of a method. Yield the list of warnings, which grows."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SaliencyWarning)
        try:
            yield caught
        except StoppedQuestion:
            raise
        except USER_CODE_ERRORS as error:  # the error concerns this method only
            send({"method": str(name), "row": error_columns(error), "progress": 1.0, "done": True})


# Targets


def read_target(asked: Any) -> tuple[Any, str]:
    """Return the target of a question, such as `{"class": 281, "against": 282}`, and the Python code that creates it.

    Raises:
        TargetError: The target is not a class, a box, a region or a text.
    """
    match asked:
        case {"class": int() | str() as label, "against": int() | str() as other}:
            return _call(contrast, label, other)
        case {"class": int() | str() as label}:
            return label, repr(label)
        case {"box": {"point": point}}:
            return _call(box, point=as_place("point", point, 2))
        case {"box": {"index": index}}:
            return _call(box, index=index)
        case {"region": int() | str() as label, "where": str() | list() as where}:
            return _call(region, label, where)
        case {"region": int() | str() as label}:
            return _call(region, label)
        case {"text": str() as prompt, "against": list() as others}:
            return _call(text, prompt, others)
        case {"text": str() as prompt}:
            return _call(text, prompt)
    raise TargetError(f"target={asked!r:.100}: expected a class, a box, a region or a text; see docs/explorer.md")


def _call(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, str]:
    """Return the result of a function of `saliency`, and the code of the call."""
    parts = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())]
    return function(*arguments, **options), f"saliency.{function.__name__}({', '.join(parts)})"


def _labels(output: Any, names: Categories) -> set[int]:
    """Return the classes that may have pixels. Raises TargetError if the output is not a segmentation."""
    if isinstance(output, list):
        if not all("masks" in entry for entry in output):
            raise TargetError("the output has boxes without masks")
        return {int(label) for entry in output for label in entry["labels"]}
    scores = score_maps(output)
    if scores.shape[1] > 1:
        return set(scores[0].argmax(0).flatten().tolist())
    return {0, 1} if names is not None and len(names) == 2 else {0}


def _method_names(asked: Asked, most: int) -> list[Any]:
    """Return the methods of a question. Raises MethodError for no method, or more than `most`."""
    names = asked.get("methods")
    if not isinstance(names, list) or not 1 <= len(names) <= most:
        raise MethodError(f"methods={names!r}: expected a list of {'one or two names' if most > 1 else 'one name'}")
    return names


def _keywords(options: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())


def _offered(images: Any) -> list[tuple[str, Callable[..., Any]]]:
    """Return the names of the images in a folder or list, and functions that open them, with the option `draft`.

    Of a mapping of files or folders, the functions open cases of several inputs.

    Raises:
        ImageError: The folder does not exist, or contains no image.
    """
    if isinstance(images, Mapping):
        if all(isinstance(source, str | os.PathLike) for source in images.values()):
            entries = find_images(images, recursive=True).entries
            return [(printable(entry.label), lambda draft, entry=entry: entry.open_inputs()) for entry in entries]
        return [("your inputs", lambda draft: images)]
    if isinstance(images, str | os.PathLike):
        entries = [entry for entry in find_images(images, recursive=True).entries if entry.exists()]
        entries.sort(key=lambda entry: entry.is_volume)  # offered after the images: it answers with the reason
        if all(entry.is_volume for entry in entries):
            raise ImageError(f"{os.fsdecode(images)} contains no image to offer; pass an existing folder of images")
        return [(printable(entry.label), entry.open) for entry in entries]
    return [
        (
            printable(PurePath(os.fsdecode(image)).name) if isinstance(image, str | os.PathLike) else f"image {index}",
            partial(open_image, image),
        )
        for index, image in enumerate(split_images(images))
    ]
