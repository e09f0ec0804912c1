"""`saliency serve`: show the page of the explorer."""

from __future__ import annotations

import argparse
import os

from ..explorer.serve import serve
from .arguments import METHOD, MODEL, arguments_of
from .console import Screen, UsageError
from .explain import methods_and_images


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Show the page until Ctrl-C is pressed, and return the exit code."""
    methods, more = methods_and_images(arguments.methods or [METHOD])
    if len(methods) != 1 or more:
        raise UsageError("--method takes one method; the page offers all others")
    if arguments.folder is None and os.path.isdir(arguments.model):  # noqa: PTH112 - unlike Path, never raises
        arguments.model, arguments.folder = MODEL, arguments.model
    given = arguments_of(serve, arguments) | {"method": methods[0], "options": dict(arguments.options or ())}
    serve(**given)
    return 0
