"""The table and the verdicts of the ZeRO stages: seconds, memory and bytes against every peer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.harness.catalogue import OURS, ours
from bench.harness.plans import bench_plan
from bench.harness.ranks import Measurement
from bench.harness.report import (
    TARGET_FAR_FROM_LIMIT,
    Rounds,
    Row,
    Verdict,
    fastest_peer,
    rows,
    target,
)
from bench.harness.spec import Mode, Size
from bench.wire import WIRE_TARGET
from echelon.cost.bytes.sent import bytes_sent_by_axis

MEMORY_TARGET = 1.00
_HEAD = (
    *("mode", "framework", "step s", "x", "spread", "CPU s", "x"),
    *("MB on the wire", "MB said", "peak MB/rank", "over tiny", "loss", "rounds"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Hold the bytes of a step, of all ranks together, by axis: by the formulas and by events."""

    formulas: Mapping[str, int]
    events: Mapping[str, int]

    @property
    def equal(self) -> bool:
        """Return whether the run sent what the formulas say, axis by axis."""
        return dict(self.formulas) == dict(self.events)

    @property
    def total(self) -> int:
        """Return the bytes by the formulas over all axes."""
        return sum(self.formulas.values())

    def line(self) -> str:
        """Return the comparison as one line of text."""
        by_axis = ", ".join(f"{axis} {count}" for axis, count in self.formulas.items())
        if self.equal:
            return f"bytes: formulas and events say {by_axis}: met"
        events = ", ".join(f"{axis} {count}" for axis, count in self.events.items())
        return f"bytes: formulas say {by_axis}; events say {events}: MISSED"


def step_bytes(mode: Mode, size: Size, taken: Sequence[Measurement]) -> StepBytes | None:
    """Return what Echelon says it sent in a step, where it ran."""
    events = next((one.recorded_bytes for one in taken if one.recorded_bytes is not None), None)
    if events is None:
        return None
    plan = bench_plan(ours(mode).settings(size))
    formulas: dict[str, int] = {}
    for rank in range(mode.world_size):
        for axis, count in bytes_sent_by_axis(plan, rank).items():
            formulas[axis] = formulas.get(axis, 0) + count
    return StepBytes(formulas=formulas, events=events)


def judge(
    mode: Mode,
    heats: Sequence[Sequence[Row]],
    said: StepBytes | None,
    *,
    wall_limit_s: float | None,
    cpu_limit_s: float | None,
) -> list[Verdict]:
    """Return the verdicts of one mode; what has nothing to be compared with has none.

    Seconds are compared with those of the peer that is fastest at this stage: within each heat,
    and the heat in which Echelon does worst counts. Memory is compared with the peer that needs
    least, bytes on the wire with what the formulas say. Only stage 0 is let off with a tie where
    the peer has nothing left to gain.
    """
    mine = [(row, heat) for heat in heats for row in heat if row.label == OURS]
    limits = (wall_limit_s, cpu_limit_s)
    compared = [_seconds(mode, row, heat, limits) for row, heat in mine]
    verdicts = max((each for each in compared if each), key=lambda each: each[0].ratio, default=[])
    others = [row for heat in heats for row in heat if row.label != OURS]
    if mine and others:
        least = min(others, key=lambda row: row.peak_bytes)
        most = max(row.peak_bytes for row, _ in mine)
        verdicts = [*verdicts, _megabytes("peak memory", least.label, least.peak_bytes, most)]
    sent = [row.sent_bytes for row, _ in mine if row.sent_bytes is not None]
    if sent and said is not None:
        verdicts = [*verdicts, _megabytes("wire", "its formulas", said.total, max(sent))]
    return verdicts


def _seconds(
    mode: Mode, mine: Row, heat: Sequence[Row], limits: tuple[float | None, float | None]
) -> list[Verdict]:
    """Return the verdicts on wall and CPU seconds within one heat; none without a peer."""
    peer = fastest_peer(heat)
    if peer is None:
        return []
    pairs = (("wall", peer.step_s, mine.step_s), ("CPU", peer.cpu_s, mine.cpu_s))
    return [
        Verdict(
            quantity=quantity,
            peer=peer.label,
            peer_value=theirs,
            our_value=own,
            limit=limit,
            target=target(theirs, limit) if mode.zero_stage == 0 else TARGET_FAR_FROM_LIMIT,
        )
        for (quantity, theirs, own), limit in zip(pairs, limits, strict=True)
    ]


def _megabytes(quantity: str, peer: str, theirs: int, own: int) -> Verdict:
    return Verdict(
        quantity=quantity,
        peer=peer,
        peer_value=theirs / 1e6,
        our_value=own / 1e6,
        limit=None,
        target=WIRE_TARGET if quantity == "wire" else MEMORY_TARGET,
        unit="MB",
    )


def zero_table(
    mode: Mode,
    rounds: Rounds,
    failures: Mapping[str, str],
    *,
    said: StepBytes | None,
    floors: Mapping[str, int],
) -> str:
    """Return the rows of one mode as a Markdown table.

    "x" is the ratio to the fastest peer. "over tiny" is the peak minus `floors`, the peak of the
    same case with a tiny model: what the model adds to interpreter, libraries and buffers.
    """
    found = rows(rounds)
    peer = fastest_peer(found)
    lines = [f"| {' | '.join(_HEAD)} |", "|" + "---|" * len(_HEAD)]
    for row in found:
        total = said.total if said is not None and row.label == OURS else None
        floor = floors.get(row.label)
        cells = (
            *(mode.name, row.label),
            *(f"{row.step_s:.3f}", _ratio(row.step_s, peer and peer.step_s), f"{row.spread:.0%}"),
            *(f"{row.cpu_s:.3f}", _ratio(row.cpu_s, peer and peer.cpu_s)),
            *(_mb(row.sent_bytes, 1), _mb(total, 1), _mb(row.peak_bytes)),
            _mb(None if floor is None else row.peak_bytes - floor),
            _losses(row),
            str(row.rounds),
        )
        lines.append(f"| {' | '.join(cells)} |")
    for label, reason in failures.items():
        lines.append(f"| {mode.name} | {label} | did not run: {reason} |{' |' * (len(_HEAD) - 3)}")
    return "\n".join(lines)


def floor_bytes(taken: Sequence[Measurement]) -> int:
    """Return the peak of a case with a tiny model."""
    return round(statistics.median(one.peak_bytes for one in taken))


def _ratio(value: float, other: float | None) -> str:
    return f"{value / other:.3f}" if other else "-"


def _mb(count: int | None, digits: int = 0) -> str:
    return "-" if count is None else f"{count / 1e6:.{digits}f}"


def _losses(row: Row) -> str:
    if row.first_loss is None or row.last_loss is None:
        return "-"
    return f"{row.first_loss:.4f} -> {row.last_loss:.4f}"
