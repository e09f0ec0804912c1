from __future__ import annotations

import pytest

import saliency
from tests.relevance.vision_transformers import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_gradient_at_every_pixel(name: str) -> None:
    model, x = MODELS[name]()
    values = saliency.VanillaGradient(model).attribute(x, 1).values
    assert values.shape == x.shape == (2, 3, *x.shape[2:])
    assert not model.training
    assert bool((values.isfinite() & (values != 0)).all())
