"""One page per method, and the gallery of all of them, from the registry, the testbed's results and the guides."""

from __future__ import annotations

import inspect
import json
import re
from functools import cache
from pathlib import Path

import saliency
from saliency.attribution.base import Attribution, source, summary
from saliency.cli.lists import describe

from .docstrings import as_markdown
from .examples import example
from .markdown import PICTURES, ROOT, relative

TESTBED = "benchmarks/testbed.md"
_RANKS = {"convolutional networks": "convolutional networks", "a vision transformer": "the vision transformer"}
_FINDINGS = "## What holds by all scores: ranks on "


def classes() -> list[type[Attribution]]:
    """Return all methods of the toolkit, in the order of the registry."""
    return [cls for cls in saliency.METHODS.values() if cls.__module__.startswith("saliency.methods.")]


def page(cls: type[Attribution]) -> str:
    """Return the path of a method's page."""
    return f"methods/{cls.name}.md"


@cache
def families() -> dict[str, list[type[Attribution]]]:
    """Return the methods by family, from the table in the README."""
    by_name = {cls.__name__: cls for cls in classes()}
    rows = re.findall(r"^\| ([a-zA-Z ,]+) \| ((?:`\w+`(?:, )?)+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    found = {family: [by_name.pop(name) for name in re.findall(r"\w+", names)] for family, names in rows}
    return found | ({"other methods": list(by_name.values())} if by_name else {})


def method_page(cls: type[Attribution], links: dict[str, str]) -> str:
    """Return the page of a method. `links` has the page of each public name."""
    facts, here = describe(cls), page(cls)
    docstring = inspect.getdoc(cls) or ""
    lead, _, rest = docstring.partition("\n\n")
    body = [part for part in rest.split("\n\n") if not part.startswith("Args:")]
    code = f"{Path(inspect.getfile(cls)).relative_to(ROOT)}, line {inspect.getsourcelines(cls)[1]}"
    parts = [
        f"# {cls.__name__}",
        as_markdown(lead, here, links),
        *_picture(cls),
        f"```python\n{example(cls)}```",
        "## What it computes",
        as_markdown("\n\n".join(body), here, links),
        "## When to use it, and when not",
        "\n".join(f"- {line}" for line in _advice(cls)),
        f"## Cost\n\n{facts['cost'][0].upper()}{facts['cost'][1:]}; see [benchmarks](../benchmarks.md).",
        "## Options",
        _options(cls, links),
        "## Source",
        as_markdown(source(cls), here, links),
        f"The code is in `{code}`. On the command line, the method is `{cls.name}`.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def gallery_page() -> str:
    """Return the page that lists all methods by family, with their pictures."""
    parts = [
        "# Gallery",
        "Each method has a page: what it computes, when to use it and when not, its cost, its options and its source. "
        "[Choosing a method](../choosing-a-method.md) is the place to start.",
    ]
    for family, members in families().items():
        rows = [f"## {family[0].upper()}{family[1:]}", "", "| method | summary | cost |", "|---|---|---|"]
        for cls in members:
            link = f"[`{cls.__name__}`]({cls.name}.md)"
            rows.append(f"| {link} | {summary(cls)} | {cls.cost} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _picture(cls: type[Attribution]) -> list[str]:
    """Return the picture of a method, if `make gallery` has drawn it."""
    file = PICTURES / f"{cls.name}.jpg"
    return [f"![{cls.__name__} on five images](../gallery/{file.name})"] if file.exists() else []


def _options(cls: type[Attribution], links: dict[str, str]) -> str:
    """Return the table of a method's options."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, option in describe(cls)["options"].items():
        default = json.dumps(option["default"], default=str)
        values = ", ".join(f"`{value}`" for value in option["choices"])
        meaning = as_markdown(option["description"], page(cls), links) + (f" One of {values}." if values else "")
        rows.append(f"| `{name}` | `{default}` | {meaning} |".replace("\n", " "))
    return "\n".join(rows)


def _advice(cls: type[Attribution]) -> list[str]:
    """Return what the testbed found for a method, its limits, and the guides that describe it."""
    return [*_testbed(cls), *_limits(cls), _guides(cls)]


@cache
def _results() -> str:
    return (ROOT / "benchmarks" / "results" / "testbed.md").read_text()


def _testbed(cls: type[Attribution]) -> list[str]:
    """Return the mean ranks of a method on the testbed, and the remarks that name it."""
    link, found = relative(TESTBED, page(cls)), []
    for heading, networks in _RANKS.items():
        section = _results().partition(f"## Ranks on {heading}\n")[2].partition("\n## ")[0]
        row = re.search(rf"^\| `{cls.__name__}` \| ([\d.]+) .*?\| ([\d.]+) .*?\| ([\d.]+) ", section, re.MULTILINE)
        count = len(re.findall(r"^\| [`*]", section, re.MULTILINE))
        if row is None:
            found.append(f"Drawn images, {networks}: not measured.")
            continue
        ranks = f"{row[1]} by energy, {row[2]} by rank accuracy, {row[3]} by AUC"
        found.append(f"Drawn images, {networks}: [mean rank of {count} maps]({link}) {ranks}; 1 is the best.")
        found += [f"Drawn images, {networks}, {where}: {remark}." for where, remark in _remarks(cls, heading)]
    return found


def _remarks(cls: type[Attribution], heading: str) -> list[tuple[str, str]]:
    """Return the case and the remark of each finding "case: remark: `A`, `B`." that names a method."""
    section = _results().partition(f"{_FINDINGS}{heading}\n")[2].partition("\n## ")[0]
    remarks = []
    for line in re.findall(r"^- (.*)$", section, re.MULTILINE):
        case, _, rest = line.partition(": ")
        if "Better by no score: " not in rest:  # "Mean rank in the first half of 56: `LRP`, ..."
            found = [("by all three scores", case)] if f"`{cls.__name__}`" in rest else []
        else:
            worse, no_score = rest.split("Better by no score: ")
            said = {"worse than the best map that ignores the network": worse}
            said["by no score better than all maps that ignore the network"] = no_score
            found = [(f"task {case}", text) for text, names in said.items() if f"`{cls.__name__}`" in names]
        remarks += [(where, f"{text[0].lower()}{text[1:]}") for where, text in found]
    return remarks


def _limits(cls: type[Attribution]) -> list[str]:
    """Return the limits of docs/limits.md that name a method, also by its name in prose, such as "Grad-CAM++"."""
    text = (ROOT / "docs" / "limits.md").read_text().partition("## Methods\n")[2].partition("\n## ")[0]
    letters = "[ -]?".join(map(re.escape, cls.__name__.replace("PlusPlus", "++")))
    named = re.compile(rf"(?<![\w-]){letters}(?:agation)?(?![\w+])", re.IGNORECASE)
    limits = [" ".join(item.split()) for item in re.split(r"^- ", text, flags=re.MULTILINE)[1:]]
    return [re.sub(r"\]\((?!https)", "](../", limit) for limit in limits if named.search(limit)]


def _guides(cls: type[Attribution]) -> str:
    """Return links to the pages under docs/ that name a method."""
    links = []
    for file in sorted((ROOT / "docs").glob("*.md")):
        text = file.read_text()
        if f"{cls.__name__}`" in text or f"{cls.__name__}(" in text:
            links.append(f"[{text.partition(chr(10))[0].removeprefix('# ')}](../{file.name})")
    return f"Described in: {', '.join(links)}."
