# SPDX-License-Identifier: Apache-2.0
"""`echelon plan`: check a run by every rule, or search for the best way to split one; `explore`.

A model without a cluster is searched for on the GPUs of this machine; where it has none, four sizes
of a common device are shown (`planner/recommend/recommend.py`).

Exit codes: 0 the run fits, or a plan was found; 1 the run does not fit, or none of the plans of a
search does; 2 wrong input, or a search in which no plan is legal; 130 interrupted, with the best
plan of what was seen until then printed, where there is one.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from echelon.cli.flags import (
    OUT,
    PAGE,
    PLAN,
    REPORT,
    RUN_FILE,
    Json,
    Names,
    Settings,
    WrittenFiles,
    bad_argument,
    require_new_files,
)
from echelon.cli.output import note, page_columns, print_error_json, print_json, working
from echelon.config.files.new_file import write_new
from echelon.interop.tools import trainer_names
from echelon.launch.stop import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from echelon.core.plan import Plan
    from echelon.planner.recommend.recommend import Recommendation
    from echelon.planner.search.ranked import RankedPlan
    from echelon.planner.search.request import SearchAim, SearchRequest
    from echelon.planner.search.search import SearchResult

OURS = "echelon"

ModelOrRun = Annotated[
    str, Parameter(help="A run.toml, a preset of a run or model, or a config.json to search for.")
]
ClusterName = Annotated[
    str | None, Parameter(help="Search for a plan on COUNTxDEVICE such as 8xh100, or on a file's.")
]
Search = Annotated[bool, Parameter(help="Search for a better layout on the cluster of the run.")]
PinTexts = Annotated[
    tuple[str, ...],
    Parameter(
        name="--pin",
        show_default=False,
        help="Keep the search to key=value, such as tp=8 or schedule=1f1b; repeat for more.",
    ),
]
ObjectiveName = Annotated[
    Literal["time", "throughput", "cost", "devices", "expected", "longest-sequence", "front"],
    Parameter(
        help="A short step; tokens per device; tokens for a price; few devices; a short step of a "
        "long run, with interruptions and the risk of memory (expected); the longest sequence of "
        "which a plan fits; or, with front, what no other plan beats in time, memory and devices."
    ),
]
Price = Annotated[float | None, Parameter(help="Of a device for an hour, in any currency.")]
Why = Annotated[
    bool, Parameter(help="Say why this plan, why not its neighbours, what would change it.")
]
Detail = Annotated[
    bool, Parameter(help="Show also the ten best plans, and every term of the first.")
]
Trainer = Annotated[
    str,
    Parameter(
        help="Whose seconds, and what it can run: echelon, generic, or a tool by its generation: "
        f"{', '.join(trainer_names())}."
    ),
]
Out = Annotated[
    Names,
    Parameter(
        show_default=False,
        help="What to write, by its ending: of a search the best plan as a run FILE.toml or a plan "
        "FILE.json; a page as FILE.html, its figures as FOLDER/, NAME.svg or NAME.png; repeat for "
        "more.",
    ),
]
AsJson = Annotated[
    Json,
    Parameter(
        help="Print one versioned JSON object; that of a search has a published JSON Schema, which "
        "`echelon explain json` prints."
    ),
]


def plan(
    run: ModelOrRun,
    /,
    *,
    cluster: ClusterName = None,
    search: Search = False,
    pin: PinTexts = (),
    objective: ObjectiveName = "time",
    price: Price = None,
    trainer: Trainer = OURS,
    out: Out = (),
    why: Why = False,
    detail: Detail = False,
    settings: Settings = (),
    json: AsJson = False,
) -> int:
    """Show what the ranks of a run hold and send; with --cluster or --search, the best splits.

    A model without a cluster is planned on the GPUs of this machine, else on four sizes of common
    ones. Exit 1 where nothing fits into the memory of the devices.
    """
    from echelon.planner.search.request import SearchAim, asks_what_exists

    columns = page_columns()
    files = WrittenFiles.read(out, (RUN_FILE, PLAN, *REPORT))
    anywhere = cluster is None and not search and asks_what_exists(run, settings)
    if cluster is None and not search and not anywhere:
        asked: dict[str, object] = {
            "--objective": objective != "time",
            "--trainer": trainer != OURS,
        }
        asked |= {"--pin": pin, "--price": price, "--detail": detail}
        asked |= dict.fromkeys(files.names(RUN_FILE, PLAN), True)
        _require_search(asked)
        return _show(run, settings, files, why=why, json=json, columns=columns)
    front = objective == "front"
    question = SearchQuestion(
        model=run,
        cluster=cluster,
        settings=settings,
        pins=pin,
        aim=SearchAim(objective="time" if front else objective, price=price, trainer=trainer),
        front=front,
        detail=detail,
        why=why,
        files=files,
        json=json,
        columns=columns,
    )
    return plan_on_what_exists(question) if anywhere else run_search(question)


def _show(
    run: str,
    settings: tuple[str, ...],
    files: WrittenFiles,
    *,
    why: bool,
    json: bool,
    columns: int,
) -> int:
    """Print what a run holds and sends, write its page; return 1 where it does not fit."""
    from echelon.config.automatic import search_note_of_job
    from echelon.config.files.measurements import unit_times_from_job
    from echelon.config.job import assumed_of_job
    from echelon.config.load import load_job
    from echelon.core.messages.plurals import in_singular
    from echelon.planner.lint.checks import plan_fits
    from echelon.planner.report.printed_numbers import require_page
    from echelon.planner.report.report import plan_json, plan_text, require_text

    with working("planning", lines=False):
        job = load_job(run, settings)
        times = unit_times_from_job(job)
        assumed, searched = assumed_of_job(job), search_note_of_job(job)
        text = "" if json else plan_text(job.plan, times, searched, assumed, columns=columns)
        document = plan_json(job.plan, times, assumed)
        if not json:
            require_text(text, document)
    if json:
        print_json("plan", document)
    print(in_singular(text), end="")
    if why:
        _explain(run, settings, job.plan, columns=columns)
    if files.has_report:
        from echelon.page.documents.plan import plan_page

        page = plan_page(job.plan, times)
        require_page(page, document)
        files.write_report(page)
    return 0 if plan_fits(job.plan) else 1


def _explain(run: str, settings: tuple[str, ...], plan: Plan, *, columns: int) -> None:
    """Say what makes a run fit, where it does not, else draw it: on stderr, beside its page."""
    from echelon.planner.answer.why_text import fixes_text
    from echelon.planner.explain.fixes import candidate_from_plan, find_fixes
    from echelon.planner.predict.estimate import estimate_plan
    from echelon.planner.report.report import pictures_text
    from echelon.planner.search.request import make_request

    fixes = find_fixes(make_request(run, settings=settings), candidate_from_plan(plan))
    note(
        fixes_text(fixes, plan.cluster.device, columns=columns)
        if fixes
        else pictures_text(plan, estimate_plan(plan), columns=columns)
    )


def _require_search(flags: dict[str, object]) -> None:
    """Refuse flags of a search where there is none: they would change nothing."""
    if given := [flag for flag, value in flags.items() if value]:
        raise bad_argument(
            f"{' and '.join(given)} is about a search, and without --cluster or --search a run is "
            "shown as it is",
            "--cluster 8xh100",
            "--search",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchQuestion:
    """Hold a search that was asked for, and what is printed and written of its answer."""

    model: str
    """A run file, a preset of a run or a model, or a config.json."""
    cluster: str | None
    """A name or a file; None for that of the run."""
    settings: Sequence[str]
    """Values of ``--set``."""
    pins: Sequence[str]
    """Values of ``--pin``."""
    aim: SearchAim
    """What is best."""
    front: bool
    """Whether the plans that no other one beats are wanted."""
    detail: bool
    """Whether the ten best and all terms are printed."""
    why: bool
    """Whether reasons are."""
    files: WrittenFiles
    """What is written."""
    json: bool
    """Whether JSON is printed."""
    columns: int
    """Columns of a text."""

    def request(self, cluster: str | None) -> SearchRequest:
        """Return what is searched for on a cluster; ConfigError where it is wrong."""
        from echelon.planner.search.request import make_request

        return make_request(
            self.model, cluster=cluster, settings=self.settings, pins=self.pins, aim=self.aim
        )

    def command(self, aim: SearchAim) -> str:
        """Return the command that asks for a plan again."""
        words = ["echelon", "plan", self.model]
        words += ["--search"] if self.cluster is None else ["--cluster", self.cluster]
        flags = (("--set", self.settings), ("--pin", self.pins))
        words += [word for flag, values in flags for value in values for word in (flag, value)]
        if aim.objective != "time":
            words += ["--objective", aim.objective]
        if aim.price is not None:
            words += ["--price", f"{aim.price:g}"]
        if aim.trainer != OURS:
            words += ["--trainer", aim.trainer]
        return shlex.join(words)


def run_search(question: SearchQuestion) -> int:
    """Search, print the answer, write the best plan; return the exit code."""
    from echelon.planner.answer.recommend_text import heading_text
    from echelon.planner.recommend.recommend import Recommendation, recommend
    from echelon.planner.search.request import LONGEST_SEQUENCE
    from echelon.planner.search.search import pareto_front

    request, lines = question.request(question.cluster), not question.json
    # The length of sequences is a result of a search for the longest.
    is_known = request.objective != LONGEST_SEQUENCE
    if is_known and lines:
        print(heading_text(request, columns=question.columns), flush=True)
    with working("searching for plans", lines=lines):
        found = recommend(request)
        answer = found.answer if isinstance(found, Recommendation) else found
        front = pareto_front(request) if question.front and not answer.interrupted else ()
    if not is_known and lines:
        print(heading_text(answer.request, columns=question.columns), flush=True)
    if answer.best is None and not answer.interrupted:
        return _tell_no_plan(answer, question)
    asked = question.command(request)
    _print_answer(found, answer, front, question, asked)
    if answer.best is not None:
        _write_outputs(answer, question.files)
        if question.files.has_report:
            from echelon.page.documents.search import search_page
            from echelon.planner.answer.search_json import found_json
            from echelon.planner.report.printed_numbers import require_page

            page = search_page(found, asked)
            require_page(page, found_json(found))
            question.files.write_report(page)
    if answer.interrupted:
        note(
            f"{answer.num_computed:,} plans computed of {answer.num_legal:,} met before the "
            "interrupt; there may be better ones"
        )
        return EXIT_INTERRUPTED
    return 0


def _print_answer(
    found: Recommendation | SearchResult,
    answer: SearchResult,
    front: Sequence[RankedPlan],
    question: SearchQuestion,
    asked: str,
) -> None:
    """Print an answer as JSON, or as text where it has a plan."""
    from echelon.planner.answer.recommend_text import advice_text
    from echelon.planner.answer.search_json import explanation_json, found_json
    from echelon.planner.answer.search_text import answer_text
    from echelon.planner.answer.why_text import explanation_text
    from echelon.planner.explain.why import explain_result
    from echelon.planner.recommend.recommend import Recommendation
    from echelon.planner.report.report import require_text

    reasons, columns, told = None, question.columns, found_json(found, front)
    if question.why and answer.best is not None:
        with working("looking at other plans", lines=not question.json):
            reasons = explain_result(answer)
    if question.json:
        print_json("plan", told if reasons is None else told | {"why": explanation_json(reasons)})
    elif answer.best is not None:
        texts: list[str] = []
        if isinstance(found, Recommendation):
            texts.append(advice_text(found, asked, columns=columns))
        if question.detail or front or not isinstance(found, Recommendation):
            texts.append("\n" + answer_text(answer, front, columns=columns))
        for text in texts:
            require_text(text, told)
            print(text, end="")
        if reasons is not None:
            print("\n" + explanation_text(reasons, columns=columns), end="")


def _tell_no_plan(answer: SearchResult, question: SearchQuestion) -> int:
    """Say why a search has no plan and what would fit; return the exit code, or raise the error."""
    from echelon.planner.answer.why_text import leanest_json, no_plan_text
    from echelon.planner.explain.no_plan import NothingFits, explain_no_plan

    with working("looking for what would fit", lines=not question.json):
        error = explain_no_plan(answer)
    leanest = error.leanest if isinstance(error, NothingFits) else None
    if leanest is None:
        raise error
    if not question.json:
        print(no_plan_text(leanest, columns=question.columns), end="", flush=True)
        raise error
    print_error_json("plan", error, {"leanest": leanest_json(leanest)})
    return error.exit_code


def _write_outputs(answer: SearchResult, files: WrittenFiles) -> None:
    """Write the best plan as a plan, and as a run file with what stands beside it."""
    from echelon.interop.plan_settings import needed_settings, run_toml

    plan = answer.first.plan
    assert plan is not None, "what is the best of an answer has become a Plan"
    if (out := files.get(PLAN)) is not None:
        write_new(out, plan.to_json(), key=OUT)
    if (out := files.get(RUN_FILE)) is not None:
        run = needed_settings(plan)
        beside = {out.parent / name: text for name, text in run.beside.items()}
        require_new_files({OUT: out} | {str(file): file for file in beside})
        for file, text in beside.items():
            write_new(file, text, key=OUT)
        write_new(out, run_toml(run), key=OUT)


_HINT = "--cluster {name}; any COUNTxDEVICE or a cluster file will do."


def plan_on_what_exists(question: SearchQuestion) -> int:
    """Print the answer on the GPUs of this machine, or on four clusters; return the exit code.

    It is 1 where no cluster has a plan.
    """
    from echelon.launch.gpus import own_cluster
    from echelon.planner.answer.answer import sizes_json, sizes_text
    from echelon.planner.recommend.recommend import NO_SIZE, four_sizes

    own = own_cluster()
    if own.name is not None:
        return run_search(replace(question, cluster=own.name))
    _require_no_plan_flags(question)
    with working("searching on four sizes", lines=not question.json):
        # A table has the plan to run of each size, and no other one.
        found = four_sizes(question.request, alone=not question.json)
    if question.json:
        print_json("plan", sizes_json(found))
    elif found:
        print(sizes_text(found, own.unknown, _HINT, columns=question.columns), end="")
    if not found:
        note(NO_SIZE)
    return 0 if found else 1


def _require_no_plan_flags(question: SearchQuestion) -> None:
    """Refuse what is about one plan, where there are four."""
    from echelon.planner.search.request import LONGEST_SEQUENCE

    flags = {
        OUT: bool(question.files.paths),
        "--why": question.why,
        "--detail": question.detail,
        "--objective front": question.front,
        f"--objective {LONGEST_SEQUENCE}": question.aim.objective == LONGEST_SEQUENCE,
    }
    if given := [flag for flag, is_given in flags.items() if is_given]:
        raise bad_argument(
            f"{' and '.join(given)} is about the plans of one cluster, none is named, and this "
            "machine has no GPU that is known",
            "--cluster 8xh100",
        )


def explore(
    *,
    out: Annotated[
        Path, Parameter(help="The file to write the page to, FILE.html, which must be new.")
    ],
    model: Annotated[str, Parameter(help="The preset of a model at which controls start.")] = (
        "llama3-8b"
    ),
    cluster: Annotated[
        str, Parameter(help="Where they start: COUNTxDEVICE such as 8xh100.")
    ] = "64xh100",
) -> int:
    """Write a page whose controls are model, cluster, mesh, ZeRO, schedule, batch and recompute."""
    WrittenFiles.read((str(out),), (PAGE,))
    from echelon.api.reporting import explore as write

    write(out, model=model, cluster=cluster)
    note(f"written: {out}")
    return 0
