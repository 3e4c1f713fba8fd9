"""Bytes sent at every ZeRO stage: 2, 2, 2 and 3 psi, in the dtype that travels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from echelon.core.axis import LOSS_AXES, Axis
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import DTYPE_BYTES, Plan, Zero, ZeroStage
from echelon.cost.bytes.data import COUNT_BYTES
from echelon.cost.bytes.model_sizes import communication_volume
from echelon.cost.bytes.sent import bytes_sent, bytes_sent_by_axis
from echelon.layout.buckets import plan_buckets
from echelon.layout.modules import ModuleParameter, plan_module_buckets
from echelon.layout.stage import pp_rank_of, rank_part
from tests.cost import layouts
from tests.cost.layouts import zero_plan, zero_plans
from tests.parallel.layouts import NANO, QWEN, plan_of
from tests.parallel.module.sent_bytes import module_bytes
from tests.walks import examples

EMBEDDING = 37 * 16


def terms(plan: Plan, rank: int = 0) -> dict[tuple[str, str], tuple[int, int]]:
    """Return count and bytes of each term of a rank."""
    return {(term.axis, term.name): (term.count, term.each) for term in bytes_sent(plan, rank)}


def total(plan: Plan, *axes: str) -> int:
    """Return what rank 0 sends over some axes, the token count left out."""
    found = (t for t in bytes_sent(plan, 0) if t.axis in axes and t.name != "token count")
    return sum(term.bytes for term in found)


def elements(plan: Plan, stage: int = 0) -> int:
    """Return the elements of the buckets of a stage, padding included."""
    return sum(bucket.num_elements for bucket in plan_buckets(plan, rank_part(plan, stage)))


@pytest.mark.system("S21", "S22", "S23")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_two_two_two_three_psi(stage: ZeroStage, degree: int) -> None:
    # Tied, so that every weight is read in backward; one microbatch.
    plan = zero_plan(stage, dp_shard=degree, microbatches=1, model=QWEN)
    psi = elements(plan)
    assert total(plan, "dp", "dp_shard") == communication_volume(stage).sent_bytes(psi, degree, 8)


def test_an_embedding_that_is_only_looked_up_is_not_gathered_for_backward() -> None:
    plan = zero_plan(3, dp_shard=2, microbatches=1, model=NANO)
    found = terms(plan)
    assert found["dp_shard", "parameters forward"] == (1, elements(plan) // 2 * 8)
    assert found["dp_shard", "parameters backward"] == (1, (elements(plan) - EMBEDDING) // 2 * 8)


@pytest.mark.system("S23", "S24")
@pytest.mark.parametrize("microbatches", [1, 3])
def test_rounds_of_stage_three(microbatches: int) -> None:
    kept = Zero(stage=3, accumulate="slices", reshard_after_forward=False)
    plan = zero_plan(3, dp_shard=2, microbatches=microbatches, zero=kept, model=QWEN)
    half = elements(plan) // 2 * 8
    wanted = {("dp_shard", "gradients"): (microbatches, half)}
    assert data_terms(plan) == {**wanted, ("dp_shard", "parameters"): (1, half)}
    freed = zero_plan(3, dp_shard=2, microbatches=microbatches, model=QWEN)
    half = elements(freed) // 2 * 8
    assert data_terms(freed) == {
        ("dp_shard", "gradients"): (microbatches, half),
        ("dp_shard", "parameters forward"): (microbatches, half),
        ("dp_shard", "parameters backward"): (microbatches, half),
    }
    once = replace(freed.layout.zero, accumulate="whole")
    whole = replace(freed, layout=replace(freed.layout, zero=once))
    assert terms(whole)["dp_shard", "gradients"] == (1, half)


def data_terms(plan: Plan) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the terms of the axis "dp_shard"."""
    return {key: value for key, value in terms(plan).items() if key[0] == "dp_shard"}


@pytest.mark.system("S24")
def test_small_parameters_are_gathered_once_however_many_microbatches() -> None:
    zero = Zero(stage=3, keep_whole_below=17, accumulate="slices")
    plan = zero_plan(3, dp_shard=2, microbatches=4, zero=zero)
    norms = 9 * 16
    assert terms(plan)["dp_shard", "parameters"] == (1, norms // 2 * 8)
    count, each = terms(plan)["dp_shard", "parameters forward"]
    assert (count, each) == (4, (elements(plan) - norms) // 2 * 8)
    assert terms(plan)["dp_shard", "gradients"] == (4, elements(plan) // 2 * 8)


@pytest.mark.system("B04")
def test_replicas_add_up_slices_only() -> None:
    plan = zero_plan(2, dp=3, dp_shard=2, microbatches=2)
    slices = elements(plan) // 2 * 8
    assert terms(plan)["dp_replicate", "gradients"] == (1, 2 * 2 * slices // 3)
    assert terms(plan)["dp_shard", "gradients"] == (2, slices)
    assert terms(plan)["dp", "token count"] == (1, 5 * COUNT_BYTES)
    flat = zero_plan(0, dp=3, dp_shard=2, microbatches=2)
    assert terms(flat)["dp", "gradients"] == (1, 2 * 5 * elements(flat) * 8 // 6)
    assert {axis for axis, _ in terms(flat)} == {"dp", "world"}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_message_has_the_dtype_that_it_is_sent_in(stage: ZeroStage) -> None:
    mixed = layouts.MIXED  # parameters bf16, reduced in fp32
    plan = zero_plan(stage, dp_shard=2, tp=2, pp=2, model=QWEN, microbatches=1, precision=mixed)
    wide = replace(plan, mathematics=replace(plan.mathematics, precision=layouts.DOUBLE))
    for rank in range(plan.mesh.world_size):
        narrow, double = terms(plan, rank), terms(wide, rank)
        # Buckets are cut by bytes: what is compared are bytes of all of them together.
        for key, (_, each) in narrow.items():
            size = {"gradients": 4, "tied embedding": 4, "replicated parameters": 4}.get(key[1], 2)
            if key[0] == "pp" and key[1] == "gradients":
                size = 2
            if key[1] == "loss statistics":
                size = 4
            if key[1] in ("token count", "step row"):
                size = 8
            assert each * 8 == double[key][1] * size, key


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hops_over_other_axes_are_slices_in_the_dtype_of_the_reduction(stage: ZeroStage) -> None:
    plan = zero_plan(
        stage, dp_shard=2, tp=2, pp=2, model=QWEN, sequence_parallel=True, microbatches=3,
        precision=layouts.MIXED,
    )  # fmt: skip
    blocks = 2 * (16 + 16 + 4 + 4)
    for rank in range(plan.mesh.world_size):
        last = pp_rank_of(plan, rank) == 1
        partial = (blocks + 16 * last) // 2
        assert terms(plan, rank)["tp", "replicated parameters"] == (1, partial * 4)
        assert terms(plan, rank)["pp", "tied embedding"] == (1, 19 * 16 // 2 * 4)


@given(zero_plans(optimizers=("adamw",)))
@settings(deadline=None, max_examples=examples(60))
def test_ranks_of_a_stage_with_the_same_positions_send_the_same(plan: Plan) -> None:
    alike: dict[tuple[int, int], dict[str, int]] = {}
    for rank in range(plan.mesh.world_size):
        sent = bytes_sent_by_axis(plan, rank)
        place = pp_rank_of(plan, rank), plan.mesh.coordinates(rank)[Axis.CP]
        assert alike.setdefault(place, sent) == sent
        assert all(number > 0 for number in sent.values())


@given(zero_plans(optimizers=("adamw",)))
@settings(deadline=None, max_examples=examples(60))
def test_sharding_sends_no_more_than_all_reducing(plan: Plan) -> None:
    """Stages 1 and 2, reduced once: what stage 0 sends, the outer hops being smaller."""
    zero = replace(plan.layout.zero, accumulate="whole")
    layouts_of = {
        stage: replace(plan.layout, zero=replace(zero, stage=stage)) for stage in (0, 1, 2)
    }
    sent = {stage: replace(plan, layout=layout) for stage, layout in layouts_of.items()}
    precision = plan.mathematics.precision
    narrower = DTYPE_BYTES[precision.parameters] <= DTYPE_BYTES[precision.reduction]
    axes = ("dp", "dp_shard", "dp_replicate")
    assert total(sent[1], *axes) == total(sent[2], *axes)
    if narrower and plan.mesh.dp_replicate == 1:
        assert total(sent[1], *axes) <= total(sent[0], *axes)
    if narrower and plan.mesh.degree(*LOSS_AXES) == 1:
        assert total(sent[0], *axes) == total(sent[1], *axes) == 0


@pytest.mark.parametrize(
    ("stage", "kept", "sent"),
    [
        # Of 12 elements of 8 bytes over 4 ranks, in two backward passes.
        (0, (), {"dp": 2 * 3 * 96 // 4}),
        (1, (), {"dp_shard": 72 + 72}),
        (2, (), {"dp_shard": 2 * 72 + 72}),
        (3, (), {"dp_shard": 2 * 72 + 2 * 2 * 72}),
        (3, ("bucket0",), {"dp_shard": 2 * 72 + 2 * 72}),
    ],
)
def test_a_module_sends_its_buckets(
    stage: ZeroStage, kept: tuple[str, ...], sent: dict[str, int]
) -> None:
    accumulate = "slices" if stage >= 2 else "whole"
    zero = Zero(stage=stage, accumulate=accumulate, keep_whole_below=0)
    plan = plan_of(zero=zero, dp=1 if stage else 4, dp_shard=4 if stage else 1)
    spec = ParameterSpec(name="weight", shape=(3, 4), layer=None)
    one = ModuleParameter(spec=spec, users=("block",), trained=True)
    buckets = plan_module_buckets(plan, [one], ["block"])
    assert module_bytes(plan, buckets, passes=2, kept=kept) == sent
