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
from echelon.layout.stage import pp_rank_of
from echelon.parallel.buckets import Bucket
from echelon.parallel.module.module import RankModule
from echelon.parallel.weights import stored_values
from echelon.training.module.whole_state import PARAMETERS, WholeTensors, own_part
from echelon.training.optimizer import MASTER, SliceOptimizer


class ModuleState:
    """Tell what a rank holds of a module, and take it back."""

    def __init__(self, module: RankModule, slices: SliceOptimizer) -> None:
        """Serve the optimizer of these slices."""
        self._module, self._slices = module, slices
        self._whole_tensors = WholeTensors(module, slices)
        self.is_whole = False

    @property
    def away(self) -> bool:
        """Return whether what is read or written through the module would be wrong now."""
        held = self._module.gathering.sliced or self._module.foreign
        # What tensor ranks have of a parameter is never the whole of it.
        return (bool(held) and not self.is_whole) or self._module.split.degree > 1

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
        """Give rank 0 every whole tensor in turn."""
        self._whole_tensors.give(take)

    @torch.no_grad()
    def load_full(self, give: Callable[[str, str], torch.Tensor], num_updates: int) -> None:
        """Take every whole tensor, which rank 0 gives, whatever layout they were saved from."""
        module = self._module
        module.hooks.free_all()
        self._whole_tensors.take(give)
        for bucket in self._buckets():
            module.gathering.updated(bucket)
        module.gathering.settle()
        self._slices.set_num_steps(num_updates)

    def read_full(self, path: str | Path) -> dict[str, Any]:
        """Return the contents of a file of whole tensors on rank 0, on the others its progress.

        CheckpointError, the same on every rank, where it is not of this module.
        """
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
        tensors = {
            PARAMETERS: {b.name: stored_values(b)[own_part(b)].clone() for b in self._buckets()}
        }
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

    def _buckets(self) -> list[Bucket]:
        return [*self._module.buckets, *self._module.frozen]

    def _layout(self) -> dict[str, Any]:
        module = self._module
        return {
            "plan": module.plan.content_hash(),
            "rank": module.groups.rank,
            "buckets": [[bucket.name, bucket.plan.num_elements] for bucket in self._buckets()],
        }


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
