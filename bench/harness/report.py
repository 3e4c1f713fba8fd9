"""Medians over rounds, ratios to the fastest peer, and whether the targets are met."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.harness.catalogue import OURS
from bench.harness.ranks import Measurement
from bench.harness.spec import Mode

NEAR_LIMIT = 1.10
TARGET_NEAR_LIMIT = 1.00
TARGET_FAR_FROM_LIMIT = 0.95
SAME_LOSS = 1e-4
"""Losses of one module after equal steps differ by less than this, of themselves."""

Rounds = Mapping[str, Sequence[Measurement]]
"""Label of a case -> its measurements, one per round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Hold the medians of one case over its rounds."""

    label: str
    step_s: float
    spread: float
    cpu_s: float
    sent_bytes: int | None
    peak_bytes: int
    first_loss: float | None
    last_loss: float | None
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Compare Echelon with the fastest peer of one mode in one quantity."""

    quantity: str
    peer: str
    peer_value: float
    our_value: float
    limit: float | None
    target: float
    unit: str = "s"

    @property
    def ratio(self) -> float:
        """Return Echelon's value over the peer's (below 1 is better)."""
        return self.our_value / self.peer_value

    @property
    def met(self) -> bool:
        """Return whether the ratio is at most the target."""
        return self.ratio <= self.target

    def line(self) -> str:
        """Return the verdict as one line of text."""
        limit = ""
        if self.limit is not None:
            above = (self.peer_value / self.limit - 1) * 100
            limit = f"; limit {self.limit:.3f} s, the peer stands {above:+.0f} % above it"
        word = "met" if self.met else "MISSED"
        mine, theirs = (f"{v:.3f} {self.unit}" for v in (self.our_value, self.peer_value))
        return (
            f"{self.quantity}: {OURS} {mine}, {self.peer} {theirs}"
            f" = {self.ratio:.3f}x, target <= {self.target:.2f}x: {word}{limit}"
        )


def rows(rounds: Rounds) -> list[Row]:
    """Return one row per case, in the order given."""
    return [_row(label, taken) for label, taken in rounds.items() if taken]


def _row(label: str, taken: Sequence[Measurement]) -> Row:
    steps = [one.step_s for one in taken]
    middle = statistics.median(steps)
    sent = [one.sent_bytes for one in taken if one.sent_bytes is not None]
    return Row(
        label=label,
        step_s=middle,
        spread=(max(steps) - min(steps)) / middle,
        cpu_s=statistics.median(one.cpu_s for one in taken),
        sent_bytes=round(statistics.median(sent)) if sent else None,
        peak_bytes=round(statistics.median(one.peak_bytes for one in taken)),
        first_loss=taken[0].first_loss,
        last_loss=taken[-1].last_loss,
        rounds=len(taken),
    )


def table(mode: Mode, found: Sequence[Row], failures: Mapping[str, str]) -> str:
    """Return the rows of one mode as a Markdown table."""
    lines = [
        "| mode | framework | step s | spread | CPU s | MB sent | peak MB/rank | loss | rounds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        sent = "-" if row.sent_bytes is None else f"{row.sent_bytes / 1e6:.1f}"
        loss = "-"
        if row.first_loss is not None and row.last_loss is not None:
            loss = f"{row.first_loss:.4f} -> {row.last_loss:.4f}"
        lines.append(
            f"| {mode.name} | {row.label} | {row.step_s:.3f} | {row.spread:.0%} "
            f"| {row.cpu_s:.3f} | {sent} | {row.peak_bytes / 1e6:.0f} | {loss} | {row.rounds} |"
        )
    for label, reason in failures.items():
        lines.append(f"| {mode.name} | {label} | did not run: {reason} | | | | | | |")
    return "\n".join(lines)


def fastest_peer(found: Sequence[Row]) -> Row | None:
    """Return the peer with the least wall seconds per step."""
    others = [row for row in found if row.label != OURS]
    return min(others, key=lambda row: row.step_s) if others else None


def compare(
    found: Sequence[Row], *, wall_limit_s: float | None, cpu_limit_s: float | None
) -> list[Verdict]:
    """Return the verdicts on wall and CPU seconds against the fastest peer; none without both."""
    peer = fastest_peer(found)
    mine = next((row for row in found if row.label == OURS), None)
    if peer is None or mine is None:
        return []
    pairs = (
        ("wall", peer.step_s, mine.step_s, wall_limit_s),
        ("CPU", peer.cpu_s, mine.cpu_s, cpu_limit_s),
    )
    return [
        Verdict(
            quantity=quantity,
            peer=peer.label,
            peer_value=theirs,
            our_value=own,
            limit=limit,
            target=target(theirs, limit),
        )
        for quantity, theirs, own, limit in pairs
    ]


def target(peer_value: float, limit: float | None) -> float:
    """Return the ratio to reach: 1.00, or 0.95 where the peer leaves more than 10 % to gain."""
    if limit is not None and peer_value <= NEAR_LIMIT * limit:
        return TARGET_NEAR_LIMIT
    return TARGET_FAR_FROM_LIMIT


def compare_modules(found: Sequence[Row]) -> list[Verdict]:
    """Return the verdicts on seconds and memory of a module that the peers train, too.

    The target of seconds is 0.95 however near the peer is to a limit, that of memory the peer that
    takes least.
    """
    seconds = compare(found, wall_limit_s=None, cpu_limit_s=None)
    mine = next((row for row in found if row.label == OURS), None)
    others = [row for row in found if row.label != OURS]
    if mine is None or not others:
        return seconds
    least = min(others, key=lambda row: row.peak_bytes)
    memory = Verdict(
        quantity="peak memory",
        peer=least.label,
        peer_value=least.peak_bytes / 1e6,
        our_value=mine.peak_bytes / 1e6,
        limit=None,
        target=1.0,
        unit="MB",
    )
    return [*seconds, memory]


def unequal_losses(found: Sequence[Row]) -> list[str]:
    """Return what differs from our losses, of the first and of the last step that was timed.

    Cases of one contest take equally many steps, on the same batches, from the same values.
    """
    mine = next((row for row in found if row.label == OURS), None)
    if mine is None:
        return []
    wrong: list[str] = []
    for row in found:
        pairs = (
            ("first", row.first_loss, mine.first_loss),
            ("last", row.last_loss, mine.last_loss),
        )
        for which, theirs, own in pairs:
            if theirs is None or own is None or abs(theirs - own) > SAME_LOSS * abs(own):
                wrong.append(f"{which} loss: {row.label} {theirs}, {OURS} {own}")
    return wrong
