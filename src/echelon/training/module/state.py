"""Reading, writing, saving and loading the parameters and the optimizer state of a split module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from echelon.core.errors import CheckpointError, RunFailed
from echelon.core.rulebook.module import MODULE_STATE, VALUES_AWAY
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
        return bool(self._module.gathering.sliced) and not self.is_whole

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
        held = {slot.spec.name for bucket in self._buckets() for slot in bucket.slots}
        named = dict(self._module.model.named_parameters())
        for one in self._module.parameters:
            if one.spec.name not in held and self._module.groups.rank == 0:
                take(PARAMETERS, one.spec.name, named[one.spec.name].detach().clone())

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
        for slot in bucket.slots if groups.rank == 0 else ():
            take(kind, slot.spec.name, whole[slot.start : slot.end].view(slot.spec.shape).clone())

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
