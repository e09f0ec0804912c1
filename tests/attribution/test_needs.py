"""What methods read of a forward: one object each, merged for the forward that they share."""

from __future__ import annotations

from dataclasses import fields
from functools import reduce
from itertools import permutations
from operator import or_
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import saliency
from saliency import METHODS, Explanation, Together
from saliency.attribution.base import TracedAttribution
from saliency.attribution.forward import SharedForward
from saliency.attribution.options import RunStats
from saliency.errors import MethodError
from saliency.extending import BatchAttribution, Needs
from saliency.hooks.operations import SavedValues
from saliency.testing import images, tiny_model, tiny_model_for


def test_needs_merge_to_what_serves_both() -> None:
    cam = Needs("layers", backwards=1, layers=("a",))
    walk = Needs(backwards=2, layers=("b", "a"), values=SavedValues.LINEAR, modules=("c",))
    both = Needs("input", 3, ("a", "b"), SavedValues.LINEAR, ("c",))
    assert cam | walk == both
    assert Needs("none", backwards=0) | Needs("layers", backwards=1) == Needs("layers", backwards=1)
    assert (cam | Needs(attention=True)) == Needs("input", None, ("a",), attention=True)


@pytest.mark.parametrize("values", set(SavedValues) - {SavedValues.CHANGES})
def test_changes_alone_do_not_serve_another_method(values: SavedValues) -> None:
    changes = Needs(values=SavedValues.CHANGES)
    assert (changes | changes).values == SavedValues.CHANGES
    assert (changes | Needs(values=values)).values == (Needs(values=values) | changes).values == SavedValues.ALL


def test_the_order_of_methods_changes_no_need() -> None:
    several = [
        Needs("none", backwards=0),
        Needs("layers", backwards=1, values=SavedValues.CHANGES),
        Needs(backwards=2, values=SavedValues.LINEAR, attention=True),
    ]
    assert len({reduce(or_, order) for order in permutations(several)}) == 1


@pytest.mark.parametrize(
    ("options", "read", "match"),
    [
        ({"gradients": "layer"}, None, "gradients='layer' is not one of.*did you mean \"layers\""),
        ({"backwards": "1"}, None, "backwards='1' is not a whole number"),
        ({"layers": "relu"}, None, "layers='relu' is not a tuple of names of layers"),
        ({"backwards": 0}, lambda grads: grads.input_gradient(), "more backward passes than"),
        ({"gradients": "none"}, lambda grads: grads.input_gradient(), 'do not record: Needs\\(gradients="none"\\)'),
        ({"gradients": "layers"}, lambda grads: grads.input_gradient(), 'do not record: Needs\\(gradients="layers"\\)'),
        ({"gradients": "none", "layers": ("relu",)}, lambda grads: grads.gradient("relu"), "do not record"),
        ({"layers": ("relu",)}, lambda grads: grads.gradient("conv"), 'layer "conv" is not among those'),
        ({}, lambda grads: grads.activation("relu"), 'layer "relu" is not among those'),
        ({"layers": ("reluu",)}, lambda grads: grads.activation("reluu"), 'no layer "reluu".*closest are relu'),
    ],
)
def test_a_slip_in_the_needs_of_a_method_is_one_sentence(options: Any, read: Any, match: str) -> None:
    class Slip(saliency.extending.TracedAttribution):
        """A method whose needs do not fit; without a name, it stays out of the registry."""

        def explain_gradients(
            self, grads: saliency.extending.TargetGradients, layers: tuple[str, ...]
        ) -> BatchAttribution:
            return BatchAttribution(read(grads), grads.scores)

    def explain() -> None:
        Slip.needs = Needs(**options)
        Slip(tiny_model()).attribute(images(2), 1)

    with pytest.raises((MethodError, saliency.errors.LayerError), match=match):
        explain()


def test_needs_of_another_type_are_refused_where_the_class_is_written() -> None:
    with pytest.raises(TypeError, match=r"Wrong.needs is not a saliency.extending.Needs, got 'layers'"):
        type("Wrong", (saliency.extending.TracedAttribution,), {"needs": "layers"})


@pytest.mark.parametrize("name", METHODS)
def test_a_method_declares_its_needs_in_one_object(name: str) -> None:
    cls = METHODS[name]
    assert isinstance(cls.needs, Needs)
    former = ("gradients", "backwards", "keep", "needs_attention", "layer_names", "traced_modules", "quick_options")
    assert not [attribute for attribute in former if hasattr(cls, attribute) and attribute not in cls.options()]


@pytest.mark.parametrize("name", [name for name, cls in METHODS.items() if issubclass(cls, TracedAttribution)])
def test_a_method_runs_no_more_backward_passes_than_it_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last pass may free the graph, so the declared number is exact where it is declared."""
    cls, counts, count = METHODS[name], list[bool](), SharedForward.count_backward

    def counted(forward: SharedForward) -> bool:
        counts.append(count(forward))
        return counts[-1]

    monkeypatch.setattr(SharedForward, "count_backward", counted)
    x, model = images(2), tiny_model_for(cls)()
    cls(model, **cls.preview_options).attribute(x, 1)
    assert cls.needs.backwards is None or len(counts) <= cls.needs.backwards


def test_a_cam_without_gradients_lets_the_other_method_free_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    frees, count = list[bool](), SharedForward.count_backward

    def counted(forward: SharedForward) -> bool:
        frees.append(count(forward))
        return frees[-1]

    monkeypatch.setattr(SharedForward, "count_backward", counted)
    model = tiny_model()
    Together(saliency.EigenCAM(model), saliency.GradCAM(model)).attribute(images(1), 1)
    assert frees == [True]


def test_facts_of_a_result_stand_once_and_all_reach_the_explanation() -> None:
    assert not set(Explanation.__annotations__) & {field.name for field in fields(BatchAttribution)}

    class Complete(saliency.extending.TracedAttribution):
        """A method that states every fact; without a name, it stays out of the registry."""

        needs = Needs("none", backwards=0)
        stated: ClassVar[BatchAttribution]

        def explain_gradients(
            self, grads: saliency.extending.TargetGradients, layers: tuple[str, ...]
        ) -> BatchAttribution:
            rows, maps = torch.arange(2.0), torch.ones(2, 1, 4, 4)
            type(self).stated = BatchAttribution(
                maps,
                grads.scores,
                layer="relu",
                evidence={
                    "residual": rows,
                    "error": maps / 2,
                    "agreement": rows,
                    "run_stats": (RunStats(1, 0.5, "complete"),) * 2,
                    "ledger": torch.ones(2, 1),
                    "ledger_names": ("all",),
                    "outliers": maps[:, 0] > 2,
                },
            )
            return self.stated

    found = Complete(tiny_model()).attribute(images(2), 1)
    for name in ("values", "scores", "layer", *Complete.stated.evidence):
        got, stated = getattr(found, name), getattr(Complete.stated, name)
        assert torch.equal(got, stated) if isinstance(stated, Tensor) else got == stated, name
    assert found.evidence.keys() == {*Complete.stated.evidence, "probabilities", "notes"}
