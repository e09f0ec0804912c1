"""Class names and indices, and the class scores of a model's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import TargetError, did_you_mean
from ..validation import is_integer

Categories = Sequence[str] | None
"""Class names in the order of the output; None if the model has none."""

_MOST_LISTED = 20


def output_tensor(output: Any) -> Tensor:
    """Return the tensor of scores: the output itself, its `.logits`, `["out"]`, or its only tensor.

    Raises:
        TargetError: There are several tensors, and none has such a name.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        parts = dict(output)
    elif isinstance(output, tuple | list):
        parts = dict(zip(getattr(output, "_fields", None) or map(str, range(len(output))), output, strict=True))
    else:
        parts = {name: getattr(output, name) for name in ("logits", "out") if hasattr(output, name)}
    tensors: dict[str, Tensor] = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
    name = next((name for name in ("logits", "out", *tensors) if name in tensors), None)
    if name is not None and (name in ("logits", "out") or len(tensors) == 1):
        return tensors[name]
    kinds = ", ".join(f"{name!r}: {type(part).__name__}" for name, part in parts.items()) or "empty"
    raise TargetError(
        f"the model returned a {type(output).__name__} ({kinds}), and it is not clear which tensor holds the scores; "
        f"pass a function as the target, for example target=lambda output: {_example_target(output)}"
    )


def _example_target(output: Any) -> str:
    """Return the code of a target that sums the scores, or else the first entry, of an output."""
    if isinstance(output, list | tuple) and output and isinstance(output[0], Mapping):  # one entry per image
        return f"torch.stack([image[{_scores_key(output[0])!r}].sum() for image in output])"
    key = 0 if isinstance(output, list | tuple) else _scores_key(output) if isinstance(output, Mapping) else "scores"
    return f"output[{key!r}].flatten(1).sum(1)"


def _scores_key(parts: Mapping[Any, Any]) -> Any:
    return "scores" if "scores" in parts else next(iter(parts), "scores")


def as_categories(like: Any) -> tuple[str, ...]:
    """Convert a sequence of names, or a mapping of index to name, to class names in the order of the output.

    Raises:
        TargetError: `like` is neither, or contains something other than names.
    """
    if isinstance(like, Mapping) and all(isinstance(key, int) for key in like):
        like = [like[key] for key in sorted(like)]
    if isinstance(like, str) or not isinstance(like, Sequence) or not all(isinstance(name, str) for name in like):
        raise TargetError(f"expected class names as a list of strings in output order, got {type(like).__name__}")
    return tuple(like)


def class_scores(output: Any) -> Tensor:
    """Return the scores (N, classes) of an output; an output (N,) has one class.

    Raises:
        TargetError: The output has another shape.
    """
    scores = output_tensor(output)
    if scores.dim() == 1:
        return scores[:, None]
    if scores.dim() == 2 and scores.shape[1] > 0:
        return scores
    target = "saliency.region(label)" if scores.dim() == 4 else "a function of the output"
    raise TargetError(
        f"the model's output has shape {tuple(scores.shape)}, not (N, classes); pass {target} as the target"
    )


def class_probabilities(output: Any) -> Tensor:
    """Return the probabilities (N, classes): the softmax of the scores, or the scores if they are probabilities.

    Raises:
        TargetError: The output is not (N, classes), or has only one class, so its softmax would be 1.
    """
    scores = class_scores(output)
    if scores.shape[1] == 1:
        raise TargetError(
            "the model returns one number per image, whose softmax is always 1; explain the number itself: "
            "saliency.value(0), or saliency.value() for an output of shape (N,)"
        )
    known = scores.detach().float()
    sums_to_one = float(known.min()) >= 0 and bool(((known.sum(1) - 1).abs() < 1e-3).all())
    is_distribution = sums_to_one or not scores.is_floating_point()
    return scores if is_distribution else scores.softmax(1)


def per_image(classes: Any, images: int) -> list[Any]:
    """Return one class per image; a single one applies to all. Raises TargetError for a wrong number."""
    if isinstance(classes, Tensor | np.ndarray):
        classes = classes.tolist()
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        return [classes] * images
    if len(classes) != images:
        raise TargetError(
            f"got {len(classes)} targets for {images} image{'s' * (images != 1)}; pass one for all, or one per image "
            "(several classes of one image: attribute_classes)"
        )
    return list(classes)


def class_index(label: Any, categories: Categories) -> int:
    """Return the index of a class, given by index or name. For an unknown name, TargetError has the closest names."""
    if not isinstance(label, str):
        index = class_number(label)
        if categories is not None:
            require_class(index, len(categories))
        return index
    if categories is None:
        raise TargetError(
            f'class "{label}" cannot be looked up: the model has no class names; '
            "pass an index, or set model.categories to the list of names"
        )
    matches = [i for i, name in enumerate(categories) if name == label]
    matches = matches or [i for i, name in enumerate(categories) if name.casefold() == label.casefold()]
    if not matches:
        hint = did_you_mean(label, categories)
        if not hint and len(categories) <= _MOST_LISTED:
            hint = f"; the classes are {', '.join(categories)}"
        raise TargetError(f'no class "{label}" among {len(categories)} classes{hint}')
    if len(matches) > 1:
        raise TargetError(f'several classes are named "{label}": {", ".join(map(str, matches))}; pass the index')
    return matches[0]


def class_name(index: int, categories: Categories) -> str:
    """Return the name of a class; `class 7` if it has no name."""
    return categories[index] if categories is not None and index < len(categories) else f"class {index}"


def class_number(label: Any) -> int:
    """Return a class index as an int. Raises TargetError unless it is a non-negative integer."""
    label = label.item() if isinstance(label, Tensor) and label.numel() == 1 else label
    if not is_integer(label, least=None):
        raise TargetError(f"a class is an index or a name, got {label!r} ({type(label).__name__})")
    if int(label) < 0:
        raise TargetError(f"class {label} is negative; classes count from 0")
    return int(label)


def require_class(index: int, classes: int) -> None:
    """Raise TargetError unless a class index is less than the number of classes."""
    if index >= classes:
        raise TargetError(f"class {index} is outside 0..{classes - 1}, the classes of the model's output")
