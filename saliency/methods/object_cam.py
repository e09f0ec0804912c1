"""CAMs of single objects: of a detector's boxes, and of regions of a segmentation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..attribution.options import Option
from ..attribution.resolved_target import ResolvedTarget
from ..axes import max_pool, on_finest_grid, spatial
from ..layers.find import layers_by_resolution
from ..validation import check_integer, check_number
from .baselines import blurred
from .cam import GradCAM, HiResCAM, LayerAttribution, LayerCombination


class ODAM(LayerCombination):
    """The positive part of activation times blurred gradient, summed over the channels, for one object.

    Formula: S_i = (Σ_k A_ki (b ∗ ∂y/∂A_k)_i)⁺, with b a Gaussian.

    For boxes, explain the class or an edge with `saliency.box(of="x0")`. The maps of all levels that enter the head are
    resized bilinearly to the finest, and their maximum is taken. Other targets are explained at one layer.

    Args:
        blur: The standard deviation of the Gaussian that blurs the gradients, in cells of the layer. 0 does not blur
            them, as in the authors' code.

    Values: (N, 1, h, w), not negative, in score units; for an edge in pixels of the image.

    Source: Zhao and Chan, "ODAM: Gradient-based Instance-specific Visual Explanations for Object Detection" (2023),
        https://arxiv.org/abs/2304.06354.
    """

    name = "odam"

    blur: Option[float] = Option(1.0, check_number, least=0)

    def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the positive part of the sum over the channels of blurred gradient times activation."""
        smooth = blurred(gradient, self.blur) if self.blur else gradient
        return (smooth * activation).sum(1, keepdim=True).clamp(min=0)

    def combine_levels(self, maps: Sequence[Tensor]) -> Tensor:
        """Return the maximum of the maps of all levels."""
        return on_finest_grid(maps).amax(0)


class BottleneckCAM(LayerAttribution):
    """Base class of CAMs at the last layer of the coarsest resolution, the bottleneck of an encoder and decoder."""

    def default_layers(self, x: Tensor, target: ResolvedTarget) -> tuple[str, ...]:
        """Return the last of the outermost layers of the coarsest resolution."""
        return layers_by_resolution(self.model, x, target)[-1:]


class SegGradCAM(BottleneckCAM, GradCAM):
    """Grad-CAM of the pixels of a region, at the bottleneck of a segmentation network.

    Formula: S = Σ_k w_k A_k, with w_k = mean_i ∂y/∂A_ki and y the mean class score of the region.

    Choose the class and its pixels with `saliency.region`. Other targets are explained at the same layer.

    Values: (N, 1, h, w), signed, in units of the mean score of the region; the paper takes the sum of its pixels.

    Source: Vinogradova et al., "Towards Interpretable Semantic Segmentation via Gradient-weighted Class Activation
        Mapping" (2020), https://arxiv.org/abs/2002.11434.
    """

    name = "seg_grad_cam"


class SegXResCAM(BottleneckCAM, HiResCAM):
    """HiResCAM of the pixels of a region, with the gradient replaced by its maximum in each block of cells.

    Formula: S_i = Σ_k A_ki max_j ∂y/∂A_kj, with j in the block of i and y the mean class score of the region.

    Blocks of one cell give `HiResCAM`. The layer is the bottleneck, as for `SegGradCAM`.

    Args:
        block: The height and width of a block, in cells of the layer. Blocks at the right and bottom edge may be
            smaller.

    Values: (N, 1, h, w), signed, in units of the mean score of the region.

    Source: Hasany et al., "Seg-XRes-CAM: Explaining Spatially Local Regions in Image Segmentation" (2023),
        https://openaccess.thecvf.com/content/CVPR2023W/XAI4CV/html/Hasany_Seg-XRes-CAM_Explaining_Spatially_Local_Regions_in_Image_Segmentation_CVPRW_2023_paper.html.
    """

    name = "seg_xres_cam"

    block: Option[int] = Option(2, check_integer)

    def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the sum over the channels of the gradients' maxima in blocks times activation."""
        enlarged = max_pool(gradient, self.block, ceil_mode=True)
        for axis in spatial(gradient):
            enlarged = enlarged.repeat_interleave(self.block, axis).narrow(axis, 0, gradient.shape[axis])
        return super().combine(activation, enlarged)
