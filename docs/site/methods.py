"""One page per method, and the gallery of all of them, from the registry, the testbed's results and the guides."""

from __future__ import annotations

import html
import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import saliency
from saliency.attribution.base import Attribution, source, summary
from saliency.cli.commands import describe

from .docstrings import as_markdown, entries
from .examples import BUDGETS, example
from .markdown import PICTURES, ROOT, as_page, relative

TESTBED = "benchmarks/testbed.md"
_WORSE = "Worse than the best map that ignores the network"
_NO_SCORE = "Not better by any score than all maps that ignore the network"


_SYMBOLS = (
    "S is the map, x the normalised image, x′ the baseline, and y or y(x) the score. A<sub>k</sub> is channel k of the "
    "layer's activations, i and j are pixels or locations, and up(·) resizes a map. A ⊙ B is the product of each pair "
    "of values, a⁺ is max(a, 0), |s| is the number of pixels of segment s, and [condition] is 1 if the condition "
    "is true, else 0. Means, maxima and softmaxes run over their index. *Stretched to 0..1* means minus the smallest "
    "value, divided by the range.",
    "In backward passes and relevance, R<sub>out</sub> arrives at the result of an operation and R<sub>in</sub> at its "
    "operand. Neuron k has the inputs a<sub>j</sub>, the weights w<sub>jk</sub>, the bias b<sub>k</sub> and the result "
    "z<sub>k</sub>; z′ is the value for the baseline. In transformers, A<sub>l</sub> is the attention of block l, "
    "∇A<sub>l</sub> its gradient, h a head, I the identity, and r a row with the weight of each token that the "
    "classifier reads.",
)
_INDEX = re.compile(r"_(\w[^\W²³]*(?:[+−]1|&lt;n|∈T|′?,[tF]|′)?)")


def classes() -> list[type[Attribution]]:
    """Return all methods of the toolkit, in the order of the registry."""
    return [cls for cls in saliency.METHODS.values() if cls.__module__.startswith("saliency.methods.")]


def page(cls: type[Attribution]) -> str:
    """Return the path of a method's page."""
    return f"methods/{cls.name}.md"


def file_of(cls: type[Attribution]) -> str:
    """Return the path of a method's code in the repository, and its line."""
    file = Path(inspect.getfile(cls)).relative_to(ROOT).as_posix()
    return f"{file}#L{inspect.getsourcelines(cls)[1]}"


@cache
def families() -> dict[str, list[type[Attribution]]]:
    """Return the methods by family, from the table in docs/choosing-a-method.md."""
    by_name = {cls.__name__: cls for cls in classes()}
    rows = re.findall(
        r"^\| ([a-zA-Z ,]+) \| ((?:`\w+`(?:, )?)+) \|$",
        (ROOT / "docs" / "choosing-a-method.md").read_text(),
        re.MULTILINE,
    )
    found = {family: [by_name.pop(name) for name in re.findall(r"\w+", names)] for family, names in rows}
    return found | ({"other methods": list(by_name.values())} if by_name else {})


def method_page(cls: type[Attribution], links: dict[str, str]) -> str:
    """Return the page of a method. `links` has the page of each public name."""
    facts, here = describe(cls), page(cls)
    docstring = inspect.getdoc(cls) or ""
    lead, _, rest = docstring.partition("\n\n")
    body = [part for part in rest.split("\n\n") if not part.startswith(("Args:", "Formula:", "Source:"))]
    parts = [
        f"# {cls.__name__}",
        as_markdown(lead, here, links),
        formula(cls),
        "The [symbols](index.md#symbols) are the same on all pages.",
        f"```python\n{example(cls)}```",
        _budget(cls),
        *(f"{picture}{{ .beside }}" for picture in _picture(cls)),
        "## What it computes",
        as_markdown("\n\n".join(body), here, links),
        "## When to use it, and when not",
        "\n".join(f"- {line}" for line in _advice(cls)),
        f"## Cost\n\n{facts['cost'][0].upper()}{facts['cost'][1:]}; see [benchmarks](../benchmarks.md).",
        "## Options",
        _options(cls, links),
        "## Source",
        as_markdown(source(cls), here, links),
        f"On the command line, the method is `{cls.name}`.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def formula(cls: type[Attribution]) -> str:
    """Return the formula of a method, from its docstring, as HTML; empty if the docstring has no formula."""
    found = re.search(r"^Formula: (.*?)\.$", inspect.getdoc(cls) or "", re.MULTILINE | re.DOTALL)
    if found is None:
        return ""
    text = _INDEX.sub(r"<sub>\1</sub>", html.escape(" ".join(found[1].split())))
    return f'<p class="formula">{text}</p>'


def gallery_page() -> str:
    """Return the page that shows all methods by family, each on a card with its picture."""
    parts = [
        "# All methods",
        "Each method has a page: its formula, what it computes, when to use it and when not, its cost, its options and "
        "its source. All formulas use the same [symbols](#symbols). "
        "Start with [choosing a method](../choosing-a-method.md).",
        "![Five photos, explained on EfficientNet-Lite0 by five methods](../assets/readme/sheet.jpg)",
    ]
    for family, members in families().items():
        parts += [f"## {family[0].upper()}{family[1:]}", '<div class="grid cards" markdown>']
        for cls in members:
            link, cost = f"[`{cls.__name__}`]({cls.name}.md)", f"Cost: {cls.cost}."
            pictures = (f"{picture}{{ loading=lazy }}" for picture in _picture(cls))
            lines = [link, *pictures, summary(cls), formula(cls), cost]
            parts.append("-   " + "\n\n    ".join(lines))
        parts.append("</div>")
    parts += ["## Symbols", *_SYMBOLS]
    return "\n\n".join(parts) + "\n"


def _picture(cls: type[Attribution]) -> list[str]:
    """Return the picture of a method, if `make gallery` has drawn it."""
    file = PICTURES / f"{cls.name}.jpg"
    return [f"![{cls.__name__} on five images](../gallery/{file.name})"] if file.exists() else []


def _budget(cls: type[Attribution]) -> str:
    """Return why the code of a method does not use the defaults; nothing if it does."""
    if cls.__name__ not in BUDGETS:
        return ""
    reason = "keeps five photos below a few minutes on one core; the [default](#cost) takes longer"
    return f"`{BUDGETS[cls.__name__]}` {reason}."


def _options(cls: type[Attribution], links: dict[str, str]) -> str:
    """Return the table of a method's options: all parameters of its constructor but the model."""
    described, common = describe(cls)["options"], entries(cls.__doc__ or "", "Args")
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, parameter in list(inspect.signature(cls).parameters.items())[1:]:
        option = described.get(name, {"description": common.get(name, ""), "choices": ()})
        values = ", ".join(f"`{json.dumps(value)}`" for value in option["choices"])
        meaning = as_markdown(option["description"], page(cls), links) + (f" One of {values}." if values else "")
        default = parameter.default
        shown = json.dumps(default) if isinstance(default, str) else str(default)
        rows.append(f"| `{name}` | `{shown}` | {meaning} |".replace("\n", " "))
    return "\n".join(rows)


def _advice(cls: type[Attribution]) -> list[str]:
    """Return the results of a method on the testbed, its limits, and the guides that describe it."""
    return [*_testbed(cls), *_objects(cls), *_limits(cls), _guides(cls)]


@cache
def _results() -> str:
    return (ROOT / "benchmarks" / "results" / "testbed.md").read_text()


def _testbed(cls: type[Attribution]) -> list[str]:
    """Return the mean ranks of a method on the testbed, and the findings that name it."""
    found = []
    for networks in ("convolutional networks", "a vision transformer"):
        section = _section(f"Ranks on {networks}")
        row = re.search(rf"^\| `{cls.__name__}` \| ([\d.]+) .*?\| ([\d.]+) .*?\| ([\d.]+) ", section, re.MULTILINE)
        if row is None:
            found.append(f"On drawn images and {networks}: not measured.")
            continue
        count = len(re.findall(r"^\| [`*]", section, re.MULTILINE))
        ranks = f"{row[1]} by energy, {row[2]} by rank accuracy and {row[3]} by AUC"
        link = f"[mean rank of {count} maps]({relative(TESTBED, page(cls))})"
        lead = f"On drawn images and {networks}, the {link} is {ranks}"
        found.append(f"{lead}; 1 is the best.{''.join(_findings(cls, networks))}")
    return found


def _objects(cls: type[Attribution]) -> Iterator[str]:
    """Yield how well a method distinguishes two objects of an image, if it applies to a network that finds objects."""
    text = (ROOT / "benchmarks" / "results" / "testbed_objects.md").read_text()
    header, row = (
        re.search(rf"^\| {name} \| (.*) \|$", text, re.MULTILINE) for name in ("method", f"`{cls.__name__}`")
    )
    if header is None or row is None:
        return
    values = dict(zip(header[1].split(" | "), row[1].split(" | "), strict=True))
    found = ", ".join(f"{network} {value.strip('*')}" for network, value in values.items() if value != "-")
    fails = ", ".join(network for network, value in values.items() if "*" in value)
    if found:
        link = f"[fraction of the map on the explained object]({relative('benchmarks/testbed_objects.md', page(cls))})"
        doubt = f" It does not distinguish them on {fails}." if fails else ""
        yield f"Of two objects in an image, the {link} minus the fraction on the other object: {found}.{doubt}"


def _findings(cls: type[Attribution], networks: str) -> Iterator[str]:
    """Yield the findings of the testbed that name a method, each as a sentence after a space."""
    tasks: dict[str, list[str]] = {_WORSE: [], _NO_SCORE: []}
    for line in re.findall(r"^- (.*)$", _section(f"What holds by all scores: ranks on {networks}"), re.MULTILINE):
        case, _, names = line.partition(": ")
        if "Better by no score: " not in names:  # "Mean rank in the first half of 56: `LRP`, ..."
            if f"`{cls.__name__}`" in names:
                plain = case.replace("all controls", "all maps that ignore the network")
                yield f" {plain.replace('the best control', 'the best map that ignores the network')}, by all scores."
            continue
        for finding, named in zip(tasks, names.split("Better by no score: "), strict=True):
            if f"`{cls.__name__}`" in named:
                tasks[finding].append("`{}` with `{}`".format(*case.split(", ")))
    for finding, cases in tasks.items():
        if cases:
            yield f" {finding}: {', '.join(cases)}."


def _section(heading: str) -> str:
    """Return the text below a heading of the testbed's results."""
    return _results().partition(f"## {heading}\n")[2].partition("\n## ")[0]


def _limits(cls: type[Attribution]) -> list[str]:
    """Return the limits of docs/limits.md that name a method, also by its name in prose, such as "Grad-CAM++"."""
    text = (ROOT / "docs" / "limits.md").read_text().partition("## Methods\n")[2].partition("\n## ")[0]
    letters = "[ -]?".join(map(re.escape, cls.__name__.replace("PlusPlus", "++")))
    named = re.compile(rf"(?<![\w-]){letters}(?:agation)?(?![\w+])", re.IGNORECASE)
    limits = [" ".join(item.split()) for item in re.split(r"^- ", text, flags=re.MULTILINE)[1:]]
    pages = (as_page("docs/limits.md", limit) for limit in limits if named.search(limit))
    return [re.sub(r"\]\((?!https)", "](../", limit) for limit in pages]


def _guides(cls: type[Attribution]) -> str:
    """Return links to the pages under docs/ that name a method."""
    links = []
    for file in sorted((ROOT / "docs").glob("*.md")):
        text = file.read_text()
        if f"{cls.__name__}`" in text or f"{cls.__name__}(" in text:
            links.append(f"[{text.partition(chr(10))[0].removeprefix('# ')}](../{file.name})")
    return f"Described in: {', '.join(links)}."
