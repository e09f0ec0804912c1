"""The server of the explorer: addresses, the queue of the model, and who may ask.

One thread runs the model. A newer question of the same page stops the older one between two chunks of passes.
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
import threading
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from secrets import compare_digest
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote, urlsplit

from ..batch.failures import Failure
from ..batch.run_options import RunOptions
from ..batch.sources import find_images
from ..errors import ImageError, SaliencyError, optional_import
from .page import static_files
from .session import MOST_BYTES, Answer, Session, StoppedQuestion, UnknownImageError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send
    from torch import nn

    from ..io.preprocess import PreprocessLike, Whole

Run = Callable[[Callable[[Any], None], Callable[[], None]], Any]
"""Answers a question, given a function that takes answers, and one that raises once the question was stopped."""

MOST_JSON, MOST_NAME = 16 * 2**10, 200  # bytes of a question; characters of a file name
MOST_WAITING = 8  # questions of all pages, besides the one that runs
MOST_UPLOADS = 4  # bodies of images that are received at once
IDLE_SECONDS, BODY_SECONDS = 10.0, 120.0  # without a byte of the body, and for all of it
LOOPBACK = ("localhost", "127.0.0.1", "::1")
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


class RequestError(SaliencyError):
    """A request that is not answered, with its status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Last:
    """The result of a question, or its error."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Job:
    """One question to the model, and its answers.

    Args:
        page: The page that asks.
        run: Answers the question.
        replaces: Whether it replaces older questions of the page that have this mark too.
    """

    def __init__(self, page: str, run: Run, *, replaces: bool) -> None:
        self.page, self.replaces, self._run = page, replaces, run
        self._loop, self._answers = asyncio.get_running_loop(), asyncio.Queue[Any]()
        self._is_stopped = threading.Event()

    @property
    def is_stopped(self) -> bool:
        """Whether the answers are not wanted any more."""
        return self._is_stopped.is_set()

    def stop(self) -> None:
        """Stop the question between two chunks of passes, or before it begins."""
        self._is_stopped.set()

    def check(self) -> None:
        """Raise StoppedQuestion once the question was stopped."""
        if self.is_stopped:
            raise StoppedQuestion("a newer question of this page replaced this one")

    def run(self) -> None:
        """Answer the question in this thread."""
        try:
            self.check()
            result = self._run(self.send, self.check)
        except Exception as error:  # noqa: BLE001 - any error is the answer to this question
            result = error
        self.send(_Last(result))

    def send(self, answer: Any) -> None:
        """Add an answer, from the thread of the model."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._answers.put_nowait, answer)

    async def answers(self) -> AsyncIterator[Any]:
        """Yield the answers, and then the result unless it is None. Raises the error of the question."""
        try:
            while not isinstance(answer := await self._answers.get(), _Last):
                yield answer
            if isinstance(answer.value, Exception):
                raise answer.value
            if answer.value is not None:
                yield answer.value
        finally:
            self.stop()


class Explorer:
    """Answers to all requests about one model.

    Args:
        session: The model.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._thread = ThreadPoolExecutor(1, "saliency")
        self._jobs: list[Job] = []
        self._uploads = 0

    def close(self) -> None:
        """Stop all questions, and wait for the thread of the model."""
        for job in self._jobs:
            job.stop()
        self._thread.shutdown(cancel_futures=True)

    def _ask(self, request: Request, run: Run, *, replaces: bool = False) -> AsyncIterator[Any]:
        """Put a question into the queue, and return its answers. It is stopped once the connection closes.

        Raises:
            RequestError: Too many questions wait.
        """
        job = Job(request.headers.get("x-page", ""), run, replaces=replaces)
        for other in self._jobs:
            if replaces and other.replaces and other.page == job.page:
                other.stop()
        if sum(not other.is_stopped for other in self._jobs) > MOST_WAITING:
            raise RequestError(503, "the model is busy with other questions; try again")
        self._jobs.append(job)
        watch = asyncio.create_task(_stop_when_closed(request, job))
        loop = asyncio.get_running_loop()

        def end() -> None:
            self._jobs.remove(job)
            watch.cancel()

        def end_soon(future: Future[None]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(end)

        self._thread.submit(job.run).add_done_callback(end_soon)
        return job.answers()

    # Requests

    async def static(self, request: Request) -> Response:
        """Return the page, or one of its files."""
        from starlette.responses import Response

        content, kind = static_files()[request.url.path.removeprefix("/")]
        return Response(content, media_type=kind)

    async def about(self, request: Request) -> Response:
        """Return the facts that the page needs first."""
        return _json(self.session.about())

    async def upload(self, request: Request) -> Response:
        """Open the image in the body."""
        if self._uploads >= MOST_UPLOADS:
            raise RequestError(503, "too many images arrive at once; try again")
        self._uploads += 1
        try:
            content = await read_body(request, MOST_BYTES)
        finally:
            self._uploads -= 1
        name = unquote(request.headers.get("x-name", ""))
        return await self._open(request, content, name[:MOST_NAME] or "image")

    async def offered(self, request: Request) -> Response:
        """Open an image of the folder."""
        await read_body(request, 0)
        return await self._open(request, request.path_params["index"], "")

    async def _open(self, request: Request, image: bytes | int, name: str) -> Response:
        answers = self._ask(request, lambda send, check: self.session.open(image, name), replaces=True)
        return _json(await anext(answers))

    async def picture(self, request: Request) -> Response:
        """Return an opened image as JPEG."""
        from starlette.responses import Response

        picture = await asyncio.to_thread(self.session.picture, request.path_params["number"])
        return Response(picture, media_type="image/jpeg")

    async def thumbnail(self, request: Request) -> Response:
        """Return an image of the folder as a small JPEG."""
        from starlette.responses import Response

        picture = await asyncio.to_thread(self.session.thumbnail, request.path_params["index"])
        return Response(picture, media_type="image/jpeg")

    async def explain(self, request: Request) -> Response:
        """Return maps, one line of JSON each, as they become known."""
        from starlette.responses import StreamingResponse

        asked = await read_json(request)
        answers = self._ask(request, partial(self.session.explain, asked), replaces=True)
        first = await anext(answers)

        async def lines() -> AsyncIterator[bytes]:
            yield _dumped(first) + b"\n"
            try:
                async for answer in answers:
                    yield _dumped(answer) + b"\n"
            except StoppedQuestion as error:
                yield _dumped(_facts_of(error)) + b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def trust(self, request: Request) -> Response:
        """Return a trust card."""
        asked = await read_json(request)
        answers = self._ask(request, lambda send, check: self.session.trust(asked, check))
        return _json(await anext(answers))

    async def save(self, request: Request) -> Response:
        """Return an overlay, a figure or code."""
        from starlette.responses import Response

        asked = await read_json(request)
        saved = await anext(self._ask(request, lambda send, check: self.session.save(asked, check)))
        return Response(saved, media_type="text/plain" if isinstance(saved, str) else "image/png")

    def app(self, token: str, host: str) -> ASGIApp:
        """Return the application, which only answers requests with the token, from its own page."""
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.routing import Route

        def refused(request: Request, error: Exception) -> Response:
            return error_response(error)

        routes = [
            *(Route(f"/{name}", _answering(self.static)) for name in static_files()),
            Route("/about", _answering(self.about)),
            Route("/image", _answering(self.upload), methods=["POST"]),
            Route("/image/{index:int}", _answering(self.offered), methods=["POST"]),
            Route("/image/{number}", _answering(self.picture)),
            Route("/thumbnail/{index:int}", _answering(self.thumbnail)),
            Route("/explain", _answering(self.explain), methods=["POST"]),
            Route("/trust", _answering(self.trust), methods=["POST"]),
            Route("/save", _answering(self.save), methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: refused})
        app.router.redirect_slashes = False
        return Guard(app, token, host)


class Guard:
    """Application that refuses requests without the token, for another host, or from another page.

    Args:
        app: The application, for addresses without the token.
        token: The first part of each address.
        host: The address that the server is bound to.
    """

    def __init__(self, app: ASGIApp, token: str, host: str) -> None:
        self._app, self._token = app, token
        self._hosts = {*LOOPBACK, host.lower()}
        self._is_open = host in ("", "0.0.0.0", "::")  # noqa: S104 - the user asked for all interfaces
        if self._is_open:
            self._hosts.add(socket.gethostname().lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, with the headers of all answers."""

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        _, token, path = [*scope["path"].split("/", 2), "", ""][:3]
        answer: ASGIApp = self._app
        try:
            self._check({name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}, scope)
            if not compare_digest(token.encode("utf-8", "replace"), self._token.encode()):
                raise RequestError(404, "there is nothing at this address; open the one that the server printed")
        except RequestError as error:
            answer = error_response(error)
        await answer({**scope, "path": f"/{path}"}, receive, send_with_headers)

    def _check(self, headers: Mapping[str, str], scope: Scope) -> None:
        """Raise RequestError for a request to another host, as after DNS rebinding, or by another page."""
        host = headers.get("host", "")
        if not self._is_own(host):
            raise RequestError(403, "the server does not answer under this name; open the address that it printed")
        origin = headers.get("origin")
        if scope["method"] != "GET" and origin is not None and origin.partition("://")[2] != host:
            raise RequestError(403, "the request is from another page")

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            # No name of an attacker's domain is an IP address.
            return name in self._hosts or (self._is_open and bool(ipaddress.ip_address(name)))
        except ValueError:
            return False


async def _stop_when_closed(request: Request, job: Job) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.stop()


async def read_body(request: Request, most: int) -> bytes:
    """Return the body of a request. Raises RequestError if it is too large, too slow or incomplete."""
    from starlette.requests import ClientDisconnect

    too_large = RequestError(413, f"the body is larger than the limit of {most:,} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise too_large
    body, chunks = bytearray(), request.stream()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                async with asyncio.timeout(IDLE_SECONDS):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return bytes(body)
                body += chunk
                if len(body) > most:
                    raise too_large
    except TimeoutError as error:
        raise RequestError(408, "the body did not arrive in time") from error
    except ClientDisconnect as error:
        raise RequestError(400, "the connection was closed") from error


async def read_json(request: Request) -> dict[str, Any]:
    """Return the object in the body of a request. Raises RequestError for anything else."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise RequestError(415, "expected JSON, with the content type application/json")
    body = await read_body(request, MOST_JSON)
    try:
        asked = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "the body is not JSON") from error
    if not isinstance(asked, dict):
        raise RequestError(400, "expected a JSON object")
    return asked


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _answering(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Exception as error:  # noqa: BLE001 - any error is the answer to this request
            return error_response(error)

    return answer


def _facts_of(error: Exception) -> Answer:
    failure = Failure.of(error)
    kind = "superseded" if isinstance(error, StoppedQuestion) else failure.kind
    return {"error": str(error) if isinstance(error, StoppedQuestion) else failure.reason, "error_kind": kind}


def error_response(error: Exception) -> Response:
    """Return an error as JSON, with its status."""
    from starlette.exceptions import HTTPException

    if isinstance(error, RequestError | HTTPException):
        status = error.status if isinstance(error, RequestError) else error.status_code
        reason = str(error) if isinstance(error, RequestError) else str(error.detail)
        return _json({"error": reason, "error_kind": "RequestError"}, status)
    statuses: dict[type[Exception], int] = {
        StoppedQuestion: 409,
        UnknownImageError: 404,
        ImageError: 415,
        SaliencyError: 400,
    }
    status = next((status for kind, status in statuses.items() if isinstance(error, kind)), 500)
    return _json(_facts_of(error), status)


def _json(answer: Answer, status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(_dumped(answer), status, media_type="application/json")


def _dumped(answer: Answer) -> bytes:
    """Return an answer as one line of JSON, with bytes in base64."""
    return json.dumps(answer, allow_nan=False, default=lambda part: base64.b64encode(part).decode()).encode()


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
    show: Callable[[str], object] | None = None,
) -> None:
    """Show a page on which a model explains the images that are dropped on it, until Ctrl-C is pressed.

    The address holds a secret token. Whoever has it can use the model and see the images of the folder. The server
    sends nothing to any other machine. See docs/explorer.md.

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
        show: Called with the address; by default it is written to standard error.

    Raises:
        DependencyError: Starlette or uvicorn is not installed.
        SaliencyError: The model, the method or an option is invalid, or an event loop runs in this thread, as in a
            notebook.
        OSError: The port is not free.
    """
    uvicorn = optional_import("uvicorn", "app", "the explorer")
    optional_import("starlette", "app", "the explorer")
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise SaliencyError("serve cannot run inside an event loop; in a notebook, use saliency.explore(model, images)")
    run_options = RunOptions.of({**locals(), "methods": method})
    entries = [] if folder is None else find_images(folder, recursive=True).entries
    explorer = Explorer(Session(run_options, [entry for entry in entries if not entry.is_volume]))
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
        (show or (lambda text: sys.stderr.write(f"saliency explorer: {text}\n")))(address)
        if browser:
            webbrowser.open(address)
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
