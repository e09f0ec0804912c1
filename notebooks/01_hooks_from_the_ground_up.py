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
# **How does one look inside a network while it runs?** PyTorch's answer is the *hook*: a function of yours that is
# called when a tensor gets its gradient, or when a layer is used. All that this toolkit does stands on hooks. This page
# begins with the smallest one and ends with guided backpropagation written by hand. In between, things go wrong, one
# after the other, because they do.

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
# `register_hook` on a tensor takes a function of the tensor's gradient. If it returns something, that takes the
# gradient's place; if it returns nothing, the gradient stays as it is. Several hooks form a chain, in the order in
# which they were registered. Here: double, print, halve, print, on the gradient of the sum of squares. That gradient is
# twice `v`.

# %%
v = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
double = v.register_hook(lambda gradient: gradient * 2)
v.register_hook(print)
v.register_hook(lambda gradient: gradient / 2)
v.register_hook(print)

(v**2).sum().backward()

# %% [markdown]
# The first `print` saw `[4, 8, 12]`, because it stands behind the doubling; the second saw `[2, 4, 6]` again. Drawn:


# %%
def draw_chain(axes, gradient, steps):
    """The gradient on its way through the chain, from left to right."""
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
    ("arrives: 2 v", lambda g: g),
    ("double; print shows this", lambda g: g * 2),
    ("halve; print shows this", lambda g: g / 2),
    ("v.grad", lambda g: g),
]
draw_chain(axes, 2 * v.detach(), chain)

# %% [markdown]
# `register_hook` returned a *handle*, and a hook stays until somebody calls its `remove()`. Without the doubling, the
# rest of the chain still halves:

# %%
double.remove()
v.grad = None
(v**2).sum().backward()
print("v.grad is", v.grad)

# %% [markdown]
# **What to beware of.** A hook outlives the line it was written for. Forget the handle, and you keep the hook.
#
# The same chain with this toolkit is a list of rules in a `with` block. When the block ends, nothing is left.

# %%
w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
rules = inspection.rules
with inspection.edit_gradients(None, w, [rules.scale(2), rules.show(), rules.scale(0.5), rules.show()]):
    (w**2).sum().backward()

# %% [markdown]
# ## Backward twice
#
# A backward pass frees what it needed of the graph. To go twice, say `retain_graph=True` the first time. And mind that
# `.grad` is a *sum*: the second pass adds to what the first left there.

# %%
w.grad = None
loss = (w**2).sum()
loss.backward(retain_graph=True)
print("after the first: ", w.grad)
loss.backward()
print("after the second:", w.grad)

# %% [markdown]
# Nobody doubled anything here. It is why training loops call `zero_grad`, and why this toolkit never calls
# `backward()` on a model of yours: `torch.autograd.grad` returns the gradient and leaves `.grad` alone.
#
# ## Three hooks on a module
#
# A layer has more places to look at: before it runs, after it ran, and when the gradient has come back through it.

# %%
layer = nn.Linear(2, 3)
handles = [
    layer.register_forward_pre_hook(lambda module, inputs: print("before: input", tuple(inputs[0].shape))),
    layer.register_forward_hook(lambda module, inputs, output: print("after: output", tuple(output.shape))),
    layer.register_full_backward_hook(
        lambda module, grad_input, grad_output: print(
            "on the way back: grad_output", tuple(grad_output[0].shape), "grad_input", tuple(grad_input[0].shape)
        )
    ),
]
x = torch.randn(5, 2, requires_grad=True)
layer(x).sum().backward()
for handle in handles:
    handle.remove()

# %% [markdown]
# The most popular hook of all prints shapes. On the seven outermost parts of EfficientNet-Lite0, the network that comes
# with the install:

# %%
model = saliency.load("efficientnet_lite0")


def as_input(name):
    """A photo as the network takes it, (1, 3, 224, 224)."""
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
# A network small enough for pencil and paper: two numbers in, two layers of two neurons, a sigmoid behind each.

# %%
network = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid(), nn.Linear(2, 2), nn.Sigmoid())
with torch.no_grad():
    network[0].weight.copy_(torch.tensor([[0.15, 0.25], [0.20, 0.30]]))
    network[0].bias.fill_(0.35)
    network[2].weight.copy_(torch.tensor([[0.40, 0.50], [0.45, 0.55]]))
    network[2].bias.fill_(0.6)

forth, back = {}, {}


def keep_output(module, inputs, output):
    forth[module] = output.detach().clone()


def keep_gradients(module, grad_input, grad_output):
    back[module] = grad_input[0], grad_output[0]


handles = [layer.register_forward_hook(keep_output) for layer in network]
handles += [layer.register_full_backward_hook(keep_gradients) for layer in network]
x = torch.tensor([[0.05, 0.10]], requires_grad=True)
network(x).backward(torch.tensor([[1.0, 1.0]]))  # the gradient to start from, one for each output
for handle in handles:
    handle.remove()


def numbers(tensor):
    return "[" + ", ".join(f"{each:.4f}" for each in tensor.flatten().tolist()) + "]"


print("layer       output              grad_output         grad_input")
for name, layer in network.named_children():
    grad_input, grad_output = back[layer]
    row = [numbers(each) for each in (forth[layer], grad_output, grad_input)]
    print(f"{name} {type(layer).__name__:9}", "   ".join(row))

# %% [markdown]
# **What to see.** `grad_output` is how fast the result rises with what the layer *gave*: it comes in from above.
# `grad_input` is the same for what the layer *got*: it goes on to the layer below. So read the table from the bottom
# up: each `grad_input` is the `grad_output` of the line above it.
#
# Are these numbers right? Here is each of them by hand, with nothing but Python. Forth, a linear layer is a weighted
# sum, and a sigmoid is 1 / (1 + e^-z):

# %%
z1 = 0.15 * 0.05 + 0.25 * 0.10 + 0.35, 0.20 * 0.05 + 0.30 * 0.10 + 0.35
h = 1 / (1 + exp(-z1[0])), 1 / (1 + exp(-z1[1]))
z2 = 0.40 * h[0] + 0.50 * h[1] + 0.6, 0.45 * h[0] + 0.55 * h[1] + 0.6
y = 1 / (1 + exp(-z2[0])), 1 / (1 + exp(-z2[1]))
for name, pair in (("z1", z1), ("h", h), ("z2", z2), ("y", y)):
    print(f"{name:2} = {pair[0]:.4f} {pair[1]:.4f}")

# %% [markdown]
# Back, by the chain rule. A sigmoid's slope is y (1 - y). A linear layer hands each input the gradients of both
# outputs, weighted by the *columns* of its matrix:

# %%
dz2 = y[0] * (1 - y[0]), y[1] * (1 - y[1])  # times the 1 that we started from
dh = 0.40 * dz2[0] + 0.45 * dz2[1], 0.50 * dz2[0] + 0.55 * dz2[1]
dz1 = dh[0] * h[0] * (1 - h[0]), dh[1] * h[1] * (1 - h[1])
dx = 0.15 * dz1[0] + 0.20 * dz1[1], 0.25 * dz1[0] + 0.30 * dz1[1]
for name, pair in (("dz2", dz2), ("dh", dh), ("dz1", dz1), ("dx", dx)):
    print(f"{name:3} = {pair[0]:.4f} {pair[1]:.4f}")

# %% [markdown]
# A weight's gradient is the gradient at its neuron times the input that it weighs. Training steps along these numbers,
# so let us hold them against `.grad`:

# %%
dw2 = [[dz2[0] * h[0], dz2[0] * h[1]], [dz2[1] * h[0], dz2[1] * h[1]]]
dw1 = [[dz1[0] * 0.05, dz1[0] * 0.10], [dz1[1] * 0.05, dz1[1] * 0.10]]
for name, layer, by_hand in (("first", network[0], dw1), ("second", network[2], dw2)):
    print(f"{name} layer, by hand:", numbers(torch.tensor(by_hand)))
    print(f"{name} layer, .grad:  ", numbers(layer.weight.grad))

# %% [markdown]
# Every number agrees. As a picture: what flows forth in blue, and what comes back to the same place in orange.

# %%
places = ["x", "z1\nafter Linear", "h\nafter Sigmoid", "z2\nafter Linear", "y\nafter Sigmoid"]
values = [(0.05, 0.10), z1, h, z2, y]
gradients = [dx, dz1, dh, dz2, (1.0, 1.0)]
figure, rows = plt.subplots(2, 1, figsize=(9, 5), layout="constrained")
titles = "forth, from left to right: the values", "back, from right to left: the gradients"
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
# **What to see.** The gradient starts as 1 and arrives as a few hundredths. Each sigmoid multiplies it by less than
# a quarter, since y (1 - y) is 1/4 at most. Two sigmoids are harmless; the next page shows what twenty of them do.
#
# `inspection.record` keeps all of this for every layer of a model, without hooks to write or to remove:

# %%
with inspection.record(network) as recording:
    network(x).sum().backward()

(call,) = recording["2"]
print("output     ", numbers(call.output))
print("grad_output", numbers(call.grad_outputs[0]))
print("grad_input ", numbers(call.grad_inputs[0]))

# %% [markdown]
# ## Changing what flows
#
# What a full backward hook returns is handed on in place of `grad_input`. With ones from the first layer, the input
# gets ones. The layer's own weights notice nothing: their gradient comes from `grad_output`, which stayed as it was.

# %%
network.zero_grad()
network(x).sum().backward()
before = network[0].weight.grad.clone()

network.zero_grad()
x.grad = None
handle = network[0].register_full_backward_hook(lambda module, grad_input, grad_output: (torch.ones(1, 2),))
network(x).sum().backward()
handle.remove()
print("at the input:", x.grad)
print("the weight gradient is the same as before:", torch.equal(network[0].weight.grad, before))

# %% [markdown]
# A parameter is a tensor, so it takes a tensor hook. With a known draw of noise on the bias of the second linear layer,
# its gradient is exactly the sum, and the weight next to it is untouched:

# %%
noise = 0.1 * torch.randn(2, generator=torch.Generator().manual_seed(7))
plain_bias, plain_weight = network[2].bias.grad.clone(), network[2].weight.grad.clone()
network.zero_grad()
handle = network[2].bias.register_hook(lambda gradient: gradient + noise)
network(x).sum().backward()
handle.remove()
print(numbers(plain_bias), "+", numbers(noise), "=", numbers(network[2].bias.grad))
print("bias is exactly the sum:", torch.equal(network[2].bias.grad, plain_bias + noise))
print("weight is the same as before:", torch.equal(network[2].weight.grad, plain_weight))

# %% [markdown]
# Both in the words of this toolkit. `edits` tells how often each rule took place:

# %%
x.grad = None
network.zero_grad()
with (
    inspection.edit_gradients(network, "0", rules.replace(1.0)) as entering,
    inspection.edit_gradients(network, "2.bias", rules.add_noise(0.1, seed=7)) as noisy,
):
    network(x).sum().backward()
print("at the input:", x.grad, entering.edits)
print("bias:", numbers(network[2].bias.grad), noisy.edits)

# %% [markdown]
# ## Seven ways to go wrong
#
# Each of them runs below, with what to do about it.
#
# ### 1. In-place modules
#
# `nn.ReLU(inplace=True)` writes over its input, to save memory. A full backward hook on it, or on the layer before it,
# does not go together with that:

# %% tags=["raises-exception"]
torch.manual_seed(0)
saving = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 1))
handle = saving[1].register_full_backward_hook(lambda module, grad_input, grad_output: None)
saving(x)

# %% [markdown]
# The toolkit hangs its gradient hooks on the graph of each call instead of on modules, so that recording and editing
# work here as well:

# %%
handle.remove()
with inspection.record(saving) as recording:
    saving(x).sum().backward()
recording.table()

# %% [markdown]
# ### 2. The old backward hook
#
# `register_backward_hook` is deprecated. It looks at the *last operation* of a module only. Here is a module of three
# operations, a linear layer, a sigmoid and a product:


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
# The module's input has two numbers, and the "grad_input" three: it is the gradient at the factor of the product. The
# hook that is meant has *full* in its name:

# %%
tenfold = Tenfold()
handle = tenfold.register_full_backward_hook(tell)
tenfold(x).sum().backward()
handle.remove()

# %% [markdown]
# ### 3. A return value that nobody meant
#
# What a forward hook returns replaces the layer's output. A `lambda` always returns something, and one has to know
# what. `list.append` returns None: fine. `dict.setdefault` is just as short a way to keep an output:

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
# A cat and a rocket are espresso, to the last digit. `setdefault` returns what it kept *first*, so from the second
# photo on, the network goes on with the coffee. No error, no warning, and on the first photo all was well. In truth:

# %%
handle.remove()
for name in ("coffee", "chelsea", "rocket"):
    print(f"{name:8} {top_class(name)}")

# %% [markdown]
# With `inspection.record` no function of yours stands in the way of what flows. To change an output there is
# `inspection.edit_activations`, which has to be asked for.
#
# ### 4. Kept, then overwritten
#
# A hook gets the output itself, not a copy. If the next layer works in place, it works on what you have kept. Here
# a convolution finds vertical edges, and an in-place ReLU follows:

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
    "kept by a hook: overwritten": captured[0],
    "kept by inspection.record": recording["0"][0].output,
}
figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.8), layout="constrained")
for axis, (name, picture) in zip(axes, pictures.items(), strict=True):
    limit = 1 if name == "input" else 3
    axis.imshow(picture[0, 0], cmap="gray" if name == "input" else "RdBu_r", vmin=-limit, vmax=limit)
    axis.set_title(f"{name}\nfrom {picture.min():.1f} to {picture.max():.1f}", fontsize=10)
    axis.set_axis_off()

# %% [markdown]
# **What to see.** Red is positive, blue negative. A convolution gives both, as on the right. In the middle the blue
# half is gone: that is the output of the ReLU, under the name of the convolution.
#
# **The cure** by hand is `output.clone()`. The recorder copies by itself; with `keep="cpu"` or `keep="statistics"` also
# where memory is short.
#
# ### 5. Hooks that stay, and add up
#
# Suppose a cell registers a hook that doubles a gradient, and that you run the cell three times:

# %%
counted = nn.Linear(2, 1)
for run in (1, 2, 3):
    counted.register_full_backward_hook(lambda module, grad_input, grad_output: (2 * grad_input[0],))
    (gradient,) = torch.autograd.grad(counted(x).sum(), x)
    ratio = (gradient / counted.weight.detach())[0, 0]
    print(f"run {run}: {len(counted._backward_hooks)} hooks, the gradient is {ratio:.0f} times what it should be")

# %% [markdown]
# Nobody kept the handles, so the ways out are a private dictionary of PyTorch's, or a new layer. And whatever such a
# hook keeps is kept as well, with the whole graph behind it. A `with` block takes away what it brought, also when an
# error ends it:

# %%
clean = nn.Linear(2, 1)
for run in (1, 2, 3):
    with inspection.edit_gradients(clean, "", rules.scale(2)):
        (gradient,) = torch.autograd.grad(clean(x).sum(), x)
    print(f"run {run}: {(gradient / clean.weight.detach())[0, 0]:.0f} times")
print("hooks left:", len(clean._forward_hooks) + len(clean._forward_pre_hooks) + len(clean._backward_hooks))

# %% [markdown]
# ### 6. ReLUs that are no modules
#
# A hook needs a module to hang on. A ReLU that is written as a function has none, and a search for `nn.ReLU` finds
# half of them without saying so:


# %%
class HalfHidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 5), nn.Conv2d(8, 8, 5)
        self.relu = nn.ReLU()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.relu(self.first(x))
        x = F.relu(self.second(x))  # no module, no hook
        return self.head(x.mean((2, 3)))


torch.manual_seed(0)
hidden = HalfHidden()
print("modules that are ReLUs: ", sum(isinstance(module, nn.ReLU) for module in hidden.modules()))
print("ReLUs that were called: ", saliency.GuidedBackprop(hidden).attribute(as_input("coffee"), 0).coverage)
print("between the layers:     ", inspection.layer_table(hidden, as_input("coffee"), times=False).model.functional)

# %% [markdown]
# Guided backpropagation in this toolkit looks for ReLUs in the graph, where every spelling leaves its trace, and the
# layer table counts the functions that run between layers.
#
# ### 7. Other threads
#
# A hook on a module acts for everybody who uses the module. Two threads share a network; one of them watches:

# %%
by_hook = []
handle = network[0].register_forward_hook(lambda module, inputs, output: by_hook.append(output))
with inspection.record(network, "0") as recording:
    network(x)
    other = threading.Thread(target=network, args=(x,))
    other.start()
    other.join()
handle.remove()
print(f"calls seen by the hook: {len(by_hook)}; by the recorder of this thread: {len(recording)}")

# %% [markdown]
# ## What the hook manager does about it
#
# Whatever this toolkit hangs on a model, recorder, rules and every method, it hangs through one class, `HookManager`.
# It owns its hooks, and takes them away when its block ends, however it ends. Here it keeps what the linear layer
# gave, with the in-place ReLU right behind it, listens to the gradient there, and then something goes wrong:


# %%
def hooks_on(model):
    return sum(len(part._forward_hooks) + len(part._backward_hooks) for part in model.modules())


try:
    with HookManager(standing=True) as hooks:  # standing: for a block of yours, and not for one call of a method
        kept = hooks.capture(saving[0])
        score = saving(x).sum()
        hooks.at_gradient(kept[0], lambda gradient: print("its gradient:       ", numbers(gradient)))
        print("hooks in the block: ", hooks_on(saving))
        print("kept of the layer:  ", numbers(kept[0]))
        torch.autograd.grad(score, x)
        raise KeyError("no such class")
except KeyError as error:
    print("the block ended in: ", error)
print("hooks after it:     ", hooks_on(saving))
print("what the layer gave:", numbers(saving[0](x)))

# %% [markdown]
# **What to see.** A layer and an in-place ReLU, a value and its gradient, an error, and nothing left behind. The value
# is what the layer gave, below zero too: a copy was kept, and a copy of that flowed on. There was one hook on the
# model, that of `capture`. The one on the gradient is on the graph of this call, where in-place modules and bare
# functions are as good as any, and goes with it. Another thread
# that runs the model meanwhile meets neither.
#
# **What to beware of.** The manager is the toolkit's own machinery. Reach for `inspection.record` and
# `inspection.edit_gradients` first: they are it, with names and tables.
#
# ## In short
#
# | what goes wrong | by hand | in this toolkit |
# |---|---|---|
# | in-place modules | an error, or `inplace = False` everywhere | `record` and `edit_gradients` work on them |
# | `register_backward_hook` | use the *full* one | not used |
# | a returned value replaces the output | end with `return None` | recording changes nothing, editing is asked for |
# | an output is overwritten later | `output.clone()` | copied when it is seen |
# | hooks stay and add up | keep every handle, remove it in `finally` | a `with` block |
# | functions are no modules | rewrite the model | seen in the graph |
# | other threads | ask for the thread in each hook | only the block's own thread |
#
# ## The last step: guided backpropagation by hand
#
# The rule is one line. On its way back through a ReLU, the gradient passes where it is positive, and is cut where it is
# negative. That is a full backward hook on each `nn.ReLU`:


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
print(f"{count} ReLUs hooked; the same as saliency.GuidedBackprop: {torch.equal(by_hand, by_toolkit)}")

# %% [markdown]
# On a network of tidy `nn.ReLU` modules the hooks give the right answer, bit for bit. Now a network as one finds it. In
# EfficientNet-Lite0 the ReLUs are `nn.ReLU6`, which is no `nn.ReLU`, and they work in place:

# %%
tiger_cat = model.categories.index("tiger cat")
first_try, count = guided_by_hand(model, cat, tiger_cat)
print(f"{count} modules hooked, no error")
try:
    guided_by_hand(model, cat, tiger_cat, kind=nn.ReLU6)
except RuntimeError as error:
    print("with nn.ReLU6 named:", str(error).split(". ")[0])

patient = deepcopy(model)
for module in patient.modules():
    if isinstance(module, nn.ReLU6):
        module.inplace = False
second_try, count = guided_by_hand(patient, cat, tiger_cat, kind=nn.ReLU6)
print(f"{count} modules hooked, in a copy that is not in place")

plain = saliency.VanillaGradient(model).attribute(cat, "tiger cat").values
guided = saliency.GuidedBackprop(model).attribute(cat, "tiger cat")
print("the first is the plain gradient:      ", torch.equal(first_try, plain))
print("the second is guided backpropagation: ", torch.equal(second_try, guided.values), f"({guided.coverage})")

# %%
panels = {
    "photo": cat[0].permute(1, 2, 0) / 2 + 0.5,
    "hooks on nn.ReLU:\nthe plain gradient": first_try[0].abs().amax(0),
    "saliency.GuidedBackprop": guided.values[0].abs().amax(0),
}
figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.9), layout="constrained")
for axis, (name, panel) in zip(axes, panels.items(), strict=True):
    options = {} if name == "photo" else {"cmap": "inferno", "vmax": panel.quantile(0.998)}
    axis.imshow(panel, **options)
    axis.set_title(name, fontsize=10)
    axis.set_axis_off()

# %% [markdown]
# **What to see.** The map in the middle has eyes and nose in it as well, if with more noise. Whoever has never seen the
# right one would believe it, and it is not what its author thinks it is.
#
# **What to beware of.** It took two corrections, and a reader of the model's source to know of them. A third one, the
# ReLU that is a function, has no cure by hooks on modules at all; "Your own model, your own method" shows a network of
# that kind. `saliency.GuidedBackprop` is exact in all three cases, and where there is nothing to rewrite, it says so in
# place of a map.
#
# With the rules of this page it can even be put together again, in place and on the model as it is:

# %%
with inspection.edit_gradients(model, nn.ReLU6, lambda gradient: gradient.clamp(min=0)) as editing:
    edited = saliency.VanillaGradient(model).attribute(cat, "tiger cat")
print(f"{sum(editing.edits.values())} calls edited; equal: {torch.equal(edited.values, guided.values)}")
