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
# # How sure is this map?
#
# **A method that draws samples gives an estimate. How far is it from what it estimates?** Most toolkits do not say:
# the samples are averaged, and that is the map. Here every sampling method comes with a standard error for each
# pixel, so the question has an answer.

# %%
# %matplotlib inline
from pathlib import Path
from textwrap import fill

import matplotlib.pyplot as plt
import numpy as np

import saliency

PHOTO, TARGET = Path("../assets/coffee.jpg"), "espresso"
model = saliency.load("efficientnet_lite0")
rise = saliency.RISE(model, passes=400).attribute(PHOTO, TARGET)


def draw(pictures, titles):
    """Pictures in a row, with titles."""
    _, axes = plt.subplots(1, len(pictures), figsize=(10.5, 10.5 / len(pictures) * 0.78), layout="constrained")
    for axis, picture, title in zip(axes, pictures, titles, strict=True):
        axis.imshow(picture)
        axis.set_title(title, fontsize=11)
        axis.axis("off")


draw(
    [
        saliency.overlay(rise),
        saliency.overlay(saliency.standard_error(rise)),
        saliency.overlay(rise, min_significance=2),
    ],
    ["RISE, 400 masks", "its standard error", "faded below two errors"],
)

# %% [markdown]
# **What to see.** On the left the map: how much more the network likes the picture when a pixel is shown. In the
# middle how uncertain each value is: much the same everywhere. On the right the same map once more, and the photo
# shows through where the value could be chance.
#
# **What to beware of.** The error is that of the sampling, and of nothing else. A method can be perfectly sure of a
# map that misleads.
#
# ## More samples
#
# Four times the masks halve the error. The map settles, and the maps of either half of the samples come to agree: their
# rank correlation is the `agreement` that the explanation carries. Printed below is the error relative to the map. With
# 50 masks noise makes the map itself larger, so the first step looks like less than that:

# %%
runs = [saliency.RISE(model, passes=passes).attribute(PHOTO, TARGET) for passes in (50, 200, 800)]
draw(
    [saliency.overlay(each) for each in runs],
    [f"{each.effort[0].passes} masks, the halves agree to {float(each.agreement):.2f}" for each in runs],
)
for each in runs:
    relative = float(each.error.square().mean().sqrt() / each.values.square().mean().sqrt())
    print(f"{each.effort[0].passes:4} masks: relative error {relative:.3f}, agreement {float(each.agreement):.2f}")

# %% [markdown]
# ## Is the error true?
#
# An error bar is a claim. This one says: of 100 repetitions, some 95 lie within two errors of the truth. Let us
# repeat the estimate with other seeds, take a long run for the truth, and count.

# %%
truth = saliency.SmoothGrad(model, passes=300, seed=1000).attribute(PHOTO, TARGET).values
inside = []
for seed in range(4):
    found = saliency.SmoothGrad(model, passes=30, seed=seed).attribute(PHOTO, TARGET)
    inside.append(float(((found.values - truth).abs() < 1.96 * found.error).float().mean()))
print("within 1.96 errors of the long run, per seed:", ", ".join(f"{share:.1%}" for share in inside))

# %% [markdown]
# A little under 95 %, for two reasons: the long run that stands for the truth is itself an estimate, and so is an error
# that 30 samples tell.
#
# ## When is enough enough?
#
# A number of passes is the wrong question. Better ones: how good, or how long?
#
# ```python
# saliency.RISE(model, tolerance=0.1)   # until the error is a tenth of the map
# saliency.RISE(model, seconds=2)       # whatever two seconds give
# saliency.RISE(model, passes=4000)     # as in the paper
# ```
#
# All sampling methods take these three, also together: the first that is met ends the work. What was spent, and what
# ended it, stands in the explanation.

# %%
for options in ({"tolerance": 0.3}, {"seconds": 2}, {"passes": 100}):
    effort = saliency.RISE(model, **options).attribute(PHOTO, TARGET).effort[0]
    print(f"{options!s:20} {effort.passes:5} passes in {effort.seconds:4.1f} s, ended by {effort.stopped}")

# %% [markdown]
# ## Methods that know their error without sampling
#
# Integrated gradients must add up: the values sum to the score's rise over the baseline. How far they miss it is the
# `residual`. With a tolerance it takes as few passes as that allows.

# %%
print("photo        passes  residual / rise")
for photo in sorted(Path("../assets").glob("*.jpg")):
    found = saliency.IntegratedGradients(model, tolerance=0.01).attribute(photo)
    rise_of_score = float(found.values.sum() + found.residual)
    print(f"{photo.stem:10} {found.effort[0].passes:8}  {float(found.residual) / rise_of_score:+.4f}")

# %%
few, many = (saliency.IntegratedGradients(model, steps=steps).attribute(PHOTO, TARGET) for steps in (4, 64))
draw(
    [saliency.overlay(few, sign="absolute"), saliency.overlay(many, sign="absolute")],
    [f"4 steps, residual {float(few.residual):+.3f}", f"64 steps, residual {float(many.residual):+.4f}"],
)

# %% [markdown]
# **What to see.** Two maps that look alike, and neither adds up. The score rises by 11.4 on its way from grey to the
# photo; with 4 steps the values sum to 8.0 less, with 64 to 1.6 more. It does not rise evenly, so steps laid out in
# advance miss some of it, even many of them. With a tolerance, steps are put where the score turns: 17 were enough.
#
# **What to beware of.** A sum that is right is not yet a map that is right, and a map that looks right need not add up.
#
# ## Faster, and what it costs
#
# `precision="fast"` runs a private copy of the network with its batch norms folded away, `"bf16"` one in half the
# bits. Both are timed on the first passes and dropped where they are no faster; what was done is written down.

# %%
maps = {
    precision: saliency.RISE(model, passes=300, precision=precision).attribute(PHOTO, TARGET)
    for precision in ("exact", "fast", "bf16")
}
draw(
    [saliency.overlay(each) for each in maps.values()],
    [f'precision="{asked}" gave\n{fill(each.effort[0].precision, 44)}' for asked, each in maps.items()],
)
for asked, each in maps.items():
    same = np.corrcoef(np.asarray(each).ravel(), np.asarray(maps["exact"]).ravel())[0, 1]
    print(f"{asked:6} correlation with the exact map {same:.5f}")

# %% [markdown]
# **What to see.** One map, three times. What each cost and what was done for it stands above it; on another machine it
# reads otherwise, down to "no faster here". **What to beware of.** Half the bits move the map a little. Where digits
# count, leave `precision` alone.
#
# **What to take home.** Ask for a tolerance, look at `agreement`, and fade what is not significant before you show a
# map to anybody.
