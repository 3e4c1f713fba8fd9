"""Seconds of ZeRO 3 between nodes: what secondary slices, int8 and sums in two hops take away."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.cost.bytes.model_sizes import node_slice_weights
from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.seconds.data import node_gather_seconds, unit_gather_seconds
from echelon.cost.seconds.from_plan import cost_inputs_from_plan

WEIGHTS = 2e8


def work(*more: str) -> CostInputs:
    sets = ("cluster.preset=16xa100-80gb", "mesh.dp_shard=16", "zero.stage=3")
    plan = load_job("llama2-7b", [*sets, "precision.parameters=bf16", *more]).plan
    return cost_inputs_from_plan(plan)


def test_a_gather_from_the_own_node_takes_the_links_of_the_node() -> None:
    plain, kept = work(), work("zero.secondary=true")
    far, _ = unit_gather_seconds(kept, WEIGHTS, 0.0)
    near = node_gather_seconds(kept, WEIGHTS, 0.0, far=far)
    assert float(near) < float(far)
    assert float(node_gather_seconds(plain, WEIGHTS, 0.0, far=far)) == float(far)
    first = kept.machine.tiers[0]
    least = 7 / 8 * 2 * WEIGHTS / float(first.bandwidth)
    assert float(near) > least
    assert float(node_slice_weights(kept, WEIGHTS, 0.0)) == WEIGHTS / 8
    assert float(node_slice_weights(plain, WEIGHTS, 0.0)) == 0.0


def test_codes_of_one_byte_take_half_of_bf16_and_their_scales() -> None:
    plain, coded = (
        float(unit_gather_seconds(one, WEIGHTS, 0.0)[0])
        for one in (work(), work("zero.gather=int8"))
    )
    assert coded / plain == pytest.approx((1 + 4 / 128) / 2, rel=0.02)


def test_two_hops_send_what_eight_ranks_added_up() -> None:
    exact, eight, four = (
        float(unit_gather_seconds(work(*more), WEIGHTS, 0.0)[1])
        for more in ((), ("zero.reduce=int8",), ("zero.reduce=int4",))
    )
    assert four < eight < exact
