# SPDX-License-Identifier: Apache-2.0
"""The blocks of a plan made few, stage by stage, with every order between them kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

_ALL_KEEP_SEVERAL = 2
"""Stages up to which all keep several blocks; of more stages, one does."""


def shrink_stages(
    stages: tuple[tuple[int, ...], ...], *, unit: int = 1, least: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Return as many stages with few blocks each; uneven ones stay uneven, empty ones empty.

    Each stage gets the rank of its block count among the different counts, so an order between
    two stages is kept. Up to two stages keep `unit` + 1 blocks each where they have as many, so a
    block that feeds a block of its own stage, and of another unit, is there; of more stages one
    of the longest does, even where all are as long. There are `least` blocks in all, or as many
    as there were.
    """
    counts = [len(stage) for stage in stages]
    ranks = {count: index for index, count in enumerate(sorted({c for c in counts if c}), start=1)}
    smallest = min(ranks, default=0)
    extra = min(unit, smallest - 1) if smallest and len(stages) <= _ALL_KEEP_SEVERAL else 0
    small = [ranks[count] + extra if count else 0 for count in counts]
    longest = max(counts, default=0)
    # One in the middle of the pipeline, where there is one: it has neither end beside its blocks.
    middle = max(range(len(counts)), key=lambda i: (counts[i] == longest, 0 < i < len(counts) - 1))
    small[middle] = max(small[middle], min(longest, unit + 1))
    while sum(small) < min(least, sum(counts)):
        small = [min(few + 1, count) for few, count in zip(small, counts, strict=True)]
    return stages_of(small)


def stages_of(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return stages of so many blocks each, one after the other."""
    return tuple(tuple(range(*ends)) for ends in pairwise(accumulate(counts, initial=0)))
