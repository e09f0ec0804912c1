"""Check every method on answers of ten families of vision-language models, as in `benchmarks.zoo_cells`.

python -m benchmarks.zoo_answers               check all, and write benchmarks/results/zoo_answers.md; resumes
python -m benchmarks.zoo_answers llava qwen    check some families or methods, and print the table
"""

from __future__ import annotations

from functools import partial

import saliency
from benchmarks.zoo_cells import Case, Table
from tests.vision_language import FAMILIES, answered


def case(family: str) -> Case:
    """Return a model, an answer of it, and one of the words as the target."""
    model, _, answer = answered(family)
    return Case(model, answer, saliency.words("red"))


ANSWERS = Table(
    "zoo_answers",
    "Methods on answers of vision-language models",
    ("transformers",),
    {family: partial(case, family) for family in FAMILIES},
    {name: method.preview_options for name, method in saliency.METHODS.items()},
)

if __name__ == "__main__":
    ANSWERS.main()
