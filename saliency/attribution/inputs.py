"""The result of a method for several inputs of one call: an explanation of each, and how the score divides."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import MethodError
from ..io.inputs import Batch
from ..model.answer import Answer
from ..model.call import bind_image, bound
from ..model.inputs import Group, InputBatch, Key, ModelInputs
from ..targets.classes import per_image
from ..validation import described
from .explanation import Explanation, fractions, reduced_maps

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class InputExplanations(Mapping[Any, Explanation]):
    """Explanations of several inputs of one call: `result["depth"]` is the `Explanation` of that image.

    Attributes:
        explanations: The explanation of each image, by the name of the input.
        source: All inputs of the call.
        others: The values of inputs that are not images, such as a state vector, in their shapes (N, ...). Methods that
            explain all inputs together have them: gradients, relevance and path methods.
    """

    explanations: Mapping[Any, Explanation]
    source: ModelInputs = field(repr=False)
    others: Mapping[Key, Tensor] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: Any) -> Explanation:
        """Return the explanation of an image. Raises KeyError with the names of all."""
        if name not in self.explanations:
            raise KeyError(f"no explanation of {name!r}; there is one of {', '.join(map(repr, self.explanations))}")
        return self.explanations[name]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the names of the images."""
        return iter(self.explanations)

    def __len__(self) -> int:
        """Return the number of images of one case."""
        return len(self.explanations)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError with the cure for what only the explanation of one image has."""
        first = next(iter(self), None) if hasattr(Explanation, name) else None
        cure = "" if first is None else f"; each image has its own, as in result[{first!r}].{name}"
        raise AttributeError(f"InputExplanations has no {name}{cure}")

    @property
    def inputs(self) -> Mapping[Key, Any]:
        """All inputs as the model takes them."""
        return self.source.values

    def hold(self, name: Key | Group) -> InputBatch:
        """Return an image, or a group, for metrics and trust cards, which change it but not the other inputs."""
        return self.source.batch(*(name if isinstance(name, tuple) else (name,)), as_channels=True)

    @property
    def scores(self) -> Tensor:
        """(N,) the explained scores."""
        return next(iter(self.explanations.values())).scores

    @property
    def sums(self) -> dict[Key, Tensor]:
        """The sum (N,) of the drawn values of each input: signed values, their magnitudes, or the positive values.

        For path methods and relevance, "rest" is the part of the score that no value explains.
        """
        first = next(iter(self.explanations.values()))
        others = {name: replace(first, values=values[:, None]) for name, values in self.others.items()}
        maps = {name: reduced_maps(part, None) for name, part in {**self.explanations, **others}.items()}
        sums = {name: values.double().flatten(1).sum(1) for name, values in maps.items()}
        if first.ledger is not None:
            absorbed = [name not in ("input", *map(str, sums)) for name in first.ledger_names]
            sums["rest"] = first.ledger[:, absorbed].double().sum(1)
        if first.residual is not None:
            sums["rest"] = sums.get("rest", 0) + first.residual.double()
        return sums

    @property
    def shares(self) -> dict[Any, float | list[float]]:
        """The sum of each input's values over the magnitudes of all sums: a number, or a list of one for each case.

        Shares have the signs of the sums, and their magnitudes sum to 1.
        """
        sums = self.sums
        rows = zip(sums, fractions(torch.stack([*sums.values()]), 0).tolist(), strict=True)
        return {name: shares[0] if len(shares) == 1 else shares for name, shares in rows}

    def to(self, device: torch.device | str) -> InputExplanations:
        """Return the explanations with their tensors on another device."""
        explanations = {name: explanation.to(device) for name, explanation in self.explanations.items()}
        return replace(self, explanations=explanations, others={k: v.to(device) for k, v in self.others.items()})

    def save(self, path: str | os.PathLike[str]) -> list[Path]:
        """Save the explanation of each input: `maps/cat.safetensors` gives `maps/cat.rgb.safetensors`, and so on.

        Returns:
            The files, for `Explanation.load`.
        """
        file, files = Path(path), list[Path]()
        for name, explanation in self.explanations.items():
            label = "-".join(map(str, name)) if isinstance(name, tuple) else str(name)
            files.append(file.with_suffix(f".{label.replace('/', '_')}{file.suffix}"))
            explanation.save(files[-1])
        return files


def each_alone(batch: Batch, targets: Sequence[Any], compute: Callable[[Batch, Sequence[Any]], T]) -> list[T]:
    """Return the result of a function of a batch; or the result of each image of an answer, explained alone.

    Args:
        batch: The images. The model reads all images of an answer in each pass; the others stay unchanged.
        targets: The targets, each for all images, or with one target for each image.
        compute: Takes a batch and its targets.
    """
    if not isinstance(batch, Answer) or len(batch.inputs) == 1:
        return [compute(batch, targets)]
    results = []
    by_image = zip(*(per_image(target, len(batch.inputs)) for target in targets), strict=True)
    for image, targets_of_image in enumerate(by_image):
        part = replace(batch, inputs=batch.inputs[image, None], frames=batch.frames[image : image + 1])
        with bind_image(image):
            results.append(compute(part, targets_of_image))
    return results


def explain_inputs(
    inputs: ModelInputs,
    explain: Sequence[Key | Group] | None,
    attribute: Callable[[InputBatch], Explanation],
    *,
    is_together: bool,
) -> InputExplanations:
    """Explain the images among several inputs: all in one pass, or one by one while the other inputs stay unchanged.

    Args:
        inputs: The inputs.
        explain: As for `Attribution.attribute`.
        attribute: Explains an input, or all of them as one row of numbers.
        is_together: Whether one pass explains all inputs, unless some are explained as one image.
    """
    names: list[Any] = [*inputs.frames] if explain is None else list(explain)
    flat = chain.from_iterable(name if isinstance(name, tuple) else [name] for name in names)
    if not names or isinstance(explain, str) or not inputs.frames.keys() >= {*flat}:
        images = ", ".join(map(str, inputs.frames))
        raise MethodError(f"explain={described(explain)}: expected a list of images among {images}")
    explained = InputExplanations({}, inputs)
    if not is_together or any(isinstance(name, tuple) for name in names):
        with bound(warned=set()):  # a warning about all inputs is issued once
            return replace(explained, explanations={name: attribute(explained.hold(name)) for name in names})
    batch = inputs.batch(*inputs.joined)
    whole = attribute(batch)
    parts = {
        part: batch.parts(tensor) for part, tensor in whole.tensors().items() if tensor.shape == whole.values.shape
    }
    if whole.ledger is not None:  # its first entry is of all inputs together
        of_inputs = torch.stack([tensor.flatten(1).sum(1).to(whole.ledger) for tensor in parts["values"].values()], 1)
        ledger = torch.cat([of_inputs, whole.ledger[:, 1:]], 1)
        whole = whole.with_evidence(ledger=ledger, ledger_names=(*map(str, inputs.joined), *whole.ledger_names[1:]))
    explanations = {}
    for name in names:
        explanation = whole.with_tensors(whole.tensors() | {part: tensor[name] for part, tensor in parts.items()})
        size = tuple(inputs.values[name].shape[2:])
        explanations[name] = replace(explanation, frames=inputs.frames[name], input_size=size)
    others = {name: values for name, values in parts["values"].items() if name not in names}
    return InputExplanations(explanations, inputs, others)
