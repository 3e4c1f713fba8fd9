"""Bytes predicted and recorded: a handful of plans of the walk, and what it tells of a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.core.plan import Plan, Recompute, RecomputedOperator, RecomputePolicy
from echelon.cost.activations.numbers import LOSS_ROWS
from echelon.launch.local.supervisor import RankPool
from tests.parallel.layouts import DEEPSEEK, GPT2, NANO, plan_of
from tests.parallel.pipeline.pipelines import pipeline_plan
from tests.walks.plans.bytes_recorded import record_rank
from tests.walks.plans.bytes_walk import (
    ALLOWED,
    AS_TRAINED,
    PRECISIONS,
    BytesComparison,
    choices,
    compare,
    compare_plan,
    sample,
    summary,
)

NEAR = {
    "zero bubble": pipeline_plan("zb-h1", 2),
    "ring": plan_of(cp=2, model=GPT2, microbatch_sequences=2),
    "experts": plan_of(model=DEEPSEEK, dp_shard=2, ep=2, microbatch_sequences=2),
    "sequence parallel": plan_of(tp=2, sequence_parallel=True, dtype="fp32"),
    "products in chunks": plan_of(
        tp=4,
        model=replace(NANO, hidden=64, heads=8, kv_heads=4, ffn=32),
        sequence_parallel=True,
        tp_overlap="ring",
        dtype="fp32",
    ),
    "split backward on tensor ranks": plan_of(tp=2, schedule="zb-h1", microbatches=2),
}

LONG = replace(NANO, layers=1, vocab=700, max_positions=2500)
CHUNKED = {
    (tp, scattered, precision.parameters): plan_of(
        model=LONG,
        tp=tp,
        sequence_parallel=scattered,
        precision=precision,
        sequence_length=2500,
        microbatches=1,
        microbatch_sequences=2,
    )
    for tp, scattered, precision in (
        (1, False, PRECISIONS[1]),
        (2, False, PRECISIONS[0]),
        (2, True, PRECISIONS[1]),
    )
}
"""More tokens than the loss takes at a time, and logits that are most of what is held."""


REDONE: tuple[tuple[RecomputedOperator, ...], ...] = (
    ("norm", "activation"),
    ("attention",),
    ("norm", "mlp", "attention"),
)
"""Operators that are made again, beside every third block or alone."""


@pytest.fixture(scope="module")
def walked_near(rank_pool: RankPool) -> Callable[[str], BytesComparison]:
    """Return a function that walks a plan of `NEAR`, once for all tests."""
    return cache(lambda name: compare_plan(NEAR[name], rank_pool.run))


@pytest.mark.system("S42")
@pytest.mark.quick(
    "experts-norm+activation",
    "ring-norm+activation",
    "split backward on tensor ranks-norm+mlp+attention",
    "sequence parallel-attention",
)
@pytest.mark.parametrize("operators", REDONE, ids="+".join)
@pytest.mark.parametrize("name", NEAR)
def test_bytes_of_operators_made_again_are_those_of_the_formulas(
    rank_pool: RankPool,
    walked_near: Callable[[str], BytesComparison],
    name: str,
    operators: tuple[RecomputedOperator, ...],
) -> None:
    plan = NEAR[name]
    policy: RecomputePolicy = "full" if "activation" in operators else "selective"
    recompute = Recompute(policy=policy, every=3, operators=operators)
    redone = replace(plan, layout=replace(plan.layout, recompute=recompute))
    kept, walked = walked_near(name), compare_plan(redone, rank_pool.run)
    assert walked.problems == ()
    assert abs(walked.peak_error) <= ALLOWED
    assert walked.kept_bytes < kept.kept_bytes


DRAWN = 4
"""Plans that are drawn at random."""


@pytest.mark.system("S44")
@pytest.mark.parametrize("name", NEAR)
def test_bytes_are_those_of_the_formulas(
    walked_near: Callable[[str], BytesComparison], name: str
) -> None:
    walked = walked_near(name)
    assert walked.problems == ()
    assert min(walked.sent, walked.held, walked.kept) > 0
    assert abs(walked.peak_error) <= ALLOWED


def test_bytes_of_a_split_backward_in_chunks_are_those_of_the_formulas(
    rank_pool: RankPool,
) -> None:
    plan = plan_of(
        tp=2, sequence_parallel=True, tp_overlap="ring", schedule="zb-h1", microbatches=2
    )
    walked = compare_plan(plan, rank_pool.run)
    assert walked.problems == ()
    assert abs(walked.peak_error) <= ALLOWED


@pytest.mark.quick("(2, False, 'fp32')")
@pytest.mark.parametrize("plan", list(CHUNKED.values()), ids=map(str, CHUNKED))
def test_of_logits_a_chunk_is_held(rank_pool: RankPool, plan: Plan) -> None:
    assert plan.local_tokens > 2 * LOSS_ROWS == 2 * TRAINING_PIECES.loss_rows
    walked = compare_plan(plan, rank_pool.run)
    assert walked.problems == ()
    assert abs(walked.peak_error) <= ALLOWED


@pytest.fixture(scope="module")
def drawn() -> list[Plan]:
    """Return plans of few ranks, drawn at random: the same ones on every run."""
    return sample(DRAWN, 20261122, max_world=2)


@pytest.mark.parametrize("place", range(DRAWN))
def test_a_random_plan_of_few_ranks_takes_what_the_formulas_say(
    rank_pool: RankPool, drawn: list[Plan], place: int
) -> None:
    walked = compare_plan(drawn[place], rank_pool.run)
    assert walked.problems == ()
    assert abs(walked.peak_error) <= ALLOWED


def test_a_sample_has_every_choice_and_precision_once_and_no_plan_twice() -> None:
    plans = sample(50, 3, max_world=4)
    assert len({plan.content_hash() for plan in plans}) == len(plans) == 50
    assert {plan.mathematics.precision for plan in plans} == set(PRECISIONS)
    met = {choice for plan in plans for choice in choices(plan)}
    for word in ("ZeRO 3, slices", "cp > 1", "latent attention", "schedule zb-v"):
        assert word in met


def test_what_differs_is_told_with_both_numbers(rank_pool: RankPool, tmp_path: Path) -> None:
    plan = plan_of()
    argument = {"plan": plan.to_json(), "subject": AS_TRAINED}
    (one,) = rank_pool.run(record_rank, argument, 1)
    other = replace(one, held={**one.held, "gradients": one.held["gradients"] + 8})
    more = replace(one.actions[0], kept_bytes=one.actions[0].kept_bytes + 1)
    walked = compare(plan, [replace(other, actions=(more, *one.actions[1:]))])
    assert len(walked.problems) == 2
    assert "rank 0 holds of gradients" in walked.problems[0]
    assert f"rank 0 keeps {more.kept_bytes} after F0.0" in walked.problems[1]
    assert "0 of 1" in summary([walked], [plan])
