"""Relevance of the image to the queries of a decoder equals the paper's formulas, spelled out with whole matrices."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import saliency
from saliency import AttentionRollout, CheferAttention, CheferLRP
from saliency.errors import NotApplicableError
from saliency.testing import images

X = images(2)  # 16 patches


class TinyDetr(nn.Module):
    """Class scores of object queries, which attend to each other and to the patches, as in DETR."""

    def __init__(self, objects: int = 5, *, weights: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
        self.objects = nn.Parameter(torch.randn(objects, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, objects, classes)."""
        tokens = self.encoder(self.patches(x).flatten(2).transpose(1, 2))
        return cast("Tensor", self.head(self.decoder(self.objects.expand(len(x), -1, -1), tokens)))


def detr(objects: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return TinyDetr(objects).eval()


def third_object(output: Tensor) -> Tensor:
    return output[:, 2, 1]


def weighted(item: Any) -> Tensor:
    """Equation 5."""
    return cast("Tensor", (item.probabilities * item.gradient).clamp(min=0).mean(1))


def normalised(relevance: Tensor) -> Tensor:
    """Equations 8 and 9."""
    others = relevance - torch.eye(relevance.shape[-1])
    sums = others.sum(-1, keepdim=True)
    return torch.where(sums == 0, 0, others / sums) + torch.eye(relevance.shape[-1])


@pytest.mark.parametrize("frozen", [False, True])
def test_a_decoder_follows_the_papers_equations(frozen: bool) -> None:
    model = detr()
    calls = saliency.attention(model, X, third_object)
    assert [item.shape[2:] for item in calls] == [(16, 16), (16, 16), (5, 16), (5, 5), (5, 16)]
    first, second, cross, own, last = map(weighted, calls)
    among_tokens = torch.eye(16) + first
    among_tokens = normalised(among_tokens + second @ among_tokens)
    relevance = cross @ among_tokens
    relevance = relevance + own @ relevance
    relevance = relevance + normalised(torch.eye(5) + own).mT @ last @ among_tokens
    found = CheferAttention(model.requires_grad_(not frozen)).attribute(X, third_object)
    torch.testing.assert_close(found.values.flatten(1), relevance[:, 2])


def test_a_pooling_head_is_a_decoder_with_one_query() -> None:
    timm: Any = pytest.importorskip("timm")
    torch.manual_seed(0)
    options = {"depth": 2, "num_classes": 5, "img_size": 64}
    model = timm.create_model("vit_base_patch16_siglip_224", **options).eval()
    x = images(2, (64, 64))
    first, second, pooling = map(weighted, saliency.attention(model, x, 1))
    among_tokens = torch.eye(16) + first
    expected = pooling @ normalised(among_tokens + second @ among_tokens)
    torch.testing.assert_close(CheferAttention(model).attribute(x, 1).values.flatten(1), expected[:, 0])


def test_relevance_of_a_decoder_is_that_of_each_image() -> None:
    model = detr().double()
    together = CheferLRP(model).attribute(X.double(), third_object).values
    alone = [CheferLRP(model).attribute(x[None].double(), third_object).values for x in X]
    torch.testing.assert_close(together, torch.cat(alone))


def test_as_many_queries_as_tokens_are_refused() -> None:
    with pytest.raises(NotApplicableError, match="TinyDetr has 16 tokens and the same number of queries"):
        CheferAttention(detr(16)).attribute(X, third_object)


def test_other_methods_refuse_a_decoder() -> None:
    with pytest.raises(NotApplicableError, match="not among all tokens in each block"):
        AttentionRollout(detr()).attribute(X, third_object)


def test_detr_of_transformers_is_read() -> None:
    transformers: Any = pytest.importorskip("transformers")
    backbone = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 7}
    config = transformers.DetrConfig(backbone_config=backbone, use_timm_backbone=False, **sizes, **heads)
    torch.manual_seed(0)
    model = transformers.DetrForObjectDetection(config).eval()
    x = images(1, (32, 48))
    found = CheferAttention(model).attribute(x, lambda output: output.logits[:, 2, 1])
    assert found.values.shape == (1, 1, 4, 6)
    assert found.values.std() > 0
