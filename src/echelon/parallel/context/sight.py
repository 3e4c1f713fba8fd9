"""What the queries of a batch may meet, and over which ring."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.attention_mask import AttentionMask, DocumentStarts, Run
from echelon.core.placement import Placement
from echelon.models.attention.pieces import Piece, pieces_between
from echelon.parallel.collectives import Group
from echelon.parallel.gradients import GradientStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Hold the mask, the documents of each sequence, and the cap of the scores."""

    mask: AttentionMask
    documents: DocumentStarts | None
    soft_cap: float | None

    def pieces(self, queries: tuple[Run, ...], keys: tuple[Run, ...]) -> tuple[Piece, ...]:
        """Return what of the rows of `queries` and of `keys` is to be computed."""
        return pieces_between(queries, keys, self.mask, self.documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Hold the ring of this rank, which positions its places hold, and what a query meets there.

    `store` has work for the time of a transfer.
    """

    ring: Group
    placement: Placement
    sight: Sight
    store: GradientStore
