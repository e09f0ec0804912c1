"""Batches through a model, one after the other, with nothing of ours on it in between."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ImageError, ModelError
from ..hooks.model_state import prepared_for_attribution, unwrap
from .layer_selection import LayersLike, selected
from .model_inputs import Feed, feeds


class Passes:
    """The batches of some data, each for one pass through a model.

    While the data are asked for their next batch, the model and the random states are the user's own.

    Args:
        model: It is left as it is.
        data: As for `feeds`.
        training: The passes go through a private copy in training mode: normalisation goes by the batch, dropout
            drops, drawing from seeds of our own. The model itself, its buffers and the global random states stay
            as they are.

    Raises:
        ModelError: It is no module, has no numbers yet, or cannot be copied.
    """

    def __init__(self, model: nn.Module, data: Any, *, training: bool) -> None:
        self.original = unwrap(model)
        _require_numbers(self.original)
        self.model = _copied(self.original) if training else self.original
        self.training = training
        self.images = 0
        self.batches = 0
        self._feeds = feeds(model, data)

    def __iter__(self) -> Iterator[Feed]:
        """The batches. Raises ImageError where there is none."""
        for each in self._feeds:
            self.batches += 1
            self.images += each.size
            yield each
        if not self.batches:
            raise ImageError("the data hold no batch; an iterator that was used up before, as a generator is, is empty")

    def modules(self, layers: LayersLike) -> dict[str, nn.Module]:
        """The layers that are meant, by the names that they have in the original: a copy has other modules.

        Raises:
            LayerError: A name or pattern fits none.
        """
        modules = dict(self.model.named_modules(remove_duplicate=False))
        return {name: modules[name] for name in selected(self.original, layers)}

    @contextmanager
    def lent(self) -> Iterator[nn.Module]:
        """The model for one pass: in evaluation mode, or the copy in training mode; in eager mode, with gradients."""
        with prepared_for_attribution(self.model):
            if not self.training:
                yield self.model
                return
            # A model that keeps a part of itself from training says so in a method `train` of its own.
            self.model.train()
            with _drawing(self.batches, self.model):
                yield self.model

    def __str__(self) -> str:
        """For example `3 batches, 24 images, in evaluation mode`."""
        batches = f"{self.batches} batch{'' if self.batches == 1 else 'es'}"
        images = f"{self.images} image{'' if self.images == 1 else 's'}"
        return f"{batches}, {images}, {'in training mode, on a copy' if self.training else 'in evaluation mode'}"


def is_finite(tensor: Tensor) -> bool:
    """Whether there is neither NaN nor infinity in a tensor."""
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(tensor.isfinite().all())


def _require_numbers(model: nn.Module) -> None:
    """Raise ModelError where the parameters have no shape yet, or none but that."""
    with prepared_for_attribution(model):  # which tells of lazy ones
        tensors = (*model.named_parameters(), *model.named_buffers())
    empty = next((name for name, each in tensors if each.is_meta), None)
    if empty is not None:
        raise ModelError(
            f"{empty} is on the meta device, where there are shapes and no numbers: load the weights, or fill it by "
            "model.to_empty(device=...) and an initialisation"
        )


def _copied(model: nn.Module) -> nn.Module:
    try:
        # What is made under inference_mode has no gradients.
        with torch.inference_mode(mode=False):
            return copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            f"training=True runs a copy of the model, and {type(model).__name__} cannot be copied: {error}"
        ) from error


@contextmanager
def _drawing(seed: int, model: nn.Module) -> Iterator[None]:
    """Random numbers from a seed; afterwards the global random states are as before."""
    cuda = sorted({each.device.index for each in (*model.parameters(), *model.buffers()) if each.is_cuda})
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global state is what is kept
    try:
        with torch.random.fork_rng(cuda):
            # Not torch.manual_seed, which also moves the accelerators that the model is not on.
            torch.default_generator.manual_seed(seed)
            for index in cuda:
                torch.cuda.default_generators[index].manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
