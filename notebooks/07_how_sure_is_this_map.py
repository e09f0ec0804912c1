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
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/saliency-toolkit/saliency/blob/main/notebooks/07_how_sure_is_this_map.ipynb)
#
# **A method that draws samples gives an estimate. How far is it from the true value?** Most toolkits do not report
# this: they only return the mean of the samples. Here every sampling method returns a standard error for each pixel.

# %%
import os
import subprocess

if "COLAB_RELEASE_TAG" in os.environ:  # on Colab: install the toolkit, with the photos
    get = "git clone --depth 1 https://github.com/saliency-toolkit/saliency /content/clone"
    subprocess.run(f"{get} && pip install -q '/content/clone[all]'", shell=True, check=True)
    os.chdir("/content/clone/notebooks")

# %%
# %matplotlib inline
import os
from pathlib import Path

import matplotlib.pyplot as plt

import saliency

PHOTO, TARGET = Path("../assets/coffee.jpg"), "espresso"
model = saliency.load("efficientnet_lite0")
fewer = 10 if "PYTEST_CURRENT_TEST" in os.environ else 1  # a test runs a tenth of the passes
rise = saliency.RISE(model, passes=400 // fewer).attribute(PHOTO, TARGET)


def draw(pictures, titles):
    """Pictures in a row, with titles."""
    _, axes = plt.subplots(1, len(pictures), figsize=(10.5, 10.5 / len(pictures) * 0.78), layout="constrained")
    for axis, picture, title in zip(axes, pictures, titles, strict=True):
        axis.imshow(picture)
        axis.set_title(title, fontsize=11)
        axis.axis("off")


error = saliency.standard_error(rise)
draw(
    [
        saliency.overlay(rise),
        saliency.overlay(error),
        saliency.overlay(rise, min_significance=2),
    ],
    ["RISE, 400 masks", "its standard error", "faded below two errors"],
)

# %% [markdown]
# **What to see.** The map on the left shows the rise of the score when a pixel is visible. The map in the middle shows
# the uncertainty of each value, which is similar everywhere. The map on the right is transparent where the value could
# be due to chance.
#
# **What to beware of.** The error covers only the sampling. A map can be precise and still misleading.
#
# ## More samples
#
# Four times the masks halve the error. The map converges, and the maps of the two halves of the samples agree more and
# more: their rank correlation is the `agreement` of the explanation. The error relative to the map is printed below.
# With 25 masks, noise makes the map itself larger, so the first step looks smaller:

# %%
runs = [*(saliency.RISE(model, passes=passes).attribute(PHOTO, TARGET) for passes in (25, 100)), rise]
draw(
    [saliency.overlay(each) for each in runs],
    [f"{each.run_stats[0].passes} masks, the halves agree to {float(each.agreement):.2f}" for each in runs],
)
for each in runs:
    relative = float(each.error.square().mean().sqrt() / each.values.square().mean().sqrt())
    print(f"{each.run_stats[0].passes:4} masks: relative error {relative:.3f}, agreement {float(each.agreement):.2f}")

# %% [markdown]
# ## Is the error correct?
#
# An error bar is a claim: of 100 repetitions, about 95 lie within two errors of the true value. To test this, repeat
# the estimate with other seeds, take a long run as the true value, and count.

# %%
truth = saliency.SmoothGrad(model, passes=120 // fewer, seed=1000).attribute(PHOTO, TARGET).values
inside = []
for seed in range(2):
    found = saliency.SmoothGrad(model, passes=20, seed=seed).attribute(PHOTO, TARGET)
    inside.append(float(((found.values - truth).abs() < 1.96 * found.error).float().mean()))
print("within 1.96 errors of the long run, per seed:", ", ".join(f"{share:.1%}" for share in inside))

# %% [markdown]
# The result is under 95 %, for two reasons: the long run is itself an estimate, and so is an error from 20
# samples.
#
# ## How many samples are enough?
#
# The number of passes is rarely what matters. More useful limits are an error and a time:
#
# ```python
# saliency.RISE(model, tolerance=0.1)   # until the error is a tenth of the map
# saliency.RISE(model, seconds=2)       # as many masks as fit into two seconds
# saliency.RISE(model, passes=4000)     # as in the paper
# ```
#
# All sampling methods take these three options, also together: the first limit that is met ends the work. The
# explanation reports the passes and the time, and the limit that was met.

# %%
for options in ({"tolerance": 0.4}, {"seconds": 1}, {"passes": 50}):
    stats = saliency.RISE(model, **options).attribute(PHOTO, TARGET).run_stats[0]
    print(f"{options!s:20} {stats.passes:5} passes in {stats.seconds:4.1f} s, ended by {stats.stopped}")

# %% [markdown]
# ## Errors without sampling
#
# The values of integrated gradients should sum to the difference between the score and the baseline's score. The
# missing part is the `residual`. With a tolerance, the method runs only as many passes as it needs.

# %%
print("photo        passes  residual / rise")
for photo in sorted(Path("../assets").glob("*.jpg")):
    found = saliency.IntegratedGradients(model, tolerance=0.01).attribute(photo)
    rise_of_score = float(found.values.sum() + found.residual)
    print(f"{photo.stem:10} {found.run_stats[0].passes:8}  {float(found.residual) / rise_of_score:+.4f}")

# %%
few, many = (saliency.IntegratedGradients(model, steps=steps).attribute(PHOTO, TARGET) for steps in (4, 32))
draw(
    [saliency.overlay(few, sign="absolute"), saliency.overlay(many, sign="absolute")],
    [f"4 steps, residual {float(few.residual):+.3f}", f"32 steps, residual {float(many.residual):+.4f}"],
)

# %% [markdown]
# **What to see.** The two maps look alike, and neither sum is exact. The score rises by 11.4 from grey to the photo.
# The sum of the values is 8.0 too small with 4 steps, and 1.1 too large with 32 steps. The rise is uneven, so a fixed
# set of steps misses some of it, even with many steps. With a tolerance, steps are added where the score changes fast:
# 17 were enough.
#
# **What to beware of.** A correct sum does not make a correct map, and a map that looks right may have a wrong sum.
#
# **In short.** Set a tolerance, look at `agreement`, and fade values that are not significant before you show a map to
# others.
