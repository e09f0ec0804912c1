"""The explorer as a widget of notebooks: the page of `saliency serve`, with messages instead of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..batch.failures import error_columns
from ..batch.options import NetworkOptions
from ..errors import USER_CODE_ERRORS, optional_import
from ..io.inputs import ImagesLike
from .page import widget_module
from .session import PageAnswer, Session, Stop, StoppedQuestion

if TYPE_CHECKING:
    from torch import nn

    from ..io.preprocess import PreprocessLike, Whole

INSTEAD = "The explorer needs anywidget where JupyterLab runs: pip install anywidget there, and reload the page."
"""The text that a notebook shows if it cannot show widgets; anywidget cuts it after 110 characters."""
SendMessage = Callable[[PageAnswer, Sequence[bytes]], object]
"""Sends a message to the page: JSON and buffers."""


class Conversation:
    """Answers to the messages of one widget. A separate thread runs the model, so that messages can stop it.

    Args:
        session: The model.
        send: Sends a message to the page.
    """

    def __init__(self, session: Session, send: SendMessage) -> None:
        self._session, self._send = session, send
        self._thread = ThreadPoolExecutor(1, "saliency")
        self._stops: dict[str, Stop] = {}

    def receive(self, widget: object, message: PageAnswer, buffers: Sequence[Any]) -> None:
        """Answer a message in the thread of the model; the message "cancel" stops the answers to another message."""
        number, name = message["id"], message["name"]
        if name == "cancel":
            if number in self._stops:
                self._stops[number].set()
            return
        self._stops[number] = Stop()
        self._thread.submit(self._answer, number, message, buffers)

    def _answer(self, number: str, message: PageAnswer, buffers: Sequence[Any]) -> None:
        session, body, check = self._session, message["body"], self._stops[number].check

        def send(answer: PageAnswer) -> None:
            """Send the bytes of a map or of labels as a buffer."""
            part = next((name for name in ("map", "labels") if name in answer), None)
            if part is None:
                self._send({"id": number, "answer": answer}, [])
            else:
                plane = {key: value for key, value in answer[part].items() if key != "values"}
                self._send({"id": number, "answer": {**answer, part: plane}}, [answer[part]["values"]])

        def send_file(content: bytes | str, kind: str) -> None:
            self._send({"id": number, "type": kind}, [content.encode() if isinstance(content, str) else content])

        try:
            check()
            match message["name"]:
                case "about":
                    send(session.about())
                case "image":
                    image = bytes(buffers[0]) if buffers else body["index"]
                    replaced = body.get("replaced"), int(body.get("input", 0))
                    send(session.open(image, message.get("file") or "image", *replaced))
                case "picture":
                    send_file(session.picture(body["image"], body["input"]), "image/jpeg")
                case "thumbnail":
                    send_file(session.thumbnail(body["index"]), "image/jpeg")
                case "explain":
                    session.explain(body, send, check)
                case "trust":
                    send(session.trust(body, check))
                case "save":
                    saved = session.save(body, check)
                    send_file(saved, "text/plain" if isinstance(saved, str) else "image/png")
            self._send({"id": number, "end": True}, [])
        except StoppedQuestion:
            pass
        except USER_CODE_ERRORS as error:  # any error is the answer to this message
            self._send({"id": number, **error_columns(error)}, [])
        finally:
            del self._stops[number]


def explore(
    model: str | nn.Module = "efficientnet_lite0",
    images: ImagesLike | Mapping[Any, Any] | None = None,
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
) -> Any:
    """Show the explorer in a notebook: Jupyter, VS Code, Colab and marimo.

    Show the page of `saliency serve`, with the model in this process and without network. Return the widget, an
    `anywidget.AnyWidget`; a notebook shows the widget as the last value of a cell.

    Args:
        model: A name that `saliency.load` accepts, or a model, which stays unchanged.
        images: A folder, an image or a list of images to offer; by default a sample photo. Other images can be
            dropped on the page. For a model with several inputs, a mapping of the inputs of one case, as for
            `Attribution.attribute`, or of a folder or file for each input.
        method: The method that the page begins with.
        layer: The layer that the page begins with; None for the default of each method.
        options: Options of the methods, applied to each method that has them.
        weights: As for `saliency.load`.
        preprocess: Preprocessing of the images; by default the model's.
        categories: Class names; by default the model's.
        whole: Whether the model sees the whole image, as for every method.
        device: As for `saliency.batch`; one device.
        compile: Whether the method that the page begins with is compiled before, see `Attribution.compile`.

    Raises:
        DependencyError: anywidget is not installed.
        SaliencyError: The model, the method or an option is invalid.
    """
    anywidget = optional_import("anywidget", "notebook", "saliency.explore")
    session = Session(NetworkOptions.of({**locals(), "methods": method}), images)
    content = {"_esm": widget_module(), "__repr__": lambda widget: INSTEAD}
    widget: Any = type("ExplorerWidget", (anywidget.AnyWidget,), content)()
    widget.on_msg(Conversation(session, widget.send).receive)
    return widget
