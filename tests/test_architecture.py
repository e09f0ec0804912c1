"""The shape of the house: imports go down, names are public on purpose, and everything says what it is."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import saliency
from saliency import METHODS, Attribution

HOME = Path(saliency.__file__).parent

# From the bottom up: a package imports from those before it. Inside a package the order is free, without cycles.
LAYERS = [
    "_version",
    "errors",
    "aliases",
    "validation",
    "calls",
    "lazy",
    "tables",
    "frontend",
    "io",
    "hooks",
    "targets",
    "model",
    "attribution",
    "relevance",
    "methods",
    "evaluation",
    "metrics",
    "inspection",
    "render",
    "testbed",
    "zoo",
    "program",
    "batch",
    "explorer",
    "testing",
    "extending",
    "cli",
    "_public",
    "__main__",
]

PUBLIC: list[str] = vars(saliency)["__all__"]
FIRST = [
    *(
        "load",
        "GradCAM",
        "LayerCAM",
        "GuidedBackprop",
        "LRP",
        "AttnLRP",
        "IntegratedGradients",
        "SmoothGrad",
        "Occlusion",
    ),
    *("ODAM", "overlay", "figure", "heatmap", "box", "region", "words", "compare", "trust", "METHODS"),
]


def module_name(path: Path) -> str:
    """The name under `saliency`: "methods.cam"; "" for the package itself."""
    parts = path.relative_to(HOME).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(HOME.rglob("*.py"))}


@cache
def parsed() -> dict[str, ast.Module]:
    """The syntax tree of each module, parsed once."""
    return {name: ast.parse(path.read_text("utf-8")) for name, path in MODULES.items()}


def imports(name: str, *, lazy: bool = True) -> Iterator[str]:
    """The full names of the modules that a module imports; without `lazy`, not those inside functions and for types."""
    package = f"saliency.{name}".rstrip(".")
    if MODULES[name].name != "__init__.py":
        package = package.rpartition(".")[0]
    for node in ast.walk(parsed()[name]) if lazy else at_import(parsed()[name]):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{each.name}" for each in node.names)


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from at_import(node)


def own(imported: str) -> str | None:
    """The module of this package that an import reaches; None for others."""
    if imported != "saliency" and not imported.startswith("saliency."):
        return None
    name = imported.removeprefix("saliency").removeprefix(".")
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def layer(name: str) -> int:
    return LAYERS.index(name.split(".")[0])


def below(name: str) -> set[str]:
    """The modules of this package that a module imports, also inside functions."""
    reached = {own(imported) for imported in imports(name)}
    return {each for each in reached if each not in (None, name)}


def test_every_package_has_its_layer() -> None:
    assert {name.split(".")[0] for name in MODULES if name} == set(LAYERS)


def test_imports_only_go_down() -> None:
    for name in MODULES.keys() - {""}:
        assert_imports_go_down(name)


def assert_imports_go_down(name: str) -> None:
    for imported in below(name):
        assert imported, f"{name} imports from the package itself"
        assert layer(imported) <= layer(name), f"{name} imports up: {imported}"


def test_no_module_imports_itself_through_others() -> None:
    after: dict[str, set[str]] = {name: below(name) - {""} for name in MODULES if name}
    while leaves := [name for name, rest in after.items() if not rest & after.keys()]:
        for name in leaves:
            del after[name]
    assert not after, f"a cycle among {sorted(after)}"


def test_the_walk_sees_an_import_that_goes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source, message in (
        ("errors", "from .render.overlay import overlay", "errors imports up"),
        ("errors", "import saliency.render.overlay", "errors imports up"),
        ("errors", "def f():\n    from saliency import overlay", "errors imports"),
        ("methods.cam", "from ..render.overlay import overlay", r"methods\.cam imports up"),
    ):
        monkeypatch.setitem(parsed(), name, ast.parse(source))
        with pytest.raises(AssertionError, match=message):
            assert_imports_go_down(name)


def test_the_walk_sees_a_judgement_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("evaluation.trust", "evaluation.ledger", "inspection.statistics"):
        monkeypatch.setitem(parsed(), name, ast.parse("def f():\n    from ..render.figure import new_figure"))
        with pytest.raises(AssertionError, match=f"{name} imports up"):
            assert_imports_go_down(name)


def test_the_walk_sees_a_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parsed(), "methods.cam", ast.parse("from .gradient import VanillaGradient"))
    monkeypatch.setitem(parsed(), "methods.gradient", ast.parse("def f():\n    from .cam import GradCAM"))
    with pytest.raises(AssertionError, match=r"a cycle among .*methods\.cam"):
        test_no_module_imports_itself_through_others()


def test_nothing_below_the_drawing_draws() -> None:
    drawing = {"matplotlib", "cv2", "PIL.ImageDraw", "PIL.ImageFont"}
    below_drawing = [name for name in MODULES if name and layer(name) < LAYERS.index("render")]
    drawn = {
        (name, imported)
        for name in below_drawing
        for imported in imports(name)
        if imported in drawing or imported.split(".")[0] in drawing
    }
    assert not drawn


def test_drawing_imports_no_method() -> None:
    for name in MODULES:
        if name.startswith("render"):
            assert not [each for each in below(name) if each.startswith("methods")], name


def test_drawing_an_explanation_loads_no_method_and_no_metric() -> None:
    loaded_by(
        "import sys, torch, saliency\nfrom PIL import Image\nfrom saliency.io.geometry import Frame\n"
        "from saliency.render import figure, overlay, results, sheet\n"
        "from saliency.targets.question import QuestionFacts\n"
        "facts = {'input_size': (9, 9), 'method': 'm', 'title': 'M', 'units': 'score', 'sign': 'signed'}\n"
        "facts['frames'] = (Frame(Image.new('RGB', (9, 9)), (0.0, 0.0, 9.0, 9.0)),)\n"
        "e = saliency.Explanation(torch.rand(1, 1, 9, 9), torch.ones(1), questions=(QuestionFacts('cat'),), **facts)\n"
        "assert len(saliency.figure([e]).axes) == 2\n"
        "loaded = {name.rpartition('.')[0] for name in sys.modules}\n"
        "assert not {'saliency.methods', 'saliency.evaluation', 'saliency.inspection'} & loaded, loaded"
    )


HEAVY = (
    *("torchvision", "timm", "huggingface_hub", "matplotlib", "cv2", "skimage", "sklearn", "scipy"),
    *("rich", "pandas", "ray", "open_clip", "transformers"),
)


def test_what_is_heavy_is_imported_where_it_is_used() -> None:
    for name in MODULES:
        if not name or layer(name) < LAYERS.index("cli"):
            assert not {imported.split(".")[0] for imported in imports(name, lazy=False)} & set(HEAVY), name


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after some code."""
    report = "\nimport sys\nprint('\\n'.join(sorted({name.split('.')[0] for name in sys.modules})))"
    result = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=True)  # noqa: S603
    return set(result.stdout.splitlines())


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = loaded_by("import saliency")
    assert not loaded & {*HEAVY, "numpy", "PIL"}
    assert "saliency" in loaded


@pytest.mark.slow
def test_every_public_name_together_load_nothing_heavy() -> None:
    names = "for name in saliency.__all__: getattr(saliency, name)"
    loaded = loaded_by(f"import saliency, saliency.inspection.statistics\n{names}")
    assert not loaded & set(HEAVY)
    assert "torch" in loaded


def test_the_help_of_the_command_line_loads_no_torch() -> None:
    code = "import saliency.cli\ntry: saliency.cli.main(['--help'])\nexcept SystemExit: pass"
    assert not loaded_by(code) & {"torch", "numpy", *HEAVY} - {"rich"}


# Private names of PyTorch.

PRIVATE_NAMES_OF_TORCH = "hooks.autograd_graph"
# Operators of the documented "Core ATen IR".
CORE_OPERATORS = {"_native_batch_norm_legit_no_training", "_to_copy"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


NODE: Any = torch.relu(torch.ones(1, requires_grad=True)).grad_fn
TORCH_ATTRIBUTES = {
    name
    for thing in (torch.Tensor, torch.nn.Module(), NODE, torch.autograd.Function, torch.UntypedStorage, torch._C)
    for name in dir(thing)
    if is_private(name)
} | {"_schema", "_wrapped_node"}


def private_names_of_torch(tree: ast.AST) -> Iterator[str]:
    """The private names of PyTorch that a module uses: imports, attributes and strings that name an attribute."""
    of_torch = {"torch", "nn", "F", "aten"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for each in node.names:
                full = f"{module}.{each.name}".strip(".")
                if full.split(".")[0] == "torch" and any(map(is_private, full.split("."))):
                    yield full
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in CORE_OPERATORS:
            root = node.value
            is_own = isinstance(root, ast.Name) and root.id in ("self", "cls")
            while isinstance(root, ast.Attribute):
                root = root.value
            is_of_torch = isinstance(root, ast.Name) and root.id in of_torch
            if is_of_torch or (not is_own and is_attribute_of_torch(node.attr)):
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_attribute_of_torch(node.value):
            yield repr(node.value)


def is_attribute_of_torch(name: str) -> bool:
    return name in TORCH_ATTRIBUTES or name.startswith(("_saved_", "torch._"))


def test_private_names_of_torch_are_in_one_file() -> None:
    for name in MODULES.keys() - {PRIVATE_NAMES_OF_TORCH}:
        assert not list(private_names_of_torch(parsed()[name])), name


def test_the_memory_of_tensors_is_tracked_by_one_mode() -> None:
    for name in MODULES.keys() - {PRIVATE_NAMES_OF_TORCH}:
        assert not [each for each in imports(name) if each.endswith("StorageWeakRef")], name


def test_the_check_sees_a_private_name_of_torch() -> None:
    for source in (
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "import torch._dynamo",
        "from torch._C import _functorch",
        "from torch.nn.modules.module import _global_forward_hooks",
        "tensor._version",
        "layer._forward_hooks.clear()",
        "node._saved_result",
        "getattr(node, f'_saved_{name}')",
        "torch._C._current_graph_task_id()",
        "torch.ops.aten._scaled_dot_product_attention_math(x)",
        "getattr(layer, '_modules')",
    ):
        assert list(private_names_of_torch(ast.parse(source))), source


# Names.


def test_the_names_are_listed_by_importance_and_the_other_methods_last() -> None:
    listed = vars(saliency)["__dir__"]()  # `dir` sorts; IPython does not
    assert listed == PUBLIC
    assert listed[: len(FIRST)] == FIRST
    others = [cls.__name__ for cls in METHODS.values() if cls.__name__ not in FIRST]
    assert sorted(listed[-len(others) :]) == sorted(others)


def test_all_is_what_is_visible() -> None:
    assert sorted(PUBLIC) == sorted(name for name in dir(saliency) if not name.startswith("_") or name == "__version__")
    assert len(set(PUBLIC)) == len(PUBLIC)
    for name in PUBLIC:
        assert getattr(saliency, name) is not None


def test_a_name_for_authors_of_methods_or_of_an_error_is_not_listed_twice_and_answers_with_its_module() -> None:
    for module in (saliency.extending, saliency.errors):
        names: list[str] = vars(module)["__all__"]
        assert not set(names) & set(PUBLIC)
        for name in names:
            assert getattr(module, name) is not None
            with pytest.raises(AttributeError, match=rf'saliency has no "{name}"; it is {module.__name__}\.{name}$'):
                getattr(saliency, name)
    with pytest.raises(AttributeError, match='extending has no "WeightedCam"; did you mean "WeightedCAM"'):
        saliency.extending.WeightedCam  # type: ignore[attr-defined] # noqa: B018


def test_the_common_type_is_the_only_base_class_on_top() -> None:
    bases = {name for name in PUBLIC if isinstance(cls := getattr(saliency, name), type) and inspect.isabstract(cls)}
    assert bases == {"Attribution"}


def test_every_public_name_shadows_no_module() -> None:
    shadowed = set(PUBLIC) & {name for name in MODULES if "." not in name}
    assert all(getattr(saliency, name) is importlib.import_module(f"saliency.{name}") for name in shadowed)


def test_a_package_with_public_functions_needs_no_import_of_its_own() -> None:
    packages = {"batch", "errors", "extending", "inspection", "metrics", "relevance", "testbed", "testing", "zoo"}
    assert packages <= set(PUBLIC)


@pytest.mark.parametrize(
    "public", ["", ".extending", ".metrics", ".relevance", ".testbed"], ids=lambda name: f"saliency{name}"
)
def test_the_stub_names_what_it_takes_and_from_where(public: str) -> None:
    listing = importlib.import_module(f"saliency{public}")
    package = listing.__package__
    stub = ast.parse(Path(str(listing.__file__)).with_suffix(".pyi").read_text("utf-8"))
    for node in stub.body:
        assert isinstance(node, ast.ImportFrom)
        module = importlib.import_module(f"{package}.{node.module}" if node.module else "saliency")
        for each in node.names:
            assert each.asname == each.name
            public = getattr(listing, each.name)  # wraps the function where it is defined
            assert getattr(module, each.name) is public


def test_every_method_is_public() -> None:
    assert METHODS
    for name, cls in METHODS.items():
        assert cls.name == name
        assert getattr(saliency, cls.__name__) is cls
        assert cls.__module__.startswith("saliency.methods.")


def test_every_named_class_in_the_methods_is_registered() -> None:
    for module_path in MODULES:
        if not module_path.startswith("methods."):
            continue
        module = importlib.import_module(f"saliency.{module_path}")
        for cls in vars(module).values():
            if inspect.isclass(cls) and issubclass(cls, Attribution) and cls.__dict__.get("name"):
                assert METHODS[cls.name] is cls


def test_every_error_is_public() -> None:
    errors = saliency.errors
    named = {
        name
        for name, each in vars(errors).items()
        if inspect.isclass(each) and issubclass(each, errors.SaliencyError | errors.SaliencyWarning)
    }
    assert named == set(vars(errors)["__all__"])
    for name in named - {"SaliencyWarning"}:
        assert name in (errors.__doc__ or "")


# Words.


def test_everything_public_says_what_it_is() -> None:
    for name, tree in parsed().items():
        assert ast.get_docstring(tree), f"{name} has no docstring"
        for node in public(tree):
            doc = ast.get_docstring(node)
            assert doc, f"{name}.{node.name} has no docstring"
            # One sentence first, on its own.
            assert doc.split("\n\n")[0].rstrip().endswith((".", ":", "?")), f"{name}.{node.name}: {doc.splitlines()[0]}"


def public(
    tree: ast.Module | ast.ClassDef,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if any(ast.unparse(each) == "overload" for each in node.decorator_list):
            continue
        yield node
        if isinstance(node, ast.ClassDef):
            yield from public(node)


@cache
def calls() -> list[tuple[str, ast.Call, str]]:
    """All calls: the module, the node, and the text of what is called."""
    nodes = ((name, node) for name, tree in parsed().items() for node in ast.walk(tree))
    return [(name, node, ast.unparse(node.func)) for name, node in nodes if isinstance(node, ast.Call)]


def test_the_library_prints_nothing_and_runs_no_text() -> None:
    for name, _, called in calls():
        assert called not in ("breakpoint", "exec", "eval"), name
        assert called != "print" or name.startswith("cli"), name


CONSTRUCTORS = (
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones"),
    *("rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
)
WHOLE_OR_AS_GIVEN = ("arange", "as_tensor", "asarray", "randint", "randperm", "tensor")


def test_every_new_tensor_names_its_device_and_type() -> None:
    """The defaults of `torch.set_default_device` and `torch.set_default_dtype` are for the user's tensors."""
    for name, node, called in calls():
        if called not in [f"torch.{constructor}" for constructor in CONSTRUCTORS]:
            continue
        lacking = {"device", "dtype"} - {keyword.arg for keyword in node.keywords}
        if called.removeprefix("torch.") in WHOLE_OR_AS_GIVEN:
            lacking -= {"dtype"}
        assert not lacking, f"{name}, line {node.lineno}: {ast.unparse(node)} does not name its {lacking}"


def test_the_model_is_evaluated_by_its_lease_alone_and_never_by_backward() -> None:
    """No other code calls `.eval()`, none `.backward()`, and the manager alone registers hooks."""
    for name, node, _ in calls():
        if not isinstance(node.func, ast.Attribute) or name.startswith("testing"):
            continue
        method = node.func.attr
        assert method != "backward", name
        assert method != "eval" or name == "zoo", name
        assert not re.fullmatch("register_.*_hook", method) or name == "hooks.manager", name
