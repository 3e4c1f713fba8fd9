"""The stages of a rank, empty: which blocks they have, and how they run them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from echelon.core.plan import Recompute
from echelon.layout.stage import rank_part
from echelon.parallel.operations import RankOperations
from echelon.parallel.rank_model import empty_stages, named_parameters
from echelon.parallel.recompute import RecomputingRunner
from tests.parallel.layouts import NANO, plan_of

NOBODY = cast(RankOperations, cast(Any, SimpleNamespace(recompute=None)))
FOUR = replace(NANO, layers=4, tied=True)


def test_stages_have_their_blocks_on_the_meta_device() -> None:
    policy = Recompute(policy="full")
    plan = plan_of(model=FOUR, pp=2, tp=2, recompute=policy)
    first, last = (empty_stages(plan, rank_part(plan, rank), NOBODY) for rank in (0, 1))
    assert (list(first), list(last)) == ([0], [1])
    assert list(first[0].layers) == ["0", "1"]
    assert list(last[1].layers) == ["2", "3"]
    assert (first[0].first, first[0].last, last[1].first, last[1].last) == (
        True,
        False,
        False,
        True,
    )
    for stage in (first[0], last[1]):
        assert all(parameter.is_meta for parameter in stage.parameters())
        assert isinstance(stage.run_block, RecomputingRunner)
        assert stage.run_block.policy is policy
    assert first[0].embedding.weight.shape == (-(-FOUR.vocab // 2), FOUR.hidden)


def test_a_tied_embedding_of_two_stages_is_named_once() -> None:
    plan = plan_of(model=FOUR, pp=2, schedule="zb-v", virtual_stages=2)
    stages = empty_stages(plan, rank_part(plan, 0), NOBODY)
    assert list(stages) == [0, 3]
    names = [name for stage in stages.values() for name, _ in stage.named_parameters()]
    found = named_parameters(stages)
    assert names.count("embedding.weight") == 2
    assert len(found) == len(names) - 1
