"""Metrics of a run, written as a run writes them, and what a tracker must have of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.telemetry.run_directory import RunDirectory, create_run
from tests.telemetry.runs import make_job

Line = dict[str, Any]


def start() -> Line:
    """Return the line of a start."""
    return {"kind": "start", "time": 1.0, "plan_hash": "0123456789abcdef", "steps": 20}


def step(number: int, *, attempt: int = 0) -> Line:
    """Return the line of a step of two ranks; another `attempt` finds another loss."""
    return {
        "kind": "step",
        "time": 1000.0 + number,
        "step": number,
        "mark": f"{number} {attempt:x}",
        "loss": 5.0 / (number + 0.1 * attempt) + 1 / 3,
        "grad_norm": 0.1 * number,
        "learning_rate": 3e-4,
        "tokens": 1000 + number,
        "step_s": 0.7 / number,
        "rank_waits_s": [0.01 * number, 0.2],
        "rank_used_bytes": [2**30 + number, 2**31],
        "peak_bytes": 2**30 + 7,
        "loss_scale": 1.0,
        "skipped": number == 2,
    }


def validation(number: int) -> Line:
    """Return the line of a validation."""
    return {"kind": "validation", "time": 1000.5 + number, "step": number, "loss": 4.0 / number}


def note(number: int, text: str) -> Line:
    """Return the line of something that happened."""
    return {"kind": "note", "time": 1000.6 + number, "step": number, "text": text}


FIRST = (
    *(start(), step(1), step(2), step(3), validation(3)),
    *({"kind": "checkpoint", "time": 1004.0, "step": 3, "path": "c/step-000003"}, step(4), step(5)),
)
"""A run that was killed after step 5; its checkpoint is of step 3."""
SECOND = (start(), step(4, attempt=1), note(4, "rank 1 was lost"), step(5, attempt=1), step(6))
"""The same run, resumed from it."""


def make_run(runs_dir: Path, name: str = "nano") -> RunDirectory:
    """Make a run without a line of metrics."""
    return create_run(
        runs_dir,
        name,
        name_was_given=True,
        plan=make_job().plan,
        run_toml='extends = "nano"\n[mesh]\npp = 1\n',
        environment={"host": "here"},
    )


def add_lines(run: Path, lines: Sequence[Line]) -> None:
    """Add lines to the metrics of a run."""
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def taken_last(lines: Sequence[Line]) -> list[Line]:
    """Return lines without the steps that were taken again, and without starts."""
    kept: dict[tuple[int, str], Line] = {}
    for line in lines:
        if line["kind"] == "step":
            kept = {key: one for key, one in kept.items() if key[0] < line["step"]}
        if line["kind"] != "start":
            kept[line["step"], line["kind"]] = line
    return list(kept.values())


def expected_values(lines: Sequence[Line]) -> dict[str, dict[int, float]]:
    """Return what a tracker must have of the numbers of these lines, by name and step."""
    found: dict[str, dict[int, float]] = {}

    def put(name: str, line: Line, value: float) -> None:
        found.setdefault(name, {})[line["step"]] = value

    for line in taken_last(lines):
        if line["kind"] == "validation":
            put("validation/loss", line, line["loss"])
        if line["kind"] != "step":
            continue
        for key in ("loss", "grad_norm", "learning_rate", "loss_scale", "skipped", "tokens"):
            put(f"train/{key}", line, float(line[key]))
        put("speed/step_s", line, line["step_s"])
        put("speed/tokens_per_s", line, line["tokens"] / line["step_s"])
        put("memory/peak_bytes", line, line["peak_bytes"])
        for key, name in (("rank_waits_s", "waits_s"), ("rank_used_bytes", "used_bytes")):
            put(f"{name}/min", line, min(line[key]))
            put(f"{name}/max", line, max(line[key]))
            for rank, value in enumerate(line[key]):
                put(f"{name}/rank_{rank:04d}", line, value)
    return found
