"""Photos and processes for the tests of the command line."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from saliency import zoo
from saliency.cli import main
from tests.batchwork import forked

ASSETS = Path(__file__).parents[1] / "assets"
COFFEE = ASSETS / "coffee.jpg"

loaded = cache(zoo.load)


def share_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """One model of each name for all commands of this process, whose answers are plain text."""
    for module in ("batch.network", "cli.commands"):
        monkeypatch.setattr(f"saliency.{module}.load", loaded)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def copies(folder: Path, *files: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        with Image.open(COFFEE) as picture:
            picture.resize((60, 40)).save(folder / name, format="PNG" if name.endswith("png") else "JPEG")
    return [folder / name for name in files]


def forked_command(said: Path, *words: object) -> Any:
    """Start a command in a process that has imported torch before. What it says goes to a file."""
    return forked(run_command, said, [str(word) for word in words])


def run_command(said: Path, words: list[str]) -> None:
    """Run a command as the program does, and end the process."""
    sys.stdout = sys.stderr = said.open("w", encoding="utf-8")
    sys.argv[1:] = words
    sys.exit(main())


def started(*words: object, **options: Any) -> subprocess.Popen[bytes]:
    """The command as a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "saliency", *map(str, words)], **options)  # noqa: S603
