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
# # A volume in slices
#
# **Which voxels drove the prediction?** A scan, a microscope stack and a video are tensors (N, C, D, H, W). All methods
# accept them, as they accept images. This page explains a network that classifies solids in drawn volumes, shows the
# maps slice by slice, and saves a map for a viewer of medical images.
#
# ## A drawn volume
#
# Each volume has two solids of different classes, in noise: a ball, a cube, a cross or a ring. The network gives one
# score for each class, and both classes are right. So the right map of a class lies on the object of this class, and
# not on the other object.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import torch

import saliency

drawn = saliency.testbed.draw_volumes(20, seed=1_000_002)
model = saliency.load("shapes_volume")
x = drawn.volumes[:1]  # (1, 1, 24, 32, 32)
named, other = (model.categories[shape] for shape in drawn.shapes[0].tolist())
probabilities = model(x).softmax(1)[0].tolist()
named, other, {name: round(share, 3) for name, share in zip(model.categories, probabilities, strict=True)}

# %% [markdown]
# ## Slices through the maximum
#
# `saliency.slices` draws three slices that meet in the maximum of the map. The thin lines show the positions of the
# other two slices. The volume is drawn in grey below the map.

# %%
cam = saliency.GradCAM(model).attribute(x, named)
saliency.slices(cam, x)

# %% [markdown]
# The layer of Grad-CAM has cells of 4 x 4 x 4 voxels, so its map is smooth. Relevance has one value for each voxel:

# %%
relevance = saliency.LRP(model).attribute(x, named)
saliency.slices(relevance, x)

# %% [markdown]
# Occlusion measures the effect on the network directly. It hides a cube of voxels at each position of the volume, and
# measures the drop in the score:

# %%
covered = saliency.Occlusion(model, window=6, stride=3).attribute(x, named)
saliency.slices(covered, x)

# %% [markdown]
# ## All slices
#
# `saliency.montage` draws slices side by side, with the same colour scale. They always include the slice with the
# maximum.

# %%
saliency.montage(relevance, x, count=16)

# %% [markdown]
# The same volume, explained for the class of the other object. The map moves to it:

# %%
saliency.montage(saliency.LRP(model).attribute(x, other), x, count=16)

# %% [markdown]
# A video is a volume whose first axis is time, so a montage shows its images in order. Slices along the other axes are
# possible, too:

# %%
saliency.montage(cam, x, axis=2, count=8)

# %% [markdown]
# ## Measured on 20 volumes
#
# A picture is not a measurement. The figure shows the fraction of the positive part of each map on the object of the
# class, and on the other object:

# %%
methods = {
    "GradCAM": saliency.GradCAM(model),
    "LRP": saliency.LRP(model),
    "InputXGradient": saliency.InputXGradient(model),
    "EigenCAM": saliency.EigenCAM(model),
}
shares = {}
for name, method in methods.items():
    heat = saliency.heatmap(method.attribute(drawn.volumes, drawn.labels.tolist()), sign="positive")  # (20, 24, 32, 32)
    inside = (heat[:, None] * drawn.masks).sum((2, 3, 4)) / heat.sum((1, 2, 3))[:, None]  # (20, 2)
    shares[name] = inside.mean(0)
figure, axis = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
places = torch.arange(len(shares))
axis.bar(places - 0.2, [float(own) for own, _ in shares.values()], 0.4, label="on the named object", color="seagreen")
axis.bar(places + 0.2, [float(far) for _, far in shares.values()], 0.4, label="on the other object", color="firebrick")
axis.set_xticks(places, list(shares), fontsize=8)
axis.legend(fontsize=8)
axis.set_ylabel("share of the map")
{name: [round(float(share), 2) for share in both] for name, both in shares.items()}

# %% [markdown]
# EigenCAM does not depend on the class, so it lies on both.
#
# ## Into a viewer
#
# `heatmap` gives one number for each voxel of the input, in the order of its axes. nibabel writes it as NIfTI with the
# affine of the scan, so that ITK-SNAP and 3D Slicer show it at the right position.

# %%
from pathlib import Path
from tempfile import TemporaryDirectory

import nibabel
import numpy as np

affine = np.diag([2.0, 0.7, 0.7, 1.0])  # of your scan: nibabel.load("scan.nii.gz").affine
heat = saliency.heatmap(relevance)[0].numpy()  # (24, 32, 32)
with TemporaryDirectory() as folder:
    path = Path(folder) / "map.nii.gz"
    nibabel.save(nibabel.Nifti1Image(heat, affine), path)
    back = nibabel.load(path)
    print(back.shape, back.header.get_zooms(), f"{path.stat().st_size / 1000:.0f} kB")

# %% [markdown]
# With voxels of 2 x 0.7 x 0.7 mm, slices are drawn in their true proportions, and with the names that your axes have:

# %%
saliency.slices(relevance, x, spacing=(2, 0.7, 0.7), names=("axial", "coronal", "sagittal"))
