"""`saliency export`: write a model and its explanation as one program."""

from __future__ import annotations

import argparse

from ..batch.network import create_methods, load_model
from ..batch.options import NetworkOptions
from ..errors import visible
from ..program.export import export
from .arguments import METHOD
from .console import Screen, UsageError
from .explain import methods_and_images
from .lists import noise


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Write the file, and return the exit code."""
    methods, more = methods_and_images(arguments.methods or [METHOD])
    if len(methods) != 1 or more:
        raise UsageError("--method takes one method: a program has one map")
    options = NetworkOptions.of({**vars(arguments), "methods": methods})
    with screen.waiting(f"exporting {options.model}"):
        (method,) = create_methods(options, load_model(options))
        path = export(method, arguments.file, arguments.image or noise(), target=arguments.target)
    screen.say(f"written: {visible(path)}")
    return 0
