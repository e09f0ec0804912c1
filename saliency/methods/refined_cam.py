"""CAMs that ask more of one forward: second derivatives, other classes, several layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..attribution.base import BatchAttribution
from ..attribution.forward import SharedForward, TargetGradients, independent_of
from ..attribution.resolved_target import ResolvedTarget
from ..errors import LayerError, MethodError, NotApplicableError, TargetError
from ..io.preprocess import PreprocessLike
from ..layers.find import LayerLike
from ..targets.class_names import class_index, class_probabilities, class_scores
from ..targets.targets import ClassScore
from ..validation import check_choice, is_whole, real_number
from .cam import GradCAM, GradCAMPlusPlus, HiResCAM, LayerAttribution, LayerCAM, LayerCombination, XGradCAM
from .combined_cam import FusedCAM

_CAMS: dict[str, type[LayerCombination]] = {
    cls.name: cls for cls in (GradCAM, HiResCAM, LayerCAM, GradCAMPlusPlus, XGradCAM)
}

UTILITIES = ("rest", "score")


class ShapleyCAM(LayerAttribution):
    """Activations weighted by the Shapley value of their channel, from the gradient and the curvature of the score.

    The weight is the mean over the channel of g - H A / 2, with g the gradient and H the second derivatives of the
    utility at the activations A: the Shapley value of the utility's expansion to second order. Where the network behind
    the layer is piecewise linear and the utility is a logit, H is 0 and this is `GradCAM`.

    Args:
        model: As for every method.
        layer: As for `GradCAM`.
        utility: What is expanded. "rest", the authors' choice: for a class, its score plus the logarithm of its
            probability; for any other target, and a model of one class, the score. "score": the score itself.
        preprocess: As for every method.
        categories: As for every method.

    Values: (N, 1, h, w), signed, in units of the utility.

    Raises:
        LayerError: The layer does not exist, is not run, or has no extent in space, or the score does not depend on it.
        TargetError: The target does not fit the model's output.
        NotApplicableError: An operation behind the layer has no second derivative.

    Source: Cai, "CAMs as Shapley Value-based Explainers" (2025), https://arxiv.org/abs/2501.06261.
    """

    name = "shapley_cam"
    cost = "1 forward, 2 backwards to the layer"
    units = "score and log probability"

    def __init__(
        self,
        model: nn.Module,
        layer: LayerLike = None,
        *,
        utility: str = "rest",
        preprocess: PreprocessLike | None = None,
        categories: Sequence[str] | None = None,
    ) -> None:
        super().__init__(model, layer, preprocess=preprocess, categories=categories)
        self.utility = check_choice("utility", utility, UTILITIES)

    def read_evidence(self, evidence: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """The activations weighted by the means of g - H A / 2."""
        (layer,) = layers
        slopes = self._slopes(evidence, layer)
        weights = evidence.trace.layout(layer)(slopes).to(evidence.activation(layer)).mean((2, 3))  # (N, K)
        values = torch.einsum("nk,nkhw->nhw", weights, evidence.activation(layer))[:, None]
        return BatchAttribution(values, evidence.scores, layer=layer)

    def _slopes(self, evidence: TargetGradients, layer: str) -> Tensor:
        """The slopes g - H A / 2, as the layer's output lies in memory."""
        trace = evidence.trace
        evidence.require_gradient()
        try:
            return self._curved(trace.output, trace.layers[layer], evidence.selection, layer)
        except (RuntimeError, NotImplementedError) as error:
            if "derivative" not in str(error) and "double backward" not in str(error):
                raise
        # Attention in one piece has no second derivative; step by step it has.
        with sdpa_kernel(SDPBackend.MATH):
            trace = SharedForward(self.model, evidence.x, [layer], "layers")
            try:
                return self._curved(trace.output, trace.layers[layer], evidence.selection, layer)
            except (RuntimeError, NotImplementedError) as error:
                raise NotApplicableError(
                    f"shapley_cam needs second derivatives behind the layer; {error}. Use grad_cam"
                ) from error

    def _curved(self, output: Any, at: Tensor, selection: ResolvedTarget, layer: str) -> Tensor:
        utility = self._utility(output, selection)
        gradient = _gradient(utility.sum(), at, again=True)
        if gradient is None:
            raise LayerError(independent_of(layer))
        if not gradient.requires_grad:
            return gradient.detach()
        # The gradient of <gradient, A>, with this A held still, is H A.
        product = _gradient((gradient * at.detach()).sum(), at)
        return gradient.detach() if product is None else gradient.detach() - product / 2

    def _utility(self, output: Any, selection: ResolvedTarget) -> Tensor:
        """What is expanded, one per image (N,)."""
        score = selection(output)
        target = selection.target
        if self.utility == "score" or not isinstance(target, ClassScore) or class_scores(output).shape[1] == 1:
            return score
        scores, probabilities = class_scores(output), class_probabilities(output)
        if probabilities is scores:
            return score + score.clamp(min=torch.finfo(score.dtype).tiny).log()
        return score + target(scores.log_softmax(1))


class FinerCAM(LayerAttribution):
    """A CAM of what sets a class apart from those that the model finds most like it.

    In place of the class's score y_c it explains y_c - gamma * mean(y_r) over some reference classes r, by default
    those whose scores are nearest to y_c. What all of them share, such as fur, cancels; what is the class's own stays.

    Args:
        model: As for every method.
        layer: As for `GradCAM`.
        references: How many of the nearest classes to compare with, or a list of classes by index or name.
        gamma: How strongly the references speak against the class: 0 is the plain CAM; the paper's is 0.6.
        cam: "grad_cam", "hires_cam", "layer_cam", "grad_cam_plus_plus" or "xgrad_cam".
        preprocess: As for every method.
        categories: As for every method.

    Values: (N, 1, h, w), signed, in the units of the CAM.

    Raises:
        NotApplicableError: The target is no class, or the model has no other one.
        MethodError: No such CAM, a gamma below 0, or references that are none.
        LayerError: The layer does not exist, is not run, or has no extent in space.
        TargetError: The target or a reference does not fit the model's output.

    Source: Zhang et al., "Finer-CAM" (2025), https://arxiv.org/abs/2501.11309.
    """

    name = "finer_cam"
    backwards = 1

    def __init__(
        self,
        model: nn.Module,
        layer: LayerLike = None,
        *,
        references: int | Sequence[int | str] = 3,
        gamma: float = 0.6,
        cam: str = "grad_cam",
        preprocess: PreprocessLike | None = None,
        categories: Sequence[str] | None = None,
    ) -> None:
        super().__init__(model, layer, preprocess=preprocess, categories=categories)
        self.gamma = real_number("gamma", gamma, least=0)
        self.cam = check_choice("cam", cam, tuple(_CAMS))
        self.references = _references(references)
        named = [] if isinstance(self.references, int) else self.references
        self._named = [class_index(each, self.categories) for each in named]
        self._cam = _CAMS[cam](model)

    def read_evidence(self, evidence: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """The CAM of the contrast with the references."""
        classes = evidence.selection.indices
        if not isinstance(evidence.selection.target, ClassScore) or None in classes:
            raise NotApplicableError("finer_cam sets classes apart; the target must be a class, by index or name")
        scores = class_scores(evidence.trace.output)
        own = torch.tensor(classes, device=scores.device)
        others = self._others(scores.detach(), own)  # (N, r), shares of the references

        def contrast(output: Any) -> Tensor:
            each = class_scores(output)
            return each.gather(1, own[:, None])[:, 0] - self.gamma * (each * others).sum(1)

        selection = ResolvedTarget(contrast, evidence.selection.images, evidence.selection.categories)
        finding = self._cam.read_evidence(evidence.trace.evidence(selection), layers)
        return finding._replace(scores=evidence.scores)

    def _others(self, scores: Tensor, own: Tensor) -> Tensor:
        """The share of each class (N, classes) in the mean of the references."""
        classes = scores.shape[1]
        if classes < 2:
            raise NotApplicableError("finer_cam compares classes, and the model gives one number per image")
        shares = torch.zeros_like(scores)
        if isinstance(self.references, int):
            away = (scores - scores.gather(1, own[:, None])).abs().scatter(1, own[:, None], math.inf)
            nearest = torch.sort(away, dim=1, stable=True).indices[:, : min(self.references, classes - 1)]
            shares.scatter_(1, nearest, 1)
        else:
            beyond = [each for each in self._named if each >= classes]
            if beyond:
                raise TargetError(f"reference class {beyond[0]} is outside 0..{classes - 1}")
            shares[:, self._named] = 1
            shares.scatter_(1, own[:, None], 0)
        count = shares.sum(1, keepdim=True)
        if bool((count == 0).any()):
            raise TargetError("finer_cam compares a class with itself; name other classes in references=[...]")
        return shares / count


class RefineCAM(FusedCAM):
    """The product of one CAM over several layers: where all of them agree, as finely as the shallowest shows.

    Each layer's positive map is divided by its largest value and resized bilinearly to the finest of the layers. All
    layers share one forward and one backward.

    Args:
        model: As for every method.
        layers: Names or modules; None for the ends of the last three resolutions, found by one forward.
        cam: "layer_cam", "grad_cam", "grad_cam_plus_plus", "xgrad_cam" or "hires_cam". The authors' code takes
            "grad_cam_plus_plus", which is not defined for the signed channels that stages often end with: on the
            bundled network and photos it puts 47 % of the map into the objects' boxes, "layer_cam" 77 %.
        preprocess: As for every method.
        categories: As for every method.

    Values: (N, 1, h, w), 0 to 1, without a unit: each layer is scaled by its own maximum, image by image. Zero
        everywhere where one of the layers has nothing positive.

    Raises:
        MethodError: No such CAM.
        LayerError: A layer does not exist, is not run, or has no extent in space.
        TargetError: The target does not fit the model's output.

    Source: "RefineCAM" (2026), https://arxiv.org/abs/2605.14641.
    """

    name = "refine_cam"
    units = "product of the shares of each layer's largest"

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str | nn.Module] | None = None,
        *,
        cam: str = "layer_cam",
        preprocess: PreprocessLike | None = None,
        categories: Sequence[str] | None = None,
    ) -> None:
        super().__init__(model, layers, cam=cam, preprocess=preprocess, categories=categories)

    def read_evidence(self, evidence: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """The product of the layers' scaled maps in each place."""
        maps = [self._cam.read_evidence(evidence, (layer,)).values.clamp(min=0) for layer in layers]
        finest = max((each.shape[-2:] for each in maps), key=lambda grid: grid[0] * grid[1])
        scaled = [F.interpolate(_of_largest(each), finest, mode="bilinear", align_corners=False) for each in maps]
        return BatchAttribution(torch.stack(scaled).prod(0), evidence.scores, layer=", ".join(layers))


def _of_largest(values: Tensor) -> Tensor:
    """Each image's map as a share of its largest value."""
    peak = values.amax((1, 2, 3), keepdim=True)
    return values / torch.where(peak == 0, torch.ones_like(peak), peak)


def _gradient(of: Tensor, at: Tensor, *, again: bool = False) -> Tensor | None:
    """A gradient, that can be differentiated `again`; None where there is none. The graph is kept."""
    return torch.autograd.grad(of, at, create_graph=again, retain_graph=True, allow_unused=True)[0]


def _references(references: int | Sequence[int | str]) -> int | list[int | str]:
    given: object = references
    if is_whole(given):
        return int(given)
    if (
        isinstance(given, list | tuple)
        and given
        and all(isinstance(each, str) or is_whole(each, least=0) for each in given)
    ):
        return list(given)
    raise MethodError(f"references={references!r} is neither a number of classes nor a list of classes")
