# SPDX-License-Identifier: Apache-2.0
"""Which message carries which piece of Muon's matrices, from the view of one rank: no tensors.

`layout/muon.py` says which pieces travel; here the pieces of one bucket are packed into one message
for each pair of ranks and direction. Both ends pack in the same order, so nothing else is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from echelon.layout.muon import MuonExchange, MuonMatrix, MuonPiece
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.transport.collectives import Group
from echelon.training.optimizer.trained_ranges import TrainedRange, trained_ranges


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
