"""Random plans, rehearsed and executed: `python -m tests.walks.rehearsals.executed_walk`.

Each is drawn by `tests.walks.plans.random_settings`, shrunk as a proof shrinks it, and run
for two steps on Gloo ranks. What each communicator of each rank is given there, from the start of
the run, must be what a rehearsal says: the same operations, of the same kind, members, bytes and
dtype, in the same order. `--plans` counts plans that were executed: the walk goes on until it has
so many, and tells beside them how many rules refused on the way. With `--results` (JSON lines) it
goes on where it stopped. Exit 1 where a plan differs, or rules refused plan after plan.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from echelon.config.load import load_job
from echelon.config.rules.finders import require_trainable
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.version import source_hash
from echelon.launch.local.supervisor import RankPool
from echelon.proof.shrink import shrink
from echelon.rehearsal.rank import rehearse_rank
from echelon.rehearsal.run import on_nccl
from echelon.rehearsal.shapes import KnownResults
from tests.rehearsal.engine_targets import Issued, issued_in_rehearsal, issued_on_gloo
from tests.walks.matrix.cases import MAX_WORLD
from tests.walks.matrix.walk import append_line, lines_of
from tests.walks.plans.random_settings import PRESET, flags_of, settings_of
from tests.walks.rehearsals.random_walk import until_so_many_ran

Outcome = Literal["equal", "refused", "differs"]


def execute_random(seed: int, number: int, pool: RankPool, offload_dir: str) -> dict[str, Any]:
    """Draw plan `number` of a walk, rehearse and execute it, and return how that went."""
    flags = flags_of(settings_of(seed, number, offload_dir))
    found: dict[str, Any] = {"seed": seed, "number": number, "flags": flags}
    outcome: Outcome = "equal"
    ranks, operations, problem = 0, 0, ""
    try:
        job = load_job(PRESET, flags)
    except ConfigError as error:
        return found | {"outcome": "refused", "ranks": 0, "operations": 0, "problem": error.rules}
    try:
        require_trainable(job.plan, job.sources)
        plan = shrink(job.plan)
        ranks = plan.mesh.world_size
        operations, problem = compare(plan, pool)
    except Exception:
        # Whatever it is, it is a finding, and the walk goes on.
        problem = "\n".join(traceback.format_exc().splitlines()[-12:])
    outcome = "differs" if problem else "equal"
    return found | {
        "outcome": outcome,
        "ranks": ranks,
        "operations": operations,
        "problem": problem,
    }


def compare(plan: Plan, pool: RankPool) -> tuple[int, str]:
    """Return how many operations were compared, and the first difference, "" without any."""
    ranks = range(plan.mesh.world_size)
    executed = pool.run(issued_on_gloo, {"plan": plan.to_json()}, len(ranks))
    known = KnownResults()
    rehearsed = [rehearse_rank(on_nccl(plan), rank, known=known) for rank in ranks]
    count = 0
    for rank, (theirs, found) in enumerate(zip(executed, rehearsed, strict=True)):
        ours = issued_in_rehearsal(found)
        count += len(ours)
        told = difference(ours, [tuple(one) for one in theirs])
        if told:
            return count, f"rank {rank}: {told}"
    return count, ""


def difference(ours: Sequence[Issued], theirs: Sequence[Any]) -> str:
    """Return the first difference between two lists of operations."""
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return f"operation {place} is {one} in the rehearsal, and {other} on Gloo"
    if len(ours) != len(theirs):
        return f"{len(ours)} operations in the rehearsal, and {len(theirs)} on Gloo"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk random plans; return 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=20, help="how many plans to execute (20)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (1)")
    parser.add_argument("--results", type=Path, help="JSON lines; what is there is not done again")
    options = parser.parse_args(arguments)
    code = source_hash()[:16]
    known = {(one["seed"], one["number"]): one for one in lines_of(options.results, code)}
    walked: list[dict[str, Any]] = []
    with RankPool(MAX_WORLD) as pool, tempfile.TemporaryDirectory() as offload_dir:

        def walk(number: int) -> dict[str, Any]:
            one = known.get((options.seed, number))
            if one is None:
                one = execute_random(options.seed, number, pool, offload_dir) | {"code": code}
                append_line(options.results, one)
            return one

        for one in until_so_many_ran(walk, options.plans, was_executed):
            walked.append(one)
            told = f"{one['ranks']} ranks, {one['operations']} calls"
            print(f"{one['number']:4} {one['outcome']:8} {told}")
            if one["outcome"] == "differs":
                print(f"{' '.join(one['flags'])}\n{one['problem']}")
            sys.stdout.flush()
    equal = sum(one["outcome"] == "equal" for one in walked)
    executed = sum(map(was_executed, walked))
    print(
        f"{executed} plans executed: {equal} equal, {executed - equal} differ; "
        f"rules refused {len(walked) - executed} more"
    )
    return int(equal < options.plans)


def was_executed(one: dict[str, Any]) -> bool:
    """Return whether a plan was executed, not refused."""
    return one["outcome"] != "refused"


if __name__ == "__main__":
    sys.exit(main())
