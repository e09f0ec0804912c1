"""A sample of the networks that `make zoo` judges, one of each kind."""

import warnings

import pytest

# Plain and in-place ReLUs, functional ones, ReLU6, Hardswish, GELU; channels first and last, tokens with and without
# tokens in front, tokens that change their order, and attention of every sort.
SAMPLE = (
    "torchvision/mobilenet_v2",
    "torchvision/shufflenet_v2_x0_5",
    "torchvision/squeezenet1_1",
    "torchvision/swin_t",
    "timm/convnext_atto",
    "timm/deit_tiny_distilled_patch16_224",
    "timm/efficientvit_b0",
    "timm/hiera_tiny_224",
    "timm/mobilevit_xxs",
    "timm/tf_mobilenetv3_large_minimal_100",
)


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.slow
def test_guided_backprop_is_exact_or_refused_and_the_layer_found_by_itself_serves(name: str) -> None:
    with warnings.catch_warnings():
        # A library's own, as of timm on a deprecated name.
        warnings.simplefilter("ignore")
        row = pytest.importorskip("benchmarks.zoo", exc_type=ImportError).judge(name)
    assert row.passed, row


# Class and register tokens, rotary positions, relative biases and pooling heads, on rectangular images; windows,
# stages and channels; attention that mixes heads.
TRANSFORMERS = (
    "timm/cait_xxs24_224",
    "timm/deit_tiny_distilled_patch16_224",
    "timm/eva02_tiny_patch14_224",
    "timm/levit_128s",
    "timm/vit_pe_core_tiny_patch16_384",
    "timm/xcit_nano_12_p16_224",
    "transformers/Dinov2WithRegisters",
    "open_clip/coca_ViT-B-32",
)


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.filterwarnings("ignore:attention was read in 2 of 4 layers")  # of CaiT, whose other layers mix heads
@pytest.mark.slow
def test_attention_is_exact_and_its_methods_are_right_or_refused(name: str) -> None:
    zoo_attention = pytest.importorskip("benchmarks.zoo_attention", exc_type=ImportError)
    row = zoo_attention.judge(name, zoo_attention.builders()[name])
    assert row.passed, row
    assert "exact" in row.attention
