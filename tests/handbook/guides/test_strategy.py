"""A strategy tells what a plan does otherwise, and which split it comes to."""

from __future__ import annotations

from echelon.handbook.guides.strategy import DegreeRange, Strategy, strategy_outcome
from tests.handbook.guides.situations import plan_of, situation


def test_a_strategy_tells_what_a_plan_does_otherwise() -> None:
    plan = plan_of("llama3-70b 64xh100 mesh.tp=8 mesh.pp=4 mesh.dp_shard=2 zero.stage=1")
    wanted = Strategy(name="x", zero=(3,), tp=DegreeRange(2, 4))
    assert wanted.differs_from(plan) == ("tp 8, not 2 to 4", "pp 4, not 1", "ZeRO 1, not 3")
    assert (
        Strategy(name="y", zero=(1,), tp=DegreeRange(8, 8), pp=DegreeRange(2, 8)).differs_from(plan)
        == ()
    )


def test_no_split_is_told_where_a_strategy_cannot_use_all_devices() -> None:
    assert (
        strategy_outcome(Strategy(name="z", tp=DegreeRange(3, 3)), situation("llama3-70b 64xh100"))
        is None
    )
