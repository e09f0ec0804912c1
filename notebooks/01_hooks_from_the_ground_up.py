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
# # Hooks from the ground up
#
# **How do you look inside a network while it runs?** PyTorch's answer is the *hook*: a function that PyTorch calls when
# a tensor receives its gradient, or when a layer runs. Everything in this toolkit is built on hooks. This page starts
# with the smallest hook and ends with guided backpropagation written by hand. It also demonstrates what can go wrong.

# %%
# %matplotlib inline
import threading
from copy import deepcopy
from math import exp

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import saliency
from saliency import inspection
from saliency.hooks.manager import HookManager

ASSETS = "../assets"
torch.set_printoptions(precision=4)

# %% [markdown]
# ## A hook on a tensor
#
# `register_hook` on a tensor takes a function of the tensor's gradient. If the function returns a tensor, that tensor
# replaces the gradient. If it returns None, the gradient is unchanged. Several hooks form a chain and run in the order
# of registration. Here we double, print, halve and print the gradient of the sum of squares, which is `2 * v`.

# %%
v = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
double = v.register_hook(lambda gradient: gradient * 2)
v.register_hook(print)
v.register_hook(lambda gradient: gradient / 2)
v.register_hook(print)

(v**2).sum().backward()

# %% [markdown]
# The first `print` shows `[4, 8, 12]`, because it runs after the doubling. The second shows `[2, 4, 6]` again. As a
# figure:


# %%
def draw_chain(axes, gradient, steps):
    """Draw the gradient after each step of the chain, from left to right."""
    for axis, (name, rule) in zip(axes, steps, strict=True):
        gradient = rule(gradient)
        axis.bar(range(3), gradient, color=["#9ecae1", "#4292c6", "#08519c"])
        for at, value in enumerate(gradient.tolist()):
            axis.text(at, value + 0.3, f"{value:g}", ha="center")
        axis.set_title(name, fontsize=10)
        axis.set_ylim(0, 14)
        axis.set_xticks(range(3), ["v[0]", "v[1]", "v[2]"])
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[1:]:
        axis.annotate(
            "", (-0.02, 0.5), (-0.14, 0.5), xycoords="axes fraction", arrowprops={"arrowstyle": "->", "lw": 2}
        )


figure, axes = plt.subplots(1, 4, figsize=(10.5, 2.6), sharey=True)
chain = [
    ("incoming: 2 v", lambda g: g),
    ("doubled: first print", lambda g: g * 2),
    ("halved: second print", lambda g: g / 2),
    ("v.grad", lambda g: g),
]
draw_chain(axes, 2 * v.detach(), chain)

# %% [markdown]
# `register_hook` returned a *handle*. A hook stays registered until the `remove()` method of its handle is called.
# Without the doubling, the rest of the chain still halves the gradient:

# %%
double.remove()
v.grad = None
(v**2).sum().backward()
print("v.grad is", v.grad)

# %% [markdown]
# **What to beware of.** A hook outlives the line that registered it. If you lose the handle, the hook stays.
#
# In this toolkit, the same chain is a list of functions in a `with` block. Those that return None, such as `print`,
# leave the gradient unchanged. All hooks are removed when the block ends. The first argument is a model; here, it does
# nothing. The second argument is a tensor to edit, or the name of a layer or parameter of the model.

# %%
w, rules = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), [lambda g: g * 2, print, lambda g: g / 2, print]
with inspection.edit_gradients(nn.Identity(), w, rules):
    (w**2).sum().backward()

# %% [markdown]
# ## Backward twice
#
# A backward pass frees the tensors that the graph saved for it. To run it twice, pass `retain_graph=True` the first
# time. Note that `.grad` *accumulates*: the second pass adds its gradient to the first.

# %%
w.grad = None
loss = (w**2).sum()
loss.backward(retain_graph=True)
print("after the first: ", w.grad)
loss.backward()
print("after the second:", w.grad)

# %% [markdown]
# The gradient itself is the same both times; only the sum has grown. This is why training loops call `zero_grad`, and
# why this toolkit never calls `backward()` on your model. It uses `torch.autograd.grad`, which returns the gradient and
# leaves `.grad` unchanged.
#
# ## Three hooks on a module
#
# A hook on a layer can run at three moments: before the forward pass, after the forward pass, and once the gradient has
# been propagated back through the layer.

# %%
layer = nn.Linear(2, 3)
handles = [
    layer.register_forward_pre_hook(lambda module, inputs: print("forward pre-hook: input", tuple(inputs[0].shape))),
    layer.register_forward_hook(lambda module, inputs, output: print("forward hook: output", tuple(output.shape))),
    layer.register_full_backward_hook(
        lambda module, grad_input, grad_output: print(
            "backward hook: grad_output", tuple(grad_output[0].shape), "grad_input", tuple(grad_input[0].shape)
        )
    ),
]
x = torch.randn(5, 2, requires_grad=True)
layer(x).sum().backward()
for handle in handles:
    handle.remove()

# %% [markdown]
# The most common hook prints shapes. Here it is registered on the seven top-level modules of EfficientNet-Lite0, the
# network that is installed with the toolkit:

# %%
model = saliency.load("efficientnet_lite0")


def as_input(name):
    """Load a photo as a batch for the network, (1, 3, 224, 224)."""
    return model.preprocess(Image.open(f"{ASSETS}/{name}.jpg"))[None]


def show_shape(module, inputs, output):
    print(f"{type(module).__name__:20} {tuple(output.shape)}")


handles = [part.register_forward_hook(show_shape) for part in model.children()]
with torch.no_grad():
    model(as_input("coffee"))
for handle in handles:
    handle.remove()

# %% [markdown]
# The next page does this with one call, `inspection.layer_table`, for every layer, with names, parameters and cost.
#
# ## What are grad_input and grad_output?
#
# Here is a network small enough for pencil and paper: two inputs and two layers of two neurons, each followed by a
# sigmoid.

# %%
network = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid(), nn.Linear(2, 2), nn.Sigmoid())
with torch.no_grad():
    network[0].weight.copy_(torch.tensor([[0.15, 0.25], [0.20, 0.30]]))
    network[0].bias.fill_(0.35)
    network[2].weight.copy_(torch.tensor([[0.40, 0.50], [0.45, 0.55]]))
    network[2].bias.fill_(0.6)

outputs, gradients = {}, {}


def keep_output(module, inputs, output):
    outputs[module] = output.detach().clone()


def keep_gradients(module, grad_input, grad_output):
    gradients[module] = grad_input[0], grad_output[0]


handles = [layer.register_forward_hook(keep_output) for layer in network]
handles += [layer.register_full_backward_hook(keep_gradients) for layer in network]
x = torch.tensor([[0.05, 0.10]], requires_grad=True)
network(x).backward(torch.tensor([[1.0, 1.0]]))  # the initial gradient, 1 for each output
for handle in handles:
    handle.remove()


def numbers(tensor):
    return "[" + ", ".join(f"{each:.4f}" for each in tensor.flatten().tolist()) + "]"


print("layer       output              grad_output         grad_input")
for name, layer in network.named_children():
    grad_input, grad_output = gradients[layer]
    row = [numbers(tensor) for tensor in (outputs[layer], grad_output, grad_input)]
    print(f"{name} {type(layer).__name__:9}", "   ".join(row))

# %% [markdown]
# **What to see.** `grad_output` is the gradient of the result with respect to the layer's *output*; it arrives from the
# next layer. `grad_input` is the gradient with respect to the layer's *input*; it is passed on to the previous layer.
# Read the table from bottom to top: each `grad_input` equals the `grad_output` of the line above it.
#
# Are these numbers right? Let us compute each of them by hand, in plain Python. In the forward pass, a linear layer is
# a weighted sum plus a bias, and a sigmoid is 1 / (1 + e^-z):

# %%
z1 = 0.15 * 0.05 + 0.25 * 0.10 + 0.35, 0.20 * 0.05 + 0.30 * 0.10 + 0.35
h = 1 / (1 + exp(-z1[0])), 1 / (1 + exp(-z1[1]))
z2 = 0.40 * h[0] + 0.50 * h[1] + 0.6, 0.45 * h[0] + 0.55 * h[1] + 0.6
y = 1 / (1 + exp(-z2[0])), 1 / (1 + exp(-z2[1]))
for name, pair in (("z1", z1), ("h", h), ("z2", z2), ("y", y)):
    print(f"{name:2} = {pair[0]:.4f} {pair[1]:.4f}")

# %% [markdown]
# The backward pass applies the chain rule. The slope of a sigmoid is y (1 - y). Each input of a linear layer receives
# the gradients of both outputs, weighted by a *column* of the weight matrix:

# %%
dz2 = y[0] * (1 - y[0]), y[1] * (1 - y[1])  # times the initial gradient of 1
dh = 0.40 * dz2[0] + 0.45 * dz2[1], 0.50 * dz2[0] + 0.55 * dz2[1]
dz1 = dh[0] * h[0] * (1 - h[0]), dh[1] * h[1] * (1 - h[1])
dx = 0.15 * dz1[0] + 0.20 * dz1[1], 0.25 * dz1[0] + 0.30 * dz1[1]
for name, pair in (("dz2", dz2), ("dh", dh), ("dz1", dz1), ("dx", dx)):
    print(f"{name:3} = {pair[0]:.4f} {pair[1]:.4f}")

# %% [markdown]
# The gradient of a weight is the gradient at its neuron times the input that the weight multiplies. Training steps
# follow these gradients, so let us compare them with `.grad`:

# %%
dw2 = [[dz2[0] * h[0], dz2[0] * h[1]], [dz2[1] * h[0], dz2[1] * h[1]]]
dw1 = [[dz1[0] * 0.05, dz1[0] * 0.10], [dz1[1] * 0.05, dz1[1] * 0.10]]
for name, layer, by_hand in (("first", network[0], dw1), ("second", network[2], dw2)):
    print(f"{name} layer, by hand:", numbers(torch.tensor(by_hand)))
    print(f"{name} layer, .grad:  ", numbers(layer.weight.grad))

# %% [markdown]
# Every number agrees. The figure shows the forward values in blue and the gradients at the same positions in orange.

# %%
places = ["x", "z1\nafter Linear", "h\nafter Sigmoid", "z2\nafter Linear", "y\nafter Sigmoid"]
values = [(0.05, 0.10), z1, h, z2, y]
gradients = [dx, dz1, dh, dz2, (1.0, 1.0)]
figure, rows = plt.subplots(2, 1, figsize=(9, 5), layout="constrained")
titles = "forward, from left to right: values", "backward, from right to left: gradients"
for axis, pairs, color, title in zip(rows, (values, gradients), ("#3182bd", "#e6550d"), titles, strict=True):
    for neuron, shift in ((0, -0.2), (1, 0.2)):
        heights = [pair[neuron] for pair in pairs]
        bars = axis.bar([at + shift for at in range(5)], heights, 0.36, color=color, alpha=1 - 0.4 * neuron)
        axis.bar_label(bars, [f"{each:.4f}" for each in heights], fontsize=8, padding=1)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(y=0.15)
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_xticks(range(5), places)
# %% [markdown]
# **What to see.** The gradient starts at 1 and shrinks to a few hundredths at the input. Each sigmoid multiplies it by
# 1/4 at most, since y (1 - y) has its maximum there. Two sigmoids are harmless; the next page shows the effect of
# twenty.
#
# `inspection.record` stores all of this for every layer of a model, with no hooks to write or to remove:

# %%
with inspection.record(network) as recording:
    network(x).sum().backward()

(call,) = recording["2"]
print("output     ", numbers(call.output))
print("grad_output", numbers(call.grad_outputs[0]))
print("grad_input ", numbers(call.grad_inputs[0]))

# %% [markdown]
# ## Changing the gradient
#
# The return value of a full backward hook replaces `grad_input`. If the hook on the first layer returns ones, the
# gradient at the input is all ones. The layer's own weights are not affected: their gradient is computed from
# `grad_output`, which is unchanged.

# %%
network.zero_grad()
network(x).sum().backward()
before = network[0].weight.grad.clone()

network.zero_grad()
x.grad = None
handle = network[0].register_full_backward_hook(lambda module, grad_input, grad_output: (torch.ones(1, 2),))
network(x).sum().backward()
handle.remove()
print("gradient at the input:", x.grad)
print("weight gradient unchanged:", torch.equal(network[0].weight.grad, before))

# %% [markdown]
# A parameter is a tensor, so it accepts a tensor hook. In this toolkit, it has a name. Here a rule adds fixed noise to
# the gradient of the second linear layer's bias, until the block ends. The bias gradient becomes exactly the sum, and
# the gradient of the weight is unchanged:

# %%
noise = 0.1 * torch.randn(2, generator=torch.Generator().manual_seed(7))
plain_bias, plain_weight = network[2].bias.grad.clone(), network[2].weight.grad.clone()
network.zero_grad()
with inspection.edit_gradients(network, "2.bias", lambda gradient: gradient + noise):
    network(x).sum().backward()
print(numbers(plain_bias), "+", numbers(noise), "=", numbers(network[2].bias.grad))
print("bias gradient is exactly the sum:", torch.equal(network[2].bias.grad, plain_bias + noise))
print("weight gradient unchanged:", torch.equal(network[2].weight.grad, plain_weight))

# %% [markdown]
# Here is the edit of the layer in this toolkit. The attribute `edits` states how often the rule was applied:

# %%
x.grad = None
with inspection.edit_gradients(network, "0", torch.ones_like) as entering:
    network(x).sum().backward()
print("gradient at the input:", x.grad, entering.edits)

# %% [markdown]
# ## Seven pitfalls
#
# Each of them is demonstrated below, with its remedy.
#
# ### 1. In-place modules
#
# `nn.ReLU(inplace=True)` overwrites its input to save memory. This is incompatible with a full backward hook on the
# ReLU or on the layer before it:

# %% tags=["raises-exception"]
torch.manual_seed(0)
saving = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 1))
handle = saving[1].register_full_backward_hook(lambda module, grad_input, grad_output: None)
saving(x)

# %% [markdown]
# The toolkit attaches its gradient hooks to the autograd graph of each call instead of to modules. Recording and
# editing therefore work here as well:

# %%
handle.remove()
with inspection.record(saving) as recording:
    saving(x).sum().backward()
for call in recording:
    print(f"{call.layer}: output {numbers(call.output)}, gradient there {numbers(call.grad_outputs[0])}")

# %% [markdown]
# ### 2. The old backward hook
#
# `register_backward_hook` is deprecated. It sees only the *last operation* of a module. This module has three
# operations: a linear layer, a sigmoid and a product.


# %% tags=["warns"]
class Tenfold(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, x):
        return 10 * torch.sigmoid(self.linear(x))


def tell(module, grad_input, grad_output):
    print("grad_input", *[tuple(each.shape) for each in grad_input if each is not None])


tenfold = Tenfold()
handle = tenfold.register_backward_hook(tell)
tenfold(x).sum().backward()
handle.remove()

# %% [markdown]
# The module's input has two numbers, but the reported `grad_input` has three. It is the gradient at the sigmoid's
# output, the input of the last operation. The correct hook has *full* in its name:

# %%
tenfold = Tenfold()
handle = tenfold.register_full_backward_hook(tell)
tenfold(x).sum().backward()
handle.remove()

# %% [markdown]
# ### 3. An unintended return value
#
# The return value of a forward hook replaces the layer's output. A `lambda` always returns a value, and it is easy to
# overlook which one. `list.append` returns None, which is fine. `dict.setdefault` is an equally short way to store an
# output:

# %%
kept = {}
handle = model.blocks.register_forward_hook(lambda module, inputs, output: kept.setdefault("blocks", output))


def top_class(name):
    with torch.no_grad():
        chances = model(as_input(name)).softmax(1)[0]
    return f"{model.categories[chances.argmax()]}, {chances.max():.2%}"


for name in ("coffee", "chelsea", "rocket"):
    print(f"{name:8} {top_class(name)}")

# %% [markdown]
# The cat and the rocket are classified as espresso, with the same probability to the last digit. `setdefault` returns
# the value that was stored *first*. From the second photo on, the network therefore continues with the features of the
# coffee. There is no error and no warning, and the first photo is classified correctly. Without the hook:

# %%
handle.remove()
for name in ("coffee", "chelsea", "rocket"):
    print(f"{name:8} {top_class(name)}")

# %% [markdown]
# With `inspection.record` you write no hook function, so none can replace an output by accident. To change an output on
# purpose, use `inspection.edit_activations`.
#
# ### 4. Stored, then overwritten
#
# A hook receives the output itself, not a copy. If the next layer works in place, it overwrites the stored tensor. Here
# a convolution detects vertical edges, and an in-place ReLU follows:

# %%
edges = nn.Sequential(nn.Conv2d(1, 1, 3, bias=False), nn.ReLU(inplace=True)).requires_grad_(False)
edges[0].weight.copy_(torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]))
gray = as_input("camera").mean(1, keepdim=True)

captured = []
handle = edges[0].register_forward_hook(lambda module, inputs, output: captured.append(output))
with inspection.record(edges, "0") as recording:
    edges(gray)
handle.remove()

pictures = {
    "input": gray,
    "stored by a hook: overwritten": captured[0],
    "stored by inspection.record": recording["0"][0].output,
}
figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.8), layout="constrained")
for axis, (name, picture) in zip(axes, pictures.items(), strict=True):
    limit = 1 if name == "input" else 3
    axis.imshow(picture[0, 0], cmap="gray" if name == "input" else "RdBu_r", vmin=-limit, vmax=limit)
    axis.set_title(f"{name}\nfrom {picture.min():.1f} to {picture.max():.1f}", fontsize=10)
    axis.set_axis_off()

# %% [markdown]
# **What to see.** Red is positive, blue is negative. A convolution produces both signs, as on the right. In the middle,
# the negative half is missing: this is the output of the ReLU, labelled as the output of the convolution.
#
# **The remedy** by hand is `output.clone()`. The recorder makes its own copies. If memory is short, use `keep="cpu"` or
# `keep="statistics"`.
#
# ### 5. Hooks that accumulate
#
# Suppose a cell registers a hook that doubles a gradient, and you run the cell three times:

# %%
counted = nn.Linear(2, 1)
for run in (1, 2, 3):
    counted.register_full_backward_hook(lambda module, grad_input, grad_output: (2 * grad_input[0],))
    (gradient,) = torch.autograd.grad(counted(x).sum(), x)
    ratio = (gradient / counted.weight.detach())[0, 0]
    print(f"run {run}: hooks on the layer: {len(counted._backward_hooks)}; gradient: {ratio:.0f} times the correct one")

# %% [markdown]
# The handles were not kept, so the hooks can only be removed through a private dictionary of PyTorch, or with a new
# layer. Outputs that such a hook stores also stay in memory, with their whole graph. A `with` block removes the hooks
# that it registered, even if it ends with an error:

# %%
clean = nn.Linear(2, 1)
for run in (1, 2, 3):
    with inspection.edit_gradients(clean, "", lambda gradient: 2 * gradient):
        (gradient,) = torch.autograd.grad(clean(x).sum(), x)
    print(f"run {run}: gradient: {(gradient / clean.weight.detach())[0, 0]:.0f} times the correct one")
print("hooks left:", len(clean._forward_hooks) + len(clean._forward_pre_hooks) + len(clean._backward_hooks))

# %% [markdown]
# ### 6. ReLUs that are not modules
#
# A module hook needs a module. A ReLU that is called as a function has none, so a search for `nn.ReLU` silently misses
# it:


# %%
class HalfHidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 5), nn.Conv2d(8, 8, 5)
        self.relu = nn.ReLU()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.relu(self.first(x))
        x = F.relu(self.second(x))  # not a module, so no hook
        return self.head(x.mean((2, 3)))


torch.manual_seed(0)
hidden = HalfHidden()
print("nn.ReLU modules: ", sum(isinstance(module, nn.ReLU) for module in hidden.modules()))
print("ReLU calls:      ", saliency.GuidedBackprop(hidden).attribute(as_input("coffee"), 0).coverage)

# %% [markdown]
# In this toolkit, guided backpropagation finds ReLUs in the autograd graph, where a function and a module look the
# same.
#
# ### 7. Other threads
#
# A hook on a module acts on every call of the module, from any thread. Here two threads share a network, and one of
# them observes it:

# %%
by_hook = []
handle = network[0].register_forward_hook(lambda module, inputs, output: by_hook.append(output))
with inspection.record(network, "0") as recording:
    network(x)
    other = threading.Thread(target=network, args=(x,))
    other.start()
    other.join()
handle.remove()
print(f"calls seen by the hook: {len(by_hook)}; by this thread's recorder: {len(recording)}")

# %% [markdown]
# ## How the hook manager avoids these pitfalls
#
# The recorder, the rules and all methods of this toolkit register their hooks through one class, `HookManager`. It owns
# its hooks and removes them when its block ends, even after an error. Here it captures the output of a linear layer
# that is followed by an in-place ReLU. It also observes the gradient there; then an error is raised:


# %%
def hooks_on(model):
    return sum(len(part._forward_hooks) + len(part._backward_hooks) for part in model.modules())


try:
    with HookManager(persistent=True) as hooks:  # for a block of yours, not for one call of a method
        kept = hooks.capture(saving[0])
        score = saving(x).sum()
        hooks.at_gradient(kept[0], lambda gradient: print("gradient:          ", numbers(gradient)))
        print("hooks in the block:", hooks_on(saving))
        print("captured output:   ", numbers(kept[0]))
        torch.autograd.grad(score, x)
        raise KeyError("no such class")
except KeyError as error:
    print("error in the block:", error)
print("hooks afterwards:  ", hooks_on(saving))
print("layer run alone:   ", numbers(saving[0](x)))

# %% [markdown]
# **What to see.** The captured value is the layer's true output, including its negative part. One copy was stored, and
# another copy was passed on to the ReLU. The model had a single hook, the hook of `capture`. The gradient hook is on
# the autograd graph of this call and is freed with it. In the graph, in-place modules and plain functions are
# operations like any other. Other threads that run the model at the same time are not affected by either hook. After
# the error, no hook was left.
#
# **What to beware of.** The manager is internal to the toolkit. Prefer `inspection.record` and
# `inspection.edit_gradients`, which use the manager and add names and tables.
#
# ## In short
#
# | pitfall | by hand | in this toolkit |
# |---|---|---|
# | in-place modules | an error, or `inplace = False` everywhere | `record` and `edit_gradients` support them |
# | `register_backward_hook` | use `register_full_backward_hook` | not used |
# | a return value replaces the output | end with `return None` | recording changes nothing, editing is explicit |
# | an output is overwritten later | `output.clone()` | copied when it is captured |
# | hooks accumulate | keep every handle, remove it in `finally` | a `with` block |
# | functions are not modules | rewrite the model | found in the graph |
# | other threads | check the thread in each hook | only the thread of the block |
#
# ## The last step: guided backpropagation by hand
#
# The rule fits in one line. In the backward pass through a ReLU, positive gradients pass, and negative gradients are
# set to zero. By hand, this is a full backward hook on each `nn.ReLU`:


# %%
def only_positive(module, grad_input, grad_output):
    return (grad_input[0].clamp(min=0),)


def guided_by_hand(model, image, target, kind=nn.ReLU):
    modules = [module for module in model.modules() if isinstance(module, kind)]
    handles = [module.register_full_backward_hook(only_positive) for module in modules]
    try:
        image = image.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(image)[0, target], image)
    finally:
        for handle in handles:
            handle.remove()
    return gradient, len(modules)


torch.manual_seed(0)
tidy = nn.Sequential(
    nn.Conv2d(3, 8, 5, stride=2),
    nn.ReLU(),
    nn.Conv2d(8, 16, 3, stride=2),
    nn.ReLU(),
    nn.Conv2d(16, 16, 3),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 10),
)
cat = as_input("chelsea")
by_hand, count = guided_by_hand(tidy, cat, 3)
by_toolkit = saliency.GuidedBackprop(tidy).attribute(cat, 3).values
print(f"{count} ReLUs hooked; equal to saliency.GuidedBackprop: {torch.equal(by_hand, by_toolkit)}")

# %% [markdown]
# On a network of plain `nn.ReLU` modules, the hooks give the correct result, bit for bit. Now we try a real network.
# The ReLUs of EfficientNet-Lite0 are `nn.ReLU6`, which is not a subclass of `nn.ReLU`, and they work in place:

# %%
tiger_cat = model.categories.index("tiger cat")
first_try, count = guided_by_hand(model, cat, tiger_cat)
print(f"{count} modules hooked, no error")
try:
    guided_by_hand(model, cat, tiger_cat, kind=nn.ReLU6)
except RuntimeError as error:
    print("hooks on nn.ReLU6:", str(error).split(". ")[0])

patient = deepcopy(model)
for module in patient.modules():
    if isinstance(module, nn.ReLU6):
        module.inplace = False
second_try, count = guided_by_hand(patient, cat, tiger_cat, kind=nn.ReLU6)
print(f"{count} modules hooked, in a copy without in-place ReLUs")

plain = saliency.VanillaGradient(model).attribute(cat, "tiger cat").values
guided = saliency.GuidedBackprop(model).attribute(cat, "tiger cat")
print("first attempt equals the plain gradient:      ", torch.equal(first_try, plain))
print("second attempt equals guided backpropagation: ", torch.equal(second_try, guided.values), f"({guided.coverage})")

# %%
panels = {
    "photo": cat[0].permute(1, 2, 0) / 2 + 0.5,
    "hooks on nn.ReLU:\nplain gradient": first_try[0].abs().amax(0),
    "saliency.GuidedBackprop": guided.values[0].abs().amax(0),
}
figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.9), layout="constrained")
for axis, (name, panel) in zip(axes, panels.items(), strict=True):
    options = {} if name == "photo" else {"cmap": "inferno", "vmax": panel.quantile(0.998)}
    axis.imshow(panel, **options)
    axis.set_title(name, fontsize=10)
    axis.set_axis_off()

# %% [markdown]
# **What to see.** The map in the middle also shows the eyes and the nose, with more noise. Without the correct map for
# comparison, it looks plausible, but it is not guided backpropagation.
#
# **What to beware of.** The correct result required two corrections, and both of them require knowledge of the model's
# source code. A third case, the ReLU called as a function, cannot be handled by module hooks at all. "Your own model,
# your own method" shows such a network. `saliency.GuidedBackprop` is exact in all three cases. If there is nothing to
# rewrite, it raises an error instead of returning a map.
#
# `edit_gradients` can also rebuild the method on the unmodified model, with its in-place ReLUs:

# %%
with inspection.edit_gradients(model, nn.ReLU6, lambda gradient: gradient.clamp(min=0)) as editing:
    edited = saliency.VanillaGradient(model).attribute(cat, "tiger cat")
print(f"{sum(editing.edits.values())} calls edited; equal: {torch.equal(edited.values, guided.values)}")
