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
# **A vision-language model answers in words. Which part of the image made it write each word?** The network of this
# page is built like LLaVA and comes with the toolkit: a vision transformer turns an image into 64 tokens, and a decoder
# reads them before the prompt. It was trained on drawn scenes, so we know which object each word is about. The same
# calls work for LLaVA, Qwen-VL, InternVL and other models of transformers.

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
# `generate` runs the network once to write the answer. Each call below reads this answer in one forward pass. For
# "red", the score is the log-odds of "red" against all other words, given the image, the prompt and the words before
# it:

# %%
method = saliency.AttnLRP(model)
targets = [saliency.words("red"), saliency.words("red", against="blue")]


def outline(axis):
    """Draw the outlines of both objects, without ticks."""
    for mask in masks:
        axis.contour(mask, levels=[0.5], colors="black", linewidths=1)
    axis.set_xticks([])
    axis.set_yticks([])


figure, axes = plt.subplots(1, 3, figsize=(7.2, 2.6), layout="constrained")
axes[0].imshow(image.permute(1, 2, 0))
axes[0].set_title("image", fontsize=10)
outline(axes[0])
for axis, explanation in zip(axes[1:], method.attribute_classes(answer, targets), strict=True):
    heatmap = saliency.heatmap(explanation)[0]
    axis.imshow(heatmap, cmap="PuOr_r", vmin=-heatmap.abs().max(), vmax=heatmap.abs().max())
    axis.set_title(explanation.target_names[0], fontsize=10)
    outline(axis)
plt.show()

# %% [markdown]
# **What to see.** Orange raises the score, purple lowers it. The circle made the network say "red", although it was
# certain: the gradient of the log-odds does not vanish, as the gradient of a probability would. `against="blue"` asks
# for the log-odds of the two colours, so the blue square is evidence against "red".
#
# ## Every word has a map
#
# `word_sheet` draws all words from one forward. The table below the maps shows how much of the score of each word
# comes from the image, and how much from each token of the text: the prompt, and the words before.

# %% tags=["warns"]
saliency.word_sheet(answer, method)

# %% [markdown]
# **What to see.** The map of each colour and each shape lies on its own object. The part of the image can be negative:
# the square is evidence for "blue", and the circle is evidence against it. "a" hardly depends on the image, because
# every caption begins with it. If less than a tenth of the relevance comes from the image, a warning is issued, because
# the map of such a word shows only this small part. Without the table, it would look like any other map.
#
# ## Does every word find its object?
#
# On drawn scenes, this can be measured: the fraction of the map of a word on its own object, minus the fraction on the
# other object, over 20 scenes. The bars are two standard errors. If the bar of a method crosses 0, the method does not
# distinguish the objects.

# %%
scenes = saliency.testbed.draw_scenes(20, seed=1_000_001, task="two_objects")
captions = [names[2] for names in scenes.captions()]  # true ones; the network need not have said them
answers = [
    saliency.generate(model, processor, image, "caption", answer=caption)
    for image, caption in zip(scenes.images, captions, strict=True)
]
places = {"first colour": 1, "first shape": 2, "second colour": -2, "second shape": -1}
names = ["attn_lrp", "integrated_gradients", "input_x_gradient", "chefer_attention", "attention_rollout"]


def margins(name):
    """Return the share on the own object minus the share on the other one, (20 scenes, 4 words)."""
    explainer = saliency.METHODS[name](model)
    rows = []
    for answer, masks in zip(answers, scenes.masks, strict=True):
        targets = [saliency.words(at=answer.words[place][1]) for place in places.values()]
        maps = [saliency.heatmap(each, sign="positive")[0] for each in explainer.attribute_classes(answer, targets)]
        shares = torch.stack([(heatmap * masks).sum((1, 2)) / heatmap.sum() for heatmap in maps])  # (4, 2)
        rows.append((shares[:, 0] - shares[:, 1]) * torch.tensor([1, 1, -1, -1]))
    return torch.stack(rows)


figure, axis = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
for number, name in enumerate(names):
    found = margins(name)
    at = torch.arange(4) + 0.15 * number
    axis.bar(at, found.mean(0), 0.14, yerr=2 * found.std(0) / 20**0.5, label=name)
axis.axhline(0, color="black", linewidth=0.8)
axis.set_xticks(torch.arange(4) + 0.3, list(places))
axis.set_ylabel("own object minus other")
axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# **What to see.** All of these methods except rollout distinguish the objects for shapes and for the first colour. For
# the second colour, only `AttnLRP` does. The second colour depends on both objects, because a caption does not name an
# object twice. Without the first object, the log-odds of the second colour fall by 3.4, without its own object by 10.8.
# The page on the testbed has all methods and words.
#
# ## Raw attention
#
# Many papers draw the attention of a word. `saliency.attention` reads it from fused kernels: here, of the token that
# writes the word, in each layer of the decoder, as the mean of its heads. Below, `AttnLRP`:

# %%
layers = saliency.attention(model, answer, reduce="mean_heads")[-3:]  # after the four of the image tower
chosen = (1, 2, 3, -2, -1)  # without "a"
explanations = method.attribute_classes(answer, [saliency.words(at=answer.words[at][1]) for at in chosen])
figure, axes = plt.subplots(4, 5, figsize=(7.2, 6.2), layout="constrained")
for column, at, explanation in zip(axes.T, chosen, explanations, strict=True):
    query = answer.output_positions[at]
    column[0].set_title(answer.words[at][0], fontsize=10)
    maps = [layer.maps(query)[0] for layer in layers]
    maps.append(saliency.heatmap(explanation, sign="positive", percentile=99.5)[0])
    for axis, values in zip(column, maps, strict=True):
        axis.imshow(values, cmap="YlOrRd", extent=(-0.5, 63.5, 63.5, -0.5))
        outline(axis)
for row, name in zip(axes, ("layer 0", "layer 1", "layer 2", "AttnLRP"), strict=True):
    row[0].set_ylabel(name)
plt.show()

# %% [markdown]
# **What to see.** For a shape, the first two layers attend to its object. For a colour, they attend equally to both
# objects. The caption could name either object, and attention does not show which object was chosen. The last layer
# attends to the whole image.
#
# ## Where attention sinks
#
# In large models, most of the attention goes to a few tokens without content: the first token, punctuation, or patches
# of the border and of empty sky. The weights of a softmax sum to 1, so a head that finds nothing must still attend to
# some token. Training makes it choose a token with a small value, which has little effect (Xiao et al. 2024, "Efficient
# Streaming Language Models with Attention Sinks"). Drawn over a photo, such a map has its maxima in empty areas. Does
# this small network do the same? Over the 20 scenes, for the token that writes each word:


# %%
def rows(answer):
    """Return the attention of the tokens that write five words, (3 layers, 5 words, keys)."""
    queries = [answer.output_positions[at] for at in chosen]
    layers = saliency.attention(model, answer, reduce="mean_heads")[-3:]
    return torch.stack([layer.probabilities[0, queries] for layer in layers])


attention = torch.stack([torch.nn.functional.pad(each, (0, 80 - each.shape[2])) for each in map(rows, answers)])
objects = torch.nn.functional.max_pool2d(scenes.masks.float(), 8).bool().any(1)  # (20, 8, 8): patches of objects
border = torch.ones(8, 8, dtype=torch.bool)
border[1:-1, 1:-1] = False
regions = {"objects": objects, "border": ~objects & border, "rest of the background": ~objects & ~border}
colors = ("#2a9d5c", "#d62728", "#f4a582", "0.3", "0.75")

patches = attention[..., 1:65].unflatten(-1, (8, 8))  # (20 scenes, 3 layers, 5 words, 8, 8)
shares = {name: (patches * where[:, None, None]).sum((3, 4)).mean(0) for name, where in regions.items()}
shares |= {"first token": attention[..., 0].mean(0), "text": attention[..., 65:].sum(3).mean(0)}  # (3, 5) each

figure, axes = plt.subplots(1, 3, figsize=(8.4, 2.6), sharey=True, layout="constrained")
kinds = ["first colour", "first shape", "relation", "second colour", "second shape"]
for number, axis in enumerate(axes):
    left = torch.zeros(5)
    for (name, values), color in zip(shares.items(), colors, strict=True):
        axis.barh(kinds, values[number], left=left, color=color, label=name)
        left = left + values[number]
    axis.set_title(f"layer {number}", fontsize=10)
axes[0].invert_yaxis()
axes[2].legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()
{name: f"{float(where.float().mean()):.0%} of the patches" for name, where in regions.items()}

# %% [markdown]
# **What to see.** It does not. The border gets less attention than its fraction of the patches. A quarter of the
# attention of the last layer goes to the first token, before the first colour. Sinks grow with depth and training, so
# look at your own model. Patches that are bright in `layer.maps(query)` of two different words are sinks. `AttnLRP`
# does not mark them, because it follows the values, too.
#
# **In short.** Explain the words, look at the part of the image first, and use a method that follows the computation:
# `AttnLRP`, and occlusion to check it. Attention shows where the network looked, but not what it found there.
