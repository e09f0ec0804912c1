"""The server of the explorer: addresses, the queue of the model, and access.

One thread runs the model. A newer question of the same page stops the older one between two chunks of passes. Only
`serve` imports this module, because it needs Starlette.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
import os
import secrets
import socket
import sys
import webbrowser
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from queue import SimpleQueue
from secrets import compare_digest
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..batch.failures import error_columns
from ..batch.options import NetworkOptions
from ..errors import ImageError, SaliencyError, optional_import
from ..validation import check_number
from .page import static_files
from .session import MOST_BYTES, PageAnswer, Poll, Session, Stop, StoppedQuestion, UnknownImageError

if TYPE_CHECKING:
    from torch import nn

    from ..io.preprocess import PreprocessLike, Whole

T = TypeVar("T")

MOST_JSON, MOST_NAME = 16 * 2**10, 200  # bytes of a question; characters of a file name
MOST_WAITING = 8  # questions of all pages, besides the running question
MOST_UPLOADS = 4  # bodies of images that are received at once
MOST_DECODED, MOST_THUMBNAILS = 2, 500  # thumbnails that are drawn at once, and in memory
MODEL_THREAD = "saliency-model"
END_SECONDS = 0.5  # until a model counts as hung when the server ends
BODY_SECONDS = 120.0  # for a whole body
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STATUSES: dict[type[Exception], int] = {
    UnknownImageError: 404,
    StoppedQuestion: 409,
    ImageError: 415,
    SaliencyError: 400,
    ClientDisconnect: 400,
    Exception: 500,
}


@dataclass(frozen=True, eq=False)
class Job:
    """A question that waits for the model, or runs.

    Attributes:
        page: The page that asks.
        replaces: Whether the question replaces older questions of the page that also have `replaces`.
        answer: The future answer.
        stop: Stops the question.
    """

    page: str
    replaces: bool
    answer: asyncio.Future[Any]
    stop: Stop = field(default_factory=Stop)


class Explorer:
    """Answers to all requests about one model.

    Args:
        session: The model.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._tasks = SimpleQueue[Callable[[], None] | None]()
        self._thread = Thread(target=self._work, name=MODEL_THREAD, daemon=True)  # so that a hung model can be left
        self._thread.start()
        self._jobs: list[Job] = []
        self._uploads, self._decoding = asyncio.Semaphore(MOST_UPLOADS), asyncio.Semaphore(MOST_DECODED)
        self._thumbnail = lru_cache(MOST_THUMBNAILS)(session.thumbnail)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def end(self) -> None:
        """Stop all questions, and answer them with an error, in the thread of the requests."""
        for job in list(self._jobs):
            job.stop.set()
            if not job.answer.done():
                job.answer.set_exception(StoppedQuestion("the server ended"))

    def close(self) -> None:
        """Stop all questions, and wait for the thread of the model, unless the model hangs."""
        for job in self._jobs:
            job.stop.set()
        self._tasks.put(None)
        self._thread.join(END_SECONDS)

    def _ask(self, request: Request, answer: Callable[[Poll], T], *, replaces: bool = False) -> asyncio.Future[T]:
        """Put a question into the queue, and return its answer. The question stops when the connection closes.

        Raises:
            HTTPException: Too many questions wait.
        """
        loop = asyncio.get_running_loop()
        job = Job(request.headers.get("x-page", ""), replaces, loop.create_future())
        for other in self._jobs:
            if replaces and other.replaces and other.page == job.page:
                other.stop.set()
        if sum(not other.stop.is_set() for other in self._jobs) > MOST_WAITING:
            raise HTTPException(503, "the model is busy with other questions; try again")

        def run() -> None:
            settle: Callable[[Any], None] = job.answer.set_result
            try:
                job.stop.check()
                result: Any = answer(job.stop.check)
            except BaseException as error:  # noqa: BLE001 - raised where the answer is awaited
                settle, result = job.answer.set_exception, error
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(_settle, job.answer, settle, result)

        def end(future: asyncio.Future[T]) -> None:
            self._jobs.remove(job)
            watch.cancel()
            if not future.cancelled():
                future.exception()  # asyncio logs an error that nobody reads, as after a closed connection

        self._jobs.append(job)
        watch = asyncio.create_task(_stop_when_closed(request, job.stop))
        job.answer.add_done_callback(end)
        self._tasks.put(run)
        return job.answer

    # Requests. Starlette runs methods without `async` in other threads.

    def about(self, request: Request) -> Response:
        """Return the facts that the page needs first."""
        return json_response(self.session.about())

    async def upload(self, request: Request) -> Response:
        """Open the image in the body."""
        if self._uploads.locked():
            raise HTTPException(503, "too many images arrive at once; try again")
        async with self._uploads:
            content = await read_body(request, MOST_BYTES)
        name = unquote(request.headers.get("x-name", ""))[:MOST_NAME] or "image"
        case, index = request.query_params.get("case"), int(request.query_params.get("input", 0))
        opened = self._ask(request, lambda check: self.session.open(content, name, case, index), replaces=True)
        return json_response(await opened)

    async def offered(self, request: Request) -> Response:
        """Open an image of the folder."""
        index = request.path_params["index"]
        return json_response(await self._ask(request, lambda check: self.session.open(index), replaces=True))

    def reopened(self, request: Request) -> Response:
        """Return the facts of an opened image, for a page that was loaded again."""
        return json_response(self.session.facts(request.path_params["number"]))

    def picture(self, request: Request) -> Response:
        """Return an opened image as JPEG."""
        index = int(request.query_params.get("input", 0))
        return Response(self.session.picture(request.path_params["number"], index), media_type="image/jpeg")

    async def thumbnail(self, request: Request) -> Response:
        """Return an image of the folder as a small JPEG."""
        async with self._decoding:
            content = await run_in_threadpool(self._thumbnail, request.path_params["index"])
        return Response(content, media_type="image/jpeg")

    async def explain(self, request: Request) -> Response:
        """Return maps, one line of JSON each, when they are ready."""
        asked = await read_json(request)
        loop, answers = asyncio.get_running_loop(), asyncio.Queue[PageAnswer | None]()

        def send(answer: PageAnswer) -> None:
            loop.call_soon_threadsafe(answers.put_nowait, answer)

        future = self._ask(request, partial(self.session.explain, asked, send), replaces=True)
        future.add_done_callback(lambda _: answers.put_nowait(None))
        first = await answers.get()
        if first is None:
            await future  # raises its error

        async def lines() -> AsyncIterator[bytes]:
            answer = first
            while answer is not None:
                yield dumped(answer) + b"\n"
                answer = await answers.get()
            if error := future.exception():
                yield dumped(_columns(error)) + b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def trust(self, request: Request) -> Response:
        """Return a trust card."""
        asked = await read_json(request)
        return json_response(await self._ask(request, partial(self.session.trust, asked)))

    async def save(self, request: Request) -> Response:
        """Return an overlay, a figure or code."""
        asked = await read_json(request)
        saved = await self._ask(request, partial(self.session.save, asked))
        return Response(saved, media_type="text/plain" if isinstance(saved, str) else "image/png")

    def app(self, token: str, host: str) -> ASGIApp:
        """Return the application, which only answers requests with the token, from its page."""
        files = [
            Route(f"/{name}", Response(content, media_type=kind), methods=["GET"])
            for name, (content, kind) in static_files().items()
        ]
        routes = [
            *files,
            Route("/about", self.about),
            Route("/image", self.upload, methods=["POST"]),
            Route("/image/{index:int}", self.offered, methods=["POST"]),
            Route("/image/{number}", self.picture, methods=["GET"]),
            Route("/image/{number}", self.reopened, methods=["POST"]),
            Route("/thumbnail/{index:int}", self.thumbnail),
            Route("/explain", self.explain, methods=["POST"]),
            Route("/trust", self.trust, methods=["POST"]),
            Route("/save", self.save, methods=["POST"]),
        ]
        handlers = dict.fromkeys((HTTPException, *STATUSES), error_response)
        app = Starlette(routes=[Mount("/{token}", routes=routes)], exception_handlers=handlers)
        return Guard(app, token, host)


class Guard:
    """Application that refuses requests without the token, for another host, or from another page.

    Args:
        app: The application.
        token: The first part of each address.
        host: The address that the server is bound to.
    """

    def __init__(self, app: ASGIApp, token: str, host: str) -> None:
        self._app, self._token = app, token
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, with the headers of all answers."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        app = self._app
        try:
            self._check(scope)
        except HTTPException as error:
            app = error_response(Request(scope), error)
        await app(scope, receive, send_with_headers)

    def _check(self, scope: Scope) -> None:
        """Raise HTTPException for another host, as after DNS rebinding, for another page, or without the token."""
        headers, token = Headers(scope=scope), scope["path"].removeprefix("/").partition("/")[0]
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_allowed(host):
            raise HTTPException(403, "the server does not answer under this name; open the address that it printed")
        if scope["method"] != "GET" and origin is not None and origin.partition("://")[2] != host:
            raise HTTPException(403, "the request is from another page")
        if not compare_digest(token.encode("utf-8", "replace"), self._token.encode()):
            raise HTTPException(404, "there is nothing at this address; open the address that the server printed")

    def _is_allowed(self, host: str) -> bool:
        """Return whether a host is this machine, or any IP address, which no attacker's domain can be."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def _settle(answer: asyncio.Future[Any], settle: Callable[[Any], None], result: Any) -> None:
    if not answer.done():  # the connection was closed, or the server ended
        settle(result)


async def _stop_when_closed(request: Request, stop: Stop) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stop.set()


async def read_body(request: Request, most: int) -> bytes:
    """Return the body of a request. Raises HTTPException if it is too large or too slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise HTTPException(413, f"the body is larger than the limit of {most:,} bytes")
    except TimeoutError as error:
        raise HTTPException(408, "the body did not arrive in time") from error
    return bytes(body)


async def read_json(request: Request) -> dict[str, Any]:
    """Return the object in the body of a request. Raises HTTPException for anything else."""
    body = await read_body(request, MOST_JSON)
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "the body is not JSON") from error
    if not isinstance(asked, dict):
        raise HTTPException(400, "expected a JSON object")
    return asked


def error_response(request: Request, error: Exception) -> Response:
    """Return an error as JSON, with its status."""
    if isinstance(error, HTTPException):
        return json_response({"error": error.detail, "error_kind": "HTTPException"}, error.status_code)
    status = next(status for kind, status in STATUSES.items() if isinstance(error, kind))
    return json_response(_columns(error), status)


def _columns(error: BaseException) -> dict[str, str]:
    """Return an error as in the manifest; a stopped question has no class in its message."""
    return error_columns(error) | ({"error": str(error)} if isinstance(error, StoppedQuestion) else {})


def json_response(answer: PageAnswer, status: int = 200) -> Response:
    """Return an answer as JSON."""
    return Response(dumped(answer), status, media_type="application/json")


def dumped(answer: PageAnswer) -> bytes:
    """Return an answer as one line of JSON, with bytes in base64."""
    return json.dumps(answer, allow_nan=False, default=lambda part: base64.b64encode(part).decode()).encode()


def serve(
    model: str | nn.Module = "efficientnet_lite0",
    folder: str | os.PathLike[str] | Mapping[Any, Any] | None = None,
    *,
    method: str = "grad_cam",
    layer: str | None = None,
    options: Mapping[str, Any] | None = None,
    weights: str | None = "default",
    preprocess: PreprocessLike | None = None,
    categories: Sequence[str] | Mapping[int, str] | None = None,
    whole: Whole = False,
    device: str = "auto",
    compile: bool = False,
    host: str = "127.0.0.1",
    port: int = 0,
    browser: bool = True,
) -> None:
    """Show a page that explains images dropped on it, until Ctrl-C is pressed.

    The address is written to standard error. The address contains a secret token: anyone who has it can use the model
    and see the images of the folder. The server sends nothing to any other machine. See docs/explorer.md.

    Args:
        model: A name that `saliency.load` accepts, or a model, which stays unchanged.
        folder: A folder or a list of images to offer, with subfolders. For a model with several inputs, a mapping of
            the inputs of one case, or of a folder or file for each input.
        method: The method that the page begins with.
        layer: The layer that the page begins with; None for the default of each method.
        options: Options of the methods, applied to each method that has them.
        weights: As for `saliency.load`.
        preprocess: Preprocessing of the images; by default the model's.
        categories: Class names; by default the model's.
        whole: Whether the model sees the whole image, as for every method.
        device: As for `saliency.batch`; one device.
        compile: Whether the method that the page begins with is compiled before, see `Attribution.compile`.
        host: The address of a network interface. By default, only this machine can connect; "0.0.0.0" is all
            interfaces, without encryption.
        port: The port; 0 for any free port.
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
        server = uvicorn.Server(config)
        shut_down = server.shutdown

        async def shutdown(*arguments: Any, **options: Any) -> None:
            explorer.end()  # uvicorn waits for the answers to all requests
            await shut_down(*arguments, **options)

        server.shutdown = shutdown
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
