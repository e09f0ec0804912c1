"""Options, budget and statistics of methods of many passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from ..io.preprocess import PreprocessLike
from ..validation import check_integer, check_number

Chunk = int | Literal["auto"]
Precision = Literal["exact", "fast", "bf16"]
OnInterrupt = Literal["raise", "return"]
Stopped = Literal["complete", "passes", "seconds", "tolerance", "interrupt"]


class ModelOptions(TypedDict, total=False):
    """The options of every method.

    Attributes:
        preprocess: The preprocessing of images; see `saliency.Attribution`.
        categories: The class names in the order of the output.
    """

    preprocess: PreprocessLike | None
    categories: Sequence[str] | None


class EngineOptions(ModelOptions, total=False):
    """Options of all methods of many passes. None of the first five changes the estimated quantity.

    Attributes:
        chunk: The number of passes that run at once; "auto" measures the fastest number and remembers it for the
            process. Chunks of different sizes round differently, so two calls with "auto" agree to rounding only. With
            a number, calls on one machine agree bit for bit.
        precision: "exact" runs the model itself. "fast" runs a private copy with batch norms folded into convolutions
            and channels last in memory (equal to about 1 %). "bf16" runs this copy in bfloat16, for methods that only
            need forwards. Both are timed on the first passes, and not used if they are slower.
        progress: Whether a progress bar is drawn; None draws one on a terminal after a second.
        on_interrupt: "raise" propagates Ctrl-C; "return" returns what was computed so far; for images that were not
            begun, only their first chunk is computed.
        seed: The seed of all random draws of a call. Every image gets the same draws.
        preprocess: As for every method.
        categories: As for every method.
    """

    chunk: Chunk
    precision: Precision
    progress: bool | None
    on_interrupt: OnInterrupt
    seed: int


class SamplingOptions(EngineOptions, total=False):
    """Options of methods that draw samples, and so can stop at any time. The first limit that is met ends the sampling.

    Attributes:
        passes: The maximum number of passes per image; by default the method's own number, or 100 000 if a tolerance or
            a time is set.
        seconds: The maximum time per image, in seconds.
        tolerance: The sufficient relative error: the root mean square of the standard errors, divided by that
            of the values.
    """

    passes: int | None
    seconds: float | None
    tolerance: float | None


@dataclass(frozen=True, slots=True)
class RunStats:
    """Passes and time that a method took for one image.

    Attributes:
        passes: The number of passes of the model.
        seconds: The time of these passes, in seconds.
        stopped: Why the passes ended: "complete" (all that the method needs), a limit that was set ("passes",
            "seconds", "tolerance"), or an "interrupt".
        precision: The precision of the passes.
        note: Remarks, such as the part of the model that was run; empty if there are none.
    """

    passes: int
    seconds: float
    stopped: Stopped
    precision: str = "exact"
    note: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of the computation for one image. Raises MethodError for invalid limits."""

    passes: int | None = None
    seconds: float | None = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.passes is not None:
            object.__setattr__(self, "passes", check_integer("passes", self.passes))
        for name in ("seconds", "tolerance"):
            limit = getattr(self, name)
            if limit is not None:
                object.__setattr__(self, name, check_number(name, limit, above=0))
