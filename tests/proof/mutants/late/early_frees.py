"""Memory that is written, freed or lent again while an operation or somebody else still has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.parallel.context import ulysses
from echelon.parallel.data import GradientReduction
from echelon.parallel.offload.copying_store import CopiedFetch, CopyingOffloadStore
from echelon.parallel.offload.file_store import FileFetch, FileOffloadStore
from echelon.parallel.pipeline import PipelineExecutor
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.tensor_memory import PooledTensorMemory
from echelon.parallel.transport.collectives import Group
from echelon.parallel.zero import ParameterGathering
from tests.proof.mutants.context_layouts import split
from tests.proof.mutants.planting import Told, mutant
from tests.proof.mutants.slices import SECOND

CHANGED, FREED = "prove-in-flight", "prove-freed"
"""The rules that these bugs break."""

STAGE_3: dict[str, Any] = {"dp": 2, "accumulation": 1, "zero": {"stage": 3}}
ON_NVME: dict[str, Any] = {
    "dp": 2,
    "accumulation": 1,
    "zero": {"stage": 1, "optimizer_offload": "nvme"},
}


@mutant(
    Told(
        CHANGED,
        "send activation 0 stage 0 -> 1",
        "changed in flight",
        "pp",
        plan={"pp": 2, "accumulation": 1},
        late=True,
    )
)
def activation_reused_while_it_is_sent(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take the memory of what leaves a stage for something else."""
    give = PipelineExecutor._give

    def reused(self: PipelineExecutor, state: Any, step: Any, tensor: torch.Tensor | None) -> None:
        give(self, state, step, tensor)
        for sent in state.leaving.values():
            sent[-1][0].zero_()

    patch.setattr(PipelineExecutor, "_give", reused)


@mutant(
    Told(
        CHANGED,
        f"reduce_scatter gradients.{SECOND}",
        "changed in flight",
        "dp_shard",
        plan={"dp": 2, "accumulation": 1, "zero": {"stage": 2}},
        late=True,
    ),
)
def gradients_zeroed_while_they_are_summed(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Clear a bucket for the next microbatch as soon as its sum has begun."""
    full = GradientReduction.bucket_is_full

    def cleared(self: GradientReduction, bucket: Bucket, *, last: bool) -> None:
        full(self, bucket, last=last)
        if bucket.name == SECOND:
            bucket.gradients.zero_()

    patch.setattr(GradientReduction, "bucket_is_full", cleared)


@mutant(
    Told(
        FREED,
        f"all_gather parameters.{SECOND}",
        "used after it was freed",
        "dp_shard",
        plan=STAGE_3,
        late=True,
    ),
)
def parameters_freed_before_they_are_used(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Free a unit when it has become whole."""
    enter = ParameterGathering.enter

    def freed(self: ParameterGathering, unit: str, x: torch.Tensor | None) -> torch.Tensor | None:
        y = enter(self, unit, x)
        for bucket in self._buckets[unit]:
            if bucket.name == SECOND:
                self._free(bucket)
        return y

    patch.setattr(ParameterGathering, "enter", freed)


@mutant(
    Told(
        FREED,
        f"all_gather parameters.{SECOND}",
        "freed in flight",
        "dp_shard",
        plan=STAGE_3,
        late=True,
    ),
)
def parameters_freed_while_they_are_gathered(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give the memory of a bucket back to the pool without a look at its gather."""
    gather = ParameterGathering._gather

    def freed(self: ParameterGathering, bucket: Bucket) -> None:
        gather(self, bucket)
        if bucket.name == SECOND:
            bucket.values_memory.release()
            bucket.values_memory.allocate()

    patch.setattr(ParameterGathering, "_gather", freed)


@mutant(
    Told(
        FREED,
        f"all_gather parameters.{SECOND}",
        "freed twice",
        "dp_shard",
        plan=STAGE_3,
        late=True,
    ),
)
def pool_buffer_given_back_twice(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Forget that a piece of the pool has been given back."""
    free, release = ParameterGathering._free, PooledTensorMemory.release

    def again(self: ParameterGathering, bucket: Bucket) -> None:
        memory = bucket.values_memory
        buffer = getattr(memory, "_buffer", None)
        free(self, bucket)
        if bucket.name == SECOND and isinstance(memory, PooledTensorMemory) and buffer is not None:
            memory._buffer = buffer
            release(memory)

    patch.setattr(ParameterGathering, "_free", again)


@mutant(
    Told(
        CHANGED,
        "write bucket3.exp_avg, bucket3.exp_avg_sq",
        "changed in flight",
        "nvme",
        plan=ON_NVME,
        late=True,
    ),
)
def state_changed_while_it_is_written(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take the buffer of a set for something else while a thread writes it."""
    put = FileOffloadStore.put

    def reused(
        self: FileOffloadStore,
        keys: Sequence[str],
        tensors: Sequence[torch.Tensor],
        complete: Callable[[], object] = lambda: None,
    ) -> None:
        put(self, keys, tensors, complete)
        tensors[0].zero_()

    patch.setattr(FileOffloadStore, "put", reused)


@mutant(
    Told(
        FREED,
        "write bucket3.exp_avg, bucket3.exp_avg_sq",
        "freed in flight",
        "nvme",
        plan=ON_NVME,
        late=True,
    ),
)
def state_freed_while_it_is_written(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Lend the buffer of a set to the next one while a thread writes it."""
    start, moved = FileOffloadStore._start, FileOffloadStore._moved

    def freed(self: FileOffloadStore, found: FileFetch, *rest: Any) -> None:
        start(self, found, *rest)
        if found.phase == "writing":
            self._free(found)

    def once(self: FileOffloadStore, found: FileFetch) -> None:
        if found.buffer is not None:
            moved(self, found)
        for place in found.extents if found.phase == "done" else ():
            self._writing.pop(place.key, None)

    patch.setattr(FileOffloadStore, "_start", freed)
    patch.setattr(FileOffloadStore, "_moved", once)


@mutant(
    Told(
        CHANGED,
        "copy down slices",
        "changed in flight",
        "host",
        plan={"dp": 2, "accumulation": 1, "zero": {"stage": 1, "optimizer_offload": "host"}},
        late=True,
    )
)
def buffer_lent_while_it_is_copied_down(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take the end of the update for the end of the copy."""
    free = CopyingOffloadStore._free

    def early(self: CopyingOffloadStore, found: CopiedFetch, mark: Any) -> None:
        free(self, found, self._streams.record_event())

    patch.setattr(CopyingOffloadStore, "_free", early)


@mutant(
    Told(
        CHANGED,
        "all_to_all ulysses.forward.qkv",
        "changed in flight",
        "cp",
        plan=split("ulysses"),
        late=True,
    )
)
def heads_overwritten_while_they_are_sent(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Use the memory of what is sent again at once."""

    def exchanged(
        parts: torch.Tensor, group: Group, name: str, store: GradientStore | None = None
    ) -> torch.Tensor:
        received = torch.empty_like(parts)
        pending = group.all_to_all(received, parts, name=name, async_op=True)
        parts.zero_()
        if store is not None:
            store.run_deferred()
        pending.wait()
        return received

    patch.setattr(ulysses, "_exchanged", exchanged)


@mutant(
    Told(
        CHANGED,
        "all_gather parameters.bucket2",
        "changed in flight",
        "dp_shard",
        plan={"dp": 2, "accumulation": 1, "zero": {"stage": 3, "parameter_offload": "host"}},
        late=True,
    )
)
def slice_given_back_while_it_is_gathered(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give the buffer of a slice back as soon as its gather has begun."""
    gather = ParameterGathering._gather

    def released(self: ParameterGathering, bucket: Bucket) -> None:
        gather(self, bucket)
        read = self._reads.pop(bucket.name, None)
        if read is not None:
            read.release()

    patch.setattr(ParameterGathering, "_gather", released)
