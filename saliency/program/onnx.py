"""ONNX files of programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.export import ExportedProgram


def save_onnx(program: ExportedProgram, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a program as an ONNX file, with metadata as its `metadata_props`."""
    raise NotImplementedError
