"""A mode keeps what it knows of a memory for all views of it, and never for another memory at the same address."""

from __future__ import annotations

import torch
from torch import Tensor

from saliency.hooks.autograd_graph import MemoryMode


def numbered() -> MemoryMode[list[int]]:
    return MemoryMode(lambda tensor: [tensor.numel()])


def test_views_and_complex_views_share_the_state_of_their_memory() -> None:
    mode, x = numbered(), torch.zeros(2, 6)
    assert mode.known_memory(x) is None
    state = mode.memory(x)
    for view in (x[1:], x.T, x.detach(), torch.view_as_complex(x.view(2, 3, 2)).imag):
        assert mode.known_memory(view) is state
    assert mode.known_memory(x.clone()) is None


def test_memory_at_the_address_of_freed_memory_has_no_state() -> None:
    mode = numbered()

    def address(known: bool) -> int:
        x = torch.zeros(1000)
        if known:
            mode.memory(x)
        else:
            assert mode.known_memory(x) is None
        return x.data_ptr()

    addresses = [address(known=number % 2 == 0) for number in range(40)]
    assert len(set(addresses)) < 40  # the allocator gives some of them again


def test_empty_tensors_have_memories_of_their_own() -> None:
    mode = numbered()
    first: Tensor = torch.zeros(0)
    mode.memory(first)
    assert mode.known_memory(torch.zeros(0)) is None


def test_states_of_freed_memory_are_freed() -> None:
    mode, x = numbered(), torch.zeros(3)
    mode.memory(x)
    mode.memory(torch.zeros(4))
    mode.forget_freed()
    assert mode.known_memory(x) == [3]
    assert [state for _, state in mode._memories.values()] == [[3]]
