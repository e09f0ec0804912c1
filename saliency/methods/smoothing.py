"""Methods averaged over copies of the image: with noise (SmoothGrad, its square, the variance), or mirrored."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from ..attribution.base import Attribution, get_method
from ..attribution.estimates import Estimate, Squares, Variance, generator
from ..attribution.explanation import BatchAttribution, Explanation, Setting
from ..attribution.options import Option, PositionalOption
from ..attribution.passes import (
    ImageAttribution,
    MakeInputs,
    MultiPassAttribution,
    Passes,
    SampledAttribution,
    Stopping,
    from_estimate,
)
from ..attribution.questions import Questions
from ..errors import MethodError
from ..io.axes import along_rows, at_least_float32
from ..io.inputs import Batch
from ..model.call import unwrap
from ..targets.question import Target
from ..validation import check_flag, check_number, check_numbers, described
from .gradient import VanillaGradient

NOISE_HINT = "; 0.1 to 0.2 of the range is usual"


class WrappingAttribution(MultiPassAttribution):
    """Base class of methods that wrap another method and run it on changed copies of the image.

    Args:
        model: A model, or the method to wrap.
        inner: The name of the wrapped method, if a model is given.
        inner_options: The options of the wrapped method, if a model is given, including a layer by name.
    """

    model: PositionalOption[nn.Module | Attribution, nn.Module] = PositionalOption(
        check=lambda method, model: unwrap(model), kw_only=False
    )
    inner: Option[str] = Option(VanillaGradient.name)
    inner_options: Option[Mapping[str, Setting]] = Option({})

    def set_options(self, values: dict[str, Any]) -> None:
        """Store the values of all options, after the wrapped method was created from them."""
        wrapped, inner, inner_options = values["model"], values["inner"], values["inner_options"]
        if not isinstance(inner_options, Mapping):
            raise MethodError(f"inner_options={described(inner_options)} is not a mapping of names to options")
        if not isinstance(wrapped, Attribution):
            about_the_model = {name: values[name] for name in ("preprocess", "categories", "whole", "layout")}
            wrapped = get_method(inner)(wrapped, **{**about_the_model, **inner_options})
        elif inner_options or inner not in (VanillaGradient.name, _name_of(wrapped)):
            raise MethodError(
                f"{type(self).__name__} got the method {wrapped!r} and also inner={inner!r} with inner_options="
                f"{inner_options!r}; pass either a method, or inner and inner_options"
            )
        else:
            values |= {n: getattr(wrapped, n) for n in ("preprocess", "categories", "layout") if values[n] is None}
        values["whole"] = values["whole"] or wrapped.whole
        self._wrapped: Attribution = wrapped
        layer = getattr(wrapped, "layer", None)
        inner_options = ({"layer": layer} if isinstance(layer, str) else {}) | dict(wrapped.settings)
        values |= {"model": wrapped.model, "inner": _name_of(wrapped), "inner_options": inner_options}
        super().set_options(values)

    def explained_target(self, target: Target) -> Target:
        """Return the target that the wrapped method explains."""
        return self._wrapped.explained_target(target)

    def explanation(self, result: BatchAttribution, target: Questions, batch: Batch) -> Explanation:
        """Return the checked explanation. A mean is drawn with the sign of the wrapped method."""
        explanation = super().explanation(result, target, batch)
        return replace(explanation, sign=self._wrapped.sign) if type(self).sign != "positive" else explanation

    def wrapped_results(
        self, passes: Passes, make: MakeInputs, count: int, *, mirrored: bool = False, **stopping: Unpack[Stopping]
    ) -> Iterator[BatchAttribution]:
        """Yield the wrapped method's results for `count` copies of an image, chunk by chunk.

        Args:
            passes: Runs the passes.
            make: Creates the copies from `start` to `stop`.
            count: The number of copies.
            mirrored: Whether the copies are mirrored from left to right, and the target with them.
            **stopping: See `Stopping`.
        """
        wrapped = copy.copy(self._wrapped)
        if isinstance(wrapped, MultiPassAttribution):  # the outer method draws the progress
            wrapped.progress = False

        def compute(start: int, stop: int) -> BatchAttribution:
            with torch.no_grad():
                rows = make(start, stop)
            return wrapped.explain(rows, passes.target(len(rows), mirrored=mirrored))

        return passes.chunks(compute, count, **stopping)


class NoisyAttribution(WrappingAttribution, SampledAttribution):
    """Base class of methods that wrap another method and run it on noisy copies of the image.

    Args:
        noise: The standard deviation of the noise, as a fraction of the range of the image's values.
    """

    cost = "50 times the wrapped method: 50 forwards, 50 backwards"
    preview_options: ClassVar = {"passes": 6}

    noise: Option[float] = Option(0.15, check_number, least=0, hint=NOISE_HINT)

    estimate: ClassVar[type[Estimate]] = Estimate
    """The estimate of the map from the values for each copy."""
    least_passes: ClassVar[int] = 1

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Return an estimate over the noisy copies, once all passes ran or it is precise enough."""
        if self.most_passes < self.least_passes:
            raise MethodError(f"passes={self.passes} gives no variance; {self.name} takes at least {self.least_passes}")
        estimate, make = self.estimate(), partial(noisy_copies, passes.x, self.noise, self.seed)
        stopping: Stopping = {"estimate": estimate, "least": self.least_passes}
        for result in self.wrapped_results(passes, make, self.most_passes, **stopping):
            estimate.add(at_least_float32(result.values.detach()))
        mean = from_estimate(estimate, at_least_float32(passes.x[:0]), layer=result.layer)
        return mean._replace(coverage=result.coverage)


class Augmented(WrappingAttribution):
    """The mean of a method's values over mirrored and scaled copies of the image; by default of the gradient.

    Formula: S = mean_s,F F⁻¹(E(s F(x))), with scales s, F mirror or identity, and E the values of the wrapped method.

    The values of mirrored copies are mirrored back first. A box or a region is mirrored with the image. A function of
    the output reads the output of the mirrored copy unchanged. This is `aug_smooth` of pytorch-grad-cam.

    Args:
        flips: Whether each copy is also mirrored from left to right.
        scales: The factors of the model's normalised input, one for each copy.

    Values: as for the wrapped method, the mean over the copies; drawn as for the wrapped method.

    Raises:
        MethodError: `scales` are not positive numbers, or the wrapped method is given twice or does not exist.
        TargetError: The target is not the same in a mirrored image: a left or right edge, a joint, or the position of a
            neuron. Pass flips=False.

    Source: Gildenblat and contributors, "PyTorch library for CAM methods" (2021),
        https://github.com/jacobgil/pytorch-grad-cam.
    """

    name = "augmented"
    units = "units of the wrapped method"
    sign = "absolute"
    cost = "6 times the wrapped method: 6 forwards, 6 backwards"

    flips: Option[bool] = Option(True, check_flag)
    scales: Option[tuple[float, ...]] = Option((0.9, 1.0, 1.1), check_numbers, above=0)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Return the mean over the copies."""
        factors = along_rows(passes.x.new_tensor(self.scales), passes.x)
        values: list[Tensor] = []
        for image, mirrored in ((passes.x, False), (passes.x.flip(-1), True))[: 1 + self.flips]:

            def make(start: int, stop: int, image: Tensor = image) -> Tensor:
                return image * factors[start:stop]

            for result in self.wrapped_results(passes, make, len(factors), mirrored=mirrored):
                chunk = at_least_float32(result.values.detach())
                values.append(chunk.flip(-1) if mirrored else chunk)
        return ImageAttribution(torch.cat(values).mean(0), layer=result.layer, coverage=result.coverage)


class SmoothGrad(NoisyAttribution):
    """The mean of a method's signed values over noisy copies of the image; by default of the plain gradient.

    Formula: S = mean_z E(x + z), with normal noise z and E the values of the wrapped method.

    Any method can be wrapped: `SmoothGrad(GuidedBackprop(model))`, or `SmoothGrad(model, inner="guided_backprop")`.
    The target is resolved on the clean image. Magnitudes are taken when the map is drawn, never before the mean.

    Args:
        noise: The standard deviation of the noise, as a fraction of the range of the image's values; 0.1 to 0.2 in the
            paper.

    Values: as for the wrapped method; for the gradient (N, C, H, W), in score units per unit of the normalised input.
    They are drawn (signed, positive, absolute) as for the wrapped method. The error is the standard error of the mean.

    Raises:
        MethodError: The noise is negative, or the wrapped method is given twice or does not exist.

    Source: Smilkov et al., "SmoothGrad: removing noise by adding noise" (2017), https://arxiv.org/abs/1706.03825.
    """

    name = "smooth_grad"
    units = "units of the wrapped method; score per unit of normalised input"
    sign = "absolute"


class SmoothGradSquared(NoisyAttribution):
    """The mean of a method's squared values over noisy copies of the image; by default of the plain gradient.

    Formula: S = mean_z E(x + z)², with normal noise z and E the values of the wrapped method.

    Args:
        noise: As for `SmoothGrad`.

    Values: of the wrapped method's shape, not negative, in its units squared. The error is the standard error of the
    mean of squares.

    Raises:
        MethodError: The noise is negative, or the wrapped method is given twice or does not exist.

    Source: Hooker et al., "A Benchmark for Interpretability Methods in Deep Neural Networks" (2018),
        https://arxiv.org/abs/1806.10758.
    """

    name = "smooth_grad_squared"
    ignores_sign = True
    units = "units of the wrapped method, squared"
    sign = "positive"
    estimate = Squares


class VarGrad(NoisyAttribution):
    """The variance of a method's values over noisy copies of the image; by default of the plain gradient.

    Formula: S = Var_z E(x + z), with normal noise z and E the values of the wrapped method.

    The map is high where small changes of the image change the values. Values that are the same in all copies have no
    variance: for a linear model the map is zero.

    Args:
        noise: As for `SmoothGrad`.

    Values: of the wrapped method's shape, not negative, in its units squared: the unbiased variance. The error is the
    standard error of a variance, from the second and fourth moments: sqrt((m4 - (n - 3) / (n - 1) * s^4) / n).

    Raises:
        MethodError: A single pass, which has no variance; the noise is negative, or the wrapped method does not exist.

    Source: Adebayo et al., "Local Explanation Methods for Deep Neural Networks Lack Sensitivity to Parameter Values"
        (2018), https://arxiv.org/abs/1810.03307.
    """

    name = "var_grad"
    ignores_sign = True
    units = "units of the wrapped method, squared"
    sign = "positive"
    estimate = Variance
    least_passes = 2


def noisy_copies(x: Tensor, noise: float, seed: int, start: int, stop: int) -> Tensor:
    """Return the noisy copies (k, C, H, W) of an image (1, C, H, W) from `start` to `stop`, with independent noise.

    Args:
        x: The image.
        noise: The standard deviation of the noise, as a fraction of the range of the image's values.
        seed: The seed of the draws, which are the same for every image, dtype and device.
        start: The number of the first copy.
        stop: The number after the last copy.
    """
    drawn = torch.empty(stop - start, *x.shape[1:], dtype=torch.float32, device="cpu")
    for row, number in enumerate(range(start, stop)):
        drawn[row].normal_(generator=generator(seed, number))
    return x + noise * (x.max() - x.min()) * drawn.to(x)


def _name_of(method: Attribution) -> str:
    return method.name or type(method).__name__
