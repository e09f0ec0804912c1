"""`saliency evaluate`: print the comparison of methods on folders of images."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from ..aliases import option_hint
from ..attribution.options import declared_options
from ..batch.failures import sentence
from ..batch.folder_evaluation import evaluate
from ..errors import MethodError, plural, visible
from ..evaluation.metrics.base import Metric, get_metric
from ..tables import Table
from .batch_commands import expected_errors, run_arguments
from .console import Screen

METRICS = ("deletion", "insertion")
"""The metrics by default."""


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Measure the images, print the comparison, and return the exit code."""
    metrics = _create_metrics(arguments.metrics or METRICS, dict(arguments.metric_settings or ()))
    with screen.progress() as show:
        comparison = evaluate(**run_arguments(evaluate, arguments) | {"metrics": metrics}, on_progress=show)
    if comparison.page is not None:
        screen.say(str(Table(comparison.rows, comparison.columns)), cut=True)
        screen.say("\n".join(["", *comparison.notes]))
        screen.say(f"table: {visible(comparison.page)}")
    failures = [row for row in comparison.failures if row["error_kind"] not in expected_errors(arguments)]
    for row in failures:
        screen.error(sentence(row["source"], row["method"], row["error"]))
    screen.say_left_out(comparison.left_out)
    if failures:
        failed = plural(len({row["index"] for row in failures}), "image")
        screen.say(Text(f"{failed} with failures; re-run to try again", "red"))
    return 1 if failures or comparison.page is None else 0


def _create_metrics(names: Sequence[str], settings: Mapping[str, Any]) -> list[Metric]:
    """Create the metrics, each with the options that it accepts."""
    classes = [get_metric(name) for name in dict.fromkeys(names)]
    known = list(dict.fromkeys(option for cls in classes for option in declared_options(cls)))
    for name in settings:
        if name not in known:
            raise MethodError(f'no option "{name}" of {", ".join(names)}{option_hint(name, known)}')
    return [cls(**{name: settings[name] for name in declared_options(cls) if name in settings}) for cls in classes]
