"""The package `saliency` under a name of its own: `import saliency_toolkit as saliency`.

PAIR's distribution "saliency" installs files into the same folder. Whichever was installed last, this package loads the
files of the toolkit, under the name `saliency`. Its modules are also those of `saliency`: there is one copy of each.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

CODE = Path(__file__).parent.parent / "saliency"


class _Alias(MetaPathFinder, Loader):
    """Finds `saliency_toolkit.errors` as `saliency.errors`."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(f"saliency.{spec.name.partition('.')[2]}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:  # the import has replaced the spec, which the module's own imports need
            module.__spec__ = module.__spec__.loader_state


def _create(name: str, file: str, folders: list[str] | None = None) -> tuple[ModuleType, Any]:
    """Put an empty module of the toolkit into `sys.modules`, and return it and its loader."""
    spec: Any = spec_from_file_location(name, CODE / file, submodule_search_locations=folders)
    sys.modules[name] = module = module_from_spec(spec)
    return module, spec.loader


is_imported = "saliency._public" in sys.modules  # as `saliency`, which has its right files
if not is_imported:
    for name in [name for name in sys.modules if name.partition(".")[0] == "saliency"]:
        del sys.modules[name]
    package, _ = _create("saliency", "__init__.py", [str(CODE)])
public = import_module("saliency._public")
__all__, __dir__, __getattr__ = public.__all__, public.__dir__, public.__getattr__
if not is_imported:
    vars(package).update(__all__=__all__, __dir__=__dir__, __getattr__=__getattr__)
    metrics, loader = _create("saliency.metrics", "metrics.py")
    loader.exec_module(metrics)
sys.meta_path.append(_Alias())
