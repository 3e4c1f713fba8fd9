"""Mistakes planted into the engine that trains: a rehearsal tells each by its rule and place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from echelon.config.load import load_job
from echelon.core.errors import ProofFailed
from echelon.parallel import tensor_overlap
from echelon.parallel.data import GradientReduction
from echelon.parallel.device_mesh import GroupMaker
from echelon.parallel.pipeline import PipelineExecutor
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.transport.collectives import Pending
from echelon.parallel.zero import ParameterGathering
from echelon.rehearsal.memory import MeteredPool, RehearsedCopyStreams
from echelon.rehearsal.run import Rehearsal, rehearse
from echelon.rehearsal.shapes import META

ZERO_3 = ("mesh.dp_shard=2", "zero.stage=3")
TIED = ("mesh.pp=2", "mesh.dp_replicate=2", "model.layers=4", "zero.bucket_bytes=65536")

CHUNKS = ("mesh.tp=4", "model.kv_heads=4", "mesh.sequence_parallel=true", "mesh.tp_overlap=ring")


def rehearsed(*flags: str) -> Rehearsal:
    return rehearse(load_job("nano", flags).plan, workers=1)


def rules_of(found: Rehearsal) -> set[str]:
    return {fault.rule.id for fault in found.faults}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("flags", [ZERO_3, TIED, CHUNKS])
def test_without_a_mistake_all_runs_hold(flags: Sequence[str]) -> None:
    found = rehearsed(*flags)
    found.require()
    assert found.holds


def test_a_missing_wait_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParameterGathering, "_await", lambda self, bucket: None)
    found = rehearsed(*ZERO_3)
    assert "rehearse-missing-wait" in rules_of(found)
    texts = [fault.text for fault in found.faults]
    assert any("reads parameters.bucket" in text for text in texts), texts
    with pytest.raises(ProofFailed, match="before its wait"):
        found.require()


def test_a_release_in_flight_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(self: ParameterGathering, bucket: Any) -> None:
        bucket.values_memory.release()
        self._await(bucket)

    make_whole = ParameterGathering._make_whole

    def gather_and_free(self: ParameterGathering, unit: str, *rest: Any) -> None:
        make_whole(self, unit, *rest)
        for bucket in self.sliced:
            if bucket.name in self._gathers:
                free(self, bucket)

    monkeypatch.setattr(ParameterGathering, "_make_whole", gather_and_free)
    assert "rehearse-released-in-flight" in rules_of(rehearsed(*ZERO_3))


def test_a_chunk_that_is_multiplied_before_it_came_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_on = tensor_overlap._pass_on

    def never_awaited(*given: Any) -> Pending:
        pending = pass_on(*given)
        return Pending() if given[-1].startswith("column.forward") else pending

    monkeypatch.setattr(tensor_overlap, "_pass_on", never_awaited)
    found = rehearsed(*CHUNKS)
    texts = [f.text for f in found.faults if f.rule.id == "rehearse-missing-wait"]
    assert any("reads column.forward.1 before its wait" in text for text in texts), texts


def test_a_chunk_released_in_flight_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is lent by a pool, and given back as soon as the message has begun."""
    pass_on = tensor_overlap._pass_on

    def lent(sent: torch.Tensor, received: torch.Tensor, group: Any, name: str) -> Pending:
        shapes = group._shapes
        pool = MeteredPool(META, shapes.memory, shapes.flight.released)
        piece = pool.take(received.nbytes)
        pending = pass_on(sent, piece.view(received.dtype).view(received.shape), group, name)
        pool.give_back(piece)
        return pending

    monkeypatch.setattr(tensor_overlap, "_pass_on", lent)
    found = rehearsed(*CHUNKS)
    texts = [f.text for f in found.faults if f.rule.id == "rehearse-released-in-flight"]
    assert "the memory of row.forward.1 is released in flight" in texts


def test_a_chunk_that_one_rank_does_not_pass_on_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_on = tensor_overlap._pass_on

    def left_out(sent: torch.Tensor, received: torch.Tensor, group: Any, name: str) -> Pending:
        if group.index == 2 and name == "row.forward.2":
            return Pending()
        return pass_on(sent, received, group, name)

    monkeypatch.setattr(tensor_overlap, "_pass_on", left_out)
    faults = rehearsed(*CHUNKS).faults
    assert {fault.rule.id for fault in faults} & {"rehearse-other-data", "rehearse-missing"}
    assert any("row.forward.2" in fault.text for fault in faults)


def test_a_sum_that_nobody_awaits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientReduction, "finish", lambda self: self._pending.clear())
    assert "rehearse-never-awaited" in rules_of(rehearsed("mesh.dp_replicate=2"))


def test_communicators_that_open_late_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage comes to the sum of the tied embedding in the middle of its backward."""
    monkeypatch.setattr(GroupMaker, "open_all", lambda self: None)
    found = rehearsed(*TIED)
    assert rules_of(found) == {"rehearse-deadlock"}
    (fault,) = found.faults
    assert "of tied" in fault.text


def test_calls_in_another_order_on_one_rank_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    start = GradientReduction.bucket_is_full
    kept: list[Any] = []

    def swapped(self: Any, bucket: Any, *, last: bool) -> None:
        data = self._groups[False].data
        if data.index == 1 and last and bucket.index == 0:
            kept.append(bucket)
            return
        start(self, bucket, last=last)
        while kept and data.index == 1:
            start(self, kept.pop(), last=last)

    monkeypatch.setattr(GradientReduction, "bucket_is_full", swapped)
    found = rehearsed("mesh.dp_replicate=2", "zero.bucket_bytes=65536")
    assert rules_of(found) == {"rehearse-mismatch"}
    assert "gradients.bucket0" in found.faults[0].text


def test_a_call_that_one_rank_leaves_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    start = GradientReduction.bucket_is_full

    def left_out(self: Any, bucket: Any, *, last: bool) -> None:
        if self._groups[False].data.index != 1 or bucket.index:
            start(self, bucket, last=last)

    monkeypatch.setattr(GradientReduction, "bucket_is_full", left_out)
    found = rehearsed("mesh.dp_replicate=2")
    assert rules_of(found) & {"rehearse-mismatch", "rehearse-missing"}


def test_a_read_of_the_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = PipelineExecutor._forward

    def reads(self: Any, *args: Any) -> torch.Tensor | None:
        out = forward(self, *args)
        if out is not None:
            float(out.sum())
        return out

    monkeypatch.setattr(PipelineExecutor, "_forward", reads)
    found = rehearsed("mesh.pp=2", "model.layers=4")
    (fault,) = found.faults
    assert fault.rule.id == "rehearse-host-read"
    assert fault.ranks == (0,)
    assert "in an action F" in fault.text


def test_a_copy_to_the_host_among_weight_gradients_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """W of a zero-bubble schedule: the read is told with the rank, the place and the action."""
    run_collected = GradientStore.run_collected

    def copies(self: GradientStore, work: Any) -> None:
        run_collected(self, work)
        torch.zeros(1, device=META).cpu()

    monkeypatch.setattr(GradientStore, "run_collected", copies)
    found = rehearsed("mesh.pp=2", "model.layers=4", "pipeline.schedule=zb-h1")
    assert rules_of(found) == {"rehearse-host-read"}
    assert {fault.ranks for fault in found.faults} == {(0, 1)}
    assert all("_to_copy" in fault.text for fault in found.faults)
    assert all("in an action W" in fault.text for fault in found.faults)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_shape_that_follows_from_numbers_ends_a_rehearsal_and_is_named(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    forward = PipelineExecutor._forward

    def selects(self: Any, *args: Any) -> torch.Tensor | None:
        out = forward(self, *args)
        if out is not None:
            out[out > 0].sum()
        return out

    monkeypatch.setattr(PipelineExecutor, "_forward", selects)
    plan = load_job("nano", ("mesh.pp=2", "model.layers=4")).plan
    with pytest.raises(ProofFailed, match=r"in an action F.*rank 0") as told:
        rehearse(plan, workers=workers)
    assert told.value.rules == ("rehearse-host-read",)


def test_a_rank_that_is_unlike_its_class_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 ranks one is rehearsed for all, and the last is always compared with it."""
    start = GradientReduction.bucket_is_full

    def twice(self: Any, bucket: Any, *, last: bool) -> None:
        start(self, bucket, last=last)
        data = self._groups[False].data
        if data.index == data.size - 1 and last:
            data.all_reduce(bucket.gradients, name="again").wait()

    monkeypatch.setattr(GradientReduction, "bucket_is_full", twice)
    found = rehearsed("mesh.dp_replicate=32", "cluster.preset=32xcpu", "batch.global_sequences=64")
    assert len(found.ranks) == 1
    assert rules_of(found) == {"rehearse-class"}
    assert found.faults[0].ranks == (31,)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_copy_of_activations_that_waits_for_no_stream_is_told(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("recompute.policy=full", "recompute.offload=host")
    rehearsed(*flags).require()
    copy = RehearsedCopyStreams.copy

    def early(self: Any, way: Any, copies: Any, after: Any) -> Any:
        return copy(self, way, copies, [] if way == direction else after)

    monkeypatch.setattr(RehearsedCopyStreams, "copy", early)
    rehearsal = rehearsed(*flags)
    assert rules_of(rehearsal) == {"rehearse-missing-wait"}
    assert all(f"copy {direction} activations" in fault.text for fault in rehearsal.faults)


def test_a_copy_of_slices_that_waits_for_no_stream_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("mesh.dp_shard=2", "zero.stage=1", "zero.optimizer_offload=host")
    rehearsed(*flags).require()
    monkeypatch.setattr(RehearsedCopyStreams, "wait_for", lambda self, mark: None)
    texts = [fault.text for fault in rehearsed(*flags).faults]
    assert any("copy up slices writes on stream slices up" in text for text in texts), texts


@pytest.mark.one_in(3)
def test_a_copy_that_the_allocator_does_not_know_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The input of a block is freed while it is copied down, and later kernels get its memory."""
    flags = ("mesh.dp_replicate=2", "recompute.policy=full", "recompute.offload=host")
    monkeypatch.setattr(RehearsedCopyStreams, "record_use", lambda self, tensor: None)
    texts = [fault.text for fault in rehearsed(*flags).faults]
    assert any(
        "copy down activations reads on stream activations down" in text
        and "the allocator, which does not know the copy, writes" in text
        for text in texts
    ), texts
