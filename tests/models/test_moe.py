"""The mixture of experts on one device, against a loop over tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.parameters import parameters
from echelon.models.decoder import Decoder
from tests.parallel.layouts import DEEPSEEK, MIXTRAL
from tests.training.weights.transformers_models import GPT_OSS

SHAPES = {"mixtral": MIXTRAL, "deepseek": DEEPSEEK, "gpt-oss": GPT_OSS}


@pytest.mark.parametrize("name", SHAPES)
def test_a_decoder_holds_the_parameters_that_the_shape_names(name: str) -> None:
    shape = replace(SHAPES[name], layers=3)
    model = Decoder(shape)
    found = {name: tuple(one.shape) for name, one in model.named_parameters()}
    assert found == {spec.name: spec.shape for spec in parameters(shape)}
    assert ("layers.0.mlp.router.weight" in found) == (name != "deepseek")
