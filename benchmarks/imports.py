"""Measure the time of `import saliency` and `saliency --help` against `import torch`, in new interpreters in turn."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.timing import Timing, ratio, verdict

STATEMENTS = {
    "import torch": ["-c", "import torch"],
    "import saliency": ["-c", "import saliency"],
    "import saliency and access a method": ["-c", "import saliency; saliency.GradCAM"],
    "saliency --help": ["-m", "saliency", "--help"],
}
TARGETS = {"import saliency": 1.08, "import saliency and access a method": 1.08}


def measure(rounds: int) -> dict[str, Timing]:
    """Measure each statement once per round. Wall time is also stored as CPU time: another process does the work."""
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for turn in range(rounds + 1):
        for name, arguments in STATEMENTS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)  # noqa: S603
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(seconds), tuple(seconds)) for name, seconds in times.items()}


def main() -> None:
    """Print the table."""
    timings = measure(5)
    print("## Imports: new interpreters in turn\n\n| | seconds | over `import torch` | target |\n|---|---|---|---|")
    for name, timing in timings.items():
        over = ratio(timing, timings["import torch"])
        print(f"| `{name}` | {timing.seconds:.2f} | {over:.3f} | {verdict(over, TARGETS.get(name))} |")
    print()


if __name__ == "__main__":
    main()
