"""Import the libraries and download weights, with errors that say what is wrong and what to do."""

from __future__ import annotations

import importlib
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from ..errors import ModelError

_TIMEOUT = 5.0  # seconds for a host to answer


def library(module: str) -> Any:
    """Import and return the module `torchvision.something` or `timm`.

    Raises:
        ModelError: The module is missing or does not fit the installed torch; the message names the command to run.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        need = f"{missing} is not installed" if module.startswith(missing) else f"{module} needs {missing}"
        raise ModelError(f"{need}; pip install {missing}") from error
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        # A second import after a failed one raises AttributeError.
        versions = {package.name: package.version for package in distributions()}
        installed = [f"{name} {versions.get(name, 'missing')}" for name in ("torch", "torchvision")]
        raise ModelError(
            f"{module} cannot be imported with this torch (installed: {', '.join(installed)}): {error}. "
            "torchvision's compiled operators were built for another torch, for example a CPU torch and a CUDA "
            'torchvision; fix it with: pip install --upgrade "torch>=2.14" "torchvision>=0.29"'
        ) from error


def hub_file(url: str) -> Path:
    """Return the path at which torch stores its download of `url`."""
    return Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(url).path).name


def require_network(model: str, url: str) -> None:
    """Check that the host answers. Without a network this takes seconds, while a library's retries take a minute.

    Raises:
        ModelError: The host does not answer.
    """
    host = f"{urlsplit(url).scheme}://{urlsplit(url).netloc}"
    if not _is_reachable(host):
        raise no_network(model, host)


def no_network(model: str, host: str) -> ModelError:
    """Return the error for weights on a host that cannot be reached, with alternatives."""
    return ModelError(
        f"the weights of {model} must be downloaded once from {host}, but there is no network connection to it; use "
        f'weights=None for random weights, a local file as in weights="{model}.safetensors", or the model '
        '"efficientnet_lite0", whose weights come with its package'
    )


@contextmanager
def downloading(model: str) -> Iterator[None]:
    """Turn any error of the block, which downloads and reads weights, into a ModelError."""
    try:
        yield
    except Exception as error:
        # The libraries raise whatever their network, cache and file readers raise.
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"the pretrained weights of {model} could not be loaded: {reason}") from error


def _is_reachable(host: str) -> bool:
    """Return whether anything answers, through the environment's proxies; a name lookup that hangs counts as no."""
    answers: list[bool] = []

    def ask() -> None:
        request = urllib.request.Request(host, method="HEAD")  # noqa: S310  the libraries' own https addresses
        try:
            urllib.request.urlopen(request, timeout=_TIMEOUT).close()  # noqa: S310
        except urllib.error.HTTPError as error:
            error.close()  # an HTTP error is also an answer
        except (OSError, ValueError):
            return
        answers.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_TIMEOUT)
    return bool(answers)
