"""What a mesh leaves open: how ZeRO shares out, and the order of a pipeline.

What is recomputed, `recompute_options.py` says. Each list is small and the same for many rows, so
it is made once for what it depends on. Optimizer state rests on the device: what offload costs is
known for an assumed link of the host (`cost/seconds/data.py`). It is tried where it is pinned, and
where nothing fits without it.

Left out, because it cannot be better in either time or memory than another choice with the same
rest (`tests/planner/search/test_sweep.py` compares with a search that leaves nothing out):

    gpipe          where 1f1b is legal: as much waiting, more in flight
    breadth-first  where it is not pinned: as much waiting as interleaved, more in flight

Of dualpipe a rank holds two stages, whose weights the closed forms count once: only where pinned,
too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from echelon.cost.seconds.pipeline import schedule_index
from echelon.planner.search.legal_meshes import divisors
from echelon.planner.search.pins import Pins
from echelon.schedule.build import PLAIN_SCHEDULE, SCHEDULES

MOST_VIRTUAL = 12  # stages of a rank
MOST_STAGE = 3  # of ZeRO


@dataclass(frozen=True, slots=True)
class ZeroOption:
    """Say what data ranks share out: ZeRO's stage, over how many ranks, and where it rests."""

    zero: int
    dp_replicate: int
    dp_shard: int
    reshard: int = 1
    offload: int = 0


@dataclass(frozen=True, slots=True)
class ScheduleOption:
    """Name a schedule with its stages on a rank, and the microbatches that it takes."""

    name: str
    virtual: int
    min_microbatches: int
    microbatch_multiple: int
    max_microbatches: int = 2**62

    @property
    def schedule(self) -> int:
        """Return the number of the schedule's closed form."""
        return int(schedule_index(self.name))

    def allows(self, num_microbatches: int) -> bool:
        """Return whether it takes so many microbatches."""
        enough = self.min_microbatches <= num_microbatches <= self.max_microbatches
        return enough and num_microbatches % self.microbatch_multiple == 0


@lru_cache(maxsize=4096)
def zero_options(dp: int, cp: int, ep: int, inner: int, *, offload: bool) -> tuple[ZeroOption, ...]:
    """Return every way for `dp` x `cp` ranks to share out; ep folds over dp_shard x `inner`.

    `inner` is cp, x tp where experts are whole.
    """
    found: list[ZeroOption] = []
    for shard in divisors(dp):
        if shard * inner % ep:
            continue
        # Stage 0 cuts nothing: shards are there for experts only, as few as they need.
        if not offload and not found:
            found.append(ZeroOption(0, dp // shard, shard))
        alone = shard * cp == 1
        if not alone or offload:
            # One rank has nothing to share out; what it can is leave optimizer state to its host.
            for stage in range(1, MOST_STAGE + (not alone)):
                found.append(ZeroOption(stage, dp // shard, shard, offload=int(offload)))
                if stage == MOST_STAGE:
                    found.append(ZeroOption(stage, dp // shard, shard, 0, int(offload)))
    return tuple(found)


def pinned_zero_options(
    pins: Pins, key: tuple[int, ...], *, offload: bool
) -> tuple[ZeroOption, ...]:
    """Return those of `zero_options` that pins let through; `key` are its arguments in their order.

    If not pinned, units are gathered twice: that they stay whole takes memory not counted yet.
    """
    dp, cp, ep, inner = key
    wanted = pins.values_of("reshard") or (1,)
    return tuple(
        one
        for one in zero_options(dp, cp, ep, inner, offload=offload)
        if (one.reshard in wanted or (one.zero < MOST_STAGE and one.reshard))
        and pins.allows("zero", one.zero)
        and pins.allows("dp_replicate", one.dp_replicate)
        and pins.allows("dp_shard", one.dp_shard)
    )


def schedule_options(pins: Pins, pp: int, layers: int) -> tuple[ScheduleOption, ...]:
    """Return the schedules for so many pipeline ranks, with every number of stages on a rank.

    On one rank there is nothing to order: 1f1b stands for all, also where a trainer lacks it.
    """
    if pp == 1:
        pinned = pins.values.get("schedule", (PLAIN_SCHEDULE,))
        plain = PLAIN_SCHEDULE in pinned and pins.allows("virtual", 1)
        return (ScheduleOption(PLAIN_SCHEDULE, 1, 1, 1),) if plain else ()
    wanted = pins.values_of("schedule")
    found: list[ScheduleOption] = []
    for name in map(str, SCHEDULES if wanted is None else wanted):
        builder = SCHEDULES[name]
        if wanted is None and not builder.is_searched:
            continue
        outdone = builder.outdone_from(pp) if wanted is None else None
        most = 2**62 if outdone is None else outdone - 1
        for virtual in range(1, max(1, min(MOST_VIRTUAL, layers // pp)) + 1):
            fits = builder.fits_stages(virtual * pp, pp) and virtual * pp <= layers
            if fits and pins.allows("virtual", virtual):
                least, multiple = builder.minimum_microbatches(pp), builder.microbatch_multiple
                found.append(ScheduleOption(name, virtual, least, multiple, most))
    return tuple(found)
