"""Attention over context ranks against the reference, for every kind and mask: values and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.plan import ContextKind, Plan
from echelon.cost.bytes.context_sent import context_bytes
from echelon.launch.local.supervisor import RankPool
from echelon.layout.stage import rank_part
from echelon.models.attention.interface import band_visible
from echelon.models.attention.reference import visible
from echelon.models.batch import positions_of
from tests.parallel.context import targets as context_targets
from tests.parallel.context.cases import HEADS, B, T, context_plan, inputs_of, reference, run, sent
from tests.parallel.context.targets import CPU, Attention, Inputs, Met

KINDS: tuple[tuple[ContextKind, int, int], ...] = (
    ("ring", 2, 1),
    ("ring", 3, 1),
    ("ring", 4, 1),
    ("striped", 2, 1),
    ("striped", 4, 1),
    ("gathered", 2, 1),
    ("gathered", 4, 1),
    ("ulysses", 2, 2),
    ("ulysses", 4, 4),
    ("ulysses-ring", 4, 2),
)
MASKS: dict[str, tuple[dict[str, Any], bool]] = {
    "causal": ({}, False),
    "full": ({"causal": False}, False),
    "documents": ({}, True),
    "documents, full": ({"causal": False}, True),
    "window 3": ({"window": 3}, False),
    "window 17, documents": ({"window": 17}, True),
    "window 5, full": ({"window": 5, "causal": False}, False),
    "soft cap": ({"soft_cap": 1.5}, False),
    "sinks, scale": ({"sinks": True, "attention_scale": 0.9}, False),
    "sinks, window, documents": ({"sinks": True, "window": 7}, True),
}


def whole(ranks: list[Attention], name: str) -> torch.Tensor:
    """Put the parts of all ranks in the order of their positions; the gradients of sinks add up."""
    if name == "dsinks":
        return torch.stack([rank.dsinks for rank in ranks]).sum(0)
    parts = torch.cat([getattr(rank, name) for rank in ranks])
    found = torch.full_like(parts, torch.nan)
    found[torch.cat([rank.positions for rank in ranks])] = parts
    return found


@pytest.mark.system("B08", "S30", "S31", "S32", "S33")
@pytest.mark.quick(
    "striped-4-1-window 5, full",
    "ulysses-ring-4-2-causal",
    "ring-4-1-documents, full",
    "gathered-4-1-soft cap",
    "ring-2-1-sinks, window, documents",
    "ulysses-2-2-full",
)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("kind", "cp", "ulysses"), KINDS)
def test_values_bytes_and_pairs_are_those_of_the_reference(
    kind: ContextKind, cp: int, ulysses: int, mask: str, rank_pool: RankPool
) -> None:
    """Forward and backward, with other heads for each mask; each visible pair is met once."""
    settings, documents = MASKS[mask]
    first = list(MASKS).index(mask)
    for heads in (list(HEADS)[first % 4], list(HEADS)[(first + 1 + first // 4) % 4]):
        plan = context_plan(kind, cp, ulysses, heads=heads, **settings)
        inputs = inputs_of(plan, documents=documents)
        ranks = run(plan, inputs, rank_pool)
        for name, value in reference(plan, inputs).items():
            error = float((whole(ranks, name) - value).abs().max())
            assert error < 1e-12, (heads, name, error)
        for index, rank in enumerate(ranks):
            assert sent(rank) == stated(plan, index), heads
        each_visible_pair_is_met_once(plan, inputs, ranks)


@pytest.mark.quick(
    "gathered-4-1-sinks, window, documents",
    "ulysses-ring-4-2-documents",
    "striped-4-1-documents, full",
    "ring-4-1-causal",
    "ulysses-4-4-documents",
)
@pytest.mark.parametrize("mask", [name for name in MASKS if name != "soft cap"])
@pytest.mark.parametrize(("kind", "cp", "ulysses"), [("ring", 1, 1), *KINDS])
def test_the_calls_for_a_gpu_are_right_by_what_they_are_told(
    kind: ContextKind, cp: int, ulysses: int, mask: str, rank_pool: RankPool
) -> None:
    """Offsets, lengths and windows of every call, read as the kernel's documentation says."""
    settings, documents = MASKS[mask]
    plan = context_plan(kind, cp, ulysses, heads=list(HEADS)[len(mask) % 4], **settings)
    inputs = inputs_of(plan, documents=documents)
    ranks = rank_pool.run(context_targets.attend_by_flash, (plan, inputs), world_size=cp)
    for name, value in reference(plan, inputs).items():
        assert float((whole(ranks, name) - value).abs().max()) < 1e-12, name
    if cp > 1:
        each_visible_pair_is_met_once(plan, inputs, ranks)


def stated(plan: Plan, cp_rank: int) -> tuple[int, int]:
    terms = context_bytes(plan, rank_part(plan, 0), cp_rank)
    by_name = [(term.name, term.each) for term in terms]
    assert all(count.count in (0, 1) for count in context_bytes(plan, rank_part(plan, 0), cp_rank))
    forward = sum(each for name, each in by_name if name.endswith("forward"))
    backward = sum(each for name, each in by_name if not name.endswith(("forward", "again")))
    return forward, backward


def each_visible_pair_is_met_once(plan: Plan, inputs: Inputs, ranks: list[Attention]) -> None:
    positions = torch.arange(T)
    seen = visible(positions, positions, plan.model.mask, inputs.documents)
    # The ranks of a Ulysses group meet the same pairs, each for its own heads.
    wanted = seen.expand(B, T, T).long() * plan.layout.context.ulysses_degree
    for met in ("met_forward", "met_backward"):
        pairs = torch.zeros(B, T, T, dtype=torch.int64)
        for rank in ranks:
            # Where all keys are there at once, backward takes the very pieces of forward.
            once = plan.layout.context.kind in ("gathered", "ulysses")
            asked = getattr(rank, met)
            assert bool(asked) == (met == "met_forward" or not once)
            for one in asked or rank.met_forward:
                pairs += pairs_of(one)
        assert torch.equal(pairs, wanted), met


def pairs_of(met: Met) -> torch.Tensor:
    """Return how often the pieces meet each (sequence, query, key)."""
    queries, keys, pieces = met
    q_at, k_at = positions_of(queries, CPU), positions_of(keys, CPU)
    pairs = torch.zeros(B, T, T, dtype=torch.int64)
    for piece in pieces:
        inside = band_visible(piece.band, piece.num_queries, piece.num_keys, CPU).long()
        sequences = range(B) if piece.sequence is None else (piece.sequence,)
        for sequence in sequences:
            pairs[sequence, q_at[piece.q, None], k_at[None, piece.k]] += inside
    return pairs


@pytest.mark.quick("striped-4-1", "ulysses-ring-4-2", "gathered-2-1", "ring-2-1")
@pytest.mark.parametrize(("kind", "cp", "ulysses"), KINDS)
def test_exchanges_in_batches_as_nccl_runs_them_bring_the_same(
    kind: ContextKind, cp: int, ulysses: int, rank_pool: RankPool
) -> None:
    masks: list[dict[str, Any]] = [{}, {"window": 5}]
    for settings in masks:
        plan = context_plan(kind, cp, ulysses, **settings)
        inputs = inputs_of(plan, documents=False)
        ranks = rank_pool.run(
            context_targets.attend_in_batches_of_messages, (plan, inputs), world_size=cp
        )
        for name, value in reference(plan, inputs).items():
            assert float((whole(ranks, name) - value).abs().max()) < 1e-12, name


@pytest.mark.parametrize(("kind", "cp", "ulysses"), [KINDS[0], KINDS[3], KINDS[5], KINDS[-1]])
def test_positions_that_are_not_this_ranks_are_refused(
    kind: ContextKind, cp: int, ulysses: int, rank_pool: RankPool
) -> None:
    plan = context_plan(kind, cp, ulysses)
    for rank, said in enumerate(
        rank_pool.run(context_targets.refusals, plan, world_size=plan.mesh.world_size)
    ):
        assert len(said) == 2
        assert f"context rank {rank} holds" in said[0]


@pytest.mark.parametrize(("kind", "cp", "ulysses"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_lose_what_their_rounding_costs(
    kind: ContextKind, cp: int, ulysses: int, dtype: torch.dtype, rank_pool: RankPool
) -> None:
    """Each output is a mean of values: it is off by a few roundings of the largest of them."""
    plan = context_plan(kind, cp, ulysses)
    inputs = inputs_of(plan, documents=True, dtype=dtype)
    ranks = run(plan, inputs, rank_pool)
    wanted = reference(plan, inputs)
    eps = torch.finfo(dtype).eps
    largest = float(inputs.v.abs().max())
    assert ranks[0].out.dtype == dtype
    # The weights, the sum, and the output of each of up to `cp` blocks are rounded.
    assert float((whole(ranks, "out").double() - wanted["out"]).abs().max()) < (
        (3 + cp) * eps * largest
    )
    for name in ("dq", "dk", "dv"):
        scale = float(wanted[name].abs().max())
        error = float((whole(ranks, name).double() - wanted[name]).abs().max())
        assert error < (6 + 2 * cp) * eps * max(1.0, scale), (name, error, scale)
