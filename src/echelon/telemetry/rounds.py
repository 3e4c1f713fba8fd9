# SPDX-License-Identifier: Apache-2.0
"""What islands of local SGD sent each other in a run, from the events of its first rank.

Where islands may be lost, each step is read from the first rank of the island that told of it, and
the formulas are those of the islands that met; sums that did not count are sent beside these.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.bytes.local_sgd import mean_outer_bytes, outer_bytes, rejoin_bytes
from echelon.layout.islands import islands_of
from echelon.telemetry.events import METRICS_FILE, STEP, events_files
from echelon.telemetry.json_lines import last_of_each_step, read_entries
from echelon.telemetry.recorded_steps import RecordedSteps

OUTER = "outer "
"""How names of events begin that are of meetings."""
REJOIN = "rejoin."
"""The same of what an island is given that comes back."""
ROUND = "round"
"""The name of the last event of each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSummary:
    """Say how islands met; bytes are those that rank 0 sent over `dp_replicate`."""

    every: int
    """Steps of a round."""
    rounds: int
    """Rounds that are over."""
    steps: int
    """Steps of which there are events."""
    sent_bytes: int
    """Bytes sent in all of these."""
    planned_bytes: float
    """Bytes of a mean step, by the formulas."""
    islands: int = 0
    """Islands of a run that loses none."""
    short_rounds: int = 0
    """Rounds at whose end fewer met, where some may be lost."""
    fewest: int = 0
    """The fewest islands that met."""

    @property
    def mean_bytes(self) -> float:
        """Return the bytes of a mean step."""
        return self.sent_bytes / max(1, self.steps)


def summarize_rounds(run_dir: Path, plan: Plan) -> RoundSummary | None:
    """Return how the islands of a run met; None where there are none, or no events."""
    local = plan.mathematics.local_sgd
    if local.is_elastic:
        return _rounds_that_count(run_dir, plan)
    if not local.active or not events_files(run_dir, 0):
        return None
    recorded = RecordedSteps(run_dir, [0])
    sent = 0
    for number in recorded.numbers:
        for event in recorded.read(number).events[0]:
            if event.axis == Axis.DP_REPLICATE and event.name.startswith((OUTER, ROUND)):
                sent += event.bytes
    terms = mean_outer_bytes(plan, 0)
    return RoundSummary(
        every=local.every,
        rounds=sum(step.number % local.every == 0 for step in recorded.taken),
        steps=len(recorded.numbers),
        sent_bytes=sent,
        planned_bytes=sum(term.count * term.each / term.every for term in terms),
    )


def _rounds_that_count(run_dir: Path, plan: Plan) -> RoundSummary | None:
    """Return the same of islands that may be lost; None where nobody has told who met."""
    local, ranks = plan.mathematics.local_sgd, [one.first_rank for one in islands_of(plan)]
    entries = [e for e in read_entries(run_dir / METRICS_FILE) if e.text("kind") == STEP]
    taken = last_of_each_step(entries)
    met = {e.whole("step"): e.whole_numbers("islands") for e in taken if "islands" in e.values}
    ends = [len(islands) for step, islands in met.items() if step % local.every == 0]
    sent: dict[int, int] = {}
    planned = 0.0
    for rank in (rank for rank in ranks if events_files(run_dir, rank)):
        recorded = RecordedSteps(run_dir, [rank])
        for number in (one for one in recorded.numbers if one not in sent):
            events = recorded.read(number).events[rank]
            sent[number] = sum(one.bytes for one in events if one.name.startswith((OUTER, REJOIN)))
            gifts = [one.name for one in events if one.name.startswith(REJOIN)]
            planned += len(gifts) // max(1, len(set(gifts))) * rejoin_bytes(plan, rank)
            if number in met:
                terms = outer_bytes(plan, rank, number - 1, present=len(met[number]))
                planned += sum(term.bytes for term in terms)
    if not sent:
        return None
    return RoundSummary(
        every=local.every,
        rounds=len(ends),
        steps=len(sent),
        sent_bytes=sum(sent.values()),
        planned_bytes=planned / len(sent),
        islands=local.islands,
        short_rounds=sum(count < local.islands for count in ends),
        fewest=min(ends, default=local.islands),
    )
