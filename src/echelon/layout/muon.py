# SPDX-License-Identifier: Apache-2.0
"""Which rank runs Newton-Schulz on which matrix, and which pieces travel for it: no tensors.

Muon (Jordan et al., 2024) needs whole matrices, but ranks hold pieces: a flat range of the bucket
(their ZeRO slice) of a rectangle (their tensor slice). So the ranks of a pipeline stage share out
its matrices: each matrix has one owner, which gets the momentum-updated gradient of the pieces of
others, orthogonalises the matrix once, and sends every holder its pieces of the result. The
optimizer executes exactly this plan, and `muon_elements` adds up what it sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from echelon.core.axis import LOSS_AXES, Axis
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Plan
from echelon.layout.buckets import plan_buckets, shard_degree
from echelon.layout.slots import SlicePart, slice_parts, slot_ranges, trained_buckets
from echelon.layout.stage import RankPart, expert_index_of, held_parameters, pieces_of, rank_part

STAGE_AXES = (*LOSS_AXES, Axis.TP)
"""The axes over which the ranks of one stage differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonPiece:
    """Name one run of a matrix that no rank holds only a part of.

    It is elements `start` to `stop` of the flat tensor slice `tensor_index` of the matrix (its
    `local_shape`), which lie at `bucket_start` of the whole bucket `bucket` on every rank of
    `holders`. `sender` is the holder that gives it to the owner (it may be the owner itself).
    """

    bucket: str
    bucket_start: int
    tensor_index: int
    start: int
    stop: int
    sender: int
    holders: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Return the length of the run."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonMatrix:
    """Say which rank orthogonalises a matrix, and of which pieces it consists.

    The pieces, in order of `tensor_index` and `start`, cover each tensor slice once; a matrix that
    is not split (`split_dim` None) has the one tensor slice 0, which every tensor rank holds.
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    split_dim: int | None
    owner: int
    pieces: tuple[MuonPiece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonExchange:
    """Hold the exchange of one stage: its ranks in group order, its matrices in bucket order."""

    ranks: tuple[int, ...]
    matrices: tuple[MuonMatrix, ...]

    def owned(self, rank: int) -> tuple[MuonMatrix, ...]:
        """Return the matrices that `rank` orthogonalises."""
        return tuple(matrix for matrix in self.matrices if matrix.owner == rank)


def muon_exchange(plan: Plan, pp_rank: int, expert_index: int = 0) -> MuonExchange:
    """Return who owns which matrix of a pipeline rank and which pieces travel for it.

    Of routed experts it has those of one share, whose matrices the ranks that hold it share out.
    """
    here = {Axis.PP: pp_rank}
    ranks = plan.mesh.group(plan.mesh.rank(here), *STAGE_AXES)
    found = [*_found(plan, rank_part(plan, pp_rank, expert_index))]
    load = dict.fromkeys(ranks, 0)
    matrices: list[MuonMatrix] = []
    for expert in (False, True):
        places = {
            rank: _place(plan, rank, expert=expert)
            for rank in ranks
            if not expert or expert_index_of(plan, rank) == expert_index
        }
        alike = [one for one in found if (one[0].expert is not None) is expert]
        owners = _owners(plan, places, alike, load)
        matrices += [_matrix(plan, places, *one) for one in zip(alike, owners, strict=True)]
    order = {spec.name: place for place, (spec, _, _) in enumerate(found)}
    matrices.sort(key=lambda matrix: order[matrix.name])
    return MuonExchange(ranks=ranks, matrices=tuple(matrices))


def newton_schulz_flops(shape: tuple[int, ...], steps: int) -> int:
    """Return the FLOPs of `steps` quintic iterations: X X', its square, and their product with X.

    With m <= n the sides of the matrix: 2 m m n + 2 m m m + 2 m m n for each step.
    """
    short, long = sorted(shape)
    return steps * (4 * short * short * long + 2 * short**3)


def muon_elements(exchange: MuonExchange, rank: int) -> tuple[int, int]:
    """Return the elements that `rank` sends: pieces to owners, and results to holders."""
    pieces = results = 0
    for matrix in exchange.matrices:
        for piece in matrix.pieces:
            if matrix.owner == rank:
                others = len(piece.holders) - (rank in piece.holders)
                results += others * piece.num_elements
            elif piece.sender == rank:
                pieces += piece.num_elements
    return pieces, results


_Place: TypeAlias = tuple[int, int, int]
"""The replica, the slice and the tensor index of a rank (stage 0: only replicas)."""

_Found: TypeAlias = tuple[ParameterSpec, str, tuple[SlicePart, ...]]
"""A matrix, its bucket, and the parts of its local tensor that the slices of the bucket hold."""


def _found(plan: Plan, part: RankPart) -> Iterator[_Found]:
    specs = {spec.name: spec for spec in held_parameters(plan, part)}
    for bucket in trained_buckets(plan_buckets(plan, part)):
        if OPTIMIZERS[bucket.update].needs_whole_matrices:
            for slot in slot_ranges(plan, bucket, specs):
                yield slot.spec, bucket.name, slice_parts(plan, bucket, slot)


def _owners(
    plan: Plan, places: dict[int, _Place], found: list[_Found], load: dict[int, int]
) -> list[int]:
    """Give each matrix, the costly ones first, to the rank with the least to compute so far.

    `load` is what each has to compute already; it grows. Of ranks with as little, the one that
    holds most of the matrix: what it holds is not sent.
    """
    steps = plan.mathematics.optimizer.newton_schulz_steps
    costs = [newton_schulz_flops(spec.shape, steps) for spec, _, _ in found]
    owners = [0] * len(found)
    for index in sorted(range(len(found)), key=lambda i: -costs[i]):
        held = {part.index: part.stop - part.start for part in found[index][2]}
        least = min(load[rank] for rank in places)
        idle = [rank for rank in places if load[rank] == least]
        owner = max(idle, key=lambda rank: held.get(places[rank][1], 0))
        owners[index] = owner
        load[owner] += costs[index]
    return owners


def _matrix(plan: Plan, places: dict[int, _Place], found: _Found, owner: int) -> MuonMatrix:
    spec, bucket, parts = found
    tp, split = pieces_of(plan, spec), spec.split_dim is not None
    by_piece: dict[tuple[int, int], list[int]] = {}
    for rank, (_, index, tensor) in places.items():
        by_piece.setdefault((index, tensor if split else 0), []).append(rank)
    own_replica, _, own_tensor = places[owner]
    near = {
        (index, tensor): rank
        for rank, (replica, index, tensor) in places.items()
        if replica == own_replica
    }
    pieces: list[MuonPiece] = []
    for tensor_index in range(tp if split else 1):
        for part in parts:
            holders = by_piece[part.index, tensor_index]
            sender = near[part.index, tensor_index if split else own_tensor]
            pieces.append(
                MuonPiece(
                    bucket=bucket,
                    bucket_start=part.bucket_start,
                    tensor_index=tensor_index,
                    start=part.start,
                    stop=part.stop,
                    sender=sender,
                    holders=tuple(holders),
                )
            )
    local = spec.local_shape(tp)
    assert sum(piece.num_elements for piece in pieces) == prod(spec.shape)
    return MuonMatrix(
        name=spec.name,
        shape=spec.shape,
        local_shape=local,
        split_dim=spec.split_dim,
        owner=owner,
        pieces=tuple(pieces),
    )


def _place(plan: Plan, rank: int, *, expert: bool) -> _Place:
    mesh, expert_tp = plan.mesh, plan.layout.experts.expert_tp
    here = mesh.coordinates(rank)
    if expert:
        fold = mesh.expert_fold(expert_tp=expert_tp)
        copies = mesh.expert_shard_degree(expert_tp=expert_tp)
        data = here[Axis.DP_REPLICATE] * copies + mesh.group(rank, *fold).index(rank) // mesh.ep
    else:
        data = 0
        for axis in LOSS_AXES:
            data = data * mesh.degree(axis) + here[axis]
    replica, index = divmod(data, shard_degree(plan, expert=expert))
    whole = expert and expert_tp == 1
    return replica, index, 0 if whole else here[Axis.TP]
