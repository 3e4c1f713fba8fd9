"""Whether a plan fits: by what ranks and servers hold, and by what a step needs beside it."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.planner.lint.fits import most_held_by_server, plan_fits

EIGHT = "cluster.preset=8xh100"
SHARDED = (EIGHT, "mesh.dp_shard=8", "zero.stage=3")


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ((*SHARDED, "recompute.policy=full"), True),
        # Parameters, gradients and optimizer of each replica: 128 GB of 85.
        ((EIGHT, "mesh.dp_replicate=8"), False),
        # What is held between steps fits; activations of a microbatch do not.
        ((*SHARDED, "batch.microbatch_sequences=8"), False),
    ],
)
def test_all_that_a_step_needs_must_fit(settings: tuple[str, ...], fits: bool) -> None:
    assert plan_fits(load_job("llama3-8b", settings).plan) is fits


def test_the_fullest_server_counts() -> None:
    plan = load_job("nano", ("servers.count=2", "mesh.dp_replicate=2")).plan
    assert most_held_by_server(plan) > 0
    assert most_held_by_server(load_job("nano", ()).plan) == 0
