"""Importance of the tokens of a text for its similarity to an image."""

from __future__ import annotations

import html
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attribution.base import get_method
from ..attribution.explanation import Explanation
from ..errors import ImageError, LayerError, MethodError, ModelError
from ..hooks.manager import HookManager
from ..io.atomic_write import atomic_write
from ..io.axes import at_least_float32
from ..io.inputs import ImageLike, read
from ..model.call import model_attribute, prepared_for_attribution, reference_tensor, run_model, unwrap
from ..model.dual_encoder import DualEncoder, LateInteraction
from ..model.layers import attention_layout
from ..targets.question import QuestionFacts
from ..targets.similarity import similarity
from ..validation import check_choice, described

TEXT_METHODS = ("integrated_gradients", "deep_lift", "input_x_gradient", "attn_lrp", "cp_lrp")


@dataclass(frozen=True, slots=True, eq=False)
class TextExplanation:
    """Importance of each token of a text; a notebook shows it as coloured words.

    Attributes:
        text: The text.
        tokens: The L tokens. Padding is one token ("!" in open_clip), and is left out if it has no influence.
        values: (L,) the importance of each token, signed, in units of the score.
        score: The cosine similarity of the text and the image.
        method: The method's name in the registry.
    """

    text: str
    tokens: tuple[str, ...]
    values: Tensor
    score: float
    method: str

    def __str__(self) -> str:
        """Return one line per token: its value and its text."""
        return "\n".join(f"{value:+9.4f}  {token}" for token, value in zip(self.tokens, self.values, strict=True))

    def _repr_html_(self) -> str:
        """Return the tokens as HTML: red for positive values, blue for negative values."""
        largest = float(self.values.abs().max()) or 1.0
        words = [
            f'<span title="{value:+.4f}" style="background: hsla({0 if value > 0 else 210}, 80%, 50%, '
            f'{abs(value) / largest:.2f})">{html.escape(token)}</span>'
            for token, value in zip(self.tokens, self.values.tolist(), strict=True)
        ]
        return f'<meta charset="utf-8"><p>{" ".join(words)}</p>'

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the coloured words to a file of HTML, atomically, and return the path."""
        with atomic_write(path) as temporary:
            temporary.write_text(self._repr_html_(), "utf-8")
        return Path(path)


class _TextTower(nn.Module):
    """Text tower of a model for one text, as a function of the embeddings of its tokens (N, 1, L, D)."""

    def __init__(self, encoder: DualEncoder, text: str) -> None:
        super().__init__()
        self.encoder = encoder
        self.tokens = encoder.tokenize(text)
        tables = [module for module in encoder.modules() if isinstance(module, nn.Embedding)]
        self.table = max(tables, key=lambda table: table.num_embeddings)  # smaller tables are for positions

    def forward(self, x: Tensor) -> Tensor:
        tokens = {name: values.expand(len(x), -1) for name, values in self.tokens.items()}
        with HookManager() as hooks:
            hooks.revise(self.table, lambda _: x[:, 0])
            return self.encoder.encode_tokens(tokens)


def token_importance(
    model: nn.Module, image: ImageLike, text: str, method: str = "integrated_gradients", **options: Any
) -> TextExplanation:
    """Explain the cosine similarity of an image and a text by the tokens of the text.

    The method explains the text tower as a function of the token embeddings. The value of a token is the sum over its
    embedding. Baselines are by default embeddings of zero, so the values of integrated gradients and DeepLIFT sum to
    the score minus the score of such embeddings. After a layer norm, the score hardly depends on the length of an
    embedding. Gradient x input is then close to zero.

    Args:
        model: A `DualEncoder`.
        image: The image, as for `Attribution.attribute`.
        text: The text.
        method: One of "integrated_gradients", "deep_lift", "input_x_gradient", "attn_lrp" and "cp_lrp".
        options: Options of the method, such as `steps`.

    Raises:
        ModelError: The model has no text encoder.
        MethodError: The method is not supported, an option is invalid, or the text is not a string.
        ImageError: The image cannot be read, or there are several.

    Source: as for the method. Integrated gradients: Sundararajan et al., "Axiomatic Attribution for Deep Networks"
        (2017), https://arxiv.org/abs/1703.01365.
    """
    model = unwrap(model)
    if not isinstance(model, DualEncoder) or isinstance(model, LateInteraction):
        raise ModelError(
            f"{type(model).__name__} has no text encoder with one embedding per text; expected a saliency.DualEncoder"
        )
    if not isinstance(text, str):
        raise MethodError(f"text={described(text)}: expected one text, such as 'a photo of a cat'")
    cls = get_method(check_choice("method", method, TEXT_METHODS))
    with prepared_for_attribution(model), torch.no_grad():
        images = run_model(model, cls(model).read(image).inputs)["image_embeds"]
        if len(images) > 1:
            raise ImageError(f"expected one image, got {len(images)}")
        tower = _TextTower(model, text)
        ids = next(iter(tower.tokens.values()))[0]  # (L,)
        x = tower.table(ids)[None, None]  # (1, 1, L, D)
    result = cls(tower, **options).attribute(x, similarity(images[0]))
    return TextExplanation(text, *_tokens(model, ids, result.values.sum((0, 1, 3))), float(result.scores), method)


def word_similarity(model: nn.Module, image: ImageLike, text: str) -> Explanation:
    """Return the similarity of each word of a text to each patch of an image, as one map per word.

    The maximum over all tokens of the image, also tokens without a position, is the word's part of `saliency.max_sim`.

    Args:
        model: A `LateInteraction`.
        image: One image, as for `Attribution.attribute`.
        text: The text.

    Returns:
        An explanation of L words, for `saliency.figure`: values (L, 1, h, w), dimensionless, the `scores` (L,) of
            `max_sim`, and the words as target names.

    Raises:
        ModelError: The model is not a `LateInteraction`.
        ImageError: The image cannot be read, or there are several.
        LayerError: The image tokens are not a grid of patches.
    """
    model = unwrap(model)
    if not isinstance(model, LateInteraction):
        raise ModelError(f"{type(model).__name__} has no embedding per word; expected a saliency.LateInteraction")
    batch = read(image, model_attribute("preprocess", model), like=reference_tensor(model))
    x, words = batch.inputs, model.words(text)
    if len(x) > 1:
        raise ImageError(f"expected one image, got {len(x)}")
    with prepared_for_attribution(model), torch.no_grad():
        tokens = at_least_float32(run_model(model, x)["image_embeds"])  # (1, tokens, D)
        try:
            layout = attention_layout(model, tokens.shape[1], x)
        except LayerError as error:
            problem = f"the tokens of {type(model.model).__name__} are not one for each patch of the image"
            raise LayerError(problem) from error
    similarities = tokens @ model.encode_text([text]).to(tokens).T  # (1, tokens, L)
    return Explanation(
        layout(similarities).movedim(1, 0),
        similarities[0].amax(0),
        method="word_similarity",
        questions=tuple(map(QuestionFacts, words)),
        input_size=tuple(x.shape[2:]),
        frames=batch.frames * len(words),
        sign="positive",
        title="WordSimilarity",
        units="similarity",
    )


def _tokens(model: DualEncoder, ids: Tensor, values: Tensor) -> tuple[tuple[str, ...], Tensor]:
    """Return the tokens and their values, with the padding as one token, or without it if its value is zero."""
    padding = int((ids == ids[-1]).logical_not().nonzero().max()) + 1
    values = torch.cat([values[:padding], values[padding:].sum()[None]])
    values = values if values[-1] else values[:-1]
    return tuple(model.tokenizer.decode([token]).strip() for token in ids[: len(values)].tolist()), values
