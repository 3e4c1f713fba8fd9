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
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.experts": "moe_tp_experts"}
    with pytest.raises(ConfigError, match=r"'moe_tp_experts' of model\.layers"):
        rules_of(model)
    with pytest.raises(ConfigError, match="Own does not say how tensor ranks split it"):
        rules_of(Own())


def test_the_words_of_a_class_are_ours() -> None:
    rules = rules_of(make("qwen3"))
    assert rules["model.layers.*.self_attn.q_proj"] == "column"
    assert rules["model.layers.*.self_attn.q_norm"] == "summed"
    assert rules["model.embed_tokens"] == rules["lm_head"] == "vocabulary"
