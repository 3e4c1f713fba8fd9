# SPDX-License-Identifier: Apache-2.0
"""Two plans side by side: what differs, whether both compute the same, what ranks hold and send.

Bytes come from `cost/bytes/held.py` and `cost/bytes/sent.py`, which a run equals; seconds are the
planner's estimate. `summarize_plan` is the one place that says what is known of a plan by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from echelon.config.plan_view import plan_settings
from echelon.core.notebook import NOTEBOOK_VIEWS
from echelon.core.plan import Plan
from echelon.cost.bytes.terms import HeldTerm
from echelon.planner.predict.estimate import estimate_by_events
from echelon.planner.predict.stage_rows import sent_by_axis, stage_rows

MATHEMATICS = ("model", "batch", "precision", "optimizer", "train.seed", "train.steps")
BALANCE = (
    *("experts.balance", "experts.aux_coefficient", "experts.aux_over", "experts.z_coefficient"),
    *("experts.bias_rate", "experts.capacity_factor", "experts.drop", "experts.route"),
)
LAYOUT = ("batch.microbatch_sequences",)
NAMES = ("train.run_name",)
CLUSTER = "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDifference:
    """Name a setting that two plans have otherwise; None is a setting that one does not have."""

    setting: str
    a: object
    b: object
    changes_numbers: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """Hold what is known of a plan: bytes of the rank that holds most, and sends most; seconds.

    `held` are those between steps by kind, `step` what a step adds at most beside activations,
    `sent` those of a step by axis. `seconds` are those of a step by term, estimated.
    """

    plan: Plan
    held: Mapping[str, int]
    step: Mapping[str, int]
    sent: Mapping[str, int]
    seconds: Mapping[str, float]

    def bytes(self) -> Mapping[str, Mapping[str, int]]:
        """Return all bytes that are compared term by term."""
        return {"held": self.held, "step": self.step, "sent": self.sent}

    def parts(self) -> Mapping[str, Mapping[str, float]]:
        """Return everything that is compared term by term."""
        return {**self.bytes(), "seconds": self.seconds}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanComparison:
    """Hold two plans, what differs, and whether both must give the same numbers."""

    a: ComparedPlan
    b: ComparedPlan
    differences: tuple[SettingDifference, ...]

    @property
    def same_mathematics(self) -> bool:
        """Return whether both plans must give the same numbers."""
        return self.a.plan.same_mathematics(self.b.plan)

    @property
    def same_layout(self) -> bool:
        """Return whether both plans are split alike."""
        return self.a.plan.layout == self.b.plan.layout

    def _repr_html_(self) -> str | None:
        """Return both plans, as a notebook shows it: its page without a script."""
        return NOTEBOOK_VIEWS.html("comparison", self)


def compare_plans(a: Plan, b: Plan) -> PlanComparison:
    """Return two plans side by side."""
    return PlanComparison(
        a=summarize_plan(a), b=summarize_plan(b), differences=tuple(_differences(a, b))
    )


def summarize_plan(plan: Plan) -> ComparedPlan:
    """Return what is known of a plan by itself."""
    rows = stage_rows(plan)

    def most(found: Iterable[dict[str, int]]) -> dict[str, int]:
        return max(found, key=lambda one: sum(one.values()))

    return ComparedPlan(
        plan=plan,
        held=most(_by_kind(row.held) for row in rows),
        step=most(_by_kind(row.step) for row in rows),
        sent=most(sent_by_axis(row) for row in rows),
        seconds=estimate_by_events(plan).seconds,
    )


def changes_numbers(key: str) -> bool:
    """Return whether a setting is one of the mathematics of a plan."""
    if key in LAYOUT:
        return False
    return key in BALANCE or any(key == one or key.startswith(f"{one}.") for one in MATHEMATICS)


def _differences(a: Plan, b: Plan) -> Iterator[SettingDifference]:
    first, second = plan_settings(a), plan_settings(b)
    for key in dict.fromkeys((*first, *second)):
        if key not in NAMES and first.get(key) != second.get(key):
            sides = {"a": first.get(key), "b": second.get(key)}
            yield SettingDifference(setting=key, **sides, changes_numbers=changes_numbers(key))
    rows = [plan.layout.pipeline.rows for plan in (a, b)]
    if rows[0] != rows[1]:
        ours, theirs = (f"{sum(len(row.split()) for row in one)} actions" for one in rows)
        yield SettingDifference(setting="pipeline.file", a=ours, b=theirs, changes_numbers=False)
    if a.cluster != b.cluster:
        names = {"a": a.cluster.name, "b": b.cluster.name}
        yield SettingDifference(setting=CLUSTER, **names, changes_numbers=False)


def _by_kind(terms: Sequence[HeldTerm]) -> dict[str, int]:
    """Return bytes by kind; what rests off the device says where."""
    total: dict[str, int] = {}
    for term in terms:
        name = term.name if term.pool == "device" else f"{term.name} ({term.pool})"
        total[name] = total.get(name, 0) + term.bytes
    return total
