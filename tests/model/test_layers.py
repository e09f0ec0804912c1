"""Layers: found by name and by themselves, and read so that each place of the map is that place of the image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import saliency
from saliency import EigenCAM, FusedCAM, GradCAM
from saliency.errors import LayerError, NotApplicableError, TargetError
from saliency.inspection import layer_table
from saliency.inspection.arguments import select_layers
from saliency.io.preprocess import Preprocess
from saliency.model.call import prepared_for_attribution
from saliency.model.layers import LayerScan, Layout, find, layout_of, scan_layers
from saliency.testing import tiny_model
from saliency.testing.case import images
from tests.models import OwnForward, small_vgg


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Small(nn.Module):
    """Two stages on a 24 x 16 input, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ReLU())
        self.unused = nn.Conv2d(3, 4, 1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.layer2(self.layer1(x)).mean((2, 3)))
        return out


def look(model: nn.Module, x: Tensor) -> LayerScan:
    with prepared_for_attribution(model):
        return scan_layers(model, x)


# By name.


def test_a_name_that_is_not_there_gets_the_closest() -> None:
    with pytest.raises(LayerError, match=r'no layer "layer3" in Small; the closest are .*layer[12]'):
        GradCAM(Small(), "layer3")


def test_a_layer_is_found_by_name_by_module_and_by_the_names_of_wrappers() -> None:
    model = Small()
    for layer in ("layer2.0", model.layer2[0], "module.layer2.0", "_orig_mod.layer2.0", "_orig_mod.module.layer2.0"):
        assert find(model, layer) == ("layer2.0", model.layer2[0])
    x = torch.randn(1, 3, 24, 16)
    wanted = GradCAM(model, "layer2.0").attribute(x, 1)
    found = GradCAM(nn.DataParallel(model) if torch.cuda.is_available() else model, model.layer2[0]).attribute(x, 1)
    assert torch.equal(found.values, wanted.values)
    assert found.layer == "layer2.0"


def test_a_module_of_two_names_is_found_by_both() -> None:
    model = Small()
    model.again = model.layer1
    assert find(model, "again")[1] is find(model, "layer1")[1]
    x = torch.randn(1, 3, 24, 16)
    assert torch.equal(GradCAM(model, "again").attribute(x, 1).values, GradCAM(model, "layer1").attribute(x, 1).values)


@pytest.mark.parametrize("layer", [nn.ReLU(), 3, ["layer1", "layer3"], [], b"layer1"])
def test_what_is_no_layer_of_the_model_is_refused_at_once(layer: Any) -> None:
    with pytest.raises(LayerError):
        GradCAM(Small(), layer)
    with pytest.raises(LayerError, match="CAM reads one layer, got 2"):
        saliency.CAM(Small(), ["layer1", "layer2"])


# Layers that give no map.


def test_a_layer_that_is_never_run_is_an_error() -> None:
    with pytest.raises(LayerError, match='"unused" was not run'):
        GradCAM(Small(), "unused").attribute(torch.randn(1, 3, 24, 16), 1)


@pytest.mark.parametrize("cls", [GradCAM, EigenCAM])
def test_a_layer_without_an_extent_in_space_is_an_error_with_its_shape(cls: type[GradCAM | EigenCAM]) -> None:
    with pytest.raises(LayerError, match=r'"fc" has shape \(2, 5\), .* 24x16'):
        cls(Small(), "fc").attribute(torch.randn(2, 3, 24, 16), 1)


def test_a_model_without_any_spatial_layer_is_an_error() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16, 8), nn.ReLU(), nn.Linear(8, 5))
    for method in (GradCAM(flat), EigenCAM(flat), FusedCAM(flat)):
        with pytest.raises(LayerError, match="spatial output"):
            method.attribute(torch.randn(1, 3, 4, 4), 1)


def test_a_layer_of_a_single_place_is_read_where_it_is_named_and_never_chosen() -> None:
    model, x = Small(), torch.randn(1, 3, 24, 16)
    model.layer2[0] = nn.Conv2d(6, 8, (24, 16))
    assert GradCAM(model, "layer2").attribute(x, 1).values.shape == (1, 1, 1, 1)
    assert GradCAM(model).attribute(x, 1).layer == "layer1"


# The survey.


def counted(model: nn.Module) -> list[int]:
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    return calls


def test_the_survey_is_remembered_for_a_model_and_a_shape() -> None:
    model, x = Small(), torch.randn(2, 3, 24, 16)
    calls = counted(model)
    GradCAM(model).attribute(x, 1)
    assert len(calls) > 1
    calls.clear()
    GradCAM(model).attribute(x[:1] + 1, 2)
    FusedCAM(model).attribute(x, 1)
    assert len(calls) == 2
    calls.clear()
    GradCAM(model).attribute(torch.randn(1, 3, 32, 32), 1)
    assert len(calls) > 1


def test_the_survey_is_made_anew_when_the_model_is_changed() -> None:
    model, x = Small(), torch.randn(1, 3, 24, 16)
    assert GradCAM(model).attribute(x, 1).layer == "layer2"
    model.layer2 = nn.Sequential(model.layer2, nn.Conv2d(8, 8, 1))
    assert GradCAM(model).attribute(x, 1).values.shape[-2:] == (12, 8)
    model.layer2.append(nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU()))
    assert GradCAM(model).attribute(x, 1).values.shape[-2:] == (6, 4)


def test_a_survey_of_a_head_of_zeros_is_not_kept_for_the_weights_that_come_later() -> None:
    """torchvision's vision transformers begin with a head of zeros: nothing has a gradient until they are loaded."""
    model, x = vision_transformer(), torch.randn(1, 3, 32, 48)
    nn.init.zeros_(model.heads.head.weight)
    GradCAM(model).attribute(x, 1)
    nn.init.normal_(model.heads.head.weight)
    found = GradCAM(model).attribute(x, 1)
    assert found.values.any()
    assert found.layer == "encoder.layers.encoder_layer_1.ln_1"


def test_the_survey_leaves_the_model_as_it_was() -> None:
    model = Small().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    look(model, torch.randn(1, 3, 24, 16, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(not module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


# Real architectures, with random weights: which layer is chosen, and whether its places are in order.


def torchvision_model(name: str) -> nn.Module:
    import torchvision

    made: nn.Module = getattr(torchvision.models, name)(weights=None)
    return made


def small_swin() -> nn.Module:
    """torchvision's own class, narrower and not as deep."""
    from torchvision.models import SwinTransformer

    made: nn.Module = SwinTransformer([4, 4], 24, [2, 2, 2, 2], [3, 6, 12, 24], [7, 7], num_classes=10)
    return made


def vision_transformer() -> Any:
    """torchvision's own class, smaller; its head is zeros without weights."""
    from torchvision.models import VisionTransformer

    class NotSquare(VisionTransformer):  # type: ignore[misc]
        """The original insists on a square input, which this is not."""

        def _process_input(self, x: Tensor) -> Tensor:
            out: Tensor = self.conv_proj(x)
            return out.flatten(2).transpose(1, 2)

    model = NotSquare(32, 8, 2, 4, 64, 128, num_classes=10)
    model.encoder.pos_embedding = nn.Parameter(torch.randn(1, 1 + 4 * 6, 64) * 0.02)
    nn.init.normal_(model.heads.head.weight)
    return model


def timm_model(name: str, **options: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, **options)
    for module in (getattr(model, "head", None), getattr(model, "head_dist", None)):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)  # some begin as zeros
    return model


@dataclass(frozen=True)
class Case:
    """A network, its input, and how the layer that is found by itself should be read."""

    make: Callable[[], nn.Module]
    size: tuple[int, int]
    layer: str
    layout: Layout
    off_by: float = 0  # how many cells a convolution's padding may move the strongest change
    shape: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "resnet18": Case(lambda: torchvision_model("resnet18"), (128, 192), "layer4", Layout("NCHW", (4, 6)), 1),
    "vgg11": Case(small_vgg, (96, 160), "features", Layout("NCHW", (3, 5)), 1),
    "densenet121": Case(lambda: torchvision_model("densenet121"), (96, 160), "features", Layout("NCHW", (3, 5)), 1),
    "mobilenet_v3_small": Case(
        lambda: torchvision_model("mobilenet_v3_small"), (128, 192), "features", Layout("NCHW", (4, 6)), 1
    ),
    "torchvision swin_t": Case(small_swin, (96, 160), "permute", Layout("NCHW", (3, 5))),
    "torchvision vit": Case(
        vision_transformer, (32, 48), "encoder.layers.encoder_layer_1.ln_1", Layout("NTC", (4, 6), range(1, 25))
    ),
    "vit_tiny": Case(
        lambda: timm_model("vit_tiny_patch16_224", img_size=(96, 160), depth=3),
        (96, 160),
        "blocks.2.norm1",
        Layout("NTC", (6, 10), range(1, 61)),
    ),
    "deit_tiny_distilled": Case(
        lambda: timm_model("deit_tiny_distilled_patch16_224", img_size=(160, 96), depth=3),
        (160, 96),
        "blocks.2.norm1",
        Layout("NTC", (10, 6), range(2, 62)),
    ),
    "dinov2 with registers": Case(
        lambda: timm_model("vit_small_patch14_reg4_dinov2", img_size=70, depth=3),
        (70, 70),
        "blocks.2.norm1",
        Layout("NTC", (5, 5), range(5, 30)),
    ),
    "dinov2 with registers, not square": Case(
        # 45 tokens are 5 and 5 x 8; 5 x 9 would fit the input nearly as well.
        lambda: timm_model("vit_small_patch14_reg4_dinov2", img_size=(70, 112), depth=3),
        (70, 112),
        "blocks.2.norm1",
        Layout("NTC", (5, 8), range(5, 45)),
    ),
    "swin_tiny": Case(
        lambda: timm_model("swin_tiny_patch4_window7_224", img_size=(96, 160), embed_dim=24, depths=(2, 2, 2, 2)),
        (96, 160),
        "norm",
        Layout("NHWC", (3, 5)),
    ),
    "mixer_s16": Case(
        lambda: timm_model("mixer_s16_224", img_size=96), (96, 96), "norm", Layout("NTC", (6, 6), range(36))
    ),
    "convnext_atto": Case(lambda: timm_model("convnext_atto"), (96, 160), "stages", Layout("NCHW", (3, 5))),
    "efficientnet_lite0": Case(
        lambda: timm_model("tf_efficientnet_lite0"), (160, 256), "bn2", Layout("NCHW", (5, 8)), 2
    ),
}


@cache
def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name].make().eval()


def maps(model: nn.Module, name: str, x: Tensor) -> Tensor:
    """The output of a layer as maps, read by the toolkit."""
    outputs: list[Tensor] = []
    handle = find(model, name)[1].register_forward_hook(lambda module, inputs, output: outputs.append(output.clone()))
    with torch.no_grad():
        model(x)
    handle.remove()
    with prepared_for_attribution(model):
        return layout_of(model, name, outputs[-1], x)(outputs[-1])


def misplaced(model: nn.Module, name: str, size: tuple[int, int], off_by: float) -> list[str]:
    """Where the map of a layer changes most when one patch of the image is changed, and that is another place."""
    x = torch.randn(1, 3, *size)
    plain = maps(model, name, x)
    height, width = plain.shape[-2:]
    wrong = []
    for row, column in {(0, 0), (0, width - 1), (height - 1, 0), (height - 1, width - 1), (height // 3, width // 2)}:
        changed = x.clone()
        rows = slice(size[0] * row // height, size[0] * (row + 1) // height)
        columns = slice(size[1] * column // width, size[1] * (column + 1) // width)
        changed[..., rows, columns] += 3 * torch.randn_like(changed[..., rows, columns])
        change = (maps(model, name, changed) - plain).pow(2).sum(1)[0]
        if not change.any():
            wrong.append(f"{name} does not depend on the image")
            continue
        found = divmod(int(change.argmax()), width)
        if max(abs(found[0] - row), abs(found[1] - column)) > off_by:
            wrong.append(f"{name}: a change at {(row, column)} shows at {found}")
    return wrong


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_the_layer_that_is_found_by_itself_is_read_as_it_lies_in_memory(name: str) -> None:
    case = CASES[name]
    found = look(made(name), torch.randn(1, 3, *case.size))
    assert found.default == case.layer
    assert next(each.layout for each in found.candidates if each.name == found.default) == case.layout


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_a_change_in_a_corner_of_the_image_shows_in_that_corner_of_the_map(name: str) -> None:
    case = CASES[name]
    assert misplaced(made(name), case.layer, case.size, case.off_by) == []


@pytest.mark.parametrize("name", ["torchvision swin_t", "swin_tiny", "convnext_atto", "densenet121"])
@pytest.mark.slow
def test_the_stages_that_a_fusion_reads_are_in_order_too(name: str) -> None:
    case = CASES[name]
    stages = look(made(name), torch.randn(1, 3, *case.size)).last_per_resolution()
    assert len(stages) == 3
    assert [each for stage in stages for each in misplaced(made(name), stage, case.size, 1)] == []


@pytest.mark.parametrize("name", CASES)
def test_the_map_of_the_layer_is_not_empty_and_fits_the_input(name: str) -> None:
    case = CASES[name]
    found = GradCAM(made(name)).attribute(torch.randn(2, 3, *case.size), [1, 2])
    assert found.layer == case.layer
    assert found.values.shape == (2, 1, *case.layout.grid)
    assert (found.values.flatten(1).std(1) > 0).all()


class Unrolled(nn.Module):
    """Two stages of tokens in the order of Hiera: the four of each later cell lie apart, so that pooling is a maximum.

    Only after the pooling does the order of the tokens follow the picture.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.stage1 = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
        self.stage2 = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.patches(x)  # (N, K, h, w)
        n, k, h, w = maps.shape
        tokens = maps.reshape(n, k, h // 2, 2, w // 2, 2).permute(0, 3, 5, 2, 4, 1).reshape(n, h * w, k)
        pooled = self.stage1(tokens).reshape(n, 4, -1, k).amax(1)
        out: Tensor = self.head(self.stage2(pooled).tanh().mean(1))
        return out


def test_tokens_in_an_order_of_their_own_are_read_in_that_of_the_image() -> None:
    model = Unrolled().eval()
    found = look(model, torch.randn(1, 3, 64, 64))
    assert found.default == "stage2"
    assert found.last_per_resolution() == ("stage1", "stage2")
    assert [each for stage in ("stage1", "stage2") for each in misplaced(model, stage, (64, 64), 0)] == []


class Tabled(Small):
    """A stage with a table of positions of its own, as Swin V2 has it, which no image enters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 6))
        rows, columns = torch.meshgrid(torch.arange(15.0), torch.arange(15.0), indexing="ij")
        self.register_buffer("positions", torch.stack([rows, columns], 2)[None])

    def forward(self, x: Tensor) -> Tensor:
        bias = self.table(self.positions).mean((1, 2))[:, :, None, None]
        out: Tensor = self.fc(self.layer2(self.layer1(x) + bias).mean((2, 3)))
        return out


def test_the_stages_show_the_image_and_not_a_table_of_positions() -> None:
    model, x = Tabled().eval(), torch.randn(1, 3, 32, 32)
    assert look(model, x).last_per_resolution() == ("layer1", "layer2")


class Windowed(nn.Module):
    """A convolution's map, padded and cut into windows for a block of tokens, as in DaViT."""

    def __init__(self) -> None:
        super().__init__()
        self.stage1 = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.ReLU())
        self.stage2 = nn.Sequential(nn.Conv2d(8, 8, 2, stride=2), nn.ReLU())
        self.window = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.last = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.stage2(self.stage1(x))  # (N, 8, 3, 5)
        padded = nn.functional.pad(maps, (0, 2, 0, 4))  # to one window of 7 x 7
        tokens = self.window(padded.flatten(2).transpose(1, 2))
        back = tokens.transpose(1, 2).reshape(len(x), 8, 7, 7)[..., :3, :5]
        out: Tensor = self.head(self.last(back).mean((2, 3)))
        return out


def test_the_stages_hold_no_windows_of_tokens() -> None:
    model, x = Windowed().eval(), torch.randn(1, 3, 24, 40)
    assert look(model, x).last_per_resolution() == ("stage1", "last")


# Layouts on their own.


def test_a_layout_moves_no_place() -> None:
    places = torch.arange(2 * 4 * 3 * 5, dtype=torch.float32).reshape(2, 4, 3, 5)  # (N, K, h, w)
    assert torch.equal(Layout("NCHW", (3, 5))(places), places)
    assert torch.equal(Layout("NHWC", (3, 5))(places.permute(0, 2, 3, 1)), places)
    for prefix in (0, 1, 2, 5):
        tokens = torch.cat([torch.full((2, prefix, 4), -1.0), places.flatten(2).transpose(1, 2)], 1)
        assert torch.equal(Layout("NTC", (3, 5), range(prefix, prefix + 15))(tokens), places)


@pytest.mark.parametrize("size", [(64, 64), (64, 96), (96, 64), (64, 256), (256, 64), (70, 112)])
@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
def test_tokens_are_counted_by_the_grid_that_the_model_was_seen_to_use(size: tuple[int, int], prefix: int) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 8, 8, stride=8)
            self.block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.patches(x).flatten(2).transpose(1, 2)
            tokens = self.block(torch.cat([tokens.new_zeros(len(tokens), prefix, 8), tokens], 1))
            out: Tensor = self.head(tokens.tanh().mean(1))
            return out

    model = Tokens().eval()
    found = GradCAM(model).attribute(torch.randn(1, 3, *size), 1)
    assert found.layer == "block"
    assert found.values.shape[-2:] == (size[0] // 8, size[1] // 8)
    assert misplaced(model, "block", size, 0) == []


# The layer is one of the explained image.


class Pathways(nn.Module):
    """Two branches that join in the classifier: of an image and of its depth, or of two views of one image."""

    def __init__(self, view: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.view = view
        self.one, self.two = (
            nn.Sequential(nn.Conv2d(channels, 8, 3, 2, 1), nn.ReLU()) for channels in (3, 3 if view else 1)
        )
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor, depth: Tensor | None = None) -> Tensor:
        maps = self.one(x), self.two(self.view(x) if self.view else depth)
        out: Tensor = self.fc(torch.cat([own.mean((2, 3)) for own in maps], 1))
        return out


READERS = ["grad_cam", "layer_cam", "eigen_cam", "ablation_cam", "fused_cam", "refine_cam", "guided_grad_cam"]


@pytest.mark.parametrize("method", READERS)
def test_the_default_layer_is_one_of_the_image_and_not_of_another_argument(method: str) -> None:
    model, x, depth = Pathways().eval(), torch.rand(2, 3, 32, 32), torch.rand(2, 1, 32, 32)
    found = saliency.METHODS[method](model).attribute(x, 1, forward_args=(depth,))
    assert found.layer == "one"
    assert not torch.equal(*found.values)
    other = saliency.METHODS[method](model).attribute(x, 1, forward_args=(depth.flip(0),))
    if method == "layer_cam":  # linear after the layers, so the map does not depend on the depth
        torch.testing.assert_close(found.values, other.values)
    option = {"layers" if method in ("fused_cam", "refine_cam") else "layer": ["two"]}
    with pytest.raises(LayerError, match='"two" does not depend on the explained image'):
        saliency.METHODS[method](model, **option).attribute(x, 1, forward_args=(depth,))


def test_features_are_those_of_the_image() -> None:
    model, x, depth = Pathways().eval(), torch.rand(2, 3, 32, 32), torch.rand(2, 1, 32, 32)
    found = saliency.features(model, x, forward_args=(depth,))
    assert found.layer == "one"
    torch.testing.assert_close(found.values, model.one(x))
    with pytest.raises(LayerError, match='"two" does not depend on the explained image'):
        saliency.features(model, x, "two", forward_args=(depth,))


@pytest.mark.parametrize(
    ("view", "layer"),
    [
        (lambda x: x, "two"),
        (lambda x: x[..., 8:24, 8:24], "one"),  # a map of a part would be drawn over the whole image
        (lambda x: x.flip(-1), "one"),
    ],
)
@pytest.mark.parametrize("method", ["grad_cam", "fused_cam", "ablation_cam"])
def test_another_branch_of_the_image_is_named(method: str, view: Callable[[Tensor], Tensor], layer: str) -> None:
    model, x = Pathways(view).eval(), torch.rand(1, 3, 32, 32)
    other = {"one": "two", "two": "one"}[layer]
    with pytest.warns(saliency.errors.SaliencyWarning, match=f'also depends on layer "{other}"'):
        assert saliency.METHODS[method](model).attribute(x, 1).layer == layer
    assert GradCAM(model, layer).attribute(x, 1).layer == layer  # without a warning


def test_a_layer_around_which_a_connection_skips_is_not_another_branch() -> None:
    class Skips(Small):
        def forward(self, x: Tensor) -> Tensor:
            early = self.layer1(x)
            out: Tensor = self.fc(torch.cat([early.mean((2, 3))[:, :4], self.layer2(early).mean((2, 3))[:, :4]], 1))
            return out

    assert GradCAM(Skips().eval()).attribute(torch.rand(1, 3, 24, 16), 1).layer == "layer2"


# Segmentation.


@pytest.mark.parametrize("channels", [1, 2, 3, 8])
@pytest.mark.parametrize("method", ["grad_cam", "fused_cam", "ablation_cam", "excitation_backprop"])
def test_the_layer_of_a_map_of_scores_feeds_its_last_weights_with_any_number_of_channels(
    method: str, channels: int
) -> None:
    convolutions = nn.Conv2d(3, channels, 3, 2, 1), nn.ReLU(), nn.Conv2d(channels, channels, 1)
    model, x = nn.Sequential(*convolutions, nn.Upsample(scale_factor=2)).eval(), torch.rand(1, 3, 32, 32)
    for weight in (model.get_parameter("0.weight"), model.get_parameter("2.weight")):
        weight.data.abs_()
    found = saliency.METHODS[method](model).attribute(x, saliency.region(channels - 1, (4, 4, 20, 20)))
    assert found.layer == "1"
    with pytest.raises(TargetError, match=r"pass saliency.region\(label\)"):
        saliency.METHODS[method](model).attribute(x)


def test_without_a_class_and_without_a_layer_the_class_is_what_is_missing() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3)).eval(), torch.rand(1, 3, 32, 32)
    with pytest.raises(TargetError, match=r"pass saliency.region\(label\)"):
        GradCAM(model).attribute(x)
    with pytest.raises(LayerError, match="no layer of Sequential has a spatial output"):
        GradCAM(model).attribute(x, saliency.region(1, (4, 4, 20, 20)))


@pytest.mark.slow
def test_a_segmentation_model_is_read_before_its_class_scores() -> None:
    torch.manual_seed(0)
    import torchvision

    model = torchvision.models.segmentation.fcn_resnet50(weights=None, weights_backbone=None).eval()
    x = torch.randn(1, 3, 48, 80)
    label = int(model(x)["out"][0].mean((1, 2)).argmax())
    found = GradCAM(model).attribute(x, saliency.region(label))
    assert found.layer == "classifier.2"
    assert found.values.shape == (1, 1, 6, 10)
    assert found.values.any()
    assert found.target == (None,)
    by_hand = nn.Sequential(*list(model.classifier)[:3])(model.backbone(x)["out"]).detach().requires_grad_()
    logits = nn.functional.interpolate(
        nn.Sequential(*list(model.classifier)[3:])(by_hand), (48, 80), mode="bilinear", align_corners=False
    )
    inside = logits.argmax(1) == label
    assert inside.any()
    (gradient,) = torch.autograd.grad(logits[:, label][inside].sum(), by_hand)
    cam = (gradient.mean((2, 3), keepdim=True) * by_hand.detach()).sum(1, keepdim=True)
    ratio = found.values / cam
    assert torch.allclose(ratio, ratio.flatten()[0].expand_as(ratio), rtol=1e-2), "the region's sum or mean"


# Detectors: one dictionary per image, and a head that does not lie on the way to the score.


class Pyramid(nn.Module):
    """Two levels of features, the coarse one added to the fine one."""

    out_channels = 8

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        fine = self.body(x)
        deep = self.deep(fine)
        return {"0": fine + nn.functional.interpolate(deep, fine.shape[-2:]), "1": deep}


def detector(name: str) -> nn.Module:
    """A detector of torchvision with random weights, which finds boxes in any image."""
    from torchvision.models import detection
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    anchors = AnchorGenerator(((16,), (32,)), ((0.5, 0.75, 1.0, 2.0),) * 2)
    size = {"min_size": 64, "max_size": 64}
    if name == "retinanet":
        model = detection.RetinaNet(Pyramid(), 3, anchor_generator=anchors, score_thresh=0.0, **size)
    else:
        model = detection.FasterRCNN(Pyramid(), 3, rpn_anchor_generator=anchors, box_score_thresh=0.0, **size)
    made: nn.Module = model.eval()
    return made


def summed(key: str) -> Callable[[Any], Tensor]:
    return lambda output: torch.stack([each[key].sum() for each in output])


@pytest.mark.filterwarnings("ignore:.*below the rounding error")  # untrained heads hardly change the scores
@pytest.mark.parametrize("key", ["scores", "boxes"])
@pytest.mark.parametrize("name", ["retinanet", "faster_rcnn"])
@pytest.mark.parametrize("method", [GradCAM, FusedCAM])
def test_the_layer_of_a_detector_is_the_last_one_that_the_score_is_computed_from(
    method: type[GradCAM | FusedCAM], name: str, key: str
) -> None:
    model, x = detector(name), torch.rand(2, 3, 64, 64)
    found = method(model).attribute(x, summed(key))
    assert found.layer == ("backbone, backbone.deep" if method is FusedCAM else "backbone")
    assert found.values.flatten(1).any(1).all()


@pytest.mark.filterwarnings("ignore:layer .* is called 2 times")
@pytest.mark.parametrize("method", [GradCAM, saliency.ShapleyCAM])
def test_a_layer_that_the_score_is_not_computed_from_is_named_and_the_target_is_not_blamed(
    method: type[GradCAM],
) -> None:
    model, x = detector("retinanet"), torch.rand(1, 3, 64, 64)
    # It runs after the scores: nothing is recorded where they are computed.
    with pytest.raises(LayerError, match=r'depend on layer "head\.regression_head\.conv".*pass no layer'):
        method(model, "head.regression_head.conv").attribute(x, summed("scores"))
    with pytest.raises(LayerError, match=r'depend on layer "head\.classification_head\.conv"'):
        method(model, "head.classification_head.conv").attribute(x, summed("boxes"))
    for layer in (None, "backbone"):
        with pytest.raises(TargetError, match="detaches"):
            method(model, layer).attribute(x, lambda output: summed("scores")(output).detach())


def test_a_detector_that_found_nothing_has_no_layer() -> None:
    model, x = detector("retinanet"), torch.rand(1, 3, 64, 64)
    model.score_thresh = 1.0  # type: ignore[assignment]
    with pytest.raises(TargetError, match="nothing was detected"):
        GradCAM(model).attribute(x, summed("scores"))


@pytest.mark.slow
def test_the_example_of_a_target_for_a_detector_works_as_it_is_written() -> None:
    model, x = detector("faster_rcnn"), torch.rand(2, 3, 64, 64)
    with pytest.raises(TargetError, match="for example") as caught:
        GradCAM(model).attribute(x)
    example = eval(str(caught.value).partition("example target=")[2], {"saliency": saliency})  # noqa: S307
    assert GradCAM(model).attribute(x, example).scores.shape == (2,)


def test_shapley_cam_says_that_a_detectors_pooling_has_no_second_derivative() -> None:
    with pytest.raises(NotApplicableError, match=r"roi_align.*grad_cam"):
        saliency.ShapleyCAM(detector("faster_rcnn")).attribute(torch.rand(1, 3, 64, 64), summed("scores"))


# A preset of torchvision, which is a module.


def test_a_preset_on_the_model_is_not_a_layer() -> None:
    from torchvision.transforms._presets import ImageClassification

    plain, model = tiny_model().eval(), tiny_model().eval()
    model.preprocess = ImageClassification(crop_size=16)
    with pytest.raises(LayerError) as caught:
        GradCAM(model, "preprocess")
    assert "preprocess," not in str(caught.value)
    assert list(select_layers(model, "*")) == list(select_layers(plain, "*"))
    assert str(layer_table(model, images(1), times=0)) == str(layer_table(plain, images(1), times=0))
    expected = GradCAM(plain).attribute(images(1), 0)
    assert torch.equal(GradCAM(model).attribute(images(1), 0).values, expected.values)
    assert GradCAM(model).preprocess == Preprocess.from_torchvision(model.preprocess)
    own = OwnForward(lambda model, x: model.preprocess(x).mean((2, 3)), preprocess=nn.Conv2d(3, 4, 3))
    assert GradCAM(own, "preprocess").layer == "preprocess"  # a layer of the network's own


@pytest.mark.parametrize("dims", [(-1,), (-2,), (-2, -1)])
def test_the_layers_of_a_network_that_averages_over_flips_are_no_default(dims: tuple[int, ...]) -> None:
    class Flips(nn.Module):
        """The mean of the scores of an image and of its flipped copy."""

        def __init__(self) -> None:
            super().__init__()
            self.net = tiny_model()

        def forward(self, x: Tensor) -> Tensor:
            mean: Tensor = (self.net(x) + self.net(x.flip(dims))) / 2
            return mean

    model = Flips().eval()
    with pytest.raises(LayerError, match=r"no layer of Flips has a spatial output, not mirrored, .*the network inside"):
        GradCAM(model).attribute(images(1), 0)
    assert GradCAM(model.net).attribute(images(1), 0).layer
    with pytest.warns(saliency.errors.SaliencyWarning, match="is called 2 times"):
        assert GradCAM(model, "net.last").attribute(images(1), 0).layer == "net.last"
