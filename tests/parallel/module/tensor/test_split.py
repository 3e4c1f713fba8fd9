"""What rules name, what ranks hold by them, and every reason why a module cannot be cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from echelon.core.errors import ConfigError
from echelon.parallel.module.tensor.known import rules_of
from echelon.parallel.module.tensor.rules import find_targets, read_rules
from echelon.parallel.module.tensor.split import SplitPlan, plan_split
from tests.parallel.module.tensor.families import OWN_RULES, Own, make


def split(model: nn.Module, rules: dict[str, Any], degree: int = 2, **more: Any) -> SplitPlan:
    """Return how ranks hold a module by rules."""
    return plan_split(model, find_targets(model, read_rules(rules)), degree=degree, **more)


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


def test_the_conv1d_of_gpt2_is_cut_along_its_other_dim() -> None:
    model = make("gpt2")
    plan = split(model, rules_of(model))
    piece = plan.split.piece_of("transformer.h.0.attn.c_attn.weight")
    assert piece is not None
    assert (piece.dim, piece.parts) == (1, (32, 32, 32))
    assert plan.split.piece_of("transformer.wte.weight") is not None  # tied to the head


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


def test_heads_are_never_cut() -> None:
    for name, degree in (("llama", 4), ("gpt_neox", 8)):
        model = make(name)
        with pytest.raises(ConfigError) as caught:
            split(model, rules_of(model), degree)
        assert set(caught.value.rules) == {"module-tensor-split"}
        assert f"mesh.tp = {degree} does not divide num_" in str(caught.value)
    with pytest.raises(ConfigError, match=r"attention\.heads: mesh\.tp = 8 does not divide 4"):
        split(Own(), OWN_RULES, 8)


class Odd(nn.Module):
    """What cannot be cut, one of each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.same = nn.Linear(8, 16)
        self.conv, self.lstm = nn.Conv1d(4, 4, 3), nn.LSTM(8, 8)
        self.drop = nn.Dropout(0.0)


@pytest.mark.parametrize(
    ("change", "rules", "told"),
    [
        ("shared", {"up": "column"}, "the same rule for up and same"),
        ("buffer", {"up": "column", "down": "row"}, "buffer mask has a dim of 16"),
        ("dropout", {"up": "column", "down": "row"}, "drop: p = 0.1 draws random numbers"),
        ("norm", {"up": "column"}, "computed from others"),
        ("", {"conv": "column"}, "Conv1d is neither Linear nor Embedding"),
        ("", {"lstm": "column"}, "LSTM is neither Linear nor Embedding"),
    ],
)
def test_modules_that_are_refused(change: str, rules: dict[str, Any], told: str) -> None:
    model = Odd()
    if change == "shared":
        model.same.weight = model.up.weight
    if change == "buffer":
        model.register_buffer("mask", torch.zeros(16))
    if change == "dropout":
        model.drop.p = 0.1
    if change == "norm":
        nn.utils.parametrizations.weight_norm(model.up)
    with pytest.raises(ConfigError) as caught:
        split(model, rules)
    assert set(caught.value.rules) == {"module-tensor-split"}
    assert told in str(caught.value)


def test_a_sequence_needs_blocks() -> None:
    with pytest.raises(ConfigError) as caught:
        split(Own(), OWN_RULES, blocks=[])
    assert caught.value.rules == ("module-sequence",)
