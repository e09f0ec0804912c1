"""What a method of many passes may spend, and what it did spend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from ..io.preprocess import PreprocessLike
from ..validation import check_whole_number, real_number

Chunk = int | Literal["auto"]
Precision = Literal["exact", "fast", "bf16"]
OnInterrupt = Literal["raise", "return"]
Stopped = Literal["complete", "passes", "seconds", "tolerance", "interrupt"]


class ModelOptions(TypedDict, total=False):
    """The options of every method.

    Attributes:
        preprocess: How an image becomes the model's input: see `saliency.Attribution`.
        categories: The class names in the order of the output.
    """

    preprocess: PreprocessLike | None
    categories: Sequence[str] | None


class EngineOptions(ModelOptions, total=False):
    """The options that all methods of many passes share. None of the first five changes what is estimated.

    Attributes:
        chunk: How many passes run at once; "auto" finds the fastest number while running and remembers it for the
            process. Chunks of different sizes round differently, so two calls with "auto" agree to rounding only. With
            a number, calls on one machine agree bit for bit.
        precision: "exact" runs the model itself; "fast" a private copy with batch norms folded into convolutions and
            channels last in memory (the same to about 1 %); "bf16" that in bfloat16, which is meant for methods that
            only need forwards. Both are measured on the first passes, and dropped where they lose.
        progress: Whether a progress bar is drawn; None draws one for work of more than a second, on a terminal.
        on_interrupt: "raise" passes Ctrl-C on; "return" gives back what was computed so far; of images
            that were not begun, what the first chunk gives.
        seed: What all random draws of a call come from; every image gets the same.
        preprocess: As for every method.
        categories: As for every method.
    """

    chunk: Chunk
    precision: Precision
    progress: bool | None
    on_interrupt: OnInterrupt
    seed: int


class SamplingOptions(EngineOptions, total=False):
    """The options of methods that draw samples, and so can stop at any time. The first limit that is met ends the work.

    Attributes:
        passes: The most passes per image; by default the method's own number, and no limit below 100 000 where there
            is a tolerance or a time.
        seconds: The most seconds per image.
        tolerance: The relative error at which the work is good enough: the root mean square of the standard errors over
            that of the values.
    """

    passes: int | None
    seconds: float | None
    tolerance: float | None


@dataclass(frozen=True, slots=True)
class RunStats:
    """What a method spent on one image.

    Attributes:
        passes: How many passes of the model the map is made of.
        seconds: The seconds that this took.
        stopped: What ended it: "complete" (all that the method needs), a limit that was set ("passes", "seconds",
            "tolerance"), or an "interrupt".
        precision: How the passes were run.
        note: What else there is to know, such as how much of the model was run; empty where there is nothing.
    """

    passes: int
    seconds: float
    stopped: Stopped
    precision: str = "exact"
    note: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """When the work on an image ends. Raises MethodError for limits that are none."""

    passes: int | None = None
    seconds: float | None = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.passes is not None:
            object.__setattr__(self, "passes", check_whole_number("passes", self.passes))
        for name in ("seconds", "tolerance"):
            limit = getattr(self, name)
            if limit is not None:
                object.__setattr__(self, name, real_number(name, limit, above=0))
