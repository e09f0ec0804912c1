"""What `saliency report` does: the gallery page of a batch folder, made anew."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...batch.report import report as write_page
from ..console import Screen, UsageError, visible


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was typed behind `saliency report`."""

    folder: Path


def report(request: Request, screen: Screen) -> int:
    """Write the page, and say where it is."""
    try:
        with screen.waiting("writing the page"):
            page = write_page(request.folder)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UsageError(f"cannot write the page of {request.folder}: {reason}") from error
    screen.say(f"written: {visible(page)}")
    return 0
