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
# # Your own model, your own method
#
# **Does the toolkit work on your own network, and can you add a method?** This page trains a small network in half a
# minute. Its ReLUs are written in all the forms that cause problems in other tools. Then it adds a new method in ten
# lines.

# %%
# %matplotlib inline
from copy import deepcopy
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import nn

import saliency
from saliency import cli
from saliency.testing import check_method

# %% [markdown]
# ## A network of your own
#
# The task: is there a circle, a cross or a square in a noisy image? `draw` creates as many images as we like, with one
# shape or several.

# %%
SHAPES = ("circle", "cross", "square")


def draw(shapes, random):
    """A noisy picture, 64 x 64, with the shapes at random positions in its left and right half."""
    picture = Image.fromarray(random.normal(90, 25, (64, 64, 3)).clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    for place, shape in enumerate(shapes):
        r = int(random.integers(8, 12))
        x = int(random.integers(14, 50)) if len(shapes) == 1 else 16 + 32 * place
        y = int(random.integers(14, 50))
        color = tuple(random.integers(140, 240, 3).tolist())
        if shape == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), outline=color, width=3)
        elif shape == "square":
            pen.rectangle((x - r, y - r, x + r, y + r), outline=color, width=3)
        else:
            pen.line((x - r, y - r, x + r, y + r), fill=color, width=3)
            pen.line((x - r, y + r, x + r, y - r), fill=color, width=3)
    return picture


class ShapeNet(nn.Module):
    """Five rectifications, spelt in four ways."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 16, 5, padding=2, stride=2)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.third = nn.Conv2d(32, 32, 3, padding=1)
        self.fourth = nn.Conv2d(32, 32, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        x = F.relu(self.first(x))  # a function
        x = self.relu(self.second(x))  # a module that works in place
        x = x + self.relu(self.third(x))  # the same module once more
        x = torch.relu_(self.fourth(x))  # a function that works in place
        return self.head(x.mean((2, 3)).clamp(min=0))  # and a ReLU by another name


# %% [markdown]
# Training is ordinary PyTorch. `as_input` converts an image to the network's input; it is needed again later.


# %%
def as_input(picture):
    return torch.tensor(np.array(picture)).permute(2, 0, 1) / 128 - 1


torch.manual_seed(0)
random = np.random.default_rng(0)
network = ShapeNet()
optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
losses = []
for _ in range(150):
    labels = random.integers(0, 3, 32)
    batch = torch.stack([as_input(draw([SHAPES[label]], random)) for label in labels])
    loss = F.cross_entropy(network(batch), torch.tensor(labels))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

labels = random.integers(0, 3, 500)
with torch.no_grad():
    found = network(torch.stack([as_input(draw([SHAPES[label]], random)) for label in labels])).argmax(1)
print(f"loss {np.mean(losses[:10]):.2f} at first, {np.mean(losses[-50:]):.2f} at last")
print(f"right on {(found.numpy() == labels).mean():.0%} of 500 new pictures")

# %% [markdown]
# ## Two attributes for images and class names
#
# A float tensor works on any model. For images, paths and class names, give the model two attributes: its preprocessing
# and its class names. Then explain each class in three images with two shapes; each column of the sheet has one scale.

# %%
network.preprocess = as_input
network.categories = SHAPES

pictures = [draw(["circle", "cross"], random), draw(["square", "circle"], random), draw(["cross", "square"], random)]
grad_cam = saliency.GradCAM(network)
rows = [grad_cam.attribute_classes(picture, SHAPES) for picture in pictures]
saliency.contact_sheet(rows, thumb=200, shared=True)

# %% [markdown]
# **What to see.** In the second image the square is brighter than the circle for *both* classes: this network detects
# outlines, and hardly distinguishes the two. The column of the cross is surprising. The cross itself is brightest
# there, but most of the evidence is the *empty background* around it. For this network, a cross is mostly the absence
# of round or straight outlines. It classifies all new images with one shape correctly, but not for the intended reason.
# Accuracy alone would not have shown this.
#
# **What to beware of.** The network was trained on images with one shape, and these have two, so its percentages mean
# nothing here. This Grad-CAM reads `fourth`, the last convolution, *before* its in-place ReLU. The toolkit reads a
# layer's output as it was returned, even if an in-place operation overwrites it later.

# %%
grad_cam.attribute(pictures[0]).layer

# %% [markdown]
# ## Guided backpropagation for every form of a ReLU
#
# Guided backpropagation changes the backward pass of a ReLU: only positive gradients pass. So it has to find every ReLU
# that was *called*, not every `nn.ReLU` that *exists*. `coverage` reports what it found:

# %%
guided = saliency.GuidedBackprop(network).attribute(pictures[0], "circle")
print(guided.coverage)

# %% [markdown]
# It found all five. Are the numbers correct, too? As a check, here is the rule of the paper as an `autograd.Function`,
# which replaces all four forms while the network runs:


# %%
class GuidedReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * (x > 0)

    @staticmethod
    def backward(ctx, signal):
        (x,) = ctx.saved_tensors
        return signal * (signal > 0) * (x > 0)


def rectify(x, *args, **kwargs):
    return GuidedReLU.apply(x)


def gradient_of_circle(network, picture):
    x = as_input(picture)[None].requires_grad_()
    return torch.autograd.grad(network(x)[0, SHAPES.index("circle")], x)[0]


spellings = ("torch.nn.functional.relu", "torch.relu_", "torch.Tensor.clamp")
with mock.patch(spellings[0], rectify), mock.patch(spellings[1], rectify), mock.patch(spellings[2], rectify):
    by_the_paper = gradient_of_circle(network, pictures[0])

print("the same, bit for bit:", torch.equal(guided.values, by_the_paper))

# %% [markdown]
# The usual recipe is different: put a backward hook on each `nn.ReLU` of the model. On this network it fails at first,
# because hooks and in-place modules are incompatible:


# %%
def by_module_hooks(network, picture):
    network = deepcopy(network)
    for module in network.modules():
        if isinstance(module, nn.ReLU):
            module.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0].clamp(min=0),))
    return gradient_of_circle(network, picture)


try:
    by_module_hooks(network, pictures[0])
except RuntimeError as error:
    print(str(error).split(". ")[0])

# %% [markdown]
# With `inplace` switched off it runs, and returns a map. Next to it are the correct map and the plain gradient:

# %%
patient = deepcopy(network)
patient.relu.inplace = False
maps = {
    "guided, by saliency": guided.values,
    "guided, by module hooks": by_module_hooks(patient, pictures[0]),
    "plain gradient": saliency.VanillaGradient(network).attribute(pictures[0], "circle").values,
}

figure, axes = plt.subplots(1, 4, figsize=(10.5, 2.9), layout="constrained")
axes[0].imshow(pictures[0])
axes[0].set_title("picture")
for axis, (name, values) in zip(axes[1:], maps.items(), strict=True):
    likeness = torch.corrcoef(torch.stack([values.flatten(), by_the_paper.flatten()]))[0, 1]
    axis.imshow(values.abs().amax(1)[0], cmap="inferno")
    axis.set_title(f"{name}\ncorrelation with the rule {likeness:.2f}", fontsize=9)
for axis in axes:
    axis.set_axis_off()

# %% [markdown]
# **What to see.** The hooks reached one module, and two of five ReLUs. The result correlates with the paper's rule
# hardly better than the plain gradient does, and nothing in the map shows the error.
#
# **What to beware of.** A ReLU written as arithmetic, `x * (x > 0)`, cannot be distinguished from any other product. A
# warning reports it. For a network in which no ReLU is found, an error is raised instead.
#
# ## A method of your own, in ten lines
#
# A class activation map is a choice of *weights*: one number for each channel of a layer, from its activations and
# gradients. Suppose that we want a map of only the few channels that support the class most:


# %%
class LoudestCAM(saliency.extending.WeightedCAM):
    """Grad-CAM of the five channels that speak loudest for the class.

    Values: (N, 1, h, w), in score units.
    Source: A. Reader, "An idea in a notebook" (2026), https://example.org."""

    name = "loudest_cam"

    def weights(self, activation, gradient):  # both (N, K, h, w)
        weights = gradient.mean((2, 3))
        said = weights * activation.mean((2, 3))
        return torch.where(said >= said.topk(5).values[:, -1:], weights, 0)


# %% [markdown]
# That is all. The base class reads photos, resolves targets, finds the layer, runs the passes and draws:

# %%
lite0 = saliency.load("efficientnet_lite0")
both = [saliency.GradCAM(lite0), LoudestCAM(lite0)]
photos = [f"../assets/{name}.jpg" for name in ("camera", "chelsea", "rocket")]
saliency.contact_sheet([saliency.Together(*both).attribute(photo) for photo in photos], thumb=240)

# %% [markdown]
# **What to see.** Five channels of 1280 highlight the same regions, more coarsely.
#
# **What to beware of.** The five channels are a small part of the whole. The sheet hides this, because it draws each
# map on its own scale. On the rocket, Grad-CAM's strongest cell is more than six times as strong as the strongest cell
# of the five channels.
#
# Does the method keep the promises of the toolkit, such as an unchanged model, and batches that equal their single
# images? `check_method` runs about forty checks on a tiny network, and lists those that fail:

# %%
check_method(LoudestCAM)

# %% [markdown]
# No output means that all checks passed. The class has a `name`, so it is in the registry. In this process, the command
# line can use it without further steps:

# %%
list(saliency.METHODS)[-1]

# %%
cli.main(["explain", "../assets/rocket.jpg", "--method", "loudest_cam", "--out", "../out/notebooks", "--quiet"])
Image.open("../out/notebooks/rocket.loudest_cam.png")

# %% [markdown]
# **To keep the method**, put the class into a module of your own, and start the command line from there. A file of two
# lines is enough: `import my_methods` and `from saliency.cli import main; raise SystemExit(main())`.
