"""Orders of sums: what a plan cuts into parts is named, from the inside."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.proof.deviations import reduction_order

ONE_MICROBATCH = ("batch.global_sequences=8", "batch.microbatch_sequences=8")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (ONE_MICROBATCH, ("nothing: as in one process",)),
        (
            ("mesh.dp_replicate=2", "batch.global_sequences=16", "batch.microbatch_sequences=2"),
            (
                "gradients of weights: 4 microbatches in the order of backward, then 2 data ranks "
                "(all-reduce)",
            ),
        ),
        (
            ("mesh.tp=2", "mesh.sequence_parallel=true", *ONE_MICROBATCH),
            ("outputs of row-parallel layers: parts of 2 tensor ranks (reduce-scatter)",),
        ),
        (
            ("mesh.cp=2", *ONE_MICROBATCH),
            (
                "attention: 2 blocks of keys, its own first, joined by their log-sum-exp",
                "gradients of weights: 2 context ranks (all-reduce)",
            ),
        ),
        (
            ("mesh.cp=2", "context.kind=gathered", *ONE_MICROBATCH),
            (
                "gradients of keys and values: parts of 2 context ranks (reduce-scatter)",
                "gradients of weights: 2 context ranks (all-reduce)",
            ),
        ),
    ],
)
def test_each_sum_in_parts_is_named(settings: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert reduction_order(load_job("nano", settings).plan) == expected


def test_slices_are_added_up_over_ranks_before_microbatches() -> None:
    shared = ("mesh.dp_shard=2", "mesh.dp_replicate=2", "zero.stage=2")
    sizes = ("batch.global_sequences=8", "batch.microbatch_sequences=1")
    for accumulate, expected in (
        ("whole", "2 microbatches in the order of backward, then 2 data ranks (reduce-scatter)"),
        ("slices", "2 data ranks (reduce-scatter), then 2 microbatches in the order of backward"),
    ):
        plan = load_job("nano", (*shared, *sizes, f"zero.accumulate={accumulate}")).plan
        (told,) = reduction_order(plan)
        assert told == f"gradients of weights: {expected}, then 2 replicas (all-reduce)"


def test_servers_add_up_workers_in_their_order() -> None:
    """S06: the same order on every run."""
    plan = load_job("nano", ["mesh.dp_replicate=2", "servers.count=2"]).plan
    (order,) = reduction_order(plan)
    assert order.endswith("then 2 workers, one after the other, on each server")
