"""When adapters can be trained over a frozen model: which layers, and beside what."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.rules.violations import RuleViolation, setting_without_effect
from echelon.config.settings.experts import has_experts
from echelon.config.settings.lora import (
    ALPHA_KEY,
    DROPOUT_KEY,
    RANK_KEY,
    RSLORA_KEY,
    TARGETS_KEY,
    has_lora,
    lora_targets,
)
from echelon.config.settings.value_types import toml_text
from echelon.config.view import View
from echelon.core.choices.lora import ALL_LINEAR
from echelon.core.rulebook.lora import (
    LORA_DROPOUT,
    LORA_FULL_PRECISION,
    LORA_MODEL,
    LORA_OVERLAP,
    LORA_REPLICAS,
    LORA_TARGETS,
)

OFF = f'{RANK_KEY} = "none"'
WHOLE: tuple[tuple[str, object], ...] = (
    ("precision.matmul", "parameters"),
    ("zero.gather", "parameters"),
)
"""Settings that put weights or products into 8 bits, with what they are without."""

REPLICAS: tuple[tuple[str, object], ...] = (
    ("local_sgd.every", 0),
    ("servers.count", 0),
    ("threads.replicas", 1),
)
"""Settings that make replicas exchange parameters, with what they are without."""


def lora_names_layers(view: View) -> Iterator[RuleViolation]:
    """Check that every target is a layer of the model."""
    if has_lora(view) and "gate" in lora_targets(view) and not view.flag("model.gated"):
        others = [name for name in lora_targets(view) if name != "gate"]
        yield RuleViolation(
            rule=LORA_TARGETS,
            key=TARGETS_KEY,
            message=f"{TARGETS_KEY} has gate, but the MLP of {view.model_name} has none",
            set_by=(TARGETS_KEY, "model.gated"),
            suggestions=(
                *([{TARGETS_KEY: others}] if others else []),
                {TARGETS_KEY: ALL_LINEAR},
            ),
        )


def lora_has_layers(view: View) -> Iterator[RuleViolation]:
    """Check that the model has the layers that adapters stand beside."""
    if not has_lora(view):
        return
    for found, what, key in (
        (view.has_table("model.latent"), "latent attention", "model.latent.kv_rank"),
        (has_experts(view), "experts", "model.experts.num_experts"),
    ):
        if found:
            yield RuleViolation(
                rule=LORA_MODEL,
                key=RANK_KEY,
                message=f"{RANK_KEY} = {view.integer(RANK_KEY)}, but {view.model_name} has {what}",
                set_by=(RANK_KEY, key),
                suggestions=(OFF,),
            )
            return


def lora_drops_nothing(view: View) -> Iterator[RuleViolation]:
    """Check that adapters read all of their input."""
    if has_lora(view) and view.number(DROPOUT_KEY) > 0.0:
        yield RuleViolation(
            rule=LORA_DROPOUT,
            key=DROPOUT_KEY,
            message=f"{DROPOUT_KEY} = {view.number(DROPOUT_KEY)}: no mask is drawn inside of "
            "linear layers",
            suggestions=(f"{DROPOUT_KEY} = 0.0",),
        )


def lora_in_full_precision(view: View) -> Iterator[RuleViolation]:
    """Check that products and gathers have the dtype of parameters."""
    for key, plain in WHOLE if has_lora(view) else ():
        if view.value(key) != plain:
            yield _beside(view, LORA_FULL_PRECISION.id, key, plain)


def lora_at_once(view: View) -> Iterator[RuleViolation]:
    """Check that rows are not asked to travel in chunks beside products."""
    if has_lora(view) and view.word("mesh.tp_overlap") not in ("none", "auto"):
        yield _beside(view, LORA_OVERLAP.id, "mesh.tp_overlap", "none")


def lora_sums_gradients(view: View) -> Iterator[RuleViolation]:
    """Check that no replicas exchange parameters."""
    for key, plain in REPLICAS if has_lora(view) else ():
        if view.value(key) != plain:
            yield _beside(view, LORA_REPLICAS.id, key, plain)


def lora_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Find settings of adapters where there are none."""
    if not has_lora(view):
        for key in (ALPHA_KEY, TARGETS_KEY, RSLORA_KEY, DROPOUT_KEY, "train.adapters"):
            yield from setting_without_effect(view, key, f"{OFF}, and all weights are trained")


def _beside(view: View, rule: str, key: str, plain: object) -> RuleViolation:
    value = toml_text(view.value(key))
    return RuleViolation(
        rule=rule,
        key=key,
        message=f"{key} = {value} with {RANK_KEY} = {view.integer(RANK_KEY)}",
        set_by=(key, RANK_KEY),
        suggestions=(f"{key} = {toml_text(plain)}", OFF),
    )


LORA_FINDERS = (
    lora_names_layers,
    lora_has_layers,
    lora_in_full_precision,
    lora_at_once,
    lora_sums_gradients,
)
"""Rules without which ranks could not train adapters."""

LORA_RUN_FINDERS = (lora_drops_nothing, lora_settings_without_effect)
"""Rules about what a plan does not say, and about settings without effect."""
