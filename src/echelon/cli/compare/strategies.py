# SPDX-License-Identifier: Apache-2.0
"""`echelon compare --strategies`: how far each way to split a run is from one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from echelon.api.comparing import compare_strategies
from echelon.cli.output import page_columns, print_result
from echelon.cli.stderr import note, working
from echelon.core.choices.strategies import STRATEGIES
from echelon.planner.view.text_layout import fit_page, table

if TYPE_CHECKING:
    from echelon.proof.deviations import StrategyDeviation

ALL = "all"
TOLD = ("loss", "gradient", "parameter")


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
        lambda: fit_page("\n\n".join(_parts(found, columns)), columns=columns) + "\n",
        as_json=as_json,
    )
    return 0 if all_hold(found) else 1


def _parts(found: Sequence[StrategyDeviation], columns: int) -> Iterator[str]:
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
