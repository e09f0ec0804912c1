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
# class; where it is blue the score *rose* without them: there the picture spoke for something else.
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
# statistics of sensitivity analysis. Each gets about the same number of passes.

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
draw([box.attribute(PHOTO, TARGET) for box in boxes])

# %% [markdown]
# **What to see.** Most find the coffee in the cup. The methods on superpixels follow the edges of things, because the
# superpixels do. LIME, Kernel SHAP and Shapley sampling ask nearly the same question of the same superpixels, and their
# maps look it.
#
# **What to beware of.** They all show the network pictures that it has never seen the like of. And with few passes
# the weaker superpixels are noise: the next picture lets through whatever is less than two standard errors from zero.

# %%
shap = saliency.KernelSHAP(model, passes=400).attribute(PHOTO, TARGET)
figure, axes = plt.subplots(1, 3, figsize=(10.5, 2.7), layout="constrained")
pictures = {
    "Kernel SHAP": saliency.overlay(shap),
    "standard error": saliency.overlay(saliency.standard_error(shap)),
    "faded below two errors": saliency.overlay(shap, fade=2),
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
# The CAMs that need no gradient mask activations in place of pixels. Only the part behind the layer is run again for
# each mask, so a thousand of them cost little.

# %%
inside = [saliency.ScoreCAM(model, channels=64), saliency.AblationCAM(model), saliency.ReciproCAM(model)]
draw([method.attribute(PHOTO, TARGET) for method in inside], columns=3)
for method in inside:
    effort = method.attribute(PHOTO, TARGET).effort[0]
    print(f"{method.name:14} {effort.passes:5} passes, {effort.seconds:5.2f} s. {effort.note}")

# %% [markdown]
# ## The smallest picture that is enough
#
# The last kind looks for a mask rather than trying many: which tenth of the picture keeps the score up? It follows the
# gradient of the *mask*, so it needs the network's gradient after all; it is here because its question is the same.

# %%
extremal = saliency.ExtremalPerturbation(model, areas=[0.1], steps=150).attribute(PHOTO, TARGET)
saliency.cutout(extremal, keep=0.1)

# %% [markdown]
# **What to take home.** Occlusion first: it is quick, exact for what it does, and easy to explain to anybody. RISE or
# Kernel SHAP with a tolerance where you have to defend a number.
