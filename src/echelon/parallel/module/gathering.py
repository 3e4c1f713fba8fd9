# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 3 for any module: what of its parameters is whole, and when.

Split: as in `zero.py`.
Sent:  one all-gather per bucket before its forward and one before its backward; one for both where
       it is kept whole in between (the root's, and what the first step showed to be irregular).
Bytes: `module_bytes` in `cost/bytes/data.py`.
Must divide: nothing; buckets are padded.
Source: Rajbhandari et al., "ZeRO", 2020; Zhao et al., "PyTorch FSDP", 2023 (units, prefetch).

`hooks.py` says which unit is used when. A parameter whose bucket is freed reads as NaN: who
reads it by another way than through the module sees so at once, where the memory is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from echelon.core.errors import RunFailed
from echelon.core.plan import Zero
from echelon.core.rulebook.module import UNIT_OUT_OF_ORDER
from echelon.parallel.buckets import Bucket
from echelon.parallel.module.unit_order import GatherSchedule, UnitOrder
from echelon.parallel.transport.collectives import Group
from echelon.parallel.zero import ParameterGathering


class ModuleParameterGathering(ParameterGathering):
    """Gather and free buckets as sweeps over the units say, as `ParameterGathering` does."""

    def __init__(self, buckets: Sequence[Bucket], shard: Group, zero: Zero) -> None:
        """Keep everything whole for each pass until there is an order to `follow`."""
        super().__init__(buckets, [], (shard, shard), zero)
        self._named = {bucket.name: bucket for bucket in buckets}
        self._views = {one.name: [slot.parameter.data for slot in one.slots] for one in self.sliced}
        self._hidden: set[str] = set()
        self.frees = zero.reshard_after_forward
        self.on_passed: Callable[[Bucket], None] = lambda _: None
        self.follow(UnitOrder())
        self.free_all()

    def follow(self, order: UnitOrder) -> None:
        """Gather and free the units of `order` one by one from now on."""
        users = {
            bucket.name: bucket.plan.units
            for bucket in self.sliced
            if order.units.issuperset(bucket.plan.units)
        }
        self.kept = [bucket for bucket in self.sliced if bucket.name not in users]
        self.forward = GatherSchedule(order.forward, users, ahead=self._zero.prefetch)
        self.backward = GatherSchedule(order.backward, users, ahead=self._zero.prefetch)

    def enter_unit(self, sweep: GatherSchedule, unit: str) -> None:
        """Make a unit whole in its turn; free what is over, start on what comes."""
        if sweep.passed(unit):
            raise out_of_order(unit, "its turn has passed")
        turn = sweep.enter(unit)
        self._pass(sweep, turn.over)
        self._join(sweep, turn.skipped)
        for name in turn.gather:
            self._gather_missing(self._named[name])
        for name in turn.after if len(self._reads) < num_buffers(self._zero) else ():
            self._read(self._named[name])
        for name in sweep.buckets_of(unit):
            self._await(self._named[name])

    def leave_unit(self, sweep: GatherSchedule, unit: str) -> None:
        """Free what no later unit of a sweep uses."""
        self._pass(sweep, sweep.leave(unit))

    def complete(self, sweep: GatherSchedule) -> None:
        """Go to the end of a sweep: take part in gathers of what this rank did not use."""
        live, skipped = sweep.end()
        self._pass(sweep, live)
        self._join(sweep, skipped)

    def gather_kept(self) -> None:
        """Make whole what does not come and go."""
        for bucket in self.kept:
            self._gather_missing(bucket)
        for bucket in self.kept:
            self._await(bucket)

    def free_kept(self) -> None:
        """Free what does not come and go."""
        for bucket in self.kept if self.frees else ():
            self._free(bucket)

    def make_all_whole(self) -> None:
        """Make everything whole; all ranks do so together."""
        for bucket in self.sliced:
            self._gather_missing(bucket)
            self._await(bucket)

    def free_all(self) -> None:
        """Free everything, and begin all sweeps anew."""
        self.forward.restart()
        self.backward.restart()
        self.end_pass()

    def _join(self, sweep: GatherSchedule, names: Sequence[str]) -> None:
        """Take part in gathers of what this rank does not use."""
        for name in names:
            self._gather_missing(self._named[name])
            self._await(self._named[name])
            self._pass(sweep, [name])

    def _pass(self, sweep: GatherSchedule, names: Sequence[str]) -> None:
        for name in names:
            if self.frees:
                self._free(self._named[name])
            if sweep is self.backward:
                self.on_passed(self._named[name])

    def _gather_missing(self, bucket: Bucket) -> None:
        if bucket.values_memory.present:
            return
        while bucket.offload_store is not None and len(self._reads) >= num_buffers(self._zero):
            self._await(self._named[next(iter(self._reads))])
        self._gather(bucket)

    def _await(self, bucket: Bucket) -> None:
        super()._await(bucket)
        if bucket.name in self._hidden and bucket.values_memory.present:
            self._hidden.discard(bucket.name)
            for slot, view in zip(bucket.slots, self._views[bucket.name], strict=True):
                slot.parameter.data = view

    def _free(self, bucket: Bucket) -> None:
        super()._free(bucket)
        if bucket.name in self._hidden:
            return
        self._hidden.add(bucket.name)
        nothing = bucket.values.new_full((), float("nan"))
        for slot in bucket.slots:
            slot.parameter.data = nothing.expand(slot.spec.shape)


def num_buffers(zero: Zero) -> int:
    """Return how many slices of parameters may be on their way from where they rest."""
    return zero.offload_buffers + zero.prefetch


def out_of_order(unit: str, why: str) -> RunFailed:
    """Return the error of a unit that is used when it cannot be whole."""
    return RunFailed(
        UNIT_OUT_OF_ORDER.problem(
            f"{unit} is not whole on this rank: {why}",
            suggestions=(
                "units=[...] with the modules that hold these units",
                'zero.reshard_after_forward = "never"',
            ),
        )
    )
