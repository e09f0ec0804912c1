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
# # Inside a transformer
#
# **What does a vision transformer attend to, and does its attention explain a class?** The networks of this page are
# small and come with the toolkit. They were trained on drawn scenes, so we know where the right answer is. Everything
# works the same on ViT, DeiT, DINOv2, SigLIP and CLIP; the last section has the code.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import torch
from IPython.display import display

import saliency

model = saliency.load("shapes_vit")
scenes = saliency.testbed.draw_scenes(1000, seed=1_000_000, task="two_objects")
captions = [caption[:2] for caption in scenes.captions()]
number = captions.index(("a red circle", "a blue square"))
image, masks = scenes.images[number], scenes.masks[number]
classes = ["circle", "square"]

scores = saliency.VanillaGradient(model).attribute_classes(image, classes)
figure, axis = plt.subplots(figsize=(2.6, 2.6), layout="constrained")
axis.imshow(image.permute(1, 2, 0), interpolation="nearest")
axis.set_title(", ".join(f"{name} {float(each.scores):.1f}" for name, each in zip(classes, scores, strict=True)))
axis.axis("off")
plt.show()

# %% [markdown]
# The network has two correct answers here. It cuts the image into 8 x 8 patches and adds a class token and four
# *registers*, which have no position. In each of its four blocks, every token gathers information from all 69 tokens.
#
# ## Reading attention
#
# A fused kernel never forms the matrix of attention. `saliency.attention` computes it from the values that the kernel
# saved for its backward pass, without switching the kernel off. Is the result right? Its rows sum to 1, and it equals
# the softmax that is computed by hand:

# %%
layers = saliency.attention(model, image)
for each in layers:
    rows = each.probabilities.sum(-1)
    print(
        each.layer, each.shape, "rows sum to", float(rows.min().round(decimals=5)), float(rows.max().round(decimals=5))
    )

qkv = saliency.inspection.activations(model, image, "blocks.3.attn.qkv")["blocks.3.attn.qkv"]  # (1, 69, 192)
query, key, _ = qkv.view(69, 3, 4, 16).permute(1, 2, 0, 3)  # each (4 heads, 69 tokens, 16)
by_hand = (query @ key.mT / 16**0.5).softmax(-1)
print("equal to the softmax by hand:", torch.allclose(layers[3].probabilities[0], by_hand, atol=1e-5))

# %% [markdown]
# The class is read from the class token, so its row is the one to look at. Here it is for each block and head, as 8 x 8
# patches with the outlines of the circle (red) and the square (blue):

# %%


def outline(axis):
    """Draw the outlines of both objects, without ticks."""
    for mask, color in zip(masks, ("#ff5050", "#5090ff"), strict=True):
        axis.contour(mask, levels=[0.5], colors=color, linewidths=1.5)
    axis.set_xticks([])
    axis.set_yticks([])


figure, axes = plt.subplots(4, 4, figsize=(6.0, 6.2), layout="constrained")
for block, row in zip(layers, axes, strict=True):
    row[0].set_ylabel(block.layer)
    for head, axis in enumerate(row):
        patches = block.probabilities[0, head, 0, 5:].view(8, 8)
        axis.imshow(patches, cmap="gray", extent=(-0.5, 63.5, 63.5, -0.5))
        outline(axis)
for head, axis in enumerate(axes[0]):
    axis.set_title(f"head {head}", fontsize=10)
plt.show()

# %% [markdown]
# **What to see.** Some heads look at an object: in the last block, heads 0 and 2 at the circle, and head 1 at the
# square. Other heads, such as head 3 of the last block, attend to the whole image. In total:

# %%
grid = torch.nn.functional.avg_pool2d(masks.float(), 8) > 0.2  # (2, 8, 8): the patches of each object
parts = {
    "class token": torch.tensor([0]),
    "registers": torch.arange(1, 5),
    "circle": 5 + grid[0].flatten().nonzero()[:, 0],
    "square": 5 + grid[1].flatten().nonzero()[:, 0],
}
rows = torch.stack([each.probabilities[0, :, 0].mean(0) for each in layers])  # (4 blocks, 69): of the class token
shares = {name: rows[:, part].sum(1) for name, part in parts.items()}
shares["background"] = 1 - sum(shares.values())

figure, axis = plt.subplots(figsize=(7, 2.4), layout="constrained")
left = torch.zeros(4)
for (name, values), color in zip(shares.items(), ("0.2", "0.5", "#d62728", "#3060e0", "0.85"), strict=True):
    axis.barh([each.layer for each in layers], values, left=left, color=color, label=name)
    left = left + values
axis.invert_yaxis()
axis.set_xlabel("share of the class token's attention, mean of heads")
axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# **What to see.** In the second block, most of the attention goes to the background. The registers get 3 to 13 %. Each
# block attends more to the circle than to the square, although the two scores are almost equal.
#
# ## Attention is not an explanation of a class
#
# *Rollout* multiplies the attention of all blocks. It does not depend on the class. The other methods weight attention
# by the gradient of the class, or pass relevance through the whole network. One row for each of the two classes:

# %%
METHODS = ("attention_rollout", "chefer_attention", "gradient_rollout", "chefer_lrp", "attn_lrp")


def sheet(network, names, targets):
    """Draw one row per target and one column per method: the positive part of each map, and the outlines."""
    methods = [saliency.METHODS[name](network) for name in names]
    size = 1.9 * len(names), 1.95 * len(targets)
    _, axes = plt.subplots(len(targets), len(names), figsize=size, layout="constrained")
    for row, target in zip(axes, targets, strict=True):
        for axis, each in zip(row, saliency.Together(*methods).attribute(image, target), strict=True):
            axis.imshow(saliency.heatmap(each, sign="positive", percentile=99.5)[0], cmap="inferno")
            outline(axis)
        row[0].set_ylabel(each.target_names[0].replace(" rather", "\nrather"))
    for axis, name in zip(axes[0], names, strict=True):
        axis.set_title(name, fontsize=10)
    plt.show()


sheet(model, METHODS, classes)

# %% [markdown]
# **What to see.** Rollout is the same in both rows. The others move from the circle to the square. Maps from attention
# have one value per patch of 8 x 8 pixels, which is why they reach beyond the outlines. AttnLRP, too, is read at the
# patches.
#
# One scene proves little. The next figure uses 50 scenes with an object of the class and a distractor of equal size.
# How much of the positive part of each map is on the object, and how much on the distractor?

# %%
trials = saliency.testbed.draw_scenes(50, seed=1_000_000)
methods = [saliency.METHODS[name](model) for name in METHODS]
inside = []
for explanation in saliency.Together(*methods).attribute(trials.images, trials.labels.tolist()):
    heatmap = saliency.heatmap(explanation, sign="positive")
    inside.append((heatmap[:, None] * trials.masks).sum((2, 3)) / heatmap.sum((1, 2))[:, None])
inside = torch.stack(inside)  # (methods, 50, 2)

figure, axis = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
places = torch.arange(len(METHODS))
for column, (name, color) in enumerate((("named object", "#d62728"), ("distractor", "0.6"))):
    values = inside[..., column]
    axis.bar(places + 0.4 * column, values.mean(1), 0.38, yerr=values.std(1) / 50**0.5, color=color, label=name)
axis.set_xticks(places + 0.2, METHODS)
axis.set_ylabel("share of the map")
axis.legend()
plt.show()

# %% [markdown]
# **What to see.** Rollout gives the distractor as much as the object. AttnLRP has the largest fraction on the object,
# and the smallest on the distractor. With `at="pixels"` it has 0.57 on the object, but also 0.16 on the distractor.
#
# **What to beware of.** Rollout shows where information can flow. Do not present it as the reason for a class.
#
# ## Images and texts
#
# The second network has two towers, as CLIP has: one for images, one for captions. The target is a text. Without an
# alternative, the score is the similarity of the image and the text. With `against=`, the map shows the evidence for
# one text rather than another:

# %%
towers = saliency.load("shapes_two_tower")
one, other = captions[number]
texts = [saliency.text(one), saliency.text(other), saliency.text(one, against=other)]
sheet(towers, ("attention_rollout", "chefer_attention", "grad_eclip", "attn_lrp"), texts)

# %% [markdown]
# **What to see.** Each text moves the maps to its object; rollout does not read the text. AttnLRP also leaves a little
# on the other object.
#
# And the words? `token_importance` divides the similarity among the tokens of the caption. Red words raise it, blue
# words lower it:

# %%
for caption in (one, other, "a red square"):
    for method in ("attn_lrp", "integrated_gradients"):
        words = saliency.token_importance(towers, image, caption, method)
        print(
            f"{caption}, similarity {words.score:.2f}, {method}: {[round(value, 2) for value in words.values.tolist()]}"
        )
        display(words)

# %% [markdown]
# **What to see.** With AttnLRP, the colour and the shape of a correct caption get equal shares, and the article
# nothing. Integrated gradients, the default, sum to the difference from embeddings of zero. They give *circle* a large
# negative value and the end token a large positive one. For the wrong caption, both give *red* a negative value.
#
# **What to beware of.** Words interact, and there is no single right way to divide a similarity among them. Compare two
# methods before you draw conclusions from one word.
#
# ## The same on large networks
#
# These cells need a download, so they are not run here. Registers and other prefix tokens are counted automatically:
#
# ```python
# import timm
#
# dino = timm.create_model("vit_small_patch14_reg4_dinov2", pretrained=True, img_size=518)
# dino.preprocess = dino.pretrained_cfg
# layers = saliency.attention(dino, "../assets/chelsea.jpg", reduce="mean_heads")
# row = layers[-1].probabilities[0, 0, 5:].view(37, 37)  # after the class token and four registers
#
# like_cat = saliency.similarity("another_cat.jpg")  # DINOv2 has no classes
# saliency.overlay(saliency.CheferAttention(dino).attribute("../assets/chelsea.jpg", like_cat))
# ```
#
# ```python
# clip = saliency.load("open_clip/ViT-B-32")  # pip install "saliency-toolkit[open_clip]"
# cat = saliency.text("a photo of a cat", against=["a photo of a dog", "a photo of a bus"])
# methods = [saliency.GradECLIP(clip), saliency.LeGrad(clip), saliency.AttnLRP(clip)]
# saliency.figure(saliency.Together(*methods).attribute("../assets/chelsea.jpg", cat))
# saliency.token_importance(clip, "../assets/chelsea.jpg", "a photo of a tabby cat")
# ```
#
# [Transformers](../docs/transformers.md) lists the methods for each model, their results on such scenes, and the
# methods that fail.
