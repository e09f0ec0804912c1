"""The command `saliency`: what may be typed, and where it leads.

Nothing here imports torch, so help, version and slips of the keyboard are answered at once. A command is one entry in
`COMMANDS`; what it does is imported when it is run.

Exit codes: 0; 1, some photo failed and the others are written; 2, what was typed cannot be done; 130, interrupted by
Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine.allocator import keep_memory
from ..errors import SaliencyError, did_you_mean
from .arguments import Help, Parser, look_options, whole
from .commands import batch as batching
from .commands import render as rendering

if TYPE_CHECKING:
    from .console import Screen

DISTRIBUTION = "saliency-toolkit"
MODEL = "efficientnet_lite0"
METHOD = "grad_cam"


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its line in the help, its options, and what it does, which returns the exit code."""

    summary: str
    usage: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Screen], int]
    examples: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # the process is the command's own
        keep_memory()
        _interrupt_on_termination()
    try:
        if words and not words[0].startswith("-"):
            return _run(words[0], words[1:])
        _root_parser().parse_args(words)
    except SystemExit as stop:  # argparse has answered
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return 130
    _root_parser().print_help(sys.stderr)
    return 2


def _interrupt_on_termination() -> None:
    """Let SIGTERM (docker stop, Slurm, Kubernetes) do what Ctrl-C does, unless the process was started to ignore it."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _run(name: str, words: Sequence[str]) -> int:
    if name not in COMMANDS:
        _root_parser().error(_unknown_command(name))
    arguments = _parser(name).parsed(words)

    from .console import Screen

    screen = Screen(quiet=getattr(arguments, "quiet", False))
    try:
        with screen.noting_warnings():
            return COMMANDS[name].run(arguments, screen)
    except SaliencyError as error:
        screen.error(error)
        return 2
    except KeyboardInterrupt as interrupt:
        screen.error(f"interrupted{f'; {interrupt}' if interrupt.args else ''}")
        return 130


def _explain(arguments: argparse.Namespace, screen: Screen) -> int:
    with screen.waiting("starting"):
        from .commands.explain import Request, explain

    # The default would stay in front of what is typed: argparse extends it.
    arguments.methods = arguments.methods or [METHOD]
    return explain(Request(**{name: value for name, value in vars(arguments).items() if name != "quiet"}), screen)


def _methods(arguments: argparse.Namespace, screen: Screen) -> int:
    with screen.waiting("starting"):
        from .commands.lists import methods

    return methods(screen)


def _layers(arguments: argparse.Namespace, screen: Screen) -> int:
    with screen.waiting("starting"):
        from .commands.layers import Request, layers

    return layers(Request(**vars(arguments), version=version(DISTRIBUTION)), screen)


def _models(arguments: argparse.Namespace, screen: Screen) -> int:
    with screen.waiting("starting"):
        from .commands.lists import models

    return models(arguments.pattern, arguments.all, screen)


def _explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("photos", metavar="PHOTO", nargs="*", help="a file, or a folder for the pictures in it")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    what = parser.add_argument_group("what is explained, and how")
    what.add_argument("--model", metavar="NAME", default=MODEL, help=f"see saliency models (default: {MODEL})")
    _weights_option(what)
    what.add_argument(
        "-m",
        "--method",
        metavar="NAME",
        dest="methods",
        nargs="+",
        action="extend",
        help=f"one or more, or all; see saliency methods (default: {METHOD})",
    )
    what.add_argument("-t", "--target", metavar="CLASS", help="name or index (default: each photo's top class)")
    what.add_argument("--layer", metavar="NAME", help="that CAMs read; see saliency layers (default: found by itself)")
    what.add_argument(
        "--set",
        metavar="OPTION=VALUE",
        dest="settings",
        action="append",
        default=[],
        help="for methods with that option, as in smooth=positive",
    )
    what.add_argument("--device", metavar="NAME", default="auto", help="cpu, cuda:1, mps (default: cuda, else cpu)")
    files = parser.add_argument_group("what is written")
    files.add_argument("-o", "--out", metavar="DIR", type=Path, default=Path("out"), help="where to (default: out)")
    files.add_argument("--sheet", action="store_true", help="also a contact sheet, photos by methods: sheet.png")
    files.add_argument("--save", action="store_true", help="also the values, as .safetensors for Explanation.load")
    look_options(parser.add_argument_group("how it is drawn"))


def _layers_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=MODEL, help=f"see saliency models (default: {MODEL})"
    )
    parser.add_argument("--photo", metavar="PHOTO", help="run it on this photo (default: on noise)")
    _weights_option(parser)
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument("--all", action="store_true", help="every layer, however deep")
    rows.add_argument("--depth", metavar="N", type=whole, help="layers inside of layers, so deep (default: what fits)")
    parser.add_argument("--stats", action="store_true", help="also what they give: means, zeros, dead channels, NaN")
    parser.add_argument("--gradients", action="store_true", help="also how a class's score changes with each of them")
    parser.add_argument("-t", "--target", metavar="CLASS", help="of --gradients: name or index (default: top class)")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write it all as a page, too")


def _models_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pattern", metavar="PATTERN", nargs="?", help="a part of the name, or a pattern as in 'vit_*_384'"
    )
    parser.add_argument("--all", action="store_true", help="every model of torchvision and timm")


def _weights_option(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--weights",
        metavar="NAME|FILE",
        default="default",
        help="others of the library, a checkpoint, or none for random ones",
    )


def _report(arguments: argparse.Namespace, screen: Screen) -> int:
    with screen.waiting("starting"):
        from .commands.report import Request, report

    return report(Request(**vars(arguments)), screen)


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="that saliency batch wrote")


COMMANDS: dict[str, Command] = {
    "explain": Command(
        "draw over photos what the model looked at",
        "PHOTO... [options]",
        _explain_options,
        _explain,
        """\
examples:
  saliency explain cat.jpg
  saliency explain cat.jpg -m grad_cam guided_backprop --target "tiger cat"
  saliency explain photos/ --method all --sheet --out maps
  saliency explain *.jpg --model resnet50 --layer layer3 --opacity map

files:
  The overlay of cat.jpg by grad_cam is DIR/cat.grad_cam.png, as large as the
  photo. Photos that differ in the suffix only keep it: cat.jpg.grad_cam.png
  beside cat.png.grad_cam.png. Photos of one name from several folders are
  numbered: cat-2.grad_cam.png. Files of an earlier run are replaced.

exit codes:
  0  done; a method that does not apply to the model is no failure with all
  1  some photo failed, and the others are written
  2  there is no such model, method, layer, class or option
  130  interrupted by Ctrl-C or SIGTERM; what is done is kept
""",
    ),
    "batch": Command(
        "a folder of photos becomes a folder of overlays, with a page to look through",
        "SOURCE... [options]",
        lambda parser: batching.options(parser, MODEL, METHOD),
        batching.run,
        batching.EXAMPLES,
    ),
    "render": Command(
        "the maps of a batch in other colours, without the network",
        "MAPS... [options]",
        rendering.options,
        rendering.run,
        rendering.EXAMPLES,
    ),
    "report": Command(
        "the page of a batch folder anew", "DIR", _report_options, _report, "examples:\n  saliency report out\n"
    ),
    "methods": Command("the methods, with their papers and what they cost", "", lambda parser: None, _methods, ""),
    "layers": Command(
        "the layers of a model: shapes, sizes, times, and which one CAMs read",
        "[MODEL] [options]",
        _layers_options,
        _layers,
        """\
examples:
  saliency layers
  saliency layers vgg16 --weights none --depth 1
  saliency layers --photo cat.jpg --stats --gradients --html layers.html
""",
    ),
    "models": Command(
        "the models that can be named",
        "[PATTERN] [--all]",
        _models_options,
        _models,
        """\
examples:
  saliency models
  saliency models resnet
  saliency models 'vit_*_384'
""",
    ),
}


def _root_parser() -> Parser:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items())
    parser = Parser(
        prog="saliency",
        usage="saliency COMMAND ...",
        description="What did an image model look at? Heatmaps over photos, from the command line.",
        epilog=f"commands:\n{lines}\n\nstart with:\n  saliency explain photo.jpg\n\n"
        "and ask a command for its options: saliency explain --help",
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"saliency {version(DISTRIBUTION)}")
    return parser


def _parser(name: str) -> Parser:
    command = COMMANDS[name]
    parser = Parser(
        prog=f"saliency {name}",
        description=command.summary[0].upper() + command.summary[1:] + ".",
        epilog=command.examples,
        usage=f"saliency {name} {command.usage}".strip(),
        formatter_class=Help,
        allow_abbrev=False,
    )
    command.options(parser)
    return parser


def _unknown_command(name: str) -> str:
    if Path(name).exists():
        return f"{name} is no command; to explain it: saliency explain {name}"
    return f'no command "{name}"{did_you_mean(name, COMMANDS) or "; there are " + ", ".join(COMMANDS)}'
