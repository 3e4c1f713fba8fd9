# SPDX-License-Identifier: Apache-2.0
"""Printed numbers of a plan, compared with a rehearsed rank.

Bytes sent by axis and to other nodes, model state, actions, messages and microbatches held are
counted: they must be equal. What a step takes "at most" is a bound. A peak is the highest moment of
a list of operators, and may be off by `PEAK_ERROR`. If it is off, gathered parameters or buffers
may explain `STATE_ERROR` of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from echelon.core.axis import Axis
from echelon.core.choices.collective_algorithms import BACKEND
from echelon.core.plan import Plan
from echelon.cost.bytes.expert_memory import IN_DISPATCH
from echelon.cost.bytes.sent import bytes_sent
from echelon.cost.bytes.terms import far_bytes_by_axis
from echelon.cost.bytes.transient import ATTENTION, WHOLE_UNITS, transient_terms
from echelon.cost.peak.rank_peak import RankPeak
from echelon.layout.islands import plan_and_rank
from echelon.layout.stage import pp_rank_of
from echelon.rehearsal.memory import ACTIVATIONS, BUFFERS, GATHERED, MESSAGES, OTHER, STATE_TERMS
from echelon.rehearsal.order import SEND
from echelon.rehearsal.rank import RankRehearsal
from echelon.schedule.check import peak_in_flight
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.messages import ScheduleMessages

PEAK_ERROR = 0.05
"""Share of a rehearsed peak by which the peak of a plan may be off."""
STATE_ERROR = 0.01
"""Share of a rehearsed peak that gathered parameters, or buffers, may be off by."""
LEAST_ERROR = 5 << 17
"""Bytes by which they may be off, however small a model is: moments of a few MB are alike."""

PEAK, ACTIONS = "peak", "actions of the schedule"
IN_FLIGHT = "activations held at once"

_AT_PEAK: Mapping[str, tuple[tuple[str, ...], float]] = {
    "gathered parameters": ((GATHERED,), STATE_ERROR),
    "buffers": ((BUFFERS, OTHER), STATE_ERROR),
    "activations and messages": ((ACTIVATIONS, MESSAGES), PEAK_ERROR),
}
"""Terms of a peak that are compared together, and their share of the peak that may be off."""


def with_sums_of_nccl(plan: Plan) -> Plan:
    """Return a plan that sums by its backend: what arrives for sums of messages has no memory."""
    collectives = replace(plan.layout.collectives, algorithm=BACKEND)
    return replace(plan, layout=replace(plan.layout, collectives=collectives))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNumber:
    """A number of a plan for a rank, and the same number of its rehearsal."""

    rank: int
    name: str
    """The number, as ``sent over dp``."""
    part: str = ""
    """The part of the schedule that is counted, as ``F0``; "" of all."""
    planned: float
    """Its value in the plan."""
    rehearsed: float
    """Its value in the rehearsal."""
    error: float
    """The part of the difference that counts."""
    allowed: float = 0.0
    """The largest error that holds."""
    note: str = ""
    """The place of the difference; "" without one."""

    @property
    def holds(self) -> bool:
        """True if the error is allowed."""
        return self.error <= self.allowed

    @property
    def text(self) -> str:
        """The difference in a sentence."""
        note = f"; {self.note}" if self.note else ""
        part = f", {self.part}" if self.part else ""
        return (
            f"{self.name}{part}: the plan has {self.planned:,.0f}, the rehearsed rank "
            f"{self.rehearsed:,.0f}{note}"
        )

    def to_json(self) -> dict[str, object]:
        """Return the number as a JSON object."""
        return {
            "name": self.name,
            "part": self.part,
            "planned": self.planned,
            "rehearsed": self.rehearsed,
            "allowed": self.allowed,
            "holds": self.holds,
        }


def plan_numbers(
    plan: Plan, rehearsal: RankRehearsal, peak: RankPeak, sent: Mapping[str, int]
) -> Iterator[PlanNumber]:
    """Yield the numbers of a plan for a rank, with their values in its rehearsal.

    `peak` and `sent` are the plan's peak of the rank, and its bytes of the last step by axis.
    """
    rank = rehearsal.rank
    for axis in sorted({*sent, *rehearsal.sent}):
        yield _counted(rank, f"sent over {axis}", sent.get(axis, 0), rehearsal.sent.get(axis, 0))
    every_step = not plan.mathematics.local_sgd.active
    if every_step:
        for axis, far in sorted(far_bytes_by_axis(bytes_sent(plan, rank)).items()):
            name = f"sent over {axis} to other nodes"
            yield _counted(rank, name, far, rehearsal.far_sent.get(axis, 0))
    for term in STATE_TERMS:
        name = f"{term} between steps"
        yield _counted(rank, name, peak.terms.get(term, 0), rehearsal.held.get(term, 0))
    # Buffers of offloaded parameters are counted as if all were taken at once.
    offloads = plan.layout.zero.parameter_offload != "none"
    yield from _of_peak(rehearsal, peak, {"buffers": PEAK_ERROR} if offloads else {})
    if not plan.mesh.is_server(rank):
        yield from _of_schedule(plan, rehearsal)
        if every_step:
            yield from _in_a_step(plan, rehearsal)


def _counted(rank: int, name: str, planned: float, rehearsed: float, part: str = "") -> PlanNumber:
    return PlanNumber(
        rank=rank,
        name=name,
        part=part,
        planned=planned,
        rehearsed=rehearsed,
        error=abs(planned - rehearsed),
    )


def _of_peak(
    rehearsal: RankRehearsal, peak: RankPeak, shares: Mapping[str, float]
) -> Iterator[PlanNumber]:
    """Yield the peak, and groups of its terms with the part of its error that each explains.

    `shares` of the peak may be off in place of those of `_AT_PEAK`.

    Two moments may be equally high. So a term counts as wrong only if the peak is off, too.
    """
    highest, off = rehearsal.peak_bytes, peak.bytes - rehearsal.peak_bytes
    note = f"the plan's moment is {peak.where}"
    yield PlanNumber(
        rank=rehearsal.rank,
        name=PEAK,
        planned=peak.bytes,
        rehearsed=highest,
        error=abs(off),
        allowed=max(PEAK_ERROR * highest, LEAST_ERROR),
        note=note,
    )
    for name, (terms, share) in _AT_PEAK.items():
        planned, rehearsed = (
            sum(values.get(term, 0) for term in terms) for values in (peak.terms, rehearsal.at_peak)
        )
        explained = min(abs(planned - rehearsed), abs(off))
        yield PlanNumber(
            rank=rehearsal.rank,
            name=f"{name} at the peak",
            planned=planned,
            rehearsed=rehearsed,
            error=explained if (planned - rehearsed) * off > 0 else 0.0,
            allowed=max(shares.get(name, share) * highest, LEAST_ERROR),
            note=note,
        )


def _in_a_step(plan: Plan, rehearsal: RankRehearsal) -> Iterator[PlanNumber]:
    """Yield bounds of gathered parameters and of buffers, and the most of each in the rehearsal.

    Keys of other context ranks and rows of experts are activations of a block there.
    """
    terms = transient_terms(with_sums_of_nccl(plan), pp_rank_of(plan, rehearsal.rank))
    on_device = {term.name: term.bytes for term in terms if term.pool == "device"}
    gathered = on_device.pop(WHOLE_UNITS, 0)
    buffers = sum(size for name, size in on_device.items() if name not in (ATTENTION, IN_DISPATCH))
    for name, term, most in (
        ("gathered parameters", GATHERED, gathered),
        ("buffers", BUFFERS, buffers),
    ):
        rehearsed = rehearsal.most.get(term, 0)
        yield PlanNumber(
            rank=rehearsal.rank,
            name=f"{name} in a step, at most",
            planned=most,
            rehearsed=rehearsed,
            error=max(0, rehearsed - most),
            allowed=STATE_ERROR * rehearsal.peak_bytes,
        )


def _of_schedule(plan: Plan, rehearsal: RankRehearsal) -> Iterator[PlanNumber]:
    """Yield counts of the schedule, and of the executor."""
    plan, rank = plan_and_rank(plan, rehearsal.rank)
    place, schedule = pp_rank_of(plan, rank), schedule_from_plan(plan)
    row = schedule.actions[place]
    names, ran = [str(action) for action in row], [point.action for point in rehearsal.points]
    pairs = enumerate(zip(ran, names, strict=False))
    note = next((f"action {at} was {a}, not {b}" for at, (a, b) in pairs if a != b), "")
    order = _counted(rehearsal.rank, ACTIONS, len(names), len(ran))
    yield replace(order, error=max(order.error, float(bool(note))), note=note)
    planned, executed = (Counter(name.split(".")[0] for name in each) for each in (names, ran))
    for kind in sorted({*planned, *executed}):
        yield _counted(rehearsal.rank, ACTIONS, planned[kind], executed[kind], kind)
    channels = ScheduleMessages.from_schedule(schedule).channels.items()
    messages = sum(len(sent) for channel, sent in channels if channel[0] == place)
    sends = sum(event.kind == SEND and event.axis == Axis.PP.value for event in rehearsal.events)
    yield _counted(rehearsal.rank, "messages of the schedule", messages, sends)
    yield _counted(rehearsal.rank, IN_FLIGHT, peak_in_flight(row), rehearsal.in_flight[None])
    for stage in schedule.stages_of(place):
        most = peak_in_flight([action for action in row if action.stage == stage])
        yield _counted(
            rehearsal.rank, IN_FLIGHT, most, rehearsal.in_flight[stage], f"stage {stage}"
        )
