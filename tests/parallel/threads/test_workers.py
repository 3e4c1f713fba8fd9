"""Threads of replicas: where they are, what they count, take over, raise, and end with."""

from __future__ import annotations

import threading
import traceback

import pytest
import torch

from echelon.core.event import EventList
from echelon.parallel.threads.workers import (
    ReplicaThreads,
    ThreadSeconds,
    num_bytes,
    replica_devices,
    start_thread,
)
from echelon.parallel.transport.recorder import Recorder

CPU = torch.device("cpu")


def test_replicas_are_on_the_first_gpus_or_all_on_the_cpu() -> None:
    assert replica_devices(CPU, 3) == [CPU] * 3
    gpus = [torch.device("cuda", n) for n in range(4)]
    assert replica_devices(gpus[0], 3) == gpus[:3]
    assert replica_devices(gpus[2], 4) == [gpus[2], gpus[0], gpus[1], gpus[3]]
    assert replica_devices(gpus[2], 2) == [gpus[2], gpus[0]]


def test_a_thread_keeps_its_place_and_ends() -> None:
    before = set(threading.enumerate())
    thread = start_thread(1, CPU, 2)
    names = {thread.submit(lambda: threading.current_thread().name).result() for _ in range(3)}
    assert len(names) == 1
    assert names.pop().startswith("replica-1")
    thread.shutdown()
    assert set(threading.enumerate()) <= before


def test_passes_of_a_thread_add_up() -> None:
    seconds = ThreadSeconds()
    seconds.add(wall_s=2.0, blocked_s=0.5)
    seconds.add(wall_s=1.0, blocked_s=0.0)
    assert (seconds.wall_s, seconds.blocked_s) == (3.0, 0.5)


def test_bytes_are_those_of_elements() -> None:
    assert num_bytes(torch.zeros(3, 5, dtype=torch.float64)) == 120


def test_each_replica_runs_in_its_thread_and_is_written_down() -> None:
    events = EventList()
    threads = ReplicaThreads([CPU] * 3, Recorder(0, events))
    names = threads.run("forward", lambda index: (index, threading.current_thread().name))
    assert [index for index, _ in names] == [0, 1, 2]
    assert len({name for _, name in names}) == 3
    assert threads.run("forward", lambda index: index, count=2) == [0, 1]
    assert [event.name for event in events.events] == [
        f"forward of replica {index}" for index in (0, 1, 2, 0, 1)
    ]
    threads.close()


def test_a_thread_computes_in_the_modes_of_the_caller() -> None:
    threads = ReplicaThreads([CPU] * 2, Recorder(0, EventList()))

    def modes(index: int) -> tuple[bool, bool, bool, torch.dtype]:
        dtype = torch.get_autocast_dtype("cpu")
        on = torch.is_autocast_enabled("cpu")
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), on, dtype

    default = torch.get_autocast_dtype("cpu")
    assert threads.run("x", modes) == [(True, False, False, default)] * 2
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert threads.run("x", modes) == [(False, False, True, torch.float16)] * 2
    with torch.inference_mode():
        assert threads.run("x", modes) == [(False, True, False, default)] * 2
    assert threads.run("x", modes) == [(True, False, False, default)] * 2
    threads.close()


def test_what_replicas_raise_names_the_first_and_keeps_its_traceback() -> None:
    threads = ReplicaThreads([CPU] * 4, Recorder(0, EventList()))

    def deep_inside(index: int) -> int:
        if index in (1, 3):
            raise KeyError(f"of {index}")
        return index

    with pytest.raises(KeyError, match="of 1") as caught:
        threads.run("forward", deep_inside)
    assert caught.value.__notes__ == [
        "in replica 1 of 4, on cpu",
        "replica 3 raised too: KeyError: 'of 3'",
    ]
    told = "".join(traceback.format_exception(caught.value))
    assert "in deep_inside" in told
    assert "in replica 1 of 4" in told
    assert threads.run("forward", lambda index: index) == [0, 1, 2, 3]
    threads.close()
