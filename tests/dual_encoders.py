"""Small models of images and texts of open_clip and transformers, with random weights and tokenizers of few words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from saliency import DualEncoder, Preprocess
from tests.relevance.vision_transformers import drawn

# More words than the image towers have positions, as in the models that people use.
WORDS = ["<pad>", "<start>", "a", "photo", "of", "cat", "dog", "red", "bus", *map(str, range(20)), "<end>"]
END = len(WORDS) - 1
TEXT = {"context_length": 8, "vocab_size": len(WORDS), "width": 16, "heads": 2, "layers": 2}
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


class WordTokenizer:
    """As those of open_clip: one token per word, padded with zeros; the end has the highest number."""

    def __call__(self, prompts: list[str], context_length: int = 8) -> Tensor:
        rows = [[1, *(WORDS.index(word) for word in prompt.split()), END] for prompt in prompts]
        cut = [[*row[: context_length - 1], END] if len(row) > context_length else row for row in rows]
        return torch.tensor([row + [0] * (context_length - len(row)) for row in cut])

    def decode(self, tokens: list[int]) -> str:
        return "".join(f"{WORDS[token]} " for token in tokens)


def tokenizer(pad: str = "<end>") -> Any:
    """A tokenizer of transformers that puts a start and an end around the words."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast.post_processor = tokenizers.processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 1), ("<end>", END)]
    )
    special = {"pad_token": pad, "bos_token": "<start>", "eos_token": "<end>", "unk_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **special)


def config(kind: str = "CLIP") -> Any:
    """The configuration of a small model of transformers."""
    transformers = pytest.importorskip("transformers")
    text = {**TOWER, "vocab_size": len(WORDS), "max_position_embeddings": 8, "eos_token_id": END, "pad_token_id": 0}
    text |= {"bos_token_id": 1, "projection_size": 16}
    sizes = {} if kind == "Siglip" else {"projection_dim": 8}
    return getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config={**TOWER, "image_size": 32, "patch_size": 8}, **sizes
    )


def _of_open_clip(vision: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    open_clip = pytest.importorskip("open_clip")
    return drawn(lambda: DualEncoder(open_clip.CLIP(8, vision, TEXT), WordTokenizer()), 32)


def _of_transformers(kind: str) -> tuple[nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    pad = "<pad>" if kind == "Siglip" else "<end>"
    return drawn(lambda: DualEncoder(getattr(transformers, f"{kind}Model")(config(kind)), tokenizer(pad)), 32)


_VIT = {"layers": 2, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 32}
_BUILDERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "open_clip ViT": partial(_of_open_clip, _VIT),
    "open_clip ResNet": partial(
        _of_open_clip, {"layers": [1, 1, 1, 1], "width": 8, "image_size": 32, "head_width": 32}
    ),
    "transformers CLIP": partial(_of_transformers, "CLIP"),
    "transformers SigLIP": partial(_of_transformers, "Siglip"),
}

# As MODELS of tests.relevance.vision_transformers.
MODELS = {name: cache(build) for name, build in _BUILDERS.items()}


def for_photos() -> nn.Module:
    """A model with a preprocessing, as `--model tests.dual_encoders:for_photos`."""
    model: Any = copy.deepcopy(MODELS["open_clip ViT"]()[0])
    model.preprocess = Preprocess(size=(32, 32), resize=32)
    return model  # type: ignore[no-any-return]
