"""What is wrong between a master copy, its update, and the parameter that is rounded from it."""

from __future__ import annotations

import torch

from echelon.prove.checks import Evidence
from echelon.prove.diagnosis import Finding
from echelon.prove.factors import close, fit_factor
from echelon.prove.oracle import TORCH_DTYPES
from echelon.prove.places import narrowed
from echelon.prove.ranks import INITIAL
from echelon.prove.replay import replay

_ROUGHLY = 1e-2


def explain_written_back(
    evidence: Evidence, step: int, name: str
) -> tuple[Finding, tuple[int, ...]]:
    """Return why a parameter is not the rounding of its master copy, and whose slice it is."""
    held, where, owners = _not_written(evidence, step, name)
    finding = Finding(factor="none", says="not the rounding of its master copy")
    if step != INITIAL:
        before = _rounded(evidence, step - 1 if step else INITIAL, name)
        if torch.equal(held[where], before[where]):
            says = "the rounding of its master copy before the update: not written back"
            finding = Finding(factor="stale", says=says)
    # Other tensors of the step count too: all of this one may lie in the slice of one rank.
    ranks = {r for other in evidence.observed.specs for r in _not_written(evidence, step, other)[2]}
    everyone = range(evidence.plan.mesh.world_size)
    return narrowed(evidence.plan, finding, ranks, everyone), owners


def _rounded(evidence: Evidence, step: int, name: str) -> torch.Tensor:
    dtype = TORCH_DTYPES[evidence.plan.mathematics.precision.parameters]
    return evidence.observed.whole("masters", step, name).to(dtype)


def _not_written(
    evidence: Evidence, step: int, name: str
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Return a parameter as ranks hold it, where it is wrong, and who updates it there."""
    observed, right = evidence.observed, _rounded(evidence, step, name)
    where = torch.zeros(right.shape, dtype=torch.bool)
    held = right.clone()
    for piece in observed.pieces("parameters", step, name):
        if observed.fits(piece):
            odd = piece.tensor != right[piece.region]
            where[piece.region] |= odd
            held[piece.region] = torch.where(odd, piece.tensor, held[piece.region])
    copies = observed.pieces("masters", step, name)
    return held, where, tuple(sorted({p.rank for p in copies if bool(where[p.region].any())}))


def explain_replayed(evidence: Evidence, step: int, name: str) -> tuple[Finding, tuple[int, ...]]:
    """Return how an update differs from what the formula makes of the ranks' own gradients."""
    right = next(one for one in replay(evidence, torch.float64) if one.step == step).added[name]
    seen = evidence.observed.update(step, name)
    factor, residual = fit_factor(seen, right)
    if residual < _ROUGHLY and abs(factor - 1) > residual and not close(factor, 1.0):
        says = f"{factor:.4g} times what the formula makes of the gradients"
        return Finding(factor="number", says=says, value=factor, residual=residual), ()
    says = "not what the formula makes of the gradients that the ranks hold"
    return Finding(factor="none", says=says, residual=residual), ()
