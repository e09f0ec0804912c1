# Types of the arguments of `figure`, for type checkers only: the types of results load with their drawings.
from collections.abc import Sequence
from typing import Literal, TypeAlias, TypedDict

from ..attribution.explanation import Explanation
from ..evaluation.ledger import LedgerRow
from ..evaluation.trust import Property
from ..inspection.attention_record import LayerAttention, Query
from ..inspection.statistics import LayerGradients
from .overlay import Opacity

Entry: TypeAlias = Explanation | Sequence[Explanation] | LayerAttention | LayerGradients | LedgerRow | Property

class FigureOptions(TypedDict, total=False):
    # Each belongs to one type of result.
    columns: int | None
    title: str | None
    opacity: Opacity
    colormap: str | None
    smoothing: float
    shared: bool | Literal["method"]
    label: str | None
    parse_math: bool
    foreground: bool
    parts: int | None
    count: int
    query: Query
    image: int
    size: tuple[float, float]
