"""Replicas of our models: one that is stale gets the primary's parameters, and the bytes are told.

What they compute in a step is in `test_stage.py`.
"""

from __future__ import annotations

import torch

from tests.parallel.threads.test_stage import engine_of, threaded


def test_a_stale_replica_gets_the_parameters_of_the_primary() -> None:
    engine, events = engine_of(threaded(3))
    replicas = engine.model.replicas
    assert replicas is not None
    assert [one.index for one in replicas] == [0, 1, 2]
    for other in replicas.others:
        for bucket in other.buckets:
            bucket.values.fill_(7.0)
    replicas.replicate()
    for other in replicas.others:
        for here, there in zip(replicas.primary.buckets, other.buckets, strict=True):
            assert torch.equal(here.values, there.values)
            assert here.values.data_ptr() != there.values.data_ptr()
    (event,) = [one for one in events.events if one.kind == "replicate"]
    assert event.bytes == 2 * sum(one.values.nbytes for one in replicas.primary.buckets)
    engine.close()
