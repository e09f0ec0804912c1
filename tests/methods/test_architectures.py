"""A sample of the networks that `make zoo` judges, one of each kind."""

import warnings

import pytest

from benchmarks.zoo import judge

# Plain and in-place ReLUs, functional ones, ReLU6, Hardswish, GELU; channels first and last, tokens with and without
# tokens in front, tokens that change their order, and attention of every sort.
SAMPLE = (
    "torchvision/alexnet",
    "torchvision/mobilenet_v2",
    "torchvision/shufflenet_v2_x0_5",
    "torchvision/squeezenet1_1",
    "torchvision/swin_t",
    "timm/convnext_atto",
    "timm/deit_tiny_distilled_patch16_224",
    "timm/efficientvit_b0",
    "timm/hiera_tiny_224",
    "timm/mobilevit_xxs",
    "timm/res2net50_26w_4s",
    "timm/tf_mobilenetv3_large_minimal_100",
)


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.slow
def test_guided_backprop_is_exact_or_refused_and_the_layer_found_by_itself_serves(name: str) -> None:
    with warnings.catch_warnings():
        # A library's own, as of timm on a deprecated name.
        warnings.simplefilter("ignore")
        row = judge(name)
    assert row.passed, row
