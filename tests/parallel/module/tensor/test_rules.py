"""Words and names that are refused, and numbers that are divided."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.core.errors import ConfigError
from echelon.parallel.module.tensor.rules import find_targets, read_rules, rules_of
from tests.parallel.module.tensor.families import Own, make
from tests.parallel.module.tensor.splits import split


@pytest.mark.parametrize(
    ("rules", "rule", "told"),
    [
        ({"blocks.*.attention.qvk": "column"}, "module-tensor-rules", "blocks.*.attention.qkv"),
        ({"blocks.*.up": "colum"}, "module-tensor-rules", "column"),
        ({"blocks.*.up": "column", "blocks.0.up": "row"}, "module-tensor-rules", "blocks.0.up is"),
        ({"blocks.*.attention.head": "divide"}, "module-tensor-rules", "no number of a module"),
        ({"norm": "column"}, "module-tensor-split", "LayerNorm is neither Linear nor Embedding"),
        ({"tokens": "row"}, "module-tensor-split", 'cut by "vocabulary"'),
        ({"blocks.*.attention.scale": "row"}, "module-tensor-split", "a parameter by itself"),
        ({"blocks.0.up": ("column", 3)}, "module-tensor-split", "64 is not 3 equal parts"),
        ({"blocks.0.up": ("column", (60, 5))}, "module-tensor-split", "add up to 65"),
        ({"blocks.0.up": ("column", (61, 3))}, "module-tensor-split", "61 % 2 != 0"),
    ],
)
def test_rules_that_are_refused(rules: dict[str, Any], rule: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split(Own(), rules)
    assert set(caught.value.rules) == {rule}
    assert told in str(caught.value)


def test_a_record_of_a_module_is_copied_before_its_number_is_divided() -> None:
    model: Any = make("phi3")
    named = find_targets(model, read_rules(rules_of(model)))
    config: Any = model.config
    heads = config.num_attention_heads
    for division in named.divisions:
        division.divide(2)
    assert config.num_attention_heads == heads
    for layer in model.model.layers:
        assert layer.self_attn.config.num_attention_heads == heads // 2
        assert layer.self_attn.num_key_value_heads == 1


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
