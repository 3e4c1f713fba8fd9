# SPDX-License-Identifier: Apache-2.0
"""Whole tensors of a split module, out and in: data slices, tensor pieces, stages of a pipeline.

Split: nothing; every layout gives and takes the same tensors, under the same names.
Sent:  out, a bucket is gathered over its shard group, its pieces over the tensor group, and each
       tensor of another stage goes to rank 0 as a sum over all ranks; in, each tensor of rank 0
       goes to all ranks as such a sum. One tensor at a time.
Bytes: none that a step counts.
Must divide: nothing.
Source: none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from echelon.layout.stage import pp_rank_of
from echelon.parallel.module.module import RankModule
from echelon.parallel.module.tensor.layers import cut_values, join_values
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.weights import stored_values
from echelon.training.optimizer import SliceOptimizer

PARAMETERS = "parameters"
"""The kind of the parameters themselves, beside the kinds of the optimizer's state."""


@dataclass(frozen=True, slots=True)
class TensorRun:
    """Say what a rank has of one kind: a bucket of that name, or one parameter that is in none.

    `slots` are the name, the first element and the shape here of each parameter.
    """

    kind: str
    bucket: str
    num_elements: int
    dtype: torch.dtype
    slots: tuple[tuple[str, int, tuple[int, ...]], ...]


class WholeTensors:
    """Give whole tensors to rank 0, and take them from there."""

    def __init__(self, module: RankModule, slices: SliceOptimizer) -> None:
        """Serve what this rank has of a module and of its optimizer."""
        self._module, self._slices = module, slices

    def give(self, take: Callable[[str, str, torch.Tensor], None]) -> None:
        """Call `take` on rank 0 with every tensor in turn; all ranks call this together."""
        for owner, runs in enumerate(self.runs()):
            for run in runs:
                self._give_run(owner, run, take)

    @torch.no_grad()
    def take(self, give: Callable[[str, str], torch.Tensor]) -> None:
        """Take every tensor from what `give` returns on rank 0; all ranks call this together.

        The caller sends what has changed to whoever keeps parameters whole.
        """
        module = self._module
        for kind, name, dtype, shape in self._every(self.runs()):
            whole = torch.zeros(shape, dtype=dtype, device=module.device)
            if module.groups.rank == 0:
                whole.copy_(give(kind, name))
            self._from_one(whole, name=f"load.{kind}.{name}")
            piece, group = module.split.piece_of(name), module.groups.tensor
            part = whole if piece is None else cut_values(piece, whole, group.size, group.index)
            self._put(kind, name, part.reshape(-1))

    def runs(self) -> list[list[TensorRun]]:
        """Return the runs of each pipeline rank, or of the one that all ranks are alike to."""
        module = self._module
        if not module.owners:
            return [self._own_runs()]
        mine = pp_rank_of(module.plan, module.groups.rank)
        said: list[tuple[int, list[TensorRun]]] = module.groups.world.gather_objects(
            (mine, self._own_runs())
        )
        return [runs for _, runs in sorted(dict(said).items())]

    def misfit(
        self,
        runs: Sequence[Sequence[TensorRun]],
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> str:
        """Return in what whole tensors are not those of this module; nothing where they are."""
        order = [one.spec.name for one in self._module.parameters]
        every = sorted(self._every(runs), key=lambda one: order.index(one[1]))
        for kind, name, _, shape in every:
            if kind not in tensors:
                return f"it has no {kind}"
            found = tensors[kind].get(name)
            if found is None or tuple(found.shape) != shape:
                said = "not there" if found is None else str(tuple(found.shape))
                of = "" if kind == PARAMETERS else f" ({kind})"
                return f"{name}{of} is {said}, and this module's is {shape}"
        return ""

    def _own_runs(self) -> list[TensorRun]:
        """Return what this rank has: a bucket of one kind after the other, then what is in none."""
        state = self._slices.state()
        runs: list[TensorRun] = []
        for bucket in self._buckets():
            kinds = {PARAMETERS: bucket.values.dtype}
            kinds |= {
                k: held[bucket.name].dtype for k, held in state.items() if bucket.name in held
            }
            slots = tuple((s.spec.name, s.start, tuple(s.spec.shape)) for s in bucket.slots)
            numel = bucket.plan.num_elements
            runs += [TensorRun(k, bucket.name, numel, dtype, slots) for k, dtype in kinds.items()]
        for name, one in self._loose().items():
            slots = ((name, 0, tuple(one.shape)),)
            runs.append(TensorRun(PARAMETERS, "", one.numel(), one.dtype, slots))
        return runs

    def _every(
        self, runs: Sequence[Sequence[TensorRun]]
    ) -> Iterator[tuple[str, str, torch.dtype, tuple[int, ...]]]:
        """Yield kind, name, dtype and whole shape of each tensor once, in one order everywhere."""
        seen: set[tuple[str, str]] = set()
        for run in (one for of_stage in runs for one in of_stage):
            for name, _, local in run.slots:
                if (run.kind, name) not in seen:
                    seen.add((run.kind, name))
                    piece = self._module.split.piece_of(name)
                    yield run.kind, name, run.dtype, local if piece is None else piece.shape

    def _give_run(
        self, owner: int, run: TensorRun, take: Callable[[str, str, torch.Tensor], None]
    ) -> None:
        module = self._module
        groups = module.groups
        wanted = [one for one in run.slots if module.owners.get(one[0], owner) == owner]
        if not wanted:
            return
        here = not module.owners or pp_rank_of(module.plan, groups.rank) == owner
        flat = self._whole_run(run) if here else None
        for name, start, shape in wanted:
            part = None
            if flat is not None:
                part = self._joined(run, name, flat[start : start + prod(shape)].view(shape))
            if module.owners:
                part = self._sent(run, name, shape, part)
            if groups.rank == 0 and part is not None:
                take(run.kind, name, part.clone())

    def _sent(
        self, run: TensorRun, name: str, local: tuple[int, ...], part: torch.Tensor | None
    ) -> torch.Tensor:
        """Return a tensor of another stage, which one of the ranks that have it sends."""
        groups, piece = self._module.groups, self._module.split.piece_of(name)
        if part is None or groups.data.index or groups.tensor.index:
            shape = local if piece is None else piece.shape
            part = torch.zeros(shape, dtype=run.dtype, device=self._module.device)
        # State that rests in host memory is sent from the device.
        part = part.to(self._module.device).contiguous()
        self._from_one(part, name=f"full.{run.kind}.{name}")
        return part

    def _joined(self, run: TensorRun, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return a tensor of which tensor ranks may have pieces."""
        group, piece = self._module.groups.tensor, self._module.split.piece_of(name)
        if piece is None:
            return part
        part = part.to(self._module.device)
        every = part.new_empty((group.size, *part.shape))
        name = f"full.{run.kind}.{name}"
        group.all_gather(every.view(-1), part.reshape(-1), name=name).wait()
        return join_values(piece, list(every)) if group.index == 0 else part

    def _whole_run(self, run: TensorRun) -> torch.Tensor:
        """Return all of what this rank, or its shard group, has of a run."""
        if not run.bucket:
            return self._loose()[run.slots[0][0]].detach().reshape(-1)
        bucket = next(one for one in self._buckets() if one.name == run.bucket)
        flat = stored_values(bucket)
        if run.kind != PARAMETERS:
            flat = self._slices.state()[run.kind][bucket.name]
        if flat.numel() == bucket.plan.num_elements:
            return flat
        whole = bucket.values.new_empty(bucket.plan.num_elements, dtype=flat.dtype)
        piece = flat.to(whole.device)
        name = f"full.{run.kind}.{bucket.name}"
        self._module.groups.shard.all_gather(whole, piece, name=name).wait()
        return whole

    def _put(self, kind: str, name: str, values: torch.Tensor) -> None:
        """Write what this rank holds of a parameter where it rests, if it has it."""
        if kind == PARAMETERS and (loose := self._loose().get(name)) is not None:
            loose.copy_(values.view(loose.shape))
        for bucket in self._buckets():
            target = stored_values(bucket)[own_part(bucket)]
            first = bucket.own.start
            if kind != PARAMETERS:
                held = self._slices.state().get(kind, {}).get(bucket.name)
                if held is None:
                    continue
                target, first = held, 0 if held.numel() == bucket.plan.num_elements else first
            for slot in bucket.slots:
                begin, end = max(slot.start, first), min(slot.end, first + target.numel())
                if slot.spec.name == name and begin < end:
                    part = values[begin - slot.start : end - slot.start]
                    target[begin - first : end - first].copy_(part)

    def _from_one(self, values: torch.Tensor, *, name: str) -> None:
        """Give all ranks what one of them has, where the others have zeros."""
        # A sum of bytes of which all but one are zero keeps the bits.
        bits = values.view(-1).view(torch.uint8)
        self._module.groups.world.all_reduce(bits, name=name).wait()

    def _loose(self) -> dict[str, torch.Tensor]:
        """Return the parameters of this rank that are in no bucket."""
        module = self._module
        held = {slot.spec.name for bucket in self._buckets() for slot in bucket.slots}
        named = dict(module.model.named_parameters())
        return {
            one.spec.name: named[one.spec.name]
            for one in module.parameters
            if one.spec.name not in held and one.spec.name not in module.foreign
        }

    def _buckets(self) -> list[Bucket]:
        return [*self._module.buckets, *self._module.frozen]


def own_part(bucket: Bucket) -> slice:
    """Return where in the resting values this rank's slice is."""
    return slice(None) if bucket.plan.sliced else bucket.own
