from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from saliency import zoo
from saliency.errors import ModelError
from saliency.io.preprocess import Preprocess, as_preprocess
from saliency.zoo.libraries import Timm, Torchvision, imagenet_categories

ASSETS = Path(__file__).parents[2] / "assets"
SMALL = "timm/test_resnet"  # a third of a million weights


def photo(name: str) -> Image.Image:
    return Image.open(ASSETS / f"{name}.jpg").convert("RGB")


def logits(model: Any, picture: Image.Image) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(model.preprocess(picture)[None])
    return output[0]


def same_weights(model: nn.Module, other: nn.Module) -> bool:
    mine, theirs = model.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("resnt50", "resnet50"),
        ("eficientnet_lite0", "efficientnet_lite0"),
        ("timm/resnet50.a1_in1", "resnet50.a1_in1k"),
    ],
)
def test_an_unknown_name_gets_the_closest_ones(name: str, closest: str) -> None:
    with pytest.raises(ModelError, match=f'no model "{name}"; did you mean .*"{closest}"'):
        zoo.load(name)


@pytest.mark.parametrize(
    "name", ["r3d_18", "raft_small", "quantized_resnet18", "", "torchvision/", "nonsense/resnet18"]
)
def test_what_takes_no_picture_or_does_not_exist_is_no_model(name: str) -> None:
    with pytest.raises(ModelError, match="no model"):
        zoo.load(name, weights=None)


@pytest.mark.slow
def test_bare_names_mean_bundled_then_torchvision_then_timm_and_prefixes_decide() -> None:
    origins = {
        name: type(zoo.load(name, weights=None)).__module__.partition(".")[0]
        for name in ("resnet18", "torchvision/resnet18", "timm/resnet18", "test_vit")
    }
    assert origins == {
        "resnet18": "torchvision",
        "torchvision/resnet18": "torchvision",
        "timm/resnet18": "timm",
        "test_vit": "timm",
    }
    pads_as_tensorflow = [
        type(zoo.load(f"{prefix}efficientnet_lite0", weights=None).conv_stem).__name__ for prefix in ("", "timm/")
    ]
    assert pads_as_tensorflow == ["Conv2dSame", "Conv2d"]


def test_the_table_of_models_has_each_name_once_as_load_takes_it() -> None:
    table = zoo.models()
    names = [each.name for each in table]
    assert len(set(names)) == len(names)
    assert table[0].source == "bundled"
    assert {
        "resnet50",
        "timm/resnet50",
        "fcn_resnet50",
        "vit_base_patch16_224",
        "timm/efficientnet_lite0",
    } <= {*names}
    assert {each.source for each in table} == {"bundled", "torchvision", "timm"}
    for each in table[:: len(table) // 40]:
        library, bare = zoo._find(each.name)
        assert (library.source, bare) == (each.source, each.name.rpartition("/")[2])


@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "squeezenet1_1", "lraspp_mobilenet_v3_large"])
@pytest.mark.slow
def test_a_torchvision_model_sees_what_torchvisions_own_transform_shows_it(name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    model: Any = zoo.load(name, weights=None)
    transform = models.get_model_weights(name).DEFAULT.transforms()
    picture = photo("chelsea")
    assert torch.equal(model.preprocess(picture), transform(picture))
    assert model.categories == tuple(models.get_model_weights(name).DEFAULT.meta["categories"])
    assert not model.training
    with torch.no_grad():
        ours, theirs = (model(x[None]) for x in (model.preprocess(picture), transform(picture)))
    ours, theirs = (output if isinstance(output, Tensor) else output["out"] for output in (ours, theirs))
    assert torch.equal(ours, theirs)
    assert ours.shape[1] == len(model.categories)


def test_every_torchvision_model_has_torchvisions_preprocessing_and_names() -> None:
    models = pytest.importorskip("torchvision.models")
    picture, seen = photo("rocket"), set()
    for name in Torchvision().names():
        facts = Torchvision().facts(nn.Identity(), name, "default")
        transform = models.get_model_weights(name).DEFAULT.transforms()
        assert facts.categories is not None
        if repr(transform) not in seen:
            seen.add(repr(transform))
            assert torch.equal(as_preprocess(facts.preprocess or {})(picture), transform(picture)), name
    assert len(seen) > 10


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "mobilenetv3_small_050", "efficientvit_b0"])
def test_a_timm_model_sees_what_timms_own_transform_shows_it(name: str) -> None:
    data = pytest.importorskip("timm.data")
    model: Any = zoo.load(f"timm/{name}", weights=None)
    transform = data.create_transform(**data.resolve_model_data_config(model), is_training=False)
    picture = photo("astronaut")
    assert torch.equal(model.preprocess(picture), transform(picture))
    with torch.no_grad():
        assert torch.equal(logits(model, picture), model(transform(picture)[None])[0])
    assert model.categories == imagenet_categories()
    assert not model.training


def test_the_names_of_the_classes_stand_in_the_order_of_timms_models() -> None:
    info = pytest.importorskip("timm.data").ImageNetInfo("imagenet-1k")
    names = imagenet_categories()
    assert len(set(names)) == len(names) == 1000
    off = [
        name for name, lemma in zip(names, info.label_descriptions(), strict=True) if name.lower() not in lemma.lower()
    ]
    assert off == [
        "crane bird",
        "maillot tank suit",
    ]  # names that torchvision tells apart, at the right places
    for name in ("espresso", "tripod", "tiger cat", "Egyptian cat", "tabby", "missile", "football helmet"):
        assert name in names


@pytest.mark.slow
def test_larger_sets_of_classes_have_wordnets_names_each_once_and_unknown_sets_none() -> None:
    timm = pytest.importorskip("timm")
    model: Any = zoo.load("timm/convnext_nano.in12k", weights=None)
    assert len(set(model.categories)) == len(model.categories) == model.num_classes == 11821
    assert any(name.startswith("espresso") for name in model.categories)
    assert Timm().facts(timm.create_model("test_vit.r160_in1k"), "", "").categories == imagenet_categories()
    without_names: Any = zoo.load("timm/resmlp_12_224.fb_dino", weights=None)
    assert without_names.categories is None


def test_preprocessing_and_names_of_the_users_own_take_the_place_of_the_librarys() -> None:
    own = Preprocess((32, 32), 40)
    names = [f"thing {index}" for index in range(1000)]
    model: Any = zoo.load(SMALL, weights=None, preprocess=own, categories=names)
    assert model.preprocess is own
    assert model.categories == tuple(names)
    for wrong in (names[:3], "espresso"):
        with pytest.raises(ModelError, match="expected 1000 names"):
            zoo.load(SMALL, weights=None, categories=wrong)


@pytest.mark.parametrize("name", ["efficientnet_lite0", "googlenet", "densenet121", "timm/test_vit"])
def test_loading_leaves_every_global_random_state_where_it_is(name: str) -> None:
    states: list[Callable[[], bytes]] = [
        lambda: torch.get_rng_state().numpy().tobytes(),
        lambda: pickle.dumps(np.random.get_state()),  # noqa: NPY002  the global state is what is at stake
        lambda: pickle.dumps(random.getstate()),
    ]
    before = [state() for state in states]
    first = zoo.load(name, weights=None)
    assert [state() for state in states] == before
    torch.rand(1)
    assert same_weights(first, zoo.load(name, weights=None))


def test_a_model_loaded_under_inference_mode_can_be_differentiated_afterwards() -> None:
    with torch.inference_mode():
        model = zoo.load(SMALL, weights=None)
    x = torch.rand(1, 3, 64, 64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x)[0, 0], x)
    assert torch.isfinite(gradient).all()
