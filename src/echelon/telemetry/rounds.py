"""What islands of local SGD sent each other in a run, from the events of its first rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.bytes.local_sgd import mean_outer_bytes
from echelon.telemetry.events import events_path
from echelon.telemetry.recorded_steps import RecordedSteps

OUTER = "outer "
"""How names of events begin that are of meetings."""
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

    @property
    def mean_bytes(self) -> float:
        """Return the bytes of a mean step."""
        return self.sent_bytes / max(1, self.steps)


def summarize_rounds(run_dir: Path, plan: Plan) -> RoundSummary | None:
    """Return how the islands of a run met; None where there are none, or no events."""
    local = plan.mathematics.local_sgd
    if not local.active or not events_path(run_dir, 0).exists():
        return None
    recorded = RecordedSteps(run_dir, [0])
    sent = rounds = 0
    for number in recorded.numbers:
        for event in recorded.read(number).events[0]:
            if event.axis == Axis.DP_REPLICATE and event.name.startswith((OUTER, ROUND)):
                sent += event.bytes
                rounds += event.name == ROUND
    terms = mean_outer_bytes(plan, 0)
    return RoundSummary(
        every=local.every,
        rounds=rounds,
        steps=len(recorded.numbers),
        sent_bytes=sent,
        planned_bytes=sum(term.count * term.each / term.every for term in terms),
    )
