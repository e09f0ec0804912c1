"""Write the pages of the site and its configuration to build/site: `python -m docs.site`, as `make docs` does."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from . import methods, reference
from .llms import llms
from .markdown import CONFIGURATION, FILES, OUT, PICTURES, ROOT, URLS, as_page, at_repository, page_of
from .notebooks import notebook_pages

_METHOD = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)


def main(out: Path = OUT) -> dict[str, str]:
    """Write all pages, their pictures and the configuration to a folder, and return the pages by path."""
    shutil.rmtree(out, ignore_errors=True)
    folder = out / "pages"
    pages = repository_pages() | generated_pages() | notebook_pages(folder / "notebooks")
    pages = {name: f"{text.rstrip()}\n\n{source_link(name)}\n" for name, text in pages.items()}
    navigation = full_navigation(pages)
    summary = pages["index.md"].split("\n\n")[1].replace("\n", " ")
    for name, text in (pages | llms(pages, navigation, summary)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    shutil.copytree(ROOT / "assets", folder / "assets", ignore=shutil.ignore_patterns("*.md"))
    for name in ("iframe-worker.js", "site.css"):
        shutil.copy(Path(__file__).with_name(name), folder / "assets")
    shutil.copytree(Path(__file__).with_name("overrides"), out / "overrides")
    if PICTURES.exists():
        shutil.copytree(PICTURES, folder / "gallery", ignore=shutil.ignore_patterns("*.txt"))
    addresses = {"site_url": URLS["Documentation"], "repo_url": URLS["Repository"]}
    own = {"docs_dir": "pages", "site_dir": "html", "nav": navigation, **addresses}
    configuration = yaml.safe_load(CONFIGURATION.read_text()) | own
    configuration["theme"]["custom_dir"] = "overrides"
    (out / "mkdocs.yml").write_text(json.dumps(configuration, indent=1))  # JSON is YAML
    return pages


def repository_pages() -> dict[str, str]:
    """Return the pages that are Markdown files of the repository."""
    pages = {}
    for name in FILES:
        text = (ROOT / name).read_text()
        if name == "README.md":  # the navigation of the site replaces its list of pages
            text = re.sub(r"^## Documentation\n.*?(?=^## )", "", text, flags=re.MULTILINE | re.DOTALL)
        if not re.search("^# ", text, re.MULTILINE):
            text = f"# Results: {Path(name).stem}\n\n{text}"
        pages[page_of(name)] = _with_methods(as_page(name, text), page_of(name))
    return pages


def generated_pages() -> dict[str, str]:
    """Return the pages that are made from the registry and from docstrings."""
    pages = {methods.page(cls): methods.method_page(cls, reference.links()) for cls in methods.classes()}
    pages["methods/index.md"] = methods.gallery_page()
    pages |= {reference.page(package): reference.reference_page(package) for package in reference.contents()}
    pages["reference/index.md"] = reference.index_page()
    return pages


@cache
def source_files() -> dict[str, str]:
    """Return the file or folder of the repository that each page but those of notebooks is made from."""
    packages = {reference.page(package): reference.file_of(package) for package in reference.contents()}
    scripts = {methods.page(cls): methods.file_of(cls) for cls in methods.classes()}
    lists = {"methods/index.md": "saliency/methods", "reference/index.md": "saliency"}
    return {page_of(name): name for name in FILES} | packages | scripts | lists


def source_link(page: str) -> str:
    """Return the last line of a page: a link to the file of the repository that it is made from."""
    file = source_files().get(page, page.replace(".md", ".ipynb"))
    return f"[Source of this page: {file}]({at_repository(file)}){{ .source }}"


def full_navigation(pages: dict[str, str]) -> list[dict[str, Any]]:
    """Return the navigation of mkdocs.yml, with the generated pages below the page that lists them.

    Raises:
        LookupError: A page is not in the navigation.
    """
    navigation: list[dict[str, Any]] = yaml.safe_load(CONFIGURATION.read_text())["nav"]
    families = {family: [methods.page(cls) for cls in members] for family, members in methods.families().items()}
    below: dict[str, list[Any]] = {
        "methods/index.md": [{family[0].upper() + family[1:]: names} for family, names in families.items()],
        "reference/index.md": [reference.page(package) for package in reference.contents()],
        "notebooks/index.md": sorted(name for name in pages if re.match(r"notebooks/\d", name)),
        "benchmarks.md": sorted(name for name in pages if name.startswith("benchmarks/")),
    }
    for section in navigation:
        for heading, entry in section.items():
            entries = entry if isinstance(entry, list) else [entry]
            section[heading] = [*entries, *(more for each in entries for more in below.get(str(each), []))]
    missing = set(pages) - set(re.findall(r"[\w/-]+\.md", json.dumps(navigation)))
    if missing:
        raise LookupError(f"not in the navigation of mkdocs.yml: {', '.join(sorted(missing))}")
    return navigation


def _with_methods(text: str, page: str) -> str:
    """Return the text with links from tables of methods to the page of each."""
    links, depth = reference.links(), "../" * page.count("/")

    def link(row: re.Match[str]) -> str:
        target = links.get(row[1], "")
        return f"| [`{row[1]}`]({depth}{target}) |" if target.startswith("methods/") else row[0]

    return _METHOD.sub(link, text)


if __name__ == "__main__":
    print(f"{len(main())} pages in {OUT.relative_to(ROOT)}")
