"""The page on integrations is true: its callback, writers and metric do what they say."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import saliency
from saliency.testing.unchanged import Snapshot
from tests.integrations import Recorder, stand_in
from tests.models import PooledNet
from tests.selection import case

PAGE = Path(__file__).parents[1] / "docs" / "integrations.md"
PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 24, 3), np.uint8))
PREPROCESS = saliency.Preprocess((16, 16))


def positive_net() -> PooledNet:
    """A model whose maps of all classes are positive."""
    model = PooledNet()
    model.head.weight.data.abs_()
    return model.eval()


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names that the page defines, run on an explanation of two images, without its first code block."""
    stand_in(monkeypatch)
    method = saliency.GradCAM(positive_net(), preprocess=PREPROCESS, categories=list("abcde"))
    session = {"saliency": saliency, "torch": torch, "explanation": method.attribute([PHOTO, PHOTO], [1, 2])}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1:]:
        exec(block.replace("torch.ones(1, 224, 224)", "torch.ones(2, 16, 16)"), session)  # noqa: S102
    return session


def test_tensorboard_gets_an_overlay_of_each_image(page: dict[str, Any]) -> None:
    writer = Recorder()
    page["add_overlays"](writer, "cam", page["explanation"], 7)
    assert [(name, given[0], given[2], keywords) for name, given, keywords in writer.calls] == [
        ("add_image", f"cam/{number} {label}", 7, {"dataformats": "HWC"}) for number, label in enumerate("bc")
    ]
    assert np.array_equal(writer.calls[1][1][1], np.asarray(saliency.overlay(page["explanation"][1])))


def test_wandb_gets_an_overlay_of_each_image_with_its_class(page: dict[str, Any]) -> None:
    run = Recorder()
    page["log_overlays"](run, "cam", page["explanation"], 7)
    ((name, (logged,), keywords),) = run.calls
    assert (name, keywords) == ("log", {"step": 7})
    assert [(image.arguments[0].size, image.keywords["caption"]) for image in logged["cam"]] == [
        (PHOTO.size, "b"),
        (PHOTO.size, "c"),
    ]


@pytest.mark.parametrize("mode", [case(torch.enable_grad, by_default=False), torch.no_grad, torch.inference_mode])
def test_the_callback_writes_overlays_and_leaves_the_module_alone(mode: Any, page: dict[str, Any]) -> None:
    module = positive_net().train()
    module(torch.rand(2, 3, 16, 16)).sum().backward()
    trainer = SimpleNamespace(logger=SimpleNamespace(experiment=Recorder()), global_step=3)
    callback = page["Overlays"]([PHOTO, PHOTO], 1, preprocess=PREPROCESS)
    with mode():
        before = Snapshot(model=module)
        callback.on_validation_epoch_end(trainer, module)
        assert before.changes() == []
    assert module.training
    assert [given[0] for _, given, _ in trainer.logger.experiment.calls] == ["grad_cam/0 class 1", "grad_cam/1 class 1"]


def test_the_share_of_a_map_inside_a_mask_is_a_metric(page: dict[str, Any]) -> None:
    assert page["inside"].compute() == pytest.approx(1)
    half = torch.zeros(2, 16, 16)
    half[:, :8] = 1
    metric = type(page["inside"])()
    page["update_share"](metric, page["explanation"], half)
    page["update_share"](metric, page["explanation"], 1 - half)
    assert len(metric.values) == 4
    assert metric.compute() == pytest.approx(0.5)
