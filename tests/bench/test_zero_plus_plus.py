"""The benches of ZeRO++ and of bytes between hosts: tiny runs, formulas, and verdicts."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import pytest

from bench import wire_bytes, zero_plus_plus
from bench.harness.host_ranks import run_on_hosts
from bench.harness.hosts import can_make_namespaces, linked_hosts
from bench.harness.node_plans import (
    HOSTS,
    TIMEOUT_S,
    HostedPlan,
    crossing,
    islands,
    planned_far,
    served_plan,
    zero_plans,
)
from echelon.cost.bytes.sent import bytes_sent_by_axis, parameter_gather_tiers
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool

TINY = (
    *("model.layers=1", "model.hidden=64", "model.heads=2", "model.kv_heads=2", "model.ffn=128"),
    *("model.vocab=257", "batch.sequence_length=8"),
)


def take_turns(context: RankContext, argument: Mapping[str, Any]) -> Any:
    """Let the cases of the bench take turns on this rank, as it does on its hosts."""
    plans = zero_plus_plus.plans(Namespace(**argument))
    turns = {name: zero_plus_plus.stepper(plan, context.rank) for name, plan in plans.items()}
    ticks = iter(range(10**6))
    return zero_plus_plus.measured(
        turns, rounds=2, steps=1, ranks=argument["ranks"], sent=lambda: next(ticks)
    )


@pytest.mark.slow
def test_every_case_takes_turns_and_slices_in_nodes_have_the_same_losses(
    rank_pool: RankPool,
) -> None:
    told = {"ranks": 2, "settings": list(TINY)}
    ranks = rank_pool.run(take_turns, told, 4)
    assert ranks[0].keys() == zero_plus_plus.plans(Namespace(**told)).keys()
    plain, kept = (
        ranks[0][name]["losses"] for name in (zero_plus_plus.PLAIN, zero_plus_plus.SAME_BITS)
    )
    assert plain == kept
    assert ranks[0]["gathers in int8 (qwZ)"]["losses"] != plain
    # Between both readings of the counter it is read once; one rank of each host speaks for it.
    assert all(one["sent"] == [2.0, 2.0] for one in ranks[0].values())


def test_far_bytes_are_those_of_the_tiers() -> None:
    plans = zero_plans(2, TINY)
    plain, kept = plans["ZeRO 3"], plans["secondary slices (hpZ)"]
    saved = sum(
        parameter_gather_tiers(plain, rank)[1] - parameter_gather_tiers(kept, rank)[1]
        for rank in range(4)
    )
    assert planned_far(plain, range(1)) - planned_far(kept, range(1)) == saved > 0
    assert planned_far(plain, range(3)) == 3 * planned_far(plain, range(1))
    summed = plans["sums in int8 (qgZ)"]
    across = sum(bytes_sent_by_axis(summed, rank)["dp_shard_across"] for rank in range(4))
    assert 0 < across < planned_far(summed, range(1))
    assert crossing(plain, "dp_shard") == pytest.approx(2 / 3)


def test_servers_send_everything_to_the_other_host_and_islands_meet_every_two_steps() -> None:
    served = served_plan(*TINY)
    far = planned_far(served, range(1))
    assert far == sum(bytes_sent_by_axis(served, rank)["servers"] for rank in range(4))
    apart = islands(*TINY)
    first, second = (planned_far(apart, range(step, step + 1)) for step in (0, 1))
    assert first == 0 < second


def test_a_case_that_sends_too_much_or_gains_nothing_misses() -> None:
    names = [zero_plus_plus.PLAIN, zero_plus_plus.SAME_BITS]
    formulas = dict.fromkeys(names, 100)

    def told(seconds: float, sent: float, loss: float = 1.0) -> dict[str, dict[str, list[float]]]:
        cases = zip(names, ((2.0, 100.0, 1.0), (seconds, sent, loss)), strict=True)
        return {
            name: {"seconds": [one[0]], "sent": [one[1]], "losses": [one[2]]} for name, one in cases
        }

    text, met = zero_plus_plus.report(told(1.0, 102.0), formulas)
    assert met
    assert "| 2.00 | 0.000 | 1.0200 |" in text
    for wrong in (told(1.0, 104.0), told(2.5, 100.0), told(1.0, 100.0, 1.5)):
        assert not zero_plus_plus.report(wrong, formulas)[1]


def test_what_is_counted_stands_beside_the_formula() -> None:
    every = wire_bytes.systems(TINY)
    assert len(every) == 10
    name = "parameter servers, asynchronous"
    assert every[name].plan.mathematics.updates.is_asynchronous
    (*_, row) = wire_bytes.table({name: [1020, 1000]}, every).splitlines()
    assert row == f"| {name} | 4 | 1,000 | 1,020 | 1.0200 |"


@pytest.mark.slow
@pytest.mark.skipif(not can_make_namespaces(), reason="hosts of their own need root and `ip`")
@pytest.mark.parametrize("only", ["hpZ, qwZ", "parameter servers", "local SGD, int8"])
def test_tiny_systems_are_counted_between_namespaces(only: str) -> None:
    chosen = {name: one for name, one in wire_bytes.systems(TINY).items() if only in name}
    found = _counted(chosen, only)
    assert found.keys() == chosen.keys()
    # Tiny messages have large headers; less than the formula nobody can send.
    assert all(counted / formula >= 1.0 for counted, formula in found.values())


def _counted(chosen: Mapping[str, HostedPlan], only: str) -> dict[str, list[int]]:
    (each,) = {one.each for one in chosen.values()}
    sets = [word for one in TINY for word in ("--set", one)]
    words = ["--only", only, *sets, "--ranks", str(each)]
    with linked_hosts(HOSTS) as hosts:
        return run_on_hosts("bench.wire_bytes", hosts, words, each=each, timeout_s=TIMEOUT_S)
