# SPDX-License-Identifier: Apache-2.0
"""Bytes of a run by place: what rests where, what a step adds, what ZeRO decided, servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from echelon.core.plan import Plan
from echelon.core.units import binary_bytes, decimal_bytes
from echelon.cost.bytes.held import bytes_held
from echelon.cost.bytes.sent import bytes_sent
from echelon.cost.bytes.servers import through_server
from echelon.cost.bytes.terms import Pool
from echelon.planner.predict.stage_rows import (
    StageRow,
    most_held_bytes,
    most_step_bytes,
    place_head,
    pool_bytes,
)
from echelon.planner.report.head import count_text
from echelon.planner.view.document import DataTable, Section

POOLS: tuple[Pool, ...] = ("device", "host", "nvme")
MOST_SHOWN = 8  # runs of ranks, servers


def memory_sections(plan: Plan, runs: Sequence[Sequence[StageRow]]) -> Iterator[Section]:
    """Yield what is held between steps, what a step adds, what ZeRO's choices cost, servers."""
    rows = [row for run in runs for row in run]
    device, place = plan.cluster.device, place_head(rows)
    room = f"{device.name} has {binary_bytes(device.memory_bytes)}"
    if most_held_bytes(plan, rows) > device.memory_bytes:
        room += ": THIS DOES NOT FIT"
    elif most_step_bytes(plan, rows) > device.memory_bytes:
        room += ": this fits, but maybe not what a step adds"
    else:
        room += ", activations come on top"
    yield Section(
        id="held",
        title="Bytes between steps",
        summary=f"Each rank holds between steps ({room}):",
        table=_held(place, runs),
    )
    if any(run[0].step for run in runs):
        yield Section(
            id="step-bytes",
            title="Bytes that a step adds",
            summary="While a step runs each rank also holds, at most, beside activations:",
            table=_step_table(place, runs),
        )
    if any(run[0].choices for run in runs):
        yield Section(
            id="zero-choices",
            title="Choices of ZeRO",
            summary="What a rank sends over its data axes per step and holds on its device, with "
            "the other choice too (* this plan):",
            table=_choices_table(place, runs),
        )
    if plan.mesh.servers:
        yield _servers(plan)


def run_places(run: Sequence[StageRow]) -> str:
    """Return the places of rows that are alike, in short."""
    return ranges([row.pp_rank for row in run])


def _held(place: str, runs: Sequence[Sequence[StageRow]]) -> DataTable:
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
    return DataTable.of(head, cells)


def _step_table(place: str, runs: Sequence[Sequence[StageRow]]) -> DataTable:
    """Return what a step adds at most, for each place by its name."""
    cells = [
        (run_places(run), term.name, term.pool, binary_bytes(term.bytes), term.formula)
        for run in runs
        for term in run[0].step
    ]
    return DataTable.of((place, "what", "where", "at most", "elements x bytes"), cells)


def _choices_table(place: str, runs: Sequence[Sequence[StageRow]]) -> DataTable:
    """Return what each value of a setting costs, for each place by its name."""
    cells = [
        (
            run_places(run),
            choice.setting,
            choice.value + (" *" if choice.chosen else ""),
            decimal_bytes(choice.sent_bytes),
            binary_bytes(choice.held_bytes),
            binary_bytes(choice.step_bytes),
        )
        for run in runs
        for choice in run[0].choices
    ]
    head = (place, "setting", "value", "sent", "held", "in a step, at most")
    return DataTable.of(head, cells)


def ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers in short: ``0-3``, ``0-1, 4-5``, or ``0, 8 ... 120``."""
    found = groupby(enumerate(numbers), key=lambda one: one[1] - one[0])
    runs = [[number for _, number in run] for _, run in found]
    if len(runs) > MOST_SHOWN:
        return f"{numbers[0]}, {numbers[1]} ... {numbers[-1]}"
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def servers_json(plan: Plan) -> list[dict[str, Any]]:
    """Return what each server holds and sends, and the bytes of the model that go through it."""
    return [
        {
            "server": server,
            "rank": rank,
            "held": [asdict(term) for term in bytes_held(plan, rank)],
            "sent_bytes_per_step": [
                {**asdict(term), "bytes": term.bytes} for term in bytes_sent(plan, rank)
            ],
            "model_bytes_through_it_per_step": through_server(plan, server),
        }
        for server, rank in enumerate(plan.mesh.server_ranks)
    ]


def _servers(plan: Plan) -> Section:
    """Return what servers hold between steps, and what goes through each in a step."""
    shown = [*enumerate(plan.mesh.server_ranks)][:MOST_SHOWN]
    kinds = [*dict.fromkeys(term.name for _, rank in shown for term in bytes_held(plan, rank))]
    cells: list[tuple[object, ...]] = []
    for server, rank in shown:
        held = {term.name: term.bytes for term in bytes_held(plan, rank)}
        cells.append(
            (
                server,
                rank,
                *(binary_bytes(held.get(kind, 0)) for kind in kinds),
                binary_bytes(sum(held.values())),
                decimal_bytes(through_server(plan, server)),
            )
        )
    more = plan.mesh.servers - len(shown)
    return Section(
        id="servers",
        title="Parameter servers",
        summary="Each parameter server holds between steps, and has pass through its link in a "
        "step (all gradients in, all parameters out: W workers x its range x (g + p) bytes):",
        table=DataTable.of(("server", "rank", *kinds, "together", "through it"), cells),
        notes=(f"and {count_text(more, 'server')} more like these",) if more else (),
    )
