"""The words of `echelon rehearse`: the verdict, and the memory and the work of a few ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from echelon.core.units import binary_bytes, decimal_bytes, short_count
from echelon.planner.view.text_layout import fit_page, table

if TYPE_CHECKING:
    from echelon.rehearsal.rank import RankRehearsal
    from echelon.rehearsal.result import Rehearsal

MOST_RANKS = 8
"""Ranks whose memory is a row of the page: those with the highest peaks."""
MOST_KERNELS = 6
"""Kernels that are named: those that move most bytes."""


def rehearsal_text(found: Rehearsal, *, columns: int) -> str:
    """Return a rehearsal as a page."""
    return fit_page("\n\n".join(_parts(found, columns)), columns=columns) + "\n"


def _parts(found: Rehearsal, columns: int) -> Iterator[str]:
    plan, count = found.plan, len(found.ranks)
    ranks = "1 distinct rank" if count == 1 else f"{count:,} distinct ranks"
    few = ""
    if plan.num_microbatches < found.num_microbatches:
        few = f" of {found.num_microbatches:,}"
    yield (
        f"{plan.name}: {plan.mesh.world_size:,} ranks under NCCL, without a GPU\n"
        f"{ranks} rehearsed, {len(found.checked)} beside to compare; two steps of "
        f"{plan.num_microbatches:,}{few} microbatches"
    )
    yield _memory(found, columns)
    yield f"The fullest rank, {found.fullest.rank}, in a step:\n\n{_work(found.fullest, columns)}"
    yield f"What moves most bytes on it:\n\n{_kernels(found.fullest, columns)}"
    if found.holds:
        yield (
            f"holds: {found.num_operations:,} operations have one order, are equal on all members "
            "and awaited before use; no host waits inside of a schedule"
        )
    else:
        count = len(found.faults)
        yield f"DOES NOT HOLD: {count} fault{'s' * (count > 1)}"


def _memory(found: Rehearsal, columns: int) -> str:
    fullest = sorted(found.ranks, key=lambda one: (-one.peak_bytes, one.rank))[:MOST_RANKS]
    rows = [
        (
            one.rank,
            found.plan.mesh.label(one.rank),
            binary_bytes(sum(one.held.values())),
            binary_bytes(one.peak_bytes),
            binary_bytes(sum(found.planned[one.rank].values())),
            f"{100 * found.memory_error(one):+.1f} %",
        )
        for one in fullest
    ]
    return table(("rank", "", "held", "peak", "planned peak", "plan off by"), rows, columns)


def _work(rank: RankRehearsal, columns: int) -> str:
    rows = [
        (
            task or "outside of actions",
            f"{work.kernels:,}",
            decimal_bytes(work.bytes),
            short_count(work.flops),
        )
        for task, work in rank.work.items()
    ]
    sent = ", ".join(f"{axis} {decimal_bytes(count)}" for axis, count in rank.sent.items())
    shown = table(("action", "kernels", "bytes moved", "FLOPs"), rows, columns)
    return f"{shown}\n\nbytes sent by axis: {sent or 'none'}"


def _kernels(rank: RankRehearsal, columns: int) -> str:
    total: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for work in rank.work.values():
        total += work.bytes_by_name
        times += work.by_name
    rows = [
        (name, f"{times[name]:,}", decimal_bytes(count))
        for name, count in total.most_common(MOST_KERNELS)
    ]
    return table(("kernel", "times", "bytes moved"), rows, columns)
