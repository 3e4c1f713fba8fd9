# SPDX-License-Identifier: Apache-2.0
"""The part of the page that a rehearsal fills: memory by rank beside the plan's, faults, work.

It is read from `rehearsal.json`, as `rehearse` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from echelon.core.units import binary_bytes, decimal_bytes, short_count
from echelon.core.version import __version__
from echelon.page.documents.curves import MOST_POINTS, sampled
from echelon.planner.view.document import (
    BarRow,
    BarsFigure,
    DataTable,
    Fact,
    LineSeries,
    LinesFigure,
    PageDocument,
    Section,
)

MOST_RANKS = 24  # ranks
MOST_NAMED = 64  # ranks of a fault that are named


def rehearsal_page(found: Mapping[str, Any]) -> PageDocument:
    """Return the page of a rehearsal alone, from the object that `rehearsal.json` holds."""
    ranks = found["ranks"]
    fullest = max(ranks, key=_peak)
    return PageDocument(
        title=f"{found['plan']}: rehearsal",
        subject=f"{found['world_size']:,} ranks under NCCL, without a GPU; plan "
        f"{str(found['plan_hash'])[:12]}",
        verdict=verdict_of_rehearsal(found),
        good=bool(found["holds"]),
        facts=(
            Fact(name="distinct ranks", value=f"{len(ranks):,}"),
            Fact(name="operations in one order", value=f"{found['num_operations']:,}"),
            Fact(
                name="peak of the fullest rank",
                value=binary_bytes(fullest["peak_bytes"]),
                note=f"planned {binary_bytes(fullest['planned_peak_bytes'])}",
            ),
        ),
        sections=rehearsal_sections(found),
        made_by=f"Echelon {__version__}",
    )


def verdict_of_rehearsal(found: Mapping[str, Any]) -> str:
    """Return in a sentence whether the ranks of the rehearsal do anything wrong."""
    if found["holds"]:
        return (
            f"It holds: {found['num_operations']:,} operations have one order, are equal on all "
            "members and awaited before use."
        )
    count = len(found["faults"])
    return f"It does not hold: {count} fault{'s' * (count != 1)}. {found['faults'][0]['text']}"


def rehearsal_sections(found: Mapping[str, Any]) -> tuple[Section, ...]:
    """Return faults, peaks beside those of the plan, the memory curve and the counted work."""
    fullest = max(found["ranks"], key=_peak)
    parts = [_peaks(found), _curve(fullest), _work(fullest)]
    if found["faults"]:
        parts.insert(0, _faults(found))
    return tuple(parts)


def _peak(rank: Mapping[str, Any]) -> int:
    return int(rank["peak_bytes"])


def _faults(found: Mapping[str, Any]) -> Section:
    return Section(
        id="faults",
        title="Faults",
        summary=verdict_of_rehearsal(found),
        table=DataTable(
            head=("rule", "ranks", "what"),
            rows=tuple((one["rule"], _ranks(one["ranks"]), one["text"]) for one in found["faults"]),
        ),
    )


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text; of very many, the first."""
    more = f" and {len(ranks) - MOST_NAMED:,} more" if len(ranks) > MOST_NAMED else ""
    return ", ".join(map(str, ranks[:MOST_NAMED])) + more


def _peaks(found: Mapping[str, Any]) -> Section:
    shown = sorted(found["ranks"], key=lambda one: (-_peak(one), one["rank"]))[:MOST_RANKS]
    rows = [row for rank in shown for row in _pair(rank)]
    errors = [rank["planned_peak_bytes"] / rank["peak_bytes"] - 1 for rank in shown]
    worst = max(errors, key=abs)
    return Section(
        id="rehearsed-memory",
        title="Memory at its peak, rehearsed and planned",
        summary=f"The plan is off by {100 * worst:+.2f} % at most, of {len(shown)} ranks.",
        figure=BarsFigure(kinds=("bytes",), rows=tuple(rows)),
        table=DataTable(
            head=("rank", "rehearsed", "planned", "plan off by"),
            rows=tuple(
                (
                    str(rank["rank"]),
                    f"{rank['peak_bytes']:,}",
                    f"{round(rank['planned_peak_bytes']):,}",
                    f"{100 * error:+.2f} %",
                )
                for rank, error in zip(shown, errors, strict=True)
            ),
            right=(0, 1, 2, 3),
        ),
    )


def _pair(rank: Mapping[str, Any]) -> tuple[BarRow, BarRow]:
    name, planned = f"rank {rank['rank']}", rank["planned_peak_bytes"]
    return (
        BarRow.of(f"{name}, rehearsed", (rank["peak_bytes"],), binary_bytes),
        BarRow.of(f"{name}, planned", (planned,), binary_bytes),
    )


def _curve(rank: Mapping[str, Any]) -> Section:
    """Return what the fullest rank holds after each action of a step, and at its peak in it."""
    every = rank["curve"]
    points = sampled(every, MOST_POINTS)
    some = f" {len(points):,} of them are drawn." if len(points) < len(every) else ""
    return Section(
        id="memory-curve",
        title=f"Memory of rank {rank['rank']} through a step",
        summary=f"It peaks at {binary_bytes(rank['peak_bytes'])}, over {len(every):,} actions."
        + some,
        figure=LinesFigure(
            unit="bytes",
            steps=tuple(range(len(points))),
            series=(
                LineSeries(name="held after the action", values=tuple(p["kept"] for p in points)),
                LineSeries(name="peak in the action", values=tuple(p["peak"] for p in points)),
            ),
            planned=float(rank["planned_peak_bytes"]),
            planned_text=binary_bytes(rank["planned_peak_bytes"]),
        ),
        table=DataTable(
            head=("action", "held after it", "peak in it"),
            rows=tuple((str(p["action"]), f"{p['kept']:,}", f"{p['peak']:,}") for p in points),
            right=(1, 2),
        ),
    )


def _work(rank: Mapping[str, Any]) -> Section:
    return Section(
        id="work",
        title=f"What rank {rank['rank']} computes and sends in a step",
        summary="Bytes sent by axis: "
        + (", ".join(f"{a} {decimal_bytes(n)}" for a, n in rank["sent_bytes"].items()) or "none")
        + ".",
        table=DataTable(
            head=("action", "kernels", "bytes moved", "FLOPs"),
            rows=tuple(
                (
                    task,
                    f"{work['kernels']:,}",
                    decimal_bytes(work["bytes"]),
                    short_count(work["flops"]),
                )
                for task, work in rank["work"].items()
            ),
            right=(1, 2, 3),
        ),
    )
