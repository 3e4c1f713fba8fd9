"""Measure plans drawn at random on this machine beside what the planner predicts of them.

`python -m bench.planner_regret` calibrates this machine as `echelon calibrate` does (or takes
`--cluster FILE`), draws random plans of 1 to 4 ranks from all that are legal, adds those that the
planner ranks first for 1, 2 and 4 ranks, and takes steps of each by the engine that trains, all
plans in turn. Printed are measured and predicted seconds, the errors of the drawn plans, and the
regret: how much longer the plan that is predicted to be the fastest takes than the one that is.
`--json FILE` keeps every number. Exit 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench.planner_regret.plans import drawn_plans, planned
from bench.planner_regret.report import Measured, summary, text
from echelon.api.calibrating.machine import calibrate_machine
from echelon.api.calibrating.measuring import step_s
from echelon.config.load import load_job
from echelon.core.cluster import Cluster
from echelon.core.plan import Plan
from echelon.cost.fit.runs import plan_label
from echelon.launch.local.supervisor import RankPool
from echelon.planner.predict.estimate import estimate_plan

RANKS = 4
WORLDS = (1, 2, 4)


def main() -> int:
    """Measure, print the table, and return 1 where a target is missed."""
    arguments = _parser().parse_args()
    started = time.monotonic()
    cluster = _cluster(arguments.cluster)
    drawn = drawn_plans(cluster, arguments.plans, arguments.seed)
    names = {plan_label(plan) for plan in drawn}
    top = [plan for world in WORLDS for plan in planned(cluster, world, arguments.top)]
    plans = [*drawn, *(plan for plan in top if plan_label(plan) not in names)]
    say(f"measuring {len(plans)} plans ({time.monotonic() - started:.0f} s)")
    with RankPool(RANKS) as pool:
        seconds = measure(pool, plans, arguments)
    rows = [
        Measured(
            plan=plan,
            predicted_s=estimate_plan(plan).step_s,
            measured_s=median(taken),
            drawn=plan_label(plan) in names,
        )
        for plan, taken in zip(plans, seconds, strict=True)
    ]
    print(text(rows))
    missed = summary(rows).missed
    load = os.getloadavg()[0]
    print("\n".join(f"missed: {one}" for one in missed) or "all targets met")
    print(f"{time.monotonic() - started:.0f} s, load {load:.1f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(_json(rows, seconds, cluster), indent=1) + "\n")
    return 1 if missed else 0


def measure(
    pool: RankPool, plans: list[Plan], arguments: argparse.Namespace
) -> list[tuple[float, ...]]:
    """Return the seconds of a step of each plan in every round; in a round all take turns."""
    rounds: list[list[float]] = []
    for number in range(arguments.rounds):
        say(f"round {number + 1} of {arguments.rounds}")
        rounds.append(
            [step_s(pool, plan, warmup=arguments.warmup, steps=arguments.steps) for plan in plans]
        )
    return list(zip(*rounds, strict=True))


def say(line: str) -> None:
    """Tell how far the measurement is."""
    print(line, file=sys.stderr, flush=True)


def _cluster(file: Path | None) -> Cluster:
    """Return the cluster of a file, or of this machine as it is measured now."""
    with tempfile.TemporaryDirectory() as folder:
        path = file
        if path is None:
            path = Path(folder) / "cluster.toml"
            calibrate_machine(out=path, ranks=RANKS, say=say)
        return load_job("nano", [f"cluster.file={path}"]).plan.cluster


def _json(
    rows: list[Measured], seconds: list[tuple[float, ...]], cluster: Cluster
) -> dict[str, object]:
    plans = [
        {
            "plan": plan_label(one.plan),
            "ranks": one.plan.mesh.world_size,
            "drawn": one.drawn,
            "predicted_s": one.predicted_s,
            "rounds_s": taken,
        }
        for one, taken in zip(rows, seconds, strict=True)
    ]
    return {"plans": plans, "summary": asdict(summary(rows)), "cluster": asdict(cluster)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.planner_regret", description=__doc__)
    add = parser.add_argument
    add("--cluster", type=Path, help="a file of `echelon calibrate` (default: calibrate now)")
    add("--plans", type=int, default=20, help="plans drawn at random (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the draw (default: %(default)s)")
    add("--top", type=int, default=2, help="the planner's plans for 1, 2, 4 ranks (%(default)s)")
    add("--rounds", type=int, default=3, help="turns of every plan (default: %(default)s)")
    add("--steps", type=int, default=3, help="timed steps a turn (default: %(default)s)")
    add("--warmup", type=int, default=1, help="untimed steps a turn (default: %(default)s)")
    add("--json", type=Path, help="write every measurement to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
