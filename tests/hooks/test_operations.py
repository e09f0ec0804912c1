"""A record of a forward keeps no more memory than its graph, and what it reads is what the forward computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saliency.attribution.forward import Needs, SharedForward, TargetGradients
from saliency.attribution.questions import Questions
from saliency.hooks.operations import Operation, SavedValues, WeakTensor
from saliency.targets.question import Images


class Branches(nn.Module):
    """A linear layer whose output the graph does not save, and one that is written to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.x = x.flatten(1)
        self.before = self.branch(self.x)
        scores: Tensor = self.head((self.before + 1).mul_(2))
        return scores


def recorded(model: nn.Module, x: Tensor) -> dict[str, Operation]:
    torch.manual_seed(0)
    grads = TargetGradients(SharedForward(model, x, Needs(values=SavedValues.ALL)), Questions(1, Images(len(x))))
    operations = [(node, grads.forward.operations.operation(node)) for node in grads.nodes]
    model.forward_of = grads  # type: ignore[assignment]
    return {operation.name: operation for _, operation in operations[::-1] if operation is not None}


def test_a_result_that_the_graph_does_not_save_is_freed_and_computed_again() -> None:
    model, x = Branches(), torch.randn(2, 2, 2, 2)
    first = recorded(model, x)["add"]
    expected = model.before.detach()
    assert first.args["self"] is model.before
    del model.before
    kept = first.kept_args["self"]
    assert isinstance(kept, WeakTensor)
    assert kept.alive() is None
    assert torch.equal(first.args["self"], expected)


def test_an_operand_is_what_it_was_before_a_write_in_place() -> None:
    model, x = Branches(), torch.randn(2, 2, 2, 2)
    operations = recorded(model, x)
    torch.testing.assert_close(operations["mul"].args["self"], model.before + 1)
    torch.testing.assert_close(operations["add"].result, model.before + 1)
    torch.testing.assert_close(operations["mul"].result, (model.before + 1) * 2)
