"""One rank of one case: builds its step function, then runs steps when the controller says so.

Between commands a rank waits on a pipe and uses no CPU, so the cases of a mode can all be alive
and take turns. Started by `bench.harness.ranks`; runs in Echelon's environment or in the peers'.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from bench.harness.spec import NotApplicable, Settings, StepFunction


def main() -> int:
    """Serve one controller until it says stop or goes away."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=Settings.from_json, required=True)
    parser.add_argument("--commands", type=int, required=True)
    parser.add_argument("--replies", type=int, required=True)
    arguments = parser.parse_args()
    with os.fdopen(arguments.commands) as commands, os.fdopen(arguments.replies, "w") as replies:
        try:
            _serve(arguments.settings, commands, replies)
        except NotApplicable as reason:
            _reply(replies, {"not_applicable": str(reason)})
        except BaseException as error:
            traceback.print_exc()
            _reply(replies, {"error": "".join(traceback.format_exception_only(error))})
            return 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the frameworks' own exit handlers may wait for ranks that are gone already


def _serve(settings: Settings, commands: TextIO, replies: TextIO) -> None:
    torch.set_num_threads(settings.threads)
    module: Any = importlib.import_module(settings.module)
    step: StepFunction = module.build(settings)
    recorded = getattr(module, "recorded_bytes", None)
    _reply(replies, {"ready": True, "torch": torch.__version__})
    for line in commands:
        command = json.loads(line)
        if command["do"] == "stop":
            break
        if command["do"] == "profile":
            _reply(replies, {"operators": _profile(step, command["first"], command["steps"])})
            continue
        if recorded is not None:
            recorded(step, reset=True)
        reply = _run(step, command["first"], command["warmup"], command["steps"])
        if recorded is not None:
            reply["recorded_bytes"] = recorded(step, reset=False)
        _reply(replies, reply)
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _run(step: StepFunction, first: int, warmup: int, steps: int) -> dict[str, object]:
    """Run steps; the warm-up ones are neither timed nor counted in CPU seconds or memory."""
    losses = [step(first + number) for number in range(warmup)]
    reset_peak()
    cpu = time.process_time()
    times: list[float] = []
    start = time.perf_counter()
    for number in range(steps):
        losses.append(step(first + warmup + number))
        now = time.perf_counter()
        times.append(now - start)
        start = now
    return {
        "step_s": statistics.median(times) if times else 0.0,
        "times": times,
        "cpu_s": (time.process_time() - cpu) / max(steps, 1),
        "peak_bytes": status_bytes("VmHWM"),
        "losses": losses,
    }


def _profile(step: StepFunction, first: int, steps: int) -> list[list[object]]:
    """Return (operator, calls per step, own CPU seconds per step), most expensive first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for number in range(steps):
            step(first + number)
    rows = [
        [entry.key, entry.count / steps, entry.self_cpu_time_total / 1e6 / steps]
        for entry in profiler.key_averages()
    ]
    return sorted(rows, key=lambda row: -float(row[2]))[:40]


def _reply(replies: TextIO, value: dict[str, object]) -> None:
    replies.write(json.dumps(value) + "\n")
    replies.flush()


def reset_peak() -> None:
    """Let the peak of resident memory begin at what is resident now (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def status_bytes(name: str) -> int:
    """A size of this process: "VmRSS" resident now, "VmHWM" its peak (Linux; 0 elsewhere)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    sys.exit(main())
