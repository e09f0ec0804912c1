"""Check `saliency.export` on torchvision and timm networks: programs of PyTorch, and ONNX files in ONNX Runtime.

The networks have random weights and small images. A program must give the map of `attribute` for one image and for
three, within 1e-5 of its largest value. Or the method is refused with the reason.

    python -m benchmarks.zoo_export             check all, and write benchmarks/results/zoo_export.md; re-run to resume
    python -m benchmarks.zoo_export resnet vit lrp  check methods on networks with such a part in their name, and
                                                print the table
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import timm
import torch
import torchvision
from torch import Tensor, nn

import saliency
from benchmarks.zoo import make_usable
from saliency.program.export import captured, write_onnx
from tests.reference import error

RESULTS = Path(__file__).parent / "results" / "zoo_export.md"
PROGRESS = Path(__file__).parents[1] / "build" / "zoo_export.jsonl"
MAX_DIFFERENCE = 1e-5
ROUNDING = torch.finfo(torch.float32).eps
SEEDS = range(8)
EDGES = (64, 96, 128, 224, 256)

# The programs of the networks of the first group are also written as ONNX files, those of relevance only for the third.
ONNX = """torchvision/resnet18 torchvision/squeezenet1_1 torchvision/mobilenet_v2 torchvision/mobilenet_v3_small
    torchvision/mnasnet0_5 torchvision/shufflenet_v2_x0_5 torchvision/alexnet timm/resnet10t timm/regnetx_002
    timm/convnext_atto timm/vit_tiny_patch16_224 timm/test_vit timm/test_convnext timm/test_efficientnet
    timm/test_resnet timm/test_nfnet timm/test_byobnet timm/lcnet_050 timm/mobilenetv4_conv_small
    timm/efficientnet_lite0"""
PYTORCH = """torchvision/vgg11 torchvision/googlenet torchvision/densenet121 torchvision/resnext50_32x4d
    torchvision/regnet_y_400mf torchvision/efficientnet_b0 torchvision/convnext_tiny torchvision/swin_t
    torchvision/resnet50 timm/test_coatnet timm/test_maxvit timm/test_mambaout timm/test_vit2 timm/test_vit3
    timm/test_vit_relpos timm/ghostnet_050 timm/repvgg_a0 timm/hardcorenas_a timm/dla34 timm/tinynet_e timm/resnet18d
    timm/seresnet18 timm/mixer_s32_224 timm/deit_tiny_patch16_224 timm/pit_ti_224 timm/poolformer_s12
    timm/swin_tiny_patch4_window7_224 timm/mobileone_s0 timm/fastvit_t8 timm/pvt_v2_b0"""
RELEVANCE = """torchvision/resnet18 torchvision/squeezenet1_1 torchvision/mobilenet_v2 timm/resnet10t timm/convnext_atto
    timm/vit_tiny_patch16_224 timm/test_vit timm/test_convnext timm/test_efficientnet timm/test_resnet"""

Create = Callable[[nn.Module], saliency.Attribution]
METHODS: dict[str, Create] = {
    "grad_cam": saliency.GradCAM,
    "vanilla_gradient": saliency.VanillaGradient,
    "guided_backprop": saliency.GuidedBackprop,
    "integrated_gradients": lambda model: saliency.IntegratedGradients(model, steps=3, progress=False),
    "lrp": saliency.LRP,
    "attn_lrp": saliency.AttnLRP,
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """Return a network with usable random weights, and three images of the smallest size that it takes."""
    library, _, bare = name.partition("/")
    for edge in EDGES:
        torch.manual_seed(0)
        try:
            model = of_timm(bare, edge) if library == "timm" else of_torchvision(bare)
            x = torch.randn(3, 3, edge, edge, generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                model(x)
        except (AssertionError, RuntimeError, ValueError):
            continue
        make_usable(model, x)
        return model.eval(), x
    raise ValueError(f"{name} takes no image of {EDGES}")


def of_timm(name: str, edge: int) -> nn.Module:
    """Return a network of timm for images of one size, if it can be chosen."""
    try:
        model: nn.Module = timm.create_model(name, img_size=edge)
    except TypeError:
        model = timm.create_model(name)
    return model.eval()


def of_torchvision(name: str) -> nn.Module:
    """Return a network of torchvision."""
    options = {"init_weights": False} if name == "googlenet" else {}
    model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    return model.eval()


def pairs() -> list[tuple[str, str]]:
    """Return the networks and methods that are checked: method by method."""
    return [(name, method) for method in METHODS for name in (ONNX + " " + PYTORCH).split()]


def judge(name: str, method: str) -> dict[str, Any]:
    """Return the edge of the images, and the verdicts on the program and on the ONNX file of a method on a network."""
    cell: dict[str, Any] = {"name": name, "method": method, "edge": ""}
    try:
        model, x = build(name)
        cell["edge"] = x.shape[-1]
        files = RELEVANCE if "lrp" in method else ONNX
        cell.update(verdicts(METHODS[method], model, x, name in files.split()))
    except Exception as failure:  # noqa: BLE001 - the table has every network, whatever it raises
        word = "refused" if isinstance(failure, saliency.errors.SaliencyError) else f"FAILED: {type(failure).__name__}"
        cell["onnx" if "pt2" in cell else "pt2"] = f"{word}: {failure}"[:250].replace("\n", " ")
    return cell


def verdicts(create: Create, model: nn.Module, x: Tensor, onnx: bool) -> Iterator[tuple[str, str]]:
    """Yield the verdicts on the program and on the ONNX file."""
    method = create(model)
    maps = {count: saliency.heatmap(method.attribute(x[:count])) for count in (1, 3)}
    exact = create(copy.deepcopy(model).double())
    rounding = partial(rounding_of, method, exact, x, maps)
    program, metadata, _ = captured(method, x[:1])
    run = program.module()
    yield "pt2", compared(maps, lambda count: run(x[:count])[2], rounding)
    if onnx:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            write_onnx(program, path, metadata)
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        run_onnx = lambda count: torch.from_numpy(session.run(["map"], {"image": x[:count].numpy()})[0])  # noqa: E731
        yield "onnx", compared(maps, run_onnx, rounding)


def compared(maps: dict[int, Tensor], run: Callable[[int], Tensor], rounding: Callable[[], float]) -> str:
    """Return "works", "rounded" or "FAILED" with the largest difference for one image and for three."""
    worst = max(error(run(count), expected) for count, expected in maps.items())
    if worst <= MAX_DIFFERENCE:
        return f"works: {worst:.0e}"
    own = rounding()
    return f"{'rounded' if worst <= 2 * own else 'FAILED'}: {worst:.0e} ({own:.0e})"


def rounding_of(method: saliency.Attribution, exact: saliency.Attribution, x: Tensor, maps: dict[int, Tensor]) -> float:
    """Return the largest difference of the maps of `attribute` for images with other last digits, and in float64."""
    copies = [x * (1 + ROUNDING * torch.randn(x.shape, generator=torch.Generator().manual_seed(n))) for n in SEEDS]
    runs = [*((method, other) for other in copies), (exact, x.double())]
    return max(
        error(saliency.heatmap(run.attribute(other[:count])), expected)
        for count, expected in maps.items()
        for run, other in runs
    )


def resumed(pairs: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield a cell for each network and method. The cells of an interrupted run are read."""
    PROGRESS.parent.mkdir(exist_ok=True)
    PROGRESS.touch()
    done = {(cell["name"], cell["method"]): cell for cell in map(json.loads, PROGRESS.read_text().splitlines())}
    for pair in pairs:
        cell = done.get(pair) or judge(*pair)
        if pair not in done:
            with PROGRESS.open("a") as file:
                file.write(json.dumps(cell) + "\n")
        yield cell


def text(cell: dict[str, Any] | None) -> str:
    """Return the largest differences, or the reasons."""
    verdicts = [cell[kind] for kind in ("pt2", "onnx") if kind in cell] if cell else []
    return " / ".join(re.sub("^(works|rounded): |export: ", "", verdict) for verdict in verdicts)


def count(cells: list[dict[str, Any]], method: str, kind: str) -> str:
    """Return how many programs or files of a method have each kind of verdict."""
    found = Counter(cell[kind].partition(":")[0] for cell in cells if cell["method"] == method and kind in cell)
    return " / ".join(str(found[word]) for word in ("works", "rounded", "refused", "FAILED"))


def page(cells: list[dict[str, Any]]) -> str:
    """Return the Markdown page."""
    head = [
        "# Export of networks",
        "",
        f"Generated by `make zoo` with torch {torch.__version__}, torchvision {torchvision.__version__}, timm",
        f"{timm.__version__} and onnxruntime {onnxruntime.__version__}. The networks have random weights.",
        "",
        "A cell has the largest difference between the map of the program and the map of `attribute`, for one image",
        "and for three, as a share of the largest value: of the program in PyTorch, then of the ONNX file in ONNX",
        f"Runtime. It works up to {MAX_DIFFERENCE:.0e}. For a larger difference, the effect of rounding is in",
        "parentheses: the largest difference between the maps of `attribute` for the images, for copies with other",
        "last digits, and in float64. Up to twice this effect, the cell counts as rounded. If a method is",
        "refused, the cell has the reason.",
        "An empty cell was not checked.",
        "",
        "| method | programs: work / rounded / refused / fail | ONNX files: work / rounded / refused / fail |",
        "|---|---|---|",
        *(f"| `{name}` | {count(cells, name, 'pt2')} | {count(cells, name, 'onnx')} |" for name in METHODS),
        "",
        "| network | image | " + " | ".join(f"`{name}`" for name in METHODS) + " |",
        "|---" * (2 + len(METHODS)) + "|",
    ]
    lines = []
    for name in dict.fromkeys(cell["name"] for cell in cells):
        own = {cell["method"]: cell for cell in cells if cell["name"] == name}
        columns = [name, str(next(iter(own.values()))["edge"]), *(text(own.get(method)) for method in METHODS)]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join([*head, *lines]) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Check the networks, and write or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="parts of names of networks, and names of methods (default: all)")
    parts = parser.parse_args(arguments).parts
    warnings.simplefilter("ignore")
    cells = []
    methods = METHODS.keys() & parts or METHODS.keys()
    networks = [part for part in parts if part not in METHODS] or [""]
    chosen = [(name, own) for name, own in pairs() if own in methods and any(part in name for part in networks)]
    for cell in itertools.starmap(judge, chosen) if parts else resumed(chosen):
        cells.append(cell)
        print(*cell.values(), sep=" | ", flush=True)
    if parts:
        print(page(cells))
    else:
        RESULTS.write_text(page(cells))
        PROGRESS.unlink()


if __name__ == "__main__":
    main()
