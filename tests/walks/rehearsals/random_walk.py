"""Random plans, rehearsed, of up to so many ranks:

    python -m tests.walks.rehearsals.random_walk --plans 300 --ranks 16 --seed 1 --results F

Each is drawn as settings on a preset (`tests/walks/plans/random_settings.py`), and read as a run
file is. It is refused by a rule, or every class of its ranks is rehearsed: no fault may be found,
and each rank must send the bytes that the formulas say. How far its planned peak is from the
rehearsed one is told, and counted where it is more than `ALLOWED`.

`--plans` counts plans that were rehearsed: the walk goes on until it has so many, and tells beside
them how many rules refused on the way.

A plan whose rehearsal is more work than `MOST_WORK` is drawn again. That leaves out no setting and
no model: only long pipelines of many context ranks, and hundreds of experts whose matrices Muon
shares out. The walk over presets (`make walk-rehearsals`) has the large models whole.

Each plan leaves one JSON line with the command that does it again; with the same results the walk
goes on where it stopped. Exit 1 where a plan has a fault, or sends other bytes.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Literal, TypeVar

from echelon.config.load import load_job
from echelon.config.rules.finders import require_trainable
from echelon.core.errors import EchelonError
from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.core.version import source_hash
from echelon.cost.peak.rank_peak import with_few_microbatches
from echelon.rehearsal.run import RankClasses, on_nccl, rehearse
from tests.walks.matrix.walk import append_line, lines_of
from tests.walks.plans.random_settings import PRESET, draw_settings, flags_of

RehearsalOutcome = Literal["holds", "refused", "failed"]
Walked = TypeVar("Walked")

ALLOWED = 0.02
"""How far a planned peak may be from the rehearsed one, as a share of it."""

FEW_RANKS = (1, 2, 2, 3, 4, 4, 6, 8, 8, 16, 16)
"""Ranks of a plan of at most 16, drawn as often as they are named."""

MANY_RANKS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Ranks of a plan where more are allowed."""

MOST_WORK = 6_000
"""Passes of a microbatch through a layer, over all ranks that are rehearsed, of a plan that is not
drawn again: about a minute of one core."""

TENSORS_AS_A_PASS = 8
"""Parameters of a rank whose making and update take as long as one such pass."""

DRAWS = 50
"""How often a plan is drawn at most."""

REFUSED_IN_A_ROW = 100
"""How many plans rules may refuse one after the other before a walk ends: about one in six is."""

_TOLD_LINES = 12  # of a traceback


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRehearsal:
    """Say how one random plan fared."""

    seed: int
    """Of the walk."""
    number: int
    """Of the plan in it, from 0."""
    ranks: int
    """The most that a plan of this walk may have."""
    code: str
    """Hash of the code that it ran with."""
    command: str
    """What does it again."""
    world_size: int
    """Its ranks; 0 where it was refused."""
    outcome: RehearsalOutcome
    """Whether nothing is wrong, or rules refused it, or something is."""
    rules: tuple[str, ...]
    """The rules that refused it, or that it breaks."""
    rehearsed: int
    """Ranks that were rehearsed: one of each class."""
    memory_error: float
    """By how much the plan's peak is off, as a share, on the rank where that is most."""
    seconds: float
    """What the rehearsal took."""
    problem: str
    """What is wrong, where it failed."""


def world_sizes(ranks: int) -> Sequence[int]:
    """Return how many ranks plans may have, of at most `ranks`."""
    choices = FEW_RANKS if ranks <= max(FEW_RANKS) else MANY_RANKS
    return [one for one in choices if one <= ranks]


def work_of(plan: Plan) -> float:
    """Return about how many passes of a microbatch through a layer its rehearsal takes.

    Context ranks go piece by piece through what the others have.
    """
    few = with_few_microbatches(on_nccl(plan))
    kinds, pp = len(RankClasses(few).first_ranks()), few.mesh.pp
    passes = few.num_microbatches * few.model.layers * few.mesh.cp / pp
    tensors = len(parameters(few.model)) / (pp * few.mesh.ep)
    return kinds * (passes + tensors / TENSORS_AS_A_PASS)


def rehearse_random(seed: int, number: int, ranks: int, offload_dir: str) -> dict[str, Any]:
    """Draw plan `number` of a walk, rehearse it, and return how that went."""
    found: dict[str, Any] = {"outcome": "holds", "rules": (), "problem": ""}
    found |= {"world_size": 0, "rehearsed": 0, "memory_error": 0.0}
    started = time.monotonic()
    random, flags = Random(f"{seed}/{number}"), list[str]()
    try:
        for _ in range(DRAWS):
            flags = flags_of(draw_settings(random, offload_dir, world_sizes(ranks)))
            found["world_size"] = 0
            job = load_job(PRESET, flags)
            found["world_size"] = job.plan.mesh.world_size
            require_trainable(job.plan, job.sources)
            if work_of(job.plan) <= MOST_WORK:
                break
        rehearsal = rehearse(job.plan)
        found["rehearsed"] = len(rehearsal.ranks)
        found["memory_error"] = max(map(rehearsal.memory_error, rehearsal.ranks), key=abs)
        rehearsal.require()
        wrong = [
            f"rank {one.rank} sends {dict(one.sent)}, by the formulas {dict(said)}"
            for one in rehearsal.ranks
            if dict(one.sent) != dict(said := rehearsal.sent[one.rank])
        ]
        if wrong:
            found |= {"outcome": "failed", "problem": "\n".join(wrong)}
    except EchelonError as error:
        found["outcome"] = "failed" if found["world_size"] else "refused"
        found["rules"] = error.rules
        found["problem"] = str(error) if found["world_size"] else ""
    except Exception:
        # Whatever it is, it is a finding, and the walk goes on.
        told = traceback.format_exc().splitlines()[-_TOLD_LINES:]
        found |= {"outcome": "failed", "problem": "\n".join(told)}
    sets = [part for flag in flags for part in ("--set", flag)]
    command = shlex.join(["echelon", "rehearse", PRESET, *sets])
    return found | {"command": command, "seconds": round(time.monotonic() - started, 2)}


def walk_rehearsals(
    seed: int, count: int, ranks: int, results: Path | None
) -> Iterator[RandomRehearsal]:
    """Yield how each plan fared, until `count` were rehearsed.

    What `results` has of this very code is not done again.
    """
    code = source_hash()[:16]
    lines = {(one["seed"], one["number"], one["ranks"]): one for one in lines_of(results, code)}
    with tempfile.TemporaryDirectory(prefix="echelon-rehearse-") as offload_dir:

        def walked(number: int) -> RandomRehearsal:
            line = lines.get((seed, number, ranks))
            if line is not None:
                return rehearsal_of(line)
            found = rehearse_random(seed, number, ranks, offload_dir)
            one = RandomRehearsal(seed=seed, number=number, ranks=ranks, code=code, **found)
            append_line(results, asdict(one))
            return one

        yield from until_so_many_ran(walked, count, lambda one: one.outcome != "refused")


def until_so_many_ran(
    walk: Callable[[int], Walked], count: int, ran: Callable[[Walked], bool]
) -> Iterator[Walked]:
    """Yield what `walk` gives for 0, 1, 2 and so on, until `count` of them `ran`.

    It ends, too, where `REFUSED_IN_A_ROW` did not.
    """
    done = in_a_row = number = 0
    while done < count and in_a_row < REFUSED_IN_A_ROW:
        one = walk(number)
        number += 1
        done, in_a_row = (done + 1, 0) if ran(one) else (done, in_a_row + 1)
        yield one


def rehearsal_of(line: Mapping[str, Any]) -> RandomRehearsal:
    """Return the result that a line holds."""
    return RandomRehearsal(**{**line, "rules": tuple(line["rules"])})


def summary(walked: Sequence[RandomRehearsal]) -> str:
    """Return the figures of a walk."""
    done = [one for one in walked if one.world_size]
    failed = sum(one.outcome == "failed" for one in walked)
    refused = sum(one.outcome == "refused" for one in walked)
    ran = len(walked) - refused
    off = [abs(one.memory_error) for one in done] or [0.0]
    near = sum(one <= ALLOWED for one in off)
    return (
        f"{ran} plans: {ran - failed} hold, {failed} failed; rules refused {refused} more\n"
        f"{sum(one.rehearsed for one in done)} ranks rehearsed; median "
        f"{median([one.seconds for one in done] or [0.0]):.1f} s\n"
        f"planned peak within {ALLOWED:.0%} in {near} of {len(done)}; median {median(off):.2%}, "
        f"most {max(off):.1%}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk random plans; return 1 where one has a fault or sends other bytes."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.walks.rehearsals.random_walk", description=__doc__
    )
    parser.add_argument("--plans", type=int, default=20, help="how many plans to rehearse (20)")
    parser.add_argument("--ranks", type=int, default=16, help="the most ranks of a plan (16)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (1)")
    parser.add_argument("--results", type=Path, help="JSON lines; what is there is not done again")
    options = parser.parse_args(arguments)
    if options.results is not None:
        options.results.parent.mkdir(parents=True, exist_ok=True)
    walked: list[RandomRehearsal] = []
    for one in walk_rehearsals(options.seed, options.plans, options.ranks, options.results):
        walked.append(one)
        told = ", ".join(one.rules) if one.outcome == "refused" else f"{one.seconds:.1f} s"
        off = f"  memory {one.memory_error:+.1%}" if one.rehearsed else ""
        print(f"{one.number:5}  {one.outcome:8}  {told}{off}")
        if one.problem:
            print(f"{one.command}\n{one.problem}")
        sys.stdout.flush()
    print(f"\n{summary(walked)}")
    ran = sum(one.outcome != "refused" for one in walked)
    return int(ran < options.plans or any(one.outcome == "failed" for one in walked))


if __name__ == "__main__":
    sys.exit(main())
