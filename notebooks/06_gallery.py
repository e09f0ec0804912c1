# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The gallery
#
# **Which pixels drove the prediction, according to every method?** The page has no list of methods: it iterates over
# the registry, so a new method appears here without any change. Each map explains the network's own top class. Methods
# that read attention have [a page of their own](10_inside_a_transformer.ipynb), because this network has none.

# %%
import math
import os
from pathlib import Path

import numpy as np
from IPython.display import Markdown, display

import saliency
from saliency.attribution.base import summary

PHOTOS = sorted(Path("../assets").glob("*.jpg"))

model = saliency.load("efficientnet_lite0")
saliency.contact_sheet([[saliency.GradCAM(model).attribute(photo)] for photo in PHOTOS], thumb=180)

# %% [markdown]
# The sheet shows the five photos, with the class that is explained below and its Grad-CAM. Two of the five classes are
# wrong: there is no astronaut among the 1000 classes, and the rocket is classified as a missile. Explanations are most
# useful where a network is wrong.
#
# ## The methods

# %%
classes = [cls for cls in saliency.METHODS.values() if not cls.needs.attention]
rows = [f"| `{cls.__name__}` | {summary(cls)} | {cls.cost} |" for cls in classes]
Markdown("\n".join(["| method | summary | cost of a call |", "|---|---|---|", *rows]))

# %% [markdown]
# ## Methods of a single pass
#
# These methods take one forward and at most a few backward passes; DeepSHAP repeats this for ten baselines.
# `Together` runs one forward pass per photo for all of them, and computes each gradient once.


# %% tags=["warns"]
FAMILIES = {
    "Class activation maps": ["cam"],
    "Class activation maps with other layers, classes or gradients": ["combined_cam"],
    "Class activation maps from forward passes": ["gradient_free_cam"],
    "Gradients": ["gradient", "full_grad"],
    "Relevance": ["lrp", "deep_lift"],
    "Path methods": ["integrated_gradients", "xrai"],
    "Smoothing": ["smoothing"],
    "Masks and windows": ["occlusion", "rise", "extremal_perturbation", "sobol", "vit_cx"],
    "Superpixels: Shapley values and local models": ["lime_shap"],
}


def family(explanation):
    """Return the heading of a method: the heading of the file in which its class is defined."""
    file = saliency.METHODS[explanation.method].__module__.rpartition(".")[2]
    return next((name for name, files in FAMILIES.items() if file in files), "Other methods")


def draw(rows, thumb, columns=6):
    """Draw the contact sheets of each family below its heading."""
    for heading in [*FAMILIES, "Other methods"]:
        chosen = [[each for each in row if family(each) == heading] for row in rows]
        if not chosen[0]:
            continue
        display(Markdown(f"### {heading}"))
        sheets = math.ceil(len(chosen[0]) / columns)
        for part in np.array_split(np.arange(len(chosen[0])), sheets):
            display(saliency.contact_sheet([[row[index] for index in part] for row in chosen], thumb=thumb))


is_test = "PYTEST_CURRENT_TEST" in os.environ


def create(cls, **options):
    """Return a method, without the options that it does not have; in a test, with few passes."""
    few = {"steps": 10, "channels": 8, "window": 48, "stride": 48, "distance": 0.6}
    few = {**cls.preview_options, **few} if is_test else {}
    return cls(model, **{name: value for name, value in {**options, **few}.items() if name in cls.options()})


many = [cls for cls in classes if issubclass(cls, saliency.extending.MultiPassAttribution)]
single = [create(cls) for cls in classes if cls not in many]
rows = [saliency.Together(*single).attribute(photo) for photo in PHOTOS]
print(f"{len(single)} methods on {len(PHOTOS)} photos: {sum(map(len, rows))} maps")
draw(rows, thumb=140)

# %% [markdown]
# Excitation backpropagation issues a warning: on this network, most of the relevance stays at neurons that are excited
# only by their bias.
#
# Each map has its own scale. The stronger a value, the brighter and the more opaque is its colour. In the maps in red
# and blue, red is evidence for the class and blue is evidence against it.
#
# **What to see.** Maps of a layer are smooth and show *where*; maps of the input are fine and show *what*. Most maps of
# a layer agree on the helmet, the cup and the tripod. Several are equal on this network; the page on [class activation
# maps](04_class_activation_maps.ipynb) gives the reason. Of the maps of the input, LRP is the clearest: it draws the
# tripod and the eyes where gradients show dots ([why](09_where_the_score_comes_from.ipynb)). AttnLRP and CP-LRP are
# made for transformers, and are close to input x gradient here.
#
# **What to beware of.** A map that looks right may still be wrong. The lattice of DeconvNet is the same for every
# photo; [the first page on heatmaps](03_first_heatmap.ipynb) shows why. Maps that agree are not independent evidence:
# they read the same layer.
#
# ## Methods of many passes
#
# These methods smooth, integrate or perturb, and take tens to thousands of passes. Here they run with their defaults,
# on one of the photos. This takes about ten minutes; the tests of this page take a few passes of each method.

# %%
methods = [create(cls) for cls in many]
coffee = saliency.Together(*methods).attribute("../assets/coffee.jpg")
print(f"{len(coffee)} methods on one photo")
draw([coffee], thumb=140)

# %% [markdown]
# **What to see.** FullGrad above, and the CAMs, XRAI, occlusion, RISE and Sobol here, show the
# coffee as a whole. The path methods, whose values belong to single pixels, draw its rim. LIME, Kernel SHAP and Shapley
# sampling agree on an arc of the rim. Some highlight something else: feature ablation the spoon, extremal perturbation
# spots at the edge of the crop. The maps alone do not show which of them are wrong.
#
# **What to beware of.** A large budget does not make a map right: extremal perturbation took 800 steps for each area.
# The next two pages measure how certain a map is, and explain the quantity that each method
# measures: [How sure is this map?](07_how_sure_is_this_map.ipynb) and [Without gradients](08_without_gradients.ipynb).
#
# The same on the command line, with one file per photo and method:
#
# ```bash
# saliency explain assets --method all --set passes=140 --sheet --out out
# ```
