"""The peak of a primary: with all replicas in one memory, and with a GPU for each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.peak.rank_peak import rank_peak
from echelon.cost.peak.threads import share_of_replica

SETS = ("batch.microbatch_sequences=4", "batch.global_sequences=16")


def plan_on(cluster: str, *sets: str) -> Plan:
    return load_job("nano", [f"cluster.preset={cluster}", *SETS, *sets]).plan


def test_replicas_that_share_a_memory_have_the_activations_of_one_process() -> None:
    two = rank_peak(plan_on("laptop", "threads.replicas=2"), 0).terms
    one = rank_peak(plan_on("laptop"), 0).terms
    assert two["parameters"] == 2 * one["parameters"]
    assert two["gradients"] == 2 * one["gradients"]
    assert two["optimizer"] == one["optimizer"]
    assert two["activations"] == pytest.approx(one["activations"], rel=0.02)


def test_a_primary_on_its_gpu_has_its_share_and_a_bucket_of_another() -> None:
    plan = plan_on("8xh100", "threads.replicas=4", "kernels.provider=plain")
    share = share_of_replica(plan)
    assert share.layout.microbatch_sequences == 1
    assert share.num_microbatches == plan.num_microbatches
    found, alone = rank_peak(plan, 0).terms, rank_peak(share, 0).terms
    more = {name: found[name] - alone[name] for name in found if found[name] != alone[name]}
    assert more.keys() == {"buffers"}
    assert 0 < more["buffers"] <= alone["gradients"]
    assert replace(share, mathematics=plan.mathematics, layout=plan.layout) == plan
