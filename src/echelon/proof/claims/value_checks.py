# SPDX-License-Identifier: Apache-2.0
"""The comparisons of whole tensors: gradients, updates, values, and what is rounded from them.

In the plan's own precision a gradient is rough, and Muon's orthogonalisation magnifies what is
rough, up to 500 times in directions of small singular value. So beside the comparison with the
oracle, whose tolerance must allow for that, each update is compared with what the formula makes of
the ranks' own gradients and of the values before the step, in float64: as sharp as the master
dtype. The formula is run in that dtype too: its error against itself in float64 says what the dtype
is worth, and the tolerance follows from it as in `proof/claims/tolerance.py`. What a plan adds is
the order of the optimizer's few operations.

A direction in which a gradient is zero by mathematics has rounding alone in it, in one kernel more
than in another, and Muon magnifies that too. Where an update of Muon is off by more than the
tolerance, what the formula makes of the ranks' own gradients may be as far off: those gradients,
and that the update is the formula's, are claims of their own. A vector of few elements that moves
little is off by the rounding of its values, which is bounded and not drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import torch

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.choices.registry import load_reference
from echelon.core.choices.step_parts import STEP_PARTS
from echelon.layout.stage import update_rule_of
from echelon.proof.claims.checks import Check, Evidence, exact_check, relative_error, tensor_error
from echelon.proof.claims.tolerance import (
    FLOOR,
    ErrorSample,
    measured,
    tensor_errors,
    unit_roundoff,
)
from echelon.proof.oracle.optimizers import (
    OptimizerState,
    clip_scale,
    global_norm,
    learning_rate,
    update,
)
from echelon.proof.oracle.oracle import TORCH_DTYPES
from echelon.proof.ranks import INITIAL


def gradients(evidence: Evidence) -> Iterator[Check]:
    """Compare every gradient, from the last parameter to the first, as backward makes them.

    Gradients that overflowed are not numbers to compare; that the step was skipped is a claim of
    its own.
    """
    for oracle in evidence.oracle:
        if not oracle.skipped:
            yield from _tensor_checks(
                evidence, "gradients", oracle.step, oracle.gradients, backward=True
            )


def updates(evidence: Evidence) -> Iterator[Check]:
    """Compare what each step added to every value that the optimizer keeps."""
    replayed: ReplayedSteps | None = None
    for oracle in evidence.oracle:
        updates = {name: one.total for name, one in oracle.updates.items()}
        floor = FLOOR * global_norm(updates)
        for position, (name, added) in enumerate(updates.items()):
            error = relative_error(evidence.observed.update(oracle.step, name), added, floor)
            allowed, detail = evidence.tolerance.allowed("updates", oracle.step, name), ""
            if oracle.skipped:
                allowed, detail = 0.0, "changed in a step that is skipped"
            elif (
                not error <= allowed
                and _may_replay(evidence)
                and _is_whole(evidence, name)
                and name not in evidence.changed_outside(oracle.step)
            ):
                replayed = replay(evidence, torch.float64) if replayed is None else replayed
                allowed += relative_error(replayed[oracle.step][name], added, floor)
            if not oracle.skipped and not error <= allowed:
                allowed += _rounding_of_value(evidence, oracle.step, name, added, floor)
            yield Check(oracle.step, name, error, allowed=allowed, detail=detail, position=position)


def parameters(evidence: Evidence) -> Iterator[Check]:
    """Compare parameters after the last step, their master copies, and values of step parts."""
    last = evidence.oracle[-1]
    if evidence.observed.has_masters:
        yield from _tensor_checks(evidence, "masters", last.step, last.after)
    yield from _tensor_checks(evidence, "parameters", last.step, last.after)
    for kind, values in _of_parts(evidence).items():
        yield from _tensor_checks(evidence, kind, last.step, values, like="masters")


def _of_parts(evidence: Evidence) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Return what step parts keep after the last step, by kind and name."""
    steps = evidence.oracle
    values = [steps[0].before, *(one.after for one in steps)]
    oracles = [record.oracle for record in STEP_PARTS.values() if record.oracle]
    kept = [load_reference(oracle)(evidence.plan, values) for oracle in oracles]
    return {kind: tensors for kinds in kept for kind, tensors in kinds.items()}


def written_back(evidence: Evidence) -> Iterator[Check]:
    """Compare every parameter with the rounding of its master copy, bit for bit."""
    observed = evidence.observed
    if not observed.has_masters:
        return
    dtype = TORCH_DTYPES[evidence.plan.mathematics.precision.parameters]
    steps = (INITIAL, *(oracle.step for oracle in evidence.oracle))
    for step, (position, name) in product(steps, enumerate(observed.specs)):
        master = observed.whole("masters", step, name).to(dtype)
        odd = {
            piece.rank
            for piece in observed.shards("parameters", step, name)
            if not observed.fits(piece) or not torch.equal(piece.tensor, master[piece.region])
        }
        problem = f"on ranks {sorted(odd)} it is not the rounding of its master copy" * bool(odd)
        yield exact_check(step, name, problem, position)


def replicas(evidence: Evidence) -> Iterator[Check]:
    """Compare every copy of a value with that of its primary holder, bit for bit."""
    observed = evidence.observed
    names = list(enumerate(observed.specs))
    kinds = (*observed.value_kinds, *_of_parts(evidence))
    for oracle, kind, (position, name) in product(evidence.oracle, kinds, names):
        whole = observed.whole(kind, oracle.step, name)
        odd = {
            piece.rank
            for piece in observed.shards(kind, oracle.step, name)
            if not observed.fits(piece)
            or not torch.equal(piece.tensor.double(), whole[piece.region])
        }
        problem = f"ranks {sorted(odd)} differ from the primary holder" * bool(odd)
        yield exact_check(oracle.step, name, problem, position)


_DETAILS = {"masters": "the master copy"}
"""How the details of a comparison name a kind of values."""


def _tensor_checks(
    evidence: Evidence,
    kind: str,
    step: int,
    oracle: Mapping[str, torch.Tensor],
    *,
    backward: bool = False,
    like: str = "",
) -> Iterator[Check]:
    """Compare the tensors of a kind, as closely as those of the kind `like`."""
    total = global_norm(oracle)
    names = list(oracle)
    for position, name in enumerate(reversed(names) if backward else names):
        scale = max(float(oracle[name].double().norm()), FLOOR * total)
        error = tensor_error(evidence.observed, kind, step, name, oracle[name])
        yield Check(
            step,
            name,
            error / scale if scale else error,
            allowed=evidence.tolerance.allowed(like or kind, step, name),
            detail=_DETAILS.get(kind, kind if like else ""),
            position=position,
        )


def loss_scale(evidence: Evidence) -> Iterator[Check]:
    """Compare the loss scale of each step, and whether it was skipped, rank by rank."""
    did = {True: "skipped the step", False: "took the step"}
    for oracle, rank, report in evidence.reports():
        if report.skipped is not None:
            wrong = report.skipped != oracle.skipped
            problem = f"{did[report.skipped]}; one device {did[oracle.skipped]}" * wrong
            yield exact_check(oracle.step, f"decision of rank {rank}", problem, rank)
        if report.loss_scale is not None:
            error = abs(report.loss_scale - oracle.loss_scale) / oracle.loss_scale
            detail = f"{report.loss_scale:.10g} instead of {oracle.loss_scale:.10g}"
            subject = f"loss scale of rank {rank}"
            yield Check(oracle.step, subject, error, detail=detail, position=rank)


NUM_OPERATIONS = 16
"""Roundings from a gradient to a value in the longest rule, AdamW's, in whatever order."""


ReplayedSteps = Mapping[int, Mapping[str, torch.Tensor]]
"""What the updates of each step that was taken add to each value, float64."""


def replayed_updates(evidence: Evidence) -> Iterator[Check]:
    """Compare each update with the formula's; nothing in float64, where the oracle says it all."""
    if not _may_replay(evidence):
        return
    precision = evidence.plan.mathematics.precision
    exact = replay(evidence, torch.float64)
    rough = replay(evidence, TORCH_DTYPES[precision.master])
    errors: dict[tuple[str, int, str], ErrorSample] = {}
    for step, added in exact.items():
        errors.update(tensor_errors("updates", step, added, rough[step]))
    tolerance = measured([errors], NUM_OPERATIONS * unit_roundoff(precision.master), {})
    for step, updates in exact.items():
        floor = FLOOR * global_norm(updates)
        for position, (name, added) in enumerate(updates.items()):
            if name in evidence.changed_outside(step):
                continue
            error = relative_error(evidence.observed.update(step, name), added, floor)
            allowed = tolerance.allowed("updates", step, name)
            if not error <= allowed:
                allowed += _rounding_of_value(evidence, step, name, added, floor)
            yield Check(step, name, error, allowed=allowed, position=position)


def replay(evidence: Evidence, dtype: torch.dtype) -> ReplayedSteps:
    """Return what the formula makes of the ranks' gradients, in the arithmetic of `dtype`."""
    observed, optimizer = evidence.observed, evidence.plan.mathematics.optimizer
    specs = observed.trained
    states = {name: OptimizerState() for name in specs}
    steps: dict[int, dict[str, torch.Tensor]] = {}
    for oracle in evidence.oracle:
        if oracle.skipped:
            continue
        step = oracle.step
        gradients = {name: observed.whole("gradients", step, name) for name in specs}
        clip = clip_scale(global_norm(gradients), optimizer.clip_norm)
        rate = learning_rate(optimizer, step)
        added: dict[str, torch.Tensor] = {}
        for name, spec in specs.items():
            kind, before = observed.values_kind, step - 1 if step else INITIAL
            value = observed.whole(kind, before, name).to(dtype)
            gradient = gradients[name].to(dtype) * clip
            one = update(spec, value, gradient, states[name], optimizer, rate)
            added[name] = (value + one.total).double() - value.double()
        steps[step] = added
    return steps


def _rounding_of_value(
    evidence: Evidence, step: int, name: str, added: torch.Tensor, floor: float
) -> float:
    """Return the most that rounding a value may change of what was added to it; 0 in float64.

    An update is seen as a difference of values, and each element of the later one is rounded once.
    A vector of few elements may have drawn less on one device.
    """
    if not evidence.tolerance.own_precision:
        return 0.0
    observed, precision = evidence.observed, evidence.plan.mathematics.precision
    dtype = precision.master if observed.has_masters else precision.parameters
    value = observed.whole(observed.values_kind, step, name)
    return unit_roundoff(dtype) * float(value.norm()) / max(float(added.norm()), floor)


def _may_replay(evidence: Evidence) -> bool:
    """Return whether the ranks told all that the formula needs, in a precision that is rough."""
    told = evidence.observed.has_masters or not evidence.plan.mathematics.precision.has_master
    return evidence.tolerance.own_precision and told and not _overflows(evidence)


def _is_whole(evidence: Evidence, name: str) -> bool:
    """Return whether the rule of a value needs its whole matrix, as Muon's does."""
    rule = update_rule_of(evidence.plan.mathematics.optimizer, evidence.observed.specs[name])
    return OPTIMIZERS[rule].needs_whole_matrices


def _overflows(evidence: Evidence) -> bool:
    """Return whether a rank took other steps than one device, which another claim tells."""
    return any(
        report.skipped not in (None, oracle.skipped) for oracle, _, report in evidence.reports()
    )
