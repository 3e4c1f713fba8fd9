"""Threads of replicas: where they are, what they count, and what they end with."""

from __future__ import annotations

import threading

import torch

from echelon.parallel.threads.replicas import (
    ThreadSeconds,
    num_bytes,
    replica_devices,
    start_thread,
)

CPU = torch.device("cpu")


def test_replicas_are_on_the_first_gpus_or_all_on_the_cpu() -> None:
    assert replica_devices(CPU, 3) == [CPU] * 3
    gpus = [torch.device("cuda", n) for n in range(4)]
    assert replica_devices(gpus[0], 3) == gpus[:3]
    assert replica_devices(gpus[2], 4) == [gpus[2], gpus[0], gpus[1], gpus[3]]
    assert replica_devices(gpus[2], 2) == [gpus[2], gpus[0]]


def test_a_thread_keeps_its_place_and_ends() -> None:
    thread = start_thread(1, CPU, 2)
    names = {thread.submit(lambda: threading.current_thread().name).result() for _ in range(3)}
    assert len(names) == 1
    assert names.pop().startswith("replica-1")
    thread.shutdown()
    assert not any(one.name.startswith("replica-1") for one in threading.enumerate())


def test_passes_of_a_thread_add_up() -> None:
    seconds = ThreadSeconds()
    seconds.add(wall_s=2.0, blocked_s=0.5)
    seconds.add(wall_s=1.0, blocked_s=0.0)
    assert (seconds.wall_s, seconds.blocked_s) == (3.0, 0.5)


def test_bytes_are_those_of_elements() -> None:
    assert num_bytes(torch.zeros(3, 5, dtype=torch.float64)) == 120
