"""State of one call: the extra arguments of the model's forward, the layout of its layers, and its listener.

It is bound to the thread for the call, because methods, recordings and user's targets run the model in many places. All
of them use `run_model`, which reads the arguments here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..errors import CALL, MethodError
from ..io.inputs import Batch

ForwardArgs = tuple[Any, ...] | list[Any] | Mapping[str, Any]
"""Arguments after the image, by position or by name."""


class Call(NamedTuple):
    """State of one call.

    Attributes:
        values: Extra arguments by position or name.
        batch: The images whose rows the arguments have; None without arguments.
        image: The image of which each pass runs variants; None for the whole batch.
        caches: The caches of a call with arguments, on which results may depend.
        layer: The layer whose output is the model's output.
        layout: The user's function from the output of a layer to maps.
        listener: The function that is called between chunks of passes.
        logits: The sigmoid or softmax before which the values of each tensor of an output were read; None
            if the output is read unchanged.
        is_tracing: Whether the call is traced into a program, so that no value can be read.
        warned: The lines of the toolkit that have warned, if each shall warn once, whatever the numbers in its text.
    """

    values: Mapping[Any, Any] = {}
    batch: Batch | None = None
    image: int | None = None
    caches: dict[tuple[int, int | None], dict[Any, Any]] | None = None
    layer: str | None = None
    layout: Callable[[Tensor], Tensor] | None = None
    listener: Callable[..., None] | None = None
    logits: MutableMapping[Tensor, str] | None = None
    is_tracing: bool = False
    warned: set[tuple[str, int]] | None = None

    def numbers(self, x: Tensor) -> list[int]:
        """Return the number of the image that each row of a batch (k, C, H, W) shows."""
        return list(range(len(x))) if self.image is None else [self.image] * len(x)

    def rows(self, value: Any, x: Tensor) -> Any:
        """Return the rows of an argument for a batch (k, C, H, W); an argument without rows is returned unchanged."""
        shape = (len(value),) if isinstance(value, list) else getattr(value, "shape", ())
        if self.batch is None or shape[:1] != self.batch.inputs.shape[:1]:
            return value
        images = self.numbers(x)
        rows = [value[image] for image in images] if isinstance(value, list) else value[images]
        return rows.detach().to(x.device) if isinstance(rows, Tensor) else rows


_NOTHING = Call()


@contextmanager
def bound(**state: Any) -> Iterator[None]:
    """Change the state of the call of this thread in a block."""
    token = CALL.set(current_call()._replace(**state))
    try:
        yield
    finally:
        CALL.reset(token)


def arguments_of(like: ForwardArgs, batch: Batch, layer: str | None = None) -> dict[str, Any]:
    """Return the state of a call with the extra arguments of a batch, which replace those of an outer call.

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
    image = 0 if len(batch.inputs) == 1 else None
    if not (values or layer or batch.arguments):
        return NO_ARGUMENTS | {"image": image}
    return {"values": values, "batch": batch, "image": image, "caches": {}, "layer": layer}


NO_ARGUMENTS: dict[str, Any] = {"values": {}, "batch": None, "image": None, "caches": None, "layer": None}


def bind_image(image: int) -> AbstractContextManager[None]:
    """Bind one image of the batch in a block, its arguments and options: the model runs only variants of it."""
    number = current_call().image
    return bound(image=image if number is None else number)


def current_call() -> Call:
    """Return the state of the innermost call of this thread."""
    return cast("Call", CALL.get(_NOTHING))


def is_tracing() -> bool:
    """Return whether a method is being traced into a program, so that a check of values has nothing to check."""
    return current_call().is_tracing


def shown_images(x: Tensor) -> list[int]:
    """Return the number of the image that each row of a batch (k, C, H, W) shows."""
    return current_call().numbers(x)


def has_forward_args() -> bool:
    """Return whether extra arguments are bound."""
    return current_call().caches is not None


def forward_args(x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the extra arguments for a batch (k, C, H, W), by position and by name; of an answer, all arguments."""
    call = current_call()
    arguments = call.batch and call.batch.arguments
    values: dict[Any, Any] = arguments(x, cast("int", call.image)) if arguments else {}
    values |= {key: call.rows(value, x) for key, value in call.values.items()}
    positional = tuple(values.pop(key) for key in list(values) if isinstance(key, int))
    return positional, values


def cache_of(caches: WeakKeyDictionary[nn.Module, dict[Any, Any]], model: nn.Module) -> dict[Any, Any]:
    """Return the cache of a model. A call with extra arguments has its own, since results may depend on them."""
    call = current_call()
    if call.caches is None:
        return caches.setdefault(model, {})
    return call.caches.setdefault((id(caches), call.image), {})
