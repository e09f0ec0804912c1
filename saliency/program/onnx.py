"""ONNX files of exported programs, and ONNX Runtime, which checks them where it is installed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ..errors import NotApplicableError
from .decompositions import FOR_ONNX

OUTPUTS = ("scores", "classes", "map")


def write_onnx(program: ExportedProgram, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a program as an ONNX file with the input `image`, the outputs `OUTPUTS`, and metadata as `metadata_props`.

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
        translated = torch.onnx.export(forward, input_names=["image"], output_names=OUTPUTS, **options)
    except torch.onnx.OnnxExporterError as error:
        named = re.search(r"(aten|prims)\.\w+", str(error))
        raise NotApplicableError(f"export: ONNX cannot express {named[0] if named else error}") from error
    written = cast("torch.onnx.ONNXProgram", translated)
    for node in written.model.graph.all_nodes():
        node.metadata_props.clear()
    written.model.metadata_props.clear()
    written.model.metadata_props.update(metadata)
    written.save(path)


def run_onnx(path: Path, x: Tensor) -> list[Tensor]:
    """Return the outputs of an ONNX file for images (N, C, H, W), from ONNX Runtime on the CPU.

    Raises:
        NotApplicableError: ONNX Runtime cannot run the file.
    """
    runtime = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # no warnings: errors are raised
    try:
        session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        outputs = session.run(OUTPUTS, {"image": x.numpy(force=True)})
    except Exception as error:  # of many types
        hint = "; convert the model to float32" if x.dtype in (torch.float64, torch.bfloat16) else ""
        raise NotApplicableError(f"export: ONNX Runtime cannot run the file: {error}{hint}") from error
    return [torch.from_numpy(output) for output in outputs]
