"""A server of the explorer in a thread, for pages in a browser."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import uvicorn

from saliency.explorer.server import Explorer
from saliency.explorer.session import Session

TOKEN = "token"  # noqa: S105 - of a test


@contextmanager
def served(session: Session) -> Iterator[str]:
    """The address of a page of this session."""
    with socket.create_server(("127.0.0.1", 0)) as listening, closing(Explorer(session)) as explorer:
        config = uvicorn.Config(
            explorer.app(TOKEN, "127.0.0.1"), http="h11", ws="none", lifespan="off", log_level="error"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/{TOKEN}/"
        finally:
            server.should_exit = server.force_exit = True
            thread.join()
