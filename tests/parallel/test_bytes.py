"""What a run sends and holds is what the formulas say, to the byte, on every rank and axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.core.event import EventList
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Context, Plan, Precision, Recompute, Zero
from echelon.cost.bytes.held import bytes_held
from echelon.cost.bytes.sent import bytes_sent, bytes_sent_by_axis
from echelon.launch.local.supervisor import RankPool
from tests.parallel import targets
from tests.parallel.layouts import ADAMW, GPT2, NANO, QWEN, plan_of
from tests.parallel.pipeline.pipelines import EIGHT, pipeline_plan
from tests.parallel.targets import Trained

TIED = replace(EIGHT, tied=True)
FULL = Recompute(policy="full")
RING: dict[str, Any] = {"sequence_parallel": True, "tp_overlap": "ring"}
THREE_HEADS = replace(NANO, heads=6, kv_heads=3, ffn=27)
SLICES = Zero(stage=3, accumulate="slices")
MIXED = Precision(parameters="bf16", gradients="bf16", reduction="fp32", master="fp32")
SGD = replace(ADAMW, kind="sgd")
MUON = replace(ADAMW, kind="muon")

ZERO_PLANS = {
    "stage 0, mixed": plan_of(dp=2, model=QWEN, precision=MIXED),
    "stage 1": plan_of(dp_shard=2, zero=Zero(stage=1), microbatches=3),
    "stage 1, mixed, replicated": plan_of(
        dp=2, dp_shard=2, zero=Zero(stage=1), precision=replace(MIXED, gradients="fp32")
    ),
    "stage 2": plan_of(dp_shard=4, model=GPT2, zero=replace(SLICES, stage=2), optimizer=SGD),
    "stage 2, whole sums": plan_of(dp_shard=2, zero=Zero(stage=2), model=QWEN, precision=MIXED),
    "stage 3": plan_of(dp_shard=2, zero=SLICES, microbatches=3, model=QWEN),
    "stage 3, mixed, replicated": plan_of(
        dp=2, dp_shard=2, zero=SLICES, precision=replace(MIXED, reduction="bf16")
    ),
    "stage 3, tp2 scattered": plan_of(
        dp_shard=2, tp=2, zero=SLICES, model=QWEN, sequence_parallel=True, recompute=FULL
    ),
    "stage 3, pp2 x tp2, once a step": plan_of(
        dp_shard=2,
        tp=2,
        pp=2,
        model=replace(GPT2, layers=2),
        zero=replace(SLICES, reshard_after_forward=False, keep_whole_below=50),
    ),
    "muon, stage 0": plan_of(dp=2, tp=2, optimizer=MUON),
    "muon, stage 1, replicated": plan_of(dp=2, dp_shard=2, zero=Zero(stage=1), optimizer=MUON),
    "muon, stage 3, pp2 x tp2": plan_of(
        dp_shard=2, tp=2, pp=2, model=replace(QWEN, layers=3), zero=SLICES, optimizer=MUON
    ),
}

PLANS = {
    "one": plan_of(),
    "dp2": plan_of(dp=2),
    "dp3, padded": plan_of(dp=3, model=GPT2, bucket_bytes=2**20),
    "dp2 x shard2, small buckets": plan_of(dp=2, dp_shard=2, bucket_bytes=64),
    "tp2": plan_of(tp=2, model=QWEN, microbatches=3),
    "tp2 scattered": plan_of(tp=2, model=QWEN, sequence_parallel=True, microbatches=3),
    "tp2 recompute": plan_of(tp=2, recompute=FULL, dtype="fp32"),
    "tp2 scattered, every other recomputed": plan_of(
        tp=2, sequence_parallel=True, recompute=Recompute(policy="full", every=2)
    ),
    "tp2 in chunks": plan_of(tp=2, model=QWEN, **RING, microbatches=3),
    "tp3 in chunks": plan_of(tp=3, model=THREE_HEADS, **RING, sequence_length=12),
    "tp4 in chunks, norms and MLPs made again": plan_of(
        tp=4,
        model=replace(NANO, heads=8, kv_heads=4, head_dim=2),
        **RING,
        recompute=Recompute(policy="selective", operators=("norm", "mlp")),
    ),
    "dp2 x tp2 in chunks, stage 3": plan_of(
        dp_shard=2, tp=2, model=GPT2, **RING, zero=SLICES, recompute=FULL
    ),
    "pp2 x tp2 in chunks, zb-h1": plan_of(
        pp=2, tp=2, model=QWEN, **RING, schedule="zb-h1", microbatches=3
    ),
    "pp2": plan_of(pp=2, model=QWEN),
    "pp4 gpipe": plan_of(pp=4, schedule="gpipe", microbatches=5),
    "pp3 naive, uneven": plan_of(pp=3, schedule="naive", model=QWEN, stages=((0,), (1, 2), (3,))),
    "dp2 x pp2": plan_of(dp=2, pp=2, model=GPT2),
    "dp2 x tp2 scattered": plan_of(dp=2, tp=2, model=GPT2, sequence_parallel=True),
    "pp2 x tp2 scattered": plan_of(
        pp=2, tp=2, model=QWEN, sequence_parallel=True, microbatch_sequences=2
    ),
}
BOTH_WAYS = (
    "F0.0 F2.1 BW2.1 BW0.0",
    "F1.0 F1.1 BW1.1 BW1.0",
    "F2.0 BW2.0 F0.1 BW0.1",
)
"""Three ranks, of which the middle one is its own mirror."""

PIPELINES = {
    "zb-v, tied, mixed": pipeline_plan("zb-v", 2, model=TIED, precision=MIXED),
    "interleaved, tp2 scattered": pipeline_plan(
        "interleaved-1f1b", 2, tp=2, sequence_parallel=True, recompute=FULL
    ),
    "zb-h2, stage 3, offloaded": pipeline_plan(
        "zb-h2", 2, dp_shard=2, zero=replace(SLICES, optimizer_offload="host")
    ),
    "dualpipe, mixed": pipeline_plan("dualpipe", 2, model=TIED, precision=MIXED),
    "dualpipe, stage 2": pipeline_plan(
        "dualpipe", 2, dp_shard=2, zero=replace(SLICES, stage=2), precision=MIXED
    ),
    "dualpipe, stage 3, replicated": pipeline_plan(
        "dualpipe", 2, "p", dp=2, dp_shard=2, zero=SLICES, model=TIED
    ),
    "dualpipe, muon": pipeline_plan("dualpipe", 4, "p", optimizer=MUON),
    "both ways, odd": plan_of(pp=3, schedule="file", rows=BOTH_WAYS, microbatches=2),
    "a rank without parameters, mixed": plan_of(
        pp=3, stages=((0, 1), (), (2, 3)), precision=MIXED, microbatches=3
    ),
}

CONTEXTS = {
    "ring, stage 3, separate documents": plan_of(
        cp=2, dp_shard=2, zero=SLICES, documents="separate", model=QWEN
    ),
    "ring, recompute, mixed, replicated": plan_of(
        cp=2, dp=2, zero=Zero(stage=1), recompute=FULL, precision=MIXED
    ),
    "striped, tp2 scattered, window": plan_of(
        cp=2,
        tp=2,
        context=Context(kind="striped"),
        sequence_parallel=True,
        model=replace(NANO, window=3),
    ),
    "ring, window": plan_of(cp=4, sequence_length=16, model=replace(NANO, window=2)),
    "gathered, pp2, mixed": plan_of(
        cp=2, pp=2, context=Context(kind="gathered"), model=GPT2, precision=MIXED
    ),
    "gathered, window, muon": plan_of(
        cp=4,
        context=Context(kind="gathered"),
        sequence_length=16,
        model=replace(NANO, window=2),
        optimizer=MUON,
    ),
    "ulysses, copies of keys": plan_of(
        cp=4, context=Context(kind="ulysses", ulysses_degree=4), recompute=FULL
    ),
    "ulysses in a ring, mixed": plan_of(
        cp=4,
        context=Context(kind="ulysses-ring", ulysses_degree=2),
        precision=MIXED,
        sequence_length=16,
    ),
    "ring, split backward": pipeline_plan(
        "zb-h1", 2, cp=2, tp=2, sequence_parallel=True, recompute=FULL
    ),
}
PLANS |= ZERO_PLANS | PIPELINES | CONTEXTS


@pytest.fixture(
    scope="module",
    params=[
        # `make test` takes every fifth one.
        pytest.param(plan, id=name, marks=[pytest.mark.slow] if position % 5 else [])
        for position, (name, plan) in enumerate(PLANS.items())
    ],
)
def run(request: pytest.FixtureRequest, rank_pool: RankPool) -> tuple[Plan, list[Trained]]:
    """Take two steps of each plan."""
    plan: Plan = request.param
    return plan, rank_pool.run(targets.train, (plan, 2), world_size=plan.mesh.world_size)


@pytest.mark.quick("dualpipe, stage 2", "stage 1")
@pytest.mark.system("S11")
def test_bytes_sent_by_axis(run: tuple[Plan, list[Trained]]) -> None:
    plan, ranks = run
    for index, rank in enumerate(ranks):
        # Parameters that an update sends are awaited in the next step; each step sends as much.
        every = [event for events in (*rank.events, rank.tail) for event in events]
        for axis, sent in EventList(every).bytes_by_axis().items():
            assert sent == len(rank.events) * bytes_sent_by_axis(plan, index)[axis], axis
        assert len(EventList(every).bytes_by_axis()) == len(bytes_sent_by_axis(plan, index))


@pytest.mark.system("S11")
def test_the_terms_count_the_messages(run: tuple[Plan, list[Trained]]) -> None:
    plan, ranks = run
    for index, rank in enumerate(ranks):
        counts = {(t.axis, t.name): t.count for t in bytes_sent(plan, index)}
        names = [event.name for event in rank.events[1] if event.axis]
        for term, prefixes in (
            (("pp", "activations"), ("activation ",)),
            (("pp", "gradients"), ("gradient ",)),
            (("tp", "embedding"), ("embedding.",)),
            (("tp", "head"), ("head.forward", "head.backward")),
            (("tp", "loss statistics"), ("head.statistics",)),
            (("dp", "token count"), ("tokens",)),
            (("world", "step row"), ("step",)),
        ):
            assert sum(name.startswith(prefixes) for name in names) == counts.get(term, 0)
        backward = ("column.backward", "row.backward")
        assert sum(name.startswith(backward) for name in names) == (
            counts.get(("tp", "blocks backward"), 0)
            + counts.get(("tp", "blocks backward, inputs again"), 0)
        )
        forward = ("column.forward", "row.forward")
        assert sum(name.startswith(forward) for name in names) == (
            counts.get(("tp", "blocks forward"), 0) + counts.get(("tp", "blocks forward again"), 0)
        )


def test_bytes_held(run: tuple[Plan, list[Trained]]) -> None:
    plan, ranks = run
    for index, rank in enumerate(ranks):
        assert rank.held == {term.name: term.bytes for term in bytes_held(plan, index)}


@pytest.mark.system("S40")
@pytest.mark.parametrize("model", [NANO, QWEN], ids=lambda model: model.name)
def test_the_cube_of_eight_ranks(rank_pool: RankPool, model: ModelShape) -> None:
    plan = plan_of(
        dp=2, tp=2, pp=2, model=replace(model, layers=2), sequence_parallel=True, bucket_bytes=2048
    )
    ranks: list[Trained] = rank_pool.run(targets.train, (plan, 1), world_size=8)
    for index, rank in enumerate(ranks):
        assert EventList(rank.events[0]).bytes_by_axis() == bytes_sent_by_axis(plan, index)
        assert rank.held == {term.name: term.bytes for term in bytes_held(plan, index)}
