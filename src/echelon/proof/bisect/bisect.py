# SPDX-License-Identifier: Apache-2.0
"""Find the smallest run that fails as a given one does, by halving.

A plan is taken as settings of a run.toml: leaving one out gives it its default. Some go together:
without tensor ranks there is no sequence parallelism. What a rule refuses then for a setting that
has lost its effect is left out too.

Which settings a failure needs is a search for a minimal set: QuickXplain (Junker, AAAI 2004), which
asks of whole halves first, so that n settings of which k are needed take about 2k log2(n/k) + 2k
proofs. Then degrees, blocks and microbatches are halved as long as the failure stays. A failure is
the same one where the same rule is broken; a run that a rule refuses is not one that fails.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from echelon.config.cluster.file import cluster_toml
from echelon.config.derived.pipeline import FILE, FILE_KEY, SCHEDULE_KEY, STAGES_KEY
from echelon.config.files.show import CLUSTER_FILE, CLUSTER_KEY, SCHEDULE_FILE
from echelon.config.load import load_job
from echelon.config.plan_view import view_from_plan
from echelon.config.rules.finders import require_trainable
from echelon.config.schema import SETTINGS
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.settings.value_types import toml_tables, toml_text
from echelon.launch.root_cause import RankFailure
from echelon.proof.bisect.verdict import Bisection, NeededPart, halves
from echelon.proof.causes.finding import Diagnosis
from echelon.proof.verdict import Proof
from echelon.schedule.files import schedule_csv
from echelon.schedule.from_plan import schedule_from_plan


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


SettingValues = Mapping[str, object]
"""What stands in a run.toml, by key; what is not there has its default."""

AXES = ("mesh.pp", "mesh.cp", "mesh.ep", "mesh.dp_replicate", "mesh.dp_shard", "mesh.tp")
GLOBAL_KEY, MICROBATCH_KEY = "batch.global_sequences", "batch.microbatch_sequences"
LAYERS_KEY = "model.layers"
RUN_FILE = "run.toml"

_KEPT_TABLES = ("batch",)
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_positions")
_KEPT_KEYS = frozenset({"model.name", *(f"model.{name}" for name in _SIZES)})
_WHOLE_TABLES = ("model.experts", "model.latent", "model.rope_scaling")
_EXPERT_LAYOUT = tuple(
    f"experts.{name}" for name in ("expert_tp", "zero_stage", "dispatch", "chunks", "padded")
)
_COMPANIONS: Mapping[str, tuple[str, ...]] = {
    "mesh.pp": ("pipeline.",),
    "mesh.tp": ("mesh.sequence_parallel", "experts.expert_tp"),
    "mesh.cp": ("context.",),
    "mesh.ep": _EXPERT_LAYOUT,
    "model.experts": ("experts.", "mesh.ep"),
}
_MOST_REPAIRS = 4
"""Rounds of leaving out what a rule refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart:
    """Name what may be left out of a run: one setting, or those that have a meaning together."""

    name: str
    keys: frozenset[str]

    def without(self, values: SettingValues) -> SettingValues:
        """Return the run without this part; each data rank has as many microbatches as before."""
        left = {key: value for key, value in values.items() if key not in self.keys}
        return with_microbatches(left, num_microbatches(values))


class BisectedSettings:
    """Turn a plan into settings, and settings into plans, with the files beside them.

    The cluster is that of the plan, and so is a schedule that is written out.
    """

    def __init__(self, plan: Plan) -> None:
        """Read the settings of a plan."""
        self._cluster = plan.cluster
        rows = plan.layout.pipeline.rows
        self._schedule = schedule_csv(schedule_from_plan(plan)) if rows else None
        entries = view_from_plan(plan).entries
        found = {
            key: entry.value
            for key, entry in entries.items()
            if entry.value is not None and entry.value != SETTINGS[key].default
        }
        found[CLUSTER_KEY] = CLUSTER_FILE
        if self._schedule is not None:
            found |= {SCHEDULE_KEY: FILE, FILE_KEY: SCHEDULE_FILE}
        self.values: SettingValues = found

    def plan(self, values: SettingValues) -> tuple[Plan, SettingValues]:
        """Return the plan of `values`, and these without what has no effect in it.

        Raise ConfigError where a rule refuses the rest.
        """
        for _ in range(_MOST_REPAIRS):
            try:
                return self._load(values), values
            except ConfigError as error:
                refused = {problem.key for problem in error.problems} & _droppable(values)
                if not refused:
                    raise
                values = {key: value for key, value in values.items() if key not in refused}
        return self._load(values), values

    def _load(self, values: SettingValues) -> Plan:
        with tempfile.TemporaryDirectory(prefix="echelon-bisect-") as folder:
            for name, text in self.files(values).items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            return load_job(Path(folder) / RUN_FILE).plan

    def files(self, values: SettingValues) -> Mapping[str, str]:
        """Return the text of run.toml and of what it reads, by name of the file."""
        told = {key: toml_text(value) for key, value in values.items()}
        files = {RUN_FILE: toml_tables({key: told[key] for key in SETTINGS if key in told})}
        if CLUSTER_KEY in values:
            files[CLUSTER_FILE] = cluster_toml(self._cluster)
        if values.get(SCHEDULE_KEY) == FILE and self._schedule is not None:
            files[SCHEDULE_FILE] = self._schedule
        return files


def parts_of(values: SettingValues) -> list[RunPart]:
    """Return what may be left out, axes of the mesh last: they are what a split is about."""
    parts = [*_setting_parts(values), *_table_parts(values)]
    axes = [_with_companions(values, key, [key]) for key in AXES if key in values]
    return parts + axes


def _setting_parts(values: SettingValues) -> Iterator[RunPart]:
    for key, value in values.items():
        of_table = any(key.startswith(f"{table}.") for table in _WHOLE_TABLES)
        if key in _droppable(values) and key not in AXES and not of_table:
            yield RunPart(name=f"{key} = {toml_text(value)}", keys=frozenset({key}))


def _table_parts(values: SettingValues) -> Iterator[RunPart]:
    for table in _WHOLE_TABLES:
        if keys := [key for key in values if key.startswith(f"{table}.")]:
            yield _with_companions(values, table, keys)


def _with_companions(values: SettingValues, of: str, keys: list[str]) -> RunPart:
    companions = _COMPANIONS.get(of, ())
    with_it = {key for key in values if key.startswith(companions)} if companions else set[str]()
    name = f"{of} = {toml_text(values[of])}" if of in values else of
    return RunPart(name=name, keys=frozenset({*keys, *with_it}))


def _droppable(values: SettingValues) -> set[str]:
    return {
        key for key in values if key not in _KEPT_KEYS and key.partition(".")[0] not in _KEPT_TABLES
    } | {"batch.documents"}.intersection(values)


def whole(values: SettingValues, key: str) -> int:
    """Return a whole number among the settings, or its default."""
    value = values.get(key, SETTINGS[key].default)
    assert isinstance(value, int), f"{key} is a whole number"
    return value


def _data_ranks(values: SettingValues) -> int:
    return whole(values, "mesh.dp_replicate") * whole(values, "mesh.dp_shard")


def num_microbatches(values: SettingValues) -> int:
    """Return the microbatches of a data rank in a step."""
    sequences = whole(values, GLOBAL_KEY)
    return sequences // (whole(values, MICROBATCH_KEY) * _data_ranks(values))


def with_microbatches(values: SettingValues, count: int) -> SettingValues:
    """Return the run with `count` microbatches of a data rank."""
    sequences = count * whole(values, MICROBATCH_KEY) * _data_ranks(values)
    return {**values, GLOBAL_KEY: sequences}


def smaller_runs(values: SettingValues) -> Iterator[SettingValues]:
    """Yield smaller runs, the smallest of each kind first: degrees, blocks, microbatches, rows."""
    count = num_microbatches(values)
    for key in AXES:
        for degree in halves(whole(values, key), least=2):
            yield with_microbatches(_without_stages({**values, key: degree}), count)
    for layers in halves(whole(values, LAYERS_KEY), least=1):
        yield _without_stages({**values, LAYERS_KEY: layers})
    for few in halves(count, least=1):
        yield with_microbatches(values, few)
    if whole(values, MICROBATCH_KEY) > 1:
        yield with_microbatches({**values, MICROBATCH_KEY: 1}, count)


def _without_stages(values: SettingValues) -> SettingValues:
    return {key: value for key, value in values.items() if key != STAGES_KEY}
