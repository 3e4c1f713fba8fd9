"""Settings that cannot change anything, and settings that this version cannot honour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from echelon.config.context_checks import CONTEXT_CHECKS
from echelon.config.context_plan import context_problems
from echelon.config.expert_plan import expert_problems
from echelon.config.experts import has_experts, ranks_with_the_same_experts
from echelon.config.job import ResolvedSetting
from echelon.config.pipeline_effects import pipeline_effects
from echelon.config.precision import dtypes_fit, loss_scaling_fits
from echelon.config.refusals import no_effect, not_built
from echelon.config.tried import EXPERT_CHECKS
from echelon.config.updates import (
    learning_rate_effects,
    learning_rate_fits_steps,
    optimizer_effects,
)
from echelon.config.view import View, gradient_ranks
from echelon.config.zero import ZERO_CHECKS
from echelon.core.errors import ConfigError, InfeasiblePlan, Problem
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan
from echelon.core.rulebook.config import CONFLICTING_SETTINGS, NO_EFFECT, NOT_BUILT_YET
from echelon.schedule.plan_problems import pipeline_problems


def mesh_effects(view: View) -> Iterator[Problem]:
    """Yield settings that need another axis of the mesh."""
    if view.integer("mesh.tp") == 1:
        yield from no_effect(
            view, "mesh.sequence_parallel", "it splits over tp, and mesh.tp = 1", ["mesh.tp = 2"]
        )
    alone = gradient_ranks(view) == 1 and view.integer("zero.stage") == 0
    if alone and not (has_experts(view) and ranks_with_the_same_experts(view) > 1):
        yield from no_effect(
            view,
            "zero.bucket_bytes",
            "gradients are reduced over data and context ranks, and there is one",
            ["mesh.dp_replicate = 2"],
        )


def recompute_effects(view: View) -> Iterator[Problem]:
    """Yield an interval, or a place for stored inputs, without blocks that are recomputed."""
    if view.word("recompute.policy") != "full":
        works = ['recompute.policy = "full"']
        why = "it counts blocks of full recompute"
        yield from no_effect(view, "recompute.every", why, works)
        why = "only the stored inputs of recomputed blocks are offloaded"
        yield from no_effect(view, "recompute.offload", why, works)


def position_effects(view: View) -> Iterator[Problem]:
    """Yield rotary settings of a model without rotary positions."""
    if view.word("model.positions") == "learned":
        why = 'rotary positions are not used with positions = "learned"'
        yield from no_effect(view, "model.rope_theta", why, [])
        if view.has_table("model.rope_scaling"):
            key = "model.rope_scaling.factor"
            yield NO_EFFECT.problem(
                f"[model.rope_scaling] changes nothing: {why}", key=key, set_by=view.set_by(key)
            )


def validation_effects(view: View) -> Iterator[Problem]:
    """Yield settings of a validation that never happens, or that has nothing to read."""
    every = view.entry("train.validate_every").value
    if every == "never":
        why = 'train.validate_every = "never"'
        yield from no_effect(view, "train.validation_batches", why, ["validate_every = 50"])
        return
    if view.number("data.validation_fraction") == 0:
        yield CONFLICTING_SETTINGS.problem(
            f"train.validate_every = {every}, but data.validation_fraction = 0 holds nothing out",
            key="data.validation_fraction",
            set_by=view.set_by("data.validation_fraction", "train.validate_every"),
            works=("data.validation_fraction = 0.01", 'train.validate_every = "never"'),
        )


def checkpoint_effects(view: View) -> Iterator[Problem]:
    """Yield a number of checkpoints to keep where none are written."""
    if view.entry("checkpoint.every").value == "never":
        why = 'checkpoint.every = "never"'
        yield from no_effect(view, "checkpoint.keep", why, ["checkpoint.every = 100"])


def design_not_built(view: View) -> Iterator[Problem]:
    """Yield every setting of the design that this version cannot honour."""
    if view.word("recompute.policy") == "selective":
        yield not_built(view, "recompute.policy", ['"none"', '"full"'])


EFFECTS = (
    mesh_effects,
    *ZERO_CHECKS,
    *CONTEXT_CHECKS,
    pipeline_effects,
    recompute_effects,
    position_effects,
    optimizer_effects,
    learning_rate_effects,
    learning_rate_fits_steps,
    dtypes_fit,
    loss_scaling_fits,
    validation_effects,
    checkpoint_effects,
    *EXPERT_CHECKS,
    design_not_built,
)


def require_trainable(plan: Plan, sources: Sequence[ResolvedSetting] = ()) -> None:
    """Raise ConfigError where a plan cannot be proven or trained, before any rank starts.

    Its model may be one that can only be planned, and its layout may have been changed since it
    was checked. Where there is nothing but faults of the layout, it is an InfeasiblePlan.
    """
    set_by = {setting.key: setting.source for setting in sources}
    missing = list(_not_trained_yet(plan.model))
    found = [
        replace(problem, set_by=problem.set_by or set_by.get(problem.key, ""))
        for problem in (
            *missing,
            *expert_problems(plan),
            *context_problems(plan),
            *pipeline_problems(plan),
        )
    ]
    if found:
        raise (ConfigError if missing else InfeasiblePlan)(found)


def _not_trained_yet(model: ModelShape) -> Iterator[Problem]:
    if model.gated and model.activation != "silu":
        yield NOT_BUILT_YET.problem(
            f"{model.name} has a gate with {model.activation}: it can be planned, but not yet "
            "proven or trained",
            key="model.activation",
            works=('model.activation = "silu"', "model.gated = false"),
        )
