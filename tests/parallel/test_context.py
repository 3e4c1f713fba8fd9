"""Attention over context ranks against the reference, for every kind and mask: values and bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.event import Event
from echelon.core.plan import Context, ContextKind, Plan
from echelon.cost.context import context_bytes
from echelon.cost.stage import rank_part
from echelon.launch.pool import RankPool
from echelon.models.attention.interface import band_visible
from echelon.models.attention.reference import attention_reference, visible
from echelon.models.batch import positions_of
from tests.parallel import context_targets
from tests.parallel.context_targets import CPU, Attention, Inputs, Met
from tests.parallel.layouts import NANO, plan_of

T, B, HD = 48, 2, 4
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
DOCUMENTS = ((0, 3, 4, 29), (0, 40))
MASKS: dict[str, tuple[dict[str, Any], bool]] = {
    "causal": ({}, False),
    "full": ({"causal": False}, False),
    "documents": ({}, True),
    "documents, full": ({"causal": False}, True),
    "window 3": ({"window": 3}, False),
    "window 17, documents": ({"window": 17}, True),
    "window 5, full": ({"window": 5, "causal": False}, False),
    "soft cap": ({"soft_cap": 1.5}, False),
}
BOTH: ContextKind = "ulysses-ring"
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1), "odd": (12, 6)}


def context_plan(
    kind: ContextKind, cp: int, ulysses: int, *, heads: str = "gqa", **mask: Any
) -> Plan:
    """Return a plan of one block over context ranks."""
    h, k = HEADS[heads]
    model = replace(NANO, layers=1, heads=h, kv_heads=k, max_positions=T)
    plan = plan_of(model=replace(model, **mask), sequence_length=T, microbatch_sequences=B)
    layout = replace(
        plan.layout,
        mesh=replace(plan.mesh, cp=cp),
        context=Context(kind=kind, ulysses_degree=ulysses),
    )
    mathematics = replace(plan.mathematics, global_sequences=B)
    return replace(plan, layout=layout, mathematics=mathematics)


def inputs_of(plan: Plan, *, documents: bool, dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(3)
    h, k = plan.model.heads, plan.model.kv_heads

    def values(heads: int) -> torch.Tensor:
        return torch.randn(T, B, heads, HD, generator=generator, dtype=torch.float64).to(dtype)

    return Inputs(
        q=values(h),
        k=values(k),
        v=values(k),
        dout=values(h),
        documents=DOCUMENTS if documents else None,
    )


def run(plan: Plan, inputs: Inputs, pool: RankPool) -> list[Attention]:
    ranks = pool.run(context_targets.attend, (plan, inputs), world_size=plan.mesh.world_size)
    assert all(isinstance(rank, Attention) for rank in ranks)
    return ranks


def whole(ranks: list[Attention], name: str) -> torch.Tensor:
    """Put the parts of all ranks in the order of their positions."""
    parts = torch.cat([getattr(rank, name) for rank in ranks])
    found = torch.full_like(parts, torch.nan)
    found[torch.cat([rank.positions for rank in ranks])] = parts
    return found


def reference(plan: Plan, inputs: Inputs) -> dict[str, torch.Tensor]:
    q, k, v = (x.double().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    positions = torch.arange(T)
    seen = visible(positions, positions, plan.model.mask, inputs.documents)
    out, _ = attention_reference(q, k, v, seen, plan.model.soft_cap)
    out.backward(inputs.dout.double())
    values = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {name: context_targets.given(value) for name, value in values.items()}


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


def sent(rank: Attention) -> tuple[int, int]:
    """Return the bytes that a rank sent, forward and backward."""
    return total(rank.forward), total(rank.backward)


def total(events: list[Event]) -> int:
    return sum(event.bytes for event in events)


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


@pytest.mark.parametrize("kind", ["ring", "striped"])
@pytest.mark.parametrize("causal", [True, False])
def test_the_next_keys_are_under_way_while_these_are_met(
    kind: ContextKind, causal: bool, rank_pool: RankPool
) -> None:
    plan = context_plan(kind, 4, 1, causal=causal)
    ranks = run(plan, inputs_of(plan, documents=False), rank_pool)
    for rank in ranks:
        for events, names in ((rank.forward, "ring.forward"), (rank.backward, "ring.backward")):
            work = {e.name: e for e in events if e.kind == "attend"}
            moves = {e.name: e for e in events if e.kind == "all_to_all"}
            waits = [e.start for e in events if e.kind == "wait"]
            assert {f"{names}.{step}" for step in range(1, 4)} <= set(moves)
            for step in range(3):
                # It starts before the work of this step, which nothing delays, and ends after it.
                move, here = moves[f"{names}.{step + 1}"], work[f"{names}.{step}"]
                assert move.start <= here.start
                assert move.end >= here.end
                assert not [wait for wait in waits if move.start <= wait <= here.end]
        gradients = {e.name: e for e in rank.backward if e.name.startswith("ring.gradients")}
        work = {e.name: e for e in rank.backward if e.kind == "attend"}
        for name, move in gradients.items():
            step = name.rpartition(".")[2]
            assert move.start <= work[f"ring.backward.{step}"].start
            assert move.end >= work[f"ring.backward.{step}"].end


@pytest.mark.parametrize("causal", [True, False])
def test_at_its_ends_a_ring_of_ulysses_groups_is_the_pure_kind(
    causal: bool, rank_pool: RankPool
) -> None:
    ends: tuple[tuple[ContextKind, int], ...] = (("ring", 1), ("ulysses", 4))
    for pure, ulysses in ends:
        plans = [context_plan(kind, 4, ulysses, causal=causal) for kind in (pure, BOTH)]
        inputs = inputs_of(plans[0], documents=False)
        first, second = (run(plan, inputs, rank_pool) for plan in plans)
        for one, other in zip(first, second, strict=True):
            for name in ("positions", "out", "dq", "dk", "dv"):
                assert torch.equal(getattr(one, name), getattr(other, name)), (pure, name)
            assert sent(one) == sent(other)


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


def test_a_naive_split_is_wrong_and_a_ring_is_not(rank_pool: RankPool) -> None:
    """Queries that meet only the keys of their own rank give another output."""
    plan = context_plan("ring", 4, 1)
    inputs = inputs_of(plan, documents=False)
    ranks = run(plan, inputs, rank_pool)
    right = reference(plan, inputs)["out"]
    for rank in ranks:
        own = rank.positions
        alone, _ = attention_reference(
            inputs.q[own], inputs.k[own], inputs.v[own], visible(own, own, plan.model.mask, None)
        )
        assert float((alone - right[own]).abs().max()) > 0.1
        assert float((rank.out - right[own]).abs().max()) < 1e-12


def test_a_window_sends_its_own_length_only(rank_pool: RankPool) -> None:
    """Of 4 x 2 chunks of 6 positions, a window of 3 needs the last two keys of the one before."""
    element = 2 * B * HEADS["gqa"][1] * HD * 8
    for kind in ("ring", "gathered"):
        plan = context_plan(kind, 4, 1, window=3)
        ranks = run(plan, inputs_of(plan, documents=False), rank_pool)
        # Seven borders between chunks, of which one lies inside of the last rank.
        assert sum(total(rank.forward) for rank in ranks) == 6 * 2 * element
        assert sum(total(rank.backward) for rank in ranks) == 2 * 6 * 2 * element


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


def test_the_pairs_of_a_ring_are_spread_evenly(rank_pool: RankPool) -> None:
    """Counted from what the ranks were asked to compute, not from the formula."""
    for kind in ("ring", "striped"):
        plan = context_plan(kind, 4, 1)
        ranks = run(plan, inputs_of(plan, documents=False), rank_pool)
        work = Counter(
            {
                index: sum(
                    piece.band.num_pairs(piece.num_queries, piece.num_keys)
                    for _, _, pieces in rank.met_forward
                    for piece in pieces
                )
                for index, rank in enumerate(ranks)
            }
        )
        spread = (max(work.values()) - min(work.values())) / max(work.values())
        assert sum(work.values()) == T * (T + 1) // 2
        # Striped ranks differ by one key a query: 2 x 3 / T of the work for the last of four.
        assert spread == 0 if kind == "ring" else spread < 2 * 3 / T
