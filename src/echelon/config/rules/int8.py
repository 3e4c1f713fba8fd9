# SPDX-License-Identifier: Apache-2.0
"""When matrices can be gathered in int8: what is cut, how wide rows are, what else is rounded."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from echelon.config.rules.suggestions import MOST_NAMED, near_divisors
from echelon.config.rules.violations import RuleViolation, setting_without_effect
from echelon.config.settings.experts import (
    EXPERT_TP_KEY,
    FFN_KEY,
    STAGE_KEY,
    expert_stage,
    has_dense_layers,
    has_experts,
    shared_width,
)
from echelon.config.view import View
from echelon.core.rulebook.zero import (
    INT8_BLOCK_DIVIDES,
    INT8_GATHER_OF_ALL,
    INT8_GATHER_ROUNDS_ONCE,
)
from echelon.core.rules import nearest_divisors

GATHER_KEY, BLOCK_KEY, MATMUL_KEY = "zero.gather", "zero.int8_block", "precision.matmul"
KEEP_KEY, SEQUENCE_KEY, TP_KEY = "zero.keep_whole_below", "mesh.sequence_parallel", "mesh.tp"
PLAIN_GATHER = f'{GATHER_KEY} = "parameters"'
WHOLE_STAGE = 3
"""The stage of ZeRO that gathers matrices before each use."""
LARGEST_BLOCK = 256
"""Numbers of a block that is suggested, at most."""

RowWidth = tuple[str, int, str]
"""What a row is, its numbers in the model, and the axis that cuts it ("" for none)."""


def _is_int8(view: View) -> bool:
    return view.word(GATHER_KEY) == "int8"


def int8_block_divides(view: View) -> Iterator[RuleViolation]:
    """Check that no block of a row is cut by a layout, or short."""
    if not _is_int8(view):
        return
    block, widths = view.integer(BLOCK_KEY), list(_row_widths(view))
    degrees = {"": 1, TP_KEY: view.integer(TP_KEY), EXPERT_TP_KEY: view.integer(EXPERT_TP_KEY)}
    for what, width, axis in widths:
        degree = degrees[axis]
        if width % (degree * block) == 0:
            continue
        cut = f" / {axis} = {width} / {degree}" if axis else f" = {width}"
        common = gcd(*(width // degrees[one] for _, width, one in widths))
        works = [n for n in near_divisors(common, block) if 1 < n <= LARGEST_BLOCK]
        yield RuleViolation(
            rule=INT8_BLOCK_DIVIDES,
            key=BLOCK_KEY,
            message=f"rows of {what}{cut} are no multiple of {BLOCK_KEY} = {block}",
            set_by=tuple(key for key in (BLOCK_KEY, axis, GATHER_KEY) if key),
            suggestions=(
                *({BLOCK_KEY: n} for n in works[:MOST_NAMED]),
                *({axis: n} for n in nearest_divisors(width // block, degree) if axis),
                PLAIN_GATHER,
            ),
        )
        return


def _row_widths(view: View) -> Iterator[RowWidth]:
    """Yield how long rows of all matrices are that are gathered in int8."""
    heads, head_dim = view.integer("model.heads"), view.integer("model.head_dim")
    yield "hidden numbers", view.integer("model.hidden"), ""
    if view.has_table("model.latent"):
        for name in ("query_rank", "kv_rank"):
            if view.value(f"model.latent.{name}") != "none":
                yield f"latent.{name} numbers", view.integer(f"model.latent.{name}"), ""
        width = heads * view.integer("model.latent.value_dim")
        yield "heads x value_dim numbers", width, TP_KEY
    else:
        yield "heads x head_dim numbers", heads * head_dim, TP_KEY
    if has_dense_layers(view):
        yield "ffn numbers", view.integer("model.ffn"), TP_KEY
    if shared := shared_width(view):
        yield "shared_experts x experts.ffn numbers", shared, TP_KEY
    if has_experts(view):
        yield "experts.ffn numbers", view.integer(FFN_KEY), EXPERT_TP_KEY


def int8_gather_of_all(view: View) -> Iterator[RuleViolation]:
    """Check that every matrix that is rounded is gathered, so that no layout rounds others."""
    if not _is_int8(view):
        return
    stages = {"zero.stage": view.integer("zero.stage")}
    if has_experts(view):
        stages[STAGE_KEY] = expert_stage(view)[0]
    for key, stage in stages.items():
        if stage < WHOLE_STAGE:
            yield RuleViolation(
                rule=INT8_GATHER_OF_ALL,
                key=GATHER_KEY,
                message=f'{GATHER_KEY} = "int8", but {key} = {stage} keeps matrices whole, and '
                f"gathers none of them before use: {stage} < {WHOLE_STAGE}",
                set_by=(GATHER_KEY, key),
                suggestions=({key: WHOLE_STAGE}, PLAIN_GATHER),
            )
            return
    if (keep := view.integer(KEEP_KEY)) > 0:
        yield RuleViolation(
            rule=INT8_GATHER_OF_ALL,
            key=GATHER_KEY,
            message=f'{GATHER_KEY} = "int8" with {KEEP_KEY} = {keep}: matrices of fewer numbers '
            "would be whole, and not rounded",
            set_by=(GATHER_KEY, KEEP_KEY),
            suggestions=({KEEP_KEY: 0}, PLAIN_GATHER),
        )
    if view.has_table("model.latent") and view.flag(SEQUENCE_KEY) and view.integer(TP_KEY) > 1:
        yield RuleViolation(
            rule=INT8_GATHER_OF_ALL,
            key=GATHER_KEY,
            message=f'{GATHER_KEY} = "int8" with {SEQUENCE_KEY} = true: matrices that lead down to '
            f"latent vectors are whole on each of {view.integer(TP_KEY)} tensor ranks, and not cut",
            set_by=(GATHER_KEY, SEQUENCE_KEY),
            suggestions=({SEQUENCE_KEY: False}, PLAIN_GATHER),
        )


def int8_gather_rounds_once(view: View) -> Iterator[RuleViolation]:
    """Check that nothing else rounds the same matrices."""
    if _is_int8(view) and view.word(MATMUL_KEY) == "fp8":
        yield RuleViolation(
            rule=INT8_GATHER_ROUNDS_ONCE,
            key=GATHER_KEY,
            message=f'{GATHER_KEY} = "int8" with {MATMUL_KEY} = "fp8": weights would be rounded to '
            "integers, and then to floats of 8 bits",
            set_by=(GATHER_KEY, MATMUL_KEY),
            suggestions=(
                {GATHER_KEY: "fp8", BLOCK_KEY: 128},
                {MATMUL_KEY: "parameters"},
                PLAIN_GATHER,
            ),
        )


def int8_block_without_effect(view: View) -> Iterator[RuleViolation]:
    """Find a block where nothing is rounded to int8."""
    if not _is_int8(view):
        why = f'{GATHER_KEY} = "{view.word(GATHER_KEY)}" rounds nothing to int8'
        yield from setting_without_effect(view, BLOCK_KEY, why, f'{GATHER_KEY} = "int8"')


INT8_FINDERS = (int8_block_divides, int8_gather_of_all, int8_gather_rounds_once)
"""Rules without which ranks could not gather in int8, or would round otherwise than others."""
