"""A config.json is taken only where the same shape is read back from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.config.presets import preset_names
from echelon.core.errors import ConfigError
from echelon.core.model_shape import Rotary
from echelon.interop.hugging_face.config_json import hub_config, shape_of_config
from tests.parallel.layouts import GPT2, NANO

REFUSED = {
    "a soft cap": (
        replace(NANO, soft_cap=30.0),
        'model.soft_cap = 30.0, which would become "none"',
    ),
    "an offset": (replace(NANO, norm_offset=1.0), "model.norm_offset = 1.0, which would become"),
    "a layer norm": (replace(NANO, norm="layernorm"), 'norm = "layernorm", which would become'),
    "no gate": (replace(NANO, gated=False), "model.gated = false, which would become true"),
    "one bias": (replace(NANO, output_bias=True), "model.output_bias = true, which would become"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_architecture_says_is_refused_with_what_would_differ(name: str) -> None:
    shape, words = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        hub_config(shape)
    assert caught.value.rules == ("weights-have-architecture",)
    assert words in str(caught.value)
    assert caught.value.problems[0].suggestions == ("--to echelon",)


def test_no_row_of_a_vocabulary_is_padding() -> None:
    """A family's own ids are rows that a smaller vocabulary lacks, or that get no gradient."""
    smollm3 = replace(NANO, rotary=Rotary(none_every=2), tied=True)
    olmo2 = replace(NANO, norm_place="after", qk_norm=True, qk_norm_over="width")
    for shape, kind in ((NANO, "llama"), (smollm3, "smollm3"), (olmo2, "olmo2"), (GPT2, "gpt2")):
        found = hub_config(shape)
        assert found.model_type == kind
        tokens = [found.keys[f"{name}_token_id"] for name in ("bos", "eos", "pad")]
        assert tokens == [None, None, None]


def test_a_type_that_is_asked_for_is_taken_or_refused() -> None:
    assert hub_config(NANO).model_type == "llama"
    assert hub_config(NANO, "mistral").model_type == "mistral"
    for asked, words in (
        ("lama", "lama is no model_type that is written"),
        ("mixtral", "mixtral has not the parts of nano: it has no experts"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            hub_config(NANO, asked)
        assert caught.value.rules == ("weights-type-names-shape",)
    with pytest.raises(ConfigError, match=r"nearest is qwen3, but for model\.qk_norm = false"):
        hub_config(NANO, "qwen3")


@pytest.mark.parametrize("name", preset_names("models"))
def test_every_preset_is_said_and_is_the_same_read_back(name: str) -> None:
    """Published models leave as what they are; dropout is no part of what they compute."""
    shape = load_job("nano", [f"model.preset={name}", "batch.sequence_length=16"]).plan.model
    found = hub_config(shape)
    back = shape_of_config(found.keys, shape.name)
    assert back is not None
    if not shape.has_dense_blocks:
        back = replace(back, ffn=shape.ffn)
    assert replace(back, dropout=shape.dropout) == shape
