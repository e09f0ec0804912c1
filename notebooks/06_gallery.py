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
from pathlib import Path

from IPython.display import Markdown
from PIL import Image

import saliency
from saliency.attribution.registry import summary

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
# One loop over `METHODS`, with no name of a method in it. Many take one forward and one backward, and all that can
# share these do. Those that smooth, integrate, cover up and ask again take tens to thousands of passes. Here each that
# samples has 96 for one photo, and the others a few steps, less than their authors would allow: a look, and no more.
# (It still is the longest wait in these pages, two minutes or so.)

# %%
quick = {"passes": 96, "grid": 5, "steps": 10, "channels": 20, "window": 48, "stride": 24, "precision": "fast"}
methods = []
for cls in saliency.METHODS.values():
    options = {name: value for name, value in quick.items() if name in cls.options()}
    methods.append(cls(model, **options))

rows = [saliency.explain_together(methods, photo) for photo in PHOTOS]
print(f"{len(methods)} methods on {len(PHOTOS)} photos: {sum(map(len, rows))} maps")

# %% [markdown]
# Seven methods fit across the page, so the five photos come again for the next seven, and so on. Each map is drawn on
# its own scale. Dark to bright is none to much; in the maps on a white ground red speaks for the class, blue against
# it.


# %%
def sheet(rows, across, thumb):
    """Contact sheets of so many methods each, one below the other."""
    starts = range(0, len(rows[0]), across)
    strips = [
        saliency.contact_sheet([row[at : at + across] for row in rows], thumb=thumb, opacity=0.8) for at in starts
    ]
    page = Image.new("RGB", (strips[0].width, sum(strip.height for strip in strips)), "white")
    top = 0
    for strip in strips:
        page.paste(strip, (0, top))
        top += strip.height
    return page


sheet(rows, across=7, thumb=120)

# %% [markdown]
# **What to see.** Most maps of a layer are smooth and say *where*; most of those of the input are fine and say *what*.
# Nearly all of the former agree on the helmet, the cup and the tripod, and several are equal on this network, for the
# reason on the page on [class activation maps](04_class_activation_maps.ipynb).
#
# **What to beware of.** A map that looks right need not be right, and one that looks odd may be telling. The lattice
# of DeconvNet is the same for every photo; [the first page on heatmaps](03_first_heatmap.ipynb) shows why. Maps that
# agree are no independent witnesses: they read the same layer. And 96 passes are few. The patchwork of LIME and
# Kernel SHAP around the rocket is noise for the most part, and extremal perturbation has taken 10 of its 800 steps.
#
# The same from the command line, with a file per photo and method:
#
# ```console
# $ saliency explain assets --method all --set passes=140 --sheet --out out
# ```
#
# One photo closer, by the methods that map the input:

# %%
on_coffee = next(row for row, photo in zip(rows, PHOTOS, strict=True) if photo.stem == "coffee")
sheet([[each for each in on_coffee if each.layer is None]], across=5, thumb=150)

# %% [markdown]
# **What to see.** Most point at the coffee in the cup, each in a hand of its own. FullGrad, occlusion, RISE, Sobol and
# XRAI find it as a whole; the path methods, which end at single pixels, draw its rim. Some point elsewhere: feature
# ablation at the spoon, extremal perturbation at four spots, HSIC beside the cup. Which of them are wrong,
# no picture tells. How sure a map is, and what its method asks, are the subjects of the next two pages, [How sure is
# this map?](07_how_sure_is_this_map.ipynb) and [Without gradients](08_without_gradients.ipynb).
