"""Dense features of a backbone as maps: their similarity to a patch, and their principal components in colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import LayerError, NonFiniteError, TargetError, plural
from ..hooks.manager import HookManager
from ..io.axes import along_rows, at_least_float32, require_two_axes
from ..io.geometry import Frame, Geometry
from ..io.inputs import ImagesLike, read
from ..io.preprocess import PreprocessLike, Whole, without_crop
from ..model.call import ForwardArgs, arguments_of, model_attribute, prepared_for_attribution, reference_tensor, unwrap
from ..model.layers import LayoutFunction, feature_layer, find
from ..targets.boxes import as_place, as_text
from ..targets.question import QuestionFacts
from ..validation import check_integer
from .estimates import generator
from .explanation import Explanation
from .forward import Needs, SharedForward

COMPONENTS = 3  # red, green and blue


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Features of images at one layer, without the tokens that have no position, such as the class token.

    Attributes:
        values: (N, K, h, w) the features.
        layer: The name of the layer.
        input_size: (H, W) of the model's input.
        frames: The position of the model's input on each original image; None for an image given as a tensor.
        outliers: (N, h, w) of bool, the cells whose tokens have an outlying norm, as for methods of attention. Such
            tokens hold information about the whole image. None if no layer norm reads tokens.
    """

    values: Tensor
    layer: str
    input_size: tuple[int, int]
    frames: tuple[Frame | None, ...]
    outliers: Tensor | None = None

    def __repr__(self) -> str:
        """Return one line: the number of images, the layer, and the shape of the values."""
        shape = tuple(self.values.shape)
        return f"<Features of {plural(len(self.values), 'image')} at {self.layer}, values {shape}>"

    def similarity(self, point: Sequence[float] | None = None, image: int = 0) -> Explanation:
        """Return the cosine similarity of every cell of all images to one cell.

        The result is an explanation of N images, with values (N, 1, h, w) from -1 to 1. `overlay`, `figure` and
        `contact_sheet` draw it, and hatch the outliers. Its `scores` are the means of the maps.

        Args:
            point: (x, y) of the cell, in pixels of the original image, or of the model's input if the image was given
                as a tensor. By default the mean of all cells of the image that are not outliers.
            image: The index of the image.

        Raises:
            IndexError: There is no such image.
            TargetError: The point is not a pair of numbers, or is not on the part of the image that the model sees.
        """
        values, position = self.values[image], as_place("point", point, 2)
        if position is None:
            query = values[:, self._shown[image]].mean(1)  # (K,)
        else:
            query = values[:, *cell_at(position, self.frames[image], self.input_size, values.shape[1:], image)]
        maps = F.cosine_similarity(self.values, query[None, :, None, None])[:, None]
        name = f"similarity to {f'{as_text(position)} of ' if position else ''}image {image}"
        return self._explanation(maps, "feature_similarity", name, "cosine similarity")

    def parts(self, count: int, *, seed: int = 0) -> list[Explanation]:
        """Divide the features into parts, each an explanation of all images: by semi-nonnegative matrix factorisation.

        The features of a cell are approximated by a weighted sum of the features of the parts. The weights are not
        negative: they are the values of the parts at this cell. The features may have any sign, as in transformers. The
        same part has the same features in all images, so pass several images of one kind of object. The values (N, 1,
        h, w) of a part are fractions of its largest; the largest part is the first.

        Args:
            count: The number of parts.
            seed: The seed of the start.

        Raises:
            LayerError: There are fewer cells than parts, not counting outliers.

        Source: Ding et al., "Convex and Semi-Nonnegative Matrix Factorizations" (2010),
            https://doi.org/10.1109/TPAMI.2008.277; Collins et al., "Deep Feature Factorization" (2018),
            https://arxiv.org/abs/1806.10206.
        """
        shown, cells = self._shown.cpu(), self.values.cpu().movedim(1, -1).double()
        if check_integer("count", count) > int(shown.sum()):
            raise LayerError(f'the features of layer "{self.layer}" have {int(shown.sum())} cells for {count} parts')
        weights = _semi_nmf(cells[shown], count, seed)  # (M, count)
        weights = weights[:, weights.sum(0).argsort(descending=True)]
        maps = torch.zeros(*shown.shape, count, dtype=weights.dtype, device="cpu")
        maps[shown] = weights / weights.amax(0).clamp(min=1e-30)
        names = [f"part {number + 1} of {count}" for number in range(count)]
        parts = zip(maps.movedim(-1, 0)[:, :, None].to(self.values), names, strict=True)
        return [
            self._explanation(part, "feature_parts", name, "fraction of the largest weight") for part, name in parts
        ]

    def _explanation(self, maps: Tensor, method: str, name: str, units: str) -> Explanation:
        """Return maps (N, 1, h, w) as an explanation; its scores are their means."""
        return Explanation(
            maps,
            maps.mean((1, 2, 3)),
            self.layer,
            {} if self.outliers is None else {"outliers": self.outliers},
            method=method,
            questions=(QuestionFacts(name),) * len(maps),
            input_size=self.input_size,
            frames=self.frames,
            sign="positive",
            title="Features",
            units=units,
        )

    def pca(self, *, foreground: bool = True) -> Tensor:
        """Return the first three principal components of the cells of all images as colours (N, 3, h, w), 0 to 1.

        Equal colours mean similar features, also in different images. First, the first component of all cells is
        divided into two parts by Otsu's threshold. The foreground is the part with the smaller fraction of its cells at
        the borders of the images. The colours of all other cells, and of outliers, are 0. The components of the
        foreground are then scaled to unit variance over all images and mapped by sigmoid(2 z), as in the demo of
        DINOv3. The largest weight of each component is positive, so the colours are always the same.

        Args:
            foreground: Whether the background is removed first.

        Raises:
            LayerError: The layer has fewer than three channels, or fewer than two cells are left.

        Source: Oquab et al., "DINOv2" (2023), https://arxiv.org/abs/2304.07193; Otsu, "A Threshold Selection Method
            from Gray-Level Histograms" (1979), https://doi.org/10.1109/TSMC.1979.4310076.
        """
        shown, cells = self._shown.cpu(), self.values.cpu().movedim(1, -1).double()  # (N, h, w, K)
        if self.values.shape[1] < COMPONENTS or shown.sum() < 2:
            few = f"{self.values.shape[1]} channels and {int(shown.sum())} cells"
            raise LayerError(f'the features of layer "{self.layer}" have {few}; expected at least 3 channels, 2 cells')
        if foreground:
            first = _components(cells[shown], 1)[:, 0]
            high, border = first > _otsu(first), torch.ones_like(shown)
            border[:, 1:-1, 1:-1] = False
            shares = [border[shown][part].double().mean().nan_to_num(2) for part in (high, ~high)]
            shown = shown.masked_scatter(shown, high if shares[0] <= shares[1] else ~high)
        components, colors = _components(cells[shown], COMPONENTS), torch.zeros_like(cells[..., :COMPONENTS])
        scale = components.square().mean(0).sqrt().clamp(min=1e-30)
        colors[shown] = (2 * components / scale).sigmoid()
        return colors.movedim(-1, 1).to(self.values)

    @property
    def _shown(self) -> Tensor:
        """The cells (N, h, w) that are not outliers."""
        return torch.ones_like(self.values[:, 0], dtype=torch.bool) if self.outliers is None else ~self.outliers


def cell_at(
    point: tuple[float, ...], frame: Frame | None, input_size: tuple[int, int], grid: Sequence[int], image: int
) -> tuple[int, int]:
    """Return the row and the column of the cell at a point.

    Args:
        point: (x, y) in pixels of the original image, or of the model's input without a frame.
        frame: The position of the model's input on the image.
        input_size: (H, W) of the model's input.
        grid: (h, w) of the cells.
        image: The index of the image, for errors.

    Raises:
        TargetError: The point is outside the part of the image that the model sees.
    """
    (x, y), geometry = point, Geometry.of(frame, input_size)
    column, row = geometry.to_input((x, y, x, y))[:2]
    (height, width), (h, w) = input_size, grid
    if not (0 <= column < width and 0 <= row < height):
        left, top, right, bottom = (round(edge) for edge in geometry.box)
        part = f"part of image {image} that the model sees, x {left} to {right} and y {top} to {bottom}"
        raise TargetError(f"the point {as_text(point)} is outside the {part}")
    return int(row * h / height), int(column * w / width)


def features(
    model: nn.Module,
    images: ImagesLike,
    layer: str | nn.Module | None = None,
    *,
    preprocess: PreprocessLike | None = None,
    whole: Whole = False,
    layout: LayoutFunction | None = None,
    forward_args: ForwardArgs = (),
) -> Features:
    """Return the features of images at a layer as maps, from one forward.

        features = saliency.features(model, ["cat.jpg", "dog.jpg"])
        saliency.figure(features.similarity((300, 120)), shared=True)  # the similarity to the cell at this pixel
        saliency.figure(features)  # principal components in colours

    Args:
        model: Any backbone, with or without a head. It is unchanged.
        images: One or several images, as for `Attribution.attribute`.
        layer: A dotted name or the module itself; by default the last layer with spatial output, such as the final norm
            of a vision transformer. For a segmentation, it is the layer before the scores.
        preprocess: As for `Attribution`.
        whole: As for `Attribution`: True or "aspect" shows the model the whole image instead of a crop.
        layout: As for `Attribution`.
        forward_args: As for `Attribution.attribute`.

    Raises:
        ImageError: An image cannot be read, or the images differ in size.
        LayerError: The layer does not exist or has no spatial output.
        NonFiniteError: A feature is NaN or infinite.
        NotApplicableError: The input is a volume; `saliency.inspection.activations` accepts it.
    """
    network = unwrap(model)
    preprocess = model_attribute("preprocess", model) if preprocess is None else preprocess
    preprocess = without_crop(preprocess, whole) if whole else preprocess
    layout = model_attribute("layout", model) if layout is None else layout
    batch = read(images, preprocess, like=reference_tensor(network))
    require_two_axes(batch.inputs, "saliency.features")
    x, lengths = batch.inputs, dict[tuple[int, ...], Tensor]()  # norms of tokens, by (N, tokens)
    with prepared_for_attribution(network, **arguments_of(forward_args, batch), layout=layout):
        name = feature_layer(network, x) if layer is None else find(network, layer)[0]
        with HookManager(persistent=True) as hooks:  # the forward has a manager of its own
            for module in network.modules():
                if isinstance(module, nn.LayerNorm):
                    hooks.revise_input(module, partial(_measure, lengths))
            forward = SharedForward(network, x, Needs("none", layers=(name,)))
        maps = forward.layout(name)
        values = at_least_float32(maps(forward.layers[name].detach()))
        tokens = lengths.get(tuple(forward.layers[name].shape[:2])) if maps.kind == "NTC" else None
        outliers = None if tokens is None else outlying(maps(tokens)[:, 0])
    if not bool(values.isfinite().all()):
        raise NonFiniteError(f'the features of layer "{name}" are NaN or infinite')
    return Features(values, name, (int(x.shape[-2]), int(x.shape[-1])), batch.frames, outliers)


def _measure(lengths: dict[tuple[int, ...], Tensor], tokens: Tensor) -> Tensor:
    """Store the norms (N, tokens, 1) of tokens, replacing those of earlier calls, and return the tokens."""
    lengths[tuple(tokens.shape[:2])] = at_least_float32(tokens.detach()).norm(dim=-1, keepdim=True)
    return tokens


def outlying(lengths: Tensor) -> Tensor:
    """Return the tokens whose norms (N, h, w) exceed the median of the image by 5 deviations: (N, h, w) of bool.

    The deviation is the median of absolute deviations in the image. The norm is also at least twice the median:
    smaller excesses occur at objects, up to 1.7 times the median with `shapes_vit`.

    Source: Darcet et al., "Vision Transformers Need Registers" (2023), https://arxiv.org/abs/2309.16588.
    """
    median = along_rows(lengths.flatten(1).median(1).values, lengths)
    deviation = along_rows((lengths - median).abs().flatten(1).median(1).values, lengths)
    return lengths > torch.maximum(median + 5 * deviation, 2 * median)


def _components(cells: Tensor, count: int) -> Tensor:
    """Return the first principal components (M, count) of cells (M, K); the largest weight of each is positive."""
    centred = cells - cells.mean(0)
    weights = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -count:].flip(1)  # (K, count)
    largest = weights.gather(0, weights.abs().argmax(0, keepdim=True))
    scores: Tensor = centred @ (weights * largest.sign())
    return scores


def _otsu(values: Tensor) -> Tensor:
    """Return the threshold that divides values (M,) into two parts with the smallest variance inside both."""
    ordered = values.sort().values
    below = torch.arange(1, len(values), dtype=values.dtype, device="cpu")
    sums = ordered.cumsum(0)
    difference = sums[:-1] / below - (sums[-1] - sums[:-1]) / (len(values) - below)
    between = below * (len(values) - below) * difference.square()
    return ordered[between.argmax()]


def _semi_nmf(cells: Tensor, count: int, seed: int, steps: int = 100) -> Tensor:
    """Return weights (M, count) >= 0, with which `count` vectors of any sign approximate cells (M, K)."""
    start = torch.randint(len(cells), (1,), generator=generator(seed), device="cpu").item()
    directions, chosen = F.normalize(cells), [int(start)]
    while len(chosen) < count:  # the cell that is least similar to the chosen ones
        chosen.append(int((directions @ directions[chosen].T).amax(1).argmin()))
    nearest = (directions @ directions[chosen].T).argmax(1)
    weights = F.one_hot(nearest, count).to(cells) + 0.2
    for _ in range(steps):
        vectors = torch.linalg.pinv(weights) @ cells  # (count, K)
        along, between = cells @ vectors.T, vectors @ vectors.T
        more = along.clamp(min=0) + weights @ (-between).clamp(min=0)
        less = (-along).clamp(min=0) + weights @ between.clamp(min=0)
        weights = weights * (more / less.clamp(min=1e-30)).sqrt()
    return weights
