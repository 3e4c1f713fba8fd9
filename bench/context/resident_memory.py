"""What memory a function took: as torch's allocator counts it, and as the kernel does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

_STATUS = Path("/proc/self/status")


def allocated_peak(run: Callable[[], None]) -> int:
    """Return the most bytes that tensors made inside of `run` held at a time, on CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results: Any = profiler.profiler
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in results.kineto_results.events()
        if event.name() == "[memory]"
    )
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def resident_growth(run: Callable[[], None]) -> int:
    """Return how far the resident memory of this process rose above its start while `run` ran."""
    gc.collect()
    reset_peak()
    before = resident_bytes()
    run()
    return peak_resident_bytes() - before


def reset_peak() -> None:
    """Let the peak of resident memory begin at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return _kilobytes("VmRSS") * 1024


def peak_resident_bytes() -> int:
    """Return the largest resident memory since `reset_peak`."""
    return _kilobytes("VmHWM") * 1024


def _kilobytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise RuntimeError(f"{_STATUS} has no {name}")
