"""Where models come from: the bundled networks, torchvision and timm, each behind the same few questions."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from ..errors import ModelError, did_you_mean
from ..io.preprocess import PreprocessLike
from .download import downloading, hub_file, library, no_network, require_network

Source = Literal["bundled", "torchvision", "timm"]
Where = Literal["here", "download", "pip install", "none"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a library knows about a model besides its weights."""

    preprocess: PreprocessLike
    categories: tuple[str, ...] | None  # None where the names of the classes are not known
    classes: int | None  # None where their number is not known either


class Library(ABC):
    """Models by name, from one place."""

    source: ClassVar[Source]

    @abstractmethod
    def names(self) -> list[str]:
        """Every architecture, sorted."""

    @abstractmethod
    def build(self, name: str, classes: int | None) -> nn.Module:
        """The model with random weights; `classes` None for as many as its default weights have."""

    @abstractmethod
    def pretrained(self, name: str, weights: str) -> nn.Module:
        """The model with the weights of that name, downloaded where they are not here yet."""

    @abstractmethod
    def facts(self, model: nn.Module, name: str, weights: str, /) -> Facts:
        """Preprocessing and class names that go with those weights."""

    @abstractmethod
    def where(self, name: str) -> Where:
        """Where the default weights are."""

    def tagged(self) -> list[str]:
        """Every name that says which weights are meant, as in `resnet50.a1_in1k`."""
        return []

    def native(self, weights: Mapping[str, Tensor], _own: Collection[str], /) -> Mapping[str, Tensor]:
        """A checkpoint's weights under the model's own keys, where this library has named them otherwise."""
        return weights


class Torchvision(Library):
    """Classifiers, segmentation and detection models of torchvision."""

    source = "torchvision"

    def names(self) -> list[str]:
        """What takes a picture and can be differentiated: no video, optical flow or quantised models."""
        models = library("torchvision.models")
        modules = (models, models.segmentation, models.detection)
        return sorted(name for module in modules for name in models.list_models(module))

    def build(self, name: str, classes: int | None) -> nn.Module:
        """The model as it is built for its pretrained weights, but without heads for training."""
        models = library("torchvision.models")
        options: dict[str, Any] = {} if classes is None else {"num_classes": classes}
        if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
            options["weights_backbone"] = None  # otherwise a model of random weights downloads a backbone
        if name in ("googlenet", "inception_v3"):
            options |= {"transform_input": True, "aux_logits": False, "init_weights": False}
        model: nn.Module = models.get_model(name, weights=None, **options)
        return model

    def pretrained(self, name: str, weights: str) -> nn.Module:
        """The model with "default" or, for example, "IMAGENET1K_V2"."""
        entry = self._entry(name, weights)
        if not hub_file(entry.url).is_file():
            require_network(name, entry.url)
        with downloading(name):
            model: nn.Module = library("torchvision.models").get_model(name, weights=entry)
        return model

    def facts(self, _model: nn.Module, name: str, weights: str, /) -> Facts:
        """What `weights.transforms()` and `weights.meta` say; neither needs the weights themselves."""
        entry = self._entry(name, weights)
        categories = tuple(entry.meta["categories"])
        return Facts(entry.transforms(), categories, len(categories))

    def where(self, name: str) -> Where:
        """Whether torch's hub folder has the file."""
        return "here" if hub_file(self._entry(name, "default").url).is_file() else "download"

    def native(self, weights: Mapping[str, Tensor], _own: Collection[str], /) -> Mapping[str, Tensor]:
        """DenseNet's files on the download server say `norm.1` where the model says `norm1`."""
        return {re.sub(r"(\.denselayer\d+\.(?:norm|conv))\.([12]\.)", r"\1\2", key): weights[key] for key in weights}

    def _entry(self, name: str, weights: str) -> Any:
        table = library("torchvision.models").get_model_weights(name)
        if weights == "default":
            return table.DEFAULT
        wanted = weights.removeprefix(f"{table.__name__}.")
        if wanted not in table.__members__:
            known = list(table.__members__)
            hint = did_you_mean(wanted, known) or f"; there are {', '.join(known)}"
            raise ModelError(f'torchvision has no weights "{weights}" for {name}{hint}')
        return table[wanted]


class Timm(Library):
    """All of timm; `resnet50.a1_in1k` is the architecture with that set of weights."""

    source = "timm"

    def names(self) -> list[str]:
        """Every architecture of timm, without tags."""
        listed: list[str] = library("timm").list_models()
        return listed

    def tagged(self) -> list[str]:
        """Every set of weights of every architecture."""
        listed: list[str] = library("timm").list_pretrained()
        return listed

    def build(self, name: str, classes: int | None) -> nn.Module:
        """The model with random weights; a tag still decides its number of classes."""
        options = {} if classes is None else {"num_classes": classes}
        model: nn.Module = library("timm").create_model(name, **options)
        return model

    def pretrained(self, name: str, weights: str) -> nn.Module:
        """The model with "default" or, for example, "a1_in1k"."""
        timm = library("timm")
        name = self._tagged(name, weights)
        config = timm.get_pretrained_cfg(name)
        file = _timm_file(config)
        # From the file itself, timm neither asks the network whether there is a newer one nor retries.
        overlay = None if file is None else {"file": str(file), "custom_load": file.suffix == ".npz"}
        if file is None:
            _require_timm_network(name, config)
        with downloading(name):
            model: nn.Module = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay)
        return model

    def facts(self, model: nn.Module, _name: str, _weights: str, /) -> Facts:
        """What the model's `pretrained_cfg` says."""
        config: Any = model.pretrained_cfg
        preprocess = library("timm.data").resolve_model_data_config(model)
        classes = config["num_classes"]
        return Facts(preprocess, _timm_categories(classes, config["tag"] or ""), classes)

    def where(self, name: str) -> Where:
        """Whether the cache of the hub that timm downloads from has the file."""
        timm = library("timm")
        if not timm.is_model_pretrained(name):
            return "none"
        return "download" if _timm_file(timm.get_pretrained_cfg(name)) is None else "here"

    def _tagged(self, name: str, weights: str) -> str:
        timm = library("timm")
        tagged = name if weights == "default" else f"{name.partition('.')[0]}.{weights}"
        if timm.is_model_pretrained(tagged):
            return tagged
        known = [each.partition(".")[2] for each in timm.list_pretrained(f"{name.partition('.')[0]}.*")]
        if not known:
            raise ModelError(f"timm has no pretrained weights for {name}; use weights=None or a local file")
        hint = did_you_mean(weights, known) or f"; there are {', '.join(known)}"
        raise ModelError(f'timm has no weights "{weights}" for {name}{hint}')


def _timm_file(config: Any) -> Path | None:
    """Where an earlier download of these weights lies, or None."""
    if not config.hf_hub_id:
        file = hub_file(config.url)
        return file if file.is_file() else None
    hub = library("huggingface_hub")
    for name in ("model.safetensors", "pytorch_model.bin"):
        cached = hub.try_to_load_from_cache(config.hf_hub_id, name)
        if isinstance(cached, str):
            return Path(cached)
    return None


def _require_timm_network(name: str, config: Any) -> None:
    constants = library("huggingface_hub.constants")
    if config.hf_hub_id and constants.HF_HUB_OFFLINE:
        raise no_network(name, f"{constants.ENDPOINT} (HF_HUB_OFFLINE is set)")
    require_network(name, constants.ENDPOINT if config.hf_hub_id else config.url)


def _timm_categories(classes: int, tag: str) -> tuple[str, ...] | None:
    """The names of ImageNet's classes: torchvision's short ones for the usual 1000, else WordNet's."""
    if classes == 1000:
        # The few sets of weights with 1000 outputs that are not ImageNet's classes are not tagged in1k.
        return imagenet_categories() if not tag or "in1k" in tag else None
    data = library("timm.data")
    subset = data.infer_imagenet_subset({"num_classes": classes})
    if subset is None:
        return None
    info = data.ImageNetInfo(subset)
    lemmas, synsets = info.label_descriptions(), info.label_names()
    seen = Counter(lemmas)
    return tuple(
        lemma if seen[lemma] == 1 else f"{lemma} ({synset})" for lemma, synset in zip(lemmas, synsets, strict=True)
    )


def imagenet_categories() -> tuple[str, ...]:
    """The 1000 classes of ImageNet-1k in their usual order, each name once: tench ... toilet tissue."""
    return tuple(library("torchvision.models").get_model_weights("resnet50").DEFAULT.meta["categories"])
