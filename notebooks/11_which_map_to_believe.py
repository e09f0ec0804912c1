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
# # Which map to believe
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/saliency-toolkit/saliency/blob/main/notebooks/11_which_map_to_believe.ipynb)
#
# **A map that looks right can be wrong. How can you tell?** Test the map. A *trust card* asks two questions about one
# map, by tests with an exact level: does it depend on the class, and does it mark what the model learned to use? All
# other rows are numbers, next to those of maps that ignore the prediction.

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

PHOTOS = [Path("../assets") / f"{name}.jpg" for name in ("camera", "coffee", "rocket")]
model = saliency.load("efficientnet_lite0")
cards = {photo.stem: saliency.trust(saliency.GradCAM(model), photo) for photo in PHOTOS}
saliency.figure(cards["coffee"])

# %% [markdown]
# **What to see.** The first row is the test of the class: in a mosaic of four images, most of the map lies on the image
# of its class. The second row is the test of the weights: the diamond is the map, and the crosses are the maps of
# Grad-CAM on networks whose weights were permuted. Better values lie to the right, and green is clear. Below, the map
# is among copies of itself at other positions, and next to a spot at the centre, edges, smoothed edges and colour
# contrast.
#
# A map can pass one test and fail the other. A flipped map depends on the class as much as the right map does.
#
# ## Three photos
#
# The same tests for three photos:

# %%
for photo, card in cards.items():
    print(f"{photo}: {card.summary}")

# %% [markdown]
# **What to beware of.** A test that is not clear does not mean that the map is wrong. On one photo, maps of untrained
# networks can mark the object as well, because it is salient. Evidence adds over images:
# `saliency.compare(methods, images, metrics="weights")` combines the ranks of all images.
#
# ## A small effect
#
# Guided backpropagation draws the sharpest maps. Here is its card of the same cup:

# %%
guided = saliency.trust(saliency.GuidedBackprop(model), PHOTOS[1], "espresso")
saliency.figure(guided)

# %% [markdown]
# **What to see.** The test of the class is clear, but the effect is small: 31 % of the map lies on the image of its
# class, and 25 % are expected by chance. Read the size next to p. The maps of two very different classes show why:

# %%
maps = [saliency.GuidedBackprop(model).attribute(PHOTOS[1], name) for name in ("espresso", "tiger cat")] + [
    saliency.GradCAM(model).attribute(PHOTOS[1], name) for name in ("espresso", "tiger cat")
]
_, axes = plt.subplots(1, 4, figsize=(10.5, 2.2), layout="constrained")
for axis, each in zip(axes, maps, strict=True):
    axis.imshow(saliency.overlay(each))
    axis.set_title(f"{each.method}: {each.target_names[0]}", fontsize=9)
    axis.axis("off")

# %% [markdown]
# **What to see.** Guided backpropagation draws the same edges for a cat that is not there. It passes only positive
# gradients through every ReLU, so it recovers the image rather than the evidence for a class. The map of Grad-CAM moves
# to the rim of the cup.
#
# ## Known answers
#
# On photos, the right map is unknown. On the scenes of the [testbed](../docs/testbed.md) we know it: the object of
# the class. `saliency.compare` measures methods over many images. How much of each map lies on the object?

# %%
METHODS = ("lrp", "input_x_gradient", "guided_backprop", "grad_cam", "layer_cam", "vanilla_gradient", "full_grad")
network = saliency.load("shapes_cnn")
scenes = saliency.testbed.draw_scenes(30, seed=1_000_000)
comparison = saliency.compare(
    [saliency.METHODS[name](network) for name in METHODS],
    scenes.images,
    scenes.labels.tolist(),
    metrics=["energy_pointing_game"],
    masks=scenes.evidence,
)
rows = sorted(comparison, key=lambda row: row.mean)
figure, axis = plt.subplots(figsize=(7.5, 3), layout="constrained")
colors = ["#1a8a4a" if row.rank else "0.6" for row in rows]  # controls have no rank
axis.barh([row.name for row in rows], [row.mean for row in rows], xerr=[2 * row.error for row in rows], color=colors)
axis.set_xlabel("share of the map on the object, with two standard errors; grey: controls")
plt.show()

# %% [markdown]
# **What to see.** LRP puts most of its relevance on the object, and FullGrad hardly more than the spot at the centre.
# Guided backpropagation does well here, since there is only one class to find.
#
# **What to beware of.** The ranking is of this network and this metric. The fraction is lower for coarse maps: Grad-CAM
# has cells of 8 x 8 pixels. Measure on your own network and images: `saliency.compare(methods, images, targets)`, or
# `saliency evaluate FOLDER`.
#
# **In short.** Look at the card before you show a map, and do not believe a map that hardly depends on the class when
# you ask for the reason of a class.
