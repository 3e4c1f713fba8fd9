"""`echelon plan MODEL --cluster ...`: search, print the answer, and write the best plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.cli.new_files import require_new_files, require_suffix
from echelon.cli.output import note, print_json
from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.command_line import BAD_ARGUMENT

if TYPE_CHECKING:
    from echelon.planner.request import Objective
    from echelon.planner.search import Answer

EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Hold what the command line asks for."""

    model: str
    cluster: str | None
    settings: Sequence[str]
    pins: Sequence[str]
    objective: Objective
    price: float | None
    trainer: str
    top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Hold what is printed and written of an answer."""

    front: bool
    out: Path | None
    why: bool
    svg: Path | None
    json: bool


def run_search(wanted: Wanted, shown: Shown) -> int:
    """Search, print the answer, write the best plan; return the exit code."""
    from echelon.cli.plan_search_json import answer_json
    from echelon.cli.plan_search_text import answer_text
    from echelon.planner.front import front_of
    from echelon.planner.request import Aim, make_request
    from echelon.planner.search import search
    from echelon.planner.unfit import why_nothing

    _require_sensible(wanted)
    require_suffix("--out", shown.out, (".toml", ".json"))
    require_new_files({"--out": shown.out})
    if shown.svg is not None:
        from echelon.cli.plan_view import require_new_folder

        require_new_folder(shown.svg)
    request = make_request(
        wanted.model,
        cluster=wanted.cluster,
        settings=wanted.settings,
        pins=wanted.pins,
        aim=Aim(
            objective=wanted.objective,
            price=wanted.price,
            top=wanted.top,
            trainer=wanted.trainer,
        ),
    )
    answer = search(request)
    if answer.best is None and not answer.interrupted:
        if shown.why:
            from echelon.cli.plan_why import fixes_text
            from echelon.planner.explain.pin_fixes import cheapest_fix

            note(fixes_text(cheapest_fix(request)))
        raise why_nothing(answer)
    kept = front_of(request) if shown.front and not answer.interrupted else ()
    if shown.json:
        found = {"search": answer_json(answer, kept)}
        if shown.why and answer.best is not None:
            from echelon.cli.plan_why_json import why_json

            found["why"] = why_json(answer)
        print_json("plan", found)
    elif answer.best is not None:
        print(answer_text(answer, kept), end="")
        if shown.why:
            from echelon.cli.plan_why import why_text

            print("\n" + why_text(answer), end="")
    if answer.best is not None:
        _keep(answer, shown)
    if answer.interrupted:
        note(
            f"interrupted: {answer.computed:,} plans computed of {answer.seen:,} met so far; there "
            "may be better ones"
        )
        return EXIT_INTERRUPTED
    return 0


def _require_sensible(wanted: Wanted) -> None:
    problems: list[Problem] = []
    if wanted.top < 1:
        problems.append(_bad("--top", f"{wanted.top} is below 1", "1"))
    price = wanted.price
    if price is not None and not 0 < price < math.inf:
        problems.append(_bad("--price", f"{price} is no price of a device for an hour", "2.5"))
    if problems:
        raise ConfigError(problems)


def _bad(flag: str, why: str, works: str) -> Problem:
    return BAD_ARGUMENT.problem(
        f"{flag} {why}", set_by="the command line", works=(f"{flag} {works}",)
    )


def _keep(answer: Answer, shown: Shown) -> None:
    """Write what was asked for of the best plan."""
    if shown.out is not None:
        _write(answer, shown.out)
    best = answer.best
    if shown.svg is not None and best is not None and best.plan is not None:
        from echelon.cli.plan_view import draw

        drawn = draw(best.plan, best.estimate.seconds, best.estimate.bytes, shown.svg)
        note(drawn.rstrip("\n"))


def _write(answer: Answer, out: Path) -> None:
    """Write the best plan: a run file, with what stands beside it, or the plan itself."""
    from echelon.config.new_file import write_new
    from echelon.planner.export.run_toml import run_toml
    from echelon.planner.export.settings import needed_settings

    assert answer.best is not None
    assert answer.best.plan is not None
    plan = answer.best.plan
    if out.suffix == ".json":
        write_new(out, plan.to_json(), key="--out")
        return
    run = needed_settings(plan)
    files = {out.parent / name: text for name, text in run.beside.items()}
    require_new_files({"--out": out} | {str(file): file for file in files})
    for file, text in files.items():
        write_new(file, text, key="--out")
    write_new(out, run_toml(run), key="--out")
