"""Kill or stop random ranks of a run at random moments, and judge how the run ends.

    python -m bench.faults                                  20 faults in training runs of nano.toml
    python -m bench.faults --run zero3-nvme                 ... at ZeRO stage 3, its slices in files
    python -m bench.faults --times 5 -- COMMAND ...         faults in another run on local ranks

Each time a fresh run is started, one of its ranks gets kill -9 or SIGSTOP, and these must hold: the
run ends within the limit, with a non-zero code, and names the rank that was hit; no rank is left
behind, nor a file in the folder of offloaded slices; and the last checkpoint, if it came to one,
loads. Prints one line per fault and exits with 1 if any of them went wrong.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from echelon.core.errors import EchelonError
from echelon.training.checkpoint.folder import list_checkpoints
from echelon.training.checkpoint.load import check_checkpoint

ROOT = Path(__file__).parents[2]
FILES = "offloaded"
FAULTS = (signal.SIGKILL, signal.SIGSTOP)
START_TIMEOUT_S = 120.0
SHARED_OUT = ("mesh.dp_replicate=1", "mesh.dp_shard=2")
ONE_STAGE = ("mesh.pp=1", "mesh.tp=1", "mesh.sequence_parallel=false")
IN_FILES = ("zero.optimizer_offload=nvme", "zero.parameter_offload=nvme")
RUNS = {
    "nano": (),
    "zero2": (*SHARED_OUT, "zero.stage=2"),
    "zero3": (*SHARED_OUT, "zero.stage=3"),
    "zero3-nvme": (*SHARED_OUT, "zero.stage=3", *IN_FILES),
    "zero3-nvme-2": (*ONE_STAGE, *SHARED_OUT, "zero.stage=3", *IN_FILES),
}
"""What runs of nano.toml are changed to; all but the last have eight ranks."""

CULPRIT = re.compile(r"^error\[([a-z-]+)\]: rank (\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Say what one fault did to its run."""

    fault: str
    rank: int
    world_size: int
    after_s: float
    ended_s: float
    code: int
    rule: str
    named: int | None
    left: int
    wrong: str = ""

    def good(self, limit_s: float) -> bool:
        """Return whether the run ended as it must."""
        ended = self.ended_s <= limit_s and self.code != 0 and self.named == self.rank
        return ended and not self.left and not self.wrong

    def line(self, limit_s: float) -> str:
        """Return the result as one line."""
        verdict = "ok" if self.good(limit_s) else f"WRONG {self.wrong}".rstrip()
        return (
            f"{self.fault:8} rank {self.rank} of {self.world_size} after {self.after_s:5.2f} s: "
            f"ended in {self.ended_s:5.2f} s, exit {self.code}, {self.rule or 'no rule'} "
            f"names rank {self.named}, {self.left} left  {verdict}"
        )


def main() -> int:
    """Run the command as often as asked, and print what happened."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.faults", description=str(__doc__).split("\n\n")[0]
    )
    parser.add_argument("--times", type=int, default=20, help="number of faults")
    parser.add_argument("--limit-s", type=float, default=15.0, help="seconds a run has to end")
    parser.add_argument("--span-s", type=float, default=8.0, help="faults come within this time")
    parser.add_argument("--seed", type=int, default=0, help="seed of ranks, faults and moments")
    parser.add_argument("--run", choices=(*RUNS, "all"), default="nano", help="which training run")
    parser.add_argument("command", nargs="*", help="another run")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    names = list(RUNS) if options.run == "all" else [options.run]
    wrong = 0
    slowest = 0.0
    for number in range(options.times):
        name = "" if options.command else names[number // len(FAULTS) % len(names)]
        with tempfile.TemporaryDirectory(prefix="echelon-faults-") as directory:
            command = options.command or training(Path(directory), RUNS[name])
            result = hit(command, FAULTS[number % 2], chance, options.span_s, options.limit_s)
            result = replace(result, wrong=left_wrong(Path(directory)))
        line = result.line(options.limit_s)
        print(f"{number + 1:3}/{options.times}  {name:12} {line}", flush=True)
        wrong += not result.good(options.limit_s)
        slowest = max(slowest, result.ended_s)
    print(f"{options.times - wrong} of {options.times} as they must be, slowest {slowest:.2f} s")
    return 1 if wrong else 0


def training(directory: Path, settings: Sequence[str]) -> list[str]:
    """Return the command of a training run that is long enough to be hit."""
    changes = [f"train.runs_dir={directory}", "train.steps=100000", "checkpoint.every=5", *settings]
    if any(setting in IN_FILES for setting in settings):
        (directory / FILES).mkdir()
        changes.append(f"zero.offload_dir={directory / FILES}")
    return [
        *(sys.executable, "-m", "echelon", "train", str(ROOT / "examples" / "nano.toml")),
        *(word for change in changes for word in ("--set", change)),
    ]


def left_wrong(directory: Path) -> str:
    """Return what is wrong with what a run left in its folder; nothing is as it must be."""
    if (directory / FILES).is_dir() and (left := list((directory / FILES).iterdir())):
        return f"left {left}"
    for run in directory.glob("*/checkpoints"):
        if stored := list_checkpoints(run):
            try:
                check_checkpoint(stored[-1].path)
            except EchelonError as error:
                return str(error)
    return ""


def hit(
    command: list[str], fault: signal.Signals, chance: random.Random, span_s: float, limit_s: float
) -> Result:
    """Start `command`, apply `fault` to one of its ranks, and wait for the end."""
    with tempfile.TemporaryFile("w+") as output:
        run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            ranks = wait_for_ranks(run)
            after_s = chance.uniform(0.0, span_s)
            time.sleep(after_s)
            rank = chance.randrange(len(ranks))
            ranks[rank].send_signal(fault)
            began = time.monotonic()
            try:
                code = run.wait(4 * limit_s)
            except subprocess.TimeoutExpired:
                code = 0
            ended_s = time.monotonic() - began
            _, left = psutil.wait_procs(ranks, timeout=2.0)
        finally:
            run.kill()
            run.wait()
        output.seek(0)
        found = CULPRIT.findall(output.read())
    rule, named = found[-1] if found else ("", None)
    return Result(
        fault=fault.name,
        rank=rank,
        world_size=len(ranks),
        after_s=after_s,
        ended_s=ended_s,
        code=code,
        rule=rule,
        named=int(named) if named is not None else None,
        left=len(left),
    )


def wait_for_ranks(run: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the ranks of a run in order, once their number does not grow any more."""
    deadline = time.monotonic() + START_TIMEOUT_S
    before: list[psutil.Process] = []
    while time.monotonic() < deadline:
        ranks = ranks_of(run.pid)
        if ranks and len(ranks) == len(before):
            return ranks
        if run.poll() is not None:
            raise SystemExit(f"the run ended by itself with code {run.returncode}")
        before = ranks
        time.sleep(0.5)
    raise SystemExit(f"no ranks after {START_TIMEOUT_S:g} s")


def ranks_of(pid: int) -> list[psutil.Process]:
    """Return the processes below `pid` that call themselves ranks, in order."""
    named: dict[str, psutil.Process] = {}
    for process in psutil.Process(pid).children(recursive=True):
        try:
            name = Path(f"/proc/{process.pid}/comm").read_text().strip()
        except OSError:
            continue
        if re.fullmatch(r"rank-\d+", name):
            named[name] = process
    return [named[name] for name in sorted(named)]


if __name__ == "__main__":
    sys.exit(main())
