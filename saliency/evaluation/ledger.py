"""The ledger of an explanation, which accounts for its score, as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..attribution.explanation import Explanation, method_titles, single_images
from ..errors import RenderError
from ..tables import Column, Table, number, share


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One part of the score of an image. The last two rows of an image are the residual and the score.

    Attributes:
        name: The name of the part, "residual" or "score".
        share: The part in score units.
        percent: The part as a percentage of the score; NaN if the score is zero.
        image: The index of the image in the table.
        target: The name of the target.
        method: The name of the method's class, with the settings in which methods of equal name differ.
    """

    name: str
    share: float
    percent: float
    image: int
    target: str
    method: str


_ENTRY = (
    Column("entry", "name", align="left"),
    Column("share", "share", number, hint="in score units"),
    Column("percent", "percent", "{:z.1f} %".format, hint="of the score"),
)
_IMAGE = (Column("image", "image"), Column("target", "target", align="left"), Column("method", "method", align="left"))


def ledger_table(explanations: Explanation | Iterable[Explanation]) -> Table[LedgerRow]:
    """Return a table of the parts of the score, such as the parts of the input and of the biases.

    The parts and the residual of an image sum to its score.

    Args:
        explanations: One or more explanations, of one or more images, by methods with a ledger.

    Returns:
        A sequence of rows that prints as text, displays as HTML and converts with `dataframe()`: one row per part,
        then the residual and the score. The notes list the operations that each method treated.

    Raises:
        RenderError: There is no explanation, or an explanation has no ledger.
    """
    images = single_images(explanations, "ledger_table")
    rows, notes = list[LedgerRow](), dict[str, None]()
    for index, (image, method) in enumerate(zip(images, method_titles(images), strict=True)):
        rows += _rows(image, index, method)
        if image.coverage:
            notes[f"{method}: {image.coverage}"] = None
        if image.image_share is not None:
            part = float(image.image_share)
            parts = f"{share(part)} is the image's, {share(1 - part)} the text's"
            notes[f"{method}: of the relevance of all tokens, {parts}"] = None
    is_one = len(images) == 1
    title = f"Ledger of {rows[0].target} by {rows[0].method}" if is_one else "Ledgers"
    return Table(rows, _ENTRY if is_one else _IMAGE + _ENTRY, title, notes)


def _rows(image: Explanation, index: int, title: str) -> list[LedgerRow]:
    if image.ledger is None or image.residual is None:
        raise RenderError(f"the explanation by {image.method} has no ledger; lrp, for example, has one")
    score = float(image.scores)
    shares = [*image.ledger[0].tolist(), float(image.residual), score]
    about = (index, image.target_names[0], title)
    entries = zip([*image.ledger_names, "residual", "score"], shares, strict=True)
    return [LedgerRow(name, share, 100 * share / score if score else math.nan, *about) for name, share in entries]
