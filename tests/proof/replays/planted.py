"""Bugs of islands that are lost and come back: whose mean it is, what the one that is back has."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.core.plan import Plan
from echelon.training.local_sgd.elastic_steps import ElasticOuterSteps
from echelon.training.local_sgd.meetings import IslandMeetings, Meeting
from echelon.training.local_sgd.outer_steps import MOMENTUM
from tests.proof.layouts import layout
from tests.proof.mutants.planting import Told, mutant
from tests.proof.run.local_sgd import NESTEROV, with_islands


def elastic(**chosen: Any) -> Plan:
    """Return two islands, one of which may be lost."""
    plan = layout(accumulation=1, **chosen)
    return with_islands(plan, every=2, min_islands=1, **NESTEROV)


def told(rule: str, factor: str) -> Told:
    """Return what is told of a bug."""
    return Told(rule, "", factor, "dp_replicate", of=elastic)


@mutant(told("prove-meetings-replayed", "absent counted"))
def mean_over_all(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Divide the sum over the islands that met by the number of all."""
    sums = ElasticOuterSteps._sums
    islands = plan.mathematics.local_sgd.islands

    def smaller(self: Any, meeting: Meeting, *args: Any, **named: Any) -> Any:
        found = sums(self, meeting, *args, **named)
        for one in found or ():
            one.moved.mul_(len(meeting.members) / islands)
        return found

    patch.setattr(ElasticOuterSteps, "_sums", smaller)


@mutant(told("prove-meetings-replayed", "momentum not given"))
def momentum_kept_back(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give outer parameters to the island that comes back, and no momentum."""
    agreed = ElasticOuterSteps._agreed
    patch.setattr(
        ElasticOuterSteps,
        "_agreed",
        lambda self: [one for one in agreed(self) if not one[0].endswith(MOMENTUM)],
    )


@mutant(told("prove-meetings-replayed", "parameters not given"))
def goes_on_from_the_first_values(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let the island that comes back begin the run anew, with the momentum of the others."""
    receive = ElasticOuterSteps._receive

    def own(self: Any, meeting: Meeting) -> bool:
        first = {name: values.clone() for name, values in self._parameters.items()}
        found = receive(self, meeting)
        for name, values in first.items():
            self._parameters[name].copy_(values)
        return found

    patch.setattr(ElasticOuterSteps, "_receive", own)


@mutant(told("prove-lost-island", "none"))
def never_lets_in(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let nobody in who waits at the door."""
    patch.setattr(IslandMeetings, "_at_the_door", lambda *_: {})
