"""Guides are asked about one situation, and compared with one another and with a plan."""

from __future__ import annotations

from echelon.handbook.guides.practices import advise, rows_for
from echelon.handbook.guides.trees import TREES
from tests.handbook.guides.situations import situation


def test_every_tree_and_every_row_that_covers_a_situation_advises() -> None:
    here = situation("llama3-70b 64xh100")
    found = advise(here)
    rows = [row.id for row in rows_for(here)]
    assert [one.id for one in found.advice] == [*(tree.id for tree in TREES), *rows]
    assert all(bool(one.steps) != bool(one.note) for one in found.advice)


def test_conflicts_and_differences_from_a_plan_are_told() -> None:
    here = situation("gpt2 8xh100")
    found = advise(here)
    assert ("llm-training", "cheapest", ("ZeRO 3 against 0",)) in found.conflicts
    assert not any({one, other} == {"distributed", "scaling"} for one, other, _ in found.conflicts)
    plan = situation("gpt2 8xh100 mesh.dp_shard=8 zero.stage=2").plan
    differs = {one.id: what for one, what in found.against(plan)}
    assert differs["cheapest"] == ("ZeRO 2, not 0",)
    assert differs["llm-training"] == ("ZeRO 2, not 3",)
