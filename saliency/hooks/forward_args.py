"""Extra arguments of the model's forward in one call of `attribute`: one row per image, or the same for all.

They are bound to the thread for the call, because methods, recordings and fast copies run the model in many places. All
of them use `run_model`, which reads the arguments here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..errors import MethodError
from ..targets.words import AnswerText

_T = TypeVar("_T")

ForwardArgs = tuple[Any, ...] | list[Any] | Mapping[str, Any]
"""Arguments after the image, by position or by name."""


@dataclass(frozen=True, slots=True, eq=False)
class AnswerForward:
    """Forward of a vision-language model on an answer, as a function of its images.

    Attributes:
        arguments: A function from a batch (k, C, H, W) and the number of the image that each row shows to all arguments
            of the model, by name.
        reader: The name of the module that reads the embeddings (N, L, D) of all tokens; None if it is not known.
        is_image: (L,) of bool: whether each token is a part of an image.
        text: The words of the answer.
    """

    arguments: Callable[[Tensor, Sequence[int]], dict[str, Any]]
    reader: str | None
    is_image: Tensor
    text: AnswerText


class _Bound(NamedTuple):
    """Arguments of one call. With an `image`, each pass runs variants of this image only."""

    values: Mapping[int | str, Any]  # by position or name
    images: int
    image: int | None
    caches: dict[tuple[int, int | None], dict[Any, Any]]
    layer: str | None = None  # the layer whose output is the model's output
    answer: AnswerForward | None = None

    def numbers(self, x: Tensor) -> list[int]:
        """Return the number of the image that each row of a batch (k, C, H, W) shows."""
        return list(range(self.images)) if self.image is None else [self.image] * len(x)

    def rows(self, value: Any, x: Tensor) -> Any:
        """Return the rows of an argument for a batch (k, C, H, W); an argument without rows as it is."""
        shape = (len(value),) if isinstance(value, list) else getattr(value, "shape", ())
        if shape[:1] != (self.images,):
            return value
        images = self.numbers(x)
        rows = [value[image] for image in images] if isinstance(value, list) else value[images]
        return rows.detach().to(x.device) if isinstance(rows, Tensor) else rows


_bound: ContextVar[_Bound | None] = ContextVar("forward_args", default=None)


@contextmanager
def bound_value(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Set a variable of this thread in a block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def bind_forward_args(
    like: ForwardArgs, images: int, layer: str | None = None, answer: AnswerForward | None = None
) -> AbstractContextManager[None]:
    """Bind the extra arguments of a batch in a block. They replace the arguments of an outer call, even if empty.

    Args:
        like: Tensors, arrays and lists with one row per image are divided into images; others are passed as they are.
        images: The number of images.
        layer: The layer whose output `run_model` returns instead of the model's.
        answer: The answer whose images form the batch; None for other images.

    Raises:
        MethodError: `like` is neither a tuple nor a mapping of names.
    """
    if not isinstance(like, tuple | list | Mapping):
        raise MethodError(f"forward_args is a {type(like).__name__}; expected a tuple (mask,) or a mapping of names")
    values: Mapping[Any, Any] = like if isinstance(like, Mapping) else dict(enumerate(like))
    bound = _Bound(values, images, 0 if images == 1 else None, {}, layer, answer)
    return bound_value(_bound, bound if values or layer or answer else None)


def bind_image(image: int) -> AbstractContextManager[None]:
    """Bind the arguments of one image of the batch in a block: the model runs only variants of this image."""
    bound = _bound.get()
    return bound_value(_bound, bound._replace(image=image) if bound is not None and bound.image is None else bound)


def returned_layer() -> str | None:
    """Return the layer whose output is returned instead of the model's; None for the model's output."""
    bound = _bound.get()
    return None if bound is None else bound.layer


def bound_answer() -> AnswerForward | None:
    """Return the answer whose images form the batch; None for other images."""
    bound = _bound.get()
    return None if bound is None else bound.answer


def shown_images(x: Tensor) -> list[int]:
    """Return the number of the image that each row of a batch (k, C, H, W) shows."""
    bound = _bound.get()
    return list(range(len(x))) if bound is None else bound.numbers(x)


def has_forward_args() -> bool:
    """Return whether extra arguments are bound."""
    return _bound.get() is not None


def forward_args(x: Tensor) -> tuple[list[Any], dict[str, Any]]:
    """Return the extra arguments for a batch (k, C, H, W), by position and by name; of an answer, all arguments."""
    bound = _bound.get()
    values: dict[Any, Any] = {}
    if bound is not None:
        values = {} if bound.answer is None else bound.answer.arguments(x, bound.numbers(x))
        values |= {key: bound.rows(value, x) for key, value in bound.values.items()}
    positional = [values.pop(key) for key in list(values) if isinstance(key, int)]
    return positional, values


def cache_of(caches: WeakKeyDictionary[nn.Module, dict[Any, Any]], model: nn.Module) -> dict[Any, Any]:
    """Return the cache of a model. A call with extra arguments has its own, since results may depend on them."""
    bound = _bound.get()
    own = None if bound is None else bound.caches.setdefault((id(caches), bound.image), {})
    return caches.setdefault(model, {}) if own is None else own
