"""Gradients of stages: what never came is zero, and a step has one backward."""

from __future__ import annotations

import torch
from torch import nn

from echelon.launch.local.supervisor import RankPool
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.gradients import Reduction
from tests.parallel.module.forwards.test_linear_deferred import store_for
from tests.parallel.module.pipeline import targets
from tests.parallel.module.pipeline.targets import Case, plan


class Told(Reduction):
    """Note the buckets that were given for summing."""

    def __init__(self) -> None:
        self.full: list[tuple[str, bool]] = []

    def bucket_is_full(self, bucket: Bucket, *, last: bool) -> None:
        self.full.append((bucket.name, last))


def test_a_bucket_is_summed_when_its_stage_is_done() -> None:
    model = nn.Linear(2, 3).double()
    store, told = store_for(model), Told()
    store._reduction = told
    for last in (False, True):
        store.start_backward(0, last=last)
        store.add(model.weight, torch.ones(3, 2, dtype=torch.float64))
        assert told.full == []
        store.end_backward(0)
    assert told.full == [("bucket0", True)]
    slots = {s.spec.name: s for bucket in store.buckets for s in bucket.slots}
    assert torch.equal(slots["weight"].gradient, torch.full_like(model.weight, 2.0))
    assert not slots["bias"].gradient.any()
    assert store.came == {id(model.weight)}


def test_what_no_token_reaches_is_an_error_or_zero(rank_pool: RankPool) -> None:
    for error, norm in rank_pool.run(targets.unused, Case(plan=plan()), world_size=2):
        assert "unused-parameter" in error
        assert "spare.weight got no gradient in step 0 on rank 0" in error
        assert norm > 0
