"""What a gradient is of: a loss, or the score of a class, as one number for a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TargetError
from ..hooks.pytree import tree_map_tensors
from ..targets.class_names import Categories
from ..targets.targets import OutputTarget, TargetLike, as_target
from .model_inputs import Feed

Loss = Callable[..., Tensor]
"""loss(output) or loss(output, labels) -> a scalar, or one number per image, of which the mean is taken."""

_LABELS = ("label", "labels", "target", "targets", "y", "y_true")


class Objective:
    """One number for each batch, of which gradients are taken.

    Args:
        loss_or_target: A loss, or whatever names the score of a class.
        categories: The class names in the order of the output.
    """

    def __init__(self, loss_or_target: Loss | TargetLike, categories: Categories = None) -> None:
        self._given = loss_or_target
        self._categories = categories
        self._is_function = callable(loss_or_target) and not isinstance(loss_or_target, OutputTarget | Tensor)
        self._labels = _takes_labels(loss_or_target) if self._is_function else False
        self.name = "loss" if self._is_function else "score"

    def __call__(self, output: Any, feed: Feed) -> Tensor:
        """The loss or the mean score of a batch, as a tensor of one number.

        Raises:
            TargetError: It is no number, has no gradient, does not fit the output, or asks for labels that the data
                do not have.
        """
        if self._is_function:
            found = self._loss(output, feed)
        else:
            target = as_target(self._given, feed.size, self._categories)
            if isinstance(target, OutputTarget):
                target = target.resolve_from(output)
            found = target(output)
        if not isinstance(found, Tensor) or not found.is_floating_point() or found.dim() > 1:
            came = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise TargetError(f"the {self.name} is {came}; expected a float tensor of one number, or of one per image")
        if found.dim() == 1:
            if len(found) not in (1, feed.size):
                raise TargetError(f"the {self.name} has {len(found)} numbers for {feed.size} images; expected one each")
            found = found.mean()
        if not found.requires_grad:
            raise TargetError(
                f"the {self.name} has no gradient: it or the model detaches the output, or takes an argmax or a number "
                "of it"
            )
        return found

    def _loss(self, output: Any, feed: Feed) -> Any:
        loss: Any = self._given
        if self._labels is True and feed.labels is None:
            raise TargetError(
                f"the loss {_name(loss)} takes labels, and the data have none; pass pairs of a batch and its labels, "
                "or a loss of the output alone"
            )
        if self._labels is False or feed.labels is None:
            return loss(output)
        # What was made under inference_mode could not be saved for the way back; copies can.
        return loss(output, tree_map_tensors(feed.labels, torch.clone))


def _takes_labels(loss: Any) -> bool | None:
    """Whether a loss takes labels besides the output; None where it may do without."""
    try:
        # What calls a module has no signature of its own.
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (ValueError, TypeError):  # functions written in C, as torch.sum
        return False
    takes = [
        each
        for each in signature.parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if len(takes) < 2:
        return None if any(each.kind is each.VAR_POSITIONAL for each in signature.parameters.values()) else False
    second = takes[1]
    if second.default is second.empty:
        return True
    return None if second.name in _LABELS else False


def _name(loss: Any) -> str:
    return str(getattr(loss, "__name__", type(loss).__name__)).strip("<>")
