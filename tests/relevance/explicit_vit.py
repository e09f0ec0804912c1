"""AttnLRP and CP-LRP a second time, for torchvision's vision transformer: relevance written out layer by layer.

Attention is explicit, no gradient is taken, and each step says who gets which share of R. Everything is in float64.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold


class Explained(NamedTuple):
    """Relevance of a batch, and where the rest of the scores went."""

    scores: Tensor  # (N,)
    values: Tensor  # (N, C, H, W)
    patches: Tensor  # (N, T), after the patch embedding
    ledger: dict[str, Tensor]  # (N,) each: biases, tokens, softmax


class ExplicitViT:
    """The propagation of relevance through a vision transformer of torchvision.

    Args:
        model: An instance of `torchvision.models.VisionTransformer`.
        constant_attention: CP-LRP: attention probabilities are constants. Else AttnLRP.
    """

    def __init__(self, model: nn.Module, *, constant_attention: bool = False) -> None:
        self.p = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
        self.depth = len(model.get_submodule("encoder.layers").state_dict()) // 12
        heads = model.get_submodule("encoder.layers.encoder_layer_0").num_heads
        assert isinstance(heads, int)
        self.heads, self.constant_attention = heads, constant_attention
        self.ledger: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))

    def explain(self, x: Tensor, target: Tensor) -> Explained:
        """The relevance of images (N, C, H, W) for one class (N,) each."""
        weight = self.p["conv_proj.weight"]  # (D, C, p, p)
        size = weight.shape[-1]
        pixels = unfold(x.double(), size, stride=size).transpose(1, 2)  # (N, T, C p p)
        patches = pixels @ weight.flatten(1).T + self.p["conv_proj.bias"]
        token = self.p["class_token"].expand(len(x), -1, -1)
        position = self.p["encoder.pos_embedding"]
        states = [torch.cat([token, patches], 1) + position]
        for number in range(self.depth):
            states.append(self._block(number, states[-1]))
        normed = self._norm("encoder.ln", states[-1])
        logits = self._affine("heads.head", normed[:, 0])

        rows = torch.arange(len(x))
        r = torch.zeros_like(logits)
        r[rows, target] = logits[rows, target]
        r_normed = torch.zeros_like(normed)
        r_normed[:, 0] = self._through_affine("heads.head", normed[:, 0], r)
        r = self._through_norm("encoder.ln", states[-1], r_normed)
        for number in reversed(range(self.depth)):
            r = self._through_block(number, states[number], r)
        g = r / states[0]
        self._book("tokens", position * g)
        self._book("tokens", token * g[:, :1])
        r_patches = patches * g[:, 1:]
        g = r_patches / patches
        self._book("biases", self.p["conv_proj.bias"] * g)
        r_pixels = pixels * (g @ weight.flatten(1))
        values = nn.functional.fold(r_pixels.transpose(1, 2), x.shape[-2:], size, stride=size)
        return Explained(logits[rows, target], values, r_patches.sum(2), dict(self.ledger))

    def _block(self, number: int, x: Tensor) -> Tensor:
        name = f"encoder.layers.encoder_layer_{number}."
        x = x + self._attention(name, self._norm(name + "ln_1", x))
        hidden = self._affine(name + "mlp.0", self._norm(name + "ln_2", x))
        return x + self._affine(name + "mlp.3", nn.functional.gelu(hidden))

    def _through_block(self, number: int, x: Tensor, r: Tensor) -> Tensor:
        name = f"encoder.layers.encoder_layer_{number}."
        attended = self._attention(name, self._norm(name + "ln_1", x))
        middle = x + attended
        normed = self._norm(name + "ln_2", middle)
        hidden = self._affine(name + "mlp.0", normed)
        activated = nn.functional.gelu(hidden)
        mlp = self._affine(name + "mlp.3", activated)

        # A sum: to each summand in proportion.
        out = middle + mlp
        r_middle, r_mlp = middle / out * r, mlp / out * r
        # An activation: as it is.
        r_hidden = self._through_affine(name + "mlp.3", activated, r_mlp)
        r_normed = self._through_affine(name + "mlp.0", normed, r_hidden)
        r_middle = r_middle + self._through_norm(name + "ln_2", middle, r_normed)
        r_x, r_attended = x / middle * r_middle, attended / middle * r_middle
        r_normed = self._through_attention(name, self._norm(name + "ln_1", x), r_attended)
        return r_x + self._through_norm(name + "ln_1", x, r_normed)

    def _attention(self, name: str, x: Tensor) -> Tensor:
        q, k, v = self._heads(name, x)
        mixed = (self._scores(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self._affine(name + "self_attention.out_proj", mixed)

    def _through_attention(self, name: str, x: Tensor, r: Tensor) -> Tensor:
        q, k, v = self._heads(name, x)
        z = self._scores(q, k)
        s = z.softmax(-1)
        mixed = s @ v  # (N, heads, T, d)
        r = self._through_affine(name + "self_attention.out_proj", mixed.transpose(1, 2).flatten(2), r)
        share = self._split(r) / mixed
        r_v = torch.einsum("nhij,nhjd,nhid->nhjd", s, v, share)
        r_s = torch.einsum("nhij,nhjd,nhid->nhij", s, v, share)
        if self.constant_attention:
            r_q, r_k = torch.zeros_like(q), torch.zeros_like(k)
        else:
            # A product of two variables: half to each.
            r_v, r_s = r_v / 2, r_s / 2
            # The softmax.
            r_z = z * (r_s - s * r_s.sum(-1, keepdim=True))
            self._book("softmax", r_s)
            self._book("softmax", -r_z)
            share = r_z / z / 2 / q.shape[-1] ** 0.5
            r_q = torch.einsum("nhid,nhjd,nhij->nhid", q, k, share)
            r_k = torch.einsum("nhid,nhjd,nhij->nhjd", q, k, share)
        r_qkv = torch.cat([each.transpose(1, 2).flatten(2) for each in (r_q, r_k, r_v)], 2)
        return self._through_affine(name + "self_attention.in_proj_", x, r_qkv)

    def _heads(self, name: str, x: Tensor) -> tuple[Tensor, ...]:
        qkv = self._affine(name + "self_attention.in_proj_", x)
        return tuple(self._split(each) for each in qkv.chunk(3, 2))

    def _split(self, x: Tensor) -> Tensor:
        """Heads (N, heads, T, d) of features (N, T, D)."""
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores: Tensor = torch.einsum("nhid,nhjd->nhij", q, k) / q.shape[-1] ** 0.5
        return scores

    def _parameters(self, name: str) -> tuple[Tensor, Tensor]:
        joint = "" if name.endswith("_") else "."
        return self.p[f"{name}{joint}weight"], self.p[f"{name}{joint}bias"]

    def _affine(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._parameters(name)
        out: Tensor = x @ weight.T + bias
        return out

    def _through_affine(self, name: str, x: Tensor, r: Tensor) -> Tensor:
        weight, bias = self._parameters(name)
        share = r / self._affine(name, x)
        self._book("biases", bias * share)
        found: Tensor = torch.einsum("n...j,kj,n...k->n...j", x, weight, share)
        return found

    def _scaled(self, name: str, x: Tensor) -> Tensor:
        """The weight of a norm over the standard deviation, which is a constant."""
        scaled: Tensor = self.p[name + ".weight"] / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        return scaled

    def _norm(self, name: str, x: Tensor) -> Tensor:
        out: Tensor = (x - x.mean(-1, keepdim=True)) * self._scaled(name, x) + self.p[name + ".bias"]
        return out

    def _through_norm(self, name: str, x: Tensor, r: Tensor) -> Tensor:
        out = self._norm(name, x)
        # Each output may be 0, and its relevance too.
        share = torch.where(r == 0, torch.zeros_like(r), r / out)
        self._book("biases", self.p[name + ".bias"] * share)
        # Output k is the sum over j of x_j (1[j = k] - 1/D) w_k / sigma, and a bias.
        centre = torch.eye(x.shape[-1], dtype=torch.float64) - 1 / x.shape[-1]
        found: Tensor = torch.einsum("ntj,jk,ntk->ntj", x, centre, self._scaled(name, x) * share)
        return found

    def _book(self, name: str, relevance: Tensor) -> None:
        self.ledger[name] = self.ledger[name] + relevance.flatten(1).sum(1)
