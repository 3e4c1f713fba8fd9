"""What a rank of the engine records on Gloo, to lay beside what its rehearsal records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.core.event import Event
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.proof.oracle.batches import global_batch
from echelon.training.subject import EngineSubject

Call = tuple[str, str, str, int]
"""What an event says but for its times, and for where it was awaited: kind, name, axis, bytes."""


def call_of(event: Event) -> Call:
    return event.kind, event.name, event.axis, event.bytes


def recorded_calls(context: RankContext, argument: Mapping[str, Any]) -> list[Call]:
    """Take two steps of a plan on a rank; return the calls of the second one."""
    plan = Plan.from_json(argument["plan"])
    subject = EngineSubject(plan, context)
    for step in range(2):
        subject.step(global_batch(plan, step), step)
    return [call_of(event) for event in subject.events.events]
