"""`saliency trust`: print the trust card of one image, and write it to files."""

from __future__ import annotations

import argparse

from ..batch.failures import Failure, sentence
from ..batch.network import Network, load_model, move_model, trust_card
from ..batch.options import NetworkOptions, OutputOptions
from ..batch.plan import Slot
from ..batch.sources import find_images
from ..errors import plural, visible
from ..evaluation.trust import TrustCard
from .arguments import METHOD
from .batch_commands import choose_target
from .console import Screen, UsageError
from .explain import methods_and_images, one_device


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Print the card, write it to files, and return the exit code.

    Raises:
        SaliencyError: The command line is invalid. Nothing has been written.
    """
    methods, more_images = methods_and_images(arguments.methods or [METHOD])
    entries = find_images([*arguments.images, *more_images]).entries
    if len(entries) != 1 or len(methods) != 1:
        counts = f"got {plural(len(entries), 'image')} and {plural(len(methods), 'method')}"
        raise UsageError(f"a trust card is of one image and one method, {counts}; saliency explain --trust writes many")
    given = {**vars(arguments), "methods": methods, "target": choose_target(arguments)}
    options, seconds, (entry,) = NetworkOptions.of(given), OutputOptions.of(given).seconds, entries
    with screen.waiting("measuring the map"):
        network = Network(options, move_model(load_model(options), one_device(options)))
        loaded = network.load(Slot(0, entry, (methods[0],)))
        card = trust_card(network.methods[0], loaded, seconds, seed=arguments.seed)
    if isinstance(card, BaseException):
        screen.error(sentence(entry.source, methods[0], Failure.of(card).reason))
        return 1
    print_card(card, arguments, screen)
    return 0


def print_card(card: TrustCard, arguments: argparse.Namespace, screen: Screen) -> None:
    """Print the card as text or JSON, and write its files."""
    if arguments.json:
        print(card.to_json(), end="")
    else:
        screen.say(str(card.of(card)), cut=True)
        screen.say("\n".join(["", *card.notes]))
    for file in filter(None, (arguments.html, arguments.png)):
        card.save(file)
        if not arguments.json:
            screen.say(f"written: {visible(file)}")
