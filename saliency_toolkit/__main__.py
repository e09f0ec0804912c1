"""Run the command line: `python -m saliency_toolkit`."""

import sys

from saliency.cli import main

if __name__ == "__main__":
    sys.exit(main())
