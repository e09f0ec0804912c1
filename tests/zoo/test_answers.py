"""Five cells of the table in benchmarks/results/zoo_answers.md, which `make zoo` checks as a whole."""

from __future__ import annotations

import pytest


@pytest.mark.filterwarnings("ignore::saliency.SaliencyWarning")
@pytest.mark.parametrize(
    ("family", "method", "verdict"),
    [
        ("llava", "deep_lift", "works"),
        ("llava_next", "smooth_grad", "works"),
        ("qwen3_vl", "cp_lrp", "works"),
        ("blip_2", "occlusion", "works"),
        ("internvl", "guided_backprop", "refused"),
    ],
)
def test_a_cell_is_as_in_the_table(family: str, method: str, verdict: str) -> None:
    zoo_answers = pytest.importorskip("benchmarks.zoo_answers", exc_type=ImportError)
    assert family in zoo_answers.FAMILIES
    assert method in zoo_answers.METHODS
    assert zoo_answers.cell(family, method).startswith(verdict)
