"""Settings -> Job: everything derived, everything checked, nothing "auto" left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

from echelon.config.automatic import read_zero, resharding
from echelon.config.checks import CHECKS, run_checks
from echelon.config.cluster import DEFAULT_CLUSTER, read_cluster
from echelon.config.context import read_context
from echelon.config.effects import EFFECTS
from echelon.config.entries import DEFAULT, Entry
from echelon.config.experts import read_balance, read_expert_layout
from echelon.config.factorings import cluster_problems, world_size_problems
from echelon.config.gather import Gathered
from echelon.config.job import (
    CheckpointSettings,
    DataSettings,
    Job,
    ObserveSettings,
    ResolvedSetting,
    TrainSettings,
)
from echelon.config.kinds import toml_text
from echelon.config.model import (
    MODEL_CHECKS,
    PARTS,
    build_model,
    derive_model,
    expand_model,
    model_problems,
)
from echelon.config.placement import placed, provisional_pipeline
from echelon.config.schema import CLUSTER_SOURCES, MODEL_SOURCES, SETTINGS
from echelon.config.view import View, mesh_of, record
from echelon.core.cluster import Cluster
from echelon.core.errors import ConfigError, InfeasiblePlan, Problem
from echelon.core.plan import (
    Documents,
    Layout,
    Mathematics,
    Optimizer,
    Plan,
    Precision,
    Recompute,
)
from echelon.core.rulebook.config import MISSING_SETTING

PARTS_OF_MODEL = tuple(f"model.{part}" for part in PARTS)


def resolve(gathered: Gathered, run_name: str, world_size: int | None) -> Job:
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
    problems.extend(run_checks(view, (*MODEL_CHECKS, *CHECKS, *EFFECTS)))
    problems.extend(run_checks(view, (lambda v: world_size_problems(v, world_size),)))
    if isinstance(cluster, Cluster):
        problems.extend(run_checks(view, (lambda v: cluster_problems(v, cluster),)))
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
        entry = entries.get(key)
        if entry is not None and isinstance(entry.value, str) and not _is_word(key, entry.value):
            entries[key] = Entry(value=str(entry.path().absolute()), source=entry.source)


def _is_word(key: str, value: str) -> bool:
    if key == "data.source":
        return value == "stdlib"
    if key in ("zero.offload_dir", "train.weights", "pipeline.file", "pipeline.times"):
        return value == "none"
    return key == "data.tokenizer" and (value == "bytes" or value.startswith("bpe-"))


def _missing(view: View) -> Iterator[Problem]:
    yield from model_problems(view)
    for key in ("batch.global_sequences", "batch.sequence_length"):
        if not view.has(key) and key not in view.wrong:
            yield MISSING_SETTING.problem(
                f"{key} is not set and has no default: {SETTINGS[key].about}", key=key
            )


def _build_job(view: View, cluster: Cluster) -> Job:
    model = build_model(view)
    steps = view.integer("train.steps")
    zero, derived = read_zero(view)
    context, degree = read_context(view)
    derived.update(degree)
    experts, stage = read_expert_layout(view)
    derived.update(stage)
    clip = view.entry("optimizer.clip_norm").value
    mathematics = Mathematics(
        model=model,
        global_sequences=view.integer("batch.global_sequences"),
        sequence_length=view.integer("batch.sequence_length"),
        documents=cast(Documents, view.word("batch.documents")),
        seed=view.integer("train.seed"),
        precision=record(view, Precision, "precision"),
        optimizer=record(
            view,
            Optimizer,
            "optimizer",
            total_steps=steps,
            clip_norm=None if clip == "none" else clip,
        ),
        balance=read_balance(view),
    )
    layout = Layout(
        mesh=mesh_of(view),
        microbatch_sequences=view.integer("batch.microbatch_sequences"),
        pipeline=provisional_pipeline(view),
        sequence_parallel=view.flag("mesh.sequence_parallel"),
        zero=zero,
        recompute=record(view, Recompute, "recompute"),
        context=context,
        experts=experts,
    )
    run_name = view.word("train.run_name")
    plan = Plan(name=run_name, mathematics=mathematics, layout=layout, cluster=cluster)
    plan, placement = placed(view, plan)
    derived.update(placement)
    gathers = 3 in (zero.stage, experts.zero_stage)
    if gathers and view.word("zero.reshard_after_forward") == "auto":
        reshards, source = resharding(plan)
        derived["zero.reshard_after_forward"] = "always" if reshards else "never", source
        zero = replace(zero, reshard_after_forward=reshards)
        plan = replace(plan, layout=replace(plan.layout, zero=zero))
    return Job(
        plan=plan,
        data=record(view, DataSettings, "data"),
        train=record(view, TrainSettings, "train"),
        checkpoint=record(view, CheckpointSettings, "checkpoint"),
        observe=record(view, ObserveSettings, "observe"),
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
