"""Random plans of the whole space: ``python -m echelon.proof.matrix.random_plans --plans 1000
--seed 1 --results F``.

Each is drawn as settings on a preset (`proof/matrix/random_settings.py`) and read as a run file is.
It is refused by a rule, or proven in float64 and in its own precision; else it is a finding: a
proof that fails, a traceback, or ranks that do not come back in time. Each plan leaves one JSON
line with the command that does it again; with the same results the walk goes on where it stopped.
The figures come last. Exit 1 where there is a finding.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any, Literal

from echelon.config.load import load_job
from echelon.config.rules.plan import require_trainable
from echelon.core.errors import EchelonError, ProofFailed
from echelon.core.version import source_hash
from echelon.launch.local.pool import RankPool
from echelon.proof.matrix.cases import MAX_WORLD
from echelon.proof.matrix.random_settings import PRESET, Settings, draw_settings
from echelon.proof.matrix.walk import append_line, lines_of
from echelon.proof.run import RankRunner, prove

Outcome = Literal["proven", "refused", "failed"]

TIMEOUT_S = 300.0
"""Ranks that take longer hang, on a machine that others use too."""

_TOLD_LINES = 12  # of a traceback


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPlanResult:
    """Say how one random plan fared."""

    seed: int
    """Of the walk."""
    number: int
    """Of the plan in it, from 0."""
    code: str
    """Hash of the code that it ran with."""
    command: str
    """What does it again."""
    world_size: int
    """Its ranks; 0 where it was refused."""
    outcome: Outcome
    """Whether it was proven, refused by rules, or neither."""
    rules: tuple[str, ...]
    """The rules that refused it, or the claims that do not hold."""
    seconds: float
    """What its proof took."""
    problem: str
    """What is wrong, where it failed."""
    late: bool = False
    """Whether operations also completed as late as they may."""


def settings_of(seed: int, number: int, offload_dir: str) -> Settings:
    """Return the settings of plan `number` of a walk; they depend on nothing else."""
    return draw_settings(Random(f"{seed}/{number}"), offload_dir)


def flags_of(settings: Settings) -> list[str]:
    """Return settings as a command line takes them."""
    return [f"{key}={_text(value)}" for key, value in settings.items()]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def walk_plan(
    seed: int,
    number: int,
    run_ranks: RankRunner,
    *,
    offload_dir: str,
    code: str,
    late: bool = False,
) -> RandomPlanResult:
    """Draw a plan, prove it, and say how that went; `late` as in `proof.run.prove`."""
    flags = flags_of(settings_of(seed, number, offload_dir))
    outcome: Outcome = "proven"
    rules: tuple[str, ...] = ()
    problem, world_size = "", 0
    started = time.monotonic()
    try:
        job = load_job(PRESET, flags)
        require_trainable(job.plan, job.sources)
        world_size = job.plan.mesh.world_size
        started = time.monotonic()
        prove(job.plan, run_ranks=run_ranks, late=late).require()
    except EchelonError as error:
        refused = not world_size and not isinstance(error, ProofFailed)
        outcome, rules = ("refused" if refused else "failed"), error.rules
        problem = "" if refused else str(error)
    except Exception:
        # Whatever it is, it is a finding, and the walk goes on.
        outcome, problem = "failed", "\n".join(traceback.format_exc().splitlines()[-_TOLD_LINES:])
    return RandomPlanResult(
        seed=seed,
        number=number,
        code=code,
        command=shlex.join(
            [
                *("echelon", "prove", PRESET),
                *(part for flag in flags for part in ("--set", flag)),
                *(("--late",) if late else ()),
            ]
        ),
        late=late,
        world_size=world_size,
        outcome=outcome,
        rules=rules,
        seconds=round(time.monotonic() - started, 2),
        problem=problem,
    )


def walk_plans(
    seed: int, count: int, results: Path | None, *, late: bool = False
) -> Iterator[RandomPlanResult]:
    """Yield how each plan fared; what `results` has of this very code is not run again."""
    code = source_hash()[:16]
    done = {
        (line["seed"], line["number"]): line
        for line in lines_of(results, code)
        if line.get("late", False) == late
    }
    with (
        RankPool(MAX_WORLD) as pool,
        tempfile.TemporaryDirectory(prefix="echelon-random-") as offload_dir,
    ):
        run_ranks = partial(pool.run, timeout_s=TIMEOUT_S)
        for number in range(count):
            line = done.get((seed, number))
            if line is not None:
                yield result_of(line)
                continue
            result = walk_plan(
                seed, number, run_ranks, offload_dir=offload_dir, code=code, late=late
            )
            append_line(results, asdict(result))
            yield result


def result_of(line: Mapping[str, Any]) -> RandomPlanResult:
    """Return the result that a line holds."""
    return RandomPlanResult(**{**line, "rules": tuple(line["rules"])})


def summary(results: Sequence[RandomPlanResult]) -> str:
    """Return the figures of a walk."""
    outcomes = Counter(one.outcome for one in results)
    refusals = Counter(rule for one in results if one.outcome == "refused" for rule in one.rules)
    seconds = [one.seconds for one in results if one.outcome == "proven"]
    slowest = quantiles(seconds, n=10)[-1] if len(seconds) > 1 else sum(seconds)
    lines = [
        f"{len(results)} plans: {outcomes['proven']} proven, {outcomes['refused']} refused by "
        f"rules, {outcomes['failed']} failed",
        f"seconds of a proof: median {median(seconds or [0.0]):.1f}, "
        f"nine of ten within {slowest:.1f}",
    ]
    lines += [f"{count:6}  {rule}" for rule, count in refusals.most_common()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk random plans; return 1 where one is neither proven nor refused."""
    parser = argparse.ArgumentParser(
        prog="python -m echelon.proof.matrix.random_plans", description=__doc__
    )
    parser.add_argument("--plans", type=int, default=20, help="how many plans to draw (20)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (1)")
    parser.add_argument("--results", type=Path, help="JSON lines; what is there is not run again")
    parser.add_argument(
        "--late", action="store_true", help="also complete operations as late as they may"
    )
    options = parser.parse_args(arguments)
    walked: list[RandomPlanResult] = []
    for one in walk_plans(options.seed, options.plans, options.results, late=options.late):
        walked.append(one)
        told = ", ".join(one.rules) if one.outcome == "refused" else f"{one.seconds:.1f} s"
        print(f"{one.number + 1:5}/{options.plans}  {one.outcome:8}  {told}")
        if one.problem:
            print(f"{one.command}\n{one.problem}")
        sys.stdout.flush()
    print(f"\n{summary(walked)}")
    return int(any(one.outcome == "failed" for one in walked))


if __name__ == "__main__":
    sys.exit(main())
