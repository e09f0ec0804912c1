"""ViT-CX: the effect on the score of showing only the regions of clusters of feature maps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attribution.options import Option
from ..axes import along_rows, resize
from ..engine.estimates import normal
from ..engine.multi_pass import ImageAttribution, Passes, TimedAttribution
from ..errors import optional_import
from ..validation import check_number
from .layer_passes import LayerPasses, stretched


class ViTCX(LayerPasses, TimedAttribution):
    """Effect on the score of showing only the region highlighted by a cluster of feature maps.

    Formula: S_i = Σ_m (e_m − ē) m_i / Σ_m m_i, with e_m = y(x ⊙ m + z ⊙ (1 − m)) − y(x + z ⊙ (1 − m)) for a mask m and
    noise z, and ē their mean.

    The feature maps are resized to the image and stretched to 0..1. Maps with a small cosine distance form a cluster,
    by agglomerative clustering with complete linkage. The sum of a cluster, stretched to 0..1, is a mask M. Its effect
    is f(x M + z (1 - M)) - f(x + z (1 - M)), where z is normal noise: the second score cancels the effect of the noise
    alone. The value of a pixel is the mean of the effects, weighted by the fraction of the pixel that each mask shows.
    This corrects for pixels that many masks show. The mean effect of all masks is subtracted: the paper's map is the
    same up to a constant and a factor. The paper takes class probabilities: the target `saliency.probability(...)`.

    The clusters depend on the network's rounding, see docs/transformers.md for bfloat16. Feature maps that are constant
    highlight nothing and form no cluster. With a single mask there is nothing to
    compare, so the map is 0.

    Args:
        layer: As for `LayerAttribution`. In a vision transformer with a class token, this is the first normalisation of
            the last block, as in the authors' code. Other networks have feature maps too.
        distance: The largest cosine distance of two feature maps of one cluster.
        noise: The standard deviation of the noise, as a share of the range of the image's values. For a photo, 0.02 is
            about the paper's 0.1 in the normalised input.

    Values: (N, 1, H, W), signed, in score units; 0 if no mask shows the pixel.

    Raises:
        DependencyError: SciPy is not installed.

    Source: Xie et al., "ViT-CX: Causal Explanation of Vision Transformers" (2023), https://arxiv.org/abs/2211.03064.
    """

    name = "vit_cx"
    cost = "1 forward, 2 forwards for each cluster of feature maps"
    assumes_unsigned = False

    distance: Option[float] = Option(0.1, check_number, above=0, most=1)
    noise: Option[float] = Option(0.02, check_number, least=0)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the map of one image."""
        layer, size = self.read_layer(passes), passes.x.shape[2:]
        maps = stretched(resize(layer.maps[None], size))[0]
        maps = maps[maps.flatten(1).any(1)]
        if len(maps) < 2:
            return ImageAttribution(maps.new_zeros(1, *size), layer=layer.layer)
        masks = self.cluster_masks(maps)
        note = f"{len(masks)} clusters of {len(maps)} feature maps"
        effects = self.effects(passes, masks[:, None])
        shown = masks[: len(effects)]  # (k, H, W)
        total = torch.tensordot((effects - effects.mean()).to(shown), shown, 1)
        values = total / shown.sum(0).clamp(min=torch.finfo(shown.dtype).tiny)  # 0 where no mask shows the pixel
        return ImageAttribution(values[None], layer=layer.layer, notes=[note])

    def cluster_masks(self, maps: Tensor) -> Tensor:
        """Return a mask per cluster (clusters, H, W) of feature maps (K, H, W), largest clusters first."""
        hierarchy = optional_import("scipy.cluster.hierarchy", "perturbation", "ViTCX")
        directions = F.normalize(maps.flatten(1))
        first, second = torch.triu_indices(len(maps), len(maps), 1, device="cpu")
        distances = (1 - directions @ directions.T).clamp(min=0).cpu()[first, second]  # of each pair
        tree = hierarchy.linkage(distances.numpy(), "complete")
        labels = torch.from_numpy(hierarchy.fcluster(tree, self.distance, "distance")).long() - 1
        order = labels.bincount().argsort(descending=True, stable=True)
        members = F.one_hot(labels)[:, order].to(maps)  # (K, clusters)
        return stretched(torch.tensordot(members.T, maps, 1)[None])[0]

    def effects(self, passes: Passes, masks: Tensor) -> Tensor:
        """Return the effects (k,) of masks (masks, 1, H, W); k < masks after the time limit."""
        x, deviation = passes.x, self.noise * (passes.x.max() - passes.x.min())

        def make(start: int, stop: int) -> Tensor:
            """Pass 2 i shows the image under mask i, and pass 2 i + 1 the whole image; both have the same noise."""
            numbers = range(start, stop)
            noise = [normal(x.shape[1:], self.seed, number // 2) for number in numbers]
            part = masks[[number // 2 for number in numbers]]
            is_whole = along_rows(torch.tensor([number % 2 for number in numbers], device=x.device), x)
            return x * torch.where(is_whole == 1, 1, part) + deviation * torch.stack(noise).to(part) * (1 - part)

        scores = passes.scores(make, 2 * len(masks), least=2)
        pairs = scores[: len(scores) // 2 * 2].view(-1, 2)
        return pairs[:, 0] - pairs[:, 1]
