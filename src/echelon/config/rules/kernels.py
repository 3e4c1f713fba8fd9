# SPDX-License-Identifier: Apache-2.0
"""Which kernels a run can have: on its devices, and of what its model has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from echelon.config.cluster.settings import cluster_of
from echelon.config.rules.violations import RuleViolation, setting_without_effect
from echelon.config.settings.kernels import (
    FUSED_KEY,
    PROVIDER_KEY,
    kernel_provider,
    missing_pieces,
)
from echelon.config.settings.value_types import toml_text
from echelon.config.view import View
from echelon.core.rulebook.config import NO_EFFECT
from echelon.core.rulebook.model import RESIDUAL_NEEDS_NORM, TRITON_NEEDS_GPU


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
