"""Memory in flight: who reads, writes or releases it before the wait."""

from __future__ import annotations

import pytest
import torch

from echelon.rehearsal.memory import MISSING_WAIT, NEVER_AWAITED, RELEASED_IN_FLIGHT, MemoryInFlight


def shape(*size: int) -> torch.Tensor:
    return torch.empty(size, device="meta")


@pytest.mark.parametrize(("of_result", "write", "wrong"), [
    (True, False, True),
    (True, True, True),
    (False, True, True),
    (False, False, False),
])  # fmt: skip
def test_a_result_is_left_alone_and_what_is_read_may_be_read(
    of_result: bool, write: bool, wrong: bool
) -> None:
    flight, reads, writes = MemoryInFlight(), shape(4), shape(4)
    flight.begin(0, "gradients.bucket0", [reads], [writes])
    flight.touched(writes if of_result else reads, write=write, by="mul", where="x.py:1")
    assert [one.rule for one in flight.misuses] == ([MISSING_WAIT] if wrong else [])
    flight.end(0)
    flight.touched(writes, write=True, by="mul", where="x.py:2")
    assert len(flight.misuses) == wrong


def test_only_the_part_that_was_given_is_taken() -> None:
    flight, whole = MemoryInFlight(), shape(8)
    flight.begin(0, "gradients.bucket0", [], [whole[:4]])
    flight.touched(whole[4:], write=True, by="add_", where="x.py:1")
    assert not flight.misuses
    flight.touched(whole.view(2, 4)[:, 1], write=True, by="add_", where="x.py:2")
    (misuse,) = flight.misuses
    assert misuse.text == "add_ at x.py:2 writes gradients.bucket0 before its wait"


def test_one_of_two_that_are_under_way_is_still_told() -> None:
    flight, x = MemoryInFlight(), shape(4)
    flight.begin(0, "first", [x], [])
    flight.begin(1, "second", [x], [])
    flight.end(0)
    flight.touched(x, write=True, by="zero_", where="x.py:1")
    assert [one.text for one in flight.misuses] == ["zero_ at x.py:1 writes second before its wait"]


def test_released_and_forgotten_memory_is_told_once() -> None:
    flight, x = MemoryInFlight(), shape(4)
    flight.begin(0, "gradients.bucket0", [], [x])
    for _ in range(2):
        flight.released(x.untyped_storage()._cdata)
        flight.step_ended()
    assert [one.rule for one in flight.misuses] == [RELEASED_IN_FLIGHT, NEVER_AWAITED]


def test_parameters_may_be_under_way_when_a_step_ends() -> None:
    flight = MemoryInFlight()
    flight.begin(0, "parameters.bucket0", [], [shape(4)])
    flight.step_ended()
    assert not flight.misuses
