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
# **What does this toolkit have to say about five photos?** Every method, on every photo, for the network's own top
# class. There is no list of methods on this page: it asks the registry, so a new method appears here by itself.

# %%
# %matplotlib inline
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import Markdown

import saliency
from saliency.catalogue import summary

PHOTOS = sorted(Path("../assets").glob("*.jpg"))

model = saliency.load("efficientnet_lite0")
saliency.contact_sheet([[saliency.GradCAM(model).attribute(photo)] for photo in PHOTOS], thumb=180)

# %% [markdown]
# The five photos, with the class that is explained below and where Grad-CAM sees it. Two of the five classes are off:
# there is no astronaut among the 1000 classes, and the rocket is taken for a missile. What a network goes by is most
# worth a look where it is wrong.
#
# ## The methods

# %%
rows = [f"| `{cls.__name__}` | {summary(cls)} | {cls.cost} |" for cls in saliency.METHODS.values()]
Markdown("\n".join(["| method | in a sentence | one call costs |", "|---|---|---|", *rows]))

# %% [markdown]
# ## The sheet
#
# First the methods that one forward and one backward are enough for. Each photo is explained by all of them together;
# whatever passes of the network they can share, they do. Each map is drawn on its own scale. Dark to bright is none to
# much; in the maps with signs red speaks for the class, blue against it.

# %%
is_of_many_passes = {cls: "chunk" in cls.options() for cls in saliency.METHODS.values()}
methods = [cls(model) for cls, many in is_of_many_passes.items() if not many]
figure, axes = plt.subplots(
    len(methods), len(PHOTOS), figsize=(11, 2 * len(methods)), layout="constrained", squeeze=False
)
for column, photo in zip(axes.T, PHOTOS, strict=True):
    for axis, explanation in zip(column, saliency.explain_together(methods, photo), strict=True):
        axis.imshow(saliency.overlay(explanation, opacity=0.7))
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    column[0].set_title(explanation.target_names[0], fontsize=13)
for axis, method in zip(axes[:, 0], methods, strict=True):
    axis.set_ylabel(type(method).__name__, fontsize=12)

# %% [markdown]
# **What to see.** Two kinds of maps. Those of a layer are smooth and say *where*; those of the input are fine and say
# *what*. Several of the smooth ones are equal on this network, for the reason on the page on [class activation
# maps](04_class_activation_maps.ipynb).
#
# **What to beware of.** A map that looks right need not be right, and one that looks odd may be telling. The lattice
# of DeconvNet is the same for every photo; [the first page on heatmaps](03_first_heatmap.ipynb) shows why. And maps
# that agree are no independent witnesses: they read the same layer.
#
# The same from the command line, with a file per photo and method:
#
# ```console
# $ saliency explain assets --method all --set passes=140 --sheet --out out
# ```
#
# One photo closer, by the methods that map the input:

# %%
closer = [each for each in saliency.explain_together(methods, "../assets/coffee.jpg") if each.layer is None]
saliency.contact_sheet([closer], thumb=150, opacity=0.8)

# %% [markdown]
# ## The methods of many passes
#
# Those that smooth, integrate, cover up and ask again take tens to thousands of passes. Here each that samples has 140
# for one photo, and the others a few steps, which is less than their authors would allow: a look, and no more.

# %%
quick = {"passes": 140, "steps": 10, "channels": 100, "window": 48, "stride": 24, "precision": "fast"}
looks = []
for cls in (cls for cls, many in is_of_many_passes.items() if many):
    options = {name: each for name, each in quick.items() if name in cls.options()}
    looks.append(cls(model, **options).attribute("../assets/coffee.jpg"))
rows = -(-len(looks) // 4)
figure, axes = plt.subplots(rows, 4, figsize=(11, 2.3 * rows), layout="constrained")
for axis in axes.flat:
    axis.axis("off")
for axis, explanation in zip(axes.flat, looks, strict=False):
    axis.imshow(saliency.overlay(explanation, opacity=0.7))
    axis.set_title(f"{explanation.method}\n{explanation.effort[0].passes} passes", fontsize=9)

# %% [markdown]
# **What to see.** Nearly all point at the cup. Those that mask or cover find it as a whole; the path methods, which end
# at single pixels, draw its rim. More on these on the pages [How sure is this map?](07_how_sure_is_this_map.ipynb) and
# [Without gradients](08_without_gradients.ipynb).
