"""The optimizer replayed on the gradients that the ranks hold: as sharp as the master dtype.

In the plan's own precision a gradient is rough, and Muon's orthogonalisation magnifies what is
rough, up to 500 times in directions of small singular value. So beside the comparison with the
oracle, whose tolerance must allow for that, each update is compared with what the formula makes of
the ranks' own gradients and of the values before the step, in float64.

The formula is run in the master dtype too: its error against itself in float64 says what that dtype
is worth, and the tolerance follows from it as in `prove/tolerance.py`. What a plan adds is the
order of the optimizer's few operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from echelon.core.parameters import parameters
from echelon.prove.checks import Check, Evidence, relative_error
from echelon.prove.formulas import clip_scale, global_norm, learning_rate
from echelon.prove.optimizers import State, Update, update
from echelon.prove.oracle import TORCH_DTYPES
from echelon.prove.ranks import INITIAL
from echelon.prove.tolerance import FLOOR, Draw, Tolerance, measured, tensor_errors, unit_roundoff
from echelon.prove.value_checks import length_of_all

NUM_OPERATIONS = 16
"""Roundings from a gradient to a value in the longest rule, AdamW's, in whatever order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Hold the updates of one step, by name, and what they add in the arithmetic of a dtype."""

    step: int
    updates: Mapping[str, Update]
    added: Mapping[str, torch.Tensor]


def replayed_updates(evidence: Evidence) -> Iterator[Check]:
    """Compare each update with the formula's; nothing in float64, where the oracle says it all."""
    precision = evidence.plan.mathematics.precision
    told = evidence.observed.tells_masters or not precision.has_master
    if not evidence.tolerance.own_precision or not told or _overflows(evidence):
        return
    exact = replay(evidence, torch.float64)
    rough = replay(evidence, TORCH_DTYPES[precision.master])
    tolerance = _tolerance(exact, rough, NUM_OPERATIONS * unit_roundoff(precision.master))
    for one in exact:
        floor = FLOOR * length_of_all(one.added)
        for position, (name, added) in enumerate(one.added.items()):
            yield Check(
                step=one.step,
                subject=name,
                error=relative_error(evidence.observed.update(one.step, name), added, floor),
                allowed=tolerance.allowed("updates", one.step, name),
                position=position,
            )


def replay(evidence: Evidence, dtype: torch.dtype) -> tuple[Replay, ...]:
    """Return what the formula makes of the ranks' gradients, in the steps that were taken."""
    observed, optimizer = evidence.observed, evidence.plan.mathematics.optimizer
    specs = {spec.name: spec for spec in parameters(evidence.plan.model)}
    states = {name: State() for name in specs}
    steps: list[Replay] = []
    for oracle in evidence.oracle:
        if oracle.skipped:
            continue
        step = oracle.step
        gradients = {name: observed.whole("gradients", step, name) for name in specs}
        clip = clip_scale(global_norm(gradients), optimizer.clip_norm)
        rate = learning_rate(optimizer, step)
        updates: dict[str, Update] = {}
        added: dict[str, torch.Tensor] = {}
        for name, spec in specs.items():
            kind, before = observed.values_kind, step - 1 if step else INITIAL
            value = observed.whole(kind, before, name).to(dtype)
            gradient = gradients[name].to(dtype) * clip
            updates[name] = update(spec, value, gradient, states[name], optimizer, rate)
            added[name] = (value + updates[name].total).double() - value.double()
        steps.append(Replay(step=step, updates=updates, added=added))
    return tuple(steps)


def _tolerance(exact: tuple[Replay, ...], rough: tuple[Replay, ...], flat: float) -> Tolerance:
    errors: dict[tuple[str, int, str], Draw] = {}
    for one, other in zip(exact, rough, strict=True):
        errors.update(tensor_errors("updates", one.step, one.added, other.added))
    return measured([errors], flat, {})


def _overflows(evidence: Evidence) -> bool:
    """Return whether a rank took other steps than one device, which another claim tells."""
    return any(
        report.skipped not in (None, oracle.skipped)
        for oracle in evidence.oracle
        for report in evidence.observed.reports(oracle.step)
    )
