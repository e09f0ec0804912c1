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
# # Which pixels made it say "red"?
#
# **A language model that sees answers in words. Which part of the image made it write each of them?** The network of
# this page is built like LLaVA and comes with the toolkit: a vision transformer turns an image into 64 tokens, and a
# decoder reads them before the prompt. It was trained on drawn scenes, so we know which object each word is about.
# LLaVA, Qwen-VL, InternVL and others of transformers take the same calls.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import torch

import saliency

model, processor = saliency.load("shapes_caption"), saliency.testbed.CaptionProcessor()
scenes = saliency.testbed.draw_scenes(1000, seed=1_000_000, task="two_objects")
number = [pair[:2] for pair in scenes.captions()].index(("a red circle", "a blue square"))
image, masks = scenes.images[number], scenes.masks[number]

answer = saliency.generate(model, processor, image, "caption")
answer.text, answer.tokens

# %% [markdown]
# `generate` let the network write, once. Everything below reads this answer again, in one forward each. For "red", the
# score is the log-odds of "red" against all other words, given the image, the prompt and the words before it:

# %%
method = saliency.AttnLRP(model)
explanation = method.attribute(answer, saliency.words("red"))
saliency.overlay(explanation)

# %% [markdown]
# **What to see.** The map is red on the circle and blue on the square: the square speaks against "red", because the
# network could have begun with "blue", too. Both sentences are true of this image.
#
# ## Every word has a map
#
# One map for each word, with the outlines of the circle (red) and the square (blue). The number is the share of the
# tokens of the image in the relevance of all tokens; the other tokens are the prompt and the words before.

# %% tags=["warns"]
words = [(word, method.attribute(answer, saliency.words(at=tokens))) for word, tokens in answer.words]


def outline(axis):
    """Draw the outlines of both objects, without ticks."""
    for mask, color in zip(masks, ("#ff5050", "#5090ff"), strict=True):
        axis.contour(mask, levels=[0.5], colors=color, linewidths=1.5)
    axis.set_xticks([])
    axis.set_yticks([])


def show(axis, explanation, title):
    """Draw the positive part of a map."""
    axis.imshow(saliency.heatmap(explanation, sign="positive", percentile=99.5)[0], cmap="inferno")
    outline(axis)
    axis.set_title(title, fontsize=10)


figure, axes = plt.subplots(2, 4, figsize=(7.2, 4.0), layout="constrained")
for axis, (word, each) in zip(axes.flat, words, strict=False):
    show(axis, each, f"{word}: {float(each.image_share):.0%}")
for axis in axes.flat[len(words) :]:
    axis.axis("off")
plt.show()

# %% [markdown]
# ## Image or text?
#
# A word can follow from the words before it. The relevance of all tokens says how much: here is its magnitude, for the
# image, the prompt and the earlier words.

# %%
figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
left = torch.zeros(len(words))
kinds = ["image" if token is None else "prompt" if at < 66 else "earlier words" for at, token in enumerate(answer.sequence)]
for kind, color in (("image", "#2a9d5c"), ("prompt", "0.45"), ("earlier words", "0.75")):
    where = torch.tensor([own == kind for own in kinds])
    values = torch.stack([each.token_shares[0].abs()[where].sum() / each.token_shares.abs().sum() for _, each in words])
    axis.barh([f"{at} {word}" for at, (word, _) in enumerate(words)], values, left=left, color=color, label=kind)
    left = left + values
axis.invert_yaxis()
axis.set_xlabel("share of the relevance of all tokens, by magnitude")
axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# **What to see.** Colours and shapes come from the image. "a" comes from the text, as it would in any caption, and the
# toolkit warned above: a map of such a word shows the small rest. The ledger of a word has the same account:

# %%
saliency.ledger_table(words[1][1])

# %% [markdown]
# ## Raw attention sinks
#
# Many papers draw the attention of a word instead. Here is the attention of the position that writes the word, in each
# layer of the decoder, as the mean of its heads; below, `AttnLRP`. By hand, it is a softmax between queries and keys:

# %%
recorded = []
handles = [
    block.attn.qkv.register_forward_hook(lambda module, args, output: recorded.append(output))
    for block in model.decoder
]
tokens = processor([image], "caption " + answer.text)
with torch.no_grad():
    model(**tokens)
for handle in handles:
    handle.remove()


def attention(qkv):
    """Return the attention (heads, queries, keys) of a causal layer."""
    length = qkv.shape[1]
    query, key, _ = qkv[0].view(length, 3, 4, 16).permute(1, 2, 0, 3)  # each (4 heads, tokens, 16)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    return (query @ key.mT / 16**0.5).masked_fill(later, -torch.inf).softmax(-1)


layers = torch.stack([attention(qkv) for qkv in recorded]).mean(1)  # (3 layers, queries, keys)
chosen = [1, 2, len(words) - 2, len(words) - 1]  # both colours and shapes

figure, axes = plt.subplots(4, 4, figsize=(6.2, 6.6), layout="constrained")
for column, at in zip(axes.T, chosen, strict=True):
    for axis, layer in zip(column, layers, strict=False):
        axis.imshow(layer[answer.queries[at], 1:65].view(8, 8), cmap="inferno", extent=(-0.5, 63.5, 63.5, -0.5))
        outline(axis)
    show(column[3], words[at][1], "")
    column[0].set_title(words[at][0], fontsize=10)
for row, name in zip(axes, ("layer 0", "layer 1", "layer 2", "AttnLRP"), strict=True):
    row[0].set_ylabel(name)
plt.show()

# %% [markdown]
# The same attention in numbers, over 50 scenes: how much goes to the first token, to the words, and to which part of
# the image. Patches of the background carry nothing about the word.
