"""Round trips of random tiny models: `python -m tests.training.round_trips.walk --trips 200`.

Each draws a model_type, a configuration of it (`draws.py`), two layouts and an optimizer
(`layouts.py`), and takes the trip of `trip.py`. Where rules refuse a layout, another is drawn;
where they refuse the configuration by name, the trip is refused. `--trips` counts those that were
taken: the walk goes on until it has so many, and tells which rules refused how often. With
`--results` (JSON lines) it goes on where it stopped. Exit 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

from echelon.config.model.architectures.table import ARCHITECTURES
from echelon.core.errors import ConfigError
from echelon.core.version import source_hash
from echelon.launch.local.supervisor import RankPool
from tests.training.round_trips.draws import draw_configuration
from tests.training.round_trips.layouts import draw_updates
from tests.training.round_trips.theirs import be_quiet, make_model
from tests.training.round_trips.trip import Place, Trip, job_of, layout_for, small_text, take
from tests.walks.matrix.walk import append_line, lines_of
from tests.walks.rehearsals.random_walk import until_so_many_ran

MOST_RANKS = 8
FILE_BYTES = (None, None, 20_000)
"""The most bytes of a file of a folder: of all, or of several."""

Line = dict[str, Any]


def take_random(seed: int, number: int, text: Path, pool: RankPool, folder: Path) -> Line:
    """Draw trip `number` of a walk, take it, and return how that went."""
    random = Random(f"{seed}/{number}")
    kind = random.choice(sorted(ARCHITECTURES))
    settings, updates = draw_configuration(random, kind), draw_updates(random)
    found: Line = {"seed": seed, "number": number, "kind": kind, "settings": settings}
    found |= {"updates": dataclasses.asdict(updates), "outcome": "same", "rules": [], "ranks": 0}
    found |= {"layout": [], "onwards": [], "problems": [], "worst": {}, "layouts_refused": {}}
    place = Place(folder=folder, text=text, pool=pool)
    hub, refused, started = folder / "before", Counter[str](), time.monotonic()
    try:
        make_model(kind, settings, hub)
        try:
            shape = job_of(place, hub, (), updates).plan.model
        except ConfigError as error:
            return found | {"outcome": "refused", "rules": sorted(set(error.rules))}
        layouts = [
            layout_for(
                random,
                refused,
                experts=shape.experts is not None,
                job=lambda layout: job_of(place, hub, layout, updates),
            )
            for _ in range(2)
        ]
        found |= {"layout": layouts[0], "onwards": layouts[1], "layouts_refused": dict(refused)}
        trip = Trip(
            kind=kind,
            settings=settings,
            updates=updates,
            layout=tuple(layouts[0]),
            onwards=tuple(layouts[1]),
            model_type=random.choice((kind, None)),
            file_bytes=random.choice(FILE_BYTES),
        )
        found["ranks"] = job_of(place, hub, trip.layout, updates).plan.mesh.world_size
        taken = take(trip, place)
        found |= {"problems": taken.problems, "worst": taken.worst}
    except Exception:
        # Whatever it is, it is a finding, and the walk goes on.
        found["problems"] = ["\n".join(traceback.format_exc().splitlines()[-12:])]
    outcome = "differs" if found["problems"] else "same"
    return found | {"outcome": outcome, "seconds": round(time.monotonic() - started, 1)}


def was_taken(line: Line) -> bool:
    """Return whether a trip was taken, not refused."""
    return line["outcome"] != "refused"


def walk_trips(
    seed: int, count: int, results: Path | None = None, *, pool: RankPool | None = None
) -> list[Line]:
    """Take so many trips, and say of each how it went."""
    be_quiet()
    code = source_hash()[:16]
    known = {(one["seed"], one["number"]): one for one in lines_of(results, code)}
    with tempfile.TemporaryDirectory(prefix="echelon-trips-") as folder:
        text = small_text(Path(folder))
        with RankPool(MOST_RANKS) if pool is None else nullcontext(pool) as ranks:

            def walk(number: int) -> Line:
                line = known.get((seed, number))
                if line is None:
                    with tempfile.TemporaryDirectory(dir=folder) as own:
                        line = take_random(seed, number, text, ranks, Path(own))
                    append_line(results, line | {"code": code})
                _tell(line)
                return line

            return list(until_so_many_ran(walk, count, was_taken))


def _tell(line: Line) -> None:
    told = ", ".join(line["rules"]) or f"{line['ranks']} ranks, {line['seconds']} s"
    print(f"{line['number']:4} {line['outcome']:8} {line['kind']:12} {told}")
    for problem in line["problems"][:6]:
        print(f"     {problem}")
    if line["problems"]:
        print(f"     {line['settings']}\n     {line['updates']}\n     {line['layout']}")
        print(f"     {line['onwards']}")
    sys.stdout.flush()


def summary(lines: Sequence[Line]) -> str:
    """Return the figures of a walk: what was taken, what was refused, how near to wrong it was."""
    taken = [one for one in lines if was_taken(one)]
    wrong = sum(one["outcome"] == "differs" for one in taken)
    kinds = Counter(one["kind"] for one in taken)
    rules = Counter(rule for one in lines if not was_taken(one) for rule in one["rules"])
    layouts = Counter[str]()
    worst: dict[str, float] = {}
    for one in taken:
        layouts.update(one["layouts_refused"])
        for name, share in one["worst"].items():
            worst[name] = max(worst.get(name, 0.0), share)
    told = [
        f"{len(taken)} trips taken: {len(taken) - wrong} the same, {wrong} differ; "
        f"{len(lines) - len(taken)} configurations refused by name",
        f"families: {_counts(kinds)}",
        f"configurations refused by: {_counts(rules)}",
        f"layouts refused by: {_counts(layouts)}",
        "largest error, of what is allowed: "
        + ", ".join(f"{name} {share:.2f}" for name, share in worst.items()),
    ]
    return "\n".join(told)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common()) or "none"


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk round trips; return 1 where something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.training.round_trips.walk", description=__doc__
    )
    parser.add_argument("--trips", type=int, default=200, help="how many to take (200)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (1)")
    parser.add_argument("--results", type=Path, help="JSON lines; what is there is not done again")
    options = parser.parse_args(arguments)
    if options.results is not None:
        options.results.parent.mkdir(parents=True, exist_ok=True)
    lines = walk_trips(options.seed, options.trips, options.results)
    print(f"\n{summary(lines)}")
    return int(sum(one["outcome"] == "same" for one in lines) < options.trips)


if __name__ == "__main__":
    sys.exit(main())
