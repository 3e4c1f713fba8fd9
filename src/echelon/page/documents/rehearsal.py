# SPDX-License-Identifier: Apache-2.0
"""The sections of a rehearsal: memory by rank beside the plan's, faults, work and its seconds.

They are read from `rehearsal.json`, as `rehearse` writes it; the page and the text have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from echelon.core.units import binary_bytes, decimal_bytes, short_count
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
MOST_SECONDS = 5  # kernels that take longest
LEAST_SHARE = 0.005  # of a step


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
            Fact("distinct ranks", f"{len(ranks):,}"),
            Fact("operations in one order", f"{found['num_operations']:,}"),
            Fact(
                "peak of the fullest rank",
                binary_bytes(fullest["peak_bytes"]),
                f"planned {binary_bytes(fullest['planned_peak_bytes'])}",
            ),
        ),
        sections=rehearsal_sections(found),
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
    """Return faults, peaks beside the plan's, the memory curve, the work and its seconds."""
    fullest = max(found["ranks"], key=_peak)
    parts = [_peaks(found), *number_sections(found), _curve(fullest), work_section(fullest)]
    parts += roofline_sections(found)
    if found["faults"]:
        parts.insert(0, _faults(found))
    if found.get("patterns"):
        parts.append(_patterns(found["patterns"]))
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


def _patterns(patterns: Sequence[Mapping[str, Any]]) -> Section:
    return Section(
        id="patterns",
        title="Why no order hangs or mixes data",
        summary="The calls and the waits of a rank depend on no time. So the order of its calls is "
        "the same, whichever rank is slow.",
        table=DataTable(
            head=("communicator", "calls", "count", "why none hangs", "why none mixes data"),
            rows=tuple(
                (p["communicator"], p["kind"], f"{p['calls']:,}", p["no_hang"], p["no_mixing"])
                for p in patterns
            ),
            right=(2,),
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


def number_sections(rehearsal: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the table of compared numbers, each at its worst rank.

    Files of earlier versions have no such numbers.
    """
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for rank in rehearsal["ranks"]:
        for number in rank.get("numbers", ()):
            by_name.setdefault(number["name"], []).append(number)
    if not by_name:
        return
    rows: list[tuple[str, ...]] = []
    for name, numbers in by_name.items():
        worst = max(numbers, key=lambda n: (not n["holds"], abs(n["planned"] - n["rehearsed"])))
        values = (f"{round(worst[key]):,}" for key in ("planned", "rehearsed"))
        verdict = "holds" if worst["holds"] else "DIFFERS"
        rows.append((name, str(len(numbers)), *values, verdict))
    wrong = sum(row[-1] != "holds" for row in rows)
    yield Section(
        id="plan-numbers",
        title="Numbers of the plan, compared with the ranks",
        summary=f"{len(rows)} numbers of the plan, each at its worst rank: "
        f"{wrong or 'none'} differ{'s' * (wrong == 1)}.",
        table=DataTable(
            head=("number", "compared", "planned", "rehearsed", ""),
            rows=tuple(rows),
            right=(1, 2, 3),
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


def work_section(rank: Mapping[str, Any]) -> Section:
    """What a rank computes and sends in a step, by the kind of action."""
    sent = (f"{axis} {decimal_bytes(count)}" for axis, count in rank["sent_bytes"].items())
    return Section(
        id="work",
        title=f"What rank {rank['rank']} computes and sends in a step",
        summary=f"The fullest rank, {rank['rank']}, in a step:",
        table=DataTable.of(
            ("action", "kernels", "bytes moved", "FLOPs"),
            [
                (
                    task,
                    f"{work['kernels']:,}",
                    decimal_bytes(work["bytes"]),
                    short_count(work["flops"]),
                )
                for task, work in rank["work"].items()
            ],
        ),
        notes=(f"bytes sent by axis: {', '.join(sent) or 'none'}",),
    )


def roofline_sections(found: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the seconds of the counted work, what binds, and the kernels that take longest.

    Nothing where devices are processors, or the file is older than that.
    """
    roofline = found.get("roofline")
    if roofline is None:
        return
    shares = ", ".join(
        f"{name} {100 * share:.0f} %"
        for name, share in sorted(roofline["share"].items(), key=lambda one: -one[1])
        if share > LEAST_SHARE
    )
    yield Section(
        id="roofline",
        title="Seconds of the counted work",
        summary=(
            f"The counted work at the rates of {roofline['device']}, with nothing lost between "
            f"kernels, takes {roofline['step_s']:.4g} s a step: MFU {100 * roofline['mfu']:.1f} "
            f"(full attention). The plan predicts {roofline['planned_step_s']:.4g} s, "
            f"{roofline['planned_over_roofline']:.2f} times as long: MFU "
            f"{100 * roofline['planned_mfu']:.1f}."
        ),
    )
    yield Section(
        id="roofline-kernels",
        title="What binds, and the kernels that take longest",
        summary=f"bound by: {shares}",
        table=DataTable.of(
            ("kernel", "times", "seconds", "of the step", "bound by"),
            [
                (
                    one["name"],
                    f"{one['times']:,}",
                    f"{one['seconds']:.4g}",
                    f"{100 * one['seconds'] / roofline['step_s']:.1f} %",
                    one["binds"],
                )
                for one in roofline["kernels"][:MOST_SECONDS]
            ],
        ),
    )
