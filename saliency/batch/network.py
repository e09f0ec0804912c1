"""Decode and preprocess images, and run the methods on batches of them."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn

from ..aliases import option_hint
from ..attribution.base import METHODS, Attribution, Together, get_method
from ..attribution.explanation import Explanation
from ..attribution.inputs import InputExplanations
from ..attribution.passes import MultiPassAttribution, listening
from ..errors import USER_CODE_ERRORS, ImageError, LayerError, MethodError, NotApplicableError
from ..evaluation.trust import TrustCard, trust
from ..io.atomic_write import is_drawing
from ..io.geometry import Box, Frame, Geometry, Range
from ..io.inputs import Batch, open_image
from ..io.preprocess import Prepare, Preprocess, as_preprocess, drawable, locate
from ..io.volumes import Volume, locate_volume, preprocess_volume, read_volume
from ..model.call import is_out_of_memory, name_subjects, prepared_for_attribution, reference_tensor, run_model
from ..targets.boxes import BoxTarget, box
from ..targets.classes import Located, class_index
from ..targets.language import parse_target
from ..targets.question import Target
from ..targets.regions import Keypoint, Region
from ..validation import described
from ..zoo import load
from .failures import BatchError, attempt, error_columns
from .listing import ImageEntry
from .options import NetworkOptions
from .plan import BatchSlot, Plan

Results = Mapping[str, Explanation | InputExplanations | BaseException]
"""Explanation, or explanations of a case, or error of every method for one image, by the name of the method."""
_Outcomes = dict[str, list[Explanation | BaseException]]
"""Explanation or error of every image of a batch, by the name of the method."""


class BatchTooLargeError(MemoryError):
    """A batch of several images does not fit into memory."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedImage:
    """A decoded and preprocessed image.

    Attributes:
        slot: The image.
        failure: Reason why the image cannot be explained.
        target: Class index, or another target; None for the top class.
        input: (C, H, W) input of the model, (C, D, H, W) for a volume; None after a failure.
        box: Position of the input on the image.
        image: The decoded image; None if it was too large to be kept.
        range: Pixel values that the preprocessing and the drawing map to black and white in an image of 16 bits.
        volume: The volume; None for an image.
        inputs: The inputs of a case of a model with several inputs, as for `Attribution.attribute`; None for an image.
    """

    slot: BatchSlot
    failure: BaseException | None = None
    target: int | Target | None = None
    input: Tensor | None = None
    box: Box = (0.0, 0.0, 0.0, 0.0)
    image: Image.Image | None = None
    range: Range | None = None
    volume: Volume | None = None
    inputs: Mapping[str, Any] | None = None

    def open(self) -> Image.Image:
        """Return the decoded image. An image that was not kept is decoded again, and `failure` is raised.

        Raises:
            ImageError: The file changed since it was listed, so the input may be of another image.
        """
        if self.failure is not None:
            raise self.failure
        image, entry = self.image or self.slot.entry.open(), self.slot.entry
        if self.image is None and entry.stamp != entry.current_stamp():
            raise ImageError("the file changed during the run; re-run to explain the new file")
        return image

    def frame(self) -> Frame:
        """Return the frame to draw on."""
        entry = self.slot.entry
        name = entry.path if entry.offset is None else entry.label
        return Frame(drawable(self.open(), self.range), self.box, Path(name).stem, self.range)


class Network:
    """Model with the methods of a run. Several threads may use it at once.

    Args:
        options: Options of the run.
        model: The model, on its device.

    Attributes:
        methods: The methods, compiled or not.
        exact: The methods, not compiled.

    Raises:
        MethodError: A method does not exist, or does not accept an option.
        LayerError: The layer does not exist.
        TargetError: The target of all images does not exist.
    """

    def __init__(self, options: NetworkOptions, model: nn.Module) -> None:
        like = reference_tensor(model)
        self._name, self.device = options.model_name, device_of(model)
        self._dtype = torch.float32 if like is None else like.dtype
        self.methods = create_methods(options, model)
        self.preprocess: Prepare = self.methods[0].preprocess
        self.categories = self.methods[0].categories
        self.exact = self.methods
        self._target = None if options.target is None else self._as_target(options.target)
        self._separate: set[str] = set()  # methods that do not share the passes of the others

    def require_preprocess(self, entries: Iterable[ImageEntry]) -> None:
        """Raise BatchError if there are images, and no preprocessing."""
        if self.preprocess is None and not all(entry.is_volume or entry.inputs for entry in entries):
            raise BatchError(f"{self._name} has no preprocessing; pass preprocess=")

    def compile(self, plan: Plan, parallel: int, check: Callable[..., None], warm: Callable[..., None]) -> str:
        """Compile the methods for the batches of a plan, and return a sentence about the time this takes and saves.

        The first image that can be read is explained as a batch of copies: as many copies as the first batch has
        images, two copies if some methods have many passes, and one if all methods have many. Images of another size,
        and targets other than classes, are explained by the exact methods.

        Args:
            plan: The batches.
            parallel: Number of batches that run in parallel.
            check: Called between calls and passes. It may raise KeyboardInterrupt.
            warm: Runs the passes of this network on a batch.
        """
        slots = (slot for slot in chain.from_iterable(plan) if slot.entry.inputs is None)
        loaded = next((loaded for loaded in map(self.load, slots) if loaded.input is not None), None)
        if loaded is None:
            return "not compiled: no image can be read, or each case has several inputs"
        kinds = {isinstance(method, MultiPassAttribution) for method in self.exact}
        most, rounds = (len(kinds), 2) if True in kinds else (sys.maxsize, 4)
        batch, seconds = [loaded] * min(len(next(iter(plan))), most), list[float]()
        compiled_methods = [method.compile() for method in self.exact]
        for methods in (self.exact, compiled_methods) * rounds:
            self.methods, start = methods, perf_counter()
            check()
            with listening(check):
                warm(self, batch)
            seconds.append(perf_counter() - start)
        obstacles = [cast("Any", method).obstacle() for method in compiled_methods]
        if all(obstacles):
            return f"not compiled: {obstacles[0]}"
        exact, compiled = (min(seconds[first::2]) for first in (2, 3))  # the first round compiles
        saved, text = (exact - compiled) / len(batch) / parallel, f"compiled in {sum(seconds):.0f} s; saves"
        if saved <= 0:
            return f"{text} no time on these images"
        return f"{text} {1000 * saved:.3g} ms an image: pays off from {sum(seconds) / saved:,.0f} images on"

    def _as_target(self, target: int | str | Target) -> int | Target:
        """Return a target with the index of a class instead of its name."""
        parsed: int | str | Target = parse_target(target, self.categories)
        return class_index(parsed, self.categories) if isinstance(parsed, int | str) else parsed

    def count_detections(self, entry: ImageEntry) -> int:
        """Return the number of detections of an image; 0 if the image cannot be explained."""
        loaded = self.load(BatchSlot(0, entry._replace(detection=0), ()))
        if loaded.input is None:
            return 0
        method, located = self.methods[0], cast("Located", loaded.target)
        x = loaded.input[None].to(self.device, self._dtype)
        with prepared_for_attribution(method.model, layout=method.layout), torch.no_grad():
            output = attempt(run_model, method.model, x)
            if isinstance(output, BaseException):  # the row of the image states it
                return 0
            images = method.images(x).located(located.geometries)
            return len(cast("BoxTarget", located.target).detections(output, images))

    def load(self, slot: BatchSlot, most_pixels: float = math.inf) -> LoadedImage:
        """Look up the target of an image, decode and preprocess it, and keep an image of at most `most_pixels`.

        An error is returned as its `failure`.
        """
        name_subjects(slot.entry.source)
        try:
            target = self._target if slot.entry.target is None else self._as_target(slot.entry.target)
            if slot.entry.detection is not None:
                target = box(index=slot.entry.detection, cls=cast("int | None", target))
            if slot.entry.inputs is not None:
                return LoadedImage(slot, None, target, inputs=slot.entry.open_inputs())
            if slot.entry.is_volume and not slot.entry.problem:
                volume = read_volume(slot.entry.path)
                x = preprocess_volume(volume.values, self.preprocess)
                volume = volume._replace(to_input=locate_volume(volume.values, self.preprocess, x))
                return LoadedImage(slot, None, target, x, volume=volume)
            image = slot.entry.open()
            to_draw = image if image.width * image.height <= most_pixels else None
            prepare = as_preprocess(cast("Preprocess", self.preprocess))  # `Run.execute` requires it
            x, input_box = prepare(image), locate(prepare, image)
            if isinstance(target, BoxTarget | Region | Keypoint):
                target = Located(target, (Geometry(input_box, image.size, (x.shape[-2], x.shape[-1])),))
            return LoadedImage(slot, None, target, x, input_box, to_draw, prepare.range)
        except USER_CODE_ERRORS as error:  # any error is a failure of this image only
            return LoadedImage(slot, error)

    def explain(self, batch: Sequence[LoadedImage]) -> list[tuple[Results, str | None]]:
        """Run all methods on a batch, and return the results of each image, in order.

        An image that could not be loaded is replaced by the first image of its batch, with the target of that image, so
        that the others keep their positions. After an error, the batch is repeated in parts, down to one method on one
        image. The error is returned next to the results of its images; None if there was no error, or if a method
        does not apply.

        Args:
            batch: The images.

        Raises:
            BatchTooLargeError: The batch does not fit into memory, and has several images.
        """
        results: list[tuple[Results, str | None]] = [(self._explain_case(loaded), None) for loaded in batch]
        # The images that can be explained.
        inputs = {index: loaded.input for index, loaded in enumerate(batch) if loaded.input is not None}
        shapes = {x.shape for x in inputs.values()}
        for shape in sorted(shapes):
            # If all images have one size, they keep their positions. Otherwise each size runs as a batch of its own.
            same = [index for index, x in inputs.items() if x.shape == shape] if len(shapes) > 1 else range(len(batch))
            first = next(index for index in same if index in inputs)
            shown = [index if index in inputs else first for index in same]
            x = torch.stack([inputs[index] for index in shown]).to(self.device, self._dtype)  # (N, C, H, W)
            # Methods that failed on every image of an earlier batch run separately.
            shared = [method for method in self.methods if method.name not in self._separate]
            outcomes: _Outcomes = {}
            errors: list[str] = []
            for methods in [shared, *([method] for method in self.methods if method not in shared)]:
                if methods:
                    outcomes |= self._attempt(methods, x, [batch[index] for index in shown], errors)
            for position, index in enumerate(same):
                if index in inputs:
                    of_image = {name: of_batch[position] for name, of_batch in outcomes.items()}
                    results[index] = of_image, next(iter(errors), None)
        return results

    def _explain_case(self, loaded: LoadedImage) -> Results:
        """Return the results of a case of several inputs, which is a batch of its own; none for an image."""
        name_subjects(loaded.slot.entry.source)
        methods = [method for method in self.methods if loaded.inputs and method.name in loaded.slot.methods]
        return {method.name: attempt(method.attribute, loaded.inputs, loaded.target) for method in methods}

    def _attempt(
        self, methods: Sequence[Attribution], x: Tensor, images: Sequence[LoadedImage], errors: list[str]
    ) -> _Outcomes:
        """Run methods on a batch. If that fails, append the reason to `errors`, and run parts of the batch."""
        explained = attempt(self._explain_together, methods, x, images)
        if not isinstance(explained, BaseException):
            return {method.name: list(of_batch) for method, of_batch in zip(methods, explained, strict=True)}
        # Free the memory of the pass: drop the tracebacks, which reference tensors.
        error, cause = explained, cast("BaseException | None", explained)
        while cause is not None:
            cause.__traceback__ = None
            cause = cause.__cause__ or cause.__context__
        if is_out_of_memory(error) and x.is_cuda:
            torch.cuda.empty_cache()
        if is_out_of_memory(error) and len(x) > 1:
            raise BatchTooLargeError(f"a batch of {len(x)} images does not fit into memory")
        applies = not isinstance(error, NotApplicableError | LayerError | MethodError)
        if applies and len(methods) * len(x) > 1:
            errors.append(error_columns(error)["error"])
        if len(methods) > 1:
            return {k: v for method in methods for k, v in self._attempt([method], x, images, errors).items()}
        if not applies:
            self._separate.add(methods[0].name)
            return {methods[0].name: [error] * len(x)}
        if len(x) == 1:
            return {method.name: [error] for method in methods}
        parts = [self._attempt(methods, x[i : i + 1], images[i : i + 1], errors) for i in range(len(x))]
        return {method.name: [result for part in parts for result in part[method.name]] for method in methods}

    def _explain_together(
        self, methods: Sequence[Attribution], x: Tensor, images: Sequence[LoadedImage]
    ) -> list[Explanation]:
        name_subjects(*(image.slot.entry.source for image in images))
        # Unlike a tensor of a user, a batch of images is not checked for wrong normalisation. The values of a volume
        # are checked.
        batch = methods[0].read(x) if x.dim() > 4 else Batch(x, (None,) * len(x))
        explanations = Together(*methods).attribute(batch, cast("Any", [image.target for image in images]))
        return [explanation.to("cpu") for explanation in explanations]


def trust_card(
    method: Attribution, loaded: LoadedImage, seconds: float | None, **options: Any
) -> TrustCard | BaseException:
    """Return the trust card of a loaded image, or the reason why there is none."""
    options.setdefault("others", other_images(method, loaded.slot.entry))
    return attempt(lambda: trust(method, loaded.open(), loaded.target, seconds=seconds, **options))


def other_images(method: Attribution, entry: ImageEntry) -> list[Path] | None:
    """Return other images of an image's folder, for the test of the class; None to use the package's photos."""
    path, has_photos = Path(entry.path), len(method.categories or ()) == 1000  # the classes of ImageNet
    files = [] if has_photos or entry.offset is not None else sorted(path.parent.glob(f"*{path.suffix}"))
    others = list(islice((file for file in files if file.name != path.name and _is_photo(file)), 12))
    return others if len(others) >= 3 else None


@cache
def _is_photo(file: Path) -> bool:
    """Return whether a file is an image that can be decoded, and not a drawing of the toolkit."""
    return not is_drawing(str(file)) and isinstance(attempt(open_image, file), Image.Image)


def load_model(options: NetworkOptions) -> nn.Module:
    """Return the model of a run, on the CPU if it is given by name."""
    return load(options.model, weights=options.weights) if isinstance(options.model, str) else options.model


def find_devices(names: str, model: str | nn.Module) -> list[torch.device]:
    """Parse device names such as "auto", "cpu" or "cuda:0,cuda:1".

    "auto" is the device of the model. For a model given by name, it is a GPU if there is one, else the CPU.

    Raises:
        BatchError: A device does not exist.
    """
    if names == "auto":
        if isinstance(model, str):
            return [torch.device("cuda" if torch.cuda.is_available() else "cpu")]
        return [device_of(model)]
    text = str(names) if isinstance(cast("object", names), str | torch.device) else described(names)
    with _device_errors(f'no device "{text}"', "auto, cpu, cuda, mps or cuda:0,cuda:1"):
        return [torch.empty(0, dtype=torch.uint8, device=name.strip()).device for name in text.split(",")]


@contextmanager
def _device_errors(problem: str, hint: str) -> Iterator[None]:
    """Convert the errors of PyTorch for a device that does not exist or is full."""
    try:
        yield
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise BatchError(f"{problem}: {reason}; try {hint}") from error


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model; the CPU if it has no parameters and buffers."""
    like = reference_tensor(model)
    return torch.device("cpu") if like is None else like.device


def move_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device. Raises BatchError if the device cannot be used."""
    with _device_errors(f"the device {device} cannot be used", "cpu"):
        return model.to(device)


def replicate(options: NetworkOptions, model: nn.Module, devices: Sequence[torch.device]) -> list[Network]:
    """Return a network per device. The first uses the model itself if it is on that device; others use a copy."""
    here = device_of(model)
    return [
        Network(options, model if index == 0 and device == here else move_model(copy.deepcopy(model), device))
        for index, device in enumerate(devices)
    ]


def create_methods(options: NetworkOptions, model: nn.Module) -> list[Attribution]:
    """Create the methods of a run, each with the options that it accepts."""
    classes = [get_method(name) for name in options.methods]
    require_options(options.options, classes)
    if options.layer is not None and not any(map(reads_layer, classes)):
        raise MethodError(f'layer="{options.layer}": {", ".join(options.methods)} reads no layer; leave the option out')
    return [create_method(cls, options, model) for cls in classes]


def require_options(names: Iterable[str], classes: Collection[type[Attribution]]) -> None:
    """Raise MethodError for the name of an option that no method has."""
    options = list(dict.fromkeys(option for cls in classes for option in cls.options()))
    for name in names:
        if name not in options:
            owner = "any method" if len(classes) == len(METHODS) else ", ".join(cls.name for cls in classes)
            raise MethodError(f'no option "{name}" of {owner}{option_hint(name, options)}')


def create_method(cls: type[Attribution], options: NetworkOptions, model: nn.Module) -> Attribution:
    """Create a method with the options that it has, and with the layer if it reads a layer."""
    values = {"progress": False, **options.options}  # the run shows progress
    accepted = {name: value for name, value in values.items() if name in cls.options()}
    if options.layer is not None:
        layers = {"layer": options.layer, "layers": [options.layer]}
        accepted |= {name: value for name, value in layers.items() if name in cls.parameters()}
    about_the_model = {name: getattr(options, name) for name in ("preprocess", "categories", "whole")}
    return cls(model, **about_the_model, **accepted)


def reads_layer(cls: type[Attribution]) -> bool:
    """Return whether a method reads a layer, or several."""
    return not {"layer", "layers"}.isdisjoint(cls.parameters())
