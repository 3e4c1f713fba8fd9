"""Rows of a mixture on a rank: balanced, padded, in chunks, or of a record."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from echelon.core.experts import Balance, ExpertLayout
from echelon.cost.activations.expert_numbers import expert_numbers
from echelon.layout.expert_load import ExpertLoad, expert_load_from_routing
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of

PLAN = plan_of(model=MIXTRAL, dp_shard=4, ep=4, microbatches=1, dtype="fp32")
"""Four ranks with two experts each; a rank has 8 tokens, two experts for each."""


def test_balanced_rows_come_in_as_they_go_out() -> None:
    found = expert_numbers(PLAN, 0)
    assert (found.routed, found.experts, found.top_k, found.here) == (8, 8, 2, 16)
    assert (found.inner, found.shared_inner, found.deferred) == (12, 0, 1)
    assert [chunk.rows for chunk in found.chunks] == [16 * 16 * 4]


def test_an_even_record_is_balanced() -> None:
    even_BTK = np.arange(4 * 8 * 2).reshape(4, 8, 2) % 8
    load = expert_load_from_routing(PLAN, 2, dict.fromkeys(range(2), even_BTK))
    assert expert_numbers(PLAN, 2, (0, 0), load) == expert_numbers(PLAN, 2)


def test_a_record_tells_whose_experts_the_rows_meet() -> None:
    rows = tuple(np.tile(np.array([0, 2]), (8, 1)) for _ in range(4))
    load = ExpertLoad(num_experts=8, choices={(0, 0): rows})
    here = [expert_numbers(PLAN, rank, (0, 0), load).here for rank in range(4)]
    # Expert 0 is on the first rank, expert 2 on the second.
    assert here == [32, 32, 0, 0]


def test_chunks_share_out_the_rows() -> None:
    plan = plan_of(model=MIXTRAL, dp_shard=4, ep=4, dtype="fp32", experts=ExpertLayout(chunks=4))
    found = expert_numbers(plan, 0)
    assert found.here == 16
    assert [chunk.rows for chunk in found.chunks] == [4 * 16 * 4] * 4


def test_padded_rows_are_all_slots_whatever_the_routing() -> None:
    layout, balance = ExpertLayout(padded=True), Balance(kind="aux", capacity_factor=1.0)
    plan = plan_of(model=MIXTRAL, dp_shard=4, ep=4, experts=layout, balance=balance)
    # An expert has room for 8 x 2 / 8 tokens of each of four ranks; two experts are here.
    assert expert_numbers(plan, 0).here == 2 * 2 * 4
    assert expert_numbers(plan, 0).limiting > 0
    assert expert_numbers(PLAN, 0).limiting == 0


def test_choices_of_the_model_are_flags() -> None:
    model = replace(DEEPSEEK, hidden=16)
    found = expert_numbers(plan_of(model=model, balance=Balance(z_coefficient=0.1)), 0)
    assert (found.sigmoid, found.z_loss, found.auxiliary, found.shared_inner) == (1, 1, 0, 12)
