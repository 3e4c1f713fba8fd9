"""A split module that nobody holds is collected, and what it held with it."""

from __future__ import annotations

import gc
import weakref

import pytest

from echelon.api.parallelizing import parallelize
from echelon.core.plan import Plan, Zero
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from tests.parallel.module.models import loss_of, make, tokens
from tests.parallel.module.test_module import STAGES, plan


@pytest.mark.parametrize("zero", STAGES)
def test_a_module_that_nobody_holds_is_collected(rank_pool: RankPool, zero: Zero) -> None:
    # What is kept would keep its buckets, and a group of Gloo its threads.
    assert rank_pool.run(let_go, plan(zero), world_size=2) == [[], []]


def let_go(context: RankContext, plan: Plan) -> list[str]:
    """Train a step, forget the module, and return what is still there of it."""
    model, optimizer = parallelize(make("transformer"), plan)
    for step in range(2):
        loss_of(model, tokens(step, 0, context.rank)).backward()
        optimizer.step()
    held = {
        "passes": weakref.ref(optimizer.module.passes),
        "residency": weakref.ref(optimizer.module.gathering),
    }
    optimizer.close()
    del model, optimizer
    gc.collect()
    return [name for name, one in held.items() if one() is not None]
