"""Photos and processes for the tests of the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image

ASSETS = Path(__file__).parents[1] / "assets"
COFFEE = ASSETS / "coffee.jpg"


def copies(folder: Path, *files: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        with Image.open(COFFEE) as picture:
            picture.resize((60, 40)).save(folder / name, format="PNG" if name.endswith("png") else "JPEG")
    return [folder / name for name in files]


def started(*words: object, **options: Any) -> subprocess.Popen[bytes]:
    """The command as a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "saliency", *map(str, words)], **options)  # noqa: S603
