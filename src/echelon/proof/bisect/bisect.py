# SPDX-License-Identifier: Apache-2.0
"""Find the smallest run that fails as a given one does, by halving.

Which settings a failure needs is a search for a minimal set: QuickXplain (Junker, AAAI 2004), which
asks of whole halves first, so that n settings of which k are needed take about 2k log2(n/k) + 2k
proofs. Then degrees, blocks and microbatches are halved as long as the failure stays. A failure is
the same one where the same rule is broken; a run that a rule refuses is not one that fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from echelon.config.rules.finders import require_trainable
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.launch.root_cause import RankFailure
from echelon.proof.bisect.run_settings import (
    BisectedSettings,
    RunPart,
    SettingValues,
    parts_of,
    smaller_runs,
)
from echelon.proof.bisect.verdict import Bisection, NeededPart
from echelon.proof.causes.finding import Diagnosis
from echelon.proof.verdict import Proof


class ProvePlan(Protocol):
    """Prove a plan, in its own precision too or in float64 only; RankFailure where a rank fails."""

    def __call__(self, plan: Plan, *, own_precision: bool = True) -> Proof:
        """Return the proof."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """How the proof of one run ended: the rule that it breaks ("" for none), and what it says.

    `exact`: whether float64 is enough to see it.
    """

    rule: str
    says: str
    values: SettingValues = field(default_factory=dict[str, object])
    diagnosis: Diagnosis | None = None
    plan: Plan | None = None
    exact: bool = False


def bisect(plan: Plan, prove_plan: ProvePlan) -> Bisection | None:
    """Return the smallest run that breaks the rule that `plan` breaks first; None where it holds.

    ConfigError where its settings do not give a plan.
    """
    settings = BisectedSettings(plan)
    plan, values = settings.plan(settings.values)
    search = _Search(settings, prove_plan)
    first = search.outcome(values)
    return search.run(first) if first.rule else None


class _Search:
    """Halve the settings of one run."""

    def __init__(self, settings: BisectedSettings, prove_plan: ProvePlan) -> None:
        self._settings, self._prove = settings, prove_plan
        self._known: dict[str, _Outcome] = {}
        self._rule, self._own_precision = "", True

    def run(self, first: _Outcome) -> Bisection:
        """Return the smallest run that fails as `first` does."""
        self._rule, self._own_precision = first.rule, not first.exact
        parts = parts_of(first.values)
        needed = self._needed(first.values, parts)
        unneeded = [part for part in parts if part not in needed]
        last = self.outcome(self._smallest(_without(first.values, unneeded)))
        plan = last.plan
        assert plan is not None, "the smallest run fails, so it was run"
        return Bisection(
            rule=self._rule,
            needed=tuple(self._without_it(last.values, part) for part in parts_of(last.values)),
            left_out=tuple(part.name for part in unneeded),
            sizes={
                "ranks": plan.mesh.world_size,
                "blocks": plan.model.layers,
                "microbatches": plan.num_microbatches,
                "steps": max(0, last.diagnosis.step if last.diagnosis else 0) + 1,
            },
            files=self._settings.files(last.values),
            diagnosis=last.diagnosis,
            summary=last.says,
            num_proofs=sum(outcome.plan is not None for outcome in self._known.values()),
        )

    def outcome(self, values: SettingValues) -> _Outcome:
        """Return how the proof of a run ends; each is proven once."""
        key = repr(sorted(values.items()))
        if key not in self._known:
            self._known[key] = self._proven(values)
        return self._known[key]

    def _needed(self, base: SettingValues, parts: Sequence[RunPart]) -> list[RunPart]:
        """Return the parts among `parts` that the failure needs, all others of `base` kept."""
        if not parts or self._fails(_without(base, parts)):
            return []
        if len(parts) == 1:
            return list(parts)
        half = len(parts) // 2
        first, second = parts[:half], parts[half:]
        late = self._needed(base, second)
        gone = [part for part in second if part not in late]
        return self._needed(_without(base, gone), first) + late

    def _smallest(self, values: SettingValues) -> SettingValues:
        """Return the run with degrees, blocks and microbatches halved while the failure stays."""
        for smaller in smaller_runs(values):
            if self._fails(smaller):
                return self._smallest(smaller)
        return values

    def _without_it(self, values: SettingValues, part: RunPart) -> NeededPart:
        outcome = self.outcome(part.without(values))
        same = outcome.rule == self._rule
        return NeededPart(name=part.name, without="fails all the same" if same else outcome.says)

    def _fails(self, values: SettingValues) -> bool:
        return self.outcome(values).rule == self._rule

    def _proven(self, values: SettingValues) -> _Outcome:
        try:
            plan, values = self._settings.plan(values)
            require_trainable(plan)
        except ConfigError as error:
            return _Outcome(rule="refused", says=f"refused by {error.rules[0]}")
        try:
            proof = self._prove(plan, own_precision=self._own_precision)
        except RankFailure as failure:
            says = str(failure).splitlines()[0]
            return _Outcome(rule=failure.rules[0], says=says, values=values, plan=plan)
        found = proof.diagnosis
        return _Outcome(
            rule="" if found is None else found.rule,
            says="proven" if found is None else found.sentence(),
            values=values,
            diagnosis=found,
            plan=plan,
            exact=not proof.passes[0].holds,
        )


def _without(values: SettingValues, parts: Sequence[RunPart]) -> SettingValues:
    for part in parts:
        values = part.without(values)
    return values
