"""Token activation maps: the image tokens at which a vision-language model would write a word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attribution.base import Attribution
from ..attribution.explanation import BatchAttribution
from ..attribution.questions import Questions, explained_answer
from ..errors import NotApplicableError
from ..hooks.manager import HookManager
from ..io.axes import at_least_float32
from ..model.answer import Answer
from ..model.call import call, forward_args, shown_images
from ..targets.classes import output_tensor
from ..targets.words import WordScore
from ..validation import Sign


class TAM(Attribution):
    """Logit of a word at each token of the image, without the part that earlier words have in common with it.

    Formula: S = G((A − λ Σ_c w_c A_c)⁺), with A_i = (u · h_i)⁺ the logit of the word at image token i, A_c the logit of
    the earlier word c, w_c the logit of the word at c, and λ = ⟨A, I⟩ / ⟨I, I⟩ the least squares for the sum I. G is
    the rank Gaussian filter.

    The last hidden state h_i of each image token is multiplied by the row u of the output layer that belongs to the
    word. Earlier words are the text between the image and the word, except for the same token. The filter replaces each
    cell by a weighted mean of its 3 x 3 neighbourhood, sorted: the weights are a Gaussian around the median, with the
    coefficient of variation as its width. The maps of the tokens of a word are added.

    It explains answers only, so it is not in the registry. It shows where the model would write the word, not why: it
    uses no gradient and does not change the image.

    Values: (N, 1, h, w), at least 0, logits.

    Raises:
        NotApplicableError: An image is explained; the target is not `saliency.words`, or is a contrast of words; the
            logits are not a linear layer of the hidden states; or the image tokens have no position in the image.

    Source: Li et al., "Token Activation Map to Visually Explain Multimodal LLMs" (2025),
        https://arxiv.org/abs/2506.23270.
    """

    cost = "1 forward"
    units = "logit"
    sign: ClassVar[Sign] = "positive"
    is_complete = False

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        """Explain one target."""
        return self.explain_targets(x, [target])[0]

    def explain_targets(self, x: Tensor, targets: Sequence[Questions]) -> list[BatchAttribution]:
        """Explain several targets from one forward."""
        answer = explained_answer()
        if answer is None:
            raise NotApplicableError("TAM explains words of an answer; pass saliency.generate(...) instead of an image")
        layout, text = answer.layout(shown_images(x)[0]), _text_after_image(answer)
        output, logits = self._logits(answer, text, x)
        results = []
        for target in targets:
            scores = target(output)  # finds the words in the answer
            words = target[0].score
            if not isinstance(words, WordScore) or words.other is not None:
                problem = "TAM explains saliency.words(...) without against="
                raise NotApplicableError(f"{problem}; use attn_lrp for other targets")
            maps = torch.stack([_activation(answer, text, row, words) for row in logits])
            results.append(BatchAttribution(rank_gaussian(layout(maps[..., None])), scores))
        return results

    def _logits(self, answer: Answer, text: Tensor, x: Tensor) -> tuple[Any, Tensor]:
        """Return the output of the model, and the positive logits (N, L, T) of T tokens of text at all positions.

        The model computes the logits of the whole vocabulary at the positions of the answer only.
        """
        head, hidden, count = _output_layer(self.model), list[Tensor](), len(answer.tokens)
        positional, arguments = forward_args(x)
        if "logits_to_keep" in arguments:
            arguments["logits_to_keep"] = 0

        def keep(states: Tensor) -> Tensor:
            hidden.append(states.detach())
            return states[:, -count:]

        with torch.no_grad(), HookManager() as hooks:
            hooks.revise_input(head, keep)
            output = call(self.model, tuple(positional), arguments)
        problem = f"the logits of {type(self.model).__name__} are not a linear layer of its hidden states"
        refusal = NotApplicableError(f"TAM: {problem}; use attn_lrp or chefer_attention")
        if not hidden:
            raise refusal
        ids = answer.ids[text]
        offsets: Tensor | None = head.bias
        bias = None if offsets is None else at_least_float32(offsets.detach()[ids])
        logits = F.linear(at_least_float32(hidden[-1]), at_least_float32(head.weight.detach()[ids]), bias)
        read, tail = at_least_float32(output_tensor(output))[:, -count:, ids], logits[:, -count:]
        if read.shape != tail.shape or not torch.allclose(read, tail, rtol=1e-2, atol=1e-2 * float(read.abs().max())):
            raise refusal
        return output, logits.clamp_(min=0)


def _text_after_image(answer: Answer) -> Tensor:
    """Return the positions (T,) of the text after the first token of an image, up to the end of the answer."""
    is_image = answer.is_image
    after = torch.arange(len(answer.ids), device=is_image.device) > is_image.nonzero()[0, 0]
    after[:-1] &= ~is_image
    return after.nonzero()[:, 0]


def _activation(answer: Answer, text: Tensor, logits: Tensor, words: WordScore) -> Tensor:
    """Return the activation (L,) of words at image tokens, from the positive logits (L, T) of a text."""
    is_image, total = answer.is_image, torch.zeros_like(logits[:, 0])
    for row, token in words.pairs:
        position = answer.output_positions[row] + 1
        earlier = (text < position) & (answer.ids[text] != token)
        column = logits[:, text == position][:, 0]
        context = (logits[:, earlier] @ column[text[earlier]]) * is_image
        word = column * is_image
        factor = (word @ context) / (context @ context).clamp(min=torch.finfo(word.dtype).tiny)  # least squares
        total += (word - factor * context).clamp(min=0)
    return total


def rank_gaussian(maps: Tensor) -> Tensor:
    """Return maps (N, 1, h, w), at least 0, after the rank Gaussian filter with 3 x 3 cells."""
    mode = "reflect" if min(maps.shape[2:]) > 1 else "replicate"
    windows = F.unfold(F.pad(maps, (1, 1, 1, 1), mode=mode), 3).sort(1).values  # (N, 9, cells)
    ranks = torch.arange(-4.0, 5.0, device=maps.device, dtype=maps.dtype)[:, None]
    tiny = torch.finfo(maps.dtype).eps
    width = windows.std(1, correction=0, keepdim=True) / windows.mean(1, keepdim=True).clamp(min=tiny)
    weights = torch.exp(-ranks.square() / (2 * width.square()).clamp(min=tiny))
    return ((windows * weights).sum(1) / weights.sum(1)).view_as(maps)


def _output_layer(model: nn.Module) -> nn.Linear:
    """Return the layer of the logits: the layer that transformers names, or the last linear layer."""
    named: Any = getattr(model, "get_output_embeddings", lambda: None)()
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return named if isinstance(named, nn.Linear) else linear[-1]
