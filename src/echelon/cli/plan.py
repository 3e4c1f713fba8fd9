"""`echelon plan`: check a run by every rule, or search for the best way to split one.

Exit codes: 0 found; 2 wrong input, or nothing fits; 130 interrupted, with the best plan of what was
seen until then printed, where there is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from echelon.cli.flags import Settings
from echelon.cli.output import print_json

OURS, TOP = "echelon", 10

ModelOrRun = Annotated[
    str, Parameter(help="A run.toml, a preset of a run or model, or a config.json to search for.")
]
ClusterName = Annotated[
    str | None, Parameter(help="Search for a plan on COUNTxDEVICE such as 8xh100, or on a file's.")
]
Search = Annotated[
    bool, Parameter(negative=(), help="Search for a better layout on the cluster of the run.")
]
PinTexts = Annotated[
    tuple[str, ...],
    Parameter(
        name="--pin",
        negative=(),
        show_default=False,
        help="Keep the search to key=value, such as tp=8 or schedule=1f1b; repeat for more.",
    ),
]
ObjectiveName = Annotated[
    Literal["time", "throughput", "cost", "devices", "front"],
    Parameter(
        help="A short step; tokens per device; tokens for a price; few devices; or, with front, "
        "what no other plan beats in time, memory and devices."
    ),
]
Price = Annotated[float | None, Parameter(help="Of a device for an hour, in any currency.")]
Top = Annotated[int, Parameter(help="How many plans to show.")]
Why = Annotated[
    bool,
    Parameter(negative=(), help="Say why this plan, why not its neighbours, what would change it."),
]
Svg = Annotated[
    Path | None, Parameter(help="Draw memory, step and mesh of the best into this new folder.")
]
Trainer = Annotated[
    str,
    Parameter(
        help="Whose seconds, and what it can run: echelon, generic, or a tool by its generation: "
        "megatron-core (of 2023), megatron-core-2025, megatron-core-2026, deepspeed, "
        "deepspeed-2021, fsdp, fsdp2, torchtitan, accelerate ..."
    ),
]
Out = Annotated[
    Path | None, Parameter(help="Write the best plan here: a run file, or a plan as FILE.json.")
]
AsJson = Annotated[
    bool,
    Parameter(
        name="--json",
        negative=(),
        show_default=False,
        help="Print one versioned JSON object; that of a search has a published JSON Schema, which "
        "`echelon explain json` prints.",
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
    top: Top = TOP,
    out: Out = None,
    why: Why = False,
    svg: Svg = None,
    settings: Settings = (),
    json: AsJson = False,
) -> int:
    """Show what the ranks of a run hold and send; with --cluster or --search, the best splits."""
    if cluster is None and not search:
        asked = {
            "--objective": objective != "time",
            "--trainer": trainer != OURS,
            "--top": top != TOP,
        }
        _require_search({"--pin": pin, "--price": price, "--out": out, **asked})
        return _show(run, settings, json=json) or _explained(run, settings, why=why, svg=svg)
    from echelon.cli.plan_search import Shown, Wanted, run_search

    wanted = Wanted(
        model=run,
        cluster=cluster,
        settings=settings,
        pins=pin,
        objective="time" if objective == "front" else objective,
        price=price,
        trainer=trainer,
        top=top,
    )
    shown = Shown(front=objective == "front", out=out, why=why, svg=svg, json=json)
    return run_search(wanted, shown)


def _show(run: str, settings: tuple[str, ...], *, json: bool) -> int:
    from echelon.cli.plan_report import plan_json, plan_text
    from echelon.config.load import load_job
    from echelon.config.placement import found_of
    from echelon.config.times_file import times_of

    job = load_job(run, settings)
    times = times_of(job)
    if json:
        print_json("plan", plan_json(job.plan, times))
    else:
        print(plan_text(job.plan, times, found_of(job)), end="")
    return 0


def _explained(run: str, settings: tuple[str, ...], *, why: bool, svg: Path | None) -> int:
    """Say what makes a run fit, where it does not, and draw it: on stderr, beside its page."""
    if not why and svg is None:
        return 0
    from echelon.cli.output import note
    from echelon.cli.plan_view import draw
    from echelon.cli.plan_why import fixes_text
    from echelon.config.load import load_job
    from echelon.planner.estimate import estimate
    from echelon.planner.explain.fixes import choice_of, fixes_of
    from echelon.planner.request import make_request

    plan = load_job(run, settings).plan
    told = estimate(plan)
    if why:
        fixes = fixes_of(make_request(run, settings=settings), choice_of(plan))
        note(fixes_text(fixes) if fixes else draw(plan, told.seconds, told.bytes))
    if svg is not None:
        note(draw(plan, told.seconds, told.bytes, svg).rstrip("\n"))
    return 0


def _require_search(flags: dict[str, object]) -> None:
    """Refuse flags of a search where there is none: they would change nothing."""
    from echelon.core.errors import ConfigError
    from echelon.core.rulebook.command_line import BAD_ARGUMENT

    given = [flag for flag, value in flags.items() if value]
    if given:
        raise ConfigError(
            BAD_ARGUMENT.problem(
                f"{' and '.join(given)} is about a search, and without --cluster or --search a run "
                "is shown as it is",
                set_by="the command line",
                works=("--cluster 8xh100", "--search"),
            )
        )
