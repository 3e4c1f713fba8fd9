# SPDX-License-Identifier: Apache-2.0
"""When adapters can be trained over a frozen model: which layers, and beside what."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.derived.experts import has_experts
from echelon.config.model.settings import (
    ALPHA_KEY,
    DROPOUT_KEY,
    RANK_KEY,
    RSLORA_KEY,
    TARGETS_KEY,
    has_lora,
    lora_linears,
    lora_targets,
)
from echelon.config.rules.violations import RuleViolation, setting_without_effect
from echelon.config.view import View
from echelon.core.choices.lora import ALL_LINEAR, MLP_LINEARS
from echelon.core.rulebook.weights import (
    LORA_DROPOUT,
    LORA_FULL_PRECISION,
    LORA_MODEL,
    LORA_OVERLAP,
    LORA_REPLICAS,
    LORA_TARGETS,
)
from echelon.core.settings.value_types import toml_text

OFF = f'{RANK_KEY} = "none"'
WHOLE: tuple[tuple[str, object], ...] = (
    ("precision.matmul", "parameters"),
    ("zero.gather", "parameters"),
)
"""Settings that put weights or products into 8 bits, with what they are without."""

REPLICAS: tuple[tuple[str, object], ...] = (
    ("local_sgd.every", 0),
    ("servers.count", 0),
)
"""Settings that make replicas exchange parameters, with what they are without."""


def lora_names_layers(view: View) -> Iterator[RuleViolation]:
    """Check that every target is a layer of the model."""
    if not has_lora(view):
        return
    there, asked = lora_linears(view), lora_targets(view)
    absent = [name for name in asked if name not in there]
    if absent:
        others = [name for name in asked if name in there]
        latent = "latent attention" if view.has_table("model.latent") else "grouped-query attention"
        why = f"the MLP of {view.model_name} has none"
        if absent != ["gate"]:
            why = f"{view.model_name} has {latent}, whose blocks have {', '.join(there)}"
        yield RuleViolation(
            rule=LORA_TARGETS,
            key=TARGETS_KEY,
            message=f"{TARGETS_KEY} has {', '.join(absent)}, but {why}",
            set_by=(TARGETS_KEY, "model.gated"),
            suggestions=(
                *([{TARGETS_KEY: others}] if others else []),
                {TARGETS_KEY: ALL_LINEAR},
            ),
        )


def lora_has_layers(view: View) -> Iterator[RuleViolation]:
    """Check that a mixture of experts has adapters beside its attention alone."""
    if not has_lora(view) or not has_experts(view):
        return
    asked = [name for name in lora_targets(view) if name in MLP_LINEARS]
    if asked:
        others = [name for name in lora_linears(view) if name not in MLP_LINEARS]
        yield RuleViolation(
            rule=LORA_MODEL,
            key=TARGETS_KEY,
            message=f"{TARGETS_KEY} = {toml_text(view.value(TARGETS_KEY))} has {', '.join(asked)}, "
            f"but {view.model_name} has experts",
            set_by=(TARGETS_KEY, RANK_KEY, "model.experts.num_experts"),
            suggestions=({TARGETS_KEY: others}, OFF),
        )


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
