"""Extra arguments of the model's forward in one call of `attribute`: one row per image, or the same for all.

They are bound to the thread for the call, because methods, recordings and fast copies run the model in many places. All
of them use `run_model`, which reads the arguments here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..errors import MethodError
from ..io.inputs import Batch

_T = TypeVar("_T")

ForwardArgs = tuple[Any, ...] | list[Any] | Mapping[str, Any]
"""Arguments after the image, by position or by name."""


class _Bound(NamedTuple):
    """Arguments of one call. With an `image`, each pass runs variants of this image only."""

    values: Mapping[Any, Any] = {}  # by position or name
    batch: Batch | None = None
    image: int | None = None
    caches: dict[tuple[int, int | None], dict[Any, Any]] | None = None
    layer: str | None = None  # the layer whose output is the model's output

    def numbers(self, x: Tensor) -> list[int]:
        """Return the number of the image that each row of a batch (k, C, H, W) shows."""
        return list(range(len(x))) if self.image is None else [self.image] * len(x)

    def rows(self, value: Any, x: Tensor) -> Any:
        """Return the rows of an argument for a batch (k, C, H, W); an argument without rows as it is."""
        shape = (len(value),) if isinstance(value, list) else getattr(value, "shape", ())
        if self.batch is None or shape[:1] != self.batch.inputs.shape[:1]:
            return value
        images = self.numbers(x)
        rows = [value[image] for image in images] if isinstance(value, list) else value[images]
        return rows.detach().to(x.device) if isinstance(rows, Tensor) else rows


_NOTHING = _Bound()
_bound: ContextVar[_Bound] = ContextVar("forward_args", default=_NOTHING)


@contextmanager
def bound_value(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Set a variable of this thread in a block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def bind_forward_args(like: ForwardArgs, batch: Batch, layer: str | None = None) -> AbstractContextManager[None]:
    """Bind the extra arguments of a batch in a block. They replace the arguments of an outer call, even if empty.

    Args:
        like: Tensors, arrays and lists with one row per image are divided into images; others are passed as they are.
        batch: The images.
        layer: The layer whose output `run_model` returns instead of the model's.

    Raises:
        MethodError: `like` is neither a tuple nor a mapping of names.
    """
    if not isinstance(like, tuple | list | Mapping):
        raise MethodError(f"forward_args is a {type(like).__name__}; expected a tuple (mask,) or a mapping of names")
    values: Mapping[Any, Any] = like if isinstance(like, Mapping) else dict(enumerate(like))
    bound = _Bound(values, batch, 0 if len(batch.inputs) == 1 else None, {}, layer)
    return bound_value(_bound, bound if values or layer or batch.arguments else _NOTHING)


def unbind_forward_args() -> AbstractContextManager[None]:
    """Bind no arguments in a block."""
    return bound_value(_bound, _NOTHING)


def bind_image(image: int) -> AbstractContextManager[None]:
    """Bind the arguments of one image of the batch in a block: the model runs only variants of this image."""
    bound = _bound.get()
    return bound_value(_bound, bound._replace(image=image) if bound.batch and bound.image is None else bound)


def returned_layer() -> str | None:
    """Return the layer whose output is returned instead of the model's; None for the model's output."""
    return _bound.get().layer


def bound_batch() -> Batch | None:
    """Return the batch whose arguments are bound; None without arguments."""
    return _bound.get().batch


def shown_images(x: Tensor) -> list[int]:
    """Return the number of the image that each row of a batch (k, C, H, W) shows."""
    return _bound.get().numbers(x)


def has_forward_args() -> bool:
    """Return whether extra arguments are bound."""
    return _bound.get() is not _NOTHING


def forward_args(x: Tensor) -> tuple[list[Any], dict[str, Any]]:
    """Return the extra arguments for a batch (k, C, H, W), by position and by name; of an answer, all arguments."""
    bound = _bound.get()
    arguments = bound.batch and bound.batch.arguments
    values: dict[Any, Any] = arguments(x, cast("int", bound.image)) if arguments else {}
    values |= {key: bound.rows(value, x) for key, value in bound.values.items()}
    positional = [values.pop(key) for key in list(values) if isinstance(key, int)]
    return positional, values


def cache_of(caches: WeakKeyDictionary[nn.Module, dict[Any, Any]], model: nn.Module) -> dict[Any, Any]:
    """Return the cache of a model. A call with extra arguments has its own, since results may depend on them."""
    bound = _bound.get()
    if bound.caches is None:
        return caches.setdefault(model, {})
    return bound.caches.setdefault((id(caches), bound.image), {})
