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
# **A map that looks right can be wrong. How can you tell?** Measure the map, and compare it with maps that ignore the
# prediction. A *trust card* does this for one map: a property is clear only if the map is better than all of these
# controls.

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
# **What to see.** Each row is one property. The diamond is the map, the grey marks are the controls: the edges of the
# image, a spot at the centre, the map itself at random positions (the bar is the range of 19 draws), and for the first
# three rows a constant and noise. Better values lie to the right. Green means clear, red worse than all controls.
#
# The properties have two groups. The map *depends on the model*: on the weights and on the class, and it is stable
# under noise. Whether it *marks what matters* is another question: a flipped map depends on the model just as much. On
# this photo, all properties except insertion are clear: two copies of the map at other positions raise the score as
# fast.
#
# ## Three photos
#
# The same card for three photos. A dark cell is clear:

# %%


def draw_cards(cards):
    """Draw one column per card and one row per property: dark if it is clear."""
    names = [row.title for row in next(iter(cards.values()))]
    clear = [[card[row.name].is_clear for card in cards.values()] for row in next(iter(cards.values()))]
    _, axis = plt.subplots(figsize=(1.1 * len(cards) + 3.4, 3.4), layout="constrained")
    axis.pcolormesh(clear, cmap="Greens", vmin=-0.15, vmax=1.3, edgecolors="white", linewidth=3)
    axis.set_xticks([place + 0.5 for place in range(len(cards))], list(cards))
    axis.set_yticks([place + 0.5 for place in range(len(names))], names)
    axis.tick_params(length=0)
    axis.invert_yaxis()
    axis.set_frame_on(False)


draw_cards(cards)
for photo, card in cards.items():
    print(f"{photo}: {sum(row.is_clear for row in card)} of {len(card)} properties are clear")

# %% [markdown]
# **What to see.** The first three rows are clear on all photos: Grad-CAM passes the sanity checks. Of the other rows,
# four are clear on the first two photos. On the rocket, only the agreement with other methods is clear. **What to
# beware of.** A light cell does not mean that the map is wrong. It means that this measurement cannot distinguish it
# from a map that ignores the prediction.
#
# ## A method that fails
#
# Guided backpropagation draws the sharpest maps. Here is its card of the same cup:

# %%
guided = saliency.trust(saliency.GuidedBackprop(model), PHOTOS[1], "espresso")
saliency.figure(guided)

# %% [markdown]
# **What to see.** "Depends on the class" is not clear: its value is below 0.002, like that of a map that ignores the
# class. The maps of two very different classes show why:

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
# Still, its map passes the test of the weights. One test is not enough.
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
# Guided backpropagation does well here, since there is only one class to find. On the photo it failed.
#
# **What to beware of.** The ranking is of this network and this metric. The fraction is lower for coarse maps: Grad-CAM
# has cells of 8 x 8 pixels. Measure on your own network and images: `saliency.compare(methods, images, targets)`, or
# `saliency evaluate FOLDER`.
#
# **In short.** Look at the card before you show a map, and do not believe a map that fails "depends on the class" when
# you ask for the reason of a class.
