"""Small vision-language models of transformers, with random weights and processors of few words."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import saliency

QUESTION = "what color is the car"
WORDS = "what color is the car a red blue circle square left right of user assistant".split()  # noqa: SIM905
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TEXT = {**TOWER, "num_key_value_heads": 1, "max_position_embeddings": 1024}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE {% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def scene(seed: int = 0, size: tuple[int, int] = (140, 90)) -> Image.Image:
    """Return a smooth image without symmetry."""
    coarse = np.random.default_rng(seed).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def tokenizer(*special: str, **named: str) -> Any:
    """Return a tokenizer of words, with some special tokens; those with a name become attributes."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    tokens = ["<pad>", "<unk>", "<s>", "</s>", *special, *named.values()]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*tokens, *WORDS]))}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=tokens[1]))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    ends = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), tokens, strict=False))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **ends, extra_special_tokens=named or [*special])


def byte_tokenizer(*special: str) -> Any:
    """Return a tokenizer with one token for each byte of a text, as those of Qwen and Llama for rare characters."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    tokens = ["<pad>", "<unk>", "<s>", "</s>", *special]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    fast = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate([*tokens, *alphabet])}, []))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    ends = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), tokens, strict=False))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **ends, extra_special_tokens=[*special])


def llava(edge: int = 28, patch: int = 7, words: Any = None, **tower: int) -> tuple[nn.Module, Any]:
    """Return LLaVA: one square crop."""
    t: Any = pytest.importorskip("transformers")

    words, sizes = words or tokenizer("<image>"), {**TOWER, **tower}
    config = t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(**sizes, image_size=edge, patch_size=patch),
        text_config=t.LlamaConfig(**{**TEXT, **tower}, vocab_size=len(words)),
        image_token_index=words.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    images = t.CLIPImageProcessor(size={"shortest_edge": edge}, crop_size={"height": edge, "width": edge})
    processor = t.LlavaProcessor(
        images,
        words,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    )
    return t.LlavaForConditionalGeneration(config), processor


def llava_next() -> tuple[nn.Module, Any]:
    """Return LLaVA-NeXT: a view of the whole image, and tiles of a padded one."""
    t: Any = pytest.importorskip("transformers")

    words, grids = tokenizer("<image>"), [[28, 56], [56, 28], [56, 56]]
    vision = t.CLIPVisionConfig(**TOWER, image_size=28, patch_size=7)
    config = t.LlavaNextConfig(
        vision_config=vision,
        text_config=t.LlamaConfig(**TEXT, vocab_size=len(words)),
        image_token_index=words.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        image_grid_pinpoints=grids,
    )
    images = t.LlavaNextImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=grids
    )
    processor = t.LlavaNextProcessor(
        images,
        words,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    )
    return t.LlavaNextForConditionalGeneration(config), processor


def _qwen(kind: str, patch: int, vision: dict[str, Any]) -> tuple[nn.Module, Any]:
    t: Any = pytest.importorskip("transformers")

    words = tokenizer("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    ids = {
        f"{name}_token_id": words.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in {
            "image": "image_pad",
            "video": "video_pad",
            "vision_start": "vision_start",
            "vision_end": "vision_end",
        }.items()
    }
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {**TEXT, "vocab_size": len(words), "rope_parameters": rope, "rope_scaling": rope, "head_dim": 8}
    config = getattr(t, f"{kind}Config")(
        vision_config={"patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2, **vision},
        text_config=text,
        **ids,
    )
    images = t.Qwen2VLImageProcessor(patch_size=patch, merge_size=2, size={"shortest_edge": 400, "longest_edge": 4000})
    video = getattr(t, "Qwen3VLVideoProcessor" if kind.startswith("Qwen3") else "Qwen2VLVideoProcessor")()
    processor = getattr(t, f"{kind.replace('_', '_')}Processor")(
        images,
        words,
        video,
        chat_template=TEMPLATE.replace("IMAGE", "<|vision_start|> <|image_pad|> <|vision_end|>"),
    )
    return getattr(t, f"{kind}ForConditionalGeneration")(config), processor


def qwen2_vl() -> tuple[nn.Module, Any]:
    """Return Qwen2-VL: merged patches of an image of any size."""
    return _qwen("Qwen2VL", 4, {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "mlp_ratio": 2})


def qwen2_5_vl() -> tuple[nn.Module, Any]:
    """Return Qwen2.5-VL, which attends in windows."""
    vision = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 16}
    return _qwen("Qwen2_5_VL", 4, {**vision, "window_size": 16, "fullatt_block_indexes": [1]})


def qwen3_vl() -> tuple[nn.Module, Any]:
    """Return Qwen3-VL, whose vision enters several layers of the language model."""
    vision = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 16}
    return _qwen("Qwen3VL", 4, {**vision, "deepstack_visual_indexes": [0], "num_position_embeddings": 16})


def internvl() -> tuple[nn.Module, Any]:
    """Return InternVL: tiles and a thumbnail."""
    t: Any = pytest.importorskip("transformers")

    special = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>", "video": "<video>"}
    words = tokenizer(**{f"{name}_token": token for name, token in special.items()})
    config = t.InternVLConfig(
        vision_config=t.InternVLVisionConfig(**TOWER, image_size=[28, 28], patch_size=[7, 7]),
        text_config=t.Qwen2Config(**TEXT, vocab_size=len(words)),
        image_token_id=words.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    images = t.GotOcr2ImageProcessor(
        size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=6
    )
    processor = t.InternVLProcessor(
        images,
        words,
        t.InternVLVideoProcessor(),
        image_seq_length=4,
        chat_template=TEMPLATE.replace("IMAGE", "<IMG_CONTEXT>"),
    )
    return t.InternVLForConditionalGeneration(config), processor


def blip_2() -> tuple[nn.Module, Any]:
    """Return BLIP-2: queries that read the image by cross attention."""
    t: Any = pytest.importorskip("transformers")

    words = tokenizer("<image>")
    config = t.Blip2Config(
        vision_config=t.Blip2VisionConfig(**TOWER, image_size=28, patch_size=7, initializer_range=0.3),
        qformer_config=t.Blip2QFormerConfig(
            **{**TOWER, "num_hidden_layers": 3}, encoder_hidden_size=16, vocab_size=len(words), initializer_range=0.3
        ),
        text_config=t.OPTConfig(
            hidden_size=16,
            ffn_dim=24,
            word_embed_proj_dim=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=len(words),
            max_position_embeddings=64,
        ),
        num_query_tokens=8,
        image_token_index=words.convert_tokens_to_ids("<image>"),
    )
    images = t.BlipImageProcessor(size={"height": 28, "width": 28})
    model = t.Blip2ForConditionalGeneration(config)
    nn.init.normal_(model.query_tokens)  # they are zeros, and patches and queries are equal, without training
    return model, t.Blip2Processor(images, words, num_query_tokens=8)


def paligemma() -> tuple[nn.Module, Any]:
    """Return PaliGemma: one resized image, and a prompt that attends both ways."""
    t: Any = pytest.importorskip("transformers")

    words = tokenizer("<image>")
    images = t.SiglipImageProcessor(size={"height": 28, "width": 28})
    images.image_seq_length = 16
    processor = t.PaliGemmaProcessor(images, words)
    config = t.PaliGemmaConfig(
        vision_config=t.SiglipVisionConfig(**TOWER, image_size=28, patch_size=7, vision_use_head=False),
        text_config=t.GemmaConfig(**TEXT, head_dim=8, vocab_size=len(processor.tokenizer)),
        image_token_index=processor.image_token_id,
        projection_dim=16,
    )
    return t.PaliGemmaForConditionalGeneration(config), processor


def _idefics3(kind: str) -> tuple[nn.Module, Any]:
    t: Any = pytest.importorskip("transformers")

    rows = [f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)]
    words = tokenizer("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *rows)
    config = getattr(t, f"{kind}Config")(
        vision_config={**TOWER, "image_size": 28, "patch_size": 7},
        text_config=t.LlamaConfig(**TEXT, vocab_size=len(words)),
        image_token_id=words.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    images = getattr(t, f"{kind}ImageProcessor")(
        size={"longest_edge": 112}, max_image_size={"longest_edge": 28}, do_image_splitting=True
    )
    more = [t.SmolVLMVideoProcessor()] if kind == "SmolVLM" else []
    processor = getattr(t, f"{kind}Processor")(
        images, words, *more, image_seq_len=4, chat_template=TEMPLATE.replace("IMAGE", "<image>")
    )
    return getattr(t, f"{kind}ForConditionalGeneration")(config), processor


def idefics3() -> tuple[nn.Module, Any]:
    """Return Idefics3: tiles with their row and column, and a view of the whole image."""
    return _idefics3("Idefics3")


def smolvlm() -> tuple[nn.Module, Any]:
    """Return SmolVLM, as Idefics3."""
    module: Any = pytest.importorskip("transformers.models.smolvlm.processing_smolvlm")
    module.num2words = str  # a package that only the prompts of videos need
    return _idefics3("SmolVLM")


def mllama() -> tuple[nn.Module, Any]:
    """Return Llama 3.2 Vision, whose language model reads tiles by cross attention; one token stands for the image."""
    t: Any = pytest.importorskip("transformers")

    words = tokenizer("<|image|>")
    image_id = words.convert_tokens_to_ids("<|image|>")
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text = {**TEXT, "vocab_size": len(words), "rope_parameters": rope, "cross_attention_layers": [1]}
    vision = {
        "hidden_size": 16,
        "attention_heads": 2,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "intermediate_size": 24,
        "intermediate_layers_indices": [0],
        "vision_output_dim": 32,
    }
    config = t.MllamaConfig(
        vision_config=t.MllamaVisionConfig(**vision, image_size=28, patch_size=7, max_num_tiles=4),
        text_config=t.MllamaTextConfig(**text, pad_token_id=0, bos_token_id=2, eos_token_id=3),
        image_token_index=image_id,
    )
    model = t.MllamaForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if name.endswith("gate"):
            nn.init.constant_(parameter, 0.5)  # they are zeros, so the image has no effect, without training
    images = t.MllamaImageProcessor(size={"height": 28, "width": 28}, max_image_tiles=4)
    processor = t.MllamaProcessor(images, words, chat_template=TEMPLATE.replace("IMAGE", "<|image|>"))
    return model, processor


def florence_2() -> tuple[nn.Module, Any]:
    """Return Florence-2, an encoder-decoder: its encoder reads the image and the prompt."""
    t: Any = pytest.importorskip("transformers")

    names = {"image_token": "<image>"}
    words = tokenizer(**names)
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64}
    ends = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    config = t.Florence2Config(
        vision_config=t.Florence2VisionConfig(
            depths=(1, 1),
            patch_size=(7, 3),
            patch_stride=(4, 2),
            patch_padding=(3, 1),
            patch_prenorm=(False, True),
            embed_dim=(8, 16),
            num_heads=(2, 2),
            num_groups=(2, 2),
            window_size=4,
            projection_dim=16,
        ),
        text_config=t.BartConfig(**sizes, **heads, **ends, forced_eos_token_id=None, vocab_size=len(words)),
        image_token_id=words.convert_tokens_to_ids("<image>"),
    )
    images = t.CLIPImageProcessor(size={"height": 32, "width": 32}, do_center_crop=False)
    images.image_seq_length = 17
    return t.Florence2ForConditionalGeneration(config), t.Florence2Processor(images, words)


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    build.__name__: build
    for build in (
        *(llava, llava_next, qwen2_vl, qwen2_5_vl, qwen3_vl),
        *(internvl, blip_2, paligemma, idefics3, smolvlm),
    )
}


def build(family: str) -> tuple[nn.Module, Any]:
    """Return a model of a family with random weights, and its processor."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, processor = FAMILIES[family]()
    return model.eval(), processor


@cache
def answered(family: str) -> tuple[nn.Module, Any, saliency.Answer]:
    """Return a model of a family, its processor, and an answer to a question about a scene."""
    model, processor = build(family)
    return model, processor, saliency.generate(model, processor, scene(), QUESTION, answer="a red car")
