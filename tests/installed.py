"""Install the wheel into an empty environment, with the core dependencies alone, and use it: `make dist`.

The core dependencies are not downloaded again. They are links to those of this environment, and nothing else of it can
be imported. `pip check` confirms that they satisfy the wheel.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

from saliency.testbed.networks import NETWORKS

USE = """
import importlib.util, pathlib, warnings
import torch
from PIL import Image
import saliency

assert "site-packages" in saliency.__file__, saliency.__file__
for name in ("skimage", "scipy", "timm", "torchvision", "rich", "cv2", "pandas"):
    assert importlib.util.find_spec(name) is None, f"{name} is not a core dependency"
network = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 5),
)
preprocess = saliency.Preprocess(size=(64, 64), mean=(0.5,) * 3, std=(0.5,) * 3)
photo = Image.effect_noise((90, 70), 60).convert("RGB")
for method in (saliency.GradCAM, saliency.GuidedBackprop, saliency.IntegratedGradients):
    explanation = method(network, preprocess=preprocess).attribute(photo, 1)
    drawn = saliency.overlay(explanation)
    assert drawn.size == photo.size and drawn.tobytes() != photo.tobytes()
scenes = saliency.testbed.draw_scenes(1)
explanation = saliency.AttnLRP(saliency.load("shapes_vit")).attribute(scenes.images, int(scenes.labels[0]))
explanation.save("map.safetensors")
assert torch.equal(saliency.Explanation.load("map.safetensors").values, explanation.values)
try:
    saliency.LIME(network, preprocess=preprocess).attribute(photo, 1)
except saliency.errors.DependencyError as error:
    print(error)
import saliency_toolkit
assert saliency_toolkit.GradCAM is saliency.GradCAM
print("saliency", saliency.__version__, "from the wheel explains and draws")
"""


def core_dependencies() -> Iterable[Distribution]:
    """The distributions that the toolkit requires without extras, and those that they require."""
    waiting, seen = [Requirement("saliency-toolkit")], {"saliency-toolkit"}
    while waiting:
        need = waiting.pop()
        found = distribution(need.name)
        for line in found.requires or ():
            further = Requirement(line)
            applies = further.marker is None or any(
                further.marker.evaluate({"extra": extra}) for extra in ("", *need.extras)
            )
            if applies and str(further) not in seen:
                seen.add(str(further))
                waiting.append(further)
        if need.name != "saliency-toolkit":
            yield found


def link(dependencies: Iterable[Distribution], site: Path) -> None:
    """Link what the distributions installed into the site-packages of another environment."""
    for found in dependencies:
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))


def main(folder: Path) -> None:
    """Install and use the wheel in a folder."""
    (wheel,) = folder.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    pages = {"batch/report/page.html", "explorer/page/page.html", "frontend/shared.css", "frontend/sample.jpg"}
    data = {"saliency/py.typed", "saliency/__init__.pyi", *(f"saliency/{page}" for page in pages)}
    weights = {f"saliency/testbed/{name}.safetensors" for name in NETWORKS}
    missing = (data | weights) - names
    if missing:
        sys.exit(f"{wheel} has no {', '.join(sorted(missing))}")
    with tempfile.TemporaryDirectory() as home:
        venv.create(home, with_pip=True)
        python = Path(home, "bin", "python").as_posix()
        (site,) = Path(home).glob("lib/*/site-packages")
        link(core_dependencies(), site)
        for command in (("pip", "install", "--quiet", "--no-index", "--no-deps", wheel.resolve()), ("pip", "check")):
            subprocess.run([python, "-m", *command], check=True)  # noqa: S603
        subprocess.run([python, "-I", "-c", USE], check=True, cwd=home)  # noqa: S603
        subprocess.run([python, "-I", "-m", "saliency", "--version"], check=True, cwd=home)  # noqa: S603


if __name__ == "__main__":
    main(Path(sys.argv[1]))
