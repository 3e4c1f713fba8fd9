"""Adapters by the names that PEFT gives them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from echelon.core.choices.lora import Lora
from echelon.core.errors import ConfigError
from echelon.core.parameters import num_trained_parameters
from echelon.interop.hugging_face.adapters import adapter_config, adapter_tensors
from echelon.interop.hugging_face.folder import hub_config
from tests.parallel.layouts import GPT2, NANO

LORA = Lora(rank=4, alpha=8.0, targets=("q", "down"))


def test_tensors_and_configuration_name_the_layers_of_the_architecture() -> None:
    shape = replace(NANO, lora=LORA)
    architecture = hub_config(NANO, "llama").architecture
    tensors = {one.key: one for one in adapter_tensors(shape, architecture)}
    assert sum(one.numel for one in tensors.values()) == num_trained_parameters(shape)
    first = "base_model.model.model.layers.0.self_attn.q_proj"
    assert tensors[f"{first}.lora_A.weight"].shape == (4, NANO.hidden)
    assert tensors[f"{first}.lora_B.weight"].shape == (NANO.query_dim, 4)
    keys = json.loads(adapter_config(shape, architecture))
    assert (keys["r"], keys["lora_alpha"], keys["use_rslora"]) == (4, 8.0, False)
    assert keys["target_modules"] == ["down_proj", "q_proj"]


def test_what_peft_has_no_layer_for_is_refused() -> None:
    architecture = hub_config(GPT2, "gpt2").architecture
    with pytest.raises(ConfigError, match="several layers in one") as caught:
        adapter_tensors(replace(GPT2, lora=LORA), architecture)
    assert caught.value.problems[0].rule == "export-adapters"
    with pytest.raises(ConfigError, match="trained whole"):
        adapter_tensors(GPT2, architecture)
