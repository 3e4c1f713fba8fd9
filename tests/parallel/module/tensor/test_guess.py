"""Rules that are guessed from a forward are those that a class says, and leave nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon.core.errors import ConfigError
from echelon.parallel.module.tensor.apply import guess_rules
from echelon.parallel.module.tensor.rules import rules_of
from tests.parallel.module.tensor.families import OWN_RULES, Own, batch, make


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "olmo2"])
def test_families_say_what_is_guessed(name: str) -> None:
    model = make(name)
    said = {key: word for key, word in rules_of(model).items()}
    if name == "qwen3":
        for norm in ("q_norm", "k_norm"):
            pattern = f"model.layers.*.self_attn.{norm}"
            said[f"{pattern}.weight"] = said.pop(pattern)
    assert guess_rules(model, ({"input_ids": batch(0, 0), "use_cache": False},)) == said


def test_a_module_of_ones_own() -> None:
    torch.manual_seed(0)
    model = Own().train()
    before = torch.get_rng_state()
    guessed = guess_rules(model, (batch(0, 0),))
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert model.blocks[0].training
    right = {**OWN_RULES, "blocks.*.attention.qkv": ("column", (32, 32, 32))}
    assert guessed == right


def test_nothing_to_guess() -> None:
    with pytest.raises(ConfigError, match="no linear layer gives all"):
        guess_rules(nn.Linear(3, 3), (torch.zeros(2, 3),))
    with pytest.raises(ConfigError, match="nothing to give"):
        guess_rules(nn.Linear(3, 3), ())
