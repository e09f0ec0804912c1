"""Check that the tests that run by default notice mistakes in the code.

Each mistake is a small change of one file, made in a copy of the package. The tests of the directory that mirrors the
package must fail: for a mistake in `saliency/io`, those under `tests/io`.

    python -m benchmarks.mutation                  make each mistake
    python -m benchmarks.mutation threads gamma    make some, by parts of their names or files
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINKED = ("assets", "docs", "examples", "notebooks", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "mkdocs.yml")


@dataclass(frozen=True, slots=True)
class Mistake:
    """A change of a file under `saliency/`: the text `right`, which occurs once, becomes `wrong`."""

    name: str
    path: str
    right: str
    wrong: str


MISTAKES = (
    Mistake(
        "hooks on leaves act in other threads",
        "hooks/manager.py",
        "not self.closed and (is_engine_thread or threading.get_ident() == self.thread)",
        "not self.closed",
    ),
    Mistake("a capture is not a clone", "hooks/manager.py", "clone = tensor.clone()", "clone = tensor"),
    Mistake("the user's hooks run first", "hooks/manager.py", "[-1][1], prepend=True)", "[-1][1])"),
    Mistake(
        "a closed manager keeps its hooks on the graph",
        "hooks/manager.py",
        "handles[-1].remove()\n",
        "handles[-1]\n",
    ),
    Mistake(
        "the first of overlapping calls restores the training mode",
        "model/call.py",
        "_was_training.difference(*_held.values())",
        "set(_was_training)",
    ),
    Mistake(
        "a query that sees no key has NaN as probabilities",
        "hooks/attention.py",
        "probabilities if self.bias is None else probabilities.nan_to_num_(0)",
        "probabilities",
    ),
    Mistake(
        "the size of epsilon grows with the number of outputs",
        "relevance/rules.py",
        "norms / math.sqrt(math.prod(map(self.output.shape.__getitem__, self.dims)))",
        "norms",
    ),
    Mistake(
        "products of negative inputs and negative weights are negative parts",
        "relevance/rules.py",
        "op.run(up, like) + op.run(down, unlike)",
        "op.run(up, like) + op.run(down, like)",
    ),
    Mistake(
        "a bias gets no relevance in alpha-beta",
        "relevance/kernels.py",
        "positive = None if bias is None else bias.clamp(min=0)",
        "positive = None if bias is None else bias.clamp(max=0)",
    ),
    Mistake("gamma counts twice", "relevance/kernels.py", "rule.gamma / (2 + rule.gamma)", "rule.gamma"),
    Mistake(
        "a product counts its first factor at the image",
        "relevance/multipliers.py",
        'return step.grad * step.pair("other").mean, step',
        'return step.grad * step.pair("other").x, step',
    ),
    Mistake(
        "losses of a max pool go to the winner of the image",
        "relevance/multipliers.py",
        ".scatter_add_(-1, winners0, part.sub_(gain))",
        ".scatter_add_(-1, winners, part.sub_(gain))",
    ),
    Mistake(
        "a contrast is a sum", "targets/classes.py", "first(output) - second(output)", "first(output) + second(output)"
    ),
    Mistake(
        "the top of two classes is the other one",
        "targets/classes.py",
        "row > threshold(link)",
        "row < threshold(link)",
    ),
    Mistake(
        "log-odds are against the best other text",
        "targets/similarity.py",
        "scores[:, 0] - scores[:, 1:].logsumexp(1)",
        "scores[:, 0] - scores[:, 1:].amax(1)",
    ),
    Mistake(
        "a mirrored image has the box of the image",
        "targets/boxes.py",
        "box=(ends - x1, y0, ends - x0, y1)",
        "box=(x0, y0, x1, y1)",
    ),
    Mistake(
        "masks of queries are logits",
        "targets/regions.py",
        '"nqc,nqhw->nchw", classes, masks.sigmoid())',
        '"nqc,nqhw->nchw", classes, masks)',
    ),
    Mistake(
        "a crop starts a pixel early", "io/preprocess.py", "round((resized - crop) / 2.0)", "(resized - crop) // 2"
    ),
    Mistake(
        "16 bits are cut off instead of rounded",
        "io/inputs.py",
        "(array.astype(np.uint32) + 128) // 257",
        "array.astype(np.uint32) // 257",
    ),
    Mistake(
        "a failed write leaves its temporary file", "io/atomic_write.py", "temporary.unlink(missing_ok=True)", "pass"
    ),
)


def outcome(mistake: Mistake) -> str:
    """Make a mistake in a copy of the package, and return whether a test fails: "caught", "MISSED" or "STALE"."""
    source = (ROOT / "saliency" / mistake.path).read_text("utf-8")
    if source.count(mistake.right) != 1:
        return f"STALE: saliency/{mistake.path} has {mistake.right!r} {source.count(mistake.right)} times"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for package in ("saliency", "tests", "benchmarks"):
            shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for name in LINKED:
            (copy / name).symlink_to(ROOT / name)
        (copy / "saliency" / mistake.path).write_text(source.replace(mistake.right, mistake.wrong), "utf-8")
        tests = f"tests/{mistake.path.partition('/')[0]}"
        command = [sys.executable, "-m", "pytest", "--exitfirst", "--no-header", "-p", "no:cacheprovider", tests]
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode == 0:
        return "MISSED"
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return f"caught by {failed[0]}" if failed else f"STALE: pytest ended with {done.returncode}: {done.stdout[-500:]}"


def main() -> None:
    """Make the mistakes, print the outcomes, and exit with 1 unless all were caught."""
    parts = sys.argv[1:]
    is_caught = []
    for mistake in MISTAKES:
        if not parts or any(part in f"{mistake.path} {mistake.name}" for part in parts):
            start = time.perf_counter()
            result = outcome(mistake)
            is_caught.append(result.startswith("caught"))
            print(
                f"{mistake.name} (saliency/{mistake.path}): {result}, {time.perf_counter() - start:.0f} s", flush=True
            )
    print(f"{sum(is_caught)} of {len(is_caught)} mistakes were caught")
    sys.exit(not all(is_caught))


if __name__ == "__main__":
    main()
