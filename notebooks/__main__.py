"""Run and rewrite the notebooks: all of them, or the named ones, as in `python -m notebooks 03 06`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .checks import problems
from .pages import CellError, execute, notebook_of, pages, write


async def _rewrite(script: Path, semaphore: asyncio.Semaphore) -> bool:
    """Run one page and write its notebook. Print the result, and return whether it succeeded."""
    async with semaphore:
        start = time.perf_counter()
        try:
            notebook = await execute(script)
        except CellError as error:
            print(f"FAILED  {error}", file=sys.stderr)
            return False
    if messages := problems(notebook):
        print(f"FAILED  {script.stem} ran but is not written:", *messages, sep="\n  ", file=sys.stderr)
        return False
    path = notebook_of(script)
    write(notebook, path)
    print(f"{path.name:32} {time.perf_counter() - start:5.1f} s {path.stat().st_size / 2**20:6.2f} MiB", flush=True)
    return True


async def _rewrite_all(scripts: Sequence[Path], jobs: int) -> bool:
    semaphore = asyncio.Semaphore(jobs)
    return all(await asyncio.gather(*(_rewrite(script, semaphore) for script in scripts)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named pages, and return the exit code: 1 if a page fails, 2 if no page has such a name."""
    parser = argparse.ArgumentParser(prog="python -m notebooks", description=(__doc__ or "").strip())
    parser.add_argument("names", metavar="PAGE", nargs="*", help="number or part of a file name (default: all pages)")
    parser.add_argument(
        "-j", "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="number of pages that run at once"
    )
    arguments = parser.parse_args(argv)
    try:
        scripts = pages(arguments.names)
    except LookupError as error:
        parser.error(str(error.args[0]))
    try:
        return 0 if asyncio.run(_rewrite_all(scripts, max(1, arguments.jobs))) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
