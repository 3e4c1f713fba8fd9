# SPDX-License-Identifier: Apache-2.0
"""What the optimizer has beside the model state, once backward is over."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from math import prod

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.fp8 import CODE_BYTES
from echelon.layout.buckets import BucketPlan, slice_elements
from echelon.layout.muon import MuonExchange, MuonMatrix, muon_exchange
from echelon.layout.stage import expert_index_of, pp_rank_of

UPDATE_ELEMENTS = 1 << 24
"""Elements of a fused update that casts too (`gpu_update_elements` in `models/piece_sizes.py`)."""

NORM_ELEMENTS = 1 << 16
"""Gradients whose squares a CPU adds up at a time (`norm_elements` in the same file)."""

WIDE_BYTES = 4
"""Codes are made of values in at least float32, and squares added up in that."""

MUON_BUCKETS = 4
"""Buckets of Muon whose pieces travel at a time (`models/piece_sizes.py`)."""

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
