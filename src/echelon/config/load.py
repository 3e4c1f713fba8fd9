# SPDX-License-Identifier: Apache-2.0
"""A run file or preset, and --set flags -> a Job, or an error that tells everything at once.

Everything is derived and checked: nothing "auto" is left in a Job.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from echelon.config.adaptation import ADAPTED, adapted_view
from echelon.config.automatic import (
    default_log_every,
    default_precision,
    default_resharding,
    place_stages,
    provisional_pipeline,
    read_fp8_gradients,
    read_recompute,
    read_tensor_overlap,
    read_zero,
)
from echelon.config.cluster.settings import DEFAULT_CLUSTER, read_cluster
from echelon.config.derived.context import read_context
from echelon.config.derived.experts import read_balance, read_expert_layout
from echelon.config.derived.kernels import read_kernels
from echelon.config.derived.replicas import read_collectives, read_local_sgd, read_updates
from echelon.config.entries import DEFAULT, Entry
from echelon.config.job import (
    CheckpointSettings,
    DataSettings,
    Job,
    ObserveSettings,
    ResolvedSetting,
    TrainSettings,
)
from echelon.config.model.settings import (
    PARTS,
    build_model,
    derive_model,
    expand_model,
    model_problems,
)
from echelon.config.rules.finders import FINDERS
from echelon.config.rules.mesh import servers_are_ps_tasks, world_size_is_product
from echelon.config.rules.violations import ViolationFinder, find_problems
from echelon.config.schema import CLUSTER_SOURCES, MODEL_SOURCES, SETTINGS
from echelon.config.setting_layers import SettingLayers, gather_layers
from echelon.config.view import View, mesh_of, record
from echelon.core.choices.registry import load_installed_plugins
from echelon.core.cluster import Cluster
from echelon.core.errors import ConfigError, InfeasiblePlan, Problem
from echelon.core.plan import Documents, Layout, Mathematics, Optimizer, Plan, Precision
from echelon.core.rulebook.config import MISSING_SETTING
from echelon.core.settings.list_types import NO_MIXTURE, mixture_parts
from echelon.core.settings.value_types import toml_text

LOG = logging.getLogger(__name__)
PARTS_OF_MODEL = tuple(f"model.{part}" for part in PARTS)


def resolve(
    gathered: SettingLayers, run_name: str, world_size: int | None, servers: int | None = None
) -> Job:
    """Return the Job, or raise ConfigError with every problem that was found.

    Where each value is legal and only their combination is not, it is an InfeasiblePlan.
    """
    problems = list(gathered.problems)
    if gathered.incomplete:
        raise ConfigError(problems)
    merged = gathered.merged()
    wrong = {key for problem in problems for key in _keys_under(problem.key)}
    unread = bool(wrong.intersection(MODEL_SOURCES))
    if not unread:
        merged, source_problems = expand_model(merged)
        problems.extend(source_problems)
        unread = bool(source_problems)
    if unread:
        wrong.update(key for key in SETTINGS if key.startswith("model."))
    else:
        # Derived values stand below what was set, and are judged together with it.
        first = View(entries=merged, wrong=frozenset(wrong))
        merged.update(derive_model(first, run_name))
    _resolve_names(merged, run_name)
    view = View(entries=merged, wrong=frozenset(wrong))
    problems.extend(_missing(view))
    legal_by_themselves = not problems
    cluster = None if wrong.intersection(CLUSTER_SOURCES) else read_cluster(view)
    if isinstance(cluster, list):
        problems.extend(cluster)
        legal_by_themselves = False
    elif cluster is not None:
        dtypes, why = default_precision(view, cluster)
        source = f"derived: {why}"
        derived = {key: Entry(value=value, source=source) for key, value in dtypes.items()}
        view = replace(view, entries=merged | derived)
    started: list[ViolationFinder] = []
    if world_size is not None:
        started.append(world_size_is_product(world_size))
        if servers is not None:
            started.append(servers_are_ps_tasks(servers, world_size))
    finders = (*FINDERS[:-1], *started, FINDERS[-1])
    view = adapted_view(view, finders)
    problems.extend(find_problems(view, finders))
    if problems:
        raise (InfeasiblePlan if legal_by_themselves else ConfigError)(problems)
    assert isinstance(cluster, Cluster)
    return _build_job(view, cluster)


def _keys_under(name: str) -> Iterator[str]:
    """Yield the setting of this name, or all settings of the table of this name."""
    return (key for key in SETTINGS if key == name or (name and key.startswith(f"{name}.")))


def _resolve_names(entries: dict[str, Entry], run_name: str) -> None:
    if not any(key in entries for key in CLUSTER_SOURCES):
        entries["cluster.preset"] = Entry(value=DEFAULT_CLUSTER, source=DEFAULT)
    name = entries.get("train.run_name")
    if name is None or name.value == "auto":
        entries["train.run_name"] = Entry(value=run_name, source="derived: the file or preset")
    for key in (setting.key for setting in SETTINGS.values() if setting.path):
        if (entry := entries.get(key)) is not None:
            entries[key] = absolute_entry(key, entry)
    _resolve_mixture(entries)


def absolute_entry(key: str, entry: Entry) -> Entry:
    """Return the entry of a path with an absolute one; a word that is none stays."""
    if not isinstance(entry.value, str) or _is_word(key, entry.value):
        return entry
    return replace(entry, value=str(entry.path().absolute()), folder=None)


def _resolve_mixture(entries: dict[str, Entry]) -> None:
    """Make the sources of a mixture independent of the file that names them."""
    entry = entries.get("data.mixture")
    if entry is None or entry.value == NO_MIXTURE:
        return
    parts = [
        {**part, "path": _absolute(entry, str(part["path"]))}
        for part in cast("list[dict[str, object]]", entry.value)
    ]
    entries["data.mixture"] = replace(entry, value=parts)


def _absolute(entry: Entry, path: str) -> str:
    if path == "stdlib" or "://" in path:
        return path
    return str(replace(entry, value=path).path().absolute())


def _is_word(key: str, value: str) -> bool:
    """Return whether what may be a path is none: a URL, "none", "stdlib", "bytes" or "bpe-N"."""
    if key == "data.source" and "://" in value:
        return True
    trained = key == "data.tokenizer" and value.startswith("bpe-")
    return trained or value == SETTINGS[key].default


_TYPICAL = {"batch.global_sequences": 16, "batch.sequence_length": 128}
"""Settings without a default, and values of a small run."""


def _missing(view: View) -> Iterator[Problem]:
    yield from model_problems(view)
    for key, typical in _TYPICAL.items():
        if not view.has(key) and key not in view.wrong:
            yield MISSING_SETTING.problem(
                f"{key} is not set and has no default: {SETTINGS[key].about}",
                key=key,
                suggestions=(f"{key} = {typical}",),
            )


def _build_job(view: View, cluster: Cluster) -> Job:
    model = build_model(view)
    steps = view.integer("train.steps")
    zero, derived = read_zero(view, cluster)
    overlap, how = read_tensor_overlap(view, cluster)
    derived.update(how)
    recompute, operators = read_recompute(view)
    derived.update(operators)
    context, degree = read_context(view)
    derived.update(degree)
    experts, stage = read_expert_layout(view)
    derived.update(stage)
    kernels, pieces = read_kernels(view, cluster)
    derived.update(pieces)
    gradients, how = read_fp8_gradients(view)
    derived.update(how)
    collectives, chosen = read_collectives(view, cluster)
    derived.update(chosen)
    local, how = read_local_sgd(view)
    derived.update(how)
    mathematics = Mathematics(
        model=model,
        global_sequences=view.integer("batch.global_sequences"),
        sequence_length=view.integer("batch.sequence_length"),
        documents=cast(Documents, view.word("batch.documents")),
        seed=view.integer("train.seed"),
        precision=record(
            view,
            Precision,
            "precision",
            fp8_gradients=gradients,
            int8_block=view.integer("zero.int8_block") if view.word("zero.gather") == "int8" else 0,
        ),
        optimizer=record(view, Optimizer, "optimizer", total_steps=steps),
        balance=read_balance(view),
        local_sgd=local,
        updates=read_updates(view),
    )
    layout = Layout(
        mesh=mesh_of(view),
        microbatch_sequences=view.integer("batch.microbatch_sequences"),
        pipeline=provisional_pipeline(view),
        sequence_parallel=view.flag("mesh.sequence_parallel"),
        tp_overlap=overlap,
        zero=zero,
        recompute=recompute,
        context=context,
        experts=experts,
        kernels=kernels,
        collectives=collectives,
    )
    run_name = view.word("train.run_name")
    plan = Plan(name=run_name, mathematics=mathematics, layout=layout, cluster=cluster)
    plan, placement = place_stages(view, plan)
    derived.update(placement)
    gathers = 3 in (zero.stage, experts.zero_stage)
    if gathers and view.word("zero.reshard_after_forward") == "auto":
        reshards, source = default_resharding(plan)
        derived["zero.reshard_after_forward"] = "always" if reshards else "never", source
        zero = replace(zero, reshard_after_forward=reshards)
        plan = replace(plan, layout=replace(plan.layout, zero=zero))
    log_every = view.value("observe.log_every")
    if log_every == "auto":
        log_every, source = default_log_every(steps)
        derived["observe.log_every"] = log_every, source
    return Job(
        plan=plan,
        data=record(view, DataSettings, "data", mixture=mixture_parts(view.value("data.mixture"))),
        train=record(view, TrainSettings, "train"),
        checkpoint=record(view, CheckpointSettings, "checkpoint"),
        observe=record(view, ObserveSettings, "observe", log_every=log_every),
        sources=tuple(_rows(view, derived)),
    )


def _rows(view: View, derived: Mapping[str, tuple[object, str]]) -> Iterator[ResolvedSetting]:
    for key in SETTINGS:
        if not view.has(key):
            continue
        if SETTINGS[key].table in PARTS_OF_MODEL and not view.has_table(SETTINGS[key].table):
            continue
        value, source = derived.get(key, (view.value(key), view.entry(key).source))
        yield ResolvedSetting(key=key, value=toml_text(value), source=source)


def load_job(
    source: Path | str,
    sets: Sequence[str] = (),
    *,
    world_size: int | None = None,
    servers: int | None = None,
    typed: Mapping[str, Entry] | None = None,
) -> Job:
    """Return the Job of a run file (or of the preset of this name) with `sets` on top.

    `sets` are "table.key=value" strings, `typed` what else was typed, with its origin.
    `world_size` is the number of ranks that a launcher has started, where one has, `servers` how
    many of them it has started as parameter servers, where it says. Raises ConfigError, with all
    problems that there are; InfeasiblePlan where only the combination is at fault.
    """
    load_installed_plugins()
    layers = gather_layers(source, sets, typed)
    job = resolve(layers, run_name_of(source), world_size, servers)
    say_adapted(job)
    if LOG.isEnabledFor(logging.DEBUG):
        for row in job.sources:
            if row.source != DEFAULT and not row.source.startswith("derived"):
                LOG.debug(f"{row.key} = {row.value}, {row.source}")
    return job


def say_adapted(job: Job) -> None:
    """Log one line about the preset's values that gave way to the user's."""
    if adapted := [row for row in job.sources if row.source.startswith(ADAPTED)]:
        LOG.warning("; ".join(f"{row.key} = {row.value}, {row.source}" for row in adapted))


def run_name_of(source: Path | str) -> str:
    """Return the name of a run that does not say its own: that of its file or preset."""
    stem = Path(source).name.removesuffix(".toml")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-") or "run"
