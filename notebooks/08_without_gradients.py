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
# **What if the network is a black box?** An API gives no gradients. But you can change the image and observe the score.
# All methods on this page except the last do only that. They differ in how they change the image, and in how they
# attribute the effect.

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
    """Overlays with the names, passes and times of their methods."""
    rows = -(-len(explanations) // columns)
    _, axes = plt.subplots(rows, columns, figsize=(10.5, 2.35 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, each in zip(axes.flat, explanations, strict=False):
        axis.imshow(saliency.overlay(each, **options))
        axis.set_title(f"{each.method}\n{each.run_stats[0].passes} passes", fontsize=10)


occlusion = saliency.Occlusion(model, window=48, stride=24).attribute(PHOTO, TARGET)
saliency.figure(occlusion)

# %% [markdown]
# **What to see.** Occlusion is the oldest of these methods: it hides a square and records the drop in the score. Red
# squares supported the class. Where the map is blue, the score *rose* without the square: there the image opposed the
# class.
#
# ## What replaces the hidden pixels?
#
# Pixels cannot be removed from an image. Other values have to replace them, and the network sees these values too.

# %%
fills = [saliency.Occlusion(model, window=48, stride=24, fill=fill) for fill in ("mean", "blur", "inpaint")]
found = [occlusion, *(method.attribute(PHOTO, TARGET) for method in fills)]
figure, axes = plt.subplots(1, 4, figsize=(10.5, 2.1), layout="constrained")
for axis, fill, each in zip(axes, (0.0, "mean", "blur", "inpaint"), found, strict=True):
    axis.imshow(saliency.overlay(each))
    axis.set_title(f"fill={fill!r}", fontsize=10)
    axis.axis("off")

# %% [markdown]
# Where these maps agree, they show the effect of the cup. Where they differ, they show the effect of the fill.
#
# ## Black-box methods side by side
#
# The methods use squares, soft random masks, combinations of visible superpixels, regressions on such combinations, and
# statistics of sensitivity analysis. Methods that sample get 200 passes each; occlusion takes one for each square, and
# feature ablation one for each superpixel.

# %%
boxes = [
    saliency.RISE(model, passes=200),
    saliency.FeatureAblation(model),
    saliency.LIME(model, passes=200),
    saliency.KernelSHAP(model, passes=200),
    saliency.ShapleySampling(model, passes=200),
    saliency.Sobol(model, passes=200),
]
found = {"occlusion": occlusion} | {box.name: box.attribute(PHOTO, TARGET) for box in boxes}
draw(list(found.values()))

# %% [markdown]
# **What to see.** Most maps highlight the coffee in the cup. Feature ablation, which hides one superpixel at a time, is
# strongest on the spoon. Methods on superpixels follow the edges of objects, because superpixels do. LIME, Kernel SHAP
# and Shapley sampling estimate nearly the same quantity for the same superpixels, so their maps are similar.
#
# **What to beware of.** With all of these methods, the network sees images unlike any in its training data. With few
# passes, the values of the weaker superpixels are noise. The next figure fades values below two standard errors.

# %%
shap = found["kernel_shap"]
error = saliency.standard_error(shap)
figure, axes = plt.subplots(1, 3, figsize=(10.5, 2.7), layout="constrained")
pictures = {
    "Kernel SHAP": saliency.overlay(shap),
    "standard error": saliency.overlay(error),
    "faded below two errors": saliency.overlay(shap, min_significance=2),
}
for axis, (title, picture) in zip(axes, pictures.items(), strict=True):
    axis.imshow(picture)
    axis.set_title(title, fontsize=11)
    axis.axis("off")

# %% [markdown]
# Shapley values add up: over all superpixels they sum to the score minus the score of the image with all superpixels
# hidden.

# %%
print(f"sum of the values {float(shap.values.sum()):.4f}, missed by {float(shap.residual):+.1e}")

# %% [markdown]
# ## Masks inside the network
#
# Some CAMs need no gradient: they use masks instead. Score-CAM multiplies the photo by each channel, and needs a whole
# pass for each. Ablation-CAM and Recipro-CAM mask a layer inside the network. They repeat only the part after the
# layer, or use a formula if that part is linear.

# %%
inside = [saliency.ScoreCAM(model, channels=64), saliency.AblationCAM(model), saliency.ReciproCAM(model)]
found = [method.attribute(PHOTO, TARGET) for method in inside]
draw(found, columns=3)
for each in found:
    stats = each.run_stats[0]
    print(f"{each.method:14} {stats.passes:5} passes, {stats.seconds:5.2f} s. {stats.note}")

# %% [markdown]
# ## Is a small part of the image enough?
#
# The last method optimises one mask instead of trying many: which tenth of the image keeps the score highest while the
# rest is blurred? It follows the gradient of the *mask*, so it does need the network's gradient; it is on this page
# because it also changes the image and observes the score. The answer can be tested: show the network only this part.

# %%
photo = model.preprocess(Image.open(PHOTO))[None]
blurred = gaussian_blur(photo, 121, 20.0)
figure, axes = plt.subplots(1, 2, figsize=(7, 2.7), layout="constrained")
for axis, area in zip(axes, (0.1, 0.4), strict=True):
    extremal = saliency.ExtremalPerturbation(model, areas=[area], steps=60).attribute(PHOTO, TARGET)
    with torch.no_grad():
        output = model(extremal.values * photo + (1 - extremal.values) * blurred)
    chance = output.softmax(1)[0, model.categories.index(TARGET)]
    axis.imshow(saliency.cutout(extremal, keep=area))
    axis.set_title(f"{area:.0%} of what it saw: espresso {chance:.1%}", fontsize=10)
    axis.axis("off")

# %% [markdown]
# **What to see.** A tenth is not enough, not even the best tenth that was found: with it the network gives espresso 0.9
# %. With two fifths, most of the coffee and half of the rim, it gives 62 %, compared with 95 % on the whole photo.
#
# **What to beware of.** Such a map looks convincing at every size. It shows the best part of this size that 60 steps
# found. Whether this part is enough has to be measured. The figure shows the cut-out on black, but the network saw it
# on a blurred photo. On black, the result would differ.
#
# **In short.** Start with occlusion: it is fast, exact for what it measures, and easy to explain. Use RISE or Kernel
# SHAP with a tolerance where you have to defend a number.
