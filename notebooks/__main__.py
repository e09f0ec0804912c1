"""Run the notebooks and write them anew: all of them, or those named, as in `python -m notebooks 03 06`."""

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


async def _rewrite(script: Path, turn: asyncio.Semaphore) -> bool:
    """Run one page and write it. Says how it went, and returns whether it went well."""
    async with turn:
        begun = time.perf_counter()
        try:
            notebook = await execute(script)
        except CellError as error:
            print(f"FAILED  {error}", file=sys.stderr)
            return False
    if found := problems(notebook):
        print(f"FAILED  {script.stem} ran, and is not written:", *found, sep="\n  ", file=sys.stderr)
        return False
    path = notebook_of(script)
    write(notebook, path)
    print(f"{path.name:32} {time.perf_counter() - begun:5.1f} s {path.stat().st_size / 2**20:6.2f} MiB", flush=True)
    return True


async def _rewrite_all(scripts: Sequence[Path], jobs: int) -> bool:
    turn = asyncio.Semaphore(jobs)
    return all(await asyncio.gather(*(_rewrite(each, turn) for each in scripts)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line names, and return the exit code: 1 where a page fails, 2 where there is none."""
    parser = argparse.ArgumentParser(prog="python -m notebooks", description=(__doc__ or "").strip())
    parser.add_argument("names", metavar="PAGE", nargs="*", help="a number or a part of a name (default: all)")
    parser.add_argument("-j", "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="how many at a time")
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
