"""How many multiply-adds a module or an operation takes: those of convolutions, matrix products and attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..hooks.autograd_graph import DispatchMode, child_modules, forward_hook_ids
from ..hooks.pytree import tree_tensors

Formula = Callable[[Any, Any], int]
"""(the first argument of a call, its output) -> its multiply-adds."""


def known_kind(module: nn.Module) -> bool:
    """Whether a module is one of torch.nn's own, without parts: what it does inside is what it is called."""
    return (
        not child_modules(module) and type(module).__module__.startswith("torch.nn.") and "forward" not in vars(module)
    )


def closed_form(module: nn.Module) -> Formula | None:
    """The multiply-adds of a call from its shapes alone; None where its operations have to be watched.

    That of modules that multiply nothing by a matrix is always 0.
    """
    if not known_kind(module) or forward_hook_ids(module):
        return None
    formula = _FORMULAS.get(type(module))
    if formula is not None:
        return formula(module)
    return _nothing if type(module).__module__.rpartition(".")[2] in _FREE else None


def _nothing(x: Any, output: Any) -> int:
    return 0


def _linear(module: nn.Module) -> Formula:
    """One multiply-add for each weight and each vector, also for one that is not in a batch."""
    weights = _weight(module).numel()
    vector = _weight(module).shape[0]
    return lambda x, output: output.numel() // vector * weights if vector else 0


def _transposed(module: nn.Module) -> Formula:
    """Each number of the input meets the weights of its channel."""
    weights = math.prod(_weight(module).shape[1:])
    return lambda x, output: x.numel() * weights


def _bilinear(module: nn.Module) -> Formula:
    """As torch computes it: each number of one vector with each of the other, once for each number of the output."""
    pairs = math.prod(_weight(module).shape[1:])
    return lambda x, output: output.numel() * pairs


def _recurrent(module: nn.Module) -> Formula:
    """Each weight once for each step of each sequence."""
    weights, size = sum(each.numel() for each in module.parameters() if each.dim() == 2), module.input_size

    def formula(x: Any, output: Any) -> int:
        steps = len(x.data) if isinstance(x, PackedSequence) else x.numel() // int(size)  # type: ignore[arg-type]
        return steps * weights

    return formula


def _weight(module: nn.Module) -> Tensor:
    weight: Any = module.weight
    tensor: Tensor = weight
    return tensor


_FORMULAS: dict[type[nn.Module], Callable[[nn.Module], Formula]] = {
    **dict.fromkeys((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), _linear),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _transposed),
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), _recurrent),
    nn.Bilinear: _bilinear,
    nn.Identity: lambda module: _nothing,
}

# The files of torch.nn.modules whose modules without parts multiply no matrices.
_FREE = frozenset(
    "activation batchnorm channelshuffle container dropout flatten fold instancenorm normalization padding "  # noqa: SIM905
    "pixelshuffle pooling sparse upsampling".split()
)


class Operations(DispatchMode):
    """Counts the multiply-adds of each operation of the block in this thread.

    Args:
        count: Called with the multiply-adds of each operation that has some.
    """

    def __init__(self, count: Callable[[int], None]) -> None:
        super().__init__()
        self._count = count
        self._formulas: dict[Any, Callable[..., int] | None] = {}
        self._elementary: set[Any] = set()  # operations without a formula that consist of no others

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            formula = self._formulas[func]
        except KeyError:
            formula = self._formulas[func] = _formula_of(func)
        if formula is None and func not in self._elementary:
            output = self._decomposed(func, args, kwargs)
            if output is not NotImplemented:
                return output
            self._elementary.add(func)
        output = func(*args, **kwargs)
        if formula is not None:
            self._count(formula(*args, **kwargs, out_val=output))
        return output

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation returns that consists of others, as under inference_mode; NotImplemented for any other."""
        if not hasattr(func, "decompose") or func.namespace == "prim":
            return NotImplemented
        with self:
            return func.decompose(*args, **kwargs)


def _formula_of(func: Any) -> Callable[..., int] | None:
    from torch.utils.flop_counter import flop_registry  # takes longer to import than all of this package

    packet = getattr(func, "overloadpacket", func)
    flops = flop_registry.get(packet)
    if flops is None:
        return _MORE.get(str(packet))
    known = flops
    # What torch counts are multiplications and additions, one by one.
    return lambda *args, **kwargs: int(known(*args, **kwargs)) // 2


def _product_with_vector(*args: Any, out_val: Any, **kwargs: Any) -> int:
    """Of all operands that with the most numbers: a matrix, or either of two vectors."""
    return max(each.numel() for each in tree_tensors(args))


def _product(*args: Any, out_val: Any, **kwargs: Any) -> int:
    """Each number of the first matrix, or of a batch of them, with a row of the second, which come last."""
    *_, first, second = tree_tensors(args)
    return int(first.numel() * second.shape[-1])


def _weighed(x: Any, weight: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    """Each number of the output takes the weights of its channel, the first axis."""
    return int(out_val.numel() * math.prod(weight.shape[1:]))


def _weighed_last(x: Any, weight: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    return int(out_val.numel() * math.prod(weight.shape[:-1]))


def _recurred(x: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    """Each weight of the layers, which come right behind the input, once for each step of each sequence."""
    weights = args[0] if isinstance(args[0], list | tuple) else args[:2]
    return int(x.numel() // x.shape[-1] * sum(each.numel() for each in weights if each.dim() == 2))


# What torch has no formula for, though it has for the same product with one more axis, or for what it is fused from.
_MORE: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("aten.mv", "aten.addmv", "aten.addmv_", "aten.dot", "aten.vdot"), _product_with_vector),
    **dict.fromkeys(("aten.addbmm", "aten.addbmm_", "aten._addmm_activation", "aten._int_mm"), _product),
    **dict.fromkeys(("aten._trilinear", "torchvision.deform_conv2d"), _weighed),
    **dict.fromkeys(("aten.mkldnn_rnn_layer", "aten._cudnn_rnn", "aten.miopen_rnn"), _recurred),
    "aten.conv_tbc": _weighed_last,
}
