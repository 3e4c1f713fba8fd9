"""Which message carries which piece of Muon's matrices, from the view of one rank: no tensors.

`cost/muon.py` says which pieces travel; here the pieces of one bucket are packed into one message
for each pair of ranks and direction. Both ends pack in the same order, so nothing else is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from echelon.cost.muon import MuonExchange, MuonMatrix, MuonPiece
from echelon.parallel.buckets import Bucket
from echelon.parallel.collectives import Group
from echelon.train.optimizer.parts import Part, parts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonLinks:
    """The ranks of one pipeline stage as a group, and what they exchange."""

    group: Group
    exchange: MuonExchange

    @property
    def rank(self) -> int:
        """Return this rank."""
        return self.group.ranks[self.group.index]

    def place(self, rank: int) -> int:
        """Return the place of a rank in the group."""
        return self.group.ranks.index(rank)


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of a flat tensor: those of a message, of a matrix, or of this rank's slice."""

    start: int
    length: int

    @property
    def place(self) -> slice:
        """Return the range."""
        return slice(self.start, self.start + self.length)


@dataclass(slots=True)
class Message:
    """What one other rank is sent, or sends: the runs of a matrix that it consists of, in order."""

    runs: list[tuple[MuonMatrix, Run]] = field(default_factory=list)
    length: int = 0

    def add(self, matrix: MuonMatrix, piece: MuonPiece) -> Run:
        """Append a piece; return where in the message it is."""
        self.runs.append((matrix, in_matrix(matrix, piece)))
        self.length += piece.num_elements
        return Run(self.length - piece.num_elements, piece.num_elements)

    def content(self) -> tuple[tuple[str, Run], ...]:
        """Return what tells this message from others of the same rank and bucket."""
        return tuple((matrix.name, run) for matrix, run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPiece:
    """A piece of a matrix in this rank's slice, and the owner of that matrix.

    `result` is where in the owner's message the result is, or in the matrix where this rank owns
    it; `outgoing` where in the message to the owner (or in the matrix) it goes, unless another
    holder sends it.
    """

    matrix: str
    part: Part
    owner: int
    outgoing: Run | None
    result: Run


@dataclass(slots=True)
class MuonLayout:
    """The messages of one rank for one bucket, by the place of the other rank in the group."""

    owned: list[MuonMatrix] = field(default_factory=list)
    held: list[HeldPiece] = field(default_factory=list)
    pieces_out: dict[int, Message] = field(default_factory=dict)
    pieces_in: dict[int, Message] = field(default_factory=dict)
    results_out: dict[int, Message] = field(default_factory=dict)
    results_in: dict[int, Message] = field(default_factory=dict)


def muon_layout(bucket: Bucket, links: MuonLinks) -> MuonLayout:
    """Return what this rank holds, owns, sends and receives for the matrices of a bucket."""
    layout, trained = MuonLayout(), parts_of(bucket)
    for matrix in _matrices(bucket, links.exchange):
        if matrix.owner == links.rank:
            layout.owned.append(matrix)
            _as_owner(layout, links, matrix)
        for piece in matrix.pieces:
            if links.rank in piece.holders:
                part = _part(bucket, piece, trained)
                layout.held.append(_as_holder(layout, links, (matrix, piece), part))
    return layout


def in_matrix(matrix: MuonMatrix, piece: MuonPiece) -> Run:
    """Return where a piece lies in a matrix that is stored tensor slice after tensor slice."""
    start = piece.tensor_index * prod(matrix.local_shape) + piece.start
    return Run(start, piece.num_elements)


def _as_owner(layout: MuonLayout, links: MuonLinks, matrix: MuonMatrix) -> None:
    for piece in matrix.pieces:
        if piece.sender != links.rank:
            sender = links.place(piece.sender)
            layout.pieces_in.setdefault(sender, Message()).add(matrix, piece)
        for holder in piece.holders:
            if holder != links.rank:
                layout.results_out.setdefault(links.place(holder), Message()).add(matrix, piece)


def _as_holder(
    layout: MuonLayout, links: MuonLinks, found: tuple[MuonMatrix, MuonPiece], part: Part
) -> HeldPiece:
    matrix, piece = found
    owner = links.place(matrix.owner)
    outgoing = result = in_matrix(matrix, piece)
    if matrix.owner != links.rank:
        result = layout.results_in.setdefault(owner, Message()).add(matrix, piece)
        if piece.sender == links.rank:
            outgoing = layout.pieces_out.setdefault(owner, Message()).add(matrix, piece)
    return HeldPiece(
        matrix=matrix.name,
        part=part,
        owner=owner,
        outgoing=outgoing if piece.sender == links.rank else None,
        result=result,
    )


def _matrices(bucket: Bucket, exchange: MuonExchange) -> Iterator[MuonMatrix]:
    trained = {slot.spec.name for slot in bucket.slots if slot.parameter.requires_grad}
    for matrix in exchange.matrices:
        if matrix.pieces[0].bucket == bucket.name and matrix.name in trained:
            yield matrix


def _part(bucket: Bucket, piece: MuonPiece, trained: list[Part]) -> Part:
    place = bucket.within_own(slice(piece.bucket_start, piece.bucket_start + piece.num_elements))
    assert place.stop - place.start == piece.num_elements, f"{bucket.name}: a piece is cut"
    (decays,) = [
        part.decays
        for part in trained
        if part.place.start <= place.start and place.stop <= part.place.stop
    ]
    return Part(place, decays)
