"""Models of images and texts with a common embedding, such as CLIP and SigLIP."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from ..errors import ModelError, plural, warn
from ..hooks.autograd_graph import tensor_version
from ..targets.question import Prompt
from .call import model_attribute, prepared_for_attribution

_MOST_QUOTED = 60  # characters of a text in a warning
# By model: the state of its weights, and the embeddings of its prompts in that state.
_encoded: WeakKeyDictionary[nn.Module, tuple[Any, dict[str, Tensor]]] = WeakKeyDictionary()


class DualEncoder(nn.Module):
    """Model with an image encoder and a text encoder, wrapped as an image model that all methods can explain.

    Its forward takes images (N, C, H, W) and returns {"image_embeds": (N, D)}, not normalised. `saliency.load` wraps
    the two-tower models of open_clip and transformers.

    Args:
        model: A model of open_clip or OpenAI's clip, with `encode_image` and `encode_text`; or a model of transformers
            with `get_image_features` and `get_text_features`, such as CLIPModel and SiglipModel. It is not changed.
        tokenizer: The tokenizer of the model: `open_clip.get_tokenizer(...)`, or `AutoTokenizer` of transformers. The
            image processor of a processor of transformers, such as CLIPProcessor, becomes `preprocess`.

    Raises:
        ModelError: The model has none of these methods, or does not take images (N, C, H, W).

    Example:
        >>> network = open_clip.create_model("ViT-B-32", "openai")  # doctest: +SKIP
        >>> model = saliency.DualEncoder(network, open_clip.get_tokenizer("ViT-B-32"))  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        super().__init__()
        self.model: Any = model
        self.tokenizer = tokenizer
        preprocess = model_attribute("preprocess", model)
        if hasattr(tokenizer, "image_processor"):  # a processor of transformers
            self.tokenizer, preprocess = tokenizer.tokenizer, tokenizer.image_processor
        if preprocess is not None:
            self.preprocess = preprocess
        name = type(model).__name__
        for kind in ("text", "image"):
            if not hasattr(model, f"get_{kind}_features") and not hasattr(model, f"encode_{kind}"):
                videos = ", but one of videos" if hasattr(model, "get_video_features") else ""
                wanted = f"neither encode_{kind} nor get_{kind}_features"
                raise ModelError(f"{name} has no {kind} encoder{videos}: {wanted}")
        encode: Any = getattr(model, "get_image_features", None)
        if encode is not None and "spatial_shapes" in inspect.signature(encode).parameters:
            hint = "load weights of one size, such as hf/google/siglip2-base-patch16-224"
            raise ModelError(f"{name} takes lists of patches (NaFlex) instead of images (N, C, H, W); {hint}")

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return the embeddings of images."""
        return {"image_embeds": self._encoded("image", x)}

    def _encoded(self, kind: str, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Return the embeddings of an image or a text, by the function of transformers or else of open_clip."""
        encode = getattr(self.model, f"get_{kind}_features", None) or getattr(self.model, f"encode_{kind}")
        output = encode(*args, **kwargs)
        embeddings: Tensor = getattr(output, "pooler_output", output)
        return embeddings

    @property
    def logit_scale(self) -> float:
        """The factor from cosine similarities to logits, 100 in CLIP. Raises ModelError if it is missing."""
        if not hasattr(self.model, "logit_scale"):
            raise ModelError(f"{type(self.model).__name__} has no logit_scale, which log-odds of texts need")
        return float(self.model.get_parameter("logit_scale").detach().exp())

    def tokenize(self, prompt: str) -> dict[str, Tensor]:
        """Return the arguments of the text tower for one prompt; the first is its token ids (1, L).

        Warns:
            SaliencyWarning: The prompt has too many tokens, and is cut.
        """
        if not hasattr(self.model, "get_text_features"):
            tokens = {"text": self.tokenizer([prompt])}
            cut = self._cut_tokens(prompt, tokens["text"][0])
        else:
            # SigLIP was trained with padding to this length; in CLIP, padding has no influence.
            length = self.model.config.text_config.max_position_embeddings
            options = {"padding": "max_length", "truncation": True, "max_length": length, "return_tensors": "pt"}
            tokens = dict(self.tokenizer([prompt], **options))
            if self.model.config.model_type.startswith("siglip"):
                tokens.pop("attention_mask", None)  # SigLIP was trained to attend to the padding
            cut = len(self.tokenizer([prompt], verbose=False)["input_ids"][0]) - length
        if cut > 0:
            start = prompt if len(prompt) <= _MOST_QUOTED else f"{prompt[:_MOST_QUOTED]}..."
            warn(f'the model ignores the last {plural(cut, "token")} of the text "{start}", which is too long')
        device = next(self.model.parameters()).device
        return {name: values.to(device) for name, values in tokens.items()}

    def _cut_tokens(self, prompt: str, tokens: Tensor) -> int:
        """Return the number of prompt tokens that open_clip's tokenizer cut, given the remaining ones (L,)."""
        if "context_length" not in inspect.signature(self.tokenizer).parameters:
            return 0
        whole = self.tokenizer([prompt], context_length=len(tokens) + len(prompt.encode()) + 1)[0]  # ends in padding
        return int((whole != whole[-1]).nonzero().max() - (tokens != whole[-1]).nonzero().max())

    def encode_tokens(self, tokens: dict[str, Tensor]) -> Tensor:
        """Return the embedding (K, D) of tokens, not normalised."""
        if hasattr(self.model, "get_text_features"):
            return self._encoded("text", **tokens)
        return self._encoded("text", *tokens.values())

    def encode_text(self, prompts: Sequence[Prompt]) -> Tensor:
        """Return the embeddings (K, D) of prompts, not normalised, without gradient.

        The embedding of a tuple is the mean of its normalised embeddings. Each prompt is encoded once, until the
        weights change.
        """
        tensors = chain(self.model.parameters(), self.model.buffers())
        state = tuple((tensor.data_ptr(), tensor_version(tensor)) for tensor in tensors)
        if _encoded.get(self, (None,))[0] != state:
            _encoded[self] = (state, {})
        cached = _encoded[self][1]
        members = [[prompt] if isinstance(prompt, str) else prompt for prompt in prompts]
        for text in chain.from_iterable(members):
            if text not in cached:
                cached[text] = self._encode(text)
        rows = [[cached[text] for text in texts] for texts in members]
        return torch.cat([_mean(row) if len(row) > 1 else row[0] for row in rows])

    def _encode(self, prompt: str) -> Tensor:
        tokens = self.tokenize(prompt)
        kind = next(iter(tokens.values())).device.type
        with prepared_for_attribution(self), torch.no_grad(), torch.autocast(kind, enabled=False):
            return self.encode_tokens(tokens)


class LateInteraction(DualEncoder):
    """Model with an embedding for each token of an image and of a text, such as ColPali, wrapped as an image model.

    Its forward takes images (N, C, H, W) and returns {"image_embeds": (N, tokens, D)}. `saliency.max_sim` is the score
    of a text, and `saliency.word_similarity` shows which patches match which word.

    Args:
        model: `ColPaliForRetrieval` of transformers, or a model with the same forward. It is not changed.
        processor: Its processor.

    Raises:
        ModelError: The model takes patches or tiles instead of images (N, C, H, W).
    """

    def __init__(self, model: nn.Module, processor: Any) -> None:
        nn.Module.__init__(self)
        if not hasattr(processor, "image_processor"):
            got = type(processor).__name__
            raise ModelError(f"expected the processor of the model, such as ColPaliProcessor, got {got}")
        self.model, self.processor = model, processor
        self.tokenizer, self.preprocess = processor.tokenizer, processor.image_processor
        self._page = dict(processor(images=[Image.new("RGB", (64, 64))], return_tensors="pt"))
        if (shape := tuple(self._page.pop("pixel_values").shape))[1:2] != (3,) or len(shape) != 4:
            raise ModelError(f"{type(model).__name__} takes {shape}; expected images (N, 3, H, W), as of ColPali")

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return the embeddings of all tokens of images."""
        page = {name: values.to(x.device).expand(len(x), -1) for name, values in self._page.items()}
        return {"image_embeds": self.model(pixel_values=x, **page).embeddings}

    def tokenize(self, prompt: str) -> dict[str, Tensor]:
        """Return the arguments of the model for a text; the first is its token ids (1, L)."""
        device = next(self.model.parameters()).device
        return {name: values.to(device) for name, values in self.processor(text=[prompt], return_tensors="pt").items()}

    def encode_tokens(self, tokens: dict[str, Tensor]) -> Tensor:
        """Return the embeddings (L, D) of the tokens of one text."""
        embeddings: Tensor = self.model(**tokens).embeddings[0]
        return embeddings

    def words(self, prompt: str) -> tuple[str, ...]:
        """Return the L tokens of a text, with the tokens that the processor adds."""
        return tuple(self.tokenizer.decode([token]).strip() for token in self.tokenize(prompt)["input_ids"][0].tolist())


def _mean(embeddings: list[Tensor]) -> Tensor:
    return F.normalize(torch.cat(embeddings), dim=1).mean(0, keepdim=True)
