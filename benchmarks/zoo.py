"""Check guided backpropagation and Grad-CAM on every torchvision classifier and one network of each timm family.

The networks have random weights, and explain one image. Guided backpropagation must equal the reference of the tests,
or be refused. Grad-CAM must find a layer, and its map must be finite and vary. The model must not change.

    python -m benchmarks.zoo                    check all networks, and write benchmarks/results/zoo.md
    python -m benchmarks.zoo resnet18 beit      check some networks, and print the table
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

# Parts of names of small networks, which are quick to build.
SMALL = ("atto", "femto", "pico", "nano", "xxs", "xxtiny", "_xs", "tiny", "_t", "mini", "_s", "small", "_0", "18", "26")


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one network."""

    name: str
    guided: str
    coverage: str
    layer: str
    cam: str
    untouched: bool
    seconds: float

    @property
    def passed(self) -> bool:
        """Return whether guided backpropagation is exact or refused, the map varies, and the model is unchanged."""
        return (
            self.guided.startswith(("exact", "refused", "warned")) and self.cam.startswith("varies") and self.untouched
        )


def torchvision_names() -> list[str]:
    """Return the names of all classifiers of torchvision."""
    return [f"torchvision/{name}" for name in torchvision.models.list_models(module=torchvision.models)]


def timm_names() -> list[str]:
    """Return the name of one network of each timm family, a small one if possible."""
    names = []
    for family in timm.list_modules():
        members = timm.list_models(module=family)
        if members:
            small = [name for word in SMALL for name in members if word in name]
            names.append(f"timm/{(small or sorted(members, key=len))[0]}")
    return names


def build(name: str) -> tuple[nn.Module, Tensor]:
    """Build a network with usable random weights, and an input for it."""
    library, _, bare = name.partition("/")
    model: Any
    torch.manual_seed(0)
    if library == "torchvision":
        options = {"init_weights": False} if bare in ("googlenet", "inception_v3") else {}
        model = torchvision.models.get_model(bare, weights=None, **options)
        full_size = (3, 224, 224)
    else:
        model = timm.create_model(bare, pretrained=False)
        full_size = tuple(model.pretrained_cfg["input_size"])
    model.eval()
    x = torch.randn(1, *smallest(model, full_size), generator=torch.Generator().manual_seed(1))
    make_usable(model, x)
    return model.eval(), x


def smallest(model: nn.Module, full_size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the input size with edges of at most 128 pixels if the network accepts it, else `full_size`."""
    small = (full_size[0], min(full_size[1], 128), min(full_size[2], 128))
    try:
        with torch.no_grad():
            model(torch.zeros(1, *small))
    except (AssertionError, RuntimeError, ValueError):
        return full_size
    return small


def make_usable(model: nn.Module, x: Tensor) -> None:
    """Replace zero weights and set the statistics of batch norms, so that outputs neither vanish nor explode."""
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
        pass  # a norm over single values has no statistics; the network is checked unchanged
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def fingerprint(model: nn.Module) -> list[object]:
    """Return the state of a model that a call might change."""
    state: list[object] = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        data = tensor.detach().contiguous().view(-1).numpy().tobytes()
        state.append((name, id(tensor), tensor._version, tensor.requires_grad, tensor.grad is None, zlib.crc32(data)))
    for name, module in model.named_modules():
        hooks = [len(value) for key, value in vars(module).items() if "hook" in key and hasattr(value, "__len__")]
        state.append((name, module.training, hooks))
    return state


def judge(name: str) -> Row:
    """Check one network."""
    start = time.perf_counter()
    model, x = build(name)
    before = fingerprint(model)
    guided, coverage = judge_guided(model, x)
    layer, cam = judge_cam(model, x)
    return Row(name, guided, coverage, layer, cam, fingerprint(model) == before, time.perf_counter() - start)


def judge_guided(model: nn.Module, x: Tensor) -> tuple[str, str]:
    """Return "exact", "warned", "refused" or "WRONG" with details, and the coverage."""
    target = int(model(x).argmax())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", saliency.SaliencyWarning)
        try:
            explanation = saliency.GuidedBackprop(model).attribute(x, target)
        except saliency.SaliencyError as refusal:
            return f"refused: {refusal}", ""
    expected = reference(model, x, target, "guided_backprop")
    assert explanation.coverage is not None
    messages = "; ".join(str(entry.message) for entry in caught if issubclass(entry.category, saliency.SaliencyWarning))
    counted = sum(explanation.coverage.rewritten.values()) == sum(expected.calls.values())
    difference = error(explanation.values, expected.values)
    if torch.equal(explanation.values, expected.values) and counted:
        word = "exact"
    elif difference < 1e-5 and counted:
        word = f"exact to {difference:.0e}"
    else:
        word = f"WRONG by {difference:.1e}, {sum(expected.calls.values())} calls"
    return (f"warned ({messages}), {word}" if messages and word.startswith("exact") else word), str(
        explanation.coverage
    )


def judge_cam(model: nn.Module, x: Tensor) -> tuple[str, str]:
    """Return the default layer, and whether the map varies."""
    try:
        explanation = saliency.GradCAM(model).attribute(x)
    except saliency.SaliencyError as refusal:
        return "", f"refused: {refusal}"
    values = explanation.values
    varies = bool(values.isfinite().all()) and float(values.amax() - values.amin()) > 0
    return str(explanation.layer), f"varies, {values.shape[-2]}x{values.shape[-1]}" if varies else "CONSTANT"


def rows(names: list[str]) -> Iterator[Row]:
    """Yield a row per network, also if it fails."""
    for name in names:
        try:
            yield judge(name)
        except Exception as error:  # noqa: BLE001 - the table has every network, whatever it raises
            yield Row(name, f"FAILED: {type(error).__name__}: {error}"[:300].replace("\n", " "), "", "", "", False, 0.0)
        gc.collect()


def table(results: list[Row]) -> str:
    """Return the Markdown page with all rows."""
    exact = sum(row.guided.startswith(("exact", "warned")) for row in results)
    refused = sum(row.guided.startswith("refused") for row in results)
    head = [
        "# Guided backpropagation and Grad-CAM on every architecture",
        "",
        f"Generated by `make zoo` with torch {torch.__version__}, torchvision {torchvision.__version__},",
        f"timm {timm.__version__}.",
        f"{len(results)} networks with random weights: guided backpropagation is exact on {exact}, refused with the",
        f"reason on {refused}, wrong or failed on {len(results) - exact - refused}.",
        f"All checks pass on {sum(row.passed for row in results)}.",
        "",
        "| network | guided backpropagation | coverage | default layer | map | model unchanged |",
        "|---|---|---|---|---|---|",
    ]
    body = [
        f"| {row.name} | {row.guided} | {row.coverage} | {row.layer} | {row.cam} | {'yes' if row.untouched else 'NO'} |"
        for row in results
    ]
    return "\n".join(head + body) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Check the networks, and write or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names or parts of names (default: all networks)")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    everything = torchvision_names() + timm_names()
    names = [name for name in everything if not options.names or any(part in name for part in options.names)]
    results = []
    for row in rows(names):
        results.append(row)
        print(f"{'ok ' if row.passed else 'BAD'} {row.name:45s} {row.seconds:6.1f} s  {row.guided[:70]}", flush=True)
    if options.names:
        print(table(results))
    else:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(table(results))
        print(f"{sum(row.passed for row in results)} of {len(results)} networks passed; the table is in {RESULTS}")


if __name__ == "__main__":
    main()
