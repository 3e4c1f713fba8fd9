"""Measure plans drawn at random on this machine beside what the planner predicts of them.

`python -m bench planner_regret` calibrates this machine as `echelon calibrate` does (or takes
`--cluster FILE`), draws random plans of 1 to 4 ranks from all that are legal, adds those that the
planner ranks first for 1, 2 and 4 ranks, and takes steps of each by the engine that trains, all
plans in turn. Printed are measured and predicted seconds, the errors of the drawn plans, and the
regret: how much longer the plan that is predicted to be the fastest takes than the one that is.
`--json FILE` keeps every number. Exit 1 where a target is missed.

A draw takes a world size, degrees that multiply to it, and for each choice that they leave open one
value, all equally likely; `config/` then checks it as it would check a run, and what a rule refuses
is drawn again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import mean, median

os.environ.setdefault("OMP_NUM_THREADS", "1")

from echelon.api.calibrating.machine import calibrate_machine
from echelon.api.calibrating.measuring import step_s
from echelon.config.load import load_job
from echelon.core.cluster import Cluster
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.cost.fit.runs import first_devices, plan_label
from echelon.launch.local.supervisor import RankPool
from echelon.planner.predict.estimate import estimate_plan
from echelon.planner.search.request import SearchRequest, make_request
from echelon.planner.search.search import search

RANKS = 4
WORLDS = (1, 2, 4)


MODEL: Mapping[str, object] = {
    "model.layers": 8,
    "model.hidden": 256,
    "model.heads": 8,
    "model.kv_heads": 4,
    "model.ffn": 704,
    "model.vocab": 2048,
    "model.tied": False,
    "batch.sequence_length": 192,
    "batch.global_sequences": 8,
}
"""A decoder of 8 million parameters, and a batch of which a step takes about a second here."""
DRAWN_WORLDS = (1, 2, 2, 3, 4, 4, 4, 4)
"""Ranks of a draw: most plans are there for four."""
SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1")
MOST_DRAWS = 20_000
Settings = dict[str, object]


def drawn_plans(cluster: Cluster, count: int, seed: int) -> list[Plan]:
    """Return `count` distinct random plans of 1 to as many ranks as `cluster` has devices."""
    generator = random.Random(seed)
    requests: dict[int, SearchRequest] = {}
    found: dict[str, Plan] = {}
    for _ in range(MOST_DRAWS):
        if len(found) == count:
            return list(found.values())
        world = generator.choice([n for n in DRAWN_WORLDS if n <= cluster.num_devices])
        if world not in requests:
            requests[world] = request_of(cluster, world)
        try:
            plan = requests[world].job(_settings(world, generator)).plan
        except ConfigError:
            continue
        plan = replace(plan, cluster=requests[world].cluster)
        found.setdefault(plan_label(plan), plan)
    raise ValueError(f"{count} plans wanted, {len(found)} found in {MOST_DRAWS} draws")


def planned(cluster: Cluster, world: int, top: int) -> list[Plan]:
    """Return the plans of `world` ranks that the planner ranks first."""
    request = replace(request_of(cluster, world), top=top)
    ranked = search(request).ranked
    return [replace(one.plan, cluster=request.cluster) for one in ranked if one.plan is not None]


def request_of(cluster: Cluster, world: int) -> SearchRequest:
    """Return what is asked of the planner: the model on the first `world` devices of a cluster."""
    settings = [f"{key}={_toml(value)}" for key, value in MODEL.items()]
    request = make_request("nano", cluster=f"{world}xcpu", settings=settings)
    some = first_devices(cluster, world)
    return replace(request, cluster=some, one_rank_run=replace(request.one_rank_run, cluster=some))


def _settings(world: int, generator: random.Random) -> Settings:
    """Return one draw of the settings of a layout."""
    pick = generator.choice
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    degrees = dict.fromkeys(axes, 1)
    left = world
    while left > 1:
        factor = 2 if left % 2 == 0 else left
        degrees[pick(axes)] *= factor
        left //= factor
    found: Settings = {f"mesh.{axis}": degree for axis, degree in degrees.items()}
    found["batch.microbatch_sequences"] = pick((1, 2, 4, 8))
    if degrees["tp"] > 1:
        found["mesh.sequence_parallel"] = pick((True, False))
    if degrees["cp"] > 1:
        found["context.kind"] = pick(("ring", "striped", "gathered", "ulysses"))
    if degrees["pp"] > 1:
        found["pipeline.schedule"] = schedule = pick(SCHEDULES)
        if schedule == "interleaved-1f1b":
            found["pipeline.virtual_stages"] = 2
    if degrees["dp_shard"] * degrees["cp"] > 1:
        found["zero.stage"] = stage = pick((0, 1, 2, 3))
        if stage == 3:
            found["zero.reshard_after_forward"] = pick(("always", "never"))
    every = pick((0, 0, 1, 2))
    if every:
        found |= {"recompute.policy": "full", "recompute.every": every}
    return found


def _toml(value: object) -> str:
    return str(value).lower()


WITHIN, MIDDLE_WITHIN, REGRET_WITHIN = 0.12, 0.06, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Hold a plan, its predicted and measured seconds, and whether it was drawn at random."""

    plan: Plan
    predicted_s: float
    measured_s: float
    drawn: bool

    @property
    def error(self) -> float:
        """Return predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Sum up the errors of the drawn plans, and the regret over all.

    `regret` is how much longer the plan that is predicted to be the fastest takes than the one that
    was: over all plans, and by the number of ranks. `in_order` is the share of pairs of drawn plans
    of which the one that is predicted to be faster was.
    """

    mean: float
    median: float
    worst: float
    in_order: float
    regret: float
    regret_of: dict[int, float]

    @property
    def missed(self) -> list[str]:
        """Return what is over its limit, in words."""
        limits = (
            ("largest error", self.worst, WITHIN),
            ("median error", self.median, MIDDLE_WITHIN),
            ("regret", self.regret, REGRET_WITHIN),
        )
        return [
            f"{name} {value:.1%}, wanted {limit:.0%}"
            for name, value, limit in limits
            if value > limit
        ]


def summary(rows: Sequence[Measured]) -> Summary:
    """Return the summary of some measured plans; at least two were drawn."""
    drawn = [one for one in rows if one.drawn]
    errors = [abs(one.error) for one in drawn]
    pairs = list(combinations(drawn, 2))
    right = [(a.predicted_s - b.predicted_s) * (a.measured_s - b.measured_s) >= 0 for a, b in pairs]
    worlds = sorted({one.plan.mesh.world_size for one in rows})
    by_world = {n: [one for one in rows if one.plan.mesh.world_size == n] for n in worlds}
    return Summary(
        mean=mean(errors),
        median=median(errors),
        worst=max(errors),
        in_order=mean(right),
        regret=regret(rows),
        regret_of={world: regret(some) for world, some in by_world.items()},
    )


def regret(rows: Sequence[Measured]) -> float:
    """Return how much longer than the fastest plan the one takes that is predicted to be it."""
    chosen = min(rows, key=lambda one: one.predicted_s)
    return chosen.measured_s / min(one.measured_s for one in rows) - 1.0


def text(rows: Sequence[Measured]) -> str:
    """Return every plan, slowest last, and the summary; a star is the planner's own plan."""
    lines = [f"{'plan':44} {'measured':>9} {'predicted':>10} {'off':>8}"]
    for one in sorted(rows, key=lambda row: row.measured_s):
        name = plan_label(one.plan) + ("" if one.drawn else " *")
        lines.append(
            f"{name:44.44} {one.measured_s:7.3f} s {one.predicted_s:8.3f} s {one.error:+8.1%}"
        )
    found = summary(rows)
    lines += [
        "",
        f"error of {sum(one.drawn for one in rows)} plans drawn: mean {found.mean:.1%}, "
        f"median {found.median:.1%}, largest {found.worst:.1%}",
        f"pairs in the right order: {found.in_order:.1%}",
        f"regret of the plan ranked first: {found.regret:.1%}; of so many ranks: "
        + ", ".join(f"{world}: {value:.1%}" for world, value in found.regret_of.items()),
    ]
    return "\n".join(lines)


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
    parser = argparse.ArgumentParser(prog="python -m bench planner_regret", description=__doc__)
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
