"""Words and names that are refused, and numbers that are divided."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.core.errors import ConfigError
from echelon.parallel.module.tensor.known import rules_of
from echelon.parallel.module.tensor.rules import find_targets, read_rules
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
