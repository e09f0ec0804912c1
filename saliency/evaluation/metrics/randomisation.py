"""Metrics of randomisation: does the map change if the weights, or the explained class, change?

`MPRT` and `RandomLogit` measure a drop in similarity: similarity of the map to a repeated computation, minus similarity
to the map after the change. A map that ignores the model has a value of 0, whether it is constant or noise.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from ...attribution.base import Attribution
from ...attribution.options import Option
from ...engine.estimates import generator
from ...errors import MethodError, TargetError
from ...hooks.manager import HookManager
from ...hooks.model_state import prepared_for_attribution, run_model
from ...targets.question import Images
from ...targets.targets import TargetLike, class_scores
from ...validation import check_choice, check_integer
from .base import Outcome, Subject, outputs
from .repeated_maps import SIMILARITIES, Maps, MethodMetric, Similarity, similarities

Randomised = Literal["cascading", "independent"]


class MPRT(MethodMetric):
    """Drop in the similarity of the map while the layers are randomised from the top down; higher is better.

    Args:
        order: "cascading" keeps the layers above randomised; "independent" randomises one layer at a time.
        compare: The similarity of two maps: "spearman" (rank correlation), "absolute" (of magnitudes) or "ssim".
        layers: The number of steps, each of which randomises an equal number of layers; None takes one for each layer.
        draws: The number of draws of the weights, for the standard error.

    Values: (N,), the similarity of the map to a repeated computation, minus the mean similarity over the layers. The
    curve has the similarities: the first with the model as it is. All parameters and buffers are randomised by
    permuting the values of each tensor, which keeps their distribution. Smooth MPRT (Hedström et al. 2024) is this
    metric of the maps of `SmoothGrad(method)`.

    Source: Adebayo et al., "Sanity Checks for Saliency Maps" (2018), https://arxiv.org/abs/1810.03292.
    """

    name = "mprt"
    higher_is_better = True

    order: Option[Randomised] = Option("cascading", check_choice, ("cascading", "independent"))
    compare: Option[Similarity] = Option("spearman", check_choice, SIMILARITIES)
    layers: Option[int | None] = Option(None, check_integer)
    draws: Option[int] = Option(1, check_integer)

    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the drops of the images."""
        randomised = self.randomised_similarities(maps)  # (draws, N, layers)
        same = similarities(maps.own, [maps.again()], self.compare)  # (N, 1)
        falls = same - randomised.mean(2).T
        error = standard_error(falls) if self.draws > 1 else None
        return Outcome(falls.mean(1), error, curves=torch.cat([same, randomised.mean(0)], 1))

    def randomised_similarities(self, maps: Maps) -> Tensor:
        """Return the similarities of the maps to the maps of randomised models: (draws, N, layers)."""
        keys = [(self.order, self.compare, self.layers, draw) for draw in range(self.draws)]
        return torch.stack([maps.once(key, self._one_draw, maps, key[-1]) for key in keys])

    def _one_draw(self, maps: Maps, draw: int) -> Tensor:
        """Return the similarities for one draw of the weights: (N, layers)."""
        others = (maps(maps.subject.images, method) for method in self._randomised(maps, draw))
        return similarities(maps.own, others, self.compare)

    def _randomised(self, maps: Maps, draw: int) -> Iterator[Attribution]:
        """Yield the method on a copy of the model with randomised layers; each is valid until the next one."""
        subject = maps.subject
        with subject.bound(subject.images[:1]):
            names = subject.once("layers", layers_from_the_top, subject.method, subject.images[:1])
        count = min(self.layers or len(names), len(names))
        if maps.control:
            yield from [subject.method] * count
            return
        method = subject.once("copy", _copied, subject)
        restore(method.model, subject.method.model)
        ends = [round(step * len(names) / count) for step in range(count + 1)]
        for begin, end in pairwise(ends):
            if self.order == "independent":
                restore(method.model, subject.method.model)
            randomise(method.model, names[begin:end], subject.seed, draw)
            yield method


class RandomLogit(MethodMetric):
    """Drop in the similarity of the map when another class is explained; higher is better.

    For a box, a region or a joint, it is another class of the same box, of the same pixels, or another joint.

    Args:
        compare: The similarity of two maps: "spearman" (rank correlation), "absolute" (of magnitudes) or "ssim".
        draws: The number of other classes, drawn at random, for the standard error.
        of: "class"; or "box" for the other detections in the image instead of other classes, in descending order of
            their probability.

    Values: (N,), the similarity of the map to a repeated computation, minus the mean similarity to the maps of other
    classes. The curve has the similarities: the first for the same class.

    Raises:
        TargetError: The explained target is not a class, or the model has no other class or found no other box.

    Source: Sixt et al., "When Explanations Lie: Why Many Modified BP Attributions Fail" (2020),
        https://arxiv.org/abs/1912.09818.
    """

    name = "random_logit"
    higher_is_better = True

    compare: Option[Similarity] = Option("spearman", check_choice, SIMILARITIES)
    draws: Option[int] = Option(5, check_integer)
    of: Option[Literal["class", "box"]] = Option("class", check_choice, ("class", "box"))

    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the drops of the images."""
        others = maps.subject.once(("others", self.of, self.draws), self._others, maps.subject)
        again = [maps.again(), *(maps(maps.subject.images, target=other) for other in others)]
        curve = similarities(maps.own, again, self.compare)
        falls = curve[:, :1] - curve[:, 1:]
        return Outcome(falls.mean(1), standard_error(falls), curves=curve)

    def _others(self, subject: Subject) -> list[TargetLike]:
        """Return other targets for all images."""
        images, classes, names = subject.images, subject.explanation.target, subject.explanation.target_names
        others = subject.others(self.of)
        if all(others):
            order = torch.randperm(max(map(len, others)), generator=generator(subject.seed), device="cpu").tolist()
            places = (range(len(order)) if self.of == "box" else order)[: self.draws]
            return [[own[at % len(own)] for own in others] for at in places]
        if self.of == "box" or None in classes:
            problem = "has no other box in the image" if self.of == "box" else "is not a class with others to compare"
            raise TargetError(f'the explained target, "{names[[*map(bool, others)].index(False)]}", {problem}')
        scores = class_scores(subject.once("output", outputs, subject.method, images[:1]))
        count = Images(categories=subject.method.categories).class_count(scores.shape[1])
        if count < 2:
            raise TargetError("the model returns one number per image, so there are no other classes")
        draws = torch.rand(count, generator=generator(subject.seed), dtype=torch.float64, device="cpu")
        ranks = draws.repeat(len(images), 1)
        ranks[torch.arange(len(images), device="cpu"), torch.tensor(classes, dtype=torch.int64, device="cpu")] = 2
        lowest = ranks.argsort(1)[:, : min(self.draws, count - 1)]  # the explained class comes last
        return [column.tolist() for column in lowest.T]


def _copied(subject: Subject) -> Attribution:
    """Return a copy of the method and its model, which reads the layer that the explanation is from."""
    method, layer = copy.deepcopy(subject.method), subject.explanation.layer
    if getattr(method, "layer", layer) is None and layer in dict(method.model.named_modules()):
        vars(method)["layer"] = layer
    return method


def standard_error(samples: Tensor) -> Tensor:
    """Return the standard error of the mean of samples (N, k): (N,); 0 for one sample."""
    count = samples.shape[1]
    return samples.std(1) / count**0.5 if count > 1 else torch.zeros_like(samples[:, 0])


def layers_from_the_top(method: Attribution, x: Tensor) -> list[str]:
    """Return the names of the modules with parameters or buffers of their own, from the last that starts to run.

    A module that is not called, such as the output projection of `nn.MultiheadAttention`, counts as its parent.

    Raises:
        MethodError: There are none.
    """
    model, began = method.model, list[str]()
    with prepared_for_attribution(model), torch.no_grad(), HookManager() as hooks:
        for name, module in model.named_modules():
            hooks.around(module, lambda *_, name=name: began.append(name), lambda *_: None)
        run_model(model, x)
    places = {name: place for place, name in reversed(list(enumerate(began)))}
    own = [name for name, module in model.named_modules() if _tensors(module)]
    if not own:
        raise MethodError(f"{type(model).__name__} has no parameters or buffers, so nothing can be randomised")

    def place(name: str) -> int:
        while name not in places and name:
            name = name.rpartition(".")[0]
        return places.get(name, 0)

    return sorted(own, key=place, reverse=True)


def randomise(model: nn.Module, names: list[str], *seed: int) -> None:
    """Permute the values of all parameters and buffers of some modules in place.

    Args:
        model: The model.
        names: The names of the modules.
        *seed: The seed, and the number of the draw if there are several.
    """
    for name in names:
        for number, tensor in enumerate(_tensors(model.get_submodule(name))):
            source = generator(*seed, *name.encode(), number)
            order = torch.randperm(tensor.numel(), generator=source, device="cpu").to(tensor.device)
            with torch.no_grad():
                tensor.copy_(tensor.flatten().index_select(0, order).view_as(tensor))


def restore(copied: nn.Module, model: nn.Module) -> None:
    """Copy the values of a model back into its copy, including buffers that are not saved."""
    with torch.no_grad():
        for tensor, value in zip(_tensors(copied, recurse=True), _tensors(model, recurse=True), strict=True):
            tensor.copy_(value)


def _tensors(module: nn.Module, *, recurse: bool = False) -> list[Tensor]:
    """Return the parameters and buffers of a module itself, or also of its children."""
    return [*module.parameters(recurse), *module.buffers(recurse)]
