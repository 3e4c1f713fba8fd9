# SPDX-License-Identifier: Apache-2.0
"""Muon (Jordan et al., 2024) on slices: momentum where the slices are, Newton-Schulz at one owner.

Every holder of a slice updates its momentum; the pieces of a matrix go to its owner, which makes it
orthogonal once, and the pieces of the result go to all that hold a piece. Three steps for each
bucket, so that several buckets are on their way at a time.

The quintic Newton-Schulz iteration brings singular values near 1, not to 1: its coefficients are
chosen for the fastest growth of small ones, and five steps in low precision are enough.

Shape suffixes: M rows, K columns, S the shorter and L the longer side.

`layout/muon.py` says which pieces travel; here the pieces of one bucket are packed into one message
for each pair of ranks and direction. Both ends pack in the same order, so nothing else is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from echelon.core.plan import Optimizer
from echelon.layout.muon import MuonExchange, MuonMatrix, MuonPiece
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.transport.collectives import Group, Pending
from echelon.training.optimizer.elementwise import fused_sgd
from echelon.training.optimizer.trained_ranges import (
    FusedOperands,
    TrainedRange,
    scale_gradient,
    trained_ranges,
)

# Coefficients of a step a X + (b A + c A A) X, with A = X X^T (Jordan et al., Muon, 2024).
_A = 3.4445
_B = -4.7750
_C = 2.0315
_SMALLEST_NORM = 1e-7  # of a matrix


def newton_schulz(update_MK: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the orthogonal factor [M, K]; computed in float32 or float64, zeros stay zeros."""
    wide = update_MK.dtype if update_MK.dtype == torch.float64 else torch.float32
    tall = update_MK.shape[0] > update_MK.shape[1]
    x_SL = update_MK.t() if tall else update_MK
    x_SL = x_SL.to(wide)
    x_SL = x_SL / (torch.linalg.vector_norm(x_SL) + _SMALLEST_NORM)
    for _ in range(steps):
        a_SS = x_SL @ x_SL.t()
        polynomial_SS = torch.addmm(a_SS, a_SS, a_SS, beta=_B, alpha=_C)
        x_SL = torch.addmm(x_SL, polynomial_SS, x_SL, beta=_A)
    return x_SL.t() if tall else x_SL


def step_size(shape: tuple[int, ...]) -> float:
    """Return what makes the update as large as AdamW's usually is: 0.2 sqrt(longer side).

    So both take the same learning rate and weight decay (Liu et al., "Muon is Scalable for LLM
    Training", 2025, section 2.2).
    """
    return 0.2 * max(shape) ** 0.5


@dataclass(slots=True, kw_only=True)
class _PendingBucket:
    """A bucket on its way: the matrices that this rank owns, flat, and what it receives."""

    matrices: dict[str, torch.Tensor]
    received: dict[int, torch.Tensor]
    pending: Pending
    like: torch.Tensor


class Muon:
    """Update the matrices of a pipeline stage together with its other ranks."""

    def __init__(self, settings: Optimizer, group: MuonGroup, buckets: Sequence[Bucket]) -> None:
        """Learn who owns the matrices of `buckets`; the ranks of the stage do so together."""
        self._settings, self._group = settings, group.group
        self._messages = {bucket.name: muon_messages(bucket, group) for bucket in buckets}
        self._pending: dict[str, _PendingBucket] = {}
        # NCCL opens the links of a group in its first call, in which all members must take part;
        # in an exchange a member may have none.
        self._group.gather_objects(None)

    def send_parts(
        self, bucket: Bucket, gradient: torch.Tensor, momentum: torch.Tensor, factor: float
    ) -> None:
        """Update the momentum of a slice and start to send its pieces to the owners."""
        layout, beta = self._messages[bucket.name], self._settings.momentum
        matrices = {matrix.name: momentum.new_empty(prod(matrix.shape)) for matrix in layout.owned}
        sends = _empty(layout.parts_out, momentum)
        received = _empty(layout.pieces_in, momentum)
        for piece in layout.held:
            place = piece.place
            scaled = scale_gradient(gradient[place], factor, momentum.dtype)
            torch.add(scaled, momentum[place], alpha=beta, out=momentum[place])
            if piece.outgoing is not None:
                home = _source_of_part(piece, matrices, sends)[as_slice(piece.outgoing)]
                torch.add(scaled, momentum[place], alpha=beta, out=home)
        self._pending[bucket.name] = _PendingBucket(
            matrices=matrices,
            received=received,
            pending=self._group.exchange(sends, received, name=f"muon.pieces.{bucket.name}"),
            like=momentum.new_empty(0),
        )

    def orthogonalise(self, bucket: Bucket) -> None:
        """Make this rank's matrices of a bucket orthogonal and start to send the results.

        A result is the step at a learning rate of 1, in the dtype of the momentum.
        """
        layout, pending = self._messages[bucket.name], self._pending[bucket.name]
        pending.pending.wait()
        for place, message in layout.pieces_in.items():
            start = 0
            for matrix, run in message.runs:
                # No name for the piece: it would keep the last message until the results have left.
                pending.matrices[matrix.name][as_slice(run)] = pending.received[place][
                    start : start + len(run)
                ]
                start += len(run)
        for matrix in layout.owned:
            pending.matrices[matrix.name] = self._step(matrix, pending.matrices[matrix.name])
        pending.received = _empty(layout.results_in, pending.like)
        sends = _packed(layout.results_out, pending.matrices)
        pending.pending = self._group.exchange(
            sends, pending.received, name=f"muon.results.{bucket.name}"
        )

    def apply(self, bucket: Bucket, target: torch.Tensor, rate: float) -> None:
        """Subtract weight decay and the results from a slice."""
        layout, pending = self._messages[bucket.name], self._pending.pop(bucket.name)
        pending.pending.wait()
        for decays in (True, False):
            held = [piece for piece in layout.held if piece.decays is decays]
            # Weight decay that is coupled to a gradient without momentum is decoupled decay.
            operands = FusedOperands(
                targets=[target[piece.place] for piece in held],
                gradients=[
                    _source_of_part(piece, pending.matrices, pending.received)[
                        as_slice(piece.result)
                    ]
                    for piece in held
                ],
                state=(),
                rate=rate,
                weight_decay=self._settings.weight_decay if decays else 0.0,
            )
            fused_sgd(operands, [], 0.0)

    def _step(self, matrix: MuonMatrix, flat: torch.Tensor) -> torch.Tensor:
        x_MK = newton_schulz(_rows(matrix, flat), self._settings.newton_schulz_steps)
        # In place: of a tall matrix what is made flat next is a copy, too.
        return _flat(matrix, x_MK.mul_(step_size(matrix.shape)).to(flat.dtype))


def _rows(matrix: MuonMatrix, flat: torch.Tensor) -> torch.Tensor:
    """Return a matrix that is stored tensor slice after tensor slice as [rows, columns]."""
    if matrix.split_dim != 1:
        return flat.view(matrix.shape)
    return flat.view(-1, *matrix.local_shape).transpose(0, 1).reshape(matrix.shape)


def _flat(matrix: MuonMatrix, x_MK: torch.Tensor) -> torch.Tensor:
    """Return [rows, columns] as it is stored: tensor slice after tensor slice."""
    if matrix.split_dim != 1:
        return x_MK.reshape(-1)
    rows, columns = matrix.local_shape
    return x_MK.reshape(rows, -1, columns).transpose(0, 1).reshape(-1)


def _source_of_part(
    piece: HeldMatrixPart,
    matrices: Mapping[str, torch.Tensor],
    messages: Mapping[int, torch.Tensor],
) -> torch.Tensor:
    """Return what a piece is a part of: the matrix, where it is this rank's, or a message."""
    return matrices[piece.matrix] if piece.matrix in matrices else messages[piece.owner]


def _empty(messages: Mapping[int, MuonMessage], like: torch.Tensor) -> dict[int, torch.Tensor]:
    return {place: like.new_empty(message.length) for place, message in messages.items()}


def _packed(
    messages: Mapping[int, MuonMessage], matrices: Mapping[str, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return the messages with their content; replicas are sent the same tensor."""
    packed: dict[tuple[tuple[str, range], ...], torch.Tensor] = {}
    for message in messages.values():
        content = message.content()
        if content not in packed:
            packed[content] = torch.cat([matrices[name][as_slice(run)] for name, run in content])
    return {place: packed[message.content()] for place, message in messages.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonGroup:
    """The ranks of one pipeline stage as a group, and what they exchange.

    In the exchange ranks are counted from `first_rank`: that of an island of local SGD.
    """

    group: Group
    exchange: MuonExchange
    first_rank: int = 0

    @property
    def rank(self) -> int:
        """Return this rank."""
        return self.group.ranks[self.group.index] - self.first_rank

    def index_of(self, rank: int) -> int:
        """Return the place of a rank in the group."""
        return self.group.ranks.index(self.first_rank + rank)


@dataclass(slots=True)
class MuonMessage:
    """What one other rank is sent, or sends: the runs of a matrix that it consists of, in order."""

    runs: list[tuple[MuonMatrix, range]] = field(default_factory=list)
    length: int = 0

    def add(self, matrix: MuonMatrix, piece: MuonPiece) -> range:
        """Append a piece; return where in the message it is."""
        self.runs.append((matrix, range_in_matrix(matrix, piece)))
        self.length += piece.num_elements
        return range(self.length - piece.num_elements, self.length)

    def content(self) -> tuple[tuple[str, range], ...]:
        """Return what tells this message from others of the same rank and bucket."""
        return tuple((matrix.name, run) for matrix, run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMatrixPart:
    """A piece of a matrix in this rank's slice, and the owner of that matrix.

    `result` is where in the owner's message the result is, or in the matrix where this rank owns
    it; `outgoing` where in the message to the owner (or in the matrix) it goes, unless another
    holder sends it.
    """

    matrix: str
    place: slice
    decays: bool
    owner: int
    outgoing: range | None
    result: range


@dataclass(slots=True)
class MuonMessages:
    """The messages of one rank for one bucket, by the place of the other rank in the group."""

    owned: list[MuonMatrix] = field(default_factory=list)
    held: list[HeldMatrixPart] = field(default_factory=list)
    parts_out: dict[int, MuonMessage] = field(default_factory=dict)
    pieces_in: dict[int, MuonMessage] = field(default_factory=dict)
    results_out: dict[int, MuonMessage] = field(default_factory=dict)
    results_in: dict[int, MuonMessage] = field(default_factory=dict)


def muon_messages(bucket: Bucket, group: MuonGroup) -> MuonMessages:
    """Return what this rank holds, owns, sends and receives for the matrices of a bucket."""
    layout, trained = MuonMessages(), trained_ranges(bucket)
    for matrix in _matrices(bucket, group.exchange):
        if matrix.owner == group.rank:
            layout.owned.append(matrix)
            _as_owner(layout, group, matrix)
        for piece in matrix.pieces:
            if group.rank in piece.holders:
                part = _part(bucket, piece, trained)
                layout.held.append(_as_holder(layout, group, (matrix, piece), part))
    return layout


def as_slice(elements: range) -> slice:
    """Return where in a flat tensor some elements of it are."""
    return slice(elements.start, elements.stop)


def range_in_matrix(matrix: MuonMatrix, piece: MuonPiece) -> range:
    """Return where a piece lies in a matrix that is stored tensor slice after tensor slice."""
    start = piece.tensor_index * prod(matrix.local_shape) + piece.start
    return range(start, start + piece.num_elements)


def _as_owner(layout: MuonMessages, links: MuonGroup, matrix: MuonMatrix) -> None:
    for piece in matrix.pieces:
        if piece.sender != links.rank:
            sender = links.index_of(piece.sender)
            layout.pieces_in.setdefault(sender, MuonMessage()).add(matrix, piece)
        for holder in piece.holders:
            if holder != links.rank:
                layout.results_out.setdefault(links.index_of(holder), MuonMessage()).add(
                    matrix, piece
                )


def _as_holder(
    layout: MuonMessages, links: MuonGroup, found: tuple[MuonMatrix, MuonPiece], part: TrainedRange
) -> HeldMatrixPart:
    matrix, piece = found
    owner = links.index_of(matrix.owner)
    outgoing = result = range_in_matrix(matrix, piece)
    if matrix.owner != links.rank:
        result = layout.results_in.setdefault(owner, MuonMessage()).add(matrix, piece)
        if piece.sender == links.rank:
            outgoing = layout.parts_out.setdefault(owner, MuonMessage()).add(matrix, piece)
    return HeldMatrixPart(
        matrix=matrix.name,
        place=part[0],
        decays=part[1],
        owner=owner,
        outgoing=outgoing if piece.sender == links.rank else None,
        result=result,
    )


def _matrices(bucket: Bucket, exchange: MuonExchange) -> Iterator[MuonMatrix]:
    trained = {slot.spec.name for slot in bucket.slots if slot.parameter.requires_grad}
    for matrix in exchange.matrices:
        if matrix.pieces[0].bucket == bucket.name and matrix.name in trained:
            yield matrix


def _part(bucket: Bucket, piece: MuonPiece, trained: list[TrainedRange]) -> TrainedRange:
    place = bucket.within_own_slice(
        slice(piece.bucket_start, piece.bucket_start + piece.num_elements)
    )
    assert place.stop - place.start == piece.num_elements, f"{bucket.name}: a piece is cut"
    (decays,) = [
        decays for part, decays in trained if part.start <= place.start and place.stop <= part.stop
    ]
    return place, decays
