"""Models of the user in Python code, by "FILE.py:NAME" or "package.module:NAME"."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ModelError, did_you_mean
from ..hooks.model_state import model_attribute
from ..targets.targets import as_categories
from .libraries import ModelInfo, Source


class PythonModel:
    """Model in a Python file or module: a module object, or a class or function that returns one without arguments."""

    source: Source = "python"

    def build(self, name: str, classes: int | None = None) -> nn.Module:
        """Run the file, or import the module, and return the model.

        Raises:
            ModelError: The code raises an error, or does not give a model.
        """
        place, _, attribute = name.partition(":")
        with _user_code(place):
            # A file is not importable elsewhere: under this name, its classes are pickled with their code for workers.
            names = runpy.run_path(place, run_name=f"<{place}>") if _is_file(place) else vars(import_module(place))
            found: Any = names.get(attribute)
            model = found() if callable(found) and not isinstance(found, nn.Module) else found
        if not isinstance(model, nn.Module):
            hint = f"; it is a {type(model).__name__}" if attribute in names else did_you_mean(attribute, names)
            raise ModelError(f'no model "{attribute}" in {place}; pass FILE.py:NAME, such as mine.py:make{hint}')
        return model

    def pretrained(self, name: str, weights: str) -> nn.Module:
        """Return the model with the weights that its code loads."""
        if weights != "default":
            raise ModelError(f'{name} has no weights "{weights}"; pass the path of a checkpoint')
        return self.build(name)

    def facts(self, model: nn.Module, _name: str, _weights: str) -> ModelInfo:
        """Return the attributes `preprocess` and `categories` of the model."""
        categories = model_attribute("categories", model)
        names = None if categories is None else as_categories(categories)
        return ModelInfo(model_attribute("preprocess", model), names, None)


def is_python(name: str) -> bool:
    """Return whether the name of a model refers to Python code."""
    return ":" in name or _is_file(name)


def _is_file(place: str) -> bool:
    return place.endswith(".py")


@contextmanager
def _user_code(place: str) -> Iterator[None]:
    """Find modules in the folder of a file, or in the current folder. Errors get the file and line that raised them."""
    folder = str(Path(place).absolute().parent)
    sys.path.insert(0, folder)
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if Path(frame.filename).is_file() and frame.filename.startswith(folder)]
        where = f"{ours[-1].filename}, line {ours[-1].lineno}: " if ours else ""
        raise ModelError(f"{place} cannot be loaded: {where}{type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
