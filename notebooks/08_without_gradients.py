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
# # Without gradients
#
# **What if the network is a black box?** Behind an API there is no gradient to ask for. But one can change the picture
# and see what the score does. All methods on this page do only that, and differ in what they change and how they
# share out the blame.

# %%
# %matplotlib inline
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from PIL import Image
from torchvision.transforms.functional import gaussian_blur

import saliency

PHOTO, TARGET = Path("../assets/coffee.jpg"), "espresso"
model = saliency.load("efficientnet_lite0")


def draw(explanations, columns=4, **options):
    """Overlays with the names of their methods and what they took."""
    rows = -(-len(explanations) // columns)
    _, axes = plt.subplots(rows, columns, figsize=(10.5, 2.35 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, each in zip(axes.flat, explanations, strict=False):
        axis.imshow(saliency.overlay(each, **options))
        axis.set_title(f"{each.method}\n{each.effort[0].passes} passes", fontsize=10)


occlusion = saliency.Occlusion(model, window=48, stride=24).attribute(PHOTO, TARGET)
saliency.figure(occlusion)

# %% [markdown]
# **What to see.** The oldest idea: cover a square and note by how much the score falls. Red squares carried the
# class; where it is blue the score *rose* without them: there the picture spoke against it.
#
# ## What is put in place of the pixels?
#
# Nothing can be removed from a picture; something has to stand in its place, and the network sees that too.

# %%
fills = [saliency.Occlusion(model, window=48, stride=24, fill=fill) for fill in (0.0, "mean", "blur", "inpaint")]
found = [method.attribute(PHOTO, TARGET) for method in fills]
figure, axes = plt.subplots(1, 4, figsize=(10.5, 2.1), layout="constrained")
for axis, method, each in zip(axes, fills, found, strict=True):
    axis.imshow(saliency.overlay(each))
    axis.set_title(f"fill={method.fill!r}", fontsize=10)
    axis.axis("off")

# %% [markdown]
# Where these agree, the map is about the cup; where they part, it is about the filling.
#
# ## All black boxes side by side
#
# Squares, soft random masks, superpixels switched on and off in fair turns, regressions on such trials, and the
# statistics of sensitivity analysis. Those that sample get 400 passes each; occlusion takes one for each square, and
# feature ablation one for each superpixel.

# %%
boxes = [
    saliency.Occlusion(model, window=48, stride=16),
    saliency.RISE(model, passes=400),
    saliency.FeatureAblation(model),
    saliency.LIME(model, passes=400),
    saliency.KernelSHAP(model, passes=400),
    saliency.ShapleySampling(model, passes=400),
    saliency.Sobol(model, passes=400),
    saliency.HSIC(model, passes=400),
]
found = {box.name: box.attribute(PHOTO, TARGET) for box in boxes}
draw(list(found.values()))

# %% [markdown]
# **What to see.** Most find the coffee in the cup. Not all: feature ablation, which hides one superpixel at a time,
# has its darkest red on the spoon, and HSIC sees the rim of the cup. The methods on superpixels follow the edges of
# things, because the superpixels do. LIME, Kernel SHAP and Shapley sampling ask nearly the same question of the same
# superpixels, and their maps look it.
#
# **What to beware of.** They all show the network pictures that it has never seen the like of. And with few passes
# the weaker superpixels are noise: in the next picture the photo shows through where a value is less than two standard
# errors from zero.

# %%
shap = found["kernel_shap"]
figure, axes = plt.subplots(1, 3, figsize=(10.5, 2.7), layout="constrained")
pictures = {
    "Kernel SHAP": saliency.overlay(shap),
    "standard error": saliency.overlay(saliency.standard_error(shap)),
    "faded below two errors": saliency.overlay(shap, min_significance=2),
}
for axis, (title, picture) in zip(axes, pictures.items(), strict=True):
    axis.imshow(picture)
    axis.set_title(title, fontsize=11)
    axis.axis("off")

# %% [markdown]
# Shapley values add up: over all superpixels they sum to the score's rise over the empty picture.

# %%
print(f"sum of the values {float(shap.values.sum()):.4f}, missed by {float(shap.residual):+.1e}")

# %% [markdown]
# ## Masks inside the network
#
# The CAMs that need no gradient mask with activations. Score-CAM lays each channel over the photo, and pays a whole
# pass for each. Ablation-CAM and Recipro-CAM mask inside the network, and run only the part behind the layer again, or
# a formula where that part is linear.

# %%
inside = [saliency.ScoreCAM(model, channels=64), saliency.AblationCAM(model), saliency.ReciproCAM(model)]
found = [method.attribute(PHOTO, TARGET) for method in inside]
draw(found, columns=3)
for each in found:
    effort = each.effort[0]
    print(f"{each.method:14} {effort.passes:5} passes, {effort.seconds:5.2f} s. {effort.note}")

# %% [markdown]
# ## A small picture that is enough?
#
# The last kind looks for a mask rather than trying many: which tenth of the picture keeps the score highest while all
# else is blurred? It follows the gradient of the *mask*, so it needs the network's gradient after all; it is here
# because its question is the same. And the answer can be put to the test: show the network that part alone.

# %%
photo = model.preprocess(Image.open(PHOTO))[None]
blurred = gaussian_blur(photo, 121, 20.0)
figure, axes = plt.subplots(1, 3, figsize=(10.5, 2.7), layout="constrained")
for axis, area in zip(axes, (0.1, 0.2, 0.4), strict=True):
    extremal = saliency.ExtremalPerturbation(model, areas=[area], steps=150).attribute(PHOTO, TARGET)
    with torch.no_grad():
        output = model(extremal.values * photo + (1 - extremal.values) * blurred)
    chance = output.softmax(1)[0, model.categories.index(TARGET)]
    axis.imshow(saliency.cutout(extremal, keep=area))
    axis.set_title(f"{area:.0%} of what it saw: espresso {chance:.1%}", fontsize=10)
    axis.axis("off")

# %% [markdown]
# **What to see.** A tenth is not enough, not even the best tenth that was found: the network gives espresso 0.1 % on
# it. With two fifths, most of the coffee and half of the rim, it is at 73 %, of 95 % on the whole photo.
#
# **What to beware of.** Such a map looks like an answer at every size. It says which part of that size was the best
# that 150 steps found, and not that the part is enough; that has to be measured. We see the cut-out on black, the
# network saw it on a blurred photo; on black it would be another question.
#
# **What to take home.** Occlusion first: it is quick, exact for what it does, and easy to explain to anybody. RISE or
# Kernel SHAP with a tolerance where you have to defend a number.
