# SPDX-License-Identifier: Apache-2.0
"""A Plan -> the settings of a run.toml that gives it again: all of them, or no more than needed.

`config/load.py` goes the other way. What is left out is a default, or what "auto" finds: the
result is resolved, and whatever comes out otherwise is added until the plan is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from echelon.config.cluster.file import cluster_toml
from echelon.config.cluster.settings import DEFAULT_CLUSTER, named_cluster
from echelon.config.derived.pipeline import AUTO, FILE, FILE_KEY, SCHEDULE_KEY, VIRTUAL_KEY
from echelon.config.entries import Entry
from echelon.config.files.show import CLUSTER_FILE, CLUSTER_KEY, SCHEDULE_FILE, text_of_file
from echelon.config.job import Job
from echelon.config.load import resolve
from echelon.config.model.settings import build_model, derive_model, expand_model
from echelon.config.plan_view import model_settings, plan_settings, settings_under
from echelon.config.presets import preset_names
from echelon.config.rules.training import SOURCE_KEY, data_is_named
from echelon.config.schema import SETTINGS
from echelon.config.setting_layers import SettingLayers
from echelon.config.view import View
from echelon.core.errors import ConfigError
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan
from echelon.core.settings.list_types import NO_MIXTURE
from echelon.core.settings.value_types import toml_tables, toml_text
from echelon.schedule.files import schedule_csv
from echelon.schedule.from_plan import schedule_from_plan

LEFT_TO_US = (
    "zero.bucket_bytes",
    "zero.accumulate",
    "zero.reshard_after_forward",
    "pipeline.virtual_stages",
    "pipeline.stages",
    "context.ulysses_degree",
    "experts.zero_stage",
    "kernels.provider",
    "kernels.fused",
    "collectives.algorithm",
)
"""Settings whose value mostly follows from others: written only where it would not."""

CHANGED = "-changed"
NAMED = ("model.preset", "model.name")
ROUNDS = 4  # attempts
_OF_HEADS = ("model.kv_heads", "model.head_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Hold the settings of a run, and the text of the files beside it that they name."""

    settings: Mapping[str, object]
    beside: Mapping[str, str]


def needed_settings(plan: Plan, job: Job | None = None) -> RunSettings:
    """Return what a run.toml must say to give this plan, and the rest of the run of `job`.

    ConfigError where no run.toml can: the plan breaks a rule.
    """
    wanted = plan_settings(plan)
    found = {
        key: value
        for key, value in wanted.items()
        if not key.startswith("model.") and key not in LEFT_TO_US and value != SETTINGS[key].default
    }
    found |= shortest_model(plan.model) | _settings_around_plan(job)
    cluster, beside = _cluster(plan, job)
    found |= cluster
    with TemporaryDirectory() as folder:
        if plan.layout.pipeline.rows:
            found, more = _with_rows(plan, wanted, found, Path(folder), beside)
            beside |= more
        else:
            found = _completed(wanted, found, beside, Path(folder))
    ordered = {key: found[key] for key in SETTINGS if key in found}
    return RunSettings(settings=ordered, beside=beside)


def resolve_settings(settings: Mapping[str, object], folder: Path, name: str = "run") -> Job:
    """Return the run that these settings give, with files in `folder`; ConfigError as a file's."""
    gathered = SettingLayers()
    gathered.add({k: Entry(value=v, source="", folder=folder) for k, v in settings.items()})
    return resolve(gathered, name, None)


def run_toml(run: RunSettings, comments: tuple[str, ...] = ()) -> str:
    """Return the text of a run file with these settings."""
    head = "".join(f"# {line}\n" for line in comments) + ("\n" if comments else "")
    return head + toml_tables({key: toml_text(value) for key, value in run.settings.items()})


def shortest_model(model: ModelShape) -> dict[str, object]:
    """Return the settings that give this model: a preset and what differs, or all that matter."""
    wanted = model_settings(model)
    for name in dict.fromkeys((model.name, model.name.removesuffix(CHANGED))):
        if (found := _from_preset(name, wanted)) is not None:
            return found
    for name in preset_names("models"):
        if (found := _from_preset(name, wanted)) is not None and len(found) == len(NAMED):
            return found
    return written_out(model)


def written_out(model: ModelShape) -> dict[str, object]:
    """Return the settings that give this model without a preset; what follows is left out."""
    found = {k: v for k, v in model_settings(model).items() if v != SETTINGS[k].default}
    if model.kv_heads == model.heads:
        found.pop("model.kv_heads", None)
    latent = model.latent
    parts = model.hidden // model.heads if latent is None else latent.nope_dim + latent.rope_dim
    if model.head_dim == parts and (latent is not None or model.hidden % model.heads == 0):
        found.pop("model.head_dim", None)
    return found


def _from_preset(name: str, wanted: Mapping[str, object]) -> dict[str, object] | None:
    """Return a preset and what differs; None where there is none, or it has a part too many."""
    if (preset := preset_model(name)) is None:
        return None
    model, written = preset
    base = model_settings(model)
    if base.keys() - wanted.keys():
        return None
    defaults = {key: SETTINGS[key].default for key in wanted} | base
    other = {k: v for k, v in wanted.items() if k != "model.name" and defaults[k] != v}
    # `config/model/settings.py` calls a model so whose preset is overridden.
    if wanted["model.name"] != (f"{name}{CHANGED}" if written.intersection(other) else name):
        other["model.name"] = wanted["model.name"]
    settings = {"model.preset": name, **other}
    return settings | _derived_otherwise(settings, wanted)


def _derived_otherwise(
    settings: Mapping[str, object], wanted: Mapping[str, object]
) -> dict[str, object]:
    """Return the wanted settings of heads that a run with `settings` would derive otherwise."""
    given = {key: Entry(value=value, source="") for key, value in settings.items()}
    entries, _ = expand_model(given)
    entries |= dict(derive_model(View(entries=entries), ""))
    known = {key: entry.value for key, entry in entries.items()}
    return {key: wanted[key] for key in _OF_HEADS if known.get(key) != wanted[key]}


def _settings_around_plan(job: Job | None) -> dict[str, object]:
    """Return the settings of a run that are no part of its plan, those that differ."""
    if job is None:
        return {}
    parts = {"data": job.data, "train": job.train, "checkpoint": job.checkpoint}
    found: dict[str, object] = {}
    for table, part in {**parts, "observe": job.observe}.items():
        found |= settings_under(table, part)
    mixture = [{k: v for k, v in asdict(one).items() if v is not None} for one in job.data.mixture]
    found["data.mixture"] = mixture or NO_MIXTURE
    left = {"train.steps", "train.run_name"}
    left |= {row.key for row in job.sources if row.source.startswith("derived")}
    changed = {k: v for k, v in found.items() if k not in left and v != SETTINGS[k].default}
    # Training refuses a run that names no data, so data that is the default by choice is named.
    named = data_is_named(job) and not job.data.mixture
    return {**changed, SOURCE_KEY: job.data.source} if named else changed


def _cluster(plan: Plan, job: Job | None) -> tuple[dict[str, object], dict[str, str]]:
    """Return the setting that names the cluster, and the file that it names where it is one."""
    name = plan.cluster.name
    if named_cluster(name, "") == plan.cluster:
        return ({} if name == DEFAULT_CLUSTER else {"cluster.preset": name}), {}
    row = next((one for one in job.sources if one.key == CLUSTER_KEY), None) if job else None
    text = cluster_toml(plan.cluster) if row is None else text_of_file(row)
    return {CLUSTER_KEY: CLUSTER_FILE}, {CLUSTER_FILE: text}


def _completed(
    wanted: Mapping[str, object], found: dict[str, object], beside: Mapping[str, str], folder: Path
) -> dict[str, object]:
    """Return `found` with what would come out otherwise."""
    for name, text in beside.items():
        (folder / name).write_text(text, encoding="utf-8")
    for _ in range(ROUNDS):
        try:
            got = plan_settings(resolve_settings(found, folder).plan)
        except ConfigError:
            if VIRTUAL_KEY in found:
                raise
            # Only some schedules say how many stages a rank has.
            found = {**found, VIRTUAL_KEY: wanted[VIRTUAL_KEY]}
            continue
        other = {key: value for key, value in wanted.items() if got.get(key) != value}
        if not other:
            return found
        found = {**found, **other}
    raise AssertionError(f"settings that do not give their plan: {sorted(found)}")


def _with_rows(
    plan: Plan,
    wanted: Mapping[str, object],
    found: dict[str, object],
    folder: Path,
    beside: Mapping[str, str],
) -> tuple[dict[str, object], dict[str, str]]:
    """Return settings that give the rows of a plan: by the search that found them, or a file."""
    if plan.layout.pipeline.schedule == AUTO:
        try:
            again = _completed(wanted, found, beside, folder)
            if resolve_settings(again, folder).plan == plan:
                return again, {}
        except ConfigError:
            pass  # The search was under limits that a plan does not keep.
    found = {**found, SCHEDULE_KEY: FILE, FILE_KEY: SCHEDULE_FILE}
    files = {**beside, SCHEDULE_FILE: schedule_csv(schedule_from_plan(plan))}
    return _completed({**wanted, SCHEDULE_KEY: FILE}, found, files, folder), {
        SCHEDULE_FILE: files[SCHEDULE_FILE]
    }


@lru_cache(maxsize=64)
def preset_model(name: str) -> tuple[ModelShape, frozenset[str]] | None:
    """Return the model of a preset, and the settings that it writes; None where there is none."""
    if name not in preset_names("models"):
        return None
    entries, problems = expand_model({"model.preset": Entry(value=name, source="")})
    assert not problems, problems
    written = frozenset(entries)
    entries.update(derive_model(View(entries=entries), name))
    return build_model(View(entries=entries)), written
