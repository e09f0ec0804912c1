"""Layer-wise relevance propagation: rules instead of gradients, from the score to the pixels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..attribution.base import TracedAttribution
from ..attribution.explanation import BatchAttribution
from ..attribution.forward import Needs, TargetGradients, needs_with, no_gradient_message
from ..attribution.options import ConvertedOption, Option, PositionalOption
from ..attribution.questions import Questions, explained_answer
from ..errors import LayerError, MethodError, warn
from ..hooks.autograd_graph import Gradients, reached_nodes, result_spec
from ..hooks.operations import LINEAR, SOFTMAX, Operation, SavedValues
from ..hooks.rectifiers import Coverage, require_visible
from ..io.axes import along_rows, at_least_float32
from ..io.preprocess import Preprocess
from ..model.answer import Answer
from ..model.call import check_later, current_call
from ..model.layers import LayerLike, given_layout, layers_by_resolution, named_layers, trace_layers
from ..relevance import rules as formulas
from ..relevance.kernels import Passed
from ..relevance.propagation import NONLINEAR, Propagation, Unknown, linear_weight
from ..relevance.walk import CallGraph, Visit, Walk
from ..validation import Sign, check_choice, check_flag, check_number, described, is_integer
from .cam import layer_name

MAX_MISSING_SHARE = 1e-3
"""The fraction of the score that may be missing from the ledger without a warning."""

EMBEDDINGS = "embeddings of tokens"
"""The name under which a walk keeps the relevance of the tokens of an answer; not a name of a layer."""

MIN_SHARE = 0.5
"""The fraction of the relevance that a layer receives in excitation backpropagation without a warning."""

Through = Mapping[str, Sequence[int]]
At = Literal["pixels", "patches"]


def _as_channels(option: str, through: Any) -> Through:
    """Return the channels of layers. Raises MethodError for anything but a mapping from layers to lists of channels."""
    lists = list(through.values()) if isinstance(through, Mapping) else [None]
    if not all(isinstance(channels, list | tuple) and all(is_integer(c, 0) for c in channels) for channels in lists):
        raise MethodError(f'{option}={described(through)}: expected channels by layer, as in {{"layer4.1": [12, 40]}}')
    return cast("Through", through)


class RelevancePropagation(TracedAttribution):
    """Base class of relevance propagation: one forward, and one walk of its graph with the rules of a composite.

    Args:
        through: Channels by layer: only relevance that passes through these channels is kept (concept relevance,
            Achtibat et al. 2023, https://arxiv.org/abs/2206.03208). The ledger holds the relevance of the other
            channels. Relevance that takes a path around the layer, such as a residual connection, is kept too. If a
            module is called several times, only its last call is restricted.
        per_channel: Whether relevance at a layer, or at patches, is given for each channel instead of summed.
        unknown: "refuse" raises NotApplicableError for an operation without a rule; "gradient" passes its gradient.
    """

    needs = Needs(backwards=1, values=SavedValues.LINEAR)
    propagation: ClassVar[type[Propagation]] = Propagation

    layer: PositionalOption[LayerLike, str | None] = PositionalOption(check=layer_name, default=None, kw_only=False)
    through: Option[Through | None] = Option(None, _as_channels)
    per_channel: Option[bool] = Option(False, check_flag)
    unknown: Option[Unknown] = Option("refuse", check_choice, get_args(Unknown))

    def __post_init__(self) -> None:
        self._through = {layer_name(self, layer): list(channels) for layer, channels in (self.through or {}).items()}

    @abstractmethod
    def rules(self, grads: TargetGradients) -> formulas.Composite:
        """Return the rules for a forward and its scores."""

    def needs_for(self, x: Tensor, target: Questions) -> Needs:
        """Return the layers whose relevance is restricted, and the layer whose relevance is read, if any."""
        return needs_with(self.needs, layers=(*self._through, *([] if self.layer is None else [self.layer])))

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """Propagate the relevance of the scores."""
        for name in layers:
            if grads.forward.layers[name].grad_fn not in grads.nodes:
                for node in grads.nodes:
                    require_visible(node)
                raise LayerError(no_gradient_message(name))
        layer = layers[-1] if len(layers) > len(self._through) else None
        patches = self.patches(grads) if layer is None else None
        walk = self.walk(grads, patches)
        values, ledger = walk.relevance, walk.ledger
        if layer is not None:
            values, ledger = _at_layer(walk, layer)
        elif patches is not None:
            layer, values = patches.layer, patches.read(cast("Tensor", cast("Propagation", walk.rule).relevance))
            ledger = walk.ledger_at(values, walk.graph.after(patches.node))
        if values is not walk.relevance and not self.per_channel:
            values = values.sum(1, keepdim=True)
        coverage = Coverage(handled=dict(walk.handled), rules=_rules_of_modules(self.model, walk))
        tokens = walk.watched_relevance[EMBEDDINGS].sum(-1) if EMBEDDINGS in walk.watched_relevance else None
        if tokens is not None and "tokens" in ledger and (patches is not None or layer is None):
            text = (tokens * ~cast("Answer", explained_answer()).is_image.to(tokens.device)).sum(1)
            ledger = {**ledger, "text": text, "tokens": ledger["tokens"] - text}
        evidence = {
            "coverage": coverage,
            "residual": walk.missing,
            "ledger": torch.stack(list(ledger.values()), 1),
            "ledger_names": tuple(ledger),
            "token_shares": tokens if tokens is None or grads.embeddings_hold_image else None,
        }
        return BatchAttribution(values, grads.scores, layer, evidence)

    def patches(self, grads: TargetGradients) -> _Patches | None:
        """Return the patches at which relevance is read if no layer is given; None for the input."""
        return None

    def walk(self, grads: TargetGradients, patches: _Patches | None = None) -> Walk:
        """Return the walk of this method from the scores of one forward; methods with the same rules share it."""
        composite, first = self.rules(grads), patches and patches.node
        key = composite, self._through, self.unknown, first
        return grads.shared(key, partial(self._checked_walk, grads, composite, first))

    def _checked_walk(self, grads: TargetGradients, composite: formulas.Composite, first: Node | None) -> Walk:
        """Return a walk, and warn if its ledger does not hold the whole score."""
        named = composite.layers(self.model)
        rules = self.propagation(composite, named, self.unknown, first)
        changes = {}
        for name, channels in self._through.items():
            changes[name] = partial(_restricted, grads, name, channels)
        watched = {**grads.forward.layers, **dict(zip([EMBEDDINGS], grads.forward.embeddings, strict=False))}
        walk = Walk(grads, rules, watched, changes, frees=grads.forward.count_backward()).run().balance()
        if named:
            rules.check_layers()
        if rules.unmerged:
            names = ", ".join(f"{name} ({count})" for name, count in rules.unmerged.items())
            problem = f"some batch norms are not merged with the convolution before them, because of {names} in between"
            warn(f"{self.name}: {problem}: the map depends on how the model is written; apply them to the convolution")
        most = max(MAX_MISSING_SHARE, 16 * torch.finfo(grads.scores.dtype).eps)

        def check(fraction: float) -> None:
            if not fraction <= most:  # false for NaN
                warn(f"{self.name}: {fraction:.1g} of the score is missing from the ledger")

        if self.unknown == "refuse":
            check_later(check, (walk.missing.abs() / grads.scores.abs().clamp(min=1e-6)).max())
        return walk


def _rules_of_modules(model: nn.Module, walk: Walk) -> dict[str, str]:
    """Return the rules of the modules that hold the weights of convolutions and matrix products."""
    rules, names = cast("Propagation", walk.rule).rules, dict[str, str]()
    for name, module in model.named_modules():
        for weight in module.parameters(recurse=False):
            if (rule := rules.get(weight.data_ptr())) is not None:
                names[name] = repr(rule)
    return names


def _at_layer(walk: Walk, layer: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the relevance at a layer (N, K, h, w), and the parts of the score (N,) from the layer on."""
    tensor, layout = walk.grads.forward.layers[layer], walk.grads.forward.layout(layer)
    relevance = walk.watched_relevance.get(layer, torch.zeros_like(tensor))
    values, node = at_least_float32(layout(relevance.detach())), cast("Node", tensor.grad_fn)
    tokens = None
    if layout.kind == "NTC" and len(layout.tokens) < relevance.shape[1]:
        others = [token for token in range(relevance.shape[1]) if token not in layout.tokens]
        tokens = relevance[:, torch.tensor(others, device=relevance.device)]
    return values, walk.ledger_at(values, {node, *walk.graph.after(node)}, tokens)


def _restricted(
    grads: TargetGradients, layer: str, selected: list[int], walk: Walk, value: Tensor | float, grad: Tensor
) -> Tensor:
    """Set G to 0 at all channels of a layer but some; the ledger holds the removed relevance."""
    tensor = grads.forward.layers[layer]
    channels = 1 if grad.dim() > 2 and grads.forward.layout(layer).kind == "NCHW" else grad.dim() - 1
    if max(selected, default=0) >= grad.shape[channels]:
        raise MethodError(f'through: layer "{layer}" has {grad.shape[channels]} channels, got channel {max(selected)}')
    lost = grad.index_fill(channels, torch.tensor(selected, dtype=torch.long, device=grad.device), 0)
    walk.absorb("other channels", value * lost, cast("Node", tensor.grad_fn))
    return grad - lost


class _Patches(NamedTuple):
    """The output of the first convolution or linear layer.

    Attributes:
        node: The operation.
        layer: The name of the module; None if no module has its weights.
        read: The function from a tensor like the result of the operation to maps (N, K, h, w).
    """

    node: Node
    layer: str | None
    read: Callable[[Tensor], Tensor]


def _find_patches(model: nn.Module, grads: TargetGradients, node: Node) -> _Patches | None:
    """Return the output of a linear operation as patches; None if it has no spatial extent."""
    operation = cast("Operation", CallGraph.of(grads).operations[node])
    address, images = linear_weight(operation).data_ptr(), len(grads.x)
    weights = ((name, getattr(module, "weight", None)) for name, module in named_layers(model).items())
    name = next((name for name, weight in weights if isinstance(weight, Tensor) and weight.data_ptr() == address), None)
    if operation.name == "convolution":
        shape = result_spec(node, 0).shape
        is_map = len(shape) == grads.x.dim() and shape[0] == images  # not patches of patches, as in TNT
        return _Patches(node, name, lambda maps: maps) if is_map else None
    layer = next((layer for layer in trace_layers(model, grads.x).spatial if layer.name == name), None)
    if layer is None:
        return None
    function, tokens = current_call().layout, layer.shape[1:]
    layout = given_layout(function, grads.x.new_zeros(layer.shape)) if function else layer.layout
    return _Patches(node, name, lambda rows: layout(rows.reshape(images, *tokens)))


def _embeds_patches(graph: CallGraph, first: Node) -> bool:
    """Return whether the first linear operation is a patch embedding, whose results are the tokens of attention.

    All other linear operations come after it. Between it and the attention are linear operations, but no activation.
    """
    names = {node: operation.name for node, operation in graph.operations.items() if operation is not None}
    before, after = reached_nodes(graph.attention[-1:], lambda node: node is first), {first, *graph.after(first)}
    linear = {node for node, name in names.items() if name in LINEAR}
    between = before & after - {*graph.attention}
    has_activation = any(names.get(node) in NONLINEAR for node in between)
    return first in between and linear <= after and len(linear & between) > 1 and not has_activation


class PixelRelevance(RelevancePropagation):
    """Base class of relevance propagation that is read at pixels or patches.

    Args:
        at: "pixels"; or "patches" to read relevance at the output of the first convolution or linear layer, such as the
            patch embedding. None is "patches" if that is a patch embedding, whose results are the tokens of attention,
            of a single input; else "pixels". Within a patch, relevance of both signs is often much larger than its sum,
            so pixels show noise. The rule of this operation is used at pixels only. The option `layer` has precedence.
        layer: The layer at which relevance is read, summed over its channels; None for `at`. The ledger then refers to
            the layer: the relevance that later operations absorb, and the rest, which takes other paths. If a module is
            called several times, the last call is read. At a convolution that is merged with its batch norm, it is the
            relevance of the merged output.
    """

    at: Option[At | None] = Option(None, check_choice, get_args(At))

    def explains_together(self) -> bool:
        """Return whether relevance is read at the inputs, so that one walk reaches all inputs of a model."""
        return self.layer is None and self.at != "patches"

    def patches(self, grads: TargetGradients) -> _Patches | None:
        """Return the patches at which relevance is read; None for the input."""
        graph = CallGraph.of(grads)
        first, patches = next(reversed(graph.linear), None), None
        is_automatic = self.at is None and bool(graph.attention) and not getattr(current_call().batch, "is_rows", False)
        if first is not None and (self.at == "patches" or (is_automatic and _embeds_patches(graph, first))):
            patches = _find_patches(self.model, grads, first)
        if patches is None and self.at == "patches":
            raise LayerError('at="patches": the first convolution or linear layer has no spatial output; pass layer=')
        return patches


class LRP(PixelRelevance):
    """Layer-wise relevance propagation: the score, divided among the inputs of each operation by a rule.

    Formula: S = R at the input, from R = y at the score, with R_j = Σ_k R_k (a_j w_jk)⁺ / d_k at convolutions, where
    d_k = b_k⁺ + Σ_j (a_j w_jk)⁺, and R_j = Σ_k R_k a_j w_jk / (z_k + ε sign z_k) at matrix products and at the last
    convolution, if no other one follows; in networks with attention, as for AttnLRP.

    Works on the autograd graph of the call, so residual connections, functions, reused modules and operations in place
    need no preparation of the model. Batch norm is merged into the convolution or matrix product before it if nothing
    else reads that result; the weights are not changed. Other operations: activations pass their relevance;
    normalisations pass it with their deviation as a constant; each factor of a product gets half, or all if the other
    factor is a deviation; a product of functions of the same value, such as x * sigmoid(x), is an activation; fused
    attention gives half to the value and a quarter each to query and key.

    The ledger accounts for the score: the relevance of the input, and the relevance absorbed by biases, tokens, the
    softmax of attention, activations of zero, and the stabiliser. In deep networks, biases absorb most of the score, so
    values may be as small as 1e-7 of it. Their errors are as small: compare their pattern, not their size.

    Args:
        composite: The rules: the name of a composite ("epsilon_plus", "epsilon", "gamma", "epsilon_gamma_box",
            "epsilon_alpha2_beta1", ...), or a mapping from an operation kind ("conv", "linear", "first", "last",
            "activation", "norm"), a type of modules, a layer's name, or a pattern of names to a rule of
            `saliency.relevance`. A batch norm with a rule is not merged. None takes "epsilon_plus", or "attn_lrp" for
            networks with attention.
        gamma: The gamma of all gamma rules of the composite; None keeps the gamma of each rule.

    Values: (N, C, H, W) at the input, or (N, 1, h, w) at a layer, or (N, K, h, w) per channel; signed, in score units.

    Warns:
        SaliencyWarning: More than a thousandth of the score is missing from the ledger.

    Raises:
        NotApplicableError: An operation of the model has no rule.
        MethodError: The composite, gamma or the channels are invalid, or a rule needs bounds of the input.
        LayerError: A layer does not exist or is not run.

    Source: Bach et al., "On Pixel-Wise Explanations for Non-Linear Classifier Decisions by Layer-Wise Relevance
        Propagation" (2015), https://doi.org/10.1371/journal.pone.0130140.
    """

    name = "lrp"
    cost = "1 forward, 1 to 1.5 backward"

    composite: ConvertedOption[formulas.CompositeLike | None, formulas.Composite | None] = ConvertedOption(
        None, formulas.as_composite
    )
    gamma: Option[float | None] = Option(None, check_number, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        rules = {} if self.composite is None else self.composite.rules
        if self.gamma is not None and not any(isinstance(rule, formulas.Gamma) for rule in rules.values()):
            names = ", ".join(
                name for name, composite in formulas.COMPOSITES.items() if formulas.Gamma() in composite.rules.values()
            )
            problem = f"gamma={self.gamma}: the composite has no gamma rule; composites with gamma rules are {names}"
            raise MethodError(f"{problem}; or use AttnLRP")
        if self.composite is not None:
            self.composite = replace(self.composite, rules={key: self._completed(rule) for key, rule in rules.items()})

    def _completed(self, rule: formulas.AnyRule) -> formulas.AnyRule:
        """Return a rule with the gamma of the method, or with the bounds of the input under its preprocessing."""
        if isinstance(rule, formulas.Gamma) and self.gamma is not None:
            return formulas.Gamma(self.gamma)
        if rule == formulas.ZBox() and isinstance(self.preprocess, Preprocess):
            pairs = list(zip(self.preprocess.mean, self.preprocess.std, strict=True))
            return formulas.ZBox(*(tuple((end - mean) / std for mean, std in pairs) for end in (0, 1)))
        return rule

    def needs_for(self, x: Tensor, target: Questions) -> Needs:
        """Return the layers, the modules that the composite names, and all values if activations have a rule."""
        needs = super().needs_for(x, target)
        if self.composite is None:
            return needs
        is_nonlinear = any(isinstance(rule, formulas.NonlinearRule) for rule in self.composite.rules.values())
        values = SavedValues.ALL if is_nonlinear else needs.values  # the operands of ReLUs too
        return needs_with(needs, values=values, modules=tuple(chain(*self.composite.layers(self.model).values())))

    def rules(self, grads: TargetGradients) -> formulas.Composite:
        """Return the given composite; by default the composite for the network's kind."""
        return self.composite or formulas.COMPOSITES["attn_lrp" if CallGraph.of(grads).attention else "epsilon_plus"]


class AttnLRP(PixelRelevance):
    """LRP of transformers: plain gradients of linear operations, rules for attention, norms, activations and products.

    Formula: S = x ⊙ G, or at patches the sum of a ⊙ G over channels, with G the gradient of y where an activation f has
    the slope f(a) / a, a product passes half to each factor, and a norm has a constant 1/σ.

    The relevance of attention reaches query and key through the gradient of the softmax. Fused attention stays fused.

    Args:
        gamma: The gamma of linear layers, at least 0; the authors use 0.01 to 0.05. With 0, they pass their gradient.
            0.05 is better for two classifiers of the testbed, and worse for its texts, see docs/transformers.md.
        conv_gamma: The gamma of convolutions; the authors use 0.1 to 0.25. At the patch embedding, it is used with
            at="pixels" only.

    Values: (N, C, H, W) at the input, or (N, 1, h, w) at a layer; signed, in score units.

    Warns:
        SaliencyWarning: More than a thousandth of the score is missing from the ledger.

    Raises:
        NotApplicableError: An operation of the model has no rule.
        MethodError: A gamma is negative, or the channels are invalid.
        LayerError: A layer does not exist or is not run.

    Source: Achtibat et al., "AttnLRP: Attention-Aware Layer-Wise Relevance Propagation for Transformers" (2024),
        https://arxiv.org/abs/2402.05602.
    """

    name = "attn_lrp"
    cost = "1 forward, 1 backward"
    constant_gates: ClassVar[bool] = False

    gamma: Option[float] = Option(0.0, check_number, least=0)
    conv_gamma: Option[float] = Option(0.0, check_number, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        gammas = {"linear": self.gamma, "conv": self.conv_gamma}
        rules: dict[formulas.RuleKey, formulas.AnyRule] = {
            kind: formulas.Gamma(gamma) for kind, gamma in gammas.items() if gamma
        }
        self._composite = formulas.Composite(rules, constant_gates=self.constant_gates)

    def needs_for(self, x: Tensor, target: Questions) -> Needs:
        """Return the layers, and the values that the rules read."""
        values = SavedValues.LINEAR if self._composite.rules else SavedValues.ACTIVATIONS
        return needs_with(super().needs_for(x, target), values=values)

    def rules(self, grads: TargetGradients) -> formulas.Composite:
        """Return the rules of the options."""
        return self._composite


class CPLRP(AttnLRP):
    """LRP of transformers with constant attention weights and gates, so the values of attention get all relevance.

    Formula: S = x ⊙ G, or at patches the sum of a ⊙ G over channels, with G the gradient of y where an activation f has
    the slope f(a) / a, and attention weights, gates and 1/σ are constant.

    Values: (N, C, H, W) at the input, or (N, 1, h, w) at a layer; signed, in score units.

    Warns:
        SaliencyWarning: More than a thousandth of the score is missing from the ledger.

    Source: Ali et al., "XAI for Transformers: Better Explanations through Conservative Propagation" (2022),
        https://arxiv.org/abs/2202.07304.
    """

    name = "cp_lrp"
    constant_gates = True


class _ExcitationRules(Propagation):
    """The rules of excitation backpropagation: biases receive nothing, and relevance starts before a final softmax.

    Attributes:
        received: The relevance that the positive parts of each top layer receive, by node.
    """

    shift_receives = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.received: dict[Node, Tensor] = {}
        self._below: set[Node | None] = set()  # the nodes from which a linear operation is computed

    def __call__(self, visit: Visit) -> Gradients:
        """Return G at the operands of a node."""
        operation, is_below = visit.operation, visit.node in self._below
        name = "" if operation is None else operation.name
        if is_below or name in LINEAR:
            self._below.update(visit.walk.graph.operands[visit.node])
        if operation is None or is_below or name not in ("_log_softmax", *SOFTMAX):
            return super().__call__(visit)
        lost = (operation.result - operation.args["self"]) * visit.grad  # probabilities minus logits
        visit.walk.absorb("softmax", torch.where(visit.grad == 0, 0, lost), visit.node)
        return visit.grads

    def propagate(self, visit: Visit, rule: formulas.Rule, op: formulas.LinearOperation, values: Tensor) -> Passed:
        """Return G at the input of a linear operation."""
        passed = super().propagate(visit, rule, op, values)
        if isinstance(rule, formulas.Excitation):
            self.received[visit.node] = (op.input * cast("Tensor", passed.grad)).clamp(min=0)
        return passed


class ExcitationBackprop(RelevancePropagation):
    """Fraction of the score that reaches each location through excitatory connections: positive inputs and weights.

    Formula: S = P at the layer, with P_j = Σ_k P_k (a_j w_jk)⁺ / d_k, d_k = Σ_j (a_j w_jk)⁺, and a sum of 1 at the top
    layers.

    Each neuron divides its fraction among its inputs in proportion to the positive parts of its input; biases receive
    nothing. The score is a neuron above the last linear layers, whose weights are its gradient there. So the negative
    score has a different map, and constants in the score have no effect. Probabilities and their logarithms are treated
    as their logits. A contrastive map subtracts the map of the negated weights of this neuron, which cancels the part
    that all classes have in common. Only the positive part of the difference remains. One walk computes both, because
    the rules are linear.

    Args:
        contrastive: Whether the map is contrastive.
        layer: The layer of the map. By default the last layer of the second-lowest resolution: for most networks, twice
            the grid of a class activation map.

    Values: (N, 1, h, w), fractions, at least 0 in networks with ReLUs. They sum to 1 if all paths pass the layer and
        each neuron has a positive input; the values of a contrastive map sum to a smaller number.

    Warns:
        SaliencyWarning: Fractions are negative or exceed 1, because the network adds signed activations; or they sum
            to less than half.

    Raises:
        NotApplicableError: An operation of the model has no rule.
        MethodError: The channels are invalid.
        LayerError: The layer does not exist, is not run, or has no spatial output.

    Source: Zhang et al., "Top-down Neural Attention by Excitation Backprop" (2016), https://arxiv.org/abs/1608.00507.
    """

    name = "excitation_backprop"
    cost = "1 forward, 1 to 1.5 backward"
    sign: ClassVar[Sign] = "positive"
    units = "fraction"
    is_complete = False
    propagation = _ExcitationRules

    contrastive: Option[bool] = Option(False, check_flag)

    def needs_for(self, x: Tensor, target: Questions) -> Needs:
        """Return the layers as for other relevance; by default the last layer of the second-lowest resolution."""
        layer = self.layer or layers_by_resolution(self.model, x, target)[-2:][0]
        return needs_with(self.needs, layers=(*self._through, layer))

    def rules(self, grads: TargetGradients) -> formulas.Composite:
        """Return the rules of excitation backpropagation."""
        top = formulas.ContrastiveRule() if self.contrastive else formulas.Excitation()
        return formulas.Composite({**formulas.COMPOSITES[self.name].rules, "last": top})

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """Return the relevance at the layer as fractions of the relevance that the top layers receive."""
        result = super().explain_gradients(grads, layers)
        walk, total = self.walk(grads), torch.zeros_like(grads.scores)
        for node, relevance in cast("_ExcitationRules", walk.rule).received.items():
            total = total + walk.per_image(relevance, node)
        fractions = formulas.divided(result.values, along_rows(total, result.values))
        self._check(fractions, result.layer)
        values = fractions.clamp(min=0) if self.contrastive else fractions
        return replace(result.with_evidence(residual=None, ledger=None, ledger_names=None), values=values)

    def _check(self, fractions: Tensor, layer: str | None) -> None:
        """Warn of fractions (N, 1, h, w) that are not probabilities."""
        flat, most = fractions.flatten(1), 2 if self.contrastive else 1

        def check(lowest: float, least: float, largest: float) -> None:
            is_negative = lowest < -MAX_MISSING_SHARE and not self.contrastive
            if is_negative or largest > most + MAX_MISSING_SHARE:
                sizes = f"are as low as {lowest:.1g} of the largest" if is_negative else f"add up to {largest:.1f}"
                warn(
                    f"{self.name}: the fractions at {layer} {sizes}, expected at least 0 and a sum of at most {most}: "
                    "the network adds signed activations, but the method assumes positive activations; use lrp"
                )
            elif least < MIN_SHARE and not self.contrastive:
                warn(
                    f"{self.name}: the fractions at {layer} add up to {least:.2g}, not to 1: the rest stays at neurons "
                    "without a positive input, or takes other paths; use lrp to account for all of the score"
                )

        check_later(check, formulas.divided(flat.amin(1), flat.amax(1)).min(), *flat.abs().sum(1).aminmax())
