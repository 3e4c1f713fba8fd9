"""Stacks of experts, some on each tensor rank: values, bytes, and calls that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.errors import RunFailed
from echelon.core.event import NoEvents
from echelon.launch.local.supervisor import RankPool
from echelon.layout.modules import StackedExperts
from echelon.parallel.module.tensor.experts import SplitExperts
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.recorder import Recorder
from tests.parallel.module.sent_bytes import (
    ExpertCall,
    module_bytes,
    module_expert_bytes,
    module_tensor_bytes,
)
from tests.parallel.module.tensor.families import LENGTH, WIDTH, OwnExperts
from tests.parallel.module.tensor.targets import Looped
from tests.parallel.module.tensor.test_layers import LAYOUTS, assert_as_on_one_device, loop_of


def assert_bytes(ranks: list[Looped], choices: int, reduced: dict[str, int]) -> None:
    """Compare what each of two ranks sent over tensor ranks in the second step with formulas."""
    split, tokens = ranks[0].split, 2 * LENGTH
    for me, rank in enumerate(ranks):
        right = module_tensor_bytes(split, tokens, 8) + reduced.get("tp", 0)
        assert len(rank.chosen) == len(split.experts)
        for index, experts in enumerate(split.experts):
            here = experts.num_experts // 2
            owners = [one.chosen[index] // here for one in ranks]
            call = ExpertCall(
                tokens=tokens,
                width=WIDTH,
                choices=choices,
                leaving=int((owners[me] != me).sum()),
                arriving=int((owners[1 - me] == me).sum()),
            )
            right += module_expert_bytes(experts, call, degree=2, element_bytes=8, gate_bytes=8)
        assert rank.tensor_bytes[1] == right


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("own_moe", "tp2 sequence"),
        pytest.param("own_moe", "tp2", marks=pytest.mark.slow),
        pytest.param("own_skewed", "tp2", marks=pytest.mark.slow),
        pytest.param("own_skewed", "tp2 sequence", marks=pytest.mark.slow),
        pytest.param("mixtral", "tp2", marks=pytest.mark.slow),
        pytest.param("mixtral", "tp2 sequence", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "tp2 sequence", marks=pytest.mark.slow),
    ],
)
def test_values_and_bytes(rank_pool: RankPool, model: str, layout: str) -> None:
    loop = loop_of(model, layout)
    ranks = assert_as_on_one_device(rank_pool, loop)
    reduced = module_bytes(loop.plan, ranks[0].buckets, passes=1, kept=())
    assert_bytes(ranks, 3 if model == "qwen3_moe" else 2, reduced)
    assert all(one.cut is (layout == "tp2 sequence") for one in ranks[0].split.experts)
    if model == "own_skewed":
        owners = torch.cat([chosen // 2 for rank in ranks for chosen in rank.chosen])
        assert not owners.any()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_under_zero(rank_pool: RankPool, layout: str) -> None:
    assert_as_on_one_device(rank_pool, loop_of("own_moe", layout))


def alone(cut: bool) -> SplitExperts:
    """Return the forward of experts on the only rank."""
    group = Group("tp", [0], 0, None, Recorder(0, NoEvents()))
    experts = StackedExperts(name="experts", num_experts=4, cut=cut)
    return SplitExperts(OwnExperts(), experts, group)


@pytest.mark.parametrize("cut", [False, True])
def test_one_rank_has_all_experts(cut: bool) -> None:
    torch.manual_seed(0)
    split = alone(cut)
    x = torch.randn(3, 2, WIDTH, requires_grad=True)
    gates, chosen = torch.topk(torch.randn(3, 2, 4).softmax(-1), 2)
    y = split(x, gates_NK=gates, chosen_NK=chosen)
    own: Any = split._own
    right = own(x.flatten(0, 1), chosen.flatten(0, 1), gates.flatten(0, 1)).view_as(x)
    torch.testing.assert_close(y, right)
    found, expected = (torch.autograd.grad(one.square().sum(), x)[0] for one in (y, right))
    torch.testing.assert_close(found, expected)


def test_calls_that_do_not_fit() -> None:
    x, chosen = torch.randn(3, WIDTH), torch.zeros(3, 2, dtype=torch.int64)
    for args in [(x,), (x, chosen), (x, chosen, torch.randn(3, 4))]:
        with pytest.raises(RunFailed, match="experts take tokens") as caught:
            alone(False)(*args)
        assert caught.value.rules == ("module-tensor-split",)


def test_experts_that_are_modules_are_cut_one_by_one(rank_pool: RankPool) -> None:
    assert_as_on_one_device(rank_pool, loop_of("own_listed", "tp2"))


def test_experts_that_are_modules_are_refused_along_the_sequence(rank_pool: RankPool) -> None:
    """Each rank chose other positions: gathered, they would be no tensor."""
    with pytest.raises(RunFailed, match="those that were chosen, as of an expert") as caught:
        assert_as_on_one_device(rank_pool, loop_of("own_listed", "tp2 sequence"))
    assert "module-sequence" in str(caught.value)
