# SPDX-License-Identifier: Apache-2.0
"""Rules of the parts of a block (rotations, factors, norms), of adapters, and of kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from echelon.config.cluster.settings import cluster_of
from echelon.config.derived.experts import has_experts
from echelon.config.derived.kernels import FUSED_KEY, PROVIDER_KEY, kernel_provider, missing_pieces
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
from echelon.config.rules.violations import (
    RuleViolation,
    setting_without_effect,
    settings_excluding,
)
from echelon.config.view import View
from echelon.core.choices.lora import ALL_LINEAR, MLP_LINEARS
from echelon.core.rulebook.config import NO_EFFECT
from echelon.core.rulebook.model import (
    BLOCK_FORMS_COMPOSE,
    FACTOR_WITHOUT_DROPOUT,
    HEADS_TURN,
    RESIDUAL_NEEDS_NORM,
    TRITON_NEEDS_GPU,
    TURNS_NEED_ROTARY,
)
from echelon.core.rulebook.weights import (
    LORA_DROPOUT,
    LORA_FULL_PRECISION,
    LORA_MODEL,
    LORA_OVERLAP,
    LORA_REPLICAS,
    LORA_TARGETS,
)
from echelon.core.settings.value_types import toml_text

FRACTION_KEY = "model.rotary.fraction"
PLACE_KEY, RESIDUAL_KEY = "model.norm_place", "model.residual"
_OF_TURNS = (FRACTION_KEY, "model.rotary.interleaved", "model.rotary.none_every")
_FACTORS = ("model.multipliers.residual", "model.multipliers.embedding")


def turns_need_rotary(view: View) -> Iterator[RuleViolation]:
    """Find settings of turns where nothing turns, or other dims do."""
    latent = view.has_table("model.latent")
    if view.word("model.positions") == "rope" and not latent:
        return
    why = "the model has latent attention" if latent else 'model.positions = "learned"'
    for key in _OF_TURNS:
        if not view.is_default(key):
            default = view.settings[key].default
            yield RuleViolation(
                rule=TURNS_NEED_ROTARY,
                key=key,
                message=f"{key} is set, but {why}",
                set_by=(key, "model.positions"),
                suggestions=({key: default},),
            )


def heads_turn(view: View) -> Iterator[RuleViolation]:
    """Find a part of a head without a pair of dims."""
    fraction, width = view.number(FRACTION_KEY), view.integer("model.head_dim")
    if view.word("model.positions") == "rope" and int(width * fraction) < 2:
        yield RuleViolation(
            rule=HEADS_TURN,
            key=FRACTION_KEY,
            message=f"{FRACTION_KEY} = {fraction:g}, but model.head_dim = {width}: {width} x "
            f"{fraction:g} = {width * fraction:g}, which is no pair of dims",
            set_by=(FRACTION_KEY, "model.head_dim"),
            suggestions=({FRACTION_KEY: 2 / width}, {FRACTION_KEY: 1.0}),
        )


def factor_without_dropout(view: View) -> Iterator[RuleViolation]:
    """Find branches that are multiplied and dropped in part."""
    if view.number("model.dropout") == 0.0:
        return
    for key in _FACTORS:
        if view.number(key) != 1.0:
            yield RuleViolation(
                rule=FACTOR_WITHOUT_DROPOUT,
                key=key,
                message=f"{key} = {view.number(key):g} with model.dropout = "
                f"{view.number('model.dropout'):g}",
                set_by=(key, "model.dropout"),
                suggestions=({"model.dropout": 0.0}, {key: 1.0}),
            )


def block_forms_compose(view: View) -> Iterator[RuleViolation]:
    """Find forms of blocks with parts that they are not built with."""
    place, residual = view.word(PLACE_KEY), view.word(RESIDUAL_KEY)
    for key, value, default in (
        (PLACE_KEY, place, "before"),
        (RESIDUAL_KEY, residual, "sequential"),
    ):
        if value == default:
            continue
        beside = {
            "experts": view.has_table("model.experts"),
            "latent attention": view.has_table("model.latent"),
            f"model.dropout = {view.number('model.dropout'):g}": view.number("model.dropout") > 0.0,
            f'model.norm_place = "{place}"': key == RESIDUAL_KEY and place != "before",
            'precision.matmul = "fp8"': view.word("precision.matmul") == "fp8",
        }
        for what in (name for name, there in beside.items() if there):
            yield RuleViolation(
                rule=BLOCK_FORMS_COMPOSE,
                key=key,
                message=f'{key} = "{value}" is not built with {what}',
                suggestions=({key: default},),
            )


BLOCK_FINDERS = (turns_need_rotary, heads_turn, factor_without_dropout, block_forms_compose)


def triton_needs_gpu(view: View) -> Iterator[RuleViolation]:
    """Check that kernels for GPUs are asked of GPUs."""
    cluster = cluster_of(view)
    if view.word(PROVIDER_KEY) == "triton" and cluster.backend == "gloo":
        yield RuleViolation(
            rule=TRITON_NEEDS_GPU,
            key=PROVIDER_KEY,
            message=f'{PROVIDER_KEY} = "triton", but the devices of {cluster.name} are processors',
            set_by=(PROVIDER_KEY, "cluster.preset"),
            suggestions=(f'{PROVIDER_KEY} = "plain"', f'{PROVIDER_KEY} = "compiled"'),
        )


def fused_pieces(view: View) -> Iterator[RuleViolation]:
    """Yield pieces that nothing fuses, that the model does not have, or that need another."""
    provider, _ = kernel_provider(view, cluster_of(view))
    value = view.value(FUSED_KEY)
    if provider == "plain":
        because = f'{PROVIDER_KEY} = "plain" fuses nothing'
        compiled = f'{PROVIDER_KEY} = "compiled"'
        yield from setting_without_effect(view, FUSED_KEY, because, compiled, allowed=([], ()))
        return
    if value == "auto":
        return
    pieces = cast("Sequence[str]", value)
    auto, missing = f'{FUSED_KEY} = "auto"', missing_pieces(view, provider)
    if not pieces:
        message = f'{PROVIDER_KEY} = "{provider}" changes nothing: {FUSED_KEY} = [] names no piece'
        yield RuleViolation(rule=NO_EFFECT, key=FUSED_KEY, message=message, suggestions=(auto,))
    for piece, why in missing.items():
        if piece in pieces:
            rest = [one for one in pieces if one not in missing]
            yield RuleViolation(
                rule=NO_EFFECT,
                key=FUSED_KEY,
                message=f"{FUSED_KEY} has {toml_text(piece)}, which changes nothing: {why}",
                suggestions=(*([f"{FUSED_KEY} = {toml_text(rest)}"] if rest else []), auto),
            )
    if "residual" in pieces and "norm" not in pieces and "residual" not in missing:
        rest = [one for one in pieces if one != "residual"]
        ways = [["norm", *pieces], *([rest] if rest else [])]
        yield RuleViolation(
            rule=RESIDUAL_NEEDS_NORM,
            key=FUSED_KEY,
            message=f'{FUSED_KEY} = {toml_text(pieces)} has "residual" without "norm"',
            suggestions=tuple(f"{FUSED_KEY} = {toml_text(way)}" for way in ways),
        )


KERNEL_FINDERS = (triton_needs_gpu, fused_pieces)


OFF = f'{RANK_KEY} = "none"'
WHOLE: tuple[tuple[str, object], ...] = (
    ("precision.matmul", "parameters"),
    ("zero.gather", "parameters"),
)
"""Settings that put weights or products into 8 bits, with what they are without."""

REPLICAS: tuple[tuple[str, object], ...] = (("local_sgd.every", 0), ("servers.count", 0))
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
            suggestions=(*([{TARGETS_KEY: others}] if others else []), {TARGETS_KEY: ALL_LINEAR}),
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
            ways = f"{key} = {toml_text(plain)}", OFF
            yield settings_excluding(view, LORA_FULL_PRECISION, key, RANK_KEY, *ways)


def lora_at_once(view: View) -> Iterator[RuleViolation]:
    """Check that rows are not asked to travel in chunks beside products."""
    key = "mesh.tp_overlap"
    if has_lora(view) and view.word(key) not in ("none", "auto"):
        yield settings_excluding(view, LORA_OVERLAP, key, RANK_KEY, f'{key} = "none"', OFF)


def lora_sums_gradients(view: View) -> Iterator[RuleViolation]:
    """Check that no replicas exchange parameters."""
    for key, plain in REPLICAS if has_lora(view) else ():
        if view.value(key) != plain:
            ways = f"{key} = {toml_text(plain)}", OFF
            yield settings_excluding(view, LORA_REPLICAS, key, RANK_KEY, *ways)


def lora_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Find settings of adapters where there are none."""
    if not has_lora(view):
        for key in (ALPHA_KEY, TARGETS_KEY, RSLORA_KEY, DROPOUT_KEY, "train.adapters"):
            yield from setting_without_effect(view, key, f"{OFF}, and all weights are trained")


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
