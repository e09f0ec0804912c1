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
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/saliency-toolkit/saliency/blob/main/notebooks/03_first_heatmap.ipynb)
#
# **Which pixels drove the prediction?** This page answers the question with five methods. All of them are *gradients at
# the input*: one number for each colour value of each pixel, from one forward and one backward pass.
#
# The network is EfficientNet-Lite0, small and pretrained on the 1000 classes of ImageNet. It is installed with the
# package, so nothing is downloaded here.

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

import torch

import saliency

ASSETS = Path("../assets")
PHOTOS = sorted(ASSETS.glob("*.jpg"))

model = saliency.load("efficientnet_lite0")

# %% [markdown]
# ## One photo, one line
#
# Pass a path. Without a class, the method explains the network's top class.

# %%
gradient = saliency.VanillaGradient(model)
explanation = gradient.attribute(ASSETS / "coffee.jpg")
explanation

# %% [markdown]
# A notebook shows an explanation as an overlay: the map in colours on the part of the photo that the network saw. The
# values have the shape of the network's *input*, 224 by 224 pixels with three colours. A value states how much the
# score rises per unit of this number of the input, for a small change. A figure adds the photo and a colour bar:

# %%
saliency.figure(explanation)

# %% [markdown]
# **What to see.** The brightest specks lie in the coffee and on the inside of the cup above it. What lies outside
# the thin line was cropped away: the network never saw it.
#
# **What to beware of.** The map is speckled, and this is not an artefact of drawing: in a network like this one,
# neighbouring pixels have quite different gradients. A gradient shows how the score *would change*, not why it has its
# value.

# %% [markdown]
# ## Five methods on five photos
#
# - **Vanilla gradient**: the gradient of the score. Its magnitude is drawn.
# - **Input times gradient**: the contribution of each value, if the network were linear. Red supports the class, blue
#   opposes it.
# - **Guided backpropagation**: the gradient, but in the backward pass each ReLU passes only positive values.
# - **DeconvNet**: the same idea, but it ignores which ReLUs were active in the forward pass.
# - **RectGrad**: each ReLU passes only the 2 % of its units with the largest product of activation and gradient; the
#   result is multiplied by the input.
#
# `Together` runs one forward pass for all of them. The contact sheet has a row for each photo and a column for
# each method.

# %%
methods = [
    saliency.VanillaGradient(model),
    saliency.InputXGradient(model),
    saliency.GuidedBackprop(model),
    saliency.DeconvNet(model),
    saliency.RectGrad(model),
]
rows = [saliency.Together(*methods).attribute(photo) for photo in PHOTOS]
saliency.contact_sheet(rows, thumb=150)

# %% [markdown]
# **What to see.**
#
# - The network's top class is printed on the left, even if it is not correct. The astronaut is classified as "football
#   helmet": ImageNet has no astronaut class, and the specks on the helmet show what the network used instead.
# - Guided backpropagation draws fine lines: eyes and nose of the cat, the rim of the coffee, the tips of rocket and
#   masts.
# - RectGrad keeps the fewest pixels, among them the legs of the tripod.
# - DeconvNet shows nearly the same lattice on each photo. The next section explains why.
#
# ## A map that does not depend on the photo
#
# Explain the same class on two photos with DeconvNet:

# %%
photos = [ASSETS / "coffee.jpg", ASSETS / "chelsea.jpg"]
for method in (saliency.DeconvNet(model), saliency.GuidedBackprop(model)):
    on_coffee, on_cat = method.attribute(photos, "espresso")
    print(f"{method.name:16} same map on both photos: {torch.equal(on_coffee.values, on_cat.values)}")

# %% [markdown]
# The maps are identical. DeconvNet's rule ignores which ReLUs were active. In the networks of its paper, the positions
# of the maxima in the pooling layers still carried information about the photo. This network has no max pooling, so
# only the lattice of its strides is left. The method is computed as in its paper, and on this network it shows nothing.
# Compare the maps of several photos before you trust a method on your network.
#
# ## Does the map depend on the class?
#
# A second test takes one line: explain a class that is not in the photo.

# %%
classes = ["espresso", "space shuttle"]
explained = [each.attribute_classes(ASSETS / "coffee.jpg", classes) for each in (methods[0], methods[2], methods[4])]
saliency.contact_sheet([list(row) for row in zip(*explained, strict=True)], thumb=220)

# %%
for of_espresso, of_shuttle in explained:
    both = torch.stack([saliency.heatmap(each).flatten() for each in (of_espresso, of_shuttle)])
    print(f"{of_espresso.method:16} correlation between the two maps: {torch.corrcoef(both)[0, 1]:.2f}")

# %% [markdown]
# **What to beware of.** Guided backpropagation draws the cup for every class. For a space shuttle, which is not in the
# photo, the map is practically the same as for the espresso. RectGrad is similar. Both show what the network *detects*.
# The plain gradient, the noisiest of the three, does change with the class.
#
# ## Only the pixels that matter
#
# In an overlay, the opacity follows the strength of the map, and the rest of the photo is unchanged. The drawing is
# smoothed over about a pixel of the input; `smoothing=0` draws each value unchanged. With a number as the opacity, the
# whole crop is covered. `cutout` keeps the strongest fraction of the pixels.

# %%
guided = methods[2].attribute(ASSETS / "chelsea.jpg", "tiger cat")
saliency.overlay(guided, opacity=0.7, smoothing=0)

# %%
saliency.cutout(guided, keep=0.1, background="white")

# %% [markdown]
# **What to see.** One pixel in ten is enough for *us* to see a cat: eyes, nose and the edges between them. Whether it
# is enough for the network is another question, answered in [Without gradients](08_without_gradients.ipynb).
#
# **In short.** Gradients at the input show *fine detail*, but say little about *which class*. Class activation maps, on
# the next page, do depend on the class.
