"""The command `saliency`: its commands, their help, and the entry point.

Nothing here imports torch, so that help, version and usage errors are printed without delay. A command is one entry in
`COMMANDS`; its code is imported when it runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

from .._version import __version__
from ..aliases import matches
from ..attribution.allocator import keep_memory
from ..batch import StoppedError
from ..errors import DependencyError, SaliencyError, did_you_mean, optional_import
from .arguments import Parser


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        summary: One-line description in the help.
        options: Names of its positional arguments and options, separated by spaces; see `ARGUMENTS`.
        function: Path "module:name" of its function under `saliency.cli`. The function takes the parsed arguments and a
            `Screen`, and returns the exit code.
        help: Text at the end of the help, such as examples.
    """

    summary: str
    options: str
    function: str
    help: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # the process runs only this command
        keep_memory()
        # libtiff writes lines of its own to standard error. Pillow raises the errors of a file.
        with suppress(AttributeError, OSError):  # a build of Pillow that does not export libtiff
            ctypes.CDLL(import_module("PIL._imaging").__file__).TIFFSetErrorHandler(None)
        # SIGTERM (docker stop, Slurm, Kubernetes) acts like Ctrl-C, unless the process was started to ignore it.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = _exit_code(words)
        if sys.stdout is not None:  # closed from the start
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest at its exit
        return 128 + 13  # as after SIGPIPE
    return code


def _exit_code(words: Sequence[str]) -> int:
    try:
        if words and not words[0].startswith("-"):
            return _run(words[0], words[1:])
        _root_parser().parse_args(words)
    except SystemExit as stop:  # raised by argparse, after its message
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return 130
    _root_parser().print_help(sys.stderr)
    return 2


def _run(name: str, words: Sequence[str]) -> int:
    if name not in COMMANDS:
        _root_parser().error(_unknown_command(name))
    arguments = command_parser(name).parse(words)

    try:
        optional_import("rich", "cli", "the command line")
    except DependencyError as error:
        _root_parser().error(str(error))

    from .console import Screen

    screen = Screen(quiet=getattr(arguments, "quiet", False))
    try:
        with screen.waiting("starting"):
            command = resolve_name(f"{__name__}.{COMMANDS[name].function}")
        with screen.collected_warnings():
            code: int = command(arguments, screen)
        return code
    except BrokenPipeError:
        raise
    except (SaliencyError, OSError) as error:  # OSError: a file of the command line cannot be read or written
        screen.error(error)
        return 1 if isinstance(error, StoppedError) else 2
    except SystemExit as stop:  # raised by code of the user: a model in `saliency layers`, or a preprocessing
        screen.error(f"the code of the model called sys.exit({stop.code!r})")
        return 2
    except KeyboardInterrupt as interrupt:
        screen.error(f"interrupted{f'; {interrupt}' if interrupt.args else ''}")
        return 130


def command_parser(name: str) -> Parser:
    """Create the parser of a command."""
    command = COMMANDS[name]
    description = f"{command.summary[0].upper()}{command.summary[1:]}."
    optional = ("METHOD", "MODEL", "FOLDER", "PATTERN", "RUN_SAME")
    positional = command.options.partition(" --")[0].split()
    words = " ".join(f"[{word}]" if word in optional else word for word in positional)
    about = {"description": description, "usage": f"saliency {name} {words} [options]", "epilog": command.help}
    return Parser(f"saliency {name}", command.options, **about)


def _root_parser() -> Parser:
    lines = "\n".join(f"  {name:10}  {command.summary}" for name, command in COMMANDS.items())
    parser = Parser(
        "saliency",
        usage="saliency COMMAND ...",
        description="Explain what drives an image model's prediction.",
        epilog=f"commands:\n{lines}\n\nstart with:\n  saliency explain photo.jpg\n\n"
        f"options of a command:\n  saliency explain --help\n\n{_EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"saliency {__version__}")
    return parser


def _unknown_command(name: str) -> str:
    if Path(name).exists():
        return f"{name} is not a command; to explain it: saliency explain {name}"
    hint = "".join(f'; did you mean "{command}"?' for command in matches(name, "commands"))
    return f'no command "{name}"{hint or did_you_mean(name, COMMANDS) or "; there are " + ", ".join(COMMANDS)}'


_MODEL = "--model --weights --classes --preprocess --whole --method --layer --set --device --target"
_TARGETS = """\
targets:
  cat, 281               class by name or index
  box:0                  detection with the highest probability; box:1 the next
  box:210,110            detection at a point
  box:120,40,300,260     detection that overlaps a box: left,top,right,bottom
  box:cat, box:cat:0     detection of a class, also with any of the places above
  region:cat             all pixels of a class in a segmentation
  region:cat:border      its contour; also region:cat:mask.png, a point or a box
  keypoint:nose          joint of a pose; keypoint:nose:1 of the second person
  "text:a red car"       text, for a model of images and texts
Positions are in pixels of the image.
"""
_DRAWING = """\
drawing:
  --set also takes opacity (0 to 1, or map), colormap (of matplotlib), sign
  (positive, signed or absolute), percentile (at which colours saturate, auto or
  none) and smoothing (a fraction of the edge).
"""
_EXIT_CODES = """\
exit codes:
  0    success; with --method all, methods that do not apply are not failures
  1    some images failed and all others are written, or the disk is full
  2    the command line is invalid, or the output folder is in use
  130  interrupted by Ctrl-C or SIGTERM; finished files are kept
"""

COMMANDS: dict[str, Command] = {
    "explain": Command(
        "draw heatmaps over images",
        f"IMAGE --json --quiet --recursive {_MODEL} --out --sheet --maps --trust --seconds",
        "commands:explain",
        f"""\
examples:
  saliency explain cat.jpg
  saliency explain cat.jpg -m grad_cam guided_backprop --target "tiger cat"
  saliency explain photos/ --method all --sheet --out maps
  saliency explain *.jpg --model resnet50 --layer layer3 --set opacity=0.5
  saliency explain cat.jpg --model mine.py:make --classes names.txt
  saliency explain cat.jpg --json | jq '.[].probability'
  saliency explain cat.jpg --model open_clip/ViT-B-32 -t text:cat text:dog
  saliency explain street.jpg --model mine.py:detector --target box:210,110
  saliency explain cat.jpg --model mine.py:unet --target region:cat:border
  curl -s https://example.org/cat.jpg | saliency explain - -o - > cat.png
  saliency explain rgb=a.png depth=d.npy --model mine.py:fusion  (one case)

files:
  The overlay of cat.jpg by grad_cam is DIR/cat.grad_cam.png, as large as the
  image. Images with the same name are numbered: cat-2.grad_cam.png. Files of
  an earlier run are replaced. With -o -, one overlay goes to standard output.

{_TARGETS}
Several texts have a map each, of their log-odds among all texts, in files such
as DIR/cat-a_dog.grad_cam.png. The score of a single text is its cosine
similarity to the image.

{_DRAWING}
{_EXIT_CODES}""",
    ),
    "batch": Command(
        "turn a folder of images into a folder of overlays, with a gallery page",
        f"SOURCE --quiet --recursive --limit {_MODEL} --targets --detections --out --maps --trust --seconds "
        "--restart --retry --strict --format --engine --compile --batch-size --workers",
        "batch_commands:run",
        f"""\
examples:
  saliency batch photos/ --out maps
  saliency batch photos/ --recursive -m grad_cam layer_cam --format jpg --maps
  saliency batch photos/ --trust --seconds 5   (can each map be trusted?)
  saliency batch photos/ -m all --device cuda:0,cuda:1
  saliency batch list.csv --out maps           (columns: path, target)
  saliency batch 'shards/*.tar' --out maps     (WebDataset)
  saliency batch rgb=photos/ depth=depths/ --model mine.py:fusion --out maps
  saliency batch photos/ --model open_clip/ViT-B-32 -t text:cat text:dog
  saliency batch photos/ --model mine.py:detector --detections all --out boxes
  find . -name '*.jpg' | saliency batch - --out maps

A run may be interrupted at any time. Run the same command again to resume.
With --detections, cat.jpg has a map for each box: cat.0, cat.1, ...;
--target CLASS selects detections of a class.

{_TARGETS}
Of several texts, the first is explained against the others.

{_DRAWING}
files:
  DIR/index.html       the gallery page
  DIR/overlays/        cat.jpg by grad_cam is overlays/cat.grad_cam.png
  DIR/manifest.jsonl   a row per image and method, including failures
  DIR/maps/            with --maps: the values, for Explanation.load
  DIR/trust/           with --trust: a trust card of each overlay

{_EXIT_CODES}""",
    ),
    "evaluate": Command(
        "compare methods by metrics on a folder of images",
        f"SOURCE --quiet --recursive --limit {_MODEL} --targets --metrics --objects --out --model-card "
        "--engine --compile --workers",
        "commands:evaluate",
        f"""\
examples:
  saliency evaluate photos/ -m grad_cam layer_cam lrp --out measured
  saliency evaluate photos/ -m grad_cam rise --set steps=28
  saliency evaluate photos/ --objects masks/ --metrics pointing_game
  saliency evaluate photos/ --objects boxes.json --metrics iou

Each method is compared on each image with maps that ignore the prediction.
Run the same command again to resume, or with more methods. If a method and a
metric have the same option, write --set metric.steps=28 or method.steps=28.

{_TARGETS}
Of several texts, the first is explained against the others.

files:
  DIR/evaluation.html  the sortable table and all differences; in an output
                       folder of saliency batch, a tab of its index.html
  DIR/evaluation.json  the same, with mean curves and the values of each image
  DIR/results/         the values of cat.jpg by grad_cam: cat.grad_cam.json
  DIR/card.md          with --card: methods, figures and limits for a model card

{_EXIT_CODES}""",
    ),
    "trust": Command(
        "measure whether the heatmap of one image can be trusted",
        f"FILE --quiet {_MODEL} --seconds --seed --others --draws --card",
        "commands:trust",
        f"""\
examples:
  saliency trust cat.jpg -m grad_cam --target "tiger cat"
  saliency trust cat.jpg -m guided_backprop -o card.html -o card.png
  saliency trust cat.jpg -o - > card.json

Two tests have a verdict: whether the heatmap depends on the class, and whether
it marks what the model learned to use. Other rows are numbers.

{_TARGETS}
{_EXIT_CODES}""",
    ),
    "serve": Command(
        "show a page on which a model explains photos: drop one, compare methods",
        "MODEL FOLDER --quiet --weights --classes --preprocess --whole --method --layer --set --device "
        "--compile --port --host --no-browser",
        "commands:serve",
        """\
examples:
  saliency serve
  saliency serve resnet50 photos/ -m layer_cam
  saliency serve mine.py:detector --port 8000 --no-browser
  saliency serve mine.py:fusion rgb=scene.png depth=depth.npy

The page starts with the method and the layer. Ctrl-C ends it. Anyone who has
the address can use the model, so keep it secret.
""",
    ),
    "export": Command(
        "write a model and its heatmap as one program, for PyTorch or ONNX",
        "MODEL --quiet --image --weights --classes --preprocess --whole --method --layer --set --class --output",
        "commands:export",
        """\
examples:
  saliency export resnet50 --method grad_cam -o model.onnx
  saliency export mine.py:make -m integrated_gradients --set steps=20 -o m.pt2

The program takes normalised images (N, C, H, W), with any N. It returns the
scores, the explained classes, and the heatmaps (N, H, W). It runs without this
package. The file holds the class names and the preprocessing.
""",
    ),
    "report": Command(
        "rewrite the gallery page of a batch folder, or write its table as CSV",
        "DIR --quiet --csv --title --fiftyone",
        "batch_commands:report",
        """\
examples:
  saliency report maps --title "Scans of May"
  saliency report maps --csv                   (writes maps/manifest.csv)
  saliency report maps --fiftyone scans        (of a run with --maps)
""",
    ),
    "compare": Command(
        "compare the maps of two batch folders; for methods, see saliency evaluate",
        "RUN_A RUN_B RUN_SAME --quiet --null --fail-under --out",
        "batch_commands:compare",
        """\
examples:
  saliency compare before after --null
  saliency compare before after other_seed --fail-under 0.9 --out compared

All folders were written by saliency batch --maps, over the same images. The
yardstick is how far maps move by chance: between RUN_A and each RUN_SAME, a run
that differs only in a seed, or if images are mirrored (--null). Without a
yardstick, the maps are compared, but none is marked as changed. Images can be
marked if a method has at least 19.

files:
  DIR/comparison.html  classes and images, the most changed ones first
  DIR/comparison.json  the same as JSON
  DIR/comparison.xml   JUnit: a case for each class, which fails if it changed
""",
    ),
    "groups": Command(
        "find images of a class that a model recognises by other features",
        "DIR --quiet --view --seed",
        "batch_commands:groups",
        """\
examples:
  saliency groups maps                  (loads the model of the run)
  saliency groups maps --view places

The folder was written by saliency batch --maps. The images of each class are
divided by the features that their maps mark, or by the places of the maps. A
class without clear groups is not listed.

files:
  DIR/groups.html  the groups with examples and mean maps; a tab of index.html
  DIR/groups.csv   their figures
""",
    ),
    "methods": Command(
        "list the methods with their papers and costs, or describe one with its options",
        "METHOD --json",
        "commands:methods",
        "examples:\n  saliency methods rise\n  saliency methods --json | jq 'map(.method)'\n",
    ),
    "layers": Command(
        "list the layers of a model: shapes, sizes, times, default layer of CAMs",
        "MODEL --image --weights --classes --preprocess --all --depth --stats --gradients --class",
        "commands:layers",
        """\
examples:
  saliency layers vgg16 --weights none --depth 1
  saliency layers --image cat.jpg --stats --gradients
  saliency layers --all --gradients parameters
""",
    ),
    "models": Command(
        "list the models that can be loaded by name",
        "PATTERN --all",
        "commands:models",
        "examples:\n  saliency models resnet\n  saliency models 'vit_*_384'\n",
    ),
}
