"""Private copies of a model that run faster: channels last, with batch norms folded.

A copy is used only after it was compared with the model on the image that is explained. No clock decides, so the same
call gives the same bits.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from ..axes import at_least_float32
from ..hooks.autograd_graph import has_global_module_hooks, module_hooks, own_parameters
from ..hooks.manager import HookManager
from ..hooks.model_state import leaf, reference_tensor, run_model, unique_modules
from ..hooks.pytree import tree_leaves, tree_tensors
from .recording import ExternalTensor, Slot, Tape, TensorRef, UntracedAccess

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

Pairs = tuple[tuple[str, str], ...]
"""The names of convolutions, each with the batch norm that is folded into it."""

_MOST_ERROR, _LEAST_COSINE = 2e-2, 0.999
"""The largest allowed error of the output relative to its norm, and the smallest allowed cosine similarity."""


class FasterModel(NamedTuple):
    """Model that runs the passes of one call: the user's model or a private copy."""

    model: nn.Module
    note: str
    """The precision of the copy, or the reason why the model itself is used."""


class _Choice(NamedTuple):
    """The convolutions and batch norms that are folded in a copy; None to use the model itself."""

    pairs: Pairs | None
    note: str


_choices: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, _Choice]] = weakref.WeakKeyDictionary()


def faster_model(model: nn.Module, x: Tensor, *, backward: bool = False) -> FasterModel:
    """Return a faster model for batches like this one if it is exact enough.

    It is a private copy with convolutions laid out channels last and batch norms folded into them. Outputs and
    gradients differ by at most 2e-2, with a cosine of at least 0.999. For bfloat16, run the call in `torch.autocast`,
    which is as fast as a copy in this type.

    A copy of a model with fewer than two convolutions and no folded batch norm gains nothing, and is not used. The copy
    is compared with the model on one row. If it is not exact enough, the model itself is used. The note reports the
    choice. The choice is cached for the process, by model, shape, dtype and device. Each call copies the weights again
    and checks the output of the copy again.

    Args:
        model: The model, prepared by the caller.
        x: The first batch (N, C, H, W).
        backward: Whether gradients at the input will be computed.
    """
    reason = _unsuitable(model, x)
    if reason:
        return FasterModel(model, f"exact: {reason}")
    sample = x[:1].detach()
    autocast = torch.is_autocast_enabled(x.device.type)
    hooked = tuple(name for name, module in model.named_modules() if module_hooks(module))
    key = backward, sample.shape, x.dtype, x.device, autocast, hooked
    with torch.random.fork_rng([x.device] if x.is_cuda else []), HookManager(exclusive=True):
        known = _choices.setdefault(model, {})
        choice = known[key] = known.get(key) or _choose(model, sample, backward=backward)
        if choice.pairs is None:
            return FasterModel(model, choice.note)
        candidate, why = _checked_copy(model, sample, choice.pairs, backward=False)
        return FasterModel(model, f"exact: {why}") if candidate is None else FasterModel(candidate, choice.note)


def _unsuitable(model: nn.Module, x: Tensor) -> str:
    """Return why no copy can be used; an empty string if one may be tried."""
    if isinstance(model, torch.jit.ScriptModule):
        return "a scripted model is run as it is"
    like = reference_tensor(model)
    dtype = x.dtype if like is None else like.dtype
    is_precise = dtype in (torch.float32, torch.float64)
    return "" if is_precise else f"fast is not for models in {str(dtype).removeprefix('torch.')}"


def _choose(model: nn.Module, x: Tensor, *, backward: bool) -> _Choice:
    """Return the batch norms to fold if the copy is exact enough and has a reason to be faster than the model."""
    try:
        pairs = foldable_pairs(model, x)
    except Exception as error:  # noqa: BLE001 - the real pass raises it too
        return _Choice(None, f"exact: the trial of fast failed ({type(error).__name__})")
    if not pairs and sum(isinstance(module, _CONVOLUTIONS) for module in model.modules()) < 2:
        return _Choice(None, "exact: fast speeds up convolutions, of which there are fewer than two")
    candidate, note = _checked_copy(model, x, pairs, backward=backward)
    if candidate is None:
        return _Choice(None, f"exact: {note}")
    return _Choice(pairs, f"fast: {note}, {len(pairs)} batch norms folded")


def _checked_copy(model: nn.Module, x: Tensor, pairs: Pairs, *, backward: bool) -> tuple[nn.Module | None, str]:
    """Return a copy and a description of its accuracy, or None and the reason."""
    try:
        candidate = _converted_copy(model, pairs)
        error, cosine = error_and_cosine(_trial(candidate, x, backward=backward), _trial(model, x, backward=backward))
    except Exception as failure:  # noqa: BLE001 - not every model can be copied, and memory may be short
        return None, f"fast failed here ({type(failure).__name__})"
    if error > _MOST_ERROR or cosine < _LEAST_COSINE:
        return None, f"fast was not exact enough here (cosine {cosine:.4f})"
    return candidate, f"cosine {cosine:.4f}"


def _trial(model: nn.Module, x: Tensor, *, backward: bool) -> list[Tensor]:
    """Return the tensors of the output and, if wanted, the gradient of their sum at the input."""
    with torch.set_grad_enabled(backward):
        at = leaf(x) if backward else x
        tensors = [tensor for tensor in tree_tensors(run_model(model, at)) if tensor.is_floating_point()]
        sums = [tensor.float().sum() for tensor in tensors if tensor.requires_grad]
        gradients = torch.autograd.grad(torch.stack(sums).sum(), at) if backward else ()
        return [tensor.detach() for tensor in (*tensors, *gradients)]


class _ChannelsLast(nn.Module):
    """A private copy, whose images are laid out channels last."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.training = model, False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the copy."""
        return self.model(x.to(memory_format=torch.channels_last), *args, **kwargs)


def _converted_copy(model: nn.Module, pairs: Pairs) -> nn.Module:
    candidate = private_copy(model)
    fold(candidate, pairs)
    nn.Module.to(candidate, memory_format=torch.channels_last)
    for parameter in candidate.parameters():
        # The backward pass is slower if weights require no gradient.
        parameter.requires_grad = parameter.is_floating_point()
    return _ChannelsLast(candidate)


def private_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model. It shares hook objects, and the memory of parameters until they are converted.

    Raises:
        Exception: Any error of a part of the model that cannot be copied.
    """
    # Objects in the memo are not copied: a hook may be a method of an object that collects results.
    memo: dict[int, Any] = {id(hook): hook for module in unique_modules(model) for hook in module_hooks(module)}
    # Copying the linear layers of vgg16 takes as long as two of its passes.
    memo |= {id(each): nn.Parameter(each.detach(), False) for each in model.parameters() if type(each) is nn.Parameter}
    return copy.deepcopy(model, memo)


def foldable_pairs(model: nn.Module, x: Tensor) -> Pairs:
    """Return the names of the convolutions and of the batch norms that can be folded into them, found by one forward.

    Neither of the two has hooks or shares weights or statistics, and each is called once. Only the batch norm reads the
    output of the convolution. If the forward reads values of tensors, there are no pairs, since the forward may call
    other layers for other images.

    Args:
        model: The model, in evaluation mode.
        x: A batch (N, C, H, W); one row is enough.
    """
    names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    free = [(name, module) for name, module in model.named_modules() if not module_hooks(module)]
    norms = {id(norm.running_mean): name for name, norm in free if _is_foldable_norm(norm) and names[id(norm)] == 1}
    convolutions = {(id(part.weight), id(part.bias)): name for name, part in free if _is_foldable_convolution(part)}
    tape, access = Tape(), UntracedAccess()
    with torch.no_grad(), tape, access:
        tape.begin(x)
        tape.end(run_model(model, x))
    if tape.refusal or access.reason or has_global_module_hooks():
        return ()
    reads = Counter(tape.outputs)
    for step in tape.steps:
        reads.update(tree_leaves((step.args, step.kwargs), TensorRef))

    def tensor(part: Any) -> Tensor | None:
        return tape.external[part.at] if isinstance(part, ExternalTensor) else None

    convolved = {Slot(at): step for step in tape.steps if step.op is _CONVOLUTION for at in step.results if at}
    pairs = []
    for norm in tape.steps:
        convolution = convolved.get(norm.args[0]) if "batch_norm" in str(norm.op) else None
        if convolution is None or reads[norm.args[0]] != 1 or reads[convolution.args[1]] != 1:
            continue
        name = convolutions.get((id(tensor(convolution.args[1])), id(tensor(convolution.args[2]))))
        statistics = [part for part in norm.args if id(tensor(part)) in norms and reads[part] == 1]
        if name is not None and len(statistics) == 1:
            pairs.append((name, norms[id(tensor(statistics[0]))]))
    return tuple(pairs)


def _is_foldable_convolution(module: Any) -> bool:
    if not isinstance(module, _CONVOLUTIONS) or type(own_parameters(module).get("weight")) is not nn.Parameter:
        return False
    return "bias" in own_parameters(module) and not (module.transposed and module.groups > 1)


def _is_foldable_norm(module: Any) -> bool:
    """Return whether a module is a batch norm with running statistics, or timm's batch norm with an activation."""
    if not isinstance(module, NORMS) or module.running_mean is None or module.running_var is None or module.training:
        return False
    return type(module) in NORMS or {name for name, _ in module.named_children()} == {"drop", "act"}


def fold(model: nn.Module, pairs: Pairs) -> None:
    """Fold the batch norms of some pairs into their convolutions, in a private copy."""
    for convolution_name, norm_name in pairs:
        convolution: Any = model.get_submodule(convolution_name)
        norm: Any = model.get_submodule(norm_name)
        statistics = norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
        with torch.no_grad():
            convolution.weight, convolution.bias = fuse_conv_bn_weights(
                convolution.weight, convolution.bias, *statistics, convolution.transposed
            )
        rest = nn.Sequential(OrderedDict(norm.named_children()))
        rest.training = False
        model.set_submodule(norm_name, rest)


def error_and_cosine(output: Any, expected: Any) -> tuple[float, float]:
    """Return the relative error and the cosine of the worst tensor; (inf, -1) if the tensors cannot be compared."""
    trees = (output, expected)
    first, second = ([value.detach() for value in tree_tensors(tree) if value.is_floating_point()] for tree in trees)
    if not second or [value.shape for value in first] != [value.shape for value in second]:
        return math.inf, -1.0
    errors, cosines = [0.0], [1.0]
    for pair in zip(first, second, strict=True):
        a, b = (at_least_float32(value.flatten()) for value in pair)
        if not torch.equal(a, b):
            errors.append(float((a - b).norm() / b.norm()))
            cosines.append(float(F.cosine_similarity(a, b, dim=0)))
    return (max(errors), min(cosines)) if math.isfinite(sum(errors)) else (math.inf, -1.0)
