# SPDX-License-Identifier: Apache-2.0
"""Rules of the parts of a block (rotations, factors, norms), and of kernels for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from echelon.config.cluster.settings import cluster_of
from echelon.config.derived.kernels import (
    FUSED_KEY,
    PROVIDER_KEY,
    kernel_provider,
    missing_pieces,
)
from echelon.config.rules.violations import RuleViolation, setting_without_effect
from echelon.config.view import View
from echelon.core.rulebook.config import NO_EFFECT
from echelon.core.rulebook.model import (
    BLOCK_FORMS_COMPOSE,
    FACTOR_WITHOUT_DROPOUT,
    HEADS_TURN,
    RESIDUAL_NEEDS_NORM,
    TRITON_NEEDS_GPU,
    TURNS_NEED_ROTARY,
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


BLOCK_FINDERS = (
    turns_need_rotary,
    heads_turn,
    factor_without_dropout,
    block_forms_compose,
)


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
