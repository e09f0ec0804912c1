"""The user's model without its wrappers, and the preprocessing, class names and layout that it carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import nn

from ..errors import ModelError
from ..targets.targets import as_categories


def unwrap(model: object) -> nn.Module:
    """Return the model inside `torch.compile`, `DataParallel`, `DistributedDataParallel`, and `YOLO` of Ultralytics.

    Raises:
        ModelError: `model` is not a `torch.nn.Module`.
    """
    while isinstance(model, nn.Module):
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None and hasattr(model, "predictor") and hasattr(model, "overrides"):
            inner = getattr(model, "model", None)  # of YOLO, whose own call is a pipeline under inference_mode
        if not isinstance(inner, nn.Module):
            return model
        model = inner
    hint = "load one with saliency.load(name), or wrap your function in a module"
    raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}; {hint}")


_ATTRIBUTES: dict[str, tuple[Any, ...]] = {
    "preprocess": (Callable, Mapping),
    "categories": (Sequence, Mapping),
    "layout": (FunctionType,),
}


def model_attribute(name: str, model: nn.Module) -> Any:
    """Return the preprocessing, the class names or the layout of a model or of the model in its wrapper; else None.

    A model of Hugging Face has its class names in `config.id2label`, unless they are "LABEL_0", "LABEL_1", ... A YOLO
    has them in `names`. Models of timm and open_clip carry the configuration of their preprocessing. Detectors of
    torchvision normalise images themselves.
    """
    values = [getattr(owner, name, None) for owner in (model, unwrap(model))]
    if name == "categories":
        labels = getattr(getattr(unwrap(model), "config", None), "id2label", None)  # of Hugging Face
        has_names = isinstance(labels, Mapping) and labels != {key: f"LABEL_{key}" for key in labels}
        names = getattr(unwrap(model), "names", None)  # of YOLO
        values += [labels if has_names else None, names if isinstance(names, Mapping) else None]
    if name == "preprocess":
        values.append(_carried_preprocess(unwrap(model)))
    return next((value for value in values if isinstance(value, _ATTRIBUTES[name])), None)


def _carried_preprocess(model: nn.Module) -> Mapping[str, Any] | None:
    timm: Any = getattr(model, "pretrained_cfg", None)
    if isinstance(timm, Mapping) and (timm.get("input_size") or (0,))[0] in (1, 3):
        return timm
    open_clip: Any = getattr(getattr(model, "visual", None), "preprocess_cfg", None)
    if isinstance(open_clip, Mapping):
        size = open_clip["size"] if isinstance(open_clip["size"], Sequence) else (open_clip["size"],) * 2
        mode = {"shortest": "center"}.get(open_clip["resize_mode"], open_clip["resize_mode"])
        return {**open_clip, "input_size": size, "crop_pct": 1.0, "crop_mode": mode}
    if hasattr(getattr(model, "transform", None), "image_mean"):  # of torchvision; it also resizes
        return {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    return None


def categories_of(model: nn.Module) -> tuple[str, ...] | None:
    """Return the class names stored on a model; None without any."""
    names = model_attribute("categories", model)
    return None if names is None else as_categories(names)
