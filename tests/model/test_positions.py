"""Positions are read from the operations of a forward: the peak of a map lies on the patch that the score reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saliency import METHODS, AttentionRollout, CheferAttention, GradCAM, HiResCAM
from saliency.errors import LayerError
from saliency.model.call import prepared_for_attribution
from saliency.model.layers import Layout, attention_layout, scan_layers
from saliency.model.positions import PositionTrace
from saliency.testing import images

GRID, SIZE, WIDTH = (4, 7), (32, 56), 8
TOKENS = GRID[0] * GRID[1]
PATCH = (2, 5)
X = images(2, SIZE)
ORDER = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
EXTRA = {"class": 1, "prompts": 3, "registers": 4}
ORDERS = [
    "class patches",
    "patches class",
    "prompts class patches",
    "class patches prompts",
    "class registers patches",
    "registers patches class prompts",
]
Move = Callable[[Tensor], Tensor]


class OnePatch(nn.Module):
    """A vision transformer of one block, whose class token gets the value of one patch only.

    Args:
        order: The parts of its tokens.
        move: A function that moves the patches among each other.
    """

    def __init__(self, order: str = "class patches", move: Move = lambda patches: patches) -> None:
        super().__init__()
        self.order, self.move = order.split(), move
        self.patches = nn.Conv2d(3, WIDTH, 8, stride=8)
        self.extra = nn.ParameterDict({name: torch.randn(1, count, WIDTH) for name, count in EXTRA.items()})
        self.norm, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def among(self, patches: Tensor, extra: Callable[[str], Tensor]) -> Tensor:
        return torch.cat([self.move(patches) if name == "patches" else extra(name) for name in self.order], 1)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)  # (N, 28, K)
        tokens = self.among(patches, lambda name: self.extra[name].expand(len(x), -1, -1))
        query, key, value = self.qkv(self.norm(tokens))[:, None].chunk(3, -1)
        one = F.one_hot(torch.tensor(PATCH[0] * GRID[1] + PATCH[1]), TOKENS).to(x)[None, :, None]
        is_read = self.among(one, lambda name: x.new_zeros(1, EXTRA[name], 1))
        # With small queries, the keys have almost no influence.
        mixed = F.scaled_dot_product_attention(0.001 * query, key, value * is_read)[:, 0]
        own = sum(EXTRA.get(name, TOKENS) for name in self.order[: self.order.index("class")])
        return cast("Tensor", self.head((tokens + self.proj(mixed))[:, own]))


def one_patch(*args: Any) -> OnePatch:
    torch.manual_seed(0)
    return OnePatch(*args).eval()


def flipped(patches: Tensor) -> Tensor:
    return patches.flip(1)


def in_windows(patches: Tensor) -> Tensor:
    """In the order of windows of 2 x 1 patches, as in Hiera."""
    n, _, k = patches.shape
    return patches.reshape(n, 2, 2, 7, k).transpose(2, 3).reshape(n, TOKENS, k)


def by_index(patches: Tensor) -> Tensor:
    return patches[:, ORDER]


def written_into(patches: Tensor) -> Tensor:
    """In place, in two parts of a buffer."""
    tokens = patches.new_zeros(patches.shape)
    tokens[:, :10] = patches[:, 18:]
    tokens[:, 10:] = patches[:, :18]
    return tokens


@pytest.mark.parametrize("move", [None, flipped, in_windows, by_index, written_into])
@pytest.mark.parametrize("order", ORDERS)
def test_the_peak_lies_on_the_only_patch_that_the_score_depends_on(order: str, move: Move | None) -> None:
    model = one_patch(order) if move is None else one_patch(order, move)
    peaks = []
    for target in range(3):
        for method in (CheferAttention(model), HiResCAM(model, "norm")):
            values = method.attribute(X, target).values[:, 0].abs()
            assert values.shape[1:] == GRID
            peaks += [divmod(int(each.argmax()), GRID[1]) for each in values if each.any()]
    assert len(peaks) >= 6
    assert set(peaks) == {PATCH}


@pytest.mark.parametrize("name", [name for name, cls in METHODS.items() if cls.needs.attention])
def test_maps_from_attention_do_not_depend_on_the_order_of_the_tokens(name: str) -> None:
    one, other = one_patch("class patches prompts"), one_patch("prompts patches class", in_windows)
    options = METHODS[name].preview_options
    if name == "le_grad":
        pytest.skip("it needs two blocks")
    maps = [METHODS[name](model, **options).attribute(X, 1).values for model in (one, other)]
    torch.testing.assert_close(maps[0], maps[1], rtol=1e-4, atol=1e-5 * float(maps[0].abs().max()))


def shuffled(patches: Tensor) -> Tensor:
    return patches[:, torch.rand(TOKENS).argsort()]


def by_norm(patches: Tensor) -> Tensor:
    """In an order that depends on the image."""
    order = patches.norm(dim=-1, keepdim=True).argsort(1)
    return patches.gather(1, order.expand_as(patches)) if patches.shape[2] > 1 else patches


def dropped(patches: Tensor) -> Tensor:
    return patches[:, ORDER[:14]]


def upper_half(patches: Tensor) -> Tensor:
    return patches[:, :14]


def doubled(patches: Tensor) -> Tensor:
    return torch.cat([patches, patches], 1)


@pytest.mark.parametrize("move", [shuffled, by_norm, dropped, upper_half, doubled])
def test_tokens_that_are_not_one_for_each_patch_are_refused_with_the_cures(move: Move) -> None:
    model = one_patch("class patches", move)
    for method in (AttentionRollout(model), GradCAM(model, "norm")):
        with pytest.raises(LayerError, match=r"one for each patch.*noise.*pass layout="):
            method.attribute(X, 1)


def test_images_with_different_orders_are_refused() -> None:
    class Ordered(OnePatch):
        def forward(self, x: Tensor, *orders: Tensor) -> Tensor:
            order = orders[0]
            self.move = lambda patches: patches.gather(
                1, order[..., None].expand(-1, -1, patches.shape[2])[: len(patches)]
            )
            return super().forward(x)

    torch.manual_seed(0)
    model = Ordered().eval()
    same, other = torch.arange(TOKENS).flip(0).expand(2, -1), torch.stack([torch.arange(TOKENS)] * 2)
    other[1] = other[1].flip(0)
    assert AttentionRollout(model).attribute(X, 1, forward_args=(same,)).values.shape == (2, 1, *GRID)
    with pytest.raises(LayerError, match="one for each patch"):
        AttentionRollout(model).attribute(X, 1, forward_args=(other,))


def test_positions_are_traced_once_for_a_model_and_a_size() -> None:
    model, calls = one_patch(), list[int]()
    model.register_forward_hook(lambda *_: calls.append(1))
    AttentionRollout(model).attribute(X, 1)
    assert len(calls) == 2
    AttentionRollout(model).attribute(X + 1, 1)
    assert len(calls) == 3


def rotated(tokens: Tensor) -> Tensor:
    """With rotary positions: pairs of channels as complex numbers, each token turned by an angle of its own."""
    pairs = torch.view_as_complex(tokens.reshape(*tokens.shape[:2], -1, 2))
    turned = pairs * torch.exp(1j * torch.arange(tokens.shape[1]))[:, None]
    return torch.view_as_real(turned).flatten(2)


def by_fourier(tokens: Tensor) -> Tensor:
    """Mixed as in FNet: by the real part of a Fourier transform over the tokens, next to the tokens themselves."""
    return cast("Tensor", tokens + torch.fft.fft(tokens, dim=1).real)


@pytest.mark.parametrize("move", [rotated, by_fourier])
def test_positions_are_followed_through_views_of_complex_numbers(move: Move) -> None:
    x = images(1, (4, 6))
    with PositionTrace(x) as trace:
        tokens = x.flatten(2).transpose(1, 2).repeat(1, 1, 2).contiguous()
        positions = trace.positions(move(tokens))
    assert positions is not None
    expected = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij")).flatten(1)
    assert torch.equal(positions.nanmean(-1).expand(2, 1, 24)[:, 0], expected)


@pytest.mark.parametrize("part", [lambda z: z.real, lambda z: z.imag, lambda z: torch.view_as_real(z)[..., 1]])
def test_parts_of_complex_numbers_that_mix_all_positions_have_none(part: Move) -> None:
    x = images(1, (4, 6))
    with PositionTrace(x) as trace:
        positions = trace.positions(part(torch.fft.ifft2(torch.fft.fft2(x))))
    assert positions is not None
    assert positions.isnan().all()


class Encoder(nn.Module):
    """PyTorch's encoder with tokens in the first dimension, or the second."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=batch_first, norm_first=True)
        self.patches, self.encoder = nn.Conv2d(3, WIDTH, 8, stride=8), nn.TransformerEncoder(layer, 2)
        self.token, self.head = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Linear(WIDTH, 3)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.patches(x).flatten(2).transpose(1, 2), self.token.expand(len(x), -1, -1)], 1)
        if self.batch_first:
            return cast("Tensor", self.head(self.encoder(tokens)[:, -1]))
        return cast("Tensor", self.head(self.encoder(tokens.transpose(0, 1))[-1]))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_attention_is_read_in_both_layouts_of_pytorch() -> None:
    torch.manual_seed(0)
    models = [Encoder(batch_first=batch_first).eval() for batch_first in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    maps = [CheferAttention(model).attribute(X, 1).values for model in models]
    assert maps[0].shape == (2, 1, *GRID)
    torch.testing.assert_close(maps[0], maps[1])


def layouts(model: nn.Module, x: Tensor, tokens: int) -> Layout:
    with prepared_for_attribution(model):
        return attention_layout(model, tokens, x)


def transformers_model(kind: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = getattr(transformers, f"{kind.removesuffix('Model').removesuffix('ForObjectDetection')}Config")
    model: nn.Module = getattr(transformers, kind)(config(**sizes, patch_size=8, **options))
    return model.eval()


def test_yolos_has_its_patches_between_the_class_token_and_those_of_objects() -> None:
    model = transformers_model("YolosForObjectDetection", image_size=list(SIZE), num_detection_tokens=10)
    assert layouts(model, X, 1 + TOKENS + 10) == Layout("NTC", GRID, range(1, 1 + TOKENS))
    with prepared_for_attribution(model):
        default = scan_layers(model, X, lambda output: output.logits[:, 0, 1]).default
    assert default is not None
    assert default.startswith("vit.encoder.layer")


def test_vit_mae_is_refused_unless_its_order_is_fixed() -> None:
    model = transformers_model("ViTMAEModel", image_size=32, mask_ratio=0.0)
    x = images(2, (32, 32))

    def score(output: Any) -> Tensor:
        return cast("Tensor", output.last_hidden_state[:, 0, 0])

    with pytest.raises(LayerError, match=r'forward_args=\{"noise"'):
        AttentionRollout(model).attribute(x, score)
    orders = [torch.arange(16.0), torch.arange(16.0).flip(0)]
    maps = [
        AttentionRollout(model).attribute(x, score, forward_args={"noise": order.expand(2, -1)}).values
        for order in orders
    ]
    torch.testing.assert_close(maps[0], maps[1])


def test_learned_queries_are_no_patches() -> None:
    """As in BLIP-2, where 16 or 36 queries would be a square."""

    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, WIDTH, 8, stride=8)
            self.queries = nn.Parameter(torch.randn(1, 16, WIDTH))
            self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            patches = self.patches(x).flatten(2).transpose(1, 2)
            queries = self.queries.expand(len(x), -1, -1)
            found = self.block(queries + self.attend(queries, patches, patches)[0])
            return cast("Tensor", self.head(found.mean(1)))

    torch.manual_seed(0)
    model = Queries().eval()
    assert GradCAM(model).attribute(images(1, (32, 32)), 1).layer == "patches"
    with pytest.raises(LayerError, match="one for each patch"):
        GradCAM(model, "block").attribute(images(1, (32, 32)), 1)


def test_the_models_own_output_is_never_the_default_layer() -> None:
    """A decoder of words returns logits (N, tokens, words)."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.norm = nn.Conv2d(3, WIDTH, 8, stride=8), nn.LayerNorm(WIDTH)
            self.words = nn.Linear(WIDTH, 50)

        def forward(self, x: Tensor) -> Tensor:
            return cast("Tensor", self.words(self.norm(self.patches(x).flatten(2).transpose(1, 2))))

    torch.manual_seed(0)
    model = nn.Sequential(Inner()).eval()
    assert GradCAM(model).attribute(X, lambda output: output[:, -1, 3]).layer == "0.norm"
