"""`saliency.serve`: the explorer as a page of a server on this machine."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from ..batch.options import NetworkOptions
from ..errors import SaliencyError, optional_import
from ..validation import check_number
from .session import Session

if TYPE_CHECKING:
    from torch import nn

    from ..io.preprocess import PreprocessLike, Whole


def serve(
    model: str | nn.Module = "efficientnet_lite0",
    folder: str | os.PathLike[str] | None = None,
    *,
    method: str = "grad_cam",
    layer: str | None = None,
    options: Mapping[str, Any] | None = None,
    weights: str | None = "default",
    preprocess: PreprocessLike | None = None,
    categories: Sequence[str] | Mapping[int, str] | None = None,
    whole: Whole = False,
    device: str = "auto",
    host: str = "127.0.0.1",
    port: int = 0,
    browser: bool = True,
) -> None:
    """Show a page on which a model explains the images that are dropped on it, until Ctrl-C is pressed.

    The address is written to standard error. It holds a secret token: whoever has it can use the model and see the
    images of the folder. The server sends nothing to any other machine. See docs/explorer.md.

    Args:
        model: A name that `saliency.load` accepts, or a model. It stays as it is.
        folder: A folder or a list of images to offer, with subfolders.
        method: The method that the page begins with.
        layer: The layer that the page begins with; None for the default of each method.
        options: Options of the methods, applied to each method that has them.
        weights: As for `saliency.load`.
        preprocess: Preprocessing of the images; None for the model's own.
        categories: Class names; None for the model's own.
        whole: Whether the model sees the whole image, as for every method.
        device: As for `saliency.batch`; one device.
        host: The address of a network interface. By default, only this machine can connect; "0.0.0.0" is all of its
            interfaces, without encryption.
        port: The port; 0 for any free one.
        browser: Whether the page is opened in a browser.

    Raises:
        DependencyError: Starlette or uvicorn is not installed.
        SaliencyError: The model, the method, the port or an option is invalid, the folder contains no image, or an
            event loop runs in this thread, as in a notebook.
        OSError: The port is not free.
    """
    uvicorn = optional_import("uvicorn", "app", "the explorer")
    optional_import("starlette", "app", "the explorer")
    from .server import Explorer

    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise SaliencyError("serve cannot run inside an event loop; in a notebook, use saliency.explore(model, images)")
    check_number("port", port, least=0, most=65535, error=SaliencyError)
    explorer = Explorer(Session(NetworkOptions.of({**locals(), "methods": method}), folder))
    token = secrets.token_urlsafe(24)
    config = uvicorn.Config(
        explorer.app(token, host),
        http="h11",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.create_server((host, port), family=family)) as listening, closing(explorer):
        name = "127.0.0.1" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104
        address = f"http://{name}:{listening.getsockname()[1]}/{token}/"
        sys.stderr.write(f"{address}\nCtrl-C ends it; whoever has this address can use the model\n")
        if browser:
            webbrowser.open(address)
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
