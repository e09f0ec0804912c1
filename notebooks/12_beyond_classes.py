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
# # Beyond classes
#
# **Why this box, why this region, why this joint?** A detector or a segmentation answers many questions about one
# image. Here, each is the second argument of one call. The networks are small and come with the toolkit; the same calls
# work on your own detector, see the page on targets.
#
# ## Ten boxes of a street
#
# Three drawn scenes side by side are a street of twelve objects. The detector reads the whole street as one image.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import torch
from PIL import Image

import saliency

scenes = saliency.testbed.draw_scenes(3, seed=1_000_004, task="several")
street = torch.cat(list(scenes.images), 2)  # (3, 64, 192)
x = street[None] / 127.5 - 1
objects = [
    ([x0 + 64 * part, y0, x1 + 64 * part, y1], int(shape))
    for part in range(3)
    for (x0, y0, x1, y1), shape in zip(scenes.boxes[part].tolist(), scenes.shapes[part], strict=True)
][:10]

detector = saliency.load("shapes_detector")
method = saliency.LayerCAM(detector)
maps = [method.attribute(x, saliency.box(box=box)) for box, _ in objects]
[explanation.target_names[0] for explanation in maps]

# %% [markdown]
# Each name states the box that was found, its class, and its overlap with the box of the target. The maps of all boxes
# have the same colour scale, so a weak box looks weak:

# %%


def draw(axis, values=None, box=None, title="", size=street.shape[1:], image=street, high=None):
    """Draw a map over the image, in red where it supports the score and in blue where it lowers it."""
    axis.imshow(image.permute(1, 2, 0), alpha=0.45 if values is not None else 1)
    if values is not None:
        high = float(values.abs().max()) if high is None else high
        enlarged = torch.nn.functional.interpolate(values[None, None], size, mode="bilinear")[0, 0]
        axis.imshow(enlarged, cmap="seismic", vmin=-high, vmax=high, alpha=0.6)
    if box is not None:
        (x0, y0, x1, y1) = box
        axis.add_patch(plt.Rectangle((x0 - 0.5, y0 - 0.5), x1 - x0, y1 - y0, fill=False, color="black", linewidth=1.2))
    axis.set_title(title, fontsize=8)
    axis.set_axis_off()


figure, axes = plt.subplots(5, 2, figsize=(9, 8.4), layout="constrained")
high = max(float(explanation.values.max()) for explanation in maps)
for axis, explanation, (box, _) in zip(axes.flat, maps, objects, strict=True):
    draw(axis, explanation.values[0].sum(0), box, explanation.target_names[0], high=high)

# %% [markdown]
# **What to see.** Each map lies on its own box, also where another object of the same class stands next to it. The
# toolkit chooses the layers: all feature maps that enter the head, each in proportion to its part of the score.

# %%
maps[0].layer

# %% [markdown]
# A picture is not a measurement. The next figure shows the fraction of each map on its own box. For comparison, it also
# shows Grad-CAM, which averages the gradient over the image and so marks all similar objects:

# %%
masks = torch.zeros(len(objects), 64, 192)
for row, (box, _) in enumerate(objects):
    x0, y0, x1, y1 = (int(edge) for edge in box)
    masks[row, y0:y1, x0:x1] = 1


def on_own_box(explanations):
    """Return the share of each map on its own box."""
    heat = torch.cat([saliency.heatmap(explanation, sign="positive") for explanation in explanations])  # (10, 64, 192)
    return (heat * masks).sum((1, 2)) / heat.sum((1, 2))


local = on_own_box(maps)
averaged = on_own_box([saliency.GradCAM(detector).attribute(x, saliency.box(box=box)) for box, _ in objects])
figure, axis = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
places = torch.arange(len(objects))
axis.bar(places - 0.2, local, 0.4, label="LayerCAM", color="seagreen")
axis.bar(places + 0.2, averaged, 0.4, label="Grad-CAM", color="firebrick")
axis.set_xticks(places, [saliency.testbed.CLASSES[shape] for _, shape in objects], fontsize=8)
axis.set_ylabel("share on the own box")
axis.set_ylim(0, 1)
axis.legend(fontsize=8, ncols=2)
f"LayerCAM is ahead for {int((local > averaged).sum())} of {len(objects)} boxes"

# %% [markdown]
# ## This class rather than the next
#
# `against="second"` explains the class against the second class of the same box. `of="x0"` explains an edge: why does
# the box start here?

# %%
box, _ = objects[0]
gradient = saliency.SmoothGrad(saliency.InputXGradient(detector), passes=16)
questions = {
    "the class": saliency.box(box=box),
    "rather than the second class": saliency.box(box=box, against="second"),
    "the left edge, in pixels": saliency.box(box=box, of="x0"),
    "the right edge, in pixels": saliency.box(box=box, of="x1"),
}
figure, axes = plt.subplots(1, 4, figsize=(10, 2.8), layout="constrained")
for axis, (title, target) in zip(axes, questions.items(), strict=True):
    values = gradient.attribute(x, target).values[0].sum(0)[:, :64]
    draw(axis, values, box, title, (64, 64), street[:, :, :64])

# %% [markdown]
# ## A region and its border
#
# `saliency.region("circle")` is the mean logit over the pixels that the segmentation calls a circle. With `"border"`,
# it is the inside minus the outside of the predicted contour: why does the region end here?

# %%
segmenter = saliency.load("shapes_unet")
index = int((scenes.shapes == 0).any(1).nonzero()[0])
scene = scenes.images[index]
one = scene[None] / 127.5 - 1
predicted = segmenter(one).argmax(1)[0].detach()
pixels = saliency.SmoothGrad(saliency.InputXGradient(segmenter), passes=16)
figure, axes = plt.subplots(1, 4, figsize=(10, 2.8), layout="constrained")
draw(axes[0], title="the image", image=scene)
axes[1].imshow(predicted, cmap="viridis")
axes[1].set_title("the segmentation", fontsize=8)
axes[1].set_axis_off()
for axis, where in zip(axes[2:], ("predicted", "border"), strict=True):
    explanation = pixels.attribute(one, saliency.region("circle", where))
    draw(axis, explanation.values[0].sum(0), None, explanation.target_names[0], (64, 64), scene)

# %% [markdown]
# **What to see.** The region needs the whole object. The border needs the contour, on both of its sides. Methods that
# average the gradient over the image, such as Grad-CAM at the last layer, cannot answer the second question, because
# the gradients inside and outside cancel. They issue a warning.
#
# ## A joint
#
# A pose network has one heatmap for each joint. Here, the joints are the corners of a triangle.

# %%
corners = saliency.testbed.draw_scenes(1, seed=1_000_005, task="corners")
pose = saliency.load("shapes_keypoints")
triangle = corners.images / 127.5 - 1
pixels = saliency.SmoothGrad(saliency.InputXGradient(pose), passes=16)
figure, axes = plt.subplots(1, 3, figsize=(8, 2.8), layout="constrained")
for axis, name, (across, down) in zip(axes, pose.categories, corners.keypoints[0, 0].tolist(), strict=True):
    explanation = pixels.attribute(triangle, saliency.keypoint(name))
    draw(axis, explanation.values[0].sum(0), None, explanation.target_names[0], (64, 64), corners.images[0])
    axis.plot(across - 0.5, down - 0.5, "x", color="black")

# %% [markdown]
# ## A face
#
# P-Net, the first network of MTCNN, finds faces in photos. Its package contains the weights:
# `pip install --no-deps facenet-pytorch`. Its output is the probability of a face in each window of 12 x 12 pixels, a
# format that the toolkit does not know. So a function reads it, and returns a box and a logit for each window:

# %%
from pathlib import Path

from facenet_pytorch.models import mtcnn

face_net = mtcnn.PNet(pretrained=False)
face_net.load_state_dict(torch.load(Path(mtcnn.__file__).parents[1] / "data" / "pnet.pt", weights_only=True))
face_net.preprocess = saliency.Preprocess(size=(61, 61), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
face_net.categories = ["face"]


def read_faces(output):
    """Return the windows of each image as candidates; they are 2 pixels apart."""
    probabilities = output[1][:, 1]  # (N, rows, columns)
    rows, columns = map(torch.arange, probabilities.shape[1:])
    corners = 2 * torch.cartesian_prod(rows, columns).flip(1).float()  # x, y
    boxes = torch.cat([corners, corners + 12], 1)
    return [saliency.Candidates(boxes, own.flatten()[:, None].logit(eps=1e-6)) for own in probabilities]


methods = [saliency.InputXGradient(face_net), saliency.LRP(face_net), saliency.Occlusion(face_net, window=4, stride=2)]
face = saliency.box(index=0, read=read_faces)
saliency.figure([method.attribute("../assets/astronaut.jpg", face) for method in methods])

# %% [markdown]
# The green line is the window that the network found, on the photo. A square that hides the eyes or the nose lowers the
# log-odds of the face the most, and the rest of the photo has no effect, because no other window is near.

# %% [markdown]
# ## Can the map be trusted?
#
# A trust card takes these targets as well. The box is found once. Then the card deletes the pixels that the map marks,
# and measures the remaining score of *this* box. Three other boxes of the image take the place of other classes.

# %%
photo = Image.fromarray(scenes.images[0].permute(1, 2, 0).numpy())
target = saliency.box(box=objects[0][0])
cards = {name: saliency.trust(saliency.METHODS[name](detector), photo, target) for name in ("grad_cam", "layer_cam")}
saliency.figure(cards["grad_cam"])

# %% [markdown]
# The map of Grad-CAM lies on all squares of the scene. The same card for LayerCAM:

# %%
saliency.figure(cards["layer_cam"])
