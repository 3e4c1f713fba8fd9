# SPDX-License-Identifier: Apache-2.0
"""Memory of the optimizer beside the model state: its update, and buffers of offloaded tensors.

Once backward is over, the norm and an update have chunks of gradients, and Muon its matrices.
Buffers of offloaded tensors are as many as are in use at a time, and they stay: each is as large as
the largest set of its store, which is one bucket's slices: of the optimizer the set that one job of
the update reads, of parameters the slice itself. Two jobs are at hand at a time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from math import prod

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.disk import round_up_to_pages
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.quantised import CODE_BYTES
from echelon.cost.bytes.terms import WIDE_BYTES, Pool
from echelon.cost.bytes.transient import buffer_pools
from echelon.layout.buckets import BucketPlan, slice_elements
from echelon.layout.muon import MuonExchange, MuonMatrix, muon_exchange
from echelon.layout.slots import trained_buckets
from echelon.layout.stage import expert_index_of, pp_rank_of

UPDATE_ELEMENTS = 1 << 24
"""Elements of a fused update that casts too (`gpu_update_elements` in `core/piece_sizes.py`)."""

NORM_ELEMENTS = 1 << 16
"""Gradients whose squares a CPU adds up at a time (`norm_elements` in the same file)."""

MUON_BUCKETS = 4
"""Buckets of Muon whose pieces travel at a time (`core/piece_sizes.py`)."""

MUON_RESULTS = 2
"""Buckets of Muon whose results travel at a time (the same file)."""

Messages = tuple[int, int, int, int]
"""Elements of pieces that leave and come, and of results that leave and come."""


def most_update_bytes(plan: Plan, rank: int, buckets: Sequence[BucketPlan]) -> int:
    """Return the most bytes that the norm and an update have on a rank, matrices of Muon included.

    Gradients in another dtype than the master copy are cast, a bounded number of them at a time;
    an update in one pass casts what it reads. For the norm a CPU widens a run of gradients.
    """
    precision = plan.mathematics.precision
    gradients, master = (DTYPE_BYTES[one] for one in (precision.gradients, precision.master))
    casts = precision.gradients != precision.master
    one_pass = plan.layout.kernels.of("update") != "plain"
    cast = {one.name for one in buckets if not (one_pass and OPTIMIZERS[one.update].one_pass)}
    longest = {one.name: min(UPDATE_ELEMENTS, slice_elements(plan, one)) for one in buckets}
    run = min(NORM_ELEMENTS, max(longest.values(), default=0))
    squares = run * WIDE_BYTES * (gradients < WIDE_BYTES) * (plan.cluster.backend == "gloo")
    coded = max((longest[one.name] for one in buckets if one.fp8_squares), default=0)
    codes = coded * (max(WIDE_BYTES, DTYPE_BYTES[precision.parameters]) + CODE_BYTES)
    muon = _MuonUpdate(plan, rank, buckets)
    most = now = 0
    for step, name in _jobs(buckets[::-1]):
        inside, left = muon.of(step, name)
        if step == "elements":
            inside = casts * (name in cast) * longest[name]
        most = max(most, now + inside)
        now += left
    return max(most * master, squares, codes)


class _MuonUpdate:
    """What each job of an update has of matrices and messages, in elements."""

    def __init__(self, plan: Plan, rank: int, buckets: Sequence[BucketPlan]) -> None:
        whole = [one for one in buckets if OPTIMIZERS[one.update].needs_whole_matrices]
        self._of: dict[str, tuple[Messages, Sequence[MuonMatrix]]] = {}
        if not whole:
            return
        exchange = muon_exchange(plan, pp_rank_of(plan, rank), expert_index_of(plan, rank))
        for bucket in whole:
            owned = [one for one in exchange.owned(rank) if one.pieces[0].bucket == bucket.name]
            self._of[bucket.name] = _messages(exchange, bucket, rank), owned
        precision = plan.mathematics.precision
        self._piece = 0
        if precision.gradients != precision.master:
            self._piece = max(
                (
                    piece.num_elements
                    for matrix in exchange.matrices
                    for piece in matrix.pieces
                    if rank in piece.holders
                ),
                default=0,
            )

    def of(self, step: str, bucket: str) -> tuple[int, int]:
        """Return what a job has at most beside what was there, and what more it leaves."""
        if step == "elements":
            return 0, 0
        (pieces_out, pieces_in, results_out, results_in), owned = self._of[bucket]
        matrices = sum(prod(one.shape) for one in owned)
        if step == "send":
            left = matrices + pieces_out + pieces_in
            return left + self._piece, left
        if step == "orthogonalise":
            inside = max((_inside(one) for one in owned), default=0) - pieces_out
            left = results_out + results_in - pieces_in - pieces_out
            # Rooms for results come before the pieces are let go of.
            return max(inside, left + (pieces_in if not results_out else 0)), left
        return 0, -matrices - results_out - results_in


def _inside(matrix: MuonMatrix) -> int:
    """Return the elements that an iteration has: a matrix, the next one, and two squares."""
    short = min(matrix.shape)
    copied = matrix.split_dim == 1 and matrix.local_shape != matrix.shape
    return (2 + copied) * prod(matrix.shape) + 2 * short * short


def _jobs(buckets: Sequence[BucketPlan]) -> Iterator[tuple[str, str]]:
    """Yield the jobs of an update, as `training/optimizer/step.py` orders them."""
    unsent = deque(one for one in buckets if OPTIMIZERS[one.update].needs_whole_matrices)
    results = deque[str]()
    for _ in range(min(MUON_BUCKETS, len(unsent))):
        yield "send", unsent.popleft().name
    for one in buckets:
        if not OPTIMIZERS[one.update].needs_whole_matrices:
            yield "elements", one.name
            continue
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


JOBS_AT_HAND = 2
"""Jobs of an update whose sets have buffers: one that runs, and the next."""


def offload_buffer_bytes(
    plan: Plan, buckets: Sequence[BucketPlan], reads: int, pools: set[Pool]
) -> int:
    """Return the bytes of buffers in `pools`, where so many slices of parameters are read ahead."""
    zero, precision = plan.layout.zero, plan.mathematics.precision
    trained = trained_buckets(buckets)
    sets = [_largest_set(plan, bucket) for bucket in trained]
    jobs = sum(len(_sets(plan, bucket)) for bucket in trained)
    count = min(zero.offload_buffers, JOBS_AT_HAND, jobs)
    found = sum(
        count * max(sets, default=0)
        for pool in buffer_pools(plan, zero.optimizer_offload)
        if pool in pools
    )
    size = DTYPE_BYTES[precision.parameters]
    values = [
        round_up_to_pages(slice_elements(plan, bucket) * size)
        for bucket in buckets
        if bucket.sliced
    ]
    count = max(reads, min(JOBS_AT_HAND, len(values)))
    return found + sum(
        count * max(values, default=0)
        for pool in buffer_pools(plan, zero.parameter_offload)
        if pool in pools
    )


def _largest_set(plan: Plan, bucket: BucketPlan) -> int:
    """Return the bytes of the largest set of the optimizer that a job reads of a bucket."""
    master = DTYPE_BYTES[plan.mathematics.precision.master]
    each = round_up_to_pages(slice_elements(plan, bucket) * master)
    return max(_sets(plan, bucket), default=0) * each


def _sets(plan: Plan, bucket: BucketPlan) -> list[int]:
    """Return how many tensors each job of the update of a bucket reads."""
    return [count for count in _tensors(plan, bucket) if count]


def _tensors(plan: Plan, bucket: BucketPlan) -> Iterator[int]:
    record, master = OPTIMIZERS[bucket.update], int(plan.mathematics.precision.has_master)
    if record.needs_whole_matrices:
        yield from (len(record.state), master)
    else:
        yield len(record.state) + master
