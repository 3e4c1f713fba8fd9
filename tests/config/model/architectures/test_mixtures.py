"""Models with experts leave in their own keys, and are the same read back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.model.architectures.mixtures import MIXTURES
from echelon.core.model_shape import ModelShape
from echelon.interop.hugging_face.config_json import hub_config, shape_of_config
from tests.training.weights.transformers_models import DEEPSEEK, MIXTRAL, QWEN3_MOE


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("mixtral", MIXTRAL), ("qwen3_moe", QWEN3_MOE), ("deepseek_v3", DEEPSEEK)],
)
def test_the_same_shape_is_read_back(kind: str, shape: ModelShape) -> None:
    assert kind in MIXTURES
    found = hub_config(shape, kind)
    back = shape_of_config(found.keys, shape.name)
    assert back is not None
    if not shape.has_dense_blocks:
        back = replace(back, ffn=shape.ffn)
    assert back == shape
