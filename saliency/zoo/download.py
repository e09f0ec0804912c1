"""Libraries imported and weights downloaded, or a sentence that says why not and what to do."""

from __future__ import annotations

import importlib
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from ..errors import ModelError

_PATIENCE = 5.0  # seconds for a host to answer at all
_MEND = 'pip install --upgrade "torch>=2.14" "torchvision>=0.29"'


def library(module: str) -> Any:
    """The module `torchvision.something` or `timm`, imported now.

    Raises:
        ModelError: It is not installed, or does not fit the installed torch; the message says what to run.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        need = f"{missing} is not installed" if module.startswith(missing) else f"{module} needs {missing}"
        raise ModelError(f"{need}; pip install {missing}") from error
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        # A second import after a failed one meets its ruins as an AttributeError.
        raise ModelError(_why_broken(module, error)) from error


def hub_file(url: str) -> Path:
    """Where torch keeps its download of `url`."""
    return Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(url).path).name


def require_network(model: str, url: str) -> None:
    """Ask the host once: without a network it takes seconds, where a library's retries take a minute.

    Raises:
        ModelError: The host does not answer.
    """
    host = f"{urlsplit(url).scheme}://{urlsplit(url).netloc}"
    if not _answers(host):
        raise no_network(model, host)


def no_network(model: str, host: str) -> ModelError:
    """The error for weights behind a host that is out of reach, with what to do instead."""
    return ModelError(
        f"the weights of {model} have to be downloaded once from {host}, and there is no network to it; use "
        f'weights=None for random weights, a local file as in weights="{model}.safetensors", or the model '
        '"efficientnet_lite0", whose weights come with its package'
    )


@contextmanager
def downloading(model: str) -> Iterator[None]:
    """Whatever a library raises while it fetches and reads the weights of `model`, as a ModelError."""
    try:
        yield
    except Exception as error:
        # The libraries raise what their network, cache and file readers raise; for the user it is one thing.
        raise ModelError(
            f"the pretrained weights of {model} could not be loaded: {type(error).__name__}: {error}"
        ) from error


def _answers(host: str) -> bool:
    """Whether anything answers, over the environment's proxies; a name lookup that hangs counts as no."""
    answers: list[bool] = []

    def ask() -> None:
        request = urllib.request.Request(host, method="HEAD")  # noqa: S310  the libraries' own https addresses
        try:
            urllib.request.urlopen(request, timeout=_PATIENCE).close()  # noqa: S310
        except urllib.error.HTTPError as error:
            error.close()
            answers.append(True)  # a refusal is an answer too
        except (OSError, ValueError):
            answers.append(False)
        else:
            answers.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return answers == [True]


def _why_broken(module: str, error: Exception) -> str:
    installed = ", ".join(f"{name} {_version(name)}" for name in ("torch", "torchvision"))
    return (
        f"{module} does not load beside this torch (installed: {installed}): {error}. "
        "torchvision's compiled operators were built for another torch, as when a CPU torch meets a CUDA "
        f"torchvision; mend it with: {_MEND}"
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
