"""Products in chunks around a ring equal those of one device, and hide what brings the chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan, Recompute, RecomputedOperator
from echelon.launch.local.pool import RankPool
from tests.parallel.layouts import GPT2, NANO, QWEN, plan_of
from tests.parallel.one_device import assemble
from tests.parallel.tensor.test_tensor import (
    BIASED,
    FOUR_HEADS,
    close,
    reference,
    run,
    whole,
)

THREE_HEADS = replace(NANO, name="three-heads", heads=6, kv_heads=3, head_dim=4, ffn=27)


def ring_plan_of(model: ModelShape, tp: int, *operators: RecomputedOperator) -> Plan:
    """Return the plan of a block whose rows go around a ring of tensor ranks."""
    plan = plan_of(
        model=model,
        tp=tp,
        sequence_parallel=True,
        tp_overlap="ring",
        microbatches=1,
        microbatch_sequences=2,
        sequence_length=12 if tp == 3 else 8,
    )
    recompute = Recompute(policy="selective", operators=operators) if operators else Recompute()
    return replace(plan, layout=replace(plan.layout, recompute=recompute))


@pytest.mark.parametrize(
    ("model", "tp", "operators"),
    [
        (NANO, 2, ()),
        (QWEN, 2, ("norm", "activation")),
        (GPT2, 4, ()),
        (BIASED, 2, ("mlp",)),
        (FOUR_HEADS, 4, ("norm", "mlp", "attention")),
        (THREE_HEADS, 3, ()),
        (THREE_HEADS, 3, ("norm",)),
    ],
    ids=str,
)
def test_a_block_equals_that_of_one_device(
    rank_pool: RankPool, model: ModelShape, tp: int, operators: tuple[RecomputedOperator, ...]
) -> None:
    plan = ring_plan_of(model, tp, *operators)
    ranks = run(rank_pool, plan)
    y_ND, dx_ND, grads = reference(plan)
    close(whole(plan, [rank.out for rank in ranks]), y_ND, "output")
    close(whole(plan, [rank.dx for rank in ranks]), dx_ND, "input gradient")
    got = assemble(plan, [rank.gradients for rank in ranks])
    for name, expected in grads.items():
        close(got[name], expected, name)
