"""Operations whose results are used without a wait: right on an idle machine, most of the time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.parallel.context.ring import _RingKeys
from echelon.parallel.data import GradientReduction, _PendingSum
from echelon.parallel.expert.token_dispatcher import FlatTokenDispatcher, Transfer
from echelon.parallel.offload.copying_store import CopiedFetch, CopyingOffloadStore
from echelon.parallel.offload.file_store import FileFetch
from echelon.parallel.offload.host_memory import CompletedEvent
from echelon.parallel.pipeline import PipelineExecutor
from echelon.parallel.recompute import OffloadedActivation
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.transport.collectives import Pending
from echelon.parallel.zero import ParameterGathering
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.proof.layouts import layout
from tests.proof.mutants.expert_layouts import EP2
from tests.proof.mutants.planting import Told, mutant
from tests.proof.mutants.slices import SECOND


def _late(operation: str, axis: str, plan: dict[str, Any], step: int = 0, **more: Any) -> Told:
    """Return what is told of an operation that is used too early."""
    used = "used before it was awaited"
    return Told("prove-awaited", operation, used, axis, step, plan, late=True, **more)


@mutant(
    _late(
        f"all_gather parameters.{SECOND}",
        "dp_shard",
        {"dp": 2, "accumulation": 1, "zero": {"stage": 3}},
    ),
    _late(
        f"all_gather parameters.{SECOND}",
        "dp_shard",
        {"dp": 2, "accumulation": 1, "zero": {"stage": 1}},
        step=1,
    ),
)
def parameters_used_before_they_are_whole(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Never wait for the gather of a bucket."""
    wait = ParameterGathering._await

    def drop(self: ParameterGathering, bucket: Bucket) -> None:
        if bucket.name == SECOND:
            self._gathers.pop(bucket.name, None)
        wait(self, bucket)

    patch.setattr(ParameterGathering, "_await", drop)


@mutant(
    _late(
        f"reduce_scatter gradients.{SECOND}",
        "dp_shard",
        {"dp": 2, "accumulation": 1, "zero": {"stage": 2}},
    ),
    _late(f"all_reduce gradients.{SECOND}", "dp", {"dp": 2, "accumulation": 1}),
)
def gradients_used_before_they_are_summed(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take the sum of a bucket for granted."""
    finish = GradientReduction._finish_sum

    def at_once(self: GradientReduction, pending_sum: _PendingSum) -> None:
        if pending_sum.bucket.name == SECOND:
            pending_sum = replace(pending_sum, pending=Pending())
        finish(self, pending_sum)

    patch.setattr(GradientReduction, "_finish_sum", at_once)


@mutant(_late("receive activation 0 stage 0 -> 1 from rank 0", "pp", {"pp": 2, "accumulation": 1}))
def activation_used_before_it_is_received(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Run a stage on a buffer into which nothing has come yet."""
    take = PipelineExecutor._take

    def at_once(self: PipelineExecutor, state: Any, step: Any) -> torch.Tensor | None:
        # Of gradients too, the other rank might be told first.
        if step.receive in state.arriving and str(step.receive).startswith("activation"):
            buffer, _ = state.arriving[step.receive]
            state.arriving[step.receive] = buffer, Pending()
        return take(self, state, step)

    patch.setattr(PipelineExecutor, "_take", at_once)


@mutant(
    _late(
        "exchange ring.forward.1",
        "cp",
        {"mesh": {"cp": 2}, "accumulation": 1, "context": {"kind": "ring"}},
    ),
)
def keys_used_before_they_came_around(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Attend to the keys of the other place while they travel."""
    finish = _RingKeys.finish

    def at_once(self: _RingKeys, step: int) -> None:
        if self._transfer is not None:
            self._transfer.pending = Pending()
        finish(self, step)

    patch.setattr(_RingKeys, "finish", at_once)


def _not_awaited(patch: pytest.MonkeyPatch, motion: str) -> None:
    start = getattr(FlatTokenDispatcher, motion)

    def at_once(self: FlatTokenDispatcher, parts: torch.Tensor, name: str) -> Transfer:
        arrange, _ = start(self, parts, name)
        return arrange, Pending()

    patch.setattr(FlatTokenDispatcher, motion, at_once)


EXPERTS: dict[str, Any] = {"model": MIXTRAL, **EP2}


@mutant(_late("exchange experts.dispatch", "ep", EXPERTS, of=plan_of))
def tokens_used_before_they_are_dispatched(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let experts work on rows that are on their way."""
    _not_awaited(patch, "_to_experts")


@mutant(_late("exchange experts.combine", "ep", EXPERTS, of=plan_of))
def outputs_used_before_they_are_combined(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Add up outputs of experts that are on their way."""
    _not_awaited(patch, "_from_experts")


@mutant(
    _late(
        "read bucket3.exp_avg, bucket3.exp_avg_sq",
        "nvme",
        {"dp": 2, "accumulation": 1, "zero": {"stage": 1, "optimizer_offload": "nvme"}},
    ),
)
def state_used_before_it_is_read(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Update optimizer state that a thread reads meanwhile."""
    wait = FileFetch.wait

    def at_once(self: FileFetch) -> list[torch.Tensor]:
        return self.tensors() if self.buffer is not None else wait(self)

    patch.setattr(FileFetch, "wait", at_once)


@mutant(
    _late(
        "copy up slices",
        "host",
        {"dp": 2, "accumulation": 1, "zero": {"stage": 1, "optimizer_offload": "host"}},
    ),
)
def state_used_before_it_is_copied(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Update optimizer state while it is copied to the device."""
    wait = CopyingOffloadStore.wait_for

    def at_once(self: CopyingOffloadStore, found: CopiedFetch) -> list[torch.Tensor]:
        return found.tensors if found.copied is not None else wait(self, found)

    patch.setattr(CopyingOffloadStore, "wait_for", at_once)


def _recomputing(**chosen: Any) -> Plan:
    """Return a plan whose blocks keep their inputs on the host."""
    plan = layout(**chosen)
    recompute = replace(plan.layout.recompute, policy="full", offload="host")
    return replace(plan, layout=replace(plan.layout, recompute=recompute))


@mutant(_late("copy up activations", "host", {"dp": 2, "accumulation": 1}, of=_recomputing))
def inputs_used_before_they_are_copied(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Run a block again on an input that is on its way back from the host."""
    take = OffloadedActivation.take

    def at_once(self: OffloadedActivation) -> torch.Tensor:
        self.start_copy()
        assert self.brought is not None
        self.brought = self.brought[0], CompletedEvent()
        return take(self)

    patch.setattr(OffloadedActivation, "take", at_once)


@mutant(_late("copy down activations", "host", {"dp": 2, "accumulation": 1}, of=_recomputing))
def inputs_copied_up_before_they_are_down(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Order the copy up after kernels alone."""

    def start_copy(self: OffloadedActivation) -> None:
        if self.brought is None and self.memory is not None:
            x = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
            self.streams.record_use(x)
            after = [self.streams.record_event()]
            self.brought = x, self.streams.copy("up", [(x, self.host)], after)

    patch.setattr(OffloadedActivation, "start_copy", start_copy)
