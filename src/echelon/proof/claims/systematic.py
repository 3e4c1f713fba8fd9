# SPDX-License-Identifier: Apache-2.0
"""A factor told apart from rounding, in a precision whose own errors are as large.

Rounding errs to both sides, so over n elements its mean shrinks with the root of n; a factor of
1.02 in a path that only bf16 takes does not. In each step one device in the same precision begins
with the weights that the ranks have, so what they are off by, it is off by too. So each tensor is
fitted as

    what one device has in this precision + c x the right one + rounding,

and c must be 0 to within six standard errors (twelve, where few rows stand for it), four times the
c of that device where it rounds in another way, or not at all (in a gradient one token may outweigh
all others, and what its scalars are off by, all elements are off by), and the unit roundoff of
float32, in which scalars are computed, for each partial sum.

Ids that pad the vocabulary leave losses nearly right. What they would add to the gradient before
the head is known: it takes the place of the right one in another fit.

A sum that is rounded before it is float32 has few digits: its last bits are zeros. Products are
rounded to the parameters' dtype, microbatch by microbatch, and then added up: the sum of M numbers
of 8 digits has more than 8. So the digits of a gradient, on the mean over its elements, must not be
fewer than those of one device's, which adds up as many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as fn

from echelon.core.parameters import ROUTER
from echelon.models.decoder import FINAL_NORM
from echelon.models.operations import Operations
from echelon.proof.claims.checks import Check, copies_at, whole_activation
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.claims.tolerance import FACTORS, is_low, num_partial_sums, unit_roundoff
from echelon.proof.evidence.evidence import SAFETY_FACTOR
from echelon.proof.evidence.fits import FEW, NUM_STANDARD_ERRORS, FactorFit, fit_part, sizeable
from echelon.proof.evidence.run import INITIAL
from echelon.proof.oracle.oracle import (
    OracleStep,
    build_decoder,
    hearing,
    loss_of_tokens,
    step_from_values,
)

FLOAT32_DIGITS = 24
"""Binary digits of a float32."""

PADDING = "padding"
"""The kind of the fit of what padding ids add."""

_ATTRIBUTES = {
    "activations": "activations",
    "activation gradients": "activation_gradients",
    "gradients": "gradients",
}
"""Where a step has the tensors of a kind."""

_OF_VALUES = ("attention.v.weight", "attention.o.weight")
"""Weights of attention whose gradients are no gradients of scores."""

Compared = Iterator[tuple[str, str, torch.Tensor, torch.Tensor, torch.Tensor]]
"""Kind, name, observed, of one device in the same precision, right."""


class PaddedVocabulary(Operations):
    """Let `padding` ids that do not exist take part in the softmax, with logits of 0."""

    def __init__(self, padding: int) -> None:
        """Pad the vocabulary by `padding` ids."""
        self.padding = padding

    def logits(self, x_ND: torch.Tensor, weight_VD: nn.Parameter) -> torch.Tensor:
        """Return the logits and those of the padding."""
        return fn.pad(super().logits(x_ND, weight_VD), (0, self.padding))


class Draws:
    """One device in one step, begun with the ranks' weights, rounded in several ways when asked."""

    def __init__(self, evidence: PlanEvidence, step: int) -> None:
        """Hold the runs of a first step: all begin with the same weights there."""
        self._evidence, self._step = evidence, step
        self._made = dict(enumerate(run[0] for run in evidence.rounded)) if not step else {}

    def __len__(self) -> int:
        """Return the number of ways."""
        return len(self._evidence.rounded)

    def __getitem__(self, index: int) -> OracleStep:
        """Return the step in the ranks' precision, rounded in one way: as it is, in the first."""
        if index not in self._made:
            own = self._evidence.rounded[0][self._step]
            plan, factor = self._evidence.plan, FACTORS[index]
            self._made[index] = step_from_values(plan, own, self._values(), factor=factor)
        return self._made[index]

    def exact(self) -> OracleStep:
        """Return the step in float64."""
        evidence = self._evidence
        own = evidence.steps[self._step]
        return step_from_values(evidence.reference_plan, own, self._values())

    def _values(self) -> dict[str, torch.Tensor]:
        observed, before = self._evidence.run, self._step - 1 if self._step else INITIAL
        return {name: observed.whole("parameters", before, name) for name in observed.specs}


@dataclass(frozen=True, slots=True)
class SystematicFit:
    """Hold the factor that was fitted for one tensor of a step, and what it is judged by."""

    step: int
    kind: str
    name: str
    fit: FactorFit
    right: torch.Tensor
    draws: Draws = field(repr=False)

    @property
    def drawn(self) -> float:
        """Return the largest c of one device beside itself, rounded in another way or not at all.

        What the loss is multiplied by changes no forward pass.
        """
        if self.kind not in _ATTRIBUTES:
            return 0.0
        first = self._of(self.draws[0])
        others = [self.draws[i] for i in range(1, len(self.draws)) if self.kind != "activations"]
        fits = (
            fit_part(self._of(one) - first, self.right) for one in (*others, self.draws.exact())
        )
        found = [abs(fit.factor) for fit in fits if fit is not None and math.isfinite(fit.factor)]
        return max(found, default=0.0)

    def _of(self, step: OracleStep) -> torch.Tensor:
        return getattr(step, _ATTRIBUTES[self.kind])[self.name].double()


def systematic_errors(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare the factor of every activation and gradient with 1, where precision is low."""
    flat = num_partial_sums(evidence.plan) * unit_roundoff("fp32")
    for position, one in enumerate(fits(evidence)):
        error, allowed = abs(one.fit.factor), one.fit.by_chance + flat
        if not error <= allowed:
            allowed += SAFETY_FACTOR * one.drawn
        yield Check(
            one.step,
            one.name,
            error,
            allowed=allowed,
            detail=f"{one.kind}: {one.fit.factor:+.3g} +- {one.fit.error:.1g} times the right one",
            position=position,
        )


def fits(evidence: PlanEvidence) -> Iterator[SystematicFit]:
    """Yield the fit of each tensor, step by step."""
    if not evidence.rounded or not is_low(evidence.plan):
        return
    for right in evidence.steps[: len(evidence.rounded[0])]:
        draws = Draws(evidence, right.step)
        for kind, name, observed, rough, part in _compared(evidence, right, draws[0]):
            fit = fit_part(observed.double() - rough.double(), part)
            if fit is not None and math.isfinite(fit.factor):
                yield SystematicFit(right.step, kind, name, fit, part, draws)


def _compared(evidence: PlanEvidence, right: OracleStep, rough: OracleStep) -> Compared:
    for gradient, kind, ours, theirs in (
        (False, "activations", right.activations, rough.activations),
        (True, "activation gradients", right.activation_gradients, rough.activation_gradients),
    ):
        copies = copies_at(evidence.plan, evidence.run, right.step, gradient=gradient)
        for name, one in () if gradient and right.skipped else sizeable(ours):
            if name in copies:
                yield kind, name, whole_activation(copies[name], one), theirs[name], one
    if right.skipped or rough.skipped:
        return
    for name, one in reversed(list(sizeable(right.gradients))):
        seen = evidence.run.whole("gradients", right.step, name)
        yield "gradients", name, seen, rough.gradients[name], one
    yield from _padded(evidence, right, rough)


def _padded(evidence: PlanEvidence, right: OracleStep, rough: OracleStep) -> Compared:
    """Compare with what ids that pad the vocabulary would add before the head: no part of it."""
    plan = evidence.reference_plan
    copies = copies_at(plan, evidence.run, right.step, gradient=True).get(FINAL_NORM)
    padding = -plan.model.vocab % plan.mesh.tp
    if copies and padding:
        model = build_decoder(
            plan,
            right.before,
            PaddedVocabulary(padding),
            routing=right.routing,
            rounding=right.rounding,
        )
        with hearing(model) as heard:
            loss_of_tokens(plan, model, right).backward()
        ours = right.activation_gradients[FINAL_NORM]
        seen = whole_activation(copies, ours)
        added = heard.gradients[FINAL_NORM] - ours
        yield PADDING, "head", seen, rough.activation_gradients[FINAL_NORM], added


def sum_dtypes(evidence: PlanEvidence) -> Iterator[Check]:
    """Ask that gradients which are to be float32 sums have the digits of such."""
    precision = evidence.plan.mathematics.precision
    wide = precision.gradients == precision.reduction == "fp32"
    if not is_low(evidence.plan) or not wide:
        return
    for rough in evidence.rounded[0] if evidence.rounded else ():
        for position, name in enumerate(reversed(list(rough.gradients))):
            if rough.skipped or not _is_sum_of_products(evidence, name):
                continue
            pieces = evidence.run.parts("gradients", rough.step, name)
            parts = [one.tensor.reshape(-1) for one in pieces if one.primary]
            if not parts or any(part.dtype != torch.float32 for part in parts):
                continue
            found, wanted = digits(torch.cat(parts)), digits(rough.gradients[name])
            if min(len(found), len(wanted)) < FEW:
                continue
            fewer = float(wanted.mean() - found.mean())
            error = math.sqrt(sum(float(one.var()) / len(one) for one in (found, wanted)))
            yield Check(
                rough.step,
                name,
                max(0.0, fewer),
                allowed=NUM_STANDARD_ERRORS * error,
                detail=f"{float(found.mean()):.1f} binary digits instead of {wanted.mean():.1f}",
                position=position,
            )


def _is_sum_of_products(evidence: PlanEvidence, name: str) -> bool:
    """Return whether each element of a gradient adds up products over the tokens of a microbatch.

    Experts meet the tokens of several ranks at once. Where documents are separate, many a token
    attends to itself alone: the gradients of its query and key are zero by mathematics, and what
    one device has there is rounding, with digits of its own.
    """
    separate = evidence.plan.mathematics.documents == "separate"
    if separate and ".attention." in name and not name.endswith(_OF_VALUES):
        return False
    spec = evidence.run.specs[name]
    rows = name.startswith(("embedding", "positions"))
    return len(spec.shape) > 1 and spec.expert is None and not rows and not name.endswith(ROUTER)


def digits(x: torch.Tensor) -> torch.Tensor:
    """Return the binary digits of each float32 that is not zero: 24, less the zeros at its end."""
    bits = x.float()[x != 0].view(torch.int32) & (2 ** (FLOAT32_DIGITS - 1) - 1)
    lowest = bits & -bits
    zeros = torch.where(bits == 0, float(FLOAT32_DIGITS - 1), lowest.double().log2())
    return FLOAT32_DIGITS - zeros.double()
