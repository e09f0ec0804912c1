"""Wrong names are answered by the right ones: options, arguments of `attribute`, methods and public names."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch

import saliency
from saliency import METHODS, aliases
from saliency.aliases import option_hint, public_hint
from saliency.errors import MethodError, closest
from saliency.metrics import METRICS
from saliency.render.figure import draw_maps
from saliency.testing import tiny_model
from tests.models import PooledNet

MODEL = PooledNet().eval()
X = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "option", "hint"),
    [
        ("integrated_gradients", "n_steps", "it is called steps here"),
        ("integrated_gradients", "step", 'did you mean "steps"?'),
        ("integrated_gradients", "baselines", "it is called baseline here"),
        ("integrated_gradients", "internal_batch_size", "it is called chunk here"),
        ("expected_gradients", "baselines", "it is called baseline here"),
        ("occlusion", "sliding_window_shapes", "it is called window here"),
        ("occlusion", "baselines", "it is called fill here"),
        ("smooth_grad", "nt_samples", "it is called passes here"),
        ("smooth_grad", "stdevs", "it is called noise here, as a fraction of the range of each image"),
        ("grad_cam", "aug_smooth", "use Augmented(method), which averages over flips and factors"),
        ("grad_cam", "target_layers", "it is called layer here"),
        ("fused_cam", "target_layers", "it is called layers here"),
        ("grad_cam", "targets", "pass the target to attribute"),
        ("grad_cam", "use_cuda", "move the model to the device"),
        ("grad_cam", "reshape_transform", "it is called layout here"),
        ("grad_cam", "n_steps", "the options are model, layer, calls, preprocess, categories"),
    ],
)
def test_an_unknown_option_is_answered_by_the_one_that_is_meant(name: str, option: str, hint: str) -> None:
    method = METHODS[name]
    with pytest.raises(TypeError) as caught:
        method(MODEL, **{option: 1})
    assert str(caught.value).startswith(f'{method.__name__} has no option "{option}"; {hint}')


@pytest.mark.parametrize("name", METHODS)
def test_an_unknown_option_names_the_class_that_was_called(name: str) -> None:
    with pytest.raises(TypeError, match=rf'^{METHODS[name].__name__} has no option "bogus"; the options are model, '):
        METHODS[name](MODEL, bogus=1)


def test_a_name_that_left_the_registry_is_answered_by_the_nearest_one() -> None:
    for registry, table in ((METHODS, aliases.table("methods")), (METRICS, aliases.table("metrics"))):
        for nearest, names in table.items():
            assert nearest.split()[0] in registry
            for name in names:
                with pytest.raises(MethodError, match=f'"{name}"; not offered here; nearest: {re.escape(nearest)}$'):
                    registry.find(name)


@pytest.mark.parametrize(
    ("cls", "old", "new"),
    [
        (saliency.FinerCAM, "references", "classes"),
        (saliency.ExpectedGradients, "references", "baseline"),
        (saliency.DeepSHAP, "samples", "passes"),
        (saliency.SmoothGrad, "draws", "passes"),
        (saliency.RISE, "masks", "passes"),
        *((METRICS[name], "samples", "passes") for name in ("infidelity", "sensitivity_n", "avg_sensitivity")),
    ],
)
def test_an_option_that_was_renamed_is_answered_by_its_new_name(cls: Any, old: str, new: str) -> None:
    with pytest.raises(TypeError, match=f'no option "{old}"; it is called {new} here'):
        cls(*([tiny_model()] if cls in METHODS.values() else []), **{old: 3})


def test_every_spelling_leads_to_an_option_or_a_public_name() -> None:
    options = {option for method in METHODS.values() for option in method.parameters()}
    for function in (saliency.Attribution.attribute, saliency.overlay, saliency.batch.batch):
        options |= set(inspect.signature(function).parameters)
    assert set(aliases.table("options")) <= options | set(inspect.signature(draw_maps).parameters)
    for name in aliases.table("public"):
        attrgetter(name.partition("(")[0])(saliency)
    for names in (*aliases.table("public").values(), *aliases.table("absent").values()):
        assert not set(names) & set(dir(saliency))
    for text in (*aliases.table("absent"), *aliases.table("result")):
        for name in re.findall(r"(?:saliency\.)?([\w.]+)\(", text):
            attrgetter(name)(saliency)
    # Several options may share a spelling of others, but a method answers it with one of them.
    assert "is called steps here" in option_hint("n_iter", saliency.IntegratedGradients.parameters())
    assert "is called passes here" in option_hint("n_iter", saliency.SmoothGrad.parameters())


FOREIGN_KEYWORDS = [
    ("overlay", "alpha", "it is called opacity here"),
    ("overlay", "cmap", "it is called colormap here"),
    ("contact_sheet", "cmap", "it is called colormap here"),
    ("figure", "cmap", "it is called colormap here"),
    ("figure", "ncols", "it is called columns here"),
    ("figure", "figsize", r"it returns a matplotlib Figure: figure\(result\)\.set_size_inches"),
    ("heatmap", "normalize", "values keep their units"),
    ("load", "pretrained", "weights are pretrained by default; weights=None"),
    ("load", "device", "move the model to the device"),
    ("Preprocess", "crop_size", "it is called size here"),
    ("Tiled", "tile_size", "it is called size here"),
    ("Candidates", "bboxes", 'did you mean "boxes"'),
    ("batch", "output_dir", "it is called out here"),
    ("batch", "method", "it is called methods here"),
    ("batch.OverlayStyle", "alpha", "it is called opacity here"),
    ("inspection.activations", "target_layers", "it is called layers here"),
    ("load", "bogus", "the options are name, weights, preprocess, categories"),
]


@pytest.mark.parametrize(("function", "keyword", "hint"), FOREIGN_KEYWORDS)
def test_public_functions_and_classes_answer_foreign_keywords(function: str, keyword: str, hint: str) -> None:
    explanation = saliency.GradCAM(MODEL).attribute(X, 1)
    title = function.rpartition(".")[2]
    with pytest.raises(TypeError, match=rf'{title} has no (argument|option) "{keyword}".*; {hint}'):
        attrgetter(function)(saliency)(explanation, **{keyword: 1})


PUBLIC = [
    (module.__name__, name)
    for module in (saliency, saliency.batch, saliency.inspection, saliency.metrics, saliency.testing, saliency.zoo)
    for name in getattr(module, "__all__", [name for name in dir(module) if not name.startswith("_")])
    if inspect.isfunction(function := getattr(module, name))
    and function.__module__.startswith(module.__name__)
    and not inspect.getfullargspec(inspect.unwrap(function)).varkw  # these answer their options themselves
]


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_every_public_function_answers_foreign_keywords(module: str, name: str) -> None:
    function = getattr(sys.modules[module], name)
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    arguments = [None for p in required if p.kind == p.POSITIONAL_OR_KEYWORD]
    with pytest.raises(TypeError, match=r'has no (argument|option) "bogus"; '):
        function(*arguments, bogus=1)


WRAPPERS: list[Callable[[], Any]] = [
    lambda: saliency.Tiled(saliency.GradCAM(MODEL)),
    lambda: saliency.Together(saliency.GradCAM(MODEL), saliency.LayerCAM(MODEL)),
]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_of_methods_answer_foreign_keywords(wrapper: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match='attribute has no argument "additional_forward_args"; it is called forward_ar'):
        wrapper().attribute(X, additional_forward_args=())


def test_functions_that_answer_keywords_keep_their_signature_help_and_pickle() -> None:
    for function in (saliency.overlay, saliency.heatmap, saliency.load, saliency.inspection.record):
        assert function is pickle.loads(pickle.dumps(function))
        assert "keywords" not in inspect.signature(function).parameters
        assert function.__doc__
        assert function.__module__.startswith("saliency.")


@pytest.mark.parametrize(
    ("cls", "option", "ours"),
    [
        (saliency.SmoothGrad, "steps", "passes"),
        (saliency.IntegratedGradients, "passes", "steps"),
        (saliency.KernelSHAP, "baseline", "fill"),
        (saliency.IntegratedGradients, "fill", "baseline"),
        (saliency.GradCAM, "class_names", "categories"),
    ],
)
def test_an_option_of_other_methods_is_answered_by_the_one_of_this_method(cls: Any, option: str, ours: str) -> None:
    with pytest.raises(TypeError, match=f'no option "{option}"; it is called {ours} here'):
        cls(MODEL, **{option: 3})


PAIRS = {
    "captum.attr": {
        "IntegratedGradients": "IntegratedGradients",
        "Saliency": "VanillaGradient",
        "NoiseTunnel": "SmoothGrad",
        "GradientShap": "ExpectedGradients",
        "Occlusion": "Occlusion",
        "FeatureAblation": "FeatureAblation",
        "Lime": "LIME",
        "KernelShap": "KernelSHAP",
        "ShapleyValueSampling": "ShapleySampling",
        "GuidedBackprop": "GuidedBackprop",
        "LayerGradCam": "GradCAM",
    },
    "pytorch_grad_cam": {"GradCAM": "GradCAM", "ScoreCAM": "ScoreCAM", "FinerCAM": "FinerCAM", "FullGrad": "FullGrad"},
    "zennit.attribution": {"SmoothGrad": "SmoothGrad", "Occlusion": "Occlusion", "Gradient": "VanillaGradient"},
}
# What has no counterpart: inner parts of a peer, features that the toolkit does not have.
WITHOUT = {
    *("self", "args", "kwargs", "grad_kwargs", "inputs", "input", "input_tensor", "additional_forward_args"),
    *("interpretable_model", "similarity_func", "perturb_func", "return_input_shape", "draw_baseline_from_distrib"),
    *("attribute_to_layer_input", "attr_dim_summation", "target_idx", "alpha", "comparison_categories"),
    *("compute_input_gradient", "uses_gradients", "tta_transforms", "detach", "attr_output_fn"),
}
WITHOUT_IN = {"GradientShap: stdevs", "FullGrad: target_layers"}


@pytest.mark.parametrize("module", PAIRS)
def test_every_option_of_other_toolkits_gets_an_answer(module: str) -> None:
    peer = pytest.importorskip(module)
    missing = []
    for theirs, ours in PAIRS[module].items():
        known = getattr(saliency, ours).parameters()
        calls = [getattr(getattr(peer, theirs), name, None) for name in ("__init__", "attribute", "forward")]
        options = {option for call in calls if call is not None for option in inspect.signature(call).parameters}
        missing += [
            f"{theirs}: {option}"
            for option in options - WITHOUT - set(known)
            if option_hint(option, known).startswith(("; the options", "; did you mean"))
        ]
    assert not set(missing) - WITHOUT_IN


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("n_steps", r"the method takes it: IntegratedGradients\(model, steps=...\)"),
        ("steps", r"the method takes it: IntegratedGradients\(model, steps=...\)"),
        ("return_convergence_delta", "explanation.residual is this difference"),
        ("targets", "it is called target here"),
        ("additional_forward_args", "it is called forward_args here"),
        ("targt", 'did you mean "target"'),
    ],
)
def test_an_unknown_argument_of_attribute_is_answered(keyword: str, hint: str) -> None:
    attribute: Any = saliency.IntegratedGradients(MODEL).attribute
    with pytest.raises(TypeError, match=f'attribute has no argument "{keyword}"; {hint}'):
        attribute(X, **{keyword: 1})


def test_a_method_that_is_called_shows_the_call() -> None:
    with pytest.raises(TypeError, match=r"GradCAM\(model\)\.attribute\(inputs, target\)"):
        saliency.GradCAM(MODEL)(X, 1)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("GradCam", 'did you mean "GradCAM"'),
        ("gradcam", 'did you mean "GradCAM"'),
        ("IntegratedGradient", 'did you mean "IntegratedGradients"'),
        ("Saliency", "it is called VanillaGradient here"),
        ("show_cam_on_image", "it is called overlay here"),
        ("DeepExplainer", "it is called DeepSHAP here"),
        ("LayerConductance", "not offered here; nearest: HiResCAM"),
        ("AttCAT", "not offered here; nearest: CheferAttention"),
        ("explain_pair", "it is called pair here"),
        ("explain_text", "it is called token_importance here"),
        ("explain_together", "it is called Together here"),
        ("draw_trust", "it is called figure here"),
        ("draw_ledger", r"it is called figure\(ledger_table\(explanation\)\) here"),
        ("draw_answer", "it is called word_sheet here"),
        ("plot", "it is called overlay here"),
        ("explain", r"it is called GradCAM\(model\)\.attribute\(image, target\) here"),
        ("KPCA_CAM", "not offered here; nearest: EigenCAM"),
    ],
)
def test_an_unknown_public_name_is_answered_by_the_closest(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=f'saliency has no "{name}"; {hint}') as caught:
        getattr(saliency, name)
    assert caught.value.name == name
    assert not hasattr(saliency, name)
    assert getattr(saliency, name, None) is None
    with pytest.raises(ImportError, match=name):
        exec(f"from saliency import {name}")  # noqa: S102


def test_an_earlier_name_of_inspection_is_answered() -> None:
    with pytest.raises(AttributeError, match=r'no "extract_features"; it is called inspection\.activations here'):
        saliency.inspection.extract_features  # type: ignore[attr-defined] # noqa: B018


def test_a_with_block_shows_the_call() -> None:
    with pytest.raises(TypeError, match=r"no with block.*GradCAM\(model\)\.attribute"), saliency.GradCAM(MODEL):
        pass


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("show", r"saliency\.overlay\(explanation\)"),
        ("heatmap", r"saliency\.heatmap\(explanation\)"),
        ("value", r"explanation\.values"),
        ("zzz", "$"),
    ],
)
def test_a_drawing_method_of_a_result_is_answered_by_the_function(name: str, hint: str) -> None:
    explanation = saliency.GradCAM(MODEL).attribute(X, 1)
    with pytest.raises(AttributeError, match=f'Explanation has no "{name}".*{hint}'):
        getattr(explanation, name)
    assert not hasattr(explanation, name)
    assert pickle.loads(pickle.dumps(explanation)).method == copy.copy(explanation).method == "grad_cam"


def test_a_list_with_one_layer_is_that_layer_and_is_shown() -> None:
    forms: list[Any] = [MODEL.features, "features", [MODEL.features], ["features"]]
    for layer in forms:
        assert repr(saliency.GradCAM(MODEL, layer)) == "GradCAM(PooledNet, layer='features')"
    assert "layers=('features',)" in repr(saliency.FusedCAM(MODEL, layers=["features"]))
    several: list[Any] = [[], ["features", "head"]]
    for layers in several:
        with pytest.raises(saliency.errors.LayerError, match=r"reads one layer, got [02]; FusedCAM"):
            saliency.ShapleyCAM(MODEL, layers)


def test_a_name_like_no_other_has_no_suggestion() -> None:
    assert public_hint("zzzzzz", dir(saliency)) == ""


def test_the_registry_is_a_dict_whose_missing_names_are_answered() -> None:
    with pytest.raises(KeyError, match='no method "gradcam"; did you mean "grad_cam"'):
        METHODS["gradcam"]
    assert "gradcam" not in METHODS
    assert METHODS.get("gradcam") is None
    assert dict(METHODS) == METHODS


CLOSEST: dict[str, Callable[[], tuple[str, list[str], list[str]]]] = {
    "whole words, the shortest first": lambda: (
        "cat",
        ["crate", "oxcart", "Egyptian cat", "tiger cat", "catamaran", "tabby, tabby cat"],
        ["tiger cat", "Egyptian cat", "tabby, tabby cat", "catamaran"],
    ),
    "all words in any order": lambda: ("cat tiger", ["cat", "tiger cat"], ["tiger cat"]),
    "beginnings before parts": lambda: ("bird", ["hummingbird", "birdhouse"], ["birdhouse", "hummingbird"]),
    "parts before spelling": lambda: ("cam", ["calm", "gradcam"], ["gradcam", "calm"]),
    "no word": lambda: ("", ["a", "b"], []),
}


@pytest.mark.parametrize("case", CLOSEST)
def test_the_closest_words_are_ordered(case: str) -> None:
    word, words, expected = CLOSEST[case]()
    assert closest(word, words, most=4) == expected
