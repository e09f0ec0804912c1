"""Import the modules of the pages, for the process from which the kernels are forked."""

import os
import warnings
from importlib import import_module

import saliency

from .kernels import ENVIRONMENT

os.environ.update(ENVIRONMENT)
# timm's progress bars warn if ipywidgets is missing, but work without it.
warnings.filterwarnings("ignore", "IProgress not found")
for _name in ("ipykernel.kernelapp", "matplotlib.pyplot", "skimage.segmentation", "timm"):
    import_module(_name)
for _name in dir(saliency):
    getattr(saliency, _name)
