# SPDX-License-Identifier: Apache-2.0
"""The part of `echelon plan` about memory: what rests where, what a step adds, what was decided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from echelon.core.plan import Plan
from echelon.core.units import binary_bytes, decimal_bytes
from echelon.cost.bytes.held import ZeroChoice
from echelon.cost.bytes.terms import HeldTerm, Pool
from echelon.planner.predict.stage_rows import (
    StageRow,
    most_held_bytes,
    most_step_bytes,
    place_head,
    pool_bytes,
)
from echelon.planner.view.text_layout import WIDTH, table

POOLS: tuple[Pool, ...] = ("device", "host", "nvme")
MOST_SHOWN = 8  # runs of ranks


def memory_parts(
    plan: Plan,
    rows: Sequence[StageRow],
    runs: Sequence[Sequence[StageRow]],
    *,
    columns: int = WIDTH,
) -> Iterator[str]:
    """Yield what is held between steps, what a step adds, and what ZeRO's choices cost."""
    device, place = plan.cluster.device, place_head(rows)
    room = f"{device.name} has {binary_bytes(device.memory_bytes)}"
    if most_held_bytes(plan, rows) > device.memory_bytes:
        room += ": THIS DOES NOT FIT"
    elif most_step_bytes(plan, rows) > device.memory_bytes:
        room += ": this fits, but maybe not what a step adds"
    else:
        room += ", activations come on top"
    yield f"Each rank holds between steps ({room}):\n\n{_held(place, runs, columns=columns)}"
    if any(run[0].step for run in runs):
        found = _step_table(
            place, [(run_places(run), run[0].step) for run in runs], columns=columns
        )
        yield f"While a step runs each rank also holds, at most, beside activations:\n\n{found}"
    if any(run[0].choices for run in runs):
        found = _choices_table(
            place, [(run_places(run), run[0].choices) for run in runs], columns=columns
        )
        yield (
            "What a rank sends over its data axes per step and holds on its device, with the "
            f"other choice too (* this plan):\n\n{found}"
        )


def run_places(run: Sequence[StageRow]) -> str:
    """Return the places of rows that are alike, in short."""
    return ranges([row.pp_rank for row in run])


def _held(place: str, runs: Sequence[Sequence[StageRow]], *, columns: int) -> str:
    """Return what rests where.

    Each kind has a column, then each pool together, then the padding among all of it, where there
    is any; a kind that rests off the device says where.
    """
    kinds = [*dict.fromkeys((term.name, term.pool) for run in runs for term in run[0].held)]
    pools: list[Pool] = [pool for pool in POOLS if pool in {other for _, other in kinds}]
    totals = ["together"] if pools == ["device"] else [f"on {pool}" for pool in pools]
    names = [name if pool == "device" else f"{name} ({pool})" for name, pool in kinds]
    padded = any(term.padding for run in runs for term in run[0].held)
    cells: list[tuple[object, ...]] = []
    for run in runs:
        terms = run[0].held
        held = {(term.name, term.pool): term.bytes for term in terms}
        cells.append(
            (
                run_places(run),
                ranges([rank for row in run for rank in row.ranks]),
                len(run[0].blocks),
                ranges(sorted(block for row in run for block in row.blocks)),
                *(binary_bytes(held.get(kind, 0)) for kind in kinds),
                *(binary_bytes(pool_bytes(terms, pool)) for pool in pools),
                *([binary_bytes(sum(term.padding for term in terms))] if padded else []),
            )
        )
    head = (place, "ranks", "blocks", "which", *names, *totals, *(["padding"] if padded else []))
    return table(head, cells, columns)


def _step_table(place: str, rows: Sequence[tuple[str, Sequence[HeldTerm]]], *, columns: int) -> str:
    """Return what a step adds at most, for each place by its name."""
    cells = [
        (stage, term.name, term.pool, binary_bytes(term.bytes), term.formula)
        for stage, terms in rows
        for term in terms
    ]
    return table((place, "what", "where", "at most", "elements x bytes"), cells, columns)


def _choices_table(
    place: str, rows: Sequence[tuple[str, Sequence[ZeroChoice]]], *, columns: int
) -> str:
    """Return what each value of a setting costs, for each place by its name."""
    cells = [
        (
            stage,
            choice.setting,
            choice.value + (" *" if choice.chosen else ""),
            decimal_bytes(choice.sent_bytes),
            binary_bytes(choice.held_bytes),
            binary_bytes(choice.step_bytes),
        )
        for stage, choices in rows
        for choice in choices
    ]
    head = (place, "setting", "value", "sent", "held", "in a step, at most")
    return table(head, cells, columns)


def ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers in short: ``0-3``, ``0-1, 4-5``, or ``0, 8 ... 120``."""
    found = groupby(enumerate(numbers), key=lambda one: one[1] - one[0])
    runs = [[number for _, number in run] for _, run in found]
    if len(runs) > MOST_SHOWN:
        return f"{numbers[0]}, {numbers[1]} ... {numbers[-1]}"
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
