"""Small networks for drawn shapes and scenes: classifiers, networks that find objects, transformers, several inputs."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import TargetError, optional_import
from ..io.inputs import ImagesLike, read
from ..io.preprocess import Preprocess
from ..validation import check_choice
from .shapes import CLASSES, COLOURS, DISTRACTORS, KEYPOINTS, SIZE, SOLIDS, draw_noise, draw_scenes

RgbdTask = Literal["colour", "depth", "both"]
RGBD_TASKS: tuple[RgbdTask, ...] = get_args(RgbdTask)
CAMERAS = ("observation.images.top", "observation.images.wrist")
INSTRUCTION = "observation.instruction"
STEPS = 4  # points of a motion


@dataclass(frozen=True, slots=True)
class InputScenes:
    """Scenes of two images, by the names of the inputs of a network. Each image shows up to two objects."""

    inputs: dict[str, Tensor]  # images (N, C, 64, 64), uint8 or float32, and others
    masks: dict[str, Tensor]  # for each image (N, 2, 64, 64), bool; empty for objects that it does not show
    shapes: dict[str, Tensor]  # (N, 2), indices into CLASSES + DISTRACTORS
    importance: dict[str, Tensor]  # (N, 2), 1 for the object that decides the answer, if the image shows it
    answers: Tensor  # (N,), classes; or motions (N, 4, 2)

    @property
    def evidence(self) -> dict[str, Tensor]:
        """The pixels of the object that decides the answer, (N, 1, 64, 64), bool; empty if the image shows none."""
        important = {name: (own > 0)[..., None, None] for name, own in self.importance.items()}
        return {name: (own & important[name]).any(1, keepdim=True) for name, own in self.masks.items()}

    @property
    def distractor(self) -> dict[str, Tensor]:
        """The pixels of all other objects, (N, 1, 64, 64), bool."""
        return {name: self.masks[name].any(1, keepdim=True) & ~own for name, own in self.evidence.items()}


def draw_rgbd(count: int, *, seed: int = 0, task: RgbdTask = "both") -> InputScenes:
    """Draw colours and depths of the scenes of `draw_scenes`: an object of a class, and a distractor.

    "rgb" is an image, and "depth" (N, 1, 64, 64) the height above the background, whose mean is 0. The answer is the
    class. The tasks differ in where both objects show:

    - "colour": in the colours only, as prints on a wall.
    - "depth": in the depth only, in the colours of the background.
    - "both": in both, at the same place.

    Args:
        count: The number of scenes.
        seed: Fixes the scenes, with the count. The global random state is neither read nor changed.
        task: The inputs that show the objects.

    Raises:
        MethodError: The task is unknown, or the count is below 1.
    """
    check_choice("task", task, RGBD_TASKS)
    scenes, random = draw_scenes(count, seed=seed), torch.Generator("cpu").manual_seed(~seed)
    shows = {"rgb": task != "depth", "depth": task != "colour"}
    heights = 0.5 + 0.5 * torch.rand(count, 2, 1, 1, generator=random, device="cpu", dtype=torch.float32)
    ground, grain = draw_noise(count, random)
    objects = (scenes.masks * heights * shows["depth"]).sum(1, keepdim=True)
    depth = (ground - 0.5 + grain)[:, :1] + objects
    return InputScenes(
        {"rgb": scenes.images if shows["rgb"] else scenes.backgrounds, "depth": depth},
        {name: scenes.masks & own for name, own in shows.items()},
        dict.fromkeys(shows, scenes.shapes),
        {name: scenes.importance * own for name, own in shows.items()},
        scenes.labels,
    )


def draw_cameras(count: int, *, seed: int = 0) -> InputScenes:
    """Draw what two cameras of a robot see, and an instruction such as "move to the red circle".

    Each camera sees two objects of different classes and colours. Only one camera sees the object of the instruction,
    which is one-hot: its colour, then its class. The answer is the motion from the centre of the image to the object,
    as four points (x, y) at equal distances; the edges of the image are at -1 and 1.

    Args:
        count: The number of scenes.
        seed: Fixes the scenes, with the count. The global random state is neither read nor changed.

    Raises:
        MethodError: The count is below 1.
    """
    views = [draw_scenes(count, seed=2 * seed + camera, task="two_objects") for camera in range(len(CAMERAS))]
    random = torch.Generator("cpu").manual_seed(~seed)
    seen = torch.randint(len(CAMERAS), (count,), generator=random, device="cpu")
    rows = torch.arange(count, device="cpu")
    shapes, colours = torch.stack([own.shapes for own in views]), torch.stack([own.colours for own in views])
    shape, colour = shapes[seen, rows, 0], colours[seen, rows, 0]
    importance = torch.zeros_like(shapes)  # (cameras, N, 2)
    importance[seen, rows, 0] = 1
    # An equal object in the other camera is left out.
    kept = (shapes != shape[:, None]) | (colours != colour[:, None]) | (importance > 0)
    masks = torch.stack([own.masks for own in views]) & kept[..., None, None]
    images = [own.without((own.masks ^ mask).any(1, keepdim=True)) for own, mask in zip(views, masks, strict=True)]
    pixels = 2 * torch.arange(0.5, SIZE, device="cpu", dtype=torch.float32) / SIZE - 1
    mask = masks[seen, rows, 0].float()
    centres = torch.stack([mask.sum(1) @ pixels, mask.sum(2) @ pixels], 1) / mask.sum((1, 2))[:, None]
    steps = torch.arange(1, STEPS + 1, device="cpu", dtype=torch.float32)
    instruction = torch.cat([F.one_hot(colour, len(COLOURS)), F.one_hot(shape, len(CLASSES))], 1).float()
    return InputScenes(
        dict(zip(CAMERAS, images, strict=True)) | {INSTRUCTION: instruction},
        dict(zip(CAMERAS, masks, strict=True)),
        dict(zip(CAMERAS, shapes, strict=True)),
        dict(zip(CAMERAS, importance, strict=True)),
        centres[:, None] * steps[:, None] / STEPS,
    )


OBJECTS = CLASSES[:3]  # of the task "several"
_STRIDES = (4, 8)  # pixels per cell of the two levels of the detectors


def _convolution(inputs: int, width: int, stride: int = 1) -> nn.Sequential:
    layers = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    return nn.Sequential(*layers)


def _pair(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(_convolution(inputs, width), _convolution(width, width))


class UNet(nn.Module):
    """U-Net with grids of 64 x 64, 32 x 32, 16 x 16 and, in `bottleneck`, 8 x 8.

    Source: Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation" (2015),
    https://arxiv.org/abs/1505.04597.

    Args:
        outputs: The number of maps: the background and one for each class; 1 for a single class; or a heatmap for each
            keypoint, whose maximum is 1 at its position (Xiao et al., "Simple Baselines for Human Pose Estimation and
            Tracking" (2018), https://arxiv.org/abs/1804.06208).
        stride: The pixels per cell of the output: 1, or 2 to leave out the last upsampling.
    """

    def __init__(self, outputs: int = 1 + len(OBJECTS), *, stride: int = 1) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([_pair(3, 16), _pair(16, 32), _pair(32, 64)])
        self.bottleneck = _pair(64, 64)
        decoder = [_pair(64 + 64, 32), _pair(32 + 32, 16), _pair(16 + 16, 16)]
        self.decoder = nn.ModuleList(decoder if stride == 1 else decoder[:2])
        self.head = nn.Conv2d(16, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each pixel, (N, outputs, H / stride, W / stride)."""
        skips = []
        for level in self.encoder:
            skips.append(x := level(x))
            x = F.max_pool2d(x, 2)
        x = self.bottleneck(x)
        for level, skip in zip(self.decoder, reversed(skips), strict=False):
            x = level(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))
        logits: Tensor = self.head(x)
        return logits


class Backbone(nn.Module):
    """Convolutions with grids of 16 x 16 and 8 x 8 cells."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(_convolution(3, 16, 2), _convolution(16, 32, 2), _convolution(32, 32))
        self.layer2 = nn.Sequential(_convolution(32, 64, 2), _pair(64, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (N, 32, H / 4, W / 4) and (N, 64, H / 8, W / 8)."""
        fine = self.layer1(x)
        return fine, self.layer2(fine)


class Detect(nn.Module):
    """Head of a detector without anchors, one branch of boxes and one of scores for each level.

    In each cell it predicts the distances from the centre of the cell to the four sides of a box.
    """

    def __init__(self, outputs: int, width: int) -> None:
        super().__init__()
        self.boxes, self.scores = (
            nn.ModuleList(nn.Sequential(_convolution(width, width), nn.Conv2d(width, maps, 1)) for _ in _STRIDES)
            for maps in (4, outputs)
        )

    def forward(self, features: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the boxes and scores of all cells, as `Detector` does."""
        boxes, scores = (
            torch.cat([branch(level).flatten(2) for branch, level in zip(branches, features, strict=True)], 2)
            for branches in (self.boxes, self.scores)
        )
        grids = [self._grid(level, stride) for level, stride in zip(features, _STRIDES, strict=True)]
        centres, strides = (torch.cat(parts, 1) for parts in zip(*grids, strict=True))  # (2, M), (1, M)
        before, after = (F.softplus(boxes) * strides).chunk(2, 1)  # (N, 2, M)
        y = torch.cat([centres + (after - before) / 2, before + after, scores.sigmoid()], 1)
        return y, {"boxes": boxes, "scores": scores}

    @staticmethod
    def _grid(level: Tensor, stride: int) -> tuple[Tensor, Tensor]:
        y, x = (torch.arange(size, device=level.device, dtype=level.dtype) + 0.5 for size in level.shape[2:])
        centres = stride * torch.stack([x.expand(len(y), -1), y[:, None].expand(-1, len(x))]).flatten(1)
        return centres, torch.full_like(centres[:1], stride)


class Detector(nn.Module):
    """One-stage detector on grids of 16 x 16 and 8 x 8, with the outputs of Ultralytics in evaluation.

    Sources: Lin et al., "Feature Pyramid Networks" (2017), https://arxiv.org/abs/1612.03144; Tian et al., "FCOS"
    (2019), https://arxiv.org/abs/1904.01355.
    """

    def __init__(self, outputs: int = len(OBJECTS)) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.fine, self.coarse = nn.Conv2d(32, 32, 1), nn.Conv2d(64, 32, 1)
        self.head = Detect(outputs, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (y, raw), for M candidates.

        y (N, 4 + C, M) has the centre, width and height of each box in pixels, and its C probabilities. raw["scores"]
        (N, C, M) has their logits, raw["boxes"] (N, 4, M) the distances before softplus and stride.
        """
        fine, coarse = self.backbone(x)
        coarse = self.coarse(coarse)
        fine = self.fine(fine) + F.interpolate(coarse, scale_factor=2.0)
        result: tuple[Tensor, dict[str, Tensor]] = self.head([fine, coarse])
        return result


class QueryDetector(nn.Module):
    """Detector whose queries attend to a grid of 8 x 8 cells, with the outputs of DETR in the library transformers.

    Source: Carion et al., "End-to-End Object Detection with Transformers" (2020), https://arxiv.org/abs/2005.12872.
    """

    def __init__(self, outputs: int = len(OBJECTS), *, queries: int = 16, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.positions = nn.Embedding((SIZE // 8) ** 2, width)
        self.encoder = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.queries = nn.Embedding(queries, width)
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 4, 2 * width, 0.0, batch_first=True) for _ in range(depth)
        )
        self.classes = nn.Linear(width, outputs + 1)
        self.boxes = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    def decode(self, x: Tensor) -> list[dict[str, Tensor]]:
        """Return the outputs after each layer of the decoder."""
        cells = self.backbone(x)[1].flatten(2).transpose(1, 2)  # (N, 64, width)
        tokens = self.encoder(cells + self.positions.weight)
        states = self.queries.weight.expand(len(x), -1, -1)
        outputs = []
        for layer in self.decoder:
            states = layer(states, tokens)
            outputs.append({"logits": self.classes(states), "pred_boxes": self.boxes(states).sigmoid()})
        return outputs

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return "logits" (N, Q, C + 1), the last for no object, and "pred_boxes" (N, Q, 4).

        The boxes have a centre, a width and a height, from 0 to 1 of the edges of the image.
        """
        return self.decode(x)[-1]


_WORDS = ("a", *COLOURS, *CLASSES, *DISTRACTORS, "left", "right", "of", "above", "below")
_TOKENS = ("<pad>", "<start>", *_WORDS, "<end>")
_LENGTH = 10  # tokens of a caption: the start, at most 8 words, the end
_SPOKEN = ("<pad>", "<start>", "<image>", *_WORDS, "caption", "what", "colour", "is", "the", "<end>")
_CELLS = (SIZE // 8) ** 2  # patches of an image
_CONTEXT = 96  # tokens of the captioner: the start, the patches, a prompt and its answer
PREPROCESS = Preprocess(size=(SIZE, SIZE), resize=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3)


class Attention(nn.Module):
    """Multi-head self-attention with the fused kernel of PyTorch."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens (N, T, C) of the same shape."""
        images, tokens, width = x.shape
        qkv = self.qkv(x).reshape(images, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (N, heads, T, C / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Transformer block with norms before attention and MLP."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal=causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens (N, T, C) of the same shape."""
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.tensor(0.0, device=None).repeat(shape).normal_(std=0.02))


class ViT(nn.Module):
    """Vision transformer with a class token, four register tokens and patches of 8 pixels.

    Source: Darcet et al., "Vision Transformers Need Registers" (2024), https://arxiv.org/abs/2309.16588.
    """

    def __init__(self, outputs: int = len(CLASSES), *, width: int = 64, depth: int = 4, registers: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 8, 8)
        self.prefix = _parameter(1, 1 + registers, width)
        self.pos_embed = _parameter(1, _CELLS, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head: nn.Module = nn.Linear(width, outputs)

    def tokens(self, x: Tensor) -> Tensor:
        """Return the class token, the registers and the patches, (N, 5 + 64, C)."""
        patches = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed  # (N, 64, C)
        tokens: Tensor = self.norm(self.blocks(torch.cat([self.prefix.expand(len(x), -1, -1), patches], 1)))
        return tokens

    def forward(self, x: Tensor) -> Tensor:
        """Return one row of outputs per image, read from the class token."""
        out: Tensor = self.head(self.tokens(x)[:, 0])
        return out


class TwoTower(nn.Module):
    """Image and text encoder with a common embedding, trained as CLIP; methods are named as in open_clip.

    Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (2021),
    https://arxiv.org/abs/2103.00020.
    """

    def __init__(self, embedding: int = 32, *, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.visual = ViT(embedding)
        self.token_embedding = nn.Embedding(len(_TOKENS), width)
        self.positional_embedding = _parameter(_LENGTH, width)
        self.transformer = nn.Sequential(*(Block(width, 4, causal=True) for _ in range(depth)))
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Linear(width, embedding, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07), device=None))

    def encode_image(self, image: Tensor) -> Tensor:
        """Return the embeddings (N, D) of images, not normalised."""
        embeddings: Tensor = self.visual(image)
        return embeddings

    def encode_text(self, text: Tensor) -> Tensor:
        """Return the embeddings (M, D) of tokens (M, L), not normalised."""
        x = self.transformer(self.token_embedding(text) + self.positional_embedding)
        ends = text.argmax(-1)  # the end token has the highest number
        embeddings: Tensor = self.text_projection(self.ln_final(x)[torch.arange(len(x), device=x.device), ends])
        return embeddings


class Tokenizer:
    """Tokenizer of captions such as "a red circle left of a blue square", used like a tokenizer of open_clip."""

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Return the tokens (M, 10) of captions, padded with 0.

        Raises:
            TargetError: A caption has more than 8 words, or a word that the network does not know.
        """
        rows = [self._encode(caption.split()) for caption in captions]
        return torch.tensor([row + [0] * (_LENGTH - len(row)) for row in rows], device="cpu")

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with a space after each."""
        return "".join(f"{_TOKENS[token]} " for token in tokens)

    def _encode(self, words: list[str]) -> list[int]:
        if len(words) > _LENGTH - 2 or not set(words) <= set(_WORDS):
            expected = f"expected at most {_LENGTH - 2} words of: {', '.join(_WORDS)}"
            raise TargetError(f'"{" ".join(words)}" is not a caption of drawn shapes; {expected}')
        return [_TOKENS.index(word) for word in ("<start>", *words, "<end>")]


class CaptionerOutput(NamedTuple):
    """Output of the captioner, with the attribute of transformers."""

    logits: Tensor  # (N, T, V)


class Captioner(nn.Module):
    """Vision transformer whose patches enter a causal decoder instead of the tokens "<image>", as in LLaVA.

    Source: Liu et al., "Visual Instruction Tuning" (2023), https://arxiv.org/abs/2304.08485.
    """

    def __init__(self, *, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.visual = ViT(width=width)
        self.visual.head = nn.Identity()  # the class token is not used
        self.projector = nn.Linear(width, width)
        self.embed_tokens = nn.Embedding(len(_SPOKEN), width)
        self.positions = _parameter(_CONTEXT, width)
        self.decoder = nn.Sequential(*(Block(width, 4, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, len(_SPOKEN), bias=False)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embeddings of tokens, as models of transformers do."""
        return self.embed_tokens

    def forward(self, input_ids: Tensor, pixel_values: Tensor, logits_to_keep: int = 0) -> CaptionerOutput:
        """Return the logits of the next token at each position, (N, T, V).

        Args:
            input_ids: The tokens (N, T) of `CaptionProcessor`, with 64 tokens "<image>" in each row.
            pixel_values: The images (N, 3, 64, 64).
            logits_to_keep: The number of last positions to return; 0 for all.
        """
        patches = self.projector(self.visual.tokens(pixel_values)[:, -_CELLS:])
        x = self.embed_tokens(input_ids)
        x = x.masked_scatter((input_ids == _SPOKEN.index("<image>"))[..., None], patches)
        x = self.decoder(x + self.positions[: x.shape[1]])
        return CaptionerOutput(self.lm_head(self.norm(x[:, -logits_to_keep:])))


class CaptionProcessor:
    """Processor of the captioner, used as in transformers: words are tokens, and each patch is a token "<image>".

    The prompts are "caption", answered by a sentence such as "a red circle left of a blue square", and "what colour is
    the circle?", answered by a colour.
    """

    image_token, image_token_id = "<image>", _SPOKEN.index("<image>")
    eos_token_id, pad_token_id = _SPOKEN.index("<end>"), _SPOKEN.index("<pad>")

    def __call__(self, images: ImagesLike, text: str | Sequence[str], return_tensors: str = "pt") -> dict[str, Tensor]:
        """Return `input_ids` (N, T), padded after the text, and `pixel_values` (N, 3, 64, 64).

        The causal decoder does not read the padding, so there is no mask.

        Raises:
            TargetError: The network does not know a word.
            ImageError: An image cannot be read.
        """
        texts = [text] if isinstance(text, str) else text
        starts = ["<start>", *[self.image_token] * _CELLS]
        rows = [self.encode(" ".join([*starts, prompt.replace(self.image_token, "")])) for prompt in texts]
        tokens = nn.utils.rnn.pad_sequence([torch.tensor(row, device="cpu") for row in rows], batch_first=True)
        return {"input_ids": tokens, "pixel_values": read(images, PREPROCESS).inputs}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the tokens of words, without special tokens. Raises TargetError if a word is unknown."""
        words = re.findall(r"<\w+>|\w+", text.lower())
        if unknown := set(words) - set(_SPOKEN):
            raise TargetError(f'"{min(unknown)}" is not a word of the captioner; expected: {", ".join(_SPOKEN)}')
        return [_SPOKEN.index(word) for word in words]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with a space between words."""
        return " ".join(_SPOKEN[token] for token in token_ids)


def window_transformer(outputs: int = len(CLASSES)) -> nn.Module:
    """Return torchvision's Swin transformer with windows of 4 x 4 tokens on grids of 16 x 16 and 8 x 8."""
    swin = optional_import("torchvision.models.swin_transformer", "models", "a window transformer")
    options = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "mlp_ratio": 2.0, "stochastic_depth_prob": 0.0}
    model: nn.Module = swin.SwinTransformer([4, 4], window_size=[4, 4], num_classes=outputs, **options)
    return model


def cnn(outputs: int = len(CLASSES), *, hidden: int = 0) -> nn.Sequential:
    """Return a plain network: four convolutions with ReLUs and max pooling, then the mean over a grid of 8 x 8.

    Args:
        outputs: The number of classes.
        hidden: The width of a hidden layer of the head, which can combine parts of the image; 0 for a linear head.
    """
    hidden_layer = [nn.Linear(64, hidden), nn.ReLU()] if hidden else []
    layers = {
        "features": nn.Sequential(
            *(nn.Conv2d(3, 16, 5, 2, 2), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU()),
        ),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "head": nn.Sequential(*hidden_layer, nn.Linear(hidden or 64, outputs)),
    }
    return nn.Sequential(OrderedDict(layers))


def volume_cnn(outputs: int = len(SOLIDS)) -> nn.Sequential:
    """Return a plain network for volumes (N, 1, D, H, W), with a final grid of (D / 4, H / 4, W / 4)."""
    features = nn.Sequential(
        *(nn.Conv3d(1, 16, 5, 2, 2), nn.ReLU()),
        *(nn.Conv3d(16, 32, 3, 1, 1), nn.ReLU(), nn.MaxPool3d(2)),
        *(nn.Conv3d(32, 64, 3, 1, 1), nn.ReLU(), nn.Conv3d(64, 64, 3, 1, 1), nn.ReLU()),
    )
    head = {"pool": nn.AdaptiveAvgPool3d(1), "flatten": nn.Flatten(), "head": nn.Linear(64, outputs)}
    return nn.Sequential(OrderedDict({"features": features} | head))


class Residual(nn.Module):
    """Two convolutions with batch norms and a shortcut, as in ResNet-18, with the names of torchvision.

    Source: He et al., "Deep Residual Learning for Image Recognition" (2016), https://arxiv.org/abs/1512.03385.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return features (N, width, H / stride, W / stride)."""
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        result: Tensor = self.relu(out + self.downsample(x))
        return result


def resnet(outputs: int = len(CLASSES)) -> nn.Sequential:
    """Return a residual network with batch norms on grids of 32 x 32, 16 x 16 and 8 x 8, named as in torchvision."""
    stem = {"conv1": nn.Conv2d(3, 16, 3, 2, 1, bias=False), "bn1": nn.BatchNorm2d(16), "relu": nn.ReLU()}
    layers = {"layer1": Residual(16, 16, 1), "layer2": Residual(16, 32, 2), "layer3": Residual(32, 64, 2)}
    head = {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(64, outputs)}
    return nn.Sequential(OrderedDict(stem | layers | head))


class ColourAndDepth(nn.Module):
    """Network of two inputs: a stream of convolutions for each, which join on a grid of 16 x 16 cells."""

    def __init__(self, outputs: int = len(CLASSES)) -> None:
        super().__init__()
        self.rgb_stream, self.depth_stream = (
            nn.Sequential(_convolution(channels, 16, 2), _convolution(16, 32, 2)) for channels in (3, 1)
        )
        self.fused = nn.Sequential(_convolution(64, 64, 2), _convolution(64, 64))
        self.head = nn.Linear(64, outputs)

    def forward(self, rgb: Tensor, depth: Tensor) -> Tensor:
        """Return the logits (N, outputs) of colours (N, 3, H, W) and depths (N, 1, H, W)."""
        joined = self.fused(torch.cat([self.rgb_stream(rgb), self.depth_stream(depth)], 1))
        logits: Tensor = self.head(joined.mean((2, 3)))
        return logits


class Policy(nn.Module):
    """Robot policy of one mapping, as in LeRobot: a transformer of the cells of two cameras and an instruction.

    Source: Zhao et al., "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware" (2023),
    https://arxiv.org/abs/2304.13705.
    """

    def __init__(self, outputs: int = 2, *, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        layers = _convolution(3, 16, 2), _convolution(16, 32, 2), _convolution(32, width, 2)
        self.backbone = nn.Sequential(*layers, _convolution(width, width))
        self.instruction = nn.Linear(len(COLOURS) + len(CLASSES), width)
        self.pos_embed = _parameter(len(CAMERAS) * _CELLS, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, STEPS * outputs)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the motion (N, 4, outputs) for images (N, 3, 64, 64) of both cameras and an instruction (N, 9)."""
        cells = torch.cat([self.backbone(batch[name]).flatten(2).mT for name in CAMERAS], 1) + self.pos_embed
        tokens = torch.cat([self.instruction(batch[INSTRUCTION])[:, None], cells], 1)  # (N, 1 + 128, C)
        motion: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return motion.reshape(len(motion), STEPS, -1)


class DrawnNetwork(NamedTuple):
    """Network for drawn images: the function that builds it, the names of its classes, and its preprocessing."""

    build: Callable[..., nn.Module]
    categories: tuple[str, ...] | None = CLASSES
    preprocess: Preprocess | Mapping[str, Preprocess] | None = PREPROCESS


NETWORKS = {
    "shapes_cnn": DrawnNetwork(cnn),
    "shapes_resnet": DrawnNetwork(resnet),
    "shapes_shortcut": DrawnNetwork(cnn),
    "shapes_xor": DrawnNetwork(partial(cnn, 2, hidden=32), ("same", "different")),
    "shapes_order": DrawnNetwork(partial(cnn, 2), ("light", "heavy")),
    "shapes_vit": DrawnNetwork(ViT),
    "shapes_window": DrawnNetwork(window_transformer),
    "shapes_two_tower": DrawnNetwork(TwoTower),
    "shapes_caption": DrawnNetwork(Captioner, None),
    "shapes_unet": DrawnNetwork(UNet, ("background", *OBJECTS)),
    "shapes_circles": DrawnNetwork(partial(UNet, 1), ("circle",)),
    "shapes_detector": DrawnNetwork(Detector, OBJECTS),
    "shapes_queries": DrawnNetwork(QueryDetector, OBJECTS),
    "shapes_keypoints": DrawnNetwork(partial(UNet, len(KEYPOINTS), stride=2), KEYPOINTS),
    "shapes_volume": DrawnNetwork(volume_cnn, SOLIDS, None),
    "shapes_rgbd": DrawnNetwork(ColourAndDepth, preprocess={"rgb": PREPROCESS}),
    "shapes_policy": DrawnNetwork(Policy, None, dict.fromkeys(CAMERAS, PREPROCESS)),
}


def weights_file(name: str) -> Path:
    """Return the file of trained weights of a network, in float16."""
    return Path(__file__).parent / f"{name}.safetensors"
