"""Bytes of rounds by hand arithmetic; what ranks send and hold is compared in proofs.

Evidence of row B06: what crosses islands is 1/H of what replicas send.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.axis import Axis
from echelon.core.choices.local_sgd import LocalSgd
from echelon.core.plan import Plan
from echelon.cost.bytes.held import bytes_held
from echelon.cost.bytes.local_sgd import (
    mean_outer_bytes,
    outer_bytes,
    outer_held,
    outer_step_bytes,
    rejoin_bytes,
    sent_element_bytes,
)
from echelon.cost.bytes.sent import bytes_sent, bytes_sent_by_axis
from tests.layout.test_islands import islands

REPLICATE = Axis.DP_REPLICATE.value


def sharded(**local: object) -> Plan:
    plan = islands(dp_shard=2)
    zero = replace(plan.layout.zero, stage=1)
    mathematics = replace(plan.mathematics, local_sgd=replace(plan.mathematics.local_sgd, **local))
    return replace(plan, layout=replace(plan.layout, zero=zero), mathematics=mathematics)


def replicas(plan: Plan) -> Plan:
    """Return the same layout, whose replicas sum gradients in each step."""
    return replace(plan, mathematics=replace(plan.mathematics, local_sgd=LocalSgd()))


@pytest.mark.system("B06")
def test_a_round_sends_what_a_step_of_replicas_sends() -> None:
    """Evidence of row B06: 1/H of the bytes over dp_replicate, without padding of buckets."""
    plan = sharded(every=50)
    (round_sent,) = [t for t in mean_outer_bytes(plan, 1) if t.name == "outer gradients"]
    (step,) = [
        t for t in bytes_sent(replicas(plan), 1) if (t.axis, t.name) == (REPLICATE, "gradients")
    ]
    padding = step.each - round_sent.each
    assert 0 <= padding < 0.01 * step.each
    assert round_sent.every == 50
    assert round_sent.bytes == round_sent.each // 50


@pytest.mark.parametrize("rank", range(4))
def test_steps_of_a_round_send_its_bytes_and_no_others(rank: int) -> None:
    plan = sharded(every=4, fragments=2)
    each = [sum(t.bytes for t in outer_bytes(plan, rank, step)) for step in range(8)]
    assert each[:4] == each[4:]
    assert each[0] == each[2] == 0
    assert sum(each[:4]) == sum(term.each for term in mean_outer_bytes(plan, rank))
    inner = bytes_sent_by_axis(plan, rank)
    assert inner[REPLICATE] == sum(t.bytes for t in mean_outer_bytes(plan, rank))


def test_outer_state_is_held_as_slices_are() -> None:
    plain, nesterov = sharded(outer="sgd"), sharded(outer="nesterov", delay=1)
    slices = next(t for t in bytes_held(plain, 0) if t.name == "optimizer state").bytes // 2
    assert {t.name: t.bytes for t in outer_held(plain, 0)} == {"outer parameters": slices}
    assert {t.name: t.bytes for t in outer_held(nesterov, 0)} == {
        "outer parameters": slices,
        "outer momentum": slices,
        "outer gradients": slices,
    }
    assert not outer_held(replicas(plain), 0)
    assert 0 < outer_step_bytes(plain, 0) <= slices
    assert outer_step_bytes(nesterov, 0) == 0


def test_codes_are_a_byte_and_a_scale_of_a_block() -> None:
    plan = sharded(every=4, gradients="int8")
    sent = {t.name: t.each for t in mean_outer_bytes(plan, 0)}
    sums = {t.name: t.each for t in mean_outer_bytes(sharded(every=4), 0)}
    # A sum of two float64 sends a whole number of each of 8 bytes, its code is one byte.
    assert sent["codes of outer gradients"] * 8 == sums["outer gradients"]
    assert sent["scales of outer gradients"] % 8 == 0
    assert sent["largest of outer blocks"] > 0
    assert sent_element_bytes(plan) == 1 + 8 / 128


def test_a_meeting_of_fewer_islands_and_a_return_by_hand() -> None:
    """B06: 2 (k-1)/k of the slices, none of one alone; all that is agreed on to who is back."""
    plan = sharded(outer="nesterov", islands=2, min_islands=1, every=4)
    elements = sum(held.bytes for held in outer_held(plan, 0) if "parameters" in held.name) // 4
    ends = 3
    alone, both = (
        sum(term.bytes for term in outer_bytes(plan, 0, ends, present=count)) for count in (1, 2)
    )

    assert alone == 0
    assert both == outer_bytes(plan, 0, ends)[0].bytes
    assert 0 < both <= elements * 4
    # No row of who asks to stop: that goes through the store.
    assert [term.name for term in outer_bytes(plan, 0, ends)] == ["outer gradients"]
    assert (
        rejoin_bytes(plan, 0) == 2 * elements * 4 == sum(one.bytes for one in outer_held(plan, 0))
    )
    # All sums of a meeting are there at a time.
    assert outer_step_bytes(plan, 0) == both
    plain = replace(
        plan,
        mathematics=replace(
            plan.mathematics, local_sgd=replace(plan.mathematics.local_sgd, outer="sgd")
        ),
    )
    assert rejoin_bytes(plain, 0) == elements * 4
