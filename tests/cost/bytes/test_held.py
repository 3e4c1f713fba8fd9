"""Model state per rank: sixteen bytes a weight in fp32, a share of it per tensor and stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings

from echelon.core.axis import SHARD_AXES, Axis
from echelon.core.choices.lora import LINEARS, Lora
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.parameters import num_parameters, num_trained_parameters
from echelon.core.plan import DTYPE_BYTES, Mathematics, Optimizer, Plan, Precision, Zero, ZeroStage
from echelon.cost.bytes.held import StoredBytes, bytes_held, bytes_held_by_pool, stored_bytes
from echelon.cost.bytes.model_sizes import FP32_PRECISION, MIXED_PRECISION, model_states
from echelon.cost.bytes.terms import HeldTerm
from echelon.layout.buckets import accumulates_slices, plan_buckets, shard_degree
from echelon.layout.slots import slice_parts, slot_ranges
from echelon.layout.stage import held_parameters, pp_rank_of, rank_part, update_rule_of
from tests.core.test_parameters import GPT2_SMALL, LLAMA2_7B
from tests.cost import layouts
from tests.cost.layouts import zero_plan, zero_plans
from tests.parallel.layouts import GPT2, NANO, QWEN, cut, plan_of
from tests.walks import examples


def test_sixteen_bytes_a_weight_without_sharding() -> None:
    plan = plan_of(model=LLAMA2_7B, stages=cut(32, 1), dtype="fp32")
    terms = {term.name: term.bytes for term in bytes_held(plan, 0)}
    psi = num_parameters(LLAMA2_7B)
    assert terms == {"parameters": 4 * psi, "gradients": 4 * psi, "optimizer state": 8 * psi}
    assert sum(terms.values()) == 16 * psi
    # The two moments are twice the parameters, not more (fp32 throughout).
    assert terms["optimizer state"] == 2 * terms["parameters"]


def test_replicas_hold_the_same_but_for_padding() -> None:
    for dp in (1, 2, 3):
        plan = plan_of(dp=dp, bucket_bytes=2**20)
        psi = -(-num_parameters(NANO) // dp) * dp
        assert sum(term.bytes for term in bytes_held(plan, dp - 1)) == 4 * 8 * psi


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_ranks_hold_a_share_of_what_is_split_and_all_of_the_rest(tp: int) -> None:
    plan = plan_of(model=replace(GPT2, vocab=40), tp=tp, bucket_bytes=2**20)
    norms = 4 * (4 * 16 + 2 * 16) + 2 * 16 + 16 * 16
    split = num_parameters(plan.model) - norms
    assert {t.name: t.bytes for t in bytes_held(plan, 1)}["parameters"] == 8 * (split // tp + norms)


def test_thirty_five_gigabytes_for_seventy_billion_over_thirty_two_ranks() -> None:
    # 16 psi / (tp pp): the published 35 GB at 70e9 weights, within what the ends add.
    model = replace(
        LLAMA2_7B, layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672
    )
    plan = plan_of(model=model, tp=8, pp=4, stages=cut(80, 4), dtype="fp32")
    per_rank = [sum(term.bytes for term in bytes_held(plan, rank)) for rank in range(0, 32, 8)]
    expected = 16 * num_parameters(model) / 32
    assert sum(per_rank) / 4 == pytest.approx(expected, rel=1e-3)
    assert sum(per_rank) / 4 / 1e9 == pytest.approx(35.0, rel=0.03)


def test_each_term_has_its_own_precision() -> None:
    plan = plan_of(model=GPT2_SMALL, stages=cut(12, 1))
    mixed = Precision(parameters="bf16", gradients="fp32", reduction="fp32", master="fp32")
    plan = replace(plan, mathematics=replace(plan.mathematics, precision=mixed))
    psi = num_parameters(GPT2_SMALL)
    terms = bytes_held(plan, 0)
    assert [term.name for term in terms] == [
        "parameters",
        "gradients",
        "master parameters",
        "optimizer state",
    ]
    assert [term.bytes for term in terms] == [2 * psi, 4 * psi, 4 * psi, 8 * psi]
    assert [term.formula for term in terms] == [
        f"{psi:,} x 2",
        f"{psi:,} x 4",
        f"{psi:,} x 4",
        f"2 x {psi:,} x 4",
    ]


ADAPTED = replace(NANO, lora=Lora(rank=4, alpha=8.0, targets=LINEARS))
BF16 = Precision(parameters="bf16", gradients="bf16", reduction="fp32", master="fp32")


def numbers(shape: object, **changes: object) -> Mathematics:
    whole = Mathematics(model=NANO, global_sequences=4, sequence_length=16)
    return replace(whole, model=shape, **changes)


def test_a_model_that_is_trained_whole_has_no_base() -> None:
    weights = num_parameters(NANO)
    assert stored_bytes(numbers(NANO)) == StoredBytes(
        trained=4 * weights, optimizer=8 * weights, base=0
    )
    one = stored_bytes(numbers(NANO, optimizer=Optimizer(kind="sgd")))
    assert one.checkpoint == 8 * weights


def test_adapters_alone_are_in_a_checkpoint() -> None:
    trained = num_trained_parameters(ADAPTED)
    frozen = num_parameters(ADAPTED) - trained
    assert frozen == num_parameters(NANO)
    one = stored_bytes(numbers(ADAPTED))
    assert (one.checkpoint, one.base) == (12 * trained, 4 * frozen)
    half = stored_bytes(numbers(ADAPTED, precision=BF16))
    assert (half.checkpoint, half.base) == (12 * trained, 2 * frozen)


def test_muon_keeps_one_tensor_of_matrices_and_two_of_the_rest() -> None:
    one = stored_bytes(numbers(NANO, optimizer=Optimizer(kind="muon")))
    weights = num_parameters(NANO)
    assert 4 * weights < one.optimizer < 8 * weights
    assert one.trained == pytest.approx(4 * weights)


def one_replica(plan: Plan) -> list[int]:
    """Return the ranks of the first replica: those that share out one copy of the states."""
    return [
        rank
        for rank in range(plan.mesh.world_size)
        if plan.mesh.coordinates(rank)[Axis.DP_REPLICATE] == 0
    ]


def real(plan: Plan, ranks: Sequence[int], name: str) -> int:
    """Return the bytes of one kind on `ranks`, without padding."""
    return sum(t.bytes - t.padding for r in ranks for t in bytes_held(plan, r) if t.name == name)


def elements(plan: Plan, times: dict[str, int] | None = None) -> int:
    """Return the elements of all stages and tensor ranks, those of a rule counted `times`."""
    total = 0
    for stage in range(plan.num_stages):
        for spec in held_parameters(plan, rank_part(plan, stage)):
            copies = plan.mesh.tp if spec.split_dim is None else 1
            update = update_rule_of(plan.mathematics.optimizer, spec)
            total += copies * spec.numel * (times[update] if times else 1)
    return total


@given(zero_plans())
@settings(deadline=None, max_examples=examples(80))
def test_slices_of_all_ranks_are_the_model_once(plan: Plan) -> None:
    ranks, precision, zero = one_replica(plan), plan.mathematics.precision, plan.layout.zero
    degree = plan.mesh.degree(*SHARD_AXES)
    copies = 1 if zero.stage else degree
    states = {name: len(record.state) for name, record in OPTIMIZERS.items()}
    size = DTYPE_BYTES[precision.master]
    assert real(plan, ranks, "optimizer state") == copies * size * elements(plan, {**states})
    if precision.has_master:
        assert real(plan, ranks, "master parameters") == copies * size * elements(plan)
    copies = 1 if accumulates_slices(plan) else degree
    size = DTYPE_BYTES[precision.gradients]
    assert real(plan, ranks, "gradients") == copies * size * elements(plan)
    sliced = zero.stage == 3 and zero.keep_whole_below == 0 and not plan.layout.sequence_parallel
    if sliced and plan.model is NANO:
        size = DTYPE_BYTES[precision.parameters]
        assert real(plan, ranks, "parameters") == size * elements(plan)


@given(zero_plans())
@settings(deadline=None, max_examples=examples(60))
def test_ranks_of_a_stage_hold_the_same_bytes_and_little_padding(plan: Plan) -> None:
    by_stage: dict[int, list[tuple[str, str, int]]] = {}
    for rank in range(plan.mesh.world_size):
        terms = bytes_held(plan, rank)
        shown = [(term.name, term.pool, term.bytes) for term in terms]
        assert by_stage.setdefault(pp_rank_of(plan, rank), shown) == shown
        assert all(0 <= term.padding < term.bytes or term.bytes == 0 for term in terms)
        by_pool = bytes_held_by_pool(plan, rank)
        assert sum(by_pool.values()) == sum(term.bytes for term in terms)


@given(zero_plans())
@settings(deadline=None, max_examples=examples(60))
def test_slices_cover_each_parameter_once(plan: Plan) -> None:
    for stage in range(plan.num_stages):
        part = rank_part(plan, stage)
        specs = {spec.name: spec for spec in held_parameters(plan, part)}
        for bucket in plan_buckets(plan, part):
            size = bucket.num_elements // shard_degree(plan)
            end = 0
            for slot in slot_ranges(plan, bucket, specs):
                assert slot.start == end
                end = slot.stop
                parts = slice_parts(plan, bucket, slot)
                assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])]
                assert parts[-1].stop == slot.stop - slot.start
                for piece in parts:
                    assert piece.bucket_start == slot.start + piece.start
                    inside = piece.bucket_start - piece.index * size
                    assert 0 <= inside < inside + piece.stop - piece.start <= size
            assert end <= bucket.num_elements


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_the_published_formulas_hold_exactly_padding_included(
    stage: ZeroStage, degree: int
) -> None:
    mixed = replace(layouts.MIXED, reduction="bf16")
    for precision, sizes in ((mixed, MIXED_PRECISION), (layouts.SINGLE, FP32_PRECISION)):
        plan = zero_plan(stage, dp_shard=degree, precision=precision, model=QWEN)
        psi = sum(bucket.num_elements for bucket in plan_buckets(plan, rank_part(plan, 0)))
        wanted = model_states(psi, stage, degree, sizes)
        terms = {term.name: term.bytes for term in bytes_held(plan, degree - 1)}
        assert terms["parameters"] == wanted.parameters
        assert terms["gradients"] == wanted.gradients
        optimizer = terms["optimizer state"] + terms.get("master parameters", 0)
        assert optimizer == wanted.optimizer
        assert sum(terms.values()) == wanted.total


def test_gradients_that_add_up_whole_are_whole_at_every_stage() -> None:
    for stage in (1, 2, 3):
        plan = zero_plan(stage, dp_shard=2, zero=Zero(stage=stage, accumulate="whole"))
        split = zero_plan(stage, dp_shard=2, zero=Zero(stage=stage, accumulate="slices"))
        assert held(plan, "gradients").bytes == 2 * held(split, "gradients").bytes


def held(plan: Plan, name: str, pool: str = "device") -> HeldTerm:
    """Return what rank 0 holds of one kind in one pool."""
    (term,) = (t for t in bytes_held(plan, 0) if (t.name, t.pool) == (name, pool))
    return term


@pytest.mark.system("S25")
def test_offload_moves_slices_and_nothing_else() -> None:
    kept = Zero(stage=3, keep_whole_below=17, bucket_bytes=4096, accumulate="slices")
    moved = replace(kept, optimizer_offload="nvme", parameter_offload="host")
    plans = [zero_plan(3, dp_shard=2, zero=z, precision=layouts.MIXED) for z in (kept, moved)]
    plain, away = (bytes_held(plan, 0) for plan in plans)
    assert sum(term.bytes for term in plain) == sum(term.bytes for term in away)
    assert {(term.name, term.pool) for term in away} == {
        ("parameters", "device"),  # norms, which are smaller than keep_whole_below
        ("parameters", "host"),
        ("gradients", "device"),
        ("master parameters", "nvme"),
        ("optimizer state", "nvme"),
    }
    norms = 9 * 16
    assert held(plans[1], "parameters").bytes == 2 * norms
    assert bytes_held_by_pool(plans[1], 0)["nvme"] == sum(
        term.bytes for term in plain if term.name in ("master parameters", "optimizer state")
    )


def test_padding_is_told_where_it_lies() -> None:
    # One bucket: the head (37 rows, 38 with padding) in front of the embedding, then the end.
    plan = zero_plan(2, dp_shard=3, tp=2, bucket_bytes=2**20)
    (bucket,) = plan_buckets(plan, rank_part(plan, 0))
    gaps = [held_by(plan, rank, "gradients").padding // 8 for rank in range(6)]
    last_rows = [held_by(plan, rank, "parameters").padding // 8 for rank in (0, 1)]
    end = bucket.num_elements - sum(
        spec.local_numel(2) for spec in held_parameters(plan, rank_part(plan, 0))
    )
    assert last_rows == [end, end + 2 * 16]
    assert sum(gaps[0::2]) == end
    assert sum(gaps[1::2]) == end + 2 * 16


def held_by(plan: Plan, rank: int, name: str) -> HeldTerm:
    """Return what a rank holds of one kind."""
    (term,) = (t for t in bytes_held(plan, rank) if t.name == name)
    return term


def test_muon_keeps_one_tensor_for_matrices_and_two_for_the_rest() -> None:
    plan = zero_plan(1, dp_shard=2, optimizer="muon", precision=layouts.SINGLE)
    term = held(plan, "optimizer state")
    matrices = 4 * (16 * 16 + 8 * 16 + 8 * 16 + 16 * 16 + 3 * 24 * 16)
    others = 9 * 16 + 2 * 37 * 16
    assert term.bytes - term.padding == 4 * (matrices + 2 * others) // 2
    assert term.formula == f"{term.bytes // 4:,} x 4"
