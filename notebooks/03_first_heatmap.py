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
# # Your first heatmap
#
# **Which pixels did the network go by?** This page asks it five times, in five ways. All of them are *gradients at
# the input*: one number for every colour value of every pixel, from one forward and one backward pass.
#
# The network is EfficientNet-Lite0, small and pretrained on ImageNet's 1000 classes. It comes with the install, so
# nothing is downloaded here.

# %%
# %matplotlib inline
from pathlib import Path

import torch

import saliency

ASSETS = Path("../assets")
PHOTOS = sorted(ASSETS.glob("*.jpg"))

model = saliency.load("efficientnet_lite0")

# %% [markdown]
# ## One photo, one line
#
# Hand over a path. Without a class, the method explains the one that the network finds most likely.

# %%
gradient = saliency.VanillaGradient(model)
explanation = gradient.attribute(ASSETS / "coffee.jpg")
explanation

# %% [markdown]
# The values have the shape of the network's *input*, 224 by 224 with three colours. A value says how many points the
# score would rise per unit, if that one number of the input rose a little. Drawing puts the map back on the photo,
# where the network's crop was:

# %%
saliency.figure(explanation)

# %% [markdown]
# **What to see.** The brightest specks lie in the coffee and on the inside of the cup above it. Around the tinted
# square is the part of the photo that was cropped away: the network never saw it.
#
# **What to beware of.** It is speckled, and that is no fault of the drawing. Neighbouring pixels have quite different
# gradients in a network like this one: a single pixel's slope is a local, jittery thing. And a gradient tells how the
# score *would change*, which is not why it is what it is.

# %% [markdown]
# ## Five methods on five photos
#
# - **Vanilla gradient**: how fast the score rises with each value. Drawn is its size, whatever its sign.
# - **Input times gradient**: each value's part in the score, if the network were linear. Red speaks for the class,
#   blue against it.
# - **Guided backpropagation**: the gradient, but on its way back each ReLU lets positive signals through only.
# - **DeconvNet**: the same idea, but blind to which ReLUs were open on the way forth.
# - **RectGrad**: each ReLU passes only the 2 % of its units where activation times signal is largest; then times the
#   input.
#
# `explain_together` lets them share the forward pass. The contact sheet puts photos down and methods across.

# %%
methods = [
    saliency.VanillaGradient(model),
    saliency.InputXGradient(model),
    saliency.GuidedBackprop(model),
    saliency.DeconvNet(model),
    saliency.RectGrad(model),
]
rows = [saliency.explain_together(methods, photo) for photo in PHOTOS]
saliency.contact_sheet(rows, thumb=150, opacity=0.8)

# %% [markdown]
# **What to see.**
#
# - The network's top class stands at the left, right or wrong. The astronaut is a "football helmet" to it: the
#   classes have no astronaut, and the specks on the helmet show what it took instead.
# - Guided backpropagation draws fine lines: eyes and nose of the cat, the rim of the coffee, the tips of rocket and
#   masts.
# - RectGrad keeps the fewest pixels of all, among them the legs of the tripod.
# - DeconvNet shows nearly the same lattice on each photo. That is worth a closer look.
#
# ## A map that does not depend on the photo
#
# Ask DeconvNet for the same class on two photos:

# %%
photos = [ASSETS / "coffee.jpg", ASSETS / "chelsea.jpg"]
for method in (saliency.DeconvNet(model), saliency.GuidedBackprop(model)):
    on_coffee, on_cat = method.attribute(photos, "espresso")
    print(f"{method.name:16} same map on both photos: {torch.equal(on_coffee.values, on_cat.values)}")

# %% [markdown]
# Bit for bit the same. DeconvNet's rule ignores which ReLUs were open; in the networks it was made for, the places of
# the maxima in the pooling layers still carried the photo into the map. This network has no max pooling, so nothing
# of the photo is left: the lattice is the pattern of its strides. The method is computed as its paper says, and on
# this network it says nothing. Look at several photos before you trust any method on yours.
#
# ## Does the map know the class?
#
# A second test that costs one line: ask for a class that is not in the photo at all.

# %%
classes = ["espresso", "space shuttle"]
explained = [each.attribute_classes(ASSETS / "coffee.jpg", classes) for each in (methods[0], methods[2], methods[4])]
saliency.contact_sheet([list(row) for row in zip(*explained, strict=True)], thumb=220, opacity=0.8)

# %%
for of_espresso, of_shuttle in explained:
    both = torch.stack([saliency.heatmap(each).flatten() for each in (of_espresso, of_shuttle)])
    print(f"{of_espresso.method:16} correlation between the two maps: {torch.corrcoef(both)[0, 1]:.2f}")

# %% [markdown]
# **What to beware of.** Guided backpropagation draws the cup, whoever asks: asked for a space shuttle, which nobody
# would see here, it returns practically the same picture as for the espresso. RectGrad comes close to that. They show
# what the network *detects*. The plain gradient, the noisiest of them, does change with the class.
#
# ## Only the pixels that matter
#
# Two more ways to draw. With `opacity="map"` the colours are as strong as the map is, so everything else stays as it
# was; `cutout` keeps the strongest share of the pixels.

# %%
guided = methods[2].attribute(ASSETS / "chelsea.jpg", "tiger cat")
saliency.overlay(guided, opacity="map")

# %%
saliency.cutout(guided, keep=0.1, background="white")

# %% [markdown]
# **What to see.** One pixel in ten is enough for *us* to see a cat: eyes, nose and the edges between them. Whether it
# is enough for the network is another question, and [the last page](08_without_gradients.ipynb) asks it.
#
# **In short.** Gradients at the input show *fine detail*, and are weak at *which class*. For that there are class
# activation maps, on the next page.
