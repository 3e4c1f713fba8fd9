# SPDX-License-Identifier: Apache-2.0
"""The oracle's decoder beside the same model of transformers: every token's loss, every gradient.

Both have the oracle's weights before a step and its global batch; the gradients are those of the
mean loss over the counted tokens, without what routers add. The first and the last step are taken.

Shape suffixes: B sequences, T positions, N = T * B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from echelon.core.parameters import base_shape
from echelon.core.plan import Plan
from echelon.models.batch import IGNORED_LABEL
from echelon.proof.claims.checks import Check, relative_error
from echelon.proof.evidence.fits import FLOOR
from echelon.proof.evidence.tolerance import FLOAT64_TOLERANCE
from echelon.proof.independent import attention, decoder, mixture
from echelon.proof.independent.hugging_face.configuration import transformers_model
from echelon.proof.independent.hugging_face.model import (
    ATTENTION_NORM,
    ATTENTION_PART,
    EMBEDDING_PART,
    HEAD_PART,
    MLP_NORM,
    LossAndGradients,
    TokensAndLabels,
    adapter_gradients,
    build,
    give_weights,
    loss_and_gradients,
    merged,
    missing,
)
from echelon.proof.independent.optimizers import norm_of
from echelon.proof.independent.parts import (
    LOSS,
    SAME,
    DifferentPart,
    NotingOperations,
    relative_difference,
)
from echelon.proof.independent.sequence import HEAD_UNIT, PartKey
from echelon.proof.independent.weights import has_experts
from echelon.proof.oracle.oracle import OracleStep, build_decoder, token_losses
from echelon.proof.subject import ProofBatch


def class_beside(plan: Plan) -> str:
    """Return the class of transformers that a plan's model is compared with; empty for none."""
    found = transformers_model(plan)
    return "" if missing() or isinstance(found, str) else found.model_class


def why_not_beside(plan: Plan) -> str:
    """Return why a plan's model is not compared with transformers; empty where it is."""
    found = transformers_model(plan)
    reason = missing() or (found if isinstance(found, str) else "")
    return reason and f"not compared with transformers: {reason}"


def transformers_checks(
    plan: Plan, steps: Sequence[OracleStep], batches: Sequence[ProofBatch]
) -> Iterator[Check]:
    """Compare losses and gradients of the first and the last step; nothing without a class."""
    if not class_beside(plan):
        return
    model = _built(plan)
    for number in sorted({0, len(steps) - 1}):
        theirs = _theirs(model, plan, steps[number], batches[number])
        yield from _step_checks(plan, steps[number], batches[number], theirs)


def _step_checks(
    plan: Plan, step: OracleStep, batch: ProofBatch, theirs: LossAndGradients
) -> Iterator[Check]:
    model = build_decoder(plan, step.before, routing=step.routing, rounding=step.rounding)
    losses_BT = token_losses(plan, model, batch, step.step)
    for row, sample in enumerate(batch.sample_ids):
        error = relative_error(losses_BT[row].detach(), theirs.losses_BT[row], 0.0)
        subject = f"token losses of sample {sample}"
        yield Check(step.step, subject, error, allowed=FLOAT64_TOLERANCE, position=row)
    (losses_BT.sum() / int((batch.labels_BT != IGNORED_LABEL).sum())).backward()
    own = dict(model.named_parameters())
    floor = FLOOR * norm_of(theirs.gradients)
    for position, name in enumerate(reversed(list(theirs.gradients)), start=len(losses_BT)):
        right, found = theirs.gradients[name], own[name].grad
        error = relative_error(torch.zeros_like(right) if found is None else found, right, floor)
        yield Check(step.step, name, error, allowed=FLOAT64_TOLERANCE, position=position)


def first_part_unlike_transformers(
    plan: Plan, step: OracleStep, batch: ProofBatch
) -> DifferentPart | None:
    """Return the first part of a forward pass that the shared code computes otherwise."""
    theirs = _theirs(_built(plan), plan, step, batch)
    noting = NotingOperations()
    model = build_decoder(plan, step.before, noting, routing=step.routing, rounding=step.rounding)
    with torch.no_grad():
        losses_BT = token_losses(plan, model, batch, step.step)
    num_sequences = len(batch.sample_ids)
    for (unit, part), right in theirs.parts.items():
        noted = noting.parts[_noted_key(plan, noting, unit, part)]
        found = noted.reshape(-1, num_sequences, right.shape[-1]).transpose(0, 1)
        error = relative_difference(found, right)
        if not error <= SAME:
            says = f"off by {error:.2g} beside transformers; all before it agrees"
            return DifferentPart(part, unit, says)
    error = relative_difference(losses_BT, theirs.losses_BT)
    if not error <= SAME:
        return DifferentPart(LOSS, HEAD_UNIT, f"off by {error:.2g} beside transformers")
    return None


def _noted_key(plan: Plan, noting: NotingOperations, unit: str, part: str) -> PartKey:
    """Return under which key the shared code notes a part of transformers."""
    if part == EMBEDDING_PART:
        return unit, decoder.EMBEDDING, 0
    if part == HEAD_PART:
        return HEAD_UNIT, decoder.HEAD, 0
    if part == ATTENTION_NORM:
        return unit, attention.NORM, 0
    if part == ATTENTION_PART:
        return unit, decoder.OUTPUT, 0
    if part != MLP_NORM and has_experts(plan.model, int(unit.removeprefix("layers."))):
        return unit, mixture.EXPERTS, 0
    kind = attention.NORM if part == MLP_NORM else decoder.OUTPUT
    return max(key for key in noting.parts if key[:2] == (unit, kind))


def _built(plan: Plan) -> Any:
    description = transformers_model(plan)
    assert not isinstance(description, str), description
    return build(description)


def _theirs(model: Any, plan: Plan, step: OracleStep, batch: ProofBatch) -> LossAndGradients:
    rows = TokensAndLabels(inputs_BT=batch.inputs_BT, labels_BT=batch.labels_BT)
    if plan.model.lora is None:
        give_weights(model, plan.model, step.before, step.routing.biases)
        return loss_and_gradients(model, plan.model, rows)
    shape = base_shape(plan.model)
    give_weights(model, shape, merged(plan.model, step.before), step.routing.biases)
    found = loss_and_gradients(model, shape, rows)
    return replace(found, gradients=adapter_gradients(plan.model, step.before, found.gradients))
