"""The V-shaped placement: a rank holds a stage on the way down and one on the way back.

Rank r of p holds stages r and 2p-1-r, so the first and the last stage are on rank 0 (the embedding
and the head that may share its weights, and the loss), and stages p-1 and p are neighbours on one
rank. Qi et al. (arXiv 2401.10241), section 6.
"""

from __future__ import annotations

from typing import ClassVar

from echelon.schedule.builder import Builder


class VShaped(Builder):
    """Place two stages on each rank in the shape of a V."""

    __slots__ = ()

    places: ClassVar[str] = (
        "two stages on each pipeline rank, rank r having stages r and 2 x num_ranks - 1 - r"
    )
    default_virtual_stages: ClassVar[int] = 2

    @classmethod
    def fits_virtual_stages(cls, virtual_stages: int) -> bool:
        """Return whether each rank holds two stages."""
        return virtual_stages == 2

    @classmethod
    def owners(cls, num_stages: int, num_ranks: int) -> tuple[int, ...]:
        """Return the rank that owns each stage: 0 to p-1, and back."""
        return tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))
