"""The batches of the next step are copied while the device works on those of this one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch

from echelon.models.batch import IGNORED_LABEL, TokenBatch, start_copy
from echelon.parallel.offload.host_memory import (
    CompletedEvent,
    CopyDirection,
    CopyStreams,
    StreamEvent,
    TensorCopy,
)
from echelon.training.data.feed import BatchFeed

CPU, DEVICE = torch.device("cpu"), torch.device("meta")


class DelayedStreams(CopyStreams):
    """Copies that are done when somebody waits for them."""

    def __init__(self) -> None:
        """Begin with none."""
        self.under_way: dict[int, Sequence[TensorCopy]] = {}
        self.ordered: list[bool] = []

    def copy(
        self, direction: CopyDirection, copies: Sequence[TensorCopy], after: Iterable[StreamEvent]
    ) -> StreamEvent:
        """Note a copy, and whether it comes after what the computation was given."""
        assert direction == "up"
        self.ordered.append(bool(list(after)))
        mark = CompletedEvent()
        self.under_way[id(mark)] = copies
        return mark

    def wait_for(self, mark: StreamEvent) -> None:
        """Do the copy."""
        for target, source in self.under_way.pop(id(mark)):
            target.copy_(source)


def batch_of(step: int) -> TokenBatch:
    """Return the one batch of a step."""
    tokens = torch.full((2, 3), step)
    labels = tokens.clone()
    labels[0, : step + 1] = IGNORED_LABEL
    return TokenBatch.from_rows(tokens, labels, torch.tensor([step, step + 1]))


class Feed(BatchFeed):
    """A feed for a device that is this host's memory, with a note of what was loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_steps: int) -> None:
        """Let what is made for the device be made here, and what is locked stay as it is."""
        self.loaded: list[int] = []
        self.streams = DelayedStreams()
        super().__init__(self._note, DEVICE, self.streams, num_steps=num_steps)
        made = torch.empty_like
        monkeypatch.setattr("torch.empty_like", lambda one, device: made(one))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda one: one)

    def _note(self, step: int) -> list[TokenBatch]:
        self.loaded.append(step)
        return [batch_of(step)]


def test_the_next_batches_arrive_when_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(monkeypatch, num_steps=4)
    feed.prepare(1)
    assert feed.loaded == [1]
    assert len(feed.streams.under_way) == 1
    (first,) = feed.take(1)
    assert feed.loaded == [1]
    assert first.tokens_N.tolist() == [1] * 6
    assert first.labels_N.tolist() == batch_of(1).labels_N.tolist()
    assert first.sample_ids_B.tolist() == [1, 2]


def test_two_sets_of_buffers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(monkeypatch, num_steps=5)
    taken: list[TokenBatch] = []
    for step in range(1, 5):
        feed.prepare(step)
        if taken:
            assert taken[-1].tokens_N.tolist() == [step - 1] * 6, "the step before still reads it"
        taken.extend(feed.take(step))
    places = [one.tokens_N.data_ptr() for one in taken]
    assert places[0] == places[2] != places[1] == places[3]
    assert feed.streams.ordered == [True, True, False, False], "fresh memory may still be read"


def test_counts_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(monkeypatch, num_steps=4)
    feed.prepare(1)
    (batch,) = feed.take(1)
    batch.labels_N.fill_(IGNORED_LABEL)
    assert batch.num_valid() == 4, "the device is not asked"


def test_nothing_is_loaded_past_the_last_step_nor_ahead_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed = Feed(monkeypatch, num_steps=2)
    feed.prepare(2)
    assert feed.loaded == []
    loaded: list[int] = []

    def load(step: int) -> list[TokenBatch]:
        loaded.append(step)
        return [batch_of(step)]

    on_cpu = BatchFeed(load, CPU, CopyStreams(), num_steps=4)
    on_cpu.prepare(0)
    assert loaded == []
    assert on_cpu.take(0)[0].tokens_N.tolist() == [0] * 6


def test_batches_of_another_step_are_loaded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(monkeypatch, num_steps=9)
    feed.prepare(3)
    (batch,) = feed.take(5)
    assert feed.loaded == [3, 5]
    assert batch.num_valid() == batch_of(5).num_valid()


def test_a_copy_to_a_gpu_is_from_locked_memory_and_not_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def to(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        asked.append((device, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda one: (asked.append("locked"), one)[1])
    monkeypatch.setattr(torch.Tensor, "to", to)
    gpu = torch.device("cuda", 0)
    start_copy(torch.arange(3), gpu)
    assert asked == ["locked", (gpu, True)]
