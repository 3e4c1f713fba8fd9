# SPDX-License-Identifier: Apache-2.0
"""What a mesh leaves open: how ZeRO shares out, and the order of a pipeline.

What is recomputed, `recompute_options.py` says. Each list is small and the same for many rows, so
it is made once for what it depends on. Optimizer state rests on the device: what offload costs is
known for an assumed link of the host (`cost/seconds/data.py`). It is tried where it is pinned, and
where nothing fits without it. Secondary slices are tried wherever ZeRO 3 crosses nodes that hold
several ranks each; gathers and sums that round, where they are pinned only (`rounding.py`).

Left out, because it cannot be better in either time or memory than another choice with the same
rest (`tests/planner/search/test_sweep.py` compares with a search that leaves nothing out):

    gpipe          where 1f1b is legal: as much waiting, more in flight
    breadth-first  where it is not pinned: as much waiting as interleaved, more in flight

Of dualpipe a rank holds two stages, whose weights the closed forms count once: only where pinned,
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from echelon.cost.inputs.pipeline import schedule_index
from echelon.planner.search.legal_meshes import divisors
from echelon.planner.search.pins import Pins
from echelon.planner.search.rounding import EXACT, EXACT_GATHER, EXACT_SUM, Rounding
from echelon.schedule.build import PLAIN_SCHEDULE, SCHEDULES

MOST_VIRTUAL = 12  # stages of a rank
MOST_STAGE = 3  # of ZeRO


@dataclass(frozen=True, slots=True)
class ZeroOption:
    """Say what data ranks share out: ZeRO's stage, over how many ranks, and where it rests.

    `secondary` is 1 where nodes keep slices, `rounding` how gathers and sums round.
    """

    zero: int
    dp_replicate: int
    dp_shard: int
    reshard: int = 1
    offload: int = 0
    secondary: int = 0
    rounding: Rounding = EXACT

    @property
    def gathered_bytes(self) -> float:
        """Return the bytes of a weight of a block that is gathered as a code, else 0."""
        return self.rounding.gathered_bytes

    @property
    def gathers_ends(self) -> float:
        """Return 1 where codes of embedding and head are gathered, too."""
        return self.rounding.gathers_ends

    @property
    def summed_bytes(self) -> float:
        """Return the bytes of a gradient of which codes are summed, else 0."""
        return self.rounding.summed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOfRanks:
    """Say which ranks of a mesh a node holds: `devices` of it, of tensor groups of `tp` ranks.

    `expert_stride` is how far apart the ranks lie that share out the same experts; 0: there are
    none. No node is known (`devices` 0) where all ranks are on one.
    """

    devices: int = 0
    tp: int = 1
    expert_stride: int = 0

    def holds_several(self, ranks: int, expert_ranks: int) -> bool:
        """Return whether of the ranks that share out each node holds several, and none all.

        Of those of experts it is enough. Nodes hold whole groups of what lies between two of them.
        """
        groups = ((ranks, self.tp), (expert_ranks, self.expert_stride))
        return any(self._holds(count, stride) for count, stride in groups)

    def _holds(self, count: int, stride: int) -> bool:
        if not self.devices or not stride or self.devices % stride:
            return False
        here = self.devices // stride
        return 1 < here < count and count % here == 0


ONE_NODE = NodeOfRanks()


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
def zero_options(
    dp: int, cp: int, ep: int, inner: int, *, offload: bool, node: NodeOfRanks = ONE_NODE
) -> tuple[ZeroOption, ...]:
    """Return every way for `dp` x `cp` ranks to share out; ep folds over dp_shard x `inner`.

    `inner` is cp, x tp where experts are whole. Nothing is rounded.
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
                if stage < MOST_STAGE:
                    continue
                if node.holds_several(shard * cp, shard * inner // ep):
                    found.append(replace(found[-1], secondary=1))
                found.append(ZeroOption(stage, dp // shard, shard, 0, int(offload)))
    return tuple(found)


def pinned_zero_options(
    pins: Pins,
    key: tuple[int, ...],
    *,
    offload: bool,
    node: NodeOfRanks = ONE_NODE,
    roundings: Sequence[Rounding] = (EXACT,),
) -> tuple[ZeroOption, ...]:
    """Return those of `zero_options` that pins let through; `key` are its arguments in their order.

    If not pinned, units are gathered twice: that they stay whole takes memory not counted yet.
    Each is there with every one of `roundings` that it can have.
    """
    dp, cp, ep, inner = key
    wanted = pins.values_of("reshard") or (1,)
    return tuple(
        one if rounding == EXACT else replace(one, rounding=rounding)
        for one in zero_options(dp, cp, ep, inner, offload=offload, node=node)
        if (one.reshard in wanted or (one.zero < MOST_STAGE and one.reshard))
        and pins.allows("zero", one.zero)
        and pins.allows("dp_replicate", one.dp_replicate)
        and pins.allows("dp_shard", one.dp_shard)
        and pins.allows("secondary", one.secondary)
        for rounding in roundings
        if _can_round(one, rounding, node, (one.dp_shard * cp, one.dp_shard * inner // ep))
    )


def _can_round(
    option: ZeroOption, rounding: Rounding, node: NodeOfRanks, sharers: tuple[int, int]
) -> bool:
    """Return whether what is gathered and summed is of the kind that is rounded.

    `sharers` are how many ranks share out, and how many of them experts.
    """
    gathers = rounding.gather == EXACT_GATHER or option.zero == MOST_STAGE
    summed = rounding.reduce == EXACT_SUM or option.zero > 0
    return gathers and summed and (rounding.reduce == EXACT_SUM or node.holds_several(*sharers))


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
