# SPDX-License-Identifier: Apache-2.0
"""What must hold of the parts of a block: of what turns, of factors, of where norms stand."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.rules.violations import RuleViolation
from echelon.config.view import View
from echelon.core.rulebook.model import (
    BLOCK_FORMS_COMPOSE,
    FACTOR_WITHOUT_DROPOUT,
    HEADS_TURN,
    TURNS_NEED_ROTARY,
)

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
