"""Arguments of all commands, and their parser.

Nothing here imports torch, so that help and usage errors are printed without delay.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ..aliases import matches
from ..batch import FORMATS
from ..errors import did_you_mean
from ..io.atomic_write import is_image

MODEL = "efficientnet_lite0"
METHOD = "grad_cam"
ALL = "all"  # every method
SECONDS = 15.0  # for a trust card
_FILE_SUFFIXES = frozenset((".csv", ".html", ".json", ".pdf", ".svg", ".txt", ".zip"))


class Parser(argparse.ArgumentParser):
    """Parser of a command, with one-line errors that suggest the closest option.

    Args:
        prog: The command.
        names: Names of its arguments in `ARGUMENTS`, separated by spaces.
        keywords: Keyword arguments of `ArgumentParser`.
    """

    def __init__(self, prog: str, names: str = "", **keywords: Any) -> None:
        formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=27, width=80)
        super().__init__(prog, formatter_class=formatter, allow_abbrev=False, **keywords)
        for title, arguments in ARGUMENTS.items():
            group: Any = self.add_argument_group(title) if title else self  # the help leaves out an empty group
            for argument in arguments:
                if argument.name in names.split():
                    group.add_argument(*argument.flags, **argument.keywords)

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        self.exit(2, f"saliency: {message}\n          see {self.prog} --help\n")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse arguments. Options may precede, separate and follow positional arguments."""
        arguments, unknown = self.parse_known_intermixed_args(_join_whole(words))
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            flag = unknown[0].partition("=")[0]
            self.error(self._renamed(unknown[0], words) or f'no option "{flag}"{did_you_mean(flag, flags)}')
        if vars(arguments).get("target"):  # -t "text:a dog" "text:a cat" cat.jpg
            images = vars(arguments).get("sources") or vars(arguments).get("images") or []
            arguments.target += [word for word in images if word.startswith("text:")]
            images[:] = [word for word in images if not word.startswith("text:")]
        return arguments

    def _renamed(self, word: str, words: Sequence[str]) -> str:
        """Return how to write an option of an earlier version; empty if the command had no such option.

        It repeats the value of the user: "write VALUE without an option" would name a word that the user never wrote.
        """
        flag, equals, value = word.partition("=")
        written = matches(f"{self.prog.split()[-1]}:{flag}", "flags") or matches(flag, "flags")
        option, _, form = "".join(written).partition(" ")
        if not option or (option != "VALUE" and option not in self._option_string_actions):
            return ""
        value = value if equals else "".join(words[words.index(word) + 1 :][:1]) or "..."
        before = f"{flag} {shlex.quote(value)}" if "VALUE" in option + form else flag
        parts = (shlex.quote(part.replace("VALUE", value)) for part in (option, form) if part)
        return f"{before} is written {' '.join(parts)}"


def arguments_of(function: Callable[..., object], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the parsed arguments that are parameters of a function or class, by name."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in vars(arguments).items() if name in parameters}


def _join_whole(words: Sequence[str]) -> list[str]:
    """Join `--whole` and its value to one word. Otherwise argparse takes an image after `--whole` as its value."""
    joined: list[str] = []
    for word in words:
        if word == "aspect" and joined[-1:] == ["--whole="]:
            joined[-1] += word
        else:
            joined.append("--whole=" if word == "--whole" else word)
    return joined


# Converting arguments ------------------------------------------------------------------------------------------


def _setting(text: str) -> tuple[str, Any]:
    """Parse `OPTION=VALUE`. The value is JSON, or text if it is not valid JSON."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: expected OPTION=VALUE, for example --set smooth=positive")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _path(text: str) -> Path | str:
    """Return an absolute path, since code of the user may change the current folder. Return an address unchanged."""
    return text if "://" in text else Path(text).absolute()


def _card_file(text: str) -> Path:
    if text != "-" and Path(text).suffix not in (".html", ".png", ".json"):
        raise ValueError(text)
    return Path(text).absolute()


def _folder(text: str) -> Path:
    if (is_image(text) or Path(text).suffix.lower() in _FILE_SUFFIXES) and not Path(text).is_dir():
        hint = "pass the folder that receives the files; saliency explain -o - > cat.png writes one overlay to a file"
        raise argparse.ArgumentTypeError(f"{text} is the name of a file; {hint}")
    return Path(text)


def _weights(text: str) -> str | None:
    return None if text == "none" else text


def _explained(parse: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    """Return a function that parses an argument. Its errors state the expected value."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
            reason = str(error) if isinstance(error, json.JSONDecodeError) else getattr(error, "strerror", "")
            raise argparse.ArgumentTypeError(f"{text}: expected {expected}{reason and f'; {reason}'}") from error

    return convert


def _class_names(file: str) -> list[str] | dict[int, str]:
    """Read class names: one per line, or JSON: a list, or an object with indices as keys or values, also "id2label"."""
    text = Path(file).read_text("utf-8-sig")
    if Path(file).suffix != ".json":
        return [line.strip() for line in text.splitlines() if line.strip()]
    names = json.loads(text)
    if isinstance(names, dict):
        pairs = (pair if pair[0].isdecimal() else pair[::-1] for pair in names.get("id2label", names).items())
        by_index = {int(index): name[-1] if isinstance(name, list) else name for index, name in pairs}
        has_gaps = set(by_index) != set(range(len(by_index)))
        return by_index if has_gaps else [by_index[index] for index in range(len(by_index))]
    return [name[-1] if isinstance(name, list) else name for name in names]


def _whole(text: str) -> str | bool:
    return text == "" or {"aspect": text}[text]


def _detections(text: str) -> int | str:
    return ALL if text == ALL else int(text)


def _objects(name: str) -> str | dict[str, Any]:
    """Parse a JSON file of boxes. Return the folder or the pattern of masks unchanged."""
    return dict(json.loads(Path(name).read_bytes())) if Path(name).suffix == ".json" else name


def _preprocess(text: str) -> dict[str, Any]:
    """Parse `imagenet`, fields as in `size=224,mean=0.5,0.5,0.5`, or a JSON file of fields or of a timm config."""
    if text == "imagenet":
        return {"size": (224, 224), "resize": 256}
    if "=" in text:
        return dict(map(_field, re.split(r",(?=[a-z]+=)", text)))
    fields = json.loads(Path(text).read_bytes())
    return dict(fields.get("pretrained_cfg", fields))


def _field(text: str) -> tuple[str, Any]:
    """Parse a field of `Preprocess`: JSON values separated by commas, or text. A single size means a square."""
    name, _, value = text.partition("=")
    try:
        values = json.loads(f"[{re.sub(r'(?<![0-9])[.](?=[0-9])', '0.', value)}]")  # JSON has no .5
    except json.JSONDecodeError:
        return name, value
    if len(values) == 1 and name in ("size", "resize"):
        return name, values[0] if name == "resize" else values * 2
    return name, values


# The table -----------------------------------------------------------------------------------------------------


class Argument:
    """Argument of commands: an option, or a positional argument.

    Args:
        usage: An option "-o --out DIR", a switch "-q --quiet", or a positional argument "DIR".
        text: The help.
        name: Name in `COMMANDS`, if it is not the long flag.
        keywords: More keyword arguments of `add_argument`.

    Attributes:
        name: Name in `COMMANDS`: the long flag, such as "--model", or the metavar of a positional argument.
        flags: Positional arguments of `add_argument`.
        keywords: Keyword arguments of `add_argument`.
    """

    def __init__(self, usage: str, text: str, name: str = "", **keywords: Any) -> None:
        flags = [word for word in usage.split() if word.startswith("-")]
        metavar = usage.split()[len(flags) :]
        if "type" in keywords:
            noun = {int: "a whole number: ", float: "a number: "}.get(keywords["type"], "")
            keywords["type"] = _explained(keywords["type"], noun + text.replace("%%", "%"))
        value: dict[str, Any] = {"metavar": metavar[0]} if metavar else {"action": "store_true"}
        self.name = name or (flags[-1] if flags else usage)
        self.flags = flags or [keywords.pop("dest")]
        self.keywords = {"help": text} | value | keywords


_TARGET_HELP = "class by name or index, or another of the targets below (default: the top class of each image)"
_WHOLE_HELP = "show the model the whole image, not its centre; resized, or with its aspect ratio"
_METHOD_HELP = f"see saliency methods (default: {METHOD})"
_SET_HELP = "option of a method; see saliency methods NAME"
_CARD_HELP = "file of the card, .html, .png or .json, or - to print JSON; may be repeated"
_OBJECTS_HELP = 'masks named as the images, or JSON of boxes, as in {"a.png": [x0, y0, x1, y1]}'
_GRADIENTS_HELP = "also print gradients of the score of one class, of layers or parameters (default: layers)"
ARGUMENTS: dict[str, list[Argument]] = {
    "": [
        Argument("IMAGE", "image files, folders or lists; - reads one image from stdin", dest="images", nargs="*"),
        Argument("FILE", "one image file", dest="images", nargs="*"),
        Argument("SOURCE", "folders, files, patterns, lists, shards; - for paths on stdin", dest="sources", nargs="+"),
        Argument("DIR", "folder written by saliency batch", dest="folder", type=Path),
        Argument("RUN_A", "folder written by saliency batch --maps", dest="first", type=Path),
        Argument("RUN_B", "another one, over the same images", dest="second", type=Path),
        Argument("RUN_SAME", "as RUN_A, with another seed; best three", dest="same", type=Path, nargs="*", default=[]),
        Argument("MODEL", f"as --model of saliency explain (default: {MODEL})", dest="model", nargs="?", default=MODEL),
        Argument("FOLDER", "images to offer, or rgb=FILE depth=FILE (default: a sample)", dest="folder", nargs="*"),
        Argument("PATTERN", "part of a name, or a pattern such as 'vit_*_384'", dest="pattern", nargs="?"),
        Argument("METHOD", "method to describe (default: list all)", dest="method", nargs="?"),
        Argument("--json", "print JSON"),
        Argument("-q --quiet", "print errors only"),
        Argument("-r --recursive", "include subfolders"),
        Argument("--limit N", "only the first N images", type=int),
        Argument("--image IMAGE", "run the model on this image (default: noise)", type=_path),
        Argument("--all", "list all layers or models"),
        Argument("--depth N", "levels of nested layers (default: up to 40 rows)", type=int),
        Argument("--stats", "also print activation statistics: means, zeros, dead channels, NaN"),
        Argument("--gradients OF", _GRADIENTS_HELP, nargs="?", const="layers", choices=["layers", "parameters"]),
        Argument("--csv", "also write the rows of the manifest as manifest.csv"),
        Argument("--fiftyone DATASET", "also write the saved maps as heatmaps into this dataset of FiftyOne"),
        Argument("--null", "also compare RUN_A with its model on the mirrored images", dest="mirrored"),
        Argument("--fail-under FRACTION", "fraction of unchanged maps below which the exit code is 1", type=float),
        Argument("--view NAME", "channels (default) or places", choices=("channels", "places"), default="channels"),
        Argument("--title TEXT", "title of the page; later runs keep it"),
        Argument("--seconds NUMBER", "time limit for a trust card (default: 15)", type=float, default=SECONDS),
        Argument("--seed N", "seed of all draws (default: 0)", type=int, default=0),
        Argument("--others IMAGE", "three or more images of other classes (default: of the same folder)", nargs="+"),
        Argument("--draws N", "untrained networks; 99 for a level of 1 %% (default: 19)", type=int, default=19),
        Argument("--port N", "port of the page (default: any free one)", type=int, default=0),
        Argument("--host ADDRESS", "interface of this machine (default: only this machine)", default="127.0.0.1"),
        Argument("--no-browser", "do not open the page", dest="browser", action="store_false"),
    ],
    "model, method and target": [
        Argument("--model NAME", f"see saliency models; or FILE.py:NAME (default: {MODEL})", default=MODEL),
        Argument("--weights NAME|FILE", "name, file, or none for random weights", type=_weights, default="default"),
        Argument("--classes FILE", "class names, one per line or JSON", dest="categories", type=_class_names),
        Argument("--preprocess TEXT", "imagenet, a JSON file, or as in size=224,mean=0.5,0.5,0.5", type=_preprocess),
        Argument("-m --method NAME", _METHOD_HELP, dest="methods", nargs="+", action="extend"),
        Argument("-t --target TARGET", _TARGET_HELP, action="append"),
        Argument("-t --target CLASS", "name or index (default: the top class)", "--class", action="append"),
        Argument("--targets FILE", "csv file with the columns path and target, for images without one"),
        Argument(
            "--detections N|all", "explain all detections, or the N best, each by a map of its own", type=_detections
        ),
        Argument("--whole aspect", _WHOLE_HELP, nargs="?", default=False, type=_whole),
        Argument("--layer NAME", "layer that the method reads; see saliency layers (default: automatic)"),
        Argument("--set OPTION=VALUE", _SET_HELP, dest="options", type=_setting, action="append", default=[]),
    ],
    "metrics": [
        Argument("--metrics NAME", "one or more (default: deletion insertion)", nargs="+", action="extend"),
        Argument("--objects FOLDER|FILE", _OBJECTS_HELP, type=_objects),
    ],
    "output": [
        Argument("-o --out DIR", "output folder (default: out)", type=_folder, default=Path("out")),
        Argument("-o --output FILE", "model.pt2 for PyTorch, or model.onnx", dest="file", type=_path, required=True),
        Argument(
            "-o --out FILE", _CARD_HELP, name="--card", dest="files", type=_card_file, action="append", default=[]
        ),
        Argument("--card", "also write card.md, a section of a model card", name="--model-card"),
        Argument("--sheet", "also write a contact sheet of images and methods, sheet.png"),
        Argument("--trust", "also write a trust card for each overlay"),
        Argument("--maps", "also save the attribution values, for Explanation.load"),
        Argument("--restart", "delete the results of an earlier run and start again"),
        Argument("--retry", "retry images that failed in an earlier run"),
        Argument("--strict", "stop at the first image that fails"),
        Argument("--format NAME", "of overlays: png, jpg or webp (default: png)", choices=FORMATS, default="png"),
    ],
    "execution": [
        Argument("--engine NAME", "local (default), or ray for a cluster", choices=("local", "ray"), default="local"),
        Argument("--device NAME", "cpu, cuda:1, or auto (default)", default="auto"),
        Argument("--compile", "compile the methods first, which pays off for many images"),
        Argument("--batch-size N", "images per batch (default: 8 on CPUs, 64 on GPUs)", type=int),
        Argument("--workers N", "number of threads (default: one per core)", type=int),
    ],
}
