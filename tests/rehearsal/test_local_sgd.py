"""Rounds of local SGD on ranks without elements: their order, bytes and memory."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.rehearsal.run import rehearse

SETS = {
    "replicas": ["mesh.dp_replicate=2", "train.steps=500"],
    "late fragments of slices": [
        "mesh.dp_replicate=2",
        "mesh.dp_shard=2",
        "zero.stage=1",
        "local_sgd.fragments=2",
        "local_sgd.delay=5",
        "train.steps=505",
    ],
    "pipelines": ["mesh.dp_replicate=2", "mesh.pp=2", "mesh.tp=2", "train.steps=500"],
    "codes": ["mesh.dp_replicate=2", "local_sgd.gradients=int8", "train.steps=500"],
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SETS)
def test_rounds_cannot_hang_and_send_and_hold_what_is_planned(name: str) -> None:
    """Evidence of row B06: bytes of the step in which a round ends are those of the formulas."""
    plan = load_job("nano", ["local_sgd.every=50", *SETS[name]]).plan
    found = rehearse(plan, workers=1)
    assert found.faults == ()
    for one in found.ranks:
        assert dict(one.sent) == found.sent[one.rank]
        planned = sum(found.planned[one.rank].values())
        if name == "codes":
            # A bound: what a block of codes takes beside depends on the largest parameter.
            assert one.peak_bytes <= 1.02 * planned
        else:
            assert one.peak_bytes == pytest.approx(planned, rel=0.02)
