"""Wrong calls that many make end in one sentence that names the cure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import saliency
from saliency.errors import SaliencyError
from saliency.testing import tiny_model

MODEL = tiny_model()
METHOD: Any = saliency.GradCAM(MODEL, preprocess=saliency.Preprocess(size=(32, 32)))
X = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
IMAGE = Image.new("RGB", (32, 32))
TWO = torch.cat([X, X.cumsum(2)])
PHOTO = Path(__file__).parents[1] / "assets" / "coffee.jpg"
LOADER = DataLoader(TensorDataset(X, torch.zeros(1)))
API: Any = saliency


class _Transform:
    def __call__(self, image: Image.Image) -> torch.Tensor:
        raise NotImplementedError


class Unhashable:
    __hash__: Any = None

    def __call__(self, output: object) -> None: ...


# The call, and the cure that its error names.
CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "an attribute of a class": (lambda: API.GradCAM.attribute("x.jpg"), "GradCAM(model).attribute(image)"),
    "an attribute of a class with a target": (lambda: API.LRP.attribute("x.jpg", 1), "(model).attribute(image)"),
    "an attribute of a class by keyword": (lambda: API.GradCAM.attribute(inputs=X), "GradCAM(model).attribute(image)"),
    "an attribute without image": (lambda: API.LRP(MODEL).attribute(), "LRP(model).attribute(image)"),
    "classes of a class": (
        lambda: API.LRP.attribute_classes("x.jpg", [0, 1]),
        "(model).attribute_classes(image, [0, 1])",
    ),
    "classes without an image": (lambda: API.LRP(MODEL).attribute_classes(), "LRP(model).attribute_classes(image, ["),
    "classes without targets": (lambda: METHOD.attribute_classes(X), "GradCAM(model).attribute_classes(image, ["),
    "a compiled class": (lambda: API.GradCAM.compile(), "GradCAM(model).compile()"),
    "a compiled class with a mode": (lambda: API.GradCAM.compile("reduce-overhead"), "GradCAM(model).compile()"),
    "a measure of a class": (
        lambda: API.metrics.Deletion.measure(METHOD.attribute(X)),
        "Deletion().measure(explanation)",
    ),
    "a measure of nothing": (lambda: API.metrics.Deletion().measure(), "Deletion().measure(explanation)"),
    "the class of a metric alone": (
        lambda: API.metrics.measure(API.metrics.Deletion, METHOD.attribute(X)),
        "create an object of it, Deletion(...)",
    ),
    "captum's tuple of baselines": (
        lambda: API.IntegratedGradients(API.load("shapes_rgbd"), baseline=(X, X[:, :1])),
        'baseline of several inputs is a mapping: baseline={"rgb": ..., "depth": ...}',
    ),
    "a list of baselines of several inputs": (
        lambda: API.DeepLIFT(API.load("shapes_rgbd"), baseline=[X, X[:, :1]]),
        'baseline of several inputs is a mapping: baseline={"rgb": ..., "depth": ...}',
    ),
    "captum's tuple as fills": (
        lambda: API.Occlusion(API.load("shapes_rgbd"), fill=(X, X[:, :1])),
        "fill=tuple is invalid; expected a finite number, one number per channel",
    ),
    "a function as the model": (lambda: API.GradCAM(tiny_model), "call it: tiny_model()"),
    "weights as the model": (lambda: API.GradCAM(MODEL.state_dict()), 'saliency.load("mine.py:make", weights='),
    "a checkpoint with the model": (lambda: API.GradCAM({"model": MODEL}), "holds the module under ['model']"),
    "a name as the model": (lambda: API.GradCAM("resnet18"), "saliency.load(name)"),
    "a class as preprocessing": (lambda: API.GradCAM(MODEL, preprocess=_Transform), "class _Transform; call it"),
    "transforms that were not called": (
        lambda: API.GradCAM(MODEL, preprocess=partial(_Transform)),
        "class _Transform; call it, as in weights.transforms()",
    ),
    "a checked object": (lambda: API.testing.check_method(METHOD), "expected the class of a method, such as MyCAM"),
    "a file of code that is missing": (lambda: API.load("nofile.py:make"), "there is no file nofile.py"),
    "weights by path": (lambda: API.load("best.pt"), "--model mine.py:make --weights best.pt"),
    "a YOLO by path": (lambda: API.load("yolov8n.pt"), "from ultralytics import YOLO"),
    "a function as the model of a run": (lambda: API.batch("assets", "maps", tiny_model), "call it: tiny_model()"),
    "a model instead of a method": (lambda: API.trust(MODEL, PHOTO), "such as GradCAM(model), got "),
    "images and labels": (lambda: METHOD.attribute((X, 1), 1), "int is not an image; expected a path"),
    "no name": (lambda: API.load(None), "expected the name of a model"),
    "passes without end": (lambda: API.RISE(MODEL, passes=10**9), "and at most 1000000"),
    "steps without end": (lambda: API.IntegratedGradients(MODEL, steps=10**6), "and at most 5000"),
    "steps of a mask without end": (lambda: API.ExtremalPerturbation(MODEL, steps=5001), "and at most 5000"),
    "colours without end": (lambda: API.DeepSHAP(MODEL, passes=10**6 + 1), "and at most 1000000"),
    "a tensor as an option": (lambda: API.IntegratedGradients(MODEL, steps=X), "steps=Tensor of shape (1, 3, 32, 32)"),
    "a network as an option": (lambda: API.IntegratedGradients(MODEL, baseline=MODEL).attribute(X), "baseline=TinyNet"),
    "a tensor as a layout": (lambda: API.GradCAM(MODEL, layout=X), "layout=Tensor of shape"),
    "a tensor as a colour map": (lambda: API.overlay(METHOD.attribute(IMAGE), colormap=X), "colormap=Tensor of shape"),
    "a tensor as targets": (lambda: METHOD.attribute_classes(X, X), "got Tensor of shape"),
    "a tensor as a channel": (lambda: API.neuron("relu", X), "got Tensor of shape"),
    "the class of a metric": (lambda: API.compare([METHOD], X, metrics=[API.metrics.Deletion]), "Deletion(...)"),
    "swapped arguments of word_sheet": (lambda: API.word_sheet(METHOD, None), "got GradCAM and NoneType"),
    "tensors as a model of text": (lambda: API.LateInteraction(X, X), "expected the processor of the model"),
    "an image as the explored model": (lambda: API.explore(IMAGE), "expected a torch.nn.Module, got Image"),
    "a class before its image": (lambda: METHOD.attribute(1, X), "the target comes second"),
    "a name before its image": (lambda: METHOD.attribute("tiger cat", IMAGE), "the target comes second"),
    "a name before its file": (lambda: METHOD.attribute("tiger cat", __file__), "the target comes second"),
    "a pattern as the image": (lambda: METHOD.attribute("*.jpg"), "for path in glob.glob('*.jpg')"),
    "a generator as the image": (lambda: METHOD.attribute(Path().glob("*")), "for image in images"),
    "a loader as the image": (lambda: METHOD.attribute(LOADER), "for images, labels in loader"),
    "a folder as the image": (lambda: METHOD.attribute("."), "saliency.batch(folder"),
    "a one-hot target": (lambda: METHOD.attribute(X, np.eye(5)[3]), "pass the class, 3"),
    "a row of scores as the target": (lambda: METHOD.attribute(X, torch.eye(5)[:1]), "target.argmax(1)"),
    "an image before its explanation": (lambda: API.overlay(IMAGE, METHOD.attribute(X)), "overlay(explanation, image)"),
    "a tensor as the file of a program": (lambda: API.export(METHOD, X, X), "path=Tensor of shape (1, 3, 32, 32): exp"),
    "a tensor as the folder of a run": (lambda: API.batch(PHOTO, X, MODEL), "out=Tensor of shape"),
    "a tensor as the folder of an evaluation": (lambda: API.evaluate(PHOTO, X), "out=Tensor of shape"),
    "an image as the sources of an evaluation": (lambda: API.evaluate(IMAGE, "out"), "take images in memory"),
    "no model to explore": (lambda: API.explore(None), "expected a torch.nn.Module, got NoneType"),
    "an image to explore": (lambda: API.explore(MODEL, IMAGE), "this model has no preprocessing"),
    "a number as a value of each image": (lambda: API.PerImage(3), "a list with a value for each image, got int"),
    "a tensor as a layer": (lambda: METHOD.attribute(X, API.neuron(X, 1)), "a dotted name or a module, got Tensor"),
    "an image as masks": (
        lambda: API.metrics.measure("iou", METHOD.attribute(X, 0), masks=[X, IMAGE]),
        "masks=list: expected a tensor or an array (N, H, W) of bool",
    ),
    "a list as a reader of boxes": (lambda: API.box(index=0, read=[]), "read=[]: expected a hashable function"),
    "a reader of joints that cannot be a key": (lambda: API.keypoint(0, read=Unhashable()), "a hashable function"),
    "images with different segments": (
        lambda: API.metrics.measure(
            "irof", METHOD.attribute(TWO, 0), model=MODEL, inputs=TWO, target=0, controls=False
        ),
        "different numbers of segments; measure them one by one",
    ),
    "a drawing into no folder": (
        lambda: API.overlay(METHOD.attribute(IMAGE)).save("nofolder/x.png"),
        "cannot write x.png: there is no folder nofolder",
    ),
    "a number as the layers of a recording": (
        lambda: API.inspection.record(MODEL, 5),
        "a dotted name or a module, got",
    ),
    "a number as fused layers": (lambda: API.FusedCAM(MODEL, layers=3), "takes a list of layers, got 3"),
    "no repetitions": (lambda: API.inspection.layer_table(MODEL, X, times=None), "times=None is not a whole number"),
    "the method of a run as an object": (lambda: API.batch(PHOTO, "out", MODEL, [METHOD]), 'its name, "grad_cam"'),
    "a number as the methods of a run": (lambda: API.batch(PHOTO, "out", MODEL, 5), 'no method "5"'),
    "a tensor as the method of a run": (lambda: API.batch(PHOTO, "out", MODEL, [X]), 'no method "Tensor of shape'),
    "a number as options of a run": (
        lambda: API.batch(PHOTO, "out", MODEL, options=5),
        "options=5: expected a mapping",
    ),
    "a device of a run that is none": (lambda: API.explore(MODEL, device=5), 'no device "5"'),
    "a number as a list of targets": (lambda: API.batch(PHOTO, "out", MODEL, targets=5), "targets=5: expected a path"),
    "moments of a text": (lambda: API.inspection.moments("x"), "moments are of a tensor, got 'x'"),
    "a file as boxes": (lambda: API.evaluate(PHOTO, "out", boxes="b.json"), "boxes='b.json': expected the boxes by f"),
    "no metric": (lambda: API.compare([METHOD], X, 0, None), 'no metric "None"'),
    "a seed that is none": (
        lambda: API.compare([METHOD], X, 0, "deletion", seed="a"),
        "seed='a' is not a whole number",
    ),
    "a number as masks": (lambda: API.compare([METHOD], X, 0, masks=5), "masks=5: expected a list, with an entry for"),
    "no text to compare with": (lambda: API.text("a", None), "expected a text or a list of texts, got None"),
    "a tensor as a text": (lambda: API.text(X), "got Tensor of shape (1, 3, 32, 32)"),
    "a tensor as words": (lambda: API.words(X), "text=Tensor of shape"),
    "arrays as candidates": (lambda: API.Candidates(np.zeros((2, 4)), [1]), "and [1]; expected tensors of boxes"),
    "no processor": (lambda: API.generate(MODEL, None, IMAGE, "What?"), "expected the processor of the model"),
    "a number as weights": (lambda: API.load("shapes_cnn", weights=5), "weights=5: expected the name of weights"),
    "a path to a preprocessing": (lambda: METHOD.preprocess("x.jpg"), "a path is opened by PIL.Image.open(path)"),
    "a target that was not called": (lambda: METHOD.attribute(X, API.box), "call it: box(...)"),
    "a class of networks as the target": (lambda: METHOD.attribute(X, torch.nn.Linear), "call it: Linear(...)"),
    "no path to save to": (lambda: METHOD.attribute(IMAGE).save(None), "path=None: expected a path"),
    "no path of a card": (lambda: API.compare([METHOD], X, 0, "gini").save(None), "path=None: expected a path"),
    "a saved explanation first": (
        lambda: API.testing.assert_same_explanation("x.safetensors", METHOD.attribute(IMAGE)),
        "takes an Explanation",
    ),
    "an option of another type": (
        lambda: API.generate(MODEL, len, IMAGE, "a", canvas=5),
        "canvas=5: expected Callable[",
    ),
    "a truth value of many values": (
        lambda: API.contact_sheet([[METHOD.attribute(IMAGE)]], shared=X),
        "contact_sheet: shared=Tensor of shape (1, 3, 32, 32): expected bool",
    ),
    "a result that is built from other values": (
        lambda: API.Comparison(5),
        "results=5: expected Iterable[MetricResult]",
    ),
    "an argument too many": (lambda: API.keep_memory(5), "too many positional arguments; it takes no arguments"),
    "a model without its name": (lambda: API.testing.Snapshot(MODEL), "it takes **objects"),
    "no image to overlay": (
        lambda: API.overlay(),
        "missing a required argument: 'explanations'; it takes explanations,",
    ),
    "a method of a result": (
        lambda: API.Explanation.load(file="x"),
        'load has no argument "file"; the options are path',
    ),
    "an unknown argument of a comparison": (
        lambda: API.compare([METHOD], IMAGE, 0, "gini", device="cpu"),
        'a metric has no argument "device"; move the model',
    ),
    "an image of a model with several inputs": (
        lambda: API.GradCAM(API.load("shapes_rgbd")).attribute(IMAGE),
        'a preprocessing for each input, rgb; name the inputs: {"rgb": image, ...}, on the command line rgb=FILE',
    ),
    "a class as an option": (lambda: API.RISE(MODEL, passes=int), "passes=the class int is not a whole number"),
    "an object as an option": (lambda: API.RISE(MODEL, passes=object()), "passes=object is not a whole number"),
    "a figure into no folder": (
        lambda: API.figure(METHOD.attribute(IMAGE)).savefig("nofolder/x.png"),
        "cannot write x.png: there is no folder nofolder",
    ),
    "a file before its explanation": (lambda: API.overlay("x.jpg", None), "overlay(explanation, image)"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_call_names_the_cure(case: str) -> None:
    call, cure = CALLS[case]
    with pytest.raises((SaliencyError, TypeError, OSError), match=re.escape(cure)) as caught:
        call()
    assert "tensor(" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_error_of_the_user_is_raised_unchanged_if_the_arguments_have_their_types() -> None:
    def fail(image: Image.Image) -> torch.Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        API.Together(API.GradCAM(MODEL)).attribute(X, fail)


def test_an_error_of_the_model_is_not_blamed_on_arrays_or_sets_in_place_of_lists() -> None:
    class Broken(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

    method = saliency.GradCAM(Broken())
    calls: tuple[Callable[[], object], ...] = (
        lambda: API.Together(method).attribute(TWO, np.array([0, 1])),
        lambda: API.compare([method], TWO, 0, {"gini"}, boxes=np.ones((2, 4))),
    )
    for call in calls:
        with pytest.raises(KeyError, match="mine"):
            call()


def test_the_image_of_attribute_is_shown_as_required() -> None:
    signature = str(inspect.signature(saliency.GradCAM.attribute)).replace("saliency.", "")
    assert "(self: 'Any', inputs: 'Any', target" in signature
    signature = str(inspect.signature(saliency.GradCAM.attribute_classes))
    assert "inputs: 'ImagesLike | Batch', targets: 'Sequence[TargetLike]', *" in signature
