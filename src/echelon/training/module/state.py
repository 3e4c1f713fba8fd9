# SPDX-License-Identifier: Apache-2.0
"""Reading, writing, saving and loading the parameters and the optimizer state of a split module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
        for bucket in self._buckets():
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
            PARAMETERS: {b.name: stored_values(b)[own_part(b)].clone() for b in self._buckets()}
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
        for bucket in self._buckets():
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
