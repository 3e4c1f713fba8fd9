# SPDX-License-Identifier: Apache-2.0
"""The comparisons of what passes between the parts of the model, token by token.

Every rank tells the rows that it has: some positions where a sequence is split, its microbatches,
its blocks. Together they are whole [B, T, W] tensors; a token that several ranks have is compared
on each, and so is one that is computed again in backward.

Shape suffixes: B sequences of the global batch, T positions, n tokens of a rank, W numbers of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from echelon.core.plan import Plan
from echelon.proof.claims.checks import Check
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.evidence.fits import FLOOR
from echelon.proof.observed import ObservedRun
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.optimizers import global_norm
from echelon.proof.oracle.oracle import Activations


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCopy:
    """Hold the rows that one rank has of a boundary; `place_n` says where in B * T each is."""

    rank: int
    recomputed: bool
    place_n: torch.Tensor
    values_nW: torch.Tensor

    def right_rows(self, whole_BTW: torch.Tensor) -> torch.Tensor:
        """Return the same rows of a whole tensor."""
        return whole_BTW.flatten(0, 1)[self.place_n]


Copies = Mapping[str, list[ActivationCopy]]
"""What all ranks have of each boundary."""


def copies_at(plan: Plan, observed: ObservedRun, step: int, *, gradient: bool = False) -> Copies:
    """Return what ranks told of the boundaries in a step."""
    length = plan.mathematics.sequence_length
    samples = torch.tensor(global_batch(plan, step).sample_ids)
    in_order, row_of = samples.sort()
    found: dict[str, list[ActivationCopy]] = {}
    for one in observed.activations:
        if (one.step, one.gradient) != (step, gradient):
            continue
        sample_n, position_n = one.tokens_n // length, one.tokens_n % length
        at_n = torch.searchsorted(in_order, sample_n).clamp(max=len(samples) - 1)
        known_n = in_order[at_n] == sample_n
        found.setdefault(one.name, []).append(
            ActivationCopy(
                rank=one.rank,
                recomputed=one.recomputed,
                place_n=(row_of[at_n] * length + position_n)[known_n],
                values_nW=one.values_nW[known_n].double(),
            )
        )
    return found


def whole_activation(copies: list[ActivationCopy], like_BTW: torch.Tensor) -> torch.Tensor:
    """Return the tensor that the ranks have together in the forward pass; NaN where none has it."""
    whole_BTW = torch.full(like_BTW.shape, torch.nan, dtype=torch.float64)
    for copy in reversed(copies):
        if not copy.recomputed and copy.values_nW.shape[-1] == whole_BTW.shape[-1]:
            whole_BTW.view(-1, whole_BTW.shape[-1])[copy.place_n] = copy.values_nW
    return whole_BTW


def activations(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare what passed each boundary in each forward pass."""
    for oracle in evidence.steps:
        yield from _checks(evidence, "activations", oracle.step, oracle.activations)


def activation_gradients(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare the gradient of the mean loss at each boundary, the last one first."""
    for oracle in evidence.steps:
        if not oracle.skipped:
            of = oracle.activation_gradients
            yield from _checks(evidence, "activation gradients", oracle.step, of)


def _checks(evidence: PlanEvidence, kind: str, step: int, right: Activations) -> Iterator[Check]:
    copies = copies_at(evidence.plan, evidence.run, step, gradient=kind != "activations")
    floor = FLOOR * global_norm(right)
    for position, (name, right_BTW) in enumerate(right.items() if copies else ()):
        error, detail = copies_error(copies.get(name, []), right_BTW.double())
        scale = max(float(right_BTW.double().norm()), floor)
        yield Check(
            step,
            name,
            error / scale if scale else error,
            allowed=evidence.tolerance.allowed(kind, step, name),
            detail=detail,
            position=position,
        )


def copies_error(copies: list[ActivationCopy], right_BTW: torch.Tensor) -> tuple[float, str]:
    """Return the error of the copy that is furthest off, and who has it."""
    told_N = torch.zeros(right_BTW[..., 0].numel(), dtype=torch.bool)
    worst, detail = 0.0, ""
    for copy in copies:
        if copy.values_nW.shape[-1] != right_BTW.shape[-1]:
            return math.inf, f"rank {copy.rank} has {copy.values_nW.shape[-1]} numbers of a token"
        told_N[copy.place_n] |= not copy.recomputed
        error = float((copy.values_nW - copy.right_rows(right_BTW)).norm())
        if not error <= worst:
            again = ", recomputed in backward" if copy.recomputed else ""
            worst, detail = (math.inf if math.isnan(error) else error), f"rank {copy.rank}{again}"
    missing = int((~told_N).sum())
    if missing:
        return math.inf, f"{missing} of {len(told_N)} tokens are told by no rank"
    return worst, detail
