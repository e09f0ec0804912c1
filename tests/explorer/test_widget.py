"""The promises of the widget: the answers of a session as messages with buffers, which do not block the notebook."""

from __future__ import annotations

import base64
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import saliency
from saliency.batch.options import NetworkOptions
from saliency.explorer.page import widget_module
from saliency.explorer.session import PageAnswer, Session
from saliency.explorer.widget import Conversation
from saliency.testbed import draw_rgbd
from saliency.testbed.shapes import draw_scenes
from tests.browser import PATIENCE, chromium, visit

SCENES = (draw_scenes(2).images * 255).round().byte().permute(0, 2, 3, 1).numpy()
CAT = Path(__file__).parents[2] / "assets" / "chelsea.jpg"


class FrontEnd:
    """A stand-in for the page, which asks and reads all answers."""

    def __init__(self, session: Session) -> None:
        self.messages: queue.Queue[tuple[PageAnswer, Sequence[bytes]]] = queue.Queue()
        self.conversation = Conversation(session, lambda message, buffers: self.messages.put((message, buffers)))

    def ask(self, name: str, body: PageAnswer | None = None, buffers: Sequence[bytes] = ()) -> None:
        message = {"id": name, "name": name, "body": body or {}, "file": "drawn.png"}
        self.conversation.receive(None, message, [memoryview(buffer) for buffer in buffers])

    def read(self) -> list[tuple[PageAnswer, Sequence[bytes]]]:
        """The messages of one question up to its end, or its error."""
        read: list[tuple[PageAnswer, Sequence[bytes]]] = []
        while True:
            message, buffers = self.messages.get(timeout=120)
            if "end" in message:
                return read
            read.append((message, buffers))
            if "error" in message:
                return read


@pytest.fixture(scope="module")
def session() -> Session:
    return Session(NetworkOptions(model="shapes_cnn"), list(SCENES))


def test_a_photo_and_its_map_are_messages_with_buffers(session: Session) -> None:
    page = FrontEnd(session)
    page.ask("about")
    ((about, _),) = page.read()
    assert [image["index"] for image in about["answer"]["images"]] == [0, 1]
    page.ask("thumbnail", {"index": 0})
    ((thumbnail, (jpeg,)),) = page.read()
    assert thumbnail["type"] == "image/jpeg"
    assert jpeg.startswith(b"\xff\xd8")
    page.ask("image", {"index": 1})
    ((opened, _),) = page.read()
    page.ask("explain", {"image": opened["answer"]["image"], "methods": ["grad_cam"], "target": None})
    ((explained, (values,)),) = page.read()
    plane = explained["answer"]["map"]
    heat = np.frombuffer(values, "<f4").reshape(plane["height"], plane["width"])
    explanation = saliency.GradCAM(session.model).attribute(SCENES[1])
    assert explained["answer"]["done"]
    assert torch.allclose(torch.from_numpy(heat.copy()), saliency.heatmap(explanation, size=heat.shape)[0], atol=1e-5)
    page.ask("save", {"image": opened["answer"]["image"], "methods": ["grad_cam"], "as": "code"})
    ((saved, (code,)),) = page.read()
    assert saved["type"] == "text/plain"
    assert b"saliency.GradCAM(" in code


def test_a_dropped_file_arrives_as_a_buffer(session: Session) -> None:
    page = FrontEnd(session)
    page.ask("image", {}, [CAT.read_bytes()])
    ((opened, _),) = page.read()
    assert (opened["answer"]["name"], opened["answer"]["width"]) == ("drawn.png", 451)


def test_a_dropped_file_replaces_one_input_of_a_case() -> None:
    inputs = draw_rgbd(1, seed=1_000_003).inputs
    page = FrontEnd(Session(NetworkOptions(model="shapes_rgbd"), inputs))
    page.ask("image", {"index": 0})
    ((opened, _),) = page.read()
    page.ask("image", {"input": "0", "replaced": opened["answer"]["image"]}, [CAT.read_bytes()])
    ((replaced, _),) = page.read()
    assert [image["width"] for image in replaced["answer"]["images"]] == [451, 64]
    page.ask("picture", {"image": replaced["answer"]["image"], "input": 1})
    ((picture, (jpeg,)),) = page.read()
    assert (picture["type"], jpeg[:2]) == ("image/jpeg", b"\xff\xd8")


def test_an_error_is_one_message(session: Session) -> None:
    page = FrontEnd(session)
    page.ask("image", {}, [b"no image"])
    ((error, _),) = page.read()
    assert "image" in error["error"]
    assert error["error_kind"] == "ImageError"


def test_a_map_of_many_passes_is_cancelled_while_it_runs(session: Session) -> None:
    started, stopped = threading.Event(), threading.Event()

    def explain(asked: PageAnswer, send: Callable[[PageAnswer], None], check: Callable[[], None]) -> None:
        send({"method": "rise", "progress": 0.1, "done": False})
        started.set()
        try:
            while True:
                check()
        finally:
            stopped.set()

    page = FrontEnd(session)
    vars(session)["explain"] = explain
    try:
        page.ask("explain", {"methods": ["rise"]})
        assert started.wait(120)
        page.conversation.receive(None, {"id": "explain", "name": "cancel"}, [])
        assert stopped.wait(120)
    finally:
        del vars(session)["explain"]
    page.ask("image", {"index": 0})
    names = [message for message, _ in page.read()]
    assert [message["id"] for message in names] == ["explain", "image"]  # no error, and no end of the stopped one


def test_explore_gives_a_widget_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    anywidget = pytest.importorskip("anywidget")
    sent: list[PageAnswer] = []
    monkeypatch.setattr(anywidget.AnyWidget, "send", lambda self, content, buffers=None: sent.append(content))
    widget = saliency.explore("shapes_cnn", list(SCENES))
    widget._handle_custom_msg({"id": "1", "name": "about", "body": {}}, [])
    while len(sent) < 2:  # the answer comes from a thread
        time.sleep(0.01)
    assert sent[0]["answer"]["model"] == "shapes_cnn"
    assert "export default" in widget._esm
    text = widget._repr_mimebundle_()[0]["text/plain"]  # shown where JupyterLab has no anywidget
    assert text == repr(widget)
    assert "pip install anywidget" in text
    widget.close()


STUB = """
const listeners = new Set();
globalThis.deliver = (message, buffers) => {
  const views = buffers.map((text) => new DataView(Uint8Array.from(atob(text), (each) => each.charCodeAt(0)).buffer));
  for (const listener of listeners) listener(message, views);
};
const model = {
  on: (_, listener) => listeners.add(listener),
  off: (_, listener) => listeners.delete(listener),
  send: (message) => globalThis.ask(message),
};
widget.render({ model, el: document.getElementById("cell") });
"""


@pytest.mark.slow
def test_the_module_shows_the_explorer_in_a_page_of_a_notebook(session: Session, tmp_path: Path) -> None:
    """The page has its own styles and a dark ground; the answers are those of a session."""
    module = widget_module().replace("export default", "const widget =") + STUB
    (tmp_path / "cell.html").write_text(
        "<!doctype html><style>body { background: #111; color: #eee } button { background: lime }</style>"
        f'<h1>Notebook</h1><div id="cell"></div><script type="module">{module}</script>',
        "utf-8",
    )
    front = FrontEnd(session)
    with chromium() as browser, visit(browser) as window:
        page = window.page
        page.expose_function("ask", lambda message: front.conversation.receive(None, message, []))
        page.goto((tmp_path / "cell.html").as_uri())
        text = ""
        for _ in range(50 * PATIENCE):
            while not front.messages.empty():
                message, buffers = front.messages.get()
                page.evaluate(
                    "([message, buffers]) => deliver(message, buffers)",
                    [message, [base64.b64encode(each).decode() for each in buffers]],
                )
            text = page.evaluate(
                "document.getElementById('cell').shadowRoot?.querySelector('.status')?.textContent ?? ''"
            )
            if "explained by GradCAM" in text:
                break
            page.wait_for_timeout(20)
        assert "explained by GradCAM" in text
        page.evaluate("window.keys = []; document.addEventListener('keydown', (event) => keys.push(event.key))")
        page.locator(".pick").focus()
        for key in ("d", "ArrowDown", "Control+s"):
            page.keyboard.press(key)
        assert page.evaluate("keys") == ["Control", "s"]  # the notebook would delete its cell
        cell = "document.getElementById('cell')"
        assert page.evaluate(f"{cell}.dataset.theme") == "dark"
        button = f"getComputedStyle({cell}.shadowRoot.querySelector('.thumb')).backgroundColor"
        assert page.evaluate(button) == "rgba(0, 0, 0, 0)"
        assert page.evaluate("getComputedStyle(document.querySelector('h1')).fontSize") == "32px"
        assert window.complaints == []
