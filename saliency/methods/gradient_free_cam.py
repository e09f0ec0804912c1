"""CAMs without gradients: weights from scores of masked images, or of forwards without parts of a layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..attribution.estimates import normal
from ..attribution.forward import Needs, SharedForward, TargetGradients
from ..attribution.options import Option, PositionalOption
from ..attribution.passes import ImageAttribution, MultiPassAttribution, Passes, TimedAttribution
from ..attribution.questions import Questions
from ..errors import NotApplicableError, TargetError, optional_import
from ..hooks.manager import HookManager
from ..hooks.pytree import first_tensor, tree_map_tensors, tree_tensors
from ..io.axes import along_axes, along_rows, at_least_float32, resize, spatial
from ..model.call import run_model
from ..model.layers import LayerLike, default_layer
from ..validation import check_choice, check_flag, check_integer, check_number
from .cam import is_close, layer_name, linear_head, warn_if_signed

RESIZED_PIXELS = 2**22
"""Pixels of the feature maps that ViT-CX resizes between two reports."""

Order = Literal["deviation", "gradient"]


def strongest(strength: Tensor, limit: int | None) -> Tensor:
    """Return the channels in descending order of strength (K,), at most `limit`; ties by number."""
    return torch.sort(strength, descending=True, stable=True).indices[:limit]


class LayerMaps:
    """Output of a layer for one image, and the channel and location of each of its values.

    Args:
        forward: A forward of the image (1, C, H, W), with the layer.

    Attributes:
        layer: The layer's name.
        raw: (1, ...) the output in the layout of the model.
        maps: (K, h, w) the output as maps; half precision as float32.
        output: The output of the model.
    """

    def __init__(self, forward: SharedForward) -> None:
        ((self.layer, self.raw),) = forward.layers.items()
        self.output, layout = forward.output, forward.layout(self.layer)
        self.maps = at_least_float32(layout(self.raw)[0])
        positions = torch.arange(self.raw.numel(), device=self.raw.device).view(self.raw.shape)
        self._positions = layout(positions)[0].flatten(1)  # (K, h * w) the index of each value in the raw output

    def without(self, channels: Tensor) -> Tensor:
        """Return the raw output (k, ...), where the channels (k, m) of each row are set to 0."""
        rows = self.raw.flatten()[None].repeat(len(channels), 1)
        rows.scatter_(1, self._positions[channels].flatten(1), 0)
        return rows.view(-1, *self.raw.shape[1:])

    def scaled(self, factors: Tensor) -> Tensor:
        """Return the raw output (k, ...), where the locations of each row are scaled by factors (k, h, w).

        Values without a location, such as class tokens, are unchanged.
        """
        rows = self.raw.flatten()[None].repeat(len(factors), 1)
        rows[:, self._positions] *= factors.to(rows).flatten(1)[:, None]
        return rows.view(-1, *self.raw.shape[1:])

    def weighted(self, weights: Tensor) -> Tensor:
        """Return the map (1, h, w): the sum over the channels of weight (K,) times activation."""
        return torch.einsum("k,k...->...", weights.to(self.maps), self.maps)[None]


class LayerPasses(MultiPassAttribution):
    """Base class of methods that read a layer of one image once, and then run the model many times.

    Args:
        layer: A dotted name, the module, or None for the last layer with spatial output; see `LayerAttribution`.

    Raises:
        LayerError: The layer does not exist, is not run, or has no spatial output.
    """

    sign = "positive"
    assumes_unsigned: ClassVar[bool] = True
    """As for `LayerCombination`."""

    layer: PositionalOption[LayerLike, str | None] = PositionalOption(check=layer_name, default=None, kw_only=False)

    def layers_for(self, x: Tensor, target: Questions) -> tuple[str, ...]:
        """Return the layer of a single image, unless the caller's autocast would round its output."""
        if len(x) > 1 or torch.is_autocast_enabled(x.device.type):
            return ()
        return (self.layer or default_layer(self.model, x, target),)

    def read_layer(self, passes: Passes) -> LayerMaps:
        """Read the layer, in the forward of the score if possible, else in one forward of the image.

        Raises:
            LayerError: The layer is not run, or has no spatial output.
        """
        if (forward := passes.forward) is None:
            name = self.layer or default_layer(self.model, passes.x, passes.target(1))
            forward = SharedForward(self.model, passes.x, Needs("none", layers=(name,)))
        layer = LayerMaps(forward)
        if self.assumes_unsigned:
            warn_if_signed(self.name, layer.maps[None])
        return layer


def stretched(maps: Tensor) -> Tensor:
    """Return maps (N, K, H, W), each stretched to 0..1; constant maps become 0."""
    low, high = maps.amin(axes := spatial(maps), keepdim=True), maps.amax(axes, keepdim=True)
    return (maps - low) / torch.where(high == low, torch.ones_like(high), high - low)


def resized(maps: Tensor, size: torch.Size, passes: Passes) -> Iterator[Tensor]:
    """Yield maps (K, h, w), resized to a size in parts (k, 1, H, W), and report after each part."""
    for part in torch.split(maps[:, None], max(1, RESIZED_PIXELS // size.numel())):
        yield resize(part, size)
        passes.report()


class ScoreCAM(LayerPasses, TimedAttribution):
    """Activations weighted by the score of the image masked with each channel.

    Formula: S = Σ_k w_k A_k, with w = softmax_k y(x ⊙ m_k) and m_k = up(A_k) stretched to 0..1.

    Each channel, resized and stretched to 0..1, is multiplied with the normalised image, so hidden pixels become the
    mean colour. The weights are the softmax over the channels of the resulting scores: equation 3 of the paper, whose
    baseline cancels. (The authors' code takes the class probabilities; the target `saliency.probability(...)` is the
    closest to it.) The logits of a confident model differ by much more than 1, so few channels hold most of the weight.

    Constant channels, such as dead channels, highlight nothing and have no weight. In the softmax they have the score
    of the empty image, which takes one forward for all of them. All weights are 0 if no mask changes the score.

    Args:
        channels: The number of channels to use; None for all.
        order: The criterion by which channels are chosen: "deviation", the standard deviation of their activations, or
            "gradient", their mean gradient, with one more forward and a backward. `channels=300, order="gradient"` is
            gScoreCAM, proposed for the thousands of channels of CLIP. (Its authors' code also gives weight to channels
            without a pass.)
        align_corners: Whether masks are resized so that the centres of corner cells lie on the corners of the image, as
            in pytorch-grad-cam. By default the outer corners of these cells do, as in drawn maps and in the authors'
            code.

    Values: (N, 1, h, w), a weighted mean of the channels, in units of activation; zero if no mask changes the score.

    Raises:
        LayerError: No gradient reaches the layer, and `order` is "gradient".

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer after a ReLU.

    Source: Wang et al., "Score-CAM" (2019), https://arxiv.org/abs/1910.01279; the order by gradients of Chen et al.,
        "gScoreCAM: What Objects Is CLIP Looking At?" (2022), https://doi.org/10.1007/978-3-031-26316-3_35.
    """

    name = "score_cam"
    units = "activation"
    cost = "1 forward, 1 forward for each channel that is not constant"
    draft_options: ClassVar[Mapping[str, Any]] = {}

    channels: Option[int | None] = Option(None, check_integer)
    order: Option[Order] = Option("deviation", check_choice, get_args(Order))
    align_corners: Option[bool] = Option(False, check_flag)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the map of one image."""
        x, layer = passes.x, self.read_layer(passes)
        is_flat = layer.maps.flatten(1).amax(1) == layer.maps.flatten(1).amin(1)
        chosen = strongest(self._strength(passes, layer).masked_fill(is_flat, -math.inf), self.channels)
        varied = chosen[~is_flat[chosen]]  # (m,) in descending order of strength
        flat = len(chosen) - len(varied)
        used, left_out = f"{len(varied)} of {len(is_flat)} channels as masks", len(is_flat) - len(chosen)
        notes = [f"{used}, one forward for the {flat} constant channels, {left_out} left out"]
        count = len(varied) + bool(flat)  # one empty mask at the end stands for all constant channels
        scores = torch.full((count,), math.nan, dtype=torch.float64, device="cpu")  # NaN: not run yet

        def make(start: int, stop: int) -> Tensor:
            large = resize(layer.maps[varied[start:stop]][:, None], x.shape[2:], align_corners=self.align_corners)
            masks = x.new_zeros(stop - start, 1, *x.shape[2:])
            masks[: len(large)] = stretched(large).to(masks)
            return x * masks

        def combined() -> ImageAttribution:
            weights, has_run = scores.new_zeros(len(is_flat)), ~scores.isnan()
            if bool((scores[has_run] != score.to(scores)).any()):
                channels = torch.ones_like(scores)
                channels[len(varied) :] = flat
                fractions = torch.where(has_run, scores + channels.log(), -math.inf).softmax(0)
                weights[varied.cpu()] = fractions[: len(varied)]
            return ImageAttribution(layer.weighted(weights), layer=layer.layer, notes=notes)

        for done in passes.forwards(make, count, partial=combined):
            scores[done.start : done.start + len(done.scores)] = done.scores.to(scores)
        if bool(scores.isnan().any()):
            notes.append(f"{int((~scores.isnan()).sum())} of {count} masks were run")
        return combined()

    def _strength(self, passes: Passes, layer: LayerMaps) -> Tensor:
        """Return the criterion (K,) by which channels are chosen."""
        if self.order == "deviation":
            return layer.maps.flatten(1).std(1, correction=0)
        with torch.enable_grad():
            forward = SharedForward(self.model, passes.x, Needs("layers", backwards=1, layers=(layer.layer,)))
            gradient = TargetGradients(forward, passes.target(1)).gradient(layer.layer)[0]
            return gradient.mean(spatial(gradient, 1))


class AblationCAM(LayerPasses, TimedAttribution):
    """Activations weighted by the drop in the score when the channel is set to zero.

    Formula: S = Σ_k w_k A_k, with w_k = y − y(A without channel k).

    The weight of a channel is y - y_k, where y is the score and y_k the score without the channel: positive if the
    channel supports the target, also for a negative score. (The paper divides by y, which is the same for all channels
    and inverts the map if y is negative.)

    Only the part of the model after the layer runs for each channel. If this part is pooling and one linear layer,
    which each call checks, the weights are computed in closed form. Channels that are zero everywhere have no effect,
    and are not run.

    Args:
        channels: The number of channels to remove, in descending order of energy; None for all.

    Values: (N, 1, h, w), signed, in units of score times activation.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer after a ReLU.

    Source: Desai and Ramaswamy, "Ablation-CAM" (2020), https://doi.org/10.1109/WACV45572.2020.9093360.
    """

    name = "ablation_cam"
    cost = "1 forward, 1 pass from the layer on for each channel; 2 forwards before pooling and a linear layer"
    units = "score times activation"

    channels: Option[int | None] = Option(None, check_integer)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the map of one image."""
        layer = self.read_layer(passes)
        energy = layer.maps.square().flatten(1).sum(1)
        channels = strongest(energy, self.channels)
        channels = channels[energy[channels] > 0]
        weights, count, notes = torch.zeros_like(energy), len(channels), list[str]()
        if count:
            drops = self._drops_in_closed_form(passes, layer, channels)
            if drops is not None:
                notes.append("in closed form: only pooling and one linear layer follow the layer")
            else:
                scores = passes.tail_scores(layer.layer, lambda i, j: layer.without(channels[i:j, None]), count)
                drops = passes.target(1)(layer.output) - scores  # both without the caller's autocast
            weights[channels[: len(drops)]] = drops.to(weights)
            if len(drops) < count:
                notes.append(f"{len(drops)} of {count} channels, in descending order of energy")
        return ImageAttribution(layer.weighted(weights), layer=layer.layer, notes=notes)

    def _drops_in_closed_form(self, passes: Passes, layer: LayerMaps, channels: Tensor) -> Tensor | None:
        """Return the drops (m,) without each channel if only pooling and a linear layer follow; else None.

        One forward without half of the channels tests the formula.
        """
        tensors = list(tree_tensors(layer.output))
        if len(tensors) != 1:
            return None
        try:
            weight = linear_head(self.model, layer.maps[None], layer.output, layer.layer)  # (classes, K)
        except (NotApplicableError, TargetError):  # TargetError: only the target can read the scores from the output
            return None
        losses = (weight * layer.maps.mean(spatial(layer.maps, 1)))[:, channels]  # (classes, m)

        raw = layer.without(channels[None, ::2])

        def replace(output: Any) -> Any:
            first = first_tensor(output)
            if first is None or first.shape != raw.shape:
                return None
            return tree_map_tensors(output, lambda tensor: raw.clone() if tensor is first else tensor)

        def is_right(start: int, stop: int) -> bool:
            with torch.no_grad(), HookManager() as hooks:
                hooks.revise(self.model.get_submodule(layer.layer), replace)
                changed = first_tensor(run_model(self.model, passes.x))
            return changed is not None and is_close(changed, tensors[0] - losses[:, ::2].sum(1))

        if not all(list(passes.chunks(is_right, 1))):
            return None
        whole = at_least_float32(tensors[0])  # half precision would round small drops away
        score = passes.target(1)(tree_map_tensors(layer.output, lambda _: whole))
        return score - passes.target(len(channels))(tree_map_tensors(layer.output, lambda _: whole - losses.T))


class ReciproCAM(LayerPasses):
    """The score when only one location of the layer is kept.

    Formula: S_i = y(A ⊙ b_i) − y(A ⊙ 0), with b_i = 1/4 at i, 1/8 next to i, 1/16 diagonal to i, 0 elsewhere.

    Each pass scales the layer's output to zero, except for one location and its neighbours. These are scaled to 1/4
    (the location), 1/8 (direct neighbours) and 1/16 (diagonal neighbours). Values without a location, such as a class
    token, are unchanged. The value of a location is the resulting score minus the score of a layer without any
    location. (The paper takes class probabilities, and stretches them to 0..1 for display: the target
    `saliency.probability(...)`.)

    Only the part of the model after the layer runs for each location.

    Args:
        alone: Whether to keep each location unscaled and without its neighbours. If only pooling and one linear layer
            follow, the values then equal the values of `CAM` divided by the number of locations.

    Values: (N, 1, h, w), signed, in score units.

    Source: Byun and Lee, "Recipro-CAM" (2022), https://arxiv.org/abs/2209.14074; for class tokens Byun and Lee,
        "ViT-ReciproCAM" (2023), https://arxiv.org/abs/2310.02588.
    """

    name = "recipro_cam"
    cost = "1 forward, 1 pass from the layer on for each location"
    units = "score"
    preview_options: ClassVar = {"chunk": 16}
    assumes_unsigned = False

    alone: Option[bool] = Option(False, check_flag)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the map of one image."""
        layer = self.read_layer(passes)
        size = layer.maps.shape[1:]
        kernel = near = layer.maps.new_tensor([0.25, 0.5, 0.25])
        for _ in size[1:]:
            kernel = kernel[..., None] * near

        def make(start: int, stop: int) -> Tensor:
            """Pass 0 shows no location; pass 1 + i shows location i."""
            numbers = torch.arange(start, stop, device=near.device)
            factors = F.one_hot(numbers, 1 + size.numel())[:, 1:].to(near).view(-1, 1, *size)
            if not self.alone:
                factors = (F.conv2d if len(size) == 2 else F.conv3d)(factors, kernel[None, None], padding=1)
            return layer.scaled(factors[:, 0])

        scores = passes.tail_scores(layer.layer, make, 1 + size.numel())
        values = (scores[1:] - scores[0]).to(layer.maps)
        return ImageAttribution(values.view(1, *size), layer=layer.layer)


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
    highlight nothing and form no cluster. With a single mask there is nothing to compare, so the map is 0.

    Args:
        layer: As for `LayerAttribution`. In a vision transformer with a class token, this is the first normalisation of
            the last block, as in the authors' code. Other networks have feature maps too.
        distance: The largest cosine distance of two feature maps of one cluster.
        noise: The standard deviation of the noise, as a fraction of the range of the image's values. For a photo, 0.02
            is about the paper's 0.1 in the normalised input.

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
        extremes = [maps.flatten(1).aminmax(dim=1) for maps in resized(layer.maps, size, passes)]
        low, high = (along_rows(torch.cat(ends), layer.maps) for ends in zip(*extremes, strict=True))
        maps = ((layer.maps - low) / (high - low))[(high > low).flatten()]  # 0..1 after resizing
        if len(maps) < 2:
            return ImageAttribution(maps.new_zeros(1, *size), layer=layer.layer)
        masks = torch.cat([stretched(sums) for sums in resized(self.cluster_sums(maps, size), size, passes)])
        note = f"{len(masks)} clusters of {len(maps)} feature maps"
        effects = self.effects(passes, masks)
        shown = masks[: len(effects), 0]  # (k, H, W)
        total = torch.tensordot((effects - effects.mean()).to(shown), shown, 1)
        values = total / shown.sum(0).clamp(min=torch.finfo(shown.dtype).tiny)  # 0 where no mask shows the pixel
        return ImageAttribution(values[None], layer=layer.layer, notes=[note])

    def cluster_sums(self, maps: Tensor, size: torch.Size) -> Tensor:
        """Return the sum of each cluster (clusters, h, w) of feature maps (K, h, w), largest clusters first."""
        hierarchy = optional_import("scipy.cluster.hierarchy", "perturbation", "ViTCX")
        # Resizing is linear along each axis, so the products of the resized maps follow from the small maps.
        units = [torch.eye(edge, dtype=maps.dtype, device=maps.device)[None] for edge in maps.shape[1:]]
        lines = [resize(unit, [edge])[0] for unit, edge in zip(units, size, strict=True)]
        products = maps.flatten(1) @ along_axes(maps, [line @ line.T for line in lines]).flatten(1).T
        similarities = products.cpu().numpy()  # (K, K)
        norms = np.sqrt(similarities.diagonal())
        distances = (1 - similarities / np.outer(norms, norms)).clip(0)
        tree = hierarchy.linkage(distances[np.triu_indices(len(maps), 1)], "complete")
        labels = torch.from_numpy(hierarchy.fcluster(tree, self.distance, "distance") - 1).long()
        order = labels.bincount().argsort(descending=True, stable=True)
        members = F.one_hot(labels)[:, order].to(maps)  # (K, clusters)
        return torch.einsum("kc,k...->c...", members, maps)

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
