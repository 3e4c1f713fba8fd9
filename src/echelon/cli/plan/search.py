# SPDX-License-Identifier: Apache-2.0
"""`echelon plan MODEL --cluster ...`: search, print the answer, and write the best plan."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.cli.flags import OUT, bad_argument, require_new_files
from echelon.cli.output import print_error_json, print_json
from echelon.cli.stderr import note, working
from echelon.cli.written_files import PLAN, RUN_FILE, WrittenFiles
from echelon.config.files.new_file import write_new
from echelon.core.errors import ConfigError
from echelon.launch.stop import EXIT_INTERRUPTED
from echelon.planner.recommend.recommend import NO_SIZE
from echelon.planner.search.request import LONGEST_SEQUENCE

if TYPE_CHECKING:
    from echelon.core.plan import Plan
    from echelon.planner.recommend.recommend import Recommendation
    from echelon.planner.search.request import SearchAim, SearchRequest
    from echelon.planner.search.search import SearchResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutputOptions:
    """Hold what is printed and written of an answer."""

    front: bool
    detail: bool
    why: bool
    files: WrittenFiles
    json: bool


def run_search(
    model: str,
    wanted: SearchAim,
    shown: SearchOutputOptions,
    *,
    cluster: str | None,
    settings: Sequence[str],
    pins: Sequence[str],
    columns: int,
) -> int:
    """Search, print the answer, write the best plan; return the exit code."""
    from echelon.planner.answer.recommend_text import advice_text, heading_text
    from echelon.planner.answer.search_json import explanation_json, found_json
    from echelon.planner.answer.search_text import answer_text
    from echelon.planner.answer.why_text import explanation_text
    from echelon.planner.explain.why import explain_result
    from echelon.planner.recommend.recommend import Recommendation, recommend
    from echelon.planner.search.request import LONGEST_SEQUENCE, make_request
    from echelon.planner.search.search import pareto_front

    request = make_request(model, cluster=cluster, settings=settings, pins=pins, aim=wanted)
    # The length of sequences is a result of a search for the longest.
    is_known = request.objective != LONGEST_SEQUENCE
    if is_known and not shown.json:
        print(heading_text(request, columns=columns), flush=True)
    with working("searching for plans", lines=not shown.json):
        found = recommend(request)
        answer = found.answer if isinstance(found, Recommendation) else found
        kept = pareto_front(request) if shown.front and not answer.interrupted else ()
    if not is_known and not shown.json:
        print(heading_text(answer.request, columns=columns), flush=True)
    if answer.best is None and not answer.interrupted:
        return _tell_no_plan(answer, shown, columns=columns)
    reasons = None
    if shown.why and answer.best is not None:
        with working("looking at other plans", lines=not shown.json):
            reasons = explain_result(answer)
    if shown.json:
        told = found_json(found, kept)
        if reasons is not None:
            told["why"] = explanation_json(reasons)
        print_json("plan", told)
    elif answer.best is not None:
        if isinstance(found, Recommendation):
            asked = _command(model, cluster, settings, pins, request)
            print(advice_text(found, asked, columns=columns), end="")
        if shown.detail or kept or not isinstance(found, Recommendation):
            print("\n" + answer_text(answer, kept, columns=columns), end="")
        if reasons is not None:
            print("\n" + explanation_text(reasons, columns=columns), end="")
    if answer.best is not None:
        _write_outputs(answer, shown)
        _write_report(found, shown.files, _command(model, cluster, settings, pins, request))
    if answer.interrupted:
        note(
            f"{answer.num_computed:,} plans computed of {answer.num_legal:,} met before the "
            "interrupt; there may be better ones"
        )
        return EXIT_INTERRUPTED
    return 0


def _tell_no_plan(answer: SearchResult, shown: SearchOutputOptions, *, columns: int) -> int:
    """Say why a search has no plan and what would fit; return the exit code, or raise the error."""
    from echelon.planner.answer.why_text import leanest_json, no_plan_text
    from echelon.planner.explain.no_plan import NothingFits, explain_no_plan

    with working("looking for what would fit", lines=not shown.json):
        error = explain_no_plan(answer)
    leanest = error.leanest if isinstance(error, NothingFits) else None
    if leanest is None:
        raise error
    if not shown.json:
        print(no_plan_text(leanest, columns=columns), end="", flush=True)
        raise error
    print_error_json("plan", error, {"leanest": leanest_json(leanest)})
    return error.exit_code


def _command(
    model: str,
    cluster: str | None,
    settings: Sequence[str],
    pins: Sequence[str],
    aim: SearchAim,
) -> str:
    """Return the command that asks for this plan again."""
    from echelon.cost.seconds.trainers import OURS

    words = ["echelon", "plan", model]
    words += ["--search"] if cluster is None else ["--cluster", cluster]
    flags = (("--set", settings), ("--pin", pins))
    words += [word for flag, values in flags for value in values for word in (flag, value)]
    if aim.objective != "time":
        words += ["--objective", aim.objective]
    if aim.price is not None:
        words += ["--price", f"{aim.price:g}"]
    if aim.trainer != OURS:
        words += ["--trainer", aim.trainer]
    return shlex.join(words)


def _write_report(found: Recommendation | SearchResult, files: WrittenFiles, asked: str) -> None:
    """Write the page of the best plan, or its figures, where that is wanted."""
    if files.has_report:
        from echelon.page.documents.search import search_page

        files.write_report(search_page(found, asked))


def _write_outputs(answer: SearchResult, shown: SearchOutputOptions) -> None:
    """Write what was asked for of the best plan."""
    plan = answer.first.plan
    assert plan is not None, "what is the best of an answer has become a Plan"
    if (out := shown.files.get(PLAN)) is not None:
        write_new(out, plan.to_json(), key=OUT)
    if (out := shown.files.get(RUN_FILE)) is not None:
        _write_run(plan, out)


def _write_run(plan: Plan, out: Path) -> None:
    """Write a plan as a run file, with what stands beside it."""
    from echelon.interop.plan_settings import needed_settings, run_toml

    run = needed_settings(plan)
    files = {out.parent / name: text for name, text in run.beside.items()}
    require_new_files({OUT: out} | {str(file): file for file in files})
    for file, text in files.items():
        write_new(file, text, key=OUT)
    write_new(out, run_toml(run), key=OUT)


_HINT = "--cluster {name}; any COUNTxDEVICE or a cluster file will do."


def plan_on_what_exists(
    model: str,
    wanted: SearchAim,
    shown: SearchOutputOptions,
    *,
    settings: Sequence[str],
    pins: Sequence[str],
    columns: int,
) -> int:
    """Print the answer on the GPUs of this machine, or on four clusters; return the exit code.

    It is 1 where no cluster has a plan.
    """
    from echelon.launch.gpus import own_cluster
    from echelon.planner.answer.answer import sizes_json, sizes_text
    from echelon.planner.recommend.recommend import four_sizes
    from echelon.planner.search.request import make_request

    own = own_cluster()
    if own.name is not None:
        return run_search(
            model, wanted, shown, cluster=own.name, settings=settings, pins=pins, columns=columns
        )
    _require_no_plan_flags(shown, wanted.objective)

    def request_on(cluster: str) -> SearchRequest:
        return make_request(model, cluster=cluster, settings=settings, pins=pins, aim=wanted)

    with working("searching on four sizes", lines=not shown.json):
        # A table has the plan to run of each size, and no other one.
        found = four_sizes(request_on, alone=not shown.json)
    if shown.json:
        print_json("plan", sizes_json(found))
    elif found:
        print(sizes_text(found, own.unknown, _HINT, columns=columns), end="")
    if not found:
        note(NO_SIZE)
    return 0 if found else 1


def _require_no_plan_flags(shown: SearchOutputOptions, objective: str) -> None:
    """Refuse what is about one plan, where there are four."""
    flags = {
        OUT: bool(shown.files.paths),
        "--why": shown.why,
        "--detail": shown.detail,
        "--objective front": shown.front,
        f"--objective {LONGEST_SEQUENCE}": objective == LONGEST_SEQUENCE,
    }
    if given := [flag for flag, is_given in flags.items() if is_given]:
        problem: ConfigError = bad_argument(
            f"{' and '.join(given)} is about the plans of one cluster, none is named, and this "
            "machine has no GPU that is known",
            "--cluster 8xh100",
        )
        raise problem
