"""What attention over context ranks holds: stated, and seen by the allocator of the ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from echelon.core.choices.kernels import AttentionKernel
from echelon.core.mesh import Mesh
from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.core.plan import Context, ContextKind, DType, Plan
from echelon.cost.bytes import context_memory as formulas
from echelon.cost.bytes import context_memory as kernels
from echelon.cost.bytes.context_memory import (
    AttentionSizes,
    attention_memory,
    most_attention_memory,
)
from echelon.cost.bytes.transient import transient_terms
from echelon.launch.local.supervisor import RankPool
from echelon.layout import attention_tiles as boxes
from echelon.models.attention.fused import FusedGpuKernel
from echelon.models.attention.local import AttentionRule, kernel_for
from echelon.models.attention.plain import PlainKernel
from echelon.models.precision import TORCH_DTYPES
from tests.cost.context_memory_targets import Allocated, attention_allocates
from tests.parallel.layouts import NANO, plan_of
from tests.walks import shortened

KINDS: tuple[tuple[ContextKind, int], ...] = (
    ("ring", 1),
    ("striped", 1),
    ("gathered", 1),
    ("ulysses", 4),
    ("ulysses-ring", 2),
)
CASES: tuple[tuple[DType, int, bool], ...] = (
    ("fp32", 1, False),
    ("bf16", 1, False),
    ("fp32", 2, True),
)
EDGE = "mask of an edge"
TILE_ROWS, TILE_COLUMNS = 256, 512
"""The queries and keys that PyTorch's kernel on CPU takes at a time, for each of its threads."""


def context_plan(
    kind: ContextKind,
    degree: int,
    *,
    length: int = 2048,
    cp: int = 4,
    sequences: int = 1,
    dtype: DType = "fp32",
    **shape: Any,
) -> Plan:
    """Return a plan of cp ranks: 8 heads, 4 key/value heads, 64 wide unless `shape` says."""
    sizes = {"heads": 8, "kv_heads": 4, "head_dim": 64, "hidden": 512, "max_positions": 2**20}
    model = replace(NANO, **{**sizes, **shape})
    plan = plan_of(model=model, sequence_length=length, microbatch_sequences=sequences, dtype=dtype)
    context = Context(kind=kind, ulysses_degree=degree)
    return replace(plan, layout=replace(plan.layout, mesh=Mesh(cp=cp), context=context))


def tiles(plan: Plan) -> int:
    """Return what the kernel has for itself: scores and their gradients, and rows of sums."""
    sizes = AttentionSizes.from_plan(plan)
    scores = 2 * TILE_ROWS * TILE_COLUMNS * (sizes.wide + sizes.element_bytes)
    return scores + 4 * TILE_ROWS * (plan.model.head_dim + 2) * sizes.wide


def compare(plan: Plan, rank: int, found: Allocated, *, tight: bool) -> None:
    """Check that what is stated is there, and no more; `tight`: that no less is there either."""
    memory, sizes = attention_memory(plan, rank), AttentionSizes.from_plan(plan)
    made = memory.kept_bytes - sum(t.bytes for t in memory.kept if t.name == "queries")
    copied = sum(t.bytes for t in memory.kept if t.name == "output, position by position")
    assert made - copied <= found.forward_left <= made
    forward = max(phase.bytes for phase in memory.forward)
    backward = max(phase.bytes for phase in memory.backward)
    assert found.forward_peak <= made + forward + tiles(plan)
    assert found.backward_peak <= backward + tiles(plan)
    if tight:
        # Output and log-sum-exps may not be there yet; sums of this place's gradients neither.
        later = sizes.out * sizes.element_bytes + 5 * sizes.lse * sizes.wide
        sums = (sizes.out + sizes.keys) * sizes.wide
        assert found.forward_peak >= made + forward - later
        assert found.backward_peak >= backward - sums


@pytest.mark.one_in(12)
# Every kind is quick in one of the two cases in which no less is there either, one in the third.
@pytest.mark.parametrize(
    ("case", "kind"),
    shortened(
        product(CASES, KINDS),
        lambda both: both == (CASES[2], KINDS[0]) or both[0] == CASES[KINDS.index(both[1]) % 2],
    ),
    ids=str,
)
def test_ranks_allocate_what_is_stated(
    rank_pool: RankPool, case: tuple[DType, int, bool], kind: tuple[ContextKind, int]
) -> None:
    dtype, sequences, causal = case
    plan = context_plan(*kind, length=1024, dtype=dtype, sequences=sequences, causal=causal)
    for rank, found in enumerate(rank_pool.run(attention_allocates, plan, world_size=4)):
        compare(plan, rank, found, tight=not causal)


def in_turn(values: tuple[Any, ...]) -> list[Any]:
    """Return every kind with every value: quick is each kind with one of two, in turn."""
    return shortened(
        product(KINDS, values), lambda one: values.index(one[1]) == KINDS.index(one[0]) % 2
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("kind", "shape"), in_turn(({"window": 300}, {"kv_heads": 1, "soft_cap": 20.0})), ids=str
)
def test_ranks_allocate_no_more_than_is_stated(
    rank_pool: RankPool, kind: tuple[ContextKind, int], shape: dict[str, Any]
) -> None:
    plan = context_plan(*kind, length=1024, **shape)
    for rank, found in enumerate(rank_pool.run(attention_allocates, plan, world_size=4)):
        compare(plan, rank, found, tight=False)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_as_long_as_the_sequence_has_no_edge(
    kind: tuple[ContextKind, int], causal: bool
) -> None:
    plan = context_plan(*kind, length=1024, window=1024, causal=causal)
    assert EDGE not in kernel_terms(plan)
    assert EDGE in kernel_terms(context_plan(*kind, length=1024, window=1023, causal=causal))


@pytest.mark.quick("('ulysses-ring', 2)-True")
@pytest.mark.parametrize(("kind", "causal"), in_turn((True, False)), ids=str)
def test_ranks_allocate_no_edge_for_a_window_as_long_as_the_sequence(
    rank_pool: RankPool, kind: tuple[ContextKind, int], causal: bool
) -> None:
    plan = context_plan(*kind, length=1024, window=1024, causal=causal)
    # With a window rows go from place to place, and what is stated of packing them is a bound.
    tight = not causal and kind[0] != "gathered"
    for rank, found in enumerate(rank_pool.run(attention_allocates, plan, world_size=4)):
        compare(plan, rank, found, tight=tight)


def kernel_terms(plan: Plan) -> set[str]:
    memory = attention_memory(plan, 0)
    return {part.name for phase in (*memory.forward, *memory.backward) for part in phase.terms}


def peak(kind: tuple[ContextKind, int], *, length: int, cp: int) -> int:
    degree = cp if kind[0] == "ulysses" else kind[1]
    plan = context_plan(kind[0], degree, length=length, cp=cp, heads=16, kv_heads=16, head_dim=32)
    return most_attention_memory(plan).peak.bytes


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0])
def test_memory_grows_with_positions_on_a_rank_and_gathered_with_all_of_them(
    kind: tuple[ContextKind, int],
) -> None:
    one, long = peak(kind, length=2**16, cp=8), peak(kind, length=2**18, cp=8)
    assert long == 4 * one
    spread = peak(kind, length=2**18, cp=16)
    if kind[0] == "gathered":
        assert spread > 0.75 * long
    else:
        assert spread == pytest.approx(long / 2, rel=0.15)


def test_gathering_costs_most_and_few_key_heads_make_it_cheap() -> None:
    plans = {kind: context_plan(kind, degree, length=2**16) for kind, degree in KINDS}
    peaks = {kind: most_attention_memory(plan).peak.bytes for kind, plan in plans.items()}
    assert max(peaks, key=lambda kind: peaks[kind]) == "gathered"
    shapes = [context_plan("gathered", 1, length=2**16, kv_heads=heads) for heads in (8, 1)]
    many, one = (most_attention_memory(plan).peak for plan in shapes)
    assert many.name == one.name == "backward, the sum"
    assert one.bytes < many.bytes / 4


def test_a_step_holds_the_phase_that_holds_most() -> None:
    plan = context_plan("ring", 1)
    (term,) = (
        one for one in transient_terms(plan, 0) if one.name == "attention over context ranks"
    )
    most = most_attention_memory(plan).peak
    assert term.bytes == most.bytes == sum(part.bytes for part in most.terms)
    assert term.formula.startswith("backward, step ")
    alone = context_plan("ring", 1, cp=1)
    assert "attention over context ranks" not in [one.name for one in transient_terms(alone, 0)]


def test_the_bounds_are_those_of_the_kernels() -> None:
    assert TRAINING_PIECES.score_columns == formulas.SCORE_COLUMNS
    assert TRAINING_PIECES.score_elements == formulas.MAX_SCORES
    assert TRAINING_PIECES.score_rows == formulas.SCORE_ROWS
    assert TRAINING_PIECES.tile_rows == formulas.EDGE_ROWS
    assert formulas.TILES_PER_WINDOW == boxes.TILES_PER_WINDOW


def plan_with(backend: str, dtype: DType, head_dim: int, soft_cap: float | None) -> Plan:
    plan = plan_of(model=replace(NANO, head_dim=head_dim, soft_cap=soft_cap))
    precision = replace(plan.mathematics.precision, parameters=dtype)
    return replace(
        plan,
        mathematics=replace(plan.mathematics, precision=precision),
        cluster=replace(plan.cluster, backend=backend),
    )


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [12, 32, 320])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("attention", ["auto", "plain"])
def test_the_plain_kernel_is_the_one_that_is_chosen(
    backend: str, dtype: DType, head_dim: int, soft_cap: float | None, attention: AttentionKernel
) -> None:
    plan = plan_with(backend, dtype, head_dim, soft_cap)
    context = replace(plan.layout.context, attention=attention)
    plan = replace(plan, layout=replace(plan.layout, context=context))
    device = torch.device("cpu" if backend == "gloo" else "meta")
    rule = AttentionRule(soft_cap=soft_cap, kernel=attention)
    chosen = kernel_for(device, TORCH_DTYPES[dtype], head_dim, rule)
    plain = isinstance(chosen, PlainKernel)
    assert kernels.plain_kernel_runs(plan) is plain
    flash = isinstance(chosen, FusedGpuKernel) and chosen.flash is not None
    assert kernels.flash_kernel_runs(plan) is flash
    efficient = isinstance(chosen, FusedGpuKernel) and not flash
    assert kernels.efficient_kernel_runs(plan) is efficient


def test_a_window_in_float16_has_bands_that_flash_attention_alone_takes() -> None:
    plan = plan_with("nccl", "fp16", 320, None)
    windowed = replace(
        plan, mathematics=replace(plan.mathematics, model=replace(plan.model, window=9))
    )
    assert not kernels.plain_kernel_runs(plan)
    assert kernels.plain_kernel_runs(windowed)
    narrow = replace(windowed.model, head_dim=32)
    mathematics = replace(windowed.mathematics, model=narrow)
    assert kernels.flash_kernel_runs(replace(windowed, mathematics=mathematics))
