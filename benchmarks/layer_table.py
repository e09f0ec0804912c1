"""Measure the time of a layer table relative to its one forward pass without a graph."""

from __future__ import annotations

import torch

import saliency
from benchmarks.timing import Contender, interleaved, ratio, verdict, wall_ratio
from saliency.inspection.layers import layer_table

MODELS = ("resnet50", "efficientnet_lite0")
LIMIT = {
    ("resnet50", 1): 1.0,
    ("resnet50", 10): 1.0,
}  # ratio to one forward pass; the rest is the overhead of the hooks


def main() -> None:
    """Print the table."""
    print("| layer table without times | forward | ratio to forward (CPU) | (wall) | overhead per layer, ms | target |")
    print("|---|---|---|---|---|---|")
    for name in MODELS:
        model = saliency.load(name, weights=None if name == "resnet50" else "default").eval()
        for batch in (1, 10):
            x = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))

            def forward(model: torch.nn.Module = model, x: torch.Tensor = x) -> object:
                with torch.no_grad():
                    return model(x)

            def table(model: torch.nn.Module = model, x: torch.Tensor = x) -> object:
                return layer_table(model, x, times=False)

            contenders: dict[str, Contender] = {"forward": forward, "table": table}
            timings = interleaved(contenders, 10)
            measured = ratio(timings["table"], timings["forward"])
            layers = sum(1 for _ in model.modules())
            overhead = 1000 * (timings["table"].seconds - timings["forward"].seconds) / layers
            print(
                f"| {name}, batch {batch} | {timings['forward'].seconds * 1000:.0f} ms | {measured:.3f} | "
                f"{wall_ratio(timings['table'], timings['forward']):.3f} | {overhead:.3f} | "
                f"{verdict(measured, LIMIT.get((name, batch)))} |"
            )


if __name__ == "__main__":
    main()
