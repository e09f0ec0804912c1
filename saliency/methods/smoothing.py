"""Means over noisy copies of the image, of any method: what stays is what does not hang on the single pixel."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from ..attribution.base import Attribution, BatchAttribution
from ..attribution.explanation import Explanation, Setting
from ..attribution.forward import at_least_float32
from ..attribution.options import SamplingOptions
from ..attribution.registry import get_method as method_named
from ..attribution.resolved_target import ResolvedTarget
from ..engine.estimates import Estimate, rank_correlation
from ..engine.multi_pass import ImageAttribution, MultiPassAttribution, SampledAttribution, from_estimate, generator
from ..engine.runner import PassRunner
from ..errors import MethodError
from ..hooks.rectifiers import Coverage
from ..io.inputs import Batch
from ..validation import real_number
from .gradient import VanillaGradient


class Variance(Estimate):
    """A variance per pixel over samples that stream by, with its standard error, in constant memory.

    It keeps sums of the first four powers of what each sample is off the first one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first: Tensor | None = None
        self._sums: list[Tensor] = []
        self._evens: list[Tensor] = []  # the first two of the samples 0, 2, 4, ...

    def add(self, samples: Tensor) -> None:
        """Take in a chunk of samples (k, ...)."""
        if not len(samples):
            return
        samples = samples.detach().to(torch.float32 if samples.device.type == "mps" else torch.float64)
        if self._first is None:
            self._first = samples[0].clone()
            self._sums = [torch.zeros_like(self._first) for _ in range(4)]
            self._evens = [torch.zeros_like(self._first) for _ in range(2)]
        off = samples - self._first
        power = torch.ones_like(off)
        for order in range(4):
            power *= off
            self._sums[order] += power.sum(0)
            if order < 2:
                self._evens[order] += power[self.count % 2 :: 2].sum(0)
        self.count += len(samples)

    @property
    def mean(self) -> Tensor:
        """What is estimated: the unbiased variance of the samples (...); zero for a single one."""
        return _variance(self._sums, self.count)

    @property
    def error(self) -> Tensor | None:
        """The standard error of the variance (...); None for fewer than four samples, which say nothing of it."""
        n = self.count
        if n < 4:
            return None
        m, second, third, fourth = (each / n for each in self._sums)
        central = fourth - 4 * m * third + 6 * m.square() * second - 3 * m**4
        squared = self.mean.square() * ((n - 3) / (n - 1))
        return ((central - squared).clamp(min=0) / n).sqrt()

    @property
    def agreement(self) -> float | None:
        """The rank correlation of the variances of every other sample and of those between; None below four samples."""
        if self.count < 4:
            return None
        evens = (self.count + 1) // 2
        odds = [total - even for total, even in zip(self._sums[:2], self._evens, strict=True)]
        return rank_correlation(_variance(self._evens, evens), _variance(odds, self.count - evens))


def _variance(sums: Sequence[Tensor], count: int) -> Tensor:
    """The unbiased variance, from the sums of samples and of their squares."""
    return ((sums[1] - sums[0].square() / count) / max(count - 1, 1)).clamp(min=0)


Options = Mapping[str, Setting] | Sequence[Sequence[Setting]]
"""Options of a method by name, or pairs of a name and an option."""


class NoisyAttribution(SampledAttribution):
    """A method that wraps another one, and asks it about noisy copies of the image.

    Args:
        model: A model, or a method on one, which is then the wrapped one.
        inner: The name of the wrapped method, where a model is given.
        inner_options: Its options, where a model is given; a layer by name is among them.
        noise: The noise's standard deviation, as a share of the range of the image's values.
        **sampling: See `saliency.attribution.options.SamplingOptions`.
    """

    cost = "50 times the wrapped method: 50 forwards, 50 backwards"
    quick_options: ClassVar[Mapping[str, Any]] = {"passes": 6}

    def __init__(
        self,
        model: nn.Module | Attribution,
        *,
        inner: str = VanillaGradient.name,
        inner_options: Options = (),
        noise: float = 0.15,
        **sampling: Unpack[SamplingOptions],
    ) -> None:
        if isinstance(model, Attribution):
            if inner_options or inner not in (VanillaGradient.name, _name_of(model)):
                raise MethodError(
                    f"{type(self).__name__} was given {model!r} to wrap, and inner={inner!r} with options "
                    f"{inner_options!r} as well; give one of them"
                )
            wrapped = model
            sampling.setdefault("preprocess", wrapped.preprocess)
            sampling.setdefault("categories", None if wrapped.categories is None else list(wrapped.categories))
        else:
            wrapped = method_named(inner)(model, **_as_options(inner_options))
        super().__init__(wrapped.model, **sampling)
        self.inner = _name_of(wrapped)
        self.inner_options = _options_of(wrapped)
        self.noise = real_number("noise", noise, least=0, hint="; 0.1 to 0.2 of the range is usual")
        self._wrapped = wrapped
        self._coverages: list[Coverage | None] | None = None

    def explain(self, x: Tensor, target: ResolvedTarget) -> BatchAttribution:
        """The findings of all images, with the coverage that the wrapped method reports."""
        one_call = copy.copy(self)  # a list of its own: other threads may use this object
        coverages: list[Coverage | None] = []
        one_call._coverages = coverages
        finding = super(NoisyAttribution, one_call).explain(x, target)
        return finding._replace(coverage=coverages[0] if coverages else None)

    def explained_target(self, target: ResolvedTarget) -> ResolvedTarget:
        """That of the wrapped method."""
        return self._wrapped.explained_target(target)

    def explanation(self, finding: BatchAttribution, selection: ResolvedTarget, batch: Batch) -> Explanation:
        """A finding, checked. The mean of a method is read as the method is."""
        made = super().explanation(finding, selection, batch)
        return replace(made, sign=self._wrapped.sign) if type(self).sign != "positive" else made

    def noisy(self, passes: PassRunner) -> Iterator[tuple[Tensor, str | None]]:
        """What the wrapped method gives for noisy copies of an image: values (k, ...) and the layer, chunk by chunk."""

        def make(start: int, stop: int) -> Tensor:
            return noisy_copies(passes.x, self.noise, self.seed, start, stop)

        if type(self._wrapped) is VanillaGradient:
            for done in passes.gradients(make, self.most_passes):
                yield at_least_float32(done.gradients), None
            return
        wrapped = _subordinate(self._wrapped)
        if self.precision != "exact":
            own = isinstance(wrapped, MultiPassAttribution)
            passes.notes.append(f"{self.inner} runs the model " + ("by its own precision" if own else "exactly"))

        def compute(start: int, stop: int) -> BatchAttribution:
            with torch.no_grad():
                rows = make(start, stop)
            return wrapped.explain(rows, passes.target(len(rows)))

        for finding in passes.chunks(compute, self.most_passes, f"{self.inner} of noisy copies"):
            if self._coverages is not None:
                self._coverages.append(finding.coverage)
            for effort in finding.effort:
                passes.ran(self.inner, effort.precision)
            yield at_least_float32(finding.values.detach()), finding.layer

    def averaged(self, passes: PassRunner, estimate: Estimate, *, squared: bool = False) -> ImageAttribution:
        """An estimate over the noisy copies, until the passes are made or it is good enough."""
        layer = None
        for values, layer in self.noisy(passes):  # noqa: B007 - the layer is the same every time
            estimate.add(values.square() if squared else values)
            if passes.enough(estimate):
                break
        return from_estimate(estimate, at_least_float32(passes.x[:0]), layer=layer)


class SmoothGrad(NoisyAttribution):
    """The mean of a method's signed values over noisy copies of the image; by default of the plain gradient.

    Any method can be wrapped: `SmoothGrad(GuidedBackprop(model))`, or `SmoothGrad(model, inner="guided_backprop")`.
    The target is settled on the clean image. Magnitudes are taken when the map is drawn, never before the mean.

    Args:
        model: A model, or a method on one, which is then the wrapped one.
        inner: The name of the wrapped method, where a model is given.
        inner_options: Its options, where a model is given; a layer by name is among them.
        noise: The noise's standard deviation, as a share of the range of the image's values; the paper's is 0.1 to 0.2.
        **sampling: See `saliency.attribution.options.SamplingOptions`.

    Values: as those of the wrapped method, (N, C, H, W) and in score units per unit of the normalised input for the
    gradient; read (signed, positive, absolute) as the wrapped method is. The error is that of the mean.

    Raises:
        MethodError: The noise is negative, or the wrapped method is given twice or does not exist.
        TargetError: The target does not fit the model's output, or does not depend on the input.

    Source: Smilkov et al., "SmoothGrad: removing noise by adding noise" (2017), https://arxiv.org/abs/1706.03825.
    """

    name = "smooth_grad"
    units = "those of the wrapped method; score per unit of normalised input"
    sign = "absolute"

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The mean over noisy copies."""
        return self.averaged(passes, Estimate())


class SmoothGradSquared(NoisyAttribution):
    """The mean of a method's squared values over noisy copies of the image; by default of the plain gradient.

    Args:
        model: As for `SmoothGrad`.
        inner: As for `SmoothGrad`.
        inner_options: As for `SmoothGrad`.
        noise: As for `SmoothGrad`.
        **sampling: See `saliency.attribution.options.SamplingOptions`.

    Values: of the wrapped method's shape, not negative, in its units squared. The error is that of the mean of squares.

    Raises:
        MethodError: The noise is negative, or the wrapped method is given twice or does not exist.
        TargetError: The target does not fit the model's output, or does not depend on the input.

    Source: Hooker et al., "A Benchmark for Interpretability Methods in Deep Neural Networks" (2018),
        https://arxiv.org/abs/1806.10758.
    """

    name = "smooth_grad_squared"
    units = "those of the wrapped method, squared"
    sign = "positive"

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The mean of the squares over noisy copies."""
        return self.averaged(passes, Estimate(), squared=True)


class VarGrad(NoisyAttribution):
    """The variance of a method's values over noisy copies of the image; by default of the plain gradient.

    High where small changes of the picture change the method's mind, and blind to what is the same in all copies: on a
    linear model it is zero.

    Args:
        model: As for `SmoothGrad`.
        inner: As for `SmoothGrad`.
        inner_options: As for `SmoothGrad`.
        noise: As for `SmoothGrad`.
        **sampling: See `saliency.attribution.options.SamplingOptions`.

    Values: of the wrapped method's shape, not negative, in its units squared: the unbiased variance. The error is that
    of a variance, from the second and fourth moments: sqrt((m4 - (n - 3) / (n - 1) * s^4) / n).

    Raises:
        MethodError: A single pass, which has no variance; the noise is negative, or the wrapped method does not exist.
        TargetError: The target does not fit the model's output, or does not depend on the input.

    Source: Adebayo et al., "Local Explanation Methods for Deep Neural Networks Lack Sensitivity to Parameter Values"
        (2018), https://arxiv.org/abs/1810.03307.
    """

    name = "var_grad"
    units = "those of the wrapped method, squared"
    sign = "positive"

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The variance over noisy copies."""
        if self.most_passes < 2:
            raise MethodError(f"passes={self.passes} gives no variance; var_grad takes at least 2")
        passes.least = 2
        estimate = Variance()
        found = self.averaged(passes, estimate)
        if estimate.count < 2:
            passes.notes.append("one pass only, which has no variance")
        return found


def noisy_copies(x: Tensor, noise: float, seed: int, start: int, stop: int) -> Tensor:
    """The noisy copies (k, C, H, W) of an image (1, C, H, W) from `start` to `stop`; each has a draw of its own.

    Args:
        x: The image.
        noise: The noise's standard deviation, as a share of the range of the image's values.
        seed: What the draws come from. They are the same for every image, dtype and device.
        start: The number of the first copy.
        stop: The number behind that of the last.
    """
    drawn = torch.empty(stop - start, *x.shape[1:], dtype=torch.float32, device="cpu")
    for row, copy_ in enumerate(range(start, stop)):
        drawn[row].normal_(generator=generator(seed, copy_))
    return x + noise * (x.max() - x.min()) * drawn.to(x)


def _name_of(method: Attribution) -> str:
    return method.name or type(method).__name__


def _as_options(options: Options) -> dict[str, Any]:
    pairs = list(options.items()) if isinstance(options, Mapping) else options
    if not isinstance(pairs, list | tuple) or not all(map(_is_option, pairs)):
        raise MethodError(f"inner_options={options!r} are neither options by name nor pairs of a name and an option")
    return dict(pairs)


def _is_option(pair: object) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str)


def _options_of(method: Attribution) -> list[list[Setting]]:
    """The options of a method, and the layer that it was given, as pairs."""
    options: list[list[Setting]] = [[name, option] for name, option in method.settings.items()]
    layer = getattr(method, "layer", None)
    return [["layer", layer], *options] if isinstance(layer, str) else options


def _subordinate(method: Attribution) -> Attribution:
    """The wrapped method as it is run within another: progress and interrupts are the outer one's business."""
    if isinstance(method, MultiPassAttribution):
        method = copy.copy(method)
        method.progress, method.on_interrupt = False, "raise"
    return method
