"""Classes: from their names to indices, and from a model's output to their scores."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import TargetError, did_you_mean

Categories = Sequence[str] | None
"""The class names in the order of the output, where the model carries them."""

_FEW = 20  # as many as an error message can list


def output_tensor(output: Any) -> Tensor:
    """The tensor that holds the scores: the output itself, its `.logits`, `["out"]`, or its only tensor.

    Raises:
        TargetError: There are several tensors, and none is called so.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        named = dict(output)
    elif isinstance(output, tuple | list):
        fields = getattr(output, "_fields", None) or [str(i) for i in range(len(output))]
        named = dict(zip(fields, output, strict=True))
    else:
        named = {name: getattr(output, name) for name in ("logits", "out") if hasattr(output, name)}
    for name in ("logits", "out"):
        if isinstance(named.get(name), Tensor):
            tensor: Tensor = named[name]
            return tensor
    tensors = {name: each for name, each in named.items() if isinstance(each, Tensor)}
    if len(tensors) == 1:
        return next(iter(tensors.values()))
    came = ", ".join(f"{name!r}: {type(each).__name__}" for name, each in named.items()) or "nothing in it"
    raise TargetError(
        f"the model returned a {type(output).__name__} ({came}), and it is not clear which tensor holds the scores; "
        f"pass a function as the target, for example target=lambda output: {_example(output)}"
    )


def _example(output: Any) -> str:
    """A target for an output in which it is not clear which tensor holds the scores."""
    if isinstance(output, list | tuple) and output and isinstance(output[0], Mapping) and output[0]:  # one per image
        return f"torch.stack([each[{_key(output[0])!r}].sum() for each in output])"
    return f"{_written(output, 'output')}.flatten(1).sum(1)"


def _written(output: Any, path: str) -> str:
    """How one writes the first tensor, or the scores, of an output."""
    if isinstance(output, Mapping) and output:
        return _written(output[_key(output)], f"{path}[{_key(output)!r}]")
    if isinstance(output, tuple | list) and output:
        fields = getattr(output, "_fields", None)
        return _written(output[0], f"{path}.{fields[0]}" if fields else f"{path}[0]")
    return path if isinstance(output, Tensor) or path != "output" else "output['scores']"


def _key(named: Mapping[Any, Any]) -> Any:
    """The key of an output whose name or value most looks like scores."""
    tensors = [key for key, each in named.items() if isinstance(each, Tensor)]
    return next((key for key in ("scores", "logits") if key in tensors), (tensors or list(named))[0])


def as_categories(like: Any) -> tuple[str, ...]:
    """The class names in the order of the output, from a sequence or from a mapping of index to name.

    Raises:
        TargetError: It is neither, or holds something else than names.
    """
    if isinstance(like, Mapping) and all(isinstance(key, int) for key in like):
        like = [like[key] for key in sorted(like)]
    if isinstance(like, str) or not isinstance(like, Sequence) or not all(isinstance(each, str) for each in like):
        raise TargetError(f"class names are a list of strings in the order of the output, got {type(like).__name__}")
    return tuple(like)


def class_scores(output: Any) -> Tensor:
    """The scores (N, classes) of an output; one value per image counts as one class.

    Raises:
        TargetError: The output is no row of classes.
    """
    scores = output_tensor(output)
    if scores.dim() == 1:
        return scores[:, None]
    if scores.dim() == 2 and scores.shape[1] > 0:
        return scores
    cure = (
        "use saliency.region(label) as the target"
        if scores.dim() == 4
        else "pass a function of the output as the target"
    )
    raise TargetError(f"the model's output has shape {tuple(scores.shape)}, not (N, classes); {cure}")


def class_probabilities(output: Any) -> Tensor:
    """The probabilities (N, classes): the softmax of the scores, or the scores where they are probabilities already.

    Raises:
        TargetError: The output is no row of classes, or only one number, which has no softmax.
    """
    scores = class_scores(output)
    if scores.shape[1] == 1:
        raise TargetError(
            "the model gives one number per image, which has no softmax; explain the number itself: "
            "saliency.value(0), or saliency.value() for an output of shape (N,)"
        )
    known = scores.detach().float()
    sums_to_one = float(known.min()) >= 0 and bool(((known.sum(1) - 1).abs() < 1e-3).all())
    is_distribution = sums_to_one or not scores.is_floating_point()
    return scores if is_distribution else scores.softmax(1)


def per_image(classes: Any, images: int) -> list[Any]:
    """One class per image: a single one serves all. Raises TargetError for a wrong number."""
    if isinstance(classes, Tensor | np.ndarray):
        classes = classes.tolist()
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        return [classes] * images
    if len(classes) != images:
        raise TargetError(
            f"{len(classes)} targets came for {images} image{'s' * (images != 1)}; pass one for all, or one for each "
            "(several classes of one image: attribute_classes)"
        )
    return list(classes)


def class_index(label: Any, categories: Categories) -> int:
    """The index of a class by index or name. Raises TargetError, with the closest names, where there is none."""
    if not isinstance(label, str):
        index = class_number(label)
        if categories is not None and index >= len(categories):
            raise TargetError(f"class {index} is outside 0..{len(categories) - 1}")
        return index
    if categories is None:
        raise TargetError(
            f'class "{label}" cannot be looked up: the model carries no class names; '
            "pass an index, or set model.categories to the list of names"
        )
    found = [i for i, name in enumerate(categories) if name == label]
    found = found or [i for i, name in enumerate(categories) if name.casefold() == label.casefold()]
    if not found:
        hint = did_you_mean(label, categories)
        if not hint and len(categories) <= _FEW:
            hint = f"; they are {', '.join(categories)}"
        raise TargetError(f'no class "{label}" among {len(categories)}{hint}')
    if len(found) > 1:
        raise TargetError(f'class "{label}" is the name of several: {", ".join(map(str, found))}; pass the index')
    return found[0]


def class_name(index: int, categories: Categories) -> str:
    """The name of a class, or `class 7` where the model carries none."""
    return categories[index] if categories is not None and index < len(categories) else f"class {index}"


def class_number(label: Any) -> int:
    """A class index as an int. Raises TargetError for what is no integer, or negative."""
    label = label.item() if isinstance(label, Tensor) and label.numel() == 1 else label
    try:
        index = operator.index(label) if not isinstance(label, bool) else None
    except TypeError:
        index = None
    if index is None:
        raise TargetError(f"a class is an index or a name, got {label!r} ({type(label).__name__})")
    if index < 0:
        raise TargetError(f"class {index} is negative; classes count from 0")
    return index
