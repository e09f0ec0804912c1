"""The version of the installed distribution, which git tags determine."""

from importlib.metadata import version

DISTRIBUTION = "saliency-toolkit"
__version__ = version(DISTRIBUTION)
