# SPDX-License-Identifier: Apache-2.0
"""What a wrong outer step of local SGD looks like: whose weight in the mean, and which momentum.

With what each of I islands moved (d_i) and the momentum before (m), an outer step takes from the
outer parameters r times

    sgd        (d_1 + ... + d_I) / I
    nesterov   (1 + u) (d_1 + ... + d_I) / I + u^2 m

so what it took, over r, is a sum of known vectors. Least squares give the weight that each has in
it; where they leave nothing over, wrong weights say what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from echelon.core.axis import Axis
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.claims.checks import Check
from echelon.proof.claims.islands import OUTER_PARAMETERS
from echelon.proof.claims.plan_evidence import PlanEvidence, RoundsEvidence
from echelon.proof.evidence.fits import EXPLAINED
from echelon.proof.oracle.local_sgd import OuterStep

_AXIS = Axis.DP_REPLICATE.value
_SAME = 1e-6  # relative
_ROWS_LOOKED_AT = 8  # of each tensor


@dataclass(frozen=True, slots=True)
class _Weights:
    """What each island has in an outer step, and the momentum before; what is left, relative."""

    islands: tuple[float, ...]
    momentum: float
    residual: float


def explain_outer(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """Name a wrong outer step by the weights that what islands moved has in it."""
    rounds = evidence.rounds
    assert rounds is not None, "the claim is one of islands"
    one = rounds.outer[failure.step]
    if not one.changed:
        return ProofFinding("changed", "outer parameters change between two meetings", _AXIS)
    found = _fit(evidence, rounds, one)
    if not found.residual < EXPLAINED:
        if rounds.local.quantised and _fits_by_block(evidence, rounds, one):
            says = "codes are multiplied by the scales of other blocks: each block of a row is off "
            says += "by a factor of its own"
            return ProofFinding("wrong scale", says, _AXIS, residual=found.residual)
        return ProofFinding("none", f"{failure.detail} is no sum of what islands moved", _AXIS)
    return _named(rounds, one, found) or ProofFinding(
        "none", f"{failure.detail} is not as on one device", _AXIS
    )


def _named(rounds: RoundsEvidence, one: OuterStep, found: _Weights) -> ProofFinding | None:
    local, count = rounds.local, rounds.local.islands
    u = local.outer_momentum if local.outer == "nesterov" else 0.0
    kept = u * u
    had = any(float(value.norm()) > 0 for value in one.momentum_before.values())
    shares = [weight * count / (1.0 + u) for weight in found.islands]
    even = max(shares) - min(shares) < _SAME * max(1.0, *shares)
    residual = found.residual
    if not even:
        told = ", ".join(f"{share / count:.3g}" for share in shares)
        says = f"islands do not count alike in the mean: {told} in place of {1 / count:.3g} each"
        left_out = [i for i, share in enumerate(shares) if abs(share) < _SAME]
        if left_out:
            says = f"what island {left_out[0]} moved is not in the mean"
        return ProofFinding("unfair mean", says, _AXIS, residual=residual)
    if u and had and abs(found.momentum) < _SAME and abs(shares[0] - 1.0) < _SAME:
        says = "the momentum of the outer step begins anew in this round"
        return ProofFinding("momentum reset", says, _AXIS, residual=residual)
    if abs(shares[0] - count) < _SAME * count:
        says = "what islands moved is added up, and not divided by their number"
        return ProofFinding("islands", says, _AXIS, value=float(count), residual=residual)
    if u and abs(found.islands[0] - 1.0 / count) < _SAME and abs(found.momentum - u) < _SAME:
        says = "the step goes along the momentum, and not ahead of it as Nesterov's does"
        return ProofFinding("no look-ahead", says, _AXIS, residual=residual)
    if abs(shares[0] - 1.0) > _SAME:
        says = f"the outer step is {shares[0]:.4g} times as long as it must be"
        factor = f"{shares[0]:.4g}"
        return ProofFinding(factor, says, _AXIS, value=shares[0], residual=residual)
    if had and abs(found.momentum - kept) > _SAME:
        says = f"the momentum before counts {found.momentum:.3g}, not u^2 = {kept:.3g}"
        return ProofFinding("momentum", says, _AXIS, value=found.momentum, residual=residual)
    return None


def _fit(evidence: PlanEvidence, rounds: RoundsEvidence, one: OuterStep) -> _Weights:
    """Return by which weights known vectors add up to what an outer step took, over its rate."""
    names = one.changed
    after = {n: evidence.run.whole(OUTER_PARAMETERS, one.step, n) for n in names}
    took = _flat([one.before[n].double() - after[n] for n in names]) / (
        rounds.local.outer_learning_rate
    )
    known = [_flat([moved[n].double() for n in names]) for moved in one.moved]
    momentum = _flat([one.momentum_before[n].double() for n in names])
    has_momentum = bool(momentum.norm() > 0)
    basis = torch.stack([*known, *([momentum] if has_momentum else [])], dim=1)
    weights = torch.linalg.lstsq(basis, took.unsqueeze(1)).solution.squeeze(1)
    left = float((basis @ weights - took).norm()) / max(float(took.norm()), 1e-300)
    islands = tuple(weights[: len(known)].tolist())
    return _Weights(islands, float(weights[-1]) if has_momentum else 0.0, left)


def _fits_by_block(evidence: PlanEvidence, rounds: RoundsEvidence, one: OuterStep) -> bool:
    """Return whether every block of some rows is a sum of what islands moved, with other weights.

    Blocks of few numbers are, whatever they hold, and say nothing.
    """
    rate, vectors = rounds.local.outer_learning_rate, len(one.moved) + 1
    looked_at = 0
    for name in one.changed:
        after = evidence.run.whole(OUTER_PARAMETERS, one.step, name)
        took = _rows((one.before[name].double() - after) / rate)
        known = [_rows(moved[name].double()) for moved in one.moved]
        known.append(_rows(one.momentum_before[name].double()))
        for row in range(min(len(took), _ROWS_LOOKED_AT)):
            for columns in torch.arange(took.shape[1]).split(rounds.local.outer_block):
                if len(columns) <= 2 * vectors:
                    continue
                basis = torch.stack([each[row, columns] for each in known], dim=1)
                target = took[row, columns]
                weights = torch.linalg.lstsq(basis, target.unsqueeze(1), driver="gelsd").solution
                left = float((basis @ weights - target.unsqueeze(1)).norm())
                if left > EXPLAINED * max(float(target.norm()), 1e-300):
                    return False
                looked_at += 1
    return looked_at > 0


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(1, -1) if tensor.dim() == 1 else tensor


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
