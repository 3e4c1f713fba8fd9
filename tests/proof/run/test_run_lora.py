"""Plans whose adapters alone are trained are proven, and what ranks keep is what `cost/` says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.choices.lora import LINEARS, Lora
from echelon.core.plan import Plan
from echelon.launch.local.pool import RankPool
from echelon.proof.matrix.block_cases import BlockCase
from echelon.proof.matrix.bytes_walk import compare_plan
from echelon.proof.run import OUR_ENGINE, prove

FAST = (BlockCase("partly-turned", "tp2sp", "none"), ("q", "v"))
SLOW: tuple[tuple[BlockCase, tuple[str, ...]], ...] = (
    (BlockCase("partly-turned", "zero3-tp2sp-pp2", "none"), LINEARS),
    (BlockCase("partly-turned", "pp2", "norm-mlp"), ("q", "v")),
    (BlockCase("gemma3", "zero3", "none"), ("k", "o", "up")),
    (BlockCase("partly-turned", "ring2", "none"), LINEARS),
    (BlockCase("granite", "ulysses2", "full"), ("q", "o", "down")),
    (BlockCase("gpt-oss-attention", "tp2sp", "norm-attention"), LINEARS),
    (BlockCase("falcon", "pp2-zb", "none"), ("q", "v")),
    (BlockCase("falcon", "tp2", "none"), ("up", "down")),
    (BlockCase("neox", "pp2-zb", "none"), ("down",)),
    (BlockCase("olmo2", "pp2-zb", "none"), ("down",)),
)


def _plan(case: BlockCase, targets: tuple[str, ...]) -> Plan:
    """Return the plan of a case with adapters on those of `targets` that it has."""
    plan = case.plan()
    own = tuple(name for name in targets if name != "gate" or plan.model.gated)
    model = replace(plan.model, lora=Lora(rank=4, alpha=8.0, targets=own))
    return replace(plan, mathematics=replace(plan.mathematics, model=model))


def _check(case: BlockCase, targets: tuple[str, ...], rank_pool: RankPool) -> None:
    plan = _plan(case, targets)
    prove(plan, run_ranks=rank_pool.run, subject=OUR_ENGINE, own_precision=False).require()
    found = compare_plan(plan, rank_pool.run)
    assert found.problems == ()
    assert not found.wrong, found.peak_error


def test_adapters_on_two_tensor_ranks_are_proven(rank_pool: RankPool) -> None:
    _check(*FAST, rank_pool)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "targets"), SLOW, ids=lambda one: getattr(one, "name", None))
def test_adapters_are_proven_in_every_kind_of_layout(
    case: BlockCase, targets: tuple[str, ...], rank_pool: RankPool
) -> None:
    _check(case, targets, rank_pool)
