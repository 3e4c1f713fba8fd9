# SPDX-License-Identifier: Apache-2.0
"""ZeRO: what of the parameters is whole, and when (stages 1 to 3, hybrid sharding).

Split: every bucket into N equal slices over `dp_shard` (x `cp`): optimizer state at stage 1,
       gradients too at stage 2, parameters too at stage 3. `dp_replicate` ranks hold copies.
Sent:  gradients: `data.py`. Parameters, stages 1 and 2: one all-gather per bucket and step, under
       way since the update, awaited by the first forward that uses it. Stage 3: one all-gather per
       unit before its forward and one before its backward (or one per step), a unit ahead; of
       weights multiplied in 8 bits their codes (`fp8_gather.py`), or matrices in int8
       (`storage/buckets.py`), with `zero.gather`. With `zero.secondary` (hpZ of ZeRO++) the
       first gather of a step crosses nodes; each rank copies its secondary slice from it, and all
       later ones, of later microbatches and of backward passes, stay inside of the node.
Bytes: `data_bytes` in `cost/bytes/data.py`, by tier `parameter_gather_tiers` in
       `cost/bytes/sent.py`.
Must divide: nothing; buckets are padded. Each node holds as many of the ranks, more than one, with
       secondary slices (`secondary-needs-nodes`).
Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
        2020; Zhao et al., "PyTorch FSDP", 2023 (units, prefetch); Wang et al., "ZeRO++: Extremely
        Efficient Collective Communication for Giant Model Training", 2023, section 3.2.

At stage 3 at most 1 + `prefetch` units are whole at a time (and a tied embedding from its lookup to
the loss), or all of them where `reshard_after_forward` is off. Parameters change with the update at
the end of a step and at no other time, so secondary slices are right until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.plan import Plan, Zero
from echelon.layout.buckets import stage_units
from echelon.layout.data_groups import secondary_elements
from echelon.layout.stage import RankPart
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.fp8_gather import SliceCodes
from echelon.parallel.offload import OffloadPlace, OffloadStore, PendingFetch
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.transport.collectives import Group, Pending


class SecondarySlices:
    """The secondary slices of a rank, and whether they have the values of this step."""

    def __init__(self, buckets: Sequence[Bucket], nodes: tuple[Group, Group]) -> None:
        """Make room for those of `buckets` that are cut between uses.

        `nodes` are the ranks of this node that share them out: of routed experts the second group.
        """
        self._nodes = nodes
        self._slices = {
            bucket.name: torch.empty(
                bucket.plan.num_elements // nodes[bucket.plan.expert].size,
                dtype=bucket.values.dtype,
                device=bucket.values.device,
            )
            for bucket in buckets
            if bucket.plan.sliced and nodes[bucket.plan.expert].size > 1
        }
        self._kept: set[str] = set()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the memory of all slices."""
        return list(self._slices.values())

    def has(self, bucket: Bucket) -> bool:
        """Return whether the ranks of this node have the values of a bucket."""
        return bucket.name in self._kept

    def keep(self, bucket: Bucket) -> None:
        """Copy the slice of this rank out of a bucket that is whole, unless it was done."""
        if bucket.name not in self._slices or bucket.name in self._kept:
            return
        piece, group = self._slices[bucket.name], self._nodes[bucket.plan.expert]
        start = group.index * piece.numel()
        piece.copy_(bucket.values.detach()[start : start + piece.numel()])
        self._kept.add(bucket.name)

    def gather(self, bucket: Bucket) -> Pending:
        """Start to fill a bucket, whose memory is there, from the ranks of this node."""
        whole, piece = bucket.values, self._slices[bucket.name]
        if bucket.fp8 is not None:
            # Gloo sends no floats of 8 bits, but bytes.
            whole, piece = whole.view(torch.uint8), piece.view(torch.uint8)
        return self._nodes[bucket.plan.expert].all_gather(
            whole, piece, name=f"parameters.{bucket.name}", async_op=True
        )

    def forget(self) -> None:
        """Learn that parameters may change from here on: a step or an evaluation is over."""
        self._kept.clear()


class _UnitBoundary(torch.autograd.Function):
    """The input or the output of a unit: its backward ends or begins here."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, reached: Callable[[str], None], unit: str
    ) -> torch.Tensor:
        """Return x; remember whom to tell when backward has come to it."""
        ctx.reached, ctx.unit = reached, unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Make the unit whole, or free it, and pass the gradient on."""
        ctx.reached(ctx.unit)
        return dx, None, None


class ParameterGathering:
    """Make the parameters of a unit whole while it is used, and hold slices in between."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        stages: Sequence[Sequence[str]],
        shards: tuple[Group, Group],
        zero: Zero,
        secondary: SecondarySlices | None = None,
        codes: SliceCodes | None = None,
    ) -> None:
        """Serve the units of each stage of this rank, in the order of its forward pass.

        `shards` are the ranks that hold the slices: of routed experts the second group. `secondary`
        are the slices that ranks of a node keep, if any, `codes` the slices gathered in 8 bits.
        Nothing is gathered ahead beyond the end of a stage, whose next action may be another's.
        """
        self._order = {unit: list(units) for units in stages for unit in units}
        units = list(self._order)
        self._shards, self._zero = shards, zero
        self.sliced = [bucket for bucket in buckets if bucket.plan.sliced]
        self._buckets: dict[str, list[Bucket]] = {
            unit: [bucket for bucket in buckets if unit in bucket.plan.units] for unit in units
        }
        self._backward = {
            unit: [b for b in self._buckets[unit] if b.plan.sliced and unit != "embedding"]
            for unit in units
        }
        self._gathers: dict[str, Pending] = {}
        self._reads: dict[str, PendingFetch] = {}
        self.secondary = secondary or SecondarySlices((), shards)
        self.codes = codes or SliceCodes((), shards)

    def enter(self, unit: str, x: torch.Tensor | None) -> torch.Tensor | None:
        """Make a unit whole for its forward, and start on those that come after it."""
        self._make_whole(unit, self._order[unit], self._buckets)
        if x is None or not self._frees_after_use(unit) or not x.requires_grad:
            return x
        return _UnitBoundary.apply(x, self.leave_backward, unit) if torch.is_grad_enabled() else x

    def leave(self, unit: str, y: torch.Tensor) -> torch.Tensor:
        """Free what no later unit of this forward uses."""
        if not self._frees_after_use(unit):
            return y
        for bucket in self._buckets[unit]:
            if bucket.plan.sliced and self._in_stage_of(unit, bucket.plan.units)[-1] == unit:
                self._free(bucket)
        gradient = torch.is_grad_enabled() and y.requires_grad and self._backward[unit]
        return _UnitBoundary.apply(y, self.enter_backward, unit) if gradient else y

    def enter_backward(self, unit: str) -> None:
        """Make a unit whole for its backward, and start on those that come after it there."""
        self._make_whole(unit, self._order[unit][::-1], self._backward)

    def leave_backward(self, unit: str) -> None:
        """Free what no later unit of this backward uses."""
        for bucket in self._backward[unit]:
            if self._in_stage_of(unit, bucket.plan.backward_units)[0] == unit:
                self._free(bucket)

    def updated(self, bucket: Bucket) -> None:
        """Learn that the slice of a bucket has new values: send it where the whole is kept."""
        if not bucket.plan.sliced and self._shard(bucket).size > 1:
            self._gather(bucket)

    def end_update(self) -> None:
        """Learn that all slices have new values; who waits for them does so at their use."""

    def settle(self) -> None:
        """Return when nothing is under way."""
        for pending in self._gathers.values():
            pending.wait()

    def end_pass(self) -> None:
        """Free every unit: a step or an evaluation is over."""
        for bucket in self.sliced:
            self._free(bucket)
        for read in self._reads.values():
            read.release()
        self._reads.clear()
        self.secondary.forget()

    def _in_stage_of(self, unit: str, units: Sequence[str]) -> list[str]:
        """Return those of `units` that are in the same stage as `unit`."""
        return [other for other in units if other in self._order[unit]]

    def _frees_after_use(self, unit: str) -> bool:
        return self._zero.reshard_after_forward and any(
            bucket.plan.sliced for bucket in self._buckets[unit]
        )

    def _make_whole(
        self, unit: str, order: Sequence[str], buckets: dict[str, list[Bucket]]
    ) -> None:
        here = order.index(unit)
        coming = order[here : here + 1 + self._zero.prefetch]
        for bucket in (bucket for ahead in coming for bucket in buckets[ahead]):
            if bucket.plan.sliced and not bucket.values_memory.present:
                self._gather(bucket)
        for ahead in order[here + len(coming) : here + len(coming) + 1]:
            for bucket in buckets[ahead]:
                self._read(bucket)
        for bucket in buckets[unit]:
            self._await(bucket)

    def _gather(self, bucket: Bucket) -> None:
        whole, piece = bucket.values, bucket.value_slice
        if self.secondary.has(bucket):
            bucket.values_memory.allocate()
            self._gathers[bucket.name] = self.secondary.gather(bucket)
            return
        if bucket.plan.sliced:
            self._read(bucket)
            bucket.values_memory.allocate()
            if bucket.name in self._reads:
                piece = self._reads[bucket.name].wait()[0].to(bucket.values.device)
        if bucket.fp8 is not None:
            # Gloo sends no floats of 8 bits, but bytes.
            whole, piece = whole.view(torch.uint8), bucket.fp8.codes.view(torch.uint8)
        elif bucket.int8 is not None:
            bucket.int8.memory.allocate()
            whole, piece = bucket.int8.whole, bucket.int8.piece(piece)
        self._gathers[bucket.name] = self._shard(bucket).all_gather(
            whole, piece, name=f"parameters.{bucket.name}", async_op=True
        )

    def _shard(self, bucket: Bucket) -> Group:
        """Return the ranks that hold the other slices of a bucket."""
        return self._shards[bucket.plan.expert]

    def _read(self, bucket: Bucket) -> None:
        """Start to bring a slice of parameters from where it rests."""
        missing = bucket.name not in self._reads and not bucket.values_memory.present
        if bucket.offload_store is not None and missing and not self.secondary.has(bucket):
            self._reads[bucket.name] = bucket.offload_store.fetch([bucket.values_key])

    def _await(self, bucket: Bucket) -> None:
        pending = self._gathers.pop(bucket.name, None)
        if pending is not None:
            pending.wait()
            if bucket.int8 is not None and bucket.int8.memory.present:
                bucket.int8.write_values(bucket.values, self._shard(bucket).size)
                bucket.int8.memory.release()
            self.secondary.keep(bucket)
        read = self._reads.pop(bucket.name, None) if bucket.values_memory.present else None
        if read is not None:
            read.release()

    def _free(self, bucket: Bucket) -> None:
        self._await(bucket)
        bucket.values_memory.release()


def make_gathering(
    plan: Plan,
    part: RankPart,
    buckets: Sequence[Bucket],
    groups: RankGroups,
    pieces: PieceSizes = TRAINING_PIECES,
) -> ParameterGathering:
    """Return what makes the units of a rank whole under a plan."""
    units = [stage_units(one) for one in part.stages]
    shards = groups.shard, groups.expert_shard
    secondary = secondary_slices(plan, buckets, groups)
    codes = SliceCodes(buckets, shards, pieces)
    return ParameterGathering(buckets, units, shards, plan.layout.zero, secondary, codes)


def make_parameter_store(
    zero: Zero,
    groups: RankGroups,
    device: torch.device,
    *,
    num_buffers: int,
    pieces: PieceSizes = TRAINING_PIECES,
) -> OffloadStore | None:
    """Return where slices of parameters rest, where that is not the device."""
    if zero.parameter_offload == "none":
        return None
    place = OffloadPlace(
        target=zero.parameter_offload,
        folder=Path(zero.offload_dir),
        rank=groups.rank,
        num_buffers=num_buffers,
        chunk_bytes=pieces.file_bytes,
    )
    return groups.completion.offload_store(place, device)


def secondary_slices(
    plan: Plan, buckets: Sequence[Bucket], groups: RankGroups
) -> SecondarySlices | None:
    """Return what the ranks of a node keep under a plan; None where they keep nothing."""
    kept = [bucket for bucket in buckets if secondary_elements(plan, bucket.plan)]
    if not kept:
        return None
    return SecondarySlices(kept, (groups.shard_within, groups.expert_shard_within))
