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
# # Two eyes
#
# **Which input drove the prediction, and where in it?** Some networks read colours and depth, two scans, or the
# cameras of a robot. `attribute` takes all inputs by their names, and returns a map and a share of the score for each.
# This page explains two small networks on drawn scenes, so the right answer can be checked.
#
# ## Colours and depth
#
# The network `shapes_rgbd` names an object from an image and a depth. In this scene the object shows in the depth only:
# the colours are background. A distractor shows in the depth, too.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt

import saliency

scene = saliency.testbed.draw_rgbd(1, seed=1_000_003, task="depth")
network = saliency.load("shapes_rgbd")  # forward(rgb, depth)
shape = int(scene.answers[0])
result = saliency.IntegratedGradients(network).attribute(scene.inputs, shape)
result.shares

# %% [markdown]
# The shares are signed, and their magnitudes sum to 1; `rest` is what the integral misses. The figure has one row for
# each input. Both maps have one scale, so the map of the colours stays empty:

# %%
saliency.figure(result, title=f"{network.categories[shape]}, in the depth only")

# %% [markdown]
# If the object is a print on a flat wall, it shows in the colours only:

# %%
scene = saliency.testbed.draw_rgbd(1, seed=1_000_003, task="colour")
shape = int(scene.answers[0])
result = saliency.IntegratedGradients(network).attribute(scene.inputs, shape)
saliency.figure(result, title=f"{network.categories[shape]}, in the colours only")

# %% [markdown]
# ## Other questions about the same two inputs
#
# Shapley values hide each input as a whole, alone and together with the other. With two inputs they are exact:

# %%
scene = saliency.testbed.draw_rgbd(1, seed=1_000_003, task="both")
shape = int(scene.answers[0])
saliency.KernelSHAP(network, segments="inputs").attribute(scene.inputs, shape).shares

# %% [markdown]
# A class activation map reads the last layer that is computed from one input and from no other. After it, both inputs
# are joined:

# %%
cams = saliency.GradCAM(network).attribute(scene.inputs, shape)
{name: cam.layer for name, cam in cams.items()}

# %% [markdown]
# Occlusion of a group hides the same place in both inputs at once:

# %%
both = saliency.Occlusion(network, window=12, stride=4).attribute(scene.inputs, shape, explain=[("rgb", "depth")])
saliency.figure(both, title="the drop of the score when a place is hidden in both")

# %% [markdown]
# ## The cameras of a robot
#
# The policy `shapes_policy` takes one mapping, as those of LeRobot: two cameras, and an instruction such as "move to
# the red circle". It returns a motion of four points. Only one camera sees the object of the instruction.

# %%
seen = saliency.testbed.draw_cameras(1, seed=1_000_001)
policy = saliency.load("shapes_policy")
motion = policy({name: x.float() / 127.5 - 1 if x.ndim == 4 else x for name, x in seen.inputs.items()})[0].detach()
goal = seen.answers[0]
motion.round(decimals=2).tolist(), goal.round(decimals=2).tolist()

# %% [markdown]
# `saliency.value(3, 0)` explains one number of the motion: x of the last point. The instruction is not an image, but it
# has a share of the score, too.

# %%
explained = saliency.IntegratedGradients(policy).attribute(seen.inputs, saliency.value(3, 0))
explained.shares

# %%
saliency.figure(explained, title="x of the last point of the motion")

# %% [markdown]
# The motion starts at the centre of the image. Drawn over the camera that sees the object, it ends at the object:

# %%
camera = next(name for name, mask in seen.evidence.items() if mask.any())
figure, axes = plt.subplots(figsize=(3.2, 3.2))
axes.imshow(seen.inputs[camera][0].permute(1, 2, 0))
points = (motion + 1) * 32 - 0.5
axes.plot([31.5, *points[:, 0]], [31.5, *points[:, 1]], "o-", color="black", markersize=4)
axes.set_title(camera.removeprefix("observation.images."), fontsize=9)
_ = axes.axis("off")

# %% [markdown]
# More about several inputs: [the page](../docs/inputs.md), with options for each input, views, and the command line.
