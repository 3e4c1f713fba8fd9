"""Medians over rounds, ratios to peers, and whether the targets are met."""

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
MEMORY_TARGET = 1.00
WIRE_TARGET = 1.03
"""Bytes that the kernel counted over those that Echelon records."""
SAME_LOSS = 1e-4
"""Losses of one module after equal steps differ by less than this, of themselves."""
_HEAD = (
    *("mode", "framework", "step s", "x", "spread", "CPU s", "x"),
    *("MB on the wire", "MB said", "peak MB/rank", "loss", "rounds"),
)

Rounds = Mapping[str, Sequence[Measurement]]
"""Label of a case -> its measurements, one per round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Hold the medians of one case over its rounds; `said_bytes` are those that it records."""

    label: str
    step_s: float
    spread: float
    cpu_s: float
    sent_bytes: int | None
    peak_bytes: int
    first_loss: float | None
    last_loss: float | None
    rounds: int
    said_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Compare Echelon with one peer of a mode in one quantity."""

    quantity: str
    peer: str
    peer_value: float
    our_value: float
    limit: float | None = None
    target: float
    unit: str = "s"

    @property
    def ratio(self) -> float:
        """Echelon's value over the peer's (below 1 is better)."""
        return self.our_value / self.peer_value

    @property
    def met(self) -> bool:
        """True if the ratio is at most the target."""
        return self.ratio <= self.target

    def line(self) -> str:
        """The verdict as one line of text."""
        limit = ""
        if self.limit is not None:
            above = (self.peer_value / self.limit - 1) * 100
            limit = f"; limit {self.limit:.3f} s, the peer stands {above:+.0f} % above it"
        mine, theirs = (f"{v:.3f} {self.unit}" for v in (self.our_value, self.peer_value))
        return (
            f"{self.quantity}: {OURS} {mine}, {self.peer} {theirs}"
            f" = {self.ratio:.3f}x, target <= {self.target:.2f}x: {met_word(self.met)}{limit}"
        )


def met_word(met: bool) -> str:
    """How a verdict ends."""
    return "met" if met else "MISSED"


def rows(rounds: Rounds) -> list[Row]:
    """One row per case, in the order given."""
    return [_row(label, taken) for label, taken in rounds.items() if taken]


def spread_of(values: Sequence[float]) -> float:
    """The distance of the largest from the smallest, over the median."""
    return (max(values) - min(values)) / statistics.median(values)


def _row(label: str, taken: Sequence[Measurement]) -> Row:
    steps = [one.step_s for one in taken]
    sent = [one.sent_bytes for one in taken if one.sent_bytes is not None]
    said = taken[-1].recorded_bytes
    return Row(
        label=label,
        step_s=statistics.median(steps),
        spread=spread_of(steps),
        cpu_s=statistics.median(one.cpu_s for one in taken),
        sent_bytes=round(statistics.median(sent)) if sent else None,
        peak_bytes=round(statistics.median(one.peak_bytes for one in taken)),
        first_loss=taken[0].first_loss,
        last_loss=taken[-1].last_loss,
        rounds=len(taken),
        said_bytes=None if said is None else sum(said.values()),
    )


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; a line with too few cells is filled up with empty ones."""
    return "\n".join(
        f"| {' | '.join([*line, *[''] * (len(head) - len(line))])} |"
        for line in (head, ["---"] * len(head), *lines)
    )


def table(mode: Mode, found: Sequence[Row], failures: Mapping[str, str]) -> str:
    """The rows of one mode as a Markdown table; "x" is the ratio to the fastest peer."""
    peer = fastest_peer(found)
    lines = [
        [
            *(mode.name, row.label),
            *(f"{row.step_s:.3f}", _ratio(row.step_s, peer and peer.step_s), f"{row.spread:.0%}"),
            *(f"{row.cpu_s:.3f}", _ratio(row.cpu_s, peer and peer.cpu_s)),
            *(megabytes(row.sent_bytes), megabytes(row.said_bytes)),
            *(megabytes(row.peak_bytes, 0), _losses(row), str(row.rounds)),
        ]
        for row in found
    ]
    lines += [[mode.name, label, f"did not run: {why}"] for label, why in failures.items()]
    return markdown(_HEAD, lines)


def megabytes(count: int | None, digits: int = 1) -> str:
    """Bytes as the MB of a table's cell."""
    return "-" if count is None else f"{count / 1e6:.{digits}f}"


def _ratio(value: float, other: float | None) -> str:
    return f"{value / other:.3f}" if other else "-"


def _losses(row: Row) -> str:
    if row.first_loss is None or row.last_loss is None:
        return "-"
    return f"{row.first_loss:.4f} -> {row.last_loss:.4f}"


def own_row(found: Sequence[Row]) -> Row | None:
    """Echelon's row, where it ran."""
    return next((row for row in found if row.label == OURS), None)


def fastest_peer(found: Sequence[Row]) -> Row | None:
    """The peer with the least wall seconds per step."""
    others = [row for row in found if row.label != OURS]
    return min(others, key=lambda row: row.step_s) if others else None


def seconds_verdicts(
    mine: Row,
    peer: Row,
    targets: float | None = None,
    limits: tuple[float | None, float | None] = (None, None),
) -> list[Verdict]:
    """The verdicts on wall and CPU seconds; without a target it depends on the limits."""
    pairs = (("wall", peer.step_s, mine.step_s), ("CPU", peer.cpu_s, mine.cpu_s))
    return [
        Verdict(
            quantity=quantity,
            peer=peer.label,
            peer_value=theirs,
            our_value=own,
            limit=limit,
            target=target(theirs, limit) if targets is None else targets,
        )
        for (quantity, theirs, own), limit in zip(pairs, limits, strict=True)
    ]


def target(peer_value: float, limit: float | None) -> float:
    """The ratio to reach: 1.00, or 0.95 where the peer leaves more than 10 % to gain."""
    near = limit is not None and peer_value <= NEAR_LIMIT * limit
    return TARGET_NEAR_LIMIT if near else TARGET_FAR_FROM_LIMIT


def verdicts_of(
    heats: Sequence[Sequence[Row]],
    *,
    limits: tuple[float | None, float | None] = (None, None),
    seconds_target: float | None = None,
    lean: bool = False,
) -> list[Verdict]:
    """The verdicts of one mode; what has nothing to be compared with has none.

    Seconds are compared with those of the peer that is fastest, within each heat, and the heat in
    which Echelon does worst counts. In a `lean` mode peak memory is compared with the peer that
    needs least, and bytes on the wire with those that Echelon records.
    """
    mine = [(row, fastest_peer(heat)) for heat in heats for row in heat if row.label == OURS]
    compared = [
        seconds_verdicts(row, peer, seconds_target, limits)
        for row, peer in mine
        if peer is not None
    ]
    found = max(compared, key=lambda each: each[0].ratio, default=[])
    others = [row for heat in heats for row in heat if row.label != OURS]
    if lean and mine and others:
        least = min(others, key=lambda row: row.peak_bytes)
        most = max(row.peak_bytes for row, _ in mine)
        found = [*found, _bytes("peak memory", least.label, least.peak_bytes, most)]
    sent = [row for row, _ in mine if row.sent_bytes and row.said_bytes]
    if lean and sent:
        most_sent = max(sent, key=lambda row: row.sent_bytes or 0)
        found = [
            *found,
            _bytes("wire", "what it records", most_sent.said_bytes or 0, most_sent.sent_bytes or 0),
        ]
    return found


def _bytes(quantity: str, peer: str, theirs: int, own: int) -> Verdict:
    return Verdict(
        quantity=quantity,
        peer=peer,
        peer_value=theirs / 1e6,
        our_value=own / 1e6,
        target=WIRE_TARGET if quantity == "wire" else MEMORY_TARGET,
        unit="MB",
    )


def unequal_losses(found: Sequence[Row]) -> list[str]:
    """Differences from our losses, of the first and of the last step that was timed.

    Cases of one contest take equally many steps, on the same batches, from the same values.
    """
    mine = own_row(found)
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
