"""Every torchvision classifier and one timm network of each family: is guided backpropagation exact, or refused?

Random weights, one image. For each network: guided backpropagation against the independent reference of the tests, the
layer that Grad-CAM finds by itself and whether its map is finite and varies, and whether the model is left as it was.

    python -m benchmarks.zoo                    all of them; the table goes to benchmarks/results/zoo.md
    python -m benchmarks.zoo resnet18 beit      some of them, printed
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn

import saliency
from tests.reference import error, reference

RESULTS = Path(__file__).parent / "results" / "zoo.md"

# A network of each family that is quick to build, told by the size in its name.
SMALL = ("atto", "femto", "pico", "nano", "xxs", "xxtiny", "_xs", "tiny", "_t", "mini", "_s", "small", "_0", "18", "26")


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one network."""

    name: str
    guided: str
    coverage: str
    layer: str
    cam: str
    untouched: bool
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every promise was kept: exact or refused with a reason, a map that varies, an untouched model."""
        return (
            self.guided.startswith(("exact", "refused", "warned")) and self.cam.startswith("varies") and self.untouched
        )


def torchvision_names() -> list[str]:
    """Every classifier of torchvision."""
    return [f"torchvision/{name}" for name in torchvision.models.list_models(module=torchvision.models)]


def timm_names() -> list[str]:
    """One network of each of timm's families."""
    names = []
    for family in timm.list_modules():
        members = timm.list_models(module=family)
        if members:
            small = [name for word in SMALL for name in members if word in name]
            names.append(f"timm/{(small or sorted(members, key=len))[0]}")
    return names


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A network with random weights that carry signal, and an image for it."""
    library, _, bare = name.partition("/")
    model: Any
    torch.manual_seed(0)
    if library == "torchvision":
        options = {"init_weights": False} if bare in ("googlenet", "inception_v3") else {}
        model = torchvision.models.get_model(bare, weights=None, **options)
        whole = (3, 224, 224)
    else:
        model = timm.create_model(bare, pretrained=False)
        whole = tuple(model.pretrained_cfg["input_size"])
    model.eval()
    x = torch.randn(1, *smallest(model, whole), generator=torch.Generator().manual_seed(1))
    awaken(model, x)
    return model.eval(), x


def smallest(model: nn.Module, whole: tuple[int, ...]) -> tuple[int, ...]:
    """128 pixels, where the network takes them; else its own input size."""
    small = (whole[0], min(whole[1], 128), min(whole[2], 128))
    try:
        with torch.no_grad():
            model(torch.zeros(1, *small))
    except (AssertionError, RuntimeError, ValueError):
        return whole
    return small


def awaken(model: nn.Module, x: Tensor) -> None:
    """Give zero heads weights and batch norms the statistics of noise: else random networks are silent or burst."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear | nn.Conv2d) and isinstance(weight, Tensor) and not weight.any():
            nn.init.normal_(weight, std=0.02)
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    try:
        with torch.no_grad():
            model.eval()
            for norm in norms:
                norm.train()
            model(torch.randn(4, *x.shape[1:], generator=torch.Generator().manual_seed(2)))
    except (RuntimeError, ValueError):
        pass  # a norm over single values cannot be given statistics; the network is judged as it is
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def fingerprint(model: nn.Module) -> list[object]:
    """Everything of a model that a call could leave changed."""
    marks: list[object] = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        data = tensor.detach().contiguous().view(-1).numpy().tobytes()
        marks.append((name, id(tensor), tensor._version, tensor.requires_grad, tensor.grad is None, zlib.crc32(data)))
    for name, module in model.named_modules():
        hooks = [len(value) for key, value in vars(module).items() if "hook" in key and hasattr(value, "__len__")]
        marks.append((name, module.training, hooks))
    return marks


def judge(name: str) -> Row:
    """The row of one network."""
    start = time.perf_counter()
    model, x = build(name)
    before = fingerprint(model)
    guided, coverage = judge_guided(model, x)
    layer, cam = judge_cam(model, x)
    return Row(name, guided, coverage, layer, cam, fingerprint(model) == before, time.perf_counter() - start)


def judge_guided(model: nn.Module, x: Tensor) -> tuple[str, str]:
    """Exact, warned and exact, refused with the reason, or WRONG."""
    target = int(model(x).argmax())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", saliency.SaliencyWarning)
        try:
            explanation = saliency.GuidedBackprop(model).attribute(x, target)
        except saliency.SaliencyError as refusal:
            return f"refused: {refusal}", ""
    expected = reference(model, x, target, "guided_backprop")
    assert explanation.coverage is not None
    told = "; ".join(str(each.message) for each in caught if issubclass(each.category, saliency.SaliencyWarning))
    counted = sum(explanation.coverage.rewritten.values()) == sum(expected.calls.values())
    off = error(explanation.values, expected.values)
    if torch.equal(explanation.values, expected.values) and counted:
        word = "exact"
    elif off < 1e-5 and counted:
        word = f"exact to {off:.0e}"
    else:
        word = f"WRONG by {off:.1e}, {sum(expected.calls.values())} calls"
    return (f"warned ({told}), {word}" if told and word.startswith("exact") else word), str(explanation.coverage)


def judge_cam(model: nn.Module, x: Tensor) -> tuple[str, str]:
    """The layer that is found, and whether the map varies."""
    try:
        explanation = saliency.GradCAM(model).attribute(x)
    except saliency.SaliencyError as refusal:
        return "", f"refused: {refusal}"
    values = explanation.values
    varies = bool(values.isfinite().all()) and float(values.amax() - values.amin()) > 0
    return str(explanation.layer), f"varies, {values.shape[-2]}x{values.shape[-1]}" if varies else "CONSTANT"


def rows(names: list[str]) -> Iterator[Row]:
    """A row per network, as they come; a network that fails is a row too."""
    for name in names:
        try:
            yield judge(name)
        except Exception as error:  # noqa: BLE001 - the table must hold every network, whatever it does
            yield Row(name, f"FAILED: {type(error).__name__}: {error}"[:300].replace("\n", " "), "", "", "", False, 0.0)
        gc.collect()


def table(found: list[Row]) -> str:
    """The rows in Markdown."""
    exact = sum(row.guided.startswith(("exact", "warned")) for row in found)
    refused = sum(row.guided.startswith("refused") for row in found)
    head = [
        "# Guided backpropagation and Grad-CAM on every architecture",
        "",
        f"Made by `make zoo` with torch {torch.__version__}, torchvision {torchvision.__version__},",
        f"timm {timm.__version__}.",
        f"{len(found)} networks with random weights: guided backpropagation is exact on {exact}, refused with the",
        f"reason on {refused}, wrong or failed on {len(found) - exact - refused}.",
        f"Every promise is kept on {sum(row.passed for row in found)}.",
        "",
        "| network | guided backpropagation | coverage | layer found | map | untouched |",
        "|---|---|---|---|---|---|",
    ]
    body = [
        f"| {row.name} | {row.guided} | {row.coverage} | {row.layer} | {row.cam} | {'yes' if row.untouched else 'NO'} |"
        for row in found
    ]
    return "\n".join(head + body) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Judge the networks and write or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names, or parts of names; all by default")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    everything = torchvision_names() + timm_names()
    names = [name for name in everything if not options.names or any(each in name for each in options.names)]
    found = []
    for row in rows(names):
        found.append(row)
        print(f"{'ok ' if row.passed else 'BAD'} {row.name:45s} {row.seconds:6.1f} s  {row.guided[:70]}", flush=True)
    if options.names:
        print(table(found))
    else:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(table(found))
        print(f"{sum(row.passed for row in found)} of {len(found)} networks passed; the table is in {RESULTS}")


if __name__ == "__main__":
    main()
