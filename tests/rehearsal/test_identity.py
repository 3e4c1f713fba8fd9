"""Data that is taken for other data: a rehearsal names both, whatever the operation is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from echelon.parallel.data import GradientReduction
from echelon.parallel.device_mesh import GroupMaker
from echelon.parallel.pipeline import PipelineExecutor
from echelon.parallel.servers import PulledParameters
from echelon.parallel.zero import ParameterGathering
from echelon.schedule.messages import Payload
from tests.rehearsal.test_planted import TIED, rehearsed

OTHER_DATA = "rehearse-other-data"
PIPE = ("mesh.pp=2", "model.layers=4")
TWO_STEPS_AHEAD = (*PIPE, "pipeline.schedule=gpipe")
REDUCED = ("mesh.dp_replicate=2", "zero.bucket_bytes=65536")
SERVED = ("mesh.dp_replicate=2", "servers.count=2", "precision.parameters=bf16")

Mutant = Callable[[pytest.MonkeyPatch], None]


def texts_of(*flags: str, rule: str = OTHER_DATA) -> list[str]:
    return [fault.text for fault in rehearsed(*flags).faults if fault.rule.id == rule]


def tensors_of_two_sends_are_swapped(patch: pytest.MonkeyPatch) -> None:
    give, held = PipelineExecutor._give, list[Any]()

    def swapped(self: Any, state: Any, step: Any, tensor: Any) -> None:
        if step.send is None or step.send.payload is not Payload.ACTIVATION:
            return give(self, state, step, tensor)
        held.append((step, tensor))
        if len(held) == 2:
            (first, x), (second, y) = held
            held.clear()
            give(self, state, first, y)
            give(self, state, second, x)
        return None

    patch.setattr(PipelineExecutor, "_give", swapped)


def two_sends_are_swapped(patch: pytest.MonkeyPatch) -> None:
    give, held = PipelineExecutor._give, list[Any]()

    def swapped(self: Any, state: Any, step: Any, tensor: Any) -> None:
        if step.send is None or step.send.payload is not Payload.ACTIVATION:
            return give(self, state, step, tensor)
        held.append((step, tensor))
        while len(held) == 2 or (held and not held[0]):
            for pair in (held[1], held[0]):
                give(self, state, *pair)
            held.clear()
        return None

    patch.setattr(PipelineExecutor, "_give", swapped)


def two_receives_are_swapped(patch: pytest.MonkeyPatch) -> None:
    post = PipelineExecutor._post_receive

    def swapped(self: Any, state: Any, message: Any, batch: Any) -> None:
        post(self, state, message, batch)
        same = [m for m in state.arriving if m.payload is message.payload]
        if len(same) == 2:
            first, second = same
            pair = state.arriving[second], state.arriving[first]
            state.arriving[first], state.arriving[second] = pair

    patch.setattr(PipelineExecutor, "_post_receive", swapped)


def directions_are_exchanged(patch: pytest.MonkeyPatch) -> None:
    """The middle stage takes an activation for a gradient, where both have come."""
    post = PipelineExecutor._post_receive

    def exchanged(self: Any, state: Any, message: Any, batch: Any) -> None:
        post(self, state, message, batch)
        kinds = {message.payload: message for message in state.arriving}
        if len(kinds) == 2:
            first, second = kinds.values()
            pair = state.arriving[second], state.arriving[first]
            state.arriving[first], state.arriving[second] = pair

    patch.setattr(PipelineExecutor, "_post_receive", exchanged)


def graphs_are_taken_in_the_order_of_making(patch: pytest.MonkeyPatch) -> None:
    """Backward runs the latest graph of its stage, with the gradient of its microbatch."""
    backward = PipelineExecutor._backward

    def latest(self: Any, state: Any, action: Any, dy_ND: Any) -> Any:
        key = action.stage, action.microbatch
        *_, other = (one for one in state.outputs if one[0] == action.stage)
        for left in (state.outputs, state.inputs):
            if other in left:
                left[key], left[other] = left[other], left[key]
        return backward(self, state, action, dy_ND)

    patch.setattr(PipelineExecutor, "_backward", latest)


def the_latest_message_is_taken(patch: pytest.MonkeyPatch) -> None:
    """Take of a channel what was asked for last, whatever the action needs."""
    take = PipelineExecutor._take

    def latest(self: Any, state: Any, step: Any) -> Any:
        if step.receive is None:
            return take(self, state, step)
        *_, message = (one for one in state.arriving if one.channel == step.receive.channel)
        tensor, pending = state.arriving.pop(message)
        pending.wait()
        return tensor

    patch.setattr(PipelineExecutor, "_take", latest)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("mutant", "flags", "words"),
    [
        (graphs_are_taken_in_the_order_of_making, PIPE, "BW0.0 runs the graph that F0.1 has left"),
        (
            the_latest_message_is_taken,
            TWO_STEPS_AHEAD,
            "BW0.0 computes on gradient 2 stage 1 -> 0, and its input is gradient 0 stage 1 -> 0",
        ),
        (
            tensors_of_two_sends_are_swapped,
            TWO_STEPS_AHEAD,
            "activation 0 stage 0 -> 1 at parallel/pipeline.py:{line} has the data of activation 1 "
            "stage 0 -> 1",
        ),
        (
            two_sends_are_swapped,
            TWO_STEPS_AHEAD,
            "send activation 1 stage 0 -> 1 with activation 1 stage 0 -> 1, from element 0 by "
            "ranks like (0,), receive activation 0 stage 0 -> 1",
        ),
        (
            two_receives_are_swapped,
            TWO_STEPS_AHEAD,
            "F1.0 computes on activation 1 stage 0 -> 1, and its input is activation 0",
        ),
        (
            directions_are_exchanged,
            ("mesh.pp=3", "model.layers=6"),
            "stage 2 -> 1, and its input is activation",
        ),
    ],
)
def test_messages_with_data_of_others_are_named(
    mutant: Mutant, flags: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    texts = texts_of(*flags)
    before, _, after = words.partition("{line}")
    assert any(before in text and after in text for text in texts), texts


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_bucket_at_the_place_of_another_one_is_named(
    everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank, members differ; on all of them, name and memory do. Copies are followed."""
    start = GradientReduction._start_first_sum
    seen: list[Any] = []

    def misplaced(self: Any, bucket: Any, hops: Any) -> Any:
        seen.append(bucket)
        data = self._groups[False].data
        if bucket.index != 2 or (data.index != 1 and not everywhere):
            return start(self, bucket, hops)
        other = next(earlier for earlier in reversed(seen) if earlier.index == 1)
        gradients = other.gradients[: bucket.gradients.numel()]
        return start(self, replace(bucket, gradients=gradients), hops)

    monkeypatch.setattr(GradientReduction, "_start_first_sum", misplaced)
    for dtype in ("precision.reduction=fp32", "precision.reduction=bf16"):
        texts = texts_of(*REDUCED, dtype)
        assert any(
            "gradients.bucket2 at parallel/data.py" in text
            and "has the data of bucket1: gradients of layers" in text
            for text in texts
        ), texts


def test_a_slice_from_another_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank gives the first slice, as if it were its own."""
    gather = ParameterGathering._gather

    def first(self: Any, bucket: Any) -> None:
        own = bucket.value_slice
        bucket.value_slice = bucket.values[: own.numel()]
        gather(self, bucket)
        bucket.value_slice = own

    monkeypatch.setattr(ParameterGathering, "_gather", first)
    texts = texts_of("mesh.dp_shard=2", "zero.stage=1")
    assert any("the slice of parameters.bucket0 is parameters of" in text for text in texts), texts
    assert all("from element 0, and its place" in text for text in texts), texts


def test_a_range_of_a_server_at_another_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    end_update = PulledParameters.end_update

    def shifted(self: Any) -> None:
        ranges = self._ranges
        self._ranges = [
            [range(part.start - 1, part.stop - 1) if part.start else part for part in parts]
            for parts in ranges
        ]
        end_update(self)
        self._ranges = ranges

    monkeypatch.setattr(PulledParameters, "end_update", shifted)
    texts = texts_of(*SERVED)
    assert any("rank 3 sends" in text and "parameters.bucket" in text for text in texts), texts


def test_communicators_made_in_another_order_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    between = GroupMaker.between_stages
    other = {"pipe_forward": "pipe_backward", "pipe_backward": "pipe_forward"}

    def swapped(self: Any, name: str, *args: Any, **named: Any) -> Any:
        if self._recorder.rank == 1:
            name = other.get(name, name)
        return between(self, name, *args, **named)

    monkeypatch.setattr(GroupMaker, "between_stages", swapped)
    texts = texts_of(*PIPE, rule="rehearse-mismatch")
    assert any(
        "pipe_forward from rank 0 on by ranks like (0,), pipe_backward from rank 0 on" in text
        for text in texts
    ), texts


def test_communicators_first_used_in_another_order_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    open_all = GroupMaker.open_all

    def backwards(self: Any) -> None:
        if self._recorder.rank == 1:
            self._collective.reverse()
        open_all(self)

    monkeypatch.setattr(GroupMaker, "open_all", backwards)
    (text,) = texts_of(*TIED, rule="rehearse-deadlock")
    assert "ranks like (1,) wait at the first call, all_reduce dp" in text
    assert "ranks like (3,) wait at the first call, all_reduce world" in text


@pytest.mark.one_in(3)
def test_directions_by_payload_are_named_where_stages_wrap_around(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An activation from the last rank to the first is no message to the next rank."""

    def by_payload(self: Any, message: Any) -> Any:
        forward = message.payload is Payload.ACTIVATION
        return self.groups.pipe_forward if forward else self.groups.pipe_backward

    monkeypatch.setattr(PipelineExecutor, "_group_for", by_payload)
    flags = ("pipeline.schedule=interleaved-1f1b", "pipeline.virtual_stages=2")
    text, *_ = texts_of(*PIPE, *flags, rule="rehearse-mismatch")
    assert "on pipe_forward: receive activation 0 stage 1 -> 2 from rank 1" in text
    assert "receive activation 0 stage 0 -> 1 from rank 0" in text
