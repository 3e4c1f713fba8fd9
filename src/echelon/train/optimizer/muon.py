"""Muon (Jordan et al., 2024) on slices: momentum where the slices are, Newton-Schulz at one owner.

Every holder of a slice updates its momentum; the pieces of a matrix go to its owner, which makes it
orthogonal once, and the pieces of the result go to all that hold a piece. Three steps for each
bucket, so that several buckets are on their way at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from echelon.core.plan import Optimizer
from echelon.cost.muon import MuonMatrix
from echelon.parallel.buckets import Bucket
from echelon.parallel.collectives import Pending
from echelon.train.optimizer.links import HeldPiece, Message, MuonLinks, Run, muon_layout
from echelon.train.optimizer.newton_schulz import newton_schulz, step_size
from echelon.train.optimizer.parts import Operands, scale
from echelon.train.optimizer.sgd import fused_sgd


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A bucket on its way: the matrices that this rank owns, flat, and what it receives."""

    matrices: dict[str, torch.Tensor]
    received: dict[int, torch.Tensor]
    pending: Pending
    like: torch.Tensor


class Muon:
    """Update the matrices of a pipeline stage together with its other ranks."""

    def __init__(self, settings: Optimizer, links: MuonLinks, buckets: Sequence[Bucket]) -> None:
        """Learn who owns the matrices of `buckets`; the ranks of the stage do so together."""
        self._settings, self._group = settings, links.group
        self._layouts = {bucket.name: muon_layout(bucket, links) for bucket in buckets}
        self._flights: dict[str, _Flight] = {}
        # NCCL opens the links of a group in its first call, in which all members must take part;
        # in an exchange a member may have none.
        self._group.gather_objects(None)

    def send_pieces(
        self, bucket: Bucket, gradient: torch.Tensor, momentum: torch.Tensor, factor: float
    ) -> None:
        """Update the momentum of a slice and start to send its pieces to the owners."""
        layout, beta = self._layouts[bucket.name], self._settings.momentum
        matrices = {matrix.name: momentum.new_empty(prod(matrix.shape)) for matrix in layout.owned}
        sends = _empty(layout.pieces_out, momentum)
        received = _empty(layout.pieces_in, momentum)
        for piece in layout.held:
            place = piece.part.place
            scaled = scale(gradient[place], factor, momentum.dtype)
            torch.add(scaled, momentum[place], alpha=beta, out=momentum[place])
            if piece.outgoing is not None:
                home = _home(piece, matrices, sends)[piece.outgoing.place]
                torch.add(scaled, momentum[place], alpha=beta, out=home)
        self._flights[bucket.name] = _Flight(
            matrices=matrices,
            received=received,
            pending=self._group.exchange(sends, received, name=f"muon.pieces.{bucket.name}"),
            like=momentum.new_empty(0),
        )

    def orthogonalise(self, bucket: Bucket) -> None:
        """Make this rank's matrices of a bucket orthogonal and start to send the results.

        A result is the step at a learning rate of 1, in the dtype of the momentum.
        """
        layout, flight = self._layouts[bucket.name], self._flights[bucket.name]
        flight.pending.wait()
        for place, message in layout.pieces_in.items():
            start = 0
            for matrix, run in message.runs:
                piece = flight.received[place][start : start + run.length]
                flight.matrices[matrix.name][run.place] = piece
                start += run.length
        for matrix in layout.owned:
            flight.matrices[matrix.name] = self._step(matrix, flight.matrices[matrix.name])
        flight.received = _empty(layout.results_in, flight.like)
        sends = _packed(layout.results_out, flight.matrices)
        flight.pending = self._group.exchange(
            sends, flight.received, name=f"muon.results.{bucket.name}"
        )

    def apply(self, bucket: Bucket, target: torch.Tensor, rate: float) -> None:
        """Subtract weight decay and the results from a slice."""
        layout, flight = self._layouts[bucket.name], self._flights.pop(bucket.name)
        flight.pending.wait()
        for decays in (True, False):
            held = [piece for piece in layout.held if piece.part.decays is decays]
            # Weight decay that is coupled to a gradient without momentum is decoupled decay.
            operands = Operands(
                targets=[target[piece.part.place] for piece in held],
                gradients=[
                    _home(piece, flight.matrices, flight.received)[piece.result.place]
                    for piece in held
                ],
                state=(),
                rate=rate,
                weight_decay=self._settings.weight_decay if decays else 0.0,
            )
            fused_sgd(operands, [], 0.0)

    def _step(self, matrix: MuonMatrix, flat: torch.Tensor) -> torch.Tensor:
        x_MK = newton_schulz(_rows(matrix, flat), self._settings.newton_schulz_steps)
        return _flat(matrix, (x_MK * step_size(matrix.shape)).to(flat.dtype))


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


def _home(
    piece: HeldPiece, matrices: Mapping[str, torch.Tensor], messages: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """Return what a piece is a part of: the matrix, where it is this rank's, or a message."""
    return matrices[piece.matrix] if piece.matrix in matrices else messages[piece.owner]


def _empty(messages: Mapping[int, Message], like: torch.Tensor) -> dict[int, torch.Tensor]:
    return {place: like.new_empty(message.length) for place, message in messages.items()}


def _packed(
    messages: Mapping[int, Message], matrices: Mapping[str, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return the messages with their content; replicas are sent the same tensor."""
    packed: dict[tuple[tuple[str, Run], ...], torch.Tensor] = {}
    for message in messages.values():
        content = message.content()
        if content not in packed:
            packed[content] = torch.cat([matrices[name][run.place] for name, run in content])
    return {place: packed[message.content()] for place, message in messages.items()}
