"""Measure the time of a layer table relative to its one forward pass without a graph."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

import saliency
from benchmarks.timing import interleaved, ratio, verdict, wall_ratio
from saliency.inspection.layer_table import layer_table

MODELS = ("resnet50", "efficientnet_lite0")
LIMIT = {
    ("resnet50", 1): 1.0,
    ("resnet50", 10): 1.0,
}  # ratio to one forward pass; the rest is the overhead of the hooks


def table_rows(rounds: int = 5, batches: tuple[int, ...] = (1, 10)) -> list[str]:
    """Return the lines of this benchmark's Markdown table."""
    rows = [
        "| layer table without times | forward | ratio to forward (CPU) | (wall) | overhead per layer, ms | target |",
        "|---|---|---|---|---|---|",
    ]
    for name in MODELS:
        model = saliency.load(name, weights=None if name == "resnet50" else "default").eval()
        for batch in batches:
            x = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))

            def forward(model: torch.nn.Module = model, x: torch.Tensor = x) -> object:
                with torch.no_grad():
                    return model(x)

            def table(model: torch.nn.Module = model, x: torch.Tensor = x) -> object:
                return layer_table(model, x, times=False)

            contenders: dict[str, Callable[[], object]] = {"forward": forward, "table": table}
            timings = interleaved(contenders, rounds if batch > 1 else 3 * rounds)
            measured = ratio(timings["table"], timings["forward"])
            layers = sum(1 for _ in model.modules())
            overhead = 1000 * (timings["table"].seconds - timings["forward"].seconds) / layers
            rows.append(
                f"| {name}, batch {batch} | {timings['forward'].seconds * 1000:.0f} ms | {measured:.3f} | "
                f"{wall_ratio(timings['table'], timings['forward']):.3f} | {overhead:.3f} | "
                f"{verdict(measured, LIMIT.get((name, batch)))} |"
            )
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    print("\n".join(table_rows(parser.parse_args(arguments).rounds)))


if __name__ == "__main__":
    main()
