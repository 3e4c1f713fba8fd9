"""Reading, writing, saving and loading the parameters and the optimizer state of a split module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from echelon.core.errors import CheckpointError, RunFailed
from echelon.core.rulebook.module import MODULE_STATE, VALUES_AWAY
from echelon.layout.stage import pp_rank_of
from echelon.parallel.buckets import Bucket
from echelon.parallel.module.module import RankModule
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
        held = self._module.gathering.sliced or self._module.foreign
        return bool(held) and not self.is_whole

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
            with foreign_values(self._module):
                yield
        finally:
            self.is_whole = False
            self._keep(before)
            self._module.hooks.free_all()

    def full_state(self, take: Callable[[str, str, torch.Tensor], None]) -> None:
        """Give rank 0 every whole tensor in turn, one bucket of one kind at a time."""
        for owner, runs in enumerate(self._runs_of_all_stages()):
            for run in runs:
                self._take_run(owner, run, take)

    def load_full(self, give: Callable[[str, str], torch.Tensor], num_updates: int) -> None:
        """Take every tensor as `full_state` gave it, in whatever layout; all ranks do so together.

        Where `give` has no master copy, that is the parameter.
        """
        module = self._module
        module.hooks.free_all()
        state = self._slices.state()
        with torch.no_grad():
            for bucket in self._buckets():
                for kind, held in state.items():
                    if bucket.name in held:
                        held[bucket.name].copy_(_slice_of(bucket, partial(give, kind)))
                _write(bucket, _slice_of(bucket, partial(give, PARAMETERS)))
                module.gathering.updated(bucket)
            module.gathering.settle()
            for name, one in self._loose().items():
                one.copy_(give(PARAMETERS, name))
        self._slices.set_num_steps(num_updates)

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

    def _runs(self) -> list[TensorRun]:
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

    def _runs_of_all_stages(self) -> list[list[TensorRun]]:
        """Return the runs of each pipeline rank, or of the one that all ranks are alike to."""
        module = self._module
        if not module.owners:
            return [self._runs()]
        mine = pp_rank_of(module.plan, module.groups.rank)
        said: list[tuple[int, list[TensorRun]]] = module.groups.world.gather_objects(
            (mine, self._runs())
        )
        return [runs for _, runs in sorted(dict(said).items())]

    def _take_run(
        self, owner: int, run: TensorRun, take: Callable[[str, str, torch.Tensor], None]
    ) -> None:
        module = self._module
        groups = module.groups
        wanted = [one for one in run.slots if module.owners.get(one[0], owner) == owner]
        if not wanted:
            return
        whole = None
        if not module.owners or pp_rank_of(module.plan, groups.rank) == owner:
            whole = self._whole(run)
        if module.owners:
            if whole is None or groups.data.index:
                whole = torch.zeros(run.num_elements, dtype=run.dtype, device=module.device)
            # A sum of bytes of which all but one are zero keeps the bits.
            whole = whole.contiguous()
            name = f"full.{run.kind}.{run.bucket}"
            groups.world.all_reduce(whole.view(torch.uint8), name=name).wait()
        if groups.rank or whole is None:
            return
        for name, start, shape in wanted:
            take(run.kind, name, whole[start : start + prod(shape)].view(shape).clone())

    def _whole(self, run: TensorRun) -> torch.Tensor:
        """Return all of what this rank, or its shard group, has of a run."""
        if not run.bucket:
            return self._loose()[run.slots[0][0]].detach().reshape(-1).clone()
        bucket = next(one for one in self._buckets() if one.name == run.bucket)
        flat = stored_values(bucket)
        if run.kind != PARAMETERS:
            flat = self._slices.state()[run.kind][bucket.name]
        if flat.numel() == bucket.plan.num_elements:
            return flat.clone()
        whole = bucket.values.new_empty(bucket.plan.num_elements, dtype=flat.dtype)
        piece = flat.to(whole.device)
        name = f"full.{run.kind}.{bucket.name}"
        self._module.groups.shard.all_gather(whole, piece, name=name).wait()
        return whole

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

    def _layout(self) -> dict[str, Any]:
        module = self._module
        return {
            "plan": module.plan.content_hash(),
            "rank": module.groups.rank,
            "buckets": [[bucket.name, bucket.plan.num_elements] for bucket in self._buckets()],
        }


@dataclass(frozen=True, slots=True)
class TensorRun:
    """Say what a rank has of one kind: a bucket of that name, or one parameter that is in none."""

    kind: str
    bucket: str
    num_elements: int
    dtype: torch.dtype
    slots: tuple[tuple[str, int, tuple[int, ...]], ...]


@contextmanager
def foreign_values(module: RankModule) -> Iterator[None]:
    """Hold the parameters of other pipeline ranks while this is open; all ranks do so together."""
    if not module.owners:
        yield
        return
    mine = pp_rank_of(module.plan, module.groups.rank)
    named = dict(module.model.named_parameters())
    hidden = {name: one.data for name, one in module.foreign.items()}
    with torch.no_grad():
        for name, owner in module.owners.items():
            bits = torch.zeros_like(named[name], memory_format=torch.contiguous_format).view(-1)
            if owner == mine and module.groups.data.index == 0:
                bits.copy_(named[name].reshape(-1))
            module.groups.world.all_reduce(bits.view(torch.uint8), name=f"whole.{name}").wait()
            if name in module.foreign:
                module.foreign[name].data = bits.view(module.foreign[name].shape)
    try:
        yield
    finally:
        for name, one in module.foreign.items():
            one.data = hidden[name]


def _slice_of(bucket: Bucket, give: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Return this rank's slice of a bucket, of whole tensors by name."""
    whole = torch.zeros(bucket.plan.num_elements, dtype=torch.float64)
    first = give(bucket.slots[0].spec.name)
    whole = whole.to(first.dtype)
    for slot in bucket.slots:
        whole[slot.start : slot.end] = give(slot.spec.name).reshape(-1)
    return whole[bucket.own]


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
    return RunFailed(VALUES_AWAY.problem(message, suggestions=("with optimizer.whole(): ...",)))


def _own(bucket: Bucket) -> slice:
    """Return where in the resting values this rank's slice is."""
    return slice(None) if bucket.plan.sliced else bucket.own


@torch.no_grad()
def _write(bucket: Bucket, values: torch.Tensor) -> None:
    """Write this rank's slice to where it rests."""
    resting = stored_values(bucket)[_own(bucket)]
    if resting.data_ptr() != values.data_ptr():
        resting.copy_(values)
