"""`figure`, which draws any result of the toolkit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

from ..attribution.explanation import Explanation, Matches
from ..attribution.features import Features
from ..attribution.inputs import InputExplanations
from ..calls import answer_calls
from .figure import draw_features, draw_maps, draw_matches

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .figure_options import Entry, FigureOptions


def figure(
    result: Explanation | InputExplanations | Features | Matches | Mapping[str, Entry] | Iterable[Entry],
    **options: Unpack[FigureOptions],
) -> Figure:
    """Draw a result: explanations, or what `features`, `matches`, `attention`, `trust` and other functions return.

    - Explanations: each image once, then its maps side by side, each with a colour bar in the map's units.
      Explanations of the same image stand next to each other. The bar shows the colours before they are mixed with the
      image. A pointed end marks values beyond it. Lists of explanations are rows, as for `contact_sheet`. The keys of a
      mapping are the titles of its explanations. For a paper, `shared="method"` draws one row per image and one column
      per method, with one scale and one colour bar per column, as wide as a page with two columns (6.9 inches).
    - `InputExplanations`: each input with its share of the score and its map, all maps on one scale. An input that was
      given as a tensor is drawn in its own range.
    - `Features`: one column per image, the image and the principal components of its features in colours. The colours
      of all images have one scale. With `parts`, each part has a colour: of the largest part in a cell, and darker
      where its weight is smaller.
    - `Matches`: both images, and lines between the cells that match most. The width of a line is proportional to the
      magnitude of its match. Red matches raise the similarity, blue ones lower it. The strongest is on top. If matches
      are neighbours in both images, only the strongest is drawn.
    - A list of `LayerAttention`: one row per layer and one column per head, with the attention of a query to each patch
      of an image. Each panel has its own scale. Its title has the value at full colour.
    - `TrustCard`: the overlay, and one axis for each property, with better values to the right. The bar of the map
      shows two standard errors. The grey bars of the controls show their ranges. The map is green where it is better
      than all controls, and red where it is worse.
    - The table of `ledger_table`: the shares of the score as horizontal bars that add up to the score. Each bar begins
      where the previous one ends: positive shares go to the right, in red, and negative ones to the left, in blue. The
      last bar is the score. The bars of several images are one below the other, on one scale.
    - The table of `gradient_statistics`: the norm of the gradient at each layer from the input (left) to the output
      (right), on a log axis. Each point is one call of a layer, in forward order, or one parameter. The backward pass
      runs from right to left: a gradient that decreases towards the left vanishes, and one that increases explodes.
      Marks at the lower edge show gradients that are zero or missing, and at the upper edge NaN or infinity.

    Args:
        result: The result.
        columns: For explanations, the number of panels side by side, with the image; by default at most 5, in rows of
            equal length.
        title: For explanations, a title above everything.
        opacity: For explanations, as in `overlay`.
        colormap: For explanations, as in `overlay`.
        smoothing: For explanations, as in `overlay`.
        shared: For explanations, whether all maps have one scale, so that equal colours mean equal values; "method" for
            one scale per method.
        label: For explanations, the label of the bars; by default the method's units.
        parse_math: For explanations, whether `title`, `label` and the titles of columns may contain formulas, such as
            "$w_k$".
        foreground: For features, as in `Features.pca`.
        parts: For features, the number of parts, as in `Features.parts`; None for principal components.
        count: For matches, the maximum number of lines; by default 20.
        query: For attention, as in `LayerAttention.maps`. A point is marked by a cross.
        image: For attention, the index of the image.
        size: For gradients, width and height in inches.

    Returns:
        A matplotlib Figure: `figure(e).savefig("cat.pdf")`. In PDF and SVG, text is text, and images have 300 dots per
        inch. A notebook shows it directly.

    Raises:
        LayerError: As for `Features.pca` and `LayerAttention.maps`.
        NonFiniteError: A value of an explanation is NaN or infinite.
        NotApplicableError: The attention is of a volume.
        RenderError: There is nothing to draw, the result has no image, or an option is invalid.
        TargetError: As for `LayerAttention.maps`.
        TypeError: The result has no such option.

    Warns:
        SaliencyWarning: A map is nearly even, or below the rounding error, and is drawn as zero.
    """
    return answer_calls(_drawing_of(result), "figure")(result, **options)


def _drawing_of(result: object) -> Callable[..., Figure]:
    """Return the function that draws results of a type, or lists of a type. Drawing of metrics loads only for them."""
    first = result[0] if isinstance(result, Sequence) and result else result
    if isinstance(first, Explanation | InputExplanations | list | tuple):
        return draw_maps
    from .measurements import DRAWINGS

    drawings: dict[type, Callable[..., Figure]] = {Features: draw_features, Matches: draw_matches, **DRAWINGS}
    return drawings.get(type(result)) or drawings.get(type(first), draw_maps)
