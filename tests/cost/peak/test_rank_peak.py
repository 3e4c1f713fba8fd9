"""The highest moment of a rank: its terms, where it is, and that no term alone is more."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.activations.timeline import RankActivations
from echelon.cost.bytes.held import bytes_held_by_pool
from echelon.cost.peak.rank_peak import (
    TERMS,
    PeakWalk,
    position_table_bytes,
    rank_peak,
    resting_terms,
)

STATE = ("parameters", "gradients", "optimizer")
ZERO3 = ("mesh.dp_shard=2", "zero.stage=3")


def plan_of(*flags: str) -> Plan:
    return load_job("nano", flags).plan


@pytest.mark.parametrize("flags", [(), ("mesh.pp=2",), ZERO3, ("mesh.pp=2", *ZERO3)])
def test_terms_are_model_state_and_what_a_step_adds(flags: tuple[str, ...]) -> None:
    plan = plan_of(*flags)
    for one in PeakWalk(plan).by_place():
        resting = resting_terms(plan, one.rank)
        assert tuple(one.terms) == TERMS
        assert {name: one.terms[name] for name in STATE} == {name: resting[name] for name in STATE}
        assert sum(resting[name] for name in STATE) == bytes_held_by_pool(plan, one.rank)["device"]
        activations = max(
            float(action.peak) for action in RankActivations(plan, one.rank).actions()
        )
        assert 0 < one.terms["activations"] <= activations
        assert one.bytes == sum(one.terms.values())


def test_without_anything_else_the_peak_is_that_of_activations() -> None:
    plan = plan_of()
    peak = rank_peak(plan, 0)
    tokens = 16 * plan.local_tokens * plan.num_microbatches
    walked = max(float(action.peak) for action in RankActivations(plan, 0).actions())
    assert peak.terms["activations"] == walked
    assert peak.terms["buffers"] == tokens + position_table_bytes(plan)
    assert peak.terms["gathered"] == peak.terms["messages"] == 0
    # Of the rounds that are walked the last microbatch is the highest: the others leave a loss.
    assert peak.where == "BW0.3, layers.3, activation"


def test_positions_of_a_context_rank_have_a_cosine_and_a_sine() -> None:
    plan, cut = plan_of(), plan_of("mesh.cp=2")
    width, length = plan.model.head_dim, plan.mathematics.sequence_length
    assert position_table_bytes(plan) == length * width * 4
    assert position_table_bytes(cut) == length * width * 2
    assert position_table_bytes(plan_of("model.positions=learned")) == 0


def test_a_longer_step_has_its_losses_and_its_tokens_more() -> None:
    few, many = (
        plan_of("mesh.pp=2", f"batch.global_sequences={count}", "batch.microbatch_sequences=1")
        for count in (12, 48)
    )
    rank = few.mesh.rank({Axis.PP: 1})
    short, long = rank_peak(few, rank), rank_peak(many, rank)
    assert long.terms["buffers"] - short.terms["buffers"] == 36 * 16 * few.local_tokens
    assert long.terms["activations"] - short.terms["activations"] == 36 * 4
    for name in ("messages", "gathered", *STATE):
        assert long.terms[name] == short.terms[name]


def test_an_update_may_be_the_peak() -> None:
    flags = ("optimizer.kind=muon", "batch.sequence_length=8", "batch.microbatch_sequences=1")
    peak = rank_peak(plan_of(*flags), 0)
    assert peak.where == "update"
    assert peak.terms["activations"] == 0
    assert peak.terms["buffers"] > 0
