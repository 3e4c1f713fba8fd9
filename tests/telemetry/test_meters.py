"""Meters, with a clock and a device that the test holds."""

from __future__ import annotations

from mmap import mmap

import pytest
import torch

from echelon.telemetry.meters import Throughput, TimeRemaining, device_memory, process_memory


def test_throughput_divides_sums_over_the_last_steps() -> None:
    meter = Throughput(window=2)
    assert (meter.tokens_per_s, meter.step_s) == (0.0, 0.0)
    for tokens, seconds in ((5, 100.0), (100, 1.0), (100, 3.0)):
        meter.add(tokens, seconds)
    assert meter.tokens_per_s == 50.0
    assert meter.step_s == 2.0


def test_throughput_leaves_out_the_first_step_once_there_is_a_second() -> None:
    meter = Throughput()
    meter.add(100, 50.0)
    assert meter.tokens_per_s == 2.0
    meter.add(100, 1.0)
    assert (meter.tokens_per_s, meter.step_s) == (100.0, 1.0)
    meter.add(300, 1.0)
    assert meter.tokens_per_s == 200.0


def test_the_time_left_counts_all_that_passes_and_leaves_out_the_first_step() -> None:
    now = [0.0]
    left = TimeRemaining(10, clock=lambda: now[0])
    assert left.seconds(2.0) == 20.0
    now[0] = 50.0
    left.step(1)
    assert left.seconds(3.0) == 27.0
    now[0] = 54.0
    left.step(3)
    assert left.seconds(3.0) == 14.0
    left.step(12)
    assert left.seconds(3.0) == 0


def test_the_memory_of_this_process_grows_with_what_it_holds() -> None:
    before = process_memory()
    held = mmap(-1, 64 * 2**20)  # new pages, never those that something freed before
    held.write(bytes(64 * 2**20))
    after = process_memory()
    assert after.used_bytes - before.used_bytes > 32 * 2**20
    assert after.peak_bytes >= after.used_bytes
    held.close()
    freed = process_memory()
    assert freed.peak_bytes >= after.used_bytes - 2**20
    assert 0 < freed.used_bytes < freed.total_bytes


def test_the_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2, 80))
    memory = device_memory()
    assert (memory.used_bytes, memory.peak_bytes, memory.total_bytes) == (3, 5, 80)


def test_the_peak_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    memory = process_memory()
    assert memory.peak_bytes == memory.used_bytes
