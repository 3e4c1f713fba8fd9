# SPDX-License-Identifier: Apache-2.0
"""`echelon plan`: check a run by every rule, or search for the best way to split one.

A model without a cluster is searched for on the GPUs of this machine; where it has none, four sizes
of a common device are shown (`planner/recommend/recommend.py`).

Exit codes: 0 the run fits, or a plan was found; 1 the run does not fit, or none of the plans of a
search does; 2 wrong input, or a search in which no plan is legal; 130 interrupted, with the best
plan of what was seen until then printed, where there is one.
"""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from echelon.cli.flags import Json, Settings, bad_argument
from echelon.cli.output import print_json
from echelon.cli.stderr import working
from echelon.cli.written_files import PLAN, REPORT, RUN_FILE, Names, WrittenFiles
from echelon.interop.tools import trainer_names

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
    from echelon.cli.output import page_columns
    from echelon.planner.search.request import asks_what_exists

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
        fits = _show(run, settings, json=json, columns=columns)
        if why:
            _explain(run, settings, columns=columns)
        if files.has_report:
            _write_report(run, settings, files)
        return 0 if fits else 1
    from echelon.cli.plan.search import SearchOutputOptions, run_search
    from echelon.planner.search.request import SearchAim

    wanted = SearchAim(
        objective="time" if objective == "front" else objective,
        price=price,
        trainer=trainer,
    )
    shown = SearchOutputOptions(
        front=objective == "front",
        detail=detail,
        why=why,
        files=files,
        json=json,
    )
    if anywhere:
        from echelon.cli.plan.search import plan_on_what_exists

        return plan_on_what_exists(run, wanted, shown, settings=settings, pins=pin, columns=columns)
    return run_search(
        run, wanted, shown, cluster=cluster, settings=settings, pins=pin, columns=columns
    )


def _show(run: str, settings: tuple[str, ...], *, json: bool, columns: int) -> bool:
    """Print what a run holds and sends, and return whether it fits."""
    from echelon.config.automatic import search_note_of_job
    from echelon.config.files.measurements import unit_times_from_job
    from echelon.config.job import assumed_of_job
    from echelon.config.load import load_job
    from echelon.core.messages.plurals import in_singular
    from echelon.planner.lint.checks import plan_fits
    from echelon.planner.report.report import plan_json, plan_text

    with working("planning", lines=False):
        job = load_job(run, settings)
        times = unit_times_from_job(job)
        assumed, searched = assumed_of_job(job), search_note_of_job(job)
        text = "" if json else plan_text(job.plan, times, searched, assumed, columns=columns)
    if json:
        print_json("plan", plan_json(job.plan, times, assumed))
    print(in_singular(text), end="")
    return plan_fits(job.plan)


def _explain(run: str, settings: tuple[str, ...], *, columns: int) -> None:
    """Say what makes a run fit, where it does not, else draw it: on stderr, beside its page."""
    from echelon.cli.stderr import note
    from echelon.config.load import load_job
    from echelon.planner.answer.why_text import fixes_text
    from echelon.planner.explain.fixes import candidate_from_plan, find_fixes
    from echelon.planner.predict.estimate import estimate_plan
    from echelon.planner.report.report import pictures_text
    from echelon.planner.search.request import make_request

    plan = load_job(run, settings).plan
    estimated = estimate_plan(plan)
    fixes = find_fixes(make_request(run, settings=settings), candidate_from_plan(plan))
    note(
        fixes_text(fixes, plan.cluster.device, columns=columns)
        if fixes
        else pictures_text(plan, estimated, columns=columns)
    )


def _write_report(run: str, settings: tuple[str, ...], files: WrittenFiles) -> None:
    """Write the page of a run's plan, or its figures."""
    from echelon.config.files.measurements import unit_times_from_job
    from echelon.config.load import load_job
    from echelon.page.documents.plan import plan_page

    job = load_job(run, settings)
    files.write_report(plan_page(job.plan, unit_times_from_job(job)))


def _require_search(flags: dict[str, object]) -> None:
    """Refuse flags of a search where there is none: they would change nothing."""
    if given := [flag for flag, value in flags.items() if value]:
        raise bad_argument(
            f"{' and '.join(given)} is about a search, and without --cluster or --search a run is "
            "shown as it is",
            "--cluster 8xh100",
            "--search",
        )
