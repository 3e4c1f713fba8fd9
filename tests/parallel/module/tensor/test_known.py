"""What classes of transformers say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.core.errors import ConfigError
from echelon.parallel.module.tensor.known import rules_of
from tests.parallel.module.tensor.families import Own, make
from tests.parallel.module.tensor.splits import split


def test_the_conv1d_of_gpt2_is_cut_along_its_other_dim() -> None:
    model = make("gpt2")
    plan = split(model, rules_of(model))
    piece = plan.split.piece_of("transformer.h.0.attn.c_attn.weight")
    assert piece is not None
    assert (piece.dim, piece.parts) == (1, (32, 32, 32))
    assert plan.split.piece_of("transformer.wte.weight") is not None  # tied to the head


def test_a_plan_in_words_that_are_not_known_is_refused() -> None:
    model: Any = make("llama")
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.identity": "moe_identity_expert"}
    with pytest.raises(ConfigError, match=r"'moe_identity_expert' of model\.layers"):
        rules_of(model)
    with pytest.raises(ConfigError, match="Own does not say how tensor ranks split it"):
        rules_of(Own())


def test_the_words_of_a_class_are_ours() -> None:
    rules = rules_of(make("qwen3"))
    assert rules["model.layers.*.self_attn.q_proj"] == "column"
    assert rules["model.layers.*.self_attn.q_norm"] == "summed"
    assert rules["model.embed_tokens"] == rules["lm_head"] == "vocabulary"


def test_experts_are_whole_on_their_ranks_and_their_number_is_divided() -> None:
    rules = rules_of(make("mixtral"))
    assert rules["model.layers.*.mlp.experts"] == "expert"
    assert rules["model.layers.*.mlp.experts.num_experts"] == "divide"
    assert not any("gate_up_proj" in name for name in rules)
    model = make("qwen3_moe")
    plan = split(model, rules_of(model))
    assert [one.name for one in plan.split.experts] == ["model.layers.1.mlp.experts"]
    piece = plan.split.piece_of("model.layers.1.mlp.experts.down_proj")
    assert piece is not None
    assert (piece.dim, piece.local_shape(2)) == (0, (4, 32, 24))
    # That of the experts, and no other number by this name.
    assert [one.name for one in plan.named.divisions] == ["model.layers.1.mlp.experts.num_experts"]
