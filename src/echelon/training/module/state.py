# SPDX-License-Identifier: Apache-2.0
"""Reading, writing, saving and loading the parameters and the optimizer state of a split module.

Whole tensors come out and go in: data slices, tensor pieces, stages of a pipeline.

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
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from echelon.core.errors import CheckpointError, RunFailed
from echelon.core.rulebook.module import MODULE_STATE, VALUES_AWAY
from echelon.layout.stage import pp_rank_of
from echelon.parallel.module.module import RankModule
from echelon.parallel.module.tensor.layers import cut_values, join_values
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.weights import stored_values
from echelon.training.optimizer import MASTER, SliceOptimizer


class ModuleState:
    """Tell what a rank holds of a module, and take it back."""

    def __init__(self, module: RankModule, slices: SliceOptimizer) -> None:
        self._module, self._slices = module, slices
        self._whole_tensors = WholeTensors(module, slices)
        self.is_whole = False

    @property
    def away(self) -> bool:
        """Return whether what is read or written through the module would be wrong now."""
        module = self._module
        elsewhere = module.gathering.sliced or module.foreign or module.split.degree > 1
        return bool(elsewhere) and not self.is_whole

    @property
    def copied(self) -> bool:
        """Return whether what is written to parameters now would not reach the master copies."""
        return bool(self._module.masters) and not self.is_whole

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold all parameters whole; keep what was written to this rank's elements.

        Inside of another one it does nothing: they are.
        """
        if self.is_whole:
            yield
            return
        gathering = self._module.gathering
        gathering.make_all_whole()
        before = (
            {bucket.name: bucket.values[bucket.own].clone() for bucket in self._module.buckets}
            if self._module.masters
            else {}
        )
        self.is_whole = True
        try:
            with whole_values(self._module):
                yield
        finally:
            self.is_whole = False
            self._keep(before)
            self._module.hooks.free_all()

    def full_state(self, take: Callable[[str, str, torch.Tensor], None]) -> None:
        """Give rank 0 every whole tensor in turn."""
        self.require_slices("what is saved would be of whole parameters and of slices")
        self._whole_tensors.give(take)

    @torch.no_grad()
    def load_full(self, give: Callable[[str, str], torch.Tensor], num_updates: int) -> None:
        """Take every whole tensor, which rank 0 gives, whatever layout they were saved from."""
        self.require_slices("what is loaded would be lost")
        module = self._module
        module.hooks.free_all()
        self._whole_tensors.take(give)
        for bucket in self._module.all_buckets:
            module.gathering.updated(bucket)
        module.gathering.settle()
        self._slices.set_num_steps(num_updates)

    def read_full(self, path: str | Path) -> dict[str, Any]:
        """Return the contents of a file of whole tensors on rank 0, on the others its progress.

        CheckpointError, the same on every rank, where it is not of this module.
        """
        self.require_slices("what is loaded would be lost")
        groups = self._module.groups
        saved: dict[str, Any] = {}
        problem = ""
        if groups.rank == 0:
            saved = torch.load(path, map_location="cpu", weights_only=True)
        runs = self._whole_tensors.runs()
        if groups.rank == 0:
            problem = self._whole_tensors.misfit(runs, saved["tensors"])
        told = groups.world.gather_objects((problem, saved.get("progress")))
        if told[0][0]:
            raise CheckpointError(MODULE_STATE.problem(f"{path}: {told[0][0]}"))
        return {"progress": told[0][1], "tensors": saved.get("tensors", {})}

    def save(self, progress: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's slices as copies, and `progress`: where training is."""
        self.require_slices("what is saved would be of whole parameters and of slices")
        tensors = {
            PARAMETERS: {
                b.name: stored_values(b)[own_part(b)].clone() for b in self._module.all_buckets
            }
        }
        for kind, held in self._slices.state().items():
            tensors[kind] = {name: flat.clone() for name, flat in held.items()}
        return {"layout": self._layout(), **progress, "tensors": tensors}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Take back the slices of `save`, on the same rank of the same module and plan."""
        self.require_slices("what is loaded would be lost")
        if state.get("layout") != self._layout():
            raise CheckpointError(
                MODULE_STATE.problem(
                    f"the state is that of {state.get('layout')}, and this is {self._layout()}"
                )
            )
        module = self._module
        module.hooks.free_all()
        for kind, held in self._slices.state().items():
            for name, flat in held.items():
                flat.copy_(state["tensors"][kind][name])
        for bucket in self._module.all_buckets:
            _write(bucket, state["tensors"][PARAMETERS][bucket.name])
            module.gathering.updated(bucket)
        module.gathering.settle()
        self._slices.set_num_steps(state["num_updates"])

    def require_slices(self, why: str) -> None:
        """RunFailed inside of `whole`, for what reads or writes this rank's slices."""
        if self.is_whole:
            raise RunFailed(
                VALUES_AWAY.problem(
                    f"parameters are whole inside of optimizer.whole(): {why}",
                    suggestions=("the call after `with optimizer.whole():`",),
                )
            )

    def _keep(self, before: Mapping[str, torch.Tensor]) -> None:
        masters = self._slices.state().get(MASTER, {})
        for bucket in self._module.all_buckets:
            mine = bucket.values[bucket.own]
            if bucket.name in before:
                # Where nothing was written, the master copy knows more than the parameter.
                written = mine != before[bucket.name]
                master = masters[bucket.name]
                master.copy_(torch.where(written, mine.to(master.dtype), master))
            _write(bucket, mine)

    def _layout(self) -> dict[str, Any]:
        module = self._module
        return {
            "plan": module.plan.content_hash(),
            "rank": module.groups.rank,
            "buckets": [
                [bucket.name, bucket.plan.num_elements] for bucket in self._module.all_buckets
            ],
        }


@contextmanager
def whole_values(module: RankModule) -> Iterator[None]:
    """Hold what other tensor and pipeline ranks have of parameters, too, while this is open.

    All ranks do so together. What is written to parameters of this rank is cut again, and kept.
    """
    named = dict(module.model.named_parameters())
    pieces = {one.name: one for one in module.split.pieces}
    own = {name: pieces[name] for name in named if name in pieces and name not in module.foreign}
    group = module.groups.tensor
    resting = {name: named[name].data for name in (*own, *module.foreign)}
    refusing = _refuse_forwards(module.model) if pieces else []
    with torch.no_grad():
        for name, piece in own.items():
            part = resting[name].reshape(-1)
            every = part.new_empty(group.size * part.numel())
            group.all_gather(every, part, name=f"whole.{name}").wait()
            locals_ = every.view(group.size, *resting[name].shape)
            named[name].data = join_values(piece, list(locals_))
        for name, owner in module.owners.items():
            shape = pieces[name].shape if name in pieces else named[name].shape
            values = named[name].new_zeros(shape)
            if owner == pp_rank_of(module.plan, module.groups.rank) and _is_first(module):
                values.copy_(named[name])
            bits = values.view(-1).view(torch.uint8)
            module.groups.world.all_reduce(bits, name=f"whole.{name}").wait()
            if name in module.foreign:
                named[name].data = values
    try:
        yield
    finally:
        for handle in refusing:
            handle.remove()
        with torch.no_grad():
            for name, piece in own.items():
                resting[name].copy_(cut_values(piece, named[name].data, group.size, group.index))
        for name, values in resting.items():
            named[name].data = values


def _is_first(module: RankModule) -> bool:
    """Return whether this is the one of the ranks with its stages that speaks for them."""
    return module.groups.data.index == 0 and module.groups.tensor.index == 0


def _refuse_forwards(model: nn.Module) -> list[RemovableHandle]:
    """Refuse calls of a module whose layers would take whole parameters for their pieces."""

    def before(*_: Any) -> None:
        raise RunFailed(
            VALUES_AWAY.problem(
                "a forward inside of optimizer.whole() would take whole parameters for the pieces "
                "of a tensor rank",
                suggestions=("the forward after `with optimizer.whole():`",),
            )
        )

    return [one.register_forward_pre_hook(before, prepend=True) for one in model.modules()]


def guard_values(model: nn.Module, state: ModuleState) -> None:
    """Refuse to save or load a module whose parameters are not there, or would not be kept."""

    def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if state.away:
            raise _refusal("model.state_dict() would read parameters of which this rank has slices")

    def before_load(*_: Any) -> None:
        if state.away:
            raise _refusal("model.load_state_dict() would write parameters that are away")
        if state.copied:
            raise _refusal(
                "model.load_state_dict() would write parameters that the next update overwrites "
                "from their master copies"
            )

    model.register_state_dict_pre_hook(before_save)
    model.register_load_state_dict_pre_hook(before_load)


def _refusal(message: str) -> RunFailed:
    instead = ("with optimizer.whole(): ...", "optimizer.save(PATH), optimizer.load(PATH)")
    return RunFailed(VALUES_AWAY.problem(message, suggestions=instead))


@torch.no_grad()
def _write(bucket: Bucket, values: torch.Tensor) -> None:
    """Write this rank's slice to where it rests."""
    resting = stored_values(bucket)[own_part(bucket)]
    if resting.data_ptr() != values.data_ptr():
        resting.copy_(values)


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
        for bucket in self._module.all_buckets:
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
        bucket = next(one for one in self._module.all_buckets if one.name == run.bucket)
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
        for bucket in self._module.all_buckets:
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
        held = {slot.spec.name for bucket in self._module.all_buckets for slot in bucket.slots}
        named = dict(module.model.named_parameters())
        return {
            one.spec.name: named[one.spec.name]
            for one in module.parameters
            if one.spec.name not in held and one.spec.name not in module.foreign
        }


def own_part(bucket: Bucket) -> slice:
    """Return where in the resting values this rank's slice is."""
    return slice(None) if bucket.plan.sliced else bucket.own
