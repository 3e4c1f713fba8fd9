"""Seconds of a step with and without trackers: `python -m bench.trackers`.

Runs of one size in turn, none first: without a tracker, with each, and with all. One number of
each: the median step over all of its runs, without the first steps, over that of runs without a
tracker. A tracker has no call in the process that trains; what is measured here is what its own
process takes from a machine whose cores are all in use, at the lowest priority.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from echelon.core.choices.trackers import TRACKERS
from echelon.telemetry.events import STEP
from echelon.telemetry.json_lines import read_entries
from echelon.telemetry.trackers.progress import mirror_status

_WARM_STEPS = 5  # steps that are not counted
NONE = "none"


def measure(folder: Path, name: str, trackers: tuple[str, ...], steps: int) -> list[float]:
    """Train a run with these trackers; return the seconds of its steps."""
    chosen = json.dumps(list(trackers)) if trackers else NONE
    settings = (
        *(f"train.steps={steps}", f"train.run_name={name}", f"observe.trackers={chosen}"),
        *("observe.events=false", f"train.runs_dir={folder}", "optimizer.warmup_steps=0"),
    )
    words = [word for one in settings for word in ("--set", one)]
    command = [sys.executable, "-m", "echelon", "train", "nano", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lacking = [one.says() for one in mirror_status(folder / name) if not one.complete]
    if lacking:
        print(f"{name}: {'; '.join(lacking)}", file=sys.stderr)
    entries = read_entries(folder / name / "metrics.jsonl")
    seconds = [one.number("step_s") for one in entries if one.text("kind") == STEP]
    return [one for one in seconds[_WARM_STEPS:] if one is not None]


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the median step of each choice over that without a tracker."""
    base = statistics.median(seconds[NONE])
    return {name: statistics.median(found) / base for name, found in seconds.items()}


def main() -> None:
    """Measure, and print a line for each choice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each choice")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run")
    asked = parser.parse_args()
    choices = {NONE: (), **{one: (one,) for one in TRACKERS}, "all": tuple(TRACKERS)}
    seconds: dict[str, list[float]] = {name: [] for name in choices}
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for turn in range(asked.rounds):
            for name, trackers in choices.items():
                seconds[name] += measure(Path(folder), f"{name}-{turn}", trackers, asked.steps)
    print(f"{os.cpu_count()} cores, {asked.rounds} runs of {asked.steps} steps each")
    for name, ratio in ratios(seconds).items():
        median_ms = 1e3 * statistics.median(seconds[name])
        print(f"{name:<12}{median_ms:8.2f} ms a step   {ratio:.3f} x")


if __name__ == "__main__":
    main()
