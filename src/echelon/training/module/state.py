"""Reading, writing, saving and loading the parameters and the optimizer state of a split module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.core.errors import CheckpointError, RunFailed
from echelon.core.rulebook.module import MODULE_STATE, VALUES_AWAY
from echelon.parallel.buckets import Bucket
from echelon.parallel.module.module import RankModule
from echelon.parallel.module.tensor.layers import cut_values, join_values
from echelon.parallel.weights import stored_values
from echelon.training.optimizer import MASTER, SliceOptimizer

PARAMETERS = "parameters"
"""The kind of the parameters themselves, beside the kinds of the optimizer's state."""


class ModuleState:
    """Tell what a rank holds of a module, and take it back."""

    def __init__(self, module: RankModule, slices: SliceOptimizer) -> None:
        """Serve the optimizer of these slices."""
        self._module, self._slices = module, slices
        self.is_whole = False

    @property
    def away(self) -> bool:
        """Return whether what is read or written through the module would be wrong now."""
        sliced = bool(self._module.gathering.sliced) and not self.is_whole
        return sliced or self._module.split.degree > 1

    @property
    def copied(self) -> bool:
        """Return whether what is written to parameters now would not reach the master copies."""
        return bool(self._module.masters) and not self.is_whole

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold all parameters whole; keep what was written to this rank's elements."""
        gathering = self._module.gathering
        gathering.make_all_whole()
        before = (
            {bucket.name: bucket.values[bucket.own].clone() for bucket in self._module.buckets}
            if self._module.masters
            else {}
        )
        self.is_whole = True
        try:
            yield
        finally:
            self.is_whole = False
            self._keep(before)
            self._module.hooks.free_all()

    def full_state(self, take: Callable[[str, str, torch.Tensor], None]) -> None:
        """Give rank 0 every whole tensor in turn, one bucket of one kind at a time."""
        state = self._slices.state()
        for bucket in (*self._module.buckets, *self._module.frozen):
            flats = {PARAMETERS: stored_values(bucket)}
            flats |= {
                kind: held[bucket.name] for kind, held in state.items() if bucket.name in held
            }
            for kind, flat in flats.items():
                self._take_bucket(bucket, kind, flat, take)
        for name, parameter in self._in_no_bucket():
            self._take_whole(PARAMETERS, name, parameter.detach(), take)

    def read_full(self, path: str | Path) -> dict[str, Any]:
        """Return the contents of a file of whole tensors on rank 0, on the others its progress."""
        groups = self._module.groups
        saved: dict[str, Any] = {}
        problem = ""
        if groups.rank == 0:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            problem = self._misfit(saved["tensors"])
        told = groups.world.gather_objects((problem, saved.get("progress")))
        if told[0][0]:
            raise CheckpointError(MODULE_STATE.problem(f"{path}: {told[0][0]}"))
        return {"progress": told[0][1], "tensors": saved.get("tensors", {})}

    def _misfit(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> str:
        """Return in what tensors of a file are not those of this module; nothing where they are."""
        kinds = [PARAMETERS, *self._slices.state()]
        if missing := [kind for kind in kinds if kind not in tensors]:
            return f"it has no {missing[0]}"
        for one in self._module.parameters:
            piece = self._module.split.piece_of(one.spec.name)
            shape = one.spec.shape if piece is None else piece.shape
            found = tensors[PARAMETERS].get(one.spec.name)
            if found is None or tuple(found.shape) != shape:
                said = "not there" if found is None else str(tuple(found.shape))
                return f"{one.spec.name} is {said}, and this module's is {shape}"
        return ""

    @torch.no_grad()
    def load_full(
        self,
        progress: Mapping[str, Any],
        give: Callable[[str, str], torch.Tensor],
    ) -> None:
        """Take whole tensors that rank 0 gives, whatever split they were saved from."""
        module = self._module
        module.hooks.free_all()
        state = self._slices.state()
        for bucket in self._buckets():
            for kind, held in state.items():
                if bucket.name in held:
                    whole = self._given_bucket(bucket, kind, held[bucket.name].dtype, give)
                    held[bucket.name].copy_(_part_like(whole, held[bucket.name], bucket))
            resting = stored_values(bucket)
            whole = self._given_bucket(bucket, PARAMETERS, resting.dtype, give)
            _write(bucket, whole[bucket.own])
            module.gathering.updated(bucket)
        for name, parameter in self._in_no_bucket():
            parameter.copy_(self._given(PARAMETERS, name, parameter.dtype, give))
        module.gathering.settle()
        self._slices.set_num_steps(progress["num_updates"])

    def save(self, progress: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's slices as copies, and `progress`: where training is."""
        tensors = {PARAMETERS: {b.name: stored_values(b)[_own(b)].clone() for b in self._buckets()}}
        for kind, held in self._slices.state().items():
            tensors[kind] = {name: flat.clone() for name, flat in held.items()}
        return {"layout": self._layout(), **progress, "tensors": tensors}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Take back the slices of `save`, on the same rank of the same module and plan."""
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
        for bucket in self._buckets():
            _write(bucket, state["tensors"][PARAMETERS][bucket.name])
            module.gathering.updated(bucket)
        module.gathering.settle()
        self._slices.set_num_steps(state["num_updates"])

    def _keep(self, before: Mapping[str, torch.Tensor]) -> None:
        masters = self._slices.state().get(MASTER, {})
        for bucket in self._buckets():
            mine = bucket.values[bucket.own]
            if bucket.name in before:
                # Where nothing was written, the master copy knows more than the parameter.
                written = mine != before[bucket.name]
                master = masters[bucket.name]
                master.copy_(torch.where(written, mine.to(master.dtype), master))
            _write(bucket, mine)

    def _take_bucket(
        self,
        bucket: Bucket,
        kind: str,
        flat: torch.Tensor,
        take: Callable[[str, str, torch.Tensor], None],
    ) -> None:
        groups = self._module.groups
        whole = flat
        if flat.numel() != bucket.plan.num_elements:
            whole = bucket.values.new_empty(bucket.plan.num_elements, dtype=flat.dtype)
            piece = flat.to(whole.device)
            groups.shard.all_gather(whole, piece, name=f"full.{kind}.{bucket.name}").wait()
        for slot in bucket.slots:
            part = whole[slot.start : slot.end].view(slot.spec.shape)
            self._take_whole(kind, slot.spec.name, part, take)

    def _take_whole(
        self,
        kind: str,
        name: str,
        part: torch.Tensor,
        take: Callable[[str, str, torch.Tensor], None],
    ) -> None:
        """Give rank 0 a tensor of which tensor ranks may have pieces."""
        groups, piece = self._module.groups, self._module.split.piece_of(name)
        whole = part
        if piece is not None:
            group = groups.tensor
            every = part.new_empty((group.size, *part.shape))
            group.all_gather(every.view(-1), part.reshape(-1), name=f"full.{kind}.{name}").wait()
            whole = join_values(piece, list(every)) if groups.rank == 0 else part
        if groups.rank == 0:
            take(kind, name, whole.clone())

    def _given_bucket(
        self,
        bucket: Bucket,
        kind: str,
        dtype: torch.dtype,
        give: Callable[[str, str], torch.Tensor],
    ) -> torch.Tensor:
        """Return all of a bucket, from whole tensors that rank 0 gives."""
        flat = torch.zeros(bucket.plan.num_elements, dtype=dtype, device=self._module.device)
        for slot in bucket.slots:
            flat[slot.start : slot.end] = self._given(kind, slot.spec.name, dtype, give).view(-1)
        return flat

    def _given(
        self,
        kind: str,
        name: str,
        dtype: torch.dtype,
        give: Callable[[str, str], torch.Tensor],
    ) -> torch.Tensor:
        """Return what this rank holds of a whole tensor that rank 0 gives."""
        groups, split = self._module.groups, self._module.split
        piece = split.piece_of(name)
        local = next(one.spec.shape for one in self._module.parameters if one.spec.name == name)
        shape = local if piece is None else piece.shape
        whole = torch.zeros(shape, dtype=dtype, device=self._module.device)
        if groups.rank == 0:
            whole.copy_(give(kind, name))
        # A sum of bytes of which all but one are zero keeps the bits.
        groups.world.all_reduce(whole.view(-1).view(torch.uint8), name=f"load.{name}").wait()
        return (
            whole if piece is None else cut_values(piece, whole, split.degree, groups.tensor.index)
        )

    def _in_no_bucket(self) -> Iterator[tuple[str, torch.Tensor]]:
        held = {slot.spec.name for bucket in self._buckets() for slot in bucket.slots}
        named = dict(self._module.model.named_parameters())
        for one in self._module.parameters:
            if one.spec.name not in held:
                yield one.spec.name, named[one.spec.name]

    def _buckets(self) -> list[Bucket]:
        return [*self._module.buckets, *self._module.frozen]

    def _layout(self) -> dict[str, Any]:
        module = self._module
        return {
            "plan": module.plan.content_hash(),
            "rank": module.groups.rank,
            "buckets": [[bucket.name, bucket.plan.num_elements] for bucket in self._buckets()],
        }


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


def _part_like(whole: torch.Tensor, held: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """Return the part of a bucket that a tensor holds: all of it, or this rank's slice."""
    return whole if held.numel() == whole.numel() else whole[bucket.own]


def _own(bucket: Bucket) -> slice:
    """Return where in the resting values this rank's slice is."""
    return slice(None) if bucket.plan.sliced else bucket.own


@torch.no_grad()
def _write(bucket: Bucket, values: torch.Tensor) -> None:
    """Write this rank's slice to where it rests."""
    resting = stored_values(bucket)[_own(bucket)]
    if resting.data_ptr() != values.data_ptr():
        resting.copy_(values)
