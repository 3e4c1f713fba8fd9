# SPDX-License-Identifier: Apache-2.0
"""Rules of training: optimizer, learning rate, recompute, validation, checkpoints, data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import cast

from echelon.config.derived.experts import has_dense_layers
from echelon.config.entries import DEFAULT
from echelon.config.job import DataSettings, Job, ResolvedSetting
from echelon.config.rules.violations import RuleViolation, setting_without_effect
from echelon.config.view import View
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.choices.trackers import TRACKERS
from echelon.core.errors import Problem
from echelon.core.model_shape import READ_BY_KIND, RopeKind, RopeScaling
from echelon.core.rulebook.config import CONFLICTING_SETTINGS, NO_EFFECT
from echelon.core.rulebook.data import DATA_IS_NAMED, MIXTURE_PARTS, MIXTURE_SCHEDULE
from echelon.core.rulebook.mesh import DECAY_FITS_NORM_OFFSET, LEARNING_RATE_FITS_STEPS
from echelon.core.settings.list_types import mixture_parts, phases_of, places_of, sources_of
from echelon.core.settings.value_types import toml_text


def recompute_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Yield an interval, or a place for stored inputs, without blocks that are recomputed."""
    if view.word("recompute.policy") != "full":
        full = 'recompute.policy = "full"'
        why = "it counts blocks of full recompute"
        yield from setting_without_effect(view, "recompute.every", why, full)
        why = "only the stored inputs of recomputed blocks are offloaded"
        yield from setting_without_effect(view, "recompute.offload", why, full)


def recomputed_operators(view: View) -> Iterator[RuleViolation]:
    """Yield operators that are redone whatever they say, or that no block has, or none at all."""
    key, value = "recompute.operators", view.value("recompute.operators")
    policy, every = view.word("recompute.policy"), view.integer("recompute.every")
    auto = f'{key} = "auto"'
    if policy == "none":
        because = "nothing is redone"
        yield from setting_without_effect(
            view, key, because, 'recompute.policy = "selective"', allowed=([], ())
        )
        return
    if policy == "full" and every == 1:
        because = "every block is redone whole"
        yield from setting_without_effect(
            view, key, because, "recompute.every = 2", allowed=([], ())
        )
        return
    if value == "auto":
        return
    operators = cast("Sequence[str]", value)
    if policy == "selective" and not operators:
        message = f'recompute.policy = "selective" changes nothing: {key} = [] names no operator'
        yield RuleViolation(rule=NO_EFFECT, key=key, message=message, suggestions=(auto,))
    lost: dict[str, str] = {}
    if not has_dense_layers(view):
        alone = "no block has an MLP that every token meets alone"
        lost = {"activation": alone, "mlp": alone}
    elif "mlp" in operators:
        lost = {"activation": "it is a part of mlp"}
    if view.has_table("model.latent"):
        lost["attention"] = "latent attention is not redone by itself"
    for operator in operators:
        if operator in lost:
            rest = [one for one in operators if one not in lost]
            yield RuleViolation(
                rule=NO_EFFECT,
                key=key,
                message=f"{key} has {toml_text(operator)}, which changes nothing: {lost[operator]}",
                suggestions=(*([f"{key} = {toml_text(rest)}"] if rest else []), auto),
            )


def position_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Yield rotary settings of a model without rotary positions."""
    if view.word("model.positions") == "learned":
        why = 'rotary positions are not used with positions = "learned"'
        yield from setting_without_effect(view, "model.rope_theta", why)
        if view.has_table("model.rope_scaling"):
            key = "model.rope_scaling.factor"
            yield RuleViolation(
                rule=NO_EFFECT,
                message=f"[model.rope_scaling] changes nothing: {why}",
                key=key,
                set_by=(key,),
            )
    elif view.has_table("model.rope_scaling"):
        kind = cast("RopeKind", view.word("model.rope_scaling.kind"))
        read = ("kind", "factor", *READ_BY_KIND[kind])
        for name in (item.name for item in fields(RopeScaling) if item.name not in read):
            yield from setting_without_effect(
                view, f"model.rope_scaling.{name}", f"{kind} does not read it"
            )


def attention_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Yield settings of local blocks, and of sinks, of a model that has none."""
    if view.value("model.window") == "none":
        why = "without model.window no block is local"
        yield from setting_without_effect(view, "model.layer_kinds", why, "model.window = 4096")
    if view.value("model.layer_kinds") == "local" or view.word("model.positions") == "learned":
        why = "one base is that of all blocks: set model.rope_theta"
        if view.word("model.positions") == "learned":
            why = 'rotary positions are not used with positions = "learned"'
        yield from setting_without_effect(view, "model.local_rope_theta", why)
    if view.has_table("model.latent"):
        yield from setting_without_effect(view, "model.sinks", "latent attention has none")


def expert_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Yield settings of a clamped SwiGLU, and of groups, of experts that have none."""
    if not view.has_table("model.experts"):
        return
    if view.value("model.experts.limit") == "none":
        why = "without model.experts.limit an expert has SiLU"
        yield from setting_without_effect(
            view, "model.experts.alpha", why, "model.experts.limit = 7.0"
        )
    if view.integer("model.experts.groups") == 1:
        why = "with one group of experts there are none to rank"
        yield from setting_without_effect(view, "model.experts.group_score", why)


def optimizer_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Yield settings of another kind of optimizer, or of a decay of nothing."""
    kind = view.word("optimizer.kind")
    used = [name for record in OPTIMIZERS.values() for name in record.settings]
    for name in dict.fromkeys(used):
        kinds = [other for other, record in OPTIMIZERS.items() if name in record.settings]
        if kind not in kinds:
            suggestions = [f'optimizer.kind = "{other}"' for other in kinds]
            yield from setting_without_effect(
                view, f"optimizer.{name}", f'"{kind}" does not use it', *suggestions
            )
    if view.number("optimizer.weight_decay") == 0:
        why = "optimizer.weight_decay = 0 lets nothing decay"
        yield from setting_without_effect(
            view, "optimizer.decay", why, "optimizer.weight_decay = 0.1"
        )


def learning_rate_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Yield parts of the learning-rate schedule that its kind does not have."""
    kind, decay = view.word("optimizer.schedule"), view.integer("optimizer.decay_steps")
    if kind != "wsd":
        why = f'"{kind}" has no separate decay; it belongs to "wsd"'
        yield from setting_without_effect(view, "optimizer.decay_steps", why, 'schedule = "wsd"')
    elif decay == 0:
        yield RuleViolation(
            rule=NO_EFFECT,
            message='optimizer.schedule = "wsd" with decay_steps = 0 never falls: it is "constant"',
            key="optimizer.schedule",
            set_by=("optimizer.schedule", "optimizer.decay_steps"),
            suggestions=('schedule = "constant"', "decay_steps = 100"),
        )
    if kind == "constant":
        why = "a constant learning rate ends where it is"
        yield from setting_without_effect(view, "optimizer.final_ratio", why, 'schedule = "cosine"')


def learning_rate_fits_steps(view: View) -> Iterator[RuleViolation]:
    """Check that warm-up and decay fit into the run."""
    steps, warmup = view.integer("train.steps"), view.integer("optimizer.warmup_steps")
    decay = view.integer("optimizer.decay_steps")
    if warmup + decay > steps:
        yield RuleViolation(
            rule=LEARNING_RATE_FITS_STEPS,
            message=f"optimizer.warmup_steps + decay_steps = {warmup} + {decay} = "
            f"{warmup + decay}, but train.steps = {steps}",
            key="optimizer.warmup_steps",
            set_by=("optimizer.warmup_steps", "optimizer.decay_steps", "train.steps"),
            suggestions=(
                f"train.steps = {warmup + decay}",
                *([f"optimizer.warmup_steps = {steps - decay}"] if decay <= steps else []),
            ),
        )


def decay_fits_norm_offset(view: View) -> Iterator[RuleViolation]:
    """Find a decay of norms whose files keep another number than the one that is trained."""
    decay, offset = view.number("optimizer.weight_decay"), view.number("model.norm_offset")
    if view.word("optimizer.decay") == "all" and decay and offset:
        yield RuleViolation(
            rule=DECAY_FITS_NORM_OFFSET,
            message=f'optimizer.decay = "all" pulls norms of {view.model_name} to 0, and in '
            f"transformers to {offset:g}: its files keep {offset:g} less (model.norm_offset)",
            key="optimizer.decay",
            set_by=("optimizer.decay", "model.norm_offset"),
            suggestions=('optimizer.decay = "matrices"', "optimizer.weight_decay = 0"),
        )


def validation_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Yield settings of a validation that never happens, or that has nothing to read."""
    every = view.entry("train.validate_every").value
    if every == "never":
        why = 'train.validate_every = "never"'
        yield from setting_without_effect(
            view, "train.validation_batches", why, "validate_every = 50"
        )
        return
    if view.number("data.validation_fraction") == 0:
        yield RuleViolation(
            rule=CONFLICTING_SETTINGS,
            message=f"train.validate_every = {every}, but data.validation_fraction = 0 holds "
            "nothing out",
            key="data.validation_fraction",
            set_by=("data.validation_fraction", "train.validate_every"),
            suggestions=("data.validation_fraction = 0.01", 'train.validate_every = "never"'),
        )


def weights_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Yield that the optimizer is to go on from a checkpoint of a trainer where none is named."""
    if view.entry("train.weights").value == "none":
        yield from setting_without_effect(
            view, "train.weights_optimizer", 'train.weights = "none"', 'weights = "ds"'
        )


def checkpoint_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Yield a number of checkpoints to keep where none are written."""
    if view.entry("checkpoint.every").value == "never":
        why = 'checkpoint.every = "never"'
        yield from setting_without_effect(view, "checkpoint.keep", why, "checkpoint.every = 100")


def comparison_of_calls_without_effect(view: View) -> Iterator[RuleViolation]:
    """Yield a wait after which calls are compared, where the run ends before it."""
    timeout_s = view.number("train.step_timeout_s")
    if view.number("train.desync_after_s") >= timeout_s:
        why = f"train.step_timeout_s = {timeout_s:g} ends the run before"
        yield from setting_without_effect(view, "train.desync_after_s", why)


def tracker_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Yield what is said of trackers where there are none, and a project where none has one."""
    value = view.value("observe.trackers")
    names = () if value == "none" else tuple(cast("Sequence[str]", value))
    why = "no tracker mirrors the run"
    way = 'observe.trackers = ["tensorboard"]'
    if not names:
        yield from setting_without_effect(view, "observe.tracker_drain_s", why, way)
    if not any(TRACKERS[name].has_projects for name in names if name in TRACKERS):
        why = "TensorBoard has no projects" if names else why
        way = 'observe.trackers = ["mlflow"]'
        yield from setting_without_effect(view, "observe.tracker_project", why, way)


RECOMPUTE_FINDERS = (
    recompute_settings_without_effect,
    recomputed_operators,
    position_settings_without_effect,
    attention_settings_without_effect,
    expert_settings_without_effect,
)
OPTIMIZER_FINDERS = (
    optimizer_settings_without_effect,
    learning_rate_settings_without_effect,
    learning_rate_fits_steps,
    decay_fits_norm_offset,
)
RUN_FINDERS = (
    validation_settings_without_effect,
    weights_settings_without_effect,
    checkpoint_settings_without_effect,
    comparison_of_calls_without_effect,
    tracker_settings_without_effect,
)


KEY = "data.mixture"
SOURCE_KEY = "data.source"
WAYS = (
    f'{SOURCE_KEY} = "stdlib" (the source of Python, to try a run out)',
    f'{SOURCE_KEY} = "PATH" or a URL (text; jsonl; parquet; a folder of these)',
    f'{SOURCE_KEY} = "FOLDER" (written by echelon data prepare)',
)
"""How a run names its data."""


def unnamed_data() -> tuple[ResolvedSetting, ...]:
    """Sources of the settings of a job without data."""
    return (
        ResolvedSetting(key=SOURCE_KEY, value=toml_text(DataSettings().source), source=DEFAULT),
    )


def data_is_named(job: Job) -> bool:
    """True if a file, a preset, a flag or a caller names the data of `job`."""
    return bool(job.data.mixture) or job.source_of(SOURCE_KEY) != DEFAULT


def data_problems(job: Job) -> list[Problem]:
    """Problem of a job that trains and names no data."""
    if data_is_named(job):
        return []
    message = f"{SOURCE_KEY} is not set: nothing says what {job.plan.name} reads"
    return [DATA_IS_NAMED.problem(message, key=SOURCE_KEY, suggestions=WAYS)]


def mixture_is_a_schedule(view: View) -> Iterator[RuleViolation]:
    """Yield sources with two weights in a phase, phases that end early, and shares of nothing."""
    parts = mixture_parts(view.value(KEY))
    if not parts:
        return
    for (path, end), count in Counter((part.path, part.until_step) for part in parts).items():
        if count > 1:
            when = "the last phase" if end is None else f"the phase until step {end}"
            message = f"{path} has {count} weights in {when}"
            yield RuleViolation(rule=MIXTURE_SCHEDULE, key=KEY, message=message)
            return
    phases, steps = phases_of(parts), view.integer("train.steps")
    last = phases[-1].until_step
    if last is not None and last < steps:
        yield RuleViolation(
            rule=MIXTURE_SCHEDULE,
            key=KEY,
            message=f"no weight holds from step {last} on, and train.steps = {steps}",
            set_by=(KEY, "train.steps"),
            suggestions=(f"train.steps = {last}",),
        )
    for phase in phases:
        if phase.until_step is not None and phase is not phases[-1] and phase.until_step >= steps:
            message = f"train.steps = {steps} ends before the phase until step {phase.until_step}"
            yield RuleViolation(
                rule=MIXTURE_SCHEDULE,
                key=KEY,
                message=f"{message}, so the phases after it are never reached",
                set_by=(KEY, "train.steps"),
            )
            return
        for path, weight, places in zip(
            sources_of(parts), phase.weights, places_of(phase.weights), strict=True
        ):
            if weight > 0 and not places:
                share = weight / sum(phase.weights)
                yield RuleViolation(
                    rule=MIXTURE_PARTS, key=KEY, message=f"{path} has a share of {share:.1e} only"
                )


def mixture_is_the_source(view: View) -> Iterator[RuleViolation]:
    """Yield what a mixture takes the place of, and an order that only a single source has."""
    if not mixture_parts(view.value(KEY)):
        return
    if not view.is_default("data.source"):
        yield RuleViolation(
            rule=CONFLICTING_SETTINGS,
            key="data.source",
            message="data.mixture names what is read, and so does data.source",
            set_by=("data.source", KEY),
            suggestions=('data.source = "stdlib"',),
        )
    if view.word("data.epoch_end") == "pad":
        yield RuleViolation(
            rule=NO_EFFECT,
            key="data.epoch_end",
            message='data.epoch_end = "pad" changes nothing: the sources of a mixture have epochs '
            "of their own, which end anywhere in a step",
            suggestions=('data.epoch_end = "continue"',),
        )


MIXTURE_FINDERS = (mixture_is_a_schedule, mixture_is_the_source)
