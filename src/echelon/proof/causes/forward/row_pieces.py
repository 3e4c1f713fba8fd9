# SPDX-License-Identifier: Apache-2.0
"""Loops over pieces of rows, and tiles of attention, that go wrong in one of them, on one device.

A kernel takes the rows of a rank a piece at a time, and attention the visible pairs a tile at a
time. What is forgotten of the last piece, or of one tile, leaves all other rows right.
On a ring of tensor ranks a rank multiplies the rows of every rank, chunk by chunk, and adds its
part to the sum of each chunk: a part may go to other rows, or be added more or less often than
once.

Shape suffixes: T queries, S keys, B sequences; E the rotary dims; of chunks N rows of all tensor
ranks, I inputs of a layer, D hidden; see `models/operations.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from echelon.core.attention_mask import PositionRun
from echelon.core.piece_sizes import PROOF_PIECES
from echelon.core.plan import Plan
from echelon.layout.attention_tiles import tiles_between
from echelon.models.attention.interface import band_visible
from echelon.models.batch import TokenBatch, positions_of
from echelon.models.operations import Operations
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.forward.attention import CountPairs, counted_attention
from echelon.proof.causes.forward.variants import Variant, positions_tensor
from echelon.proof.causes.token_ranks import context_positions

_MOST_ROWS = 32
"""Rows of a rank up to which all pairs of pieces, of queries and of keys, are tried."""


def row_piece_variants(plan: Plan) -> Iterator[Variant]:
    """Return the mistakes in one piece of rows or one tile, the most likely first."""
    if plan.model.positions == "rope":
        yield from _not_turned(plan)
    yield from _tiles(plan)


class PartlyTurned(Operations):
    """Leave the positions of some heads as they are: those that `plain_T` says."""

    def __init__(self, heads: int, plain_of_all_T: torch.Tensor, plain_T: torch.Tensor) -> None:
        """Say which rows of tensors with all `heads` are not turned, and of those with fewer."""
        self.num_heads, self.plain_of_all_T, self.plain_T = heads, plain_of_all_T, plain_T

    def rotate(self, x: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
        """Return x with the other rows turned."""
        plain_T = self.plain_of_all_T if x.shape[2] == self.num_heads else self.plain_T
        return torch.where(plain_T[:, None, None, None], x, super().rotate(x, cos_TE, sin_TE))


def _not_turned(plan: Plan) -> Iterator[Variant]:
    """Leave the last or the first rows of queries, of keys, or of both without their positions.

    Pieces have as many elements, so those of queries have fewer rows than those of keys.
    """
    row_T = context_positions(plan.placement).local_T
    rows, heads = int(row_T.max()) + 1, plan.model.heads
    tensor = positions_tensor(plan.model)
    if rows > _MOST_ROWS:
        return
    starts = sorted(product(range(rows + 1), repeat=2), key=lambda pair: abs(pair[0] - pair[1]))
    for of_q, of_k in starts:
        if min(of_q, of_k) == rows or max(of_q, of_k) == 0:
            continue
        told = [f"{what} {first}:{rows}" for what, first in (("queries", of_q), ("keys", of_k))]
        says = " and ".join(
            one for one, first in zip(told, (of_q, of_k), strict=True) if first < rows
        )
        finding = ProofFinding("positions", f"{says} are not turned: rows of a rank", tensor=tensor)
        yield Variant(finding, PartlyTurned(heads, row_T >= of_q, row_T >= of_k))
    for stop in range(1, rows):
        says = f"queries and keys 0:{stop} are not turned: rows of a rank"
        finding = ProofFinding("positions", says, tensor=tensor)
        yield Variant(finding, PartlyTurned(heads, row_T < stop, row_T < stop))


@dataclass(frozen=True, slots=True)
class CalledTile:
    """Hold a tile of attention: its place among those of a call, its positions, what it sees."""

    number: int
    is_last: bool
    sequences: slice
    rows: torch.Tensor
    columns: torch.Tensor
    seen_TS: torch.Tensor

    def describe(self) -> str:
        """Return the tile in words."""
        q, k = (f"{int(at.min())} to {int(at.max())}" for at in (self.rows, self.columns))
        return f"of queries {q} and keys {k}"


def called_tiles(plan: Plan, batch: TokenBatch) -> Iterator[CalledTile]:
    """Yield the tiles of all calls of a kernel, rank by rank and block by block."""
    placement, mask = plan.placement, plan.model.mask
    n, whole = placement.ring_degree, (PositionRun(0, 1, placement.length),)
    for place in range(n):
        queries, number = placement.ring_runs(place), 0
        blocks = [placement.ring_runs((place + step) % n) for step in range(n)]
        for keys in (whole,) if n > 1 and plan.layout.context.record.gathers_keys else blocks:
            tiles = tiles_between(queries, keys, mask, batch.documents, PROOF_PIECES.tile_rows)
            for index, tile in enumerate(tiles):
                rows = positions_of(queries, torch.device("cpu"))[tile.q]
                columns = positions_of(keys, torch.device("cpu"))[tile.k]
                seen_TS = band_visible(tile.band, len(rows), len(columns), rows.device)
                last = 0 < index == len(tiles) - 1
                yield CalledTile(number, last, tile.sequences, rows, columns, seen_TS)
                number += 1


def _tiles(plan: Plan) -> Iterator[Variant]:
    """Mask nothing inside of a tile, or leave it out: the last ones of several, or any one."""
    axis = "cp" if plan.mesh.cp > 1 else ""
    tokens_BT = torch.zeros(1, plan.mathematics.sequence_length, dtype=torch.int64)
    whole = TokenBatch.from_rows(tokens_BT, tokens_BT, torch.zeros(1, dtype=torch.int64))
    tiles = list(called_tiles(plan, whole)) if plan.mathematics.documents == "joined" else []
    for is_met, factor, says in (
        (True, "not masked", "is not masked inside: its queries meet all its keys"),
        (False, "never met", "is left out: its queries meet none of its keys"),
    ):
        for of, where in _some(tiles):
            finding = ProofFinding(factor, f"{where} {says}", axis, tensor="layers.0.attention")
            yield Variant(finding, counted_attention(_counted(of, is_met=is_met)))


def _some(tiles: Sequence[CalledTile]) -> Iterator[tuple[Sequence[CalledTile], str]]:
    last = [tile for tile in tiles if tile.is_last]
    if len(last) > 1:
        yield last, f"the last of several tiles, as that {last[0].describe()},"
    yield from (([tile], f"the tile {tile.describe()}") for tile in tiles)


def _counted(tiles: Sequence[CalledTile], *, is_met: bool) -> CountPairs:
    def counted(seen: torch.Tensor, _: TokenBatch) -> torch.Tensor:
        found = seen.clone()
        for tile in tiles:
            at = torch.meshgrid(tile.rows, tile.columns, indexing="ij")
            inside = (..., at[0], at[1])
            found[inside] = is_met or (found[inside] & ~tile.seen_TS)
        return found

    return counted


_TIMES = {
    2.0: "the sum that comes to the rank which adds last is added twice",
    0.0: "the sum that comes to the rank which adds last is not added",
}


def chunk_variants(plan: Plan) -> Iterator[Variant]:
    """Return the mistakes in chunks of rows, where a plan has any, the most likely first."""
    if not plan.layout.tp_ring or plan.mesh.cp > 1:
        return
    tp = plan.mesh.tp
    for times, says in _TIMES.items():
        finding = ProofFinding("chunk", f"of a chunk of rows {says}", "tp", value=times)
        yield Variant(finding, _MovedChunks(tp, came=times))
    for by in range(1, tp):
        says = f"the product of a chunk is taken for rows of tensor rank + {by}"
        yield Variant(ProofFinding("rows of a chunk", says, "tp"), _MovedChunks(tp, into=by))


class _MovedChunks(Operations):
    """Let chunks of column layers go into other rows, and what comes of sums count otherwise."""

    def __init__(self, tp: int, *, into: int = 0, came: float = 1.0) -> None:
        """Move products of a rank's rows on by `into` ranks; add what comes `came` times."""
        self.tp, self.into, self.came = tp, into, came

    def project_in(self, x_ND: torch.Tensor, linears: Sequence[nn.Linear]) -> torch.Tensor:
        """Return the outputs, of other rows."""
        made = super().project_in(x_ND, linears)
        return made.roll(self.into * (len(made) // self.tp), dims=0)

    def project_out(self, x_NI: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        """Return the sum of what all ranks make, for each chunk the last of them its own part."""
        if self.came == 1.0:
            return super().project_out(x_NI, linear)
        parts_n = x_NI.chunk(self.tp), linear.weight.chunk(self.tp, dim=1)
        own = [
            rows.chunk(self.tp, dim=1)[rank] @ columns.t()
            for rank, (rows, columns) in enumerate(zip(*parts_n, strict=True))
        ]
        bias: torch.Tensor | float = 0.0 if linear.bias is None else linear.bias
        came_ND = x_NI @ linear.weight.t() - torch.cat(own)
        return torch.cat(own) + self.came * came_ND + bias
