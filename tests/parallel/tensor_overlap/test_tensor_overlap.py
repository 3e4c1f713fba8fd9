"""Products in chunks around a ring equal those of one device, and hide what brings the chunks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.event import Event
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan, Recompute, RecomputedOperator
from echelon.launch.local.supervisor import RankPool
from tests.parallel.layouts import GPT2, NANO, QWEN, plan_of
from tests.parallel.one_device import assemble, make_rows
from tests.parallel.tensor.test_tensor import (
    BIASED,
    FOUR_HEADS,
    close,
    reference,
    run,
    stream,
    whole,
)
from tests.parallel.tensor_overlap.overlap_targets import (
    matrices_apart,
    one_fused_block,
    summed_parts,
    threaded_ring,
)
from tests.walks import examples

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


@pytest.mark.system("B07")
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


@pytest.mark.system("B07")
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_messages_lie_beside_the_products(rank_pool: RankPool, tp: int) -> None:
    model = {2: NANO, 3: THREE_HEADS, 4: FOUR_HEADS}[tp]
    ranks = run(rank_pool, ring_plan_of(model, tp))
    for rank in ranks:
        messages = [e for e in rank.events if e.kind == "all_to_all"]
        products = [e for e in rank.events if e.kind == "multiply"]
        for name in GATHERED:
            for message, product in _steps(messages, products, name, tp, before=True):
                # What brings the next chunk is under way before this one is multiplied.
                assert message.start <= product.start
                assert message.end >= product.end
        for name in SUMMED:
            for message, product in _steps(messages, products, name, tp, before=False):
                # What brings a sum is under way before this rank's part of it is made.
                assert message.start <= product.start
                assert message.end >= product.end


GATHERED, SUMMED = ("column.forward", "row.backward"), ("row.forward", "column.backward")


def _steps(
    messages: list[Event], products: list[Event], name: str, tp: int, *, before: bool
) -> list[tuple[Event, Event]]:
    """Return each message of an exchange with the product that hides it, both layers' in order."""
    found: list[tuple[Event, Event]] = []
    for step in range(1, tp):
        hidden_by = step - 1 if before else step
        moved = [e for e in messages if e.name == f"{name}.{step}"]
        made = [e for e in products if e.name == f"{name}.{hidden_by}"]
        assert len(moved) == len(made) == 2  # attention, and the MLP
        found += zip(moved, made, strict=True)
    return found


def test_a_ring_sends_chunks_to_the_next_rank_only(rank_pool: RankPool) -> None:
    plan = ring_plan_of(FOUR_HEADS, 4)
    rows = plan.local_tokens // 4 * plan.model.hidden * 8
    for rank in run(rank_pool, plan):
        messages = [e for e in rank.events if e.kind == "all_to_all"]
        assert {(e.axis, e.bytes) for e in messages} == {("tp", rows)}
        assert Counter(e.name.rpartition(".")[0] for e in messages) == dict.fromkeys(
            (*GATHERED, *SUMMED), 2 * 3
        )
        # Inputs for weight gradients wait for nothing: they are gathered at once.
        at_once = Counter(e.name for e in rank.events if e.kind == "all_gather")
        assert at_once["column.backward.input"] == 2


def test_the_order_of_a_sum_is_that_of_the_ring(rank_pool: RankPool) -> None:
    """The rank after the owner begins, and the owner adds its part last: bit for bit."""
    for rank, (parts, got) in enumerate(rank_pool.run(summed_parts, None, world_size=4)):
        total = parts[(rank + 1) % 4]
        for other in (2, 3, 4):
            total = parts[(rank + other) % 4] + total
        assert torch.equal(got, total)


@pytest.mark.parametrize(("model", "tp"), [(QWEN, 2), (THREE_HEADS, 3), (BIASED, 2)], ids=str)
def test_fused_products_equal_those_of_one_device(
    rank_pool: RankPool, model: ModelShape, tp: int
) -> None:
    plan = ring_plan_of(model, tp)
    plan = replace(plan, layout=replace(plan.layout, tp_overlap="symmetric-memory"))
    argument = (plan, stream(plan, 1), stream(plan, 2), make_rows(plan, 0).batch(0))
    ranks = rank_pool.run(one_fused_block, argument, world_size=tp)
    y_ND, dx_ND, grads = reference(plan)
    close(whole(plan, [rank.out for rank in ranks]), y_ND, "output")
    close(whole(plan, [rank.dx for rank in ranks]), dx_ND, "input gradient")
    got = assemble(plan, [rank.gradients for rank in ranks])
    for name, expected in grads.items():
        close(got[name], expected, name)
    for rank in ranks:
        named = Counter((e.kind, e.name) for e in rank.events if "gradients" not in e.name)
        assert named == {
            ("all_gather", "column.forward"): 2,
            ("reduce_scatter", "row.forward"): 2,
            ("all_gather", "row.backward"): 2,
            ("reduce_scatter", "column.backward"): 2,
            ("all_gather", "column.backward.input"): 2,
        }


@pytest.mark.parametrize("fused", [False, True], ids=["ring", "fused"])
def test_matrices_that_lie_apart_are_multiplied_one_by_one(
    rank_pool: RankPool, fused: bool
) -> None:
    for got, expected in rank_pool.run(matrices_apart, fused, world_size=2):
        for one, other in zip(got, expected, strict=True):
            close(one, other, "matrices apart")


@settings(max_examples=examples(40), deadline=None)
@given(size=st.integers(2, 6), rows=st.integers(1, 3), seed=st.integers(0, 99))
def test_any_ring_gathers_and_sums(size: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-3, 4, (2, 4), generator=generator, dtype=torch.float64)
    own = torch.randint(-3, 4, (size, rows, 4), generator=generator, dtype=torch.float64)
    parts = torch.randint(-3, 4, (size, rows * size, 4), generator=generator, dtype=torch.float64)
    gathered, summed = threaded_ring(size, own, parts, weight)
    whole = own.flatten(0, 1)
    total = (parts.sum(0) @ weight.t()).view(size, rows, 2)
    for rank in range(size):
        y, rows_of_all = gathered[rank]
        assert torch.equal(rows_of_all, whole)
        assert torch.equal(y, whole @ weight.t())
        assert torch.equal(summed[rank], total[rank])
