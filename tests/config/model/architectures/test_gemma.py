"""What config.json files of Gemma 2 and 3 mean, also where they leave most of it out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echelon.config.model.hugging_face import config_entries
from echelon.core.errors import ConfigError
from echelon.interop.hugging_face.folder import hub_config, shape_of_config

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def test_gemma_2_has_a_window_in_every_second_block_and_caps() -> None:
    shape = shape_of_config({"model_type": "gemma2", **SIZES}, "gemma")
    assert shape is not None
    assert (shape.window, shape.layer_kinds) == (4096, ("local", "global"))
    assert (shape.soft_cap, shape.final_soft_cap) == (50.0, 30.0)
    assert (shape.norm_place, shape.norm_offset, shape.tied) == ("both", 1.0, True)
    assert shape.attention_scale == 256**-0.5
    assert shape.multipliers.embedding == 8.0
    uncapped = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    shape = shape_of_config({"model_type": "gemma2", **SIZES, **uncapped}, "gemma")
    assert shape is not None
    assert (shape.soft_cap, shape.final_soft_cap) == (None, None)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            }
        },
    ],
    ids=["as released", "as transformers 5 writes"],
)
def test_gemma_3_stretches_global_blocks_alone(rope: dict[str, Any]) -> None:
    shape = shape_of_config({"model_type": "gemma3_text", **SIZES, **rope}, "gemma")
    assert shape is not None
    assert shape.layer_kinds == ("local",) * 5 + ("global",)
    assert (shape.rope_theta, shape.local_rope_theta) == (1e6, 10_000.0)
    assert (shape.qk_norm, shape.soft_cap) == (True, None)
    far, near = shape.of_layer(5), shape.of_layer(0)
    assert (far.window, near.window) == (None, 4096)
    assert far.rope_scaling is not None
    assert (far.rope_scaling.kind, near.rope_scaling) == ("linear", None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"layer_types": ["chunked_attention"] * 12}, "chunked_attention"),
    ],
)
def test_what_is_not_computed_is_refused(change: dict[str, Any], says: str) -> None:
    config = {"model_type": "gemma2", **SIZES, "sliding_window": 8, **change}
    _, problems = config_entries(config, Path("config.json"), "test")
    assert any(says in problem.message for problem in problems)


def test_gemma_3_caps_no_scores() -> None:
    """transformers 5.23 has the key, and does not hand it to attention: it is refused by name."""
    config = {"model_type": "gemma3_text", **SIZES}
    _, (problem,) = config_entries(
        {**config, "attn_logit_softcapping": 20.0}, Path("config.json"), "test"
    )
    assert problem.rule == "hf-config-value"
    assert "caps no scores of this model" in problem.message
    shape = shape_of_config({**config, "final_logit_softcapping": 3.0}, "gemma")
    assert shape is not None
    assert (shape.soft_cap, shape.final_soft_cap) == (None, 3.0)
    assert hub_config(shape, "gemma3_text").keys["final_logit_softcapping"] == 3.0
    with pytest.raises(ConfigError, match=r"model\.soft_cap = 20\.0, which would become"):
        hub_config(replace(shape, soft_cap=20.0), "gemma3_text")


def test_the_model_with_pictures_is_refused_by_name() -> None:
    config = {"model_type": "gemma3", "text_config": SIZES, "vision_config": {}}
    _, (problem,) = config_entries(config, Path("config.json"), "test")
    assert problem.rule == "hf-config-model-type"
    assert '"gemma3"' in problem.message
