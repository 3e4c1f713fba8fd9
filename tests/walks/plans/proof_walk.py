"""Random plans of all families, proven as a command does: `python -m tests.walks.plans.proof_walk`.

Each plan is drawn as settings on a preset (`tests/walks/plans/random_families.py`). `echelon plan`
is asked first, and may refuse a draw. After that, every refusal, failed proof and traceback is a
fault. `--late` also completes operations late; `--quick` proves the first steps in float64 only, as
`prove --quick` does. `--count` counts plans that `plan` took. Each draw
leaves a JSON line with the command that repeats it; with the same `--results` the walk goes on
where it stopped. Exit 1 where a plan has a fault.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

from echelon.api.planning import plan as planned
from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.core.version import source_hash
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from echelon.proof.whole_run.own_data import data_pass
from echelon.proof.whole_run.whole_run import prove_with_whole_run
from tests.walks.matrix.cases import MAX_WORLD
from tests.walks.matrix.walk import append_line, lines_of
from tests.walks.plans.random_families import draw_any
from tests.walks.plans.random_settings import PRESET, flags_of
from tests.walks.rehearsals.random_walk import until_so_many_ran

Outcome = Literal["proven", "refused by plan", "fault"]

_TRACEBACK_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A walk: its seed, and how its plans are proven."""

    seed: int
    late: bool = False
    quick: bool = False


def prove_random(walk: Walk, number: int, pool: RankPool, offload_dir: str) -> dict[str, Any]:
    """Draw and prove plan `number` of a walk; return its line."""
    seed = walk.seed
    flags = flags_of(draw_any(Random(f"proof/{seed}/{number}"), offload_dir))
    command = shlex.join(["echelon", "prove", PRESET, *(f"--set={flag}" for flag in flags)])
    started, problem = time.monotonic(), ""
    outcome: Outcome
    try:
        planned(PRESET, settings=flags)
        job = load_job(PRESET, flags)
    except ConfigError as error:
        outcome, problem = "refused by plan", ", ".join(error.rules)
    else:
        problem = fault_of(job, pool, walk)
        outcome = "fault" if problem else "proven"
    return {
        "seed": seed,
        "number": number,
        "command": command,
        "outcome": outcome,
        "problem": problem,
        "seconds": round(time.monotonic() - started, 1),
    }


def fault_of(job: Job, pool: RankPool, walk: Walk) -> str:
    """Return why the plan of a run is not proven; "" if it is."""
    try:
        if walk.quick:
            prove(job.plan, run_ranks=pool.run, late=walk.late, quick=True).require()
            return ""
        proof = prove_with_whole_run(job.plan, run_ranks=pool.run, late=walk.late)
        proof.require()
        replace(proof, data=data_pass(job.plan, job.data, run_ranks=pool.run)).require()
    except Exception:
        # Whatever it is, it is a fault, and the walk goes on.
        return "\n".join(traceback.format_exc().splitlines()[-_TRACEBACK_LINES:])
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove random plans; return 1 where one has a fault."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.walks.plans.proof_walk", description=__doc__
    )
    parser.add_argument("--count", type=int, default=20, help="plans to prove (20)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (1)")
    parser.add_argument("--late", action="store_true", help="also complete operations late")
    parser.add_argument("--quick", action="store_true", help="the first steps, in float64 only")
    parser.add_argument("--results", type=Path, help="JSON lines; what is there is not done again")
    options = parser.parse_args(arguments)
    chosen = Walk(seed=options.seed, late=options.late, quick=options.quick)
    code = "-".join([source_hash()[:16], *["late"] * chosen.late, *["quick"] * chosen.quick])
    done = {
        line["number"]: line
        for line in lines_of(options.results, code)
        if line["seed"] == options.seed
    }
    started, counts = time.monotonic(), dict.fromkeys(("proven", "refused by plan", "fault"), 0)
    with (
        tempfile.TemporaryDirectory(prefix="echelon-walk-") as folder,
        RankPool(MAX_WORLD) as pool,
    ):

        def walk(number: int) -> dict[str, Any]:
            if number in done:
                return done[number]
            line = prove_random(chosen, number, pool, folder)
            append_line(options.results, line | {"code": code})
            return line

        drawn = until_so_many_ran(
            walk, options.count, lambda line: line["outcome"] != "refused by plan"
        )
        for line in drawn:
            counts[line["outcome"]] += 1
            if line["outcome"] == "fault":
                print(f"{line['number']}: {line['command']}\n{line['problem']}", flush=True)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    print(f"seed {options.seed}: {outcomes}, {time.monotonic() - started:.0f} s")
    return 1 if counts["fault"] else 0


if __name__ == "__main__":
    sys.exit(main())
