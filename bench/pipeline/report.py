"""Whether a pipeline keeps what the simulator promises, and what it costs beside its peers.

Ratios are taken within a round, where all cases ran in turn, and their median is judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.harness.report import (
    Row,
    Verdict,
    markdown,
    met_word,
    seconds_verdicts,
    spread_of,
)
from bench.pipeline.spec import (
    FASTEST_1F1B_TARGET,
    GAIN_TARGET,
    SAME_SCHEDULE_TARGET,
    SIMULATION_TARGET,
)
from bench.pipeline.times import Turn, action_times, simulated_s
from echelon.schedule.action import ActionKind, Schedule

BASELINE = "1f1b"
MUST_GAIN = ("zb-h1", "auto")
"""The schedules whose gain over the baseline is promised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Hold a schedule's spans and what the simulator says they should be, round by round."""

    label: str
    measured_s: tuple[float, ...]
    simulated_s: tuple[float, ...]
    times_s: Mapping[tuple[ActionKind, int], float]

    @classmethod
    def of(cls, label: str, schedule: Schedule, turns: Sequence[Turn]) -> Simulated:
        """Return the comparison of `turns`, each simulated with its own action times."""
        return cls(
            label=label,
            measured_s=tuple(turn.span_s for turn in turns),
            simulated_s=tuple(simulated_s(schedule, turn) for turn in turns),
            times_s=action_times([step for turn in turns for step in turn.steps]),
        )

    @property
    def error(self) -> float:
        """Return by which part of the simulated span the measured one is longer."""
        pairs = zip(self.measured_s, self.simulated_s, strict=True)
        return statistics.median(measured / said - 1 for measured, said in pairs)

    @property
    def met(self) -> bool:
        """Return whether the simulation is near enough."""
        return abs(self.error) <= SIMULATION_TARGET

    def line(self) -> str:
        """Return the verdict as one line of text."""
        measured, said = map(statistics.median, (self.measured_s, self.simulated_s))
        return (
            f"{self.label} simulation: measured {measured:.3f} s, simulated {said:.3f} s"
            f" = {self.error:+.1%}, target within {SIMULATION_TARGET:.0%}: {met_word(self.met)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Hold what a case saves over another, as a part of the other's span: measured and promised."""

    label: str
    baseline: str
    measured: float
    promised: float

    @property
    def kept(self) -> float:
        """Return the part of the promise that was kept; nothing where nothing was promised."""
        return self.measured / self.promised if self.promised > 0 else 0.0

    @property
    def met(self) -> bool:
        """Return whether enough of a real promise was kept."""
        return self.kept >= GAIN_TARGET

    def facts(self) -> str:
        """Return both gains as one line of text."""
        return (
            f"{self.label} gain over {self.baseline}: measured {self.measured:.1%},"
            f" promised {self.promised:.1%}"
        )

    def line(self) -> str:
        """Return the verdict as one line of text."""
        kept = f"{self.kept:.0%} of it" if self.promised > 0 else "nothing to keep"
        return f"{self.facts()} = {kept}, target >= {GAIN_TARGET:.0%}: {met_word(self.met)}"


def gain_of(case: Simulated, baseline: Simulated) -> Gain:
    """Return what `case` gains over `baseline`; both took turns in the same rounds."""
    return Gain(
        label=case.label,
        baseline=baseline.label,
        measured=_saved(case.measured_s, baseline.measured_s),
        promised=_saved(case.simulated_s, baseline.simulated_s),
    )


def _saved(case: Sequence[float], baseline: Sequence[float]) -> float:
    pairs = zip(case, baseline, strict=False)
    return statistics.median(1 - mine / other for mine, other in pairs)


def gains(found: Sequence[Simulated]) -> list[Gain]:
    """Return what each schedule gains over 1F1B; none where that did not run."""
    baseline = next((one for one in found if one.label == BASELINE), None)
    if baseline is None:
        return []
    return [gain_of(one, baseline) for one in found if one is not baseline]


def simulation_table(found: Sequence[Simulated], failures: Mapping[str, str]) -> str:
    """Return a row per schedule as a Markdown table."""
    head = (
        *("schedule", "span s", "simulated s", "error", "spread"),
        *("gain", "promised", "actions", "rounds"),
    )
    lines: list[list[str]] = []
    saved = {gain.label: gain for gain in gains(found)}
    for one in found:
        middles = map(statistics.median, (one.measured_s, one.simulated_s))
        gain = saved.get(one.label)
        cells = (
            *(one.label, *(f"{middle:.3f}" for middle in middles)),
            *(f"{one.error:+.1%}", f"{spread_of(one.measured_s):.0%}"),
            *((f"{gain.measured:.1%}", f"{gain.promised:.1%}") if gain else ("-", "-")),
            *(_times(one.times_s), str(len(one.measured_s))),
        )
        lines.append(list(cells))
    lines += [[label, f"did not run: {reason}"] for label, reason in failures.items()]
    return markdown(head, lines)


def _times(times_s: Mapping[tuple[ActionKind, int], float]) -> str:
    """Return the milliseconds of actions, by kind and then by stage: ``F 61 64, BW 130 131``."""
    kinds: dict[ActionKind, list[str]] = {}
    for (kind, _), seconds in sorted(times_s.items()):
        kinds.setdefault(kind, []).append(f"{seconds * 1e3:.1f}")
    return ", ".join(f"{kind.value} {' '.join(each)}" for kind, each in kinds.items()) + " ms"


def peer_verdicts(mine: Row, same: Row | None, fastest: Row | None) -> list[Verdict]:
    """Return the verdicts on wall and CPU seconds against torch's same schedule and a 1F1B."""
    pairs = ((same, SAME_SCHEDULE_TARGET), (fastest, FASTEST_1F1B_TARGET))
    return [
        verdict
        for peer, target in pairs
        if peer is not None
        for verdict in seconds_verdicts(mine, peer, target)
    ]
