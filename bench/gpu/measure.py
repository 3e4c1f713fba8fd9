"""Measure one case in a process of its own; the last line that it prints is the result as JSON."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import counters as dynamo_counters
from torch.profiler import ProfilerActivity, profile

from bench.gpu.loads import Settings
from bench.gpu.subjects import MissingPackage, Step, build
from bench.harness.rank import reset_peak, status_bytes

RESULT = "RESULT "
TOP = 10


def main() -> int:
    """Measure, and say what was measured or why it was not."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.measure")
    parser.add_argument("settings", type=Settings.from_json)
    settings: Settings = parser.parse_args().settings
    try:
        result = measure(settings)
    except MissingPackage as missing:
        result = {"skipped": str(missing)}
    except torch.OutOfMemoryError as error:
        result = {"failed": f"out of memory: {str(error).splitlines()[0]}"}
    print(RESULT + json.dumps(result), flush=True)
    return 0


def measure(settings: Settings) -> dict[str, Any]:
    """Return the seconds per step, peak memory, launches and the longest kernels of a case."""
    step, close = build(settings)
    try:
        dynamo_counters.clear()
        first = float(step())
        for _ in range(settings.warmup - 1):
            step()
        if settings.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            reset_peak()
        times = [_timed(step, settings) for _ in range(settings.repeats)]
        peak = _peak_bytes(settings.device)
        last = float(step())
        launches, kernels = profiled(step, settings.device)
    finally:
        close()
    return {
        "step_s": statistics.median(times),
        "spread": (max(times) - min(times)) / statistics.median(times),
        "peak_bytes": peak,
        "first_loss": first,
        "last_loss": last,
        "launches": launches,
        "kernels": kernels,
        "graphs": dynamo_counters["stats"]["unique_graphs"],
        "graph_breaks": sum(dynamo_counters["graph_break"].values()),
        "torch": torch.__version__,
    }


def _timed(step: Step, settings: Settings) -> float:
    """Return the seconds per step of several steps in a row; nothing waits in between."""
    _synchronize(settings.device)
    start = time.perf_counter()
    for _ in range(settings.steps):
        step()
    _synchronize(settings.device)
    return (time.perf_counter() - start) / settings.steps


def profiled(step: Callable[[], object], device: str) -> tuple[int | None, list[list[object]]]:
    """Return the kernels launched by one step, and the ten that took longest: (name, calls, s).

    On a CPU there are no launches; operators stand for kernels.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=activities) as profiler:
        step()
        _synchronize(device)
    took: defaultdict[str, list[float]] = defaultdict(list)
    if device == "cuda":
        for event in profiler.events() or ():
            if str(event.device_type).endswith("CUDA") and not _is_annotation(event):
                took[event.name].append(event.time_range.elapsed_us() / 1e6)
        launches = sum(
            len(each) for name, each in took.items() if not name.startswith(("Memcpy", "Memset"))
        )
        rows = [[name, len(each), sum(each)] for name, each in took.items()]
    else:
        launches = None
        rows = [
            [entry.key, entry.count, entry.self_cpu_time_total / 1e6]
            for entry in profiler.key_averages()
        ]
    longest = sorted(rows, key=lambda row: -float(row[2]))[:TOP]
    return launches, [list(row) for row in longest]


def _is_annotation(event: Any) -> bool:
    """Return whether an event of the GPU's timeline is a range that someone named, no kernel."""
    return bool(getattr(event, "is_user_annotation", False))


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peak_bytes(device: str) -> int:
    """The most that tensors took on the GPU; on a CPU, the resident set."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else status_bytes("VmHWM")


if __name__ == "__main__":
    sys.exit(main())
