"""Results can be sent to other processes: pickled and deep copies show the same text and rows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import saliency
from saliency import GradCAM
from saliency.batch.groups import _COLUMNS, Group
from saliency.batch.runs import ImageChange, RunComparison
from saliency.tables import Table
from tests.render.test_results import PHOTO, RESULTS, model
from tests.several_inputs import case
from tests.vision_language import answered

X = torch.rand(2, 3, 16, 16)


def of_several_inputs() -> Any:
    network, inputs = case("late")
    return saliency.InputXGradient(network).attribute(inputs, 1)


# A generator is not a result, and attention is read from the model and the graph of its call.
CREATE: dict[str, Callable[[], Any]] = {
    **{kind: create for kind, (create, *_) in RESULTS.items() if kind not in ("generator", "list of LayerAttention")},
    "Comparison": lambda: saliency.compare([GradCAM(model())], [PHOTO] * 2, 1, metrics=["gini", "deletion"]),
    "Measurement": lambda: saliency.metrics.Deletion().measure(GradCAM(model()).attribute(PHOTO, 1), model=model()),
    "InputExplanations": of_several_inputs,
    "Answer": lambda: answered("idefics3")[2],
    "Answer in patches": lambda: answered("qwen2_vl")[2],
    "TextExplanation": lambda: saliency.TextExplanation("a cat", ("a", "cat"), torch.ones(2), 1.0, "attn_lrp"),
    "LayerTable": lambda: saliency.inspection.layer_table(model(), X, times=False),
    "ActivationStatistics": lambda: saliency.inspection.activation_statistics(model(), X),
    "RunComparison": lambda: RunComparison([ImageChange("0", "cam", ("cat", "dog"), 1.0, 0.5, 0.1, ("a", "b"))]),
    "groups": lambda: Table([Group("cat", "cam", 9, 0.5, None, 1.0, 0.1, 0.9, 0.01, (), ())], _COLUMNS),
}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result))])
@pytest.mark.parametrize("kind", CREATE)
def test_copies_of_a_result_show_the_same_text_and_rows(kind: str, duplicate: Callable[[Any], Any]) -> None:
    result = CREATE[kind]()
    copied = duplicate(result)
    assert (type(copied), repr(copied), str(copied)) == (type(result), repr(result), str(result))
    if isinstance(result, Table):
        assert repr(copied.rows) == repr(result.rows)
    elif hasattr(result, "values") and not callable(result.values):
        assert torch.equal(copied.values, result.values)
    elif isinstance(result, saliency.Answer):
        given, expected = (answer.arguments(answer.inputs[:1], 0)["pixel_values"] for answer in (copied, result))
        assert torch.equal(given, expected)
