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
# # Looking into a network
#
# **What does a network contain, how does it process a photo, and is it healthy?** This page first inspects a healthy
# pretrained network, so that you know what normal results look like. Then it uses the same tools to diagnose four
# networks that fail to train.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import torch
from PIL import Image
from torch import nn

import saliency
from saliency import inspection

PHOTOS = [f"../assets/{name}.jpg" for name in ("astronaut", "camera", "chelsea", "coffee", "rocket")]
COFFEE = PHOTOS[3]

model = saliency.load("efficientnet_lite0")

# %% [markdown]
# ## What does it contain?
#
# `layer_table` runs the network and lists the output shape, parameters and cost of each layer. With `depth=2` it stops
# at the second level of the module tree; by default it includes every level, down to the last ReLU.

# %%
table = inspection.layer_table(model, COFFEE, depth=2, times=10)
table

# %% [markdown]
# **What to see.** The bars behind the numbers show fractions of the total. From top to bottom, the feature maps shrink
# from 112 by 112 to 7 by 7. The number of channels grows from 32 to 1280. Most parameters are in the last layers. The
# classifier alone has more than a quarter of them, at almost no cost. Time is distributed differently:

# %%
rows = [row for row in table if row.name.startswith("blocks.") or (row.depth == 1 and row.name != "blocks")]
whole = table.model
figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.8), sharey=True, layout="constrained")
columns = {
    "parameters": [row.parameters / whole.parameters for row in rows],
    "multiply-adds": [row.multiply_adds / whole.multiply_adds for row in rows],
    "time": [row.time_share for row in rows],
}
for axis, (title, shares), color in zip(axes, columns.items(), ("#4c78a8", "#f58518", "#54a24b"), strict=True):
    axis.barh([row.name for row in rows], [100 * share for share in shares], color=color)
    axis.set_title(f"{title}, % of the total", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
axes[0].invert_yaxis()

# %% [markdown]
# **What to see.** The figure shows three different views of one network. The parameters are concentrated in `blocks.5`
# and the classifier, and the multiply-adds are spread over the blocks. The time follows neither of them closely.
#
# **What to beware of.** Multiply-adds do not measure time: a layer that moves much data and computes little is still
# slow. Times depend on the machine and its current load, so measure on your own machine, and more than once. The other
# columns are the same everywhere.
#
# ## How does it process a photo?
#
# `record` stores activations and gradients while you run the model. To view some feature maps, we only need the outputs
# of a few named layers, as copies on the CPU.

# %%
batch = torch.stack([model.preprocess(Image.open(photo)) for photo in PHOTOS])
layers = ["bn1", "blocks.1", "blocks.2", "blocks.4", "bn2"]
with torch.no_grad(), inspection.record(model, layers, keep="cpu", parts=("outputs",)) as recording:
    model(batch[3:4])

figure, axes = plt.subplots(len(layers), 8, figsize=(10.5, 7.2), layout="constrained")
for line, layer in zip(axes, layers, strict=True):
    (call,) = recording[layer]
    maps = call.output[0]  # (K, h, w)
    strongest = maps.flatten(1).std(1).topk(8).indices.tolist()
    for axis, channel in zip(line, strongest, strict=True):
        axis.imshow(maps[channel], cmap="magma")
        axis.set_title(f"channel {channel}", fontsize=7)
        axis.set_xticks([])
        axis.set_yticks([])
    line[0].set_ylabel(f"{layer}\n{maps.shape[0]} x {maps.shape[1]} x {maps.shape[2]}", fontsize=8)

# %% [markdown]
# **What to see.** Each row shows the eight channels of a layer that vary most on the photo of the coffee. The first row
# shows the photo in other colours, with edges and highlights. In the middle, some channels still show the cup. The last
# row has only 49 cells. There, a channel shows that something is *present*, but hardly what it looks like.
#
# **What to beware of.** Each panel has its own colour scale, and the colours have no meaning of their own. Nothing here
# shows how a channel affects a class. Editing the channel does, as shown further below.
#
# ## Zeros and dead channels
#
# `activation_statistics` processes any number of batches without storing activations. Here are the 33 ReLUs on five
# photos:

# %%
activity = inspection.activation_statistics(model, PHOTOS, layers=nn.ReLU6)
activity

# %% [markdown]
# A channel is *dead* if it was never above zero, at any position of any photo. In the worst of these layers, a quarter
# of the channels are dead. Is that a problem? Look at where they are, and how their number changes with more photos:

# %%
dead = [100 * len(row.dead) / row.channels for row in activity]
zeros = [100 * row.zero_share for row in activity]
counts = [
    inspection.activation_statistics(model, PHOTOS[:count], layers=nn.ReLU6).dead_channels for count in range(1, 6)
]
on_noise = inspection.activation_statistics(model, (5, 3, 224, 224), layers=nn.ReLU6).dead_channels

figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.6), layout="constrained", width_ratios=(3, 2))
left.plot(zeros, "o-", color="#4c78a8", label="zeros, %", markersize=4)
left.bar(range(len(dead)), dead, color="#e45756", label="dead channels, %")
left.set_xlabel("ReLUs, from the input to the output")
left.set_title("on five photos", loc="left", fontsize=10)
left.legend()
names = [*(f"{count} photo{'s' * (count > 1)}" for count in range(1, 6)), "5 x noise"]
bars = right.bar(names, [*counts, on_noise], color=["#e45756"] * 5 + ["#888888"])
right.bar_label(bars, fontsize=8)
right.tick_params("x", labelrotation=45)
right.set_title("dead channels in all layers", loc="left", fontsize=10)
for axis in (left, right):
    axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# **What to see.** In general, deeper layers have more zeros, because their channels respond to more specific features.
# Of the channels that are dead on one photo, two thirds are active on one of the next four.
#
# **What to beware of.** A channel is only ever dead *on these data*. Five photos without a dog say nothing about a
# channel that detects dogs. On five images of noise, nearly seven times as many channels appear dead. Use real data,
# and plenty of it, before you draw conclusions.
#
# ## Gradients
#
# The same statistics exist for gradients. Given photos and no loss, `gradient_statistics` uses the score of the top
# class. It is a table of layers, and has a figure:

# %%
gradients = inspection.gradient_statistics(model, PHOTOS)
saliency.figure(gradients, size=(10.5, 4.4))

# %% [markdown]
# **What to see.** The curve is a sawtooth with one tooth per block, and without a trend: the gradient is about as
# strong at the first layer as at the last one. This is what a healthy network looks like. The `.grad` of the model's
# parameters is unchanged.
#
# A training step follows the gradients of the *parameters*. They are shown in a table of the same form:

# %%
inspection.gradient_statistics(model, PHOTOS, layers=["conv_stem", "bn1", "blocks.0", "classifier"], of="parameters")

# %% [markdown]
# **What to see.** The weight and the bias of a layer have a row each. Nearly all values of `classifier` are zero,
# because the weights of the other classes do not affect the score of the explained class.
#
# ## What if a channel were removed?
#
# `edit_activations` changes the output of a layer inside a `with` block. Everything computed inside the block,
# including heatmaps, uses the edited network. Which channels of `bn2`, the last layer with spatial dimensions,
# contribute to "espresso"? An average and a linear layer follow, so the contribution of a channel to the score is its
# mean times its weight:

# %%
espresso = model.categories.index("espresso")
with torch.no_grad(), inspection.record(model, "bn2", keep="cpu", parts=("outputs",)) as recording:
    model(batch[3:4])
parts = recording["bn2"][0].output.mean((2, 3))[0] * model.classifier.weight[espresso].detach()
loudest = parts.argsort(descending=True).tolist()
others = torch.randperm(1280, generator=torch.Generator().manual_seed(0)).tolist()

grad_cam = saliency.GradCAM(model, "bn2")


def zeroed(channels):
    """Return a rule that sets some channels to zero."""
    return lambda maps: maps.index_fill(1, torch.tensor(channels), 0)


def without(channels):
    """Compute Grad-CAM for espresso with some channels of `bn2` set to zero."""
    with inspection.edit_activations(model, "bn2", zeroed(channels)):
        return grad_cam.attribute(COFFEE, "espresso")


cams = {
    "unchanged": grad_cam.attribute(COFFEE, "espresso"),
    "without the top 10": without(loudest[:10]),
    "without the top 40": without(loudest[:40]),
    "without 40 random channels": without(others[:40]),
}
limit = saliency.shared_limit(list(cams.values()))
figure, axes = plt.subplots(1, 4, figsize=(10.5, 2.6), layout="constrained")
for axis, (name, cam) in zip(axes, cams.items(), strict=True):
    axis.imshow(saliency.overlay(cam, limit=limit))
    axis.set_title(f"{name}\nespresso {float(cam.probabilities[0]):.1%}", fontsize=9)
    axis.set_axis_off()

# %% [markdown]
# **What to see.** Forty of the 1280 channels contain most of the evidence for espresso. Without them, the espresso
# disappears from the map (all four maps share one scale) and from the prediction. Removing forty random channels has
# hardly any effect. How many channels are needed?

# %%
numbers = [1, 2, 5, 10, 20, 40, 80, 160, 320]
figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
for name, order, color in (("largest contribution first", loudest, "#e45756"), ("random order", others, "#888888")):
    chances = []
    for number in numbers:
        with torch.no_grad(), inspection.edit_activations(model, "bn2", zeroed(order[:number])):
            chances.append(100 * model(batch[3:4]).softmax(1)[0, espresso].item())
    axis.semilogx(numbers, chances, "o-", label=name, color=color)
axis.set_xticks(numbers, numbers)
axis.minorticks_off()
axis.set_xlabel("channels of bn2 set to zero, of 1280")
axis.set_title("probability of espresso, %", loc="left", fontsize=10)
axis.legend()
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# A whole block can be removed as well. Nine blocks *add* their input to their output, and have `bn3` as their last
# layer. If its output is scaled by zero, only the shortcut is left. How much does each block matter for each photo?

# %%
adding = [name for name, module in model.named_modules() if getattr(module, "has_skip", False)]
with torch.no_grad():
    plain = model(batch).softmax(1)
    best = plain.argmax(1, keepdim=True)
    kept = []
    for block in adding:
        with inspection.edit_activations(model, f"{block}.bn3", torch.zeros_like):
            kept.append((model(batch).softmax(1).gather(1, best) / plain.gather(1, best))[:, 0])

shares = 100 * torch.stack(kept)  # (block, photo)
figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
axis.imshow(shares, cmap="RdBu", vmin=0, vmax=200, aspect="auto")
axis.set_yticks(range(len(adding)), adding)
classes = [f"{model.categories[at]}\n{plain[photo, at]:.0%}" for photo, at in enumerate(best[:, 0])]
axis.set_xticks(range(5), classes)
axis.set_title("probability of the top class without the block, % of the original", loc="left", fontsize=10)
for block, photo in torch.cartesian_prod(torch.arange(len(adding)), torch.arange(5)).tolist():
    axis.text(
        photo,
        block,
        f"{shares[block, photo]:.0f}",
        ha="center",
        va="center",
        color="white" if shares[block, photo] > 160 else "black",
    )

# %% [markdown]
# **What to see.** Where the network is confident, as with the tripod and the espresso, no single block is essential:
# most cells are close to 100. Where it is uncertain, as with the helmet and the missile, removing one block can more
# than halve the probability or nearly double it (blue). Neither is a general property of the block. It is true for
# *this* photo.
#
# ## Four networks that fail to train
#
# The test network has twenty layers of 64 neurons, and its task is easy. Is a point of the plane in a red or in a blue
# quadrant? The cases differ in the initial weights and in little else.

# %%
random = torch.Generator().manual_seed(0)
points = torch.randn(512, 2, generator=random)
labels = (points[:, 0] * points[:, 1] > 0).long()
loss = nn.CrossEntropyLoss()


def deep(activation=nn.ReLU, *, std=None, bias=0.0, between=nn.Identity):
    """Build twenty layers of 64, by default with He initialisation: standard deviation sqrt(2 / inputs)."""
    torch.manual_seed(0)
    layers = []
    for depth in range(20):
        linear = nn.Linear(64 if depth else 2, 64)
        nn.init.normal_(linear.weight, std=std if std is not None else (2 / linear.in_features) ** 0.5)
        nn.init.constant_(linear.bias, bias)
        layers += [linear, activation(), between()]
    return nn.Sequential(*layers, nn.Linear(64, 2))


def flow(network):
    """Plot the gradients of a network by layer."""
    gradients = inspection.gradient_statistics(network, [(points, labels)], loss)
    return saliency.figure(gradients, size=(10.5, 3.3))


# %% [markdown]
# ### 1. Sigmoids and small weights

# %%
vanishing = deep(nn.Sigmoid, std=0.1)
flow(vanishing)

# %% [markdown]
# **Diagnosis: vanishing gradients.** A sigmoid passes a quarter of the gradient at most, and the small weights reduce
# it further. From right to left, each layer reduces the gradient by about four fifths. At the first layer it is too
# small for any useful step. The forward pass fails as well: the output is nearly the same for every point.

# %%
with torch.no_grad(), inspection.record(vanishing, nn.Sigmoid, keep="cpu", parts=("outputs",)) as recording:
    vanishing(points)
for call in recording[::6]:
    print(f"{call.layer:3} standard deviation over the points {call.output.std(0).mean():.1e}")

# %% [markdown]
# ### 2. Large weights

# %%
exploding = deep(std=0.5)
flow(exploding)

# %% [markdown]
# **Diagnosis: exploding gradients.** Each layer multiplies the activations by nearly three in the forward pass, and the
# gradient likewise in the backward pass. After twenty layers, the first gradient is a hundred million times as strong
# as the last. The activations and the loss show it too:

# %%
activity = inspection.activation_statistics(exploding, points, layers=nn.ReLU)
for row in activity[::5]:
    print(f"{row.name:3} standard deviation {row.std:.2e}")
print(f"loss {inspection.gradient_statistics(exploding, [(points, labels)], loss).loss:.2e}")

# %% [markdown]
# **First aid** is gradient clipping. Here we use smaller weights, with a standard deviation of 0.25, but training still
# ends in NaN. A rule of the toolkit clips the gradient of each weight to a norm of 1 at most, before the optimiser sees
# it:


# %%
def train(network, steps=100):
    """Train by plain gradient descent and return the loss of each step."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02)
    losses = []
    for _ in range(steps):
        value = loss(network(points), labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


losses = train(deep(std=0.25))
print(f"without clipping: first loss {losses[0]:.3g}, last loss {losses[-1]:.3g}")
patient = deep(std=0.25)
with inspection.edit_gradients(patient, "*.weight", inspection.edit_rules.clip_norm(1.0)):
    losses = train(patient)
print(f"with clipping:    first loss {losses[0]:.3g}, last loss {losses[-1]:.3g}")

# %% [markdown]
# ### 3. A negative bias

# %%
dying, healthy = deep(bias=-1.0), deep()
figure, axis = plt.subplots(figsize=(10.5, 3.2), layout="constrained")
for shift, name, network, color in ((-0.2, "bias -1", dying, "#e45756"), (0.2, "bias 0", healthy, "#4c78a8")):
    activity = inspection.activation_statistics(network, points, layers=nn.ReLU)
    axis.bar([at + shift for at in range(20)], [len(row.dead) for row in activity], 0.4, label=name, color=color)
    print(f"{name}: {activity.dead_channels} of 1280 channels are dead")
axis.set_xticks(range(20), range(1, 21))
axis.set_xlabel("ReLU")
axis.set_title("dead channels of 64, on 512 points", loc="left", fontsize=10)
axis.legend()
axis.spines[["top", "right"]].set_visible(False)

# %%
flow(dying)

# %% [markdown]
# **Diagnosis: dead channels.** With each layer, the bias keeps more channels below zero, and from the sixth ReLU on all
# 64 are dead. No information about the point reaches the output, so no gradient reaches the input. Before the last ReLU
# the gradient is exactly zero, and training cannot change that.
#
# **What to beware of.** The network with a bias of 0 also has dead channels, nearly half of a layer at worst. Yet it is
# healthy, as shown below. Some dead channels are a reason to look closer; a whole dead layer is a diagnosis.
#
# ### 4. NaN
#
# To repair this network, suppose a hand-written normalisation is inserted after each ReLU:


# %%
class Standardize(nn.Module):
    def __init__(self, least=0.0):
        super().__init__()
        self.least = least

    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0) + self.least)


broken = deep(bias=-1.0, between=Standardize)
activity = inspection.activation_statistics(broken, points)
print("first layer with NaN or infinity:", activity.first_nonfinite)
activity[:6]

# %% [markdown]
# **Diagnosis: 0 / 0.** The loss alone would be NaN, and would not show the origin. `first_nonfinite` names the layer,
# "2", and the table shows the cause in the line above it: the ReLU "1" has a dead channel. Its standard deviation is 0,
# and `Standardize` divides by it. The result is 512 NaN, one for each point. One layer later, everything is NaN. Is it
# the same channel?

# %%
with torch.no_grad(), inspection.record(broken, "2", keep="cpu", parts=("outputs",)) as recording:
    broken(points)
spoiled = recording["2"][0].output.isnan().any(0).nonzero()[:, 0].tolist()
print("channels with NaN:", spoiled, " dead channels of the ReLU:", list(activity["1"].dead))

# %% [markdown]
# ### The remedy
#
# A ReLU discards half of its input. He initialisation compensates for that half: weights with a standard deviation of
# sqrt(2 / inputs), and zero biases. The normalisation adds a small constant to its divisor, here 0.00001.

# %%
repaired = deep(between=lambda: Standardize(1e-5))
flow(healthy)

# %% [markdown]
# The gradient has about the same strength from the twentieth layer to the first. Does it help? All networks are trained
# in the same way, for two hundred steps:

# %%
cases = {
    "sigmoids, small weights": (vanishing, "#f58518", 6, "-"),
    "bias -1": (dying, "#222222", 2, "--"),
    "large weights": (exploding, "#b279a2", 2, "-"),
    "NaN": (broken, "#e45756", 2, "-"),
    "He initialisation": (healthy, "#4c78a8", 2, "-"),
    "He initialisation, repaired normalisation": (repaired, "#54a24b", 2, "-"),
}
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.8), layout="constrained", width_ratios=(1, 2))
left.scatter(*points.T, c=labels, cmap="coolwarm", s=8)
left.set_aspect("equal")
left.set_title("the task", loc="left", fontsize=10)
for name, (network, color, width, style) in cases.items():
    losses = train(network)
    print(f"{name:42} first loss {losses[0]:8.3g}, last loss {losses[-1]:8.3g}")
    right.semilogy(losses, color=color, linewidth=width, linestyle=style, label=name)
right.set_ylim(5e-3, 30)
right.set_xlabel("step")
right.set_title("loss (not shown: too large or NaN in two cases)", loc="left", fontsize=10)
right.legend(fontsize=8, loc="upper center", ncols=2)
for axis in (left, right):
    axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# **What to see.** The two healthy networks learn the task. The orange and the black curves are flat: 0.693 is log 2,
# the loss of a random guess. The network with large weights starts at a loss of forty million and is NaN after one
# step. The fourth network starts with NaN.
#
# **In short.** When a network does not learn, inspect it before you tune it. Use `activation_statistics` for the
# forward pass, `gradient_statistics` for the backward pass, and `first_nonfinite` for the origin of a NaN. Each takes
# one line and leaves the network unchanged.
