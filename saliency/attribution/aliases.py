"""Names from other toolkits and their equivalents here, for error messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

from ..errors import did_you_mean

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Of captum, grad-cam, torchcam, zennit, tf-explain and the authors' code; the first entry that fits is shown. Each row
# answers an option of captum, grad-cam or zennit, or an argument of `attribute`, so none can go.
_OPTIONS = {
    "model": "forward_func net network nn_module",
    "layer": "target_layer target_layers layer_name conv_layer",
    "layers": "target_layer target_layers layer_names",
    "classes": "references",
    "passes": "samples draws masks directions n_samples nt_samples num_samples nsamples n_iter num_masks n_masks",
    "steps": "n_steps num_steps x_steps n_iter max_iter num_samples",
    "noise": "noise_level stdevs std stdev_spread",
    "baseline": "references baselines baseline_fn x_baseline",
    "fill": "baselines occlusion_fn",
    "window": "sliding_window_shapes patch_size window_size mask_size",
    "stride": "strides",
    "segments": "feature_mask n_segments num_segments",
    "cam": "base_method",
    "inner": "attribution_method base_method",
    "chunk": "batch_size n_batch internal_batch_size nt_samples_batch_size perturbations_per_eval",
    "progress": "show_progress",
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
    "use Augmented(method), which averages over flips and factors of the image": "aug_smooth",
    "passes run the model itself; for bfloat16, call the method in torch.autocast": "precision",
    "use EigenGradCAM": "eigen_smooth",
    "use Tiled(method, size=512, overlap=64)": "tiles overlap",
    "use SmoothGrad, SmoothGradSquared or VarGrad": "nt_type",
    "rules of layers are methods here, such as GuidedBackprop": "composite",
}
_DIFFERENCES = {"stdevs": ", as a share of the range of each image instead of in units of the input"}
_PUBLIC = {
    "VanillaGradient": "Saliency Gradient Backpropagation VanillaGrad",
    "DeconvNet": "Deconvolution",
    "GuidedBackprop": "GuidedBackpropGrad",
    "DeepSHAP": "DeepLiftShap DeepExplainer",
    "ExpectedGradients": "GradientShap GradientExplainer",
    "KernelSHAP": "KernelExplainer",
    "Passes": "PassRunner",
    "SmoothGrad": "NoiseTunnel",
    "GradCAM": "LayerGradCam",
    "HiResCAM": "LayerGradientXActivation",
    "Occlusion": "OcclusionSensitivity",
    "explain_matches": "BiLRP",
    "overlay": "show_cam_on_image overlay_mask visualize_image_attr image_plot",
    "probability": "ClassifierOutputSoftmaxTarget",
}
# The section "What does not exist here" of docs/migration.md has the same rows.
_ABSENT = {
    "HiResCAM(model, layer) multiplies gradients and activations; LRP(model, layer=layer) reads the relevance": (
        "LayerConductance LayerIntegratedGradients InternalInfluence LayerDeepLift LayerDeepLiftShap LayerGradientShap"
    ),
    "AblationCAM(model, layer) and ScoreCAM(model, layer) switch channels": "LayerFeatureAblation",
    "LRP(model, layer=layer)": "LayerLRP",
    "inspection.record(model) keeps the outputs of layers": "LayerActivation ActivationsAndGradients",
    "LRP(model, through={layer: [channel]}) is the relevance through a channel": (
        "NeuronGradient NeuronConductance NeuronIntegratedGradients NeuronDeepLift NeuronFeatureAblation"
    ),
    "inspection.extract_features(model, images) gives the activations to which a concept's classifier is fitted": (
        "TCAV Concept DeepFeatureFactorization"
    ),
    "CheferAttention(model) and GradientRollout(model) weigh attention by its gradient": (
        "AttCAT AttentionGradCAM TokenTM"
    ),
    "ScoreCAM(model, layer), with a tenth of the passes": "ISCAM SSCAM",
    'ScoreCAM(model, layer, channels=300, order="gradient")': "GScoreCAM",
    "GradCAM(model, layer) with saliency.region as the target, at the bottleneck": "SegGradCAM",
    "HiResCAM(model, layer, block=2) with saliency.region as the target, at the bottleneck": "SegXResCAM",
    "RISE(model) with saliency.similarity() as the target; uncertainty=True for the uncertainty": "RELAX",
    "ExtremalPerturbation(model) optimises the mask of a given area": "MeaningfulPerturbation",
    "Sobol(model) finds all effects of a cell on the score": "HSIC",
    "ViTCX(model), or RISE(model), which hides patches instead of removing tokens": "TIS",
    "EigenCAM(model, layer) is the linear principal component": "KPCA_CAM",
    "GradCAMPlusPlus(model, layer) or EigenCAM(model, layer)": "FEM",
    "Occlusion(model) or FeatureAblation(model); nothing is permuted within a batch": "FeaturePermutation",
    "KernelSHAP(model) or ShapleySampling(model) divides the score among segments": "PartitionExplainer",
    "the influence of training images is not explained": "TracInCP TracInCPFast SimilarityInfluence",
    "LRP(model, composite=...) takes a name or rules of relevance": (
        "Composite EpsilonPlus EpsilonPlusFlat EpsilonGammaBox EpsilonAlpha2Beta1 EpsilonAlpha2Beta1Flat"
    ),
    "batch norms are merged and sums shared on the graph of the call": (
        "Canonizer SequentialMergeBatchNorm ResNetCanonizer VGGCanonizer"
    ),
    "AttnLRP(model) needs no change of the model": "monkey_patch",
    "metrics.measure(names, explanation) measures one map": (
        "ROADCombined ROADMostRelevantFirst CamMultImageConfidenceChange infidelity sensitivity_max"
    ),
}
_RESULT = {
    "saliency.overlay(explanation) draws it; a notebook shows it as it is": "show plot visualize",
    "saliency.heatmap(explanation) is one number per pixel (N, H, W)": "heatmap map",
    "saliency.overlay(explanation) draws it": "overlay image",
    "saliency.figure(explanation) draws it": "figure",
    "explanation.values are the attributions": "attributions attribution shape numpy cpu detach",
}


def option_hint(name: str, known: Collection[str]) -> str:
    """Return the end of an error about an unknown option, such as `; it is called steps here`."""
    for ours in _matches(name, _OPTIONS):
        if ours in known:
            return f"; it is called {ours} here{_DIFFERENCES.get(name, '')}"
    for advice in _matches(name, _INSTEAD):
        return f"; {advice}"
    return did_you_mean(name, known) or (f"; the options are {', '.join(known)}" if known else "; there are no options")


def known_keywords(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Hide the catch-all of unknown keywords from the signature of `attribute`, which `refuse_keywords` answers."""
    signature = inspect.signature(function)
    known = [own for own in signature.parameters.values() if own.kind != own.VAR_KEYWORD]
    vars(function)["__signature__"] = signature.replace(parameters=known)
    return function


def refuse_unknown_keywords(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function of a method with an error for unknown keywords, which may be options of the method."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @wraps(function)
    def checked(*arguments: _P.args, **keywords: _P.kwargs) -> _R:
        for name in keywords:
            if name not in known:
                method = arguments[0] if arguments else keywords.get("method")
                hint = _argument_hint(name, type(method), known)
                raise TypeError(f'{function.__name__} has no argument "{name}"{hint}')
        return function(*arguments, **keywords)

    return checked


def refuse_keywords(names: Collection[str], cls: Any) -> NoReturn:
    """Raise TypeError for unknown keywords of `attribute`, which may be options of the method."""
    name, known = next(iter(names)), list(inspect.signature(cls.attribute).parameters)[1:]
    raise TypeError(f'attribute has no argument "{name}"{_argument_hint(name, cls, known)}')


def _argument_hint(name: str, cls: Any, known: Collection[str]) -> str:
    options: Collection[str] = getattr(cls, "parameters", tuple)()
    for ours in (name, *_matches(name, _OPTIONS)):
        if ours in options and ours not in known:
            each = ", with saliency.PerImage([...]) for one per image" if name == "baselines" else ""
            return f"; the method takes it: {cls.__name__}(model, {ours}=...){each}"
    return option_hint(name, known)


def public_hint(name: str, known: Collection[str]) -> str:
    """Return the end of an error about an unknown public name, such as `; did you mean "GradCAM"?`."""
    for ours in _matches(name, _PUBLIC):
        return f"; it is called {ours} here"
    for nearest in _matches(name, _ABSENT):
        return f"; not offered here; nearest: {nearest}"
    return did_you_mean(name, known)


def result_hint(name: str) -> str:
    """Return the end of an error about an unknown attribute of an explanation."""
    return next((f"; {advice}" for advice in _matches(name, _RESULT)), "")


def _matches(name: str, table: Mapping[str, str]) -> list[str]:
    return [ours for ours, theirs in table.items() if name in theirs.split()]
