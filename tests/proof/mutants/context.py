"""Bugs in the forward pass of a sequence that is split over context ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch

from echelon.core.attention_mask import AttentionMask, Band, PositionRun
from echelon.core.plan import Plan
from echelon.layout.attention_tiles import AttentionTile
from echelon.models.attention.interface import OnlineSoftmax
from echelon.models.batch import TokenBatch
from echelon.models.precision import widened
from echelon.parallel import operations
from echelon.parallel.context import attention, ring
from echelon.parallel.context.attention import ContextAttention
from echelon.parallel.context.ulysses import HeadsToPositions, PositionsToHeads
from echelon.parallel.operations import RankOperations
from echelon.training import subject
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.proof.mutants.context_layouts import ATTENTION, DOCUMENTS, Q, in_forward, split
from tests.proof.mutants.expert_layouts import AUX
from tests.proof.mutants.planting import Told, mutant

Runs = tuple[PositionRun, ...]
Pieces = Callable[..., tuple[AttentionTile, ...]]


def _merge(patch: pytest.MonkeyPatch, put: Any) -> None:
    """Merge the rows of a piece with `put(so far, lse so far, out, lse)`, in place."""

    def add(self: Any, piece: AttentionTile, out: torch.Tensor, lse: torch.Tensor) -> None:
        out_TBHd, lse_BHT = self._state = self._widened()
        rows, sequences = piece.q, piece.sequences
        put(out_TBHd[rows, sequences], lse_BHT[sequences, :, rows], widened(out), lse)

    patch.setattr(OnlineSoftmax, "add", add)


@mutant(
    in_forward(split("ring"), "merge"),
    in_forward(split("striped", 4), "merge"),
    in_forward(split("ring", tp=2, sequence_parallel=True), "merge"),
    in_forward(split("gathered", 4), "merge"),
    in_forward(split("ring", 4, model={"window": 20}), "merge"),
    in_forward(split("ulysses-ring", 4, 2, **DOCUMENTS), "merge"),
    Told(
        "prove-activations",
        "layers.0.attention",
        "merge",
        "cp",
        plan={"model": MIXTRAL, "cp": 2, "ep": 2, "balance": AUX},
        of=plan_of,
    ),
)
def lse_not_rescaled(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Add the outputs of blocks of keys up, without weights."""

    def put(so_far: Any, lse_so_far: Any, out: Any, lse: Any) -> None:
        so_far.add_(out)
        lse_so_far.copy_(torch.logaddexp(lse_so_far, lse))

    _merge(patch, put)


@mutant(
    in_forward(split("ring", 4), "merge"),
)
def lse_not_updated(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Weigh each further block by the log-sum-exp of the first, not of all before it."""

    def put(so_far: Any, lse_so_far: Any, out: Any, lse: Any) -> None:
        weight = (lse - torch.logaddexp(lse_so_far, lse)).exp()
        so_far.lerp_(out, weight.permute(2, 0, 1).unsqueeze(-1))
        lse_so_far.copy_(torch.where(lse_so_far.isfinite(), lse_so_far, lse))

    _merge(patch, put)


def _pieces(
    patch: pytest.MonkeyPatch, change: Callable[[Pieces, Runs, Runs, Any, Any], Any]
) -> None:
    """Compute the pieces of queries and keys by `change(right, queries, keys, mask, documents)`."""
    right = attention.tiles_between

    def changed(
        queries: Runs, keys: Runs, mask: AttentionMask, documents: Any, least_rows: int
    ) -> Any:
        return change(partial(right, least_rows=least_rows), queries, keys, mask, documents)

    patch.setattr(attention, "tiles_between", changed)


def _later(keys: Runs) -> Runs:
    return tuple(PositionRun(run.start + run.step, run.step, run.count) for run in keys)


@mutant(
    in_forward(split("ring"), "mask off by one"),
    in_forward(split("ring", 4, pp=2), "mask off by one"),
)
def mask_off_by_one_in_a_block(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Hide from the second place of a ring the last key that it sees of its own block."""
    second = plan.placement.ring_runs(1)

    def change(right: Pieces, queries: Runs, keys: Runs, mask: Any, documents: Any) -> Any:
        wrong = queries == keys == second
        return right(queries, _later(keys) if wrong else keys, mask, documents)

    _pieces(patch, change)


@mutant(
    in_forward(split("striped"), "mask off by one"),
)
def mask_off_by_one_between_places(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Hide from the second place of a ring the last key that it sees of the first."""
    first, second = plan.placement.ring_runs(0), plan.placement.ring_runs(1)

    def change(right: Pieces, queries: Runs, keys: Runs, mask: Any, documents: Any) -> Any:
        wrong = (queries, keys) == (second, first)
        return right(queries, _later(keys) if wrong else keys, mask, documents)

    _pieces(patch, change)


@mutant(
    in_forward(split("gathered"), "mask off by one"),
)
def mask_off_by_one_on_a_rank(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Hide from the second place of a ring the last key that it sees, whose ever it is."""
    second = plan.placement.ring_runs(1)

    def change(right: Pieces, queries: Runs, keys: Runs, mask: Any, documents: Any) -> Any:
        return right(queries, _later(keys) if queries == second else keys, mask, documents)

    _pieces(patch, change)


@mutant(
    in_forward(split("ulysses"), "mask off by one"),
)
def mask_off_by_one_on_a_member(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Hide from the second member of a Ulysses group the last key that it sees."""
    over_ring = ContextAttention._over_ring

    def shifted(self: Any, q: Any, k: Any, v: Any, seen: Any) -> torch.Tensor:
        if self.ulysses.index == 1:
            seen = _ShiftedRingContext(
                **{field.name: getattr(seen, field.name) for field in fields(seen)}
            )
        return over_ring(self, q, k, v, seen)

    patch.setattr(ContextAttention, "_over_ring", shifted)


class _ShiftedRingContext(attention.RingContext):
    def tiles(self, queries: Runs, keys: Runs) -> tuple[AttentionTile, ...]:
        return attention.tiles_between(queries, _later(keys), self.mask, self.documents)


@mutant(
    in_forward(split("ring", **DOCUMENTS), "documents"),
)
def documents_ignored_on_a_rank(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let the second place of a ring attend across documents."""
    second = plan.placement.ring_runs(1)

    def change(right: Pieces, queries: Runs, keys: Runs, mask: Any, documents: Any) -> Any:
        return right(queries, keys, mask, None if queries == second else documents)

    _pieces(patch, change)


@mutant(
    in_forward(split("striped", **DOCUMENTS), "documents"),
)
def documents_of_the_own_chunks_only(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Keep to documents among the positions of a place, and forget them for those of others."""

    def change(right: Pieces, queries: Runs, keys: Runs, mask: Any, documents: Any) -> Any:
        return right(queries, keys, mask, documents if queries == keys else None)

    _pieces(patch, change)


class _RowWindow(AttentionMask):
    """Count a window in rows of a rank."""

    def band(self, queries: PositionRun, keys: PositionRun) -> Band:
        assert self.window is not None
        low = AttentionMask(causal=self.causal).band(queries, keys).low
        return Band(low, self.window - 1)


@mutant(
    in_forward(split("striped", model={"window": 5}), "window"),
)
def window_of_rows(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Apply the window to rows of a rank, not to positions."""
    mask = plan.model.mask
    wrong = _RowWindow(causal=mask.causal, window=mask.window)
    _pieces(
        patch, lambda right, queries, keys, _, documents: right(queries, keys, wrong, documents)
    )


@mutant(
    in_forward(split("ring", 4), "never met"),
)
def later_ranks_skipped(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Skip the keys of later places, as a causal mask lets a ring of contiguous chunks do."""
    block = ring._RingKeys.block

    def skipped(self: Any, owner: int) -> Any:
        return None if owner > self._plan.ring_rank else block(self, owner)

    patch.setattr(ring._RingKeys, "block", skipped)


@mutant(
    in_forward(split("ring"), "met twice"),
)
def block_met_twice(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Meet the keys of the other places twice."""
    attend = ring.attend_tiles

    def twice(
        q: Any, k: Any, v: Any, pieces: Any, soft_cap: Any, into: OnlineSoftmax
    ) -> OnlineSoftmax:
        again = into._state is not None
        merged = attend(q, k, v, pieces, soft_cap, into)
        return attend(q, k, v, pieces, soft_cap, merged) if again else merged

    patch.setattr(ring, "attend_tiles", twice)


def _contiguous(plan: Plan, runs: Runs) -> Runs:
    """Return the chunk that the rank of `runs` would have without the placement."""
    placement = plan.placement
    size = placement.length // placement.degree
    rank = next(r for r in range(placement.degree) if placement.runs(r) == runs)
    return (PositionRun(rank * size, 1, size),)


@mutant(
    in_forward(split("ring"), "positions", Q),
    in_forward(split("gathered", 4), "positions", Q),
    in_forward(split("ulysses-ring", 4, 2), "positions", Q),
)
def positions_of_contiguous_chunks(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Turn keys and queries as though each rank had one contiguous chunk."""
    tables = RankOperations.rotary_tables

    def wrong(self: Any, shape: Any, batch: TokenBatch, like: torch.Tensor) -> Any:
        return tables(self, shape, replace(batch, runs=_contiguous(plan, batch.runs)), like)

    patch.setattr(RankOperations, "rotary_tables", wrong)


@mutant(
    in_forward(split("striped", model={"positions": "learned"}), "positions", "positions.weight"),
)
def learned_positions_of_rows(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Add the position vectors of the first rows on every rank."""
    embed = RankOperations.embed

    def wrong(self: Any, weight: Any, positions: Any, batch: TokenBatch) -> torch.Tensor:
        local = replace(batch, runs=(PositionRun(0, 1, batch.num_positions),))
        return embed(self, weight, positions, local)

    patch.setattr(RankOperations, "embed", wrong)


def _rows(patch: pytest.MonkeyPatch, plan: Plan, *taken: str) -> None:
    right = subject.rank_batches

    def wrong(plan: Plan, batch: Any, rank: int, step: int, *, runs: Runs) -> list[TokenBatch]:
        batches = right(plan, batch, rank, step, runs=runs)
        others = right(plan, batch, rank, step, runs=_contiguous(plan, runs))
        return [
            replace(one, **{name: getattr(other, name) for name in taken})
            for one, other in zip(batches, others, strict=True)
        ]

    patch.setattr(subject, "rank_batches", wrong)


@mutant(
    in_forward(split("ring"), "labels", "loss", rule="prove-microbatch-loss"),
)
def labels_of_contiguous_chunks(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Cut labels in contiguous chunks beside tokens that follow the placement."""
    _rows(patch, plan, "labels_N")


@mutant(
    in_forward(split("striped"), "tokens and labels", "embedding.weight"),
)
def data_of_contiguous_chunks(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Cut tokens and labels in contiguous chunks."""
    _rows(patch, plan, "tokens_N", "labels_N")


@mutant(
    in_forward(split("ring", model={"dropout": 0.1}), "dropout", "embedding.weight"),
)
def dropout_of_rows(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Key dropout by the rows of a rank, not by positions."""
    dropped = operations.apply_dropout

    def wrong(x: Any, rows: Any, probability: float, site: str, batch: TokenBatch) -> Any:
        local = replace(batch, runs=(PositionRun(0, 1, batch.num_positions),))
        return dropped(x, rows, probability, site, local)

    patch.setattr(operations, "apply_dropout", wrong)


@mutant(
    in_forward(split("ulysses"), "heads permuted", f"{ATTENTION}.o.weight"),
)
def heads_interleaved(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Put the heads that come back from a Ulysses group side by side in the wrong order."""

    def forward(ctx: Any, out: torch.Tensor, group: Any, store: Any) -> torch.Tensor:
        ctx.group, ctx.store = group, store
        packed_UTBP = out.contiguous().unflatten(0, (group.size, -1))
        mine = torch.empty_like(packed_UTBP)
        group.all_to_all(mine, packed_UTBP, name="ulysses.forward.out")
        return mine.permute(1, 2, 3, 0, 4).flatten(2, 3)

    patch.setattr(HeadsToPositions, "forward", staticmethod(forward))


@mutant(
    in_forward(split("ulysses"), "wrong heads", f"{ATTENTION}.k.weight"),
)
def key_heads_of_the_next_member(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Send key/value heads to the member before the one that needs them."""
    forward = PositionsToHeads.forward

    def rolled(ctx: Any, q: Any, k: Any, v: Any, group: Any, store: Any) -> Any:
        by = -(k.shape[2] // group.size)
        return forward(ctx, q, k.roll(by, 2), v.roll(by, 2), group, store)

    patch.setattr(PositionsToHeads, "forward", staticmethod(rolled))
