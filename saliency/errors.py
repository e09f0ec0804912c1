"""Everything that `saliency` raises, as one tree.

    SaliencyError
    ├── ImageError           the picture cannot be read, or is not one
    ├── TargetError          what is to be explained does not exist
    ├── LayerError           the layer does not exist, is not run, or has no spatial output
    ├── ModelError           the model cannot be loaded, run or understood
    ├── MethodError          no such method, or an option that it does not take
    ├── NotApplicableError   the method says nothing about this model
    ├── NonFiniteError       NaN or infinity in the input, the score or the values
    ├── RenderError          the explanation cannot be drawn as asked
    └── ExplanationError     a file that is no saved explanation

Each also derives from the built-in error that Python code would expect in its place.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from difflib import get_close_matches


class SaliencyError(Exception):
    """The root of all errors that `saliency` raises on purpose."""


class ImageError(SaliencyError, ValueError):
    """The picture cannot be read, or is not one."""


class TargetError(SaliencyError, ValueError):
    """What is to be explained does not exist in the model's output."""


class LayerError(SaliencyError, LookupError):
    """The layer does not exist, is not run, or has no spatial output."""


class ModelError(SaliencyError, ValueError):
    """The model cannot be loaded, run or understood."""


class MethodError(SaliencyError, ValueError):
    """No such method, or an option that it does not take."""


class NotApplicableError(SaliencyError, RuntimeError):
    """The method says nothing about this model, and would return something else."""


class NonFiniteError(SaliencyError, ArithmeticError):
    """NaN or infinity in the input, the score or the values."""


class RenderError(SaliencyError, ValueError):
    """The explanation cannot be drawn as asked."""


class ExplanationError(SaliencyError, ValueError):
    """A file that is no saved explanation."""


class SaliencyWarning(UserWarning):
    """The result is right, but the reader should know something about it."""


def warn(message: str) -> None:
    """Give a `SaliencyWarning` that points at the line outside this package which asked for the work."""
    frame, levels = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "saliency":
        frame, levels = frame.f_back, levels + 1
    warnings.warn(message, SaliencyWarning, stacklevel=levels + 1)


def closest(word: str, words: Iterable[str], most: int = 3) -> list[str]:
    """The entries of `words` that look most like `word`, best first; at most `most`."""
    spelled = {each.casefold(): each for each in words}
    folded = word.casefold()
    matches = get_close_matches(folded, spelled, n=most, cutoff=0.6)
    inside = [each for each in spelled if folded and folded in each and each not in matches]
    return [spelled[each] for each in (matches + sorted(inside, key=len))[:most]]


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The end of an error message: `; did you mean "espresso"?`, or nothing where no word is close."""
    quoted = [f'"{each}"' for each in closest(word, words)]
    return f"; did you mean {' or '.join(quoted)}?" if quoted else ""
