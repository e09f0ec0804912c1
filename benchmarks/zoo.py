"""Check methods on every torchvision classifier and one network of each timm family.

The networks have random weights. On one image, guided backpropagation must equal the reference of the tests, or be
refused. Grad-CAM must find a layer, and its map must be finite and vary. On a batch of two images with different
classes, the plain walk must equal the input times the gradient of autograd. The ledgers of the relevance methods must
sum to the scores, and the values of DeepLIFT to their differences from the baseline's scores. Values and ledger must
equal the results for a single image, or the methods be refused. The model must not change.

    python -m benchmarks.zoo                    check all, and write benchmarks/results/zoo.md; re-run to resume
    python -m benchmarks.zoo resnet18 beit      check some networks, and print the table
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn

import saliency
from tests.reference import error, reference
from tests.relevance.plain_walk import PlainWalk

RESULTS = Path(__file__).parent / "results" / "zoo.md"
PROGRESS = Path(__file__).parents[1] / "build" / "zoo.jsonl"

# The relevance methods, the classes that they explain, and the largest error of conservation, relative to the score,
# and of a batch, relative to the largest value. Errors above these are measured again in float64.
RELEVANCE: list[str] = [name for name in ("lrp", "attn_lrp", "deep_lift") if name in saliency.METHODS]
CLASSES = [3, 7]
COUPLED = ("timm/csatv2",)  # its attention multiplies query and key along the batch: only one image is explained
MAX_MISSING = 1e-4
MAX_DIFFERENCE = 1e-3

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
    walk: str
    relevance: dict[str, str]
    untouched: bool
    seconds: float

    @property
    def passed(self) -> bool:
        """Return whether each method is right or refused, the map varies, and the model is unchanged."""
        right = all(verdict.startswith(("conserved", "refused", "warned")) for verdict in self.relevance.values())
        exact = self.guided.startswith(("exact", "refused", "warned")) and self.walk.startswith("equal")
        return right and exact and self.cam.startswith("varies") and self.untouched


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
    """Build a network with usable random weights, and a batch of two images for it."""
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
    x = torch.randn(2, *smallest(model, full_size), generator=torch.Generator().manual_seed(1))
    make_usable(model, x)
    return model.eval(), x


def smallest(model: nn.Module, full_size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first input size that the network accepts: edges of at most 128 pixels, of 112, or `full_size`."""
    for edge in (128, 112):
        small = (full_size[0], min(full_size[1], edge), min(full_size[2], edge))
        try:
            with torch.no_grad():
                model(torch.zeros(1, *small))
        except (AssertionError, RuntimeError, ValueError):
            continue
        return small
    return full_size


def make_usable(model: nn.Module, x: Tensor) -> None:
    """Add noise to all parameters and set the statistics of batch norms, so that every part has an effect.

    Without noise, heads, biases, tokens and layer scales may be zero.
    """
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            std = 0.3 if parameter.dim() < 2 else parameter[0].numel() ** -0.5
            parameter.add_(torch.randn(parameter.shape, generator=generator) * std)
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
    guided, coverage = judge_guided(model, x[:1])
    layer, cam = judge_cam(model, x[:1])
    walk, relevance = judge_walk(model, x), judge_relevance(model, x[-1:] if name in COUPLED else x)
    untouched = fingerprint(model) == before
    return Row(name, guided, coverage, layer, cam, walk, relevance, untouched, time.perf_counter() - start)


def judge_guided(model: nn.Module, x: Tensor) -> tuple[str, str]:
    """Return "exact", "warned", "refused" or "WRONG" with details, and the coverage."""
    target = int(model(x).argmax())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", saliency.errors.SaliencyWarning)
        try:
            explanation = saliency.GuidedBackprop(model).attribute(x, target)
        except saliency.errors.SaliencyError as refusal:
            return f"refused: {refusal}", ""
    expected = reference(model, x, target, "guided_backprop")
    assert explanation.coverage is not None
    messages = "; ".join(
        str(entry.message) for entry in caught if issubclass(entry.category, saliency.errors.SaliencyWarning)
    )
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
    except saliency.errors.SaliencyError as refusal:
        return "", f"refused: {refusal}"
    values = explanation.values
    varies = bool(values.isfinite().all()) and float(values.amax() - values.amin()) > 0
    return str(explanation.layer), f"varies, {values.shape[-2]}x{values.shape[-1]}" if varies else "CONSTANT"


def judge_walk(model: nn.Module, x: Tensor) -> str:
    """Return whether the plain walk equals the input times the gradient."""
    methods = [PlainWalk(model), saliency.InputXGradient(model)]
    walked, expected = (explanation.values for explanation in saliency.Together(*methods).attribute(x, CLASSES))
    difference = error(walked, expected)
    return f"equal to {difference:.0e}" if difference < 1e-4 else f"WRONG by {difference:.1e}"


def judge_relevance(model: nn.Module, x: Tensor) -> dict[str, str]:
    """Return "conserved", "refused", "warned" or "WRONG" with details for each relevance method."""
    verdicts = {}
    doubtful = []
    for name, errors in relevance_errors(model, x, RELEVANCE).items():
        verdicts[name] = errors if isinstance(errors, str) else verdict(*errors)
        if verdicts[name].startswith("WRONG"):
            doubtful.append(name)
    if doubtful:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", saliency.errors.SaliencyWarning)
            exact = relevance_errors(copy.deepcopy(model).double(), x.double(), doubtful)
        for name, errors in exact.items():
            assert not isinstance(errors, str)
            verdicts[name] = f"{verdict(*errors)} in float64 ({verdicts[name].removeprefix('WRONG: ')} in float32)"
            if any(str(warning.message).startswith(f"{name}:") for warning in caught):
                verdicts[name] = verdicts[name].replace("WRONG", "warned")
    return verdicts


def verdict(missing: float, difference: float) -> str:
    """Return whether relevance is conserved, and a batch equals its images."""
    if missing < MAX_MISSING and difference < MAX_DIFFERENCE:
        return f"conserved to {missing:.0e}"
    return f"WRONG: {missing:.0e} missing, batch differs by {difference:.0e}"


def relevance_errors(model: nn.Module, x: Tensor, names: list[str]) -> dict[str, tuple[float, float] | str]:
    """Return the errors of conservation and of a batch for each method, or why it is refused."""
    methods = [saliency.METHODS[name](model) for name in names]
    try:
        batch = saliency.Together(*methods).attribute(x, CLASSES[-len(x) :])
        single = saliency.Together(*methods).attribute(x[-1:], CLASSES[-1])
    except saliency.errors.SaliencyError as refusal:
        if len(names) == 1:
            return {names[0]: f"refused: {refusal}"}
        return {name: errors for only in names for name, errors in relevance_errors(model, x, [only]).items()}
    return {name: errors_of(*pair) for name, *pair in zip(names, batch, single, strict=True)}


def errors_of(batch: saliency.Explanation, single: saliency.Explanation) -> tuple[float, float]:
    """Return the share of the scores that is missing, and the difference of a batch from a single image.

    For DeepLIFT, it is a share of the score or of the difference of the scores, whichever is larger.
    """
    assert batch.residual is not None
    sizes = batch.scores.abs().double()
    if batch.ledger is None:
        sizes = sizes.maximum((batch.values.double().sum((1, 2, 3)) + batch.residual).abs())
    missing = float((batch.residual.abs() / sizes).max())
    difference = error(batch.values[-1:], single.values)
    if batch.ledger is not None and single.ledger is not None:
        shares = dict(zip(single.ledger_names, single.ledger[0], strict=True))
        largest = float(single.ledger.abs().max())
        for name, share in zip(batch.ledger_names, batch.ledger[-1], strict=True):
            difference = max(difference, float((share - shares.get(name, 0)).abs()) / largest)
    return missing, difference


def resumed_rows(names: list[str]) -> Iterator[Row]:
    """Yield a row per network. The rows of an interrupted run are read."""
    PROGRESS.parent.mkdir(exist_ok=True)
    PROGRESS.touch()
    done = {row["name"]: Row(**row) for row in map(json.loads, PROGRESS.read_text().splitlines())}
    for name in names:
        row = done.get(name) or judge_safely(name)
        if name not in done:
            with PROGRESS.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        yield row


def judge_safely(name: str) -> Row:
    """Check one network; the row of a failure has its message."""
    gc.collect()
    try:
        return judge(name)
    except Exception as failure:  # noqa: BLE001 - the table has every network, whatever it raises
        message = f"FAILED: {type(failure).__name__}: {failure}"[:300].replace("\n", " ")
        return Row(name, message, "", "", "", "", {}, False, 0.0)


def table(results: list[Row]) -> str:
    """Return the Markdown page with all rows."""
    exact = sum(row.guided.startswith(("exact", "warned")) for row in results)
    refused = sum(row.guided.startswith("refused") for row in results)
    walked = sum(row.walk.startswith("equal") for row in results)
    head = [
        "# Methods on every architecture",
        "",
        f"Generated by `make zoo` with torch {torch.__version__}, torchvision {torchvision.__version__},",
        f"timm {timm.__version__}.",
        f"{len(results)} networks with random weights: guided backpropagation is exact on {exact}, refused with the",
        f"reason on {refused}, wrong or failed on {len(results) - exact - refused}.",
        f"The plain walk equals the input times the gradient on {walked}.",
        *(summary(name, results) for name in RELEVANCE),
        f"All checks pass on {sum(row.passed for row in results)}.",
        "",
        "Conserved means that the ledger sums to the score within a relative error of 1e-4, on a batch of two images",
        "with different classes, and that the second image has the same values and the same ledger alone. For",
        "`deep_lift`, the values sum to the difference between the score and the score of the baseline, within 1e-4 of",
        "the larger score.",
        f"{', '.join(COUPLED)} itself mixes the images of a batch, so it was checked on one image. The edges of images",
        "are at most 128 pixels, otherwise 112, as for timm/deepseek_vit_412m, otherwise the network's own size.",
        "",
        "| network | guided backpropagation | coverage | default layer | map | plain walk |"
        + "".join(f" {name} |" for name in RELEVANCE)
        + " model unchanged |",
        "|---" * (7 + len(RELEVANCE)) + "|",
    ]
    return "\n".join(head + [line(row) for row in results]) + "\n"


def summary(name: str, results: list[Row]) -> str:
    """Return the sentence on one relevance method."""
    verdicts = [row.relevance[name] for row in results if name in row.relevance]
    conserved, refused, warned = (
        sum(text.startswith(word) for text in verdicts) for word in ("conserved", "refused", "warned")
    )
    wrong = len(verdicts) - conserved - refused - warned
    checked = f"`{name}`, checked on {len(verdicts)}, is conserved on {conserved}"
    return f"{checked}, refused with the reason on {refused}, warns on {warned}, wrong on {wrong}."


def line(row: Row) -> str:
    """Return the line of the table for one network."""
    relevance = [row.relevance.get(name, "") for name in RELEVANCE]
    unchanged = "yes" if row.untouched else "NO"
    cells = [row.name, row.guided, row.coverage, row.layer, row.cam, row.walk, *relevance, unchanged]
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> None:
    """Check the networks, and write or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names or parts of names (default: all networks)")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    everything = torchvision_names() + timm_names()
    names = [name for name in everything if not options.names or any(part in name for part in options.names)]
    results = []
    for row in map(judge_safely, names) if options.names else resumed_rows(names):
        results.append(row)
        print(
            f"{'ok ' if row.passed else 'BAD'} {row.name:45s} {row.seconds:6.1f} s  {row.relevance}"[:200], flush=True
        )
    if options.names:
        print(table(results))
    else:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(table(results))
        PROGRESS.unlink()
        print(f"{sum(row.passed for row in results)} of {len(results)} networks passed; the table is in {RESULTS}")
    if not all(row.passed for row in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
