"""What the optimizer has beside the model state, once backward is over."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from math import prod

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.layout.buckets import BucketPlan, slice_elements
from echelon.layout.muon import MuonExchange, MuonMatrix, muon_exchange
from echelon.layout.stage import expert_index_of, pp_rank_of

UPDATE_ELEMENTS = 1 << 24
"""Elements of a fused update that casts too (`gpu_update_elements` in `models/piece_sizes.py`)."""

WIDE_BYTES = 4
"""Squares of a norm are added in at least float32."""

MUON_BUCKETS, MUON_RESULTS = 4, 2
"""Buckets of Muon whose pieces travel, and whose results do (`models/piece_sizes.py`)."""

Messages = tuple[int, int, int, int]
"""Elements of pieces that leave and come, and of results that leave and come."""


def most_update_bytes(plan: Plan, rank: int, buckets: Sequence[BucketPlan]) -> int:
    """Return the most bytes that an update has on a rank, matrices of Muon included."""
    precision = plan.mathematics.precision
    gradients, master = (DTYPE_BYTES[one] for one in (precision.gradients, precision.master))
    longest = min(UPDATE_ELEMENTS, max((slice_elements(plan, one) for one in buckets), default=0))
    casts = longest * master if precision.gradients != precision.master else 0
    squares = longest * WIDE_BYTES if gradients < WIDE_BYTES else 0
    return max(casts + most_muon_bytes(plan, rank, buckets), squares)


def most_muon_bytes(plan: Plan, rank: int, buckets: Sequence[BucketPlan]) -> int:
    """Return the most bytes of matrices that a rank owns, of messages, and of Newton-Schulz."""
    optimizer = plan.mathematics.optimizer
    if not OPTIMIZERS[optimizer.kind].needs_whole_matrices:
        return 0
    exchange = muon_exchange(plan, pp_rank_of(plan, rank), expert_index_of(plan, rank))
    sent = {bucket.name: _messages(exchange, bucket, rank) for bucket in buckets}
    owned = {
        bucket.name: [
            one for one in exchange.owned(rank) if one.pieces[0].bucket == bucket.name
        ]
        for bucket in buckets
    }
    matrices = {name: sum(prod(one.shape) for one in found) for name, found in owned.items()}
    size = DTYPE_BYTES[plan.mathematics.precision.master]
    most = now = 0
    for step, name in _jobs(buckets[::-1]):
        pieces_out, pieces_in, results_out, results_in = sent[name]
        if step == "send":
            now += matrices[name] + pieces_out + pieces_in
        elif step == "orthogonalise":
            now -= pieces_out
            inside = max((_inside(one) for one in owned[name]), default=0)
            most = max(most, now + inside)
            now += results_out + results_in - pieces_in
        else:
            most = max(most, now)
            now -= matrices[name] + results_out + results_in
        most = max(most, now)
    return most * size


def _inside(matrix: MuonMatrix) -> int:
    """Return the elements that an iteration has: a matrix, the next one, and two squares."""
    short = min(matrix.shape)
    return 2 * prod(matrix.shape) + 2 * short * short


def _jobs(buckets: Sequence[BucketPlan]) -> Iterator[tuple[str, str]]:
    """Yield the jobs of an update, as `training/optimizer/update_tasks.py` orders them."""
    whole = [one for one in buckets if OPTIMIZERS[one.update].needs_whole_matrices]
    unsent, results = deque(whole), deque[str]()
    for _ in range(min(MUON_BUCKETS, len(unsent))):
        yield "send", unsent.popleft().name
    for one in whole:
        yield "orthogonalise", one.name
        results.append(one.name)
        if len(results) > MUON_RESULTS:
            yield "apply", results.popleft()
            if unsent:
                yield "send", unsent.popleft().name
    for name in results:
        yield "apply", name


def _messages(exchange: MuonExchange, bucket: BucketPlan, rank: int) -> Messages:
    """Return what a rank sends and receives for the matrices of a bucket.

    Holders of the same pieces are sent the same tensor.
    """
    out = came = back = 0
    results: dict[int, list[tuple[str, int, int]]] = {}
    sizes: Counter[tuple[str, int, int]] = Counter()
    for matrix in exchange.matrices:
        if matrix.pieces[0].bucket != bucket.name:
            continue
        for piece in matrix.pieces:
            own = matrix.owner == rank
            key = (matrix.name, piece.tensor_index, piece.start)
            if own:
                came += piece.num_elements * (piece.sender != rank)
                sizes[key] = piece.num_elements
                for holder in piece.holders:
                    if holder != rank:
                        results.setdefault(holder, []).append(key)
            else:
                out += piece.num_elements * (piece.sender == rank)
                back += piece.num_elements * (rank in piece.holders)
    distinct = {tuple(keys) for keys in results.values()}
    leaving = sum(sizes[key] for keys in distinct for key in keys)
    return out, came, leaving, back
