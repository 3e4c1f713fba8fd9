"""What a mesh leaves open: how ZeRO shares out, the order of a pipeline, what is recomputed.

Each list is small and the same for many rows, so it is made once for what it depends on.
Optimizer state rests on the device: what offload costs is known for an assumed link of the host
(`cost/lattice/offload.py`). It is tried where it is pinned, and where nothing fits without it.

Left out, because it cannot be better in either time or memory than another choice with the same
rest (`tests/planner/test_sweep.py` compares with a search that leaves nothing out):

    gpipe          where 1f1b is legal: as much waiting, more in flight
    breadth-first  where it is not pinned: as much waiting as interleaved, more in flight
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from echelon.cost.lattice.of_plan import schedule_number
from echelon.planner.lattice import divisors
from echelon.planner.pins import NO_RECOMPUTE, Pins
from echelon.schedule.build import SCHEDULES

MOST_VIRTUAL = 12
MOST_APART = 8
MOST_STAGE = 3


@dataclass(frozen=True, slots=True)
class Shares:
    """Say what data ranks share out: ZeRO's stage, over how many ranks, and where it rests."""

    zero: int
    dp_replicate: int
    dp_shard: int
    reshard: int = 1
    offload: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """Name a schedule with its stages on a rank, and the microbatches that it takes."""

    name: str
    virtual: int
    least: int
    multiple: int
    most: int = 2**62

    @property
    def schedule(self) -> int:
        """Return the number of the schedule's closed form."""
        return int(schedule_number(self.name))

    def allows(self, num_microbatches: int) -> bool:
        """Return whether it takes so many microbatches."""
        enough = self.least <= num_microbatches <= self.most
        return enough and num_microbatches % self.multiple == 0


@lru_cache(maxsize=4096)
def shares_of(dp: int, cp: int, ep: int, inner: int, *, offload: bool) -> tuple[Shares, ...]:
    """Return every way for `dp` x `cp` ranks to share out; ep folds over dp_shard x `inner`.

    `inner` is cp, x tp where experts are whole.
    """
    found: list[Shares] = []
    for shard in divisors(dp):
        if shard * inner % ep:
            continue
        # Stage 0 cuts nothing: shards are there for experts only, as few as they need.
        if not offload and not found:
            found.append(Shares(0, dp // shard, shard))
        alone = shard * cp == 1
        if not alone or offload:
            # One rank has nothing to share out; what it can is leave optimizer state to its host.
            for stage in range(1, MOST_STAGE + (not alone)):
                found.append(Shares(stage, dp // shard, shard, offload=int(offload)))
                if stage == MOST_STAGE:
                    found.append(Shares(stage, dp // shard, shard, 0, int(offload)))
    return tuple(found)


def pinned_shares(pins: Pins, key: tuple[int, ...], *, offload: bool) -> tuple[Shares, ...]:
    """Return those of `shares_of` that pins let through; units are gathered twice, if not pinned.

    `key` are the arguments of `shares_of` in their order.

    That they stay whole after forward takes memory that is not counted yet.
    """
    dp, cp, ep, inner = key
    wanted = pins.of("reshard") or (1,)
    return tuple(
        one
        for one in shares_of(dp, cp, ep, inner, offload=offload)
        if (one.reshard in wanted or (one.zero < MOST_STAGE and one.reshard))
        and pins.allow("zero", one.zero)
        and pins.allow("dp_replicate", one.dp_replicate)
        and pins.allow("dp_shard", one.dp_shard)
    )


def orders_of(pins: Pins, pp: int, layers: int) -> tuple[Order, ...]:
    """Return the schedules for so many pipeline ranks, with every number of stages on a rank.

    On one rank there is nothing to order: 1f1b stands for all.
    """
    if pp == 1:
        plain = pins.allow("schedule", "1f1b") and pins.allow("virtual", 1)
        return (Order("1f1b", 1, 1, 1),) if plain else ()
    wanted = pins.of("schedule")
    found: list[Order] = []
    for name in map(str, SCHEDULES if wanted is None else wanted):
        builder = SCHEDULES[name]
        if wanted is None and name in NOT_SEARCHED:
            continue
        most = pp - 1 if name == "gpipe" and wanted is None else 2**62
        for virtual in range(1, max(1, min(MOST_VIRTUAL, layers // pp)) + 1):
            fits = builder.fits_stages(virtual * pp, pp) and virtual * pp <= layers
            if fits and pins.allow("virtual", virtual):
                least, multiple = builder.minimum_microbatches(pp), builder.microbatch_multiple
                found.append(Order(name, virtual, least, multiple, most))
    return tuple(found)


NOT_SEARCHED = ("breadth-first", "dualpipe")
"""Of dualpipe a rank holds two stages, whose weights the lattice counts once: only where pinned."""


def recomputes_of(pins: Pins, layers: int) -> tuple[tuple[int, float], ...]:
    """Return how far apart recomputed blocks can be, with the share of blocks; least work first."""
    every = [NO_RECOMPUTE, *range(1, MOST_APART + 1)]
    wanted = pins.of("recompute")
    if wanted is not None:
        every = [int(one) for one in wanted]
    found = {(one, ceil(layers / one) / layers if one else 0.0) for one in every if one <= layers}
    return tuple(sorted(found, key=lambda item: item[1]))
