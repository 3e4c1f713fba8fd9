# SPDX-License-Identifier: Apache-2.0
"""`echelon compare`: two plans side by side, or with --strategies each way to split one run beside
one process.

Of two plans the exit code is 0 whatever differs; of strategies it is 1 where one is not equal to
one process. The answer is on stdout, and in `--json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from echelon.api.comparing import compare as compare_runs
from echelon.api.comparing import compare_strategies
from echelon.cli.flags import REPORT, Json, ReportNames, Settings, WrittenFiles, bad_argument
from echelon.cli.other_tools import AnyRun
from echelon.cli.output import note, page_columns, print_result, working
from echelon.core.choices.strategies import STRATEGIES
from echelon.page.documents.comparison import (
    comparison_page,
    part_sections,
    value_text,
    verdict_of_comparison,
    what_changes,
)
from echelon.planner.explain.compare import PlanComparison
from echelon.planner.view.text_layout import WIDTH, fit_page, section_text, table

if TYPE_CHECKING:
    from echelon.proof.deviations import StrategyDeviation

WIDEST_VALUE = 22  # columns of a value on a page of 80

ALL = "all"
TOLD = ("loss", "gradient", "parameter")


def compare(
    a: AnyRun,
    b: AnyRun | None = None,
    /,
    *,
    strategies: Annotated[
        str | None,
        Parameter(help="Instead of B: dp,zero3,tp,pp,cp,... or all, each beside one process."),
    ] = None,
    ranks: Annotated[int | None, Parameter(help="Ranks of each strategy, 2 by default.")] = None,
    settings: Settings = (),
    out: ReportNames = (),
    json: Json = False,
) -> int:
    """Compare two plans: settings that differ, whether the mathematics do, bytes held and sent.

    With --strategies, split the run in each of these ways, prove it, and show how far loss,
    gradients and parameters are from one process, and which sums are taken in another order.
    """
    wanted = WrittenFiles.read(out, REPORT)
    if strategies is not None:
        if typed := wanted.names(*REPORT):
            raise bad_argument(
                f"{typed[0]} is the page of two plans", f"echelon compare {a} nano-zero3 {typed[0]}"
            )
        if b is not None:
            example = f"echelon compare {a} --strategies {strategies}"
            raise bad_argument("--strategies compares with one process, not with a plan B", example)
        return compare_with_one_process(a, strategies, ranks or 2, settings, as_json=json)
    if b is None:
        examples = (f"echelon compare {a} nano-zero3", f"echelon compare {a} --strategies all")
        raise bad_argument("what is to be compared with it: a plan B, or --strategies", *examples)
    if ranks is not None or settings:
        example = f"echelon compare {a} --strategies all --ranks 2"
        raise bad_argument("--ranks and --set are about --strategies", example)
    found = compare_runs(a, b)
    if wanted.has_report:
        wanted.write_report(comparison_page(found, a, b))
    columns = page_columns()
    print_result(
        "compare",
        lambda: comparison_json(found, a, b),
        lambda: comparison_text(found, a, b, columns=columns),
        as_json=json,
    )
    return 0


def comparison_json(found: PlanComparison, a: str, b: str) -> dict[str, object]:
    """Return a comparison as a JSON object."""
    sides = {"a": (a, found.a), "b": (b, found.b)}
    return {
        **{
            name: {
                "run": run,
                "name": side.plan.name,
                "plan_hash": side.plan.content_hash(),
                "bytes": {part: dict(terms) for part, terms in side.bytes().items()},
                "seconds": dict(side.seconds),
            }
            for name, (run, side) in sides.items()
        },
        "same_mathematics": found.same_mathematics,
        "same_layout": found.same_layout,
        "differences": [
            {"setting": one.setting, "a": one.a, "b": one.b, "changes": what_changes(one)}
            for one in found.differences
        ],
    }


def comparison_text(found: PlanComparison, a: str, b: str, *, columns: int = WIDTH) -> str:
    """Return a comparison as a page; no line has more columns than there are."""
    return fit_page("\n\n".join(_parts(found, a, b, columns)), columns=columns) + "\n"


def _parts(found: PlanComparison, a: str, b: str, columns: int) -> Iterator[str]:
    sides = {"A": (a, found.a), "B": (b, found.b)}
    yield "\n".join(
        f"{name}: {run}, {count} rank{'s' * (count > 1)}"
        for name, (run, side) in sides.items()
        for count in (side.plan.mesh.world_size,)
    )
    yield verdict_of_comparison(found)
    if found.differences:
        widest = WIDEST_VALUE + max(0, columns - WIDTH) // 2
        rows = [
            (one.setting, _short(one.a, widest), _short(one.b, widest), what_changes(one))
            for one in found.differences
        ]
        yield table(("setting", "A", "B", "changes"), rows, columns)
    for part in part_sections(found):
        yield section_text(part, columns=columns)


def _short(value: object, widest: int) -> str:
    """Return a value in a narrow column; of stages, how many blocks each has."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        text = " ".join(str(len(stage)) for stage in value)
    else:
        text = value_text(value)
    return text if len(text) <= widest else f"{text[: widest - 3]}..."


def compare_with_one_process(
    run: str, names: str, ranks: int, settings: Sequence[str], *, as_json: bool
) -> int:
    """Prove each strategy and print the table; return 1 where one is not equal to one process."""
    from echelon.launch.host import require_memory_for_ranks

    chosen = (
        tuple(STRATEGIES)
        if names.strip() == ALL
        else tuple(name.strip() for name in names.split(",") if name.strip())
    )
    servers = max((STRATEGIES[name].servers for name in chosen if name in STRATEGIES), default=0)
    require_memory_for_ranks(ranks + servers)
    note(f"proving {', '.join(chosen)} of {run} on {ranks} ranks beside one process ...")
    with working("comparing", lines=not as_json):
        found = compare_strategies(run, chosen, ranks=ranks, settings=settings)
    from echelon.proof.deviations import all_hold

    columns = page_columns()
    print_result(
        "compare",
        lambda: {"run": run, "ranks": ranks, "strategies": [asdict(one) for one in found]},
        lambda: fit_page("\n\n".join(_strategies_parts(found, columns)), columns=columns) + "\n",
        as_json=as_json,
    )
    return 0 if all_hold(found) else 1


def _strategies_parts(found: Sequence[StrategyDeviation], columns: int) -> Iterator[str]:
    ran = [one for one in found if one.deviations is not None]
    for place in range(max((len(one.deviations or ()) for one in ran), default=0)):
        rows = [row for one in ran if (row := _row(one, place))]
        precision = rows[0][0]
        yield f"Largest deviation from one process, {precision} (allowed in brackets):\n\n" + table(
            ("strategy", "mesh", *TOLD, ""), [row[1:] for row in rows], columns
        )
    if ran:
        yield "Sums that are taken in another order than in one process:\n\n" + "\n".join(
            f"{one.strategy}: {'; '.join(one.order)}" for one in ran
        )
    refused = [one for one in found if one.refused]
    if refused:
        yield "\n".join(
            f"{one.strategy} is refused by {', '.join(one.refused)}: {one.why}" for one in refused
        )


def _row(one: StrategyDeviation, place: int) -> tuple[str, ...] | None:
    """Return precision, strategy, mesh, what is told, and the verdict."""
    passes = list((one.deviations or {}).items())
    if place >= len(passes):
        return None
    precision, by_name = passes[place]
    cells = [
        f"{by_name[name].error:.1e} ({by_name[name].allowed:.0e})" if name in by_name else "-"
        for name in TOLD
    ]
    return precision, one.strategy, one.mesh, *cells, "" if one.holds else "FAILS"
