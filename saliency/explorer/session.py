"""One model, and the questions about images that the page of the explorer asks it.

Questions and answers are dictionaries that JSON can hold, except for the bytes of maps and pictures. Nothing here knows
how they are transported.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import PurePath
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .._version import __version__
from ..attribution.aliases import option_hint
from ..attribution.base import METHODS, Attribution, get_method, summary
from ..attribution.explanation import Explanation
from ..attribution.passes import Partial, listening
from ..batch.drawing import card_facts, explanation_facts, shrink
from ..batch.failures import Failure, printable
from ..batch.listing import ImageEntry
from ..batch.network import create_methods, find_devices, load_model, move_model
from ..batch.run_options import RunOptions
from ..engine.multi_pass import MultiPassAttribution, TimedAttribution
from ..errors import (
    LayerError,
    MethodError,
    ModelError,
    NotFoundError,
    RenderError,
    SaliencyError,
    SaliencyWarning,
    TargetError,
)
from ..evaluation.trust import missing_properties, trust
from ..hooks.dual_encoder import DualEncoder
from ..hooks.model_state import prepared_for_attribution, run_model
from ..io.inputs import Batch, ImageLike, decode, encode, open_image
from ..io.preprocess import Frame, Geometry, Preprocess, drawable, scaled_size
from ..layers.find import scan_layers
from ..layers.layout import bind_layout
from ..render.blending import DIVERGING, MOST_OPACITY, SEQUENTIAL, color_table, scale_map
from ..render.figure import figure
from ..render.overlay import encode_png, overlay
from ..targets.box import BoxScore, as_place, box
from ..targets.embedding import text
from ..targets.region import region, score_maps
from ..targets.targets import Categories, ClassScore, OutputFacts, class_name, class_scores, contrast
from ..validation import check_choice, check_number

Answer = dict[str, Any]
Asked = Mapping[str, Any]

MOST_BYTES, MOST_PIXELS = 64 * 2**20, 100_000_000  # of one image
HELD_IMAGES, HELD_PIXELS = 16, 200_000_000  # in memory, besides the newest image
HELD_RESULTS = 32
SAMPLE = "sample.jpg"
PICTURE_SIDE, THUMBNAIL_SIDE, PICTURE_QUALITY = 1600, 160, 88
LABELS_SIDE, NO_REGION = 256, 255
TOP, MOST_REGIONS = 5, 20
DRAFT = {"seconds": 1.0}
FIRST_MAP, LEAST_PAUSE = 1.0, 1.0  # seconds until the first map of the passes so far, and between two
SHARE_OF_MAPS = 0.02  # of the time that maps of the passes so far may take
FIGURE_DPI = 200
SECONDS = 15.0  # for a trust card
STYLE = {"opacity", "percentile", "threshold"}


class StoppedQuestion(Exception):  # noqa: N818 - not an error: the answer is not wanted any more
    """The answer to a question is not wanted any more."""


class UnknownImageError(SaliencyError, LookupError):
    """No image with this number is in memory."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldImage:
    """An image in memory.

    Attributes:
        name: The name of its file.
        image: The decoded image.
        batch: The model's input, and the image as it is drawn.
        facts: The facts that the page shows first: top classes, boxes, regions.
    """

    name: str
    image: Image.Image
    batch: Batch
    facts: Answer

    @property
    def frame(self) -> Frame:
        """The image as it is drawn, with the position of the input."""
        return cast("Frame", self.batch.frames[0])


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one image and one method.

    Attributes:
        held: The image.
        options: The options of the method, with its name and layer.
        call: The target.
        key: Identifies the explanation.
    """

    held: HeldImage
    options: RunOptions
    call: TargetCall
    key: str

    @property
    def cls(self) -> type[Attribution]:
        """The class of the method."""
        return get_method(self.options.methods[0])


class Session:
    """One model in memory, the images that were opened last, and their explanations.

    Only one thread at a time may call a function that runs the model: all but `about` and `picture`.

    Args:
        options: The model with its preprocessing and class names, the default method with its layer and options, the
            device, and the style of drawings.
        images: Images to offer, by entry of a listing, path, or any other image.

    Raises:
        SaliencyError: The model cannot be loaded, has no preprocessing, or an option is invalid.
    """

    def __init__(self, options: RunOptions, images: Sequence[ImageEntry | ImageLike] = ()) -> None:
        device, *_ = find_devices(options.device, options.model)
        self._options, self._is_sample = options, not images
        self._images = list(images) or [str(files("saliency.frontend").joinpath(SAMPLE))]
        self.model = move_model(load_model(options), device)
        known = list(dict.fromkeys(option for cls in METHODS.values() for option in cls.options()))
        for name in options.options:
            if name not in known:
                raise MethodError(f'no method has the option "{name}"{option_hint(name, known)}')
        self._default = self._create(self._options_of(get_method(options.methods[0]), options.layer))
        self._held: OrderedDict[str, HeldImage] = OrderedDict()
        self._results: OrderedDict[str, Explanation] = OrderedDict()
        self._lock = threading.Lock()
        noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
        batch = self._default.read(noise)
        with self._prepared():
            self._scan = scan_layers(self.model, batch.inputs)
            output = run_model(self.model, batch.inputs)
            self.asks = self._questions(output, batch)
        if not self.asks:
            raise ModelError("the explorer finds no classes, boxes, regions or embeddings in the model's output")

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        method = self._default
        with prepared_for_attribution(self.model), bind_layout(method.layout), torch.no_grad():
            yield

    def _questions(self, output: Any, batch: Batch) -> list[str]:
        """Return the kinds of targets that the model's output has."""
        if isinstance(self.model, DualEncoder):
            return ["text"]
        kinds: dict[str, Callable[[], object]] = {
            "class": lambda: class_scores(output),
            "region": lambda: self._regions(output),
            "box": lambda: self._detections(output, batch),
        }
        known = []
        for kind, read in kinds.items():
            with suppress(TargetError):
                read()
                known.append(kind)
            if known == ["class"]:
                return known
        return [*known, "point"] if known else []

    def about(self) -> Answer:
        """Return the facts that the page needs before any image: methods, layers, classes, limits and colours."""
        names = self._default.categories
        methods = [
            {
                "name": name,
                "title": cls.__name__,
                "summary": summary(cls),
                "cost": cls.cost,
                "many_passes": issubclass(cls, MultiPassAttribution),
                "reads_layer": bool({"layer", "layers"}.intersection(cls.parameters())),
            }
            for name, cls in METHODS.items()
        ]
        return {
            "model": self._options.model_name,
            "version": __version__,
            "methods": methods,
            "method": self._default.name,
            "layers": [layer.name for layer in self._scan.spatial],
            "layer": self._scan.default if self._options.layer is None else self._options.layer,
            "classes": None if names is None else list(names),
            "asks": list(self.asks),
            "images": [{"index": index, "name": _name_of(image, index)} for index, image in enumerate(self._images)],
            "sample": self._is_sample,
            "properties": missing_properties(()),
            "colors": {SEQUENTIAL: _colors(SEQUENTIAL, False), DIVERGING: _colors(DIVERGING, True)},
            "limits": {"bytes": MOST_BYTES, "pixels": MOST_PIXELS},
            "opacity": MOST_OPACITY,
        }

    # Images

    def open(self, image: bytes | int, name: str = "image") -> Answer:
        """Open the file of an image, or the offered image with this number, and return its facts.

        Raises:
            ImageError: It cannot be read, or is too large.
            UnknownImageError: No image with this number is offered.
        """
        decoded = self._offered(image) if isinstance(image, int) else decode(io.BytesIO(image), name, MOST_PIXELS)
        name = _name_of(self._images[image], image) if isinstance(image, int) else name
        batch = self._default.read(decoded)
        with self._prepared():
            facts = self._facts(batch)
        held = HeldImage(name, decoded, batch, facts)
        number = secrets.token_hex(8)
        with self._lock:
            self._held[number] = held
            while len(self._held) > 1 and (len(self._held) > HELD_IMAGES or self._held_pixels() > HELD_PIXELS):
                self._held.popitem(last=False)
        width, height = held.frame.image.size
        return {
            "image": number,
            "name": printable(held.name),
            "width": width,
            "height": height,
            "box": list(held.frame.box),
            **facts,
        }

    def _offered(self, index: int) -> Image.Image:
        """Return the offered image with a number. Raises UnknownImageError, or ImageError if it cannot be read."""
        if not 0 <= index < len(self._images):
            raise UnknownImageError(f"no image {index}; {len(self._images)} are offered")
        image = self._images[index]
        return image.open() if isinstance(image, ImageEntry) else open_image(image)

    def thumbnail(self, index: int) -> bytes:
        """Return an offered image as JPEG, with no side longer than 160. Raises errors as `open`."""
        image = drawable(self._offered(index), cast("Preprocess", self._default.preprocess).range)
        return encode(shrink(image, THUMBNAIL_SIDE), "JPEG", quality=PICTURE_QUALITY)

    def _held_pixels(self) -> int:
        return sum(held.image.width * held.image.height for held in self._held.values())

    def _find(self, number: Any) -> HeldImage:
        with self._lock:
            if not isinstance(number, str) or number not in self._held:
                raise UnknownImageError("the image is not in memory any more; open it again")
            self._held.move_to_end(number)
            return self._held[number]

    def picture(self, number: str) -> bytes:
        """Return an opened image as JPEG, upright, with no side longer than 1600. Raises UnknownImageError."""
        return encode(shrink(self._find(number).frame.image, PICTURE_SIDE), "JPEG", quality=PICTURE_QUALITY)

    def _facts(self, batch: Batch) -> Answer:
        """Return the top classes, the boxes and the regions of one image."""
        output = run_model(self.model, batch.inputs)
        return {
            "top": self._top(output, batch) if "class" in self.asks else [],
            "boxes": self._detections(output, batch) if "box" in self.asks else [],
            **(self._regions(output) if "region" in self.asks else {"regions": []}),
        }

    def _top(self, output: Any, batch: Batch) -> list[Answer]:
        resolved = self._default.resolve(None, batch.inputs, batch.frames)
        resolved(output)
        target, scores = cast("ClassScore", resolved.target), class_scores(output)[0]
        best = target.classes[0]
        order = [best, 1 - best] if target.is_binary else scores.topk(min(TOP, len(scores))).indices.tolist()
        known = [replace(target, classes=(index,)).probabilities(output) for index in order]
        return [
            {
                "target": index,
                "name": class_name(index, self._default.categories),
                "probability": None if probability is None else float(probability[0]),
            }
            for index, probability in zip(order, known, strict=True)
        ]

    def _detections(self, output: Any, batch: Batch) -> list[Answer]:
        geometry = Geometry.of(batch.frames[0], tuple(batch.inputs.shape[2:]))
        target = cast("BoxScore", box()).locate([geometry])
        return [
            {
                "index": index,
                "target": match.label,
                "name": class_name(match.label, self._default.categories),
                "probability": match.probability,
                "box": list(match.box),
            }
            for index, match in enumerate(target.found(output, self._default.categories))
        ]

    def _regions(self, output: Any) -> Answer:
        """Return the classes with pixels and their shares of the pixels, the largest first, and a plane of them."""
        names, planes = self._default.categories, {}
        for label in _labels(output, names):
            with suppress(NotFoundError):
                target: Any = cast("Any", region(label)).resolve(1, names).resolve_from(output, OutputFacts(names))
                planes[label] = cast("Tensor", target.cells)[0] > 0  # (h, w)
        shares = {label: float(plane.float().mean()) for label, plane in planes.items()}
        order = sorted(shares, key=lambda label: -shares[label])[:MOST_REGIONS]
        found = [{"target": label, "name": class_name(label, names), "share": shares[label]} for label in order]
        if not order:
            return {"regions": []}
        numbers = torch.full_like(planes[order[0]], NO_REGION, dtype=torch.uint8)
        for number, label in enumerate(order):  # small regions last, so that none is hidden
            numbers[planes[label]] = number
        plane = Image.fromarray(numbers.cpu().numpy())
        if max(plane.size) > LABELS_SIDE:
            plane = plane.resize(scaled_size(plane.size, LABELS_SIDE), Image.Resampling.NEAREST)
        return {"regions": found, "labels": {"width": plane.width, "height": plane.height, "values": plane.tobytes()}}

    # Questions

    def _question(self, asked: Asked, name: Any) -> Question:
        """Return the question about one method. Raises SaliencyError if a part of it is invalid."""
        number, layer = asked.get("image"), asked.get("layer")
        layer = self._options.layer if layer is None else layer
        held, cls = self._find(number), get_method(name)
        if layer is not None and not isinstance(layer, str):
            raise LayerError(f"layer={layer!r}: expected the name of a layer")
        if asked.get("options"):
            raise MethodError("the options of methods are set when the explorer starts: --set OPTION=VALUE")
        options = self._options_of(cls, layer)
        call = target_call(self._default_target(held) if asked.get("target") is None else asked["target"])
        return Question(held, options, call, json.dumps([number, cls.name, options.layer, repr(call)]))

    def _options_of(self, cls: type[Attribution], layer: str | None) -> RunOptions:
        """Return the options of one method: those that it has, and the layer if it reads one."""
        layer = layer if {"layer", "layers"}.intersection(cls.parameters()) else None
        own = {name: value for name, value in self._options.options.items() if name in cls.options()}
        return replace(self._options, methods=(cls.name,), layer=layer, options=own)

    def _create(self, options: RunOptions, **more: Any) -> Attribution:
        """Create the method of some options, with more options of its own."""
        return create_methods(replace(options, options={**options.options, **more}), self.model)[0]

    def _default_target(self, held: HeldImage) -> Answer:
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

    def explain(self, asked: Asked, send: Callable[[Answer], None], check: Callable[[], None]) -> None:
        """Explain an image by one method or two, and send the answers as they become known.

        The last answer of each method has `done`. Earlier ones hold a map from fewer passes, or only the progress.

        Args:
            asked: The question.
            send: Called with each answer. Its map holds the values as bytes: little-endian float32, row by row.
            check: Called between passes. It may raise `StoppedQuestion`.

        Raises:
            MethodError: The question names no methods, or more than two.
            UnknownImageError: The image is not in memory.
        """
        names = asked.get("methods")
        if not isinstance(names, list) or len(names) not in (1, 2):
            raise MethodError(f"methods={names!r}: expected a list of one or two names")
        self._find(asked.get("image"))
        questions: list[Question] = []
        for name in names:
            with _told(name, send):
                questions.append(self._question(asked, name))
        questions.sort(key=lambda one: issubclass(one.cls, MultiPassAttribution))
        rest = []
        for question in questions:
            draft = self._draft_options(question, len(names))
            is_slow = issubclass(question.cls, MultiPassAttribution) and not draft
            if is_slow or not self._answered(question, draft, send, check):
                rest.append(question)
        for question in rest:
            self._answered(question, {}, send, check)

    def _draft_options(self, question: Question, methods: int) -> Mapping[str, Any]:
        """Return the options of a first map; empty if the method needs none."""
        draft = question.cls.draft_options
        if not draft and methods > 1 and issubclass(question.cls, TimedAttribution):
            draft = DRAFT  # the other method must not wait for all passes of this one
        is_known = question.key in self._results or question.options.options.keys() & {"passes", "seconds", "steps"}
        return {} if is_known else draft

    def _answered(
        self,
        question: Question,
        draft: Mapping[str, Any],
        send: Callable[[Answer], None],
        check: Callable[[], None],
    ) -> bool:
        """Explain by one method, and return whether the last answer was sent: the complete map, or an error."""
        with _told(question.cls.name, send) as notes:
            check()
            explanation = self._results.get(question.key)
            if explanation is None:
                explanation = self._explanation(question, draft, send, check)
                if draft and (draft.keys() != DRAFT.keys() or explanation.run_stats[0].stopped != "complete"):
                    send(_answer(question, explanation, notes, 0.0))
                    return False
                explanation = self._keep(question, explanation)
            send(_answer(question, explanation, notes, 1.0))
        return True

    def _explanation(
        self,
        question: Question,
        draft: Mapping[str, Any],
        send: Callable[[Answer], None],
        check: Callable[[], None],
    ) -> Explanation:
        """Return the explanation. Maps of the passes so far are sent on the way."""
        method, batch = self._create(question.options, **draft), question.held.batch
        due = perf_counter() + FIRST_MAP

        def listener(share: float, partial: Partial) -> None:
            nonlocal due
            check()
            began = perf_counter()
            if draft or share >= 1 or began < due:
                return
            result = partial()
            if result is None:
                send({"method": method.name, "progress": share, "done": False})
            else:
                explanation = method.explanation(result, resolved, batch).to("cpu")
                send(_answer(question, explanation, [], share))
            now = perf_counter()
            due = now + max(LEAST_PAUSE, (now - began) / SHARE_OF_MAPS)

        with prepared_for_attribution(self.model), bind_layout(method.layout), listening(listener):
            resolved = method.explained_target(method.resolve(question.call.target(), batch.inputs, batch.frames))
            (result,) = method.explain_targets(batch.inputs, [resolved])
        return method.explanation(result, resolved, batch).to("cpu")

    def _keep(self, question: Question, explanation: Explanation) -> Explanation:
        """Keep a complete explanation, with the settings of the question, and return it."""
        explanation = replace(explanation, settings=self._create(question.options).settings)
        self._results[question.key] = explanation
        if len(self._results) > HELD_RESULTS:
            self._results.popitem(last=False)
        return explanation

    def trust(self, asked: Asked, check: Callable[[], None]) -> Answer:
        """Return the trust card of one method, in the form of the page of `saliency batch`."""
        question = self._question(asked, _one_method(asked))
        method = self._create(question.options)
        with listening(lambda *_: check()):
            card = trust(method, question.held.image, question.call.target(), seconds=asked.get("seconds", SECONDS))
        return {"trust": card_facts(card), "summary": card.summary, "notes": list(card.notes)}

    def save(self, asked: Asked, check: Callable[[], None]) -> bytes | str:
        """Return the overlay or the figure of one method as PNG, or the Python code that draws the overlay.

        Raises:
            RenderError: The form or a part of the style is invalid.
        """
        question, style = self._question(asked, _one_method(asked)), asked.get("style") or {}
        form = check_choice("as", asked.get("as"), ("overlay", "figure", "code"), error=RenderError)
        if not isinstance(style, dict) or not style.keys() <= STYLE:
            raise RenderError(f"style={style!r}: expected {', '.join(sorted(STYLE))}")
        if form == "code":
            return self._code(question, style)
        explanation = self._results.get(question.key)
        if explanation is None:
            explanation = self._keep(question, self._explanation(question, {}, lambda answer: None, check))
        if form == "overlay":
            drawing = overlay(explanation, **_overlay_options(style))
            share = _share(style)
            original = cast("Frame", explanation.frames[0]).image
            return encode_png(drawing if share is None else Image.blend(original, drawing, share))
        file = io.BytesIO()
        figure(explanation).savefig(file, format="png", dpi=FIGURE_DPI)
        return file.getvalue()

    def _code(self, question: Question, style: Mapping[str, Any]) -> str:
        """Return the Python code that draws the overlay of a question."""
        options, name = question.options, printable(question.held.name)
        weights = {} if options.weights == "default" else {"weights": options.weights}
        model = f"saliency.load({options.model!r}{_keywords(weights)})"
        if not isinstance(options.model, str):
            model = f"...  # your {options.model_name}"
        given = {**options.options, **({} if options.layer is None else {"layer": options.layer})}
        given |= {"whole": options.whole} if options.whole else {}
        given |= {"preprocess": options.preprocess} if isinstance(options.preprocess, Mapping) else {}
        lines = [
            f"model = {model}",
            f"method = saliency.{question.cls.__name__}(model{_keywords(given)})",
            f"explanation = method.attribute({name!r}, {question.call.code()})",
            f"drawing = saliency.overlay(explanation{_keywords(_overlay_options(style))})",
        ]
        share = _share(style)
        if share is not None:
            lines.append(f"drawing = Image.blend(explanation.frames[0].image, drawing, {share!r})")
        lines.append(f"drawing.save({f'{PurePath(name).stem}.{question.cls.name}.png'!r})")
        imports = ["import saliency"] if share is None else ["import saliency", "from PIL import Image"]
        return "\n".join([*imports, "", *lines, ""])


@contextmanager
def _told(name: Any, send: Callable[[Answer], None]) -> Iterator[list[str]]:
    """Send an error of the block as the last answer of a method. Warnings are added to the list that it yields."""
    notes: list[str] = []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def collect(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, SaliencyWarning):
                notes.append(str(message))
            else:
                show(message, category, *where, **more)

        warnings.simplefilter("always", SaliencyWarning)
        warnings.showwarning = collect
        try:
            yield notes
        except StoppedQuestion:
            raise
        except Exception as error:  # noqa: BLE001 - any error concerns this method only
            failure = Failure.of(error)
            row = {"error": failure.reason, "error_kind": failure.kind}
            send({"method": str(name), "row": row, "progress": 1.0, "done": True})


def _answer(question: Question, explanation: Explanation, notes: Sequence[str], progress: float) -> Answer:
    """Return the columns of a row, and the map as it is drawn: smoothed, NaN at outliers, but not clipped."""
    style, frame = question.options.style, question.held.frame
    scaled = scale_map(explanation, style.sign, style.percentile, smoothing=style.smoothing)
    whole = scale_map(explanation, style.sign, None, smoothing=style.smoothing)
    values = whole.values * np.float32(whole.limit - whole.floor) + np.float32(whole.floor)
    if scaled.outliers is not None:
        values[scaled.outliers > 0] = np.nan
    row = explanation_facts(explanation, scaled, style.colormap)
    row["target_box"] = scaled.placed_box(frame)
    row["notes"] = list(dict.fromkeys([*notes, *filter(None, explanation.notes)]))
    height, width = values.shape
    drawn = {"width": width, "height": height, "values": values.astype("<f4").tobytes()}
    return {"method": question.cls.name, "row": row, "map": drawn, "progress": progress, "done": progress == 1}


# Targets


@dataclass(frozen=True, slots=True)
class TargetCall:
    """The call that creates a target: a function of `saliency`, "" for a class itself, and its arguments."""

    function: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def target(self) -> Any:
        """Return the target."""
        functions: dict[str, Callable[..., Any]] = {"box": box, "contrast": contrast, "region": region, "text": text}
        return functions[self.function](*self.arguments, **self.options) if self.function else self.arguments[0]

    def code(self) -> str:
        """Return the target as Python code."""
        if not self.function:
            return repr(self.arguments[0])
        named = [f"{name}={value!r}" for name, value in self.options.items()]
        return f"saliency.{self.function}({', '.join([*map(repr, self.arguments), *named])})"


def target_call(asked: Any) -> TargetCall:
    """Return the call for the target of a question, such as `{"class": 281, "against": 282}`.

    Raises:
        TargetError: It is not a class, a box, a region or a text.
    """
    match asked:
        case {"class": int() | str() as label, "against": int() | str() as other, **rest} if not rest:
            return TargetCall("contrast", (label, other))
        case {"class": int() | str() as label, **rest} if not rest:
            return TargetCall("", (label,))
        case {"box": {"point": point, **rest}, **others} if not rest and not others:
            return TargetCall("box", (), {"point": as_place("point", point, 2)})
        case {"box": {"index": index, **rest}, **others} if not rest and not others:
            return TargetCall("box", (), {"index": index})
        case {"region": int() | str() as label, "where": [_, _] as where, **rest} if not rest:
            return TargetCall("region", (label, as_place("where", where, 2)))
        case {"region": int() | str() as label, "where": str() as where, **rest} if not rest:
            return TargetCall("region", (label, where))
        case {"region": int() | str() as label, **rest} if not rest:
            return TargetCall("region", (label,))
        case {"text": str() as prompt, "against": [*texts], **rest} if not rest:
            return TargetCall("text", (prompt,), {"against": texts})
        case {"text": str() as prompt, **rest} if not rest:
            return TargetCall("text", (prompt,))
    raise TargetError(f"target={asked!r:.100}: expected a class, a box, a region or a text; see docs/explorer.md")


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


def _one_method(asked: Asked) -> Any:
    """Return the method of a question about one. Raises MethodError if it names another number of methods."""
    names = asked.get("methods")
    if not isinstance(names, list) or len(names) != 1:
        raise MethodError(f"methods={names!r}: expected a list of one name")
    return names[0]


def _share(style: Mapping[str, Any]) -> float | None:
    """Return the weight of the overlay for an opacity; None for the opacity of `overlay`. Raises RenderError."""
    opacity = check_number("opacity", style.get("opacity", MOST_OPACITY), least=0, most=1, error=RenderError)
    return None if opacity == MOST_OPACITY else opacity / MOST_OPACITY


def _overlay_options(style: Mapping[str, Any]) -> dict[str, Any]:
    return {name: style[name] for name in ("percentile", "threshold") if style.get(name)}


def _keywords(options: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())


def _name_of(image: ImageEntry | ImageLike, index: int) -> str:
    """Return the name of an offered image; `image 3` if it has none."""
    if isinstance(image, ImageEntry):
        return printable(image.label)
    if isinstance(image, str | os.PathLike):
        return printable(PurePath(os.fsdecode(image)).name)
    return f"image {index}"


def _colors(name: str, centred: bool) -> list[str]:
    return ["#{:02x}{:02x}{:02x}".format(*row) for row in color_table(name, centred=centred).tolist()]
