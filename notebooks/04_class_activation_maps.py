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
# # Class activation maps
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/saliency-toolkit/saliency/blob/main/notebooks/04_class_activation_maps.ipynb)
#
# **Where does the network see a class?** The last layers of an image network still have a coarse spatial resolution:
# here, 7 by 7 cells with 1280 channels each. A class activation map is a sum of the channels, each weighted by its
# effect on the score.

# %%
import os
import subprocess

if "COLAB_RELEASE_TAG" in os.environ:  # on Colab: install the toolkit, with the photos
    get = "git clone --depth 1 https://github.com/saliency-toolkit/saliency /content/clone"
    subprocess.run(f"{get} && pip install -q '/content/clone[all]'", shell=True, check=True)
    os.chdir("/content/clone/notebooks")

# %%
# %matplotlib inline
from pathlib import Path

import matplotlib.pyplot as plt

import saliency

ASSETS = Path("../assets")
PHOTOS = sorted(ASSETS.glob("*.jpg"))

model = saliency.load("efficientnet_lite0")
saliency.figure(saliency.GradCAM(model).attribute(ASSETS / "coffee.jpg"))

# %% [markdown]
# **What to see.** The map highlights the cup, and neither the saucer nor the table. **What to beware of.** The map is
# smooth because it was enlarged from 7 by 7 cells; its edges are the edges of cells, not of the cup.
#
# ## The family side by side
#
# Many methods build on the same idea. Here, all of them use the same forward pass and the same gradients of each layer.

# %%
family = [
    saliency.GradCAM(model),
    saliency.GradCAMPlusPlus(model),
    saliency.EigenCAM(model),
    saliency.FusedCAM(model),
    saliency.GuidedGradCAM(model),
]
saliency.contact_sheet([saliency.Together(*family).attribute(photo) for photo in PHOTOS], thumb=150)

# %% [markdown]
# **What to see.** The first three read the last layer and agree on where the evidence is. They differ in the weak
# parts: Grad-CAM++ uses only positive gradients, so more of the image is highlighted, for example on the astronaut.
# Eigen-CAM ignores the class and shows what is most prominent in the layer. FusedCAM adds finer layers, and guided
# Grad-CAM shows the lines inside the Grad-CAM.
#
# Other CAMs of the last layer look like Grad-CAM here, and three even equal it. After this layer there are only an
# average over the locations and one linear layer. Therefore the gradient is the same at all locations, and the four
# definitions give the same map, up to a factor:

# %%
names = ["CAM", "GradCAM", "XGradCAM", "HiResCAM"]
cam, *others = saliency.Together(*[getattr(saliency, name)(model) for name in names]).attribute(PHOTOS[0])
for other in others:
    ratio = cam.values / other.values
    print(f"cam / {other.method:9} is {ratio.min():.2f} to {ratio.max():.2f} in all {ratio.numel()} places")

# %% [markdown]
# The factor 49 is the number of locations. The score is the mean of the values of CAM, and the sum of the values of the
# other methods (up to the bias of the head).
#
# ## Which layer?
#
# By default a CAM reads the last layer with spatial output. `saliency layers` on the command line lists all of them.
# Earlier layers have a finer resolution, and there the methods differ:


# %%
def draw(explanations, titles, columns=4, **options):
    """Overlays with titles, in rows of so many columns."""
    rows = len(explanations) // columns
    shape = explanations[0].frames[0].image
    size = (10.5, rows * (10.5 / columns * shape.height / shape.width + 0.3))
    _, axes = plt.subplots(rows, columns, figsize=size, layout="constrained")
    for axis, explanation, title in zip(axes.flat, explanations, titles, strict=True):
        axis.imshow(saliency.overlay(explanation, **options))
        axis.set_title(title, fontsize=9)
        axis.set_axis_off()


layers = ["blocks.1", "blocks.2", "blocks.4", "bn2"]
methods = [cls(model, layer) for cls in (saliency.GradCAM, saliency.HiResCAM, saliency.LayerCAM) for layer in layers]
found = saliency.Together(*methods).attribute(ASSETS / "coffee.jpg")
grids = ["{}x{}".format(*each.values.shape[2:]) for each in found]
draw(found, [f"{each.method} at {each.layer}, {grid}" for each, grid in zip(found, grids, strict=True)])

# %% [markdown]
# **What to see.** In the right column, all maps are alike. At `blocks.4`, Grad-CAM misses the cup and highlights the
# border of the crop. It gives each channel *one* weight, the mean of its gradients, but this far from the output a
# channel means different things at different locations. HiResCAM and LayerCAM weight each location separately, and
# highlight the cup and its contents.
#
# **What to beware of.** Finer is not better. At `blocks.1` the maps are fine-grained but show only edges and
# highlights. `FusedCAM` combines several layers in one map. Each layer is scaled by its own maximum, so the values are
# no longer in score units.

# %%
saliency.figure(saliency.FusedCAM(model).attribute(ASSETS / "coffee.jpg"))

# %% [markdown]
# ## Two classes in one photo
#
# The portrait of the astronaut shows a helmet, and behind her a model of the space shuttle. `attribute_classes`
# explains several classes from one forward pass.

# %%
photo = ASSETS / "astronaut.jpg"
classes = ["football helmet", "bobsled", "space shuttle", "torch"]
explained = saliency.GradCAM(model).attribute_classes(photo, classes)
titles = [f"{each.target_names[0]}, {100 * float(each.probabilities):.2f} %" for each in explained]
draw(explained, titles)

# %% [markdown]
# **What to see.** The map depends on the class: it highlights the helmet for one class and the shuttle for another,
# although the network gives the shuttle a tiny probability. A class that is not in the photo also has a map: it
# highlights the helmet and an area by her shoulder for "bobsled", and the bright wall for "torch".
#
# **What to beware of.** Every map here is equally strong, because each is drawn on its own scale. So the shuttle looks
# as convincing as the helmet. `shared_limit` gives the maps a common scale, on which equal colours mean equal values:

# %%
draw(explained, titles, limit=saliency.shared_limit(explained))

# %% [markdown]
# ## Why one class rather than another?
#
# Chelsea the cat is a "tiger cat" with 39 %, an "Egyptian cat" with 34 % and a "tabby" with 18 %. The maps of such
# similar classes hardly differ, because most of the evidence for one cat is evidence for all. `contrast` explains the
# *difference* of two scores.

# %%
cats = ["tiger cat", "tabby", saliency.contrast("tiger cat", "tabby"), saliency.contrast("tiger cat", "Egyptian cat")]
explained = saliency.GradCAM(model).attribute_classes(ASSETS / "chelsea.jpg", cats)
draw(explained, [each.target_names[0] for each in explained], columns=2)

# %% [markdown]
# The maps above show only evidence *for* a class. A contrast has two sides, so draw it with its sign: red supports the
# tiger cat, blue the Egyptian cat.

# %%
saliency.overlay(explained[-1], sign="signed")

# %% [markdown]
# **What to see.** The nose and the eye on the left support the tiger cat. The eye on the right and the cheek on the
# left support the Egyptian cat. Where the map is nearly colourless, both classes have equal support.
#
# ## Fine detail, restricted to a class
#
# Guided backpropagation draws fine lines, but not for the requested class. Guided Grad-CAM keeps only the lines in the
# region that Grad-CAM highlights for the class.

# %%
pair = ["football helmet", "space shuttle"]
guided, focused = (
    each.attribute_classes(photo, pair) for each in (saliency.GuidedBackprop(model), saliency.GuidedGradCAM(model))
)
draw([*guided, *focused], [f"{each.method}: {each.target_names[0]}" for each in [*guided, *focused]])

# %% [markdown]
# **What to see.** The two maps on the left are nearly the same. The two on the right show the helmet and the shuttle.
#
# **What to beware of.** Only the CAM depends on the class: within the bright area, the lines still show everything that
# the network detects there.
