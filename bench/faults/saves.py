"""Kill a run again and again while it saves: `python -m bench.faults.saves [--kills 50]`.

Each time the run is started, is let commit once, is killed (`kill -9`, one rank or all at once) at
a random moment, and what it left behind must load, bit for bit. The run is synthetic and does
nothing but save; with `--run-dir DIR -- COMMAND ...` it is a command that trains into DIR, which is
started again with `--resume DIR`. Exit 1 where a kill left a run that does not load.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.faults.saver import check_values, start_savers
from echelon.core.errors import EchelonError
from echelon.training.checkpoint.folder import CHECKPOINTS, find_latest, list_checkpoints
from echelon.training.checkpoint.load import check_checkpoint

POLL_S = 0.001


@dataclass(slots=True, kw_only=True)
class Tally:
    """Count what the kills did."""

    kills: int = 0
    within_a_save: int = 0
    loadable: int = 0
    last_step: int = 0


Begin = Callable[[], Sequence[psutil.Process]]


def kill_repeatedly(run_dir: Path, *, begin: Begin, check: Callable[[], int], kills: int) -> Tally:
    """Start the run `kills` times and kill it at random moments; raise when it does not load."""
    tally, dice = Tally(), random.Random()
    while tally.kills < kills:
        processes = begin()
        try:
            took = _await_commit(run_dir / CHECKPOINTS, processes)
            time.sleep(dice.uniform(0, took))
            # One rank alone, as when memory runs out on one host; or all, as when power does.
            first = [dice.choice(list(processes))] if dice.random() < 0.5 else processes
            _kill(first)
            if first is not processes:
                time.sleep(dice.uniform(0, 0.02))
        finally:
            _kill(processes)
        tally.kills += 1
        tally.within_a_save += any((run_dir / CHECKPOINTS).glob(".*-step-*"))
        step = check()
        if step < tally.last_step:
            raise ValueError(f"the newest checkpoint went back from {tally.last_step} to {step}")
        tally.last_step = step
        tally.loadable += 1
    return tally


def kill_savers(run_dir: Path, *, ranks: int, kills: int) -> Tally:
    """Kill the synthetic run of `ranks` processes `kills` times."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.faults.saver"])
    handles = []

    def begin() -> list[psutil.Process]:
        for handle in handles:
            handle.join()
        handles[:] = start_savers(context, run_dir, ranks)
        return [psutil.Process(handle.pid) for handle in handles]

    return kill_repeatedly(run_dir, begin=begin, check=lambda: check_values(run_dir), kills=kills)


def kill_command(run_dir: Path, command: Sequence[str], *, kills: int) -> Tally:
    """Kill a command that trains into `run_dir` `kills` times."""

    def begin() -> list[psutil.Process]:
        resumes = bool(list_checkpoints(run_dir / CHECKPOINTS))
        full = [*command, "--resume", str(run_dir)] if resumes else list(command)
        before = _newest(run_dir / CHECKPOINTS)
        started = subprocess.Popen(full, start_new_session=True, env={**os.environ})
        parent = psutil.Process(started.pid)
        while _newest(run_dir / CHECKPOINTS) == before:
            if started.poll() is not None:
                raise RuntimeError(f"the command ended by itself, exit code {started.returncode}")
            time.sleep(POLL_S)
        return [*parent.children(recursive=True), parent]

    def check() -> int:
        return check_checkpoint(find_latest(run_dir).path).step

    return kill_repeatedly(run_dir, begin=begin, check=check, kills=kills)


def main() -> int:
    """Kill a run as often as asked, and print how it went."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.saves", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2, help="of the synthetic run")
    parser.add_argument("--run-dir", type=Path, help="where COMMAND trains")
    parser.add_argument("command", nargs="*", metavar="COMMAND")
    options = parser.parse_args()
    if bool(options.command) != bool(options.run_dir):
        parser.error("--run-dir and COMMAND go together")
    try:
        if options.command:
            tally = kill_command(options.run_dir, options.command, kills=options.kills)
        else:
            with tempfile.TemporaryDirectory() as folder:
                tally = kill_savers(Path(folder), ranks=options.ranks, kills=options.kills)
    except (EchelonError, ValueError) as error:
        print(f"not loadable: {error}", file=sys.stderr)
        return 1
    print(
        f"{tally.kills} kills, {tally.within_a_save} of them within a save: "
        f"{tally.loadable} loadable runs, last step {tally.last_step}"
    )
    return 0


def _await_commit(directory: Path, processes: Sequence[psutil.Process]) -> float:
    """Wait for two commits; return the seconds between them: a moment in the next save is in it."""
    moments: list[float] = []
    newest = _newest(directory)
    while len(moments) < 2:
        if not all(process.is_running() for process in processes):
            raise RuntimeError("the run ended by itself")
        if _newest(directory) != newest:
            newest = _newest(directory)
            moments.append(time.monotonic())
        time.sleep(POLL_S)
    return moments[1] - moments[0]


def _newest(directory: Path) -> int:
    return max((checkpoint.step for checkpoint in list_checkpoints(directory)), default=0)


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(processes))


if __name__ == "__main__":
    sys.exit(main())
