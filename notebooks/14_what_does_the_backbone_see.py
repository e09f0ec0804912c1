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
# # What does the backbone see?
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/saliency-toolkit/saliency/blob/main/notebooks/14_what_does_the_backbone_see.ipynb)
#
# **A backbone turns an image into features, long before there is a class.** This page shows the features themselves:
# which parts of a photo are similar for the network, which pixels an embedding depends on, and whether the answer can
# be trusted. It uses no labels.
#
# ## One photo, three times
#
# A photo of a cat, its mirror image, and a part of it that is enlarged. They have the same size, so the network reads
# them as one batch. At 448 pixels instead of 224, its last layer has 14 x 22 cells.

# %%
import os
import subprocess

if "COLAB_RELEASE_TAG" in os.environ:  # on Colab: install the toolkit, with the photos
    get = "git clone --depth 1 https://github.com/saliency-toolkit/saliency /content/clone"
    subprocess.run(f"{get} && pip install -q '/content/clone[all]'", shell=True, check=True)
    os.chdir("/content/clone/notebooks")

# %%
# %matplotlib inline
from dataclasses import replace

import matplotlib.pyplot as plt
import skimage.data
from PIL import Image, ImageOps

import saliency

model = saliency.load("efficientnet_lite0")
cat = Image.fromarray(skimage.data.cat())  # 451 x 300 pixels
photos = [cat, ImageOps.mirror(cat), cat.crop((30, 0, 406, 250)).resize(cat.size, Image.Resampling.LANCZOS)]
larger = replace(model.preprocess, size=None, resize=448)
features = saliency.features(model, photos, preprocess=larger)
features.layer, tuple(features.values.shape)

# %% [markdown]
# `pca` reduces the 1280 channels to three colours, fitted over all photos together. `figure` draws them:

# %%
saliency.figure(features, foreground=False)

# %% [markdown]
# `similarity` compares every cell of all photos with one cell: here, the eye of the first photo. The result is an
# explanation, so `figure` draws it:

# %%
eye = (172, 102)  # x and y in pixels of the first photo
saliency.figure(features.similarity(eye), shared=True)

# %% [markdown]
# **What to see.** Equal colours mean similar features. The colours follow the cat through the mirror and the crop: the
# eyes are yellow, nose and mouth pink, the ears blue, and the background is dark green. The similarity finds both eyes
# in all three photos, although the network was never trained to find eyes.
#
# ## From texture to parts
#
# The same point at four depths of the network:

# %%
layers = ["blocks.1", "blocks.2", "blocks.4", "bn2"]
depths = [saliency.features(model, cat, layer, preprocess=larger).similarity(eye) for layer in layers]
saliency.figure(depths)

# %% [markdown]
# **What to see.** Early layers compare edges and contrast: whiskers and stripes look like the eye. Later layers compare
# parts, on a coarser grid. If a picture of the last layer is too coarse, choose an earlier layer, or a larger photo.
#
# ## Foreground first
#
# Four drawn scenes, and a network that was trained to separate their shapes. The first component usually separates the
# background from the objects. `pca` removes the background, and colours only the rest:

# %%
unet = saliency.load("shapes_unet")
scenes = saliency.testbed.draw_scenes(4, seed=1_000_003, task="several")
images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in scenes.images]
left, top, right, bottom = scenes.boxes[0][0].tolist()
middle = ((left + right) / 2, (top + bottom) / 2)
found = saliency.features(unet, images)
saliency.figure(found)

# %%
saliency.contact_sheet([[one] for one in found.similarity(middle)], shared=True, thumb=128)

# %% [markdown]
# **What to see.** Circles are green and squares are orange in all scenes, whatever their colour in the image. The point
# on a square finds the other squares. But the triangles are missing. The first component does not separate them from
# the background, and all images have the same threshold. With `foreground=False` they are visible, so look at both
# pictures.
#
# A vision transformer cuts the scene into 8 x 8 patches. Its class token and its four registers have no position, so
# they are left out. On this network, no patch has an outlying norm:

# %%
vit = saliency.features(saliency.load("shapes_vit"), images)
print(vit.layer, tuple(vit.values.shape), "outlier tokens:", int(vit.outliers.sum()))
saliency.figure(vit)

# %%
saliency.contact_sheet([[one] for one in vit.similarity(middle)], shared=True, thumb=128)

# %% [markdown]
# **What to see.** The picture is coarse, and less clear: after the last block, attention has mixed information from
# other positions into the patches of this small network. The class is read from the class token, so training does not
# require that a patch describes only its own position. Colours are not evidence: check them by the similarity to a
# point.
#
# ## An embedding without a label
#
# Which pixels does an embedding depend on? `RISE` hides random parts of the photo, and measures how much the embedding
# changes: the score `saliency.similarity()` is the cosine with the embedding of the whole photo. This is RELAX.

# %%
itself = saliency.similarity()
relax = saliency.RISE(model, passes=256).attribute(cat, itself)
spread = saliency.RISE(model, passes=256, uncertainty=True).attribute(cat, itself)
error = saliency.standard_error(relax)
figure, axes = plt.subplots(1, 3, figsize=(10, 2.8), layout="constrained")
titles = ["importance", "its standard error", "uncertainty of the paper"]
for axis, explanation, title in zip(axes, (relax, error, spread), titles, strict=True):
    axis.imshow(saliency.overlay(explanation))
    axis.set_title(f"{title}, up to {float(explanation.values.max()):.2g}", fontsize=9)
    axis.set_axis_off()

# %% [markdown]
# **What to see.** If the face of the cat is visible, the embedding hardly changes. The standard error is small compared
# with the map, and decreases with more masks. The uncertainty of the paper answers another question: how much does the
# similarity vary while the pixel is visible? It does not decrease with more masks, and is low where the pixel itself is
# decisive.
#
# ## Can the map be trusted?
#
# The trust card deletes the pixels that the map marks, and measures how much the embedding changes. The example uses a
# small network, so that twenty maps take seconds:

# %%
small = saliency.RISE(saliency.load("shapes_cnn"), passes=128)
scene = Image.fromarray(saliency.testbed.draw_scenes(1, seed=7).images[0].permute(1, 2, 0).numpy())
card = saliency.trust(small, scene, itself)
saliency.figure(card)
