"""Options of a run, the fingerprint of the options that determine its files, and its progress and summary."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from ..calls import answer_calls
from ..validation import SIGNS, Sign, check_choice, check_integer, check_number, described
from .failures import BatchError

if TYPE_CHECKING:
    from torch import nn

    from ..io.preprocess import PreprocessLike, Whole
    from ..targets.question import Target

Format = Literal["png", "jpg", "webp"]

FORMATS: tuple[Format, ...] = ("png", "jpg", "webp")


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run.

    Attributes:
        done: Number of images with results, from this run and earlier ones.
        total: Number of images.
        fresh: Number of images explained by this run.
        failed: Number of images with an error.
        note: Before the first image, a sentence about the preparation of the run; otherwise empty.
    """

    done: int
    total: int
    fresh: int
    failed: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """Result of a run.

    Attributes:
        folder: The output folder.
        page: The gallery page.
        images: Number of images of the run.
        done: Number of images with results, from this run and earlier ones.
        fresh: Number of images explained by this run.
        failed: Number of images with an error.
        kinds: Number of failed rows by class of error.
        failures: First failures of this run: (source, method, reason).
        seconds: Duration of this run.
        changed: Number of images that changed since they were listed and were explained again.
        removed: Sources of the images that no longer exist; their overlays are kept.
        unfinished: Number of images without results, by method; only methods of earlier runs in the same folder.
        left_out: Number of images in the sources that the toolkit wrote, such as overlays.
        others: Number of other files in the folders of the sources, by suffix.
        repeated: Number of images of this run whose batch failed and was repeated in parts, by the error.
    """

    folder: Path
    page: Path
    images: int
    done: int
    fresh: int
    failed: int
    kinds: Counter[str] = field(default_factory=Counter)
    failures: tuple[tuple[str, str, str], ...] = ()
    seconds: float = 0.0
    changed: int = 0
    removed: tuple[str, ...] = ()
    unfinished: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    others: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)


@answer_calls
@dataclass(frozen=True, slots=True, kw_only=True)
class OverlayStyle:
    """Style of overlays; see `saliency.overlay`.

    Attributes:
        format: File format. "png" is lossless; "jpg" files are about a seventh as large and several times faster.
        opacity: "map" for an opacity that follows the map, or a number in 0..1.
        colormap: Name of a matplotlib colormap; None for inferno, or bwr for signed maps.
        sign: "positive", "signed" or "absolute"; None for the method's default.
        percentile: Percentile of the values at which colours saturate.
        smoothing: Standard deviation of the smoothing, as a fraction of the map's longer edge.

    Raises:
        BatchError: A value is outside its range.
        RenderError: The colormap does not exist.
    """

    format: Format = "png"
    opacity: float | Literal["map"] = "map"
    colormap: str | None = None
    sign: Sign | None = None
    percentile: float | Literal["auto"] | None = "auto"
    smoothing: float = 0.005

    def __post_init__(self) -> None:
        check_choice("format", self.format, FORMATS, error=BatchError)
        if self.sign is not None:
            check_choice("sign", self.sign, SIGNS, error=BatchError)
        if self.opacity != "map":
            check_number("opacity", self.opacity, least=0, most=1, hint=', or "map"', error=BatchError)
        check_number("smoothing", self.smoothing, least=0, most=0.1, error=BatchError)
        if self.percentile not in (None, "auto"):
            hint = ', "auto" or None'
            check_number("percentile", self.percentile, above=0, most=100, hint=hint, error=BatchError)
        if self.colormap is not None:
            from ..render.scaling import color_table

            color_table(self.colormap)  # raises RenderError


class Options:
    """Base of the options of a run."""

    __slots__ = ()

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Create the options from the arguments of a function or command. Other arguments are ignored."""
        names = signature(cls).parameters.keys() & arguments.keys()
        options = {
            name: arguments[name] for name in names if arguments[name] is not None or name in ("model", "weights")
        }
        if "methods" in options:
            given = options["methods"]
            listed = given if isinstance(given, Iterable) and not isinstance(given, str | type) else [given]
            options["methods"] = [getattr(name, "name", name) if isinstance(name, type) else name for name in listed]
        if "options" in options:
            if not isinstance(options["options"], Mapping | list | tuple):
                got = described(options["options"])
                raise BatchError(f"options={got}: expected a mapping of names to values, such as {{'passes': 50}}")
            options["options"] = dict(options["options"])
        return cls(**options)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions(Options):
    """The explained model, the methods and the target.

    Attributes:
        model: A name that `saliency.load` accepts, or a model.
        weights: As for `saliency.load`; ignored if `model` is a model.
        preprocess: Preprocessing of the images; None for the model's own.
        categories: Class names; None for the model's own.
        methods: Names in the registry.
        layer: The layer, for the methods that read a layer; None for their default.
        options: Options of the methods, applied to each method that has them.
        whole: Whether the model sees the whole image, as for every method: False, True or "aspect".
        target: Class index or name, or a target such as "box:0" or `saliency.text(...)`, for all images without a
            target of their own; None for the top class of each image.
        detections: The number of detections to explain in each image, in descending order of probability, or "all";
            None to explain a single target of each image. If set, `target` is the class of the detections.
        device: Device names such as "auto", "cpu" or "cuda:0,cuda:1".
        compile: Whether the methods are compiled. Results are equal up to rounding, so a resumed run may change this.

    Raises:
        BatchError: An option is invalid.
    """

    model: str | nn.Module
    weights: str | None = "default"
    preprocess: PreprocessLike | None = None
    categories: Sequence[str] | Mapping[int, str] | Mapping[str, int] | None = None
    methods: Sequence[str] = ("grad_cam",)
    layer: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    whole: Whole = False
    target: int | str | Target | None = None
    detections: int | Literal["all"] | None = None
    device: str = "auto"
    compile: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            from ..model.call import unwrap

            unwrap(self.model)
        if not self.methods:
            raise BatchError("methods=(): expected a list of names, such as ['grad_cam']")
        if len(set(self.methods)) < len(self.methods):
            raise BatchError(f"methods={described([*self.methods])}: a method occurs twice")
        target = self.target
        if isinstance(target, str) and ":" in target:  # a finished run with a class does not import torch
            from ..targets.language import parse_target

            target = parse_target(target)
            if hasattr(getattr(target, "where", None), "shape"):  # the mask is read here, on this machine
                object.__setattr__(self, "target", target)
        if self.detections is not None and not isinstance(target, int | str | None):
            raise BatchError("detections= explains boxes of all detections; target= can only be their class")
        if self.detections not in (None, "all"):
            check_integer("detections", self.detections, error=BatchError)

    @property
    def model_name(self) -> str:
        """The name of the model, or of its class."""
        return self.model if isinstance(self.model, str) else type(self.model).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions(Options):
    """The files of each image.

    Attributes:
        style: How overlays are drawn.
        maps: Whether the values are saved.
        trust: Whether a trust card of each overlay is written.
        seconds: The time limit for each trust card; None for no limit.
        with_manifest: Whether the folder has a manifest with a page, and the images that the page shows.

    Raises:
        BatchError: An option is invalid.
    """

    style: OverlayStyle = field(default_factory=OverlayStyle)
    maps: bool = False
    trust: bool = False
    seconds: float | None = None
    with_manifest: bool = True

    def __post_init__(self) -> None:
        if self.seconds is not None:
            check_number("seconds", self.seconds, above=0, error=BatchError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(Options):
    """The course of a run.

    Attributes:
        engine: "local" or "ray".
        workers: Number of threads, or of actors on Ray; None for the default of the engine.
        batch_size: Number of images per batch; None for the default of the device.
        restart: Whether the results of an earlier run are removed first.
        retry: Whether images that failed in an earlier run are tried again.
        limit: Number of images to explain, in the order of the listing.
        strict: Whether the first failure stops the run.
        command: The command line, stored in the manifest.
        on_progress: Called after every image.

    Raises:
        BatchError: An option is invalid.
    """

    engine: Literal["local", "ray"] = "local"
    workers: int | None = None
    batch_size: int | None = None
    restart: bool = False
    retry: bool = False
    limit: int | None = None
    strict: bool = False
    command: Sequence[str] = ()
    on_progress: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, ("local", "ray"), error=BatchError)
        for name in ("workers", "batch_size", "limit"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), error=BatchError)


def expected_errors(every_method: bool, detections: object = None) -> set[str]:
    """Return the kinds of errors that are not failures: some of all methods do not apply, or there is no detection."""
    kinds = {"NotApplicableError"} if every_method else set()
    return kinds if detections is None else {*kinds, "NotFoundError"}


def fingerprint(options: NetworkOptions, output: OutputOptions) -> dict[str, Any]:
    """Return the options that determine the files, as JSON values.

    A run resumes only if they equal the options in the folder. A method that is not in the folder has its own options.
    """
    names = options.categories
    names = list(names) if isinstance(names, Sequence) else names
    values = {
        "model": options.model_name,
        "weights": _weights(options),
        "model source": _source(options.model),
        "preprocess": None if options.preprocess is None else _describe_preprocess(options.preprocess),
        "classes": None if names is None else _sha256(str(names).encode()),
        "whole": options.whole,
        "target": _describe_target(options.target),
        "detections": options.detections,
        **asdict(output.style),
    }
    for method in options.methods:
        values[f"layer of {method}"] = options.layer
        values[f"options of {method}"] = dict(sorted(options.options.items()))
        values[f"maps of {method}"] = output.maps
        values[f"trust of {method}"] = {"seconds": output.seconds} if output.trust else None
    plain: dict[str, Any] = json.loads(json.dumps(values, default=describe))  # as read back from the file
    return plain


def _weights(options: NetworkOptions) -> str | None:
    """Return the name of the weights, or a digest of a file or a model in memory."""
    if not isinstance(options.model, str):
        return _digest(options.model.state_dict())
    return _file_digest(options.weights) or options.weights


def _source(model: str | nn.Module) -> str | None:
    """Return a digest of the file with the code of the model, if it is a file or in the current folder."""
    if not isinstance(model, str):
        return None
    module = model.partition(":")[0]
    return _file_digest(module if module.endswith(".py") else f"{module.replace('.', '/')}.py")


def _describe_preprocess(preprocess: PreprocessLike) -> str:
    """Return one text for all spellings of the same preprocessing."""
    from ..attribution.options import is_per_input
    from ..io.preprocess import as_preprocess

    if is_per_input(preprocess):
        return str({name: own and _describe_preprocess(own) for name, own in preprocess.items()})
    return without_address(as_preprocess(preprocess))


def _describe_target(target: Any) -> str | None:
    """Return one text for all spellings of a class, 281 and "281", with a digest of the mask of a region."""
    mask = getattr(target, "where", None)
    shown = replace(target, where=describe(mask)) if hasattr(mask, "shape") else target
    return None if target is None else without_address(shown)


def _file_digest(name: str | None) -> str | None:
    """Return a digest of a file, or None if it does not exist."""
    if name is None or not os.path.isfile(name):  # noqa: PTH113 - unlike Path, never raises
        return None
    return _sha256(Path(name).read_bytes())


def _sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()[:16]}"


def _digest(tensors: Mapping[str, object]) -> str:
    """Return a digest of the names, types, shapes and values of tensors."""
    import torch

    digest = hashlib.sha256()
    for name, value in tensors.items():
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()[:16]}"


def describe(value: object) -> str:
    """Describe an option value that JSON cannot store. A tensor is described by a digest of all its values."""
    import torch

    return _digest({"": value}) if isinstance(value, torch.Tensor) else without_address(value)


def without_address(value: object) -> str:
    """Return a value as text, without the addresses of functions in memory."""
    return re.sub(r" at 0x\w+", "", str(value))
