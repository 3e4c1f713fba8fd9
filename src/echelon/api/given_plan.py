# SPDX-License-Identifier: Apache-2.0
"""What is taken for a plan: a Plan, or what holds one, such as the answer of `ec.plan`."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from echelon.config.job import DataSettings, Job, ObserveSettings, TrainSettings
from echelon.core.plan import Plan


class PlanHolder(Protocol):
    """Name what has a plan: an answer of `ec.plan`, one of its alternatives, an imported run."""

    @property
    def plan(self) -> Plan:
        """Return the plan."""
        ...


GivenPlan: TypeAlias = Plan | PlanHolder
"""A plan, or what has one: then that is meant."""


def plan_from_given(given: GivenPlan) -> Plan:
    """Return the plan that is meant; TypeError where there is none."""
    from echelon.planner.answer.answer import SizesAnswer

    found = given if isinstance(given, Plan) else getattr(given, "plan", None)
    if not isinstance(found, Plan):
        returned = "ec.plan returns what this takes"
        if isinstance(given, SizesAnswer):
            returned = f"take one of its answers, such as sizes[{[*given][-1]!r}]"
        raise TypeError(f"{type(given).__name__} {given!r} is no plan, and has none: {returned}")
    return found


def job_of_plan(plan: Plan, source: str | None) -> Job:
    """Return a job that trains `plan` on `source` for the steps of its schedule.

    Without a source nothing names its data, and `train_job` refuses it.
    """
    from echelon.config.automatic import default_log_every
    from echelon.config.rules.training import unnamed_data

    steps = plan.mathematics.optimizer.total_steps
    return Job(
        plan=plan,
        data=DataSettings() if source is None else DataSettings(source=source),
        sources=unnamed_data() if source is None else (),
        train=TrainSettings(steps=steps, run_name=plan.name),
        observe=ObserveSettings(log_every=default_log_every(steps)[0]),
    )
