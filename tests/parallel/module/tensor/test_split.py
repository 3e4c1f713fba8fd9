"""What ranks hold by rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from echelon.core.errors import ConfigError
from echelon.parallel.module.tensor.rules import rules_of
from tests.parallel.module.tensor.families import OWN_RULES, Own, OwnExperts, OwnMoe, make
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
        self.stacks, self.list = OwnExperts(), nn.ModuleList([nn.Linear(8, 8)])


@pytest.mark.parametrize(
    ("change", "rules", "told"),
    [
        ("shared", {"up": "column"}, "the same rule for up and same"),
        ("buffer", {"up": "column", "down": "row"}, "buffer mask has a dim of 16"),
        ("dropout", {"up": "column", "down": "row"}, "drop: p = 0.1 draws random numbers"),
        ("norm", {"up": "column"}, "computed from others"),
        ("", {"conv": "column"}, "Conv1d is neither Linear nor Embedding"),
        ("", {"lstm": "column"}, "LSTM is neither Linear nor Embedding"),
        ("", {"list": "expert"}, 'modules of their own are cut one by one, "column" and "row"'),
        ("", {"up": "expert"}, "are not stacks of as many experts: weight [16, 8], bias [16]"),
        ("", {"stacks.up": "expert"}, '"expert" names the module'),
        ("", {"stacks": "expert", "stacks.up": "column"}, "stacks.up has a rule, too"),
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


def test_experts_that_ranks_do_not_divide() -> None:
    model = nn.ModuleDict({"experts": OwnExperts(6)})
    with pytest.raises(ConfigError, match=r"mesh\.tp = 4 does not divide 6 \(6 % 4 != 0\)"):
        split(model, {"experts": "expert"}, 4)


def test_experts_beside_columns_of_a_gathered_stream() -> None:
    class Beside(OwnMoe):
        def __init__(self) -> None:
            super().__init__()
            self.mixed = nn.ModuleDict({"up": nn.Linear(32, 64), "experts": OwnExperts()})

    model = nn.Sequential(Beside())
    rules = {"0.mixed.up": "column", "0.mixed.experts": "expert"}
    split(model, rules)
    with pytest.raises(ConfigError, match=r"columns beside it have the stream of 0\.mixed"):
        split(model, rules, blocks=["0"])
