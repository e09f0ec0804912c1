"""Hooks of the user's own blocks beside those of calls: who acts when, and on whose gradients."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from saliency.hooks.autograd_graph import (
    InputEdge,
    current_sequence_nr,
    edge,
    input_edges,
    is_recorded_since,
    sequence_nr,
    this_backward,
)
from saliency.hooks.manager import HookManager
from tests.models import Fork


class Layer(nn.Module):
    """Two operations on its input, which the model uses elsewhere too."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x + x.exp()


def seen_by(outer: HookManager, inner: HookManager, model: nn.Module) -> tuple[int, int]:
    """How many calls each of two managers sees that are open inside each other."""
    calls: tuple[list[Any], list[Any]] = [], []
    with outer:
        outer.observe(model, calls[0].append)
        with inner:
            inner.observe(model, calls[1].append)
            model(torch.ones(1))
    return len(calls[0]), len(calls[1])


@pytest.mark.parametrize(
    ("outer", "inner", "seen"),
    [
        ({}, {}, (0, 1)),  # a model that asks for an explanation while it is explained
        ({"persistent": True}, {}, (1, 1)),  # an explanation inside a recording
        ({}, {"persistent": True}, (1, 1)),  # a model that records itself
        ({"persistent": True}, {"persistent": True}, (1, 1)),
        ({"persistent": True}, {"exclusive": True}, (0, 1)),  # the search for a layer
        ({"exclusive": True}, {}, (0, 1)),
    ],
)
def test_who_sees_a_call_depends_on_what_is_open_inside(outer: Any, inner: Any, seen: tuple[int, int]) -> None:
    assert seen_by(HookManager(**outer), HookManager(**inner), nn.Identity()) == seen


def test_a_persistent_manager_is_silent_for_all_that_runs_below_an_exclusive_one() -> None:
    layer, calls = nn.Identity(), list[Any]()
    with HookManager(persistent=True) as persistent:
        persistent.observe(layer, calls.append)
        with HookManager(exclusive=True), HookManager() as inner:
            captured = inner.capture(layer)
            layer(torch.ones(1))
        assert (len(calls), len(captured)) == (0, 1)
        layer(torch.ones(1))
    assert len(calls) == 1


def test_around_pairs_what_went_in_with_what_came_out_also_in_recursion() -> None:
    class Recursive(nn.Module):
        def forward(self, depth: int, *, add: int = 0) -> int:
            inner: int = self(depth - 1, add=add + 1) if depth else add
            return inner

    layer, pairs = Recursive(), list[tuple[int, int, int]]()
    with HookManager(persistent=True) as hooks:
        hooks.around(
            layer, lambda args, kwargs: (args[0], kwargs["add"]), lambda token, out: pairs.append((*token, out))
        )
        assert layer(2, add=5) == 7
    assert pairs == [(0, 7, 7), (1, 6, 7), (2, 5, 7)]
    assert not layer._forward_hooks
    assert not layer._forward_hooks_with_kwargs
    assert not layer._forward_pre_hooks
    assert not layer._forward_pre_hooks_with_kwargs


def test_a_call_that_raised_leaves_nothing_to_the_others() -> None:
    class Fails(nn.Module):
        def forward(self, depth: int) -> int:
            if not depth:
                raise ValueError("no")
            with suppress(ValueError):
                self(depth - 1)
            return depth

    class Token:
        def __init__(self, depth: int) -> None:
            self.depth = depth

    layer, pairs, tokens = Fails(), list[tuple[int, int]](), list[weakref.ref[Token]]()

    def begin(args: tuple[Any, ...], kwargs: Any) -> Token:
        token = Token(args[0])
        tokens.append(weakref.ref(token))
        return token

    with HookManager(persistent=True) as hooks:
        hooks.around(layer, begin, lambda token, out: pairs.append((token.depth, out)))
        assert layer(2) == 2
        assert pairs == [(1, 1), (2, 2)]
        assert [each() for each in tokens] == [None] * 3
        for _ in range(5):
            with suppress(ValueError):
                layer(0)
        assert sum(each() is not None for each in tokens) == 1
        assert layer(1) == 1
        assert [each() for each in tokens] == [None] * 10


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_that_is_made_inside_a_block_is_not_seen(copied: Callable[[nn.Module], nn.Module]) -> None:
    layer, seen = nn.Identity(), list[str]()
    with HookManager(persistent=True) as hooks:
        hooks.observe(layer, lambda output: seen.append("observed"))
        hooks.revise(layer, lambda output: output + 1)
        hooks.around(layer, lambda args, kwargs: seen.append("begun"), lambda token, output: seen.append("ended"))
        other = copied(layer)
        assert float(other(torch.zeros(()))) == 0
        assert not seen
        assert float(layer(torch.zeros(()))) == 1
    assert seen == ["begun", "observed", "ended"]


def test_a_manager_that_another_thread_closes_does_not_silence_those_around_it() -> None:
    layer, seen = nn.Identity(), list[Tensor]()
    with HookManager(persistent=True) as hooks:
        hooks.observe(layer, seen.append)
        inner = HookManager(exclusive=True)
        inner.__enter__()
        thread = threading.Thread(target=lambda: inner.__exit__(None, None, None))
        thread.start()
        thread.join()
        layer(torch.zeros(1))
    assert len(seen) == 1


def test_what_the_end_returns_takes_the_place_of_the_output() -> None:
    layer = nn.Identity()
    with HookManager(persistent=True) as hooks:
        hooks.around(layer, lambda args, kwargs: args[0], lambda given, out: given + 1)
        assert float(layer(torch.zeros(()))) == 1
    assert float(layer(torch.zeros(()))) == 0


# Gradients.


def called(layer: nn.Module, x: Tensor) -> tuple[Tensor, list[InputEdge]]:
    """The output of a layer, and the operations that pass gradient on to its input."""
    inputs, since = [edge(x)], current_sequence_nr()
    out = layer(x)
    assert is_recorded_since(out, since)
    return out, input_edges([out], inputs, since)[0]


def test_the_exits_of_a_call_are_its_own_operations_and_no_others() -> None:
    x = torch.randn(3, requires_grad=True) * 1
    before = x.sin()
    out, found = called(Layer(), x)
    after = x.cos()
    assert sorted(each.node.name() for each in found) == ["ExpBackward0", "MulBackward0"]
    assert next(each.operands for each in found if each.node.name() == "MulBackward0") == (0, 1)
    assert all(sequence_nr(each.node) < sequence_nr(after.grad_fn) for each in found)
    assert (before.sum() + out.sum()).requires_grad


def test_the_gradient_that_one_layer_passes_on_is_rewritten_and_no_other() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    seen: list[Tensor] = []
    with HookManager() as hooks:
        shared = x * 1
        out, found = called(Layer(), shared)

        def rule(whole: Tensor) -> Tensor:
            seen.append(whole)
            return torch.full_like(whole, 100)

        hooks.rewrite_input(shared, found, rule)
        (gradient,) = torch.autograd.grad((out + shared * 7).sum(), x)
    assert torch.allclose(seen[0], 2 * x.detach() + x.detach().exp())
    assert torch.equal(gradient, torch.full_like(x, 107.0))


def test_only_the_operations_that_take_part_are_waited_for() -> None:
    x = torch.ones(2, requires_grad=True)
    shared = x * 1
    with HookManager() as hooks:
        inputs, since = [edge(shared)], current_sequence_nr()
        one, two = Fork()(shared)
        hooks.rewrite_input(shared, input_edges([one, two], inputs, since)[0], lambda whole: whole * 10)
        (first,) = torch.autograd.grad(one.sum(), x, retain_graph=True)
        (both,) = torch.autograd.grad(one.sum() + two.sum(), x, retain_graph=True)
        (second,) = torch.autograd.grad(two.sum(), x)
    assert [float(each[0]) for each in (first, both, second)] == [20, 50, 30]


def test_parts_that_are_seen_only_stay_as_they_are() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    shared, parts = x * 1, list[Tensor]()
    with HookManager() as hooks:
        out, found = called(Layer(), shared)
        for each in found:
            hooks.at_input_edge(shared, each, parts.append)
        (gradient,) = torch.autograd.grad(out.sum(), x)
    assert len(parts) == 2
    assert torch.equal(parts[0] + parts[1], gradient)


@pytest.mark.parametrize("closed", [False, True])
def test_gradients_are_left_alone_when_the_block_has_ended(closed: bool) -> None:
    parameter = nn.Parameter(torch.ones(2))
    inner: list[Tensor] = []
    with HookManager() as hooks:
        out = parameter * 2
        hooks.at_gradient(out, lambda gradient: gradient * 10)
        hooks.at_gradient(parameter, lambda gradient: inner.append(gradient))
        if not closed:
            torch.autograd.backward(out.sum())
    if closed:
        torch.autograd.backward(out.sum())
    assert parameter.grad is not None
    assert float(parameter.grad[0]) == (2 if closed else 20)
    assert len(inner) == (0 if closed else 1)
    assert not parameter._backward_hooks


def test_a_hook_on_a_parameter_leaves_the_backward_of_another_thread_alone() -> None:
    parameter = nn.Parameter(torch.ones(2))
    found: list[Tensor] = []

    def elsewhere() -> None:
        found.extend(torch.autograd.grad((parameter * 3).sum(), parameter))

    with HookManager() as hooks:
        hooks.at_gradient(parameter, lambda gradient: gradient * 10)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        (mine,) = torch.autograd.grad((parameter * 3).sum(), parameter)
    assert (float(found[0][0]), float(mine[0])) == (3, 30)


def test_a_backward_pass_has_a_number_of_its_own() -> None:
    numbers: list[int] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    with HookManager() as hooks:
        hooks.at_gradient(y, lambda gradient: numbers.append(this_backward()))
        for _ in range(2):
            torch.autograd.grad(y, x, retain_graph=True)
    assert len(set(numbers)) == 2
    assert this_backward() == -1 not in numbers


def test_handles_of_graphs_that_are_gone_do_not_pile_up() -> None:
    with HookManager(persistent=True) as hooks:
        for _ in range(5000):
            hooks.at_gradient(torch.ones(1, requires_grad=True) * 2, lambda gradient: None)
        assert len(hooks._handles) <= 1025


@pytest.mark.parametrize("attach", [HookManager.at_gradient, None])
def test_a_graph_dies_though_the_block_goes_on(attach: Callable[..., None] | None) -> None:
    gc.disable()
    try:
        with HookManager(persistent=True) as hooks:
            x = torch.randn(3, requires_grad=True) * 1
            out, found = called(Layer(), x)
            if attach is not None:
                attach(hooks, out, lambda gradient: None)
            else:
                for each in found:
                    hooks.at_input_edge(x, each, lambda part: None)
                del each
            died = weakref.ref(x)
            del x, out, found
            assert died() is None
    finally:
        gc.enable()
