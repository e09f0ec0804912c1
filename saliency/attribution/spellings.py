"""Names that other toolkits use, and what is used here instead, for error messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from ..errors import did_you_mean

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Of captum, grad-cam, torchcam, zennit, tf-explain and the authors' code; the first entry that fits is shown.
_OPTIONS = {
    "model": "forward_func net network",
    "layer": "target_layer target_layers layer_name conv_layer",
    "layers": "target_layer target_layers layer_names",
    "draws": "num_samples",
    "passes": "n_samples nt_samples num_samples nsamples n_iter num_masks n_masks",
    "steps": "n_steps num_steps x_steps n_iter max_iter num_samples",
    "noise": "noise_level stdevs std stdev_spread",
    "baseline": "baselines baseline_fn x_baseline",
    "references": "baselines",
    "fill": "baselines occlusion_fn",
    "window": "sliding_window_shapes patch_size window_size",
    "stride": "strides",
    "segments": "feature_mask n_segments num_segments",
    "cam": "base_method",
    "inner": "attribution_method base_method",
    "max_distance": "max_dist",
    "chunk": "batch_size internal_batch_size nt_samples_batch_size perturbations_per_eval",
    "progress": "show_progress",
    "seed": "random_state",
    "layout": "reshape_transform",
    "inputs": "image images input input_tensor",
    "forward_args": "additional_forward_args",
    "target": "targets class_idx class_index target_category attr_output",
}
_INSTEAD = {
    "pass the target to attribute": "target targets class_idx class_index target_category attr_output",
    "move the model to the device; images follow it": "use_cuda device device_ids",
    "it is not needed: the values are detached, and hooks last for one call": "create_graph retain_graph enable_hooks",
    "the values include the factor (image - baseline)": "multiply_by_inputs",
    "integrals are computed by the Gauss-Legendre rule": "method",
    "explanation.residual is this difference, with the opposite sign": "return_convergence_delta",
    'the values keep their sign; pass sign="absolute" or "positive" to overlay': "abs relu_attributions",
    "overlay normalises and resizes the values where it draws them": "interpolate_mode normalized use_rgb image_weight",
    "SmoothGrad(method) averages over noisy images": "aug_smooth",
    "use EigenGradCAM": "eigen_smooth",
    "use SmoothGrad, SmoothGradSquared or VarGrad": "nt_type",
    "rules of layers are methods here, such as GuidedBackprop": "composite",
}
_PUBLIC = {
    "VanillaGradient": "Saliency Gradient Backpropagation",
    "DeconvNet": "Deconvolution",
    "ExpectedGradients": "GradientShap",
    "SmoothGrad": "NoiseTunnel",
    "GradCAM": "LayerGradCam",
    "overlay": "show_cam_on_image overlay_mask visualize_image_attr",
    "probability": "ClassifierOutputSoftmaxTarget",
}


def option_hint(name: str, known: Collection[str]) -> str:
    """Return the end of an error about an unknown option, such as `; it is called steps here`."""
    for ours in _matches(name, _OPTIONS):
        if ours in known:
            return f"; it is called {ours} here"
    for advice in _matches(name, _INSTEAD):
        return f"; {advice}"
    return did_you_mean(name, known) or (f"; the options are {', '.join(known)}" if known else "")


def refuse_unknown_keywords(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate `attribute` with an error for unknown keywords, which may be options of the method."""
    known = list(inspect.signature(function).parameters)[1:]

    @wraps(function)
    def checked(*arguments: _P.args, **keywords: _P.kwargs) -> _R:
        for name in keywords:
            if name not in known:
                hint = _attribute_hint(name, type(arguments[0]), known)
                raise TypeError(f'attribute has no argument "{name}"{hint}')
        return function(*arguments, **keywords)

    return checked


def _attribute_hint(name: str, cls: Any, known: Collection[str]) -> str:
    for ours in (name, *_matches(name, _OPTIONS)):
        if ours in cls.parameters():
            return f"; the method takes it: {cls.__name__}(model, {ours}=...)"
    return option_hint(name, known)


def public_hint(name: str, known: Collection[str]) -> str:
    """Return the end of an error about an unknown public name, such as `; did you mean "GradCAM"?`."""
    for ours in _matches(name, _PUBLIC):
        return f"; it is called {ours} here"
    return did_you_mean(name, known)


def _matches(name: str, table: Mapping[str, str]) -> list[str]:
    return [ours for ours, theirs in table.items() if name in theirs.split()]
