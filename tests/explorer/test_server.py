"""The server: hostile uploads and requests have one clear answer each, and the next request is answered as before."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from saliency.batch.options import NetworkOptions
from saliency.cli import main
from saliency.errors import SaliencyError
from saliency.explorer import server as module
from saliency.explorer import server as serve_module
from saliency.explorer.server import Explorer
from saliency.explorer.session import Session
from saliency.testbed import draw_rgbd
from tests.batchwork import Tiny
from tests.explorer.serving import served
from tests.explorer.test_session import photo

TOKEN, HOST = "secret", "127.0.0.1"
JSON = {"content-type": "application/json"}
Client = Any
SLOW: dict[str, Any] = {"passes": 100_000, "chunk": 4}
Act = Callable[[Client, str], Awaitable[Any]]


def bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    """A PNG of a few bytes that decodes to gigabytes."""
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@contextmanager
def explorer(**options: Any) -> Iterator[Explorer]:
    with closing(Explorer(Session(NetworkOptions(model=Tiny(), options=options), [photo()]))) as own:
        yield own


def run(act: Callable[[Client, Explorer], Awaitable[Any]], host: str = HOST, **options: Any) -> Any:
    """Run requests through the application, without a socket."""

    async def within() -> Any:
        with explorer(**options) as own:
            transport = httpx.ASGITransport(own.app(TOKEN, host))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000/secret/") as client:
                return await act(client, own)

    return asyncio.run(within())


async def opened(client: Client) -> str:
    answer = await client.post("image/0")
    assert answer.status_code == 200
    number: str = answer.json()["image"]
    return number


async def slow() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.sleep(30)


async def flood() -> AsyncIterator[bytes]:
    while True:
        yield b"x" * 100_000


def asking(**asked: Any) -> Act:
    return lambda client, image: client.post("explain", json={"image": image, "methods": ["grad_cam"], **asked})


def sending(content: Any, headers: dict[str, str] | None = None, address: str = "explain") -> Act:
    return lambda client, image: client.post(address, content=content, headers=JSON if headers is None else headers)


def saving(**style: Any) -> Act:
    return lambda client, image: client.post(
        "save", json={"image": image, "methods": ["grad_cam"], "as": "overlay", "style": style}
    )


HOSTILE: dict[str, tuple[Act, int, str]] = {
    "a decompression bomb": (sending(bomb(), {}, "image"), 415, "more than the limit"),
    "a damaged image": (sending(photo()[:60], {}, "image"), 415, "damaged"),
    "an empty image": (sending(b"", {}, "image"), 415, "empty"),
    "HTML as an image": (sending(b"<html>", {}, "image"), 415, "is not an AVIF"),
    "SVG": (sending(b"<svg onload='x'/>", {}, "image"), 415, "XML"),
    "a large image": (sending(b"x" * 3_000_000, {}, "image"), 413, "limit"),
    "a flood without a length": (sending(flood(), {}, "image"), 413, "limit"),
    "a slow body": (sending(slow()), 408, "in time"),
    "a large JSON": (sending(b"[" + b"1," * 20_000 + b"1]"), 413, "limit"),
    "a deep JSON": (sending(b"[" * 8_000 + b"]" * 8_000), 400, "not JSON"),
    "broken JSON": (sending(b'{"image": '), 400, "not JSON"),
    "a list": (sending(b"[1]"), 400, "object"),
    "bytes that are not text": (sending(b'{"a": "\xff"}'), 400, "not JSON"),
    "a number of many digits": (sending(b'{"image": ' + b"9" * 9_000 + b"}"), 400, "not JSON"),
    "NaN": (sending(b'{"image": NaN}'), 400, "one or two"),
    "a form": (sending(b"a=b", {"content-type": "application/x-www-form-urlencoded"}), 400, "not JSON"),
    "an unknown image": (asking(image="../../etc/passwd"), 404, "open it again"),
    "an image of another type": (asking(image=["a"]), 404, "open it again"),
    "no methods": (asking(methods=[]), 400, "one or two"),
    "many methods": (asking(methods=["grad_cam"] * 100), 400, "one or two"),
    "an unknown method": (asking(methods=["__class__"]), 200, "no method"),
    "a method of another type": (asking(methods=[{"a": 1}]), 200, "no method"),
    "an unknown layer": (asking(layer="features.__class__"), 200, "layer"),
    "a layer of another type": (asking(layer=[1]), 200, "name of a layer"),
    "an unknown class": (asking(target={"class": 10**30}), 200, "outside 0..4"),
    "a class by a wrong name": (asking(target={"class": "x" * 9_000}), 200, "no class"),
    "a negative point": (asking(target={"box": {"point": [-1e300, -5]}}), 200, "outside"),
    "a point of infinity": (
        lambda client, image: client.post(
            "explain",
            content=json.dumps({"image": image, "methods": ["grad_cam"], "target": {"box": {"point": [0, 9]}}}).replace(
                "9]", "1e999]"
            ),
            headers=JSON,
        ),
        200,
        "expected (x, y)",
    ),
    "options": (asking(options={"chunk": 10**9}), 200, "set when the explorer starts"),
    "a target that is no target": (asking(target={"exec": "import os"}), 200, "expected a class"),
    "a style of infinity": (saving(opacity=1e308), 400, "opacity"),
    "an unknown style": (saving(size=10**9), 400, "expected opacity"),
    "a picture of no image": (lambda client, image: client.get("image/0123"), 404, "open it again"),
    "traversal": (lambda client, image: client.get("static/%2e%2e/%2e%2e/server.py"), 404, "Not Found"),
    "a thumbnail far outside": (lambda client, image: client.get(f"thumbnail/{10**40}"), 404, "are offered"),
    "a wrong method": (lambda client, image: client.delete("about"), 405, "Method Not Allowed"),
    "GET of an explanation": (lambda client, image: client.get("explain"), 405, "Method Not Allowed"),
    "a wrong token": (lambda client, image: client.get("http://127.0.0.1:8000/secre/about"), 404, "nothing"),
    "no token": (lambda client, image: client.post("http://127.0.0.1:8000/explain"), 404, "nothing at this address"),
    "a token that is no text": (lambda client, image: client.get("http://127.0.0.1:8000/%ff%00/about"), 404, "nothing"),
    "another host": (lambda client, image: client.get("about", headers={"host": "evil.example"}), 403, "this name"),
    "a host that is none": (lambda client, image: client.get("about", headers={"host": "[::1"}), 403, "this name"),
    "another page": (
        lambda client, image: client.post("explain", json={}, headers={"origin": "https://evil.example"}),
        403,
        "another page",
    ),
    "a page without an origin": (
        lambda client, image: client.post("image", content=b"", headers={"origin": "null"}),
        403,
        "another page",
    ),
}  # fmt: skip


def test_hostile_requests_have_one_clear_answer_and_the_server_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 2_000_000)
    monkeypatch.setattr(module, "BODY_SECONDS", 0.2)
    assert len(HOSTILE) >= 30

    async def act(client: Client, own: Explorer) -> None:
        image = await opened(client)
        for name, (send, status, message) in HOSTILE.items():
            answer = await send(client, image)
            assert answer.status_code == status, f"{name}: {answer.status_code} {answer.text:.300}"
            (line,) = answer.text.splitlines()
            error = json.loads(line).get("row", json.loads(line))
            assert message in error["error"], f"{name}: {error}"
            assert error["error_kind"]
            assert "Traceback" not in answer.text
            assert answer.headers["content-security-policy"].startswith("default-src 'none'")
            good = await client.post("explain", json={"image": image, "methods": ["grad_cam"]})
            assert json.loads(good.text)["row"]["name"], name

    run(act)


@pytest.mark.parametrize(
    ("bound", "name", "status"),
    [
        ("127.0.0.1", "localhost:9", 200),  # as through a tunnel
        ("127.0.0.1", "192.168.0.7:8000", 200),  # no attacker's domain
        ("lab.example", "lab.example:8000", 200),
        ("0.0.0.0", "192.168.0.7:8000", 200),  # noqa: S104
        ("0.0.0.0", "evil.example:8000", 403),  # noqa: S104
    ],
)
def test_the_server_answers_under_its_own_names_only(bound: str, name: str, status: int) -> None:
    async def act(client: Client, own: Explorer) -> int:
        code: int = (await client.get("about", headers={"host": name})).status_code
        return code

    assert run(act, bound) == status


def test_an_address_without_its_last_slash_leads_to_the_page() -> None:
    async def act(client: Client, own: Explorer) -> str:
        answer = await client.get("http://127.0.0.1:8000/secret")
        assert answer.status_code == 307
        return str(answer.headers["location"])

    assert run(act) == "http://127.0.0.1:8000/secret/"


def test_no_answer_of_an_older_question_comes_after_a_newer_one() -> None:
    async def act(client: Client, own: Explorer) -> list[Any]:
        image, headers = await opened(client), {"x-page": "a"}
        asked = [{"image": image, "methods": [name]} for name in ("rise", "lime", "grad_cam")]
        tasks = []
        for one in asked:
            tasks.append(asyncio.create_task(client.post("explain", json=one, headers=headers)))
            await asyncio.sleep(0.1)  # the first one runs, the second one waits
        return list(await asyncio.gather(*tasks))

    first, second, third = run(act, **SLOW)
    assert [answer.status_code for answer in (first, second)] == [409, 409]
    assert first.json()["error_kind"] == second.json()["error_kind"] == "StoppedQuestion"
    assert json.loads(third.text)["done"]


def test_a_card_is_not_replaced_by_a_newer_question() -> None:
    async def act(client: Client, own: Explorer) -> list[int]:
        image, headers = await opened(client), {"x-page": "a"}
        asked = {"image": image, "methods": ["grad_cam"]}
        card = asyncio.create_task(client.post("trust", json=asked | {"seconds": 0.5}, headers=headers))
        await asyncio.sleep(0.05)
        newer = await client.post("explain", json=asked, headers=headers)
        return [(await card).status_code, newer.status_code]

    assert run(act) == [200, 200]


def test_a_flood_of_200_questions_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(NetworkOptions(model=Tiny()), [photo()])
    explain, is_over = session.explain, threading.Event()

    def explain_later(*arguments: Any) -> None:
        is_over.wait(60)
        explain(*arguments)

    async def act(address: str) -> list[int]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=address, limits=limits, timeout=60) as client:
            image = await opened(client)
            monkeypatch.setattr(session, "explain", explain_later)
            asked = {"image": image, "methods": ["occlusion"]}
            flood = [
                client.post("explain", json=asked | {"target": {"class": at % 5}}, headers={"x-page": str(at)})
                for at in range(100)
            ] + [client.post("image", content=photo(seed=at)) for at in range(100)]
            answers = [asyncio.ensure_future(request) for request in flood]
            while sum(answer.done() for answer in answers) < 100:  # the model has not answered any of them
                await asyncio.sleep(0.01)
            is_over.set()
            found = await asyncio.gather(*answers)
            asked["image"] = await opened(client)  # the flood may have replaced the first one
            assert (await client.post("explain", json=asked)).status_code == 200
            assert all(answer.json()["error"] for answer in found if answer.status_code != 200)
            return [answer.status_code for answer in found]

    with served(session) as address:
        codes = asyncio.run(act(address))
    assert set(codes) <= {200, 404, 409, 503}
    assert {200, 503} <= set(codes)


def test_a_closed_connection_ends_the_passes() -> None:
    session = Session(NetworkOptions(model=Tiny(), options=SLOW), [photo()])
    sizes: Any = session.model.sizes
    with served(session) as address, httpx.Client(base_url=address, timeout=60) as client:
        image = client.post("image/0").json()["image"]
        with client.stream("POST", "explain", json={"image": image, "methods": ["rise"]}) as answer:
            assert json.loads(next(answer.iter_lines()))["progress"] < 1
        before = -1
        while before != len(sizes):
            before = len(sizes)
            time.sleep(0.2)
        assert before < SLOW["passes"] // SLOW["chunk"]
        good = client.post("explain", json={"image": image, "methods": ["grad_cam"]})
        assert json.loads(good.text)["done"]


def test_the_end_of_the_server_answers_questions_to_a_hung_model_and_does_not_wait_for_it() -> None:
    is_asked, is_over = threading.Event(), threading.Event()

    def hang(*arguments: Any) -> None:
        is_asked.set()
        is_over.wait()

    async def act(client: Client, own: Explorer) -> list[Any]:
        own.session.open = hang  # type: ignore[assignment, method-assign]
        questions = [asyncio.create_task(client.post("image/0"))]
        await asyncio.to_thread(is_asked.wait)  # before the next question, which would replace it in the queue
        questions.append(asyncio.create_task(client.post("image/0")))
        while len(own._jobs) < 2:
            await asyncio.sleep(0.01)
        own.end()
        return list(await asyncio.gather(*questions))

    answers = run(act)  # closes the explorer too
    is_over.set()
    assert [answer.status_code for answer in answers] == [409] * 2
    assert answers[0].json()["error"] == "the server ended"


def test_two_thumbnails_are_drawn_at_once_and_each_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, running, most = list[int](), list[int](), list[int]()
    both = threading.Barrier(2)

    def draw(index: int) -> bytes:
        drawn.append(index)
        running.append(index)
        both.wait(60)
        most.append(len(running))
        both.wait(60)
        running.remove(index)
        return bytes([index])

    session = Session(NetworkOptions(model=Tiny()), [photo()])
    monkeypatch.setattr(session, "thumbnail", draw)

    async def act() -> list[bytes]:
        with closing(Explorer(session)) as own:
            transport = httpx.ASGITransport(own.app(TOKEN, HOST))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000/secret/") as client:
                for _ in range(2):
                    answers = await asyncio.gather(*(client.get(f"thumbnail/{index}") for index in range(8)))
                return [answer.content for answer in answers]

    assert asyncio.run(act()) == [bytes([index]) for index in range(8)]
    assert sorted(drawn) == list(range(8))
    assert most == [2] * 8


HUNG = """
import threading
from tests.batchwork import Tiny

class Hung(Tiny):
    def forward(self, x):
        if threading.current_thread().name == "saliency-model":
            print("hung", flush=True)
            while True:
                x.mean()
        return super().forward(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_ends_without_a_traceback_while_the_model_hangs(number: int, tmp_path: Path) -> None:
    (tmp_path / "hung.py").write_text(HUNG)
    command = [sys.executable, "-m", "saliency", "serve", str(tmp_path / "hung.py:Hung"), "--no-browser"]
    root = Path(__file__).parents[2]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": root}
    process: Any
    with subprocess.Popen(command, **pipes) as process, ThreadPoolExecutor() as thread:  # noqa: S603
        address = process.stderr.readline().strip()
        process.stderr.readline()
        answer = thread.submit(httpx.post, f"{address}image/0", timeout=60)
        assert process.stdout.readline() == "hung\n"
        process.send_signal(number)
        assert answer.result().status_code == 409
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


@pytest.mark.slow
def test_the_command_prints_an_address_that_answers_and_ends_by_ctrl_c() -> None:
    command = [sys.executable, "-m", "saliency", "serve", "shapes_vit", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stderr is not None
        address = process.stderr.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address), address
        about = httpx.get(f"{address}about", timeout=60).json()
        assert about["model"] == "shapes_vit"
        assert "script" in httpx.get(address, timeout=60).text
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.parametrize("words", [["resnet18", "FOLDER"], ["FOLDER"]])
def test_the_command_takes_a_model_a_folder_or_both(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[str, Any] = {}
    monkeypatch.setattr("saliency.explorer.server.serve", given(known))
    words = [str(tmp_path) if word == "FOLDER" else word for word in words]
    options = ["--port", "9", "-m", "lrp", "--set", "steps=3", "--layer", "layer3", "--no-browser", "--compile"]
    assert main(["serve", *words, *options]) == 0
    assert known["model"] == ("efficientnet_lite0" if len(words) == 1 else "resnet18")
    assert (str(known["folder"]), known["method"], known["layer"]) == (str(tmp_path), "lrp", "layer3")
    assert (known["port"], known["options"], known["browser"], known["compile"]) == (9, {"steps": 3}, False, True)


def test_the_command_takes_named_inputs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[str, Any] = {}
    monkeypatch.setattr("saliency.explorer.server.serve", given(known))
    assert main(["serve", "shapes_rgbd", "rgb=a.png", "depth=d.npy", "-m", "lrp"]) == 0
    assert known["folder"] == {"rgb": "a.png", "depth": "d.npy"}
    assert main(["serve", "rgb=a.png", "depth=d.npy"]) == 2
    assert "rgb=a.png is an input; the model comes first, as in mine.py:make rgb=a.png" in capsys.readouterr().err


def test_an_upload_replaces_one_input_of_a_case() -> None:
    inputs = {name: own[:1] for name, own in draw_rgbd(1, seed=1_000_003).inputs.items()}

    async def within() -> None:
        with closing(Explorer(Session(NetworkOptions(model="shapes_rgbd"), inputs))) as own:
            transport = httpx.ASGITransport(own.app(TOKEN, HOST))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000/secret/") as client:
                case = await opened(client)
                answer = await client.post(f"image?input=0&case={case}", content=photo())
                pictures = [
                    (await client.get(f"image/{number}?input={index}")).content
                    for number in (case, answer.json()["image"])
                    for index in range(2)
                ]
                assert [pictures[index] == pictures[index + 2] for index in range(2)] == [False, True]

    asyncio.run(within())


def given(known: dict[str, Any]) -> Callable[..., None]:
    """A function with the parameters of `serve` that stores its arguments."""

    @functools.wraps(serve_module.serve)
    def store(**arguments: Any) -> None:
        known.update(arguments)

    return store


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shapes_cnn", "none"], "none contains no image to offer"),
        (["shapes_cnn", "empty"], "empty contains no image to offer"),
        (["shapes_cnn", "volumes"], "volumes contains no image to offer"),
        (["shapes_cnn", "--port", "99999"], "port=99999"),
    ],
)
def test_a_wrong_folder_or_port_is_refused_at_the_start(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "volumes").mkdir()
    (tmp_path / "volumes" / "scan.nii").touch()
    assert main(["serve", *words, "--no-browser"]) == 2
    assert message in capsys.readouterr().err


def test_a_notebook_is_sent_to_the_widget() -> None:
    async def within() -> None:
        serve_module.serve("shapes_vit")

    with pytest.raises(SaliencyError, match=r"saliency\.explore"):
        asyncio.run(within())
