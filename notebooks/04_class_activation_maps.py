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
# **Where does the network see a class?** The last layers of an image network still have a place for everything, if a
# coarse one: here 7 by 7 cells with 1280 channels each. A class activation map adds up the channels, each by what the
# score makes of it.

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
# **What to see.** The espresso is in the cup, not in the saucer or on the table. **What to beware of.** The map is
# smooth because it was stretched from 7 by 7 cells; its edges are those of cells, not those of the cup.
#
# ## The family side by side
#
# All CAMs of one layer share one forward and one backward pass, so five cost hardly more than one.

# %%
family = [
    saliency.GradCAM(model),
    saliency.GradCAMPlusPlus(model),
    saliency.LayerCAM(model),
    saliency.EigenCAM(model),
    saliency.EigenGradCAM(model),
]
saliency.contact_sheet([saliency.explain_together(family, photo) for photo in PHOTOS], thumb=150)

# %% [markdown]
# **What to see.** They agree, on this network and at its last layer. The differences are in the weak parts:
# Grad-CAM++ and LayerCAM count positive gradients only, so more of the picture glows, see the astronaut. Eigen-CAM
# does not ask for the class at all and shows what is most prominent in the layer.
#
# Where are the others of the family? Behind this layer come only an average over its places and one linear layer.
# Then the gradient is the same in all places, and four definitions come down to one map:

# %%
names = ["CAM", "GradCAM", "XGradCAM", "HiResCAM"]
cam, *others = saliency.explain_together([getattr(saliency, name)(model) for name in names], PHOTOS[0])
for other in others:
    ratio = cam.values / other.values
    print(f"cam / {other.method:9} is {ratio.min():.2f} to {ratio.max():.2f} in all {ratio.numel()} places")

# %% [markdown]
# The 49 is the number of places: CAM's values average to the score, where those of the others add up to it (both but
# for the head's bias).
#
# ## Which layer?
#
# By itself a CAM reads the last layer with an extent in space. `saliency layers` on the command line lists all of
# them. Deeper inside the network the layers are finer, and there the methods do part:


# %%
def draw(explanations, titles, columns=4, **options):
    """Overlays with titles, in rows of so many columns."""
    rows = len(explanations) // columns
    shape = explanations[0].frames[0].picture
    size = (10.5, rows * (10.5 / columns * shape.height / shape.width + 0.3))
    _, axes = plt.subplots(rows, columns, figsize=size, layout="constrained")
    for axis, explanation, title in zip(axes.flat, explanations, titles, strict=True):
        axis.imshow(saliency.overlay(explanation, **options))
        axis.set_title(title, fontsize=9)
        axis.set_axis_off()


layers = ["blocks.1", "blocks.2", "blocks.4", "bn2"]
methods = [cls(model, layer) for cls in (saliency.GradCAM, saliency.HiResCAM, saliency.LayerCAM) for layer in layers]
found = saliency.explain_together(methods, ASSETS / "coffee.jpg")
grids = ["{}x{}".format(*each.values.shape[2:]) for each in found]
draw(found, [f"{each.method} at {each.layer}, {grid}" for each, grid in zip(found, grids, strict=True)])

# %% [markdown]
# **What to see.** On the right, all alike. At `blocks.4` Grad-CAM loses the cup and lights up the rim of its crop: it
# gives each channel *one* weight, the mean of its gradients, and this far from the output a channel means different
# things in different places. HiResCAM and LayerCAM weigh each place for itself, and stay with the cup and its
# contents.
#
# **What to beware of.** Finer is not better. At `blocks.1` the maps are fine-grained and say little: edges and
# glints. `FusedCAM` is one way to have both, several layers in one map; each layer counts by its own strongest place,
# so its numbers are no scores any more.

# %%
saliency.figure(saliency.FusedCAM(model).attribute(ASSETS / "coffee.jpg"))

# %% [markdown]
# ## Two classes in one photo
#
# The portrait of the astronaut has a helmet in it, and behind her a model of the space shuttle. `attribute_classes`
# explains several classes from one forward pass.

# %%
photo = ASSETS / "astronaut.jpg"
classes = ["football helmet", "bobsled", "space shuttle", "torch"]
explained = saliency.GradCAM(model).attribute_classes(photo, classes)
titles = [f"{each.target_names[0]}, {100 * float(each.probabilities):.2f} %" for each in explained]
draw(explained, titles)

# %% [markdown]
# **What to see.** The map goes where the class is: to the helmet for one, to the shuttle for the other, although the
# network thinks of a shuttle as next to impossible. It also goes somewhere for a class that is not there at all: the
# "bobsled" is on the helmet and by her shoulder, the "torch" on the bright wall.
#
# **What to beware of.** Every map here is as bright as it can be, because each is drawn on a scale of its own. So the
# shuttle looks as convincing as the helmet. `shared_limit` puts them on one scale, and then equal colours are equal
# values:

# %%
draw(explained, titles, limit=saliency.shared_limit(explained))

# %% [markdown]
# ## Why this rather than that?
#
# Chelsea the cat is a "tiger cat" with 39 %, an "Egyptian cat" with 34 % and a "tabby" with 18 %. The maps of such
# neighbours hardly differ, because most of what speaks for one cat speaks for all. `contrast` explains the
# *difference* of two scores.

# %%
cats = ["tiger cat", "tabby", saliency.contrast("tiger cat", "tabby"), saliency.contrast("tiger cat", "Egyptian cat")]
explained = saliency.GradCAM(model).attribute_classes(ASSETS / "chelsea.jpg", cats)
draw(explained, [each.target_names[0] for each in explained], columns=2)

# %% [markdown]
# The maps above show evidence *for* only. A contrast has two sides, so draw it with its sign: red speaks for the
# tiger cat, blue for the Egyptian one.

# %%
saliency.overlay(explained[-1], sign="signed")

# %% [markdown]
# **What to see.** The nose and the eye on the left speak for the tiger cat, the eye on the right and the cheek on the
# left for the Egyptian cat. Where it is nearly colourless, both classes have the same to say.
#
# ## The fine of one, the focus of the other
#
# Guided backpropagation draws fine lines but not for the class that was asked for. Guided Grad-CAM keeps of them what
# lies where Grad-CAM sees the class.

# %%
pair = ["football helmet", "space shuttle"]
guided, focused = (
    each.attribute_classes(photo, pair) for each in (saliency.GuidedBackprop(model), saliency.GuidedGradCAM(model))
)
draw([*guided, *focused], [f"{each.method}: {each.target_names[0]}" for each in [*guided, *focused]], opacity=0.8)

# %% [markdown]
# **What to see.** The two on the left are nearly the same picture twice. The two on the right are the helmet, and the
# shuttle.
#
# **What to beware of.** The class is in the CAM's part alone: within the bright area, the lines are still whatever
# the network detects there.
