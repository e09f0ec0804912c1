"""The promises of the screen: a table that fits a terminal, whole lines in a pipe, warnings in one line."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.cells import cell_len
from rich.text import Text

from saliency import Explanation, GradCAM, box, text
from saliency.cli import main
from saliency.cli.console import Screen, one_line
from saliency.errors import SaliencyError, SaliencyWarning, visible
from saliency.io.preprocess import scaled_grey
from saliency.metrics import measure
from saliency.model.call import name_subjects
from saliency.targets.classes import class_index, class_scores
from saliency.testing import images, tiny_model
from tests.batchwork import forked
from tests.commandline import copies, started


def run_on_terminal(terminal: str, words: list[str], folder: Path | None) -> None:
    """Run a command whose three streams are a terminal, and end the process."""
    device = os.open(terminal, os.O_RDWR)
    for stream in range(3):
        os.dup2(device, stream)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        os.environ.pop(name, None)
    os.environ["TERM"] = "xterm-256color"
    os.chdir(folder or ".")
    sys.exit(main(words))


def under_terminal(columns: int, *words: object, folder: Path | None = None) -> str:
    """Return what a command prints on a terminal of so many columns, in a process that has imported torch before."""
    pty = pytest.importorskip("pty")
    import fcntl
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = forked(run_on_terminal, os.ttyname(slave), [str(word) for word in words], folder)
    output = b""
    while select.select([master, process.sentinel], [], [])[0] != [process.sentinel]:
        output += os.read(master, 65536)
    os.close(slave)
    with suppress(OSError):  # the end of a terminal that nobody has open
        while chunk := os.read(master, 65536):
            output += chunk
    os.close(master)
    process.join()
    assert process.exitcode in (0, 1)
    return output.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.slow
def test_a_terminal_shows_a_bar_and_then_a_table_that_fits_it(columns: int, tmp_path: Path) -> None:
    photos = copies(tmp_path, "first.jpg", "second.jpg")
    methods = ("-m", "grad_cam", "grad_cam_plus_plus")
    names = [photo.name for photo in photos]
    shown = under_terminal(columns, "explain", *names, "missing.jpg", "--out", "o", *methods, folder=tmp_path)
    assert re.search("[0-3]/3", shown)  # a fast machine may skip the first states
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.rpartition("\x1b[2K")[2])
    assert max(map(cell_len, text.splitlines())) <= columns
    words = " ".join(text.split())
    assert words.count("first.jpg") == 1
    assert "cannot be read: No such file or directory" in words
    assert words.count("saliency: ") == 1
    assert "4 overlays of 2 images" in words
    assert "o/second.grad_cam_plus_plus.png" in text  # in one piece


@pytest.mark.slow
def test_a_single_photo_needs_no_bar(tmp_path: Path) -> None:
    assert "0/1" not in under_terminal(80, "explain", *copies(tmp_path, "a.jpg"), "--out", tmp_path / "o")


def test_a_pipe_gets_whole_lines_without_colours(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().table(["name", "what"], [["日本", Text("x" * 300, "red")], ["b", ""]])
    assert capsys.readouterr().out.splitlines() == ["name  what", f"日本  {'x' * 300}", "b"]


def test_a_screen_says_each_warning_once_and_names_what_it_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    with screen.collected_warnings():
        for name in ("a.jpg", "a.jpg", "b.jpg"):
            name_subjects(name)
            warnings.warn("flat\n  map", SaliencyWarning, stacklevel=1)
        name_subjects()
        warnings.warn_explicit("Invalid value for VR UI", UserWarning, "valuerep.py", 1, module="pydicom.valuerep")
    assert capsys.readouterr().err == "warning: a.jpg, b.jpg: flat map\n"


@pytest.mark.slow
def test_an_encoding_that_lacks_a_letter_gets_a_question_mark(tmp_path: Path) -> None:
    (photo,) = copies(tmp_path, "œuf.jpg")
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    process = started("explain", photo, "--out", tmp_path / "o", stdout=subprocess.PIPE, env=environment)
    assert b"?uf.jpg" in process.communicate()[0]
    assert process.returncode == 0


def test_visible_names_keep_letters_and_escape_commands() -> None:
    assert visible("Größe 日本.jpg") == "Größe 日本.jpg"
    assert visible("a\tb\u202e.jpg") == "a\\tb\\u202e.jpg"


def test_a_message_names_options_as_the_command_line_takes_them() -> None:
    assert one_line('pass smooth="positive"') == "use --set smooth=positive"
    assert one_line("three other classes: pass others=[...]") == "three other classes: pass --others"
    several = (
        'missing "depth"; pass it as forward_args={"depth": value}, or images by name, {"x": image, "depth": other}'
    )
    assert one_line(several) == 'missing "depth"; pass each input by its name, as in rgb=FILE depth=FILE'
    assert one_line('negative; sign="signed" shows\nthem') == "negative; --set sign=signed shows them"


IMAGES = images(1)


def explain(target: Any = 0, **options: Any) -> Explanation:
    return GradCAM(tiny_model(), **options).attribute(IMAGES, target)


@pytest.mark.parametrize(
    ("call", "cure"),
    [
        (lambda: class_scores(torch.zeros(1, 3, 20)), "; pass --target box:0 for a detector"),
        (lambda: class_scores(torch.zeros(1, 3, 9, 9)), "; pass --target region:CLASS"),
        (lambda: class_scores([{"boxes": torch.zeros(4)}]), ", for example --target box:0"),
        (lambda: class_scores({"scores": torch.zeros(4), "boxes": torch.zeros(4)}), " --target box:0 for a detector"),
        (lambda: class_index("tabby", None), 'pass --classes FILE, or pass --target "text:..." for a text'),
        (lambda: scaled_grey(Image.fromarray(np.zeros((4, 4), np.float32)), None), ", --preprocess range=low,high"),
        (lambda: explain(box(index=0)), "a model that returns boxes, scores and labels as torchvision does"),
        (lambda: explain(text("a cat")), "use a DualEncoder, such as --model open_clip/ViT-B-32"),
        (
            lambda: explain(layer="head"),
            "set layout of the model in its file to a function from this output to maps (N, K, h, w)",
        ),
        (lambda: measure("iou", explain()), "the position of the object: pass --objects FOLDER"),
    ],
)
def test_advice_in_python_is_written_for_the_command_line(call: Callable[[], object], cure: str) -> None:
    with pytest.raises(SaliencyError) as caught:
        call()
    line = one_line(caught.value)
    assert line.endswith(cure)
    assert "saliency." not in line
    assert "lambda" not in line


def test_a_quiet_screen_draws_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(quiet=True).table(["a"], [["b"]])
    assert capsys.readouterr().out == ""


def run_into_closed_pipe(said: str, words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    with Path(said).open("w", encoding="utf-8") as sys.stderr:
        code = main(words)
        print(code, file=sys.stderr)


@pytest.mark.parametrize("words", [["methods"], ["methods", "--json"], ["methods", "rise"]], ids=" ".join)
def test_a_closed_pipe_ends_a_command_silently(tmp_path: Path, words: list[str]) -> None:
    forked(run_into_closed_pipe, str(tmp_path / "said"), words).join()
    assert (tmp_path / "said").read_text("utf-8") == "141\n"
