"""Answers of vision-language models, which methods explain like images."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from ..errors import ImageError, MethodError, ModelError, NotApplicableError
from ..hooks.manager import HookManager
from ..hooks.pytree import tree_tensors
from ..io.axes import at_least_float32
from ..io.geometry import Box, Frame
from ..io.inputs import Batch, ImageLike, open_image, split_images
from ..io.preprocess import drawable
from ..io.probe import boxes_of_views
from ..targets.classes import output_tensor
from ..targets.question import AnswerText, encode, token_texts
from ..validation import check_integer
from .call import arguments_of, bind_image, bound, call, prepared_for_attribution, reference_tensor, run_model, unwrap
from .layers import Layout
from .positions import SAME, PositionTrace

Prompt = str | Sequence[Mapping[str, Any]]
"""A question, or the messages of a chat, as `apply_chat_template` of transformers takes them."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageTokens:
    """Tokens of the language model that hold one view of an image, such as a tile.

    Attributes:
        image: The index of the image in the answer.
        positions: (h, w) the position of the token of each cell in the sequence; (1, K) for K tokens without a
            position, such as the queries of BLIP-2.
        box: The part of the model's input that the cells cover: left, top, right and bottom in pixels of the input
            (C, H, W). None for tokens without a position.
    """

    image: int
    positions: Tensor
    box: Box | None


@dataclass(frozen=True, slots=True, eq=False)
class Answer(Batch):
    """Answer of a vision-language model about one or more images, as `generate` returns it.

    Methods take it instead of an image: `method(model).attribute(answer, saliency.words("red"))`. The result has one
    map for each image. Perturbations and paths change one image, while the other images and the text stay the same;
    the output is the logits of the answer's tokens (N, T, V), each given the tokens before it.

    Attributes:
        inputs: (N, C, H, W) the N images as the model sees them in their finest resolution, normalised. Smaller images
            are padded at the right and at the bottom.
        frames: The position of each input on its image.
        arguments: All arguments of the model, as a function of its images.
        model: The model.
        prompt: The text before the answer, with special tokens.
        ids: (L + 1,) the token ids of the prompt and the answer; the model reads the first L.
        is_image: (L,) of bool: whether each token is a part of an image.
        answer_text: The tokens of the answer, and the tokenizer.
        image_tokens: The tokens of each view of each image, in the order of the sequence.
        reader: The name of the module that reads the embeddings (N, L, D) of all tokens; None if it was not found.
    """

    arguments: ImageArguments
    model: nn.Module
    prompt: str
    ids: Tensor
    is_image: Tensor
    answer_text: AnswerText
    image_tokens: tuple[ImageTokens, ...] = ()
    reader: str | None = None

    def of(self, model: nn.Module) -> Self:
        """Return the answer. Raises ModelError if another model gave it."""
        if self.model is not model:
            names = " and ".join(type(network).__name__ for network in (self.model, model))
            raise ModelError(
                f"the answer is from another model than the method's ({names}); call saliency.generate again"
            )
        return self

    @property
    def text(self) -> str:
        """The answer."""
        return self.answer_text.text.strip()

    @property
    def tokens(self) -> tuple[str, ...]:
        """The texts of the T tokens of the answer."""
        return self.answer_text.tokens

    @property
    def words(self) -> list[tuple[str, slice]]:
        """The words of the answer in order, with the tokens of each word: `saliency.words(at=tokens)` explains them."""
        return self.answer_text.words()

    @property
    def sequence(self) -> tuple[str | None, ...]:
        """The texts of the L tokens that the model reads: of the prompt, and all but the last token of the answer.

        None stands for the tokens of images.
        """
        ids = self.ids[:-1][~self.is_image].tolist()
        texts = iter(token_texts(self.answer_text.tokenizer, ids, context=0))
        return tuple(None if of_image else next(texts) for of_image in self.is_image.tolist())

    @property
    def output_positions(self) -> range:
        """The positions in the sequence whose outputs predict the T tokens of the answer."""
        return range(len(self.ids) - 1 - len(self.tokens), len(self.ids) - 1)

    def layout(self, image: int) -> Layout:
        """Return the layout of the L tokens that the language model reads on one of the images.

        The cells have the size of the smallest token. A token of a coarser view is divided among the cells that it
        covers, so the sum is unchanged.

        Raises:
            NotApplicableError: The tokens have no position in the image, as the queries of BLIP-2.
        """
        views = [(view, view.box, view.positions.shape) for view in self.image_tokens if view.box is not None]
        if len(views) < len(self.image_tokens):
            raise NotApplicableError(
                f"the image tokens of {type(self.model).__name__} have no position in the image; use attn_lrp or rise"
            )
        height, width = self.inputs.shape[2:]
        rows = round(height / min((bottom - top) / h for _, (_, top, _, bottom), (h, _) in views))
        columns = round(width / min((right - left) / w for _, (left, _, right, _), (_, w) in views))

        def placed(tokens: Tensor) -> Tensor:
            maps = tokens.new_zeros(len(tokens), tokens.shape[2], rows, columns)
            for view, (left, top, right, bottom), _ in views:
                if view.image != image:
                    continue
                y = slice(round(top * rows / height), round(bottom * rows / height))
                x = slice(round(left * columns / width), round(right * columns / width))
                cells = tokens[:, view.positions].movedim(-1, 1)  # (k, K, h, w)
                size = (y.stop - y.start, x.stop - x.start)
                maps[..., y, x] += F.interpolate(cells, size) * (view.positions.numel() / math.prod(size))
            return maps

        return Layout("given", (rows, columns), function=placed)

    def __repr__(self) -> str:
        """Return the answer and the number of images."""
        return f"<Answer {self.text!r} about {len(self.inputs)} image{'s' * (len(self.inputs) > 1)}>"


def generate(
    model: nn.Module,
    processor: Any,
    images: ImageLike | Sequence[ImageLike],
    prompt: Prompt,
    *,
    answer: str | Sequence[int] | None = None,
    max_new_tokens: int = 32,
    canvas: Callable[[Image.Image], Canvas] | None = None,
) -> Answer:
    """Let a vision-language model answer a prompt about images, for methods to explain.

    The model decodes greedily. Each image becomes one input (C, H, W), from which the model's own pixel values follow:
    the input itself, tiles with a resized view, or patches. How a processor divides an image is recognised by running
    it on images of ramps. The tokens of each part of an image are found by tracing positions through the model.

    Args:
        model: A model of transformers for images and text, or a model with the same forward: it takes `input_ids` and
            `pixel_values`, and returns `logits`. Without a method `generate`, it runs once for each new token.
        processor: Its processor: a function of `images` and `text`, with `tokenizer`, or else `encode` and `decode`.
        images: One image or several, as for `Attribution.attribute`, but no float tensors.
        prompt: A question about the images, or a list of messages of a chat with entries {"type": "image"}. Both are
            formatted by `processor.apply_chat_template`, if there is one; a text with image tokens is used unchanged.
        answer: The answer to explain, as a text or token ids; None lets the model answer.
        max_new_tokens: The largest number of tokens that the model writes. A given `answer` is not cut.
        canvas: A function from an image to its `Canvas`, for processors that are not recognised.

    Raises:
        ImageError: An image cannot be read, or the way in which the processor divides images is not recognised.
        MethodError: `max_new_tokens` is not a positive integer, or the prompt is neither a text nor a list of messages.
        ModelError: The prompt has no token of an image, the answer is empty, the model is an encoder-decoder or refused
            its arguments, or its output has no logits for each token.
    """
    if not callable(processor):
        got = type(processor).__name__
        raise ModelError(f"expected the processor of the model, such as AutoProcessor.from_pretrained(name), got {got}")
    network, tokenizer = unwrap(model), getattr(processor, "tokenizer", processor)
    if getattr(getattr(network, "config", None), "is_encoder_decoder", False):
        expected = "a model that reads the prompt and the answer as one sequence"
        raise ModelError(f"{type(network).__name__} is an encoder-decoder; expected {expected}")
    opened = [open_image(image) for image in split_images(images)]
    check_integer("max_new_tokens", max_new_tokens)
    token = str(getattr(processor, "image_token", "<image>"))
    text = _prompt_text(processor, prompt, token, len(opened))
    like: Any = reference_tensor(network)
    tensors = _encode(processor, opened, text).items()
    inputs = {name: value.to(like if value.is_floating_point() else like.device) for name, value in tensors}
    recognise = canvas or partial(_recognised, processor, text if len(opened) == 1 else token)
    canvases = [recognise(image) for image in opened]
    with prepared_for_attribution(network), torch.no_grad():
        ids = _answer_ids(network, tokenizer, inputs, answer, max_new_tokens)
        arguments = ImageArguments(network, inputs, canvases, ids)
        before = arguments.fixed["input_ids"][0]
        is_image = before == _image_token_id(network, processor)
        if not is_image.any():
            raise ModelError(f"the prompt has no image token; write {token} into it, once for each image")
        written = AnswerText(tuple(ids), token_texts(tokenizer, ids, context=len(ids)), tokenizer)
        sequence = torch.cat([before, before.new_tensor(ids[-1:])])
        size = arguments.inputs.shape[2:]
        frames = tuple(Frame(drawable(image), _padded_box(c, size)) for image, c in zip(opened, canvases, strict=True))
        untraced = Answer(arguments.inputs, frames, arguments, network, text, sequence, is_image, written)
        traced = [_trace(untraced, number) for number in range(len(opened))]
    tokens = [view for number, (_, rows) in enumerate(traced) for view in _image_tokens(untraced, number, rows)]
    return replace(untraced, image_tokens=tuple(tokens), reader=traced[0][0])


def _prompt_text(processor: Any, prompt: Prompt, token: str, images: int) -> str:
    """Return the text of a prompt, by the chat template of the processor unless it has image tokens already."""
    has_template = getattr(processor, "chat_template", None) is not None
    is_chat = isinstance(prompt, list | tuple) and prompt and all(isinstance(turn, Mapping) for turn in prompt)
    if not isinstance(prompt, str) and not is_chat:
        kind = f"a {type(prompt).__name__}"
        raise MethodError(f"the prompt is {kind}; expected one question, or the messages of one chat, for one answer")
    if isinstance(prompt, str):
        if not has_template or token in prompt:
            return prompt
        content = [*[{"type": "image"}] * images, {"type": "text", "text": prompt}]
        prompt = [{"role": "user", "content": content}]
    if not has_template:
        raise ModelError("the processor has no chat template; pass the prompt as one text, with its image tokens")
    return str(processor.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))


def _encode(processor: Any, images: Sequence[Image.Image], text: str) -> dict[str, Tensor]:
    """Return the tensors that a processor gives for a text and its images."""
    start = getattr(getattr(processor, "tokenizer", None), "bos_token", None)
    options = {"add_special_tokens": False} if start and text.startswith(start) else {}  # of a chat template
    try:
        inputs = processor(images=list(images), text=[text], return_tensors="pt", **options)
    except ValueError as error:
        raise ModelError(f"the processor refused the prompt {text!r}: {error}") from error
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor) and name != "labels"}


def _recognised(processor: Any, text: str, image: Image.Image) -> Canvas:
    """Return the canvas of an image. Raises ImageError if the processor divides it in an unknown way."""
    try:
        return find_canvas(lambda image: _encode(processor, [image], text), image, processor)
    except (AttributeError, ImageError, RuntimeError) as error:
        wanted = "pass canvas=, a function from a PIL image to saliency.Canvas(values, box, pixels)"
        name = type(processor).__name__
        raise ImageError(f"how {name} divides an image is not recognised ({error}); {wanted}") from error


def _image_token_id(model: nn.Module, processor: Any) -> int:
    """Return the id of the tokens that the features of an image replace. Raises ModelError if there is no such id."""
    by_model = getattr(getattr(model, "config", None), "image_token_id", None)
    by_processor: int | None = getattr(processor, "image_token_id", None)
    token_id = by_model if by_processor is None else by_processor
    if token_id is None:
        raise ModelError(f"{type(processor).__name__} has no image_token_id, so the tokens of an image cannot be found")
    return token_id


def _answer_ids(
    model: Any, tokenizer: Any, inputs: Mapping[str, Tensor], answer: str | Sequence[int] | None, longest: int
) -> list[int]:
    """Return the ids of the given answer, or of the model's answer, without the token that ends it.

    Raises:
        ModelError: The answer is empty.
    """
    prompt: list[int] = inputs["input_ids"][0].tolist()
    config = getattr(model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None) or getattr(tokenizer, "eos_token_id", None)
    stop = set(ends if isinstance(ends, list) else [ends])
    if answer is not None:
        ids = [*map(int, encode(tokenizer, answer) if isinstance(answer, str) else answer)]
    elif hasattr(model, "generate"):
        greedy = {"do_sample": False, "num_beams": 1, "return_dict_in_generate": False}
        ids = model.generate(**inputs, max_new_tokens=longest, **greedy)[0].tolist()
        ids = ids[len(prompt) :] if ids[: len(prompt)] == prompt else ids
    else:
        ids = []
        while len(ids) < longest and not stop & {*ids}:
            logits = output_tensor(call(model, (), _continued(inputs, ids)))
            ids.append(int(logits[0, -1].argmax()))
    ids = ids[: next((index for index, token in enumerate(ids) if token in stop), len(ids))]
    if not ids:
        raise ModelError("the answer is empty; pass an answer to explain as answer=")
    return ids


def _continued(inputs: Mapping[str, Tensor], ids: Sequence[int]) -> dict[str, Tensor]:
    """Return the arguments of a prompt with further tokens of text."""
    prompt = inputs["input_ids"]
    # PaliGemma marks a prompt, which attends both ways, by 0, and the answer by 1. Gemma 3 marks images by 1.
    fill = {"attention_mask": 1, "token_type_ids": int(not inputs.get("token_type_ids", prompt).any())}
    longer = {name: part for name, part in inputs.items() if part.shape[:2] == prompt.shape and name != "pixel_values"}
    for name, part in longer.items():  # with tiles in Llama 3.2 Vision
        last = part[:, -1:] if part.dim() > 2 else part.new_full((1, 1), fill.get(name, 0))
        longer[name] = torch.cat([part, last.repeat_interleave(len(ids), 1)], 1)
    return {**inputs, **longer, "input_ids": torch.cat([prompt, prompt.new_tensor([ids])], 1)}


class ImageArguments:
    """Arguments of a model for an answer, as a function of canvases of its images.

    Attributes:
        fixed: The arguments with the unchanged images.
        inputs: (N, C, H, W) the canvases, padded to one size.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor], canvases: Sequence[Canvas], ids: Sequence[int]):
        self.fixed = _continued(inputs, ids[:-1])
        self.canvases = canvases
        parameters = inspect.signature(model.forward).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        options = {"logits_to_keep": len(ids), "use_cache": False}
        self.options = {name: value for name, value in options.items() if takes_all or name in parameters}
        pixels = self.fixed["pixel_values"]
        height, width = (max(c.values.shape[axis] for c in canvases) for axis in (1, 2))
        padded = [F.pad(c.values, (0, width - c.values.shape[2], 0, height - c.values.shape[1])) for c in canvases]
        self.inputs = torch.stack(padded).to(pixels)
        parts = [self._pixels(image, canvas[None])[0] for image, canvas in enumerate(self.inputs)]
        self.rows = pixels.reshape(-1, *parts[0].shape[1:]).clone()  # of all images
        self.spans = list[slice]()  # the rows of each image
        end = 0
        for number, part in enumerate(parts):
            spans = [slice(start, start + len(part)) for start in range(end, len(self.rows) - len(part) + 1)]
            errors = [float((self.rows[span] - part).abs().mean()) for span in spans]
            if min(errors, default=math.inf) > TOLERANCE:
                problem = f"the canvas of image {number} does not give the processor's pixel values: they differ"
                raise ImageError(f"{problem} by {min(errors, default=math.nan):.2g}; pass canvas=, see saliency.Canvas")
            self.spans.append(spans[errors.index(min(errors))])
            end = self.spans[-1].stop
            self.rows[self.spans[-1]] = part

    def _pixels(self, image: int, x: Tensor) -> Tensor:
        """Return the rows of one image, from canvases (k, C, H, W)."""
        height, width = self.canvases[image].values.shape[1:]
        rows = self.canvases[image].pixels(x[:, :, :height, :width])
        # Idefics3 takes a tile of zeros for padding.
        return rows + torch.finfo(rows.dtype).tiny if "pixel_attention_mask" in self.fixed else rows

    def __call__(self, x: Tensor, image: int) -> dict[str, Any]:
        """Return the arguments for canvases (k, C, H, W) of one of the images."""
        span, pixels = self.spans[image], self.rows.to(x).expand(len(x), *self.rows.shape)
        pixels = torch.cat([pixels[:, : span.start], self._pixels(image, x), pixels[:, span.stop :]], 1)
        others = {name: value.to(x.device) for name, value in self.fixed.items() if name != "pixel_values"}
        repeated = {name: torch.cat([value] * len(x)) for name, value in others.items()}
        shape = self.fixed["pixel_values"].shape[1:]
        return {**repeated, "pixel_values": pixels.reshape(-1, *shape), **self.options}


def _padded_box(canvas: Canvas, size: Sequence[int]) -> Box:
    """Return the box on the image of a canvas that is padded to (h, w) at the right and at the bottom."""
    left, top, right, bottom = canvas.box
    height, width = canvas.values.shape[1:]
    return left, top, left + (right - left) * size[1] / width, top + (bottom - top) * size[0] / height


def _trace(answer: Answer, number: int) -> tuple[str | None, Tensor]:
    """Find the module that reads the embeddings of all tokens, and the position of each token in an image.

    Returns:
        The name of the module, or None; and the rows and columns (2, L) in pixels of the canvas, NaN for tokens without
        a position.

    Raises:
        ModelError: The output does not have the length of the sequence or of the answer.
    """
    readers: list[tuple[str, Tensor]] = []
    x, length = answer.inputs[number, None], len(answer.is_image)

    def begin(name: str, args: Any, kwargs: Any) -> None:
        for tensor in tree_tensors((args, kwargs)):
            is_read = not readers and tensor.shape[:-1] == (1, length) and tensor.is_floating_point()
            positions = trace.positions(tensor) if is_read else None
            centres = None if positions is None else positions.nanmean(-1).expand(2, 1, length)[:, 0]
            if centres is not None and (centres[0].isnan() | answer.is_image).all():  # tokens of text have no position
                readers.append((name, centres))

    with PositionTrace(x, follows_values=True) as trace, HookManager(exclusive=True) as hooks:
        for name, module in answer.model.named_modules():
            if name:
                hooks.around(module, partial(begin, name), lambda token, output: None)
        with bound(**arguments_of((), answer)), bind_image(number):
            shape = tuple(output_tensor(run_model(answer.model, x)).shape)
    if len(shape) != 3 or shape[1] not in (length, len(answer.tokens)):
        raise ModelError(f"the output is {shape}; expected logits (1, {length}, V) of the sequence, one row per token")
    return readers[0] if readers else (None, torch.full((2, length), math.nan, device=x.device, dtype=torch.float32))


def _image_tokens(answer: Answer, number: int, positions: Tensor) -> list[ImageTokens]:
    """Return the tokens of each view of an image, from the row and the column of each token."""
    placed = (~positions[0].isnan()).nonzero()[:, 0]
    if not len(placed):  # queries
        if len(answer.inputs) > 1:
            problem = f"the tokens of image {number} are not in the prompt, or have no position in the image"
            raise ModelError(f"{problem}; explain one image at a time")
        return [ImageTokens(number, answer.is_image.nonzero().T, None)]
    rows, columns = positions[:, placed].tolist()
    starts = [0]
    for index in range(1, len(placed)):
        down, right = rows[index] - rows[index - 1], columns[index] - columns[index - 1]
        begins_row = down > SAME and abs(columns[index] - columns[starts[-1]]) < SAME
        if not begins_row and not abs(down) < SAME < right:
            starts.append(index)
    return [_view_tokens(number, placed[a:b], rows[a:b], columns[a:b]) for a, b in pairwise([*starts, len(placed)])]


def _view_tokens(number: int, positions: Tensor, rows: Sequence[float], columns: Sequence[float]) -> ImageTokens:
    """Return the tokens of one view, from their rows and columns."""
    width = sum(abs(row - rows[0]) < SAME for row in rows)
    height = len(positions) // width
    x = (columns[-1] - columns[0]) / (width - 1) if width > 1 else 0.0
    y = (rows[-1] - rows[0]) / (height - 1) if height > 1 else x
    x = x or y
    box = (columns[0] - x / 2 + 0.5, rows[0] - y / 2 + 0.5, columns[-1] + x / 2 + 0.5, rows[-1] + y / 2 + 0.5)
    return ImageTokens(number, positions.view(height, width), box)


Encode = Callable[[Image.Image], Mapping[str, Any]]
"""The processor of a model, for one image."""

TOLERANCE = 0.1
"""The largest mean difference between a resized view and the processor's view, in units of the normalised input."""


@dataclass(frozen=True, slots=True, eq=False)
class Canvas:
    """Normalised image in its finest resolution, from which the model's pixel values are computed differentiably.

    Attributes:
        values: (C, H, W) the numbers of the canvas.
        box: The part of the image that the canvas covers: left, top, right and bottom in pixels of the image.
        pixels: A function from canvases (N, C, H, W) to the pixel values of N images (N, rows, ...), where `rows` are
            the rows of `pixel_values` that belong to one image: views (C, h, w), or patches.
    """

    values: Tensor
    box: Box
    pixels: Callable[[Tensor], Tensor]


def find_canvas(encode: Encode, image: Image.Image, processor: Any) -> Canvas:
    """Return the canvas of an image, by recognising how a processor divides it.

    The processor may resize, crop and pad the image; cut it into rows of tiles, with a resized view of the whole image
    before or after them, and tiles of zeros at the end; or cut it into patches with `image_grid_thw`, as Qwen-VL does.

    Args:
        encode: The processor, for one image.
        image: The image.
        processor: The processor itself. If it cuts patches, its `image_processor` has `patch_size` and `merge_size`.

    Raises:
        ImageError: The pixel values are divided in another way.
    """
    encoded = encode(image)
    values: Tensor = encoded["pixel_values"]
    if "image_grid_thw" in encoded:
        _, *grid = encoded["image_grid_thw"][0].tolist()
        cutter = processor.image_processor
        return _divided_in_patches(encode, image, values.shape[1], grid, cutter.patch_size, cutter.merge_size)
    if values.dim() < 4:
        raise ImageError(f"pixel_values {tuple(values.shape)} are neither views (..., C, h, w) nor patches of a grid")
    empty = int((values.flatten(0, -4) == 0).flatten(1).all(1).sum())  # tiles that Llama 3.2 Vision appends
    views = values.flatten(0, -4)[: -empty or None]  # (V, C, h, w)
    corners = boxes_of_views(lambda ramp: encode(ramp)["pixel_values"].flatten(0, -4)[: len(views)], image.size)
    boxes = torch.tensor(corners, dtype=torch.float64, device="cpu")  # (V, 4)
    inside = torch.tensor([*image.size], device="cpu") - 0.01 * max(image.size)
    is_whole = ((boxes[:, :2] < 0.01 * max(image.size)) & (boxes[:, 2:] > inside)).all(1)
    is_tile = ~is_whole | is_whole.all()
    tiles, size = boxes[is_tile], torch.tensor(views.shape[:1:-1], device="cpu")  # (w, h)
    box = torch.cat([tiles[:, :2].amin(0), tiles[:, 2:].amax(0)])
    extent = box[2:] - box[:2]
    cell = tiles[0, 2:] - tiles[0, :2]
    steps = (tiles - box[:2].repeat(2)) / cell.repeat(2)  # edges of the tiles on a grid of such cells
    counts = (extent / cell).round().long()  # the numbers of columns and rows
    if (steps - steps.round()).abs().max() > 0.1 or len({*map(tuple, steps.round().tolist())}) != counts.prod():
        raise ImageError(f"{len(tiles)} tiles of an image are not the rows of a grid")
    canvas_size = counts * size  # (w, h)
    scale = canvas_size / extent  # pixels of the canvas per pixel of the image, (x, y)
    unit = torch.where(is_tile[:, None], size, 1).repeat(1, 2)  # tiles lie on a grid
    edges = ((boxes - box[:2].repeat(2)) * scale.repeat(2) / unit).round().clamp(min=0).long() * unit
    crops = [(..., slice(top, bottom), slice(left, right)) for left, top, right, bottom in edges.tolist()]
    canvas = values.new_zeros(views.shape[1], *canvas_size.tolist()[::-1])
    for number in is_tile.nonzero()[:, 0].tolist():
        canvas[crops[number]] = views[number]
    left, top, right, bottom = box.tolist()
    return Canvas(canvas, (left, top, right, bottom), partial(_views, crops, views.shape[2:], empty))


def _views(crops: Sequence[Any], size: Sequence[int], empty: int, x: Tensor) -> Tensor:
    """Return crops of canvases (N, C, H, W) in one size, and then empty tiles."""
    return F.pad(torch.stack([_resized(x[crop], size) for crop in crops], 1), (0,) * 7 + (empty,))


def _resized(x: Tensor, size: Sequence[int]) -> Tensor:
    if x.shape[2:] == size:
        return x
    wide = at_least_float32(x)  # CPUs do not resize in half precision
    return F.interpolate(wide, size, mode="bicubic", antialias=True).to(x.dtype)


def _divided_in_patches(
    encode: Encode, image: Image.Image, numbers: int, grid: Sequence[int], size: int, merged: int
) -> Canvas:
    """Return the canvas of flattened patches (n, numbers), in the order of blocks of `merged` x `merged` patches.

    The numbers of a patch are its pixels (3, repeats, size, size), with equal repetitions in time, as in Qwen-VL.
    """
    rows, columns = grid
    pixels = partial(_patches, rows, columns, size, merged, numbers // (3 * size**2))
    indices = torch.arange(3 * rows * columns * size**2, device="cpu").view(3, rows * size, columns * size)
    order = pixels(indices[None]).flatten()  # the index of the pixel that each value shows

    def canvas(source: Image.Image) -> Tensor:
        values: Tensor = encode(source)["pixel_values"]
        return values.new_empty(indices.shape).put_(order, values.flatten())

    (box,) = boxes_of_views(lambda source: canvas(source)[None], image.size)
    return Canvas(canvas(image), box, pixels)


def _patches(rows: int, columns: int, size: int, merged: int, repeats: int, x: Tensor) -> Tensor:
    """Return the flattened patches of canvases (N, 3, H, W), in the order of `_divided_in_patches`."""
    blocks = x.reshape(len(x), 3, rows // merged, merged, size, columns // merged, merged, size)
    patches = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(x), rows * columns, 3, 1, size, size)
    return patches.expand(-1, -1, -1, repeats, -1, -1).flatten(2)
