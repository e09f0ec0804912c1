"""Errors and warnings of `saliency`.

    SaliencyError
    ├── ImageError           the image cannot be read
    ├── TargetError          the target does not exist
    │   └── NotFoundError    the target does not exist in this image
    ├── LayerError           the layer does not exist, is not run, or has no spatial output
    ├── ModelError           the model cannot be loaded, run or understood
    ├── MethodError          the method does not exist, or an option is invalid
    ├── NotApplicableError   the method does not apply to this model
    ├── NonFiniteError       NaN or infinity in the input, the score or the values
    ├── RenderError          the explanation cannot be drawn with these options
    ├── ExplanationError     the file is not a saved explanation
    └── DependencyError      an optional package is missing, or another package has the name `saliency`

Each error also derives from a built-in error, such as ValueError.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any


class SaliencyError(Exception):
    """Base class of all errors of `saliency`."""


class ImageError(SaliencyError, ValueError):
    """The image cannot be read."""


class TargetError(SaliencyError, ValueError):
    """The target does not exist in the model's output."""


class NotFoundError(TargetError):
    """The target does not exist in this image, such as a box that the detector did not find in it."""


class LayerError(SaliencyError, LookupError):
    """The layer does not exist, is not run, or has no spatial output."""


class ModelError(SaliencyError, ValueError):
    """The model cannot be loaded, run or understood."""


class MethodError(SaliencyError, ValueError):
    """The method does not exist, or an option is invalid."""


class NotApplicableError(SaliencyError, RuntimeError):
    """The method does not apply to this model, so its values would be misleading."""


class NonFiniteError(SaliencyError, ArithmeticError):
    """NaN or infinity in the input, the score or the values."""


class RenderError(SaliencyError, ValueError):
    """The explanation cannot be drawn with these options."""


class ExplanationError(SaliencyError, ValueError):
    """The file is not a saved explanation."""


class DependencyError(SaliencyError, ImportError):
    """An optional package is missing, or another package is installed under the name `saliency`."""


class SaliencyWarning(UserWarning):
    """The result is correct, but has a limitation that the user should know."""


_TREE = (SaliencyError, SaliencyWarning)
__all__ = [name for name, cls in [*globals().items()] if isinstance(cls, type) and issubclass(cls, _TREE)]


USER_CODE_ERRORS = (Exception, SystemExit)
"""The errors of a user's code. It may call sys.exit, which must not end a run over many images."""


@contextmanager
def errors_as(kind: type[SaliencyError], problem: str) -> Iterator[None]:
    """Raise any error of a block as an error of this kind: the problem, then the reason.

    Errors of this kind, of missing packages and of memory are raised unchanged.
    """
    try:
        yield
    except (kind, DependencyError, MemoryError):
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise kind(f"{problem}: {reason}") from error


CALL: ContextVar[Any] = ContextVar("call")
"""The state of the call of this thread, see `model.call.Call`. It is declared here because `warn` reads it."""


def warn(message: str, category: type[Warning] = SaliencyWarning) -> None:
    """Issue a warning that points at the calling line outside this package, unless the call has no warnings."""
    if not getattr(CALL.get(None), "warns", True):
        return
    warned = getattr(CALL.get(None), "warned", None)
    if warned is not None:
        caller = sys._getframe(1)
        line = caller.f_code.co_filename, caller.f_lineno
        if line in warned:
            return
        warned.add(line)
    frame, levels = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "saliency":
        frame, levels = frame.f_back, levels + 1
    warnings.warn(message, category, stacklevel=levels + 1)


def warn_deprecated(old: str, new: str, removed_in: str) -> None:
    """Warn that a public name was renamed. `make release-check` names the calls that are due for removal.

    Args:
        old: The old name, as a user writes it: "VXCODE(order=)".
        new: The new name, in the same form.
        removed_in: The version that removes the old name, two minor releases after the new one: "0.3.0".
    """
    warn(f"{old} is called {new} now; the old name is removed in version {removed_in}", FutureWarning)


def closest(word: str, words: Iterable[str], most: int = 3) -> list[str]:
    """Return at most `most` entries of `words` that are similar to `word`, the most similar first.

    Entries with all words of `word` come first, then entries that begin with it, contain it, or are spelled alike.
    """
    by_folded = {entry.casefold(): entry for entry in words}
    folded = word.casefold()
    if not folded:
        return []
    by_length = sorted(by_folded, key=len)
    similar = [entry for entry in by_length if _words(folded) <= _words(entry)]
    similar += [entry for entry in by_length if entry.startswith(folded)]
    similar += [entry for entry in by_length if folded in entry]
    similar += get_close_matches(folded, by_folded, n=3, cutoff=0.6)
    return [by_folded[entry] for entry in list(dict.fromkeys(similar))[:most]]


def _words(text: str) -> set[str]:
    return set(re.split(r"[\s,_-]+", text))


def did_you_mean(word: str, words: Iterable[str], most: int = 3) -> str:
    """Return `; did you mean "espresso"?` as the end of an error message, or "" if no word is similar."""
    quoted = [f'"{entry}"' for entry in closest(word, words, most)]
    return f"; did you mean {' or '.join(quoted)}?" if quoted else ""


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: "1 row", "2 rows"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def visible(text: object) -> str:
    """Escape control and other unprintable characters of a text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def optional_import(module: str, extra: str, purpose: str) -> Any:
    """Import and return a module of a package that only the extra `extra` installs.

    Raises:
        DependencyError: The package is not installed, or its import fails, for example if a system library is missing.
            The message names the purpose, and the extra or the error.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        raise DependencyError(
            f'{purpose} needs {package}, which is not installed: pip install "saliency-toolkit[{extra}]"'
        ) from error
    except ImportError as error:
        raise DependencyError(f"{purpose} needs {module}, which cannot be imported: {error}") from error


def require_own_folder(folder: Path) -> None:
    """Raise DependencyError if PAIR's distribution "saliency" is installed into the same folder."""
    if (folder / "core" / "base.py").exists():
        raise DependencyError(
            f'two packages share the folder {folder} and the name saliency: saliency-toolkit, and PAIR\'s "saliency", '
            "each of which replaces files of the other. Write: import saliency_toolkit as saliency. Or keep one per "
            "environment: pip uninstall saliency, then pip install --force-reinstall --no-deps saliency-toolkit"
        )


if "saliency_toolkit" not in sys.modules:  # which loads the right files
    require_own_folder(Path(__file__).parent)
