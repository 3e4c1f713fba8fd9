"""What ranks hold by rules."""

from __future__ import annotations

import pytest

from echelon.core.errors import ConfigError
from tests.parallel.module.tensor.families import OWN_RULES, Own
from tests.parallel.module.tensor.splits import split


def test_pieces_of_a_module_of_ones_own() -> None:
    plan = split(Own(), OWN_RULES)
    shapes = {one.name: one.local_shape(2) for one in plan.split.pieces}
    assert shapes["tokens.weight"] == (19, 32)  # 37 rows, padded
    assert shapes["blocks.0.attention.qkv.weight"] == (48, 32)
    assert shapes["blocks.0.attention.out.weight"] == (32, 16)
    assert "blocks.0.attention.out.bias" not in shapes
    assert plan.split.summed == {f"blocks.{i}.attention.scale" for i in (0, 1)}
    qkv = plan.split.piece_of("blocks.1.attention.qkv.bias")
    assert qkv is not None
    assert qkv.ranges(2, 1) == ((16, 32), (48, 64), (80, 96))


def test_along_the_sequence_norms_and_row_biases_are_summed() -> None:
    plan = split(Own(), OWN_RULES, blocks=["blocks.0", "blocks.1"])
    assert "blocks.0.norm1.weight" in plan.split.summed
    assert "blocks.0.attention.out.bias" in plan.split.summed
    assert "blocks.1.down.bias" in plan.split.summed
    assert "norm.weight" not in plan.split.summed
    assert plan.regions == {"blocks.0.attention", "blocks.1.attention"}


def test_a_sequence_needs_blocks() -> None:
    with pytest.raises(ConfigError) as caught:
        split(Own(), OWN_RULES, blocks=[])
    assert caught.value.rules == ("module-sequence",)
