"""Export of a method as one program: the scores and the map of a batch of any size."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from .._version import __version__
from ..attribution.base import Attribution, as_setting
from ..attribution.explanation import Explanation, heatmap, reduce_channels, resized
from ..attribution.options import MOST_PASSES
from ..attribution.passes import MultiPassAttribution, SampledAttribution, TimedAttribution
from ..attribution.questions import Questions, cached_serial_reason
from ..errors import MethodError, NotApplicableError, SaliencyError, TargetError, optional_import
from ..io.atomic_write import is_stream, require_folder
from ..io.inputs import ImagesLike
from ..io.preprocess import Preprocess
from ..model.answer import Answer
from ..model.call import prepared_for_attribution, run_model
from ..targets.classes import ClassScore, ClassTarget, as_target, class_scores, threshold
from ..targets.question import Images, Question
from ..validation import check_path
from .capture import DECOMPOSITIONS, FOR_ONNX, FROZEN, INPUTS, capture, tracing

ProgramRun = Callable[..., Sequence[Tensor]]
"""Images (N, C, H, W), and perhaps classes (N,) -> the outputs of a program."""
INPUT = "input"
"""The target of a program that takes the classes as an input."""

_DECIDES = """deep_lift deep_shap full_grad score_cam ablation_cam idgi guided_ig extremal_perturbation vit_cx vx_code
    xrai"""
_READS = "attention_rollout gradient_rollout chefer_attention grad_eclip chefer_lrp le_grad ag_cam"
NO_PROGRAM = {
    **dict.fromkeys(
        _DECIDES.split(), "it decides by values of the image which operations run; in a program they are fixed"
    ),
    **dict.fromkeys(_READS.split(), "it reads the attention of one image at a time"),
    "occlusion": "it runs its windows in a random order",
}
"""The methods that cannot be a program of any model, with the reason. Others are refused while they are traced."""

MOST_DIFFERENCE, MOST_ROUNDING = 1e-4, 0.05
"""The largest difference between the map of a program and the map of `attribute`, as a fraction of its maximum; at
least the rounding of the input's type. A difference up to the second limit is accepted if other last digits of the
image change the map of `attribute` by at least half as much."""
COPIES = 4
"""Number of images with other last digits that are tried. Each has twice the change of the one before, because the
rounding of many layers adds up."""


def export(method: Attribution, path: str | Path, example: ImagesLike, *, target: int | str | None = None) -> Path:
    """Write a model and its explanation as one program, which runs without this package.

    The program takes the model's normalised input (N, C, H, W), with any N and the example's size, and for
    `target="input"` the class indices (N,), int64, of which a negative one stands for the top class. It returns the
    scores of all classes (N, classes), the explained class of each image (N,), and its heatmap (N, H, W), as `heatmap`
    gives it. The file also holds the class names, the preprocessing, the layer and the versions: as `metadata.json` in
    the `extra_files` of a .pt2 file, and as `metadata_props` of an .onnx file.

    Args:
        method: The method with its model, which does not change. Methods that draw random numbers, or that decide by
            values which operations run, are refused.
        path: The file: .pt2 for `torch.export.load`, or .onnx for ONNX Runtime and others.
        example: An image or several, as for `attribute`. The program is compared with `attribute` on them and on
            another number of images; and so is an .onnx file, if ONNX Runtime is installed.
        target: The index or name of the class that is explained; None for the top class of each image; "input" for an
            input of the program.

    Returns:
        The path.

    Raises:
        MethodError: The file has another ending, or `method` is not a method or has a time limit.
        NotApplicableError: The method, or the method on this model, cannot be a program. The message says why.
        TargetError: The target is not a class.
        DependencyError: The extra `export` is not installed, for an .onnx file.
        FileNotFoundError: The folder of the file does not exist.
        FileExistsError: The path is a folder, a device or a pipe.
        OSError: The file cannot be written. An older file stays.
    """
    path = check_path("path", path)
    if path.suffix not in (".pt2", ".onnx"):
        raise MethodError(f'export: the file "{path.name}" does not end in .pt2 or .onnx')
    require_folder(path)
    if is_stream(path) or path.is_dir():
        raise FileExistsError(f"export: cannot write {path.name}: it is not a file")
    if path.suffix == ".onnx":
        optional_import("onnxscript", "export", "writing an ONNX file")
        runtime = (
            optional_import("onnxruntime", "export", "checking an ONNX file") if find_spec("onnxruntime") else None
        )
    program, metadata, check = captured(method, example, target)
    check(program.module(), "the program")
    final = Path(os.path.realpath(path))
    with TemporaryDirectory(dir=final.parent) as folder:  # a failed export leaves the old file
        file = Path(folder, final.name)
        if path.suffix == ".pt2":
            archive = io.BytesIO()  # on a full disk, the writer of PyTorch ends the process instead of raising an error
            torch.export.save(program, archive, extra_files={"metadata.json": json.dumps(metadata)})
            file.write_bytes(archive.getbuffer())
        elif runtime:
            write_onnx(program, file, metadata | {"checked": f"onnxruntime {runtime.__version__}"})
            check(partial(run_onnx, file), "the ONNX file")
        else:
            write_onnx(program, file, metadata)
        for part in Path(folder).iterdir():
            part.replace(final.with_name(part.name))
    return path


def captured(
    method: Attribution, example: ImagesLike, target: int | str | None = None
) -> tuple[ExportedProgram, dict[str, str], Callable[[ProgramRun, str], None]]:
    """Return the program and the metadata that `export` writes, and the check of their map.

    It has the arguments and errors of `export`.
    """
    program, explanation, inputs = traced(method, example, target)
    return program, _metadata(method, explanation, target), partial(_require_equal, method, explanation, inputs)


def traced(
    method: Attribution, example: ImagesLike, target: int | str | None, *, is_frozen: bool = False
) -> tuple[ExportedProgram, Explanation, list[Tensor]]:
    """Return a program and an example. It returns a map, or the method's values if its weights will be frozen.

    Returns:
        The program; the explanation of the example by `attribute`; and the inputs of the program for the example.
    """
    if not isinstance(method, Attribution):
        raise MethodError(f"export: expected a method, such as GradCAM(model), got {type(method).__name__}")
    if reason := "it draws random samples" if isinstance(method, SampledAttribution) else NO_PROGRAM.get(method.name):
        raise NotApplicableError(f"export: {method.name} cannot be a program: {reason}")
    if isinstance(method, TimedAttribution) and method.seconds is not None:
        raise MethodError(f"export: a program has no time limit; create {method.name} without seconds=")
    if isinstance(example, Answer):
        raise MethodError("export: the example is an answer; a program takes images alone, of a model of classes")
    is_input = target == INPUT
    asked = as_target(None if is_input else target)
    if not isinstance(asked, ClassTarget):
        raise TargetError(f"export: expected a class or None as the target, got {type(asked).__name__}")
    (wanted,) = asked.prepared(Images(1, method.categories)).classes
    x = method.read(example).inputs
    # Before the capture: the call fills caches, such as the default layer, whose operations are not part of a program.
    explanation = method.attribute(x, wanted)
    inputs = [x, torch.tensor(explanation.target, device=x.device)] if is_input else [x]
    try:
        program = _program(method, [tensor[:1].detach() for tensor in inputs], wanted, is_frozen=is_frozen)
    except SaliencyError as error:
        reason = str(error).removeprefix(f"{method.name}: ")
        raise type(error)(f"export: {method.name} cannot be a program: {reason}") from error
    except Exception as error:  # the compiler of PyTorch raises many types
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise NotApplicableError(f"export: torch.export refuses {method.name} on this model: {reason}") from error
    for node in program.graph.nodes:
        node.meta = {"val": node.meta.get("val")}  # drop the origin of the node, which names files of this machine
    return program, explanation, inputs


def _metadata(method: Attribution, explanation: Explanation, target: int | str | None) -> dict[str, str]:
    """Return the metadata of a file: texts, and JSON of the settings, the class names and the preprocessing."""
    preprocess = asdict(method.preprocess) if isinstance(method.preprocess, Preprocess) else None
    return {
        "saliency": __version__,
        "torch": torch.__version__,
        "checked": "torch",
        "method": explanation.method,
        "title": explanation.title,
        "settings": json.dumps(explanation.settings),
        "layer": explanation.layer or "",
        "target": INPUT if target == INPUT else "" if target is None else explanation.target_names[0],
        "units": explanation.units,
        "sign": explanation.sign,
        "classes": json.dumps(method.categories),
        "preprocess": json.dumps(as_setting(preprocess)),
    }


class ProgramQuestions(Questions):
    """Questions about the class of each image as a tensor (N,), which the program computes.

    Args:
        wanted: The class index; None for the top class; or a tensor (N,) of indices, negative for the top class.
        score: The score of the class in the first output of the model.
        images: The images.

    Attributes:
        scores: (N, classes) the scores of the first output.
        index: (N,) the classes.
    """

    def __init__(self, wanted: int | Tensor | None, score: ClassScore, images: Images) -> None:
        super().__init__(None, images)
        self._wanted, self._score = wanted, score
        self.scores: Tensor | None = None
        self.index = torch.empty(0, dtype=torch.int64, device="cpu")

    def __call__(self, output: Any) -> Tensor:
        """Return the scores (N,)."""
        if self.asked:  # the questions of a method about the same classes
            return self.score(output)
        scores = class_scores(output)
        if self.scores is None:
            first = self.scores = scores.detach()
            if isinstance(self._wanted, int):
                self.index = torch.full_like(first[:, 0], self._wanted, dtype=torch.int64)
            else:
                is_second = first[:, 0] > threshold(self._score.link)
                self.index = is_second.long() if self._score.is_binary else first.argmax(1)
                if self._wanted is not None:
                    self.index = torch.where(self._wanted < 0, self.index, self._wanted)
        if self._score.is_binary:
            return scores[:, 0] * (2 * self.index - 1)
        return scores.gather(1, self.index[:, None]).squeeze(1)

    def __getitem__(self, image: int) -> Question:
        """Return the question about the class of an image."""
        return Question(self._score, "class")

    def classes(self, like: Tensor) -> Tensor:
        """Return the classes (N,)."""
        return self.index

    def serial_reason(self, image: int, model: nn.Module, x: Tensor) -> str:
        """Return why the passes of an image cannot run together; empty if they can."""
        return cached_serial_reason(model, x)

    def variants(self, image: int, count: int, *, mirrored: bool = False) -> ProgramQuestions:
        """Return the question about the class of one image, for variants of it."""
        other = copy.copy(self)
        other.index = self.index[image : image + 1].expand(count)
        return other


def _program(method: Attribution, inputs: Sequence[Tensor], wanted: int | None, *, is_frozen: bool) -> ExportedProgram:
    """Return the program of a method, for inputs like these: an image (1, C, H, W), and perhaps a class (1,)."""
    if isinstance(method, MultiPassAttribution) and method.chunk == "auto":
        method = copy.copy(method)
        method.chunk = MOST_PASSES  # each chunk repeats the operations of the model in the program
    with prepared_for_attribution(method.model, layout=method.layout):
        score = ClassTarget((wanted,)).find(run_model(method.model, inputs[0]), method.images(inputs[0]))

        def explain(x: Tensor, *classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            with tracing(x, *classes):
                questions = ProgramQuestions(classes[0] if classes else wanted, score, Images(len(x)))
                result = method.explain(x, questions)
                values = result.values.detach()
                if not is_frozen:
                    maps = reduce_channels(values, method.sign)
                    values = resized(maps.clamp(min=0) if method.sign == "positive" else maps, x.shape[2:])
                return cast("Tensor", questions.scores), questions.index, values

        table = FROZEN if is_frozen else DECOMPOSITIONS
        graph = capture(explain, inputs, method.model, table, one_by_one=isinstance(method, MultiPassAttribution))
    batch = Dim("batch")
    with torch.no_grad():
        pairs = tuple(torch.cat([tensor, tensor]) for tensor in inputs)
        return torch.export.export(graph, pairs, dynamic_shapes=tuple({0: batch} for _ in inputs), strict=False)


def _require_equal(
    method: Attribution, explanation: Explanation, inputs: Sequence[Tensor], run: ProgramRun, name: str
) -> None:
    """Raise NotApplicableError if a program gives another map of an image than `attribute`, by more than rounding.

    The program runs on the images of the explanation, and on another number of images.
    """
    x = inputs[0]
    other = [torch.cat([part, part]) if len(x) == 1 else part[:1] for part in inputs]
    require_close(method, explanation, x, [run(*inputs)[2], run(*other)[2][:1]], name)


def require_close(method: Attribution, explanation: Explanation, x: Tensor, runs: Sequence[Tensor], name: str) -> None:
    """Raise NotApplicableError if maps of the first images of an explanation differ by more than rounding."""
    expected = heatmap(explanation)
    largest = expected.abs().flatten(1).amax(1).clamp(min=torch.finfo(expected.dtype).tiny)

    def differences(maps: Tensor) -> Tensor:
        return (maps.to(expected) - expected[: len(maps)]).abs().flatten(1).amax(1) / largest[: len(maps)]  # (N,)

    errors, digit = torch.zeros_like(largest), torch.finfo(x.dtype).eps
    for maps in runs:
        errors[: len(maps)] = torch.maximum(errors[: len(maps)], differences(maps))
    allowed, random = torch.full_like(errors, max(MOST_DIFFERENCE, digit)), torch.Generator().manual_seed(0)
    for number in range(COPIES):
        if (errors <= allowed).all():
            return
        noise = torch.randn(x.shape, generator=random, dtype=torch.float32, device="cpu").to(x)
        with warnings.catch_warnings(action="ignore"):
            other = method.attribute(x + 2**number * digit * x.abs().clamp(min=1) * noise, list(explanation.target))
        allowed = torch.maximum(allowed, (2 * differences(heatmap(other))).clamp(max=MOST_ROUNDING))
    if not (errors <= allowed).all():
        worst = (errors - allowed).argmax()
        raise NotApplicableError(
            f"export: the map of {name} differs from attribute by {errors[worst]:.1g} of its maximum; other last "
            f"digits of the image explain {allowed[worst]:.1g}"
        )


OUTPUTS = ("scores", "classes", "map")


def write_onnx(program: ExportedProgram, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a program as an ONNX file with its inputs, the outputs `OUTPUTS`, and metadata as `metadata_props`.

    Stack traces, which name files of this machine, are left out. Weights of more than 2 GB are in a second file beside
    the first.

    Raises:
        NotApplicableError: ONNX has no translation of an operation, which the message names.
    """
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        if not node.args[0].meta["val"].is_contiguous():  # the translation ignores strides
            raise NotApplicableError("export: ONNX cannot express aten.as_strided of a tensor that is not contiguous")
    # The optimizer of onnxscript takes x + 1e-15 for x; ONNX Runtime optimizes the graph when it loads the file.
    options: dict[str, Any] = {"dynamo": True, "optimize": False, "verbose": False}
    try:
        forward = program.run_decompositions(dict(FOR_ONNX))  # all, because operations in place were left
        translated = torch.onnx.export(forward, output_names=OUTPUTS, **options)
    except torch.onnx.OnnxExporterError as error:
        named = re.search(r"(aten|prims)\.\w+", str(error))
        raise NotApplicableError(f"export: ONNX cannot express {named[0] if named else error}") from error
    written = cast("torch.onnx.ONNXProgram", translated)
    for node in written.model.graph.all_nodes():
        node.metadata_props.clear()
    written.model.metadata_props.clear()
    written.model.metadata_props.update(metadata)
    written.save(path)


def run_onnx(path: Path, *inputs: Tensor) -> list[Tensor]:
    """Return the outputs of an ONNX file for images (N, C, H, W), and perhaps classes (N,), on the CPU.

    Raises:
        NotApplicableError: ONNX Runtime cannot run the file.
    """
    runtime = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # no warnings: errors are raised
    try:
        session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        arrays = [tensor.numpy(force=True) for tensor in inputs]
        outputs = session.run(OUTPUTS, dict(zip(INPUTS, arrays, strict=False)))
    except Exception as error:  # of many types
        hint = "; convert the model to float32" if inputs[0].dtype in (torch.float64, torch.bfloat16) else ""
        raise NotApplicableError(f"export: ONNX Runtime cannot run the file: {error}{hint}") from error
    return [torch.from_numpy(output) for output in outputs]
