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
# **What is in there, what does it do with a photo, and is it well?** This page asks a healthy pretrained network first,
# so that you know what the answers look like. Then come four networks that are ill, each in its own way, and the same
# tools say what they suffer from.

# %%
# %matplotlib inline
from collections import Counter

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
# ## What is in there?
#
# `layer_table` runs the network and tells what each layer gave, holds and costs. With `depth=2` it stops at the
# second level of the module tree; without, it goes down to the last ReLU.

# %%
table = inspection.layer_table(model, COFFEE, depth=2, times=10)
table

# %% [markdown]
# **What to see.** The bars behind the numbers are shares of the whole. Downwards the maps get smaller, from 112 by 112
# to 7 by 7, and the channels more, from 32 to 1280. Parameters lie at the lower end: the classifier alone holds more
# than a quarter of them, and costs next to nothing. Where the time goes is another matter:

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
    axis.set_title(f"{title}, % of the whole", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
axes[0].invert_yaxis()

# %% [markdown]
# **What to see.** Three different pictures of one network. The parameters lie in `blocks.5` and in the classifier, the
# multiply-adds are spread over the blocks, and the time follows neither of them closely.
#
# **What to beware of.** Multiply-adds are no clock: a layer that reads and writes much and computes little takes time
# all the same. Times are of one machine and one minute, so measure on yours, and more than once. The other columns are
# the same everywhere.
#
# ### What hides between the layers
#
# A function that a `forward` calls is no module, so that no hook sees it. The table counts them:

# %%
full = inspection.layer_table(model, COFFEE, times=False)
functions = Counter(full.model.functional)
for row in full:
    functions.update(row.functional)
print(len(full), "layers;", dict(functions))
adding = [row.name for row in full if "add" in row.functional]
print("blocks that add their input to their output:", ", ".join(adding))

# %% [markdown]
# The additions are the skip connections. The other three are functions too: the library that this network comes from
# pads, convolves and normalises inside layers of its own.
#
# ## What does it do with a photo?
#
# `record` keeps what flows while you run the model. Named layers and outputs only, as copies on the CPU: that is all
# that a look at some feature maps needs.

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
# **What to see.** The eight channels of each layer that vary most on the photo of the coffee. At the top, the photo
# in other colours, with edges and glints. In the middle some channels still know the cup. At the bottom are 49 cells: a
# channel says that something is *there*, and hardly what it looks like.
#
# **What to beware of.** Each little picture has a scale of its own, and a colour is no meaning: nothing here says what
# a channel does for a class. Editing it, further below, does.
#
# ## Zeros and dead channels
#
# `activation_statistics` goes through any number of batches and keeps no activation. Of the 33 ReLUs, on five photos:

# %%
activity = inspection.activation_statistics(model, PHOTOS, layers=nn.ReLU6)
activity

# %% [markdown]
# A channel is *dead* when it was never above zero, in any place of any photo. In the worst of these layers a quarter of
# the channels are. Is that bad? Look where they are, and what becomes of them as more photos come in:

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
right.set_title("dead channels in all layers together", loc="left", fontsize=10)
for axis in (left, right):
    axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# **What to see.** By and large, deeper layers have more zeros: their channels wait for something particular. And of
# the channels that are silent on one photo, two thirds speak up by the fifth.
#
# **What to beware of.** "Dead" is always *on these data*. Five photos with no dog among them say nothing about a
# channel for dogs. And on five pictures of noise, nearly seven times as many channels look dead: ask with real data
# before you believe it, and with many.
#
# ## Gradients
#
# The same for what comes back. Given photos and no loss, `gradient_statistics` takes the score of the top class. It has
# two tables, of layers and of parameters, and a figure for the eye:

# %%
gradients = inspection.gradient_statistics(model, PHOTOS)
saliency.gradient_flow(gradients, size=(10.5, 4.4))

# %% [markdown]
# **What to see.** A sawtooth, one tooth for each block, and no trend: the gradient that reaches the first layer is
# about as strong as where it began. This is what health looks like. `.grad` of the model is as it was before.
#
# ## What if this channel were not there?
#
# `edit_activations` changes what a layer gives, for as long as a block lasts. Everything inside the block, heatmaps
# too, is of the edited network. In `bn2`, the last layer with an extent in space, which channels speak for "espresso"?
# Behind it come an average and a linear layer, so a channel's part in the score is its mean times its weight:

# %%
rules = inspection.rules
espresso = model.categories.index("espresso")
with torch.no_grad(), inspection.record(model, "bn2", keep="cpu", parts=("outputs",)) as recording:
    model(batch[3:4])
parts = recording["bn2"][0].output.mean((2, 3))[0] * model.classifier.weight[espresso].detach()
loudest = parts.argsort(descending=True).tolist()
others = torch.randperm(1280, generator=torch.Generator().manual_seed(0)).tolist()

grad_cam = saliency.GradCAM(model, "bn2")


def without(channels):
    """Grad-CAM for espresso, of the network without some channels of its last layer."""
    with inspection.edit_activations(model, "bn2", rules.zero_channels(channels)):
        return grad_cam.attribute(COFFEE, "espresso")


cams = {
    "as it is": grad_cam.attribute(COFFEE, "espresso"),
    "without the 10 loudest": without(loudest[:10]),
    "without the 40 loudest": without(loudest[:40]),
    "without 40 drawn at random": without(others[:40]),
}
limit = saliency.shared_limit(list(cams.values()))
figure, axes = plt.subplots(1, 4, figsize=(10.5, 2.6), layout="constrained")
for axis, (name, cam) in zip(axes, cams.items(), strict=True):
    axis.imshow(saliency.overlay(cam, limit=limit))
    axis.set_title(f"{name}\nespresso {float(cam.probabilities[0]):.1%}", fontsize=9)
    axis.set_axis_off()

# %% [markdown]
# **What to see.** Forty channels of 1280 carry the espresso: without them it is gone, on the map (all four have one
# scale) and from the answer. Forty others, drawn by lot, are hardly missed. How many does it take?

# %%
numbers = [1, 2, 5, 10, 20, 40, 80, 160, 320]
figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
for name, order, color in (("the loudest first", loudest, "#e45756"), ("drawn at random", others, "#888888")):
    chances = []
    for number in numbers:
        with torch.no_grad(), inspection.edit_activations(model, "bn2", rules.zero_channels(order[:number])):
            chances.append(100 * model(batch[3:4]).softmax(1)[0, espresso].item())
    axis.semilogx(numbers, chances, "o-", label=name, color=color)
axis.set_xticks(numbers, numbers)
axis.minorticks_off()
axis.set_xlabel("channels of the last layer set to zero, of 1280")
axis.set_title("probability of espresso, %", loc="left", fontsize=10)
axis.legend()
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# A whole block can be taken out too. The nine blocks that the table found to *add* their result to their input have
# `bn3` as their last layer; scaled by zero, only the shortcut is left. What is each block worth to each photo?

# %%
with torch.no_grad():
    plain = model(batch).softmax(1)
    best = plain.argmax(1, keepdim=True)
    kept = []
    for block in adding:
        with inspection.edit_activations(model, f"{block}.bn3", rules.scale(0)):
            kept.append((model(batch).softmax(1).gather(1, best) / plain.gather(1, best))[:, 0])

shares = 100 * torch.stack(kept)  # (block, photo)
figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
axis.imshow(shares, cmap="RdBu", vmin=0, vmax=200, aspect="auto")
axis.set_yticks(range(len(adding)), adding)
classes = [f"{model.categories[at]}\n{plain[photo, at]:.0%}" for photo, at in enumerate(best[:, 0])]
axis.set_xticks(range(5), classes)
axis.set_title("probability of the top class without the block, % of what it was", loc="left", fontsize=10)
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
# **What to see.** Where the network is sure, with the tripod and the espresso, no single block is missed: most cells
# are close to 100. Where it guesses, as with the helmet and the missile, taking one block out can more than halve the
# probability or nearly double it (blue). Neither is the truth about a block: it is what *this* photo makes of it.
#
# ## Four networks that are ill
#
# The patient: twenty layers of 64, and a task that is easy for it. Is a point of the plane in one of the red quarters,
# or in a blue one? From case to case the weights begin in another way, and little else differs.

# %%
random = torch.Generator().manual_seed(0)
points = torch.randn(512, 2, generator=random)
labels = (points[:, 0] * points[:, 1] > 0).long()
loss = nn.CrossEntropyLoss()


def deep(activation=nn.ReLU, *, std=None, bias=0.0, between=nn.Identity):
    """Twenty layers of 64; by default with He's initialisation, a deviation of sqrt(2 / inputs)."""
    torch.manual_seed(0)
    layers = []
    for depth in range(20):
        linear = nn.Linear(64 if depth else 2, 64)
        nn.init.normal_(linear.weight, std=std if std is not None else (2 / linear.in_features) ** 0.5)
        nn.init.constant_(linear.bias, bias)
        layers += [linear, activation(), between()]
    return nn.Sequential(*layers, nn.Linear(64, 2))


def flow(network):
    """The figure of its gradients."""
    gradients = inspection.gradient_statistics(network, [(points, labels)], loss)
    return saliency.gradient_flow(gradients, size=(10.5, 3.3))


# %% [markdown]
# ### The first: sigmoids and small weights

# %%
vanishing = deep(nn.Sigmoid, std=0.1)
flow(vanishing)

# %% [markdown]
# **Diagnosis: vanishing gradients.** A sigmoid passes a quarter of the gradient at most, and these weights take their
# part. The gradient comes from the right and loses some four fifths with each layer; what the first one gets is no
# number that a step could be made of. Forth it is no better. Whatever point goes in, the same comes out:

# %%
with torch.no_grad(), inspection.record(vanishing, nn.Sigmoid, keep="cpu", parts=("outputs",)) as recording:
    vanishing(points)
for call in recording[::6]:
    print(f"{call.layer:3} differs from point to point by {call.output.std(0).mean():.1e}")

# %% [markdown]
# ### The second: large weights

# %%
exploding = deep(std=0.5)
flow(exploding)

# %% [markdown]
# **Diagnosis: exploding gradients.** Each layer multiplies by nearly three, forth and back. After twenty of them, the
# first gets a gradient a hundred million times as strong as the last. The activations and the loss tell of it too:

# %%
activity = inspection.activation_statistics(exploding, points, layers=nn.ReLU)
for row in activity[::5]:
    print(f"{row.name:3} standard deviation {row.std:.2e}")
print(f"loss {inspection.gradient_statistics(exploding, [(points, labels)], loss).loss:.2e}")

# %% [markdown]
# **First aid** is clipping the gradient. With milder weights, a deviation of 0.25, training ends in NaN all the same.
# `edit_gradients` shortens the gradient of each weight to a length of 1 at most, before the optimiser sees it:


# %%
def train(network, steps=200):
    """The loss in each step of plain gradient descent."""
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
print(f"as it is: loss {losses[0]:.3g} at first, {losses[-1]:.3g} at last")
patient = deep(std=0.25)
with inspection.edit_gradients(patient, "*.weight", rules.clip_norm(1.0)) as editing:
    losses = train(patient)
print(f"clipped:  loss {losses[0]:.3g} at first, {losses[-1]:.3g} at last; {sum(editing.edits.values())} edits")

# %% [markdown]
# ### The third: a negative bias

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
# **Diagnosis: dead channels.** The bias keeps more channels below zero with each layer, and from the sixth ReLU on all
# 64 are. Nothing of the point gets through, so nothing of the gradient comes back: below the last ReLU it is exactly
# zero, and no training will change that.
#
# **What to beware of.** The network with a bias of 0 has dead channels as well, nearly half of a layer at worst, and is
# healthy, as we shall see. A share of dead channels is a question, a whole layer of them is an answer.
#
# ### The fourth: NaN
#
# To help that network, somebody put a normalisation of their own behind each ReLU:


# %%
class Standardize(nn.Module):
    def __init__(self, least=0.0):
        super().__init__()
        self.least = least

    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0) + self.least)


broken = deep(bias=-1.0, between=Standardize)
activity = inspection.activation_statistics(broken, points)
print("the first layer with NaN or infinity:", activity.first_nonfinite)
activity[:6]

# %% [markdown]
# **Diagnosis: 0 / 0.** The loss alone would say "NaN" and not where from. `first_nonfinite` names the layer, "2", and
# the table shows the cause in the line above it: the ReLU "1" has a dead channel. Its deviation is 0, by which
# `Standardize` divides. That makes 512 NaN, one for each point; one layer on, everything is NaN. Is it the same
# channel?

# %%
with torch.no_grad(), inspection.record(broken, "2", keep="cpu", parts=("outputs",)) as recording:
    broken(points)
spoiled = recording["2"][0].output.isnan().any(0).nonzero()[:, 0].tolist()
print("channels with NaN:", spoiled, " dead channels before:", list(activity["1"].dead))

# %% [markdown]
# ### The cure
#
# A ReLU throws half of its input away. He's initialisation makes up for that half: weights with a deviation of
# sqrt(2 / inputs), and no bias. And a normalisation adds a little to what it divides by, here 0.00001.

# %%
repaired = deep(between=lambda: Standardize(1e-5))
flow(healthy)

# %% [markdown]
# The gradient arrives about as strong as it set out, from the twentieth layer to the first. Does it help? All of them
# are trained in the same way, for two hundred steps:

# %%
cases = {
    "sigmoids, small weights": (vanishing, "#f58518", 6, "-"),
    "bias -1": (dying, "#222222", 2, "--"),
    "large weights": (exploding, "#b279a2", 2, "-"),
    "NaN": (broken, "#e45756", 2, "-"),
    "He's initialisation": (healthy, "#4c78a8", 2, "-"),
    "the same, with the repaired normalisation": (repaired, "#54a24b", 2, "-"),
}
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.8), layout="constrained", width_ratios=(1, 2))
left.scatter(*points.T, c=labels, cmap="coolwarm", s=8)
left.set_aspect("equal")
left.set_title("the task", loc="left", fontsize=10)
for name, (network, color, width, style) in cases.items():
    losses = train(network)
    print(f"{name:42} loss {losses[0]:8.3g} at first, {losses[-1]:8.3g} at last")
    right.semilogy(losses, color=color, linewidth=width, linestyle=style, label=name)
right.set_ylim(5e-3, 30)
right.set_xlabel("step")
right.set_title("loss (two cases have none that could be drawn)", loc="left", fontsize=10)
right.legend(fontsize=8, loc="upper center", ncols=2)
for axis in (left, right):
    axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# **What to see.** The two healthy networks learn the task. The orange and the black line are flat: 0.693 is the loss of
# a coin, log 2. The large weights begin at forty million and are NaN after one step. The fourth begins with NaN.
#
# **In short.** When a network does not learn, look before you turn knobs: `activation_statistics` for what goes forth,
# `gradient_flow` for what comes back, `first_nonfinite` for where it broke. Each takes a line, and leaves the network
# as it was.
