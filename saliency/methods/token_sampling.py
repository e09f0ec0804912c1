"""Methods for vision transformers that score parts of an image: some of its tokens, or clusters of feature maps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attribution.answer import explained_answer
from ..attribution.forward import Needs, SharedForward, TargetGradients
from ..attribution.options import Option
from ..axes import along_rows, at_least_float32, resize
from ..engine.estimates import generator, normal, precise_type
from ..engine.multi_pass import ImageAttribution, PassRunner, TimedAttribution
from ..errors import ModelError, NotApplicableError, optional_import
from ..hooks.manager import HookManager, is_hookable
from ..hooks.model_state import run_model
from ..validation import check_integer, check_number
from .layer_passes import LayerPasses, stretched
from .token_attention import TokenAttention

_INSTEAD = "vit_cx hides parts of the image instead"


def mean_where_shown(effects: Tensor, masks: Tensor) -> Tensor:
    """Return the mean effect of the masks that show each position, minus the mean effect of all masks.

    Args:
        effects: (k,) the effect of each mask.
        masks: (k, ...) the fraction of each position that each mask shows, 0 to 1.

    Returns:
        (...) the weighted means; 0 if no mask shows the position.
    """
    effects = (effects - effects.mean()).to(masks)
    total: Tensor = torch.tensordot(effects, masks, 1)
    return total / masks.sum(0).clamp(min=torch.finfo(masks.dtype).tiny)


class TIS(TimedAttribution):
    """Mean score of a vision transformer when a patch is among its input tokens.

    Formula: S_i = Σ_m (y_m − ȳ) m_i / Σ_m m_i, with y_m the score under mask m, ȳ their mean, and m_i = 1 if the mask
    keeps patch i, else 0.

    The activations of all blocks are one map over the patches for each block and channel. K-means groups these maps.
    Each centre is a mask that keeps the patches with the largest values. The other tokens are removed before the first
    block, after the position embedding, so hidden patches are not replaced. Class and register tokens stay.

    The paper's map is the mean score of the masks that keep a patch: the sum of the scores, divided by the coverage.
    Here the mean score of all masks is subtracted, because the paper's map is shown stretched to 0..1, which removes a
    constant. The paper takes class probabilities: `attribute(image, saliency.probability("espresso"))`.

    Every forward runs the model itself, regardless of `precision`. The masks and the differences of scores depend on
    the network's rounding, see docs/transformers.md for bfloat16.

    Args:
        masks: The number of masks. At most the number of channels of all blocks.
        visible: The share of the patches that each mask keeps.

    Values: (N, 1, h, w), signed, in score units; 0 for a patch that no mask keeps.

    Raises:
        NotApplicableError: The network has no attention among all tokens in each block, or needs all of its tokens:
            windows, relative position biases, rotary positions. Answers of vision-language models are refused.
        LayerError: The tokens are not a grid of patches.
        DependencyError: SciPy is not installed.

    Source: Englebert et al., "Explaining through Transformer Input Sampling" (2023),
        https://doi.org/10.1109/ICCVW60793.2023.00088.
    """

    name = "tis"
    cost = "3 forwards, 1024 forwards with half of the patches"
    sign = "positive"
    needs = Needs(attention=True)
    preview_options: ClassVar = {"masks": 8}

    masks: Option[int] = Option(1024, check_integer)
    visible: Option[float] = Option(0.5, check_number, above=0, below=1)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Compute the map of one image."""
        block, cells, tokens = self.read_blocks(passes)
        patches = at_least_float32(tokens[cells.flatten()])
        masks = self.patch_masks(patches.T)
        passes.notes.append(f"{len(masks)} masks, each of {int(masks[0].sum())} of {len(patches)} patches")
        is_kept = masks.new_ones(len(masks), len(tokens))
        is_kept[:, cells.flatten()] = masks
        visible = is_kept.nonzero()[:, 1].view(len(masks), -1)
        effects = self.scores(passes, block, visible) - score
        values = mean_where_shown(effects, masks[: len(effects)].to(precise_type(effects)))
        return ImageAttribution(values.view(1, *cells.shape).to(at_least_float32(passes.x).dtype))

    def read_blocks(self, passes: PassRunner) -> tuple[str, Tensor, Tensor]:
        """Return the name of the first block, the token of each cell (h, w), and the activations (tokens, K).

        The activations have the channels of all blocks.

        Raises:
            NotApplicableError: An answer is explained; or the network has no attention among all tokens in each block,
                or no module for a block.
            LayerError: The tokens are not a grid of patches.
        """
        if explained_answer() is not None:  # language models need all of their tokens
            raise NotApplicableError(f"{self.name} explains images, not answers; {_INSTEAD}")
        named = self.model.named_modules()
        names = tuple(name for name, module in named if name and is_hookable(self.model, name, module))
        with torch.enable_grad():
            forward = SharedForward(self.model, passes.x, replace(self.needs, modules=names))
            attention = TokenAttention(TargetGradients(forward, passes.target(1)), self.name)
        blocks = _block_names(attention)
        outputs = list(SharedForward(self.model, passes.x, Needs("none", layers=tuple(blocks))).layers.values())
        shape = (1, attention.tokens)
        if len(outputs) < len(attention.blocks) or any(output.shape[:2] != shape for output in outputs):
            problem = f"{type(self.model).__name__} has no module for each block that returns tokens (N, tokens, C)"
            raise NotApplicableError(f"{self.name}: {problem}; {_INSTEAD}")
        cells = attention.layout(torch.arange(attention.tokens, device=passes.x.device)[None, :, None])[0, 0]
        return blocks[0], cells, torch.cat(outputs, 2)[0]

    def patch_masks(self, maps: Tensor) -> Tensor:
        """Return the patches that each mask keeps, as bool (masks, patches), given maps over them (maps, patches)."""
        kmeans = optional_import("scipy.cluster.vq", "perturbation", "TIS").kmeans
        order = torch.randperm(len(maps), generator=generator(self.seed), device="cpu")
        points = maps.cpu()
        centres, _ = kmeans(points.numpy(), points[order[: self.masks]].numpy(), thresh=1e-4 * float(points.std()))
        count = max(1, int(self.visible * maps.shape[1]))
        visible = torch.from_numpy(centres).to(maps.device).topk(count).indices
        return torch.zeros(centres.shape, dtype=torch.bool, device=maps.device).scatter_(1, visible, True)

    def scores(self, passes: PassRunner, block: str, visible: Tensor) -> Tensor:
        """Return the scores (k,) if the first block gets only `visible` (masks, n) tokens; k < masks after the
        time limit.

        Raises:
            NotApplicableError: The model needs all of its tokens.
        """

        def compute(start: int, stop: int) -> Tensor:
            rows = visible[start:stop, :, None]
            with torch.no_grad(), HookManager() as hooks:
                hooks.revise_input(
                    self.model.get_submodule(block),
                    lambda tokens: tokens.gather(1, rows.expand(-1, -1, tokens.shape[2])),
                )
                output = run_model(self.model, passes.x.expand(len(rows), *passes.x.shape[1:]))
            return passes.target(len(rows))(output)

        try:
            return torch.cat(list(passes.chunks(compute, len(visible))))
        except ModelError as error:
            problem = f"{type(self.model).__name__} cannot run on a part of its tokens (fixed positions or windows)"
            raise NotApplicableError(f"{self.name}: {problem}; {_INSTEAD}") from error


def _block_names(attention: TokenAttention) -> list[str]:
    """Return the outermost module of each block that runs no other attention; none for a block without one."""
    grads = attention.grads
    runs = [grads.forward.operations.modules(call.node) for call in grads.attention]
    counts = Counter(chain.from_iterable(runs))
    single = [[name for name in run if counts[name] == 1] for run in runs[: len(attention.blocks)]]
    return [min(run, key=len) for run in single if run]


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
        noise: The standard deviation of the noise, in units of the model's input.

    Values: (N, 1, H, W), signed, in score units; 0 if no mask shows the pixel.

    Raises:
        DependencyError: SciPy is not installed.

    Source: Xie et al., "ViT-CX: Causal Explanation of Vision Transformers" (2023), https://arxiv.org/abs/2211.03064.
    """

    name = "vit_cx"
    cost = "1 forward, 2 forwards for each cluster of feature maps"
    assumes_unsigned = False

    distance: Option[float] = Option(0.1, check_number, above=0, most=1)
    noise: Option[float] = Option(0.1, check_number, least=0)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Compute the map of one image."""
        layer, size = self.read_layer(passes), passes.x.shape[2:]
        maps = stretched(resize(layer.maps[None], size))[0]
        maps = maps[maps.flatten(1).any(1)]
        if len(maps) < 2:
            return ImageAttribution(maps.new_zeros(1, *size), layer=layer.layer)
        masks = self.cluster_masks(maps)
        passes.notes.append(f"{len(masks)} clusters of {len(maps)} feature maps")
        effects = self.effects(passes, masks[:, None])
        return ImageAttribution(mean_where_shown(effects, masks[: len(effects)])[None], layer=layer.layer)

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

    def effects(self, passes: PassRunner, masks: Tensor) -> Tensor:
        """Return the effects (k,) of masks (masks, 1, H, W); k < masks after the time limit."""
        x, passes.least = passes.x, 2

        def make(start: int, stop: int) -> Tensor:
            """Pass 2 i shows the image under mask i, and pass 2 i + 1 the whole image; both have the same noise."""
            numbers = range(start, stop)
            noise = [normal(x.shape[1:], self.seed, number // 2) for number in numbers]
            part = masks[[number // 2 for number in numbers]]
            is_whole = along_rows(torch.tensor([number % 2 for number in numbers], device=x.device), x)
            return x * torch.where(is_whole == 1, 1, part) + self.noise * torch.stack(noise).to(part) * (1 - part)

        scores = torch.cat([done.scores for done in passes.forwards(make, 2 * len(masks))])
        pairs = scores[: len(scores) // 2 * 2].view(-1, 2)
        return pairs[:, 0] - pairs[:, 1]
