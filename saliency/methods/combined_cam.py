"""Methods made of others: a guided map times a CAM, and a CAM over several layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attribution.base import BatchAttribution, TracedAttribution
from ..attribution.explanation import Sign
from ..attribution.forward import TargetGradients
from ..errors import LayerError
from ..io.preprocess import PreprocessLike
from ..layers.default_layer import scan_layers
from ..layers.find import LayerLike, find
from ..validation import check_choice, real_number
from .cam import GradCAM, GradCAMPlusPlus, HiResCAM, LayerAttribution, LayerCAM, LayerCombination, XGradCAM
from .gradient import GuidedBackprop, Smooth


class GuidedGradCAM(LayerAttribution):
    """Guided backpropagation where Grad-CAM sees the class: the fine of the one, the focus of the other.

    Both come from one forward and one graph. The CAM's positive part is resized bilinearly to the input.

    Args:
        model: As for every method.
        layer: As for `GradCAM`.
        smooth: As for `GuidedBackprop`.
        preprocess: As for every method.
        categories: As for every method.

    Values: (N, C, H, W), signed, in the product of both methods' units.

    Raises:
        NotApplicableError: No ReLU was called.
        LayerError: The layer does not exist, is not run, or has no extent in space.
        TargetError: The target does not fit the model's output.

    Source: Selvaraju et al., "Grad-CAM" (2016), https://arxiv.org/abs/1610.02391.
    """

    name = "guided_grad_cam"
    units = "product of the guided gradient and the CAM"
    cost = "1 forward, 1 backward"
    gradients = "input"
    backwards = 2
    sign: ClassVar[Sign] = "absolute"

    def __init__(
        self,
        model: nn.Module,
        layer: LayerLike = None,
        *,
        smooth: Smooth = "leave",
        preprocess: PreprocessLike | None = None,
        categories: Sequence[str] | None = None,
    ) -> None:
        super().__init__(model, layer, preprocess=preprocess, categories=categories)
        self.smooth = smooth
        self._guided = GuidedBackprop(model, smooth=smooth)
        self._cam = GradCAM(model)

    def read_evidence(self, evidence: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """The guided gradient times the CAM at the size of the input."""
        cam = self._cam.read_evidence(evidence, layers).values.clamp(min=0)
        guided, coverage = self._guided.signal(evidence)
        cam = F.interpolate(cam, guided.shape[-2:], mode="bilinear", align_corners=False)
        return BatchAttribution(guided * cam, evidence.scores, coverage, layers[0])


_FUSABLE: dict[str, type[LayerCombination]] = {
    cls.name: cls for cls in (LayerCAM, GradCAM, GradCAMPlusPlus, XGradCAM, HiResCAM)
}


class FusedCAM(TracedAttribution):
    """One CAM over several layers: the fine edges of the shallow ones within the focus of the deep ones.

    Each layer's positive map M becomes tanh(gamma * M / max M), is resized bilinearly to the finest of the layers, and
    the largest value in each place is kept. All layers share one forward and one backward.

    Args:
        model: As for every method.
        layers: Names or modules; None for the ends of the last three resolutions, found by one forward.
        cam: The CAM to fuse: "layer_cam" as in the paper, "grad_cam", "grad_cam_plus_plus", "xgrad_cam", "hires_cam".
        gamma: How strongly weak evidence is lifted; the paper's is 2.
        preprocess: As for every method.
        categories: As for every method.

    Values: (N, 1, h, w), 0 to tanh(gamma), without a unit: each layer is scaled by its own maximum, image by image.

    Raises:
        MethodError: No such CAM, or a gamma that is not positive.
        LayerError: A layer does not exist, is not run, or has no extent in space.
        TargetError: The target does not fit the model's output.

    Source: Jiang et al., "LayerCAM" (2021), https://doi.org/10.1109/TIP.2021.3089943, section III-C.
    """

    name = "fused_cam"
    units = "share of each layer's largest"
    cost = "1 forward, 1 backward to the first layer"
    gradients = "layers"
    backwards = 1
    sign = "positive"

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str | nn.Module] | None = None,
        *,
        cam: str = "layer_cam",
        gamma: float = 2.0,
        preprocess: PreprocessLike | None = None,
        categories: Sequence[str] | None = None,
    ) -> None:
        super().__init__(model, preprocess=preprocess, categories=categories)
        if isinstance(layers, str) or (layers is not None and not layers):
            raise LayerError(f"fused_cam takes a list of layers, got {layers!r}")
        self.fused = None if layers is None else tuple(find(self.model, layer)[0] for layer in layers)
        self.cam = check_choice("cam", cam, tuple(_FUSABLE))
        self.gamma = real_number("gamma", gamma, above=0)
        self._cam = _FUSABLE[cam](model)

    def layers(self, x: Tensor, target: Callable[[Any], Tensor]) -> tuple[str, ...]:
        """The layers that were named, or the ends of the last three resolutions."""
        layers = self.fused if self.fused is not None else scan_layers(self.model, x, target).stages()
        if not layers:
            raise LayerError(
                f"no layer of {type(self.model).__name__} has an extent in space; name some with layers=[...]"
            )
        return layers

    def read_evidence(self, evidence: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """The largest of the layers' scaled maps in each place."""
        maps = [self._cam.read_evidence(evidence, (layer,)).values.clamp(min=0) for layer in layers]
        finest = max((each.shape[-2:] for each in maps), key=lambda grid: grid[0] * grid[1])
        scaled = [F.interpolate(self._scaled(each), finest, mode="bilinear", align_corners=False) for each in maps]
        return BatchAttribution(torch.stack(scaled).amax(0), evidence.scores, layer=", ".join(layers))

    def _scaled(self, values: Tensor) -> Tensor:
        peak = values.amax((1, 2, 3), keepdim=True)
        return torch.tanh(self.gamma * values / torch.where(peak == 0, torch.ones_like(peak), peak))
